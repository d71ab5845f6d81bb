"""What is hidden from torch's compiler, without loading it where nobody has."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch


def not_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """A compiled program calls ``function`` as it is: as ``torch.compiler.disable``, which would load the compiler.

    For functions of modules and classes; a bound method cannot hold what torch notes of it.
    """
    hidden = torch._disable_dynamo(function)

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        return (hidden if "torch._dynamo" in sys.modules else function)(*args, **options)

    return call
