"""One deadline per public call: a duration becomes a point in time at the entry, and that is passed down."""

from __future__ import annotations

import math
import numbers
import time
from typing import Any

from kvmpi.errors import ConfigError


def seconds_of(timeout_s: Any) -> float:
    """``timeout_s`` as a float.

    Raises:
        ConfigError: it is no number of seconds.
    """
    if not isinstance(timeout_s, numbers.Real) or timeout_s != timeout_s:  # the latter is not-a-number
        raise ConfigError(f"timeout_s={timeout_s!r}: expected seconds, or None to wait for ever")
    return float(timeout_s)


class Deadline:
    """The point in time at which a call has to give up; ``None`` seconds is never."""

    __slots__ = ("expires_s", "timeout_s")

    def __init__(self, timeout_s: float | None) -> None:
        self.timeout_s = math.inf if timeout_s is None else seconds_of(timeout_s)
        self.expires_s = time.monotonic() + self.timeout_s

    def remaining_s(self) -> float:
        """Seconds left, never negative; ``inf`` for ever."""
        return max(0.0, self.expires_s - time.monotonic())

    def expired(self) -> bool:
        return time.monotonic() >= self.expires_s
