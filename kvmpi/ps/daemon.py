"""The loops that drive a scheduler or a server: sockets, clock and heartbeats around their state machines."""

from __future__ import annotations

import importlib
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any, TypeAlias

from kvmpi.config import Config, client_bounds
from kvmpi.errors import ConfigError, KVError, ProtocolError, ServerLostError
from kvmpi.machine import host_name
from kvmpi.ps import scheduler_file
from kvmpi.ps.chains import PARTS_PER_SERVER
from kvmpi.ps.descriptors import Shortage
from kvmpi.ps.durability import SnapshotKeeper, SnapshotWriter, load_parts, resumed_manifest
from kvmpi.ps.endings import Endings, Losses
from kvmpi.ps.incarnations import last_incarnation, new_incarnation
from kvmpi.ps.observing import observe
from kvmpi.ps.reply import Forward, Outgoing, Reply, failure
from kvmpi.ps.scheduler import SchedulerState, without_old_views
from kvmpi.ps.showing import Showing
from kvmpi.ps.snapshot_book import Manifest, SnapshotBook
from kvmpi.ps.snapshot_files import Claim
from kvmpi.ps.statistics import Statistics
from kvmpi.trace import parts, stall, timeline
from kvmpi.wire import Connection, Context, Listener, OtherVersionError, Readiness, Waker, keep_large_buffers
from kvmpi.wire import messages as m
from kvmpi.wire.unread import MARK_EVERY_BYTES

#: Messages taken from one socket before others, and the clock, get their turn.
_BATCH = 16
_POLL_S = 0.2
_TICK_S = 0.1
#: After such a time a scheduler tries once more to save what it could not, and says once more that it cannot.
_SAVE_AGAIN_S, _COMPLAIN_S = 1.0, 60.0
#: Of the time after which a silent server is lost: so long after a heartbeat that was heard it answers. The rest is for
#: clocks that do not run alike.
_LEASE = 0.9
#: A client that does not read is heard until so many windows, and so many times the values of its store here, wait
#: for it.
_WINDOWS, _VALUES = 4, 3
#: A server reports so rarely that counting what it has takes one part of so many of its time.
_REPORT_PART = 500
#: How often a listener looks for peers that are gone.
_SWEEP_S = 1.0

_log = logging.getLogger(__name__)
#: The route by which a message has come, the message or what is wrong with it, its payloads.
Arrived: TypeAlias = tuple[bytes, m.Message | ProtocolError, list[memoryview]]


