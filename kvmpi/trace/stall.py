"""Who waits for whom: every wait that lasts long is reported, and all waits are on demand.

Whoever may wait for long registers with ``watch`` what tells its waits. A thread looks at them from time to time: one
of more than KVMPI_STALL_S is reported on standard error and in the log, again after twice that time and so on, and when
it is over. SIGUSR1 has the process print its waits and the stacks of all of its threads (``on_demand.py``).
"""

from __future__ import annotations

import logging
import math
import os
import re
import select
import sys
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

from kvmpi.config import Config, client_bounds
from kvmpi.deadline import running_time
from kvmpi.trace import on_demand

_log = logging.getLogger(__name__)

#: Of many waits that are reported at the same time, so many are named.
_MOST_NAMED = 3
#: How often a reported wait is looked at, to notice its end.
_LOOK_S = 0.5
#: How often the thread says that this process runs, at least.
_TICK_S = 1.0
_RANKS = re.compile(r"MPI rank (\d+(?:(?:, | to )\d+)*)(?!\d|, \d| to \d| of \d)")


class Wait(NamedTuple):
    """Something that is waited for.

    Attributes:
        name: the same at every look, and only for this wait.
        since_s: on the monotonic clock.
        what: the operation, with its key and clock.
        whom: who or what has not come.
    """

    name: Hashable
    since_s: float
    what: str
    whom: str = ""

    def text(self) -> str:
        return f"{self.what}: {self.whom}" if self.whom else self.what


class Watch:
    """Which waits are worth a line, as a state machine: waits and a time in, lines out.

    Args:
        limit_s: a wait is reported when it has lasted so long, then at twice that time, and so on.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._told: dict[Hashable, tuple[float, Wait]] = {}  # when to tell again, and what was told

    @property
    def has_told(self) -> bool:
        """Whether a wait that was reported is not over yet."""
        return bool(self._told)

    def look(self, waits: Iterable[Wait], now_s: float) -> list[str]:
        """What is to be said about ``waits``, which are all there are."""
        here = {wait.name: wait for wait in waits}
        over = [(told, name) for name, (_, told) in self._told.items() if name not in here]
        lines = [f"waits no longer, after {now_s - wait.since_s:.1f} s: {wait.what}" for wait, _ in over[:_MOST_NAMED]]
        lines += _more(over, "other waits, no longer")
        for _, name in over:
            del self._told[name]
        due = []
        for wait in sorted(here.values(), key=lambda wait: wait.since_s):
            waited_s = now_s - wait.since_s
            again_s = self._told[wait.name][0] if wait.name in self._told else self.limit_s
            if waited_s >= again_s:
                self._told[wait.name] = (max(2 * again_s, waited_s), wait)
                due.append(f"has waited {waited_s:.1f} s: {wait.text()}")
        return [*lines, *due[:_MOST_NAMED], *_more(due, "further waits")]


def _more(found: Sequence[object], what: str) -> list[str]:
    return [f"and {len(found) - _MOST_NAMED} {what}"] if len(found) > _MOST_NAMED else []


class Waiting:
    """A wait of a thread that says itself, from time to time, what it waits for; it is over when this is gone."""

    __slots__ = ("__weakref__", "since_s", "text", "thread")

    def __init__(self, since_s: float) -> None:
        self.since_s, self.text = since_s, ""
        self.thread = threading.get_ident()
        _waiting.add(self)


class _Process:
    """Who this process is, and what it waits for."""

    def __init__(self) -> None:
        self.name = ""
        self.first_worker = -1  # worker rank of MPI rank 0, where MPI ranks are those of a client
        self.limit_s = 0.0
        self.thread: threading.Thread | None = None
        self.lock = threading.Lock()


#: The training clock of the store that was moved on last.
clock = 0
_process = _Process()
_waiting: weakref.WeakSet[Waiting] = weakref.WeakSet()
_sources: list[weakref.WeakMethod[Callable[[], list[Wait]]]] = []
_notes: list[weakref.WeakMethod[Callable[[], list[str]]]] = []


def limit_of(config: Config) -> float:
    """Seconds after which a wait is reported; 0: never. Below what a call may take at all, or it would be of no use."""
    return min(config.stall_s, config.timeout_s / 2)


def begin(config: Config, role: str = "", rank: int = -1) -> None:
    """Look after the waits of this process from now on, and take SIGUSR1 if nobody has it. Idempotent.

    Args:
        role, rank: what this process is, if no launcher has told it.
    """
    with _process.lock:
        if _process.thread is not None:
            return
        role, rank = config.role or role or "worker", config.rank if config.rank >= 0 else rank
        _process.name = role if role == "scheduler" or rank < 0 else f"{role} {rank}"
        if role == "worker":
            bounds = client_bounds(config.num_workers, config.num_clients) if config.role else [(0, 0)]
            _process.first_worker = bounds[min(config.client_rank, len(bounds) - 1)][0]
            if len(bounds) > 1:
                _process.name += f" (client {config.client_rank})"
        _process.limit_s = limit_of(config)
        asked = on_demand.install(_process.name, config.job_dir)
        _process.thread = threading.Thread(target=_look_after, args=(asked,), name="kvmpi-waits", daemon=True)
        _process.thread.start()


def watch(source: Callable[[], list[Wait]]) -> None:
    """``source``, a method that may be called from any thread, tells waits for as long as its object lives."""
    _add(_sources, source)


def note(source: Callable[[], list[str]]) -> None:
    """As ``watch``, for lines that stand in ``describe`` alone."""
    _add(_notes, source)


def _add(known: list[weakref.WeakMethod[Any]], source: Callable[[], Any]) -> None:
    """Those whose objects are gone make room: a program may make stores again and again."""
    known[:] = [one for one in known if one() is not None]
    known.append(weakref.WeakMethod(source))


def current() -> list[Wait]:
    """All that this process waits for, the longest first."""
    return sorted(_ask([_told_by_threads, *_alive(_sources)]), key=lambda wait: wait.since_s)


def _alive(sources: Iterable[weakref.WeakMethod[Any]]) -> list[Any]:
    return [tell for source in list(sources) if (tell := source()) is not None]


def _told_by_threads() -> list[Wait]:
    return [
        Wait(("thread", id(waiting), waiting.since_s), waiting.since_s, _with_workers(waiting.text))
        for waiting in list(_waiting)
        if waiting.text
    ]


def _ask(tells: Iterable[Callable[[], list[Any]]]) -> list[Any]:
    found: list[Any] = []
    for tell in tells:
        for _ in range(3):
            try:
                found += tell()
                break
            except RuntimeError:  # another thread has changed what we were looking at
                continue
    return found


def describe() -> str:
    """What this process waits for, as text of one line or more: who it is, then each wait."""
    now_s = time.monotonic()
    waits = [f"  for {now_s - wait.since_s:.1f} s: {wait.text()}" for wait in current()]
    notes = [f"  {line}" for line in _ask(_alive(_notes))]
    return "\n".join([f"{_who()} waits" + (":" if waits else " for nothing in kvmpi"), *waits, *notes])


def _who() -> str:
    return f"{_process.name} at clock {clock}" if _process.name.startswith("worker") else _process.name


def _with_workers(text: str) -> str:
    """Of an error's text that part which says who has not come, with workers beside MPI ranks."""
    text = text.partition(" within ")[0].rstrip(",")
    if _process.first_worker < 0:
        return text

    def named(found: re.Match[str]) -> str:
        workers = re.sub(r"\d+", lambda rank: str(_process.first_worker + int(rank[0])), found[1])
        return f"{found[0]} (worker {workers})"

    return _RANKS.sub(named, text)


