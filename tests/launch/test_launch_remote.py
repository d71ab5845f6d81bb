"""The launcher's end of processes on other hosts: what they are told, and how long it waits for whom."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from jobs import HANGS_S

from kvmpi.launchers import batch_exec, batch_states, job, processes, reach
from kvmpi.launchers.batch import SYSTEMS
from kvmpi.launchers.hosts import Host, Layout
from kvmpi.launchers.mpirun import MPI
from kvmpi.launchers.program import Program
from kvmpi.launchers.reach import Reach
from kvmpi.launchers.remote import RemoteProcess

#: Runs a command as on another host, whose batch system has set this.
WAY = ("env", "CUDA_VISIBLE_DEVICES=2,3", "SLURMD_NODENAME=there")


def run_there(kind: str, env: dict[str, str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment that a process has there."""
    monkeypatch.setattr(Reach, "command", lambda self, host, command: (*self.words, *command))
    read_end, write_end = os.pipe()
    child = RemoteProcess(
        Reach(kind, WAY), "there", ("/usr/bin/env",), {**os.environ, **env}, local_env=os.environ,
        folders=(str(folder),), files={},
        address={}, stdout=write_end, stderr=2,
    )  # fmt: skip
    os.close(write_end)
    deadline = time.monotonic() + HANGS_S
    while not child.write() and time.monotonic() < deadline:
        time.sleep(0.001)
    with open(read_end) as output:
        found = dict(line.split("=", 1) for line in output.read().splitlines() if "=" in line)
    while child.poll() is None:
        time.sleep(0.01)
    return found


