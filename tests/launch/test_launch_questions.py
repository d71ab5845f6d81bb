"""kvmpi top --stacks and SIGUSR1: ranks that an mpirun, or a jsrun, has started on other hosts answer too."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from batch_sites import PROGRAMS, TIMEOUT_S, Site, jsm_site
from jobs import wait_for
from test_launch_hosts import PrivateHosts, needs_root
from test_launch_kill import needs_mpi

from kvmpi.benchmarks.netlab import NetLab
from kvmpi.errors import UnsupportedError
from kvmpi.launchers import mpirun

pytestmark = [needs_mpi, needs_root]
Started = tuple[list[str], dict[str, str]]


@contextlib.contextmanager
def on_hosts(request: pytest.FixtureRequest, folder: Path) -> Iterator[Started]:
    """Three hosts that share nothing but a network; the mpirun is with the launcher on the first."""
    try:
        with NetLab(3, link=None) as lab:
            apart = PrivateHosts(folder, lab.hosts[1:], lab)
            words = ["--remote-shell", str(apart.shell), "--interface", lab.subnet]
            words += ["--hosts", ",".join(f"{name}:1" for name in lab.hosts)]
            try:
                yield lab.command_on(0, [sys.executable, "-m", "kvmpi", "run", *words]), {"TMPDIR": apart.temporary}
            finally:
                apart.close()
    except UnsupportedError as error:
        pytest.skip(str(error))


@contextlib.contextmanager
def in_slurm(request: pytest.FixtureRequest, folder: Path) -> Iterator[Started]:
    """A client that is a batch job of its own, on as many nodes as it has ranks; the mpirun is on one of these."""
    site: Site = request.getfixturevalue("slurm")
    if site.lab is None:
        pytest.skip("needs nodes with names of their own")
    words = ["--launcher", "slurm", "--interface", site.network, "--batch-dir", str(site.folder), "--client-hosts", "3"]
    yield site.on([sys.executable, "-m", "kvmpi", "run", *words]), site.env


@contextlib.contextmanager
def in_jsm(request: pytest.FixtureRequest, folder: Path) -> Iterator[Started]:
    try:
        with NetLab(3, link=None) as lab:
            site = jsm_site(folder, lab, mpirun.find(os.environ, 2).path)
            words = ["--launcher", "lsf", "--interface", site.network]
            yield site.on([sys.executable, "-m", "kvmpi", "run", *words]), site.env
    except UnsupportedError as error:
        pytest.skip(str(error))


PLACES = {"hosts": on_hosts, "slurm": in_slurm, "jsrun": in_jsm}


@pytest.mark.parametrize("place", list(PLACES))
def test_ranks_on_all_hosts_answer(place: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    with PLACES[place](request, tmp_path) as (command, env):
        said = ask(command, env, "sum_on_hosts.py", "wait")
    for who in ("scheduler", "server 0", "worker 0", "worker 1", "worker 2"):
        assert len(re.findall(rf"kvmpi: {who} [^\n]*waits for nothing in kvmpi", said)) == 1, f"{who} in {said}"
    stacks = re.findall(r"^\[scheduler\] thread (.+?) \(most recent call first\)", said, re.MULTILINE)
    assert stacks[0] == "MainThread", f"what people look for comes first: {stacks}"
    assert len(stacks) > 1
    assert "kvmpi-waits" not in stacks, "who answers"
    assert said.count("thread MainThread (most recent call first)") == 5, said
    assert said.count("stopped by SIGINT") == 1


def test_ranks_that_cannot_answer_are_left_alone(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """SIGUSR1 ends whoever does not handle it."""
    with on_hosts(request, tmp_path) as (command, env):
        said = ask(command, env, "stuck.py")
    assert "asked server 0" in said
    assert "the ranks of client 0" in said
    assert "waits for nothing" in said, "the server has answered"
    assert "SIGUSR1" not in said.replace("SIGUSR1: asked", "")
    assert said.count("stopped by SIGINT") == 1, said


@pytest.mark.parametrize("place", ["hosts", "slurm"])
def test_ranks_on_all_hosts_have_the_grace(place: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    with PLACES[place](request, tmp_path) as (command, env):
        env = {**{name: value for name, value in os.environ.items() if not name.startswith("KVMPI_")}, **env}
        program = str(PROGRAMS / "saving.py")
        with subprocess.Popen(
            [*command, "-n3", "-s1", program], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as job:
            assert job.stdout is not None
            assert all("is at work" in job.stdout.readline() for _ in range(3))
            job.send_signal(signal.SIGTERM)
            out, err = job.communicate(timeout=TIMEOUT_S)
    assert job.returncode == 143, out + err
    assert out.count("has summed 3.0 after 2 s") == 3, out + err
    assert err.count("kvmpi run:") == 1, err


def answered(who: str, lines: list[str]) -> bool:
    return any(f"kvmpi: {who} waits for nothing" in line for line in lines)


def ask(command: list[str], env: dict[str, str], *program: str) -> str:
    """Run three workers in one client and a server, ask when all are there, end the job; its standard error."""
    env = {**{name: value for name, value in os.environ.items() if not name.startswith("KVMPI_")}, **env}
    words = [*command, "-n3", "-s1", str(PROGRAMS / program[0]), *program[1:]]
    job = subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    limit = threading.Timer(TIMEOUT_S, job.kill)
    limit.start()
    lines: list[str] = []
    assert job.stdout is not None
    assert job.stderr is not None
    reader = threading.Thread(target=lambda: lines.extend(job.stderr), daemon=True)  # type: ignore[arg-type]
    reader.start()
    try:
        there = [job.stdout.readline() for _ in range(3)]
        assert all(there), lines
        if program[-1] == "wait":  # for others, so that all can answer
            job.send_signal(signal.SIGUSR1)
            stack = "thread MainThread (most recent call first)"
            wait_for(lambda: "".join(lines).count(stack) >= 5, f"answers but {lines}", 30.0)
        else:
            deadline = time.monotonic() + 30.0
            while not (answered("server 0", lines) and answered("scheduler", lines)):
                assert time.monotonic() < deadline, lines
                job.send_signal(signal.SIGUSR1)
                time.sleep(0.5)
        job.send_signal(signal.SIGINT)
        job.wait()
    finally:
        limit.cancel()
        job.kill()
        job.wait()
        reader.join(10)
    return "".join(lines)
