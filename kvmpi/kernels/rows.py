"""Row-sparse vectors: some rows of a matrix, by their numbers, and the arithmetic on them.

A key of shape ``(n, ...)`` is a matrix of n rows; a key of one dimension has rows of one element.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvmpi.kernels import host

Array = npt.NDArray[Any]

#: So many rows of each id are added for all ids together, one after the other. As a rule few ids have more.
_SELDOM = 16


class Rows(msgspec.Struct, frozen=True):
    """Rows ``ids`` of a matrix, all others being untouched.

    Attributes:
        ids: shape ``(count,)``, integers, ascending, none twice.
        values: shape ``(count, width)``, C-contiguous, in storage dtype.
    """

    ids: Array
    values: Array

    @property
    def count(self) -> int:
        return int(self.ids.size)

    @property
    def width(self) -> int:
        """Elements of one row."""
        return int(self.values.shape[1])

    @property
    def nbytes(self) -> int:
        return int(self.ids.nbytes + self.values.nbytes)


def no_rows(width: int, dtype: str) -> Rows:
    """Rows of which there are none."""
    return Rows(np.empty(0, np.int64), np.empty((0, width), host.STORAGE[dtype]))


def distinct(*several: Array) -> Array:
    """The ids of ``several``, ascending, none twice.

    They are sorted, since for a million of them the hash table of ``np.unique`` takes 20 to 40 times as long.
    """
    ids = np.sort(np.concatenate(several))
    return ids[_first(ids)]


def _first(ordered: Array) -> Array:
    """Which of ``ordered`` differ from the one before."""
    first = np.ones(ordered.size, bool)
    np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
    return first


def summed(ids: Array, values: Array, dtype: str) -> Rows:
    """Rows in any order, those with equal ``ids`` added up; memory of its own.

    What bits a sum has depends on the rows of its id and their order alone. Half types are added in float32 and
    rounded once. Cost: a stable sort of ``ids`` and one copy of ``values``. ``np.add.reduceat`` would be shorter, but
    takes 5 to 20 times as long for rows of some hundred elements.

    Args:
        ids: shape ``(n,)``, integers.
        values: shape ``(n, width)``, in the storage dtype of ``dtype``.
    """
    order = np.argsort(ids, kind="stable")
    ordered = ids[order]
    starts = np.flatnonzero(_first(ordered))
    if starts.size == ids.size:
        return Rows(ordered, values.take(order, axis=0))
    counts = np.diff(starts, append=ids.size)
    total = widened(values.take(order[starts], axis=0), dtype)
    with np.errstate(all="ignore"):
        for further in range(1, min(int(counts.max()), _SELDOM)):
            again = np.flatnonzero(counts > further)
            total[again] += widened(values.take(order[starts[again] + further], axis=0), dtype)
        for often in np.flatnonzero(counts > _SELDOM).tolist():
            rest = order[starts[often] + _SELDOM : starts[often] + counts[often]]
            total[often] += widened(values.take(rest, axis=0), dtype).sum(axis=0, dtype=total.dtype)
    return Rows(ordered[starts], narrowed(total, dtype))


def summed_over(several: Sequence[Rows], dtype: str) -> Rows:
    """The sum of row-sparse vectors of one width; see ``summed``."""
    return summed(np.concatenate([rows.ids for rows in several]), np.concatenate([r.values for r in several]), dtype)


def added(total: Rows, more: Rows) -> Rows:
    """``total + more``, both in a dtype that sums have (``host.ACCUMULATE``); the memory of ``total`` is used up.

    Cost: nothing beyond the rows of ``more`` where ``total`` has them all, else a copy of the union.
    """
    union = distinct(total.ids, more.ids)
    if union.size > total.count:
        values = np.zeros((union.size, total.width), total.values.dtype)
        put(values, np.searchsorted(union, total.ids), total.values)
        total = Rows(union, values)
    add_into(total.values, Rows(np.searchsorted(union, more.ids), more.values))
    return total


def add_into(matrix: Array, rows: Rows) -> None:
    """Add ``rows`` to ``matrix``, flat or not, both in one dtype, that of sums."""
    if matrix.size:
        found = take(matrix, rows.width, rows.ids)
        with np.errstate(all="ignore"):
            found += rows.values
        put(matrix, rows.ids, found)


def widened(values: Array, dtype: str) -> Array:
    """``values`` of ``dtype`` in the dtype in which they are added up: themselves, or a copy in float32."""
    if dtype not in host.HALF:
        return values
    wide = np.empty(values.shape, np.float32)
    host.widen(values.reshape(-1), dtype, wide.reshape(-1))
    return wide


def narrowed(values: Array, dtype: str) -> Array:
    """The inverse of ``widened``."""
    if dtype not in host.HALF:
        return values
    narrow = np.empty(values.shape, host.STORAGE[dtype])
    host.narrow(values.reshape(-1), narrow.reshape(-1), dtype)
    return narrow


def take(matrix: Array, width: int, ids: Array) -> Array:
    """Copies of rows of ``matrix``, flat or not, shape ``(ids.size, width)``; an id may stand there several times."""
    if not matrix.size:  # no rows, or rows without elements, of which NumPy could not tell how many there are
        return np.empty((ids.size, width), matrix.dtype)
    return matrix.reshape(-1, width).take(ids, axis=0)


def put(matrix: Array, ids: Array, values: Array) -> None:
    """Replace rows ``ids`` of ``matrix``, flat or not, by ``values`` of its dtype; both are C-contiguous.

    Each row is one element of the copy, which takes half as long as an assignment by rows.
    """
    if values.size:
        row = np.dtype((np.void, values.shape[1] * values.itemsize))
        np.put(matrix.reshape(-1).view(row), ids, values.view(row))
