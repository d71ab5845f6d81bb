"""kill -9 of any process of a job, on several hosts and in batch systems: within ten seconds all of it is gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from batch_sites import PROGRAMS, TIMEOUT_S, Site
from jobs import await_lines, command_line, environs_with, is_mpirun, wait_for
from test_launch_hosts import PrivateHosts, assert_nothing_is_left, needs_root
from test_launch_kill import needs_mpi

from kvmpi.benchmarks.netlab import NetLab
from kvmpi.errors import UnsupportedError

pytestmark = [needs_mpi, needs_root]
#: Client 0 is an mpirun with two ranks, client 1 a process of its own.
SHAPE = ["-n", "3", "-c", "2", "-s", "1", str(PROGRAMS / "stuck.py")]
WITHIN_S = 10.0


@pytest.fixture(scope="module")
def lab() -> Iterator[NetLab]:
    try:
        with NetLab(3, link=None) as made:
            yield made
    except UnsupportedError as error:
        pytest.skip(str(error))


#: On which host, and what stands on its command line; the launcher is on host 0, with the mpirun of client 0.
ON_HOSTS = {
    "mpirun": (0, ""),
    "the helper of mpirun": (1, "/prted "),
    "a rank": (1, "rank_main.py"),
    "what starts a worker": (2, "remote_exec.py"),
    "the watchdog of a host": (2, "watchdog.py"),
    "the launcher": (0, ""),
}


@pytest.mark.parametrize("victim", list(ON_HOSTS))
def test_on_hosts_that_share_nothing(victim: str, lab: NetLab, tmp_path: Path) -> None:
    apart = PrivateHosts(tmp_path, lab.hosts[1:], lab)
    mark = f"TEST_MARK={os.urandom(8).hex()}"
    env = {name: value for name, value in os.environ.items() if not name.startswith("KVMPI_")}
    env |= {"TMPDIR": apart.temporary, "TEST_MARK": mark.partition("=")[2]}
    words = ["--remote-shell", str(apart.shell), "--interface", lab.subnet]
    words += ["--hosts", ",".join(f"{name}:1" for name in lab.hosts), *SHAPE]
    job = subprocess.Popen(
        lab.command_on(0, [sys.executable, "-m", "kvmpi", "run", *words]), env=env, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        await_lines(job, 3, "stuck", TIMEOUT_S)
        host, words_of = ON_HOSTS[victim]
        if victim == "the launcher":
            pid = job.pid
        elif host == 0:
            pid = next(pid for pid in environs_with(mark) if is_mpirun(pid))
        else:
            pid = apart.pids_of(lab.hosts[host], words_of)[-1]  # before it comes a shell with the same words
        os.kill(pid, signal.SIGKILL)
        if victim == "the watchdog of a host":  # nothing has happened to the job itself
            job.send_signal(signal.SIGINT)
        killed_s = time.monotonic()
        _, err = job.communicate(timeout=TIMEOUT_S)
        assert job.returncode == {"the launcher": -9, "the watchdog of a host": 130}.get(victim, job.returncode)
        assert job.returncode != 0, err
        assert_nothing_is_left(apart, WITHIN_S - (time.monotonic() - killed_s))
        wait_for(lambda: not environs_with(mark), "the end of all processes", WITHIN_S)
        assert os.listdir(apart.temporary) == []
    finally:
        job.kill()
        job.wait()
        apart.close()


@pytest.mark.parametrize(
    "victim", ["batch_exec client-0", "remote_exec.py client-0", "group of remote_exec.py client-1"]
)
def test_in_a_batch_system(victim: str, site: Site) -> None:
    """What stands for a batch job here, and what runs in it there. For the launcher see test_launch_batch.

    Where the system starts jobs itself the launcher has process numbers of its own, and does not see them.
    """
    own = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", '"$@"; exit $?', "sh"]
    job = site.start(*SHAPE, prefix=own if site.name == "slurm" else ())
    try:
        await_lines(job, 3, "stuck", TIMEOUT_S)
        job_id = site.job_id()
        assert len([path for path in site.files_of(job_id) if "-client-" in path]) >= 2, "there is what may be left"
        *group, program, name = victim.split()
        lines = {pid: command_line(pid) for pid in environs_with(site.mark)}
        fitting = [pid for pid, line in lines.items() if program in line and f"-{name}" in line]
        wanted = [pid for pid in fitting if ("batch_exec" in lines[pid]) is program.startswith("batch")]
        if group:
            os.killpg(os.getpgid(min(wanted)), signal.SIGKILL)
        else:
            os.kill(min(wanted), signal.SIGKILL)
        killed_s = time.monotonic()
        _, err = job.communicate(timeout=TIMEOUT_S)
        assert job.returncode not in (0, None), err
        site.assert_nothing_is_left(WITHIN_S - (time.monotonic() - killed_s), job_id)
        wait_for(lambda: not running(site), "the end of all batch jobs", WITHIN_S)
    finally:
        job.kill()
        job.wait()


def running(site: Site) -> list[str]:
    """Batch jobs that have not ended."""
    if site.name == "slurm":
        words = ["squeue", "--noheader", "--states=PENDING,RUNNING"]
        done = subprocess.run(site.on(words), env=site.env, capture_output=True, text=True, check=True)
        return done.stdout.split()
    states = [(number / "state").read_text() for number in (site.folder.parent / "jobs").iterdir()]
    return [state for state in states if state not in ("DONE", "EXIT")]
