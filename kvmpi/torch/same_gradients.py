"""Where a worker had no backward in a step: what the loops of others have made of their gradients becomes its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvmpi.compiling import methods_not_compiled
from kvmpi.store import KVStore
from kvmpi.torch.gradients import keep_apart
from kvmpi.torch.parameters import KeyedParameters, next_key, summing

#: Numbers that are passed on at a time.
_COUNT = 1 << 16


@methods_not_compiled
class SameGradients:
    """Passes gradients on from one worker to all others of ``kv``.

    What comes of an exchange is the same on all workers. Loops then clip it, unscale it, add to it; a worker without a
    backward hears of the gradients in its step, when its loop had nothing to clip: it would step with others.
    """

    def __init__(self, kv: KVStore, params: KeyedParameters) -> None:
        self._kv, self._params = kv, params
        self._key: int | None = None
        # A dtype that holds those of all others, and travels as it is.
        self._numbers = torch.zeros(max(_COUNT, kv.num_workers), dtype=torch.float64, device="cpu")

    def take_over(self, *, has_pass: bool) -> None:
        """Gradients become those of the first worker whose loop had a pass. Collective over the workers of ``kv``.

        Args:
            has_pass: whether that of this worker had one; of one of them it is so.
        """
        kv, tensors = self._kv, self._params.tensors
        had = torch.zeros(kv.num_workers, dtype=torch.float64, device="cpu")
        had[kv.rank] = has_pass
        self._sum([had], counts=True)
        is_first = int(had.argmax()) == kv.rank
        trained = [i for i, tensor in enumerate(tensors) if tensor.requires_grad]
        keep_apart(tensors[i] for i in trained)
        shown = torch.tensor([float(tensors[i].grad is not None) for i in trained], dtype=torch.float64, device="cpu")
        self._sum([shown], counts=is_first)
        found = {i: self._array(i) for i, is_shown in zip(trained, shown.tolist(), strict=True) if is_shown}
        self._sum([array.view(-1) for array in found.values()], counts=is_first)
        for i in trained:
            if i not in found:
                tensors[i].grad = None
                continue
            order = self._params.order(i)
            gradient = found[i].permute([order.index(d) for d in range(len(order))])
            if (grad := tensors[i].grad) is None:
                tensors[i].grad = gradient
            elif grad.data_ptr() != gradient.data_ptr():
                grad.copy_(gradient)

    def _array(self, index: int) -> torch.Tensor:
        """The gradient of a parameter as one contiguous array, where it lies if it can be; zeros without one."""
        grad = self._params.tensors[index].grad
        if grad is None:
            return torch.zeros_like(self._params.as_it_lies(index), memory_format=torch.contiguous_format)
        self._params.check_dense(index)
        return grad.detach().permute(self._params.order(index)).contiguous()

    def _sum(self, arrays: Sequence[torch.Tensor], *, counts: bool) -> None:
        """Flat arrays become their sum over all workers, of those that count."""
        some, room = list[torch.Tensor](), self._numbers.numel()
        for piece in (piece for array in arrays for piece in array.split(self._numbers.numel())):
            if piece.numel() > room:
                self._sum_at_once(some, counts)
                some, room = [], self._numbers.numel()
            some.append(piece)
            room -= piece.numel()
        if some:
            self._sum_at_once(some, counts)

    def _sum_at_once(self, pieces: Sequence[torch.Tensor], counts: bool) -> None:
        if self._key is None:
            self._key = next_key(self._kv)
            self._kv.init(self._key, self._numbers)
        self._numbers.zero_()
        parts = self._numbers[: sum(piece.numel() for piece in pieces)].split([piece.numel() for piece in pieces])
        for part, piece in zip(parts if counts else (), pieces, strict=False):
            part.copy_(piece)
        summing(self._kv)(self._key, self._numbers)
        for part, piece in zip(parts, pieces, strict=True):
            piece.copy_(part)
