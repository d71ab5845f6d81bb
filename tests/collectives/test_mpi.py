"""The collectives over real MPI processes: one job for each size, which runs ``mpi_checks.py``."""

from __future__ import annotations

from pathlib import Path

import mpi_jobs
import pytest
from jobs import HANGS_S

pytest.importorskip("mpi4py")

TIMEOUT_S = HANGS_S


def job(kind: str, size: int, folder: Path, threads: str = "multiple") -> str:
    if kind not in mpi_jobs.installed():
        pytest.skip(f"no {kind} here")
    return mpi_jobs.run(kind, size, "mpi_checks.py", folder, threads, folder=folder, timeout_s=TIMEOUT_S)


@pytest.mark.parametrize(("size", "threads"), [(2, "multiple"), (3, "serialized"), (4, "multiple"), (7, "multiple")])
def test_collectives_over_openmpi(size: int, threads: str, tmp_path: Path) -> None:
    """With ``serialized``, MPI allows one call at a time: the locks are at work."""
    output = job("openmpi", size, tmp_path, threads)
    assert f"all checks passed on {size} ranks of Open, threads {threads}" in output


def test_collectives_over_mpich(tmp_path: Path) -> None:
    assert "all checks passed on 3 ranks of MPICH, threads multiple" in job("mpich", 3, tmp_path)


@pytest.mark.parametrize("kind", ["openmpi", "mpich"])
def test_what_a_ring_sends_leaves_while_the_receiver_computes(kind: str, tmp_path: Path) -> None:
    """MPIs would ask the receiver first, over TCP, and wait until that polls."""
    if kind not in mpi_jobs.installed():
        pytest.skip(f"no {kind} here")
    output = mpi_jobs.run(kind, 2, "tcp_checks.py", folder=tmp_path, timeout_s=TIMEOUT_S)
    assert "sent without the receiver's help" in output
