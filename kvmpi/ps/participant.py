"""A master as a member of the job: how it joins and leaves, calls that all clients make, how it asks something."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from kvmpi.config import Config
from kvmpi.deadline import Deadline
from kvmpi.engine import Work
from kvmpi.errors import ConfigError, KVError, ProtocolError, rebuild
from kvmpi.machine import host_name
from kvmpi.place import Place
from kvmpi.ps.asks import NOWHERE, SCHEDULER, Ask, Operation
from kvmpi.ps.chains import PARTS_PER_SERVER
from kvmpi.ps.consistency import discipline
from kvmpi.ps.incarnations import new_incarnation
from kvmpi.ps.link import Link
from kvmpi.ps.reply import name_and_text, why_ended
from kvmpi.ps.spans import Spans
from kvmpi.ps.steps import Steps, finds_position
from kvmpi.trace import Recorder, timeline
from kvmpi.wire import Message
from kvmpi.wire import messages as m
from kvmpi.wire.entries import Key

Settle = Callable[[KVError | None], None]
OnReply = Callable[[Message, list[memoryview]], None]

#: Longest wait for the answers to a good-bye: a peer that is dead must not hold up the end of a program.
GOODBYE_S = 3.0
_FOR_EVER_S = 10 * 365 * 86400.0


def about(part: int, kind: type[Message], fields: tuple[Any, ...], **how: Any) -> Ask:
    """A request about a part, for whichever server answers for that."""
    return Ask(NOWHERE, kind, fields, part=part, **how)


class Participant(ABC):
    """Client ``client`` of a store, as the scheduler and the servers know it.

    Attributes:
        left_out: rounds have gone on without the process before this one.
        entered_after: and have this one after that overall step.
        clock: iterations that the program has done.
        resumed_step: how far the store was in the snapshot that the job was resumed from.
    """

    def __init__(
        self, config: Config, store: int, mode: str, client: int, num_clients: int, recorder: Recorder,
        link: Link | None,
    ) -> None:  # fmt: skip
        self._config, self._store, self._mode = config, store, mode
        self._in_rounds = discipline(mode).in_rounds
        self._client, self._num_clients, self._recorder = client, num_clients, recorder
        self._who = f"on client {client} of {num_clients}"
        finds = finds_position(mode, config.on_client_loss)
        self._steps = Steps(counts=finds or (self._in_rounds and bool(config.snapshot_dir)), finds=finds)
        self._link = link or Link(config, f"client {client} in store {store}", lambda: self.clock)
        self._link.done = self._steps.done
        self._place: Place | None = None
        self._ordinals = {"rule": 0, "hyper": 0, "barrier": 0}
        self._num_parts = 0
        self._position: int | None = None
        self.left_out = self._has_entered = self._has_finished = False
        self.entered_after = 0
        # The scheduler is told that this process pushes on from where another was; it knows its number at barriers.
        self._goes_on = self._has_number = False
        self.clock = 0
        self.resumed_step = 0

    @abstractmethod
    def _furthest_step(self) -> int:
        """Pushes of the key that has most of them."""

    @abstractmethod
    def _under_way(self) -> list[Operation]:
        """Pushes that are not over."""

    @property
    @abstractmethod
    def position(self) -> int:
        """The overall step of processes before this one, after which it goes on."""

    @abstractmethod
    def _staleness(self, key: Key) -> int:
        """How many updates old the value was from which the last push of ``key`` was computed."""

    def help(self, work: Work, until: Callable[[], bool] | None = None) -> None:
        """What a caller does best that has nothing to do until ``work`` is done; it still has to wait for it.

        It also ends when ``until()`` is true: what this thread has read gives it something else to do.
        """
        self._link.help(work, until)

    def gathering(self) -> AbstractContextManager[None]:
        """Within, small requests of this thread wait for those that follow, and leave together."""
        return self._link.gathering()

    # ---- life

    def connect(self, deadline: Deadline) -> None:
        """Join the job: register at the scheduler, then open a session at every server.

        Raises:
            KVTimeoutError: the scheduler or a server does not answer.
            ConfigError: the job is not the one that this client was told of, or another process is this client.
        """
        self._place = Place(self._config)
        try:
            self._link.start()
            incarnation = new_incarnation(self._config)  # later than that of a process which this one replaces
            self.register(incarnation, deadline).wait()
            self.open_sessions(incarnation, deadline).wait()
        except BaseException:
            self.abort()
            raise

    def register(self, incarnation: int, deadline: Deadline) -> Work:
        """Join at the scheduler; done when all servers are there and connected to."""

        def on_view(message: Message, payloads: list[memoryview]) -> None:
            if not isinstance(message, m.View):
                raise ProtocolError(f"expected a view of the job, got {type(message).__name__}")
            self._num_parts = len(message.chains)
            if self._num_parts != self._config.num_servers * PARTS_PER_SERVER:
                known = self._num_parts // PARTS_PER_SERVER
                raise ConfigError(
                    f"the scheduler knows {known} servers, KVMPI_NUM_SERVERS is {self._config.num_servers}"
                )
            self.resumed_step = message.steps.get(self._store, 0)
            before = [lost for lost in message.lost if (lost.store, lost.rank) == (self._store, self._client)]
            self.left_out = any(lost.incarnation < incarnation for lost in before)
            self._link.join()

        fields: tuple[Any, ...] = ("client", self._client, self._store, self._num_clients, incarnation, host_name(), [])
        ask = Ask(SCHEDULER, m.Register, fields, on_reply=on_view)
        return self._start(f"client {self._client} joins the job at {self._config.scheduler}", [ask], deadline)

    def open_sessions(self, incarnation: int, deadline: Deadline) -> Work:
        """Say to every server who this is."""
        hello = (self._store, self._mode, self._client, self._num_clients, incarnation)
        asks = [Ask(server, m.Hello, hello) for server in self._link.servers]
        if self.left_out and not self._in_rounds:  # there is nothing to enter
            self.left_out = False
            asks.append(Ask(SCHEDULER, m.Enter, (-1,)))
        return self._start(f"client {self._client} opens its sessions", asks, deadline)

    def close(self, deadline: Deadline, failure: BaseException | None = None) -> None:
        """Leave in good order as far as the peers still answer, and end the I/O thread. Idempotent.

        With ``failure`` the program ends with that error: who needs this client is told, and it counts as lost.
        """
        if self._link.is_open:
            self._link.stop_heartbeats()
            try:
                self.leave(Deadline(min(deadline.remaining_s(), GOODBYE_S)), failure).wait()
            except KVError:
                pass  # a peer is gone already; there is nobody left to tell
        self.abort()

    def leave(self, deadline: Deadline, failure: BaseException | None = None) -> Work:
        """Say good-bye to all peers, when whatever is still queued has gone."""
        why = "" if failure is None else why_ended(failure)
        done = self._steps.done(ends=failure is None)
        asks = [Ask(server, m.Bye, (done, why)) for server in self._link.servers]
        asks.append(Ask(SCHEDULER, m.Leave, (self.position if self._is_waited_for else 0, why)))
        return self._start(f"client {self._client} leaves", asks, deadline, priority=-(1 << 62))

    def abort(self) -> None:
        """End the I/O thread without a word to the peers."""
        self._link.stop()
        if self._place is not None:
            self._place.give_back()

    # ---- what all clients do

    def _command(
        self, name: str, kind: type[Message], fields: tuple[Any, ...], deadline: Deadline, counts: str
    ) -> Work:
        ordinal, settle = self._next_ordinal(counts)
        step, position = self._furthest_step(), self.position if self._steps.finds else 0
        pushed = step > position and (position > 0 or self._has_entered)
        step, number = max(step, position), ordinal

        def hear(message: Message, payloads: list[memoryview]) -> None:
            nonlocal number
            number = max(number, message.version if isinstance(message, m.Ack) else 0)

        def end(error: KVError | None) -> None:
            settle(error)
            if error is None:  # calls that the process before this one has made may not be made again
                self._ordinals[counts] = number

        asks = [
            about(part, kind, (ordinal, *fields, part, step, pushed), on_reply=hear) for part in range(self._num_parts)
        ]
        return self._start(f"{name} on client {self._client}", asks, deadline, settle=end)

    def _next_ordinal(self, counts: str) -> tuple[int, Settle]:
        """The number of a call that all clients make, and what has to run when the call is over."""
        ordinal = self._ordinals[counts] + 1
        self._ordinals[counts] = ordinal

        def settle(error: KVError | None) -> None:
            if error is not None:  # not used up: the next call is the repetition of this one
                self._ordinals[counts] = ordinal - 1

        return ordinal, settle

    def finish(self, deadline: Deadline) -> Work:
        """This client pushes nothing further; done when rounds and barriers go on without it.

        To be called when no push is under way but those that are late, which have to come first.
        """
        self._has_finished = True
        asks = [about(part, m.Finish, (part,)) for part in range(self._num_parts)]
        asks.append(Ask(SCHEDULER, m.Finish, ()))
        return self._start(f"join on client {self._client}", asks, deadline, after=self._under_way())

    @property
    def _is_waited_for(self) -> bool:
        """Whether others wait for another process, if one of this client is lost."""
        return self._config.on_client_loss == "wait"

    def _entry(self) -> list[Ask]:
        """What a process says with its first push if it goes on where another was: it has left behind the barriers
        before, whether its program has met them again or skipped them."""
        if not self._position or self._goes_on or not self._is_waited_for:
            return []
        self._goes_on = True
        return [Ask(SCHEDULER, m.Enter, (self._position,))]

    # ---- commands to the scheduler

    def barrier(
        self, deadline: Deadline, failure: Exception | None = None, first: list[str] | None = None,
        said: list[str] | None = None,
    ) -> Work:  # fmt: skip
        """Done when every client of the store has reached it.

        Args:
            failure: what the clients meet for has failed here. If it has on any of them, all are at one again after
                the barrier, and it ends with the error of the lowest that has said so.
            first: gets, as its only element, the number of the client that does what one has to do for all.
            said: clients meet with a question, to which this one says ``["1"]``, yes, or ``["0"]``. Becomes ``["1"]``
                if any of them has said yes. Another process of a client may meet them where they were long ago.
        """
        ordinal, settle = self._next_ordinal("barrier")
        step, position = self._furthest_step(), self.position if self._steps.finds else 0
        # Where others have gone on without it, what its program repeats is told by how far that has come itself.
        at = step if self._has_entered else max(step, position)
        # Before its first push, its program meets those barriers again that it does not skip: they are over, or open.
        by_step = self._is_waited_for and step > position > 0 and not self._has_number
        is_over = False

        def hear(message: Message, payloads: list[memoryview]) -> None:
            nonlocal is_over
            if not isinstance(message, m.Ack):
                return
            is_over = True
            if first is not None:
                # Beyond the step that it has entered after, it may not know which number it is at.
                knows = not self._has_entered or at <= self.entered_after
                first[:] = [str(message.first if knows else max(message.first, 0))]
            if self._has_entered or by_step:
                self._ordinals["barrier"] = message.version
                self._has_number = True
            # To who says yes it is yes, also where it was started again and asks at a barrier that was over before.
            if said is not None and (said != ["1"] or self._has_finished):
                said[:] = [str(int(message.yes))]
            if message.error:
                raise rebuild(message.error, message.text)

        def end(error: KVError | None) -> None:
            settle(None if is_over else error)

        number = m.NEXT_BARRIER if by_step else ordinal
        words = ("", "") if failure is None else name_and_text(failure)
        ask = Ask(SCHEDULER, m.Barrier, (number, at, *words, said == ["1"]), on_reply=hear)
        return self._start(f"barrier {ordinal} on client {self._client}", [ask], deadline, settle=end)

    def dead_clients(self, timeout_s: float, deadline: Deadline) -> tuple[Work, list[int]]:
        """Ranks of clients that have been silent for ``timeout_s``, complete when the Work is done."""
        dead: list[int] = []

        def keep(message: Message, payloads: list[memoryview]) -> None:
            if not isinstance(message, m.Dead):
                raise ProtocolError(f"expected the dead clients, got {type(message).__name__}")
            dead.extend(message.clients)

        ask = Ask(SCHEDULER, m.QueryDead, (timeout_s,), on_reply=keep)
        return self._start(f"num_dead on client {self._client}", [ask], deadline), dead

    # ---- operations

    def _start(
        self, label: str, asks: Sequence[Ask], deadline: Deadline, priority: int = 0, phase: str = "", nbytes: int = 0,
        settle: Settle | None = None, on_accepted: Callable[[], None] | None = None,
        goes_on: Callable[[], bool] | None = None, behind: Sequence[list[Operation]] = (),
        after: Sequence[Operation] = (), calls: int = 1,
    ) -> Work:  # fmt: skip
        """Submit ``asks``.

        Args:
            settle: runs before anyone learns of the end: a waiter may go on to the next step.
            goes_on: asked when the time is over, of which the waiter learns: whether the requests go on all the same.
            behind: of each key, operations that are under way, behind which this one takes its place.
            after: others that have to be over before its requests leave.
            calls: how many of ``phase`` it stands for.
        """
        work = Work(label)
        started_s = time.perf_counter()
        spans = Spans(self._store, self._client, asks, self.clock, nbytes) if timeline.on and phase else None
        if spans is not None:
            on_accepted = spans.then(on_accepted)

        def on_done(error: KVError | None) -> None:
            try:
                for others in behind:
                    if operation in others:
                        others.remove(operation)
                if settle is not None:
                    settle(error)
                if phase:
                    self._recorder.add(phase, time.perf_counter() - started_s, nbytes, calls)
                if spans is not None and asks:
                    spans.end(phase, self._staleness(asks[0].fields[0]))
            except BaseException as interruption:  # of a signal's handler; nobody else would end it
                error = error or KVError(f"{label}: interrupted by {type(interruption).__name__}")
                raise
            finally:
                if not work.done():
                    work.finish(error)

        def on_late(error: KVError) -> bool:
            if goes_on is None or not goes_on():
                return False
            work.finish(error)
            return True

        timeout_s = min(deadline.remaining_s(), _FOR_EVER_S)
        operation = Operation(label, timeout_s, self._link.now_s(), on_done, on_accepted, on_late, after)
        for others in behind:
            if others:  # they end in another thread
                operation.after = [*operation.after, *others[-1:]]
            others.append(operation)
        self._link.submit(operation, asks, priority)
        return work
