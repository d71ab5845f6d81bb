"""A job started by a real launcher, and ways to look at its processes from outside."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from batch_sites import Site, lsf_site, slurm_site
from jobs import command_line, environs_with, wait_for

from kvmpi.benchmarks.netlab import NetLab
from kvmpi.errors import UnsupportedError

LAUNCHER = str(Path(__file__).with_name("launcher_under_test.py"))
HASTY_LAUNCHER = str(Path(__file__).with_name("hasty_launcher.py"))


class LaunchedJob:
    """A running ``kvmpi run``; scheduler and servers are stand-ins unless it is ``whole``, or ``hasty`` and so whole.

    A mark in the environment finds everything it starts, the watchdog included.
    """

    def __init__(
        self, folder: Path, args: list[str], env: dict[str, str], whole: bool = False, hasty: bool = False,
        **popen: object,
    ) -> None:  # fmt: skip
        self.mark = f"TEST_MARK={uuid.uuid4().hex}"
        self.folder = folder

        name, value = self.mark.split("=")
        inherited = {n: v for n, v in os.environ.items() if not n.startswith("KVMPI_") or n == "KVMPI_MPIRUN"}
        launcher = [HASTY_LAUNCHER] if hasty else ["-m", "kvmpi", "run"] if whole else [LAUNCHER]
        self.process: subprocess.Popen[str] = subprocess.Popen(
            [sys.executable, *launcher, *args],
            env={**inherited, name: value, **env},
            cwd=folder,
            text=True,
            start_new_session=True,
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **popen},  # type: ignore[call-overload]
        )
        self.stdout = self.stderr = ""

    def environs(self) -> dict[int, dict[str, str]]:
        """The environment of every living process of the job, its launcher and watchdog included, by pid."""
        return environs_with(self.mark)

    def pids(self, **wanted: str) -> list[int]:
        """Processes with these values in their environment: ``pids(ROLE="server", RANK="0")``."""
        expected = {f"KVMPI_{name}": value for name, value in wanted.items()}
        return [pid for pid, environ in self.environs().items() if expected.items() <= environ.items()]

    def finish(self, timeout_s: float = 20.0) -> int:
        """Wait for the launcher; its exit status."""
        self.stdout, self.stderr = self.process.communicate(timeout=timeout_s)
        return self.process.returncode

    def assert_nothing_left(self, job_dir: str, timeout_s: float = 10.0) -> None:
        wait_for(lambda: not self.environs(), f"the end of all processes {self._command_lines()}", timeout_s)
        assert not os.path.exists(job_dir)

    def _command_lines(self) -> list[str]:
        return [f"{pid}: {command_line(pid)}" for pid in self.environs()]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., LaunchedJob]]:
    """``launch("-n", "2", "prog.py", env={...})`` starts a job in ``tmp_path``; what is left is killed afterwards."""
    jobs: list[LaunchedJob] = []

    def start(*args: str, env: dict[str, str] | None = None, **popen: object) -> LaunchedJob:
        jobs.append(LaunchedJob(tmp_path, list(args), env or {}, **popen))
        return jobs[-1]

    yield start
    for job in jobs:
        job.process.kill()
        job.process.wait()
        for pid in job.environs():
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """``write("prog.py", text)`` puts a program into the folder in which jobs run; its name."""

    def write_program(name: str, text: str) -> str:
        (tmp_path / name).write_text(text)
        return name

    return write_program


@pytest.fixture(scope="session")
def slurm() -> Iterator[Site]:
    """A real Slurm with three nodes, all of them this machine."""
    with slurm_site() as made:
        yield made


@pytest.fixture
def lsf(tmp_path: Path) -> Site:
    """Programs that stand in for LSF."""
    return lsf_site(tmp_path)


@pytest.fixture
def lsf_on_hosts(tmp_path: Path) -> Iterator[Site]:
    """The same, with three hosts."""
    try:
        with NetLab(3, link=None) as lab:
            yield lsf_site(tmp_path, lab)
    except UnsupportedError as error:
        pytest.skip(str(error))


@pytest.fixture(params=["slurm", "lsf"])
def site(request: pytest.FixtureRequest) -> Site:
    """One after the other."""
    found: Site = request.getfixturevalue(request.param)
    return found
