"""Whom a job names when it fails, and what jobs beside it, or inside of it, do not take from it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from jobs import HANGS_S, run_job, wait_for
from test_launch_temporary import NO_FILTERS, WITHOUT

from kvmpi.launchers import limits, mpirun
from kvmpi.launchers.watchdog import is_held

PROGRAM = Path(__file__).parent / "programs" / "one_fails.py"


@pytest.mark.parametrize(("how", "status"), [("raise", 1), ("exit", 7)])
@pytest.mark.parametrize("attempt", range(2))
def test_who_has_failed_is_named_and_not_who_has_lost_it(how: str, status: int, attempt: int) -> None:
    """It leaves the store, of which the others hear and end, before it has ended itself."""
    job = run_job("-n 3 -c 3 -s 1", PROGRAM, "dist_sync", how)
    assert job.returncode == status, job.stderr
    assert f"kvmpi run: worker 1 (client 1) ended with exit status {status}" in job.stderr, job.stderr
    assert ("worker 1 has had enough" in job.stderr) == (how == "raise")


def test_a_rank_that_ends_before_mpi_begins_is_not_waited_for_for_ever() -> None:
    job = run_job("-n 2", PROGRAM, "mpi", "early", settings={"timeout_s": 3})
    assert job.returncode, job.stderr
    assert "worker 0 waits here for the other workers of client 0: one of them has ended" in job.stderr, job.stderr
    assert "kvmpi run: worker 1 had ended in good order before that" in job.stderr, job.stderr


def test_a_rank_that_leaves_without_a_word_to_mpi_is_named() -> None:
    job = run_job("-n 3 -c 1", PROGRAM, "mpi", "silent")
    assert job.returncode, job.stderr
    assert "kvmpi run: client 0 (mpirun of workers 0 to 2) ended with exit status " in job.stderr, job.stderr
    assert "kvmpi run: worker 1 had ended with exit status 0 before that; for MPI " in job.stderr, job.stderr


def test_who_had_no_room_for_its_memory_is_told_where_to_look() -> None:
    job = run_job("-n 2 -c 2 -s 1", PROGRAM, "dist_sync", "bus")
    assert job.returncode == 128 + signal.SIGBUS, job.stderr
    assert "kvmpi run: worker 1 (client 1) was killed by SIGBUS" in job.stderr, job.stderr
    assert "file system that has no room for it: df -h /dev/shm " in job.stderr, job.stderr
    assert "shrink" not in job.stderr, job.stderr


def test_who_was_killed_for_want_of_memory_is_told_so() -> None:
    group = Path(f"/sys/fs/cgroup/memory/kvmpi-test-{os.getpid()}")
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(64 << 20))
    except OSError as error:
        pytest.skip(f"no control group of version 1 can be made here: {error}")
    try:
        job = run_job("-n 2 -c 2 -s 1", PROGRAM, "dist_sync", str(group))
    finally:
        group.rmdir()
    assert "the limit was no limit" not in job.stdout
    assert job.returncode == 128 + signal.SIGKILL, job.stderr
    assert "kvmpi run: worker 1 (client 1) was killed by SIGKILL" in job.stderr, job.stderr
    assert "kvmpi run: it seems that the kernel has killed it for want of memory" in job.stderr, job.stderr
    assert "shrink" not in job.stderr, job.stderr


@pytest.mark.parametrize(
    ("said", "advice"),
    [
        # of prterun below ulimit -n 20, and below ulimit -u 14
        (b"[vm:1] PMIX ERROR: PMIX_ERR_SYS_LIMITS_PIPES in file /x/iof_base_setup.c at line 119", "ulimit -n"),
        (b"[vm:1] PRTE ERROR: Unknown error in file /x/odls/default/odls_default_module.c at line 579", "ulimit -u"),
        # of slurmstepd
        (b"slurmstepd-a: error: *** JOB 4 ON a CANCELLED AT 2026-11-29T10:34:16 DUE TO TIME LIMIT ***", "--wall-time"),
        (
            b"slurmstepd-a: error: Detected 1 oom_kill event in StepId=4.0. Some of the step tasks have",
            "--mem",
        ),
        (b"WARNING: Open MPI failed to TCP connect to a peer MPI process.  This", "--interface"),
    ],
)
def test_an_mpirun_that_meets_a_limit_has_words_of_its_own(said: bytes, advice: str) -> None:
    assert advice in limits.advice([b"", said])


@pytest.mark.parametrize("command", ["run -c 1 -s 1 program.py", "doctor --machine"])
@pytest.mark.parametrize("error", ["EPERM", "ENOSYS"])
def test_a_filter_that_refuses_threads_is_named(command: str, error: str, tmp_path: Path) -> None:
    """As that of Docker did before 20.10.10; upon ENOSYS, which newer ones say, the C library takes clone."""
    (tmp_path / "program.py").write_text("")
    filtered = [sys.executable, WITHOUT, error, "clone3"]
    done = subprocess.run(
        [*filtered, sys.executable, "-m", "kvmpi", *command.split()],
        cwd=tmp_path, capture_output=True, text=True, timeout=HANGS_S, check=False,
    )  # fmt: skip
    if done.returncode == NO_FILTERS:
        pytest.skip("no filters of seccomp")
    told = "no thread could be started, because this container's filter of system calls refuses clone3" in done.stderr
    if error == "EPERM" and os.confstr("CS_GNU_LIBC_VERSION") >= "glibc 2.34":
        assert (done.returncode, told) == (1, True), done.stderr
    else:
        assert not told, done.stderr


@pytest.mark.parametrize("error", ["EPERM", "ENOSYS"])
def test_a_sandbox_that_hides_the_cores_holds_no_mpi_up(error: str) -> None:
    """hwloc asks again and again until it is told."""
    filtered = [sys.executable, WITHOUT, error, "sched_getaffinity", sys.executable, "-m", "kvmpi"]
    program = "import kvmpi; kv = kvmpi.create('mpi'); print('worker', kv.rank, 'of', kv.mpi_size)"
    run = [*filtered, "run", "-n", "2", "--", sys.executable, "-c", program]
    job = subprocess.run(run, capture_output=True, text=True, timeout=HANGS_S, check=False)
    if job.returncode == NO_FILTERS:
        pytest.skip("no filters of seccomp")
    assert job.returncode == 0, job.stderr
    assert all(f"worker {rank} of 2" in job.stdout for rank in range(2)), job.stdout
    if error == "ENOSYS":  # which the doctor does not tell from the other
        return
    doctor = subprocess.run([*filtered, "doctor", "--json"], capture_output=True, text=True, timeout=HANGS_S)
    found = {finding["check"]: finding for finding in json.loads(doctor.stdout)["findings"]}
    assert found["mpirun -n 2"]["level"] == "warning", found["mpirun -n 2"]
    assert "a plain mpirun, or a program that loads MPI, never starts" in found["mpirun -n 2"]["means"]
    assert "HWLOC_COMPONENTS=no_os,stop" in found["mpirun -n 2"]["do"]


def test_nor_is_it_under_a_plain_mpirun(tmp_path: Path) -> None:
    mpi = mpirun.find(mpirun.clean(os.environ), 2)
    env = {
        **mpirun.clean(os.environ),
        **mpi.env(str(tmp_path), "", crowded=True, one_host=True),
        "KVMPI_TIMEOUT_S": "3",
    }
    words = [*mpi.command(2, local=True), sys.executable, str(PROGRAM), "mpi", "early"]
    ended = subprocess.run(words, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode, ended.stderr
    assert "this rank waits here for the others: one of them has ended" in ended.stderr, ended.stderr


def test_a_job_inside_a_job_writes_nothing_over_it(tmp_path: Path) -> None:
    outer = tmp_path / "t.json"
    options = f"-n 2 -c 2 -s 1 --timeline {outer} --snapshot-dir {tmp_path / 'snapshots'} --snapshot-every 1"
    job = run_job(options, PROGRAM, "dist_sync", "nested")
    assert job.returncode == 0, job.stderr
    assert "the inner job ended with 0" in job.stdout, job.stdout + job.stderr
    assert {"worker 0", "worker 1"} <= {event["args"].get("name") for event in metadata(outer)}


def metadata(timeline: Path) -> list[dict[str, Any]]:
    return [event for event in json.loads(timeline.read_text())["traceEvents"] if event["ph"] == "M"]


def test_two_jobs_do_not_share_a_timeline(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    env = {name: value for name, value in os.environ.items() if not name.startswith("KVMPI_")}
    command = [sys.executable, "-m", "kvmpi", "run", "--timeline", str(path), "-n", "1", "--", "sleep", "100"]
    first = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: is_held(str(tmp_path / "t.json.parts")), "the place of the parts")
        second = run_job(f"--timeline {path} -n 1", Path("true"))
        assert second.returncode == 2
        assert "another job, which still runs, writes its timeline there" in second.stderr
    finally:
        first.send_signal(signal.SIGINT)
        first.wait(60)
    assert run_job(f"--timeline {path} -n 1", Path("true")).returncode == 0