@pytest.mark.parametrize(("kind", "devices"), [("ssh", "0,1"), ("srun", "2,3"), ("blaunch", "2,3")])
def test_a_batch_system_says_which_devices_are_whose(
    kind: str, devices: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = run_there(kind, {"CUDA_VISIBLE_DEVICES": "0,1", "MINE": "5"}, tmp_path, monkeypatch)
    assert (found["CUDA_VISIBLE_DEVICES"], found["MINE"]) == (devices, "5")
    assert ("SLURMD_NODENAME" in found) is (kind != "ssh")


def test_a_long_environment_goes_through_small_pipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the pipes of one user may take is limited: from some hundred hosts on, new ones take a page or two."""
    real = os.pipe

    def small() -> tuple[int, int]:
        ends = real()
        fcntl.fcntl(ends[1], fcntl.F_SETPIPE_SZ, 4096)
        return ends

    monkeypatch.setattr(os, "pipe", small)
    told = " ".join(map(str, range(20_000)))
    assert run_there("ssh", {"MINE": told}, tmp_path, monkeypatch)["MINE"] == told


def test_ranks_on_other_hosts_have_the_environment_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    of_hosts = ("SLURM_CPU_BIND", "SSH_CONNECTION", "TMPDIR", "PWD", "PMIX_RANK", "BASH_FUNC_x%%", "_")
    environ = dict.fromkeys(("HF_HOME", "NCCL_DEBUG", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", *of_hosts), "x")
    found: dict[str, set[str]] = {}
    for kind in ("ssh", "srun"):
        hosts = (Host("a", 1), Host("b", 1))
        places = job.Places(Layout((), (hosts,)), Reach(kind, ("way",)), "a", "10.0.0.1", "")
        made = job.plan(
            Program((sys.executable,), ("train.py",), ()), num_workers=2, num_clients=1, num_servers=0, environ=environ,
            job_id="abc", job_dir="/jobs/abc", mpi=MPI("/opt/mpi/bin/mpirun", "openmpi"), places=places,
        )  # fmt: skip
        (client,) = made.of_role("client")
        found[kind] = {name for option, name in itertools.pairwise(client.command) if option == "-x"}
    assert {"HF_HOME", "NCCL_DEBUG", "LD_LIBRARY_PATH", "KVMPI_SCHEDULER", "KVMPI_JOB_ID"} <= found["srun"]
    assert found["ssh"] - found["srun"] == {"CUDA_VISIBLE_DEVICES"}
    assert not found["ssh"] & set(of_hosts)


def test_steps_are_not_bound_as_the_one_that_starts_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "srun").write_text('#!/bin/sh\necho "bound ${SLURM_CPU_BIND-to nothing} $*"\n')
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("SLURM_CPU_BIND", "quiet,mask_cpu:0x1")
    (tmp_path / "agent").write_text(reach.srun().agent())
    for command in (reach.srun().command("n7", ["true"]), ["sh", str(tmp_path / "agent"), "n7", "true"]):
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stdout.startswith("bound to nothing --overlap")


def test_an_order_that_is_there_already_reaches_the_process(tmp_path: Path) -> None:
    """A job that ends while it begins: what is to run has not got as far as having a group of its own."""
    spec = {
        "word": "word", "command": ["sleep", "5"], "env": dict(os.environ), "cwd": "/", "folders": [str(tmp_path)],
        "files": {}, "kept": [], "alone": False, "spans": False, "mpirun": False, "job": "",
    }  # fmt: skip
    slow = "import os, sys, time; from kvmpi.launchers import remote_exec; setsid = os.setsid\n"
    slow += "os.setsid = lambda: (time.sleep(0.3), setsid()); sys.exit(remote_exec.main([]))"
    told = f"{json.dumps(spec)}\n{int(signal.SIGTERM)}\n"
    with subprocess.Popen(
        [sys.executable, "-c", slow], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as there:
        assert there.stdin is not None
        there.stdin.write(told)
        there.stdin.flush()  # and stays open: its end would mean that the launcher has ended
        assert there.wait() == 128 + signal.SIGTERM


def test_hosts_that_are_out_of_reach_are_waited_for_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "OTHERS_S", 0.3)
    monkeypatch.setattr(processes, "AGAIN_S", 0.2)
    waited: list[float] = []
    real = subprocess.Popen.wait

    def wait(self: Any, timeout: float | None = None) -> int:
        waited.append(timeout or 0.0)
        return real(self, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", wait)
    here = processes.Watchdog("0" * 16, [])
    here.others = [processes.Watchdog("0" * 16, [], lambda _: ["sleep", "1000"]) for _ in range(5)]
    here.finish()
    assert sum(waited[1:]) < 2 * (0.3 + 0.2), waited
    assert all(other._process.returncode == -signal.SIGKILL for other in here.others)


class Silent(type(SYSTEMS["lsf"])):  # type: ignore[misc]
    """A batch system that takes jobs and does not say how they are."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def submit(self, *_: Any) -> list[str]:
        return ["echo", "Job <77> is submitted"]

    def look(self, numbers: Sequence[str]) -> list[str]:
        return ["sleep", "1000"]

    def cancel(self, numbers: Sequence[str]) -> list[str]:
        return ["sh", "-c", f"echo {' '.join(numbers)} > {self.folder}/cancelled"]


def test_a_batch_system_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Meanwhile the job is told that somebody follows it; in the end it is cancelled."""
    monkeypatch.setitem(SYSTEMS, "silent", Silent(tmp_path))
    monkeypatch.setattr(batch_states, "ANSWER_S", 0.05)
    for name, seconds in (("POLL_S", 0.01), ("PATIENCE_S", 0.4)):
        monkeypatch.setattr(batch_exec, name, seconds)
    signs = []
    real = batch_exec.BatchJob.show
    monkeypatch.setattr(batch_exec.BatchJob, "show", lambda self: (signs.append(1), real(self))[1])
    orders, write_end = os.pipe()
    os.write(write_end, json.dumps({"word": "w", "env": {"KVMPI_GRACE_S": "5.0"}}).encode() + b"\n")
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    stdin = os.dup(0)
    os.dup2(orders, 0)
    try:
        assert batch_exec.main(["silent", str(tmp_path), "client-0", json.dumps({"tasks": 1}), "--", "true"]) == 1
    finally:
        os.dup2(stdin, 0)
        for number, handler in before.items():
            signal.signal(number, handler)
        for fd in (stdin, orders, write_end):
            os.close(fd)
    assert "no answer for 0 s: sleep has not answered" in capfd.readouterr().err
    assert (tmp_path / "cancelled").read_text() == "77\n"
    assert len(signs) > 3
