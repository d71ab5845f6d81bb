"""A float32 vector as codes of one or two bits and an error that is left, and back: MXNet's gradient compression.

What codes do not say is left for the next vector: ``left = values + residual - decoded``. The codes are those of MXNet
bit for bit (its file ``gradient_compression-inl.h``), the first element of a byte in its high bits.

Sources: Seide et al., "1-bit stochastic gradient descent", INTERSPEECH 2014 (the error is fed back); Strom, "Scalable
distributed DNN training", INTERSPEECH 2015 (two bits and a threshold).

In float32 throughout. A not-a-number or an infinity would stay in what is left for ever: ``all_finite`` tells. Where
finite ones add up to more than float32 has, it is the largest number that it has.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_LARGEST = np.finfo(np.float32).max
#: Elements that are looked at at a time: what they become stays in a level-2 cache. A multiple of 8.
BLOCK = 32 << 10


def all_finite(values: Array) -> bool:
    """Whether a float32 vector has neither an infinity nor a not-a-number. Allocates a block at most."""
    return all(bool(np.isfinite(values[part]).all()) for part in _blocks(values.size))


def two_bit(values: Array, residual: Array, left: Array, threshold: float) -> Array:
    """Codes of ``values + residual``: up (11) from ``threshold`` on, down (10) from its negative on, else nothing (00).

    Args:
        values, residual, left: float32, of one length; ``left`` is written, and may be ``residual``.
        threshold: above 0; what an up or down stands for.
    Returns:
        uint8, of shape ``(ceil(count / 4),)``.
    """
    codes = np.empty(packed_bytes(values.size, 2), np.uint8)
    table = _two_bit_values(threshold)
    up_from, down_from = np.float32(threshold), np.float32(-threshold)
    up, some = np.empty((2, min(values.size, BLOCK)), np.bool_)
    apart = np.empty(up.size + -up.size % 4, np.uint8)  # a code in each byte
    for part in _blocks(values.size):
        count = part.stop - part.start
        total = left[part]
        _add(values[part], residual[part], total)
        np.greater_equal(total, up_from, out=up[:count])
        np.less_equal(total, down_from, out=some[:count])
        np.logical_or(some[:count], up[:count], out=some[:count])
        np.left_shift(some[:count].view(np.uint8), 1, out=apart[:count])
        np.bitwise_or(apart[:count], up[:count].view(np.uint8), out=apart[:count])
        apart[count:] = 0
        packed = _four_in_a_byte(apart[: count + -count % 4])
        codes[part.start // 4 : part.start // 4 + packed.size] = packed
        np.subtract(total, _looked_up(table, packed, count), out=total)
    return codes


def one_bit(values: Array, residual: Array, left: Array, threshold: float) -> Array:
    """Codes of ``values + residual``: 1, which stands for +1, above ``threshold``, else 0, which stands for -1.

    Args:
        values, residual, left: as of ``two_bit``.
    Returns:
        uint8, of shape ``(ceil(count / 8),)``.
    """
    codes = np.empty(packed_bytes(values.size, 1), np.uint8)
    table, above = _one_bit_values(), np.float32(threshold)
    for part in _blocks(values.size):
        total = left[part]
        _add(values[part], residual[part], total)
        packed = np.packbits(total > above)
        codes[part.start // 8 : part.start // 8 + packed.size] = packed
        np.subtract(total, _looked_up(table, packed, total.size), out=total)
    return codes


def _add(values: Array, residual: Array, total: Array) -> None:
    """The sum, finite: a call for each overflow costs nothing as long as there is none."""
    overflows: list[object] = []
    with np.errstate(over="call", call=lambda *what: overflows.append(what)):
        np.add(values, residual, out=total)
    if overflows:
        np.clip(total, -_LARGEST, _LARGEST, out=total)


def two_bit_values(codes: Array, count: int, threshold: float) -> Array:
    """The ``count`` values, float32, for which codes of ``two_bit`` stand: ``threshold``, its negative, or 0."""
    return _looked_up(_two_bit_values(threshold), codes, count)


def one_bit_values(codes: Array, count: int) -> Array:
    """The ``count`` values, float32, for which codes of ``one_bit`` stand: 1 or -1."""
    return _looked_up(_one_bit_values(), codes, count)


def packed_bytes(count: int, bits: int) -> int:
    """Bytes of the codes of ``count`` elements."""
    return -(-count * bits // 8)


def _four_in_a_byte(apart: Array) -> Array:
    """Bytes of two bits each, four by four in one byte, the first in its highest bits."""
    words = apart.view("<u4")
    # Byte i of a word goes 10 (3 - i) bits up, all four into the highest byte; no two bits of the product meet.
    return (words * np.uint32(1 << 30 | 1 << 20 | 1 << 10 | 1) >> np.uint32(24)).astype(np.uint8)


def _looked_up(table: Array, codes: Array, count: int) -> Array:
    return np.take(table, codes, axis=0).reshape(-1)[:count]


@lru_cache(maxsize=64)
def _two_bit_values(threshold: float) -> Array:
    """For each byte the four values of its codes, the first from its highest bits."""
    codes = np.arange(256)[:, None] >> np.array([6, 4, 2, 0]) & 3
    # A lone low bit (01) is no code of MXNet's; it stands for nothing.
    values = np.array([0, 0, -threshold, threshold], np.float32)
    return values[codes]


@lru_cache(maxsize=1)
def _one_bit_values() -> Array:
    codes = np.arange(256)[:, None] >> np.arange(7, -1, -1) & 1
    return np.where(codes, np.float32(1), np.float32(-1))


def _blocks(count: int) -> Iterator[slice]:
    return (slice(start, min(start + BLOCK, count)) for start in range(0, count, BLOCK))
