"""A worker of a job in a lab: compute that only sleeps, gradients that are real, and what a step of it takes.

    kvmpi run ... lab_worker.py FOLDER

FOLDER has ``scenario.json`` (see ``lab_jobs.Scenario``). Every worker writes ``worker-RANK.json`` into it.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import kvmpi
from kvmpi.planner.spec import ALGORITHMS

_RATE = 2.0**-10  # a learning rate with which small whole numbers add up exactly


class _Gradients:
    """Gradients go to the servers after every batch, and new weights come back."""

    def __init__(self, kv: kvmpi.KVStore, counts: list[int]) -> None:
        self._kv, self._keys = kv, list(range(len(counts)))
        self._values = [np.full(count, kv.rank + 1 + key % 7, np.float32) for key, count in enumerate(counts)]
        self.weights = [np.zeros(count, np.float32) for count in counts]
        kv.init(self._keys, self.weights)
        kv.set_optimizer(kvmpi.optim.SGD(lr=_RATE))
        self._steps = 0

    def step(self) -> None:
        self._kv.pushpull(self._keys, self._values, self.weights)
        self._steps += 1

    def wrong(self) -> int:
        """Keys whose weights are not what all gradients of all workers make of them; collective."""
        self._kv.wait_all()
        self._kv.barrier()
        self._kv.pull(self._keys, self.weights)
        workers = self._kv.num_workers
        sums = [self._steps * (workers * (workers + 1) // 2 + workers * (key % 7)) for key in self._keys]
        pairs = zip(sums, self.weights, strict=True)
        return sum(not bool((found[:: max(1, found.size // 64)] == -_RATE * total).all()) for total, found in pairs)


class _Sums:
    """Gradients are summed over one client and nothing else: ``mpi-SGD`` of a job without servers."""

    def __init__(self, kv: kvmpi.KVStore, counts: list[int]) -> None:
        self._kv, self._keys = kv, list(range(len(counts)))
        self._values = [np.full(count, kv.rank + 1 + key % 7, np.float32) for key, count in enumerate(counts)]
        self._sums = [np.zeros(count, np.float32) for count in counts]
        kv.init(self._keys, self._sums)

    def step(self) -> None:
        self._kv.pushpull(self._keys, self._values, self._sums)

    def wrong(self) -> int:
        """Keys whose last sum is wrong."""
        workers = self._kv.num_workers
        sums = [workers * (workers + 1) // 2 + workers * (key % 7) for key in self._keys]
        return sum(not bool((found == total).all()) for total, found in zip(sums, self._sums, strict=True))


class _Weights:
    """Clients sum gradients among themselves; every ``interval`` batches their weights meet a center on the servers."""

    def __init__(self, kv: kvmpi.KVStore, counts: list[int], interval: int, outer: bool) -> None:
        self._kv, self._keys, self._interval, self._outer = kv, list(range(len(counts))), interval, outer
        self._alpha = 0.5 / kv.num_clients
        # What is summed inside a client moves no weights here, so that what is conserved can be checked.
        self._values = [np.zeros(count, np.float32) for count in counts]
        self.weights = [np.full(count, kv.client_rank + 1, np.float32) for count in counts]
        self._met = [np.zeros(count, np.float32) for count in counts]
        kv.init(self._keys, self._met)
        rule = kvmpi.optim.Outer(lr=1.0, momentum=0.0, nesterov=False) if outer else kvmpi.optim.Elastic(self._alpha)
        kv.set_optimizer(rule)
        self._inside = kv.client if kv.mpi_size > 1 else None
        if self._inside is not None:
            self._inside.init(self._keys, self._values)
        self._steps = 0

    def step(self) -> None:
        self._steps += 1
        if self._inside is not None:
            self._inside.pushpull(self._keys, self._values)
        if self._steps % self._interval:
            return
        if self._outer:  # the difference is made where the values are, which needs no memory
            for value, met, own in zip(self._values, self._met, self.weights, strict=True):
                np.subtract(met, own, out=value)
            self._kv.pushpull(self._keys, self._values, self._met)
            for value, met, own in zip(self._values, self._met, self.weights, strict=True):
                own[:], value[:] = met, 0
            return
        self._kv.pushpull(self._keys, self.weights, self._met)
        for met, own in zip(self._met, self.weights, strict=True):
            np.subtract(own, met, out=met)
            met *= self._alpha
            own -= met

    def total(self) -> float | None:
        """Of one element of the first key: this client's weight, and on worker 0 the center; None if it is another's.

        Elastic averaging conserves the sum of these over all clients.
        """
        self._kv.wait_all()
        self._kv.barrier()
        self._kv.pull(self._keys[0], self._met[0])
        center = float(self._met[0][-1]) if self._kv.rank == 0 else 0.0
        return center + float(self.weights[0][-1]) if self._kv.mpi_rank == 0 else None

    def wrong(self) -> int:
        """Keys that are not the mean of all clients after an outer step that takes it."""
        if not self._outer:
            return 0
        mean = np.float32((self._kv.num_clients + 1) / 2)
        return sum(not bool(np.allclose(own[:: max(1, own.size // 64)], mean)) for own in self.weights)


def work(scenario: dict[str, Any]) -> dict[str, Any]:
    """Do the scenario's steps; what this worker has to say about them."""
    of = ALGORITHMS[scenario["algorithm"]]
    counts = scenario["counts"]
    with kvmpi.create("mpi" if scenario["servers"] == 0 else of.store) as kv:
        loop: Any
        if scenario["servers"] == 0:
            loop = _Sums(kv, counts)
        elif of.averages:
            loop = _Weights(kv, counts, scenario["interval"], of.synchronous)
        else:
            loop = _Gradients(kv, counts)
        _steps(loop.step, scenario["compute_s"], scenario["warm_ups"])
        epochs_s = []
        processor_s = -time.process_time()
        for _ in range(scenario["epochs"]):
            kv.barrier()
            epochs_s.append(_steps(loop.step, scenario["compute_s"], scenario["steps"]))
        processor_s += time.process_time()
        found: dict[str, Any] = {"epochs_s": epochs_s, "processor_s": processor_s}
        found["total"] = loop.total() if of.averages and not of.synchronous else None
        return {**found, "wrong": loop.wrong(), "stats": _plain(kv.stats()), "rank": kv.rank}


def _steps(step: Callable[[], None], compute_s: float, count: int) -> float:
    """Seconds of ``count`` steps."""
    start_s = time.perf_counter()
    for _ in range(count):
        time.sleep(compute_s)
        step()
    return time.perf_counter() - start_s


def _plain(stats: Any) -> Any:
    return json.loads(json.dumps(stats, default=str))


def main(folder: str) -> int:
    """Work as ``folder`` says."""
    found = work(json.loads(Path(folder, "scenario.json").read_text()))
    Path(folder, f"worker-{found['rank']}.json").write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
