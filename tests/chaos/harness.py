"""Kills processes of a real job at random moments, and sees how long it takes until all workers get on."""

from __future__ import annotations

import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from jobs import environs_with

from kvmpi.errors import ConfigError
from kvmpi.ps import scheduler_file

TRAINING = Path(__file__).with_name("training.py")
#: All of these are killed, in an order that the seed says, before one comes again.
ROLES = ("server", "worker", "server", "master", "scheduler")


@dataclass
class Report:
    """What came of it."""

    status: int
    output: str
    killed: Counter[str] = field(default_factory=Counter)
    recovery_s: list[float] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    @property
    def is_right(self) -> bool:
        """Whether all went well: four workers with three keys each, and nothing wrong or left."""
        return self.status == 0 and self.output.count("has 0 wrong elements") == 12 and not self.left

    def __str__(self) -> str:
        times = f"median {statistics.median(self.recovery_s):.2f} s, longest {max(self.recovery_s):.2f} s"
        killed = ", ".join(f"{count} x {role}" for role, count in sorted(self.killed.items()))
        return f"{len(self.recovery_s)} kills ({killed}); until all workers got on: {times}"


class Chaos:
    """One job of four workers in three clients, one of which is an MPI job, three servers and one replica.

    Args:
        kills: so many processes are killed while it trains.
        nbytes: of its largest key.
    """

    def __init__(self, seed: int, kills: int, *, store_type: str = "dist_sync_mpi", nbytes: int = 1 << 20) -> None:
        self._choose, self._kills = random.Random(seed), kills
        self._roles: list[str] = []  # whose turn is still to come
        self._store_type, self._nbytes = store_type, nbytes
        self._mark = f"CHAOS_MARK={uuid.uuid4().hex}"
        self._folders: set[Path] = set()

    def run(self, timeout_s: float = 600.0) -> Report:
        """Run the job to its end, with kills until there were enough."""
        with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
            notes, output = Path(folder), Path(folder) / "output"
            (notes / "rounds").write_text("")
            with output.open("wb") as out:
                job = self._start(notes, out)
                report = Report(0, "")
                try:
                    self._wait(lambda: min(steps_of(notes), default=0) > 3, 60.0, job)
                    for environ in self._environs().values():
                        if "KVMPI_JOB_DIR" in environ:
                            self._folders |= {Path(environ["KVMPI_JOB_DIR"])}
                            self._folders |= {Path("/dev/shm", f"kvmpi-{environ['KVMPI_JOB_ID']}")}
                    for _ in range(self._kills):
                        self._kill_one(notes, report, job)
                    finish(notes, 20)
                    report.status = job.wait(timeout_s)
                finally:
                    job.kill()
                    job.wait()
                    self._wait(lambda: not self._environs(), 10.0, None)
            report.output = output.read_text(errors="replace")
            report.left = [f"process {pid}" for pid in self._environs()]
            report.left += [str(path) for path in self._folders if path.exists()]
            for pid in self._environs():
                os.kill(pid, signal.SIGKILL)
        return report

    def _start(self, notes: Path, out: BinaryIO) -> subprocess.Popen[bytes]:
        env = {name: value for name, value in os.environ.items() if not name.startswith("KVMPI_")}
        name, value = self._mark.split("=")
        command = [sys.executable, "-m", "kvmpi", "run", "-n", "4", "-c", "3", "-s", "3", "--replicas", "1"]
        command += ["--restart", "1000", str(TRAINING), self._store_type, str(notes), str(self._nbytes)]
        return subprocess.Popen(command, env={**env, name: value}, stdout=out, stderr=subprocess.STDOUT)

    def _kill_one(self, notes: Path, report: Report, job: subprocess.Popen[bytes]) -> None:
        time.sleep(self._choose.uniform(0.05, 0.6))
        self._roles = self._roles or self._choose.sample(ROLES, len(ROLES))
        role = self._roles.pop()
        if role == "server":
            # One replica bears one server's death at a time.
            self._wait(self._is_healthy, 60.0, job)
        victims = self._victims(role)
        if not victims:
            self._roles.append(role)
            return self._kill_one(notes, report, job)
        before, started_s = steps_of(notes), time.monotonic()
        os.kill(self._choose.choice(victims), signal.SIGKILL)
        report.killed[role] += 1
        # A round that was under way may still end; the next one but one needs everybody.
        self._wait(lambda: all(now > then + 2 for now, then in zip(steps_of(notes), before, strict=True)), 60.0, job)
        report.recovery_s.append(time.monotonic() - started_s)

    def _victims(self, role: str) -> list[int]:
        found = []
        for pid, environ in self._environs().items():
            kind, rank = environ.get("KVMPI_ROLE"), environ.get("KVMPI_RANK")
            if kind == ("worker" if role == "master" else role) and (role != "master" or rank == "0"):
                found.append(pid)
        return found

    def _is_healthy(self) -> bool:
        folder = next((env["KVMPI_JOB_DIR"] for env in self._environs().values() if "KVMPI_JOB_DIR" in env), "")
        return len(self._victims("server")) == 3 and is_healthy(folder)

    def _environs(self) -> dict[int, dict[str, str]]:
        """The environment of each living process of the job, by pid."""
        return environs_with(self._mark)

    @staticmethod
    def _wait(condition: Callable[[], bool], timeout_s: float, job: subprocess.Popen[bytes] | None) -> None:
        wait_for(condition, timeout_s, lambda: job is not None and job.poll() is not None)


def steps_of(notes: Path) -> list[int]:
    """How far each of the four workers is; zeros until all have begun."""
    texts = [path.read_text() for path in sorted(notes.glob("worker-*"))]
    return [int(text or 0) for text in texts] if len(texts) == 4 else [0] * 4


def finish(notes: Path, further: int) -> None:
    """Let the training end, ``further`` rounds from where it is."""
    (notes / "new").write_text(str(max(steps_of(notes)) + further))
    os.replace(notes / "new", notes / "rounds")


def is_healthy(job_dir: str) -> bool:
    """Whether all three servers are there and every part has its replica, as the scheduler knows."""
    try:
        saved = scheduler_file.read(os.path.join(job_dir, "scheduler-state"))
    except ConfigError:
        return False
    if saved is None or len(saved.alive) < 3:
        return False
    return all(len(c.members) == 2 and c.joiner < 0 and not c.draining for c in saved.chains)


def wait_for(condition: Callable[[], bool], timeout_s: float, ended: Callable[[], bool] = lambda: False) -> None:
    """Look until something is so.

    Raises:
        TimeoutError: it does not come in time, or ``ended`` says that it never will.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        over = ended()
        if over or time.monotonic() > deadline:
            raise TimeoutError("the job has ended" if over else "the job does not get on")
        time.sleep(0.02)
