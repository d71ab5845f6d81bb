"""The collectives over real MPI processes: one job for each size, which runs ``mpi_checks.py``."""

from __future__ import annotations

from pathlib import Path

import mpi_jobs
import pytest

pytest.importorskip("mpi4py")

TIMEOUT_S = 100.0


def job(kind: str, size: int, folder: Path) -> str:
    if kind not in mpi_jobs.installed():
        pytest.skip(f"no {kind} here")
    return mpi_jobs.run(kind, size, "mpi_checks.py", folder, folder=folder, timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_collectives_over_openmpi(size: int, tmp_path: Path) -> None:
    assert f"all 7 checks passed on {size} ranks of Open" in job("openmpi", size, tmp_path)


def test_collectives_over_mpich(tmp_path: Path) -> None:
    assert "all 7 checks passed on 3 ranks of MPICH" in job("mpich", 3, tmp_path)
