"""The slow, obvious collectives: gather, add in float64, send back. The oracle, selected by ``KVMPI_ALLREDUCE=naive``."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvmpi.collectives.comm import Comm
from kvmpi.collectives.waiting import wait_all
from kvmpi.deadline import Deadline

Buffer = npt.NDArray[Any]

_TAG = 4


def naive_allreduce(comm: Comm, buffer: Buffer, deadline: Deadline, label: str) -> None:
    """Sum ``buffer`` (shape ``(count,)``) over all ranks, in place, in rank order; floats in float64, rounded once."""
    if comm.rank == 0:
        parts = [np.empty_like(buffer) for _ in range(1, comm.size)]
        requests = [comm.irecv(part, rank, _TAG) for rank, part in enumerate(parts, start=1)]
        wait_all(requests, deadline, lambda: _late(comm, label, [r for r, q in enumerate(requests, 1) if not q.test()]))
        wide = np.float64 if buffer.dtype.kind == "f" else buffer.dtype
        total = buffer.astype(wide)
        for part in parts:
            total += part
        buffer[...] = total.astype(buffer.dtype)
    else:
        wait_all([comm.isend(buffer, 0, _TAG)], deadline, lambda: _late(comm, label, [0]))
    naive_broadcast(comm, buffer, 0, deadline, label)


def naive_broadcast(comm: Comm, buffer: Buffer, root: int, deadline: Deadline, label: str) -> None:
    """Send ``buffer`` of ``root`` to every other rank, one by one."""
    if comm.rank == root:
        others = [rank for rank in range(comm.size) if rank != root]
        sends = [comm.isend(buffer, rank, _TAG) for rank in others]
        wait_all(sends, deadline, lambda: _late(comm, label, others))
    else:
        wait_all([comm.irecv(buffer, root, _TAG)], deadline, lambda: _late(comm, label, [root]))


def _late(comm: Comm, label: str, missing: list[int]) -> str:
    names = ", ".join(map(str, missing))
    return f"{label}: MPI rank {comm.rank} of {comm.size} waited in vain for MPI rank {names}"
