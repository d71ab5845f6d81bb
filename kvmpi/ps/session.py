"""The master's side of the protocol as a state machine without I/O: requests, windows, retries, deadlines.

Requests to one peer leave in order of priority, then age. Two windows per peer bound what is under way: payload bytes
that the peer has not accepted, and value bytes that it has been asked for. They are separate so that a reader who waits
for other clients never keeps this client's own pushes from leaving, which those others wait for.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy.typing as npt

from kvmpi.errors import KVError, KVTimeoutError, ServerLostError, rebuild
from kvmpi.wire import Message
from kvmpi.wire import messages as m

Buffer = npt.NDArray[Any]
Reply = Callable[[Message, list[memoryview]], None]

#: The scheduler's number among the peers; servers have theirs, from 0.
SCHEDULER = -1
#: After this part of an operation's time without an answer a request is repeated, to learn whom it waits for.
_RETRY_FRACTION = 0.25


class Operation:
    """Several requests that end together: one key's exchange, or one command to all servers.

    Args:
        label: what it does, for error messages.
        timeout_s: seconds that it may take from ``now_s`` on.
        on_done: called once with the first error, or None.
    """

    __slots__ = ("error", "expires_s", "finished", "label", "on_done", "pending", "timeout_s")

    def __init__(self, label: str, timeout_s: float, now_s: float, on_done: Callable[[KVError | None], None]) -> None:
        self.label, self.timeout_s, self.expires_s, self.on_done = label, timeout_s, now_s + timeout_s, on_done
        self.pending = 0
        self.error: KVError | None = None
        self.finished = False


class Ask:
    """One request: ``kind(request number, *fields)`` to ``peer``, with payloads made when it leaves.

    Args:
        cost_bytes: what it takes from its window: payload bytes, or with ``reads`` the bytes it asks for.
        reads: it takes from the window of values asked for.
    """

    __slots__ = ("accepted", "cost_bytes", "fields", "kind", "missing", "number", "on_reply", "operation", "payloads",
                 "peer", "reads", "sent_s")  # fmt: skip

    def __init__(
        self,
        peer: int,
        kind: type[Message],
        fields: tuple[Any, ...],
        *,
        payloads: Callable[[], Sequence[Buffer]] | None = None,
        cost_bytes: int = 0,
        reads: bool = False,
        on_reply: Reply | None = None,
    ) -> None:
        self.peer, self.kind, self.fields, self.payloads = peer, kind, fields, payloads
        self.cost_bytes, self.reads, self.on_reply = cost_bytes, reads, on_reply
        self.number = -1
        self.sent_s = 0.0
        self.accepted = False
        self.missing: list[int] | None = None
        self.operation: Operation


class ClientSession:
    """All requests of one master in one store."""

    def __init__(self, window_bytes: int, retry_s: float) -> None:
        self._window_bytes, self._retry_s = window_bytes, retry_s
        self._numbers = itertools.count(1)
        self._queues: dict[tuple[int, bool], list[tuple[int, int, Ask]]] = {}
        self._in_flight: dict[tuple[int, bool], int] = {}
        self._outstanding: dict[int, Ask] = {}
        self._repeats: list[Ask] = []
        self._lost: dict[int, str] = {}
        self._ready: set[tuple[int, bool]] = set()

    @property
    def idle(self) -> bool:
        return not self._outstanding and not any(self._queues.values())

    def submit(self, operation: Operation, asks: Sequence[Ask], priority: int = 0) -> None:
        """Queue all requests of an operation; larger ``priority`` leaves first. No requests: it is done at once."""
        operation.pending = len(asks)
        if not asks:
            self._finish(operation)
            return
        for ask in asks:
            ask.operation = operation
            ask.number = next(self._numbers)
            if ask.peer in self._lost:
                self._end(ask, ServerLostError(f"{operation.label}: {self._lost[ask.peer]}"))
                continue
            where = (ask.peer, ask.reads)
            heapq.heappush(self._queues.setdefault(where, []), (-priority, ask.number, ask))
            self._ready.add(where)

    def sendable(self, now_s: float) -> Iterator[tuple[int, Message, Sequence[Buffer]]]:
        """What may leave now: (peer, message, payloads)."""
        while self._repeats:
            ask = self._repeats.pop()
            if ask.number in self._outstanding:
                yield self._emit(ask)
        for where in list(self._ready):
            queue = self._queues[where]
            while queue:
                ask = queue[0][2]
                if ask.operation.finished:
                    heapq.heappop(queue)
                    continue
                in_flight = self._in_flight.get(where, 0)
                if in_flight and in_flight + ask.cost_bytes > self._window_bytes:
                    break
                heapq.heappop(queue)
                self._in_flight[where] = in_flight + ask.cost_bytes
                self._outstanding[ask.number] = ask
                ask.sent_s = now_s
                yield self._emit(ask)
            self._ready.discard(where)

    def _emit(self, ask: Ask) -> tuple[int, Message, Sequence[Buffer]]:
        if ask.accepted:  # the push is in; only ask whom its round waits for
            return ask.peer, m.Query(ask.number, ask.fields[0], ask.fields[1]), ()
        return ask.peer, ask.kind(ask.number, *ask.fields), ask.payloads() if ask.payloads else ()

    def receive(self, message: Message, payloads: list[memoryview]) -> None:
        """Take in a server's or the scheduler's message. Answers to requests that have ended are dropped."""
        if isinstance(message, m.Lost):
            if message.role == "server":
                self.lose_peer(message.rank, f"server {message.rank} {message.text}")
            return
        ask = self._outstanding.get(getattr(message, "request", -1))
        if ask is None:
            return
        match message:
            case m.Failure():
                self._end(ask, rebuild(message.error, message.text))
            case m.Waiting():
                ask.missing = message.clients
            case m.Ack() if isinstance(ask.kind, type) and ask.kind is m.Push and ask.fields[-1]:
                if not ask.accepted:  # in its round; the value follows
                    ask.accepted = True
                    self._release(ask)
            case _:
                try:
                    if ask.on_reply is not None:
                        ask.on_reply(message, payloads)
                except KVError as error:
                    self._end(ask, error)
                else:
                    self._end(ask, None)

    def tick(self, now_s: float) -> None:
        """Repeat what has waited long without an answer; end what has passed its deadline."""
        late: dict[int, list[Ask]] = {}
        operations: dict[int, Operation] = {}
        queued = [entry[2] for queue in self._queues.values() for entry in queue]
        for ask in [*self._outstanding.values(), *queued]:
            if now_s >= ask.operation.expires_s:
                operations[id(ask.operation)] = ask.operation
                late.setdefault(id(ask.operation), []).append(ask)
        for ask in self._outstanding.values():
            interval_s = min(self._retry_s, _RETRY_FRACTION * ask.operation.timeout_s)
            if now_s - ask.sent_s > interval_s:
                ask.sent_s = now_s
                self._repeats.append(ask)
        for number, asks in late.items():
            self._abort(operations[number], asks)

    def _abort(self, operation: Operation, asks: list[Ask]) -> None:
        peer = asks[0].peer
        name = "the scheduler" if peer == SCHEDULER else f"server {peer}"
        missing = sorted({client for ask in asks for client in ask.missing or []})
        if missing:
            why = f"{name} still waits for client {', '.join(map(str, missing))}; look at that client's workers"
        else:
            why = f"no answer from {name}; check that process"
        operation.error = KVTimeoutError(
            f"{operation.label}: not done in {operation.timeout_s:.1f} s: {why}, or raise KVMPI_TIMEOUT_S"
        )
        for ask in asks:
            if self._outstanding.pop(ask.number, None) is not None and not ask.accepted:
                self._release(ask)
        self._finish(operation)

    def lose_peer(self, peer: int, why: str) -> None:
        """A server is gone: everything that waits for it fails, and everything sent to it from now on."""
        self._lost[peer] = why
        queued = [entry[2] for (to, _), queue in self._queues.items() if to == peer for entry in queue]
        for where in [where for where in self._queues if where[0] == peer]:
            self._queues[where] = []
        for ask in [*self._outstanding.values(), *queued]:
            if ask.peer == peer and not ask.operation.finished:
                self._end(ask, ServerLostError(f"{ask.operation.label}: {why}; its part of the values is lost"))

    def fail_all(self, error: KVError) -> None:
        """End everything with ``error``."""
        asks = [*self._outstanding.values(), *(entry[2] for queue in self._queues.values() for entry in queue)]
        for ask in asks:
            if not ask.operation.finished:
                ask.operation.error = error
                self._finish(ask.operation)
        self._outstanding.clear()
        self._queues.clear()
        self._ready.clear()

    def _release(self, ask: Ask) -> None:
        where = (ask.peer, ask.reads)
        self._in_flight[where] -= ask.cost_bytes
        if self._queues.get(where):
            self._ready.add(where)

    def _end(self, ask: Ask, error: KVError | None) -> None:
        if self._outstanding.pop(ask.number, None) is not None and not ask.accepted:
            self._release(ask)
        operation = ask.operation
        operation.pending -= 1
        operation.error = operation.error or error
        if operation.pending == 0:
            self._finish(operation)

    def _finish(self, operation: Operation) -> None:
        if not operation.finished:
            operation.finished = True
            operation.on_done(operation.error)
