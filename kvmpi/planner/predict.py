"""What a job will do: its step, what of it is communication, its servers' load, and what holds it up."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np

from kvmpi.collectives.cost import Choice, costs
from kvmpi.config import client_bounds
from kvmpi.errors import ConfigError
from kvmpi.planner.models import Model
from kvmpi.planner.simulate import Course, Outcome, Piece, Simulation
from kvmpi.planner.spec import Cluster, Disturbance, Job

#: Flows and other events that one prediction may take, and the most turns of a client that are worth it.
_EVENTS = 30_000
_MOST_TURNS, _LEAST_PIECES, _MOST_PIECES = 40, 16, 64
#: From so many clients on, so many stand for all.
_MANY, _REPRESENTATIVES = 512, 256
#: In a lab: processor time for a byte that is summed over a client, or broadcast in it, of each worker.
_LAB_SUM_S, _LAB_CAST_S = 0.8e-9, 0.5e-9
_UNDISTURBED = Disturbance()
#: Of a step: less than that of computing is no reason to leave communication alone.
_MOSTLY = 0.8


@dataclass(frozen=True)
class Prediction:
    """Of one job; times in seconds, of one step of one worker on average.

    Attributes:
        exposed_s: what a step takes longer than a worker's computation.
        epoch_s: of ``steps`` steps of every worker, with failures.
        staleness: how many pushes of others came between two of one client, and how often (asynchronous).
        nic_busy, processor_busy: share of the time that the servers' links and processors work.
        pushed_bytes: by one client to the servers in a step; as much comes back.
        link_bytes: out of the host of a master that sends most, in a step.
        bottleneck: what takes longest; ``reason`` says why.
        sharded_step_s: of the same job where each worker updates its share; None where it cannot.
    """

    job: Job
    step_s: float
    compute_s: float
    exposed_s: float
    epoch_s: float
    staleness: dict[int, int]
    nic_busy: float
    processor_busy: float
    pushed_bytes: float
    link_bytes: float
    bottleneck: str
    reason: str
    sharded_step_s: float | None = None

    @property
    def mean_staleness(self) -> float | None:
        """None where nobody is asynchronous."""
        pushes = sum(self.staleness.values())
        return sum(value * count for value, count in self.staleness.items()) / pushes if pushes else None


@dataclass(frozen=True)
class _Places:
    """Who is where: of each client the host of its master, and how many workers it has on each of its hosts."""

    masters: tuple[int, ...]
    layouts: tuple[tuple[int, ...], ...]
    per_host: int

    @property
    def largest(self) -> tuple[int, ...]:
        """The layout that takes longest."""
        return max(self.layouts, key=lambda layout: (len(layout), sum(layout)))


def predict(
    model: Model, cluster: Cluster, job: Job, disturbance: Disturbance = _UNDISTURBED, *, steps: int = 100,
    seed: int = 0, events: int = _EVENTS,
) -> Prediction:  # fmt: skip
    """Simulate a few turns of ``job``, and draw conclusions.

    Args:
        steps: of an epoch, of each worker.
        seed: of what is drawn: equal arguments give equal predictions.
        events: about so many are simulated.
    Raises:
        ConfigError: the job cannot run there.
    """
    if not 1 <= steps < 1e18:
        raise ConfigError(f"an epoch of {steps} steps: expected 1 or more, and fewer than 1e18")
    if disturbance.slow_workers > job.workers:
        raise ConfigError(f"{disturbance.slow_workers} slow workers: there are {job.workers}")
    if seed < 0:
        raise ConfigError(f"seed {seed}: expected zero or more")
    places = _place(job, cluster)
    slowdown = max(1.0, places.per_host / cluster.cores) if cluster.cores else 1.0
    compute_s = model.compute_s * slowdown
    interval = job.interval if job.of.averages else 1
    share = _share(places.masters)
    turns = _Turns(job, disturbance, compute_s, seed, share)
    local_s = 0.0
    if job.of.averages and max(map(sum, places.layouts)) > 1:
        local_s = _local_step_s(model, cluster, job, places, slowdown) - compute_s
    course = _course(model, cluster, job, places, lambda c, t: turns.compute_s(c, t, interval) + interval * local_s)
    limits = _limits(course, compute_s, local_s, turns, interval)
    course = _within(_shrunk(course, share), events, disturbance.jitter > 0 or not job.of.synchronous)
    outcome = Simulation(course).run()
    step_s = outcome.turn_s / interval
    if cluster.lab_cores:
        limits["the lab's cores"] = _lab_s(model, cluster, job, places) / cluster.lab_cores
        step_s = max(step_s, limits["the lab's cores"] + compute_s)
    exposed_s = step_s - compute_s
    if exposed_s < 1e-9 * step_s:
        exposed_s = 0.0  # a difference of sums in another order
    sharded_step_s = None
    if job.may_shard and not job.sharded:
        shares = replace(job, sharded=True)
        sharded_step_s = predict(model, cluster, shares, disturbance, steps=steps, seed=seed, events=events).step_s
    failing = _failing(job, disturbance)
    staleness = _of_all(outcome.staleness, len(places.masters), share)
    bottleneck, reason = _explain(limits, step_s, job, model)
    return Prediction(
        job=job, step_s=step_s, compute_s=compute_s, exposed_s=exposed_s,
        epoch_s=steps * step_s * failing, staleness=staleness, nic_busy=min(1.0, outcome.nic_busy),
        processor_busy=min(1.0, outcome.processor_busy),
        pushed_bytes=model.nbytes / interval if job.servers else 0.0,
        link_bytes=_link_bytes(course, cluster, job, places, model, interval), bottleneck=bottleneck, reason=reason,
        sharded_step_s=sharded_step_s,
    )  # fmt: skip


def _place(job: Job, cluster: Cluster) -> _Places:
    """Workers fill the hosts in order, as ``kvmpi run --hosts`` has it."""
    per_host = -(-job.workers // cluster.hosts)
    masters, layouts = [], []
    for first, end in client_bounds(job.workers, job.num_clients):
        masters.append(first // per_host)
        hosts = range(first // per_host, (end - 1) // per_host + 1)
        layouts.append(tuple(min(end, (h + 1) * per_host) - max(first, h * per_host) for h in hosts))
    return _Places(tuple(masters), tuple(layouts), per_host)


def collective(op: str, nbytes: float, layout: tuple[int, ...], cluster: Cluster) -> Choice:
    """How the workers of a client are expected to do a collective; the algorithm ``auto`` takes."""
    figures = replace(cluster.figures, link_bytes_per_s=cluster.link_bytes_per_s)
    # The library's own allreduce is for small vectors only.
    found = costs(op, max(1, round(nbytes)), layout, figures, shares=True, has_library=nbytes < 1 << 20)
    return min(found.values(), key=lambda choice: choice.seconds)


def _parts(op: str, nbytes: float, layout: tuple[int, ...], cluster: Cluster) -> tuple[float, float]:
    """Seconds that no link can shorten, and bytes over the link of a host."""
    if sum(layout) == 1:
        return 0.0, 0.0
    seconds = collective(op, nbytes, layout, cluster).seconds
    if len(layout) == 1:
        return seconds, 0.0
    hosts = len(layout)
    link_bytes = nbytes * (1.0 if op == "broadcast" else (hosts - 1) / hosts * (2 if op == "allreduce" else 1))
    return max(0.0, seconds - link_bytes / cluster.link_bytes_per_s), link_bytes


def _sum_parts(job: Job, nbytes: float, layout: tuple[int, ...], cluster: Cluster) -> tuple[float, float]:
    """As ``_parts``, of a sum that comes back to all: as it is, or updated in shares, for which two exchanges take the
    place of one. That the second may be hidden behind the next forward pass counts for nothing: where it was tried, the
    copies that it takes cost as much."""
    if not job.sharded:
        return _parts("allreduce", nbytes, layout, cluster)
    scattered, gathered = (_parts(op, nbytes, layout, cluster) for op in ("reduce_scatter", "allgather"))
    return scattered[0] + gathered[0], scattered[1] + gathered[1]


def _course(
    model: Model, cluster: Cluster, job: Job, places: _Places, compute_s: Callable[[int, int], float],
    *, local: bool = False,
) -> Course:  # fmt: skip
    """One exchange a turn; ``local``: of gradients in one client, without servers."""
    layout = places.largest
    # Chunks of a key go to all servers at once; sums are made of whole buckets.
    most = job.bucket_bytes if local or not job.servers else job.chunk_bytes * job.servers
    most = min(most, model.nbytes // _LEAST_PIECES + 1)
    bucket_bytes = min(job.bucket_bytes, model.nbytes)
    sums = _sum_parts(job, bucket_bytes, layout, cluster)
    casts = _parts("broadcast", bucket_bytes, layout, cluster)
    at_end = (job.of.averages and not local) or not job.overlap
    pieces = []
    servers = 0 if local else job.servers
    figures, window_bytes = cluster.server_figures, job.window_bytes * max(1, job.servers)
    if cluster.shared:
        figures = replace(figures, process_bytes_per_s=figures.shared_bytes_per_s)
        window_bytes *= 4  # KVMPI_SHARED_BYTES
    for nbytes, ready, keys in _cut(model, max(most, model.nbytes // _MOST_PIECES + 1), at_end=at_end):
        share = nbytes / bucket_bytes
        sum_s, sum_bytes = (share * part for part in sums)
        cast_s, cast_bytes = (share * part for part in casts) if servers else (0.0, 0.0)
        serve_s = (keys * figures.message_s + nbytes / figures.process_bytes_per_s) / servers if servers else 0.0
        pieces.append(Piece(nbytes, ready, sum_s, sum_bytes, cast_s, cast_bytes, serve_s))
    piece_bytes = max(piece.nbytes for piece in pieces)
    server_hosts = min(cluster.server_hosts or cluster.hosts, max(1, servers))
    servers_rate = server_hosts * cluster.link_bytes_per_s
    local_bytes = 0.0
    if servers and not cluster.server_hosts:
        # Servers on workers' hosts: of what a host's workers exchange one part stays there; the rest shares the link.
        local_bytes = 1 / cluster.hosts
        own = len(places.masters) / cluster.hosts
        others = len(places.masters) / server_hosts
        servers_rate *= others / (others + own)
    if cluster.lab_cores:  # one machine handles every byte at both ends, and there are two directions
        servers_rate = min(servers_rate, cluster.lab_cores * figures.process_bytes_per_s / 4)
    # A message is whole before it is encrypted, sent, decrypted; then only it may be answered.
    handled_s = 2 * min(job.chunk_bytes, piece_bytes / max(1, servers)) / figures.process_bytes_per_s
    return Course(
        hosts=(0,) if local else places.masters, pieces=pieces, compute_s=compute_s,
        synchronous=job.of.synchronous or local, servers=bool(servers), host_rate=cluster.link_bytes_per_s,
        servers_rate=servers_rate, flow_rate=figures.process_bytes_per_s, latency_s=cluster.latency_s + handled_s,
        window=max(2, int(window_bytes / piece_bytes)), local_bytes=local_bytes,
    )  # fmt: skip


def _cut(model: Model, most_bytes: float, *, at_end: bool) -> list[tuple[float, float, int]]:
    """Gradients in the order in which they are there, in pieces: bytes, when (a share of the step), keys."""
    total_s = model.compute_s or 1.0
    found: list[tuple[float, float, int]] = []
    held, keys, when = 0.0, 0, 1.0
    for nbytes, made_s in model.gradients():
        when = 1.0 if at_end or not model.compute_s else min(1.0, made_s / total_s)
        left, keys = float(nbytes), keys + 1
        while held + left >= most_bytes:
            taken = most_bytes - held
            found.append((most_bytes, when, keys))
            held, left, keys = 0.0, left - taken, 0  # what a key costs counts once, with its first piece
        held += left
    if held >= 1:
        found.append((held, when, keys))
    return found


def _share(masters: Sequence[int]) -> int:
    """How many clients one of the simulated ones stands for."""
    return 1 if len(masters) <= _MANY else len(masters) // _REPRESENTATIVES


def _shrunk(course: Course, share: int) -> Course:
    """One client of ``share``, on hosts as full as before, and servers that are as much slower.

    Flows are fluid: a link that twice as many clients share is one of half the rate. So are those of hosts that are
    too full to be left as they are.
    """
    if share == 1:
        return course
    clients = len(course.hosts) // share
    scale = len(course.hosts) / clients
    pieces = [replace(piece, serve_s=piece.serve_s * scale) for piece in course.pieces]
    course = replace(course, pieces=pieces, servers_rate=course.servers_rate / scale)
    fullness, most = course.hosts.count(course.hosts[0]), clients if len(set(course.hosts)) == 1 else clients // 2
    if fullness <= most:
        return replace(course, hosts=course.hosts[:clients])
    return replace(course, hosts=[i // most for i in range(clients)], host_rate=course.host_rate * most / fullness)


def _lab_s(model: Model, cluster: Cluster, job: Job, places: _Places) -> float:
    """Processor time of a step of all workers and servers, which one machine has to spend."""
    interval = job.interval if job.of.averages else 1
    moved = 4 * len(places.masters) * model.nbytes / cluster.server_figures.process_bytes_per_s if job.servers else 0.0
    if max(map(sum, places.layouts)) == 1:
        return moved / interval
    sums = (1 / interval + 1 if job.of.averages else 1) * _LAB_SUM_S
    casts = _LAB_CAST_S / interval if job.servers else 0.0
    return moved / interval + job.workers * model.nbytes * (sums + casts)


def _of_all(staleness: dict[int, int], clients: int, share: int) -> dict[int, int]:
    """As all clients would see it, where ``staleness`` is what those that stand for them see."""
    scale = clients / (clients // share)
    return {round((value + 1) * scale) - 1: count for value, count in staleness.items()}


def _within(course: Course, events: int, varies: bool) -> Course:
    """The course with as many pieces and turns as ``events`` allow."""
    clients, pieces = len(course.hosts), list(course.pieces)
    if not varies and course.synchronous:
        wanted, skipped = 3, 1
    else:
        wanted, skipped = _MOST_TURNS, _MOST_TURNS // 4
    least = 3 if course.synchronous else 4
    while len(pieces) > 2 and 6 * clients * len(pieces) * least > events:
        pieces = _halved(pieces)
    turns = max(least, min(wanted, events // (6 * clients * len(pieces))))
    window = max(2, course.window * len(pieces) // len(course.pieces))
    return replace(course, pieces=pieces, window=window, turns=turns, skipped=min(skipped, max(1, turns // 3)))


def _halved(pieces: Sequence[Piece]) -> list[Piece]:
    """Two pieces as one."""
    pairs = [pieces[i : i + 2] for i in range(0, len(pieces), 2)]
    return [
        Piece(
            ready=pair[-1].ready,
            **{name: sum(getattr(piece, name) for piece in pair)
               for name in ("nbytes", "sum_s", "sum_bytes", "cast_s", "cast_bytes", "serve_s")},
        )
        for pair in pairs
    ]  # fmt: skip


def _local_step_s(model: Model, cluster: Cluster, job: Job, places: _Places, slowdown: float) -> float:
    """A step of a client alone, which sums gradients over its workers."""
    course = _course(model, cluster, job, places, lambda c, t: model.compute_s * slowdown, local=True)
    return Simulation(replace(course, turns=2, skipped=1)).run().turn_s


class _Turns:
    """How long clients compute; each of those that are simulated stands for ``share`` clients."""

    def __init__(self, job: Job, disturbance: Disturbance, compute_s: float, seed: int, share: int = 1) -> None:
        self._disturbance, self._compute_s, self._seed, self._share = disturbance, compute_s, seed, share
        self._bounds = client_bounds(job.workers, job.num_clients)
        self._synchronous, self._workers = job.of.synchronous, job.workers
        self._first_slow = job.workers - min(job.workers, disturbance.slow_workers)

    def compute_s(self, client: int, turn: int, steps: int) -> float:
        """Of ``steps`` steps, each as long as the slowest worker takes that the others wait for."""
        workers, slow = self._waited_for(client)
        factor = self._disturbance.slow_factor
        if not self._disturbance.jitter:
            return steps * self._compute_s * (factor if slow else 1.0)
        draws = np.random.default_rng([self._seed, client, turn]).random((steps, 2))
        total = 0.0
        for usual, late in draws.tolist():
            longest = self._longest(usual, workers - slow) if workers > slow else 0.0
            total += max(longest, factor * self._longest(late, slow) if slow else 0.0)
        return self._compute_s * total

    def _waited_for(self, client: int) -> tuple[int, int]:
        """How many workers a simulated client has to wait for, and how many of them are slow."""
        first, last = client * self._share, min((client + 1) * self._share, len(self._bounds)) - 1
        if client == len(self._bounds) // self._share - 1:
            last = len(self._bounds) - 1
        start, end = self._bounds[first][0], self._bounds[last][1]
        slow = max(0, end - max(start, self._first_slow))
        if self._share == 1 or self._synchronous:  # rounds wait for all of them
            return end - start, slow
        own = self._bounds[first][1] - start
        return own, min(own, -(-slow // self._share)) if 2 * slow >= end - start else 0

    def _longest(self, chance: float, workers: int) -> float:
        """The largest of so many draws with mean 1, from one: the largest is below x with the probability F(x)^n."""
        sigma = self._disturbance.jitter
        quantile = min(max(chance ** (1 / workers), 1e-12), 1 - 1e-12)
        return math.exp(sigma * NormalDist().inv_cdf(quantile) - sigma * sigma / 2)

    def slowest_s(self, steps: int) -> float:
        """Of the turn of the slowest client, for which rounds wait; of the mean client where nobody waits."""
        clients = range(len(self._bounds) // self._share)
        if not self._disturbance.jitter:
            slow = steps * self._compute_s * (self._disturbance.slow_factor if self._disturbance.slow_workers else 1.0)
            return slow if self._synchronous else steps * self._compute_s
        found = [self.compute_s(client, 0, steps) for client in clients]
        return max(found) if self._synchronous else math.fsum(found) / len(found)


def _failing(job: Job, disturbance: Disturbance) -> float:
    """How much longer an epoch takes because workers fail now and then.

    A client is away for ``restart_s`` after each failure of one of its workers. Where all wait for it, the job is;
    where nobody waits, its share of the work is missing.
    """
    together = job.workers if job.of.synchronous else -(-job.workers // job.num_clients)
    return 1 + together * disturbance.restart_s / disturbance.mtbf_s


def _limits(course: Course, compute_s: float, local_s: float, turns: _Turns, interval: int) -> dict[str, float]:
    """Seconds of a step that each resource needs at least, by itself."""
    clients = len(course.hosts)
    nbytes = sum(piece.nbytes for piece in course.pieces) * (1 - course.local_bytes)
    on_host: dict[int, int] = {}
    for host in course.hosts:
        on_host[host] = on_host.get(host, 0) + 1
    most = max(on_host.values())
    sums = sum(piece.sum_bytes for piece in course.pieces) / course.host_rate
    casts = sum(piece.cast_bytes for piece in course.pieces) / course.host_rate
    # Sums and broadcasts are lanes of their own, which go on beside each other; what they share is the host's link.
    lanes = (sums + sum(piece.sum_s for piece in course.pieces), casts + sum(piece.cast_s for piece in course.pieces))
    return {
        "compute": compute_s,
        "stragglers": max(0.0, turns.slowest_s(interval) / interval - compute_s),
        "servers' links": clients * nbytes / course.servers_rate / interval if course.servers else 0.0,
        "servers' processors": clients * sum(piece.serve_s for piece in course.pieces) / interval,
        "links of workers' hosts": most * nbytes / course.host_rate / interval if course.servers else 0.0,
        "masters": nbytes / course.flow_rate / interval if course.servers else 0.0,
        "sums inside clients": local_s + max(*lanes, sums + casts) / interval,
        "latency": 2 * course.latency_s * len(course.pieces) / course.window / interval if course.servers else 0.0,
    }


def _explain(limits: dict[str, float], step_s: float, job: Job, model: Model) -> tuple[str, str]:
    """What takes longest, and why."""
    name = max(limits, key=lambda key: limits[key])
    seconds = limits[name]
    of = f"{seconds:.3g} s of a step of {step_s:.3g} s"
    clients, size = job.num_clients, f"{model.nbytes / 1e6:.3g} MB"
    often = f" every {job.interval} steps" if job.of.averages else ""
    texts = {
        "compute": f"compute takes {of}: communication is not what to look at"
        if seconds >= _MOSTLY * step_s
        else f"compute takes most, {of}; the rest is communication that it does not hide",
        "stragglers": f"stragglers are the bottleneck: waiting for the slowest worker takes {of}",
        "servers' links": f"servers' links are the bottleneck: {clients} clients x {size}{often} take {of}",
        "servers' processors": f"servers' processors are the bottleneck: {clients} clients x {size}{often} take {of}",
        "links of workers' hosts": f"links of workers' hosts are the bottleneck: {size} a client{often} take {of}",
        "masters": f"masters are the bottleneck: one process sends {size}{often} in {of}",
        "sums inside clients": f"sums inside clients are the bottleneck: {-(-job.workers // clients)} workers, {of}",
        "latency": f"latency is the bottleneck: until servers have answered, a window at a time, takes {of}",
        "the lab's cores": f"the cores of the lab are the bottleneck: {of}",
    }
    return name, texts[name]


def _link_bytes(course: Course, cluster: Cluster, job: Job, places: _Places, model: Model, interval: int) -> float:
    """Out of the host of the master that sends most, in a step."""
    on_host: dict[int, int] = {}
    for host in places.masters:
        on_host[host] = on_host.get(host, 0) + 1
    out = sum(piece.sum_bytes + piece.cast_bytes for piece in course.pieces) / interval
    if course.servers:
        out += max(on_host.values()) * model.nbytes * (1 - course.local_bytes) / interval
    if job.of.averages:
        out += _parts("allreduce", model.nbytes, places.largest, cluster)[1]
    return out


__all__ = ["Outcome", "Prediction", "collective", "predict"]
