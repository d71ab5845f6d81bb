"""Row-sparse pushes and pulls: what users pass for them, checked, and where their results go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvmpi import arrays
from kvmpi.errors import ConfigError, DTypeMismatchError, RowIndexError, ShapeMismatchError, UnsupportedError
from kvmpi.kernels import rows as by_rows
from kvmpi.kernels.rows import Rows
from kvmpi.store.grammar import Key, Pair, normal_key

Buffer = npt.NDArray[Any]


@dataclass(slots=True)
class RowOut:
    """An array ``target`` that gets rows ``ids``, in this order, of a value; without ids a torch sparse tensor, which
    gets all rows that there are. ``fence``: what was queued on its device before, and may still use it."""

    target: Any
    ids: Buffer | None
    fence: Any = field(init=False)

    def __post_init__(self) -> None:
        self.fence = arrays.fence(self.target)

    def fill(self, rows: Rows, dtype: str) -> None:
        """``rows`` must have all of ``ids``."""
        if not rows.width:
            return  # rows without elements, of which nobody has sent any
        if self.fence is not None:
            self.fence.synchronize()
        if self.ids is None:
            arrays.write_sparse(self.target, rows.ids, rows.values.reshape(-1), dtype)
        else:
            self._take(rows.values, np.searchsorted(rows.ids, self.ids))

    def fill_from(self, value: Buffer, width: int) -> int:
        """``value`` is a key's whole one, flat. Returns how many bytes are written."""
        assert self.ids is not None
        if not value.size:
            return 0
        if self.fence is not None:
            self.fence.synchronize()
        self._take(value.reshape(-1, width), self.ids)
        return int(self.ids.size * width * value.itemsize)

    def _take(self, matrix: Buffer, numbers: Buffer) -> None:
        memory = arrays.memory_of(self.target)
        if memory is None:
            arrays.write(self.target, matrix.take(numbers, axis=0).reshape(-1))
        else:  # none of them is out of range, which would have to be checked in a copy
            matrix.take(numbers, axis=0, out=memory.buffer.reshape(-1, matrix.shape[1]), mode="clip")

    def nbytes(self, rows: Rows) -> int:
        """Of what ``fill`` writes."""
        return int((rows.ids if self.ids is None else self.ids).size * rows.width * rows.values.itemsize)


def read(values: Sequence[Any], shape: tuple[int, ...], dtype: str, where: str) -> tuple[Rows, list[RowOut]]:
    """What is pushed to a key of ``shape`` and ``dtype``: the sum of torch sparse tensors and pairs of ids and rows.

    Returns: the sum, in memory of its own, and where results that replace what was pushed would go.

    Raises:
        RowIndexError, ShapeMismatchError, DTypeMismatchError, UnsupportedError: it cannot be pushed to this key.
    """
    all_ids, all_rows, outs = [], [], []
    for value in values:
        if isinstance(value, Pair):
            ids_array, rows, target = value.row_ids, value.rows, value.rows
        else:
            if arrays.shape_of(value) != shape:
                raise ShapeMismatchError(f"{where}: shape {arrays.shape_of(value)}, the key has {shape}")
            ids_array, rows = arrays.sparse_rows(value)
            target = value
        ids = read_ids(ids_array, shape, where)
        _check_rows(rows, (ids.size,), shape, dtype, where)
        all_ids.append(ids)
        all_rows.append(arrays.on_host(rows).reshape(ids.size, -1 if ids.size else 0))
        outs.append(RowOut(target, ids if isinstance(value, Pair) else None))
    kept = [rows for rows in all_rows if len(rows)]
    if not kept:
        return by_rows.no_rows(int(np.prod(shape[1:], dtype=np.int64)), dtype), outs
    return by_rows.summed(np.concatenate(all_ids), np.concatenate(kept), dtype), outs


def read_ids(array: Any, shape: tuple[int, ...], where: str) -> npt.NDArray[np.int64]:
    """Row ids as flat int64, all of them rows of a key of ``shape``."""
    try:
        ids = arrays.integers(array)
    except DTypeMismatchError as error:
        raise DTypeMismatchError(f"{where}: row ids: {error}") from None
    bad = np.flatnonzero((ids < 0) | (ids >= shape[0]))
    if bad.size:
        raise RowIndexError(
            f"{where}: row id {ids[bad[0]]} at position {bad[0]}, the key has rows 0 to {shape[0] - 1}"
            if shape[0]
            else f"{where}: row id {ids[0]}, but the key has no rows"
        )
    return ids


