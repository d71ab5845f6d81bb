"""Running statistics of normalisation layers, which see other data in every worker and have no gradients."""

from __future__ import annotations

import torch
from torch import nn

from kvmpi.engine import Work
from kvmpi.store import KVStore
from kvmpi.torch.parameters import next_key, not_compressed, summing


class NormBuffers:
    """After each step all workers go on with the statistics of the first, or with the mean of all.

    All buffers of one dtype travel as one vector, with how many workers are in the sum at its end: a worker that has
    joined contributes nothing.

    Args:
        policy: "first" or "mean".
        in_client: only the workers of one client exchange them: the store itself would take them for gradients.
    """

    def __init__(self, kv: KVStore, model: nn.Module, policy: str, *, in_client: bool) -> None:
        self._takes_part = policy == "mean"
        self._places: list[tuple[nn.Module, str]] = []
        self._vectors: list[tuple[int, torch.Tensor, list[torch.Tensor]]] = []
        self._work: Work | None = None
        if (kv.mpi_size if in_client else kv.num_workers) == 1:
            return
        self._kv = kv.client if in_client else kv
        self._takes_part = policy == "mean" or self._kv.rank == 0
        for module in model.modules():
            if is_norm(module):
                self._places += [(module, name) for name, _ in module.named_buffers(recurse=False)]
        self._find()

    def _find(self) -> None:
        """Look up the buffers; make keys for them if there are none, or none that fit. Collective where it does."""
        by_dtype: dict[torch.dtype, dict[int, torch.Tensor]] = {}
        for module, name in self._places:  # to convert a model puts other buffers there
            buffer = module._buffers[name]
            if buffer is not None:
                by_dtype.setdefault(buffer.dtype, {})[id(buffer)] = buffer
        found = [
            (not_compressed(self._kv, dtype), sum(b.numel() for b in some.values()) + 1)
            for dtype, some in by_dtype.items()
        ]
        if found != [(vector.dtype, vector.numel()) for _, vector, _ in self._vectors]:
            first = next_key(self._kv)
            vectors = [self._kv.empty((count,), dtype) for dtype, count in found]
            for key, vector in enumerate(vectors, first):
                self._kv.init(key, vector.zero_())
            self._vectors = [(key, vector, []) for key, vector in enumerate(vectors, first)]
        self._vectors = [
            (key, vector, list(some.values()))
            for (key, vector, _), some in zip(self._vectors, by_dtype.values(), strict=True)
        ]

    def leave(self) -> None:
        """This worker has no more batches: what it has is not asked for."""
        self._takes_part = False

    def start(self) -> None:
        """Send them. Collective."""
        if not self._places:
            return
        self._find()
        for _, vector, buffers in self._vectors:
            if self._takes_part:
                torch.cat([*(b.detach().reshape(-1).cpu() for b in buffers), vector.new_ones(1)], out=vector)
            else:
                vector.zero_()
        keys, vectors = [key for key, _, _ in self._vectors], [vector for _, vector, _ in self._vectors]
        self._work = summing(self._kv)(keys, vectors, async_op=True)

    def finish(self) -> None:
        """Take what has come back."""
        if self._work is None:
            return
        self._work.wait()
        self._work = None
        for _, vector, buffers in self._vectors:
            count = int(vector[-1])
            if not count:  # the first worker has joined: everybody keeps its own
                continue
            if count > 1:
                vector.copy_(torch.div(vector, count, rounding_mode=None if vector.is_floating_point() else "floor"))
            start = 0
            for buffer in buffers:
                # Not a change to autograd: a graph that was made before may have a backward of its own still, which in
                # training does not read what is running along.
                buffer.data.copy_(vector[start : start + buffer.numel()].view(buffer.shape))
                start += buffer.numel()


def is_norm(module: nn.Module) -> bool:
    """Whether its buffers are such statistics."""
    return isinstance(module, nn.modules.batchnorm._NormBase)
