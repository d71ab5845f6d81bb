"""A promise that one thread finishes and others wait for, and the record of a failure that is reported once."""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence

from kvmpi.compiling import not_compiled
from kvmpi.deadline import Deadline, seconds_of
from kvmpi.errors import KVError, KVTimeoutError

logger = logging.getLogger(__name__)

#: One clock for pushes and deliveries: who came first decides whether a failure still concerns an operation.
#: ``next`` on it is atomic, so that a delivery needs no engine's lock.
sequence = itertools.count(1)


class Failure:
    """An error on its way to a caller, shared by everything that failed because of it.

    A failure poisons variables until it was raised to some caller. What counts is program order, not when a thread
    gets round to an operation: the failure concerns the operations pushed before its delivery, and no later one. The
    threaded engine therefore skips exactly what the naive one skips.
    """

    __slots__ = ("delivered_at", "error", "order", "recorder", "traceback")

    def __init__(self, error: BaseException) -> None:
        self.error = error
        self.traceback = error.__traceback__
        self.order = math.inf  # sequence number of the operation that failed; the first failure is the cause
        self.delivered_at: int | None = None
        self.recorder: object = None  # the engine whose wait_all is going to raise it

    def concerns(self, seq: int) -> bool:
        """Whether an operation with this sequence number must not trust what the failure poisons."""
        return self.delivered_at is None or seq < self.delivered_at

    def deliver(self) -> BaseException:
        """Count as delivered; the caller raises what this returns."""
        if self.delivered_at is None:
            self.delivered_at = next(sequence)
        # Each raise prepends frames to the traceback that the exception already has; start from the original one.
        return self.error.with_traceback(self.traceback)


def earliest(first: Failure | None, second: Failure | None) -> Failure | None:
    """The failure whose operation was pushed first."""
    if first is None or (second is not None and second.order < first.order):
        return second
    return first


def acquire_within(gate: threading.Lock, timeout_s: float | None) -> bool:
    """Acquire ``gate``; no time left means to try once."""
    if timeout_s is None:
        return gate.acquire()
    deadline = Deadline(timeout_s)
    while not gate.acquire(timeout=lock_timeout(deadline.remaining_s())):
        if deadline.expired():  # else this process has stood still
            return False
    return True


def lock_timeout(timeout_s: float | None) -> float:
    """``timeout_s`` as locks want it: infinity is more than they can count, negative means for ever to them."""
    return threading.TIMEOUT_MAX if timeout_s is None else min(max(seconds_of(timeout_s), 0.0), threading.TIMEOUT_MAX)


