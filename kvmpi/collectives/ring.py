"""Rings and chains as state machines: they say what to send, receive and add next, and never wait.

A ring sums a tensor over its ranks, or brings its parts together. The elements are cut into one segment per rank, and
each segment into chunks. In step t a rank sends one segment to the right and receives another from the left; the
segment sent in step t is the one received in step t-1, so chunks flow around without waiting for whole steps:

    reduce, t = 0 .. P-2:      send segment i-t,   receive i-t-1 and add it to the own one
    gather, t = P-1 .. 2P-3:   send segment i+1-u, receive i-u,  u = t-(P-1)

An allreduce takes all steps, with i the rank's place in the ring. A reduce-scatter takes the first half and an
allgather the second, with i one less, so that segment i is the one that rank i ends up with, or begins with.

Cost per rank for S bytes: (P-1)/P * S bytes sent in each half; P-1 latencies plus one for each chunk of a segment.
Every element is summed once, in ring order (each rank adds its vectors one by one to what it receives), and copied
from there: every rank gets the same bits, and the same bits in the next run.

Source: Patarasuk & Yuan, JPDC 69(2):117-124, 2009, doi:10.1016/j.jpdc.2008.09.002. Several rings on parts of one
tensor, each a machine of its own, are Mamidala et al., arXiv:1801.03855, figure 9.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvmpi.collectives.comm import Comm, Request, Waiter
from kvmpi.collectives.waiting import Habit, Patience
from kvmpi.deadline import Deadline
from kvmpi.trace import timeline

Buffer = npt.NDArray[Any]
Range = tuple[int, int]
#: ``scratch(count, dtype)`` gives memory that is free during a call, a different part each time.
Scratch = Callable[[int, Any], Buffer]

_TAG_RING = 32
_TAG_CHAIN = 31
#: Transfers in flight in each direction: enough to hide a nap of a neighbour, few enough to stay in cache.
_WINDOW = 4
#: Waits for the ranks beside this one, and those in streams of so many chunks that the link has enough to do meanwhile:
#: who then comes late loses nothing, and who comes seldom leaves the core to others.
NEIGHBOURS, STREAMS = Habit(), Habit(nap_share=0.5)
_STREAM_CHUNKS = 8


def segment_bounds(count: int, num_segments: int) -> list[Range]:
    """Half-open element ranges covering ``range(count)``; lengths differ by at most one, longer first."""
    base, extra = divmod(count, num_segments)
    starts = [i * base + min(i, extra) for i in range(num_segments + 1)]
    return list(pairwise(starts))


def part_of(segments: Sequence[Range], ring: int, num_rings: int) -> list[list[Range]]:
    """What ``ring`` of ``num_rings`` carries of each segment: an equal part."""
    parts = []
    for start, stop in segments:
        first, last = segment_bounds(stop - start, num_rings)[ring]
        parts.append([(start + first, start + last)])
    return parts


def chunks_of(segments: Sequence[Sequence[Range]], max_chunk_count: int) -> list[list[Range]]:
    """The ranges of each segment cut into chunks of at most ``max_chunk_count`` elements.

    The same number in every segment, the last ones empty where a segment has fewer.
    """
    cut = []
    for ranges in segments:
        pieces = [(start, stop, -(-(stop - start) // max_chunk_count)) for start, stop in ranges]
        cut.append(
            [(start + a, start + b) for start, stop, n in pieces if n for a, b in segment_bounds(stop - start, n)]
        )
    longest = max(1, max(map(len, cut)))
    return [chunks + [(0, 0)] * (longest - len(chunks)) for chunks in cut]


def segments_of_step(step: int, place: int, size: int) -> tuple[int, int]:
    """(segment to send, segment to receive) in ``step`` of the ``2 * (size - 1)`` steps, at ``place`` in the ring."""
    if step < size - 1:
        return (place - step) % size, (place - step - 1) % size
    gather = step - (size - 1)
    return (place + 1 - gather) % size, (place - gather) % size


class Terms(Protocol):
    """One rank's part of a sum's arithmetic, range by range. Every element is seen exactly once, by one of the three.

    ``sum_dtype`` is that of partial sums.
    """

    sum_dtype: np.dtype[Any]

    def own(self, start: int, stop: int, into: Buffer) -> Buffer:
        """This rank's contribution to a range: written to ``into``, or where it lies until the sum is done."""
        ...

    def add(self, incoming: Buffer, start: int, stop: int, into: Buffer) -> None:
        """``into`` becomes ``incoming`` plus this rank's contribution; both have ``sum_dtype``."""
        ...

    def finish(self, incoming: Buffer, start: int, stop: int, into: Buffer) -> None:
        """Like ``add``; ``into`` is memory of the result, of its dtype. ``incoming`` may be changed."""
        ...


