"""The collectives on vectors of a GPU over real MPI processes that share one card: jobs run ``gpu_checks.py``."""

from __future__ import annotations

import re
from pathlib import Path

import mpi_jobs
import pytest
from device_checks import device_environment, needs_gpu  # noqa: F401 - a fixture

pytest.importorskip("mpi4py")

pytestmark = [*needs_gpu, pytest.mark.usefixtures("device_environment")]


def output_of(size: int, what: str, folder: Path, timeout_s: float, *, in_order: bool = True) -> str:
    if "openmpi" not in mpi_jobs.installed():
        pytest.skip("no Open MPI here")
    return mpi_jobs.run("openmpi", size, "gpu_checks.py", what, folder=folder, timeout_s=timeout_s, in_order=in_order)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_algorithm_sums_vectors_of_a_device(size: int, tmp_path: Path) -> None:
    output = output_of(size, "sums", tmp_path, 150.0)
    assert output.count("all checks passed") == size, output
    assert set(re.findall(r": sums (\w+): right", output)) >= {"nccl", "ring", "multi_ring", "shared", "auto"}, output


def test_nccl_says_which_ranks_share_a_gpu(tmp_path: Path) -> None:
    output = output_of(2, "one_host", tmp_path, 60.0)
    assert output.count("refusals: right") == 2, output


@pytest.mark.parametrize("size", [2, 3])
def test_nccl_does_not_wait_for_ever_for_a_rank(size: int, tmp_path: Path) -> None:
    output = output_of(size, "absent", tmp_path, 60.0, in_order=False)
    assert output.count("absence: right") == size, output
    assert output.count("all checks passed") == size, output
