"""A warning when a process forks that speaks MPI, which is what a ``DataLoader`` with workers does by default."""

from __future__ import annotations

import os
import sys
import warnings
import weakref
from typing import Protocol


class Speaker(Protocol):
    """What speaks MPI until it is closed: a store, a process group."""

    @property
    def mpi_size(self) -> int: ...

    @property
    def closed(self) -> bool: ...


_speakers: weakref.WeakSet[Speaker] = weakref.WeakSet()
_installed = False
_warned = False


def warn_of_forks(speaker: Speaker) -> None:
    """From now on, until ``speaker`` is closed; once in a process. Only where MPI is in use."""
    global _installed
    if speaker.mpi_size == 1 or not hasattr(os, "register_at_fork"):
        return
    _speakers.add(speaker)
    if not _installed:
        _installed = True
        os.register_at_fork(before=_warn)


def _warn() -> None:
    global _warned
    if _warned or all(speaker.closed for speaker in _speakers):
        return
    _warned = True
    # From here up to whoever asked for a process.
    depth, frame = 1, sys._getframe(1)
    while frame.f_back is not None and _is_library(frame.f_globals.get("__name__", "")):
        depth, frame = depth + 1, frame.f_back
    warnings.warn(
        "this process speaks MPI and is being forked, which MPI forbids: depending on the network the child, or this "
        "process, may crash or read wrong data. For a DataLoader with num_workers > 0 pass "
        "multiprocessing_context='forkserver' (or 'spawn'), or make the first iterator before the store or group",
        RuntimeWarning,
        stacklevel=depth + 1,
    )


def _is_library(module: str) -> bool:
    return module.partition(".")[0] in ("multiprocessing", "torch", "concurrent") or module == __name__