class Work:
    """Something that finishes later, once, with or without an error.

    Anything may create a Work and finish it from any thread. A waiter parks on a lock of its own that exists only
    while it waits: a Work that nobody waits for costs no wake-up.
    """

    __slots__ = ("__weakref__", "_callbacks", "_done", "_failure", "_gates", "_lock", "name", "on_waited")

    def __init__(self, name: str = "", _lock: threading.Lock | None = None) -> None:
        self.name = name
        self._lock = threading.Lock() if _lock is None else _lock  # guards every field below
        self._done = False
        self._failure: Failure | None = None
        self._gates: list[threading.Lock] | None = None
        self._callbacks: list[Callable[[Work], object]] | None = None
        self.on_waited: Callable[[float], object] | None = None  # told how many seconds each wait took

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}: {self.describe()}>"

    def describe(self) -> str:
        """What the Work is waiting for, for messages."""
        if not self._done:
            return "not finished"
        return "finished" if self._failure is None else f"failed with {self._failure.error!r}"

    @property
    def operations(self) -> Sequence[Work]:
        """What it is made of: one for each, where a call is several operations; else itself."""
        return [self]

    @not_compiled
    def done(self) -> bool:
        """Whether the Work is finished, with or without an error."""
        return self._done

    def error(self) -> BaseException | None:
        """The error of a failed Work; ``None`` while it is not finished. Does not count as a delivery."""
        return None if self._failure is None else self._failure.error

    @not_compiled
    def wait(self, timeout_s: float | None = None) -> None:
        """Return when the Work is finished; a failed Work raises its error, on every call.

        Raises:
            KVTimeoutError: it is not finished after ``timeout_s`` seconds; it goes on, and can be waited for again.
            ConfigError: ``timeout_s`` is no number.
        """
        if not self._done and not self._wait_timed(timeout_s):
            raise KVTimeoutError(f"{self.name or 'unnamed work'}: not finished after {timeout_s} s ({self.describe()})")
        if self._failure is not None:
            raise self._failure.deliver()

    def _wait_timed(self, timeout_s: float | None) -> bool:
        if self.on_waited is None:
            return self.wait_done(timeout_s)
        start_s = time.perf_counter()
        try:
            return self.wait_done(timeout_s)
        finally:
            self.on_waited(time.perf_counter() - start_s)

    def wait_done(self, timeout_s: float | None = None) -> bool:
        """Wait without raising the Work's error; ``False`` if time ran out."""
        if self._done:
            return True
        gate = threading.Lock()
        gate.acquire()
        with self._lock:
            if self._done:
                return True
            if self._gates is None:
                self._gates = []
            self._gates.append(gate)
        try:
            acquire_within(gate, timeout_s)
        finally:  # also after a KeyboardInterrupt: a caller that polls must not leave a gate behind each time
            if not self._done:
                with self._lock:
                    if self._gates is not None:
                        self._gates.remove(gate)
        return self._done

    def add_done_callback(self, fn: Callable[[Work], object]) -> None:
        """Call ``fn(work)`` once finished: in the finishing thread, or here and now if the Work already is.

        ``fn`` must not block. An exception that it raises is logged and goes no further; ``fn.interrupted``, if there
        is such a method, hears of it, and of one that a signal's handler raises before ``fn`` is called.
        """
        with self._lock:
            if not self._done:
                if self._callbacks is None:
                    self._callbacks = [fn]
                else:
                    self._callbacks.append(fn)
                return
        self._call_back([fn])

    def finish(self, error: BaseException | None = None) -> None:
        """Finish the Work, as failed if there is an ``error``, and run its callbacks here.

        Raises:
            KVError: it is finished already.
        """
        failure = None if error is None else Failure(error)
        callbacks: list[Callable[[Work], object]] | None = None
        try:
            with self._lock:
                if self._done:
                    raise KVError(f"{self.name or 'unnamed work'} was finished twice: {self.describe()}, now {error!r}")
                gates, callbacks = self._mark_done(failure)
            for gate in gates or ():
                gate.release()
            if callbacks:
                self._call_back(callbacks)
        except BaseException as interruption:  # of a signal's handler
            _interrupt(callbacks or (), interruption)
            raise

    def _mark_done(
        self, failure: Failure | None
    ) -> tuple[list[threading.Lock] | None, list[Callable[[Work], object]] | None]:
        """Under ``_lock``: become finished; the caller opens the gates and runs the callbacks without the lock."""
        gates, callbacks = self._gates, self._callbacks
        self._gates = self._callbacks = None
        self._failure = failure  # before _done, which readers look at without the lock
        self._done = True
        return gates, callbacks

    def _call_back(self, callbacks: list[Callable[[Work], object]]) -> None:
        for fn in callbacks:
            try:
                fn(self)
            except Exception as error:
                _interrupt([fn], error)  # a signal's handler may have raised it, before ``fn`` has begun
                logger.exception("callback %r of %r raised", fn, self)


def _interrupt(callbacks: Sequence[Callable[[Work], object]], error: BaseException) -> None:
    """Tell those of the callbacks that want to know that they may not have been called, or not to their end."""
    for fn in callbacks:
        if (interrupted := getattr(fn, "interrupted", None)) is not None:
            interrupted(error)
