"""What a process did and for how long: counters that every room feeds through one small object."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvmpi.trace import timeline

#: Phases in which a process exchanges something with others; several may be under way at once.
COMMUNICATION = frozenset({"broadcast", "pull", "push", "reduce", "wait"})
#: Stretches of communication that a later end may still join to one.
_MAX_STRETCHES = 64
#: Calls that are kept before they are worked out.
_MOST_BRIEF = 1 << 10


class Recorder:
    """Bytes, seconds and calls per phase, and a histogram of staleness; safe to use from several threads.

    Args:
        alone: what ``reduce`` adds up is of this process only, and is no communication.
    """

    def __init__(self, *, alone: bool = False) -> None:
        self._communication = COMMUNICATION - {"reduce"} if alone else COMMUNICATION
        self._lock = threading.Lock()
        self._phases: dict[str, list[float]] = {}
        self._staleness: Counter[int] = Counter()
        # When something was under way: from, to, in ascending order and apart from each other.
        self._stretches: deque[tuple[float, float]] = deque(maxlen=_MAX_STRETCHES)
        self._brief: deque[tuple[str, float, float, int]] = deque()  # needs no lock
        self._busy_s = self._blocked_s = 0.0
        self._last_s = -math.inf  # end of the last stretch

    def add(self, phase: str, seconds: float, nbytes: int = 0, calls: int = 1) -> None:
        """Count one call of ``phase`` that took ``seconds`` and moved ``nbytes``; none, if that is part of another."""
        with self._lock:
            self._take_brief()
            self._count(phase, time.perf_counter(), seconds, nbytes, calls)

    def add_brief(self, phase: str, start_s: float, end_s: float, nbytes: int) -> None:
        """``add`` of a call from ``start_s`` to ``end_s``, worked out later: where that would be a part of its time."""
        self._brief.append((phase, start_s, end_s, nbytes))
        if len(self._brief) >= _MOST_BRIEF:
            with self._lock:
                self._take_brief()

    def _take_brief(self) -> None:
        while self._brief:
            phase, start_s, end_s, nbytes = self._brief.popleft()
            self._count(phase, end_s, end_s - start_s, nbytes, 1)

    def _count(self, phase: str, end_s: float, seconds: float, nbytes: int, calls: int) -> None:
        totals = self._phases.get(phase)
        if totals is None:
            totals = self._phases[phase] = [0.0, 0.0, 0.0]
        totals[0] += seconds
        totals[1] += nbytes
        totals[2] += calls
        if seconds and phase in self._communication:
            if end_s - seconds <= self._last_s:
                self._cover(end_s, seconds)
            else:  # as a rule: nothing else was under way
                self._stretches.append((end_s - seconds, end_s))
                self._busy_s += seconds
                self._last_s = end_s

    def _cover(self, end_s: float, seconds: float) -> None:
        """Count a call once, however many were under way at the same time, and whenever its thread gets to say so."""
        start_s, later = end_s - seconds, []
        while self._stretches and self._stretches[-1][1] >= start_s:
            since_s, until_s = self._stretches.pop()
            if since_s > end_s:  # a thread that stood still before it could say what it had done
                later.append((since_s, until_s))
                continue
            self._busy_s -= until_s - since_s
            start_s, end_s = min(start_s, since_s), max(end_s, until_s)
        self._stretches.append((start_s, end_s))
        self._stretches.extend(reversed(later))
        self._busy_s += end_s - start_s
        self._last_s = self._stretches[-1][1]

    def blocked(self, seconds: float) -> None:
        """Count time that the program's own thread has spent in a call, and so not on the work that calls are for."""
        with self._lock:
            self._blocked_s += seconds

    @property
    def busy_s(self) -> float:
        """Seconds in which at least one call of ``COMMUNICATION`` was under way."""
        with self._lock:
            self._take_brief()
            return self._busy_s

    @property
    def blocked_s(self) -> float:
        """Seconds of the program in calls of the store."""
        return self._blocked_s

    @contextmanager
    def timed(self, phase: str, nbytes: int = 0) -> Iterator[None]:
        """Count the body of a ``with`` statement as one call of ``phase``; it is a span of the timeline, too."""
        start_s = time.perf_counter()
        start_ns = timeline.now() if timeline.on else 0
        try:
            yield
        finally:
            self.add(phase, time.perf_counter() - start_s, nbytes)
            if start_ns:
                timeline.span(phase, start_ns, nbytes=nbytes or timeline.NOTHING)

    def staleness(self, clocks: int) -> None:
        """Count one push whose gradient was computed from a value ``clocks`` updates old."""
        with self._lock:
            self._staleness[clocks] += 1

    def snapshot(self) -> dict[str, Any]:
        """``{"phases": {name: {"seconds", "bytes", "calls"}}, "staleness": {clocks: pushes}}``."""
        with self._lock:
            self._take_brief()
            phases = {
                name: {"seconds": totals[0], "bytes": int(totals[1]), "calls": int(totals[2])}
                for name, totals in sorted(self._phases.items())
            }
            return {"phases": phases, "staleness": dict(sorted(self._staleness.items()))}
