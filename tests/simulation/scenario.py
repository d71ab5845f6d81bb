"""One seed, one job with faults: who takes part, what its clients do, and how it ends."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from simulation.cluster import Cluster
from simulation.disk import SimulatedDisk
from simulation.disturbances import Disturbances
from simulation.meetings import Meeting, Meetings
from simulation.network import Faults, Network, Program, Violation
from simulation.oracle import BASE, Oracle, Past

from kvmpi import optim
from kvmpi.config import Config
from kvmpi.engine import Work
from kvmpi.errors import ClientLostError, KVError, ProtocolError
from kvmpi.kernels.rows import Rows
from kvmpi.ps import ArrivingRows
from kvmpi.ps.client import PsClient
from kvmpi.ps.participant import GOODBYE_S
from kvmpi.ps.snapshot_book import Manifest
from kvmpi.ps.snapshots import PartCopy

KEYS = {"weight": 11, "bias": 1, "empty": 0, 4: 7}
MOST_CLIENTS = 4
_NUMBERS = {key: i for i, key in enumerate(KEYS)}
#: What is read into, and what each client pushes.
_UNFILLED = {key: np.full(count, np.nan, "f4") for key, count in KEYS.items()}
_PUSHED = {(rank, key): np.full(KEYS[key], float(BASE**rank), "f4") for rank in range(MOST_CLIENTS) for key in KEYS}
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
        killed_after: all its processes are killed when clients were told of the end of so many pushes.
    """

    def __init__(
        self, seed: int, disk: SimulatedDisk | None = None, resumed: Manifest | None = None, past: Past | None = None
    ) -> None:
        self.seed = seed
        self.killed_after: int | None = None
        heal_s = 8.0
        self.network = Network(seed, Faults(heal_s=heal_s))
        choose = self.network.random
        faults = self.network.faults
        faults.drop, faults.duplicate = choose.choice([(0.0, 0.0), (0.05, 0.1), (0.15, 0.15)])
        faults.delay_s = choose.choice([0.001, 0.02, 0.3])
        self.mode = choose.choice(["sync", "async"])
        self.num_clients = 1 + choose.randrange(MOST_CLIENTS)
        self.steps = 3 + choose.randrange(8)
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
            config, self.network, self.mode, heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S,
            restart_s=choose.choice([0.1, 2.0]), disk=disk, resumed=resumed,
        )  # fmt: skip
        self.limit_s = heal_s + GRACE_S
        self.policy = config.on_client_loss
        # Some clients push less than others.
        self._last_step = dict.fromkeys(range(self.num_clients), self.steps)
        for client in range(1, self.num_clients):
            if choose.random() < 0.2:
                self._last_step[client] = choose.randrange(1, self.steps + 1)
        # With rounds all would be slow.
        self._slow = {client for client in range(self.num_clients) if self.mode == "async" and choose.random() < 0.5}
        self._rule = choose.choice(["test", "test", "adam"]) if self.mode == "sync" else "test"
        self._seldom, self._phases = self._choose_seldom()
        self._resumed = 0 if past is None else past.number
        # Whether each key has an init of its own.
        self._one_by_one = random.Random(f"{seed} one by one").random() < 0.5
        # Whether nobody waits for these before they are pushed again.
        self._loose = random.Random(f"{seed} loose").random() < 0.5
        self.oracle = Oracle(
            self.cluster, KEYS, self._last_step, sync=self.mode == "sync", additive=self._rule == "test",
            past=past, pushes=self._pushes, overall=self._overall,
        )  # fmt: skip
        if disk is not None:
            disk.on_complete = self._check_snapshot
        # Whether programs count their iterations, which tells what belongs to one step.
        self._counts = random.Random(f"{seed} clock").random() < 0.3
        # After so many pushes that clients were told the end of, one is lost as well: most of all in the first steps.
        early = random.Random(f"{seed} early")
        self._lost_after = sorted(early.sample(range(1, 60), 3)) if self._seldom and self.policy == "wait" else []
        # Whether clients meet after some steps, which is where one that was away has missed barriers; and whether its
        # program meets all of them again, or skips those of steps that are done.
        meets = random.Random(f"{seed} barriers")
        self._meets, self._meets_again = self.mode == "sync" and meets.random() < 0.6, meets.random() < 0.4
        self._meetings = Meetings(self.oracle)
        # Whether client 0 is killed when it is about to give the first values, or has given some of them.
        self._early = random.Random(f"{seed} early")
        self._dies_early = self.mode == "sync" and self.policy == "shrink" and self._early.random() < 0.5
        # Whether a client's first process ends before it has said anything.
        absent = random.Random(f"{seed} absent")
        may_lack = self.mode == "sync" and self.policy == "shrink" and self.cluster.tells and self.num_clients > 1
        self._absent = absent.randrange(self.num_clients) if may_lack and absent.random() < 0.3 else None
        self._absent_s = absent.choice([0.0, 0.05, 0.3, 2.0])
        # Who has done its steps: others may leave without it, and with them what another process would ask for.
        self._leaving: set[int] = set()
        self._closing: set[int] = set()
        self._programs: dict[str, Program] = {}
        self._incarnations = dict.fromkeys(range(self.num_clients), 1)
        self._disturbances = Disturbances(
            self.cluster, self._programs, adds_server=choose.random() < 0.3, may_lose=self._may_lose,
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
        self.oracle.check_whole(number, parts)
        if self.mode == "sync":
            self.oracle.check_snapshot(number, parts)
        self.network.faults.count("snapshot")
        if self._seldom:
            self.network.faults.count("seldom snapshot")

    def _choose_seldom(self) -> tuple[dict[Any, tuple[int, int]], list[list[Any]]]:
        """Keys that are pushed in every n-th step only, from which on, or never; and the order of keys in a step,
        where one group is over before the next begins."""
        choose = random.Random(f"{self.seed} seldom")
        keys = list(KEYS)
        if self.mode != "sync" or choose.random() < 0.25:
            return {}, [keys]
        choose.shuffle(keys)
        found = {}
        for key in choose.sample(keys, choose.randrange(1, len(keys))):
            every = choose.choice([2, 2, 3, 4, 100])
            found[key] = (every, choose.randrange(every))
        often = [key for key in keys if key not in found]
        phases = choose.choice([[keys], [[*found], often], [often, [*found]], [[key] for key in keys]])
        if found:
            self.network.faults.count("seldom")
        return found, phases

    def _pushes(self, key: Any, step: int) -> int:
        """How often a key is pushed in so many steps."""
        every, first = self._seldom.get(key, (1, 0))
        return max(0, (step - 1 - first) // every + 1)

    def _overall(self, key: Any, step: int) -> int:
        """The most pushes of any key by the time when the program has pushed this one in a step; of those before the
        job went on from a snapshot, its number."""
        order = [key for phase in self._phases for key in phase]
        pushed = order.index(key) + 1
        return self._resumed + max(
            self._pushes(other, step - (i >= pushed)) - self._pushes(other, self._resumed)
            for i, other in enumerate(order)
        )

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
            self.network.run(self._programs, self.limit_s)
            self._calm_down()
            self.oracle.check_chains()
        except (Violation, Killed):
            raise
        except Exception as error:
            raise Violation(f"{type(error).__name__}: {error}") from error
        return Outcome(self.seed, self.mode, self.network.now_s, self.network.faults.fired)

    def _after_each_step(self, name: str) -> None:
        self.oracle.check_servers(name)
        if self.network.now_s >= self._disturbances.next_s:
            self._disturbances.step()
        if self._lost_after and self.oracle.num_done >= self._lost_after[0]:
            del self._lost_after[0]
            self._disturbances.disturb_client()
        if self.killed_after is not None and self.oracle.num_done >= self.killed_after:
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
        if self.policy == "fail" or rank in self.oracle.gone or self.mode == "async":
            return False
        if rank in (self._closing if self.policy == "wait" else self._leaving):
            return False
        # Else another process is about to take its place.
        return f"client {rank}.{self._incarnations[rank]}" in self._programs

    def _on_loss(self, rank: int) -> None:
        """A client's process is dead, or counts as dead soon; then another may be started before it knows."""
        if self.policy == "shrink":
            self.oracle.leave_out(rank)
            if self.network.random.random() < 0.7 or len(self.oracle.gone) == self.num_clients:
                self._come_back(rank)
        elif f"client {rank}.{self._incarnations[rank]}" not in self._programs or self.network.random.random() < 0.5:
            self._come_back(rank)

    def _die_early(self) -> None:
        """Client 0 ends, if nobody has got beyond the first values."""
        name = "client 0.1"
        if name in self._programs and self.oracle.num_done == 0 and self._may_lose(0):
            self.network.faults.count("kill client 0 early")
            self.network.kill(name, self._programs)
            self.cluster.tell_end(name)
            self._on_loss(0)

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
            if self.policy == "wait" and rank in self._closing:
                self.network.faults.count("ended well after all")  # nobody takes the place of such a process
            else:
                self._start_client(rank)

        self.network.start_later(self.network.now_s + pause_s, start)

    def _start_client(self, rank: int) -> None:
        incarnation = self._incarnations[rank]
        ps = self.cluster.client(rank, self.num_clients, incarnation)
        self._programs[f"client {rank}.{incarnation}"] = self._guarded(ps, rank, incarnation)

    def _guarded(self, ps: PsClient, rank: int, incarnation: int) -> Program:
        """The program of a process that may learn that it counts as dead."""
        try:
            yield from self._program(ps, rank, incarnation)
        except (ClientLostError, ProtocolError) as error:
            if self._incarnations[rank] > 1 and "is over" in str(error) and self._closing:
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

    # ---- what clients do

    def _program(self, ps: PsClient, rank: int, incarnation: int) -> Program:
        deadline = self.cluster.deadline
        yield [ps.register(incarnation, deadline())]
        yield [ps.open_sessions(incarnation, deadline())]
        first_keys, others = ([*KEYS][:1], [*KEYS][1:]) if self._one_by_one else ([*KEYS], [])
        ps.add_keys([(key, (KEYS[key],), "float32") for key in first_keys])
        if rank == 0 and incarnation == 1 and self._dies_early:
            self.network.at(self.network.now_s + self._early.uniform(0.0, 0.5), self._die_early)
            yield [self.network.pause(self._early.choice([0.0, 1.0]))]
        yield [ps.init(key, np.zeros(KEYS[key], "f4"), deadline()) for key in first_keys]
        rule: optim.Rule = optim.Test(lr=-1.0) if self._rule == "test" else optim.Adam(lr=0.1)
        yield [ps.enter(deadline())]
        if self._one_by_one:
            for key in others:
                ps.add_keys([(key, (KEYS[key],), "float32")])
                yield [ps.init(key, np.zeros(KEYS[key], "f4"), deadline())]
                yield [ps.enter(deadline())]
        yield [ps.set_rule(rule, deadline())]
        yield from self._meet(ps, rank, (0, 0))
        entered = ps.resumed_step + ps.entered_after
        self.oracle.check_resumed(rank, ps.resumed_step)
        first = 1 + ps.resumed_step + ps.position
        if rank in self.oracle.gone and incarnation == self._incarnations[rank] > 1:
            self.network.faults.count("return" if not ps.resumed_step else "return after resume")
            if self._seldom:
                self.network.faults.count("seldom return to others")
            self.oracle.enter(rank, entered, first - 1)
            self._meetings.skip(rank, entered)
            yield from self._read_all(ps, rank, first - 1, later=True)
        elif self.mode == "sync" and self.policy == "wait" and incarnation == self._incarnations[rank] > 1:
            self.oracle.check_position(rank, first - 1, waits=not (self._loose and self._seldom))
            if self._seldom:
                self.network.faults.count("seldom return")
        if self.cluster.config.resume and incarnation == 1 and first <= self._last_step[rank]:
            yield from self._read_all(ps, rank, first - 1)
        if self.mode == "async" and incarnation > 1:
            first = 1 + self.oracle.last_begun(rank)
        for step in range(1, first) if self._meets_again else ():
            yield from self._meet(ps, rank, (step, 0))
        on_way: dict[Any, Work] = {}
        for step in range(first, self._last_step[rank] + 1):
            self._meetings.skip(rank, first - 1)
            yield from self._exchange(ps, rank, step, on_way, entered if ps._has_entered else 0)
            ps.clock += self._counts
            if rank in self._slow:
                yield [self.network.pause(self.network.random.uniform(0.0, 2.0))]
            yield from self._meet(ps, rank, (step, 0))
        yield [*on_way.values()]
        if incarnation < self._incarnations[rank]:
            self.network.detach(f"client {rank}.{incarnation}")
            return  # another is about to take its place: if it left in good order now, that one would be alone
        self._leaving.add(rank)
        while self.mode == "async" and len(self._leaving) < self.num_clients:
            # What a slow one pushes meanwhile must be there, whichever server answers.
            yield [self.network.pause(self.network.random.uniform(0.0, 0.3))]
            yield from self._read_all(ps, rank, self._last_step[rank])
        if self._last_step[rank] < self.steps:
            self.network.faults.count("finish")
            self._meetings.finished.add(rank)
            yield [ps.finish(deadline())]
        yield from self._meet(ps, rank, (self.steps, 1))
        yield from self._read_all(ps, rank, self._last_step[rank], later=True)
        yield from self._meet(ps, rank, (self.steps, 2))
        self._closing.add(rank)
        ps._link.stop_heartbeats()
        try:  # as PsClient.close, which gives up soon: nobody tells a client without heartbeats that a server is gone
            yield [ps.leave(deadline(GOODBYE_S))]
        except KVError:
            pass

    def _meet(self, ps: PsClient, rank: int, where: Meeting) -> Program:
        """A barrier, if there is one there."""
        step, number = where
        if step and not number and not (self._meets and step % 2):
            return
        self._meetings.come(rank, where)
        yield [ps.barrier(self.cluster.deadline())]
        # Who was away may have missed some before this, as long as it has not pushed.
        if ps._furthest_step() > max(ps.position, ps.entered_after) or (
            not ps._has_entered and (self._meets_again or ps.position == 0)
        ):
            self._meetings.check_passed(rank, where)

    def _read_all(self, ps: PsClient, rank: int, step: int, **how: bool) -> Program:
        outs = {key: unfilled.copy() for key, unfilled in _UNFILLED.items()}
        told = self.oracle.told()
        yield [self._pull(ps, key, outs[key], by_rows=(i + step) % 2 == 0) for i, key in enumerate(KEYS)]
        for key in KEYS:
            self.oracle.check_read(rank, key, outs[key], step, told, **how)

    def _pull(self, ps: PsClient, key: Any, out: np.ndarray, *, by_rows: bool) -> Work:
        if by_rows:
            return ps.pull_rows(key, np.arange(out.size), out.reshape(-1, 1), self.cluster.deadline())
        return ps.pull(key, out, self.cluster.deadline())

    def _exchange(self, ps: PsClient, rank: int, step: int, on_way: dict[Any, Work], entered: int) -> Program:
        """A step with every key that is pushed in it; up to step ``entered`` nothing of that counts."""
        repeats = step <= max(entered, self.oracle.last_begun(rank))
        for phase in self._phases:
            keys = [key for key in phase if self._pushes(key, step) > self._pushes(key, step - 1)]
            if self._loose and all(key in self._seldom for key in phase):
                yield [on_way.pop(key) for key in keys if key in on_way]
                on_way |= {key: self._push_alone(ps, rank, step, key, entered) for key in keys}
            elif keys:
                yield from self._exchange_keys(ps, rank, step, keys, entered, repeats=repeats)

    def _push_alone(self, ps: PsClient, rank: int, step: int, key: Any, entered: int) -> Work:
        if counts := self._overall(key, step) > entered:
            self.oracle.begin(rank, key, step)
        work = ps.push(key, _PUSHED[rank, key].copy(), self.cluster.deadline())
        if counts:
            work.add_done_callback(self.oracle.note_done(rank, key, step))
        return work

    def _exchange_keys(
        self, ps: PsClient, rank: int, step: int, keys: list[Any], entered: int, *, repeats: bool
    ) -> Program:
        """Pushpull, or push and then pull; of the whole value, or of all its rows."""
        values = {key: _PUSHED[rank, key].copy() for key in keys}
        outs = {key: _UNFILLED[key].copy() for key in keys}
        works, to_pull, arriving = [], [], {}
        for key in keys:
            i = _NUMBERS[key]
            if counts := self._overall(key, step) > entered:
                self.oracle.begin(rank, key, step)
            fused = (i + step + rank * (self.mode == "async")) % 2 == 1
            deadline, value = self.cluster.deadline(), values[key]
            if (i + step // 2 + rank) % 3 == 0:  # other clients push all of it in the same round
                changed = arriving[key] = ArrivingRows(ps.rows_of(key)) if fused else None
                rows = Rows(np.arange(value.size), value.reshape(-1, 1))
                work = ps.push_rows(key, rows, deadline, priority=-i, changed=changed)
            elif fused:
                work = ps.pushpull(key, value, outs[key], deadline, priority=-i)
            else:
                work = ps.push(key, value, deadline, priority=-i)
            to_pull += [] if fused else [key]
            if counts:
                work.add_done_callback(self.oracle.note_done(rank, key, step))
            works.append(work)
        yield works
        for value in values.values():
            value[:] = np.nan  # what was pushed is ours again
        for key, changed in arriving.items():
            if changed is not None:
                outs[key][changed.rows().ids] = changed.rows().values[:, 0]
        told = self.oracle.told()
        yield [self._pull(ps, key, outs[key], by_rows=key in arriving) for key in to_pull]
        for key in keys:
            self.oracle.check_read(rank, key, outs[key], step, told if key in to_pull else {}, later=repeats)
