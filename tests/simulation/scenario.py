"""One seed, one job with faults: who takes part, who is lost and comes back, and how it ends."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Any

from simulation.ages import Ages
from simulation.cluster import NO_PART, Cluster
from simulation.copies import Copies
from simulation.disk import SimulatedDisk
from simulation.disturbances import Disturbances
from simulation.network import Faults, Network, Program, Violation
from simulation.oracle import Oracle
from simulation.past import Past
from simulation.plan import MOST_CLIENTS, Plan
from simulation.programs import Programs

from kvmpi.config import Config
from kvmpi.errors import ClientLostError, ProtocolError
from kvmpi.ps.client import PsClient
from kvmpi.ps.snapshot_book import Manifest
from kvmpi.ps.snapshots import PartCopy

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


class Killed(Exception):
    """All processes of the job have been killed at once."""


class Job:
    """The job of ``seed``: everything about it follows from that number.

    Args:
        disk: where its servers write snapshots.
        resumed, past: the snapshot there that it goes on from, and what is in that.
    Attributes:
        mode, policy: "sync" or "async"; what rounds do without a client that is lost.
        staleness: by how many pushes who reads may be ahead of others; None: of any number.
        splits: the n of n-softsync; 0: each push is an update.
        killed_after: all its processes are killed when clients were told of the end of so many pushes.
        killed_beyond: instead, of so many more when another snapshot is complete.
    """

    def __init__(
        self, seed: int, disk: SimulatedDisk | None = None, resumed: Manifest | None = None, past: Past | None = None
    ) -> None:
        self.seed = seed
        self.killed_after: int | None = None
        self.killed_beyond: int | None = None
        heal_s = 8.0
        self.network = Network(seed, Faults(heal_s=heal_s))
        choose = self.network.random
        faults = self.network.faults
        faults.drop, faults.duplicate = choose.choice([(0.0, 0.0), (0.05, 0.1), (0.15, 0.15)])
        faults.delay_s = choose.choice([0.001, 0.02, 0.3])
        faults.bytes_per_s = random.Random(f"{seed} rate").choice([math.inf] * 8 + [2e3, 1e4])
        self.mode = choose.choice(["sync", "async"])
        bound = random.Random(f"{seed} ssp")
        is_bound = self.mode == "async" and bound.random() < 0.4
        self.staleness = bound.choice([0, 1, 1, 2, 3]) if is_bound else None
        soft = random.Random(f"{seed} softsync")
        self.splits = soft.choice([1, 1, 2, 3]) if self.mode == "async" and not is_bound and soft.random() < 0.3 else 0
        self.num_clients = 1 + choose.randrange(MOST_CLIENTS)
        self.steps = 3 + choose.randrange(8) + (5 if disk is not None and self.mode == "sync" else 0)
        num_servers = 1 + choose.randrange(4)
        config = Config(
            num_workers=self.num_clients, num_clients=self.num_clients, num_servers=num_servers,
            replicas=choose.randrange(min(3, num_servers)), chunk_bytes=choose.choice([8, 20, 1 << 20]),
            window_bytes=choose.choice([1, 64, 1 << 20]), retry_s=0.7,
            placement=choose.choice(["uniform", "lpt", "hash", "round_robin"]),
            on_client_loss=choose.choice(["fail", "wait", "shrink"]),
            **self._durable(disk, resumed),
        )  # fmt: skip
        self.cluster = Cluster(
            config, self.network,
            f"ssp:{self.staleness}" if is_bound else f"softsync:{self.splits}" if self.splits else self.mode,
            heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S, restart_s=choose.choice([0.1, 2.0]), disk=disk, resumed=resumed,
        )  # fmt: skip
        self.limit_s = heal_s + GRACE_S
        self.policy = config.on_client_loss
        self._plan = plan = Plan(
            seed, choose, mode=self.mode, policy=self.policy, num_clients=self.num_clients, steps=self.steps,
            resumed=0 if past is None else past.number, writes=disk is not None,
            gathers=self.splits > 0,
        )  # fmt: skip
        for name, happens in (
            ("seldom", plan.seldom),
            ("schedule", plan.doubles_from),
            ("sparse", plan.is_sparse),
            ("bound", is_bound),
            ("softsync", self.splits and self.num_clients > self.splits),
            ("aware", plan.rule == "aware"),
        ):
            if happens:
                faults.count(name)
        slack = max(1, self.num_clients // self.splits) - 1 if self.splits else 0
        self.cluster.ages = Ages() if plan.rule == "aware" else None
        self.oracle, self._copies = Oracle(self.cluster, plan, past, self.staleness, slack), Copies(self.cluster)
        if disk is not None:
            disk.on_complete = self._check_snapshot
        # After so many pushes that clients were told the end of, one is lost as well: most of all in the first steps.
        early = random.Random(f"{seed} early")
        self._lost_after = sorted(early.sample(range(1, 60), 3)) if plan.seldom and self.policy == "wait" else []
        # Whether client 0 is killed when it is about to give the first values, or has given some of them.
        self._early = random.Random(f"{seed} early")
        dies_early = self.mode == "sync" and self.policy == "shrink" and self._early.random() < 0.5
        # Whether a client's first process ends before it has said anything.
        absent = random.Random(f"{seed} absent")
        may_lack = self.mode == "sync" and self.policy == "shrink" and self.cluster.tells and self.num_clients > 1
        self._absent = absent.randrange(self.num_clients) if may_lack and absent.random() < 0.3 else None
        self._absent_s = absent.choice([0.0, 0.05, 0.3, 2.0])
        self._running: dict[str, Program] = {}
        self._incarnations = dict.fromkeys(range(self.num_clients), 1)
        self._programs = Programs(
            plan, self.cluster, self.oracle, self.policy, lambda rank, number: number == self._incarnations[rank],
            self._die_early if dies_early else None,
        )  # fmt: skip
        self._disturbances = Disturbances(
            self.cluster, self._running, adds_server=choose.random() < 0.3, may_lose=self._may_lose,
            on_loss=self._on_loss, has_begun=lambda: self.oracle.num_done > 0,
        )  # fmt: skip

    def _durable(self, disk: SimulatedDisk | None, resumed: Manifest | None) -> dict[str, Any]:
        if disk is None:
            return {}
        folder = disk.directory
        every, seconds = self.network.random.choice([(1, 0.0), (2, 0.0), (3, 0.0), (0, 0.5)])
        return {
            "snapshot_dir": folder, "snapshot_every": every, "snapshot_seconds": seconds,
            "resume": "" if resumed is None else folder,
        }  # fmt: skip

    def _check_snapshot(self, number: int, parts: list[PartCopy]) -> None:
        if self.killed_beyond is not None:
            self.killed_after, self.killed_beyond = self.oracle.num_done + self.killed_beyond, None
        self.oracle.check_whole(number, parts)
        if self.mode == "sync":
            self.oracle.check_snapshot(number, parts)
        self.network.faults.count("snapshot")
        if self._plan.seldom:
            self.network.faults.count("seldom snapshot")

    def run(self) -> Outcome:
        """Run it to the end.

        Raises:
            Killed: that was the end.
            Violation: something that must never happen.
        """
        self.network.after_each_step = self._after_each_step
        for rank in range(self.num_clients):
            if rank == self._absent:
                self.network.start_later(self._absent_s, self._end_absent)
            else:
                self._start_client(rank)
        try:
            self.network.run(self._running, self.limit_s)
            self._calm_down()
            self.oracle.check_chains()
            self._copies.check_all()
        except (Violation, Killed):
            raise
        except Exception as error:
            raise Violation(f"{type(error).__name__}: {error}") from error
        return Outcome(self.seed, self.mode, self.network.now_s, self.network.faults.fired)

    def _after_each_step(self, name: str) -> None:
        process = self.cluster.alive.get(name)
        if process is None:
            if self.oracle.is_told:
                self.oracle.check_servers(None)
        elif process.touched != NO_PART or self.oracle.is_told:
            self.oracle.check_servers(process)
            self._copies.check(process)
        if self.network.now_s >= self._disturbances.next_s:
            self._disturbances.step()
        if self._lost_after and self.oracle.num_done >= self._lost_after[0]:
            del self._lost_after[0]
            self._disturbances.disturb_client()
        due = self.killed_after is not None and self.killed_beyond is None
        if due and self.oracle.num_done >= self.killed_after:
            raise Killed

    def _calm_down(self) -> None:
        """Let everything that was broken come back; servers that were killed last are still to come."""
        for name, value in list(self.network.stopped.items()):
            self.network.stopped[name] = min(value, self.network.now_s)
        self.network.cut.clear()
        self.network.faults.heal_s = min(self.network.faults.heal_s, self.network.now_s)
        quiet_s = 0.0
        while self.network.now_s < self.limit_s and quiet_s < 4.0:
            self.network.rest(self.network.now_s + 1.0)
            quiet_s = quiet_s + 1.0 if self._disturbances.all_is_well() else 0.0

    # ---- clients that are lost

    def _may_lose(self, rank: int) -> bool:
        """Whether the job has to survive the end of a client's process."""
        if self.policy == "fail" or rank in self.oracle.gone:
            return False
        if rank in (self._programs.closing if self.policy == "wait" else self._programs.leaving):
            return False
        # Else another process is about to take its place.
        return f"client {rank}.{self._incarnations[rank]}" in self._running

    def _on_loss(self, rank: int) -> None:
        """A client's process is dead, or counts as dead soon; then another may be started before it knows."""
        if self.policy == "shrink":
            self.oracle.leave_out(rank)
            if self.network.random.random() < 0.7 or len(self.oracle.gone) == self.num_clients:
                self._come_back(rank)
        elif f"client {rank}.{self._incarnations[rank]}" not in self._running or self.network.random.random() < 0.5:
            self._come_back(rank)

    def _die_early(self) -> Program:
        """Client 0 ends soon, if nobody has got beyond the first values; it may wait for that."""

        def die() -> None:
            name = "client 0.1"
            if name in self._running and self.oracle.num_done == 0 and self._may_lose(0):
                self.network.faults.count("kill client 0 early")
                self.network.kill(name, self._running)
                self.cluster.tell_end(name)
                self._on_loss(0)

        self.network.at(self.network.now_s + self._early.uniform(0.0, 0.5), die)
        yield [self.network.pause(self._early.choice([0.0, 1.0]))]

    def _end_absent(self) -> None:
        """The launcher says that a client has ended which nobody has seen."""
        assert self._absent is not None
        self.network.faults.count("ends before it is there")
        self.cluster.hear_end(f"client {self._absent}.1")
        self._on_loss(self._absent)

    def _come_back(self, rank: int) -> None:
        self._incarnations[rank] += 1
        pause_s = self.network.random.choice([0.1, 0.4, 2.5])

        def start() -> None:
            if self.policy == "wait" and rank in self._programs.closing:
                self.network.faults.count("ended well after all")  # nobody takes the place of such a process
            else:
                self._start_client(rank)

        self.network.start_later(self.network.now_s + pause_s, start)

    def _start_client(self, rank: int) -> None:
        incarnation = self._incarnations[rank]
        ps = self.cluster.client(rank, self.num_clients, incarnation)
        self._running[f"client {rank}.{incarnation}"] = self._guarded(ps, rank, incarnation)

    def _guarded(self, ps: PsClient, rank: int, incarnation: int) -> Program:
        """The program of a process that may learn that it counts as dead."""
        try:
            yield from self._programs.run(ps, rank, incarnation)
        except (ClientLostError, ProtocolError) as error:
            may_be_over = self._programs.closing or self._plan.leaves_early
            if self._incarnations[rank] > 1 and "is over" in str(error) and may_be_over:
                self.network.faults.count("too late")
                self.network.detach(f"client {rank}.{incarnation}")
                return
            said = any(words in str(error) for words in ("lost", "later incarnation"))
            if not said or not self.network.was_stopped(f"client {rank}.{incarnation}"):
                raise
            self.network.faults.count("told that it is lost")
            self.network.detach(f"client {rank}.{incarnation}")
            if self.policy == "wait" and incarnation == self._incarnations[rank]:
                self._come_back(rank)
