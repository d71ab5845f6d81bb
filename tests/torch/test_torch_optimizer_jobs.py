"""``DistributedOptimizer`` in several processes. Starting torch takes seconds, so a job makes many checks."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from jobs import run_job

HERE = Path(__file__).parent
ALGORITHMS = "auto,shared,hierarchical,multi_ring,ring,host_ring,mpi,naive"


@pytest.mark.parametrize(("options", "checks"), [
    ("-n 2", [
        "mpi/gradients",
        "mpi/weights=loops_of_people,layers_wait_for_their_own,first_layers_first,compiled,too_late,uneven_batches",
        f"mpi/algorithms={ALGORITHMS}",
    ]),
    ("-n 4 -c 2 -s 2", [
        "dist_sync_mpi/gradients=every_loop,graphs_that_change,images,order_of_the_first_worker,uneven_batches",
        "dist_sync/gradients=graphs_that_change,half_types,resumed,forks",
        "dist_sync_mpi/weights=loops_of_people,rule_of_the_user,graphs_that_change,resumed,uneven_batches",
        "dist_sync/weights=layers_wait_for_their_own,first_layers_first",
        "dist_async/weights=asynchronous",
        "dist_async_mpi/weights=asynchronous",
    ]),
])  # fmt: skip
def test_workers_together_train_as_one_process_does(job, options, checks):
    done = job(options, HERE / "optimizer_job.py", *checks, timeout_s=240.0)
    for check in checks:
        assert done.stdout.count(f"{check.partition('=')[0]} passed") == int(options.split()[1])


@pytest.mark.parametrize(
    ("how", "said"), [("raise", "ArithmeticError: only worker 1"), ("interrupt", "KeyboardInterrupt")]
)
def test_an_error_in_one_worker_ends_all(how, said):
    start_s = time.monotonic()
    done = run_job("-n 2", HERE / "optimizer_fails.py", how, settings={"timeout_s": 100})
    assert done.returncode != 0
    assert said in done.stderr
    assert "worker 1 (client 0) ended" in done.stderr
    assert "went on" not in done.stdout
    assert time.monotonic() - start_s < 90, "the other worker waited until its own deadline"
