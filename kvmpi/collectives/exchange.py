"""What programs know from MPI and torch beside the collectives of a store: exchanges of parts, and other reductions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvmpi.arrays import Vector, address_of
from kvmpi.collectives.comm import Comm, Request
from kvmpi.collectives.schedule import segment_bounds
from kvmpi.collectives.tensor import Collectives
from kvmpi.collectives.waiting import in_vain, wait_all
from kvmpi.deadline import Deadline
from kvmpi.errors import ShapeMismatchError
from kvmpi.kernels import combine, host

Buffer = npt.NDArray[Any]

_TAG = 9
#: MPI counts in 32-bit integers: bytes of one message.
MAX_MESSAGE_BYTES = 1 << 30


def pieces(buffer: Buffer, max_bytes: int = MAX_MESSAGE_BYTES) -> Iterator[Buffer]:
    """A contiguous buffer as messages that MPI can count; none if it is empty."""
    flat = buffer.reshape(-1).view(np.uint8)
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
    own, target = sends[comm.rank], receives[comm.rank]
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
    if own is not None and target is not None and address_of(own) != address_of(target):
        np.copyto(target, own)

    def late() -> str:
        return describe(sorted({rank for rank, request in requests if not request.test()}))

    wait_all([request for _, request in requests], deadline, late)


class GroupCollectives(Collectives):
    """``Collectives`` with all that a process group of torch offers. Bytes are moved whatever they mean."""

    def exchange(
        self, sends: Sequence[Buffer | None], receives: Sequence[Buffer | None], deadline: Deadline, label: str
    ) -> None:
        """``exchange.exchange``: the sizes must fit, rank by rank; ``check_counts`` tells."""

        def describe(ranks: list[int]) -> str:
            return (
                f"{label} on MPI rank {self.rank} of {self.size}: MPI rank {', '.join(map(str, ranks))} did not take "
                f"part{in_vain(deadline)}"
            )

        nbytes = sum(part.nbytes for part in sends if part is not None)
        with self._recorder.timed("exchange", nbytes):
            self._guard.run(lambda: exchange(self._comm, sends, receives, deadline, describe), deadline)

    def check_counts(self, sent: Sequence[int], expected: Sequence[int], deadline: Deadline, label: str) -> None:
        """Raise on every rank unless every rank expects of every other what that one sends.

        Raises:
            ShapeMismatchError: names the first two ranks that do not agree.
        """
        table = np.empty((self.size, 2, self.size), np.int64)
        table[self.rank] = sent, expected
        self.allgather(table[self.rank].reshape(-1), table.reshape(-1), deadline, label)
        wrong = np.argwhere(table[:, 0, :] != table[:, 1, :].T)
        if len(wrong):
            source, dest = wrong[0].tolist()
            raise ShapeMismatchError(
                f"{label}: MPI rank {source} sends {table[source, 0, dest]} elements to MPI rank {dest}, which expects "
                f"{table[dest, 1, source]}"
            )

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
        bounds = segment_bounds(vector.size, self.size)
        own = out[slice(*bounds[self.rank])]
        self.fold_parts([vector[start:stop] for start, stop in bounds], own, dtype, op, deadline, label)
        self.allgather(own, out, deadline, label)

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
