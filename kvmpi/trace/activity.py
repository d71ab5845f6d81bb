"""What this process as a whole is doing: its stores together, and the numbers that the program itself reports."""

from __future__ import annotations

import operator
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec

from kvmpi.errors import ConfigError

#: Of numbers that a program reports, by name; also what the scheduler keeps of one worker.
MAX_NAMES = 16
MAX_NAME_CHARS = 64
#: Points of one curve in one report. A program that has more keeps every second one, every fourth, and so on.
MAX_POINTS = 256
MAX_STEP = 1 << 53


class Observation(msgspec.Struct):
    """What was done since the start of the process (or the store).

    Attributes:
        totals: numbers by name; those of several stores are added, but for ``steps`` and ``imbalance``, the greatest.
        phases: seconds, bytes and calls by name.
        staleness: pushes by how many updates old their values were.
        curves: by name, (step, value), since the observation before.
    """

    totals: dict[str, float] = msgspec.field(default_factory=dict)
    phases: dict[str, list[float]] = msgspec.field(default_factory=dict)
    staleness: Counter[int] = msgspec.field(default_factory=Counter)
    curves: dict[str, list[tuple[int, float]]] = msgspec.field(default_factory=dict)

    def add(self, other: Observation) -> None:
        """Take in what another store has done."""
        for name, value in other.totals.items():
            before = self.totals.get(name, 0.0)
            self.totals[name] = max(before, value) if name in _GREATEST else before + value
        for name, numbers in other.phases.items():
            mine = self.phases.setdefault(name, [0.0, 0.0, 0.0])
            mine[:] = [a + b for a, b in zip(mine, numbers, strict=True)]
        self.staleness.update(other.staleness)


#: Totals that stores do not share among them.
_GREATEST = ("steps", "imbalance", "possible_bytes_per_s")


#: What a store has done; called in any thread.
Observe = Callable[[], Observation]


class Activity:
    """All stores of a process; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Not the stores: a lone one may be dropped, and is closed for that reason.
        self._open: list[weakref.WeakMethod[Observe]] = []
        self._done = Observation()
        self._points: dict[str, list[tuple[int, float]]] = {}
        self._names: set[str] = set()
        self._reported_step = -1
        self._start_s = time.monotonic()
        # Of whoever asks for the curves: called when the last store has ended.
        self.on_idle: Callable[[], object] | None = None

    def begin(self, store: Observe) -> None:
        """A store, of which this is a method, counts from now on, as long as it is there."""
        with self._lock:
            self._open = [known for known in self._open if known() is not None]
            if not self._open and not self._done.totals:
                self._start_s = time.monotonic()
            self._open.append(weakref.WeakMethod(store))

    def end(self, store: Observe) -> None:
        """A store does nothing further, what it has done goes on to count. Idempotent."""
        with self._lock:
            if (known := weakref.WeakMethod(store)) not in self._open:
                return
            self._open.remove(known)
            self._done.add(store())
            is_last = self.is_idle
        if is_last and self.on_idle is not None:
            self.on_idle()

    @property
    def is_idle(self) -> bool:
        """Whether no store is open."""
        return all(store() is None for store in self._open)

    def report(self, step: Any, values: dict[str, Any]) -> None:
        """Take what ``KVStore.report`` is given.

        Raises:
            ConfigError: what it says there.
        """
        try:
            number = operator.index(step)
        except TypeError:
            raise ConfigError(f"report: step is {step!r}; expected how many steps are done, a whole number") from None
        if not 0 <= number < MAX_STEP:
            raise ConfigError(f"report: step is {number}; expected 0 or more")
        points = {name: _number(name, value) for name, value in values.items()}
        with self._lock:
            names = self._names | points.keys()
            if len(names) > MAX_NAMES:
                raise ConfigError(
                    f"report of {', '.join(sorted(points.keys() - self._names))}: a worker reports at most {MAX_NAMES} "
                    f"names, and has reported {', '.join(sorted(self._names))}"
                )
            self._names = names
            self._reported_step = number
            for name, value in points.items() if self.on_idle is not None else ():
                pending = self._points.setdefault(name, [])
                pending.append((number, value))
                if len(pending) >= MAX_POINTS:
                    del pending[1::2]

    def observe(self) -> Observation:
        """Everything together. The curves are handed over: the next observation has what comes after."""
        whole = Observation()
        with self._lock:
            whole.add(self._done)
            for known in self._open:
                if (store := known()) is not None:
                    whole.add(store())
            whole.curves, self._points = self._points, {}
            if self._reported_step >= 0:
                whole.totals["steps"] = float(self._reported_step)
            whole.totals["elapsed_s"] = time.monotonic() - self._start_s
        whole.totals["resident_bytes"] = float(resident_bytes())
        return whole


def _number(name: str, value: Any) -> float:
    if len(name) > MAX_NAME_CHARS:
        raise ConfigError(f"report of {name[:MAX_NAME_CHARS]}...: a name has at most {MAX_NAME_CHARS} characters")
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"report of {name}: {value!r:.200} is no number ({error}); give a float") from None
    return number


def resident_bytes() -> int:
    """Memory of this process that is in the machine's; 0 where the system does not say."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


#: That of this process.
activity = Activity()
