"""Sums of device vectors into host memory and copies back, with plain CuPy; import it when there is a device array.

A device vector is a one-dimensional C-contiguous ``cupy.ndarray`` in the storage dtype of ``kernels.host``.
Both functions order themselves after the work on the current stream of each vector's device, and return when
the host memory may be read, or used again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cupy
import numpy as np
import numpy.typing as npt

from kvmpi.kernels.host import HALF

#: Elements that are summed at a time: bounds the memory that temporaries take on the device.
BLOCK_LENGTH = 1 << 24


def sum_vectors_to_host(dst_host: npt.NDArray[Any], sources_device: Sequence[Any], dtype: str) -> None:
    """``dst_host = sources_device[0] + ...``, summed from left to right on the device of the first source.

    Half types accumulate in float32 and round once to nearest even, to the same bits as in ``host.sum_vectors``.
    """
    assert sources_device, "the sum of no vectors"
    ready = []
    for src in sources_device:
        with src.device:
            ready.append(cupy.cuda.get_current_stream().record())
    with sources_device[0].device:
        stream = cupy.cuda.get_current_stream()
        for event in ready:
            stream.wait_event(event)
        for start in range(0, dst_host.size, BLOCK_LENGTH):
            part = slice(start, min(start + BLOCK_LENGTH, dst_host.size))
            total = _sum_block([src[part] for src in sources_device], dtype)
            total.get(stream=stream, out=dst_host[part])
        stream.record().synchronize()


def copy_to_device(dst_device: Any, src_host: npt.NDArray[Any]) -> None:
    """``dst_device = src_host``, on the current stream of the device; waits until ``src_host`` may be used again."""
    with dst_device.device:
        stream = cupy.cuda.get_current_stream()
        dst_device.set(src_host, stream=stream)
        stream.record().synchronize()


def _sum_block(sources: Sequence[Any], dtype: str) -> Any:
    if len(sources) == 1:
        return sources[0]
    total = _widened(sources[0], dtype)
    for src in sources[1:]:
        # asarray copies a vector of another device to this one.
        total = total + _widened(cupy.asarray(src), dtype)
    return _narrowed(total, dtype)


def _widened(src: Any, dtype: str) -> Any:
    if dtype == "bfloat16":
        return (src.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return src.astype(np.float32) if dtype in HALF else src


def _narrowed(total: Any, dtype: str) -> Any:
    if dtype == "bfloat16":
        bits = total.view(np.uint32)
        rounded = (bits + ((bits >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF)) >> np.uint32(16)
        return cupy.where(cupy.isnan(total), np.uint32(0x7FC0), rounded).astype(np.uint16)
    if dtype == "float16":
        return cupy.where(cupy.isnan(total), np.uint16(0x7E00), total.astype(np.float16).view(np.uint16)).view(
            np.float16
        )
    return total
