"""Whole jobs that are killed, and go on from what their servers have written."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jobs import wait_for

from kvmpi.launchers.command import main

Launch = Callable[..., Any]  # see conftest.LaunchedJob
STEPS = str(Path(__file__).parent / "programs" / "steps.py")


def complete(folder: Path) -> list[int]:
    return sorted(int(manifest.parent.name) for manifest in folder.glob("*/snapshot.json"))


def kill_all(job: Any) -> None:
    """SIGKILL for every process at once, the launcher and its watchdog included, so that nobody clears up."""
    pids = sorted(job.environs())
    folders = {environ["KVMPI_JOB_DIR"] for environ in job.environs().values() if "KVMPI_JOB_DIR" in environ}
    assert job.process.pid in pids
    for number in (signal.SIGSTOP, signal.SIGKILL):  # a watchdog that sees its launcher die is quick
        for pid in pids:
            os.kill(pid, number)
    job.process.wait()
    wait_for(lambda: not job.environs(), "the end of all processes")
    job.stdout, job.stderr = job.process.communicate()
    for folder in folders:
        shutil.rmtree(folder)
        shutil.rmtree(Path("/dev/shm", Path(folder).name), ignore_errors=True)


@pytest.mark.parametrize(("store", "shape", "rule"), [
    ("dist_sync", "-n 2 -c 2 -s 2", "adam"), ("dist_sync_mpi", "-n 2 -c 2 -s 2 --replicas 1", "momentum"),
])  # fmt: skip
def test_a_job_that_was_killed_goes_on_bit_by_bit(
    launch: Launch, tmp_path: Path, store: str, shape: str, rule: str
) -> None:
    def start(out: str, *options: str, stop_at: tuple[str, ...] = ()) -> Any:
        return launch(*shape.split(), *options, STEPS, out, "40", rule, store, *stop_at, whole=True)

    snapshots, workers = tmp_path / "snapshots", int(shape.split()[1])
    whole = start("whole")
    killed = start("killed", "--snapshot-dir", "snapshots", "--snapshot-every", "3", stop_at=("18",))
    wait_for(lambda: complete(snapshots), "a snapshot")
    kill_all(killed)
    first = complete(snapshots)[-1]
    assert first in (3, 6, 9, 12, 15)  # after each of which a key is pushed before all others
    assert whole.finish(60.0) == 0, whole.stderr
    # Once more, and from another number than a multiple of what it was resumed from.
    killed = start("killed", "--resume", "snapshots", "--snapshot-every", "7", stop_at=("29",))
    wait_for(lambda: complete(snapshots)[-1] > first, "another snapshot")
    kill_all(killed)
    second = complete(snapshots)[-1]
    # In the first step of a process it is not clear yet what belongs to it, but for keys of one call.
    assert second in (7, 14, 21, 28) if store == "dist_sync_mpi" else first < second < 29
    assert killed.stdout.count(f"resumed at {first}\n") == workers
    done = start("done", "--resume", "snapshots")
    assert done.finish(60.0) == 0, done.stderr
    assert done.stdout.count(f"resumed at {second}\n") == workers
    assert not (tmp_path / "killed").exists()
    assert (tmp_path / "done").read_bytes() == (tmp_path / "whole").read_bytes()
    assert complete(snapshots)[-1] == second  # --resume alone writes none


def test_snapshots_by_time_of_an_asynchronous_store(launch: Launch, tmp_path: Path) -> None:
    options = ["-n", "2", "-c", "2", "-s", "2", "--snapshot-seconds", "0.3"]
    job = launch(
        *options, "--snapshot-dir", "snapshots", STEPS, "out", "100000", "adam", "dist_async",
        env={"KVMPI_HEARTBEAT_S": "0.1"}, whole=True,
    )  # fmt: skip
    wait_for(lambda: len(complete(tmp_path / "snapshots")) == 2, "two snapshots")
    kill_all(job)
    newest = complete(tmp_path / "snapshots")[-1]
    shape = ["-n", "3", "-c", "2", "-s", "2"]  # its clients may have more workers
    job = launch(*shape, "--resume", "snapshots", STEPS, "out", "0", "adam", "dist_async_mpi", whole=True)
    assert job.finish(60.0) == 0, job.stderr
    steps = [int(line.split("resumed at ")[1]) for line in job.stdout.splitlines()]
    assert len(steps) == 3
    assert len(set(steps)) == 1
    assert 0 < steps[0] <= newest  # of each client; the number counts the updates of both


def test_pushes_that_wait_for_others_do_so_in_the_resumed_job(launch: Launch, tmp_path: Path) -> None:
    snapshots, shape = tmp_path / "snapshots", ["-n", "2", "-c", "2", "-s", "1"]
    program = str(Path(__file__).parent / "programs" / "waiting.py")
    job = launch(
        *shape, "--snapshot-dir", "snapshots", "--snapshot-seconds", "0.2", program,
        env={"KVMPI_HEARTBEAT_S": "0.1"}, whole=True,
    )  # fmt: skip
    wait_for(lambda: len([*tmp_path.glob("there-*")]) == 2, "the push that waits")
    begun = max(complete(snapshots), default=0)
    wait_for(lambda: len([number for number in complete(snapshots) if number > begun]) == 2, "two snapshots of it")
    kill_all(job)
    job = launch(*shape, "--resume", "snapshots", program, whole=True)
    assert job.finish(60.0) == 0, job.stderr
    assert job.stdout.count("right") == 2


def test_a_resume_that_cannot_be(launch: Launch, tmp_path: Path) -> None:
    job = launch("-s", "1", "--resume", "nothing", STEPS, "out", "1", "adam", "dist_sync", whole=True)
    assert job.finish(60.0) == 1
    assert f"ConfigError: resume from {tmp_path / 'nothing'}: no usable snapshot; there is no such folder" in job.stderr


@pytest.mark.parametrize(("environ", "found"), [
    ({"SLURM_RESTART_COUNT": "2"}, True), ({"LSB_RESTART": "Y"}, True), ({"SLURM_RESTART_COUNT": "0"}, False),
    ({}, False),
])  # fmt: skip
def test_a_batch_job_that_is_run_once_more_goes_on(
    environ: dict[str, str],
    found: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The command line is the same again; what it has left tells how far it was."""
    for name in ("SLURM_RESTART_COUNT", "LSB_RESTART"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    folder, command = tmp_path / "snapshots", ["-s1", "--dry-run", "--snapshot-every", "5"]
    for there in (False, True):
        if there:
            (folder / "15").mkdir(parents=True)
            (folder / "15" / "snapshot.json").touch()
        assert main([*command, "--snapshot-dir", str(folder), STEPS]) == 0
        assert (f"KVMPI_RESUME={folder}\n" in capsys.readouterr().out) is (found and there)
