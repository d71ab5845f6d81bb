"""Tensors of torch.distributed as flat host memory, for the time of one operation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvmpi import arrays
from kvmpi.arrays import Vector
from kvmpi.errors import DTypeMismatchError, UnsupportedError
from kvmpi.kernels import host
from kvmpi.kernels.combine import OPERATIONS

Buffer = npt.NDArray[Any]

_OCTET = np.dtype(np.uint8)
#: Classes of tensors that are nothing but their memory.
_PLAIN = (torch.Tensor, torch.nn.Parameter)
#: A sum of what every rank has multiplied by the number that follows, as torch's PREMUL_SUM.
TIMES = "sum times "


@dataclass(frozen=True, slots=True)
class Flat:
    """``buffer``, shape ``(count,)``, holds what ``tensor`` does; it is the tensor's memory, or ``flat`` a copy of it.

    ``dtype`` is what kvmpi calls that of the elements, where they are to be added up. ``fence``: what was queued on the
    tensor's device before, and may still use it.
    """

    tensor: torch.Tensor
    flat: torch.Tensor
    buffer: Buffer
    dtype: str = "uint8"
    fence: Any = None

    def back(self) -> None:
        """The tensor takes what is in ``buffer`` now."""
        if self.flat is self.tensor:
            return
        if self.flat.data_ptr() == self.tensor.data_ptr() and self.tensor.device.type == "cpu":
            return
        if self.fence is not None:
            self.fence.synchronize()
        # Without a new version: who looks at it looks for others who write, and memory of the host gets none either.
        whole = self.tensor.data
        whole.copy_(self.flat.view(whole.dtype).reshape(whole.shape))
        if self.tensor.device.type == "cuda":
            # Whoever waits in another thread knows nothing of this one's stream.
            torch.cuda.current_stream(self.tensor.device).synchronize()

    @property
    def is_whole(self) -> bool:
        """Whether the elements are integers."""
        return self.buffer.dtype.kind in "iu" and self.dtype not in host.HALF

    @property
    def vector(self) -> Vector:
        """For the tensor collectives."""
        return Vector(self.buffer, self.dtype, "cpu", True)


def octets(tensor: torch.Tensor, *, reads: bool = True, writes: bool = False) -> Flat:
    """The tensor as bytes: for operations that move data, whatever it means.

    Args:
        reads: whether what the tensor holds matters; else it is only written to.
        writes: whether it is written to as well.
    Raises:
        UnsupportedError: a layout or a device that kvmpi does not carry, or elements that share memory, if it is
            written to.
    """
    if type(tensor) in _PLAIN and _lies_plainly(tensor):  # most do, and each call of torch's takes a microsecond
        if writes or not reads:
            arrays.check_writable(tensor)
        return Flat(tensor, tensor, _memory(tensor, _OCTET, tensor.nbytes))
    flat = _flat(tensor, reads, writes).view(torch.uint8)
    return Flat(tensor, flat, _memory(flat, _OCTET, flat.numel()), fence=arrays.fence(tensor))


def _lies_plainly(tensor: torch.Tensor) -> bool:
    """Whether the memory of a tensor, as it lies on the CPU, is what it holds."""
    return (
        tensor.is_cpu and tensor.layout is torch.strided and tensor.is_contiguous() and not tensor.is_complex()
        and not tensor.is_neg() and not tensor.is_quantized
    )  # fmt: skip


def numbers(tensor: torch.Tensor, op: str, *, reads: bool = True, writes: bool = False) -> Flat:
    """The tensor as numbers, or for ``bool`` as bytes that are 0 or 1; complex numbers as pairs.

    Raises:
        DTypeMismatchError: a dtype that ``op`` is not done on.
        UnsupportedError: another ``op`` than sums (``is_sum``) and those of ``combine.OPERATIONS``, or a layout or a
            device that kvmpi does not carry; as of ``octets``.
    """
    if not is_sum(op) and op not in OPERATIONS:
        raise UnsupportedError(f"reduction {op.upper()}: use one of {', '.join(OPERATIONS).upper()}, AVG")
    if tensor.is_complex() and not is_sum(op):
        raise DTypeMismatchError(f"{op} of {tensor.dtype}: complex numbers are only added up")
    flat = _flat(tensor, reads, writes)
    name = str(flat.dtype).removeprefix("torch.")
    if name == "bool":
        flat, name = flat.view(torch.uint8), "uint8"
    if name not in arrays.DTYPES:
        raise DTypeMismatchError(
            f"{op} of dtype {tensor.dtype} is not carried; use one of {', '.join(arrays.DTYPES)}, bool"
        )
    if op == "avg" and tensor.dtype == torch.bool:
        raise DTypeMismatchError(f"avg of {tensor.dtype}: truth values have no mean")
    if op.startswith(TIMES) and not flat.is_floating_point():
        raise DTypeMismatchError(f"{op} of {tensor.dtype}: only floating point is multiplied on the way")
    return Flat(tensor, flat, _memory(flat, arrays.DTYPES[name], flat.numel()), name, arrays.fence(tensor))


class _Elements:
    """The elements of a tensor, for NumPy. Whoever refers to them keeps the tensor."""

    __slots__ = ("__array_interface__", "_tensor")

    def __init__(self, tensor: torch.Tensor, dtype: np.dtype[Any], count: int) -> None:
        where = {"data": (tensor.data_ptr(), False), "shape": (count,), "typestr": dtype.str, "version": 3}
        self._tensor, self.__array_interface__ = tensor, where


def _memory(tensor: torch.Tensor, dtype: np.dtype[Any], count: int) -> Buffer:
    """What a contiguous tensor on the CPU holds, as ``count`` elements of ``dtype``, in place.

    Not ``tensor.numpy()``: torch never again resizes storage that NumPy has seen, as FSDP does with that of parameters.
    """
    if not count:
        return np.empty(0, dtype)
    return np.asarray(_Elements(tensor, dtype, count))


def is_sum(op: str) -> bool:
    """Whether ``op`` is a sum, or one that is multiplied by something: "avg" and those that begin with ``TIMES``."""
    return op in ("sum", "avg") or op.startswith(TIMES)


def reduction(tensor: torch.Tensor, op: str) -> str:
    """What ``op`` is on the elements that ``numbers`` gives: of truth values a sum is "or", a product "and".

    What a sum is multiplied by is left to the caller.
    """
    if is_sum(op):
        op = "sum"
    if tensor.dtype == torch.bool:
        return {"sum": "max", "product": "min"}.get(op, op)
    return op


def _flat(tensor: torch.Tensor, reads: bool, writes: bool) -> torch.Tensor:
    """The tensor's elements on the CPU, one-dimensional: its own memory where that is contiguous."""
    if tensor.layout is not torch.strided:
        raise UnsupportedError(f"a tensor of layout {tensor.layout} is not carried; call to_dense() first")
    if tensor.is_quantized:
        raise UnsupportedError("a quantized tensor is not carried; send its int_repr()")
    if tensor.device.type not in ("cpu", "cuda"):
        raise UnsupportedError(f"a tensor on {tensor.device} is not carried; use cpu or cuda")
    if writes or not reads:
        arrays.check_writable(tensor)
    found = tensor.detach()
    if found.is_complex():
        found = torch.view_as_real(found.resolve_conj())
    if found.device.type == "cpu" and found.is_contiguous() and not found.is_neg():
        # Not reshape(-1), which leaves a single element the stride that it has, as in a column of a batch of one.
        return found.as_strided((found.numel(),), (1,))
    # Pinned memory, of torch's pool, has the full rate of the bus.
    flat = torch.empty(found.numel(), dtype=found.dtype, device="cpu", pin_memory=found.is_cuda)
    if reads:
        flat.view(found.shape).copy_(found)
    return flat
