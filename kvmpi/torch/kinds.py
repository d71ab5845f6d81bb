"""Which parameters have sparse gradients, alike on all workers, and what stands for a gradient that is missing."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvmpi.store import KVStore


class GradientKinds:
    """The kind of gradient of each parameter: dense, or rows once any worker has had rows.

    Args:
        kv: whose workers go through the same steps; None: this worker is alone.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], kv: KVStore | None) -> None:
        self._tensors, self._kv = tensors, kv
        self._sparse: set[int] = set()
        # Those of which no worker has had a gradient; None: before the first step.
        self._unknown: set[int] | None = None
        self._zeros: dict[int, torch.Tensor] = {}

    def is_sparse(self, index: int) -> bool:
        """Whether the gradient of a parameter travels as rows."""
        return index in self._sparse

    def look_at(self, indices: Sequence[int]) -> None:
        """Take note of this worker's own gradients."""
        for i in indices:
            grad = self._tensors[i].grad
            if grad is not None and _has_rows(grad) != (i in self._sparse):
                self._sparse ^= {i}

    def learn(self, indices: Sequence[int]) -> None:
        """Learn whether gradients are sparse that this worker has not had yet, from one that has.

        Collective over those whose gradients are summed, as long as there are any that nobody has had.
        """
        kv = self._kv
        if kv is not None and kv.is_capable("async"):
            kv = kv.client if kv.mpi_size > 1 else None
        if kv is None or kv.num_workers == 1:
            return
        if self._unknown is None:
            # Where a client goes on, the others may have learnt it long ago.
            again = self._kv is not None and self._kv.resumed_step > 0
            self._unknown = set() if again else set(range(len(self._tensors)))
        unknown = [i for i in indices if i in self._unknown]
        found = {i: self._tensors[i].grad for i in unknown}
        if not unknown:
            return
        if not kv.any(any(grad is None for grad in found.values())):
            self._unknown.difference_update(unknown)
            return
        for i, grad in found.items():
            if kv.any(grad is not None and _has_rows(grad)):
                self._sparse.add(i)
                self._unknown.discard(i)
            elif kv.any(grad is not None):
                self._unknown.discard(i)

    def gradient(self, index: int) -> torch.Tensor:
        """The gradient of a parameter to be pushed; without one, zeros, which nobody may write to, or no rows."""
        tensor = self._tensors[index]
        if tensor.grad is not None:
            return tensor.grad
        if index in self._sparse:
            return no_rows(tensor)
        if index not in self._zeros:
            self._zeros[index] = torch.zeros_like(tensor)
        return self._zeros[index]

    def fill_in(self, index: int) -> None:
        """Give a parameter without a gradient one that adds nothing, to be written to."""
        tensor = self._tensors[index]
        if tensor.grad is None:
            tensor.grad = no_rows(tensor) if index in self._sparse else torch.zeros_like(tensor)


def no_rows(like: torch.Tensor) -> torch.Tensor:
    """A sparse tensor of the shape, dtype and device of ``like``, without rows."""
    ids = torch.empty((1, 0), dtype=torch.int64, device=like.device)
    values = torch.empty((0, *like.shape[1:]), dtype=like.dtype, device=like.device)
    return torch.sparse_coo_tensor(ids, values, like.shape, check_invariants=False)


def _has_rows(gradient: torch.Tensor) -> bool:
    return gradient.layout is not torch.strided
