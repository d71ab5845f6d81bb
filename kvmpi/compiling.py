"""What is hidden from torch's compiler, which does not look into what talks to other processes; torch is not loaded."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Class = TypeVar("_Class", bound=type)


def not_compiled(function: _Function) -> _Function:
    """A compiled program calls ``function`` as it is: as ``torch.compiler.disable``, which would load the compiler.

    For functions of modules and classes; a bound method cannot hold what torch notes of it.
    """
    hidden: list[Callable[..., Any]] = []

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **options)
        if not hidden:
            hidden.append(sys.modules["torch"].compiler.disable(function))
        return hidden[0](*args, **options)

    return call  # type: ignore[return-value]


def methods_not_compiled(cls: _Class) -> _Class:
    """A compiled program calls the public methods of ``cls`` as they are."""
    for name, found in list(vars(cls).items()):
        if inspect.isfunction(found) and not name.startswith("_"):
            setattr(cls, name, not_compiled(found))
    return cls
