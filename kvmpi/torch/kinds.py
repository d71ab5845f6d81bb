"""Which parameters have sparse gradients, alike on all workers, and what stands for a gradient that is missing."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvmpi import optim
from kvmpi.errors import UnsupportedError
from kvmpi.store import KVStore


class GradientKinds:
    """The kind of gradient of each parameter: dense, or rows once any worker has had rows.

    Where the store updates, each client learns by itself: one that is started again knows nothing of what others have
    learnt, and when. Of what no worker of it has had yet it pushes no rows, which are zeros to a round of whole arrays.

    Args:
        kv: whose workers go through the same steps; None: this worker is alone.
        in_store: the store updates.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], kv: KVStore | None, *, in_store: bool) -> None:
        self._tensors, self._kv = tensors, kv
        self._updates = kv if in_store else None
        self._by_client = kv is not None and in_store and kv.num_clients > 1
        self._learns_with = kv
        if kv is not None and (self._by_client or kv.is_capable("async")):
            self._learns_with = kv.client if kv.mpi_size > 1 else None
        self._sparse: set[int] = set()
        # Those of which nobody has had a gradient, of the client where each learns by itself.
        self._unknown = set(range(len(tensors)))
        self._zeros: dict[int, torch.Tensor] = {}
        self._takes_rows: dict[int, bool] = {}

    def is_sparse(self, index: int) -> bool:
        """Whether the gradient of a parameter travels as rows."""
        return index in self._sparse

    def is_left_to_others(self, index: int) -> bool:
        """Whether only other clients may have had a gradient of a parameter; known after ``learn``."""
        return self._by_client and index in self._unknown

    def look_at(self, indices: Sequence[int]) -> None:
        """Take note of this worker's own gradients."""
        for i in indices:
            grad = self._tensors[i].grad
            if grad is None and i in self._unknown and not self._by_client and self._updates is not None:
                # A file, or servers, may know, where the steps before this one were those of another process.
                if self._updates.pushed_by_rows(i):
                    self._sparse.add(i)
            elif grad is not None and _has_rows(grad) != (i in self._sparse):
                self._sparse ^= {i}

    def learn(self, indices: Sequence[int]) -> None:
        """Learn whether gradients are sparse that this worker has not had yet, from one that has.

        Collective over those that learn together, as long as there are any that nobody has had.
        """
        kv = self._learns_with
        unknown = [i for i in indices if i in self._unknown]
        found = {i: self._tensors[i].grad for i in unknown}
        if kv is None or kv.num_workers == 1:
            self._unknown.difference_update(i for i, grad in found.items() if grad is not None)
            return
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
                self._sparse.discard(i)
                self._unknown.discard(i)
            elif self._updates is not None and not self._by_client and kv.any(i in self._sparse):
                self._sparse.add(i)  # as the first of them knows

    def gradient(self, index: int) -> torch.Tensor:
        """The gradient of a parameter to be pushed; without one, zeros, which nobody may write to, or no rows."""
        tensor = self._tensors[index]
        if tensor.grad is not None:
            return tensor.grad
        if index in self._sparse or (self.is_left_to_others(index) and self._may_be_rows(index)):
            return no_rows(tensor)
        if index not in self._zeros:
            self._zeros[index] = torch.zeros_like(tensor)
        return self._zeros[index]

    def _may_be_rows(self, index: int) -> bool:
        """Whether the store takes rows of a parameter: else its gradients are dense. Collective over the client."""
        if index not in self._takes_rows:
            assert self._kv is not None
            none = no_rows(self._tensors[index]) if self._tensors[index].dim() else None
            try:
                optim.check_by_rows(self._kv.optimizer)
                if none is not None:
                    self._kv.row_sparse_pull(index, none._values(), none._indices()[0])
                self._takes_rows[index] = none is not None
            except UnsupportedError:
                self._takes_rows[index] = False
        return self._takes_rows[index]

    def fill_in(self, index: int) -> None:
        """Give a parameter without a gradient one that adds nothing, to be written to."""
        tensor = self._tensors[index]
        if tensor.grad is None:
            tensor.grad = no_rows(tensor) if index in self._sparse else torch.zeros_like(tensor)


def no_rows(like: torch.Tensor) -> torch.Tensor:
    """A sparse tensor of the shape, dtype and device of ``like``, without rows."""
    ids = torch.empty((1, 0), dtype=torch.int64, device=like.device)
    values = torch.empty((0, *like.shape[1:]), dtype=like.dtype, device=like.device)
    return torch.sparse_coo_tensor(ids, values, like.shape, device=like.device, check_invariants=False)


def _has_rows(gradient: torch.Tensor) -> bool:
    return gradient.layout is not torch.strided
