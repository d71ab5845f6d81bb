"""What a figure means nothing without: host, MPI, network, versions, and how fast this host's memory is."""

from __future__ import annotations

import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

import kvmpi
from kvmpi.benchmarks.peers import network_interface
from kvmpi.collectives.words import round_trip_s
from kvmpi.launchers.cores import YIELD

MEMORY_BYTES = 64_000_000
_MEMORY_ROUNDS = 7
Facts = dict[str, Any]


def facts(world: Any) -> Facts:
    """About the job of communicator ``world``; collective."""
    from mpi4py import MPI

    names = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")
    levels = {getattr(MPI, f"THREAD_{name}"): name for name in names}
    hosts = world.allgather(socket.gethostname())
    num_hosts = len(set(hosts))
    cores = world.allgather(_cores())
    on_this_host = set().union(*(its for its, host in zip(cores, hosts, strict=True) if host == socket.gethostname()))
    bindings = list(map(_binding, cores))
    yields = os.environ.get(YIELD, "0") not in ("0", "false")
    library = MPI.Get_library_version()
    return {
        **here(), "cores": len(on_this_host) or os.cpu_count(),
        "hosts": num_hosts, "ranks_per_host": len(hosts) // num_hosts,
        "nic": _nic() if num_hosts > 1 else "loopback/shared memory",
        "binding": bindings[0] if len(set(bindings)) == 1 else "; ".join(bindings),
        "mpi": mpi_name(library), "idle": ("yield" if yields else "spin") if "Open MPI" in library else "unknown",
        "thread_level": levels.get(MPI.Query_thread(), "unknown"),
    }  # fmt: skip


def here() -> Facts:
    """About this host and this interpreter."""
    cores = _cores()
    return {
        "host": platform.node(), "cores": len(cores) or os.cpu_count(), "binding": _binding(cores),
        "python": platform.python_version(), "numpy": np.__version__, "torch": _torch_version(),
        "pyzmq": metadata.version("pyzmq"), "kvmpi": kvmpi.__version__, "commit": _commit(),
    }  # fmt: skip


def memory_rates(world: Any) -> dict[str, float]:
    """GB/s of result that the ranks of this host copy and add when all do so at once; collective.

    A copy reads and writes every byte of its result once; an addition reads two bytes for each that it writes.
    """
    from mpi4py import MPI

    num_ranks = ranks_on_machine(world)
    count = MEMORY_BYTES // 4
    a, b, c = (np.full(count, value, np.float32) for value in (1, 2, 0))
    found = {}
    for name, work in {"copy": lambda: np.copyto(c, a), "add": lambda: np.add(a, b, out=c)}.items():
        work()
        times_s = []
        for _ in range(_MEMORY_ROUNDS):
            world.Barrier()
            start_s = time.perf_counter()
            work()
            times_s.append(world.allreduce(time.perf_counter() - start_s, MPI.MAX))
        found[name] = num_ranks * MEMORY_BYTES / statistics.median(times_s) / 1e9
    return found


def word_ns(world: Any) -> float | None:
    """On rank 0, nanoseconds that a word takes there and back between two cores: of its own, or its own and rank 1's if
    each is bound to one; collective.
    """
    found_s = None
    if (of_ranks := world.gather(_cores())) is not None:
        cores = list(dict.fromkeys(core for its in of_ranks[:2] for core in its))
        if len(cores) > 1:
            found_s = round_trip_s((cores[0], cores[1]))
    world.Barrier()
    return None if found_s is None else 1e9 * found_s


def ranks_on_machine(world: Any) -> int:
    """How many ranks share this rank's memory, though they may see themselves as different hosts; collective."""
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        machine = socket.gethostname()
    return world.allgather(machine).count(machine)


def available_bytes() -> int | None:
    """Memory that can be had without swapping; None where nobody says."""
    try:
        with open("/proc/meminfo") as file:
            lines = dict(line.split(":", 1) for line in file)
        return int(lines["MemAvailable"].split()[0]) << 10
    except (OSError, KeyError, ValueError):
        return None


def _cores() -> list[int]:
    """The cores that this process may use; none where the system does not tell."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def _binding(cores: list[int]) -> str:
    """Cores as text: ``none (cores 0-3)`` if these are all."""
    if not cores:
        return "unknown"
    runs: list[list[int]] = []
    for core in cores:
        if runs and core == runs[-1][-1] + 1:
            runs[-1].append(core)
        else:
            runs.append([core])
    text = ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return f"none (cores {text})" if len(cores) == os.cpu_count() else f"cores {text}"


def _nic() -> str:
    name, address = network_interface(several_hosts=True)
    try:
        speed = int(Path(f"/sys/class/net/{name}/speed").read_text())
    except (OSError, ValueError):
        speed = -1
    return f"{name} {address}" + (f" {speed} Mbit/s" if speed > 0 else "")


def mpi_name(library: str) -> str:
    """``Open MPI v5.0.11, package: ...`` -> ``Open MPI v5.0.11``; ``MPICH Version:      5.0.2`` -> ``MPICH 5.0.2``."""
    line = library.splitlines()[0].strip("\0 ").partition(", package")[0]
    return " ".join(line.replace("Version:", "").split())


def _torch_version() -> str:
    # The ranks import torch only where a row needs it.
    if "torch" in sys.modules:
        return str(sys.modules["torch"].__version__)
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return "none"


def _commit() -> str:
    """The commit of a source tree, with ``-dirty`` where it was changed; empty for an installed kvmpi."""
    package = Path(kvmpi.__file__).parent
    env = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}

    def git(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", *words], cwd=package, env=env, capture_output=True, text=True, check=False)

    try:
        # Installed below somebody else's repository it is none of that repository's files.
        if git("ls-files", "--error-unmatch", "__init__.py").returncode:
            return ""
        return git("describe", "--always", "--dirty", "--exclude", "*").stdout.strip()
    except OSError:
        return ""
