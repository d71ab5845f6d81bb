"""A server as a state machine without I/O: sessions of clients over parts and stores, errors that go to their cause."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvmpi.errors import (
    STORE_OVER,
    ClientLostError,
    ConfigError,
    KVError,
    ProtocolError,
    ServerLostError,
    names_in_words,
)
from kvmpi.ps.membership import MAX_CLIENTS, how_it_left
from kvmpi.ps.part import Part
from kvmpi.ps.reply import Outgoing, Reply, failure
from kvmpi.ps.shard import Shard
from kvmpi.ps.slot import Empty, new_buffer
from kvmpi.ps.snapshots import PartCopy, ServerSnapshots
from kvmpi.trace.stall import Wait
from kvmpi.wire import Message
from kvmpi.wire import messages as m
from kvmpi.wire.entries import Key

_log = logging.getLogger(__name__)

_ABOUT_PARTS = frozenset({
    m.Init, m.Push, m.Pull, m.Query, m.SetRule, m.SetHyperparams, m.GetState, m.PutState, m.Finish, m.Return,
    m.Enter,
})  # fmt: skip


class _Session(NamedTuple):
    hello: m.Hello
    who: tuple[int, int]  # its store and client


class ServerState:
    """What server ``rank`` knows. One per process; every store of the job has its own ``Shard`` in every part.

    Args:
        snapshot_every: take snapshots, and begin one after so many rounds (``ServerSnapshots``); None: take none.
    Attributes:
        empty: makes memory for values.
        lease_ends_s: so long no other server is taken for the head of a part that this one answers for. It answers
            nothing after that, since it could not know that it has been taken for lost.
    """

    def __init__(self, rank: int, on_client_loss: str = "fail", snapshot_every: int | None = None) -> None:
        self.rank, self.on_client_loss = rank, on_client_loss
        self.snapshots = None if snapshot_every is None else ServerSnapshots(rank, snapshot_every, self._answering)
        self._resumed: dict[int, PartCopy] = {}
        self._resumed_keys: dict[int, frozenset[Key]] = {}
        self.empty: Empty = new_buffer
        self.epoch = -1
        self._num_parts = 0  # of the job; until the first view it is not known
        self.lease_ends_s = math.inf
        self.parts: dict[int, Part] = {}
        self._sessions: dict[bytes, _Session] = {}
        self._routes: dict[tuple[int, int], bytes] = {}
        # When each client (store, client) was heard, and since when rounds that somebody waits for are known of.
        self._heard_s: dict[tuple[int, int], float] = {}
        self._awaited_s: dict[tuple[int, int, Key, int, str], float] = {}
        self._lost: dict[int, list[m.Lost]] = {}
        # By store and client: the last process that is known to have ended, whatever comes of it still, and how.
        self._ended: dict[tuple[int, int], tuple[int, str]] = {}
        self.rejected = self.requests = self.received_bytes = 0

    def handle(
        self, route: bytes, message: Message | ProtocolError, payloads: list[memoryview], now_s: float = 0.0
    ) -> Sequence[Outgoing]:
        """What to send because of one message. What is wrong with it goes back to whoever sent it.

        Raises:
            ServerLostError: others are to go on in this server's place, as may ``adopt``.
        """
        self.requests += 1
        for payload in payloads:
            self.received_bytes += payload.nbytes
        try:
            if type(message) in _ABOUT_PARTS:
                return self._about_part(route, message, payloads, now_s)
            if isinstance(message, ProtocolError):
                raise message
            match message:
                case m.Extend() | m.Log() | m.Install():
                    if route in self._sessions:
                        raise ProtocolError(f"server {self.rank}: a client speaks like a server")
                    part = self.parts.get(message.part)
                    return [] if part is None else part.follow(route, message, payloads, now_s)
                case m.Hello():
                    return self._hello(route, message, now_s)
                case m.Bye():
                    return self._bye(route, message, now_s)
            raise ProtocolError(f"server {self.rank}: a {type(message).__name__} is no request to a server")
        except ServerLostError:
            raise
        except Exception as error:
            refusal = self._refuse(route, message, error)
            # Two that answer each other's errors would never stop.
            return [] if isinstance(message, m.Failure) else [refusal]

    def _refuse(self, route: bytes, message: Message | ProtocolError, error: Exception) -> Reply:
        """``error`` for whoever sent ``message``; what is worth it is logged."""
        request = getattr(message, "request", -1)
        if not isinstance(error, KVError):
            _log.error("server %d: a request failed", self.rank, exc_info=error)
            text = f"server {self.rank} failed on a {type(message).__name__}: {type(error).__name__}: {error}"
            return failure(route, request, KVError(text))
        if isinstance(error, ProtocolError):
            self.rejected += 1
            if self.rejected <= 10 or self.rejected % 1000 == 0:  # a flood must not fill a disk
                _log.warning("server %d: refused a message (%d so far): %s", self.rank, self.rejected, error)
        return failure(route, request, error)

    def hear(self, server: int, message: Message, now_s: float) -> Sequence[Outgoing]:
        """What a server after this one in a chain answers."""
        part = self.parts.get(getattr(message, "part", -1))
        return [] if part is None else part.hear(message, now_s)

    def hear_done(self, done: Mapping[int, int]) -> None:
        """The scheduler says, by store, which step all clients are done with."""
        if self.snapshots is not None:
            self.snapshots.hear_done(done)

    def tick(self, now_s: float) -> Sequence[Outgoing]:
        """Say again what may have been lost."""
        return [outgoing for part in self.parts.values() if part.sends_on for outgoing in part.tick(now_s)]

    def reports(self) -> list[Message]:
        """What the scheduler waits for, to be said until it has changed the view."""
        return [message for part in self.parts.values() if part.moves for message in part.report()]

    # ---- the view

    def adopt(self, view: m.View, now_s: float = 0.0) -> Sequence[Outgoing]:
        """The scheduler says who is in the job."""
        if view.epoch <= self.epoch:
            return []
        self.epoch, self._num_parts = view.epoch, len(view.chains)
        out: list[Outgoing] = []
        answering = self._answering()
        if self.snapshots is not None:
            self.snapshots.resume(view.snapshot, view.steps)
        for number, chain in enumerate(view.chains):
            mine = self.rank in chain.members or self.rank == chain.joiner
            part = self.parts.get(number)
            if part is None:
                if not mine:
                    continue
                part = self.parts[number] = self._new_part(number)
            answered = part.answers
            out += part.adopt(chain, view.replicas, now_s)
            if (resumed := self._resumed.pop(number, None)) is not None:
                part.resume(resumed, self._resumed_keys)
            if part.answers and not answered:
                out += self._take_over(part, now_s)
            if not mine:
                del self.parts[number]
        if self.snapshots is not None and self._answering() != answering:
            self.snapshots.heads_changed()
        self._lost = {}
        for lost in view.lost:
            self._lost.setdefault(lost.store, []).append(lost)
            if lost.incarnation > self._ended_of(lost.store, lost.rank):
                self._ended[lost.store, lost.rank] = lost.incarnation, lost.text
            out += self._lose(lost, now_s)
        return out

    def _new_part(self, number: int) -> Part:
        part = Part(self.rank, number, self.on_client_loss)
        part.empty = self.empty
        part.snapshots = self.snapshots
        return part

    def resume(self, parts: dict[int, PartCopy], keys: dict[int, frozenset[Key]]) -> None:
        """What a snapshot has of the parts that the first view will give to this server, and the keys of all parts."""
        self._resumed, self._resumed_keys = parts, keys

    def _take_over(self, part: Part, now_s: float) -> list[Outgoing]:
        """This server answers for ``part`` from now on: those who are here already are to be known there too, and who
        has said good-bye while nobody answered for it."""
        replies: list[Reply] = []
        for route, session in list(self._sessions.items()):
            hello = session.hello
            shard = part.shard(hello.store, hello.mode, hello.num_clients)
            if shard.clients.incarnations.get(hello.client, -1) > hello.incarnation:
                self._end(route)  # another process has taken its place where this server was not asked
            else:
                replies += shard.join(hello.client, hello.incarnation)
        for (store, client), (incarnation, why) in self._ended.items():
            if store in part.shards and 0 <= client < part.shards[store].num_clients:
                replies += part.shards[store].lose(client, why, incarnation)
        for shard in part.shards.values():
            replies += shard.go_on()
        return [*part.hold(replies, now_s), *part.drop_deserted(now_s)]

    def _lose(self, lost: m.Lost, now_s: float) -> list[Outgoing]:
        out: list[Outgoing] = []
        for part in self._answering():
            shard = part.shards.get(lost.store)
            if shard is not None and 0 <= lost.rank < shard.num_clients:
                out += part.hold(shard.lose(lost.rank, lost.text, lost.incarnation), now_s)
                out += part.drop_deserted(now_s)
        route = self._routes.get((lost.store, lost.rank))
        if route is not None and self._sessions[route].hello.incarnation <= lost.incarnation:
            self._end(route)
        return out

    def _ended_of(self, store: int, client: int) -> int:
        """The last process of a client that is known to have ended; -1: none is."""
        return self._ended.get((store, client), (-1, ""))[0]

    def _answering(self) -> list[Part]:
        return [part for part in self.parts.values() if part.answers]

    # ---- clients

    def _about_part(self, route: bytes, message: Any, payloads: list[memoryview], now_s: float) -> Sequence[Outgoing]:
        session = self._sessions.get(route)
        part = self.parts.get(message.part)
        if part is None and self._num_parts and not 0 <= message.part < self._num_parts:
            raise ProtocolError(
                f"server {self.rank}: there is no part {message.part}, this job has {self._num_parts} from 0 on"
            )
        if session is None or part is None or not part.answers or (part.is_shared and now_s > self.lease_ends_s):
            # A client may have known the process before this one, whose place it has taken on the same address.
            return [Reply(route, m.Moved(message.request))]
        store, client = session.who
        self._heard_s[session.who] = now_s
        try:
            replies = part.request(store, client, route, message, payloads)
            if replies and type(waiting := replies[-1].message) is m.Waiting:
                waiting.silent_s = self._silent_s(store, waiting.clients, now_s)
        except ServerLostError:
            raise
        except Exception as error:  # it may have changed the state before, and that is to be passed on all the same
            replies = [self._refuse(route, message, error)]
        return part.hold(replies, now_s)

    def _silent_s(self, store: int, clients: list[int], now_s: float) -> list[int]:
        """For how long each of ``clients`` has asked nothing here; nothing to say if that is no time at all."""
        silent_s = [int(now_s - self._heard_s.get((store, client), now_s)) for client in clients]
        return silent_s if any(silent_s) else []

    def waits(self, now_s: float) -> list[Wait]:
        """The rounds and reads that somebody waits for, from the first look on that finds one; and a scheduler that is
        silent."""
        before, self._awaited_s = self._awaited_s, {}
        found: dict[tuple[int, str, tuple[int, ...]], list[tuple[float, str, int]]] = {}
        for part in list(self.parts.values()) if self._routes else ():
            for store, shard in list(part.shards.items()) if part.answers else ():
                for key, chunk, what, missing in shard.awaited():
                    where = (part.number, store, key, chunk, what)
                    since_s = self._awaited_s[where] = before.get(where, now_s)
                    found.setdefault((store, what, tuple(missing)), []).append((since_s, repr(key), chunk))
        silent = now_s > self.lease_ends_s and any(part.is_shared for part in self._answering())
        whom = "no word from it; until then this server answers nobody, as another may be in its place"
        return [
            *([Wait(("scheduler",), self.lease_ends_s, "the scheduler", whom)] if silent else ()),
            *(
                Wait(("round", store, what, missing), min(awaited)[0], _named(store, what, awaited),
                     self._late(store, missing, now_s))
                for (store, what, missing), awaited in found.items()
            ),
        ]  # fmt: skip

    def _late(self, store: int, clients: tuple[int, ...], now_s: float) -> str:
        names = []
        for client in clients:
            heard_s = self._heard_s.get((store, client))
            age = "not here" if heard_s is None else f"last request {now_s - heard_s:.1f} s ago"
            names.append(f"client {client} ({age})")
        return f"no push from {names_in_words(names)}" if names else "all have pushed"

    def held_bytes(self, route: bytes) -> int:
        """Answers to a client that wait until other servers have what they speak of."""
        return sum(part.held_bytes[route] for part in self.parts.values() if part.held_bytes)

    def value_bytes(self, route: bytes) -> int:
        """The values here of the store of a client; 0 for whoever is none."""
        session = self._sessions.get(route)
        if session is None:
            return 0
        shards = [part.shards.get(session.hello.store) for part in self.parts.values()]
        return sum(slot.value.nbytes for shard in shards if shard is not None for slot in shard.slots.values())

    def _hello(self, route: bytes, hello: m.Hello, now_s: float) -> list[Outgoing]:
        if not 0 <= hello.client < hello.num_clients <= MAX_CLIENTS:
            raise ProtocolError(f"server {self.rank}: client {hello.client} of {hello.num_clients} cannot be")
        here = self._sessions.get(route)
        if here is not None and here.who != (hello.store, hello.client):
            raise ProtocolError(
                f"server {self.rank}: client {here.who[1]} of store {here.who[0]} says it is "
                f"client {hello.client} of store {hello.store}"
            )
        there = self._routes.get((hello.store, hello.client))
        if there is not None and self._sessions[there].hello.incarnation > hello.incarnation:
            raise ProtocolError(f"client {hello.client} has a later incarnation already")
        if hello.incarnation <= self._ended_of(hello.store, hello.client):
            raise ClientLostError(f"client {hello.client} was lost, and its process cannot take part any more")
        out: list[Outgoing] = []
        refusal: KVError | None = None
        for part in self._answering():
            shard = self._shard_for(part, hello)
            out += part.hold(shard.join(hello.client, hello.incarnation), now_s)
            refusal = refusal or shard.clients.refusal(hello.client)
            out += part.drop_deserted(now_s)
        old = self._routes.pop((hello.store, hello.client), None)
        if old is not None:
            del self._sessions[old]
        if refusal is not None:
            return [*out, failure(route, hello.request, refusal)]
        self._routes[hello.store, hello.client] = route
        self._sessions[route] = _Session(hello, (hello.store, hello.client))
        self._heard_s[hello.store, hello.client] = now_s
        return [*out, Reply(route, m.Ack(hello.request, 0))]

    def _shard_for(self, part: Part, hello: m.Hello) -> Shard:
        if hello.store in part.over:
            raise ClientLostError(f"client {hello.client}: store {hello.store} {STORE_OVER}")
        new = hello.store not in part.shards or part.shards[hello.store].untouched
        shard = part.shard(hello.store, hello.mode, hello.num_clients)
        if (shard.mode, shard.num_clients) != (hello.mode, hello.num_clients):
            raise ConfigError(
                f"client {hello.client} creates a {hello.mode} store for {hello.num_clients} clients, another client "
                f"created it {shard.mode} for {shard.num_clients}; all workers must create the same stores in the same "
                f"order"
            )
        for lost in self._lost.get(hello.store, []) if new else []:
            if 0 <= lost.rank < shard.num_clients:
                shard.lose(lost.rank, lost.text, lost.incarnation)
        return shard

    def _bye(self, route: bytes, message: m.Bye, now_s: float) -> list[Outgoing]:
        session = self._sessions.get(route)
        out: list[Outgoing] = []
        if session is not None:  # else it is said again, because the answer was lost
            store, client = session.who
            how = how_it_left(message.text)
            self._ended[session.who] = session.hello.incarnation, how
            if self.snapshots is not None:
                self.snapshots.hear_end(store, message.done)
            for part in self.parts.values():
                if store in part.shards and (part.answers or part.hands_over):
                    out += part.hold(part.shards[store].lose(client, how), now_s)
                    out += part.drop_deserted(now_s) if part.answers else []
            self._end(route)
        return [*out, Reply(route, m.Ack(message.request, 0))]

    def _end(self, route: bytes) -> None:
        session = self._sessions.pop(route)
        self._routes.pop(session.who, None)
        self._heard_s.pop(session.who, None)


def _named(store: int, what: str, awaited: list[tuple[float, str, int]]) -> str:
    _, key, chunk = min(awaited)
    more = f", and of {len(awaited) - 1} further chunks" if len(awaited) > 1 else ""
    return f"{what} of key {key} (chunk {chunk}{more}) in store {store}"
