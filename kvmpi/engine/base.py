"""What the engines share: the interface, the checks of arguments, and the failures that no caller has seen yet."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

from kvmpi.engine.lanes import Lane, OrderedLane, UnorderedLane
from kvmpi.engine.operation import Operation
from kvmpi.engine.variable import Variable
from kvmpi.engine.work import Failure, Work
from kvmpi.errors import ConfigError, KVError

logger = logging.getLogger(__name__)


class Engine(ABC):
    """Runs functions as soon as the variables that they read and write allow it.

    A variable is a FIFO of reads and writes: reads between two writes run together, a write waits for the reads before
    it, everything later waits for the write. Lanes decide which thread runs a function and in which order. The
    lanes ``cpu`` (unordered) and ``inline`` (in whichever thread makes the operation ready; only for functions that
    hand work on and never block) always exist.

    Failures. An exception poisons the variables that the operation writes. An operation that reads or writes a
    poisoned variable is skipped and fails with the same cause. Once a wait has raised the failure to some caller it is
    delivered, and operations pushed from then on run again.

    All methods may be called from any thread; ``wait_all`` and ``close`` not from inside an operation.
    """

    #: Within it run inline operations that one thread has made ready together.
    together: AbstractContextManager[object] = nullcontext()
    #: What an operation calls before a thread parks to wait for it.
    _run_borrowed: Callable[[Operation, float | None], object] | None = None

    def __init__(self, num_threads: int) -> None:
        self._lock = threading.Lock()  # guards all state of the engine, its lanes, variables and operations
        self._closed = False
        self._broken_by = ""  # a signal, as the exception that it was
        self._undelivered: list[Failure] = []  # and some delivered ones
        self._prune_at = 64
        self._lanes: dict[str, Lane] = {"inline": Lane("inline")}
        self.add_lane("cpu", num_threads=num_threads)

    # -- the interface -------------------------------------------------------------------------------------------

    def add_lane(self, name: str, *, ordered: bool = False, num_threads: int = 1) -> None:
        """Add a lane; its threads start with its first operation.

        Args:
            ordered: strictly first in, first out in push order: an operation starts when all before it on the lane
                have returned and its variables admit it. Otherwise what is ready runs, larger ``priority`` first.
        Raises:
            ConfigError: the name is taken, there is no thread, or an ordered lane should have several.
        """
        if num_threads < 1 or (ordered and num_threads != 1):
            expected = "exactly 1 in an ordered lane" if ordered else "at least 1"
            raise ConfigError(f"lane {name!r}: num_threads={num_threads}, expected {expected}")
        lane = OrderedLane(name) if ordered else UnorderedLane(name, num_threads)
        with self._lock:
            self._check_open("add_lane")
            if name in self._lanes:
                raise ConfigError(f"lane {name!r} exists already; lanes: {', '.join(map(repr, self._lanes))}")
            self._lanes[name] = lane

    def variable(self, name: str = "") -> Variable:
        """A new variable of this engine."""
        return Variable(self, name)

    @abstractmethod
    def push(
        self,
        fn: Callable[..., object],
        reads: Iterable[Variable] = (),
        writes: Iterable[Variable] = (),
        lane: str = "cpu",
        priority: int = 0,
        name: str = "",
        no_skip: bool = False,
    ) -> Work:
        """Run ``fn()`` when its variables admit it, on the lane; returns the Work that finishes with it.

        Args:
            fn: if it returns a Work, the operation finishes when that Work does, and with its error; no thread waits.
            reads, writes: a variable in both is written; duplicates count once.
            priority: larger runs earlier among the ready operations of an unordered lane.
            name: for messages.
            no_skip: always call ``fn(cause)``, where ``cause`` is the error that would have skipped the operation,
                or ``None``; it fails only if ``fn`` does.
        Raises:
            KVError: the engine is closed.
            ConfigError: unknown lane, or something that is not a variable of this engine.
        """

    @abstractmethod
    def wait_all(self, timeout_s: float | None = None) -> None:
        """Return when all that has been pushed is done; raise the first undelivered failure and count all as delivered.

        What other threads push meanwhile is not waited for.

        Raises:
            KVTimeoutError: operations, which the message names, are pending after ``timeout_s`` seconds.
        """

    @abstractmethod
    def wait(self, var: Variable, timeout_s: float | None = None) -> None:
        """Return when the writes pushed so far on ``var`` have completed; then as :meth:`raise_pending`.

        Raises:
            KVTimeoutError: a write, which the message names, is pending after ``timeout_s`` seconds.
        """

    @abstractmethod
    def close(self, timeout_s: float | None = None) -> None:
        """Wait for the pending operations, then stop the threads; a second call does nothing.

        Raises:
            KVTimeoutError: operations, which the message names, are pending after ``timeout_s`` seconds. The engine
                is closed all the same, and whoever waits for one of them gets this error.
        """

    def borrow(self, *lanes: str) -> AbstractContextManager[object]:
        """Inside the ``with`` block the caller's thread does what it makes ready on these ordered lanes.

        An operation that this thread pushes, or sets free, on a lane that does nothing just then wakes no thread: it
        runs here when the caller waits for an operation, without a hand-over to another thread and back. First all that
        is ready on the first lane, which is then given back for good, then of the second. A wait with a ``timeout_s``,
        or for what depends on yet another lane, gives all back first. What is left at the end of the block is the
        lanes' own business.
        """
        return nullcontext()

    def run_borrowed(self) -> bool:
        """Do what is ready on borrowed lanes: before a wait for something else. Whether there was anything."""
        return False

    @property
    def borrows(self) -> bool:
        """Whether there is something for ``run_borrowed`` to do."""
        return False

    @property
    def broken(self) -> bool:
        """Whether a signal has closed the engine, since it came between two of its own steps."""
        return bool(self._broken_by)

    def join(self, timeout_s: float | None = None) -> None:  # noqa: B027 - the naive engine has no threads
        """Return when the threads of a broken engine have ended what they were in the middle of.

        Raises:
            KVTimeoutError: one has not after ``timeout_s`` seconds.
        """

    def raise_pending(self, var: Variable) -> None:
        """Raise the first undelivered failure that poisons ``var``, if there is one. Never waits."""
        if (failure := self._undelivered_of(var)) is not None:
            raise failure.deliver()

    def has_pending(self, var: Variable) -> bool:
        """Whether ``raise_pending`` would raise."""
        return var.poisoned and self._undelivered_of(var) is not None

    def _undelivered_of(self, var: Variable) -> Failure | None:
        if not var.poisoned:
            return None
        with self._lock:
            return var.undelivered()

    # -- for the engines -----------------------------------------------------------------------------------------

    def _operation(
        self,
        fn: Callable[..., object],
        reads: Iterable[Variable],
        writes: Iterable[Variable],
        lane: str,
        priority: int,
        name: str,
        no_skip: bool,
    ) -> Operation:
        """A checked operation. Checks come first, since a half-registered operation would block its variables."""
        target = self._lanes.get(lane)
        if target is None:
            raise ConfigError(f"push of {name!r}: no lane {lane!r}; lanes: {', '.join(map(repr, self._lanes))}")
        read, written = tuple(reads), tuple(writes)
        for var in written + read:
            if getattr(var, "_engine", None) is not self:
                raise ConfigError(f"push of {name!r}: {var!r} is not a variable of this engine")
        if len(written) > 1:
            written = tuple(dict.fromkeys(written))
        if read:
            taken = set(written)
            read = tuple([var for var in dict.fromkeys(read) if var not in taken])
        return Operation(fn, read, written, target, priority, name, no_skip, self._lock, self._run_borrowed)

    def _check_open(self, what: str) -> None:
        if self._closed:
            why = (
                f": a {self._broken_by} came while a call was being made, of which nobody knows how far it is; close "
                "this store and create another"
            )
            raise KVError(f"{what} on an engine that is closed{why if self._broken_by else ''}")

    def _record(self, op: Operation, failure: Failure) -> None:
        """Under the lock: ``op`` has failed; poison what it writes and remember what nobody has seen."""
        failure.order = min(failure.order, op.seq)
        for var in op.writes:
            var.poison(failure)
        if failure.recorder is not self:  # else it was the cause, or an operation that the function had pushed
            failure.recorder = self
            if len(self._undelivered) >= self._prune_at:  # most failures are delivered by Work.wait, which tells nobody
                self._undelivered = [known for known in self._undelivered if known.delivered_at is None]
                self._prune_at = 2 * len(self._undelivered) + 64
            self._undelivered.append(failure)

    def _raise_first(self) -> None:
        """Deliver every failure; raise the one whose operation was pushed first."""
        with self._lock:
            failures, self._undelivered = self._undelivered, []
            failures = [failure for failure in failures if failure.delivered_at is None]
            for failure in failures:
                failure.deliver()
        if failures:
            raise min(failures, key=lambda failure: failure.order).deliver()

    def _log_undelivered(self) -> None:
        """At close: an error must not end in silence because nobody waited."""
        with self._lock:
            failures = [failure for failure in self._undelivered if failure.delivered_at is None]
        for failure in failures:
            logger.warning("engine closed; nobody waited for an operation that failed with %r", failure.error)
