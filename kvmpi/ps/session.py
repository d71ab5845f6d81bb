"""The master's side of the protocol as a state machine without I/O: requests, windows, retries, deadlines.

Requests to one peer leave in order of priority, then age. Two windows per peer bound what is under way: payload bytes
that the peer has not accepted, and value bytes that it has been asked for. They are separate so that a reader who waits
for other clients never keeps this client's own pushes from leaving, which those others wait for. A third, small one is
for pushes of which nothing is said before their answer: they must not keep others from leaving either.

A request about a part of the values goes to whichever server answers for that part, and again to the next one if that
changes: servers know what has been done already.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy.typing as npt

from kvmpi.errors import KVError, KVTimeoutError, ProtocolError, rebuild
from kvmpi.ps.asks import FUSED, NOWHERE, Ask, Operation
from kvmpi.ps.explanations import as_kv_error, explain, lost_error, why_waiting
from kvmpi.trace import timeline
from kvmpi.trace.stall import Wait
from kvmpi.wire import Message
from kvmpi.wire import messages as m

Buffer = npt.NDArray[Any]
Outgoing = tuple[int, Message, Sequence[Buffer]]

#: After this part of an operation's time without an answer a request is repeated, to learn whom it waits for.
_RETRY_FRACTION = 0.25
#: Nor does the silence after which it is repeated become longer than so many times the first one.
_MOST_PAUSES = 32
_FOR_EVER_S = 1e12
_FIRST = 1 << 62
#: The window of quiet pushes, as a part of that of payloads: for large ones a word costs little beside the rest,
#: and each keeps its sender's memory until its round is over.
_QUIET_SHARE = 0.125
#: Where a Hello says who its client is.
_CLIENT = 2
#: Answers that end a request; anything else in their place is a mistake of the peer.
_ANSWERS = (m.Ack, m.Found, m.Value, m.State, m.View, m.Dead)
#: Most messages are of these kinds.
_USUAL = (m.Value, m.Ack)


class ClientSession:
    """All requests of one master in one store."""

    def __init__(self, window_bytes: int, retry_s: float) -> None:
        self._window_bytes, self._retry_s = window_bytes, retry_s
        self._quiet_bytes = int(_QUIET_SHARE * window_bytes)
        self._numbers = itertools.count(1)
        # What has not left yet; requests of finished operations stay until they come to the front.
        self._queues: dict[tuple[int, bool], list[tuple[int, int, Ask]]] = {}
        self._ready: dict[tuple[int, bool], None] = {}
        # What has left and is not answered, and what of the windows it takes.
        self._outstanding: dict[int, Ask] = {}
        self._in_flight = Counter[tuple[int, bool | None]]()
        # By peer: when what has been heard of had left, of that the latest, and when that was.
        self._heard: dict[int, tuple[float, float]] = {}
        self._now_s = 0.0  # as far as it has been told
        # To be sent once more, each only once however long there is nobody to send it to.
        self._repeats: dict[int, Ask] = {}
        self._unfinished: dict[int, Operation] = {}
        # What servers need to hear, and answer with nothing that matters.
        self._words: list[Outgoing] = []
        # Requests that came to a server that does not answer for their part; they are sent again soon.
        self._astray: list[Ask] = []
        # Why parts, and servers, are gone for good.
        self._lost_parts: dict[int, str] = {}
        self._lost_peers: dict[int, str] = {}
        # The view: by part the server that answers and its incarnation; servers there are; who knows this client.
        self._epoch, self._replicas = -1, 0
        self._heads: list[tuple[int, int]] = []
        self._incarnations: dict[int, int] = {}
        self._greeted: set[int] = set()
        self._greeting: set[int] = set()
        self._hello: tuple[Any, ...] | None = None

    def widen(self, window_bytes: int) -> None:
        """From now on so many bytes may be under way at one peer, in each direction."""
        self._window_bytes = window_bytes

    @property
    def idle(self) -> bool:
        """Whether nothing waits for time to pass or for an answer."""
        return not self._unfinished

    def submit(self, operation: Operation, asks: Sequence[Ask], priority: int = 0) -> None:
        """Queue all requests of an operation; larger ``priority`` leaves first. No requests: it is done at once."""
        operation.asks, operation.priority, operation.pending = asks, priority, len(asks)
        operation.unaccepted = operation.pending or 1
        if (retry_s := _RETRY_FRACTION * operation.timeout_s) > self._retry_s:
            retry_s = self._retry_s
        operation.retry_s = retry_s
        if not asks:
            self._finish(operation)
            return
        self._unfinished[id(operation)] = operation
        for ask in asks:
            ask.operation = operation
            ask.number = next(self._numbers)
        if self._lost_parts or self._lost_peers:
            why = next((why for ask in asks if (why := self._why_lost(ask)) is not None), None)
            if why is not None:
                self._cancel(operation, lost_error(operation, why))
                return
        if operation.after:
            awaited, operation.after = [before for before in operation.after if not before.finished], ()
            operation.num_awaited = len(awaited)
            for before in awaited:
                before.followers.append(operation)
            if awaited:
                for ask in asks:
                    self._aim(ask)
                return
        self._begin(operation)

    def _begin(self, operation: Operation) -> None:
        greets = False
        for ask in operation.asks:
            self._enqueue(ask)
            if ask.part >= 0:
                continue
            if ask.kind is m.Hello:
                self._hello, greets = ask.fields, True
                self._greeting.add(ask.peer)
            elif ask.kind is m.Bye:
                self._hello = None  # it does not matter any more who knows this client
        if greets:
            self._greet_strangers()

    def _aim(self, ask: Ask) -> None:
        if (part := ask.part) >= 0:
            heads = self._heads
            ask.peer = heads[part][0] if part < len(heads) else NOWHERE

    def _enqueue(self, ask: Ask) -> None:
        self._aim(ask)
        where = ask.peer, ask.reads
        queue = self._queues.get(where)
        if queue is None:
            queue = self._queues[where] = []
        heapq.heappush(queue, (-ask.operation.priority, ask.number, ask))
        self._ready[where] = None

    def _can_send(self, ask: Ask) -> bool:
        """Whether there is a server for it that knows this client."""
        return ask.part < 0 or ask.peer in self._greeted

    @property
    def may_send(self) -> bool:
        """Whether ``sendable`` may have something."""
        return bool(self._ready or self._repeats or self._words)

    def sendable(self, now_s: float) -> tuple[Outgoing] | Iterator[Outgoing]:
        """What may leave now: (peer, message, payloads). One request, if no other has been waiting for it; else what
        there is, each made when it is asked for."""
        self._now_s = now_s
        if len(self._ready) == 1 and not (self._repeats or self._words):
            [where] = self._ready
            queue = self._queues.get(where, [])
            if len(queue) == 1 and (ask := self._take_first(queue)) is not None:
                del self._ready[where]
                if (outgoing := self._emit(ask)) is not None:
                    return (outgoing,)
        return self._all_sendable()

    def _all_sendable(self) -> Iterator[Outgoing]:
        words, self._words = self._words, []
        yield from words
        repeats, self._repeats = self._repeats, {}
        for ask in repeats.values():
            if ask.number not in self._outstanding:
                continue
            if not self._can_send(ask):
                self._repeats[ask.number] = ask
            elif (outgoing := self._emit(ask)) is not None:
                yield outgoing
        for where in list(self._ready):
            queue = self._queues.get(where, [])
            while (first := self._take_first(queue)) is not None:
                if (outgoing := self._emit(first)) is not None:
                    yield outgoing
            self._ready.pop(where, None)

    def _take_first(self, queue: list[tuple[int, int, Ask]]) -> Ask | None:
        """The first request of a queue, which leaves, if it may."""
        while queue:
            ask = queue[0][2]
            if ask.ended or ask.operation.finished:
                heapq.heappop(queue)
            elif self._can_send(ask) and self._take_room(ask):
                heapq.heappop(queue)
                self._leave(ask)
                return ask
            else:
                return None
        return None

    def _leave(self, ask: Ask) -> None:
        self._outstanding[ask.number] = ask
        ask.sent_s = ask.left_s = self._now_s
        ask.pause_s = ask.operation.retry_s

    def _take_room(self, ask: Ask) -> bool:
        """Take what ``ask`` needs from its window, if there is so much."""
        cost_bytes, all_in_flight = ask.cost_bytes, self._in_flight
        ask.quiet = ask.may_be_quiet and all_in_flight[ask.peer, None] + cost_bytes <= self._quiet_bytes
        ask.window = window = ask.peer, None if ask.quiet else ask.reads
        in_flight = all_in_flight[window]
        if in_flight and not ask.quiet and in_flight + cost_bytes > self._window_bytes:
            return False
        all_in_flight[window] = in_flight + cost_bytes
        return True

    def _let_others_go(self, waiting: Ask) -> None:
        """What is queued behind a request that waits at its server need not stay there for lack of room, as long as
        there would be room in a second window: the oldest first.

        Other clients may wait for just that, and this one for them. Priorities, parts that move from server to server
        one by one, and pushes of a key that wait for the one before them change the order in which requests leave.
        """
        queue = self._queues.get(waiting.where, [])
        for entry in sorted(queue, key=lambda entry: entry[1]):
            ask = entry[2]
            if ask.operation.finished or ask.ended or not self._can_send(ask):
                continue
            ask.quiet, ask.window = False, ask.where
            in_flight = self._in_flight[ask.window]
            if in_flight - waiting.cost_bytes > self._window_bytes:
                break  # the second window is full
            self._in_flight[ask.window] = in_flight + ask.cost_bytes
            queue.remove(entry)
            heapq.heapify(queue)
            self._leave(ask)
            self._repeats[ask.number] = ask

    def _emit(self, ask: Ask) -> Outgoing | None:
        if ask.accepted:  # the push is in; only the end of its round is missing
            key, chunk, step = ask.fields[:3]
            return ask.peer, m.Query(ask.number, key, chunk, step, ask.fields[FUSED], max(0, ask.part)), ()
        try:
            message = ask.kind(ask.number, *ask.fields)
            if isinstance(message, m.Push):
                message.quiet = ask.quiet
            if ask.payloads is None:
                return ask.peer, message, ()
            return ask.peer, message, self._timed_payloads(ask) if timeline.on else ask.payloads()
        except Exception as error:  # a codec may be a user's own
            self._end(ask, as_kv_error(ask, error))
            return None

    @staticmethod
    def _timed_payloads(ask: Ask) -> Sequence[Buffer]:
        assert ask.payloads is not None
        if ask.kind is not m.Push:
            return ask.payloads()
        start_ns, (key, chunk, step) = timeline.now(), ask.fields[:3]
        payloads = ask.payloads()
        nbytes = sum(payload.nbytes for payload in payloads)
        timeline.span("encode", start_ns, key, nbytes=nbytes, step=step, chunk=chunk)
        return payloads

    def reject(self, number: int, error: KVError) -> None:
        """The request with this number could not be sent at all."""
        ask = self._outstanding.get(number)
        if ask is not None:
            self._end(ask, as_kv_error(ask, error))

    def receive(self, message: Message, payloads: list[memoryview]) -> None:
        """Take in a server's or the scheduler's message. Answers to requests that have ended are dropped."""
        if isinstance(message, _USUAL):
            ask = self._outstanding.get(message.request)
            if ask is not None:
                self._take_answer(ask, message, payloads)
            return
        if isinstance(message, m.View):
            self.adopt(message)
        if isinstance(message, m.Failure) and (message.request, message.error) == (-1, "PeerLostError"):
            # The scheduler has taken this process for lost, and another may be in its place.
            self.fail_all(rebuild("ClientLostError", message.text))
        ask = self._outstanding.get(getattr(message, "request", -1))
        if ask is None:
            return
        match message:
            case m.Failure():
                ask.used = message.used
                self._end(ask, rebuild(message.error, message.text))
            case m.Waiting():
                ask.missing, ask.silent_s = message.clients, message.silent_s
                if ask.accepted or ask.reads:
                    ask.pause_s = ask.operation.retry_s  # there is no answer yet that a slow link could be carrying
                if ask.withheld is not None and self._hello is not None and self._hello[_CLIENT] in message.clients:
                    self._send_again(ask)
                    (ask.payloads, ask.cost_bytes), ask.withheld = ask.withheld, None
                elif not ask.accepted:
                    self._let_others_go(ask)
            case m.Moved():
                self._astray.append(ask)
            case m.Accepted():
                if not ask.accepted:
                    self._note_heard(ask)
                    self._release(ask)
                    ask.accepted = True
                    if not self._replicas:  # else it may have to be sent again
                        self._count_accepted(ask.operation)
            case _:
                self._take_answer(ask, message, payloads)

    def _take_answer(self, ask: Ask, message: Message, payloads: list[memoryview]) -> None:
        error: KVError | None = None
        try:
            if not isinstance(message, _ANSWERS):
                raise ProtocolError(f"a {type(message).__name__} is no answer")
            if ask.on_reply is not None:
                ask.on_reply(message, payloads)
            if isinstance(message, m.Value):
                ask.old = message.old
        except Exception as caught:  # one bad answer must not end the others' thread
            error = as_kv_error(ask, caught)
        self._end(ask, error)

    def waits(self) -> list[Wait]:
        """What is under way; may be called from another thread."""
        return [
            Wait(
                ("operation", id(op)),
                op.began_s,
                op.label,
                "; ".join(why_waiting(op, self._greeted)[:4]),
            )
            for op in list(self._unfinished.values())
            if op.timeout_s < _FOR_EVER_S / 2 and not op.is_late
        ]

    def tick(self, now_s: float) -> None:
        """Repeat what has waited long without an answer, after ever longer pauses: what looks lost may wait for a slow
        link, behind its own repetitions. End what has passed its deadline."""
        self._now_s = now_s
        astray, self._astray = self._astray, []
        for ask in astray:
            self._send_again(ask)
        for operation in [op for op in self._unfinished.values() if now_s >= op.expires_s and not op.is_late]:
            self._expire(operation)
        for ask in self._outstanding.values():
            if ask.sent_s is not None and now_s - self._silent_since(ask, ask.sent_s) > ask.pause_s:
                ask.sent_s = now_s
                self._repeats[ask.number] = ask
                if ask.cost_bytes:  # mere words take no room on a slow link
                    ask.pause_s = min(2 * ask.pause_s, _most_pause_s(ask.operation))

    def _expire(self, operation: Operation) -> None:
        error = KVTimeoutError(explain(operation, self._greeted))
        if operation.on_late is None or not operation.on_late(operation.error or error):
            self._cancel(operation, error)
            return
        operation.is_late, operation.on_late = True, None
        for ask in operation.asks:
            ask.on_reply = None  # where it would put a value is somebody else's by now

    def _note_heard(self, ask: Ask) -> None:
        """Its peer has taken it in, which it does once: others do not wait for ever for the sake of those before."""
        peer, left_s = ask.peer, ask.left_s
        before = self._heard.get(peer)
        if before is None or left_s >= before[0]:
            self._heard[peer] = left_s, self._now_s

    def _silent_since(self, ask: Ask, sent_s: float) -> float:
        """Since when there should have been an answer: as long as there are some to what has left before, a slow link
        may still be carrying ``ask``, and would carry it once more for nothing."""
        left_s, heard_s = self._heard.get(ask.peer, (0.0, 0.0))
        return max(sent_s, heard_s) if left_s <= ask.left_s else sent_s

    # ---- who answers

    @property
    def servers(self) -> list[int]:
        """The servers that are there."""
        return list(self._incarnations)

    def adopt(self, view: m.View) -> None:
        """The scheduler says who is in the job, and who answers for what."""
        if view.epoch <= self._epoch:
            return
        self._epoch, self._replicas = view.epoch, view.replicas
        before, self._incarnations = self._incarnations, {info.rank: info.incarnation for info in view.servers}
        for server in before:
            if self._incarnations.get(server) != before[server]:
                self._greeted.discard(server)
                self._greeting.discard(server)
                if server not in self._incarnations:
                    self.lose_peer(server, f"server {server} is gone")
        for server in self._incarnations:
            self._lost_peers.pop(server, None)
        old, self._heads = self._heads, [self._head(chain) for chain in view.chains]
        for part, chain in enumerate(view.chains):
            if not chain.members:
                self._lose_part(part, chain.why)
        if old != self._heads:
            self._reroute({part for part in range(len(old)) if old[part] != self._heads[part]})
        if self._hello is not None:
            self._greet_strangers()

    def _head(self, chain: m.Chain) -> tuple[int, int]:
        if not chain.members or chain.draining:
            return NOWHERE, 0
        return chain.members[0], self._incarnations.get(chain.members[0], 0)

    def _greet_strangers(self) -> None:
        """Servers that do not know this client must, before they can be asked anything."""
        for server in self._incarnations.keys() - self._greeted - self._greeting:
            hello = Ask(server, m.Hello, self._hello or ())
            operation = Operation(f"hello to server {server}", _FOR_EVER_S, 0.0, self._on_greeted(server))
            # Before all that waits for it.
            self.submit(operation, [hello], _FIRST)

    def _on_greeted(self, server: int) -> Callable[[KVError | None], None]:
        def on_done(error: KVError | None) -> None:
            if error is not None and server in self._incarnations and self._hello is not None:
                self.fail_all(error)

        return on_done

    def _reroute(self, parts: set[int]) -> None:
        """Other servers answer for ``parts``."""
        waiting = [ask for queue in self._queues.values() for _, _, ask in queue]
        self._queues.clear()
        for ask in waiting:
            if not (ask.operation.finished or ask.ended):
                self._enqueue(ask)
        for ask in list(self._outstanding.values()):
            if ask.part in parts:
                self._send_again(ask)

    def _send_again(self, ask: Ask) -> None:
        """``ask`` has come to the wrong server, or to one that is gone."""
        if ask.number not in self._outstanding:
            return
        if ask.accepted and not self._replicas:
            # What was in the round has moved with it, and its memory may be another's by now.
            ask.peer, ask.pause_s = self._heads[ask.part][0], ask.operation.retry_s
            self._repeats[ask.number] = ask
            return
        del self._outstanding[ask.number]
        if not ask.accepted:
            self._release(ask)
        ask.accepted, ask.sent_s, ask.missing = False, None, None
        self._enqueue(ask)

    def _why_lost(self, ask: Ask) -> str | None:
        if ask.part >= 0:
            return self._lost_parts.get(ask.part)
        return self._lost_peers.get(ask.peer)

    def lose_peer(self, peer: int, why: str) -> None:
        """A server is gone: what is for this very one fails at once, and what is sent to it from now on."""
        self._lost_peers[peer] = why
        for ask in [ask for operation in self._unfinished.values() for ask in operation.asks]:
            if ask.peer == peer and ask.kind in (m.Hello, m.Bye) and not ask.ended:
                self._end(ask, None)  # nobody is left there to be told
        self._fail_lost()

    def _lose_part(self, part: int, why: str) -> None:
        if part not in self._lost_parts:
            self._lost_parts[part] = why
            self._fail_lost()

    def _fail_lost(self) -> None:
        for operation in list(self._unfinished.values()):
            lost = (self._why_lost(ask) for ask in operation.asks if not ask.ended)
            why = next((why for why in lost if why is not None), None)
            if why is not None:
                self._cancel(operation, lost_error(operation, why))

    def fail_all(self, error: KVError) -> None:
        """End everything with ``error``."""
        for operation in list(self._unfinished.values()):
            self._cancel(operation, error)

    def _release(self, ask: Ask) -> None:
        self._in_flight[ask.window] -= ask.cost_bytes
        self._look_again(ask)

    def _look_again(self, ask: Ask) -> None:
        """What waits where it has waited, if anything does, may be able to leave."""
        if self._queues.get(where := (ask.peer, ask.reads)):
            self._ready[where] = None

    def _close(self, ask: Ask) -> None:
        """Whatever comes for ``ask`` from now on is dropped, and what is still queued goes."""
        ask.ended = True
        if self._outstanding.pop(ask.number, None) is not None and not ask.accepted:
            self._in_flight[ask.window] -= ask.cost_bytes
        self._look_again(ask)

    def _end(self, ask: Ask, error: KVError | None) -> None:
        operation = ask.operation
        self._note_heard(ask)
        if operation.on_accepted is not None and (not ask.accepted or self._replicas):
            self._count_accepted(operation)
        if ask.kind is m.Hello and error is None and ask.peer not in self._lost_peers:
            self._greeted.add(ask.peer)
            self._ready.update(dict.fromkeys(self._queues))
        self._close(ask)
        ask.answered = error is None
        operation.pending -= 1
        if error is not None:
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
        if operation.finished:
            return
        operation.finished = True
        if operation.error is None:
            for ask in operation.asks:
                if ask.old:
                    self._words.append(_taken(ask))
        operation.on_done(operation.error)
        if operation.on_accepted is not None:
            operation.unaccepted = min(operation.unaccepted, 1)
            self._count_accepted(operation)
        # Its requests know it: their arrays are not to wait for the collector of cycles.
        operation.asks, operation.on_done, operation.on_accepted, operation.on_late = (), _nothing, None, None
        if operation.followers:
            followers, operation.followers = operation.followers, []
            for follower in followers:
                follower.num_awaited -= 1
                if not (follower.num_awaited or follower.finished):
                    self._begin(follower)

    @staticmethod
    def _count_accepted(operation: Operation) -> None:
        operation.unaccepted -= 1
        if operation.unaccepted == 0 and operation.on_accepted is not None:
            operation.on_accepted()


def _most_pause_s(operation: Operation) -> float:
    return min(_RETRY_FRACTION * operation.timeout_s, _MOST_PAUSES * operation.retry_s)


def _nothing(_: KVError | None) -> None:
    pass


def _taken(ask: Ask) -> Outgoing:
    """What lets a server forget the answer. Where another chunk's has failed all are asked for once more."""
    key, chunk, step = ask.fields[:3]
    return ask.peer, m.Query(ask.number, key, chunk, step, fused=False, part=max(0, ask.part)), ()
