"""Gradients through collectives: those of Horovod, to its scale (docs/horovod.md)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

#: From tensors to as many others.
Run = Callable[..., tuple[torch.Tensor, ...]]


class _Collective(torch.autograd.Function):
    """A call of all ranks whose gradient is another one, so that all of them must go back through it, or none."""

    @staticmethod
    def forward(context: Any, run: Run, back: Run, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        context.back = back
        return run(*tensors)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:  # type: ignore[override]
        return None, None, *context.back(*gradients)


def through(run: Run, back: Run, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """``run(*tensors)``; where autograd looks on, ``back`` makes gradients of the tensors from those of the results."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return _Collective.apply(run, back, *tensors)
    return run(*tensors)
