"""A running job gets one more server, which takes its share and is looked after like the others."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from jobs import wait_for

from kvmpi.launchers import top

GROWING = str(Path(__file__).parent / "programs" / "growing.py")


def add_server(job_id: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvmpi", "add-server", job_id]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


def job_id_of(job) -> str:
    return next(environ["KVMPI_JOB_ID"] for environ in job.environs().values() if "KVMPI_JOB_ID" in environ)


def test_a_server_that_is_added_takes_its_share_and_may_die(launch, tmp_path):
    settings = {"KVMPI_TIMEOUT_S": "40", "KVMPI_HEARTBEAT_TIMEOUT_S": "3", "KVMPI_HEARTBEAT_S": "0.3"}
    job = launch("-n", "2", "-c", "2", "-s", "2", "--replicas", "1", GROWING, "dist_sync", env=settings, whole=True)
    wait_for(lambda: (tmp_path / "runs").exists() or job.process.poll() is not None, "the first steps")
    job_id = job_id_of(job)
    folder = top.choose(top.find_jobs(top.folders()), job_id)["folder"]

    def share(rank: int) -> int:
        """Bytes of values that a server holds."""
        return sum(row["held_bytes"] for row in top.look(folder)["servers"] if row["rank"] == rank)

    for rank in (2, 3):
        asked = add_server(job_id)
        assert (asked.returncode, asked.stdout) == (0, f"server {rank} of job {job_id} is starting\n"), asked.stderr
        wait_for(lambda rank=rank: share(rank) > 50_000, f"values on server {rank}")
    [victim] = job.pids(ROLE="server", RANK="2")
    os.kill(victim, signal.SIGKILL)
    wait_for(lambda: job.pids(ROLE="server", RANK="2") not in ([], [victim]), "another process of server 2")
    wait_for(lambda: share(2) > 50_000, "values on server 2 again")
    (tmp_path / "stop").touch()
    assert job.finish(60.0) == 0, job.stderr
    steps = [int(text) for text in re.findall(r"\] 0 wrong after (\d+) steps", job.stdout)]
    assert len(steps) == 2, job.stdout + job.stderr
    assert steps[0] == steps[1] > 10
    assert "kvmpi run: server 3 is added" in job.stderr
    assert "server 2 was killed by SIGKILL; it is started again (1 of 20)" in job.stderr
    assert add_server(job_id).returncode == 1
    assert not folder.exists()


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
