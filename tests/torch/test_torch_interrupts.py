"""``DistributedOptimizer`` where training does not end well: an error in one worker, Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from jobs import HANGS_S, environs_with, is_mpirun, run_job, wait_for

HERE = Path(__file__).parent


@pytest.mark.parametrize(("options", "store", "how", "said"), [
    ("-n 2", "mpi", "raise", "ArithmeticError: only worker 1"),
    ("-n 2", "mpi", "interrupt", "KeyboardInterrupt"),
    ("-n 2 -c 2 -s 1", "dist_sync", "raise", "ArithmeticError: only worker 1"),
])  # fmt: skip
def test_an_error_in_one_worker_ends_all(options, store, how, said, tmp_path):
    start_s = time.monotonic()
    done = run_job(options, HERE / "optimizer_fails.py", store, how, tmp_path, settings={"timeout_s": 100})
    assert done.returncode == (130 if how == "interrupt" else 1)
    assert said in done.stderr
    assert f"worker 1 (client {options.count('-c')}) ended" in done.stderr
    assert "went on" not in done.stdout
    assert time.monotonic() - start_s < 90, "the other worker waited until its own deadline"
    assert 1 <= done.stderr.count("] Traceback") <= 2  # beside the last words once more
    assert "MPI_ABORT" not in done.stderr


def test_a_worker_that_catches_its_interrupt_and_closes_the_store_leaves_nobody_waiting(tmp_path):
    done = run_job("-n 2", HERE / "optimizer_fails.py", "mpi", "give_up", tmp_path, settings={"timeout_s": 100},
                   timeout_s=HANGS_S)  # fmt: skip
    assert "[worker 1] gave up after KeyboardInterrupt" in done.stdout
    assert "went on" not in done.stdout
    assert done.returncode == 1


# ---- Ctrl-C


def training(folder: Path) -> list[int]:
    """The pids of the workers that have done a step, in the order of their ranks."""
    return [int(path.name.split(".")[1]) for path in sorted(folder.glob("*.training"))]


def shared_memory(pids: list[int]) -> set[str]:
    """Files in /dev/shm that these processes have mapped."""
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    found = {line.split(maxsplit=5)[5] for line in lines if "/dev/shm/" in line}
    return {path for path in found if os.path.exists(path)}


@pytest.mark.parametrize(("command", "store", "whom", "status"), [
    ("kvmpi run -n 3 -c 2 -s 1", "dist_sync_mpi", "group", 130),
    ("kvmpi run -n 3 -c 2 -s 1", "dist_sync_mpi", "rank", 130),
    ("kvmpi run -n 2", "mpi", "ranks", 130),
    ("kvmpi run -n 2", "mpi", "mpirun", 1),
    ("mpirun --oversubscribe -n 2", "mpi", "group", None),
    ("mpirun --oversubscribe -n 2", "mpi", "rank", 130),
])  # fmt: skip
def test_ctrl_c_ends_training(command, store, whom, status, tmp_path):
    """To the foreground process group, as a terminal sends it; to a rank or all; to mpirun alone."""
    scripts, program = Path(sys.executable).parent, [str(HERE / "optimizer_fails.py"), store, "endless", str(tmp_path)]
    first, *options = command.split()
    program = program if first == "kvmpi" else [sys.executable, *program]
    mark = f"TEST_MARK={uuid.uuid4().hex}"
    env = {name: value for name, value in os.environ.items() if not name.startswith("KVMPI_")}
    env |= {"KVMPI_TIMEOUT_S": "100", "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    job = subprocess.Popen(
        [str(scripts / first), *options, *program], env=env | dict([mark.split("=")]), stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        size = int(options[options.index("-n") + 1])
        wait_for(lambda: len(training(tmp_path)) == size or job.poll() is not None, "the first step", 120)
        assert job.poll() is None, job.communicate()
        ranks = training(tmp_path)
        shared = shared_memory(ranks)
        assert shared, "the ranks of a host share memory"
        if whom == "group":
            os.killpg(job.pid, signal.SIGINT)
        elif whom == "mpirun":
            os.kill(next(filter(is_mpirun, environs_with(mark))), signal.SIGINT)
        else:
            for pid in ranks if whom == "ranks" else ranks[1:2]:
                os.kill(pid, signal.SIGINT)
        said, errors = job.communicate(timeout=HANGS_S)
    finally:
        for pid in [] if job.returncode is not None else environs_with(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    assert job.returncode == status or (status is None and job.returncode > 0), errors
    wait_for(lambda: not environs_with(mark), "the end of all processes", 0 if first == "kvmpi" else 10)
    assert not [path for path in shared if os.path.exists(path)]
    assert not said
    assert "During handling" not in errors
    if whom in ("rank", "ranks"):
        assert "KeyboardInterrupt" in errors
    # A rank that hears of it, or of a server's end, before the launcher has stopped it may say so. The launcher may
    # quote one of them, indented.
    assert len(re.findall("^(?! ).*Traceback", errors, re.MULTILINE)) <= size, errors
    if first == "kvmpi":
        assert "MPI_ABORT" not in errors
        (last,) = [line for line in errors.splitlines() if line.startswith("kvmpi run:")]
        assert last.startswith({
            "group": "kvmpi run: stopped by SIGINT", "mpirun": "kvmpi run: client 0 (mpirun of workers 0 to 1) ended",
        }.get(whom, "kvmpi run: worker "))  # fmt: skip
