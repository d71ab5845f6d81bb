"""Words of shared memory that one rank writes and others wait for, asleep where compiled code can wake them."""

from __future__ import annotations

from collections.abc import Callable

try:
    from kvmpi.collectives import _native
except ImportError:
    _native = None  # type: ignore[assignment]


def wakes() -> bool:
    """Whether ``write`` wakes those who are in ``sleep_until``. The word behind each word then belongs to these two."""
    return _native is not None and _native.wakes()


#: ``write(address, value)``: what was written before is seen by whoever sees the value.
write: Callable[[int, int], None]
#: ``sleep_until(address, value, seconds)`` returns when the word is so large, or has changed, or the time is over.
sleep_until: Callable[[int, int, float], None]
if _native is not None:
    write, sleep_until = _native.write_word, _native.sleep_until
