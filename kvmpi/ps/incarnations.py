"""Numbers of processes that follow each other in one place: that of a later one is larger, whatever clocks say."""

from __future__ import annotations

import time

from kvmpi.config import Config

#: The time counts among processes that the launcher knows nothing of: those that a batch system has started once more,
#: and those that somebody starts by hand. In these ticks it fits into so many bits until 2059.
_TICK_NS, _TIME_BITS = 10_000, 48


def new_incarnation(config: Config) -> int:
    """Of this process, or of its part in one more store."""
    return (config.start << _TIME_BITS) | (time.time_ns() // _TICK_NS) % (1 << _TIME_BITS)


def last_incarnation(start: int) -> int:
    """No process in a place before the launcher's start ``start + 1`` has a later one."""
    return ((start + 1) << _TIME_BITS) - 1
