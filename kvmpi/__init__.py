"""kvmpi: a key-value store for data-parallel training over MPI collectives and ZeroMQ parameter servers."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kvmpi.errors import KVError, KVTimeoutError, PeerLostError

if TYPE_CHECKING:
    from kvmpi import errors, optim
    from kvmpi.engine import Work
    from kvmpi.store import KVStore, create, register_store

__version__ = "0.1.0"
__all__ = [
    "KVError",
    "KVStore",
    "KVTimeoutError",
    "PeerLostError",
    "Work",
    "__version__",
    "create",
    "errors",
    "optim",
    "register_store",
]

# Loaded at first use, so that the launcher and the wrapper of every rank start without NumPy and ZeroMQ.
_LAZY = {
    "KVStore": "kvmpi.store",
    "create": "kvmpi.store",
    "register_store": "kvmpi.store",
    "Work": "kvmpi.engine",
    "optim": "",
    "errors": "",
    "torch": "",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'kvmpi' has no attribute {name!r}")
    if not _LAZY[name]:
        return importlib.import_module(f"kvmpi.{name}")
    return getattr(importlib.import_module(_LAZY[name]), name)
