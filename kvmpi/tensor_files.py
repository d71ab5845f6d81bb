"""Files of safetensors, written array by array: nothing is copied first, and the caller says into which file.

Source: https://github.com/huggingface/safetensors, "Format".
"""

from __future__ import annotations

import errno
import json
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    import numpy.typing as npt

#: What is written, and looked at, at a time.
BLOCK_BYTES = 1 << 20
#: Readers of safetensors refuse a file that has more than this before its arrays.
MAX_HEADER_BYTES = 100_000_000
_DTYPES = {
    "float16": "F16", "float32": "F32", "float64": "F64", "int8": "I8", "int16": "I16", "int32": "I32",
    "int64": "I64", "uint8": "U8", "uint16": "U16", "uint32": "U32",
}  # fmt: skip


def write(file: BinaryIO, tensors: Mapping[str, npt.NDArray[Any]], metadata: Mapping[str, str]) -> tuple[int, int]:
    """Write contiguous arrays by name, and texts by name; how many bytes that were, and their CRC-32.

    Raises:
        OSError: they cannot be written.
    """
    nbytes, checksum = 0, 0
    arrays = (array.data.cast("B") for array in tensors.values() if array.size)
    for view in (memoryview(_header(tensors, metadata)), *arrays):
        for start in range(0, len(view), BLOCK_BYTES):
            piece = view[start : start + BLOCK_BYTES]
            checksum = zlib.crc32(piece, checksum)
            file.write(piece)
        nbytes += len(view)
    return nbytes, checksum


def _header(tensors: Mapping[str, npt.NDArray[Any]], metadata: Mapping[str, str]) -> bytes:
    described: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, array in tensors.items():
        begin, end = end, end + array.nbytes
        described[name] = {
            "dtype": _DTYPES[array.dtype.name], "shape": list(array.shape), "data_offsets": [begin, end]
        }  # fmt: skip
    header = json.dumps(described).encode()
    header += b" " * (-len(header) % 8)
    if len(header) > MAX_HEADER_BYTES:
        raise OSError(
            errno.EFBIG,
            f"nobody could read it: it says {len(header)} bytes of its {len(tensors)} arrays, and safetensors have "
            f"room for {MAX_HEADER_BYTES}; have fewer and larger keys, or for snapshots a larger KVMPI_CHUNK_BYTES",
        )
    return len(header).to_bytes(8, "little") + header
