"""Rings and chains as state machines: they say what to send, receive and add next, and never wait.

A ring sums a tensor over its ranks, or brings its parts together; ``schedule`` says which chunk travels when.

Cost per rank for S bytes: (P-1)/P * S bytes sent in each half; P-1 latencies plus one for each chunk of a segment.
Every element is summed once, in ring order (each rank adds its vectors one by one to what it receives), and copied
from there: every rank gets the same bits, and the same bits in the next run.

Source: Patarasuk & Yuan, JPDC 69(2):117-124, 2009, doi:10.1016/j.jpdc.2008.09.002. Several rings on parts of one
tensor, each a machine of its own, are Mamidala et al., arXiv:1801.03855, figure 9.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvmpi.collectives.comm import Comm, Request, Waiter
from kvmpi.collectives.schedule import Schedule, chunks_of
from kvmpi.collectives.waiting import Habit, Patience, in_vain
from kvmpi.deadline import Deadline
from kvmpi.trace import timeline

Buffer = npt.NDArray[Any]
#: ``scratch(count, dtype)`` gives memory that is free during a call, a different part each time.
Scratch = Callable[[int, Any], Buffer]

#: Of the messages of the first ring; those of the next are one higher, and so on.
TAG_RING = 32
_TAG_CHAIN = 31
#: Transfers in flight in each direction: enough to hide a nap of a neighbour, few enough to stay in cache.
_WINDOW = 4
#: Waits for the ranks beside this one, and those in streams of so many chunks that the link has enough to do meanwhile:
#: who then comes late loses nothing, and who comes seldom leaves the core to others.
NEIGHBOURS, STREAMS = Habit(), Habit(nap_share=0.5)
_STREAM_CHUNKS = 8


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
        return f"{what()}: {stuck}{in_vain(deadline)}"

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
        schedule: of this rank's place among them.
        out: where results go: element ``i`` to ``out[i - base]``. Of a reduce-scatter, memory of the own segment.
        terms: what this rank contributes; None for an allgather, where ``out`` holds the own segment.
        on_chunk: called whenever one more chunk of ``out`` is final, in the order of ``schedule.completed``.
    """

    def __init__(
        self, comm: Comm, ranks: Sequence[int], schedule: Schedule, out: Buffer, terms: Terms | None = None, *,
        base: int = 0, number: int = 0, scratch: Scratch = np.empty, on_chunk: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        self._comm, self._schedule, self._out, self._terms, self._base = comm, schedule, out, terms, base
        place = ranks.index(comm.rank)
        self._left, self._right = ranks[place - 1], ranks[(place + 1) % len(ranks)]
        #: What wakes when this ring may be moved on.
        self.waiter = comm.waiter((self._left, self._right))
        self._tag = TAG_RING + number
        self._on_chunk = on_chunk
        #: Of each segment.
        self.num_chunks = schedule.num_chunks
        self._total = len(schedule.sends)
        self._window = min(_WINDOW, self._total)
        self._incoming = self._partials = out[:0]
        if terms is not None:
            self._incoming = scratch(self._window * schedule.longest_chunk, terms.sum_dtype)
            self._partials = scratch(schedule.kept_count, terms.sum_dtype)
        self._receives: deque[Request | None] = deque()
        self._sends: deque[Request | None] = deque()
        self._posted = self._received = self._sent = self._delivered = 0

    @property
    def done(self) -> bool:
        return self._received == self._total and self._delivered == self._total

    def stuck(self) -> str:
        if self._received < self._total:
            step = self._received // self.num_chunks
            return f"no data from MPI rank {self._left}, step {step + 1} of {self._schedule.num_steps}"
        return f"MPI rank {self._right} does not take its data"

    def advance(self) -> bool:
        moved = False
        most = min(self._total, self._received + self._window)
        while self._posted < most:
            self._receives.append(self._post_receive(self._posted))
            self._posted += 1
            moved = True
        if self._receives and self._has_room():
            first = self._receives[0]
            if first is None or first.test():
                self._receives.popleft()
                self._take(self._received)
                self._received += 1
                moved = True
        # The first step's chunks are at hand; each later one is the one received a step before.
        most = min(self._total, self._received + self.num_chunks)
        while self._sent < most and len(self._sends) < _WINDOW:
            self._sends.append(self._post_send(self._sent))
            self._sent += 1
            moved = True
        # To ask whether a send is through costs a turn of the library's progress engine: only where it matters.
        while self._sends and (len(self._sends) == _WINDOW or self._received == self._total or not self._has_room()):
            first = self._sends[0]
            if first is not None and not first.test():
                break
            self._sends.popleft()
            self._delivered += 1
            moved = True
        return moved

    def _has_room(self) -> bool:
        """Whether the partial sums that the next transfer's will replace have been delivered."""
        transfer = self._received
        return transfer >= self._schedule.num_kept or self._delivered > transfer - self.num_chunks

    def _post_receive(self, transfer: int) -> Request | None:
        start, stop, _ = self._schedule.receives[transfer]
        if start == stop:
            return None
        summed = transfer < self._schedule.num_summed
        into = self._slot(transfer, stop - start) if summed else self._result(start, stop)
        return self._comm.irecv(into, self._left, self._tag)

    def _result(self, start: int, stop: int) -> Buffer:
        return self._out[start - self._base : stop - self._base]

    def _slot(self, transfer: int, count: int) -> Buffer:
        first = transfer % self._window * self._schedule.longest_chunk
        return self._incoming[first : first + count]

    def _take(self, transfer: int) -> None:
        start, stop, kept = self._schedule.receives[transfer]
        if start < stop and transfer < self._schedule.num_summed:
            assert self._terms is not None
            count = stop - start
            if kept < 0:
                self._terms.finish(self._slot(transfer, count), start, stop, self._result(start, stop))
            else:
                self._terms.add(self._slot(transfer, count), start, stop, self._partials[kept : kept + count])
        if self._on_chunk is not None and transfer >= self._schedule.num_kept:
            self._on_chunk()

    def _post_send(self, transfer: int) -> Request | None:
        start, stop, kept = self._schedule.sends[transfer]
        if start == stop:
            return None
        if kept < 0:
            part = self._result(start, stop)
        else:
            part = self._partials[kept : kept + stop - start]
            if transfer < self.num_chunks:
                assert self._terms is not None
                part = self._terms.own(start, stop, part)
        return self._comm.isend(part, self._right, self._tag)


def habit_of(rings: Sequence[Ring]) -> Habit:
    """Of waits of ``rings`` that move together."""
    return STREAMS if sum(ring.num_chunks for ring in rings) >= _STREAM_CHUNKS else NEIGHBOURS


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
