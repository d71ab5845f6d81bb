"""How a rank waits: it polls, then polls between yields, then naps, and it gives up at the deadline."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from kvmpi.collectives.comm import Request, Waiter
from kvmpi.deadline import Deadline
from kvmpi.errors import KVTimeoutError
from kvmpi.machine import num_cores
from kvmpi.trace import stall

# MPI makes progress only inside calls, so waiting must poll; but a rank that spins takes the core from the rank it
# waits for, and the interpreter from the training thread. Hence few bare polls, then polls between yields, then naps.
# A yield costs as much as the others on this core take, a nap costs its length and that of a wake-up: yields suit
# ranks that wait for each other, naps suit ranks whose core a training thread uses. Which it is, is found out. So is
# how long such waits last: polls that come to nothing are time that a training thread does not get.
_BARE_POLLS_CROWDED = 16
_BARE_POLLS_OWN_CORE = 500
_BARE_POLLS_BUSY = 2
#: Of compiled code, which takes some nanoseconds for each.
_LOOKS_CROWDED = 10
_LOOKS_OWN_CORE = 200
#: See ``Habit``.
_POLLING_S = 200e-6
#: A yield that takes longer has met somebody who computes; how long to remember that.
_LONG_YIELD_S = 0.5e-3
_SHORTEST_BUSY_S, _LONGEST_BUSY_S = 0.05, 0.8
#: See ``Habit``.
_NAP_SHARE = 0.125
_SHORTEST_NAP_S = 20e-6
_LONGEST_NAP_S = 1e-3
#: Of naps from which a rank is woken.
_WOKEN_NAP_S = 20e-3
#: How much one more wait counts in what is usual, and up to what length: if fewer than a third of them are long, that
#: is not usual.
_LEARNING = 0.25
_LONGEST_USUAL_S = _LONGEST_NAP_S / _NAP_SHARE
_MOST_TIMES_USUAL, _SURPRISE_S = 4, 100e-6

#: A wait that lasts is told of so often.
_TELL_EVERY_S = 0.5

_PR_SET_TIMERSLACK = 29
_local = threading.local()
_bare_polls = _BARE_POLLS_CROWDED

# time.sleep(0) is no yield: since Python 3.11 it takes as long as the shortest nap, 80 us with Linux's timer slack.
_yield_core: Callable[[], object] = getattr(os, "sched_yield", lambda: time.sleep(0))


def expect_cores(num_ranks: int) -> None:
    """Say how many ranks share this host: with a core for each, a rank polls for longer before it yields."""
    global _bare_polls
    cores = num_cores()
    _bare_polls = _BARE_POLLS_OWN_CORE if num_ranks <= cores else _BARE_POLLS_CROWDED


def looks() -> tuple[int, bool]:
    """How often compiled code looks whether others are there, and whether it lets others run then that may want this
    core."""
    is_crowded = _bare_polls == _BARE_POLLS_CROWDED
    return (_LOOKS_CROWDED if is_crowded else _LOOKS_OWN_CORE), is_crowded


def _sharpen_naps() -> None:
    """Take 50 us of timer slack off this thread's naps, where the system is Linux."""
    if getattr(_local, "sharp", False):
        return
    _local.sharp = True
    if sys.platform == "linux":
        import ctypes

        try:
            ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1000, 0, 0, 0)  # ns
        except (OSError, AttributeError):
            pass  # naps are longer then, nothing else


class _Neighbours:
    """Whether others on this process's cores compute, as far as its waiting threads can tell.

    A yield, or a poll in which an MPI library yields, then lasts as long as their slice of time, milliseconds, while a
    nap ends when it should. So after one that took long there are only naps for a while; twice as long after the next.
    """

    __slots__ = ("_for_s", "_until_s", "compute")

    def __init__(self) -> None:
        self.compute = False
        self._for_s, self._until_s = _SHORTEST_BUSY_S, 0.0

    def may_yield(self, now_s: float) -> bool:
        """Whether they did not compute, or that is to be found out again."""
        return not self.compute or now_s >= self._until_s

    def let_run(self, took_s: float, now_s: float) -> None:
        """They have had the core for so long."""
        if took_s < _LONG_YIELD_S:
            self.compute, self._for_s = False, _SHORTEST_BUSY_S
        elif self.may_yield(now_s):
            self._for_s = min(2 * self._for_s, _LONGEST_BUSY_S) if self.compute else _SHORTEST_BUSY_S
            self.compute, self._until_s = True, now_s + self._for_s


_neighbours = _Neighbours()


