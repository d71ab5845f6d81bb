"""A server as a state machine without I/O: sessions of clients over several stores, errors that go to their cause."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from kvmpi.errors import ConfigError, KVError, ProtocolError
from kvmpi.ps.reply import Reply, failure
from kvmpi.ps.shard import Shard
from kvmpi.wire import Message
from kvmpi.wire import messages as m

_log = logging.getLogger(__name__)

#: No job has so many; a peer that claims more is wrong, and lists as long as that must not be made.
MAX_CLIENTS = 1 << 16


@dataclass(frozen=True, slots=True)
class _Session:
    shard: Shard
    client: int
    incarnation: int


class ServerState:
    """What server ``rank`` knows. One per process; every store of the job has its own ``Shard``."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._shards: dict[int, Shard] = {}
        self._sessions: dict[bytes, _Session] = {}
        self._routes: dict[tuple[int, int], bytes] = {}
        # Clients that were lost before anyone opened their store here.
        self._early_losses: dict[int, list[m.Lost]] = {}
        self.rejected = 0

    def handle(self, route: bytes, message: Message | ProtocolError, payloads: list[memoryview]) -> list[Reply]:
        """The replies to one message. Never raises: what is wrong with a request goes back to whoever sent it."""
        request = getattr(message, "request", -1)
        try:
            if isinstance(message, ProtocolError):
                raise message
            if isinstance(message, m.Hello):
                return self._hello(route, message)
            session = self._sessions.get(route)
            if session is None:
                if isinstance(message, m.Bye):  # said again, because the answer was lost
                    return [Reply(route, m.Ack(request, 0))]
                raise ProtocolError(f"server {self.rank}: a session begins with Hello, not {type(message).__name__}")
            replies = session.shard.handle(session.client, route, message, payloads)
            if isinstance(message, m.Bye):
                self._end(route, session)
            return replies
        except KVError as error:
            if isinstance(error, ProtocolError):
                self.rejected += 1
                if self.rejected <= 10 or self.rejected % 1000 == 0:  # a flood must not fill a disk
                    _log.warning("server %d: refused a message (%d so far): %s", self.rank, self.rejected, error)
            return [failure(route, request, error)]
        except Exception as error:
            _log.exception("server %d: a request failed", self.rank)
            text = f"server {self.rank} failed on a {type(message).__name__}: {type(error).__name__}: {error}"
            return [failure(route, request, KVError(text))]

    def lose(self, lost: m.Lost) -> list[Reply]:
        """The scheduler says that a member is gone; the replies to those who waited for it."""
        if lost.role != "client":
            return []
        shard = self._shards.get(lost.store)
        if shard is None:
            self._early_losses.setdefault(lost.store, []).append(lost)
            return []
        route = self._routes.get((lost.store, lost.rank))
        session = None if route is None else self._sessions[route]
        if session is not None and session.incarnation > lost.incarnation:
            return []  # this one is new, and was here before the news of its predecessor
        replies = shard.lose(lost.rank, lost.text)
        if route is not None and session is not None:
            self._end(route, session)
        else:
            self._drop_if_deserted(shard)
        return replies

    def _hello(self, route: bytes, hello: m.Hello) -> list[Reply]:
        if not 0 <= hello.client < hello.num_clients <= MAX_CLIENTS:
            raise ProtocolError(f"server {self.rank}: client {hello.client} of {hello.num_clients} cannot be")
        here = self._sessions.get(route)
        if here is not None and (here.shard.store, here.client) != (hello.store, hello.client):
            raise ProtocolError(
                f"server {self.rank}: client {here.client} of store {here.shard.store} says it is "
                f"client {hello.client} of store {hello.store}"
            )
        shard = self._shards.get(hello.store)
        if shard is None:
            shard = Shard(self.rank, hello.store, hello.mode, hello.num_clients)
            self._shards[hello.store] = shard
            for lost in self._early_losses.pop(hello.store, []):
                if 0 <= lost.rank < hello.num_clients:
                    shard.lose(lost.rank, lost.text)
        if (shard.mode, shard.num_clients) != (hello.mode, hello.num_clients):
            raise ConfigError(
                f"client {hello.client} creates a {hello.mode} store for {hello.num_clients} clients, another client "
                f"created it {shard.mode} for {shard.num_clients}; all workers must create the same stores in the same "
                f"order"
            )
        replies = shard.join(hello.client, hello.incarnation)
        old = self._routes.pop((hello.store, hello.client), None)
        if old is not None:
            del self._sessions[old]
        if (refusal := shard.refusal(hello.client)) is not None:
            self._drop_if_deserted(shard)
            return [*replies, failure(route, hello.request, refusal)]
        self._routes[hello.store, hello.client] = route
        self._sessions[route] = _Session(shard, hello.client, hello.incarnation)
        return [*replies, Reply(route, m.Ack(hello.request, 0))]

    def _end(self, route: bytes, session: _Session) -> None:
        del self._sessions[route]
        self._routes.pop((session.shard.store, session.client), None)
        self._drop_if_deserted(session.shard)

    def _drop_if_deserted(self, shard: Shard) -> None:
        if shard.deserted:
            self._shards.pop(shard.store, None)
