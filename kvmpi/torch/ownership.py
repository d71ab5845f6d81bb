"""Who exchanges the gradients of which parameters: the last that was made for them puts its hooks there."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch.utils.weak import WeakIdKeyDictionary

from kvmpi.errors import KVError
from kvmpi.store import KVStore
from kvmpi.torch.parameters import KeyedParameters

#: All that are on parameters, which the garbage collector does not look into: those whose stores are closed would keep
#: models and gradients for ever, and fail where a model is trained with another store.
_all: set[Hooks] = set()
#: By parameter: those that are on it, the last that were made.
_of_parameter: WeakIdKeyDictionary = WeakIdKeyDictionary()


def remove_unused() -> None:
    """Take the hooks away of those whose stores are closed."""
    for other in [other for other in _all if other.kv.closed]:
        other.remove()


class Hooks:
    """On all parameters, also on those that are frozen: where all others are one day, these begin a pass.

    Args:
        kv: where the gradients go.
        make: gives what is called with a parameter, of this number, that has got its gradient.
    """

    def __init__(
        self, kv: KVStore, params: KeyedParameters, make: Callable[[int], Callable[[torch.Tensor], None]]
    ) -> None:
        self.kv, self._params = kv, params
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._taken_over: str | None = None  # the parameter that others were made for
        _all.add(self)
        for i, tensor in enumerate(params.tensors):
            frozen = not tensor.requires_grad
            if frozen and (tensor.is_inference() or not (tensor.is_floating_point() or tensor.is_complex())):
                continue  # what can never be trained
            other = _of_parameter.get(tensor, lambda: None)()
            if other is not None and other in _all:  # else its optimizer has let go of it
                other._give_way(tensor)
            _of_parameter[tensor] = weakref.ref(self)
            tensor.requires_grad_(True)  # for a moment: torch takes no hooks for others, and keeps them
            self._handles.append(tensor.register_post_accumulate_grad_hook(make(i)))
            if frozen:
                tensor.requires_grad_(False)

    def remove(self) -> None:
        """Leave the parameters alone from here on."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        _all.discard(self)

    def _give_way(self, tensor: torch.Tensor) -> None:
        """Others are on ``tensor`` from now on, and nothing is left for these."""
        self._taken_over = next(n for n, p in zip(self._params.names, self._params.tensors, strict=True) if p is tensor)
        self.remove()

    def check_own(self) -> None:
        """Raise if another optimizer exchanges these gradients, so that this one would do it a second time."""
        if self._taken_over is not None:
            raise KVError(
                f"another DistributedOptimizer was made for {self._taken_over} since, and exchanges its gradients: of "
                "several for one parameter only the last can be used; detach() the others, and make them anew"
            )
