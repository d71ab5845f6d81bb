"""Parameters whose weights are under way: whoever reads one waits until it is there.

As long as that lasts a parameter is of a class made from its own one, whose ``__torch_function__`` (PyTorch's protocol
for subclasses of tensors) hears of every operation on it. The first that reads or writes values waits; what is asked
about shape, dtype or gradient does not.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from kvmpi.compiling import not_compiled

_Tensor: Any = torch.Tensor
#: What is known of a parameter without its values. Whatever is missing here costs a wait, and nothing else.
_ABOUT = frozenset({
    *(
        getattr(_Tensor, name).__get__
        for name in (
            "grad", "requires_grad", "is_leaf", "grad_fn", "shape", "ndim", "dtype", "device", "layout", "_version",
            "_base", "is_cuda", "is_sparse", "is_meta", "itemsize", "nbytes", "_backward_hooks",
        )
    ),
    *(getattr(_Tensor, name).__set__ for name in ("grad", "requires_grad", "_backward_hooks")),
    *(
        getattr(_Tensor, name)
        for name in (
            "size", "stride", "dim", "numel", "nelement", "element_size", "storage_offset", "__len__", "is_contiguous",
            "is_floating_point", "is_complex", "requires_grad_", "register_hook", "register_post_accumulate_grad_hook",
        )
    ),
    _Tensor.grad.__delete__, torch.numel, torch.is_floating_point, torch.is_complex,
})  # fmt: skip


class _Owner(NamedTuple):
    """What a parameter is when it is there, and how to wait for it, in the process that does."""

    kind: type[Any]
    wait: Callable[[], None]
    pid: int


_owners: dict[int, _Owner] = {}
_kinds: dict[type[Any], type[Any]] = {}


# The compiler of torch 2.11 looks into what hears of operations, and calls it for ever. That of 2.13 does not, and to
# hide it there takes time.
_TORCH = tuple(int(number) for number in torch.__version__.split(".")[:2])
_hidden: Callable[[Any], Any] = not_compiled if _TORCH < (2, 13) else lambda function: function


class _Pending:
    """The first base of the class of a parameter that is not there."""

    @classmethod
    @_hidden
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _ABOUT:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        _await(args)
        _await(kwargs)
        return func(*args, **(kwargs or {}))

    def as_subclass(self, cls: type[Any]) -> Any:
        _arrive(self)
        return self.as_subclass(cls)

    def __deepcopy__(self, memo: Any) -> Any:
        _arrive(self)
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        _arrive(self)
        return self.__reduce_ex__(protocol)


def mark(parameters: Iterable[torch.Tensor], wait: Callable[[], None]) -> None:
    """From now on, and until ``settle``, who reads one of ``parameters`` calls ``wait`` first.

    What has a ``__torch_function__`` of its own stays as it is.
    """
    for parameter in parameters:
        kind = type(parameter)
        if issubclass(kind, _Pending):
            kind = _owners[id(parameter)].kind
        elif kind.__torch_function__ not in (torch.Tensor.__torch_function__, torch._C._disabled_torch_function_impl):
            continue
        if kind not in _kinds:
            make: Any = type(kind)
            _kinds[kind] = make(f"Pending{kind.__name__}", (_Pending, kind), {"__slots__": ()})
        _owners[id(parameter)] = _Owner(kind, wait, os.getpid())
        parameter.__class__ = _kinds[kind]


def settle(parameters: Iterable[torch.Tensor]) -> None:
    """These are there, or nothing that waits for them is of any use."""
    for parameter in parameters:
        owner = _owners.pop(id(parameter), None)
        if owner is not None:
            parameter.__class__ = owner.kind


def _await(found: Any) -> None:
    if isinstance(found, _Pending):
        _arrive(found)
    elif isinstance(found, list | tuple):
        for each in found:
            _await(each)
    elif isinstance(found, dict):
        for each in found.values():
            _await(each)


def _arrive(parameter: Any) -> None:
    owner = _owners.get(id(parameter))
    try:
        if owner is not None and owner.pid == os.getpid():  # in a fork nothing arrives
            owner.wait()
    finally:
        settle([parameter])
