"""The one place that knows NumPy, torch and CuPy: a user's array becomes a flat ``Vector``."""

from __future__ import annotations

import ctypes
import math
import operator
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvmpi.errors import ConfigError, DTypeMismatchError, UnsupportedError

#: What kvmpi carries, and the NumPy dtype that holds it (bfloat16 as its raw bits).
DTYPES: Mapping[str, np.dtype[Any]] = MappingProxyType(
    {
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
)

#: The way back for NumPy and CuPy, by dtype: names may lie (">f4", or a package that adds a "bfloat16" to NumPy).
_NAMES = {dtype: name for name, dtype in DTYPES.items() if name != "bfloat16"}

#: By type and by dtype, as they come: every array of every call is asked.
_LIBRARIES: dict[type, str] = {np.ndarray: "numpy"}
_TORCH_NAMES: dict[Any, str] = {}

Buffer = npt.NDArray[Any]


class Vector(msgspec.Struct, frozen=True):
    """A flat, contiguous view or copy of an array.

    ``buffer`` has shape ``(count,)``: a NumPy array in the storage dtype, or a CuPy array when ``device`` is not "cpu".
    ``shared`` tells whether it is the array's own memory, which changes with it; a read-only array's may, too, through
    another view. ``ready`` is the event from which on a device's memory holds what the array did when it was read.
    """

    buffer: Any
    dtype: str
    device: str
    shared: bool
    ready: Any = None

    @property
    def count(self) -> int:
        return int(self.buffer.size)

    @property
    def nbytes(self) -> int:
        return int(self.buffer.nbytes)

    @property
    def address(self) -> int:
        """Where its memory begins."""
        return address_of(self.buffer) if self.on_host else int(self.buffer.data.ptr)

    @property
    def on_host(self) -> bool:
        return self.device == "cpu"

    def settled(self) -> Any:
        """``buffer``, once the device has computed what is in it. Waits for that, and does not keep the core."""
        if self.ready is not None:
            self.ready.synchronize()
        return self.buffer

    def copied(self) -> Vector:
        """The same in memory of its own."""
        buffer = self.settled().copy()
        return Vector(buffer, self.dtype, self.device, False, fence(buffer))


def address_of(buffer: Buffer) -> int:
    """Where a contiguous host array begins."""
    try:  # which takes a quarter of the time of the other way
        return ctypes.addressof(ctypes.c_char.from_buffer(buffer))  # type: ignore[arg-type]
    except (TypeError, ValueError):  # it is read-only, or has no elements
        return int(buffer.__array_interface__["data"][0])


def _library(array: Any) -> str:
    """ "numpy", "torch" or "cupy"; anything else is an error."""
    kind = type(array)
    found = _LIBRARIES.get(kind)
    if found is None:
        found = _LIBRARIES[kind] = _library_of_kind(array)
    return found


def _library_of_kind(array: Any) -> str:
    if isinstance(array, np.ndarray) and not isinstance(array, np.ma.MaskedArray):
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
        UnsupportedError: a torch tensor of a layout or on a device that kvmpi does not carry.
    """
    library = _library(array)
    if library == "torch":
        _check_torch(array)
        found = _TORCH_NAMES.get(array.dtype)
        if found is None and (name := str(array.dtype).removeprefix("torch.")) in DTYPES:
            found = _TORCH_NAMES[array.dtype] = name
    else:
        found = _NAMES.get(array.dtype)
    if found is None:
        raise DTypeMismatchError(
            f"dtype {array.dtype} of {library} is not carried; use one of {', '.join(DTYPES)} "
            "(bfloat16 is torch's), native byte order"
        )
    return found


def _check_torch(tensor: Any) -> None:
    torch = sys.modules["torch"]
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:  # Python code is in its memory's place
        raise UnsupportedError(
            f"a tensor of {type(tensor).__qualname__} is not carried, as it has no memory of its own; pass the plain "
            "tensor that it holds (to_local() of a DTensor)"
        )
    if tensor.layout is not torch.strided:
        raise UnsupportedError(f"torch layout {tensor.layout} is not carried; call to_dense() first")
    if not (tensor.is_cpu or tensor.is_cuda):
        raise UnsupportedError(f"torch device {tensor.device} is not carried; use cpu or cuda")
    if not tensor.data_ptr() and tensor.numel():  # NumPy would make memory for it, and call that the tensor's
        raise UnsupportedError(
            "a torch tensor whose memory has been freed is not carried, as FSDP frees that of parameters between layers"
        )


def read(array: Any) -> Vector:
    """The array as a flat vector for reading; copied only where its memory is not contiguous, or not aligned."""
    library, dtype = _library(array), dtype_of(array)
    if library == "torch":
        return _read_torch(array, dtype)
    contiguous = bool(array.flags.c_contiguous)
    if library == "numpy":
        # A matrix stays two-dimensional, whatever one asks of it.
        plain = array if type(array) is np.ndarray else array.view(np.ndarray)
        contiguous = contiguous and bool(plain.flags.aligned)
        flat = plain.reshape(-1) if contiguous else np.array(plain, order="C").reshape(-1)
        return Vector(flat, dtype, "cpu", contiguous)
    with array.device:
        flat = array.reshape(-1)
    # Whoever sums it knows nothing of this thread's stream.
    return Vector(flat, dtype, f"cuda:{array.device.id}", contiguous, fence(array))


def flat(array: Any) -> Buffer:
    """The memory of an array that has a ``layout_of``, as a vector of storage dtype which keeps it."""
    return array.reshape(-1) if type(array) is np.ndarray else read(array).buffer


def plain(array: Any, shape: tuple[int, ...], dtype: str) -> Buffer | None:
    """The memory of an array, as of ``memory_of``, if it has this shape and dtype; None for any other, or none.

    Whoever reads that says what is wrong with it.
    """
    if type(array) is np.ndarray:
        fits = array.shape == shape and array.flags.carray and _NAMES.get(array.dtype) == dtype
        return array.reshape(-1) if fits else None
    if type(array) not in _LIBRARIES or array.shape != shape:
        return None
    try:
        memory = memory_of(array) if dtype_of(array) == dtype else None
    except (DTypeMismatchError, UnsupportedError):
        return None
    return None if memory is None else memory.buffer


def may_be_on_devices() -> bool:
    """Whether any array can be: not before CuPy is imported, or torch has begun to use a GPU."""
    torch = sys.modules.get("torch")
    return "cupy" in sys.modules or (torch is not None and torch.cuda.is_initialized())


def fence(array: Any) -> Any:
    """What is queued by now on the current stream of the array's device, as an event; None for an array of the host.

    ``event.synchronize()`` waits for it in any thread, and sleeps meanwhile.
    """
    library = _library(array)
    if library == "numpy" or (library == "torch" and not array.is_cuda):
        return None
    if library == "torch":
        torch = sys.modules["torch"]
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(array.device))
        return event
    cupy = sys.modules["cupy"]
    with array.device:
        event = cupy.cuda.Event(block=True, disable_timing=True)
        event.record(cupy.cuda.get_current_stream())
    return event


def memory_of(array: Any) -> Vector | None:
    """The array's own memory as a flat vector, where that is contiguous, writable and on the host; else None."""
    library = _library(array)
    if library == "numpy":
        plain = bool(array.flags.c_contiguous and array.flags.writeable and array.flags.aligned)
    else:
        plain = library == "torch" and array.is_cpu and array.is_contiguous() and not array.is_neg()
        plain = plain and _is_aligned(array)
    return read(array) if plain else None


def layout_of(array: Any) -> tuple[Any, ...] | None:
    """Where elements lie and what they are, of a contiguous, writable array of the host; None for any other, or none.

    Arrays of one layout have the same memory, shape and dtype: there ``read`` and ``memory_of`` return the same.
    """
    library = _LIBRARIES.get(type(array))
    try:
        if library == "numpy":
            return (address_of(array), array.shape, array.dtype) if array.flags.carray else None
        if library != "torch" or not array.is_cpu or array.layout is not sys.modules["torch"].strided:
            return None
        return (array.data_ptr(), array.shape, array.dtype) if array.is_contiguous() and not array.is_neg() else None
    except Exception:  # a tensor that has no memory, for example: whoever reads it says so
        return None


def owner_of(array: Any) -> Any:
    """What keeps the memory that the array has now, whatever becomes of the array."""
    return array.untyped_storage() if _library(array) == "torch" else array


def memory_at(address: int, count: int, dtype: str) -> Buffer:
    """Memory of shape ``(count,)`` in storage dtype as an array, which does not keep it: it must be there when used."""
    storage = DTYPES[dtype]
    if not count:
        return np.empty(0, storage)
    memory: Any = (ctypes.c_char * (count * storage.itemsize)).from_address(address)
    return np.ndarray((count,), storage, memory)


def span_of(array: Any) -> tuple[int, int]:
    """Addresses between which an array's memory lies, those of host and devices being apart; (0, 0) for none."""
    library = _library(array)
    if not all(array.shape):
        return 0, 0
    if library == "numpy" and array.flags.carray:  # as a rule, and a third of the time
        start = address_of(array)
        return start, start + array.nbytes
    if library == "numpy":
        start, strides, itemsize = array.__array_interface__["data"][0], array.strides, array.itemsize
    elif library == "cupy":
        start, strides, itemsize = int(array.data.ptr), array.strides, array.itemsize
    else:
        start, itemsize = int(array.data_ptr()), array.element_size()
        if array.is_contiguous():
            return start, start + array.numel() * itemsize
        strides = [stride * itemsize for stride in array.stride()]
    reach = [(n - 1) * stride for n, stride in zip(array.shape, strides, strict=True)]
    return start + sum(min(0, r) for r in reach), start + sum(max(0, r) for r in reach) + itemsize


def _is_aligned(tensor: Any) -> bool:
    """Whether compiled code may read a torch tensor's elements where they are."""
    return bool(tensor.data_ptr() % tensor.element_size() == 0)


def _read_torch(tensor: Any, dtype: str) -> Vector:
    torch = sys.modules["torch"]
    if tensor.requires_grad:
        tensor = tensor.detach()
    contiguous = tensor.is_contiguous() and not tensor.is_neg()
    if not contiguous:
        tensor = tensor.resolve_neg().contiguous()
    elif not _is_aligned(tensor):
        tensor, contiguous = tensor.clone(), False
    if tensor.is_cpu:
        buffer = (tensor.view(torch.int16) if dtype == "bfloat16" else tensor).numpy().reshape(-1)
        return Vector(buffer.view(np.uint16) if dtype == "bfloat16" else buffer, dtype, "cpu", contiguous)
    return Vector(_as_cupy(tensor.reshape(-1), dtype), dtype, str(tensor.device), contiguous, fence(tensor))


def _as_cupy(flat: Any, dtype: str) -> Any:
    """The memory of a flat CUDA tensor, in storage dtype."""
    import cupy

    with cupy.cuda.Device(flat.device.index):
        if not flat.numel():
            return cupy.empty(0, DTYPES[dtype])
        found = cupy.asarray(flat.view(sys.modules["torch"].int16) if dtype == "bfloat16" else flat)
    return found.view(DTYPES[dtype])


def device_memory_of(array: Any) -> Any:
    """The array's own memory as a flat CuPy array in storage dtype, where that is contiguous and a device's; else None.

    Nothing is waited for.
    """
    library = _library(array)
    if library == "cupy":
        return array.reshape(-1) if array.flags.c_contiguous else None
    if library == "torch" and array.is_cuda and array.is_contiguous() and not array.is_neg() and _is_aligned(array):
        return _as_cupy(array.detach().reshape(-1), dtype_of(array))
    return None


def check_writable(array: Any) -> None:
    """Raise ``UnsupportedError`` if results cannot be written into ``array``."""
    library = _library(array)
    if library == "torch":
        _check_torch(array)
        if array.is_contiguous():
            return
        strides, itemsize = array.stride(), 1
        what = "a torch tensor, expanded or made by as_strided, whose elements share memory; pass a clone() of it"
    else:
        flags = array.flags
        if library == "numpy" and not flags.writeable:
            raise UnsupportedError("out is a read-only NumPy array; pass one that can be written")
        if flags.c_contiguous:
            return
        strides, itemsize = array.strides, array.itemsize
        what = "an array, broadcast or made by as_strided, whose elements share memory; pass a copy() of it"
    if _elements_meet(array.shape, strides, itemsize):
        raise UnsupportedError(f"out is {what}")


def _elements_meet(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    """Whether two elements of an array lie, in part at least, in the same memory."""
    if 0 in shape:
        return False
    reach = 0
    steps = sorted((abs(step), n) for n, step in zip(shape, strides, strict=True) if n > 1)
    for step, n in steps:
        if step < reach + itemsize:  # as nobody has it but on purpose; most of these meet, not all
            break
        reach += (n - 1) * step
    else:
        return False
    if steps[0][0] < itemsize:
        return True
    places = np.zeros(1, np.int64)
    for step, n in steps:
        places = np.add.outer(places, step * np.arange(n)).reshape(-1)
    places.sort()
    return bool((np.diff(places) < itemsize).any())


def note_writes(written: Iterable[Any]) -> None:
    """Tell autograd that the torch tensors among these change: a backward pass that needs what was there fails then, as
    after any operation in place."""
    torch = sys.modules.get("torch")
    if torch is not None and (found := [t for t in written if isinstance(t, torch.Tensor) and not t.is_inference()]):
        for tensor in found:  # which torch 2.1 does not take as a list
            torch.autograd.graph.increment_version(tensor)


def write(array: Any, flat: Buffer) -> None:
    """Copy ``flat``, a host buffer in the storage dtype of ``array``, into the array, whatever its layout or device."""
    library = _library(array)
    if library == "numpy":
        np.copyto(array, flat.reshape(array.shape))
    elif library == "torch":
        if array.is_cpu and array.is_contiguous() and not array.is_neg() and _is_aligned(array):
            np.copyto(_read_torch(array, dtype_of(array)).buffer, flat)
        else:
            array.detach().copy_(wrap(flat, shape_of(array), dtype_of(array), "torch"))
            _finish_on_device(array)
    else:
        cupy = sys.modules["cupy"]
        with array.device:
            array[...] = cupy.asarray(flat).reshape(array.shape)
            cupy.cuda.get_current_stream().synchronize()  # from here on, flat belongs to the caller


def empty(
    shape: int | Sequence[int],
    dtype: Any,
    device: str | None = None,
    allocate: Callable[[int, str], Buffer] | None = None,
) -> Any:
    """An uninitialised array: a torch tensor for a torch dtype or bfloat16, a CuPy array on a device, else NumPy.

    ``allocate(count, dtype)`` gives the memory where that is the host's.

    Raises:
        ConfigError: ``shape`` is none, or of more than any memory has.
        DTypeMismatchError: a dtype that kvmpi does not carry.
        UnsupportedError: there is no such ``device``, no CuPy for one, or no torch for bfloat16.
    """
    shape = _shape(shape)
    device = None if device is None else str(device)  # a torch.device is as good
    if device is not None and not re.fullmatch(r"(cpu|cuda)(:\d+)?", device):
        raise UnsupportedError(f"empty on {device}: there are arrays on cpu and on cuda devices, as cuda:0")
    if device is not None and device.startswith("cpu"):
        device = "cpu"
    torch = sys.modules.get("torch")
    of_torch = torch is not None and isinstance(dtype, torch.dtype)
    name = str(dtype).removeprefix("torch.") if of_torch else _name_of(dtype)
    if name not in DTYPES:
        raise DTypeMismatchError(f"dtype {dtype} is not carried; use one of {', '.join(DTYPES)}")
    if math.prod(shape) * DTYPES[name].itemsize > sys.maxsize:
        raise ConfigError(f"empty: an array of shape {shape} and {name} is larger than any memory")
    like = "torch" if of_torch or name == "bfloat16" else "numpy"
    if like == "torch":
        try:
            import torch as installed
        except ImportError:
            raise UnsupportedError(
                "empty: arrays of bfloat16 need torch, which is not installed; pip install 'kvmpi[torch]'"
            ) from None
    if device in (None, "cpu") and allocate is not None:
        return wrap(allocate(math.prod(shape), name), shape, name, like)
    if like == "torch":
        if device not in (None, "cpu"):
            _check_device(device, installed.cuda.device_count(), "torch")
        return installed.empty(shape, dtype=getattr(installed, name), device=device or "cpu")
    if device not in (None, "cpu"):
        try:
            import cupy
        except ImportError:
            raise UnsupportedError(f"empty on {device}: arrays on a GPU need CuPy, which is not installed") from None
        try:
            count = cupy.cuda.runtime.getDeviceCount()
        except cupy.cuda.runtime.CUDARuntimeError:  # there is no driver
            count = 0
        _check_device(device, count, "CuPy")
        with cupy.cuda.Device(int(device.partition(":")[2] or 0)):
            return cupy.empty(shape, dtype=DTYPES[name])
    return np.empty(shape, dtype=DTYPES[name])


def _check_device(device: str, count: int, library: str) -> None:
    """Raise unless ``device`` is one of ``count`` GPUs."""
    if int(device.partition(":")[2] or 0) >= count:
        raise UnsupportedError(f"empty on {device}: {library} finds {count} GPUs here")


def _shape(given: int | Sequence[int]) -> tuple[int, ...]:
    try:
        shape = tuple(map(operator.index, given)) if isinstance(given, Iterable) else (operator.index(given),)
    except TypeError:
        shape = (-1,)
    if min(shape, default=0) < 0:
        raise ConfigError(f"empty: shape {given!r}, expected a length, or a sequence of lengths, from 0 on")
    return shape


def is_sparse(array: Any) -> bool:
    """Whether ``array`` is a torch tensor of a sparse layout."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor) and array.layout is not torch.strided


def sparse_rows(tensor: Any) -> tuple[Any, Any]:
    """Row numbers and rows of a torch sparse tensor, as dense tensors of its own memory; numbers may repeat.

    Raises:
        UnsupportedError: it is not a COO tensor with one sparse dimension.
    """
    torch = sys.modules["torch"]
    if tensor.layout is not torch.sparse_coo or tensor.sparse_dim() != 1:
        found = f"{tensor.sparse_dim()} sparse dimensions" if tensor.layout is torch.sparse_coo else f"{tensor.layout}"
        raise UnsupportedError(
            f"a sparse tensor must be torch.sparse_coo with one sparse dimension, as to_sparse(1) makes it; got {found}"
        )
    tensor = tensor.detach()
    return tensor._indices()[0], tensor._values()


def sparse_tensor(ids: Buffer, flat: Buffer, shape: tuple[int, ...], dtype: str) -> Any:
    """A torch sparse tensor of rows ``ids`` (int64, ascending, none twice) with elements ``flat``; shares memory."""
    torch = sys.modules["torch"]
    values = wrap(flat, (ids.size, *shape[1:]), dtype, "torch")
    numbers = torch.from_numpy(ids)[None]
    found = torch.sparse_coo_tensor(numbers, values, shape, device="cpu", check_invariants=False)
    return found._coalesced_(True)


def write_sparse(tensor: Any, ids: Buffer, flat: Buffer, dtype: str) -> None:
    """Make rows ``ids`` (as of ``sparse_tensor``) all that the torch sparse tensor ``tensor`` has."""
    with sys.modules["torch"].no_grad():  # what detach gives does not follow a change of the number of rows
        tensor.copy_(sparse_tensor(ids, flat, tuple(tensor.shape), dtype))
        _finish_on_device(tensor)


def _finish_on_device(tensor: Any) -> None:
    """Return when what was written to a torch tensor is there for all streams."""
    if tensor.is_cuda:
        sys.modules["torch"].cuda.current_stream(tensor.device).synchronize()


def integers(array: Any) -> npt.NDArray[np.int64]:
    """The numbers of an array of integers, or of a list of ints, flat on the host, in memory of their own.

    Raises:
        DTypeMismatchError: they are not integers, or int64 has no such number.
    """
    if isinstance(array, list | tuple):
        try:
            array = np.array(array, np.int64 if not len(array) else None)
        except ValueError:
            raise DTypeMismatchError("expected integers, got lists of different lengths") from None
    library = _library(array)
    found = array if library == "numpy" else array.detach().cpu().numpy() if library == "torch" else array.get()
    if found.dtype.kind not in "iu":
        raise DTypeMismatchError(f"expected integers, got {array.dtype} of {library}")
    if found.dtype == np.uint64 and found.size and (largest := found.max()) > np.iinfo(np.int64).max:
        raise DTypeMismatchError(f"{largest} is too large for int64")
    return np.array(found, np.int64).reshape(-1)


def on_host(array: Any) -> Buffer:
    """A flat host copy of the array, or its own memory, in storage dtype."""
    if _library(array) == "torch":
        array = array.detach().cpu()
    elif _library(array) == "cupy":
        array = array.get()
    buffer: Buffer = read(array).buffer
    return buffer


def _name_of(dtype: Any) -> str:
    """The name that kvmpi has for what the caller calls a dtype; any other text if there is none."""
    if isinstance(dtype, str) and dtype in DTYPES:
        return dtype
    try:
        found = np.dtype(dtype)
    except TypeError:
        return str(dtype)
    return found.name if found.isnative else str(dtype)


def wrap(flat: Buffer, shape: tuple[int, ...], dtype: str, like: str) -> Any:
    """A host buffer in storage dtype as an array that shares its memory; NumPy's unless ``like`` is "torch"."""
    if like != "torch" and dtype != "bfloat16":
        return flat.reshape(shape)
    import torch

    if dtype == "bfloat16":
        return torch.from_numpy(flat.view(np.int16)).view(torch.bfloat16).reshape(shape)
    return torch.from_numpy(flat).reshape(shape)


def library_of(array: Any) -> str:
    """ "numpy", "torch" or "cupy"."""
    return _library(array)