def _look_after(asked: int) -> None:
    """The thread: look at the waits, listen to SIGUSR1, and say that this process runs."""
    watched = Watch(_process.limit_s)
    listens = select.poll()
    if asked >= 0:
        listens.register(asked, select.POLLIN)
    running_time.tick(_TICK_S)
    while True:
        every_s = _LOOK_S if watched.has_told else max(0.05, min(_TICK_S, (_process.limit_s or math.inf) / 8))
        signals = listens.poll(1000 * every_s)
        running_time.tick(_TICK_S)  # before waits are looked at, which it makes shorter
        if signals:
            stacks = on_demand.read(asked)
            _say(f"kvmpi: {describe()}\n{stacks}", log=False)
        if _process.limit_s:
            try:
                for line in watched.look(current(), time.monotonic()):
                    _say(f"kvmpi: {_who()}: {line}\n")
            except Exception:  # a defect here must not end what a job needs when it stands still
                _log.exception("looking at waits failed")


def _forked() -> None:
    """A child waits for itself, if it has stores of its own."""
    _process.thread, _process.lock = None, threading.Lock()
    _sources.clear()
    _notes.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def _say(text: str, *, log: bool = True) -> None:
    """On standard error, and in the log if there is one that is not there as well."""
    there = _stderr_handlers(_log)
    if log and _log.hasHandlers():
        _log.warning("%s", text.rstrip())
    if not (log and there):
        try:
            sys.stderr.flush()
            os.write(2, text.encode(errors="backslashreplace"))
        except (OSError, ValueError):
            pass  # nobody is there to read it


def _stderr_handlers(log: logging.Logger | None) -> bool:
    """Whether a warning reaches standard error by ``log``."""
    if log is None or not log.isEnabledFor(logging.WARNING):
        return False
    handlers: list[Any] = []
    while log is not None:
        handlers += log.handlers
        log = log.parent if log.propagate else None
    return any(
        isinstance(handler, logging.StreamHandler) and handler.stream in (sys.stderr, sys.__stderr__)
        for handler in handlers
    )
