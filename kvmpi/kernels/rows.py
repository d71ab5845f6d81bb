"""Row-sparse vectors: some rows of a matrix, by their numbers, and the arithmetic on them.

A key of shape ``(n, ...)`` is a matrix of n rows; a key of one dimension has rows of one element.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvmpi.kernels import host

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Rows:
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


def summed(ids: Array, values: Array, dtype: str) -> Rows:
    """Rows in any order, those with equal ``ids`` added up in the order in which they stand; memory of its own.

    Half types are added in float32 and rounded once. Cost: a stable sort of ``ids`` and one copy of ``values``, two
    where an id is there twice.

    Args:
        ids: shape ``(n,)``, integers.
        values: shape ``(n, width)``, in the storage dtype of ``dtype``.
    """
    order = np.argsort(ids, kind="stable")
    ordered = ids[order]
    first = np.ones(ids.size, bool)
    np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
    sorted_values = np.ascontiguousarray(values[order])
    if first.all():
        return Rows(ordered, sorted_values)
    wide = widened(sorted_values, dtype)
    with np.errstate(all="ignore"):
        total = np.add.reduceat(wide, np.flatnonzero(first), axis=0, dtype=wide.dtype)
    return Rows(ordered[first], narrowed(total, dtype))


def summed_over(several: Sequence[Rows], dtype: str) -> Rows:
    """The sum of row-sparse vectors of one width, added in the order in which they stand; see ``summed``."""
    return summed(np.concatenate([rows.ids for rows in several]), np.concatenate([r.values for r in several]), dtype)


def added(total: Rows, more: Rows) -> Rows:
    """``total + more``, both in a dtype that sums have (``host.ACCUMULATE``); the memory of ``total`` is used up.

    Cost: nothing beyond the rows of ``more`` where ``total`` has them all, else a copy of the union.
    """
    union = np.union1d(total.ids, more.ids)
    if union.size > total.count:
        values = np.zeros((union.size, total.width), total.values.dtype)
        values[np.searchsorted(union, total.ids)] = total.values
        total = Rows(union, values)
    with np.errstate(all="ignore"):
        total.values[np.searchsorted(union, more.ids)] += more.values
    return total


def add_into(matrix: Array, rows: Rows) -> None:
    """Add ``rows`` to the flat ``matrix``, both in one dtype, that of sums."""
    if matrix.size:
        with np.errstate(all="ignore"):
            matrix.reshape(-1, rows.width)[rows.ids] += rows.values


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
    """Copies of rows of the flat ``matrix``, shape ``(ids.size, width)``; an id may stand there several times."""
    if not matrix.size:  # no rows, or rows without elements, of which NumPy could not tell how many there are
        return np.empty((ids.size, width), matrix.dtype)
    return matrix.reshape(-1, width).take(ids, axis=0)


def put(matrix: Array, rows: Rows) -> None:
    """Replace rows of the flat ``matrix``, which has the dtype of ``rows``."""
    if matrix.size:
        matrix.reshape(-1, rows.width)[rows.ids] = rows.values