def wanted(key: Any, out: Any, row_ids: Any) -> list[tuple[Key, list[tuple[Any, Any]]]]:
    """The pairs of array and row ids for each key of a call, keys in order of first appearance.

    Accepts for each key an array and row ids; a list of arrays and one array of row ids for all, or a list of as many.

    Raises:
        ConfigError: lists of different lengths, or no array for a key.
    """
    if not isinstance(key, list | tuple):
        return [(normal_key(key), _wanted_of(key, out, row_ids))]
    for name, given in (("arrays", out), ("row_ids", row_ids)):
        if not isinstance(given, list | tuple) or len(given) != len(key):
            raise ConfigError(f"row_sparse_pull: {len(key)} keys need a list of as many {name}")
    joined: dict[Key, list[tuple[Any, Any]]] = {}
    for one, its_out, its_ids in zip(key, out, row_ids, strict=True):
        joined.setdefault(normal_key(one), []).extend(_wanted_of(one, its_out, its_ids))
    return list(joined.items())


def _wanted_of(key: Any, out: Any, row_ids: Any) -> list[tuple[Any, Any]]:
    if not isinstance(out, list | tuple):
        return [(out, row_ids)]
    ids = row_ids if isinstance(row_ids, list | tuple) else [row_ids] * len(out)
    if not out or len(ids) != len(out):
        raise ConfigError(f"row_sparse_pull of key {key!r}: {len(out)} arrays, {len(ids)} arrays of row ids")
    return list(zip(out, ids, strict=True))


def read_wanted(pairs: Sequence[tuple[Any, Any]], shape: tuple[int, ...], dtype: str, where: str) -> list[RowOut]:
    """Checked pairs of ``row_sparse_pull``, for a key of ``shape`` and ``dtype``.

    Raises:
        RowIndexError, ShapeMismatchError, DTypeMismatchError, UnsupportedError: they do not fit the key.
    """
    found = []
    for out, row_ids in pairs:
        ids = read_ids(row_ids, shape, where)
        ids_shape = np.shape(row_ids) if isinstance(row_ids, list | tuple) else arrays.shape_of(row_ids)
        _check_rows(out, ids_shape, shape, dtype, where)
        try:
            arrays.check_writable(out)
        except UnsupportedError as error:
            raise UnsupportedError(f"{where}: {error}") from None
        found.append(RowOut(out, ids))
    arrays.note_writes([out for out, _ in pairs])
    return found


def sparse_outs(targets: Sequence[Any], shape: tuple[int, ...], dtype: str, where: str) -> list[RowOut]:
    """Torch sparse tensors that get all rows which a push has changed.

    Raises:
        ShapeMismatchError, DTypeMismatchError, UnsupportedError: they do not fit the key.
    """
    for target in targets:
        if isinstance(target, Pair):
            raise UnsupportedError(f"{where}: out is a pair; pull rows of your choice with row_sparse_pull")
        _, rows = arrays.sparse_rows(target)
        if arrays.shape_of(target) != shape:
            raise ShapeMismatchError(f"{where}: out has shape {arrays.shape_of(target)}, the key has {shape}")
        if arrays.dtype_of(rows) != dtype:
            raise DTypeMismatchError(f"{where}: out has dtype {arrays.dtype_of(rows)}, the key has {dtype}")
    return [RowOut(target, None) for target in targets]


def union_of(outs: Sequence[RowOut]) -> npt.NDArray[np.int64]:
    """All ids that ``outs`` name, ascending, none twice."""
    named = [out.ids for out in outs if out.ids is not None]
    return by_rows.distinct(*named) if named else np.empty(0, np.int64)


def _check_rows(rows: Any, ids_shape: tuple[int, ...], shape: tuple[int, ...], dtype: str, where: str) -> None:
    expected = (*ids_shape, *shape[1:])
    if not arrays.is_array(rows):
        raise DTypeMismatchError(f"{where}: expected an array of shape {expected}, got {type(rows).__name__}")
    if arrays.shape_of(rows) != expected:
        raise ShapeMismatchError(
            f"{where}: rows have shape {arrays.shape_of(rows)}, expected {expected}: that of the row ids, then "
            f"{shape[1:]} of the key"
        )
    if arrays.dtype_of(rows) != dtype:
        raise DTypeMismatchError(f"{where}: dtype {arrays.dtype_of(rows)}, the key has {dtype}")
