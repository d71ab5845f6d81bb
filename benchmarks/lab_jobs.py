"""Jobs of ``kvmpi bench figure12`` and ``predict``: started on hosts of a lab, and what their workers have measured."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from kvmpi.benchmarks.environment import available_bytes
from kvmpi.benchmarks.netlab import PRIVATE, NetLab
from kvmpi.benchmarks.sizes import format_bytes
from kvmpi.errors import ConfigError, KVError
from kvmpi.planner.spec import ALGORITHMS

_WORKER = str(Path(__file__).with_name("lab_worker.py"))
_GRACE_S = 10.0


@dataclass(frozen=True)
class Scenario:
    """One job in a lab whose workers are on ``hosts`` hosts, and whose servers have each a host of its own.

    Attributes:
        counts: elements of each key, float32.
        compute_s: how long each worker sleeps in a step, instead of computing.
        steps: of an epoch.
    """

    algorithm: str
    workers: int
    clients: int
    servers: int
    hosts: int
    counts: tuple[int, ...]
    compute_s: float = 0.5
    interval: int = 4
    steps: int = 4
    epochs: int = 2
    warm_ups: int = 1
    link: str = "1gbit"
    model: str = ""

    @property
    def nbytes(self) -> int:
        """Of all keys."""
        return 4 * sum(self.counts)

    @property
    def total_steps(self) -> int:
        """Of a worker, those included that are not measured."""
        return self.warm_ups + self.epochs * self.steps

    @property
    def num_lab_hosts(self) -> int:
        return self.hosts + self.servers


@dataclass(frozen=True)
class Measured:
    """Of one job: seconds of each worker's epochs, wrong keys, processor time of the workers in an epoch."""

    epochs_s: tuple[float, ...]
    wrong: int
    staleness: float | None = None
    processor_s: float = 0.0

    @property
    def epoch_s(self) -> float:
        """The mean, over workers and epochs."""
        return statistics.fmean(self.epochs_s)


def check_memory(scenarios: Sequence[Scenario]) -> None:
    """Raise unless there is memory for each of ``scenarios`` by itself.

    Raises:
        ConfigError: one needs more than is free.
    """
    available = available_bytes()
    for scenario in scenarios:
        # A worker has gradients, weights, what it has met, and buffers of two stores; a server its part and rounds.
        needed = 5 * scenario.workers * scenario.nbytes + 4 * scenario.nbytes + 100_000_000 * scenario.workers
        if available is not None and needed > available:
            have = f"{format_bytes(available)} is free"
            raise ConfigError(f"{describe(scenario)} takes about {format_bytes(needed)} of memory, and {have}")


def run(lab: NetLab, scenario: Scenario, timeout_s: float) -> Measured:
    """Run ``scenario`` on the first hosts of ``lab``; returns when nothing of it is left.

    Raises:
        KVError: it failed, or took longer than ``timeout_s``.
    """
    folder = tempfile.mkdtemp(prefix="kvmpi-lab-")
    try:
        Path(folder, "scenario.json").write_text(json.dumps(asdict(scenario)))
        _run(lab, scenario, folder, timeout_s)
        return _read(folder, scenario)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def command(lab: NetLab, scenario: Scenario, folder: str) -> list[str]:
    """The words that start the job, on host 0 of ``lab``."""
    of = ALGORITHMS[scenario.algorithm]
    names, counts = lab.hosts[: scenario.hosts], spread(scenario.workers, scenario.hosts)
    listed = ",".join(f"{name}:{count}" for name, count in zip(names, counts, strict=True) if count)
    clients = scenario.clients if of.grouped else scenario.workers
    words = [sys.executable, "-m", "kvmpi", "run", "--remote-shell", f"{PRIVATE}/agent", "--interface", lab.subnet]
    words += ["--hosts", listed, "-n", str(scenario.workers), "-c", str(clients), "-s", str(scenario.servers)]
    if scenario.servers:
        words += ["--server-hosts", ",".join(lab.hosts[scenario.hosts : scenario.num_lab_hosts])]
    return [*words, "--", _WORKER, folder]


def spread(workers: int, hosts: int) -> list[int]:
    """How many workers each host has: full ones first, as ``--hosts`` fills them."""
    most = -(-workers // hosts)
    return [max(0, min(most, workers - most * host)) for host in range(hosts)]


def _run(lab: NetLab, scenario: Scenario, folder: str, timeout_s: float) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("KVMPI_")}
    # Hosts of a lab share cores, which no host knows; workers that sleep are not to be held up by ranks that spin.
    env |= {"OMPI_MCA_mpi_yield_when_idle": "1", "OMP_NUM_THREADS": "1"}
    job = subprocess.Popen(
        lab.command_on(0, command(lab, scenario, folder)), env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        said, _ = job.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        said = f"it took longer than {timeout_s:.0f} s"
        raise KVError(f"{describe(scenario)}: {said}") from None
    finally:
        if job.poll() is None:
            job.terminate()  # kvmpi run ends all processes of the job
            try:
                job.communicate(timeout=_GRACE_S)
            except subprocess.TimeoutExpired:
                job.kill()  # and so do its watchdogs
                job.communicate()
    if job.returncode:
        last = "\n".join(said.splitlines()[-15:])
        raise KVError(f"{describe(scenario)}: exit status {job.returncode}\n{last}")


def _read(folder: str, scenario: Scenario) -> Measured:
    found = [json.loads(Path(folder, f"worker-{rank}.json").read_text()) for rank in range(scenario.workers)]
    wrong = sum(worker["wrong"] for worker in found)
    totals = [worker["total"] for worker in found if worker["total"] is not None]
    if totals:
        clients = len(totals)
        wrong += abs(sum(totals) - clients * (clients + 1) / 2) > 1e-3 * clients
    epochs_s = tuple(time_s for worker in found for time_s in worker["epochs_s"])
    staleness = _mean_staleness([worker["stats"].get("staleness") for worker in found])
    return Measured(epochs_s, wrong, staleness, sum(worker["processor_s"] for worker in found) / scenario.epochs)


def _mean_staleness(histograms: Sequence[dict[str, int] | None]) -> float | None:
    """Of all workers that have any."""
    total = {int(value): 0 for histogram in histograms for value in histogram or {}}
    for histogram in histograms:
        for value, count in (histogram or {}).items():
            total[int(value)] += count
    pushes = sum(total.values())
    return sum(value * count for value, count in total.items()) / pushes if pushes else None


def describe(scenario: Scenario) -> str:
    """In a few words."""
    clients = scenario.clients if ALGORITHMS[scenario.algorithm].grouped else scenario.workers
    size = scenario.model or f"{scenario.nbytes / 1e6:.0f} MB in {len(scenario.counts)} keys"
    return f"{scenario.algorithm} -n {scenario.workers} -c {clients} -s {scenario.servers}, {size}"
