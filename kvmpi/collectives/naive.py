"""The slow, obvious collectives, the oracle: gather, add in float64, send back (``KVMPI_ALLREDUCE=naive``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvmpi.collectives.algorithm import Act, Tensor
from kvmpi.collectives.comm import Comm, Request
from kvmpi.collectives.terms import HostTerms, times
from kvmpi.collectives.waiting import wait_all
from kvmpi.deadline import Deadline
from kvmpi.errors import ranks_in_words
from kvmpi.kernels import host

Buffer = npt.NDArray[Any]

_TAG = 4
#: MPI counts in 32-bit integers, and rank 0 has memory for a part of every rank.
MAX_PIECE_COUNT = 1 << 24


class Naive:
    """See ``Algorithm``. Everything passes through rank 0."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm

    def allreduce(self, tensors: Sequence[Tensor], dtype: str, act: Act) -> None:
        for tensor in tensors:
            self._allreduce(tensor.vectors, tensor.out, dtype, act)
            for copy in tensor.copies:
                np.copyto(copy, tensor.out)

    def _allreduce(self, vectors: Sequence[Buffer], out: Buffer, dtype: str, act: Act) -> None:
        total = act.scratch(out.size, host.STORAGE[host.ACCUMULATE[dtype]])
        np.copyto(total, HostTerms(vectors, dtype).own(0, out.size, total))
        naive_allreduce(self._comm, total, act.deadline, act.describe())
        times(total, act.scale)
        if dtype in host.HALF:
            host.narrow(total, out, dtype)
        else:
            np.copyto(out, total)

    def reduce_scatter(self, vectors: Sequence[Buffer], out: Buffer, dtype: str, act: Act) -> None:
        whole = act.scratch(vectors[0].size, out.dtype)
        self._allreduce(vectors, whole, dtype, act)
        np.copyto(out, whole[slice(*act.segments(whole.size)[act.rank])])

    def allgather(self, out: Buffer, act: Act) -> None:
        for root, (start, stop) in enumerate(act.segments(out.size)):
            naive_broadcast(self._comm, out[start:stop], root, act.deadline, act.describe())

    def broadcast(self, buffer: Buffer, root: int, act: Act) -> None:
        naive_broadcast(self._comm, buffer, root, act.deadline, act.describe())


def naive_allreduce(
    comm: Comm, buffer: Buffer, deadline: Deadline, label: str, *, max_piece_count: int = MAX_PIECE_COUNT
) -> None:
    """Sum ``buffer`` (shape ``(count,)``) over all ranks, in place, in rank order; floats in float64, rounded once."""
    for start in range(0, buffer.size, max_piece_count):
        piece = buffer[start : start + max_piece_count]
        if comm.rank == 0:
            _gather_sum(comm, piece, deadline, label)
        else:
            _await(comm, [0], [comm.isend(piece, 0, _TAG)], deadline, label)
        naive_broadcast(comm, piece, 0, deadline, label)


def _gather_sum(comm: Comm, piece: Buffer, deadline: Deadline, label: str) -> None:
    parts = [np.empty_like(piece) for _ in range(1, comm.size)]
    receives = [comm.irecv(part, rank, _TAG) for rank, part in enumerate(parts, start=1)]
    _await(comm, range(1, comm.size), receives, deadline, label)
    total = piece.astype(np.float64 if piece.dtype.kind == "f" else piece.dtype)
    with np.errstate(all="ignore"):
        for part in parts:
            total += part
        piece[...] = total.astype(piece.dtype)


def naive_broadcast(
    comm: Comm, buffer: Buffer, root: int, deadline: Deadline, label: str, *, max_piece_count: int = MAX_PIECE_COUNT
) -> None:
    """Send ``buffer`` of ``root`` to every other rank, one by one."""
    others = [rank for rank in range(comm.size) if rank != root]
    for start in range(0, buffer.size, max_piece_count):
        piece = buffer[start : start + max_piece_count]
        if comm.rank == root:
            _await(comm, others, [comm.isend(piece, rank, _TAG) for rank in others], deadline, label)
        else:
            _await(comm, [root], [comm.irecv(piece, root, _TAG)], deadline, label)


def _await(comm: Comm, ranks: Sequence[int], requests: Sequence[Request], deadline: Deadline, label: str) -> None:
    """Return when each of ``ranks`` has done what its request is about."""

    def late() -> str:
        names = ranks_in_words(rank for rank, request in zip(ranks, requests, strict=True) if not request.test())
        return (
            f"{label}: MPI rank {comm.rank} of {comm.size} waited in vain for MPI rank {names}; "
            "look at that worker, or raise KVMPI_TIMEOUT_S"
        )

    wait_all(requests, deadline, late)
