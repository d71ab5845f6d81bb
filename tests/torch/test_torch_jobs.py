"""Trainer and averaging over real processes: one job that checks everything, since starting torch takes seconds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_four_workers_in_two_clients_with_two_servers() -> None:
    program = Path(__file__).with_name("job_of_many_checks.py")
    env = {name: value for name, value in os.environ.items() if not name.startswith("KVMPI_")}
    job = subprocess.run(
        [sys.executable, "-m", "kvmpi", "run", "-n", "4", "-c", "2", "-s", "2", str(program)],
        env={**env, "KVMPI_TIMEOUT_S": "60"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert job.returncode == 0, job.stdout + job.stderr
    assert sorted(job.stdout.split("\n")) == ["", *(f"[worker {rank}] all checks passed" for rank in range(4))]
