"""The events of a job: when each client computes, sums, pushes and pulls, and what the servers do meanwhile.

A client has four lanes, each of which does one thing at a time, in order: sums among its workers, the way to the
servers, the way back, and the broadcast among its workers. What is exchanged is cut into pieces, which go through the
lanes one behind the other, as keys and chunks do in the store.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvmpi.planner.flows import Flows

_SUM, _PUSH, _PULL, _CAST = range(4)


@dataclass(frozen=True)
class Piece:
    """A part of what is exchanged.

    Attributes:
        ready: when the computation has made it, as a share of the computation.
        sum_s, cast_s: of the client's collectives, what no link can shorten.
        sum_bytes, cast_bytes: that they move over the link of the master's host.
        serve_s: processor time of the servers.
    """

    nbytes: float
    ready: float = 1.0
    sum_s: float = 0.0
    sum_bytes: float = 0.0
    cast_s: float = 0.0
    cast_bytes: float = 0.0
    serve_s: float = 0.0


@dataclass(frozen=True)
class Course:
    """What is to happen.

    Attributes:
        hosts: of each client's master.
        compute_s: of a client's n-th turn, until its slowest worker is done; one turn ends with one exchange.
        window: pieces that a client has under way to the servers.
        turns: of each client; the first ``skipped`` count for nothing.
        latency_s: from the end of a flow to the moment when what it brought can be used.
        local_bytes: share of a piece that stays on the host, whose servers are there.
    """

    hosts: Sequence[int]
    pieces: Sequence[Piece]
    compute_s: Callable[[int, int], float]
    synchronous: bool
    servers: bool
    host_rate: float
    servers_rate: float
    flow_rate: float = math.inf
    latency_s: float = 0.0
    window: int = 2
    turns: int = 4
    skipped: int = 1
    local_bytes: float = 0.0


@dataclass
class Outcome:
    """What has happened, after the first turns.

    Attributes:
        turn_s: mean time of a client's turn.
        staleness: how many pushes of others came between two of one client, and how often.
        nic_busy, processor_busy: share of the time, of the servers, in the busier direction of their links.
    """

    turn_s: float
    staleness: dict[int, int]
    nic_busy: float
    processor_busy: float
    events: int


@dataclass(slots=True)
class _Client:
    number: int
    host: int
    turn: int = 0
    left: int = 0  # pieces of the turn that are not back
    asked: int = 0  # pieces that have begun their way to the servers
    answered: int = 0
    queues: list[deque[int]] = field(default_factory=lambda: [deque() for _ in range(4)])
    busy: list[bool] = field(default_factory=lambda: [False] * 4)
    seen: int = -1  # pushes of the first piece that the servers had, when this client pushed it last


class Simulation:
    """One run of a course. Deterministic if ``compute_s`` is."""

    def __init__(self, course: Course) -> None:
        self._course = course
        self._clients = [_Client(number, host) for number, host in enumerate(course.hosts)]
        self._agenda: list[tuple[float, int, Callable[..., None], tuple[int, ...]]] = []
        self._order = itertools.count()
        self._now = 0.0
        self._up = Flows(course.host_rate, course.servers_rate, course.flow_rate)
        self._down = Flows(course.host_rate, course.servers_rate, course.flow_rate)
        self._waiting: dict[tuple[int, int], Callable[[], None]] = {}  # (direction, flow) -> what comes next
        self._arrived: Counter[tuple[int, int]] = Counter()  # by turn and piece
        self._server_free_s = 0.0
        self._pushes = 0
        self._staleness: Counter[int] = Counter()
        self._served_s = 0.0
        self._events = 0
        self._reached: Counter[int] = Counter()  # how many clients have done so many turns
        self._done = 0  # pieces that are back
        self._settled: tuple[float, int] | None = None  # when the first turns were over, and how many pieces were back

    def run(self) -> Outcome:
        """Until every client has had its turns; where none waits for others, until half of them have."""
        for client in self._clients:
            self._begin(client.number)
        flows = (self._up, self._down)
        enough = len(self._clients) if self._course.synchronous else (len(self._clients) + 1) // 2
        while self._reached[self._course.turns] < enough:
            soonest = self._agenda[0][0] if self._agenda else math.inf
            now = min(soonest, *(of.next_end_s() for of in flows))
            if math.isinf(now):
                break
            self._now = now
            for direction, of in enumerate(flows):
                for number in of.advance(now):
                    self._events += 1
                    self._waiting.pop((direction, number))()
            while self._agenda and self._agenda[0][0] <= now:
                _, _, act, args = heapq.heappop(self._agenda)
                self._events += 1
                act(*args)
            if self._settled is None and self._reached[self._course.skipped] >= enough:
                self._settled = (now, self._done)
        return self._outcome()

    def _after(self, delay_s: float, act: Callable[..., None], *args: int) -> None:
        heapq.heappush(self._agenda, (self._now + delay_s, next(self._order), act, args))

    # ---- a turn of a client

    def _begin(self, number: int) -> None:
        client, course = self._clients[number], self._course
        client.left, client.asked, client.answered = len(course.pieces), 0, 0
        compute_s = course.compute_s(number, client.turn)
        for i, piece in enumerate(course.pieces):
            self._after(compute_s * piece.ready, self._queue, number, _SUM, i)

    def _queue(self, number: int, lane: int, piece: int) -> None:
        self._clients[number].queues[lane].append(piece)
        self._pump(number, lane)

    def _pump(self, number: int, lane: int) -> None:
        """Begin the next thing of a lane that is free."""
        client, course = self._clients[number], self._course
        if client.busy[lane] or not client.queues[lane]:
            return
        if lane == _PUSH and client.asked - client.answered >= course.window:
            return
        i = client.queues[lane].popleft()
        piece = course.pieces[i]
        client.busy[lane] = True
        if lane == _SUM:
            self._collective(number, lane, i, piece.sum_s, piece.sum_bytes)
        elif lane == _CAST:
            self._collective(number, lane, i, piece.cast_s, piece.cast_bytes)
        else:
            client.asked += lane == _PUSH
            direction, of = (0, self._up) if lane == _PUSH else (1, self._down)
            flow = of.add(client.host, piece.nbytes * (1 - course.local_bytes), serves=True)
            self._waiting[direction, flow] = lambda: self._sent(number, lane, i)

    def _collective(self, number: int, lane: int, i: int, seconds: float, nbytes: float) -> None:
        """A sum goes both ways over the link; a broadcast only away from the master."""
        host, left = self._clients[number].host, 0

        def one() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                self._after(seconds, self._end, number, lane, i)

        if not nbytes:
            self._after(seconds, self._end, number, lane, i)
            return
        ways = [(0, self._up), (1, self._down)] if lane == _SUM else [(0, self._up)]
        left = len(ways)
        for direction, of in ways:
            self._waiting[direction, of.add(host, nbytes, serves=False)] = one

    def _sent(self, number: int, lane: int, i: int) -> None:
        self._clients[number].busy[lane] = False
        if lane == _PUSH:
            self._after(self._course.latency_s, self._arrive, number, i)
        else:
            self._after(self._course.latency_s, self._return, number, i)
        self._pump(number, lane)

    def _end(self, number: int, lane: int, i: int) -> None:
        self._clients[number].busy[lane] = False
        if lane == _CAST:
            self._finish(number)
        elif self._course.servers:
            self._queue(number, _PUSH, i)
        else:
            self._finish(number)
        self._pump(number, lane)

    def _return(self, number: int, i: int) -> None:
        self._clients[number].answered += 1
        self._pump(number, _PUSH)
        self._queue(number, _CAST, i)

    def _finish(self, number: int) -> None:
        client, course = self._clients[number], self._course
        client.left -= 1
        self._done += 1
        if client.left == 0:
            client.turn += 1
            self._reached[client.turn] += 1
            if client.turn < course.turns or not course.synchronous:
                self._begin(number)

    # ---- the servers

    def _arrive(self, number: int, i: int) -> None:
        seconds = self._course.pieces[i].serve_s
        self._server_free_s = max(self._server_free_s, self._now) + seconds
        self._served_s += seconds
        self._after(self._server_free_s - self._now, self._serve, number, i)

    def _serve(self, number: int, i: int) -> None:
        client = self._clients[number]
        if not self._course.synchronous:
            if i == 0:
                if client.seen >= 0 and client.turn >= self._course.skipped:
                    self._staleness[self._pushes - client.seen] += 1
                self._pushes += 1
                client.seen = self._pushes
            self._queue(number, _PULL, i)
            return
        at = (client.turn, i)
        self._arrived[at] += 1
        if self._arrived[at] == len(self._clients):
            del self._arrived[at]
            for other in self._clients:
                self._queue(other.number, _PULL, i)

    def _outcome(self) -> Outcome:
        # Clients that do not wait for each other do as many turns as they can: what counts is what all do in a time.
        since_s, before = self._settled or (0.0, 0)
        turns = (self._done - before) / (len(self._course.pieces) * len(self._clients))
        turn_s = (self._now - since_s) / turns if turns else self._now
        carried = max(self._up.carried_bytes, self._down.carried_bytes)
        total_s = self._now or 1.0
        nic = carried / (self._course.servers_rate * total_s) if self._course.servers else 0.0
        return Outcome(turn_s, dict(sorted(self._staleness.items())), nic, self._served_s / total_s, self._events)
