"""Which layer waits for which weights, and which were loaded: hooks, where weights come back while the loop goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from kvmpi.compiling import not_compiled
from kvmpi.torch.weights import Weights


class _Hook:
    """What a module calls; in a copy of the model, which waits for nothing, it does nothing."""

    def __init__(self, call: Callable[..., None] | None = None) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> None:
        if self._call is not None:
            self._call(*arguments)

    @property
    def __name__(self) -> str:
        raise AttributeError(
            "torch.jit.script does not take the hooks by which layers wait for weights that a store updates, nor in a "
            "copy of the model: call optimizer.detach() before, or use torch.jit.trace or torch.export"
        )

    def __reduce__(self) -> Any:  # for copy and pickle alike
        return _Hook, ()


class Layers:
    """Before a module's forward, the weights that it uses are there.

    Those are its own, and those of modules inside it that are never called (as the projection inside
    ``nn.MultiheadAttention``): which are called is seen in the first forward, when nothing is under way. Weights of
    modules that no called module contains, and of models that were compiled in place or to TorchScript, are waited for
    after the step.
    A module's ``state_dict`` and ``load_state_dict`` wait as well, and what is loaded is noted for the store.

    Args:
        index: the numbers of parameters, by identity.
    """

    def __init__(self, model: torch.nn.Module, index: Mapping[int, int], weights: Weights) -> None:
        self._parents: dict[torch.nn.Module, torch.nn.Module | None] = {}
        self._called: set[torch.nn.Module] = set()
        self._before: dict[torch.nn.Module, dict[int, int]] = {}
        self._handles: list[Any] = []
        self._hook = _Hook(self._before_forward)
        self._index, self._weights, self._stale = index, weights, True
        self._visit(model, None, hooked=True)

    def close(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._hook = _Hook(lambda *_: None)  # not a method of this: a cycle would keep the model for long

    def _visit(self, module: torch.nn.Module, parent: torch.nn.Module | None, *, hooked: bool) -> None:
        if module in self._parents:
            return
        self._parents[module] = parent
        scripted = isinstance(module, torch.jit.RecursiveScriptModule)  # which takes no hooks
        if not scripted:
            self._handles += [
                module.register_state_dict_pre_hook(_Hook(lambda *_: self._weights.wait())),
                module._register_load_state_dict_pre_hook(_Hook(self._before_load), with_module=True),
                module.register_load_state_dict_post_hook(_Hook(self._after_load)),
            ]
        # Hooks are part of what is compiled.
        in_place = scripted or getattr(module, "_compiled_call_impl", None) is not None
        if hooked and not in_place:
            self._handles.append(module.register_forward_pre_hook(self._hook, prepend=True))
        compiled = in_place or type(module).__name__ == "OptimizedModule"
        for child in module.children():
            self._visit(child, module, hooked=hooked and not compiled)

    @not_compiled  # a compiler that looked into it would compile anew as what is under way changes
    def _before_forward(self, module: torch.nn.Module, _: Any) -> None:
        if module not in self._called:
            self._called.add(module)
            self._stale = True
        if self._weights.in_flight:
            self._weights.wait(self._weights_of(module))

    def _before_load(self, module: torch.nn.Module, *_: Any) -> None:
        self._weights.wait()  # or what is under way would come on top of it
        self._before[module] = self._versions(module)

    def _after_load(self, module: torch.nn.Module, _: Any) -> None:
        before = self._before.pop(module, {})
        self._weights.loaded.update(i for i, version in self._versions(module).items() if version != before.get(i))

    def _versions(self, module: torch.nn.Module) -> dict[int, int]:
        """How often each of a module's own weights was written to, by their numbers."""
        own = [p for p in module._parameters.values() if p is not None]
        return {self._index[id(p)]: p._version for p in own if id(p) in self._index}

    def after_step(self) -> None:
        """Wait for what no forward would wait for."""
        self._weights.wait(self._weights_of(None))

    def _weights_of(self, module: torch.nn.Module | None) -> list[int]:
        if self._stale:
            self._stale = False
            self._found: dict[torch.nn.Module | None, list[int]] = {}
            left = set(self._index.values())
            for owner in self._parents:
                caller: torch.nn.Module | None = owner
                while caller is not None and caller not in self._called:
                    caller = self._parents[caller]
                for parameter in owner._parameters.values():
                    i = self._index.get(id(parameter))
                    if i is not None:
                        left.discard(i)
                        self._found.setdefault(caller, []).append(i)
            self._found.setdefault(None, []).extend(left)
        return self._found.get(module, [])
