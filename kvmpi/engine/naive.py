"""The engine for debugging, and the oracle of the other: every operation runs at once in the calling thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from kvmpi.deadline import Deadline
from kvmpi.engine.base import Engine
from kvmpi.engine.operation import RETURNED, Operation, outcome, stuck
from kvmpi.engine.variable import Variable
from kvmpi.engine.work import Failure, Work, earliest, lock_timeout, sequence
from kvmpi.errors import KVError, KVTimeoutError


class NaiveEngine(Engine):
    """``push`` returns when the operation has finished. Priorities and thread counts mean nothing.

    Failures surface where they do in the threaded engine, at waits, so that a program behaves alike under both. When
    several threads push, each waits until its operation conflicts with none that runs; an operation pushed from inside
    another one runs inside it.
    """

    def __init__(self, num_threads: int) -> None:
        super().__init__(num_threads)
        self._changed = threading.Condition(self._lock)
        self._active: list[tuple[int, Operation]] = []  # (thread, operation) that run now

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
        op = self._operation(fn, reads, writes, lane, priority, name, no_skip)
        entry = (threading.get_ident(), op)
        try:
            self._enter(entry)
            result = op.call()
            failure = self._wait_for_returned(result) if isinstance(result, Work) else result
            self._leave(entry, failure)
        except BaseException:
            # The engine is closed; or a signal's handler has raised it, between two steps of the engine's own.
            with self._changed:
                if entry in self._active:
                    self._active.remove(entry)
                    self._changed.notify_all()
            raise
        if failure is not None and failure is not op.cause and not isinstance(failure.error, Exception):
            raise failure.deliver()  # Ctrl-C: it must not wait until somebody waits
        return op

    def _enter(self, entry: tuple[int, Operation]) -> None:
        """Wait until the operation conflicts with none of other threads, and let it be among those that run."""
        op = entry[1]
        with self._changed:
            self._check_open(f"push of {op.name!r}")
            while any(thread != entry[0] and _conflict(other, op) for thread, other in self._active):
                self._changed.wait()
                self._check_open(f"push of {op.name!r}")
            op.seq = next(sequence)
            for var in (*op.reads, *op.writes):
                op.cause = earliest(op.cause, var.poison_for(op.seq))
            self._active.append(entry)

    def _leave(self, entry: tuple[int, Operation], failure: Failure | None) -> None:
        """The operation is over, unless close gave up on it."""
        op = entry[1]
        with self._changed:
            self._active.remove(entry)
            self._changed.notify_all()
            if op._done:
                return
            if failure is not None:
                self._record(op, failure)
            for var in op.writes:
                var.version += 1
            gates, callbacks = op._mark_done(failure)
        assert (gates, callbacks) == (None, None), "nobody can have seen the operation yet"
        op.reads = op.writes = ()

    def _wait_for_returned(self, work: Work) -> Failure | None:
        with self._changed:
            self._changed.notify_all()  # an ordered lane is free again
        try:
            work.wait_done()
        except BaseException as error:  # Ctrl-C; the operation ends here, or its variables would stay taken
            return Failure(error)
        return outcome(work)

    def wait_all(self, timeout_s: float | None = None) -> None:
        pending = self._wait_idle("wait_all", timeout_s)
        if pending:
            raise KVTimeoutError(f"wait_all: not finished after {timeout_s} s; {stuck(pending)}")
        self._raise_first()

    def wait(self, var: Variable, timeout_s: float | None = None) -> None:
        me = threading.get_ident()

        def pending() -> list[Operation]:
            return [op for thread, op in self._active if thread != me and var in op.writes]

        with self._changed:
            if not self._changed.wait_for(lambda: not pending(), lock_timeout(timeout_s)):
                raise KVTimeoutError(
                    f"wait for variable {var.name!r}: not finished after {timeout_s} s; {stuck(pending())}"
                )
        self.raise_pending(var)

    def close(self, timeout_s: float | None = None) -> None:
        if self._closed:
            return
        deadline = Deadline(timeout_s)
        while self._wait_idle("close", deadline.remaining_s()) == [] and self._active:
            pass  # pushed by someone meanwhile
        with self._changed:
            if self._closed:
                return
            self._closed = True
            abandoned = [op for _, op in self._active]
            error = KVTimeoutError(f"close: gave up after {timeout_s} s; {stuck(abandoned)}")
            for op in abandoned:
                op._mark_done(Failure(error))
            self._changed.notify_all()
        self._log_undelivered()
        if abandoned:
            raise error

    def _wait_idle(self, what: str, timeout_s: float | None) -> list[Operation]:
        """Wait until nothing runs of what does by now; returns what still does when time is up."""
        me = threading.get_ident()
        deadline = Deadline(timeout_s)
        with self._changed:
            if any(thread == me for thread, _ in self._active):
                raise KVError(f"{what} inside an operation: waits for itself")
            before = [op for _, op in self._active]
            while (left := [op for op in before if not op._done]) and deadline.remaining_s() > 0:
                self._changed.wait(lock_timeout(deadline.remaining_s()))
            return left


def _conflict(running: Operation, op: Operation) -> bool:
    """Whether ``op`` must wait for ``running``: a write meets anything, or both want the same ordered lane."""
    if running.lane is op.lane and op.lane.ordered and running.phase != RETURNED:
        return True
    written, touched = set(op.writes), {*op.reads, *op.writes}
    return not touched.isdisjoint(running.writes) or not written.isdisjoint(running.reads)
