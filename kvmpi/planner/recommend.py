"""Which layout and algorithm suit a model and a cluster: a small grid of them, predicted one by one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvmpi.planner.predict import Prediction
from kvmpi.planner.spec import ALGORITHMS, Job

#: Steps between two exchanges of weights that are tried.
INTERVALS = (16, 64, 256)
_NEAR = 1.1  # of the fastest: what is lost is less than what a looser algorithm may cost in accuracy


@dataclass(frozen=True)
class Recommendation:
    """Predictions, the fastest first; ``best`` is the strictest algorithm that is about as fast as any."""

    sorted: tuple[Prediction, ...]
    best: Prediction
    reason: str


def candidates(
    workers: int, hosts: int, *, clients: int | None = None, servers: int | None = None,
    algorithms: Iterable[str] = ALGORITHMS, interval: int | None = None, overlap: bool = False,
) -> list[Job]:  # fmt: skip
    """The jobs that are tried; what is given stays as it is."""
    numbers = [clients] if clients is not None else _numbers(workers, hosts)
    of_servers = [servers] if servers is not None else [0, *_powers(max(1, min(hosts, 32)))]
    found = []
    for name, num_clients, num_servers in itertools.product(algorithms, numbers, of_servers):
        of = ALGORITHMS[name]
        if not of.grouped and num_clients != numbers[0]:
            continue  # every worker is a client anyway
        if of.grouped and num_clients == workers > 1 and clients is None:
            continue  # this is the dist algorithm
        if num_servers == 0 and (name != "mpi-SGD" or num_clients > 1):
            continue
        if name == "mpi-SGD" and num_clients == 1 and num_servers and servers is None:
            continue  # what servers are not needed for
        if of.grouped and not of.synchronous and num_clients == 1 and clients is None:
            continue  # one client has nobody to be asynchronous to
        for steps in ([interval] if interval is not None else INTERVALS) if of.averages else [1]:
            group = num_clients if of.grouped else 1
            found.append(Job(name, workers, group, num_servers, steps, overlap))
    return found


def recommend(jobs: Iterable[Job], predict: Callable[[Job], Prediction]) -> Recommendation:
    """Predict all of ``jobs``, of which there is at least one, and choose.

    Fewer servers win where more do not help. Synchronous gradients train as one process would; asynchronous ones are
    stale, and averages are of weights that have parted for ``interval`` steps: so the strictest wins among the fastest.
    """
    found = sorted(map(predict, jobs), key=lambda p: (p.epoch_s, p.job.servers, _looseness(p)))
    fastest = found[0]
    near = [p for p in found if p.epoch_s <= _NEAR * fastest.epoch_s]
    best = min(near, key=lambda p: (*_looseness(p), p.job.servers, p.epoch_s))
    reason = best.reason
    strict = next((p for p in found if _looseness(p)[0] == 0), None)
    if _looseness(best)[0] and strict is not None:
        times = strict.epoch_s / best.epoch_s
        reason = f"{times:.1f} times as fast as {describe(strict.job)}, where {strict.reason}"
    if _looseness(fastest) > _looseness(best):
        reason += f"; {describe(fastest.job)} is looser and {best.epoch_s / fastest.epoch_s:.2f} times as fast"
    return Recommendation(tuple(found), best, reason)


def describe(job: Job) -> str:
    """``mpi-ESGD -n 12 -c 2 -s 2, interval 64``."""
    interval = f", interval {job.interval}" if job.of.averages else ""
    return f"{job.algorithm} -n {job.workers} -c {job.num_clients} -s {job.servers}{interval}"


def _looseness(of: Prediction) -> tuple[int, float]:
    """How far an algorithm is from what one process would compute."""
    if of.job.of.averages:
        return 2, of.job.interval
    return (0, 0) if of.job.of.synchronous else (1, of.mean_staleness or 0)


def _numbers(workers: int, hosts: int) -> list[int]:
    """Of clients: powers of two, and one for each host."""
    return sorted({number for number in [*_powers(min(workers, 64)), hosts] if number <= workers})


def _powers(most: int) -> list[int]:
    return [1 << i for i in range(most.bit_length())]
