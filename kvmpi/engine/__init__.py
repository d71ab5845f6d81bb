"""A dependency engine: functions run when the variables that they read and write allow it, on named lanes."""

from __future__ import annotations

from kvmpi.engine.base import Engine
from kvmpi.engine.naive import NaiveEngine
from kvmpi.engine.threaded import ThreadedEngine
from kvmpi.engine.variable import Variable
from kvmpi.engine.work import Work
from kvmpi.errors import ConfigError

__all__ = ["Engine", "Variable", "Work", "create_engine"]

_KINDS: dict[str, type[Engine]] = {"threaded": ThreadedEngine, "naive": NaiveEngine}


def create_engine(kind: str = "threaded", num_threads: int = 2) -> Engine:
    """A new engine with the lanes ``cpu`` (unordered, ``num_threads`` threads) and ``inline``; starts no thread yet.

    Args:
        kind: ``threaded``, or ``naive``, which runs everything at once in the calling thread: debugger and oracle.
    Raises:
        ConfigError: unknown ``kind``, or fewer than one thread.
    """
    if kind not in _KINDS:
        raise ConfigError(f"engine {kind!r}: expected one of {', '.join(map(repr, _KINDS))}")
    return _KINDS[kind](num_threads)
