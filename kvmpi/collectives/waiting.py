"""How a rank waits: it polls, then yields, then sleeps for moments, and it gives up at the deadline."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from kvmpi.collectives.comm import Request
from kvmpi.deadline import Deadline
from kvmpi.errors import KVTimeoutError

# MPI makes progress only inside calls, so waiting must poll; but a rank that spins takes the core from the rank it
# waits for, and the interpreter from the training thread. Hence few bare polls, then polls between yields, then naps.
_BARE_POLLS = 8
_YIELDING_POLLS = 64
_FIRST_NAP_S = 20e-6
_LONGEST_NAP_S = 400e-6


class Patience:
    """The waiting of one call: ``pause`` after every fruitless poll, ``progress`` after a fruitful one."""

    __slots__ = ("_deadline", "_describe", "_idle", "_nap_s")

    def __init__(self, deadline: Deadline, describe: Callable[[], str]) -> None:
        self._deadline, self._describe = deadline, describe
        self._idle, self._nap_s = 0, _FIRST_NAP_S

    def progress(self) -> None:
        self._idle, self._nap_s = 0, _FIRST_NAP_S

    def pause(self) -> None:
        """Let others run for a moment.

        Raises:
            KVTimeoutError: the deadline has passed; the text is what ``describe`` returns then.
        """
        self._idle += 1
        if self._idle <= _BARE_POLLS:
            return
        if self._idle <= _BARE_POLLS + _YIELDING_POLLS:
            time.sleep(0)
            return
        time.sleep(self._nap_s)
        self._nap_s = min(2 * self._nap_s, _LONGEST_NAP_S)
        if self._deadline.expired():
            raise KVTimeoutError(self._describe())


def wait_all(requests: Iterable[Request], deadline: Deadline, describe: Callable[[], str]) -> None:
    """Return when every request is done, or raise ``KVTimeoutError`` with the text of ``describe``."""
    patience = Patience(deadline, describe)
    pending = list(requests)
    while pending:
        left = [request for request in pending if not request.test()]
        if len(left) < len(pending):
            patience.progress()
        elif left:
            patience.pause()
        pending = left
