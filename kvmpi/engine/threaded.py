"""The engine of production: every lane has threads, and a finishing operation hands over to the next."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext

from kvmpi.deadline import Deadline
from kvmpi.engine.base import Engine
from kvmpi.engine.lanes import OrderedLane, ThreadLane
from kvmpi.engine.operation import Operation, outcome, stuck
from kvmpi.engine.variable import Variable
from kvmpi.engine.work import Failure, Work, acquire_within, earliest, lock_timeout, sequence
from kvmpi.errors import ConfigError, KVError, KVTimeoutError
from kvmpi.machine import take_short_slices


class _NoThreadError(RuntimeError):
    """The system gives this process no more threads."""


class _Return:
    """What is called when the Work is done that an operation's function has returned."""

    __slots__ = ("_engine", "_op")

    def __init__(self, engine: ThreadedEngine, op: Operation) -> None:
        self._engine, self._op = engine, op

    def __call__(self, work: Work) -> None:
        self._engine._complete(self._op, outcome(work), None)

    def interrupted(self, error: BaseException) -> None:
        if not isinstance(error, _NoThreadError):
            self._engine._break(error)


class _Loan:
    """``with``: the calling thread takes lanes when there is something to do; see ``Engine.borrow``."""

    __slots__ = ("_engine", "first", "lanes", "runs")

    def __init__(self, engine: ThreadedEngine, lanes: tuple[OrderedLane, ...]) -> None:
        self._engine, self.lanes = engine, lanes
        self.first = 0  # lanes before this one are not taken any more
        self.runs = False  # an operation

    @property
    def held(self) -> Iterator[OrderedLane]:
        """The lanes that the thread has: they know it, so that no signal can come between what two say of it."""
        return (lane for lane in self.lanes if lane.borrower is self)

    def __enter__(self) -> None:
        if self._engine._loan is None:
            self._engine._local.loan = self

    def __exit__(self, *_: object) -> None:
        self._engine._end_loan(self)


