"""``kvmpi bench tune``: measures the figures by which ``auto`` chooses, and writes them to a file."""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from os.path import expanduser
from typing import Any

import numpy as np

from kvmpi import arrays
from kvmpi.benchmarks.environment import memory_rates
from kvmpi.benchmarks.options import at_least
from kvmpi.benchmarks.report import check_writable, exit_status, writing
from kvmpi.benchmarks.runner import Runner
from kvmpi.collectives import Collectives, Comm, mpi_comm
from kvmpi.collectives.cost import Figures, save
from kvmpi.collectives.topology import Layout, locate
from kvmpi.collectives.waiting import wait_all
from kvmpi.deadline import Deadline
from kvmpi.errors import ConfigError
from kvmpi.launchers.rank_exec import mpi_rank

_TAG = 100
_TIMEOUT_S = 60.0
_REPEATS = 200
_LINK_BYTES = 16 << 20
_LINK_CHUNK_BYTES = 256 << 10

_MEANINGS = {
    "meeting_s": ("all ranks of a host meet", 1e6, "us"), "add_bytes_per_s": ("each rank adds", 1e-9, "GB/s"),
    "copy_bytes_per_s": ("each rank copies", 1e-9, "GB/s"), "message_s": ("a small message", 1e6, "us"),
    "link_bytes_per_s": ("between hosts, each way", 1e-9, "GB/s"),
    "library_s": ("a step of MPI's allreduce", 1e6, "us"),
}  # fmt: skip


def main(_: str, argv: Sequence[str]) -> int:
    """Run ``kvmpi bench tune ARGV``; the exit status."""
    parser = argparse.ArgumentParser(
        prog="kvmpi bench tune", allow_abbrev=False,
        description="Measure latencies and bandwidths, and write them to a file. Jobs that are started with "
        "KVMPI_TUNING=FILE choose algorithms by them.",
        epilog="On a cluster, run it inside the job: mpirun -n 16 --hostfile hosts kvmpi bench tune",
    )  # fmt: skip
    parser.add_argument(
        "-n", "--ranks", type=at_least(2), default=2, metavar="N", help="ranks on this host (default 2)"
    )
    parser.add_argument(
        "--out", type=expanduser, default="kvmpi-tuning.json", metavar="FILE", help="default kvmpi-tuning.json"
    )
    args = parser.parse_args(argv)
    inside = mpi_comm.started_by_mpi() or bool(os.environ.get("KVMPI_ROLE"))
    return exit_status(lambda: _as_rank(args) if inside else _as_parent(args))


def _as_parent(args: argparse.Namespace) -> int:
    check_writable(args.out)
    with Runner() as runner:
        run = [sys.executable, "-m", "kvmpi", "run", "-n", str(args.ranks)]
        return runner.show([*run, "--", __file__, "--out", args.out])


def _as_rank(args: argparse.Namespace) -> int:
    first = max(0, mpi_rank(dict(os.environ))) == 0
    if first:
        check_writable(args.out)
    measured, layout = measure()
    if first:
        with writing(args.out):
            save(args.out, measured)
        print(f"ranks by host: {layout.describe()}")
        for name, value in asdict(measured).items():
            meaning, scale, unit = _MEANINGS[name]
            known = "" if name != "link_bytes_per_s" or len(layout.hosts) > 1 else "  (built in: there is one host)"
            print(f"  {meaning:<26} {value * scale:10.2f} {unit}{known}")
        print(f"written to {args.out}; jobs that are started with KVMPI_TUNING={args.out} choose by it")
    return 0


def measure() -> tuple[Figures, Layout]:
    """Collective over all ranks of the job: the figures, the same on all, and who is where."""
    from mpi4py import MPI

    world, comm = MPI.COMM_WORLD, mpi_comm.world(_TIMEOUT_S)
    if comm.size < 2:
        raise ConfigError("it takes two ranks or more to measure between them")
    topology = locate(comm, Figures(), Deadline(_TIMEOUT_S), "tune")

    def slowest_s(work: Callable[[], Any], repeats: int = _REPEATS) -> float:
        times_s = []
        for _ in range(repeats):
            world.Barrier()
            start_s = time.perf_counter()
            work()
            times_s.append(world.allreduce(time.perf_counter() - start_s, MPI.MAX))
        return statistics.median(times_s[repeats // 10 :])

    def latency_s(algorithm: str) -> float:
        """Of the sum of one number, Python's part included."""
        collectives, out = Collectives(comm.duplicate(), algorithm), np.empty(1, np.float32)
        vectors = [arrays.read(np.ones(1, np.float32))]
        return slowest_s(lambda: collectives.allreduce(vectors, out, "float32", Deadline(_TIMEOUT_S), "tune"))

    found = replace(
        Figures(), message_s=latency_s("ring") / (2 * (comm.size - 1)),
        library_s=latency_s("mpi") / (comm.size - 1).bit_length(),
    )  # fmt: skip
    if len(topology.layout.hosts) == 1 and not isinstance(topology.group, str):
        found = replace(found, meeting_s=latency_s("shared"))
    if len(topology.layout.hosts) > 1:
        ends, data = (0, topology.layout.hosts[-1][-1]), np.zeros(_LINK_BYTES, np.uint8)
        found = replace(found, link_bytes_per_s=_LINK_BYTES / slowest_s(lambda: _swap(comm, ends, data), 10))
    on_this_host = len(topology.layout.hosts[topology.layout.host_of(comm.rank)])
    rates = {name: rate * 1e9 / on_this_host for name, rate in memory_rates(world).items()}
    rates = {name: world.allreduce(rate, MPI.MIN) for name, rate in rates.items()}
    found = replace(found, add_bytes_per_s=rates["add"], copy_bytes_per_s=rates["copy"])
    return world.bcast(found), topology.layout


def _swap(comm: Comm, ends: tuple[int, int], data: np.ndarray) -> None:
    """Both ends send everything to each other at the same time."""
    if comm.rank not in ends:
        return
    peer = ends[1] if comm.rank == ends[0] else ends[0]
    into = np.empty_like(data)
    requests = []
    for start in range(0, data.size, _LINK_CHUNK_BYTES):
        part = slice(start, start + _LINK_CHUNK_BYTES)
        requests += [comm.irecv(into[part], peer, _TAG), comm.isend(data[part], peer, _TAG)]
    wait_all(requests, Deadline(_TIMEOUT_S), lambda: f"tune: no data from MPI rank {peer}")


if __name__ == "__main__":
    sys.exit(main("tune", sys.argv[1:]))
