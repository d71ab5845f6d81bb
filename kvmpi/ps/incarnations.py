"""Numbers of processes that follow each other in one place: that of a later one is larger, whatever clocks say."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from kvmpi.config import Config

#: The time counts among processes that the launcher knows nothing of: those that somebody starts by hand, or that a
#: batch system starts once more and does not count. In these ticks it fits into so many bits until 2109.
_TICK_NS, _TIME_BITS = 1_000_000, 42
#: What a batch system counts comes before the time: its hosts may have different clocks.
_AGAIN_BITS = 6


def new_incarnation(config: Config, environ: Mapping[str, str] = os.environ) -> int:
    """Of this process, or of its part in one more store."""
    again = min(restarts(environ), (1 << _AGAIN_BITS) - 1)
    time_bits = (time.time_ns() // _TICK_NS) % (1 << _TIME_BITS)
    return (config.start << _AGAIN_BITS | again) << _TIME_BITS | time_bits


def last_incarnation(start: int) -> int:
    """No process in a place before the launcher's start ``start + 1`` has a later one."""
    return ((start + 1) << _AGAIN_BITS + _TIME_BITS) - 1


def restarts(environ: Mapping[str, str]) -> int:
    """How often a batch system has started this job before; of LSF one only knows whether."""
    count = environ.get("SLURM_RESTART_COUNT", "")
    return int(count) if count.isdecimal() else int(environ.get("LSB_RESTART", "").lower() in ("y", "yes"))
