"""What goes wrong in a simulated job: processes are killed, stopped and slowed down, connections cut."""

from __future__ import annotations

import math
from collections.abc import Callable

from simulation.cluster import HEARTBEAT_S, Cluster
from simulation.network import Program


class Disturbances:
    """Harm to one process after the other, never more than the job has to survive.

    Args:
        programs: those of the clients that run, by the names of their processes.
        may_lose: whether the job has to survive the end of this client's process.
        has_begun: whether clients push already.
        on_loss: called when a client's process has been killed, or stopped until it counts as lost.
    Attributes:
        next_s: when ``step`` is to be called again.
    """

    def __init__(
        self, cluster: Cluster, programs: dict[str, Program], *, adds_server: bool, may_lose: Callable[[int], bool],
        on_loss: Callable[[int], None], has_begun: Callable[[], bool],
    ) -> None:  # fmt: skip
        self._cluster, self._network, self._programs = cluster, cluster.network, programs
        self._may_lose, self._on_loss = may_lose, on_loss
        self._has_begun = has_begun
        # Where nobody waits for rounds, a head that was replaced might answer with what was true once. That is rare
        # enough to be looked for: with all well but for this, and clients that read and push.
        self._first_unnoticed = (
            cluster.config.replicas > 0 and cluster.mode != "sync" and cluster.network.random.random() < 0.5
        )
        self._replicas, self._adds_server = cluster.config.replicas, adds_server
        self.next_s = 1.0
        # Servers that have been harmed since all was well.
        self._touched: set[tuple[int, int]] = set()

    def step(self) -> None:
        """Do harm: it is time for it, unless the network has healed."""
        now_s = self._network.now_s
        if now_s >= self._network.faults.heal_s:
            self.next_s = math.inf
            return
        self.next_s = now_s + self._network.random.uniform(0.2, 1.5)
        self._disturb()

    def _disturb(self) -> None:
        chains, choose = self._cluster.scheduler._chains, self._network.random
        if self._first_unnoticed:
            if self._has_begun():
                self._first_unnoticed = False
                victim = choose.choice(list(self._cluster.processes.values()))
                self._touched.add((victim.rank, victim.incarnation))
                self._lose_unnoticed(f"server {victim.rank}")
            return
        if choose.random() < 0.25 and self.disturb_client():
            return
        if choose.random() < 0.1:
            self._cluster.kill_scheduler()
            return
        # Most of all where rounds are open; but also, where it takes so long, before anybody has begun.
        begun = self._has_begun() or self._network.now_s > 3.0
        if self._adds_server and begun and chains is not None and chains.settled:
            self._adds_server = False
            self._network.faults.count("add")
            self._cluster.start_server(self._cluster.config.num_servers)
            # What it is handed are open rounds, if they wait for somebody.
            self._slow_down(self._name_of(choose.randrange(self._cluster.config.num_clients)), 3.0, 0.4)
            return
        if chains is None or not self._replicas:
            self._stop_something()
            return
        if self.all_is_well():
            self._touched.clear()
        alive = list(self._cluster.processes.values())
        victims = [p for p in alive if (p.rank, p.incarnation) in self._touched]
        if len(self._touched) < self._replicas:
            victims = alive
        if not victims:
            self._stop_something()
            return
        victim = choose.choice(victims)
        self._touched.add((victim.rank, victim.incarnation))
        how = choose.choice(["kill", "kill", "cut", "cut one way", "stop", "unnoticed"])
        if how == "kill":
            self._cluster.kill_server(victim.rank)
        elif how == "stop":
            self._stop(victim.name, choose.choice([0.4, 3.0]))
        elif how == "unnoticed":
            self._lose_unnoticed(f"server {victim.rank}")
        else:
            self._cut_off(f"server {victim.rank}", one_way=how == "cut one way")

    def disturb_client(self) -> bool:
        """End a client's process, or stop it until it counts as lost; whether the job has to survive that."""
        choose = self._network.random
        rank = choose.randrange(self._cluster.config.num_clients)
        name = self._name_of(rank)
        if name not in self._programs or not self._may_lose(rank):
            return False
        if choose.random() < 0.3:
            self._stop(name, 3.0)
            self._network.faults.count("stop client")
            self._on_loss(rank)
            return True
        self._network.faults.count("kill client")
        self._network.kill(name, self._programs)
        self._cluster.tell_end(name)
        self._on_loss(rank)
        return True

    def _name_of(self, rank: int) -> str:
        """The last process of a client."""
        names = [name for name in self._programs if name.startswith(f"client {rank}.")]
        return max(names, key=lambda name: int(name.rpartition(".")[2]), default="")

    def all_is_well(self) -> bool:
        """Whether every part is held as often as it should be, by servers that are really there."""
        scheduler, processes = self._cluster.scheduler, self._cluster.processes
        chains = scheduler._chains
        assert chains is not None
        if len(processes) < self._cluster.config.num_servers or set(processes) != chains.alive:
            return False
        for chain in chains.chains:
            if len(chain.members) != self._replicas + 1 or chain.joiner >= 0 or chain.draining:
                return False
            for rank in chain.members:
                known = scheduler.members[("server", -1, rank)]
                if rank not in processes or processes[rank].incarnation != known.incarnation:
                    return False
                if self._network.now_s - known.last_seen_s > 2.5 * HEARTBEAT_S:
                    return False  # it may be taken for lost yet
        return not self._network.cut and not any(
            until > self._network.now_s for until in self._network.stopped.values()
        )

    def _stop_something(self) -> None:
        """A pause that is too short to be taken for a loss, or a process that is slow for a while."""
        choose = self._network.random
        clients = [self._name_of(rank) for rank in range(self._cluster.config.num_clients)]
        servers = [process.name for process in self._cluster.processes.values()]
        name = choose.choice(sorted([name for name in clients if name in self._programs] + servers))
        if choose.random() < 0.3:
            self._slow_down(name, choose.uniform(0.5, 3.0), choose.choice([0.05, 0.4]))
        elif self._network.now_s > self._network.stopped.get(name, -1.0) + 1.0:
            self._stop(name, choose.uniform(0.1, 0.4))

    def _slow_down(self, name: str, for_s: float, delay_s: float) -> None:
        self._network.slow[name] = (self._network.now_s + for_s, delay_s)
        self._network.faults.count("slow")

    def _stop(self, name: str, seconds: float) -> None:
        self._network.stopped[name] = self._network.now_s + seconds
        self._network.faults.count("stopped")

    def _cut_off(self, name: str, *, one_way: bool) -> None:
        """Nothing passes between a server and some others for a while, or only in one direction."""
        choose = self._network.random
        others = ["scheduler", *(f"server {rank}" for rank in self._cluster.processes)]
        others += [f"client {rank}" for rank in range(self._cluster.config.num_clients)]
        chosen = [other for other in others if other != name and choose.random() < 0.6]
        pairs = {(name, other) for other in chosen}
        if not one_way:
            pairs |= {(other, name) for other in chosen}
        self._network.cut |= pairs
        self._network.faults.count("partition")
        until_s = self._network.now_s + choose.uniform(0.2, 3.0)
        self._network.at(until_s, lambda: self._network.cut.difference_update(pairs))

    def _lose_unnoticed(self, name: str) -> None:
        """A server is taken for lost, and neither it nor some of the clients hear of that for a while."""
        choose = self._network.random
        clients = [f"client {rank}" for rank in range(self._cluster.config.num_clients)]
        deaf = [client for client in clients if choose.random() < 0.5]
        pairs = {(name, "scheduler"), *(("scheduler", other) for other in (name, *deaf))}
        self._network.cut |= pairs
        self._network.faults.count("unnoticed")
        until_s = self._network.now_s + choose.uniform(3.0, 6.0)
        self._network.at(until_s, lambda: self._network.cut.difference_update(pairs))
