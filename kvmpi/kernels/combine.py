"""Reductions of host vectors other than sums: products, extremes, bits. Vectors are those of ``kvmpi.kernels.host``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from kvmpi.errors import DTypeMismatchError, UnsupportedError
from kvmpi.kernels import host

Array = npt.NDArray[Any]

_UFUNCS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "sum": np.add,
        "product": np.multiply,
        "min": np.minimum,
        "max": np.maximum,
        "band": np.bitwise_and,
        "bor": np.bitwise_or,
        "bxor": np.bitwise_xor,
    }
)

#: The names of the reductions.
OPERATIONS = tuple(_UFUNCS)
_BITWISE = frozenset({"band", "bor", "bxor"})


def check(op: str, dtype: str) -> None:
    """Raise unless vectors of ``dtype`` can be combined by ``op``.

    Raises:
        UnsupportedError: no such operation.
        DTypeMismatchError: bits of numbers that are no integers.
    """
    if op not in _UFUNCS:
        raise UnsupportedError(f"reduction {op!r}; known: {', '.join(OPERATIONS)}")
    if op in _BITWISE and (host.STORAGE[dtype].kind == "f" or dtype in host.HALF):
        raise DTypeMismatchError(f"{op} of {dtype}: bits are combined of integers only")


def combine(dst: Array, sources: Sequence[Array], dtype: str, op: str) -> None:
    """``dst = sources[0] op sources[1] op ...``, from left to right, all of ``dtype`` and of one length.

    Half types are combined in float32 and rounded once; integers wrap around; a NaN in any source is a NaN in the
    result. ``dst`` may be the first source and overlaps no other.

    Cost: n reads and n writes of a vector; for half types two float32 vectors of scratch.
    """
    check(op, dtype)
    ufunc = _UFUNCS[op]
    first, *others = sources
    with np.errstate(all="ignore"):
        if dtype in host.HALF and others:
            total, term = np.empty(dst.size, np.float32), np.empty(dst.size, np.float32)
            host.widen(first, dtype, total)
            for source in others:
                host.widen(source, dtype, term)
                ufunc(total, term, out=total)
            host.narrow(total, dst, dtype)
            return
        if dst.ctypes.data != first.ctypes.data:
            np.copyto(dst, first)
        for source in others:
            ufunc(dst, source, out=dst)
