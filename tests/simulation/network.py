"""A network in memory with a clock of its own: the state machines of kvmpi.ps exchange encoded messages over it.

Everything is decided by one seed: which messages are lost, which come twice, how long each takes, and so their order.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvmpi.config import Config
from kvmpi.engine import Work
from kvmpi.errors import ServerLostError
from kvmpi.ps.client import PsClient
from kvmpi.ps.scheduler import SchedulerState
from kvmpi.ps.server import ServerState
from kvmpi.ps.session import SCHEDULER, Ask, ClientSession, Operation
from kvmpi.trace import Recorder
from kvmpi.wire import Message, decode, encode

TICK_S = 0.1
_HEALTHY_DELAY_S = 0.001
Program = Generator[list[Work], None, None]
Inbox = Callable[[bytes, Message, list[memoryview]], None]


@dataclass
class Faults:
    """What happens to each message until the network heals, and how often it happened."""

    drop: float = 0.0
    duplicate: float = 0.0
    delay_s: float = 0.001
    heal_s: float = 0.0
    fired: dict[str, int] = field(default_factory=lambda: {"drop": 0, "duplicate": 0, "overtake": 0})


class Network:
    """Delivers messages between named peers, in the order of their arrival times, as ``run`` moves the clock."""

    def __init__(self, seed: int, faults: Faults) -> None:
        self.now_s = 0.0
        self.faults = faults
        self.random = random.Random(seed)
        self._sequence = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._inboxes: dict[str, Inbox] = {}
        self._ticks: list[Callable[[float], None]] = []
        self._last_arrival: dict[tuple[str, str], float] = {}

    def attach(self, name: str, inbox: Inbox, tick: Callable[[float], None] | None = None) -> None:
        """``inbox(route, message, payloads)`` is called for what arrives at ``name``, ``tick(now_s)`` now and then."""
        self._inboxes[name] = inbox
        if tick is not None:
            self._ticks.append(tick)

    def detach(self, name: str) -> None:
        """``name`` is dead: what is under way to it is lost."""
        self._inboxes.pop(name, None)

    def send(self, source: str, target: str, message: Message, payloads: Sequence[np.ndarray]) -> None:
        header = encode(message)
        copies, delay_s = 1, _HEALTHY_DELAY_S
        if self.now_s < self.faults.heal_s:
            delay_s = self.faults.delay_s
            if self.random.random() < self.faults.drop:
                self.faults.fired["drop"] += 1
                return
            if self.random.random() < self.faults.duplicate:
                self.faults.fired["duplicate"] += 1
                copies = 2
        frames = [payload.tobytes() for payload in payloads]
        for _ in range(copies):
            at_s = self.now_s + self.random.uniform(0.0, delay_s)
            if at_s < self._last_arrival.get((source, target), 0.0):
                self.faults.fired["overtake"] += 1
            self._last_arrival[source, target] = max(at_s, self._last_arrival.get((source, target), 0.0))
            self._at(at_s, lambda: self._deliver(source, target, header, frames, payloads))

    def _deliver(
        self, source: str, target: str, header: bytes, frames: list[bytes], lent: Sequence[np.ndarray]
    ) -> None:
        if source.startswith("server"):
            # A socket reads lent memory when it gets round to it: what a server sends must not change until then.
            assert [payload.tobytes() for payload in lent] == frames, f"{source} changed what it had lent to {target}"
        inbox = self._inboxes.get(target)
        if inbox is not None:
            inbox(source.encode(), decode(header), [memoryview(bytearray(frame)) for frame in frames])

    def _at(self, at_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at_s, next(self._sequence), event))

    def run(self, programs: dict[str, Program], limit_s: float) -> None:
        """Run all programs to their ends. A program yields the Works that it waits for; their errors are thrown in it.

        Raises:
            AssertionError: a program still waits at ``limit_s``.
        """
        waiting: dict[str, list[Work]] = {name: [] for name in programs}
        next_tick_s = self.now_s
        while True:
            for name in [name for name, works in waiting.items() if all(work.done() for work in works)]:
                failed = next((error for work in waiting[name] if (error := work.error()) is not None), None)
                try:
                    program = programs[name]
                    waiting[name] = next(program) if failed is None else program.throw(failed)
                except StopIteration:
                    del waiting[name]
            if not waiting:
                return
            if any(all(work.done() for work in works) for works in waiting.values()):
                continue
            if self._events and self._events[0][0] <= next_tick_s:
                self.now_s, _, event = heapq.heappop(self._events)
                event()
                continue
            self.now_s = next_tick_s
            next_tick_s += TICK_S
            assert self.now_s < limit_s, f"still waiting at {limit_s} s: {waiting}"
            for tick in self._ticks:
                tick(self.now_s)


class SimulatedLink:
    """What ``Link`` is to a PsClient, without threads and sockets."""

    def __init__(self, network: Network, name: str, config: Config) -> None:
        self._network, self._name = network, name
        self.session = ClientSession(config.window_bytes, config.retry_s)
        self._num_servers = config.num_servers
        self.is_open = True
        network.attach(name, self._receive, self._tick)

    def start(self) -> None:
        pass

    def join_servers(self, endpoints: Sequence[str]) -> None:
        assert len(endpoints) == self._num_servers

    def stop_heartbeats(self) -> None:
        pass

    def now_s(self) -> float:
        return self._network.now_s

    def submit(self, operation: Operation, asks: Sequence[Ask], priority: int) -> None:
        self.session.submit(operation, asks, priority)
        self._pump()

    def stop(self) -> None:
        self.is_open = False
        self.session.fail_all(ServerLostError("stopped"))
        self._network.detach(self._name)

    def _receive(self, route: bytes, message: Message, payloads: list[memoryview]) -> None:
        self.session.receive(message, payloads)
        self._pump()

    def _tick(self, now_s: float) -> None:
        if self.is_open:
            self.session.tick(now_s)
            self._pump()

    def _pump(self) -> None:
        for peer, message, payloads in self.session.sendable(self._network.now_s):
            target = "scheduler" if peer == SCHEDULER else f"server {peer}"
            self._network.send(self._name, target, message, payloads)


class SimulatedDeadline:
    """A deadline on the network's clock."""

    def __init__(self, network: Network, timeout_s: float) -> None:
        self._network, self._expires_s = network, network.now_s + timeout_s

    def remaining_s(self) -> float:
        return max(0.0, self._expires_s - self._network.now_s)