class Machine(Protocol):
    """Something under way that is moved on by polling it."""

    @property
    def done(self) -> bool: ...

    def advance(self) -> bool:
        """Do a little of what can be done now; whether there was anything."""
        ...

    def stuck(self) -> str:
        """What it waits for."""
        ...


def drive(
    machines: Sequence[Machine], deadline: Deadline, what: Callable[[], str], nbytes: int = timeline.NOTHING,
    habit: Habit = NEIGHBOURS, waiter: Waiter | None = None,
) -> None:  # fmt: skip
    """Move ``machines`` on until all are done; ``what`` gives the beginning of an error message.

    Args:
        nbytes: of all that they move, for the timeline.
        habit: of such waits.
        waiter: what wakes when any of them may be moved on; None: nothing does.
    Raises:
        KVTimeoutError: says what they wait for.
    """

    def describe() -> str:
        stuck = "; ".join(dict.fromkeys(machine.stuck() for machine in machines if not machine.done))
        return f"{what()}: {stuck} within {deadline.timeout_s:.1f} s; look at that worker, or raise KVMPI_TIMEOUT_S"

    patience: Patience | None = None
    start_ns = timeline.now() if timeline.on else 0
    left = list(machines)
    while left:
        moved = False
        for machine in left:
            moved |= machine.advance()
        left = [machine for machine in left if not machine.done]
        if patience is None:
            patience = Patience(deadline, describe, habit, waiter)
        if moved:
            patience.progress()
        else:
            patience.pause()
    if start_ns:
        timeline.span("exchange", start_ns, nbytes=nbytes)


