"""A warning when a process forks that speaks MPI, which is what a ``DataLoader`` with workers does by default."""

from __future__ import annotations

import os
import sys
import weakref
from typing import Protocol

from kvmpi.warning import warn


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
    if _warned or "mpi4py.MPI" not in sys.modules or all(speaker.closed for speaker in _speakers):
        return
    _warned = True
    warn(
        "this process speaks MPI and is being forked, which MPI forbids: depending on the network the child, or this "
        "process, may crash or read wrong data. For a DataLoader with num_workers > 0 pass "
        "multiprocessing_context='forkserver' (or 'spawn'), or make the first iterator before the store or group",
        RuntimeWarning,
    )
