"""What a process did and for how long: counters that every room feeds through one small object."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvmpi.trace import timeline


class Recorder:
    """Bytes, seconds and calls per phase, and a histogram of staleness; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._phases: dict[str, list[float]] = {}
        self._staleness: Counter[int] = Counter()

    def add(self, phase: str, seconds: float, nbytes: int = 0) -> None:
        """Count one call of ``phase`` that took ``seconds`` and moved ``nbytes``."""
        with self._lock:
            totals = self._phases.setdefault(phase, [0.0, 0.0, 0.0])
            totals[0] += seconds
            totals[1] += nbytes
            totals[2] += 1

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
            phases = {
                name: {"seconds": totals[0], "bytes": int(totals[1]), "calls": int(totals[2])}
                for name, totals in sorted(self._phases.items())
            }
            return {"phases": phases, "staleness": dict(sorted(self._staleness.items()))}
