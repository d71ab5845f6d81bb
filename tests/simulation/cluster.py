"""The state machines of kvmpi.ps as processes of a simulated network, which can be killed and started again."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import msgspec
from simulation.ages import Ages
from simulation.disk import SimulatedDisk, VirtualBackground
from simulation.network import Network, Violation

from kvmpi.config import Config
from kvmpi.errors import ServerLostError
from kvmpi.ps.asks import SCHEDULER, Ask, Operation
from kvmpi.ps.chains import PARTS_PER_SERVER
from kvmpi.ps.client import PsClient
from kvmpi.ps.durability import SnapshotKeeper, SnapshotWriter, load_parts
from kvmpi.ps.reply import Reply
from kvmpi.ps.scheduler import SchedulerState
from kvmpi.ps.scheduler_file import SavedScheduler
from kvmpi.ps.server import ServerState
from kvmpi.ps.session import ClientSession
from kvmpi.ps.slot import Slot
from kvmpi.ps.snapshot_book import Manifest, SnapshotBook
from kvmpi.trace import Recorder
from kvmpi.wire import Message
from kvmpi.wire import messages as m

HEARTBEAT_S = 0.25
NO_PART, STORE = -1, 1
OnVersion = Callable[[int, int, tuple[Any, int], int], None]
_TO_PREDECESSOR = (m.Attach, m.Committed, m.Installed)


@cache
def who(name: str) -> tuple[int, int]:
    """Rank and incarnation of a process."""
    rank, _, incarnation = name.split()[1].partition(".")
    return int(rank), int(incarnation)


class SimulatedServer:
    """A server's process.

    Attributes:
        touched: the part that the last thing that happened to it was about; None: any; NO_PART: none.
    """

    def __init__(self, cluster: Cluster, rank: int, incarnation: int) -> None:
        self._cluster, self._network = cluster, cluster.network
        self.rank, self.incarnation = rank, incarnation
        self.name = f"server {rank}.{incarnation}"
        config, disk = cluster.config, cluster.disk
        self.state = ServerState(rank, config.on_client_loss, config.snapshot_every if config.snapshot_dir else None)
        how = {} if disk is None else {"disk": disk, "beside": lambda _: cluster.beside(self.name)}
        self._writer = SnapshotWriter(config, self.state, lambda: None, **how)
        self._found: dict[int, str] = {}
        self._next_heartbeat_s = 0.0
        self._registered = False
        self.touched: int | None = None
        self._has_heard = False  # since its last tick
        # By client: its last process of which this server has been told that it is dead.
        self._dead: dict[int, int] = {}
        self._network.attach(self.name, self._receive, self._tick)

    def _receive(self, sender: str, message: Message, payloads: list[memoryview]) -> None:
        now_s = self._network.now_s
        if isinstance(message, m.Heard):
            self.touched = NO_PART
            self._extend_lease(message.sent_us / 1e6)
        else:
            part = getattr(message, "part", None)
            self.touched, self._has_heard = (part if part in self.state.parts else None), True
        if sender == "scheduler":
            if isinstance(message, m.Failure):
                self._cluster.kill_server(self.rank)  # the process ends with that error
            elif isinstance(message, m.Heard):
                self.state.hear_done(message.done)
            elif isinstance(message, m.View):
                self._registered = True
                if message.epoch > self.state.epoch:
                    for lost in message.lost:
                        self._dead[lost.rank] = max(lost.incarnation, self._dead.get(lost.rank, 0))
                    self._found = {info.rank: f"server {info.rank}.{info.incarnation}" for info in message.servers}
                    if self.state.epoch < 0 and message.snapshot:
                        load_parts(self._cluster.config, self.state, self.rank, message, lambda: None)
                self._send(self.state.adopt(message, now_s))
            elif isinstance(message, m.TakeSnapshot) and self.state.snapshots is not None:
                self.state.snapshots.begin(message.number, message.missed, ahead=message.ahead)
        elif isinstance(message, _TO_PREDECESSOR):
            self._send(self.state.hear(who(sender)[0], message, now_s))
        else:
            self._hear_client(sender, message, payloads)
        if self.state.snapshots is not None:
            self._report()

    def _report(self) -> None:
        """What the scheduler is to know about snapshots."""
        for news in self._writer.step():
            self._cluster.on_news(self.rank, news)
            self._network.send(self.name, "scheduler", news, ())

    def _hear_client(self, sender: str, message: Message, payloads: list[memoryview]) -> None:
        """What a client says counts only as long as nobody has told this server that the process is dead."""
        client, incarnation = who(sender)
        if isinstance(message, m.Hello):
            self._dead[client] = max(self._dead.get(client, 0), incarnation - 1)
        before = self._held_of(client) if incarnation <= self._dead.get(client, 0) else None
        ages = self._cluster.ages
        pushed = self._slot(message) if ages is not None and isinstance(message, m.Push) else None
        met = None if pushed is None else (pushed.rounds, pushed.value.astype("f8"))
        self._send(self.state.handle(sender.encode(), message, payloads, self._network.now_s))
        if met is not None and ages.check_update(client, message, payloads, met, pushed) > 1:
            self._network.faults.count("old push")
        if before is not None:
            self._network.faults.count("words of the dead")
            if self._held_of(client) != before:
                raise Violation(f"{self.name} takes a {type(message).__name__} of {sender}, which is dead")

    def _slot(self, push: m.Push) -> Slot | None:
        """The chunk that a push is for, if it is here."""
        part = self.state.parts.get(push.part)
        shard = None if part is None else part.shards.get(STORE)
        return None if shard is None else shard.slots.get((push.key, push.chunk))

    def _held_of(self, client: int) -> list[Any]:
        """Everything that a client could have changed in the parts that this server answers for."""
        return [
            (part.seq, [(slot.steps.get(client), slot.held.get(client)) for slot in shard.slots.values()])
            for part in self.state.parts.values() if part.answers for shard in part.shards.values()
        ]  # fmt: skip

    def _send(self, outgoing: Sequence[Any]) -> None:
        if not outgoing:
            return
        send = self._network.send
        for one in outgoing:
            if isinstance(one, Reply):
                send(self.name, one.route.decode(), one.message, one.payloads)
            elif one.server in self._found:
                send(self.name, self._found[one.server], one.message, one.payloads)

    def _tick(self, now_s: float) -> None:
        # Of what it holds only messages change anything.
        self.touched, self._has_heard = None if self._has_heard else NO_PART, False
        self._send(self.state.tick(now_s))
        for report in self.state.reports():
            self._network.send(self.name, "scheduler", report, ())
        if self.state.snapshots is not None:
            self._report()
        if now_s >= self._next_heartbeat_s:
            self._next_heartbeat_s = now_s + HEARTBEAT_S
            if self._registered:
                beat = m.Heartbeat(self._writer.round(), self.state.epoch, int(now_s * 1e6))
                self._network.send(self.name, "scheduler", beat, (), reliable=True)
            else:
                self._extend_lease(now_s)
                self.register()

    def _extend_lease(self, heard_s: float) -> None:
        self.state.lease_ends_s = heard_s + 0.9 * self._cluster.scheduler.heartbeat_timeout_s

    def register(self) -> None:
        """Say to the scheduler that it is here."""
        servers = self._cluster.config.num_servers
        fields = ("server", self.rank, -1, servers, self.incarnation, "host", [f"tcp://{self.name}"])
        self._network.send(self.name, "scheduler", m.Register(1, *fields), (), reliable=True)


class SimulatedLink:
    """What ``Link`` is to a PsClient, without threads and sockets."""

    def __init__(
        self, network: Network, name: str, config: Config, on_version: OnVersion, ages: Ages | None, *, bounds: bool
    ) -> None:  # fmt: skip
        self._network, self._name, self._on_version, self._ages = network, name, on_version, ages
        self._who, self._bounds = who(name), bounds
        self.session = ClientSession(config.window_bytes, config.retry_s)
        self.is_open = True
        self.shares = False
        self.done: Callable[[], int] = lambda: 0
        self._joined = False
        self._epoch = -1
        self._servers: dict[int, str] = {}
        self._next_heartbeat_s = 0.0
        network.attach(name, self._receive, self._tick)

    def start(self) -> None:
        pass

    def join(self) -> None:
        self._joined = True

    def carry(self, chunk_bytes: int) -> None:
        pass

    @property
    def servers(self) -> list[int]:
        return self.session.servers

    def stop_heartbeats(self) -> None:
        self._joined = False

    def now_s(self) -> float:
        return self._network.now_s

    def submit(self, operation: Operation, asks: Sequence[Ask], priority: int) -> None:
        self.session.submit(operation, asks, priority)
        self._pump()

    def stop(self) -> None:
        self.is_open = False
        self.session.fail_all(ServerLostError("stopped"))
        self._network.detach(self._name)

    def _receive(self, sender: str, message: Message, payloads: list[memoryview]) -> None:
        if isinstance(message, m.View) and message.epoch > self._epoch:
            self._epoch = message.epoch
            self._servers = {info.rank: f"server {info.rank}.{info.incarnation}" for info in message.servers}
        elif isinstance(message, m.Value) and (ask := self.session._outstanding.get(message.request)) is not None:
            self._on_version(*self._who, ask.fields[:2], message.version)
            if self._ages is not None:
                self._ages.note_read(self._who, ask.fields[:2], ask.fields[2], message.version)
        elif isinstance(message, m.Waiting) and self._bounds:
            self._network.faults.count("held read")
        self.session.receive(message, payloads)
        self._pump()

    def _tick(self, now_s: float) -> None:
        if not self.is_open:
            return
        self.session.tick(now_s)
        self._pump()
        if self._joined and now_s >= self._next_heartbeat_s:
            self._next_heartbeat_s = now_s + HEARTBEAT_S
            self._network.send(self._name, "scheduler", m.Heartbeat(0, self._epoch, 0, self.done()), (), reliable=True)

    def _pump(self) -> None:
        for peer, message, payloads in self.session.sendable(self._network.now_s):
            if peer == SCHEDULER:
                reliable = isinstance(message, (m.Register, m.Leave))
                self._network.send(self._name, "scheduler", message, payloads, reliable=reliable)
            elif peer in self._servers:
                if self._ages is not None and isinstance(message, m.Push):
                    self._ages.check_push(self._who, message)
                self._network.send(self._name, self._servers[peer], message, payloads)


class SimulatedDeadline:
    """A deadline on the network's clock."""

    def __init__(self, network: Network, timeout_s: float) -> None:
        self._network, self._expires_s = network, network.now_s + timeout_s

    def remaining_s(self) -> float:
        return max(0.0, self._expires_s - self._network.now_s)


