"""Ring allreduce (reduce-scatter, then allgather) and a pipelined chain broadcast, over host buffers in chunks.

The buffer is cut into one segment per rank and each segment into chunks. In step t of the 2(P-1) steps a rank sends
one segment to the right and receives another from the left; the segment sent in step t is the one received in step
t-1, so chunks flow around the ring without waiting for whole steps:

    reduce, t = 0 .. P-2:      send segment rank-t,   receive rank-t-1 and add it to the own one
    gather, t = P-1 .. 2P-3:   send segment rank+1-u, receive rank-u,  u = t-(P-1)

Cost per rank for S bytes: 2(P-1)/P * S bytes sent; 2(P-1) latencies plus one for each chunk of a segment.
Every element is summed once, in ring order starting with its segment's owner (each rank adds its vectors one by one to
what it receives), and copied from there: every rank gets the same bits, and the same bits in the next run.

Source: Patarasuk & Yuan, JPDC 69(2):117-124, 2009, doi:10.1016/j.jpdc.2008.09.002.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvmpi.collectives.comm import Comm, Request
from kvmpi.collectives.waiting import Patience
from kvmpi.deadline import Deadline

Buffer = npt.NDArray[Any]
Range = tuple[int, int]

_TAG_RING = 2
_TAG_CHAIN = 3
#: Transfers in flight in each direction: enough to hide a nap of a neighbour, few enough to stay in cache.
_WINDOW = 4


def segment_bounds(count: int, num_segments: int) -> list[Range]:
    """Half-open element ranges covering ``range(count)``; lengths differ by at most one, longer first."""
    base, extra = divmod(count, num_segments)
    starts = [i * base + min(i, extra) for i in range(num_segments + 1)]
    return list(pairwise(starts))


def chunked_segments(count: int, num_segments: int, max_chunk_count: int) -> list[list[Range]]:
    """Each segment's chunks, the same number in every segment, none longer than ``max_chunk_count`` elements."""
    segments = segment_bounds(count, num_segments)
    longest = segments[0][1] - segments[0][0]
    num_chunks = max(1, -(-longest // max_chunk_count))
    return [[(start + a, start + b) for a, b in segment_bounds(stop - start, num_chunks)] for start, stop in segments]


def segments_of_step(step: int, rank: int, size: int) -> tuple[int, int]:
    """(segment to send, segment to receive) of ``rank`` in ``step`` of the ``2 * (size - 1)`` steps."""
    if step < size - 1:
        return (rank - step) % size, (rank - step - 1) % size
    gather = step - (size - 1)
    return (rank + 1 - gather) % size, (rank - gather) % size


class Terms(Protocol):
    """One rank's part of a ring's arithmetic, range by range. Every element is seen exactly once by one of the two."""

    def own(self, start: int, stop: int) -> Buffer:
        """This rank's contribution to a range, in memory that stays as it is until the ring has ended."""
        ...

    def add(self, incoming: Buffer, start: int, stop: int, last: bool) -> None:
        """Add this rank's contribution to ``incoming``, which may be changed, and keep the sum.

        It goes into ``out`` as a result if ``last``, else into ``accumulator`` for the next rank.
        """
        ...


def ring_allreduce(
    comm: Comm,
    terms: Terms,
    accumulator: Buffer,
    out: Buffer,
    *,
    max_chunk_count: int,
    deadline: Deadline,
    label: str,
    scratch: Callable[[int], Buffer] | None = None,
) -> None:
    """Sum over all ranks into ``out``.

    Args:
        terms: what this rank contributes.
        accumulator: shape ``(count,)``, where partial sums live and from which they are sent; may be ``out``.
        out: shape ``(count,)``, where the result goes, of any dtype.
        max_chunk_count: elements of a chunk at most; the same on every rank.
        deadline: for the whole call.
        label: what the call is for, in error messages.
        scratch: ``scratch(count)`` gives memory of ``accumulator``'s dtype that is free during the call.
    Raises:
        KVTimeoutError: names the neighbour that was waited for; ``comm`` is then unusable.
    """
    rank, size = comm.rank, comm.size
    left, right = (rank - 1) % size, (rank + 1) % size
    segments = chunked_segments(accumulator.size, size, max_chunk_count)
    num_chunks = len(segments[0])
    reduce_steps = size - 1
    total = 2 * reduce_steps * num_chunks
    window = min(_WINDOW, total)
    longest = segments[0][0][1] - segments[0][0][0]
    incoming = np.empty(window * longest, accumulator.dtype) if scratch is None else scratch(window * longest)

    def slot(i: int, length: int) -> Buffer:
        first = i % window * longest
        return incoming[first : first + length]

    def post_receive(i: int) -> Request | None:
        step, chunk = divmod(i, num_chunks)
        start, stop = segments[segments_of_step(step, rank, size)[1]][chunk]
        if start == stop:
            return None
        return comm.irecv(out[start:stop] if step >= reduce_steps else slot(i, stop - start), left, _TAG_RING)

    def finish_receive(i: int) -> None:
        step, chunk = divmod(i, num_chunks)
        start, stop = segments[segments_of_step(step, rank, size)[1]][chunk]
        if step < reduce_steps and start < stop:
            terms.add(slot(i, stop - start), start, stop, step == reduce_steps - 1)

    def post_send(i: int) -> Request | None:
        step, chunk = divmod(i, num_chunks)
        start, stop = segments[segments_of_step(step, rank, size)[0]][chunk]
        if start == stop:
            return None
        if step == 0:
            return comm.isend(terms.own(start, stop), right, _TAG_RING)
        return comm.isend((accumulator if step < reduce_steps else out)[start:stop], right, _TAG_RING)

    receives: deque[Request | None] = deque()
    sends: deque[Request | None] = deque()
    posted = received = sent = 0
    patience = Patience(
        deadline,
        lambda: (
            f"{label}: ring allreduce on MPI rank {rank} of {size}: "
            f"{_stuck(received < total, left, right)} within {deadline.timeout_s:.1f} s, "
            f"step {min(received // num_chunks, 2 * reduce_steps - 1) + 1} of {2 * reduce_steps}; "
            "look at that worker, or raise KVMPI_TIMEOUT_S"
        ),
    )
    while received < total or sent < total or sends:
        moved = False
        while posted < total and posted < received + window:
            receives.append(post_receive(posted))
            posted += 1
            moved = True
        if receives and (receives[0] is None or receives[0].test()):
            receives.popleft()
            finish_receive(received)
            received += 1
            moved = True
        while sent < total and len(sends) < window and (sent < num_chunks or received > sent - num_chunks):
            sends.append(post_send(sent))
            sent += 1
            moved = True
        while sends and (sends[0] is None or sends[0].test()):
            sends.popleft()
            moved = True
        if moved:
            patience.progress()
        else:
            patience.pause()


def chain_broadcast(
    comm: Comm, buffer: Buffer, root: int, *, max_chunk_count: int, deadline: Deadline, label: str
) -> None:
    """Copy ``buffer`` of ``root`` to every rank, in place: chunks flow down the chain root, root+1, ... .

    Cost: S bytes sent by every rank but the last; P-1 latencies plus one for each chunk.
    """
    rank, size = comm.rank, comm.size
    position = (rank - root) % size
    left, right = (rank - 1) % size, (rank + 1) % size
    num_chunks = -(-buffer.size // max_chunk_count)
    chunks = segment_bounds(buffer.size, num_chunks) if num_chunks else []
    receives: deque[Request] = deque()
    sends: deque[Request] = deque()
    posted = received = 0 if position else num_chunks
    sent = 0 if position < size - 1 else num_chunks
    patience = Patience(
        deadline,
        lambda: (
            f"{label}: broadcast on MPI rank {rank} of {size}: {_stuck(received < num_chunks, left, right)} within "
            f"{deadline.timeout_s:.1f} s; look at that worker, or raise KVMPI_TIMEOUT_S"
        ),
    )
    while received < num_chunks or sent < num_chunks or sends:
        moved = False
        while posted < num_chunks and posted < received + _WINDOW:
            start, stop = chunks[posted]
            receives.append(comm.irecv(buffer[start:stop], left, _TAG_CHAIN))
            posted += 1
            moved = True
        if receives and receives[0].test():
            receives.popleft()
            received += 1
            moved = True
        while sent < received and len(sends) < _WINDOW:
            start, stop = chunks[sent]
            sends.append(comm.isend(buffer[start:stop], right, _TAG_CHAIN))
            sent += 1
            moved = True
        while sends and sends[0].test():
            sends.popleft()
            moved = True
        if moved:
            patience.progress()
        else:
            patience.pause()


def _stuck(receiving: bool, left: int, right: int) -> str:
    return f"no data from MPI rank {left}" if receiving else f"MPI rank {right} does not take its data"
