"""Sums, copies and conversions of host vectors, in blocks that stay in cache.

A host vector is a one-dimensional C-contiguous ``np.ndarray`` in *storage dtype* plus the name of its dtype. The
storage dtype of ``"bfloat16"`` is ``np.uint16`` (its raw bits), that of every other name the NumPy dtype of that name.
Half types accumulate in float32 and are rounded once, to nearest even; integers wrap around.

Functions allocate at most a few blocks of ``BLOCK_BYTES``, never a vector. A result may alias an input only where its
docstring says so, and then exactly: same start, same length.

Every NaN that is narrowed becomes the positive quiet NaN and every NaN that is widened from float16 becomes quiet:
processors and libraries differ here, and ranks must agree on bits.

Half types are converted by compiled code where that has been built, and by NumPy with the same bits. 4 million of them,
one thread of an AMD EPYC, NumPy 2.4: float16 is widened in 1.8 ms instead of 11, and narrowed in 3.3 instead of 26;
bfloat16 in 1.2 instead of 2.8, and 1.4 instead of 7.9. A copy of as many float32 takes 1.4.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from kvmpi.arrays import DTYPES
from kvmpi.errors import DTypeMismatchError, ShapeMismatchError

try:
    from kvmpi.kernels import _halves
except ImportError:
    _halves = None  # type: ignore[assignment]

Array = npt.NDArray[Any]

#: Bytes of one block of a temporary.
BLOCK_BYTES = 128 << 10

#: Name of a dtype -> NumPy dtype of the memory that holds it.
STORAGE: Mapping[str, np.dtype[Any]] = DTYPES

HALF = frozenset({"float16", "bfloat16"})

#: Name of a dtype -> name of the dtype in which its values are added up.
ACCUMULATE: Mapping[str, str] = MappingProxyType({name: "float32" if name in HALF else name for name in STORAGE})

#: Name of a dtype -> what compiled code calls it (``kind_t``): of integers only the width counts.
KINDS: Mapping[str, str] = MappingProxyType({
    name: kind
    for kind, names in {
        "f": ["float32"], "d": ["float64"], "e": ["float16"], "y": ["bfloat16"],
        "b": ["int8", "uint8"], "h": ["int16"], "i": ["int32"], "q": ["int64"],
    }.items()
    for name in names
})  # fmt: skip

_BFLOAT16_NAN = 0x7FC0
_FLOAT16_NAN = 0x7E00
_FLOAT32_QUIET_BIT = 0x0040_0000


def empty(count: int, dtype: str) -> Array:
    """An uninitialised vector of ``count`` elements in the storage dtype of ``dtype``."""
    return np.empty(count, _storage(dtype))


def copy(dst: Array, src: Array) -> None:
    """``dst = src``, bit for bit; both of one storage dtype and length."""
    _check(dst, src)
    np.copyto(dst, src)


def widen(src: Array, src_dtype: str, out32: Array) -> None:
    """Convert ``src`` to float32, exactly. ``src_dtype`` is float16, bfloat16 or float32."""
    _check_float32(out32, "out32")
    _check_half_or_float32(src, src_dtype, out32)
    with np.errstate(all="ignore"):
        for part in _blocks(src.size):
            _widen_block(src[part], src_dtype, out32[part])


def narrow(src32: Array, out: Array, dtype: str) -> None:
    """Convert float32 ``src32`` to ``dtype`` (float16, bfloat16 or float32), rounding to nearest even.

    What is too large becomes infinite, what is small becomes subnormal or zero, NaN becomes the positive quiet NaN.
    """
    _check_float32(src32, "src32")
    _check_half_or_float32(out, dtype, src32)
    with np.errstate(all="ignore"):
        scratch = np.empty(_block_length(src32.size), np.uint32)
        for part in _blocks(src32.size):
            _narrow_block(src32[part], out[part], dtype, scratch)


def add_into(dst: Array, src: Array, dtype: str) -> None:
    """``dst += src``, both of ``dtype``; half types are added in float32 and rounded once. ``src`` may be ``dst``."""
    sum_vectors(dst, [dst, src], dtype)


def add_widened(acc: Array, acc_dtype: str, src: Array, src_dtype: str) -> None:
    """``acc += src``, where ``acc_dtype`` is ``ACCUMULATE[src_dtype]``: half types are added to a float32 ``acc``."""
    _storage(src_dtype)
    if acc_dtype != ACCUMULATE[src_dtype]:
        raise DTypeMismatchError(
            f"values of {src_dtype} are accumulated in {ACCUMULATE[src_dtype]}, the accumulator is {acc_dtype}"
        )
    _check_storage(acc, acc_dtype)
    _check_storage(src, src_dtype)
    _check_length(acc, src)
    with np.errstate(all="ignore"):
        if src_dtype not in HALF:
            np.add(acc, src, out=acc)
            return
        scratch = np.empty(_block_length(src.size), np.float32)
        for part in _blocks(src.size):
            wide = scratch[: part.stop - part.start]
            _widen_block(src[part], src_dtype, wide)
            np.add(acc[part], wide, out=acc[part])


def sum_vectors(dst: Array, sources: Sequence[Array], dtype: str, factor: float = 1.0) -> None:
    """``dst = (sources[0] + sources[1] + ...) * factor``, added from left to right, all of ``dtype``.

    Half types accumulate in float32 and round once. ``factor`` is as for ``scale``. One source is copied. ``dst`` may
    be any of the sources, and a source may stand in the list several times.

    Cost: one pass over memory, n reads and one write of a vector; one block of scratch where it is needed. Another pass
    for a ``factor``, but of half types.
    """
    assert sources, "the sum of no vectors"
    _check_storage(dst, dtype)
    for src in sources:
        _check(dst, src)
    if len(sources) == 1:
        if sources[0] is not dst:
            np.copyto(dst, sources[0])
    elif dtype in HALF:
        with np.errstate(all="ignore"):
            _sum_half(dst, sources, dtype, factor)
        return
    else:
        with np.errstate(all="ignore"):
            if len(sources) == 2:
                np.add(sources[0], sources[1], out=dst)
            else:
                _sum_blocks(dst, sources)
    if factor != 1.0:
        scale(dst, factor, dtype)


def scale(dst: Array, factor: float, dtype: str) -> None:
    """``dst *= factor`` for the float types; half types are multiplied in float32 and rounded once.

    Raises:
        DTypeMismatchError: ``dtype`` is an integer type, where the product would have to be rounded.
    """
    _check_storage(dst, dtype)
    check_scalable(dtype, factor)
    with np.errstate(all="ignore"):
        if dtype not in HALF:
            np.multiply(dst, float(factor), out=dst)
            return
        wide, scratch = _float32_and_bits(dst.size)
        for part in _blocks(dst.size):
            acc = wide[: part.stop - part.start]
            _widen_block(dst[part], dtype, acc)
            np.multiply(acc, float(factor), out=acc)
            _narrow_block(acc, dst[part], dtype, scratch)


def check_scalable(dtype: str, factor: float, where: str = "") -> None:
    """Raise ``DTypeMismatchError`` unless ``scale`` can be called for vectors of ``dtype``."""
    if STORAGE[dtype].kind != "f" and dtype not in HALF:
        raise DTypeMismatchError(f"{where}a vector of {dtype} cannot be scaled by {factor}: only float types can")


# The pieces. A block is at most _block_length(count) elements; callers ignore floating-point warnings.


def _sum_blocks(dst: Array, sources: Sequence[Array]) -> None:
    # Where dst is one of the later sources, its old values are still needed after the first write: sum elsewhere.
    aliased = any(np.may_share_memory(dst, src) for src in sources[2:])
    length = _block_length(dst.size, dst.itemsize)
    scratch = np.empty(length if aliased else 0, dst.dtype)
    for part in _blocks(dst.size, dst.itemsize):
        acc = scratch[: part.stop - part.start] if aliased else dst[part]
        np.add(sources[0][part], sources[1][part], out=acc)
        for src in sources[2:]:
            np.add(acc, src[part], out=acc)
        if aliased:
            np.copyto(dst[part], acc)


def _sum_half(dst: Array, sources: Sequence[Array], dtype: str, factor: float) -> None:
    wide, scratch = _float32_and_bits(dst.size)
    term = scratch.view(np.float32)  # free until the block is narrowed
    for part in _blocks(dst.size):
        acc = wide[: part.stop - part.start]
        _widen_block(sources[0][part], dtype, acc)
        for src in sources[1:]:
            _widen_block(src[part], dtype, term[: acc.size])
            np.add(acc, term[: acc.size], out=acc)
        if factor != 1.0:
            np.multiply(acc, float(factor), out=acc)
        _narrow_block(acc, dst[part], dtype, scratch)


def _widen_block(src: Array, dtype: str, out: Array) -> None:
    if dtype not in HALF:
        np.copyto(out, src)
    elif _halves is not None:
        _halves.widen(KINDS[dtype], out, src)
    elif dtype == "bfloat16":
        bits = out.view(np.uint32)
        np.copyto(bits, src)
        np.left_shift(bits, np.uint32(16), out=bits)
    else:
        np.copyto(out, src)
        if _has_nan(out):
            bits = out.view(np.uint32)
            bits[np.isnan(out)] |= np.uint32(_FLOAT32_QUIET_BIT)


def _narrow_block(src: Array, out: Array, dtype: str, scratch: Array) -> None:
    if dtype not in HALF:
        np.copyto(out, src)
    elif _halves is not None:
        _halves.narrow(KINDS[dtype], out, src)
    elif dtype == "bfloat16":
        # Add half a unit of the last kept place, less one if that place is even, and cut: round to nearest even.
        # The carry runs into the exponent, up to infinity, as it should.
        bits, rounded = src.view(np.uint32), scratch[: src.size]
        np.right_shift(bits, np.uint32(16), out=rounded)
        np.bitwise_and(rounded, np.uint32(1), out=rounded)
        np.add(rounded, np.uint32(0x7FFF), out=rounded)
        np.add(rounded, bits, out=rounded)
        np.right_shift(rounded, np.uint32(16), out=rounded)
        np.copyto(out, rounded, casting="unsafe")
        if _has_nan(src):
            out[np.isnan(src)] = _BFLOAT16_NAN
    else:
        np.copyto(out, src, casting="same_kind")
        if _has_nan(src):
            out.view(np.uint16)[np.isnan(src)] = _FLOAT16_NAN


def _has_nan(block: Array) -> bool:
    return block.size > 0 and bool(np.isnan(np.maximum.reduce(block)))


def _float32_and_bits(count: int) -> tuple[Array, Array]:
    length = _block_length(count)
    return np.empty(length, np.float32), np.empty(length, np.uint32)


def _block_length(count: int, itemsize: int = 4) -> int:
    return min(count, max(1, BLOCK_BYTES // itemsize))


def _blocks(count: int, itemsize: int = 4) -> Iterator[slice]:
    """Slices that cover ``range(count)``, each of at most ``BLOCK_BYTES``."""
    length = _block_length(count, itemsize)
    return (slice(start, min(start + length, count)) for start in range(0, count, length or 1))


def _storage(dtype: str) -> np.dtype[Any]:
    found = STORAGE.get(dtype)
    if found is None:
        raise DTypeMismatchError(f"dtype {dtype!r} is not one that kvmpi carries: {', '.join(STORAGE)}")
    return found


def _check_storage(vector: Array, dtype: str) -> None:
    storage = _storage(dtype)
    if vector.dtype != storage:
        raise DTypeMismatchError(f"a vector of {dtype} is kept as {storage}, this one is {vector.dtype}")


def _check_length(a: Array, b: Array) -> None:
    if a.shape != b.shape or a.ndim != 1:  # NumPy would broadcast a vector of one element
        raise ShapeMismatchError(f"vectors of shapes {a.shape} and {b.shape}: expected one dimension and equal lengths")


def _check(dst: Array, src: Array) -> None:
    _check_length(dst, src)
    if dst.dtype != src.dtype:
        raise DTypeMismatchError(f"vectors are kept as {dst.dtype} and {src.dtype}: expected the same")


def _check_float32(vector: Array, name: str) -> None:
    if vector.dtype != np.float32:
        raise DTypeMismatchError(f"{name} is {vector.dtype}: expected float32")


def _check_half_or_float32(vector: Array, dtype: str, vector32: Array) -> None:
    if ACCUMULATE.get(dtype) != "float32":
        raise DTypeMismatchError(f"dtype {dtype!r} is not converted: expected float16, bfloat16 or float32")
    _check_storage(vector, dtype)
    _check_length(vector, vector32)
