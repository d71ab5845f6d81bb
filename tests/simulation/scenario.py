"""One seed, one job with faults, and what must hold after every step of it.

A push adds ``BASE ** client`` to every element, so that a value tells how often each client's pushes are in it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from simulation.cluster import HEARTBEAT_S, Cluster, SimulatedServer
from simulation.network import Faults, Network, Program, Violation

from kvmpi import optim
from kvmpi.config import Config
from kvmpi.ps import replay
from kvmpi.ps.client import PsClient
from kvmpi.ps.part import Part
from kvmpi.ps.session import SCHEDULER, Ask
from kvmpi.ps.slot import Slot
from kvmpi.wire import messages as m

#: Larger than the steps of a job, so that digits do not run over; with 4 clients float32 is still exact.
BASE = 64
KEYS = {"weight": 11, "bias": 1, "empty": 0, 4: 7}
HEARTBEAT_TIMEOUT_S = 1.2
#: Once the network is well, everything must be done within some retries and one loss of a server.
GRACE_S = 60.0


@dataclass
class Outcome:
    """What happened to a job: how often each fault fired, and how long it took."""

    seed: int
    mode: str
    seconds: float
    fired: dict[str, int] = field(default_factory=dict)


class Job:
    """The job of ``seed``: everything about it follows from that number."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        heal_s = 8.0
        self.network = Network(seed, Faults(heal_s=heal_s))
        choose = self.network.random
        faults = self.network.faults
        faults.drop, faults.duplicate = choose.choice([(0.0, 0.0), (0.05, 0.1), (0.15, 0.15)])
        faults.delay_s = choose.choice([0.001, 0.02, 0.3])
        self.mode = choose.choice(["sync", "async"])
        self.num_clients = 1 + choose.randrange(4)
        self.steps = 3 + choose.randrange(8)
        num_servers = 1 + choose.randrange(4)
        self.replicas = choose.randrange(min(3, num_servers))
        config = Config(
            num_workers=self.num_clients, num_clients=self.num_clients, num_servers=num_servers,
            replicas=self.replicas, chunk_bytes=choose.choice([8, 20, 1 << 20]),
            window_bytes=choose.choice([1, 64, 1 << 20]), retry_s=0.7,
            placement=choose.choice(["uniform", "lpt", "hash", "round_robin"]),
            on_client_loss=choose.choice(["fail", "wait", "shrink"]),
        )  # fmt: skip
        self.cluster = Cluster(
            config, self.network, self.mode, heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S,
            restart_s=choose.choice([0.1, 2.0]),
        )  # fmt: skip
        self.limit_s = heal_s + GRACE_S
        # By client, key: pushes that have been begun, and those whose end the client has been told.
        self.begun = {(client, key): 0 for client in range(self.num_clients) for key in KEYS}
        self.done = dict(self.begun)
        self._seen: dict[tuple[int, Any], np.ndarray] = {}
        self._counted: weakref.WeakKeyDictionary[Slot, tuple[int, list[int]]] = weakref.WeakKeyDictionary()
        self._looked_at: dict[Part, int] = {}
        self._num_done = self._num_checked = 0
        # Clients that are dead for good, or push less than others; and the links of all, to kill them by.
        self._last_step = dict.fromkeys(range(self.num_clients), self.steps)
        for client in range(1, self.num_clients):
            if choose.random() < 0.2:
                self._last_step[client] = choose.randrange(1, self.steps + 1)
        self._gone: set[int] = set()
        self._leaving: set[int] = set()
        self._programs: dict[str, Program] = {}
        self._client_incarnations = dict.fromkeys(range(self.num_clients), 1)
        self._rule = choose.choice(["test", "test", "adam"]) if self.mode == "sync" else "test"
        self._next_fault_s = 1.0
        self._added = choose.random() < 0.3
        self._touched: set[tuple[int, int]] = set()

    # ---- the programs of the clients

    def run(self) -> Outcome:
        """Run it to the end.

        Raises:
            Violation: something that must never happen.
        """
        self.network.after_each_step = self._check_and_disturb
        for rank in range(self.num_clients):
            self._start_client(rank)
        try:
            self.network.run(self._programs, self.limit_s)
            self._check_the_end()
        except Violation:
            raise
        except Exception as error:
            raise Violation(f"{type(error).__name__}: {error}") from error
        return Outcome(self.seed, self.mode, self.network.now_s, self.network.faults.fired)

    def _start_client(self, rank: int) -> None:
        incarnation = self._client_incarnations[rank]
        ps = self.cluster.client(rank, self.num_clients, incarnation)
        self._programs[f"client {rank}.{incarnation}"] = self._program(ps, rank, incarnation)

    def _program(self, ps: PsClient, rank: int, incarnation: int) -> Program:
        deadline = self.cluster.deadline
        yield [ps.register(incarnation, deadline())]
        yield [ps.open_sessions(incarnation, deadline())]
        ps.add_keys([(key, (count,), "float32") for key, count in KEYS.items()])
        yield [ps.init(key, np.zeros(count, "f4") if rank == 0 else None, deadline()) for key, count in KEYS.items()]
        rule: optim.Rule = optim.Test(lr=-1.0) if self._rule == "test" else optim.Adam(lr=0.1)
        yield [ps.set_rule(rule, deadline())]
        yield [ps.barrier(deadline())]
        first = 1 + ps.position
        if self.mode == "async" and incarnation > 1:
            first = 1 + max(self.begun[rank, key] for key in KEYS)
        for step in range(first, self._last_step[rank] + 1):
            yield from self._exchange(ps, rank, step)
        if self._last_step[rank] < self.steps:
            self.network.faults.count("finish")
            yield [ps.finish(deadline())]
        yield [ps.barrier(deadline())]
        outs = {key: np.full(count, np.nan, "f4") for key, count in KEYS.items()}
        told = dict(self.done)
        yield [ps.pull(key, outs[key], deadline()) for key in KEYS]
        for key in KEYS:
            self._check_read(rank, key, outs[key], self._last_step[rank], told, at_the_end=True)
        yield [ps.barrier(deadline())]
        self._leaving.add(rank)
        yield [ps._start("say good-bye", [Ask(server, m.Bye, ()) for server in ps._link.servers], deadline())]
        ps._link.stop_heartbeats()
        yield [ps._start("leave", [Ask(SCHEDULER, m.Leave, ())], deadline())]

    def _exchange(self, ps: PsClient, rank: int, step: int) -> Program:
        """A step with every key: pushpull, or push and then pull."""
        values = {key: np.full(count, float(BASE**rank), "f4") for key, count in KEYS.items()}
        outs = {key: np.full(count, np.nan, "f4") for key, count in KEYS.items()}
        works, to_pull = [], []
        for i, key in enumerate(KEYS):
            self.begun[rank, key] = step
            if (i + step + rank * (self.mode == "async")) % 2:
                work = ps.pushpull(key, values[key], outs[key], self.cluster.deadline(), priority=-i)
            else:
                work = ps.push(key, values[key], self.cluster.deadline(), priority=-i)
                to_pull.append(key)
            work.add_done_callback(self._note_done(rank, key, step))
            works.append(work)
        yield works
        for value in values.values():
            value[:] = np.nan  # what was pushed is ours again
        told = dict(self.done)
        yield [ps.pull(key, outs[key], self.cluster.deadline()) for key in to_pull]
        for key in KEYS:
            self._check_read(rank, key, outs[key], step, told if key in to_pull else {})

    def _note_done(self, rank: int, key: Any, step: int) -> Callable[[Any], None]:
        def note(work: Any) -> None:
            if work.error() is None:
                self.done[rank, key] = step
                self._num_done += 1

        return note

    # ---- what must hold

    def _check_read(
        self, rank: int, key: Any, value: np.ndarray, step: int, told: dict[Any, int], *, at_the_end: bool = False
    ) -> None:
        """What a client reads after its ``step``-th push, and after anybody was ``told`` of the end of some pushes."""
        where = f"client {rank} reads {key!r} after step {step}"
        if self._rule == "adam":
            if np.isnan(value).any():
                raise Violation(f"{where}: not filled")
            return
        counts = _digits(value, self.num_clients)
        for client in range(self.num_clients) if self.mode == "sync" else ():
            expected = min(step, self._last_step[client])
            rounds = set(counts[client].tolist())
            # A round holds each client once, unless that is dead: then it may be in fewer. Who has joined reads on.
            most = self._last_step[client] if at_the_end else expected
            if rounds and (max(rounds) > most or (min(rounds) < expected and client not in self._gone)):
                raise Violation(f"{where}: rounds hold {sorted(rounds)} pushes of client {client}, expected {expected}")
        if self.mode == "sync":
            return
        for client in range(self.num_clients):
            most = self.begun[client, key]
            known = told.get((client, key), 0)
            if (counts[client] < known).any():
                raise Violation(f"{where}: {counts[client].tolist()} pushes of client {client}, who knew of {known}")
            least = step if client == rank else 0
            if ((counts[client] < least) | (counts[client] > most)).any():
                raise Violation(
                    f"{where}: {counts[client].tolist()} pushes of client {client}, {least} to {most} expected"
                )
        before = self._seen.get((rank, key))
        if before is not None and (counts < before).any():
            raise Violation(f"{where}: {counts.tolist()} pushes, it has seen {before.tolist()}: time goes back")
        self._seen[rank, key] = counts

    def _check_and_disturb(self, name: str) -> None:
        acted = [process for process in self.cluster.processes.values() if process.name == name]
        told = self._num_done > self._num_checked
        self._num_checked = self._num_done
        if self._rule == "test":
            for process in list(self.cluster.processes.values()) if told else acted:
                self._check_server(process, told=told)
        now_s = self.network.now_s
        if self._next_fault_s <= now_s < self.network.faults.heal_s:
            self._next_fault_s = now_s + self.network.random.uniform(0.2, 1.5)
            self._disturb()

    def _check_server(self, process: SimulatedServer, *, told: bool) -> None:
        chains = self.cluster.scheduler._chains
        for part in process.state.parts.values():
            if chains is None or (self._looked_at.get(part) == part.seq and not told):
                continue
            self._looked_at[part] = part.seq
            # One that was stopped may believe to be the head still; whom it answers is checked elsewhere.
            if part.answers and part.chain.version == chains.chains[part.number].version:
                self._check_head(process.rank, part)

    def _check_head(self, server: int, part: Part) -> None:
        """The head has everything that was acknowledged, and nothing twice."""
        for shard in part.shards.values():
            for slot in shard.slots.values():
                counts = self._counts_of(slot)
                for client, count in enumerate(counts):
                    least, most = self.done[client, slot.key], self.begun[client, slot.key]
                    if self.mode == "sync" and not self.replicas:
                        least = min(least, slot.rounds)  # acknowledged in its round, which is still open
                    if not least <= count <= most:
                        raise Violation(
                            f"server {server}, part {part.number}, key {slot.key!r}: {count} pushes of client "
                            f"{client}, which has begun {most} and was told of {least}"
                        )

    def _counts_of(self, slot: Slot) -> list[int]:
        """How many pushes of each client are in a chunk; looked at once for each round."""
        rounds, counts = self._counted.get(slot, (-1, []))
        if rounds != slot.rounds:
            digits = _digits(slot.value, self.num_clients)
            if (digits != digits[:, :1]).any():
                raise Violation(f"key {slot.key!r}: elements of one chunk differ: {digits.tolist()}")
            counts = digits[:, 0].tolist() if slot.count else []
            self._counted[slot] = slot.rounds, counts
        return counts

    def _check_the_end(self) -> None:
        """When all is quiet, every server of a chain has the same, bit by bit."""
        for name, value in list(self.network.stopped.items()):
            self.network.stopped[name] = min(value, self.network.now_s)
        self.network.cut.clear()
        self.network.faults.heal_s = min(self.network.faults.heal_s, self.network.now_s)
        quiet_s = 0.0
        while self.network.now_s < self.limit_s and quiet_s < 4.0:  # servers that were killed last are still to come
            self.network.rest(self.network.now_s + 1.0)
            quiet_s = quiet_s + 1.0 if self._all_is_well() else 0.0
        chains = self.cluster.scheduler._chains
        assert chains is not None
        for number, chain in enumerate(chains.chains):
            if len(chain.members) != min(self.replicas + 1, len(chains.alive)) or chain.joiner >= 0:
                raise Violation(f"part {number} is held by {chain} when all is well again")
            states = [_state(self.cluster.processes[server].state.parts[number]) for server in chain.members]
            for server, state in zip(chain.members[1:], states[1:], strict=True):
                if state != states[0]:
                    raise Violation(f"part {number}: server {server} holds other bits than server {chain.members[0]}")

    # ---- what goes wrong

    def _disturb(self) -> None:
        """Do harm to one server, if the chains can bear it."""
        chains, choose = self.cluster.scheduler._chains, self.network.random
        if choose.random() < 0.15 and self._kill_client():
            return
        if choose.random() < 0.1:
            self.cluster.kill_scheduler()
            return
        if self._added and chains is not None and chains.settled:
            self._added = False
            self.network.faults.count("add")
            self.cluster.start_server(self.cluster.config.num_servers)
            return
        if chains is None or not self.replicas:
            self._stop_something()
            return
        if self._all_is_well():
            self._touched.clear()
        alive = list(self.cluster.processes.values())
        victims = [p for p in alive if (p.rank, p.incarnation) in self._touched]
        if len(self._touched) < self.replicas:
            victims = alive
        if not victims:
            self._stop_something()
            return
        victim = choose.choice(victims)
        self._touched.add((victim.rank, victim.incarnation))
        how = choose.choice(["kill", "kill", "cut", "cut one way", "stop", "unnoticed"])
        if how == "kill":
            self.cluster.kill_server(victim.rank)
        elif how == "stop":
            self._stop(victim.name, choose.choice([0.4, 3.0]))
        elif how == "unnoticed":
            self._lose_unnoticed(f"server {victim.rank}")
        else:
            self._cut_off(f"server {victim.rank}", one_way=how == "cut one way")

    def _kill_client(self) -> bool:
        """End a client's process; whether that is something that the job has to survive."""
        choose, policy = self.network.random, self.cluster.config.on_client_loss
        rank = choose.randrange(self.num_clients)
        name = f"client {rank}.{self._client_incarnations[rank]}"
        if policy == "fail" or name not in self._programs or rank in self._gone | self._leaving or self.mode == "async":
            return False
        if policy == "shrink" and (rank == 0 or len(self._gone) + 2 > self.num_clients):
            return False  # client 0 has the first values, and somebody must be left
        self.network.faults.count("kill client")
        self.network.kill(name, self._programs)
        if policy == "shrink":
            self._gone.add(rank)
            return True
        self._client_incarnations[rank] += 1
        self.network.start_later(self.network.now_s + choose.choice([0.1, 2.5]), lambda: self._start_client(rank))
        return True

    def _all_is_well(self) -> bool:
        """Whether every part is held as often as it should be, by servers that are really there."""
        scheduler, processes = self.cluster.scheduler, self.cluster.processes
        chains = scheduler._chains
        assert chains is not None
        if len(processes) < self.cluster.config.num_servers or set(processes) != chains.alive:
            return False
        for chain in chains.chains:
            if len(chain.members) != self.replicas + 1 or chain.joiner >= 0 or chain.draining:
                return False
            for rank in chain.members:
                known = scheduler.members[("server", -1, rank)]
                if rank not in processes or processes[rank].incarnation != known.incarnation:
                    return False
                if self.network.now_s - known.last_seen_s > 2.5 * HEARTBEAT_S:
                    return False  # it may be taken for lost yet
        return not self.network.cut and not any(until > self.network.now_s for until in self.network.stopped.values())

    def _stop_something(self) -> None:
        """A pause that is too short to be taken for a loss."""
        choose = self.network.random
        name = choose.choice(
            sorted([f"client 0.{self._client_incarnations[0]}", *(p.name for p in self.cluster.processes.values())])
        )
        if self.network.now_s > self.network.stopped.get(name, -1.0) + 1.0:
            self._stop(name, choose.uniform(0.1, 0.4))

    def _stop(self, name: str, seconds: float) -> None:
        self.network.stopped[name] = self.network.now_s + seconds
        self.network.faults.count("stopped")

    def _cut_off(self, name: str, *, one_way: bool) -> None:
        """Nothing passes between a server and some others for a while, or only in one direction."""
        choose = self.network.random
        others = ["scheduler", *(f"server {rank}" for rank in self.cluster.processes)]
        others += [f"client {rank}" for rank in range(self.num_clients)]
        chosen = [other for other in others if other != name and choose.random() < 0.6]
        pairs = {(name, other) for other in chosen}
        if not one_way:
            pairs |= {(other, name) for other in chosen}
        self.network.cut |= pairs
        self.network.faults.count("partition")
        until_s = self.network.now_s + choose.uniform(0.2, 3.0)
        self.network.at(until_s, lambda: self.network.cut.difference_update(pairs))

    def _lose_unnoticed(self, name: str) -> None:
        """A server is taken for lost, and neither it nor a client hears of that for a while."""
        choose = self.network.random
        deaf = [f"client {rank}" for rank in range(self.num_clients) if choose.random() < 0.5]
        pairs = {(name, "scheduler"), *(("scheduler", other) for other in (name, *deaf))}
        self.network.cut |= pairs
        self.network.faults.count("unnoticed")
        self.network.at(self.network.now_s + 3.0, lambda: self.network.cut.difference_update(pairs))


def _digits(value: np.ndarray, num_clients: int) -> np.ndarray:
    """How many pushes of each client are in ``value``; shape ``(num_clients, count)``."""
    whole = value.astype("i8")
    if not np.array_equal(whole, value) or (whole < 0).any():
        raise Violation(f"{value.tolist()} is no sum of pushes")
    return np.array([whole // BASE**client % BASE for client in range(num_clients)]).reshape(num_clients, -1)


def _state(part: Part) -> list[Any]:
    found: list[Any] = [part.seq]
    for store in sorted(part.shards):
        for entry, payloads in replay.dump(part.shards[store]):
            found.append((repr(entry), [payload.tobytes() for payload in payloads]))
    return found
