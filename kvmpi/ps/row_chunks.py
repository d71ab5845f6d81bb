"""Rows of a key on their way between a master and its servers: which of them are in which chunk, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvmpi.arrays import DTYPES
from kvmpi.errors import ProtocolError, UnsupportedError
from kvmpi.kernels.rows import Rows
from kvmpi.ps.placement import Part
from kvmpi.wire import Message, as_array
from kvmpi.wire import messages as m
from kvmpi.wire.entries import Key

Buffer = npt.NDArray[Any]

#: Row numbers as they travel: counted from the first row of the chunk.
WIRE_ID = np.dtype("<u4")


class RowChunks:
    """How the rows of a key, of ``width`` elements each, are spread over its chunks.

    Raises:
        UnsupportedError: the key is not cut at rows.
    """

    def __init__(self, key: Key, chunks: Sequence[Part], width: int, dtype: str) -> None:
        self.width, self.dtype = width, dtype
        bounds = np.array([chunk.start for chunk in chunks] + [chunks[-1].stop], np.int64)
        if not bounds[-1]:
            self._bounds = bounds  # no rows, or rows without elements: nothing of them travels
        elif not width or (bounds % width).any():
            raise UnsupportedError(
                f"key {key!r} cannot be pushed or pulled by rows: its rows of {width} elements are too few, or too "
                "large, to cut it between them; use it as a whole, or raise KVMPI_CHUNK_BYTES"
            )
        else:
            self._bounds = bounds // width

    def split(self, ids: Buffer) -> list[tuple[slice, Buffer]]:
        """For each chunk: where its rows are in ``ids``, which are ascending, and their numbers on the wire."""
        at = ids.searchsorted(self._bounds)
        return [
            (slice(start, stop), (ids[start:stop] - first).astype(WIRE_ID))
            for start, stop, first in zip(at[:-1].tolist(), at[1:].tolist(), self._bounds[:-1].tolist(), strict=True)
        ]

    def numbers(self, index: int, ids: Buffer) -> Buffer:
        """Rows of the key for rows of chunk ``index``."""
        return ids.astype(np.int64) + self._bounds[index]

    def all_of(self, index: int) -> Buffer:
        """The numbers of all rows of a chunk."""
        return np.arange(self._bounds[index], self._bounds[index + 1])


class ArrivingRows:
    """Rows that come chunk by chunk, as the answers to a push of rows."""

    def __init__(self, chunks: RowChunks) -> None:
        self._chunks = chunks
        self._came: dict[int, Rows] = {}

    def take(self, index: int, message: Message, payloads: list[memoryview]) -> None:
        """What a push to chunk ``index`` was answered with: it has changed in some rows, or as a whole.

        Raises:
            ProtocolError: it is something else.
        """
        if not isinstance(message, m.Value) or not payloads:
            raise ProtocolError(f"expected the rows that a push has changed, got a {type(message).__name__}")
        count = message.rows
        width, dtype = self._chunks.width, DTYPES[self._chunks.dtype]
        everything = self._chunks.all_of(index)
        ids, values = everything, as_array(payloads[-1], dtype)
        if count >= 0:
            if len(payloads) != 2:
                raise ProtocolError(f"rows came in {len(payloads)} payloads, expected 2")
            ids = self._chunks.numbers(index, check_ids(payloads[0], count, everything.size))
        if values.size != ids.size * width:
            raise ProtocolError(f"{values.size} elements came for {ids.size} rows of {width}")
        self._came[index] = Rows(ids, values.reshape(ids.size, width).copy())  # the server wants its memory back

    def rows(self) -> Rows:
        """All that has come."""
        came = [self._came[index] for index in sorted(self._came)]
        return Rows(np.concatenate([rows.ids for rows in came]), np.concatenate([rows.values for rows in came]))


def take_rows(out: Buffer, message: Message, payloads: list[memoryview]) -> None:
    """Copy the answer to a pull of rows to ``out``, shape ``(count, width)``.

    Raises:
        ProtocolError: it is something else.
    """
    if not isinstance(message, m.Value) or len(payloads) != 1 or message.rows != len(out):
        raise ProtocolError(f"expected {len(out)} rows, got a {type(message).__name__}")
    rows = as_array(payloads[0], out.dtype)
    if rows.size != out.size:
        raise ProtocolError(f"{rows.size} elements came for {len(out)} rows, expected {out.size}")
    np.copyto(out, rows.reshape(out.shape))


def num_rows(pushed: Buffer | Rows) -> int:
    """What messages and entries say in ``rows`` of a push, or of a sum of pushes."""
    return pushed.count if isinstance(pushed, Rows) else -1


def frames(pushed: Buffer | Rows) -> tuple[Buffer, ...]:
    """A push, or a sum of pushes, as payloads."""
    return (pushed.ids, pushed.values.reshape(-1)) if isinstance(pushed, Rows) else (pushed,)


def check_ids(payload: memoryview, count: int, num_rows: int) -> Buffer:
    """``count`` row numbers of a chunk of ``num_rows`` as they have come.

    Raises:
        ProtocolError: another count, not ascending, or too large.
    """
    ids = as_array(payload, WIRE_ID)
    if ids.size != count:
        raise ProtocolError(f"{ids.size} row numbers came, expected {count}")
    if count and (int(ids[-1]) >= num_rows or np.count_nonzero(ids[1:] > ids[:-1]) < count - 1):
        raise ProtocolError(f"row numbers must be ascending and below {num_rows}; came {ids[:8].tolist()} ...")
    return ids
