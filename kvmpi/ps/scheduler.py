"""The scheduler as a state machine without I/O: who is in the job, who holds what, heartbeats, and who has to know."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

import msgspec

from kvmpi.errors import STORE_OVER, ClientLostError, ConfigError, KVError, ProtocolError, ranks_in_words
from kvmpi.ps.barriers import Barriers
from kvmpi.ps.chains import PARTS_PER_SERVER, Chains
from kvmpi.ps.membership import CLOSED, ENDED, FOR_GOOD, MAX_CLIENTS, how_it_left
from kvmpi.ps.reply import MAX_NAMED, Reply, failure
from kvmpi.ps.scheduler_file import SavedMember, SavedScheduler
from kvmpi.ps.snapshot_book import Manifest, SnapshotBook
from kvmpi.ps.statistics import Statistics
from kvmpi.trace import timeline
from kvmpi.trace.stall import Wait
from kvmpi.wire import Message
from kvmpi.wire import messages as m

_log = logging.getLogger(__name__)

MemberName = tuple[str, int, int]
"""(role, store, rank); servers belong to store -1."""

#: So long it is not looked again how far all clients are.
_COUNT_S = 0.1
#: A view with all servers' endpoints must fit into one header.
_MAX_ENDPOINT_BYTES = 1000
#: Of a view so many bytes are for clients that are lost, each of which takes so many and why it is. Fewer clients have
#: room for the longest why.
_MAX_LOST_BYTES, _LOST_BYTES = 192 << 10, 22
_MANY_LOST = 400
#: What may be with a process that lives and is not heard.
_SILENT = "stopped, cut off, or in a call that keeps Python's lock"


class Member(msgspec.Struct):
    """A server, or a client's master in one store."""

    route: bytes
    incarnation: int
    last_seen_s: float
    host: str
    endpoints: list[str]
    clock: int = 0
    done: int = 0


def without_old_views(replies: Sequence[Reply]) -> list[Reply]:
    """All but the views that everyone gets, and a newer one after it: of many losses at once all have to hear once."""
    newest = max((reply.message.epoch for reply in replies if isinstance(reply.message, m.View)), default=0)
    return [
        reply for reply in replies
        if not isinstance(view := reply.message, m.View) or view.request >= 0 or view.epoch == newest
    ]  # fmt: skip


