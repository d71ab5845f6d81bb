"""Horovod's API: a job that runs ``programs/horovod_checks.py``, and one with its documented training loop."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from jobs import LONG_JOB_HANGS_S, run_job

from kvmpi.errors import ConfigError

PROGRAMS = Path(__file__).parent / "programs"


def test_operations_of_three_ranks() -> None:
    # Buckets so small that gradients leave in several.
    job = run_job(
        "-n 3",
        PROGRAMS / "horovod_checks.py",
        3,
        timeout_s=LONG_JOB_HANGS_S,
        settings={"bucket_bytes": 100, "timeout_s": 60},
    )
    assert job.returncode == 0, job.stdout + job.stderr
    assert sorted(job.stdout.splitlines()) == [f"[worker {rank}] all checks passed" for rank in range(3)]


@pytest.mark.parametrize("size", [2, 3])
def test_gradients_flow_through_the_operations(size: int) -> None:
    job = run_job(
        f"-n {size}", PROGRAMS / "horovod_gradients.py", size, timeout_s=LONG_JOB_HANGS_S, settings={"timeout_s": 60}
    )
    assert job.returncode == 0, job.stdout + job.stderr
    assert job.stdout.count("all gradients agree") == size, job.stdout


def test_the_documented_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # it would take a GPU for each worker
    job = run_job("-n 2", PROGRAMS / "digits.py", "--epochs", 4)
    assert job.returncode == 0, job.stdout + job.stderr
    assert "weights alike" in job.stdout, job.stdout
    accuracy = [float(text) for text in re.findall(r"accuracy ([0-9.]+)%", job.stdout)]
    assert len(accuracy) == 4
    assert accuracy[-1] > 70, job.stdout


def test_several_clients_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import kvmpi.horovod as hvd

    monkeypatch.setenv("KVMPI_NUM_CLIENTS", "2")
    monkeypatch.setenv("KVMPI_NUM_WORKERS", "2")
    with pytest.raises(ConfigError, match=r"2 clients.*-c 1"):
        hvd.init()
    assert not hvd.is_initialized()
