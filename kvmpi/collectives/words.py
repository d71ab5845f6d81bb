"""Words of shared memory that one rank writes and others wait for, asleep where compiled code can wake them."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from kvmpi.arrays import address_of

try:
    from kvmpi.collectives import _native
except ImportError:
    _native = None  # type: ignore[assignment]


#: Words between two words, each of which is stored to by another core.
_APART = 64
#: A word goes so often there and back at a time, and so many times: of those that nobody has interrupted one is there.
_ROUNDS, _TIMES = 200, 40


def wakes() -> bool:
    """Whether ``write`` wakes those who are in ``sleep_until``. The word behind each word then belongs to these two."""
    return _native is not None and _native.wakes()


def round_trip_s(cores: tuple[int, int]) -> float | None:
    """Seconds that a word takes from one core to another and back: some tens of nanoseconds between the threads of one
    core, hundreds where they share no cache. None where nobody can tell.
    """
    if _native is None or not hasattr(os, "sched_setaffinity"):
        return None
    memory = np.zeros(2 * _APART, np.uint64)  # in different cache lines
    places = [address_of(memory[:_APART]), address_of(memory[_APART:])]

    def take_part(own: int) -> float:
        os.sched_setaffinity(0, {cores[own]})  # of this thread
        return float(_native.exchange_words(places[own], places[1 - own], _ROUNDS, _TIMES, not own))

    with ThreadPoolExecutor(2) as pool:
        try:
            found_s, _ = pool.map(take_part, (0, 1))
        except OSError:  # a core that is not ours, or a sandbox
            return None
    return found_s if found_s > 0 else None


#: ``write(address, value)``: what was written before is seen by whoever sees the value.
write: Callable[[int, int], None]
#: ``sleep_until(address, value, seconds)`` returns when the word is so large, or has changed, or the time is over.
sleep_until: Callable[[int, int, float], None]
if _native is not None:
    write, sleep_until = _native.write_word, _native.sleep_until
