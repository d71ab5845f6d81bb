"""Shares the cores of a host among a job's workers there: decided on that host, since others may have other numbers.

Only the standard library is used; files beside this one load it by its path.
"""

from __future__ import annotations

import os
import runpy
from collections.abc import MutableMapping
from typing import Any

#: How many workers a process of the job shares its host with, itself included, and how many processes: ``4,6``. Where
#: only an mpirun knows its ranks' hosts: how many there may be beside its ranks, and how many such mpiruns: ``0,2,3``.
SHARE = "KVMPI_HOST_SHARE"
THREADS = "OMP_NUM_THREADS"
#: Tells the ranks of Open MPI whether to yield while they wait.
YIELD = "OMPI_MCA_mpi_yield_when_idle"
#: By which ranks learn how many of their mpirun's are on their host: Open MPI's, and MPICH's.
_LOCAL_SIZES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")


def machine() -> dict[str, Any]:
    """The functions of ``machine.py``, above this file or beside it in a checkout."""
    above = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    path = next(path for name in (".", "kvmpi") if os.path.exists(path := os.path.join(above, name, "machine.py")))
    return runpy.run_path(path)


def usable() -> int:
    """Cores that this process may keep busy."""
    return int(machine()["num_cores"]())


def threads(cores: int, workers: int) -> str:
    """Threads of each worker."""
    return str(max(1, cores // max(1, workers)))


def share_cores(environ: MutableMapping[str, str], cores: int | None = None) -> None:
    """Set what a program's libraries go by, unless somebody else has; to be called right before the program starts."""
    told = environ.pop(SHARE, "")
    if not told:
        return
    workers, processes, *mpiruns = map(int, told.split(","))
    if mpiruns:  # each may have put as many ranks here
        ranks = mpiruns[0] * next((int(n) for name in _LOCAL_SIZES if (n := environ.get(name, "")).isdigit()), 1)
        workers, processes = workers + ranks, processes + ranks
    cores = cores or usable()
    environ.setdefault(THREADS, threads(cores, workers))
    if processes > cores and "OMPI_COMM_WORLD_SIZE" in environ:
        environ.setdefault(YIELD, "1")  # who waits lets others run
