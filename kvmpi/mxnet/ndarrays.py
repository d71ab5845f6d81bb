"""NDArrays as NumPy arrays of the same memory, where that can be; one, a list, or a list of lists."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import mxnet as mx
import numpy as np

from kvmpi.arrays import DTYPES
from kvmpi.errors import ConfigError, DTypeMismatchError, UnsupportedError

_HERE = frozenset({"cpu", "cpu_pinned", "cpu_shared"})


def map_arrays(value: Any, convert: Callable[[Any], Any]) -> Any:
    """``value`` with its NDArrays converted: one, a list, or a list of lists."""
    if isinstance(value, list | tuple):
        return [map_arrays(item, convert) for item in value]
    return convert(value) if isinstance(value, mx.nd.NDArray) else value


def wanted(call: str, key: Any, out: Any, row_ids: Any = None) -> list[tuple[Any, Any, Any]]:
    """Each array of ``out`` with its key and its row ids, of one key or a list of them.

    Raises:
        ConfigError: lists of different lengths.
    """
    if isinstance(key, list | tuple):
        ids = row_ids if isinstance(row_ids, list | tuple) else [row_ids] * len(key)
        if not isinstance(out, list | tuple) or not len(key) == len(out) == len(ids):
            raise ConfigError(
                f"{call}: {len(key)} keys need lists of as many arrays, or lists of arrays, and of row_ids"
            )
        return [found for each in zip(key, out, ids, strict=True) for found in wanted(call, *each)]
    outs = list(out) if isinstance(out, list | tuple) else [out]
    ids = list(row_ids) if isinstance(row_ids, list | tuple) else [row_ids]
    ids = ids * len(outs) if len(ids) == 1 else ids
    if len(outs) != len(ids):
        raise ConfigError(f"{call} of key {key!r}: {len(outs)} arrays, {len(ids)} arrays of row ids")
    return [(key, array, of) for array, of in zip(outs, ids, strict=True)]


def read(array: Any) -> np.ndarray:
    """The array's memory, when MXNet has written it, or a copy."""
    if array.stype == "row_sparse":
        array = array.tostype("default")
    found = _memory(array, array.to_dlpack_for_read)
    return array.asnumpy() if found is None else found


def read_rows(array: Any) -> Any:
    """The same, or the ids and rows that an array of storage type row_sparse has."""
    return (read(array.indices), read(array.data)) if array.stype == "row_sparse" else read(array)


def times(factor: float, found: Any) -> Any:
    """A copy, multiplied, of what ``_read`` or ``read_rows`` gives; half types are multiplied as float32."""
    if isinstance(found, tuple):
        return found[0], times(factor, found[1])
    if found.dtype.kind != "f":
        raise UnsupportedError(
            f"rescale_grad has changed, and a push of {found.dtype} cannot be multiplied by {factor}"
        )
    product: np.ndarray = np.multiply(found, factor, dtype=np.promote_types(found.dtype, "f4"))
    return product.astype(found.dtype, copy=False)


class Writing:
    """NumPy arrays in place of NDArrays that are to be written; copies reach the NDArrays at the end of ``with``."""

    def __init__(self) -> None:
        self._copies: list[tuple[Any, np.ndarray]] = []

    def to(self, array: Any) -> np.ndarray:
        """The array's memory, when MXNet neither reads nor writes it any more, or a copy."""
        found = _memory(array, array.to_dlpack_for_write)
        if found is None:
            found = array.asnumpy()
            self._copies.append((array, found))
        elif found.size:
            # NumPy gives DLPack's memory out for reading only.
            address, _ = found.__array_interface__["data"]
            memory: Any = (ctypes.c_char * found.nbytes).from_address(address)
            found = np.frombuffer(memory, found.dtype).reshape(found.shape)
        return found

    def __enter__(self) -> Writing:
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        if kind is None:
            for array, copy in self._copies:
                # By way of another NDArray, since MXNet copies from main memory into its plain layout only.
                mx.nd.array(copy, array.context, array.dtype).copyto(array)


class _Capsule:
    """What ``numpy.from_dlpack`` asks for the memory."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **_: object) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0  # main memory


def _memory(array: Any, export: Callable[[], Any]) -> np.ndarray | None:
    """The memory of an NDArray, or None where it is on a device or in a layout of MXNet's own.

    Raises:
        DTypeMismatchError, UnsupportedError: kvmpi does not carry such arrays.
    """
    if array.stype != "default":
        raise UnsupportedError(
            f"an NDArray of storage type {array.stype} is not carried; call tostype('default') first"
        )
    if np.dtype(array.dtype) not in _DTYPES:
        raise DTypeMismatchError(f"NDArrays of dtype {np.dtype(array.dtype)} are not carried; use one of {_NAMES}")
    if array.context.device_type not in _HERE:
        return None
    try:
        return np.from_dlpack(_Capsule(export()))
    except mx.base.MXNetError:
        return None


_DTYPES = frozenset(dtype for name, dtype in DTYPES.items() if name != "bfloat16")
_NAMES = ", ".join(sorted(str(dtype) for dtype in _DTYPES))
