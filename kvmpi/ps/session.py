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

from kvmpi.errors import KVError, KVTimeoutError, ProtocolError, ServerLostError, rebuild
from kvmpi.wire import Message
from kvmpi.wire import messages as m

Buffer = npt.NDArray[Any]
Reply = Callable[[Message, list[memoryview]], None]
Outgoing = tuple[int, Message, Sequence[Buffer]]

#: The scheduler's number among the peers; servers have theirs, from 0.
SCHEDULER = -1
#: After this part of an operation's time without an answer a request is repeated, to learn whom it waits for.
_RETRY_FRACTION = 0.25
#: Where a push says among its fields whether it wants the value for an answer.
_FUSED = 4
#: Answers that end a request; anything else in their place is a mistake of the peer.
_ANSWERS = (m.Ack, m.Value, m.State, m.Roster, m.Dead)


class Operation:
    """Several requests that end together: one key's exchange, or one command to all servers.

    Args:
        label: what it does, for error messages.
        timeout_s: seconds that it may take from ``now_s`` on.
        on_done: called once with the first error, or None.
        on_accepted: called once, when the peers have taken every fused push into its round, or all is over.
    """

    __slots__ = ("asks", "error", "expires_s", "finished", "label", "on_accepted", "on_done", "pending", "timeout_s",
                 "unaccepted")  # fmt: skip

    def __init__(
        self, label: str, timeout_s: float, now_s: float, on_done: Callable[[KVError | None], None],
        on_accepted: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        self.label, self.timeout_s, self.expires_s, self.on_done = label, timeout_s, now_s + timeout_s, on_done
        self.on_accepted = on_accepted
        self.asks: Sequence[Ask] = ()
        self.pending = self.unaccepted = 0
        self.error: KVError | None = None
        self.finished = False


class Ask:
    """One request: ``kind(request number, *fields)`` to ``peer``, with payloads made when it leaves.

    Args:
        cost_bytes: what it takes from its window: payload bytes, or with ``reads`` the bytes it asks for.
        reads: it takes from the window of values asked for.
    """

    __slots__ = ("accepted", "cost_bytes", "ended", "fields", "kind", "missing", "number", "on_reply", "operation",
                 "payloads", "peer", "reads", "sent_s", "used")  # fmt: skip

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
        self.sent_s: float | None = None
        self.accepted = False  # a fused push that is in its round, and no longer takes from its window
        self.used = False  # a push that failed, and whose step is used up nevertheless
        self.ended = False
        self.missing: list[int] | None = None
        self.operation: Operation

    @property
    def awaits_value(self) -> bool:
        """Whether it is a fused push, for which an acknowledgement is not the end."""
        return self.kind is m.Push and bool(self.fields[_FUSED])

    @property
    def where(self) -> tuple[int, bool]:
        """The window that it takes from."""
        return self.peer, self.reads


class ClientSession:
    """All requests of one master in one store."""

    def __init__(self, window_bytes: int, retry_s: float) -> None:
        self._window_bytes, self._retry_s = window_bytes, retry_s
        self._numbers = itertools.count(1)
        # What has not left yet; requests of finished operations stay until they come to the front.
        self._queues: dict[tuple[int, bool], list[tuple[int, int, Ask]]] = {}
        self._ready: dict[tuple[int, bool], None] = {}
        # What has left and is not answered, and what of the windows it takes.
        self._outstanding: dict[int, Ask] = {}
        self._in_flight: dict[tuple[int, bool], int] = {}
        self._repeats: list[Ask] = []
        self._unfinished: dict[int, Operation] = {}
        self._lost: dict[int, str] = {}

    @property
    def idle(self) -> bool:
        """Whether nothing waits for time to pass or for an answer."""
        return not self._unfinished

    def submit(self, operation: Operation, asks: Sequence[Ask], priority: int = 0) -> None:
        """Queue all requests of an operation; larger ``priority`` leaves first. No requests: it is done at once."""
        operation.asks, operation.pending, operation.unaccepted = asks, len(asks), max(1, len(asks))
        if not asks:
            self._finish(operation)
            return
        self._unfinished[id(operation)] = operation
        for ask in asks:
            ask.operation = operation
            ask.number = next(self._numbers)
        lost = next((ask.peer for ask in asks if ask.peer in self._lost), None)
        if lost is not None:
            self._cancel(operation, self._lost_error(operation, lost))
            return
        for ask in asks:
            heapq.heappush(self._queues.setdefault(ask.where, []), (-priority, ask.number, ask))
            self._ready[ask.where] = None

    def sendable(self, now_s: float) -> Iterator[Outgoing]:
        """What may leave now: (peer, message, payloads)."""
        while self._repeats:
            ask = self._repeats.pop()
            if ask.number in self._outstanding and (outgoing := self._emit(ask)) is not None:
                yield outgoing
        for where in list(self._ready):
            queue = self._queues.get(where, [])
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
                if (outgoing := self._emit(ask)) is not None:
                    yield outgoing
            self._ready.pop(where, None)

    def _emit(self, ask: Ask) -> Outgoing | None:
        if ask.accepted:  # the push is in; only its answer is missing
            return ask.peer, m.Query(ask.number, *ask.fields[:3]), ()
        try:
            return ask.peer, ask.kind(ask.number, *ask.fields), ask.payloads() if ask.payloads else ()
        except Exception as error:  # a codec may be a user's own
            self._end(ask, _as_kv_error(ask, error))
            return None

    def reject(self, number: int, error: KVError) -> None:
        """The request with this number could not be sent at all."""
        ask = self._outstanding.get(number)
        if ask is not None:
            self._end(ask, _as_kv_error(ask, error))

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
                ask.used = message.used
                self._end(ask, rebuild(message.error, message.text))
            case m.Waiting():
                ask.missing = message.clients
            case m.Ack() if ask.awaits_value:
                if not ask.accepted:  # in its round; the value follows
                    self._release(ask)
                    ask.accepted = True
                    self._count_accepted(ask.operation)
            case _:
                error: KVError | None = None
                try:
                    if not isinstance(message, _ANSWERS):
                        raise ProtocolError(f"a {type(message).__name__} is no answer")
                    if ask.on_reply is not None:
                        ask.on_reply(message, payloads)
                except Exception as caught:  # one bad answer must not end the others' thread
                    error = _as_kv_error(ask, caught)
                self._end(ask, error)

    def tick(self, now_s: float) -> None:
        """Repeat what has waited long without an answer; end what has passed its deadline."""
        for operation in [op for op in self._unfinished.values() if now_s >= op.expires_s]:
            self._cancel(operation, KVTimeoutError(_explain(operation)))
        for ask in self._outstanding.values():
            interval_s = min(self._retry_s, _RETRY_FRACTION * ask.operation.timeout_s)
            if ask.sent_s is not None and now_s - ask.sent_s > interval_s:
                ask.sent_s = now_s
                self._repeats.append(ask)

    def lose_peer(self, peer: int, why: str) -> None:
        """A server is gone: everything that needs it fails at once, and everything sent to it from now on."""
        self._lost[peer] = why
        for operation in list(self._unfinished.values()):
            if any(ask.peer == peer and not ask.ended for ask in operation.asks):
                self._cancel(operation, self._lost_error(operation, peer))

    def _lost_error(self, operation: Operation, peer: int) -> ServerLostError:
        return ServerLostError(f"{operation.label}: {self._lost[peer]}; its part of the values is lost")

    def fail_all(self, error: KVError) -> None:
        """End everything with ``error``."""
        for operation in list(self._unfinished.values()):
            self._cancel(operation, error)

    def _release(self, ask: Ask) -> None:
        self._in_flight[ask.where] -= ask.cost_bytes
        self._ready[ask.where] = None

    def _close(self, ask: Ask) -> None:
        """Whatever comes for ``ask`` from now on is dropped."""
        ask.ended = True
        if self._outstanding.pop(ask.number, None) is not None and not ask.accepted:
            self._release(ask)
        self._ready[ask.where] = None  # so that what is still queued goes

    def _end(self, ask: Ask, error: KVError | None) -> None:
        operation = ask.operation
        if not ask.accepted:
            self._count_accepted(operation)
        self._close(ask)
        operation.pending -= 1
        operation.error = operation.error or error
        if operation.pending == 0:
            self._finish(operation)
        elif error is not None and ask.kind is m.Init:
            # A client that is mistaken about a key may be asking servers that will never have it.
            self._cancel(operation, error)

    def _cancel(self, operation: Operation, error: KVError) -> None:
        """End an operation before all of its requests are answered. An error that came earlier is the cause."""
        operation.error = operation.error or error
        for ask in operation.asks:
            if not ask.ended:
                self._close(ask)
        self._finish(operation)

    def _finish(self, operation: Operation) -> None:
        self._unfinished.pop(id(operation), None)
        if not operation.finished:
            operation.finished = True
            operation.on_done(operation.error)
            operation.unaccepted = min(operation.unaccepted, 1)
            self._count_accepted(operation)

    @staticmethod
    def _count_accepted(operation: Operation) -> None:
        operation.unaccepted -= 1
        if operation.unaccepted == 0 and operation.on_accepted is not None:
            operation.on_accepted()


def _as_kv_error(ask: Ask, error: Exception) -> KVError:
    """``error`` with the operation that it hit; a defect keeps its type in the message and its traceback as cause."""
    label = ask.operation.label
    if isinstance(error, KVError):
        wrapped: KVError = type(error)(f"{label}: {error}")
    else:
        wrapped = KVError(f"{label}: {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped


def _explain(operation: Operation) -> str:
    """Whom an operation still waits for."""
    reasons = []
    open_asks = [ask for ask in operation.asks if not ask.ended]
    for peer in sorted({ask.peer for ask in open_asks}):
        asks = [ask for ask in open_asks if ask.peer == peer]
        name = "the scheduler" if peer == SCHEDULER else f"server {peer}"
        missing = sorted({client for ask in asks for client in ask.missing or []})
        if missing:
            shown = ", ".join(map(str, missing[:16])) + (", ..." if len(missing) > 16 else "")
            reasons.append(f"{name} still waits for client {shown}; look at that client's workers")
        elif any(ask.accepted for ask in asks):
            reasons.append(f"{name} has accepted it and not answered; look at the other clients' workers")
        elif all(ask.sent_s is None for ask in asks):
            reasons.append(f"not yet sent to {name}, which has not accepted what was sent before")
        else:
            reasons.append(f"no answer from {name}; check that process")
    why = "; ".join(reasons[:4]) + ("; ..." if len(reasons) > 4 else "")
    return f"{operation.label}: not done in {operation.timeout_s:.1f} s: {why}, or raise KVMPI_TIMEOUT_S"