class Ring:
    """One ring over chunks of a tensor. The communicator's messages of tag number ``number`` are its own.

    Args:
        ranks: the members, in the order of the ring; the same on all of them.
        chunks: of each segment, as ``chunks_of`` returns them; one segment for each member.
        out: where results go: element ``i`` to ``out[i - base]``. Of a reduce-scatter, memory of the own segment.
        terms: what this rank contributes; None for an allgather, where ``out`` holds the own segment.
        gather: whether the sums are gathered on all ranks.
        on_chunk: called whenever one more chunk of ``out`` is final, in the order of ``completion_order``.
    """

    def __init__(
        self, comm: Comm, ranks: Sequence[int], chunks: list[list[Range]], out: Buffer, terms: Terms | None = None, *,
        gather: bool = True, base: int = 0, number: int = 0, scratch: Scratch = np.empty,
        on_chunk: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        self._comm, self._chunks, self._out, self._terms, self._base = comm, chunks, out, terms, base
        self._size = len(ranks)
        place = ranks.index(comm.rank)
        self._left, self._right = ranks[place - 1], ranks[(place + 1) % self._size]
        #: What wakes when this ring may be moved on.
        self.waiter = comm.waiter((self._left, self._right))
        self._tag = _TAG_RING + number
        self._on_chunk = on_chunk
        self._reduce_steps = self._size - 1
        self._steps = range(
            0 if terms is not None else self._reduce_steps, 2 * self._reduce_steps if gather else self._reduce_steps
        )
        self._place = place if terms is not None and gather else (place - 1) % self._size
        #: Of each segment.
        self.num_chunks = len(chunks[0])
        self._total = len(self._steps) * self.num_chunks
        self._window = min(_WINDOW, self._total)
        self._longest_chunk = max(stop - start for segment in chunks for start, stop in segment)
        self._incoming = self._partials = out[:0]
        if terms is not None:
            self._incoming = scratch(self._window * self._longest_chunk, terms.sum_dtype)
            # What is received in one step is sent in the next: two segments of partial sums take turns.
            # A chunk has the same place in both, so that it replaces the chunk of its number and no other.
            self._partials = scratch(min(2, self._size - 1) * self.num_chunks * self._longest_chunk, terms.sum_dtype)
        self._receives: deque[Request | None] = deque()
        self._sends: deque[Request | None] = deque()
        self._posted = self._received = self._sent = self._delivered = 0

    @property
    def done(self) -> bool:
        return self._received == self._total and self._delivered == self._total

    def stuck(self) -> str:
        if self._received < self._total:
            step = self._received // self.num_chunks
            return f"no data from MPI rank {self._left}, step {step + 1} of {len(self._steps)}"
        return f"MPI rank {self._right} does not take its data"

    def advance(self) -> bool:
        before = self._posted, self._received, self._sent, self._delivered
        while self._posted < self._total and self._posted < self._received + self._window:
            self._receives.append(self._post_receive(self._posted))
            self._posted += 1
        if self._receives and self._has_room(self._received):
            first = self._receives[0]
            if first is None or first.test():
                self._receives.popleft()
                self._take(self._received)
                self._received += 1
        # The first step's chunks are at hand; each later one is the one received a step before.
        while self._sent < min(self._total, self._received + self.num_chunks) and len(self._sends) < self._window:
            self._sends.append(self._post_send(self._sent))
            self._sent += 1
        while self._sends and self._must_deliver():
            first = self._sends[0]
            if first is not None and not first.test():
                break
            self._sends.popleft()
            self._delivered += 1
        return before != (self._posted, self._received, self._sent, self._delivered)

    def _must_deliver(self) -> bool:
        """Whether anything waits for a send to be through: to ask costs a turn of the library's progress engine."""
        return len(self._sends) == _WINDOW or self._received == self._total or not self._has_room(self._received)

    def _at(self, transfer: int, *, sent: bool) -> tuple[int, int, int, int]:
        """(step, number of the chunk, start, stop) of a transfer."""
        index, chunk = divmod(transfer, self.num_chunks)
        step = self._steps[index]
        segment = segments_of_step(step, self._place, self._size)[0 if sent else 1]
        return step, chunk, *self._chunks[segment][chunk]

    def _partial(self, step: int, chunk: int, count: int) -> Buffer:
        """Where the partial sums received in ``step`` are kept until they are sent; of the own part, step -1."""
        turn = (step + 1) % 2 if self._size > 2 else 0
        first = (turn * self.num_chunks + chunk) * self._longest_chunk
        return self._partials[first : first + count]

    def _result(self, start: int, stop: int) -> Buffer:
        return self._out[start - self._base : stop - self._base]

    def _slot(self, transfer: int, count: int) -> Buffer:
        first = transfer % self._window * self._longest_chunk
        return self._incoming[first : first + count]

    def _post_receive(self, transfer: int) -> Request | None:
        step, _, start, stop = self._at(transfer, sent=False)
        if start == stop:
            return None
        into = self._slot(transfer, stop - start) if step < self._reduce_steps else self._result(start, stop)
        return self._comm.irecv(into, self._left, self._tag)

    def _has_room(self, transfer: int) -> bool:
        """Whether the partial sums that this transfer's will replace have been delivered."""
        kept = self._terms is not None and transfer < (self._reduce_steps - 1) * self.num_chunks
        return not kept or self._delivered > transfer - self.num_chunks

    def _take(self, transfer: int) -> None:
        step, chunk, start, stop = self._at(transfer, sent=False)
        if start < stop and step < self._reduce_steps:
            assert self._terms is not None
            incoming = self._slot(transfer, stop - start)
            if step == self._reduce_steps - 1:
                self._terms.finish(incoming, start, stop, self._result(start, stop))
            else:
                self._terms.add(incoming, start, stop, self._partial(step, chunk, stop - start))
        if self._on_chunk is not None and step >= self._reduce_steps - 1:
            self._on_chunk()

    def _post_send(self, transfer: int) -> Request | None:
        step, chunk, start, stop = self._at(transfer, sent=True)
        if start == stop:
            return None
        if step >= self._reduce_steps:
            part = self._result(start, stop)
        else:
            part = self._partial(step - 1, chunk, stop - start)
            if step == 0:
                assert self._terms is not None
                part = self._terms.own(start, stop, part)
        return self._comm.isend(part, self._right, self._tag)


def habit_of(rings: Sequence[Ring]) -> Habit:
    """Of waits of ``rings`` that move together."""
    return STREAMS if sum(ring.num_chunks for ring in rings) >= _STREAM_CHUNKS else NEIGHBOURS


def completion_order(chunks: list[list[Range]], place: int, *, reduces: bool) -> list[Range]:
    """The chunks of ``out`` at ``place`` of a ring that gathers, in the order in which they become final.

    Without those that an allgather begins with.
    """
    size = len(chunks)
    steps = range(size - 2 if reduces else size - 1, 2 * (size - 1))
    place = place if reduces else (place - 1) % size
    return [chunk for step in steps for chunk in chunks[segments_of_step(step, place, size)[1]]]


class Chain:
    """A broadcast down a chain: chunks flow from the first of ``ranks`` to the last, in place.

    Cost: S bytes sent by every rank but the last; P-1 latencies plus one for each chunk.
    """

    def __init__(
        self, comm: Comm, ranks: Sequence[int], buffer: Buffer, max_chunk_count: int, *,
        on_chunk: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        self._comm, self._buffer, self._on_chunk = comm, buffer, on_chunk
        place = ranks.index(comm.rank)
        self._left = ranks[place - 1] if place else None
        self._right = ranks[place + 1] if place + 1 < len(ranks) else None
        #: What wakes when this chain may be moved on.
        self.waiter = comm.waiter([peer for peer in (self._left, self._right) if peer is not None])
        self._chunks = [chunk for chunk in chunks_of([[(0, buffer.size)]], max_chunk_count)[0] if chunk[0] < chunk[1]]
        self._receives: deque[Request] = deque()
        self._sends: deque[Request] = deque()
        self._posted = self._received = 0 if place else len(self._chunks)
        self._sent = 0 if self._right is not None else len(self._chunks)

    @property
    def done(self) -> bool:
        return self._received == self._sent == len(self._chunks) and not self._sends

    def stuck(self) -> str:
        if self._received < len(self._chunks):
            return f"no data from MPI rank {self._left}"
        return f"MPI rank {self._right} does not take its data"

    def advance(self) -> bool:
        moved = False
        while self._posted < len(self._chunks) and self._posted < self._received + _WINDOW:
            start, stop = self._chunks[self._posted]
            assert self._left is not None
            self._receives.append(self._comm.irecv(self._buffer[start:stop], self._left, _TAG_CHAIN))
            self._posted += 1
            moved = True
        if self._receives and self._receives[0].test():
            self._receives.popleft()
            self._received += 1
            moved = True
            if self._on_chunk is not None:
                self._on_chunk()
        while self._sent < self._received and len(self._sends) < _WINDOW:
            start, stop = self._chunks[self._sent]
            assert self._right is not None
            self._sends.append(self._comm.isend(self._buffer[start:stop], self._right, _TAG_CHAIN))
            self._sent += 1
            moved = True
        while self._sends and self._sends[0].test():
            self._sends.popleft()
            moved = True
        return moved
