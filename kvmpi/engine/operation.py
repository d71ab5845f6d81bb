"""One pushed operation: a function, the variables it reads and writes, and the Work that its caller waits for."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvmpi.engine.lanes import Lane
from kvmpi.engine.variable import Variable
from kvmpi.engine.work import Failure, Work
from kvmpi.errors import KVError

QUEUED, RUNNING, RETURNED = range(3)


class Operation(Work):
    """A Work that only its engine finishes. Its lock is the engine's: one critical section completes it."""

    __slots__ = (
        "cause", "fn", "lane", "no_skip", "num_waits", "phase", "priority", "reads", "run_borrowed", "seq", "writes",
    )  # fmt: skip

    def __init__(
        self,
        fn: Callable[..., object],
        reads: tuple[Variable, ...],
        writes: tuple[Variable, ...],
        lane: Lane,
        priority: int,
        name: str,
        no_skip: bool,
        lock: threading.Lock,
        run_borrowed: Callable[[Operation, float | None], object] | None = None,
    ) -> None:
        # What Work.__init__ does, without the call: this is the hot path of push.
        self.name = name
        self._lock = lock
        self._done = False
        self._failure = None
        self._gates = None
        self._callbacks = None
        self.on_waited = None
        self.fn: Callable[..., object] | None = fn
        self.reads = reads  # no variable that is also written, none twice
        self.writes = writes
        self.lane = lane
        self.priority = priority
        self.no_skip = no_skip
        self.seq = 0  # place in push order
        self.num_waits = 0  # variables that do not admit the operation yet
        self.cause: Failure | None = None  # why it must not run; known when every variable has admitted it
        self.phase = QUEUED
        self.run_borrowed = run_borrowed  # called before a thread parks; see ``Engine.borrow``

    def wait_done(self, timeout_s: float | None = None) -> bool:
        if not self._done and self.run_borrowed is not None:
            self.run_borrowed(self, timeout_s)
        return super().wait_done(timeout_s)

    def describe(self) -> str:
        if self._done:
            return super().describe()
        if self.num_waits:
            blockers = [var.name or "unnamed" for var in (*self.writes, *self.reads)]
            return f"waits for {self.num_waits} of its variables: {', '.join(blockers)}"
        return (
            f"queued on lane {self.lane.name!r}",
            f"running on lane {self.lane.name!r}",
            "its function has returned a Work that is not finished",
        )[self.phase]

    def finish(self, error: BaseException | None = None) -> None:
        raise KVError(f"{self.name or 'unnamed operation'}: only its engine finishes an operation")

    def call(self) -> Failure | Work | None:
        """Run the function, or skip it. Returns what is left to wait for, or the failure, or ``None``: success."""
        # Nothing else refers to the function from here on: what it captured is freed with this frame, outside locks.
        fn, self.fn = self.fn, None
        cause = self.cause
        assert fn is not None, "an operation runs once"
        self.phase = RUNNING
        try:
            if self.no_skip:
                result = fn(None if cause is None else cause.error)
            elif cause is None:
                result = fn()
            else:
                return cause
        except BaseException as error:  # whatever it is, the lane's thread must survive it and somebody must see it
            if cause is not None and error is cause.error:
                return cause  # passed on by a no_skip function: still the same failure, to be reported once
            return Failure(error)
        if not isinstance(result, Work):
            return None
        self.phase = RETURNED
        return outcome(result) if result._done else result  # several that are may not know it; a callback tells


def outcome(work: Work) -> Failure | None:
    """How an operation ends whose function returned ``work``, which is finished.

    The record is shared, so that one failure is reported once. One that was delivered before this operation failed
    has been reported for something else: then the operation has its own, or it would fail in silence.
    """
    failure = work._failure
    if failure is None or failure.delivered_at is None:
        return failure
    return Failure(failure.error)


def stuck(ops: list[Operation], limit: int = 5) -> str:
    """Names of pending operations, oldest first, for messages."""
    ops = sorted(ops, key=lambda op: op.seq)
    shown = [f"{op.name or 'unnamed'} ({op.describe()})" for op in ops[:limit]]
    more = f" and {len(ops) - limit} more" if len(ops) > limit else ""
    return f"{len(ops)} pending: {'; '.join(shown)}{more}"
