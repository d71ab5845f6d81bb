"""Where gradients that travel together lie: in blocks of memory that others can read, or where autograd made them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from kvmpi.torch.parameters import memory_order

#: From here on, to copy a gradient costs more than that the store handles one more array: between hosts a thread wakes
#: up for that several times.
DIRECT_BYTES, DIRECT_BYTES_BETWEEN_HOSTS = 64 << 10, 256 << 10


def may_be_direct(tensor: torch.Tensor, *, between_hosts: bool = False) -> bool:
    """Whether gradients of such a parameter are summed where autograd has made them, if the store allows it."""
    least = DIRECT_BYTES_BETWEEN_HOSTS if between_hosts else DIRECT_BYTES
    return tensor.device.type == "cpu" and tensor.numel() * tensor.element_size() >= least


def keep_apart(tensors: Iterable[torch.Tensor], taken: set[int] | None = None) -> None:
    """Give each parameter a gradient of its own, to be changed in place: of ``a + b`` autograd makes one for both.

    Args:
        taken: where other gradients begin; those of these are added.
    """
    taken = set() if taken is None else taken
    for tensor in tensors:
        grad = tensor.grad
        if grad is None or grad.layout is not torch.strided or not grad.data_ptr():
            continue
        if grad.data_ptr() in taken:
            tensor.grad = grad = grad.clone()
        taken.add(grad.data_ptr())


class Bucket:
    """Gradients that travel together: slices of one block of memory for each dtype and device.

    In a block they lie in the order of their keys, which is the order of a call with all of them: then even what a
    collective would have to pack is where it belongs. Those that are ``direct`` stay where autograd has made them.
    """

    def __init__(
        self, indices: Iterable[int], tensors: list[torch.Tensor], empty: Callable[..., Any], direct: Iterable[int]
    ) -> None:
        self.indices = sorted(indices)
        self.direct = sorted(direct)
        self.blocks: list[torch.Tensor] = []
        self.keys: list[int] = []  # of the blocks, where they have keys
        #: By index: the gradient as the parameter shows it, and the same memory in the order in which it lies there.
        self.grads: dict[int, torch.Tensor] = {}
        self.arrays: dict[int, torch.Tensor] = {}
        #: By index of those in blocks: the number of the block, and which elements of it.
        self._ranges: dict[int, tuple[int, int, int]] = {}
        self._tensors, self._empty = tensors, empty
        self._kept: dict[int, torch.Tensor] = {}
        self._addresses: dict[int, int] = {}
        self._orders = {i: memory_order(tensors[i]) for i in self.indices}
        self.copied = [i for i in self.indices if i not in set(self.direct)]
        self.blocks = self._lay_out(self.copied)

    def _lay_out(self, members: Iterable[int]) -> list[torch.Tensor]:
        """Blocks in which ``members`` have their gradients from here on."""
        blocks = []
        kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for i in members:
            kinds.setdefault((self._tensors[i].dtype, self._tensors[i].device), []).append(i)
        for (dtype, device), alike in kinds.items():
            count = sum(self._tensors[i].numel() for i in alike)
            blocks.append(self._empty((count,), dtype, None if device.type == "cpu" else str(device)))
            start = 0
            for i in alike:
                order = self._orders[i]
                shape = [self._tensors[i].shape[d] for d in order]
                stop = start + math.prod(shape)
                self.arrays[i] = blocks[-1][start:stop].view(shape)
                self._ranges[i] = len(blocks) - 1, start, stop
                self._lay(i)
                start = stop
        return blocks

    def _lay(self, index: int) -> torch.Tensor:
        """The gradient as its parameter shows it, in the memory of ``arrays``."""
        order = self._orders[index]
        # No view to autograd, which would not let its owner detach it in place.
        self.grads[index] = self.arrays[index].permute([order.index(d) for d in range(len(order))]).detach()
        self._addresses[index] = self.arrays[index].data_ptr()
        return self.grads[index]

    def places(self) -> Iterator[tuple[int, tuple[int, int, int]]]:
        """By index, of gradients that are in blocks: the key of the block, and where in it they lie."""
        for i in self.copied:
            number, start, stop = self._ranges[i]
            yield i, (self.keys[number], start, stop)

    def place(self, index: int) -> torch.Tensor:
        """Where a gradient lies in its block. To convert or move a model puts other memory into what it shows."""
        place = self.grads[index]
        return place if place.data_ptr() == self._addresses[index] else self._lay(index)

    def keep(self) -> None:
        """Direct gradients move to memory that others read without a copy, to stay there."""
        found = {i: grad for i in self.direct if (grad := self._tensors[i].grad) is not None}
        if not self._kept:
            self._lay_out(self.direct)
            self._kept = {i: self.grads[i] for i in self.direct}
        for i, grad in found.items():
            if grad is not self._kept[i]:
                self._tensors[i].grad = self._kept[i].copy_(grad)

    def find(self, index: int, taken: set[int], *, hidden: bool) -> bool:
        """Where the gradient of a direct parameter is now; zeros, and False, if there is none.

        One that no array describes is copied, and so is one that starts where another does, or that has a graph.

        Args:
            taken: addresses of those that were found before; this one's is added.
            hidden: there is to be none, whatever the parameter shows.
        """
        tensor = self._tensors[index]
        grad, order = None if hidden else tensor.grad, self._orders[index]
        has_one = grad is not None
        if grad is None:
            grad = torch.zeros_like(tensor)
        array = grad if order == tuple(range(len(order))) else grad.permute(order)
        if not array.is_contiguous() or grad.requires_grad or grad.data_ptr() in taken:
            array = torch.empty([grad.shape[d] for d in order], dtype=grad.dtype, device=grad.device)
            grad = array.permute([order.index(d) for d in range(len(order))]).copy_(grad).detach()
        if has_one:
            tensor.grad = grad
        taken.add(grad.data_ptr())
        self.grads[index], self.arrays[index] = grad, array
        return has_one

    def forget(self) -> None:
        """Direct gradients may go when their parameters have others."""
        for i in self.direct:
            self.grads.pop(i, None)
            self.arrays.pop(i, None)

    def held(self) -> list[torch.Tensor]:
        """The memory of all gradients that there are: blocks, and what is direct."""
        return [*self.blocks, *(self.arrays[i] for i in self.direct if i in self.arrays)]

    def host_versions(self) -> dict[int, int]:
        """Those of the gradients in host memory, by index, to see later who else has written to one under way."""
        return {i: array._version for i, array in self.arrays.items() if array.device.type == "cpu"}
