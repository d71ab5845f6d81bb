"""Arrays on the device under test, of CuPy and of torch, with numbers whose sums are exact in every dtype."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from device_checks import DEVICE, ON_GPU

if ON_GPU:
    import cupy as xp
else:
    xp = np

DTYPES = ("float32", "float64", "float16", "bfloat16", "int8", "int16", "int32", "int64", "uint8")
HALVES = ("float16", "bfloat16")


def numbers(shape: tuple[int, ...] | int, *salts: int, dtype: str = "float32") -> np.ndarray:
    """By index and salts; whole ones for integers, else multiples of 1/2, from 0 to 2."""
    count = int(np.prod(shape))
    found = (np.arange(count) * 7 + sum((i + 1) * 3 * salt for i, salt in enumerate(salts))) % 5
    return (found / (1 if "int" in dtype else 2)).reshape(shape)


def array(values: np.ndarray, dtype: str = "float32", library: str = "cupy", device: str = DEVICE) -> Any:
    """``values`` on the device, in C order; bfloat16 is torch's."""
    if library == "torch" or dtype == "bfloat16":
        return torch.tensor(values).to(getattr(torch, dtype)).to(device)
    host = np.array(values, dtype)
    return host if device == "cpu" else xp.asarray(host)


def blank(shape: tuple[int, ...], dtype: str = "float32", library: str = "cupy", device: str = DEVICE) -> Any:
    return array(np.full(shape, 77), dtype, library, device)


def transposed(shape: tuple[int, ...], dtype: str, library: str) -> Any:
    """An array of this shape whose memory lies in the order of Fortran."""
    made = blank(shape[::-1], dtype, library)
    return made.permute(tuple(range(made.dim()))[::-1]) if isinstance(made, torch.Tensor) else made.T


def strided(shape: tuple[int, ...], dtype: str, library: str) -> Any:
    """Every other element of the last dimension of something larger."""
    return blank((*shape[:-1], 2 * shape[-1]), dtype, library)[..., ::2] if shape else blank(shape, dtype, library)


def host(found: Any) -> np.ndarray:
    """What an array holds, as float64."""
    if isinstance(found, torch.Tensor):
        return found.detach().double().cpu().numpy()
    return (found if isinstance(found, np.ndarray) else found.get()).astype("f8")


def same(found: Any, expected: np.ndarray, what: object) -> None:
    np.testing.assert_array_equal(host(found), expected, err_msg=str(what))


def refill(found: Any, values: np.ndarray) -> None:
    """Other numbers in the same memory."""
    if isinstance(found, torch.Tensor):
        found.copy_(torch.tensor(values))
    else:
        found[...] = xp.asarray(values.astype(found.dtype))
