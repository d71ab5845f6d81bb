"""``DistributedOptimizer``, ``Trainer`` and averaging in several processes: one job of each shape makes many checks."""

from __future__ import annotations

import functools
import re
import subprocess
from pathlib import Path

import pytest
from jobs import LONG_JOB_HANGS_S, run_job

HERE = Path(__file__).parent
ALGORITHMS = "auto,shared,hierarchical,multi_ring,ring,host_ring,mpi,naive"
#: What each job checks, one after the other: starting torch takes seconds.
JOBS = {
    "-n 2 -c 1 -s 2": [
        "mpi/gradients",
        "mpi/direct=summed_where_they_are,hooks_of_the_user,gradients_that_others_hold,every_loop,half_types,graphs_that_change,frozen_in_turn,"
        "converted,images,two_optimizers,sums,after_an_error,before_any_gradient,summed_with_other_passes,"
        "line_searches,graphs_that_are_there_before,sums_twice,without_a_batch,"
        "uneven_batches",
        "mpi/weights=loops_of_people,groups_of_parameters,frozen_in_turn,converted,layers_wait_for_their_own,"
        "whoever_reads_waits,first_layers_first,compiled,compiled_steps,too_late,checkpoint_of_torch,loaded,written_to,"
        "uneven_batches,loaded_by_one",
        "mpi/steps=as_one_process,models_as_in_one_process,groups_of_parameters,uneven_batches,resumed,too_late,"
        "two_networks,buffers",
        "mpi/shares=loops_of_people,groups_of_parameters,graphs_that_change,frozen_in_turn,converted,"
        "whoever_reads_waits,shares_of_first_layers_first,too_late,resumed,checkpoint_of_torch,loaded,"
        "written_to,uneven_batches,loaded_by_one",
        f"mpi/algorithms={ALGORITHMS}",
        "dist_async_mpi/steps=some_as_one_process,models_as_in_one_process,groups_of_parameters,two_networks",
        "dist_sync_mpi/steps=without_a_batch,uneven_batches",
        "compiled",
    ],
    "-n 3 -c 2 -s 1": [
        "dist_sync_mpi/gradients=frozen_in_turn",
        "dist_sync_mpi/steps=each_client_by_itself,overflows,without_a_batch,uneven_batches,resumed",
        "dist_async_mpi/steps=asynchronous,buffers",
        "dist_async_mpi/weights=asynchronous",
    ],
    "-n 4 -c 2 -s 2": [
        "dist_sync_mpi/gradients=every_loop,graphs_that_change,converted,images,other_buffers,"
        "order_of_the_first_worker,compressed,compressed_in_other_buckets,without_a_batch,uneven_batches",
        "dist_sync/gradients=graphs_that_change,half_types,compressed,compressed_in_other_buckets,resumed,forks",
        "dist_sync_mpi/weights=loops_of_people,groups_of_parameters,rule_of_the_user,graphs_that_change,resumed,"
        "checkpoint_of_torch,loaded,written_to,uneven_batches",
        "dist_sync/weights=frozen_in_turn,converted,layers_wait_for_their_own,whoever_reads_waits,first_layers_first,loaded,loaded_by_one",
        "dist_async/weights=asynchronous",
        "dist_async_mpi/weights=asynchronous",
        "dist_sync_mpi/steps=each_client_by_itself,overflows,agreed_to_leave_out,uneven_batches,resumed,too_late",
        "dist_sync/steps=overflows,each_client_by_itself,without_a_batch",
        "dist_async_mpi/steps=asynchronous",
        "dist_async/steps=asynchronous",
        "trainer",
    ],
}


@functools.cache
def job(options: str) -> subprocess.CompletedProcess[str]:
    program = HERE / "job_of_many_checks.py"
    return run_job(options, program, *JOBS[options], timeout_s=LONG_JOB_HANGS_S, settings={"timeout_s": 60})


@pytest.mark.parametrize(
    ("options", "check"), [(options, check.partition("=")[0]) for options, checks in JOBS.items() for check in checks]
)
def test_workers_together_train_as_one_process_does(options: str, check: str) -> None:
    done = job(options)
    said = done.stdout + done.stderr
    assert done.stdout.count(f"] {check} passed") == int(options.split()[1]), f"{check}, or what comes before\n{said}"
    assert done.returncode == 0 or check != JOBS[options][-1].partition("=")[0], said


def test_a_client_that_is_started_again_learns_by_itself_what_has_rows() -> None:
    program = HERE / "programs" / "started_again.py"
    done = run_job("-n 3 -c 2 -s 1 --restart 1", program, settings={"timeout_s": 60})
    assert done.stdout.count("as if nothing had happened") == 3, done.stdout + done.stderr


def test_a_trainer_that_goes_on_knows_what_has_rows(tmp_path: Path) -> None:
    """The only client is killed, or its job is resumed, before it has had a gradient: the table does not decay."""
    program = HERE / "programs" / "rows_again.py"
    snapshots = f"-n 1 -c 1 -s 2 --snapshot-dir {tmp_path} --snapshot-every 3"
    for options, argument, begins in [
        ("-n 2 -c 1 -s 1 --restart 1", "kill", "2"),
        (snapshots, f"3 {tmp_path}", "0"),
        (f"-n 1 -c 1 -s 2 --resume {tmp_path}", "5", "3"),
    ]:
        done = run_job(options, program, *argument.split(), settings={"timeout_s": 60})
        said = re.findall(f"as if nothing had happened, from {begins}\n", done.stdout)
        assert len(said) == int(options[3]), f"{options}\n{done.stdout}{done.stderr}"
