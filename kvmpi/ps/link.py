"""Drives a master's session over sockets to the scheduler and the servers: a thread, and whoever asks for something."""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from kvmpi.config import Config
from kvmpi.deadline import running_time
from kvmpi.engine import Work
from kvmpi.errors import KVError, ProtocolError, ServerLostError
from kvmpi.machine import host_name
from kvmpi.ps.asks import SCHEDULER, Ask, Operation
from kvmpi.ps.placement import CHUNK_BYTES
from kvmpi.ps.session import ClientSession
from kvmpi.trace import stall, timeline
from kvmpi.wire import SMALL_BYTES, Connection, OtherVersionError, Waker, Watch, keep_large_buffers, new_context
from kvmpi.wire import messages as m

Buffer = npt.NDArray[Any]
_log = logging.getLogger(__name__)

#: Messages taken from one connection before the others get their turn.
_BATCH = 8
_TICK_S = 0.05
#: A caller sends up to so many bytes itself, which is sooner done than waking a thread. More may have to be encoded.
_HERE_BYTES = 1 << 20
#: So many operations may wait for others to leave with.
_GATHERED = 32
#: A thread that has nothing to do looks after the clock for so long before it sleeps until it is woken.
_AWAKE_S = 1.0


class Link:
    """Runs one ``ClientSession``, which belongs to whoever has the turn, as the sockets do.

    That is a thread of its own for all that comes from peers or with time, and any caller for what it submits, if
    nobody has the turn just then.

    Args:
        name: of the thread and in messages.
        clock: the training clock, for heartbeats.
    Attributes:
        now_s: the time on the clock of deadlines.
        done: also for heartbeats, the step up to which all pushes are over.
    """

    def __init__(self, config: Config, name: str, clock: Callable[[], int]) -> None:
        self._config, self._name, self._clock = config, name, clock
        self.now_s = running_time.now_s
        self.done: Callable[[], int] = lambda: 0
        # Whoever says whom it waits for has to know it by then.
        retry_s = min(config.retry_s, stall.limit_of(config) / 2 or math.inf)
        self._session = ClientSession(config.window_bytes, retry_s)
        stall.watch(self.waits)
        self._inbox: deque[tuple[Operation, Sequence[Ask], int]] = deque()
        self._waker = Waker()
        self._connections: dict[int, Connection] = {}
        self._incarnations: dict[int, int] = {}
        self._watch: Watch[Connection] | None = None
        self._helps = threading.Lock()  # held by the caller that does the thread's work
        self._turn = threading.Lock()  # guards the session, the connections and what is below
        self._unread: dict[Connection, None] = {}  # to be read until nothing is there before the thread may sleep
        self._dozes = False
        self._gatherers: set[int] = set()  # threads that begin several operations
        self._trouble: KVError | None = None  # of a caller that had the turn
        self._joined = False
        self._next_heartbeat_s = self.now_s() + config.beat_s
        self._epoch = -1
        self._shares = self._is_near = False
        self._large_bytes = 0  # of the largest chunk, if it is larger than one is as a rule
        self._stop = True  # until it is started
        self._failed: KVError | None = None
        self._thread = threading.Thread(target=self._run, name=f"kvmpi-io-{name}", daemon=True)

    @property
    def is_open(self) -> bool:
        """Whether requests can be answered."""
        return self._thread.is_alive() and not self._stop

    def start(self) -> None:
        """Start the thread, and the connection to the scheduler."""
        self._context = new_context(self._config)
        self._turn.acquire()  # the thread gives it back
        self._stop = False
        self._thread.start()

    def join(self) -> None:
        """Begin with heartbeats: the scheduler knows this client."""
        self._joined = True

    @property
    def servers(self) -> list[int]:
        """The servers that are in the job."""
        return self._session.servers

    def carry(self, chunk_bytes: int) -> None:
        """There is a key whose chunks were chosen to be so large: of these, too, one is to leave while another is on
        its way."""
        if chunk_bytes > max(CHUNK_BYTES, self._large_bytes):
            self._large_bytes = chunk_bytes
            self._set_window()
            keep_large_buffers(2 * chunk_bytes)

    @property
    def shares(self) -> bool:
        """Whether all servers hand large payloads over in shared memory."""
        return self._shares

    def empty(self, count: int, dtype: np.dtype[Any]) -> Buffer:
        """Uninitialised memory of shape ``(count,)``, which servers read where it is if all are on this host."""
        return self._context.empty(count, dtype) if self._is_near else np.empty(count, dtype)

    def _connect(self, view: m.View) -> None:
        """Have a connection to every server of a view, and to no other."""
        found = {info.rank: info for info in view.servers}
        for server in [server for server in self._connections if server != SCHEDULER]:
            if server not in found or self._incarnations[server] != found[server].incarnation:
                self._connections.pop(server).close()
        for server, info in found.items():
            if server not in self._connections:
                try:
                    endpoint = choose(info, self._config)
                    self._connections[server] = self._open(endpoint, f"server {server}")
                except KVError as error:
                    if not self._joined:
                        raise
                    # One that has come since, with an address that is none here, is no reason to part with the others.
                    _log.warning("%s cannot connect to server %d on %s: %s", self._name, server, info.host, error)
                    continue
                self._incarnations[server] = info.incarnation
        self._is_near = all(connection.is_near for peer, connection in self._connections.items() if peer != SCHEDULER)
        self._watch = None

    def _open(self, endpoint: str, peer: str, silence_s: float | None = None) -> Connection:
        return Connection(self._context, endpoint, self._config.max_message_bytes, self._name, peer, silence_s)

    def stop_heartbeats(self) -> None:
        """This client is about to leave: the scheduler would take a later sign of life for a stranger's."""
        self._joined = False

    def waits(self) -> list[stall.Wait]:
        """What is under way."""
        return [wait._replace(since_s=wait.since_s + running_time.stood_s) for wait in self._session.waits()]

    def submit(self, operation: Operation, asks: Sequence[Ask], priority: int) -> None:
        """Start an operation, from any thread. On a link that is closed it fails at once."""
        self._inbox.append((operation, asks, priority))
        if self._stop:
            self._drain_inbox()  # if the thread ends just now, it empties the inbox as its last act
            return
        cost_bytes = asks[0].cost_bytes if len(asks) == 1 else sum([ask.cost_bytes for ask in asks])
        if cost_bytes > _HERE_BYTES:
            self._waker.wake()
        elif (
            not self._gatherers or threading.get_ident() not in self._gatherers or cost_bytes >= SMALL_BYTES
            or len(self._inbox) >= _GATHERED
        ):  # fmt: skip
            self._send_here()

    def gathering(self) -> AbstractContextManager[None]:
        """Within, what this thread submits may wait for what follows, and leave with it."""
        return _Gathering(self)

    def _send_here(self) -> None:
        """Send what can be sent, unless somebody has the turn: they look into the inbox after giving it back."""
        while self._inbox:
            has_turn = [False]
            try:
                has_turn[:] = map(self._turn.acquire, (False,))  # in one step: no signal comes between the two
                if not has_turn[0]:
                    return
                self._pump(self.now_s())
                news = [connection for connection in self._unread if connection.readable]
                self._unread = dict.fromkeys(news)
                wakes = self._dozes or bool(news)
            except BaseException as error:
                if has_turn[0]:
                    self._give_up(error)
                if not isinstance(error, KVError):
                    raise
                return
            finally:
                if has_turn[0]:
                    self._turn.release()
            if wakes:
                self._waker.wake()

    def _give_up(self, error: BaseException) -> None:
        """A caller had the turn, and nobody knows how far it came: the thread ends the link."""
        if not isinstance(error, KVError):  # of a signal's handler
            cause = error
            error = KVError(f"{self._name} was interrupted by {type(error).__name__} while it handled a message")
            error.__cause__ = cause
        self._trouble = error
        self._waker.wake()

    def help(self, work: Work, until: Callable[[], bool] | None = None) -> None:
        """Do the thread's part in the thread at hand, which waits for ``work`` and would be told by the other.

        Returns when ``work`` is done, or what came has made ``until`` true, or at once if that is not possible.
        """

        is_over = work.done if until is None else lambda: work.done() or until()
        watch = self._watch
        if work.done() or watch is None or not self._helps.acquire(blocking=False):
            return
        try:
            if watch.begin_to_stand_in():
                me = threading.get_ident()
                work.add_done_callback(lambda _: None if threading.get_ident() == me else watch.nudge())
                try:
                    while not is_over():
                        ready = () if self._unread or self._inbox else watch.stand_in(_AWAKE_S)
                        if not self._help_on(watch, ready):
                            break
                finally:
                    watch.end_to_stand_in()
        finally:
            self._helps.release()
            if self._inbox:  # somebody has relied on whoever had the turn
                self._waker.wake()

    def _help_on(self, watch: Watch[Connection], ready: Sequence[Connection]) -> bool:
        """Do all that can be done, after news on connections that are ``ready``; whether there may be more to do."""
        with self._turn:
            self._unread.update(dict.fromkeys(ready))
            if self._stop or self._trouble is not None or watch is not self._watch:
                self._waker.wake()
                return False
            try:
                self._advance()
            except BaseException as error:
                self._give_up(error)
                if not isinstance(error, KVError):
                    raise
                return False
        return True

    def stop(self) -> None:
        """End the thread without a word to the peers; what is under way fails. Idempotent."""
        self._stop = True
        self._waker.wake()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(5.0)

    # ---- what runs in the thread

    def _drain_inbox(self) -> None:
        while self._inbox:
            try:
                operation, asks, priority = self._inbox.popleft()
            except IndexError:
                return  # another thread was faster
            if self._stop:
                operation.finished = True
                operation.on_done(
                    self._failed or ServerLostError(f"{operation.label}: the link to the servers is not open")
                )
            else:
                self._session.submit(operation, asks, priority)

    def _run(self) -> None:
        # Well above a received chunk, and no more: the program's own large arrays stay as they were.
        keep_large_buffers(2 * (self._config.chunk_bytes or CHUNK_BYTES))
        try:
            try:
                # Words to the scheduler are said again; silence must not last longer than the partition that caused it.
                silence_s = self._config.heartbeat_timeout_s / 4
                self._connections[SCHEDULER] = self._open(self._config.scheduler, "the scheduler", silence_s)
            finally:
                self._turn.release()
            self._loop()
        except KVError as error:
            self._failed = error
        except Exception as error:  # a defect of ours must not leave callers waiting
            _log.exception("the I/O thread of %s failed", self._name)
            self._failed = KVError(f"the I/O thread of {self._name} failed: {type(error).__name__}: {error}")
            self._failed.__cause__ = error
        finally:
            self._failed = self._failed or ServerLostError(f"the link of {self._name} to the servers is closed")
            self._stop = True
            with self._turn:
                self._session.fail_all(self._failed)
                self._drain_inbox()
                for connection in self._connections.values():
                    connection.close()
                self._watch = None  # a store that is closed may be referred to for long
            self._context.term()
            self._waker.close()

    def _loop(self) -> None:
        next_tick_s = awake_until_s = self.now_s()
        while not self._stop:
            with self._turn:
                now_s = self.now_s()
                if now_s >= next_tick_s:
                    self._session.tick(now_s)
                    self._look_for_sharing()
                    next_tick_s = now_s + _TICK_S
                self._advance()
                if not self._session.idle:
                    awake_until_s = now_s + _AWAKE_S
                if self._watch is None:
                    self._watch = Watch(self._waker, [*self._connections.values()])
                    self._unread = dict.fromkeys(self._connections.values())
                self._dozes, watch = now_s >= awake_until_s, self._watch
            if self._inbox or self._unread:
                continue
            idle_s = max(_TICK_S, self._next_heartbeat_s - now_s) if self._dozes else _TICK_S
            ready = watch.wait(idle_s)
            self._waker.clear()
            with self._turn:
                self._unread |= dict.fromkeys(ready)

    def _advance(self) -> None:
        """Do all that can be done now."""
        if self._trouble is not None:
            raise self._trouble
        self._pump(now_s := self.now_s())
        while self._unread:
            connection = next(iter(self._unread))
            del self._unread[connection]
            # A view may have ended it.
            if connection in self._connections.values() and not self._receive(connection, now_s):
                self._unread[connection] = None
            self._pump(now_s := self.now_s())

    def _look_for_sharing(self) -> None:
        """Where payloads go through shared memory, waiting for room in a window costs more than the room."""
        shares = all(connection.shares for peer, connection in self._connections.items() if peer != SCHEDULER)
        if shares != self._shares:
            self._shares = shares
            self._set_window()

    def _set_window(self) -> None:
        shared_bytes = self._context.shared_limit_bytes if self._shares else 0
        self._session.widen(max(self._config.window_bytes, 2 * self._large_bytes, shared_bytes))

    def _receive(self, connection: Connection, now_s: float) -> bool:
        """Read some messages; whether that was all there is."""
        for _ in range(_BATCH):
            try:
                received = connection.recv()
            except OtherVersionError as error:
                raise ProtocolError(str(error)) from None  # there will never be an answer
            except ProtocolError as error:
                # Nobody can say which request it answers: that one is repeated, and times out in the end.
                _log.warning("%s cannot read a message from %s: %s", self._name, connection.endpoint, error)
                continue
            if received is None:
                return True
            message = received[0]
            if isinstance(message, m.Heard) and timeline.on and message.clock:
                timeline.hear_clock(message.clock, message.sent_us * 1000, message.at_us * 1000, timeline.now())
            if isinstance(message, m.View) and message.epoch > self._epoch:
                self._epoch = message.epoch
                self._connect(message)
            self._session.receive(*received)
            received = None  # payloads that nobody holds are given back with what is sent next
            if self._session.may_send:
                self._pump(now_s)
        return False

    def _pump(self, now_s: float) -> None:
        """Send what may leave."""
        if self._inbox:
            self._drain_inbox()
        if now_s >= self._next_heartbeat_s:
            self._beat(now_s)
        session = self._session
        if not session.may_send:
            return
        outgoing = session.sendable(now_s)
        if isinstance(outgoing, tuple):
            [(peer, message, payloads)] = outgoing
            if (connection := self._sending_to(peer)) is not None:
                try:
                    connection.send(message, payloads)
                except ProtocolError as error:
                    self._reject(message, error)
            return
        for peer, group in groupby(outgoing, itemgetter(0)):
            if (connection := self._sending_to(peer)) is not None:
                connection.send_all((each[1:] for each in group), self._reject)  # each leaves before the next is made

    def _sending_to(self, peer: int) -> Connection | None:
        """The connection to send by. Without one the peer is gone; who answers in its place is asked when the session
        knows."""
        connection = self._connections.get(peer)
        if connection is not None:
            self._unread[connection] = None  # sending may take the notice that something has come
        return connection

    def _reject(self, message: m.Message, error: ProtocolError) -> None:
        self._session.reject(getattr(message, "request", -1), error)

    def _beat(self, now_s: float) -> None:
        """A sign of life, by whoever has the turn: callers of many small requests may keep it from the thread for
        long."""
        self._next_heartbeat_s = now_s + self._config.beat_s
        if self._joined:
            sent_us = timeline.now() // 1000 if timeline.on else 0
            beat = m.Heartbeat(self._clock(), self._epoch, sent_us, self.done())
            self._unread[connection := self._connections[SCHEDULER]] = None
            connection.send(beat)


class _Gathering(AbstractContextManager[None]):
    """See ``Link.gathering``."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def __enter__(self) -> None:
        self._link._gatherers.add(threading.get_ident())

    def __exit__(self, *error: object) -> None:
        self._link._gatherers.discard(threading.get_ident())
        if self._link._inbox:
            self._link._send_here()


def choose(server: m.ServerInfo, config: Config) -> str:
    """The endpoint to take of a server: a Unix socket if it is on this host and nothing else is asked for.

    Raises:
        ProtocolError: it has none.
    """
    ipc = [endpoint for endpoint in server.endpoints if endpoint.startswith("ipc://")]
    tcp = [endpoint for endpoint in server.endpoints if endpoint.startswith("tcp://")]
    if ipc and config.transport != "tcp" and server.host == host_name():
        return ipc[0]
    if not tcp and not ipc:
        raise ProtocolError(f"server {server.rank} on {server.host} has no endpoint")
    return (tcp or ipc)[0]
