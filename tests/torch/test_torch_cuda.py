"""The torch front ends with CUDA parameters, in two processes on one card: jobs run ``programs/cuda_training.py``."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from device_checks import cuda_in_torch, device_environment  # noqa: F401 - a fixture
from jobs import run_job

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not cuda_in_torch(), reason="needs CuPy, torch with CUDA and a GPU"),
    pytest.mark.usefixtures("device_environment"),
]
HERE = Path(__file__).parent


@pytest.mark.parametrize(
    ("options", "stores"), [("-n 2", "mpi"), ("-n 2 -c 1 -s 1", "dist_sync_mpi"), ("-n 2", "groups")]
)
def test_training_on_a_device_is_that_of_one_process(
    options: str, stores: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ["PYTHONPATH"]]))
    done = run_job(options, HERE / "programs" / "cuda_training.py", *stores.split())
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("all checks passed") == 2, done.stdout + done.stderr