class ThreadedEngine(Engine):
    """One lock guards everything; it is held for a few microseconds and never while foreign code runs.

    A wake-up is the unit of cost here (ten to fifty microseconds; everything else is about one), so a thread that
    finishes an operation and thereby makes another of its lane ready goes on with that one, and an ordered lane
    is woken only for a head that can run.
    """

    def __init__(self, num_threads: int) -> None:
        super().__init__(num_threads)
        self._pending: set[Operation] = set()
        #: Gates to open when none of these operations is pending any more.
        self._drained: list[tuple[threading.Lock, set[Operation]]] = []
        self._threads: list[threading.Thread] = []
        #: .backlog: inline operations that this thread is going to run; .loan: of the lane that it has borrowed.
        self._local = threading.local()

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
        failure: Failure | None = None
        try:
            if self._register(op) and op.lane.queue is None:
                failure = self._run_inline(op)
        except BaseException as error:
            # Else a signal's handler has raised it: an operation may be half registered, or half over.
            if not isinstance(error, (KVError, _NoThreadError)):
                self._break(error)
            raise
        if failure is not None and failure is not op.cause and not isinstance(failure.error, Exception):
            raise failure.deliver()  # Ctrl-C in the calling thread: it must not wait until somebody waits
        return op

    def _break(self, error: BaseException) -> None:
        """A signal has come between two steps of the engine's own: nothing waits for what it may have left undone."""
        with self._lock:
            if self._closed:
                return
            self._broken_by = type(error).__name__
            tell = self._stop(error)
        tell()

    def _register(self, op: Operation) -> bool:
        """Let ``op`` take its places; whether it waits for none of its variables."""
        wake: list[Callable[[], object]] = []
        with self._lock:
            if self._closed:
                self._check_open(f"push of {op.name!r}")
            op.seq = next(sequence)
            self._pending.add(op)
            if self._drained and self._is_inside:
                for _, left in self._drained:  # who waits for an operation waits for what it pushes
                    left.add(op)
            for var in op.reads:
                if not var.request_read(op):
                    op.num_waits += 1
                elif var._failures:
                    op.cause = earliest(op.cause, var.poison_for(op.seq))
            for var in op.writes:
                if not var.request_write(op):
                    op.num_waits += 1
                elif var._failures:
                    op.cause = earliest(op.cause, var.poison_for(op.seq))
            ready, queue = not op.num_waits, op.lane.queue
            if queue is not None:
                queue.admit(op)
                if ready and queue.enqueue(op):
                    self._summon(queue, wake)
        for call in wake:
            call()
        return ready

    def wait_all(self, timeout_s: float | None = None) -> None:
        self._refuse_own_threads("wait_all")
        if not self._wait_drained(timeout_s):
            with self._lock:
                pending = list(self._pending)
            raise KVTimeoutError(f"wait_all: not finished after {timeout_s} s; {stuck(pending)}")
        self._raise_first()

    def wait(self, var: Variable, timeout_s: float | None = None) -> None:
        write = var._last_write
        if write is not None and not write.wait_done(timeout_s):
            raise KVTimeoutError(
                f"wait for variable {var.name!r}: not finished after {timeout_s} s; last write: {stuck([write])}"
            )
        self.raise_pending(var)

    def close(self, timeout_s: float | None = None) -> None:
        self._refuse_own_threads("close")
        deadline = Deadline(timeout_s)
        while True:
            in_time = self._wait_drained(deadline.remaining_s())
            with self._lock:
                if self._closed:
                    return
                if in_time and self._pending:
                    continue  # pushed by someone between the last completion and now
                error = None
                if self._pending:
                    error = KVTimeoutError(f"close: gave up after {timeout_s} s; {stuck(list(self._pending))}")
                tell = self._stop(error)
                break
        tell()
        if error is not None:
            raise error
        self._join(deadline)

    def join(self, timeout_s: float | None = None) -> None:
        self._join(Deadline(timeout_s))
        if any(thread.is_alive() for thread in self._threads):
            raise KVTimeoutError(f"an operation on an engine that a signal has closed runs on after {timeout_s} s")

    def _join(self, deadline: Deadline) -> None:
        for thread in self._threads:
            if thread.is_alive():  # one that is about to start will find that its lane has stopped
                thread.join(lock_timeout(deadline.remaining_s()))

    # -- running operations --------------------------------------------------------------------------------------

    def _start_thread(self, lane: ThreadLane) -> None:
        thread = threading.Thread(target=self._serve, args=(lane,), name=f"kvmpi-{lane.name}", daemon=True)
        with self._lock:
            self._threads.append(thread)
        try:
            thread.start()
        except RuntimeError as error:  # no more threads: the operation stays queued, and the next one tries again
            with self._lock:
                self._threads.remove(thread)
                lane.num_started -= 1
            raise _NoThreadError(str(error)) from None

    def _serve(self, lane: ThreadLane) -> None:
        """The life of a lane's thread."""
        take_short_slices()  # others wait for what it does, and a training thread would not let it run
        gate = threading.Lock()
        gate.acquire()
        op: Operation | None = None  # never set while parked: an idle thread must keep nothing alive
        while True:
            with self._lock:
                op = lane.take()
                if op is None:
                    if lane.stopped:
                        return
                    lane.parked.append(gate)
            if op is None:
                gate.acquire()
            while op is not None:
                op = self._run(op, lane)

    def _run(self, op: Operation, lane: ThreadLane) -> Operation | None:
        """Run ``op`` on its lane's thread; returns the operation that this thread runs next, if it has one."""
        result = op.call()
        if isinstance(result, Work):
            result.add_done_callback(_Return(self, op))
            return None
        return self._complete(op, result, lane)

    def _run_inline(self, op: Operation) -> Failure | None:
        """Run ``op`` in this thread; returns its failure, if that is known already."""
        result = op.call()
        if isinstance(result, Work):
            result.add_done_callback(_Return(self, op))
            return None
        self._complete(op, result, None)
        return result

    def _complete(self, op: Operation, failure: Failure | None, lane: ThreadLane | None) -> Operation | None:
        """``op`` has finished: let go of its variables, start what waited for them, tell who waits for it.

        ``lane`` is the lane whose thread this is. Returns the operation that the thread runs next, if it has one.
        """
        freed: list[Operation] = []
        inline: list[Operation] = []
        wake: list[Callable[[], object]] = []
        following: Operation | None = None
        with self._lock:
            if op._done:  # close gave up on it
                return None
            if failure is not None:
                self._record(op, failure)
            for var in op.reads:
                var.release_read(freed)
            for var in op.writes:
                var.release_write(op, freed)
            # A callback may take its time, and so may an inline operation: this thread then promises nothing to its
            # lane, and others are woken for what is ready.
            goes_on = lane is not None and not op._callbacks
            if freed:
                goes_on = goes_on and not any(ready.lane.queue is None for ready in freed)
                own = lane if goes_on else None
                for ready in freed:
                    target = ready.lane.queue
                    if target is None:
                        inline.append(ready)
                    elif target.enqueue(ready):
                        if target is own:
                            own = None  # this thread takes one; more need more threads
                        else:
                            self._summon(target, wake)
            if goes_on and lane is not None:
                following = lane.take()
            self._pending.discard(op)
            gates, callbacks = op._mark_done(failure)
            if self._drained:
                for gate, left in self._drained:
                    left.discard(op)
                    if not left:
                        wake.append(gate.release)
                self._drained = [waiting for waiting in self._drained if waiting[1]]
        for call in wake:
            call()
        for gate in gates or ():
            gate.release()
        op.reads = op.writes = ()  # a caller may keep the Work for long
        if callbacks:
            op._call_back(callbacks)
        if inline:
            self._drain_inline(inline)
        return following

    def _drain_inline(self, ops: list[Operation]) -> None:
        """Run inline operations one after the other: a chain of them that free each other does not recurse."""
        backlog: deque[Operation] | None = getattr(self._local, "backlog", None)
        if backlog is not None:
            backlog.extend(ops)
            return
        backlog = self._local.backlog = deque(ops)
        try:
            with self.together if len(ops) > 1 else nullcontext():
                while backlog:
                    op = backlog.popleft()
                    if not op._done:  # else close gave up on it
                        self._run_inline(op)
        finally:
            self._local.backlog = None

    # -- borrowed lanes ------------------------------------------------------------------------------------------

    def borrow(self, *lanes: str) -> _Loan:
        found = tuple(lane for lane in map(self._lanes.__getitem__, lanes) if isinstance(lane, OrderedLane))
        if len(found) < len(lanes):
            raise ConfigError(f"borrow of lanes {', '.join(map(repr, lanes))}: all must be ordered")
        return _Loan(self, found)

    # A signal may come between any two lines here. A loan that stays in ``_local`` by that is ended by the next wait of
    # this thread; until then others may wait for the lanes that it has.

    @property
    def _loan(self) -> _Loan | None:
        """This thread's."""
        return getattr(self._local, "loan", None)

    def _summon(self, lane: ThreadLane, wake: list[Callable[[], object]]) -> None:
        """Under the lock: this thread has made something ready on ``lane``; arguments as of ``ThreadLane.summon``."""
        loan = self._loan
        wanted = () if loan is None else loan.lanes[loan.first :]
        if not (isinstance(lane, OrderedLane) and lane in wanted and (lane.borrower is loan or lane.lend(loan))):
            lane.summon(wake, self._start_thread)

    def _give_back(self, loan: _Loan, lanes: Iterable[OrderedLane]) -> None:
        wake: list[Callable[[], object]] = []
        with self._lock:
            for lane in lanes:
                lane.give_back(loan, wake, self._start_thread)
        for call in wake:
            call()

    def _end_loan(self, loan: _Loan | None) -> None:
        if loan is not None and not loan.runs and self._loan is loan:
            self._give_back(loan, loan.lanes)
            self._local.loan = None

    @property
    def borrows(self) -> bool:
        loan = self._loan
        return loan is not None and not loan.runs and any(True for _ in loan.held)

    def run_borrowed(self) -> bool:
        loan, ran = self._loan, False
        if loan is not None and not loan.runs:
            while (lane := next(loan.held, None)) is not None:
                ran = True
                self._run_lane(loan, lane, None)
        return ran

    def _run_borrowed(self, op: Operation, timeout_s: float | None) -> None:
        """This thread is about to wait for ``op``: meanwhile it does what there is to do on the lanes that it has."""
        loan = self._loan
        if loan is None or loan.runs:
            return
        while timeout_s is None and not op._done and (lane := next(loan.held, None)) is not None:
            self._run_lane(loan, lane, op)
        if not op._done:
            self._end_loan(loan)

    def _run_lane(self, loan: _Loan, lane: OrderedLane, op: Operation | None) -> None:
        """Run what is ready on the first lane that the thread has, until ``op`` is done; else give the lane back.

        While this thread may wait for other processes on a lane, it must have nothing to do on those before it, and
        nothing older on others: that may be what those processes wait for before they come to this one.
        """
        loan.first = loan.lanes.index(lane)
        interrupt: Failure | None = None
        try:
            loan.runs = True
            while interrupt is None and (op is None or not op._done):
                with self._lock:
                    found = lane.take() if lane.borrower is loan else None
                    older = [] if found is None else [other for other in loan.held if other.has_before(found)]
                if found is None:
                    break
                if older:
                    self._give_back(loan, older)
                failure = self._run_inline(found)
                if failure is not None and found is not op and not isinstance(failure.error, Exception):
                    interrupt = failure  # Ctrl-C: it must not wait until whoever waits for that operation hears of it
        except BaseException as error:
            self._break(error)
            raise
        finally:
            loan.runs = False
        if op is None or not op._done:
            loan.first += 1
            self._give_back(loan, (lane,))
        if interrupt is not None and interrupt.delivered_at is None:
            raise interrupt.deliver()

    # -- waiting and closing -------------------------------------------------------------------------------------

    @property
    def _is_inside(self) -> bool:
        """Whether an operation of a lane with threads runs in this thread."""
        loan = self._loan
        return threading.current_thread() in self._threads or (loan is not None and loan.runs)

    def _refuse_own_threads(self, what: str) -> None:
        if self._is_inside:
            raise KVError(f"{what} inside an operation, on thread {threading.current_thread().name}: waits for itself")

    def _wait_drained(self, timeout_s: float | None) -> bool:
        """Wait until what has been pushed by now is done; ``False`` if time ran out."""
        self._end_loan(self._loan)
        gate = threading.Lock()
        gate.acquire()
        with self._lock:
            if not self._pending:
                return True
            waiting = gate, set(self._pending)
            self._drained.append(waiting)
        opened = False
        try:
            opened = acquire_within(gate, timeout_s)
        finally:
            if not opened:
                with self._lock:
                    if waiting in self._drained:
                        self._drained.remove(waiting)
                    else:
                        opened = True  # just now
        return opened

    @property
    def _queues(self) -> list[ThreadLane]:
        return [lane.queue for lane in self._lanes.values() if lane.queue is not None]

    def _stop(self, error: BaseException | None) -> Callable[[], None]:
        """Under the lock: stop the threads; with an ``error``, end what is pending. Returns what tells all of it."""
        self._closed = True
        callbacks = self._abandon(error) if error is not None else []
        gates = [gate for queue in self._queues for gate in queue.stop()]

        def tell() -> None:
            for gate in gates:
                gate.release()
            self._log_undelivered()
            for op, fns in callbacks:
                op._call_back(fns)

        return tell

    def _abandon(self, error: BaseException) -> list[tuple[Operation, list[Callable[[Work], object]]]]:
        """Under the lock: end every pending operation, so that nobody waits for ever; returns callbacks to run.

        All in one critical section, since a stuck function may return at any moment: its completion then finds the
        operation done, and frees nothing.
        """
        failure = Failure(error)
        failure.deliver()
        callbacks: list[tuple[Operation, list[Callable[[Work], object]]]] = []
        for op in sorted(self._pending, key=lambda op: op.seq):
            gates, fns = op._mark_done(failure)
            for gate in gates or ():
                gate.release()
            if fns:
                callbacks.append((op, fns))
        for gate, _ in self._drained:
            gate.release()
        self._pending.clear()
        self._drained.clear()
        for queue in self._queues:
            queue.clear()
        return callbacks
