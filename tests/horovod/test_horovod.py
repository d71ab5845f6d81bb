"""Horovod's API: a job of three ranks that runs ``programs/horovod_checks.py``, one of two with its documented loop."""

from __future__ import annotations

import functools
import re
import subprocess
from pathlib import Path

import pytest
from jobs import LONG_JOB_HANGS_S, run_in_turn

from kvmpi.errors import ConfigError

PROGRAMS = Path(__file__).parent / "programs"

#: What each worker runs in the job of so many: starting torch takes longer than most of it.
IN_TURN = {
    2: [
        *(PROGRAMS / "digits.py", "--epochs", 4, "+", PROGRAMS / "horovod_gradients.py", 2),
        *("+", "KVMPI_BUCKET_BYTES=100", PROGRAMS / "horovod_checks.py", 2, "compiled"),
    ],
    # Buckets so small that gradients leave in several.
    3: ["KVMPI_BUCKET_BYTES=100", PROGRAMS / "horovod_checks.py", 3, "+", PROGRAMS / "horovod_gradients.py", 3],
}


@functools.cache
def job(size: int) -> subprocess.CompletedProcess[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")  # the documented loop would take a GPU for each worker
        return run_in_turn(f"-n {size}", IN_TURN[size], timeout_s=LONG_JOB_HANGS_S, settings={"timeout_s": 60})


def test_operations_of_three_ranks() -> None:
    done = job(3)
    assert done.returncode == 0, done.stdout + done.stderr
    others = re.compile(r"\[worker \d\] (begins \d|all gradients agree)")
    said = sorted(line for line in done.stdout.splitlines() if not others.fullmatch(line))
    assert said == [f"[worker {rank}] all checks passed" for rank in range(3)]


@pytest.mark.parametrize("size", [2, 3])
def test_gradients_flow_through_the_operations(size: int) -> None:
    """After what else the job has to do."""
    done = job(size)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("all gradients agree") == size, done.stdout


def test_a_compiler_meets_the_operations() -> None:
    done = job(2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("] compiles\n") == 2, done.stdout


def test_the_documented_loop() -> None:
    done = job(2)
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout
    assert "weights alike" in said, said
    accuracy = [float(text) for text in re.findall(r"accuracy ([0-9.]+)%", said)]
    assert len(accuracy) == 4
    assert accuracy[-1] > 70, said


def test_several_clients_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import kvmpi.horovod as hvd

    monkeypatch.setenv("KVMPI_ROLE", "worker")
    monkeypatch.setenv("KVMPI_NUM_CLIENTS", "2")
    monkeypatch.setenv("KVMPI_NUM_WORKERS", "2")
    with pytest.raises(ConfigError, match=r"2 clients.*-c 1"):
        hvd.init()
    assert not hvd.is_initialized()