class Daemon:
    """A loop that runs until ``stop`` is called, from any thread or a signal handler."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._waker = Waker()
        self._stopped = False

    def stop(self) -> None:
        self._stopped = True
        self._waker.wake()

    @staticmethod
    def _arrived(listener: Listener) -> Iterator[list[Arrived]]:
        """Some of what has come: what came together is handled together, and so are the answers sent."""
        for _ in range(_BATCH):
            if (received := listener.recv()) is None:
                return
            together = [received, *listener.take_rest()]
            received = None  # payloads that nobody holds are given back with the answer
            yield together

    def _send(self, listener: Listener, replies: Sequence[Reply]) -> None:
        if len(replies) == 1:
            self._send_to(listener, replies[0].route, [replies[0][1:]])
            return
        by_route: dict[bytes, list[Any]] = {}
        for reply in replies:
            by_route.setdefault(reply.route, []).append(reply[1:])
        for route, group in by_route.items():
            self._send_to(listener, route, group)

    def _send_to(self, listener: Listener, route: bytes, group: list[Any]) -> None:
        try:
            listener.send_all(route, group, partial(self._reject, listener, route))
        except Exception:  # a defect, but one peer's answer must not end the service of all
            _log.exception("a %s could not be sent", type(group[0][0]).__name__)

    @staticmethod
    def _reject(listener: Listener, route: bytes, message: m.Message, error: ProtocolError) -> None:
        _log.error("a %s could not be sent: %s", type(message).__name__, error)
        if (request := getattr(message, "request", -1)) >= 0:  # else nobody waits for it
            listener.send(*failure(route, request, error))


class SchedulerDaemon(Daemon):
    """The scheduler's process or thread.

    Args:
        say: how people are told where to look at the job; None: nobody looks at it.
    """

    def __init__(self, config: Config, say: Callable[[str], None] | None = None) -> None:
        super().__init__(config)
        self._say = say
        # Where its state is kept, in the job's folder, which goes with the job.
        self._path = os.path.join(config.job_dir, "scheduler-state") if config.job_dir else ""
        self._before = scheduler_file.read(self._path) if self._path else None
        self._claim = Claim(config.snapshot_dir) if config.snapshot_dir else None
        if self._before is None:
            try:
                resumed = resumed_manifest(config, _log.error)
            except BaseException:
                self._release()
                raise
        else:  # there may be newer snapshots by now
            resumed = Manifest(self._before.snapshot, (), self._before.steps) if self._before.snapshot else None
        book = SnapshotBook(config.num_servers * PARTS_PER_SERVER, config.snapshot_seconds, resumed)
        # Who starts a scheduler by hand need not say how many workers there will be.
        statistics = Statistics(
            config.num_workers if config.role else 0, config.num_servers, config.num_clients, config.report_s,
            config.job_id,
        )  # fmt: skip
        launched = client_bounds(config.num_workers, config.num_clients) if config.role else []
        self._state = SchedulerState(
            config.num_servers, config.heartbeat_timeout_s, config.replicas, config.on_client_loss, book, statistics,
            [range(*workers) for workers in launched],
        )  # fmt: skip
        self._state.clock_name = parts.clock_name() if config.timeline else ""
        stall.watch(self.waits)
        stall.note(self.notes)
        self._keeper = SnapshotKeeper(config, self._state, self._waker.wake)
        # Changes that are in the file, and those that could not be put there.
        self._saved = self._unsaved = 0
        self._save_again_s = self._complain_s = 0.0

    def _release(self) -> None:
        if self._claim is not None:
            self._claim.release()

    def run(self, context: Context[Any], on_listening: Callable[[str], None]) -> None:
        """Serve until stopped. ``on_listening`` gets the endpoint at which members join.

        Raises:
            ConfigError: a port is in use, or the address is not one of this host.
        """
        listener = Listener(context, self._config.max_message_bytes, "the scheduler")
        folder = self._config.job_dir
        endings, losses = Endings(folder), Losses(folder, self._config.beat_s)
        shortage = Shortage("scheduler")
        showing: Showing | None = None
        try:
            showing = Showing(self._config, self._state.describe, 0, self._say)
            if self._config.scheduler.startswith("ipc://"):
                on_listening(listener.bind_ipc(self._config.scheduler.removeprefix("ipc://")))
            else:
                on_listening(listener.bind_tcp(self._config.host, self._config.scheduler_port))
            readiness = Readiness([listener, self._waker, endings])
            next_tick_s = 0.0
            self._restore()
            while not self._stopped or self._keeper.busy(time.monotonic()):
                ready = readiness.wait(_POLL_S)
                if self._waker in ready:
                    self._waker.clear()
                now_s = time.monotonic()
                self._keeper.step()
                replies: list[Reply] = []
                # Before those that are started in their places can be heard.
                for end in endings.take():
                    replies += self._state.hear_end(
                        end.role, end.rank, last_incarnation(end.start), end.how, returns=end.returns
                    )
                for together in self._arrived(listener) if listener in ready else ():
                    for route, message, _ in together:
                        replies += self._state.handle(route, message, now_s)
                if now_s >= next_tick_s:
                    replies += self._state.tick(now_s)
                    next_tick_s = now_s + _POLL_S
                for role, rank in self._state.take_unheard():
                    losses.tell(role, rank)
                losses.live(now_s)
                shortage.look(now_s)
                self._save(now_s)
                self._send(listener, without_old_views(replies))
                showing.step(now_s)
        finally:
            if showing is not None:
                showing.close(time.monotonic())
            if self._stopped and self._path and not endings.handles:
                # The job is over: nobody is to go on with it. Where there is a launcher, that knows better.
                scheduler_file.remove(self._path)
            listener.close()
            endings.close()
            losses.close()
            self._keeper.close()
            self._waker.close()
            self._release()

    def has_servers_on(self, host: str) -> bool:
        """Whether servers of the job are there which have neither left nor been lost. In any thread."""
        return self._state.has_servers_on(host)

    def waits(self) -> list[stall.Wait]:
        """Whom members wait for here."""
        return self._state.waits(time.monotonic())

    def notes(self) -> list[str]:
        """Who is in the job."""
        return self._state.notes(time.monotonic())

    def _restore(self) -> None:
        """Be what the process before this one was: whoever talks to it need not notice."""
        if (before := self._before) is not None:
            _log.warning("scheduler: goes on where the one before it has ended, with %d members", len(before.members))
            self._state.restore(before, time.monotonic())
            self._keeper.recall()
        else:
            self._keeper.begin()

    def _save(self, now_s: float) -> None:
        """Before anyone hears of a change: a scheduler that dies now is started again with it.

        Where the file cannot be written the job goes on all the same: it is needed only if the scheduler dies.
        """
        changes = self._state.changes
        if not self._path or changes == self._saved or (changes == self._unsaved and now_s < self._save_again_s):
            return
        try:
            scheduler_file.write(self._path, self._state.save())
        except OSError as error:
            self._unsaved, self._save_again_s = changes, now_s + _SAVE_AGAIN_S
            if now_s >= self._complain_s:
                self._complain_s = now_s + _COMPLAIN_S
                _log.error(
                    "scheduler: its state cannot be written to %s (%s); the job goes on, but does not survive the "
                    "scheduler's end until it can: make room there, or set TMPDIR to another folder", self._path, error,
                )  # fmt: skip
            return
        if self._unsaved:
            _log.warning("scheduler: its state is in %s again", self._path)
        self._saved, self._unsaved = changes, 0


class ServerDaemon(Daemon):
    """A server's process or thread."""

    def __init__(self, config: Config, rank: int, say: Callable[[str], None] | None = None) -> None:
        super().__init__(config)
        from kvmpi.ps.server import ServerState  # with NumPy, and all that values need: a scheduler starts without

        self._rank, self._say = rank, say
        self._state = ServerState(rank, config.on_client_loss, config.snapshot_every if config.snapshot_dir else None)
        stall.watch(self.waits)
        self._writer = SnapshotWriter(config, self._state, self._waker.wake)
        # Connections to other servers, made when there is something to send, and where they are.
        self._others: dict[int, Connection] = {}
        self._found: dict[int, m.ServerInfo] = {}
        self._incarnations: dict[int, int] = {}
        self._readiness_changed = False
        # What is unread is known in steps.
        self._windows_bytes = max(_WINDOWS * config.window_bytes, config.shared_bytes) + 2 * MARK_EVERY_BYTES
        self._sent_bytes = self._reports = self._unreadable = 0
        # What this server reports, for its own Prometheus endpoint.
        self._statistics = Statistics(0, config.num_servers, 0, config.report_s, config.job_id)

    def run(self, context: Context[Any], on_listening: Callable[[], None] = lambda: None) -> None:
        """Serve until stopped. ``on_listening`` is called when clients can connect.

        Raises:
            ConfigError: an address cannot be had, or a module of ``--import`` cannot be imported.
            ServerLostError: the scheduler has declared this server lost, or it lacks what a replica may have.
            ProtocolError: the scheduler, or the next server of a chain, speaks another version.
        """
        for module in filter(None, self._config.imports.split(",")):
            try:
                importlib.import_module(module)
            except ImportError as error:
                raise ConfigError(f"server {self._rank} cannot import {module!r}: {error}") from None
        keep_large_buffers(32 << 20)
        self._context = context
        scheduler = self._open(self._config.scheduler, "the scheduler", self._config.heartbeat_timeout_s / 4)
        listener = Listener(context, self._config.max_message_bytes, f"server {self._rank}")
        listener.hears = self._hears
        showing: Showing | None = None
        try:
            showing = Showing(self._config, self._statistics.snapshot, 1 + self._rank, self._say)
            self._listen(listener)
            on_listening()
            self._serve(listener, scheduler, showing)
        except OtherVersionError as error:
            raise ProtocolError(str(error)) from None
        finally:
            if showing is not None:
                showing.close()
            listener.close()
            self._writer.close()
            scheduler.close()
            for other in self._others.values():
                other.close()
            self._waker.close()

    def waits(self) -> list[stall.Wait]:
        """The rounds that somebody waits for."""
        return self._state.waits(time.monotonic())

    def _open(self, endpoint: str, peer: str, silence_s: float | None = None) -> Connection:
        limit, name = self._config.max_message_bytes, f"server {self._rank}"
        return Connection(self._context, endpoint, limit, name, peer, silence_s)

    def _listen(self, listener: Listener) -> None:
        if self._config.job_dir:
            listener.bind_ipc(os.path.join(self._config.job_dir, f"server-{self._rank}"))
            self._state.empty = self._context.empty
        if not self._config.scheduler.startswith("ipc://"):
            listener.bind_tcp(self._config.host)

    def _hears(self, route: bytes, unread_bytes: int) -> bool:
        """Whether a client has read enough. Of one that keeps to the protocol no more can be under way."""
        kept_bytes = unread_bytes + (self._state.held_bytes(route) if self._config.replicas else 0)
        if kept_bytes <= self._windows_bytes:
            return True
        # Each chunk's answer once, another one that the client still uses in place, and a chunk's state.
        return kept_bytes <= self._windows_bytes + _VALUES * self._state.value_bytes(route)

    def _serve(self, listener: Listener, scheduler: Connection, showing: Showing) -> None:
        incarnation = new_incarnation(self._config)
        register = m.Register(
            1, "server", self._rank, -1, self._config.num_servers, incarnation, host_name(), listener.endpoints
        )
        self._extend_lease(time.monotonic())
        scheduler.send(register)
        next_heartbeat_s = time.monotonic() + self._config.beat_s
        next_tick_s = next_sweep_s = 0.0
        next_report_s = math.inf if self._config.report_s == 0 else time.monotonic()
        readiness: Readiness | None = None
        shortage = Shortage(f"server {self._rank}")
        while not self._stopped or self._writer.busy(time.monotonic()):
            if self._readiness_changed or readiness is None:
                readiness = Readiness([listener, scheduler, self._waker, *self._others.values()])
                self._readiness_changed = False
            ready = readiness.wait(_POLL_S)
            now_s = time.monotonic()
            if self._waker in ready:
                self._waker.clear()
            while scheduler in ready and (notice := self._recv(scheduler)) is not None:
                self._hear(listener, scheduler, notice[0], now_s)
            for together in self._arrived(listener) if listener in ready else ():
                self._answer(listener, together, now_s)
            for server in [server for server, other in self._others.items() if other in ready] if self._others else ():
                self._hear_other(listener, server, now_s)
            if now_s >= next_tick_s:
                self._dispatch(listener, self._state.tick(now_s))
                for report in self._state.reports():
                    scheduler.send(report)
                next_tick_s = now_s + _TICK_S
            shortage.look(now_s)
            if now_s >= next_sweep_s:
                listener.forget_gone()
                next_sweep_s = now_s + _SWEEP_S
            for news in self._writer.step():
                scheduler.send(news)
            if now_s >= next_heartbeat_s:
                beat = m.Heartbeat(self._writer.round(), self._state.epoch, int(time.monotonic() * 1e6))
                # Without an answer to the first word, that may have been lost with a connection.
                scheduler.send(register if self._state.epoch < 0 else beat)
                next_heartbeat_s = now_s + self._config.beat_s
            if now_s >= next_report_s:
                # To look at very many chunks takes time, which is to be a small part of all.
                began_s = time.thread_time()
                scheduler.send(self._report(incarnation, now_s))
                took_s = time.thread_time() - began_s
                next_report_s = now_s + max(self._config.report_s, _REPORT_PART * took_s)
            showing.step(now_s)
        if self._config.report_s:
            scheduler.send(self._report(incarnation, time.monotonic(), ended=True))
        for news in self._writer.step():
            scheduler.send(news)
        scheduler.send(m.Leave(2))  # whoever needs this server learns at once that it is stopped

    def _report(self, incarnation: int, now_s: float, *, ended: bool = False) -> m.Report:
        self._reports += 1
        totals, missing = observe(self._state, self._sent_bytes)
        report = m.Report(
            "server", self._rank, -1, incarnation, self._reports, host_name(), totals, missing=missing, ended=ended
        )
        with suppress(ProtocolError):  # a rank that nobody expects: the scheduler will say so
            self._statistics.hear(report, now_s)
        return report

    def _extend_lease(self, heard_s: float) -> None:
        """The scheduler knows that this server was alive then."""
        self._state.lease_ends_s = heard_s + _LEASE * self._config.heartbeat_timeout_s

    def _hear(self, listener: Listener, scheduler: Connection, message: m.Message, now_s: float) -> None:
        if isinstance(message, m.Failure):
            kind = ConfigError if message.error == "ConfigError" else ServerLostError
            raise kind(f"server {self._rank} is out of the job: {message.text}")
        if isinstance(message, m.Heard):
            self._extend_lease(message.sent_us / 1e6)
            self._state.hear_done(message.done)
            if timeline.on and message.clock:
                timeline.hear_clock(message.clock, message.sent_us * 1000, message.at_us * 1000, timeline.now())
        if isinstance(message, m.TakeSnapshot) and self._state.snapshots is not None:
            self._state.snapshots.begin(message.number, message.missed, ahead=message.ahead)
        if isinstance(message, m.View) and message.epoch > self._state.epoch:
            if self._state.epoch < 0 and message.snapshot:
                # A long silence would be taken for this server's end.
                alive = m.Heartbeat(0, message.epoch)
                load_parts(self._config, self._state, self._rank, message, lambda: scheduler.send(alive))
            self._connect(message)
            self._dispatch(listener, self._state.adopt(message, now_s))

    def _recv(self, connection: Connection) -> tuple[m.Message, list[memoryview]] | None:
        """The next message, or None. What cannot be read is passed over: whoever has sent it says again what matters.

        Raises:
            OtherVersionError: as ``Connection.recv``.
        """
        while True:
            try:
                return connection.recv()
            except OtherVersionError:
                raise  # there will never be an answer
            except ProtocolError as error:
                self._unreadable += 1
                if self._unreadable <= 10 or self._unreadable % 1000 == 0:  # a flood must not fill a disk
                    _log.warning(
                        "server %d cannot read a message from %s (%d so far): %s",
                        self._rank, connection.endpoint, self._unreadable, error,
                    )  # fmt: skip

    def _hear_other(self, listener: Listener, server: int, now_s: float) -> None:
        for _ in range(_BATCH):
            received = self._recv(self._others[server]) if server in self._others else None
            if received is None:
                return
            self._dispatch(listener, self._state.hear(server, received[0], now_s))

    def _connect(self, view: m.View) -> None:
        """Have no connection to a server that is gone, or was started again; those that are needed come by use."""
        self._found = {info.rank: info for info in view.servers}
        for server in list(self._others):
            if server not in self._found or self._incarnations[server] != self._found[server].incarnation:
                self._others.pop(server).close()
                self._readiness_changed = True

    def _answer(self, listener: Listener, together: list[Arrived], now_s: float) -> None:
        """Handle what has come together. Nothing of it is held here any more when the answers leave, nor of these when
        the next is handled: what was lent of a value is the slot's again."""
        outgoing = self._state.handle(*together.pop(), now_s) if len(together) == 1 else []
        if together:
            outgoing = [each for arrived in together for each in self._state.handle(*arrived, now_s)]
            together.clear()
        self._dispatch(listener, outgoing)

    def _dispatch(self, listener: Listener, outgoing: Sequence[Outgoing]) -> None:
        replies: list[Reply] = []
        forwards: list[Forward] = []
        for each in outgoing:
            for payload in each.payloads:
                self._sent_bytes += payload.nbytes
            if isinstance(each, Reply):
                replies.append(each)
            elif each.server in self._found:
                forwards.append(each)
        if replies:
            self._send(listener, replies)
        for server, group in groupby(forwards, attrgetter("server")):
            try:
                self._other(server).send_all([each[1:] for each in group], partial(self._complain, server))
            except KVError:  # a defect, but it must not end the service of all
                _log.exception("messages could not be sent to server %d", server)

    @staticmethod
    def _complain(server: int, message: m.Message, error: ProtocolError) -> None:
        _log.error("a %s could not be sent to server %d: %s", type(message).__name__, server, error)

    def _other(self, server: int) -> Connection:
        """The connection to another server."""
        from kvmpi.ps.link import choose

        if server not in self._others:
            info = self._found[server]
            endpoint = choose(info, self._config)
            self._others[server] = self._open(endpoint, f"server {server}")
            self._incarnations[server] = info.incarnation
            self._readiness_changed = True
        return self._others[server]
