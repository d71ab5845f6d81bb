"""The parameters of a model as keys of a store: key i is parameter i, everywhere with worker 0's first weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from kvmpi.errors import ConfigError
from kvmpi.store import KVStore

Parameters = Iterable[torch.Tensor] | Iterable[tuple[str, torch.Tensor]] | Mapping[str, torch.Tensor]


class KeyedParameters:
    """A fixed list of parameters with their names; ``keys[i]`` is ``i``."""

    def __init__(self, params: Parameters) -> None:
        """Take ``model.parameters()``, ``model.named_parameters()`` or a dict of tensors.

        Raises:
            ConfigError: nothing, something that is no tensor, or a parameter twice.
        """
        if isinstance(params, torch.Tensor):
            raise ConfigError("params is one tensor: pass a list, model.parameters() or model.named_parameters()")
        self.names: list[str] = []
        self.tensors: list[torch.Tensor] = []
        items: Iterable[Any] = params.items() if isinstance(params, Mapping) else params
        for index, item in enumerate(items):
            name, tensor = item if isinstance(item, tuple) and len(item) == 2 else (f"parameter {index}", item)
            if not isinstance(tensor, torch.Tensor):
                raise ConfigError(f"params[{index}] is {type(tensor).__name__}, expected a torch tensor")
            self.names.append(str(name))
            self.tensors.append(tensor)
        if not self.tensors:
            raise ConfigError("params is empty: a generator such as model.parameters() can be used only once")
        first: dict[int, int] = {}
        for index, tensor in enumerate(self.tensors):
            if id(tensor) in first:
                raise ConfigError(f"{self.names[index]} is the same tensor as {self.names[first[id(tensor)]]}")
            first[id(tensor)] = index
        self.keys = list(range(len(self.tensors)))

    def __len__(self) -> int:
        return len(self.tensors)

    @property
    def data(self) -> list[torch.Tensor]:
        """The tensors without their autograd history; the same memory."""
        return [tensor.detach() for tensor in self.tensors]

    def create_in(self, kv: KVStore) -> None:
        """Make the keys; every worker goes on with the weights of worker 0. Collective over all workers of ``kv``."""
        kv.broadcast(self.keys, self.data, self.data)
