"""Stores with arrays of a GPU, of CuPy and of torch: jobs run ``programs/device_arrays.py``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from device_checks import cuda_in_torch, device_environment  # noqa: F401 - a fixture
from jobs import HANGS_S, run_job

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not cuda_in_torch(), reason="needs CuPy, torch with CUDA and a GPU"),
    pytest.mark.usefixtures("device_environment"),
]
PROGRAM = Path(__file__).parent / "programs" / "device_arrays.py"


def test_arrays_of_a_device_alone(tmp_path: Path) -> None:
    command = [sys.executable, str(PROGRAM), str(tmp_path), "local", "mpi"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANGS_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all checks passed" in done.stdout


@pytest.mark.parametrize(
    ("options", "store", "algorithm"),
    [("-n 2", "mpi", "auto"), ("-n 2", "mpi", "nccl"), ("-n 2 -c 1 -s 1", "dist_sync_mpi", "auto")],
)
def test_arrays_of_a_device_in_a_job(options: str, store: str, algorithm: str, tmp_path: Path) -> None:
    done = run_job(options, PROGRAM, tmp_path, store, settings={"allreduce": algorithm})
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("all checks passed") == 2, done.stdout + done.stderr