class Habit:
    """How long waits of one kind last as a rule.

    Args:
        nap_share: a nap takes this part of the time waited so far, or of what is usual: so much later than it could the
            wait may end.
        polling_s: what lasts longer is worth no polls, only naps.
        bare_polls: at most so many polls without a yield.
    """

    __slots__ = ("bare_polls", "nap_share", "polling_s", "usual_s")

    def __init__(
        self, nap_share: float = _NAP_SHARE, polling_s: float = _POLLING_S, bare_polls: int = _BARE_POLLS_OWN_CORE
    ) -> None:
        self.nap_share, self.polling_s, self.bare_polls, self.usual_s = nap_share, polling_s, bare_polls, 0.0

    def learn(self, waited_s: float) -> None:
        """One more such wait is over."""
        believed_s = min(waited_s, _LONGEST_USUAL_S, _MOST_TIMES_USUAL * self.usual_s + _SURPRISE_S)
        self.usual_s += _LEARNING * (believed_s - self.usual_s)


_ANY = Habit()
#: Waits for a device, which computes for milliseconds or seconds and wakes nobody.
_DEVICE = Habit(nap_share=0.02)


class Patience:
    """The waiting of one call: ``pause`` after every fruitless poll, ``progress`` after a fruitful one.

    Args:
        habit: of waits of this kind.
        waiter: what wakes when there may be progress, for naps; None: nothing does.
    """

    __slots__ = (
        "_deadline", "_describe", "_habit", "_idle", "_last_s", "_since_s", "_tell_at_s", "_waiter", "_waiting"
    )  # fmt: skip

    def __init__(
        self, deadline: Deadline, describe: Callable[[], str], habit: Habit = _ANY, waiter: Waiter | None = None
    ) -> None:
        self._deadline, self._describe, self._habit, self._waiter = deadline, describe, habit, waiter
        self._idle, self._since_s, self._last_s = 0, 0.0, 0.0
        self._waiting: stall.Waiting | None = None
        self._tell_at_s = 0.0

    def progress(self) -> None:
        """What was waited for has come, or a part of it."""
        if self._idle:
            self._habit.learn(self._last_s - self._since_s)
            self._idle, self._waiting = 0, None

    def pause(self) -> None:
        """Let others run for a moment.

        Raises:
            KVTimeoutError: the deadline has passed; the text is what ``describe`` returns then.
        """
        now_s = time.monotonic()
        self._idle += 1
        if self._idle == 1:
            self._since_s, self._tell_at_s = now_s, now_s + _TELL_EVERY_S
        elif now_s - self._last_s > _LONG_YIELD_S:
            _neighbours.let_run(now_s - self._last_s, now_s)
        self._last_s = now_s
        waited_s, usual_s = now_s - self._since_s, self._habit.usual_s
        short = usual_s < self._habit.polling_s
        polls = short and waited_s < self._habit.polling_s
        bare_polls = min(_bare_polls, self._habit.bare_polls) if polls and not _neighbours.compute else _BARE_POLLS_BUSY
        if short and self._idle <= bare_polls:
            return
        if polls and _neighbours.may_yield(now_s):
            _yield_core()
            self._last_s = time.monotonic()
            _neighbours.let_run(self._last_s - now_s, self._last_s)
        else:
            if self._waiter is not None:
                self._waiter(_WOKEN_NAP_S)
            else:
                _sharpen_naps()
                nap_s = self._habit.nap_share * max(waited_s, usual_s)
                time.sleep(min(max(nap_s, _SHORTEST_NAP_S), _LONGEST_NAP_S))
            self._last_s = time.monotonic()
            if now_s >= self._tell_at_s:
                self._tell(now_s)
        if self._deadline.passed(now_s):
            self._waiting = None  # whoever keeps the error keeps this object
            raise KVTimeoutError(self._describe())

    def _tell(self, now_s: float) -> None:
        """Say whom this waits for, for whoever wants to know. Only here: MPI may not be asked from another thread."""
        if self._waiting is None:
            self._waiting = stall.Waiting(self._since_s)
        self._waiting.text = self._describe()
        self._tell_at_s = now_s + _TELL_EVERY_S


def in_vain(deadline: Deadline) -> str:
    """How an error ends that says which rank is missing. What stands before `` within `` is shown while one waits."""
    return f" within {deadline.timeout_s:.1f} s; look at that worker, or raise KVMPI_TIMEOUT_S"


def wait_all(requests: Iterable[Request], deadline: Deadline, describe: Callable[[], str], habit: Habit = _ANY) -> None:
    """Return when every request is done, or raise ``KVTimeoutError`` with the text of ``describe``."""
    patience = Patience(deadline, describe, habit)
    pending = list(requests)
    while pending:
        left = [request for request in pending if not request.test()]
        if len(left) < len(pending):
            patience.progress()
        elif left:
            patience.pause()
        pending = left


def wait_devices(events: Iterable[Any], deadline: Deadline, describe: Callable[[], str]) -> None:
    """Return when every event of CuPy or torch (``arrays.fence``) has come, or raise as ``wait_all``; None is none."""
    pending = [_Event(event) for event in events if event is not None]
    if pending:
        wait_all(pending, deadline, describe, _DEVICE)


class _Event:
    """See ``Request``."""

    __slots__ = ("_event",)

    def __init__(self, event: Any) -> None:
        self._event = event

    def test(self) -> bool:
        event = self._event
        return bool(event.query() if hasattr(event, "query") else event.done)
