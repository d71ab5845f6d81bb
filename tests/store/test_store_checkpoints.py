"""``save`` and ``load`` that cannot do what they should, in real jobs and in one process."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import run_job

PROGRAMS = Path(__file__).parent / "programs"


@pytest.mark.parametrize(
    ("options", "store"),
    [
        ("-n 3", "mpi"),
        ("-n 3 -c 3 -s 2", "dist_sync"),
        ("-n 2 -c 2 -s 1", "dist_async"),
        ("-n 4 -c 2 -s 1", "dist_sync_mpi"),
    ],
)
def test_what_fails_on_one_worker_fails_on_all_and_changes_nothing(tmp_path, options, store):
    done = run_job(options, PROGRAMS / "checkpoints.py", store, tmp_path, settings={"timeout_s": 15})
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(f"checkpoints {store} right") == int(options.split()[1])
