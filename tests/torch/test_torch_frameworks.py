"""Lightning and Accelerate, which bring loops of their own: one job runs ``programs/frameworks.py``."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import LONG_JOB_HANGS_S, run_job


def test_their_loops_train_as_one_process_does() -> None:
    for name in ("lightning", "accelerate"):
        pytest.importorskip(name)
    job = run_job("-n 2", Path(__file__).parent / "programs" / "frameworks.py", 2, timeout_s=LONG_JOB_HANGS_S)
    assert job.returncode == 0, job.stdout + job.stderr
    assert job.stdout.count("all train alike") == 2, job.stdout + job.stderr
