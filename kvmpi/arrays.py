"""The one place that knows NumPy, torch and CuPy: a user's array becomes a flat ``Vector``."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvmpi.errors import DTypeMismatchError, UnsupportedError

#: What kvmpi carries, and the NumPy dtype that holds it (bfloat16 as its raw bits).
DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(np.uint16),
    "int8": np.dtype(np.int8),
    "int16": np.dtype(np.int16),
    "int32": np.dtype(np.int32),
    "int64": np.dtype(np.int64),
    "uint8": np.dtype(np.uint8),
}

Buffer = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Vector:
    """A flat, contiguous view or copy of an array.

    ``buffer`` has shape ``(count,)``: a NumPy array in the storage dtype, or a CuPy array when ``device`` is not "cpu".
    ``shared`` tells whether it is the array's own memory, so that writing to it writes to the array.
    """

    buffer: Any
    dtype: str
    device: str
    shared: bool

    @property
    def count(self) -> int:
        return int(self.buffer.size)

    @property
    def nbytes(self) -> int:
        return int(self.buffer.nbytes)

    @property
    def on_host(self) -> bool:
        return self.device == "cpu"


def _library(array: Any) -> str:
    """ "numpy", "torch" or "cupy"; anything else is an error."""
    if isinstance(array, np.ndarray):
        return "numpy"
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return "torch"
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(array, cupy.ndarray):
        return "cupy"
    raise DTypeMismatchError(
        f"expected a NumPy array, a torch tensor or a CuPy array, got {type(array).__name__}; "
        "wrap numbers and lists with numpy.asarray"
    )


def is_array(value: Any) -> bool:
    """Whether ``value`` is an array that kvmpi can carry."""
    try:
        _library(value)
    except DTypeMismatchError:
        return False
    return True


def shape_of(array: Any) -> tuple[int, ...]:
    """The array's shape.

    Raises:
        DTypeMismatchError: ``array`` is no array.
    """
    _library(array)
    return tuple(int(n) for n in array.shape)


def dtype_of(array: Any) -> str:
    """The name of the array's dtype.

    Raises:
        DTypeMismatchError: no array, a dtype that kvmpi does not carry, or foreign byte order.
    """
    library = _library(array)
    name = str(array.dtype).removeprefix("torch.") if library == "torch" else array.dtype.name
    if name not in DTYPES or (library == "numpy" and not array.dtype.isnative):
        raise DTypeMismatchError(
            f"dtype {array.dtype} is not carried; use one of {', '.join(DTYPES)}, native byte order"
        )
    return name


def read(array: Any) -> Vector:
    """The array as a flat vector for reading; copied only where its memory is not contiguous."""
    library, dtype = _library(array), dtype_of(array)
    if library == "torch":
        return _read_torch(array, dtype)
    contiguous = bool(array.flags.c_contiguous)
    if library == "numpy":
        flat = array.reshape(-1) if contiguous else np.ascontiguousarray(array).reshape(-1)
        return Vector(flat, dtype, "cpu", contiguous and bool(array.flags.writeable))
    return Vector(array.reshape(-1), dtype, f"cuda:{array.device.id}", contiguous)


def _read_torch(tensor: Any, dtype: str) -> Vector:
    torch = sys.modules["torch"]
    if tensor.layout is not torch.strided:
        raise UnsupportedError(f"torch layout {tensor.layout} is not carried; call to_dense() first")
    tensor = tensor.detach()
    contiguous = tensor.is_contiguous()
    flat = tensor.reshape(-1) if contiguous else tensor.contiguous().reshape(-1)
    if dtype == "bfloat16":
        flat = flat.view(torch.int16)
    if tensor.device.type == "cpu":
        buffer = flat.numpy()
        return Vector(buffer.view(np.uint16) if dtype == "bfloat16" else buffer, dtype, "cpu", contiguous)
    if tensor.device.type != "cuda":
        raise UnsupportedError(f"torch device {tensor.device} is not carried; use cpu or cuda")
    import cupy

    buffer = cupy.asarray(flat)
    return Vector(buffer.view(cupy.uint16) if dtype == "bfloat16" else buffer, dtype, str(tensor.device), contiguous)


def check_writable(array: Any) -> None:
    """Raise ``UnsupportedError`` if results cannot be written into ``array``."""
    if _library(array) == "numpy" and not array.flags.writeable:
        raise UnsupportedError("out is a read-only NumPy array; pass one that can be written")


def write(array: Any, flat: Buffer) -> None:
    """Copy ``flat``, a host buffer in the storage dtype of ``array``, into the array, whatever its layout or device."""
    library = _library(array)
    if library == "numpy":
        np.copyto(array, flat.reshape(array.shape))
        return
    target = read(array)
    if target.shared and target.on_host:
        np.copyto(target.buffer, flat)
    elif library == "torch":
        torch = sys.modules["torch"]
        source = torch.from_numpy(flat.view(np.int16) if dtype_of(array) == "bfloat16" else flat)
        if dtype_of(array) == "bfloat16":
            source = source.view(torch.bfloat16)
        array.detach().copy_(source.reshape(array.shape))
    else:
        array.reshape(-1)[...] = sys.modules["cupy"].asarray(flat)


def empty(shape: tuple[int, ...], dtype: Any, device: str | None = None) -> Any:
    """An uninitialised array: a torch tensor for a torch dtype or bfloat16, a CuPy array on a device, else NumPy.

    Raises:
        DTypeMismatchError: a dtype that kvmpi does not carry.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(dtype, torch.dtype):
        return torch.empty(shape, dtype=dtype, device=device or "cpu")
    name = dtype if isinstance(dtype, str) else np.dtype(dtype).name
    if name not in DTYPES:
        raise DTypeMismatchError(f"dtype {dtype} is not carried; use one of {', '.join(DTYPES)}")
    if name == "bfloat16":
        from torch import bfloat16
        from torch import empty as torch_empty

        return torch_empty(shape, dtype=bfloat16, device=device or "cpu")
    if device not in (None, "cpu"):
        import cupy

        with cupy.cuda.Device(int(device.partition(":")[2] or 0)):
            return cupy.empty(shape, dtype=DTYPES[name])
    return np.empty(shape, dtype=DTYPES[name])


def wrap(flat: Buffer, shape: tuple[int, ...], dtype: str, like: str) -> Any:
    """A host buffer in storage dtype as an array of the library ``like`` ("torch", else NumPy) that shares its memory."""
    if like != "torch" and dtype != "bfloat16":
        return flat.reshape(shape)
    import torch

    if dtype == "bfloat16":
        return torch.from_numpy(flat.view(np.int16)).view(torch.bfloat16).reshape(shape)
    return torch.from_numpy(flat).reshape(shape)


def library_of(array: Any) -> str:
    """ "numpy", "torch" or "cupy"."""
    return _library(array)
