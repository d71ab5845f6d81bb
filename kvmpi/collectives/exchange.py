"""What programs know from MPI and torch beside the collectives of a store: exchanges of parts, and other reductions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvmpi.arrays import Vector, address_of
from kvmpi.collectives.comm import Comm, Request
from kvmpi.collectives.handover import hand_over
from kvmpi.collectives.host_group import SLOT_BYTES, HostGroup, What
from kvmpi.collectives.schedule import segment_bounds
from kvmpi.collectives.tensor import Collectives
from kvmpi.collectives.waiting import in_vain, wait_all
from kvmpi.deadline import Deadline
from kvmpi.errors import ShapeMismatchError, ranks_in_words
from kvmpi.kernels import combine, host

Buffer = npt.NDArray[Any]

_TAG = 9
# Where what a rank sends lies: in its slot, in its own memory, or there where others cannot read it.
_IN_SLOT, _IN_PLACE, _OUT_OF_REACH = range(3)
#: MPI counts in 32-bit integers: bytes of one message.
MAX_MESSAGE_BYTES = 1 << 30


def octets(buffer: Buffer) -> Buffer:
    """A contiguous buffer as bytes."""
    return buffer.reshape(-1).view(np.uint8)


def pieces(buffer: Buffer, max_bytes: int = MAX_MESSAGE_BYTES) -> Iterator[Buffer]:
    """A contiguous buffer as messages that MPI can count; none if it is empty."""
    flat = octets(buffer)
    return (flat[start : start + max_bytes] for start in range(0, flat.size, max_bytes))


def exchange(
    comm: Comm, sends: Sequence[Buffer | None], receives: Sequence[Buffer | None], deadline: Deadline,
    describe: Callable[[list[int]], str],
) -> None:  # fmt: skip
    """``sends[r]`` goes to rank r while ``receives[r]`` comes from there; None and empty buffers are no messages.

    Cost: one message to and from each rank, all at once; every byte is copied once, the own part too.

    Args:
        describe: the text of the error when time is up, given the ranks that did not do their part.
    """
    requests: list[tuple[int, Request]] = []
    # The next rank first: were rank 0 the first for all, it would be the bottleneck.
    ranks = [(comm.rank + step) % comm.size for step in range(1, comm.size)]
    for rank in reversed(ranks):
        into = receives[rank]
        if into is not None:
            requests += [(rank, comm.irecv(piece, rank, _TAG)) for piece in pieces(into)]
    for rank in ranks:
        part = sends[rank]
        if part is not None:
            requests += [(rank, comm.isend(piece, rank, _TAG)) for piece in pieces(part)]
    _take_own(sends[comm.rank], receives[comm.rank])

    def late() -> str:
        return describe(sorted({rank for rank, request in requests if not request.test()}))

    wait_all([request for _, request in requests], deadline, late)


def exchange_on_host(
    group: HostGroup, sends: Sequence[Buffer | None], receives: Sequence[Buffer | None], deadline: Deadline, what: What,
    counts: Buffer | None = None,
) -> bool:  # fmt: skip
    """``exchange`` among all ranks of a host, each of which copies what it gets.

    Cost: one meeting, and a second one for ranks whose parts do not all fit into a slot.

    Args:
        counts: as of ``_first_wrong``, the own ones; it gets those of all ranks. Nothing is copied if any is wrong.
    Returns:
        Whether it was done; else nothing has happened, on all ranks: private memory that is too large for slots cannot
        be read here.
    Raises:
        KVTimeoutError, PeerLostError: others may still read what is sent, which is kept.
    """
    call, index, kept = group.begin(deadline, what), group.index, list[Buffer]()
    # What is posted others must have read before the next call, for which nobody waits here. So all is in the slot.
    slots, words = group.offers(call)
    head, slot, used = words[index], slots[index], 8 * (1 + group.size)
    counted = slice(1 + group.size, 1 + 3 * group.size)
    if counts is not None:
        head[counted], used = counts[index].reshape(-1), 8 * counted.stop
    how, last, place = _IN_SLOT, None, 0
    for rank, part in enumerate(sends):
        if part is None or rank == index or not part.size:
            continue
        if part is not last:  # what goes to several ranks is copied once
            last, nbytes = part, part.nbytes
            if used + nbytes <= SLOT_BYTES:
                hand_over(slot[used : used + nbytes], octets(part))
                place, used = used, used + nbytes
            else:
                kept.append(part)
                found = group.place_of(part)
                how = max(how, _OUT_OF_REACH if found is None and not group.attaches else _IN_PLACE)
                place = address_of(part) if found is None else found
        head[1 + rank] = place
    head[0] = how
    group.post()
    try:
        group.await_posts(group.others, deadline, what)
        if counts is not None:
            for rank, each in enumerate(words):
                counts[rank] = each[counted].reshape(2, -1)
            if _first_wrong(counts) is not None:
                group.finish()
                return True
        if any(each[0] == _OUT_OF_REACH for each in words):
            group.finish()
            return False
        _take_own(sends[index], receives[index])
        for peer in group.others:
            into = receives[peer]
            if into is None or not into.size:
                continue
            place = int(words[peer][1 + index])
            if place < SLOT_BYTES:
                np.copyto(octets(into), slots[peer][place : place + into.nbytes])
            else:
                group.read(peer, place, slice(0, into.nbytes), octets(into))
                group.check(peer)  # else it may be something else by now
        group.finish(group.others if kept else (), deadline, what)
    except BaseException:
        group.give_up(*kept)
        raise
    return True


def _first_wrong(counts: Buffer) -> tuple[int, int] | None:
    """Of elements that each rank sends to others, and expects of them: the first two ranks that do not agree.

    Args:
        counts: shape ``(ranks, 2, ranks)``.
    """
    wrong = counts[:, 0, :] != counts[:, 1, :].T
    if not wrong.any():
        return None
    source, dest = np.argwhere(wrong)[0].tolist()
    return source, dest


def _take_own(part: Buffer | None, into: Buffer | None) -> None:
    if part is not None and into is not None and address_of(part) != address_of(into):
        np.copyto(into, part)


class GroupCollectives(Collectives):
    """``Collectives`` with all that a process group of torch offers. Bytes are moved whatever they mean."""

    def exchange(
        self, sends: Sequence[Buffer | None], receives: Sequence[Buffer | None], deadline: Deadline, label: str
    ) -> None:
        """``exchange.exchange``: the sizes must fit, rank by rank; ``exchange_counted`` tells."""
        self._exchange(sends, receives, deadline, label)

    def exchange_counted(
        self, sends: Sequence[Buffer], receives: Sequence[Buffer], sent: Sequence[int], expected: Sequence[int],
        deadline: Deadline, label: str,
    ) -> None:  # fmt: skip
        """``exchange``, if every rank expects of every other as many elements as that one sends.

        Raises:
            ShapeMismatchError: on every rank, and nothing was written; names the first two ranks that do not agree.
        """
        counts = np.empty((self.size, 2, self.size), np.int64)
        counts[self.rank] = sent, expected
        if self._group(deadline, label) is None:
            self.allgather(counts[self.rank].reshape(-1), counts.reshape(-1), deadline, label)
            self._check_counts(counts, label)
        self._exchange(sends, receives, deadline, label, counts)

    def _exchange(
        self, sends: Sequence[Buffer | None], receives: Sequence[Buffer | None], deadline: Deadline, label: str,
        counts: Buffer | None = None,
    ) -> None:  # fmt: skip
        nbytes = sum(part.nbytes for part in sends if part is not None)
        with self._recorder.timed("exchange", nbytes):
            group = self._group(deadline, label)
            if group is not None:
                where = f"{label}: exchange on MPI rank {self.rank} of {self.size}"
                done = self._guard.run(
                    lambda: exchange_on_host(group, sends, receives, deadline, lambda: where, counts), deadline
                )
                if counts is not None:
                    self._check_counts(counts, label)
                if done:
                    return
            self._exchange_by_messages(sends, receives, deadline, label)

    def _check_counts(self, counts: Buffer, label: str) -> None:
        if (wrong := _first_wrong(counts)) is not None:
            source, dest = wrong
            raise ShapeMismatchError(
                f"{label}: MPI rank {source} sends {counts[source, 0, dest]} elements to MPI rank {dest}, which "
                f"expects {counts[dest, 1, source]}"
            )

    def _group(self, deadline: Deadline, label: str) -> HostGroup | None:
        """All ranks, if they share memory. Collective at first."""
        if self.size > 1:
            self._selection.located(deadline, label)
        return self._selection.group_of_all

    def _exchange_by_messages(
        self, sends: Sequence[Buffer | None], receives: Sequence[Buffer | None], deadline: Deadline, label: str
    ) -> None:
        def describe(ranks: list[int]) -> str:
            return (
                f"{label} on MPI rank {self.rank} of {self.size}: MPI rank {ranks_in_words(ranks)} did not take "
                f"part{in_vain(deadline)}"
            )

        self._guard.run(lambda: exchange(self._comm, sends, receives, deadline, describe), deadline)

    def gather_lists(self, source: Buffer, outs: Sequence[Buffer], deadline: Deadline, label: str) -> None:
        """``outs[r]`` takes the ``source`` of rank r; their sizes may differ, and are the same on every rank."""
        if len({out.size for out in outs}) > 1 or self._group(deadline, label) is not None:
            self.exchange([source] * self.size, outs, deadline, label)
            return
        whole = np.empty(self.size * source.size, source.dtype)
        self.allgather(source, whole, deadline, label)
        for out, part in zip(outs, np.split(whole, self.size), strict=True):
            np.copyto(out, part)

    def all_tell(self, text: bytes, deadline: Deadline, label: str) -> list[bytes]:
        """The texts of all ranks, in rank order, on every rank; they may differ in length."""
        mine = np.frombuffer(text, np.uint8)
        lengths = np.empty(self.size, np.int64)
        self.allgather(np.array([mine.size]), lengths, deadline, label)
        texts = [np.empty(length, np.uint8) for length in lengths.tolist()]
        self.exchange([mine] * self.size, texts, deadline, label)
        return [text.tobytes() for text in texts]

    def fold(self, vector: Buffer, out: Buffer, dtype: str, op: str, deadline: Deadline, label: str) -> None:
        """Combine the vectors of all ranks by ``op`` (``combine.OPERATIONS``) into ``out`` of every rank.

        Each rank combines its segment in rank order, then the segments are gathered: the same bits on every rank.
        Cost per rank for S bytes on P ranks: 2(P-1)/P * S bytes sent, as a ring, in 2 latencies and P-1 messages each.

        Args:
            vector, out: shape ``(count,)``, storage dtype of ``dtype``; may be the same memory.
        """
        if self._combine_slots(vector, out, dtype, op, deadline, label):
            return
        bounds = segment_bounds(vector.size, self.size)
        own = out[slice(*bounds[self.rank])]
        self.fold_parts([vector[start:stop] for start, stop in bounds], own, dtype, op, deadline, label)
        self.allgather(own, out, deadline, label)

    def _combine_slots(
        self, vector: Buffer, out: Buffer | None, dtype: str, op: str, deadline: Deadline, label: str
    ) -> bool:
        """Combine what fits into slots, on every rank that has an ``out``; whether that is so, on all ranks alike."""
        combine.check(op, dtype)
        group = self._group(deadline, label) if vector.nbytes <= SLOT_BYTES else None
        if group is None:
            return False
        where = f"{label}: {op} on MPI rank {self.rank} of {self.size}"

        def run() -> None:
            call = group.begin(deadline, lambda: where)
            slots = [group.slot(rank, vector.size, vector.dtype, call) for rank in range(group.size)]
            hand_over(slots[group.index], vector)
            group.post()
            if out is not None:
                group.await_posts(group.others, deadline, lambda: where)
                combine.combine(out, slots, dtype, op)
            group.finish()

        with self._recorder.timed("reduce", vector.nbytes):
            self._guard.run(run, deadline)
        return True

    def fold_parts(
        self, parts: Sequence[Buffer], out: Buffer, dtype: str, op: str, deadline: Deadline, label: str
    ) -> None:
        """A reduce-scatter: part r of every rank's ``parts`` is combined by ``op`` into ``out`` of rank r.

        Args:
            parts: one for each rank, of whatever lengths; the same on every rank. ``out`` may be the own one.
        """
        combine.check(op, dtype)
        terms = np.empty((self.size, out.size), host.STORAGE[dtype])
        self.exchange(parts, list(terms), deadline, label)
        combine.combine(out, list(terms), dtype, op)

    def reduce(
        self, vector: Buffer, out: Buffer | None, dtype: str, op: str, root: int, deadline: Deadline, label: str
    ) -> None:
        """Combine the vectors of all ranks by ``op`` into ``out`` of rank ``root``, which may be its vector.

        Cost per rank for S bytes on P ranks: (P-1)/P * S bytes sent in a reduce-scatter, then S/P to the root.
        """
        if self._combine_slots(vector, out, dtype, op, deadline, label):
            return
        bounds = segment_bounds(vector.size, self.size)
        start, stop = bounds[self.rank]
        own = host.empty(stop - start, dtype)
        if op == "sum":
            self.reduce_scatter([Vector(vector, dtype, "cpu", True)], own, dtype, deadline, label)
        else:
            self.fold_parts([vector[first:last] for first, last in bounds], own, dtype, op, deadline, label)
        sends: list[Buffer | None] = [own if rank == root else None for rank in range(self.size)]
        receives: list[Buffer | None] = [None] * self.size
        if self.rank == root:
            assert out is not None
            receives = [out[first:last] for first, last in bounds]
        self.exchange(sends, receives, deadline, label)
