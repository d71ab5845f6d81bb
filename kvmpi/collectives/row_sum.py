"""Sums of row-sparse vectors over the workers of a client: only rows that somebody has travel."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvmpi.arrays import Vector
from kvmpi.collectives.tensor import Collectives
from kvmpi.deadline import Deadline
from kvmpi.kernels import host
from kvmpi.kernels import rows as by_rows
from kvmpi.kernels.rows import Rows

Buffer = npt.NDArray[Any]


def sum_rows(collectives: Collectives, rows: Rows, dtype: str, deadline: Deadline, label: str) -> Rows:
    """The sum of all ranks' ``rows``, which may be different ones; the same bits on every rank and in every run.

    The ids go to all ranks. The rows do too, to be added in the order of ranks; or, where ranks share so many that
    this would be more bytes, each rank puts its own into the union, which is summed as a dense vector.

    Cost for U rows in the union and at most n on a rank, of P: P * n ids, and P * n or about 2 * U rows.

    Args:
        rows: of one width on all ranks, values in the storage dtype of ``dtype``, ids in int64.
    Raises:
        KVTimeoutError, PeerLostError: as ``Collectives.allreduce``.
    """
    if collectives.size == 1:
        return rows
    counts, ids = _gathered_ids(collectives, rows.ids, deadline, label)
    union, most = by_rows.distinct(ids), int(counts.max())
    width = rows.width
    if not union.size or not width:
        return Rows(union, np.empty((union.size, width), host.STORAGE[dtype]))
    if collectives.size * most <= 2 * union.size:
        gathered = _allgather(collectives, rows.values.reshape(-1), most * width, deadline, label)
        values = [gathered[rank, : n * width].reshape(n, width) for rank, n in enumerate(counts.tolist())]
        return by_rows.summed(ids, np.concatenate(values), dtype)
    dense = np.zeros((union.size, width), host.STORAGE[dtype])
    dense[np.searchsorted(union, rows.ids)] = rows.values
    flat = dense.reshape(-1)
    collectives.allreduce([Vector(flat, dtype, "cpu", shared=True)], flat, dtype, deadline, label)
    return Rows(union, dense)


def union_of_ids(collectives: Collectives, ids: Buffer, deadline: Deadline, label: str) -> Buffer:
    """All ranks' ``ids`` (int64) in ascending order, none twice, on every rank."""
    if collectives.size == 1:
        return ids
    return by_rows.distinct(_gathered_ids(collectives, ids, deadline, label)[1])


def broadcast_rows(collectives: Collectives, rows: Rows, root: int, deadline: Deadline, label: str) -> Rows:
    """The rows of rank ``root`` on every rank; of others' ``rows`` only width and dtype count."""
    if collectives.size == 1:
        return rows
    count = np.array([rows.count], np.int64)
    collectives.broadcast(count, root, deadline, label)
    if collectives.rank != root:
        shape = (int(count[0]), rows.width)
        rows = Rows(np.empty(shape[0], np.int64), np.empty(shape, rows.values.dtype))
    ids = rows.ids.astype(np.int64, copy=False)
    collectives.broadcast(ids, root, deadline, label)
    collectives.broadcast(rows.values.reshape(-1), root, deadline, label)
    return Rows(ids, rows.values)


def _gathered_ids(collectives: Collectives, ids: Buffer, deadline: Deadline, label: str) -> tuple[Buffer, Buffer]:
    """How many ids each rank has, and all of them in the order of ranks."""
    counts = np.empty(collectives.size, np.int64)
    collectives.allgather(np.array([ids.size], np.int64), counts, deadline, label)
    gathered = _allgather(collectives, ids, int(counts.max()), deadline, label)
    return counts, np.concatenate([gathered[rank, :n] for rank, n in enumerate(counts.tolist())])


def _allgather(collectives: Collectives, own: Buffer, length: int, deadline: Deadline, label: str) -> Buffer:
    """What each rank has, shape ``(ranks, length)``; what is shorter has anything behind it."""
    out = np.zeros((collectives.size, length), own.dtype)
    mine = out[collectives.rank]
    mine[: own.size] = own
    collectives.allgather(mine, out.reshape(-1), deadline, label)
    return out
