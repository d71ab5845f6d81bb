"""A server as a state machine without I/O: sessions of clients over several stores, and errors that go back to their cause."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from kvmpi.errors import ConfigError, KVError, ProtocolError
from kvmpi.ps.shard import Reply, Shard
from kvmpi.wire import Message
from kvmpi.wire import messages as m

_log = logging.getLogger(__name__)


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
        self.rejected = 0

    def handle(self, route: bytes, message: Message | ProtocolError, payloads: list[memoryview]) -> list[Reply]:
        """The replies to one message. Never raises: what is wrong with a request goes back to whoever sent it."""
        request = getattr(message, "request", -1)
        try:
            if isinstance(message, ProtocolError):
                raise message
            if isinstance(message, m.Lost):
                return self._lost(message)
            if isinstance(message, m.Hello):
                return self._hello(route, message)
            session = self._sessions.get(route)
            if session is None:
                raise ProtocolError(f"server {self.rank}: a session begins with Hello, not {type(message).__name__}")
            replies = session.shard.handle(session.client, route, message, payloads)
            if isinstance(message, m.Bye):
                self._end(route, session)
            return replies
        except KVError as error:
            if isinstance(error, ProtocolError):
                self.rejected += 1
                _log.warning("server %d: refused a message: %s", self.rank, error)
            return [Reply(route, m.Failure(request, type(error).__name__, str(error)))]
        except Exception as error:
            _log.exception("server %d: a request failed", self.rank)
            text = f"server {self.rank} failed on a {type(message).__name__}: {type(error).__name__}: {error}"
            return [Reply(route, m.Failure(request, "KVError", text))]

    def _hello(self, route: bytes, hello: m.Hello) -> list[Reply]:
        if not 0 <= hello.client < hello.num_clients:
            raise ProtocolError(f"server {self.rank}: client {hello.client} of {hello.num_clients} cannot be")
        shard = self._shards.get(hello.store)
        if shard is None:
            shard = self._shards[hello.store] = Shard(self.rank, hello.store, hello.mode, hello.num_clients)
        if (shard.mode, shard.num_clients) != (hello.mode, hello.num_clients):
            raise ConfigError(
                f"client {hello.client} creates a {hello.mode} store for {hello.num_clients} clients, another client "
                f"created it {shard.mode} for {shard.num_clients}; all workers must create the same stores in the same order"
            )
        old = self._routes.get((hello.store, hello.client))
        if old is not None and old != route:
            if self._sessions[old].incarnation > hello.incarnation:
                raise ProtocolError(f"server {self.rank}: client {hello.client} has a later incarnation already")
            del self._sessions[old]
        self._routes[hello.store, hello.client] = route
        self._sessions[route] = _Session(shard, hello.client, hello.incarnation)
        return [Reply(route, m.Ack(hello.request, 0))]

    def _end(self, route: bytes, session: _Session) -> None:
        del self._sessions[route]
        self._routes.pop((session.shard.store, session.client), None)
        if session.shard.deserted:
            self._shards.pop(session.shard.store, None)

    def _lost(self, message: m.Lost) -> list[Reply]:
        if message.role != "client" or message.store not in self._shards:
            return []
        shard = self._shards[message.store]
        replies = shard.lose(message.rank, message.text)
        route = self._routes.get((message.store, message.rank))
        if route is not None:
            self._end(route, self._sessions[route])
        return replies
