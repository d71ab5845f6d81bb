"""The collectives of the MPI library itself: this worker's vectors are summed, then MPI does the rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvmpi.arrays import address_of
from kvmpi.collectives.algorithm import Act, Tensor, pack, unpack
from kvmpi.collectives.comm import Comm, Request
from kvmpi.collectives.naive import MAX_PIECE_COUNT
from kvmpi.collectives.terms import HostTerms, times
from kvmpi.collectives.waiting import Habit, in_vain, wait_all
from kvmpi.kernels import host

Buffer = npt.NDArray[Any]

#: MPI counts in 32-bit integers: the bytes of all parts of an exchange, the elements of a sum.
MAX_COUNT = (1 << 31) - 1
#: Such a collective takes many messages, one after the other, and the library sends the next only when it is asked: a
#: nap makes the wait longer by itself. Those that are chosen take no more than two milliseconds as a rule.
_LIBRARY = Habit(nap_share=0.01, polling_s=2e-3)


class Library:
    """See ``Algorithm``. Half types are sent as float32. The order of additions is the library's business."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm

    def allreduce(self, tensors: Sequence[Tensor], dtype: str, act: Act) -> None:
        wire, packed = self._wire_dtype(dtype), pack(tensors, act)
        total = packed.out if packed.out.dtype == wire else act.scratch(packed.out.size, wire)
        self._fold(packed.vectors, dtype, total, act)
        for start in range(0, total.size, MAX_PIECE_COUNT):
            self._await(self._comm.iallreduce(total[start : start + MAX_PIECE_COUNT]), act)
        times(total, act.scale)
        self._unfold(total, packed.out, dtype)
        unpack(tensors, packed)

    def reduce_scatter(self, vectors: Sequence[Buffer], out: Buffer, dtype: str, act: Act) -> None:
        wire, count = self._wire_dtype(dtype), vectors[0].size
        folded = vectors[0]
        if len(vectors) > 1 or folded.dtype != wire:
            folded = act.scratch(count, wire)
            self._fold(vectors, dtype, folded, act)
        # Not out: MPI forbids that it overlaps what is sent. MPICH compares addresses, also of nothing.
        total = act.scratch(max(1, out.size), wire)[: out.size]
        if count > MAX_COUNT:
            self._reduce_scatter_pieces(folded, total, act)
        else:
            counts = [stop - start for start, stop in act.segments(count)]
            self._await(self._comm.ireduce_scatter(folded, total, counts), act)
        times(total, act.scale)
        self._unfold(total, out, dtype)

    def _reduce_scatter_pieces(self, folded: Buffer, total: Buffer, act: Act) -> None:
        """All ranks sum piece after piece, of which each keeps what is its own."""
        own, stop = act.segments(folded.size)[act.rank]
        memory = np.empty(min(folded.size, MAX_PIECE_COUNT), folded.dtype)
        for start in range(0, folded.size, MAX_PIECE_COUNT):
            piece = memory[: folded.size - start]
            np.copyto(piece, folded[start : start + piece.size])
            self._await(self._comm.iallreduce(piece), act)
            first, last = max(own, start), min(stop, start + piece.size)
            if first < last:
                total[first - own : last - own] = piece[first - start : last - start]

    def allgather(self, out: Buffer, act: Act) -> None:
        if out.nbytes > MAX_COUNT:
            for rank, (start, stop) in enumerate(act.segments(out.size)):
                self.broadcast(out[start:stop], rank, act)
            return
        self._await(self._comm.iallgather(out, [stop - start for start, stop in act.segments(out.size)]), act)

    def broadcast(self, buffer: Buffer, root: int, act: Act) -> None:
        for start in range(0, buffer.size, MAX_PIECE_COUNT):
            self._await(self._comm.ibroadcast(buffer[start : start + MAX_PIECE_COUNT], root), act)

    def _await(self, request: Request, act: Act) -> None:
        wait_all(
            [request], act.deadline,
            lambda: f"{act.describe()}: a rank did not take part{in_vain(act.deadline)}", _LIBRARY,
        )  # fmt: skip

    @staticmethod
    def _wire_dtype(dtype: str) -> np.dtype[Any]:
        wire = host.STORAGE[host.ACCUMULATE[dtype]]
        # OpenMPI's vectorised sums of short integers do not wrap around but stop at the largest value.
        return np.dtype(np.int32) if wire.kind in "iu" and wire.itemsize < 4 else wire

    @staticmethod
    def _fold(vectors: Sequence[Buffer], dtype: str, total: Buffer, act: Act) -> None:
        if dtype in host.HALF or total.dtype == vectors[0].dtype:
            own = HostTerms(vectors, dtype).own(0, total.size, total)
        else:
            own = vectors[0]
            if len(vectors) > 1:
                own = act.scratch(total.size, own.dtype)
                host.sum_vectors(own, vectors, dtype)
        if address_of(own) != address_of(total):
            np.copyto(total, own)

    @staticmethod
    def _unfold(total: Buffer, out: Buffer, dtype: str) -> None:
        if dtype in host.HALF:
            host.narrow(total, out, dtype)
        elif total is not out:
            np.copyto(out, total, casting="unsafe")