class Cluster:
    """A scheduler, servers and clients of one store on a network."""

    def __init__(self, config: Config, network: Network, mode: str) -> None:
        self.config, self.network, self.mode = config, network, mode
        self.scheduler = SchedulerState(config.num_servers, heartbeat_timeout_s=1e9)
        network.attach("scheduler", self._at_scheduler)
        self.servers = [ServerState(rank) for rank in range(config.num_servers)]
        for rank in range(config.num_servers):
            self._start_server(rank)

    def _at_scheduler(self, route: bytes, message: Message, payloads: list[memoryview]) -> None:
        for reply in self.scheduler.handle(route, message, self.network.now_s):
            self.network.send("scheduler", reply.route.decode(), reply.message, reply.payloads)

    def _start_server(self, rank: int) -> None:
        from kvmpi.wire import messages as m

        name = f"server {rank}"

        def inbox(route: bytes, message: Message, payloads: list[memoryview]) -> None:
            if route == b"scheduler":
                return
            for reply in self.servers[rank].handle(route, message, payloads):
                self.network.send(name, reply.route.decode(), reply.message, reply.payloads)

        self.network.attach(name, inbox)
        register = m.Register(1, "server", rank, -1, self.config.num_servers, 1, "host", [f"tcp://{rank}"])
        # Servers join before the faults begin: their one message is not repeated.
        for reply in self.scheduler.handle(name.encode(), register, 0.0):
            assert isinstance(reply.message, m.Roster)

    def client(self, rank: int, num_clients: int, **link: Any) -> PsClient:
        """A client that is not connected yet."""
        return PsClient(
            self.config, store=1, mode=self.mode, client=rank, num_clients=num_clients, recorder=Recorder(),
            link=SimulatedLink(self.network, f"client {rank}", self.config),  # type: ignore[arg-type]
        )  # fmt: skip

    def deadline(self, timeout_s: float = 1e6) -> Any:
        return SimulatedDeadline(self.network, timeout_s)
