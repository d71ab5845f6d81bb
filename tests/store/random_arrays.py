"""Arrays of every layout for random programs, and whether a call has written beside them."""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

try:
    if "--without-torch" in sys.argv:  # importing it takes longer than all that a worker does with it
        raise ImportError
    import torch
except ImportError:
    torch = None  # type: ignore[assignment]

#: What is between and around the elements of an array.
BESIDE = 77


class Array:
    """``array`` is a piece of ``base``, by ``take``; ``kept`` is what base was."""

    def __init__(self, base: Any, take: Callable[[Any], Any], numbers: Any) -> None:
        self.base, self._take = base, take
        self.array = take(base)
        self.writable = not isinstance(self.array, np.ndarray) or self.array.flags.writeable
        self.fill(numbers)

    def fill(self, numbers: Any) -> None:
        """Put numbers there, whatever was there; one number goes everywhere."""
        target = self._take(self.base)
        numbers = np.asarray(numbers)
        numbers = numbers.reshape(tuple(target.shape)) if numbers.ndim else np.full(tuple(target.shape), numbers)
        if isinstance(target, np.ndarray):
            if not target.flags.writeable:
                target = target.view()
                target.flags.writeable = True
            with np.errstate(all="ignore"):
                target[...] = numbers.astype(target.dtype)
        else:
            wanted = torch.from_numpy(np.array(numbers, np.float64 if target.is_floating_point() else np.int64))
            with torch.no_grad():
                target.copy_(wanted)
        self.kept = copied(self.base)

    def numbers(self) -> Any:
        """What is there, flat."""
        return numbers_of(self.array)

    def unchanged(self) -> bool:
        return same(self.base, self.kept)

    def untouched_beside(self) -> bool:
        now, before = copied(self.base), copied(self.kept)
        for base in (now, before):
            piece = self._take(base)
            if isinstance(piece, np.ndarray):
                if not piece.flags.writeable:
                    return self.unchanged()
                piece[...] = 0
            else:
                with torch.no_grad():
                    piece.zero_()
        return same(now, before)


def numbers_of(array: Any) -> Any:
    if not isinstance(array, np.ndarray):
        array = array.detach().resolve_neg()
        array = (array.double() if array.is_floating_point() else array.long()).numpy()
    return np.ascontiguousarray(array).reshape(-1).astype(np.float64 if array.dtype.kind == "f" else np.int64)


def copied(base: Any) -> Any:
    return base.copy() if isinstance(base, np.ndarray) else base.detach().clone()


def same(a: Any, b: Any) -> bool:
    """As bits, so that what nobody has written counts too."""
    if not isinstance(a, np.ndarray):
        if not a.numel():
            return True
        a, b = (
            t.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).numpy()
            for t in (a, b)
        )
    return bool(np.array_equal(a.reshape(-1).view(np.uint8), b.reshape(-1).view(np.uint8)))


def _all(base: Any) -> Any:
    return base[...]


def _numpy(rng: random.Random, shape: tuple[int, ...], dtype: str, out: bool) -> tuple[Any, Callable[[Any], Any]]:
    count = int(np.prod(shape, dtype=np.int64))
    kind = rng.choice(["plain", "plain", "piece", "fortran", "strided", "backwards", "unaligned", "swapped", "fixed"])
    if kind == "fortran":
        return np.full(shape, BESIDE, dtype, order="F"), _all
    if kind == "strided" and shape:
        base = np.full((*shape[:-1], 2 * shape[-1] + 1), BESIDE, dtype)
        return base, lambda base: base[..., 1 : 2 * shape[-1] + 1 : 2]
    if kind == "backwards" and shape:
        return np.full(shape, BESIDE, dtype), lambda base: base[::-1]
    if kind == "swapped" and len(shape) > 1:
        return np.full(shape[::-1], BESIDE, dtype), lambda base: base.T
    if kind == "piece":
        before = rng.randrange(1, 70)
        base = np.full(count + before + 5, BESIDE, dtype)
        return base, lambda base: base[before : before + count].reshape(shape)
    if kind == "unaligned":
        nbytes, offset = count * np.dtype(dtype).itemsize, rng.randrange(1, 8)
        base = np.full(nbytes + 9, BESIDE, np.uint8)
        return base, lambda base: base[offset : offset + nbytes].view(dtype).reshape(shape)
    if kind == "fixed" and not out:

        def fixed(base: Any) -> Any:
            view = base.view()
            view.flags.writeable = False
            return view

        return np.full(shape, BESIDE, dtype), fixed
    return np.full(shape, BESIDE, dtype), _all


def _torch(rng: random.Random, shape: tuple[int, ...], dtype: str, out: bool) -> tuple[Any, Callable[[Any], Any]]:
    kind = rng.choice(["plain", "plain", "piece", "strided", "swapped", "gradient", "negative"])
    full = functools.partial(torch.full, fill_value=BESIDE, dtype=getattr(torch, dtype))
    count = int(np.prod(shape, dtype=np.int64))
    if kind == "piece":
        before = rng.randrange(1, 70)
        return full((count + before + 5,)), lambda base: base[before : before + count].reshape(shape)
    if kind == "strided" and shape:
        return full((*shape[:-1], 2 * shape[-1] + 1)), lambda base: base[..., 1 : 2 * shape[-1] + 1 : 2]
    if kind == "swapped" and len(shape) > 1:
        order = tuple(reversed(range(len(shape))))
        return full(shape[::-1]), lambda base: base.permute(order)
    if kind == "gradient" and dtype not in ("int32", "int64", "uint8"):
        return full(shape), lambda base: base.detach().requires_grad_()
    if kind == "negative" and dtype not in ("uint8",):
        return full(shape), torch._neg_view
    return full(shape), lambda base: base


def make(rng: random.Random, kv: Any, shape: tuple[int, ...], dtype: str, numbers: Any, *, out: bool = False) -> Array:
    """An array of some layout and library, with these numbers (``BESIDE`` elsewhere)."""
    of_torch = torch is not None and (dtype == "bfloat16" or rng.random() < 0.3)
    if rng.random() < 0.3:  # memory of the store
        count = int(np.prod(shape, dtype=np.int64))
        before, after = rng.choice([(0, 0), (0, 7), (64, 3), (5, 0)])
        base = kv.empty(before + count + after, getattr(torch, dtype) if of_torch else dtype)
        base[:] = BESIDE
        return Array(base, lambda base: base[before : before + count].reshape(shape), numbers)
    base, take = (_torch if of_torch else _numpy)(rng, shape, dtype, out)
    return Array(base, take, numbers)
