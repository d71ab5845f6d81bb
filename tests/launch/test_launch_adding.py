"""A running job gets one more server, which takes its share and is looked after like the others."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import HANGS_S, wait_for

from kvmpi.benchmarks.netlab import PRIVATE, NetLab
from kvmpi.launchers import top

GROWING = str(Path(__file__).parent / "programs" / "growing.py")


def add_server(job_id: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvmpi", "add-server", job_id]
    return subprocess.run(command, capture_output=True, text=True, timeout=HANGS_S, check=False)


def job_id_of(job) -> str:
    return next(environ["KVMPI_JOB_ID"] for environ in job.environs().values() if "KVMPI_JOB_ID" in environ)


def holders(folder: Path) -> set[int]:
    """The servers that hold more than a few bytes of values."""
    return {row["rank"] for row in top.look(folder)["servers"] if row["held_bytes"] > 50_000}


def test_a_server_that_is_added_takes_its_share_and_may_die(launch, tmp_path):
    settings = {"KVMPI_TIMEOUT_S": "40", "KVMPI_HEARTBEAT_TIMEOUT_S": "3", "KVMPI_HEARTBEAT_S": "0.3"}
    job = launch("-n", "2", "-c", "2", "-s", "2", "--replicas", "1", GROWING, "dist_sync", env=settings, whole=True)
    wait_for(lambda: (tmp_path / "runs").exists() or job.process.poll() is not None, "the first steps")
    job_id = job_id_of(job)
    folder = top.choose(top.find_jobs(top.folders()), job_id)["folder"]

    for rank in (2, 3):
        asked = add_server(job_id)
        assert (asked.returncode, asked.stdout) == (0, f"server {rank} of job {job_id} is starting\n"), asked.stderr
        wait_for(lambda rank=rank: rank in holders(folder), f"values on server {rank}")
    [victim] = job.pids(ROLE="server", RANK="2")
    os.kill(victim, signal.SIGKILL)
    wait_for(lambda: job.pids(ROLE="server", RANK="2") not in ([], [victim]), "another process of server 2")
    wait_for(lambda: 2 in holders(folder), "values on server 2 again")
    (tmp_path / "stop").touch()
    assert job.finish(60.0) == 0, job.stderr
    steps = [int(text) for text in re.findall(r"\] 0 wrong after (\d+) steps", job.stdout)]
    assert len(steps) == 2, job.stdout + job.stderr
    assert steps[0] == steps[1] > 10
    assert "kvmpi run: server 3 is added" in job.stderr
    assert "server 2 was killed by SIGKILL; it is started again (1 of 20)" in job.stderr
    assert add_server(job_id).returncode == 1
    assert not folder.exists()


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root")
def test_servers_are_added_on_the_hosts_of_the_others(tmp_path):
    if shutil.which("ip") is None or shutil.which("nsenter") is None:
        pytest.skip("needs iproute2 and nsenter")
    with NetLab(2, link=None) as lab:
        listed = ",".join(f"{name}:1" for name in lab.hosts)
        words = [
            "--remote-shell",
            f"{PRIVATE}/agent",
            "--hosts",
            listed,
            "--interface",
            lab.subnet,
            "-n2",
            "-c2",
            "-s2",
        ]
        env = {name: value for name, value in os.environ.items() if not name.startswith("KVMPI_")}
        env["KVMPI_TIMEOUT_S"] = "40"

        def on(host: int, *command: str) -> subprocess.Popen[str]:
            command = lab.command_on(host, [sys.executable, "-m", "kvmpi", *command])
            return subprocess.Popen(
                command, env=env, cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )

        job = on(0, "run", *words, GROWING, "dist_sync")
        try:
            wait_for(lambda: (tmp_path / "runs").exists() or job.poll() is not None, "the first steps")
            assert job.poll() is None, job.communicate()
            [card] = [card for card in top.find_jobs(top.folders()) if card["pid"] == job.pid]
            folder = card["folder"]
            for rank in (2, 3):
                said, complaint = on(0, "add-server", card["job"]).communicate(timeout=HANGS_S)
                assert said.startswith(f"server {rank} of job "), complaint
            wait_for(lambda: {2, 3} <= holders(folder), "values on both")
            hosts = {row["rank"]: row["host"] for row in top.look(folder)["servers"]}
            (tmp_path / "stop").touch()
            out, err = job.communicate(timeout=HANGS_S)
        finally:
            job.kill()
        assert job.returncode == 0, err
        assert len(re.findall(r"\] 0 wrong after \d+ steps", out)) == 2, out + err
        assert hosts[0] == hosts[2] != hosts[1] == hosts[3]


def test_a_job_without_servers_gets_none(launch, write, tmp_path):
    program = write("waits.py", "import pathlib, time\npathlib.Path('runs').touch()\ntime.sleep(60)\n")
    job = launch("-n", "1", program, whole=True)
    wait_for((tmp_path / "runs").exists, "the program")
    asked = add_server(job_id_of(job))
    assert asked.returncode == 1
    assert asked.stderr.startswith("kvmpi add-server: the job was started without servers"), asked.stderr
    assert job.process.poll() is None
    job.process.send_signal(signal.SIGINT)
    assert job.finish(20.0) == 130