def _shortened(lost: Sequence[m.Lost]) -> list[m.Lost]:
    """Clients that are lost, with why so far as there is room: who is lost has to be known, by a view that can be sent.

    What others decide by is left as it is.
    """
    room = max(0, _MAX_LOST_BYTES // len(lost) - _LOST_BYTES)
    return [
        each if len(each.text) <= room // 4 or each.text in FOR_GOOD or len(text := each.text.encode()) <= room
        else m.Lost(each.rank, each.store, each.incarnation, text[:room].decode(errors="ignore"))
        for each in lost
    ]  # fmt: skip


class SchedulerState:
    """What the scheduler knows.

    Args:
        num_servers: the job begins when so many are there.
        heartbeat_timeout_s: a member that is silent for longer is lost.
        replicas: how many servers more than one are to hold each part of the values.
        on_client_loss: what barriers do without a client that is lost: "fail", "wait" or "shrink".
        book: of the snapshots of this job, if there are any, and of the one that it was resumed from.
        statistics: of what the processes of the job report.
        workers: those of each client of the launcher, if there is one: of some stores every worker is a client.
    A silence of all members is no loss: more likely the scheduler itself was cut off from them, or stopped.

    Attributes:
        clock_name: that of the clock of ``now_s``, if members are to compare theirs with it.
        complete: snapshots of which every part is written, for whoever writes their manifests.
    Raises:
        ConfigError: there are too few servers for so many replicas.
    """

    def __init__(
        self,
        num_servers: int,
        heartbeat_timeout_s: float,
        replicas: int = 0,
        on_client_loss: str = "fail",
        book: SnapshotBook | None = None,
        statistics: Statistics | None = None,
        workers: Sequence[range] = (),
    ) -> None:
        if replicas and replicas >= num_servers:
            raise ConfigError(f"{replicas} replicas need {replicas + 1} servers or more, this job has {num_servers}")
        self.num_servers, self.heartbeat_timeout_s, self.replicas = num_servers, heartbeat_timeout_s, replicas
        self._on_client_loss, self._num_launched = on_client_loss, len(workers)
        self._home = {worker: client for client, those in enumerate(workers) for worker in those}
        self.book = book or SnapshotBook(num_servers * PARTS_PER_SERVER)
        self.statistics = statistics or Statistics(num_servers=num_servers)
        self.complete: list[Manifest] = []
        self.members: dict[MemberName, Member] = {}
        self._servers: dict[int, Member] = {}  # of them, by rank: they are few where clients are many
        self.epoch = 0
        self._chains: Chains | None = None  # until all servers are there
        self._names: dict[bytes, MemberName] = {}
        self._stores: dict[int, Barriers] = {}
        self._over: set[int] = set()  # stores that it is too late to come back to
        self._ended: dict[int, str] = {}  # clients of the launcher that have ended, and are not back; and how
        self._unheard: list[tuple[str, int]] = []
        self._lost: dict[tuple[int, int], m.Lost] = {}
        self._waiting_for_view: dict[bytes, int] = {}
        self._heard_s: float | None = None  # when anybody was heard last
        self.clock_name = ""
        self._began_s: float | None = None
        self._count_again_s, self._all_done = 0.0, dict[int, int]()
        self.rejected = 0
        self.changes = 0  # of what ``save`` tells

    def handle(self, route: bytes, message: Message | ProtocolError, now_s: float) -> list[Reply]:
        """The replies to one message. Never raises."""
        request = getattr(message, "request", -1)
        try:
            if isinstance(message, ProtocolError):
                raise message
            if isinstance(message, m.Failure):  # two that answer each other's errors would never stop
                self._note_rejected(ProtocolError(f"scheduler: a Failure comes here: {message.text[:200]}"))
                return []
            if isinstance(message, m.Register):
                self._hear_somebody(now_s)
                return self._register(route, message, now_s)
            if isinstance(message, m.Report):
                return self._note_report(route, message, now_s)
            name = self._names.get(route)
            if name is None:
                if isinstance(message, m.Leave):  # said again, because the answer was lost
                    return [Reply(route, m.Ack(message.request, 0))]
                if isinstance(message, m.Heartbeat | m.Barrier | m.QueryDead | m.Finish | m.Enter):
                    # It was told that it is lost, but that went under with a connection: it must not wait for ever.
                    why = f"it was silent for too long ({_SILENT}), or another is in its place"
                    return [Reply(route, m.Failure(-1, "PeerLostError", f"this process counts as lost: {why}"))]
                raise ProtocolError(f"scheduler: begin with Register, not {type(message).__name__}")
            self._hear_somebody(now_s)
            self.members[name].last_seen_s = now_s
            return self._from_member(name, route, message, now_s)
        except KVError as error:
            if isinstance(error, ProtocolError):
                self._note_rejected(error)
            return [failure(route, request, error)]
        except Exception as error:
            _log.exception("scheduler: a request failed")
            text = f"the scheduler failed on a {type(message).__name__}: {type(error).__name__}: {error}"
            return [failure(route, request, KVError(text))]

    def _note_rejected(self, error: ProtocolError) -> None:
        self.rejected += 1
        if self.rejected <= 10 or self.rejected % 1000 == 0:  # a flood must not fill a disk
            _log.warning("scheduler: refused a message (%d so far): %s", self.rejected, error)

    def _note_report(self, route: bytes, report: m.Report, now_s: float) -> list[Reply]:
        """Also of who is no member. One that makes no sense is no reason to end who has sent it."""
        if (name := self._names.get(route)) is not None:
            self._hear_somebody(now_s)
            self.members[name].last_seen_s = now_s
        try:
            self.statistics.hear(report, now_s)
        except ProtocolError as error:
            self._note_rejected(error)
        return [Reply(route, m.Heard(report.number))] if report.answer and name is None else []

    def has_servers_on(self, host: str) -> bool:
        """Whether servers on that host are in the job. In any thread."""
        return any(server.host == host for server in list(self._servers.values()))

    def describe(self, now_s: float) -> dict[str, Any]:
        """The job as people want to see it; see ``Statistics.snapshot``."""
        lost = [
            f"client {rank} {why}"
            for store in self._stores.values() for rank, why in sorted(store.dead.items()) if why != CLOSED
        ]  # fmt: skip
        if self._chains is not None:
            lost += [f"server {rank} is gone" for rank in range(self.num_servers) if rank not in self._servers]
        return self.statistics.snapshot(now_s, lost[:MAX_NAMED])

    def _hear_somebody(self, now_s: float) -> None:
        """What nobody could be heard in, members need not answer for: they have their time again."""
        silence_s = 0.0 if self._heard_s is None else now_s - self._heard_s
        self._heard_s = now_s
        if silence_s > self.heartbeat_timeout_s / 2:
            _log.info("scheduler: heard nobody for %.1f s", silence_s)
            for member in self.members.values():
                member.last_seen_s += silence_s

    def _from_member(self, name: MemberName, route: bytes, message: Message, now_s: float) -> list[Reply]:
        match message:
            case m.Heartbeat():
                self.members[name].clock, self.members[name].done = message.clock, message.done
                done: dict[int, int] = {}
                if name[0] == "server":
                    self.book.heartbeat(name[2], message.clock)
                    done = self._done(now_s)
                heard = [Reply(route, self._heard(message.sent_us, now_s, done))] if message.sent_us else []
                # A view may have been lost with a connection.
                stale = message.epoch < self.epoch and self._chains is not None
                return [*heard, Reply(route, self._view())] if stale else heard
            case m.CaughtUp() | m.Drained() if name[0] == "server" and self._chains is not None:
                return self._hear_of_part(name[2], message)
            case m.Finish() if name[0] == "client":
                return [Reply(route, m.Ack(message.request, 0)), *self._stores[name[1]].finish(name[2])]
            case m.Enter() if name[0] == "client":
                return self._enter(name, route, message)
            case m.SnapshotNews() if name[0] == "server":
                number, manifest = self.book.hear(message)
                self.complete += [] if manifest is None else [manifest]
                return self._take_snapshot(number)
            case m.Barrier() if name[0] == "client":
                how_long = functools.partial(self._client_silence_s, name[1], now_s)
                return self._stores[name[1]].arrive(name[2], route, message, now_s, how_long)
            case m.QueryDead() if name[0] == "client":
                return [Reply(route, m.Dead(message.request, self._silent(name[1], message.timeout_s, now_s)))]
            case m.Leave():
                if name[0] == "client":
                    self._stores[name[1]].left[name[2]] = self.members[name].incarnation
                self._remove(name)
                if name[0] == "server" and self._chains is not None:
                    self._chains.lose(name[2], f"server {name[2]} has left")
                    return [Reply(route, m.Ack(message.request, 0)), *self._announce()]
                how = how_it_left(message.text)
                return [Reply(route, m.Ack(message.request, 0)), *self._leave_barriers(name, how, message.step)]
        raise ProtocolError(f"a {type(message).__name__} is no request of a {name[0]} to the scheduler")

    def _heard(self, sent_us: int, now_s: float, done: dict[int, int]) -> m.Heard:
        """With the time here, if members want to compare their clocks with it."""
        at_us = int(now_s * 1e6) if self.clock_name else 0
        return m.Heard(sent_us, at_us, self.clock_name, done)

    def _done(self, now_s: float) -> dict[int, int]:
        """By store the overall step that all clients which still push are done with, if they say it."""
        if now_s >= self._count_again_s:
            self._count_again_s = now_s + _COUNT_S
            self._all_done = {
                number: done for number, store in self._stores.items() if (done := self._least(number, store))
            }
        return self._all_done

    def _least(self, number: int, store: Barriers) -> int:
        pushing = [rank for rank in range(store.num_clients) if not store.is_without(rank)]
        members = (self.members.get(("client", number, rank)) for rank in pushing)
        return min((0 if member is None else member.done for member in members), default=0)

    def _register(self, route: bytes, message: m.Register, now_s: float) -> list[Reply]:
        # A server may be one more than the job began with.
        most = MAX_CLIENTS if message.role == "server" else message.num_members
        if message.role not in ("server", "client") or not 0 <= message.rank < most <= MAX_CLIENTS:
            raise ProtocolError(
                f"scheduler: {message.role[:20]} {message.rank} of {message.num_members} cannot register"
            )
        # Also of empty ones there must not be any number.
        if sum(map(len, message.endpoints), len(message.host)) + len(message.endpoints) > _MAX_ENDPOINT_BYTES:
            raise ProtocolError(f"scheduler: the endpoints of {message.role} {message.rank} are too long")
        if message.role == "server" and message.num_members != self.num_servers:
            raise ConfigError(f"a server says there are {message.num_members} servers, the job has {self.num_servers}")
        name = (message.role, -1 if message.role == "server" else message.store, message.rank)
        if self._names.get(route, name) != name:
            raise ProtocolError(f"scheduler: {self._names[route]} cannot register as {name} too")
        old = self.members.get(name)
        lacks: dict[int, str] = {}
        if old is not None and old.incarnation > message.incarnation:
            raise ProtocolError(f"scheduler: {message.role} {message.rank} has a later incarnation already")
        if message.role == "client":
            if message.store in self._over:
                raise ClientLostError(f"client {message.rank} comes too late: store {message.store} {STORE_OVER}")
            self._ended.pop(self._client_of(message.rank, message.num_members), None)
            if message.store not in self._stores:
                self._stores[message.store] = self._new_store(message.num_members)
                lacks = self._lose_absent(message.store)
            store = self._stores[message.store]
            for rank, why in lacks.items():
                store.lose(rank, why)
            if store.num_clients != message.num_members:
                raise ConfigError(
                    f"client {message.rank} creates a store for {message.num_members} clients, another client for "
                    f"{store.num_clients}; all workers must create the same stores in the same order"
                )
            self._note_return(store, message, store.dead.pop(message.rank, ""), old)
        if old is not None:
            self._remove(name)
        self.changes += 1
        self._add(name, Member(route, message.incarnation, now_s, message.host, message.endpoints))
        self._waiting_for_view[route] = message.request
        known = old is not None and old.incarnation == message.incarnation
        if message.role == "server":
            return self._welcome_server(message.rank, known=known)
        return self._announce() if lacks else self._answer_waiting()

    def _add(self, name: MemberName, member: Member) -> None:
        self.members[name] = member
        self._names[member.route] = name
        if name[0] == "server":
            self._servers[name[2]] = member

    def _new_store(self, num_clients: int) -> Barriers:
        return Barriers(num_clients, self._on_client_loss, self._note_change)

    def _note_change(self) -> None:
        self.changes += 1

    def _note_return(self, store: Barriers, message: m.Register, why: str, old: Member | None) -> None:
        """Where others go on without a client that is gone, all have to know that until its new process has entered.

        Args:
            why: it was gone, if that is known.
        """
        where = (message.store, message.rank)
        replaces = old is not None and old.incarnation < message.incarnation
        if self._on_client_loss != "shrink":
            self._lost.pop(where, None)
            if self._on_client_loss == "wait" and (why or replaces):
                store.bring_back(message.rank)
        elif old is None or replaces:
            why = why or "was lost and started again"
            gone = store.left.pop(message.rank, None) if old is None else old.incarnation
            if gone is not None:
                self._lost[where] = m.Lost(message.rank, message.store, gone, why)
            if where in self._lost:
                store.bring_back(message.rank)

    def _enter(self, name: MemberName, route: bytes, message: m.Enter) -> list[Reply]:
        """A client that is back has said after which step rounds wait for it again: barriers do as well."""
        store = self._stores[name[1]]
        if message.step >= 0 and name[2] in store.returning:
            _log.warning("scheduler: client %d is back, in the rounds after %d", name[2], message.step)
        answer = Reply(route, m.Ack(message.request, store.done))
        return [answer, *store.enter(name[2], message.step)]

    def _welcome_server(self, rank: int, *, known: bool) -> list[Reply]:
        """A server is there: the last one that the job has waited for, one that was lost, or one more."""
        if self._chains is not None:
            if known:
                return self._answer_waiting()
            if rank in self._chains.alive:
                self._chains.lose(rank, f"server {rank} was lost and started again")
            self._chains.join(rank)
            return self._announce()
        if self._servers.keys() >= set(range(self.num_servers)):
            self._chains = Chains(self.num_servers, self.replicas)
            for one_more in sorted(self._servers):
                if one_more >= self.num_servers:
                    self._chains.join(one_more)
            return self._announce()
        return []

    def _hear_of_part(self, server: int, message: m.CaughtUp | m.Drained) -> list[Reply]:
        assert self._chains is not None
        if not 0 <= message.part < len(self._chains.chains):
            raise ProtocolError(f"scheduler: server {server} speaks of part {message.part}")
        before = self._chains.chains[message.part].version
        heard = self._chains.caught_up if isinstance(message, m.CaughtUp) else self._chains.drained
        heard(message.part, message.version, server)
        return self._announce() if self._chains.chains[message.part].version > before else []

    def save(self) -> SavedScheduler:
        """What another process needs to go on. Requests that wait are sent again to that one."""
        chains = self._chains
        members = [
            SavedMember(*name, member.route, member.incarnation, member.host, member.endpoints)
            for name, member in self.members.items()
        ]
        stores = [store.save(number) for number, store in self._stores.items()]
        return SavedScheduler(
            self.epoch, [] if chains is None else chains.chains, [] if chains is None else sorted(chains.alive),
            [] if chains is None else chains.wanted_heads, members, stores, list(self._lost.values()),
            0 if self.book.resumed is None else self.book.resumed.number,
            {} if self.book.resumed is None else dict(self.book.resumed.steps), sorted(self._over), self._ended,
        )  # fmt: skip

    def restore(self, saved: SavedScheduler, now_s: float) -> None:
        """Go on from what another process has saved. Members have their time again to give a sign of life."""
        self.epoch = saved.epoch
        if saved.chains:
            self._chains = Chains.restored(
                self.num_servers, self.replicas, saved.chains, saved.alive, saved.wanted_heads
            )
        for old in saved.members:
            name = (old.role, old.store, old.rank)
            self._add(name, Member(old.route, old.incarnation, now_s, old.host, old.endpoints))
        for store in saved.stores:
            self._stores[store.number] = self._new_store(store.num_clients)
            self._stores[store.number].restore(store)
        self._over, self._ended = set(saved.over), saved.ended
        self._lost = {(lost.store, lost.rank): lost for lost in saved.lost}

    def _view(self, request: int = -1) -> m.View:
        assert self._chains is not None
        servers = [
            m.ServerInfo(rank, server.incarnation, server.host, server.endpoints)
            for rank, server in sorted(self._servers.items())
        ]
        resumed = (0, {}) if self.book.resumed is None else (self.book.resumed.number, dict(self.book.resumed.steps))
        lost = list(self._lost.values())
        if len(lost) > _MANY_LOST:
            lost = _shortened(lost)
        return m.View(self.epoch, self.replicas, self._chains.chains, servers, lost, request, *resumed)

    def _take_snapshot(self, number: int | None) -> list[Reply]:
        if number is None:
            return []
        message = m.TakeSnapshot(number, self.book.missed, self.book.ahead)
        return [Reply(server.route, message) for server in self._servers.values()]

    def _answer_waiting(self) -> list[Reply]:
        """The view for those who have just registered, if there is one."""
        if self._chains is None:
            return []
        waiting, self._waiting_for_view = self._waiting_for_view, {}
        return [Reply(route, self._view(request)) for route, request in waiting.items()]

    def _announce(self) -> list[Reply]:
        """The view has changed: everyone gets the new one."""
        if self._chains is None:
            return []
        self.epoch += 1
        self.changes += 1
        if timeline.on:
            timeline.mark("view", step=self.epoch)
        waiting = self._answer_waiting()
        told = {reply.route for reply in waiting}
        view = self._view()
        return [*waiting, *(Reply(member.route, view) for member in self.members.values() if member.route not in told)]

    def _silence_s(self, name: MemberName, now_s: float) -> float | None:
        """Since when nothing was heard of a member; None if it is none."""
        return None if name not in self.members else now_s - self.members[name].last_seen_s

    def _client_silence_s(self, store: int, now_s: float, rank: int) -> float | None:
        return self._silence_s(("client", store, rank), now_s)

    def waits(self, now_s: float) -> list[Wait]:
        """Barriers that some have reached, and servers that are still to come."""
        found = []
        if self._chains is None and self.num_servers:
            absent = [rank for rank in range(self.num_servers) if rank not in self._servers]
            if absent:
                self._began_s = now_s if self._began_s is None else self._began_s
                text = "the beginning of the job"
                found.append(Wait(("servers",), self._began_s, text, f"server {ranks_in_words(absent)} has not come"))
        for number, store in list(self._stores.items()):
            wait = store.wait(number, functools.partial(self._client_silence_s, number, now_s))
            found += [] if wait is None else [wait]
        return found

    def notes(self, now_s: float) -> list[str]:
        """Every member and when it was heard."""
        return [
            f"{role} {rank}" + (f" of store {store}, clock {member.clock}" if store >= 0 else "")
            + f": last heartbeat {now_s - member.last_seen_s:.1f} s ago"
            for (role, store, rank), member in sorted(self.members.items())
        ]  # fmt: skip

    def _silent(self, store_id: int, timeout_s: float, now_s: float) -> list[int]:
        store = self._stores[store_id]
        silent = {
            rank
            for (role, of_store, rank), member in self.members.items()
            if role == "client" and of_store == store_id and now_s - member.last_seen_s > timeout_s
        }
        lost = {rank for rank, why in store.dead.items() if why != CLOSED}
        return sorted(silent | lost)

    def tick(self, now_s: float) -> list[Reply]:
        """Declare silent members lost and tell everyone."""
        self.statistics.tick(now_s)
        replies = self._take_snapshot(self.book.tick(now_s))
        for name, member in list(self.members.items()):
            # Not from now: nobody is lost while nobody is heard.
            silence_s = (self._heard_s or 0.0) - member.last_seen_s
            if silence_s > self.heartbeat_timeout_s:
                self._unheard.append((name[0], self._launched(name)))
                replies += self.lose(name, f"was lost: no heartbeat for {silence_s:.1f} s ({_SILENT})")
        return replies

    def take_unheard(self) -> list[tuple[str, int]]:
        """Role and rank of those that were lost in silence since this was asked: their processes may still be there."""
        unheard, self._unheard = self._unheard, []
        return unheard

    def hear_end(self, role: str, rank: int, newest: int, how: str, *, returns: bool = True) -> list[Reply]:
        """A process of the job has ended for certain, whoever says so: no heartbeats need be missed.

        Args:
            role, rank: of a server or a client, as the launcher has it.
            newest: none that is in its place with a later incarnation is meant.
            how: the end of a sentence.
            returns: it may be started again.
        """
        waits = returns or self._on_client_loss != "wait"
        why = f"was lost: its process {how}" if waits else ENDED
        those = [name for name in self.members if name[0] == role and self._launched(name) == rank]
        ended = [name for name in those if self.members[name].incarnation <= newest]
        replies = [reply for name in ended for reply in self.lose(name, why)]
        if role == "client" and len(ended) == len(those):
            self._ended[rank] = why
            self.changes += 1
            absent = {number: lacks for number in self._stores if (lacks := self._lose_absent(number))}
            replies += self._announce() if absent else []
            for number, lacks in absent.items():
                for missing, how_lost in lacks.items():
                    replies += self._leave_barriers(("client", number, missing), how_lost)
        return replies

    def _client_of(self, rank: int, num_clients: int) -> int:
        """The launcher's client that has ``rank`` in a store of ``num_clients``: its own rank, or that of a worker."""
        return rank if num_clients == self._num_launched else self._home.get(rank, rank)

    def _launched(self, name: MemberName) -> int:
        """The rank under which the launcher has a member."""
        role, store, rank = name
        return rank if role == "server" else self._client_of(rank, self._stores[store].num_clients)

    def _lose_absent(self, number: int) -> dict[int, str]:
        """Clients that have ended before they came to a store are lost there, unless others wait for them; and how."""
        store, waits = self._stores[number], self._on_client_loss == "wait"
        clients = ((rank, self._client_of(rank, store.num_clients)) for rank in range(store.num_clients))
        absent = {
            rank: why
            for rank, client in clients
            if (why := self._ended.get(client, "")) and rank not in store.dead and not (waits and why != ENDED)
        }
        for rank, why in absent.items():
            self._lost[number, rank] = m.Lost(rank, number, 0, why)
        return absent

    def lose(self, name: MemberName, why: str) -> list[Reply]:
        """``name`` is gone without having said so."""
        role, store, rank = name
        _log.warning("scheduler: %s %d %s", role, rank, why)
        if timeline.on:
            timeline.mark("lost", f"{role} {rank}")
        if role == "client":
            self._lost[store, rank] = m.Lost(rank, store, self.members[name].incarnation, why)
        elif self._chains is not None:
            self._chains.lose(rank, f"server {rank} {why}")
        route = self.members[name].route
        self._remove(name)
        # It may only have been silent for long: then it has to know.
        out = [Reply(route, m.Failure(-1, "PeerLostError", f"{role} {rank} {why}"))]
        return [*out, *self._announce(), *self._leave_barriers(name, why)]

    def _remove(self, name: MemberName) -> None:
        self.changes += 1
        member = self.members.pop(name)
        self._names.pop(member.route, None)
        if name[0] == "server":
            del self._servers[name[2]]
        self._waiting_for_view.pop(member.route, None)

    def _leave_barriers(self, name: MemberName, why: str, step: int = 0) -> list[Reply]:
        role, store_id, rank = name
        if role != "client":
            return []
        store = self._stores[store_id]
        replies = store.lose(rank, why, step)
        if store.deserted:
            del self._stores[store_id]
            if why in FOR_GOOD and self._on_client_loss != "fail":
                self._over.add(store_id)
            self._lost = {where: lost for where, lost in self._lost.items() if where[0] != store_id}
            return []
        return replies