class Cluster:
    """A scheduler, servers and clients of one store on a network.

    Args:
        disk: where snapshots are written, if ``config`` says so.
        resumed: the snapshot that the job goes on from.
        restart_s: after so long a server that has ended is started again, without its memory; None: never.
    Attributes:
        tells: whether the launcher says which processes have ended.
        processes, alive: the servers' processes, by rank and by name.
        on_version: called with client, incarnation, (key, chunk) and version of each value that a client gets.
        on_news: called with what a server says to the scheduler about snapshots.
        ages: where old pushes count less.
        on_let_go: called with a client to which the scheduler says that it has passed a barrier.
    """

    def __init__(
        self, config: Config, network: Network, mode: str, *, heartbeat_timeout_s: float = 1e9,
        restart_s: float | None = None, disk: SimulatedDisk | None = None, resumed: Manifest | None = None,
    ) -> None:  # fmt: skip
        self.config, self.network, self.mode, self._restart_s = config, network, mode, restart_s
        self.disk = disk
        self.on_version: OnVersion = lambda client, incarnation, where, version: None
        self.on_news: Callable[[int, Any], None] = lambda server, news: None
        self.on_let_go: Callable[[int], None] = lambda client: None
        self.ages: Ages | None = None
        self._at_barriers: set[tuple[str, int]] = set()
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._start_scheduler(resumed)
        self._keeper.begin()
        self._saved = msgspec.msgpack.encode(self.scheduler.save())
        self._changes = 0
        network.attach("scheduler", self._at_scheduler, self._tick_scheduler)
        self.processes: dict[int, SimulatedServer] = {}
        self.alive: dict[str, SimulatedServer] = {}
        self._endings = random.Random(f"{network.seed} endings")
        self.tells = self._endings.random() < 0.6
        self._untold: list[str] = []  # what it has said while there was no scheduler
        self._incarnations = 0
        for rank in range(config.num_servers):
            self.start_server(rank)

    def beside(self, name: str, lives: Callable[[], bool] = lambda: True) -> VirtualBackground:
        """What writes for a process, as long as that ``lives`` and no other has its name."""
        assert self.disk is not None
        return VirtualBackground(self.network, name, self.disk.slow_s, lives)

    def _start_scheduler(self, resumed: Manifest | None) -> None:
        config = self.config
        book = SnapshotBook(config.num_servers * PARTS_PER_SERVER, config.snapshot_seconds, resumed)
        self.scheduler = SchedulerState(
            config.num_servers, self._heartbeat_timeout_s, config.replicas, config.on_client_loss, book
        )
        life, how = self.scheduler, {}
        if self.disk is not None:
            how = {"disk": self.disk, "beside": lambda _: self.beside("scheduler", lambda: self.scheduler is life)}
        self._keeper = SnapshotKeeper(config, self.scheduler, lambda: None, **how)

    @property
    def servers(self) -> list[ServerState]:
        """The servers that are alive."""
        return [process.state for process in self.processes.values()]

    def _at_scheduler(self, sender: str, message: Message, payloads: list[memoryview]) -> None:
        if isinstance(message, m.Barrier):
            self._at_barriers.add((sender, message.request))
        self._say(self.scheduler.handle(sender.encode(), message, self.network.now_s))
        self._keeper.step()

    def _tick_scheduler(self, now_s: float) -> None:
        self._say(self.scheduler.tick(now_s))
        self._keeper.step()

    def kill_scheduler(self) -> None:
        """End the scheduler; another goes on from what this one has saved."""
        self.network.faults.count("kill scheduler")
        self.network.detach("scheduler")

        def start() -> None:
            saved = msgspec.msgpack.decode(self._saved, type=SavedScheduler)
            self._start_scheduler(Manifest(saved.snapshot, (), saved.steps) if saved.snapshot else None)
            self.scheduler.restore(saved, self.network.now_s)
            self._keeper.recall()
            self._changes = 0
            self.network.attach("scheduler", self._at_scheduler, self._tick_scheduler)
            untold, self._untold = self._untold, []
            for name in untold:
                self.hear_end(name)

        self.network.at(self.network.now_s + self.network.random.choice([0.1, 2.0]), start)

    def tell_end(self, name: str) -> None:
        """The launcher has seen a process end: soon the scheduler knows as well, in some jobs."""
        if self.tells:
            # Mostly before another is in its place.
            pause_s = self._endings.choice([0.0, 0.0, 0.05, 0.05, 0.5])
            self.network.at(self.network.now_s + pause_s, lambda: self.hear_end(name))

    def hear_end(self, name: str) -> None:
        """The scheduler is told that a process has ended, or the next one will be."""
        if not self.network.is_there("scheduler"):
            self._untold.append(name)
            return
        before = self.scheduler.epoch
        self._say(self.scheduler.hear_end(name.split()[0], *who(name), "was killed"))
        if self.scheduler.epoch != before:
            self.network.faults.count("told of the end")

    def _say(self, replies: Sequence[Reply]) -> None:
        if self.scheduler.changes != self._changes:
            self._changes = self.scheduler.changes
            self._saved = msgspec.msgpack.encode(self.scheduler.save())
        for reply in replies:
            name, message = reply.route.decode(), reply.message
            if isinstance(message, m.Ack) and (name, message.request) in self._at_barriers:
                self.on_let_go(who(name)[0])
            self.network.send("scheduler", name, message, reply.payloads)

    def start_server(self, rank: int) -> None:
        """Start a server that holds nothing."""
        self._incarnations += 1
        if (before := self.processes.get(rank)) is not None:
            del self.alive[before.name]
        process = self.processes[rank] = SimulatedServer(self, rank, self._incarnations)
        self.alive[process.name] = process

    def kill_server(self, rank: int) -> None:
        """End a server's process where it is."""
        process = self.processes.pop(rank, None)
        if process is None:
            return
        del self.alive[process.name]
        self.network.faults.count("kill")
        self.network.detach(process.name)
        self.tell_end(process.name)
        if self._restart_s is not None:
            self.network.at(self.network.now_s + self._restart_s, lambda: self.start_server(rank))

    def client(self, rank: int, num_clients: int, incarnation: int = 1) -> PsClient:
        """A process of a client that is not connected yet."""
        return PsClient(
            self.config, store=STORE, mode=self.mode, client=rank, num_clients=num_clients, recorder=Recorder(),
            link=SimulatedLink(  # type: ignore[arg-type]
                self.network, f"client {rank}.{incarnation}", self.config, self.on_version, self.ages,
                bounds=self.mode.startswith("ssp"),
            ),
        )  # fmt: skip

    def deadline(self, timeout_s: float = 1e6) -> Any:
        return SimulatedDeadline(self.network, timeout_s)
