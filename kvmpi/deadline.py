"""One deadline per public call, a point in time that is passed down, on a clock that stands still with the process."""

from __future__ import annotations

import math
import numbers
import os
import threading
import time
from typing import Any

from kvmpi.errors import ConfigError


def seconds_of(timeout_s: Any) -> float:
    """``timeout_s`` as a float.

    Raises:
        ConfigError: it is no number of seconds.
    """
    if type(timeout_s) is float and timeout_s == timeout_s:  # as most are; an abstract class takes long to answer
        return timeout_s
    if not isinstance(timeout_s, numbers.Real) or timeout_s != timeout_s:  # the latter is not-a-number
        raise ConfigError(f"timeout_s={timeout_s!r}: expected seconds, or None to wait for ever")
    return float(timeout_s)


#: A thread that comes so much later than it has said is in a process that did not run.
_STOOD_S = 1.0


class RunningTime:
    """The clock of deadlines, which stands still while this process does (SIGSTOP, a frozen container): those that it
    waits for may have been stopped with it, and get their time again. If they were not, they answer at once.

    A thread has to say again and again that the process runs, or nothing is known of times in which it did not.
    """

    __slots__ = ("_due_s", "_lock", "_seen_s", "stood_s")

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the fields below
        self.stood_s = 0.0
        self._seen_s = 0.0  # when the thread came last
        self._due_s = math.inf  # when it is to come again, at the latest

    def now_s(self) -> float:
        """Seconds on ``time.monotonic`` without those in which this process did not run."""
        now_s = time.monotonic()
        if now_s - self._due_s > _STOOD_S:
            self._look(now_s, math.inf)  # until the thread comes
        return now_s - self.stood_s

    def tick(self, within_s: float) -> None:
        """By the thread: this process runs, and it will say so again in ``within_s``."""
        now_s = time.monotonic()
        self._look(now_s, now_s + within_s)

    def _look(self, now_s: float, due_s: float) -> None:
        with self._lock:
            if now_s - self._due_s > _STOOD_S:
                self.stood_s += now_s - self._seen_s
            self._seen_s, self._due_s = now_s, due_s

    def forked(self) -> None:
        """This is a child, which has no such thread."""
        self._lock, self._due_s = threading.Lock(), math.inf


running_time = RunningTime()
_now_s = running_time.now_s

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=running_time.forked)


class Deadline:
    """The point in time at which a call has to give up; ``None`` seconds is never."""

    __slots__ = ("expires_s", "timeout_s")

    def __init__(self, timeout_s: float | None) -> None:
        # Made by every call: a small sum takes no more than seven times as long as this.
        if type(timeout_s) is not float or timeout_s != timeout_s:
            timeout_s = math.inf if timeout_s is None else seconds_of(timeout_s)
        self.timeout_s = timeout_s
        self.expires_s = timeout_s + _now_s()

    def remaining_s(self) -> float:
        """Seconds left, never negative; ``inf`` for ever."""
        return max(0.0, self.expires_s - running_time.now_s())

    def expired(self) -> bool:
        return running_time.now_s() >= self.expires_s

    def passed(self, at_s: float) -> bool:
        """As ``expired``, for a time that has been asked of ``time.monotonic``."""
        if at_s - running_time.stood_s < self.expires_s:
            return False
        running_time.now_s()
        return at_s - running_time.stood_s >= self.expires_s
