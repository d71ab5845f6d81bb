"""A worker is one process: what it starts inherits its environment, and is not taken for it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from jobs import HANGS_S
from test_launch_kill import needs_mpi

from kvmpi.config import Config
from kvmpi.errors import ConfigError
from kvmpi.launchers import mpirun
from kvmpi.place import Place

PROGRAM = Path(__file__).parent / "programs" / "inherited.py"
#: A rank and a worker of its own, each with a child that has everything and with one that has the environment.
LAYOUTS = [
    pytest.param("mpi", "-n 2", "spawn", marks=needs_mpi),
    ("dist_sync", "-n 2 -c 2 -s 1", "spawn"),
    ("dist_sync", "-n 2 -c 2 -s 1", "fork"),
    pytest.param("dist_sync_mpi", "-n 2 -s 1", "fork", marks=needs_mpi),
]


@pytest.mark.parametrize(("store_type", "layout", "method"), LAYOUTS)
def test_a_store_in_a_child_beside_that_of_its_worker_is_an_error_at_once(
    job: Callable[..., CompletedProcess[str]], store_type: str, layout: str, method: str
) -> None:
    done = job(layout, PROGRAM, store_type, method, "beside")
    (child,) = (line for line in done.stdout.splitlines() if "child: " in line)
    assert "child: ConfigError: process" in child, done.stdout
    assert "is not worker 0 of this job: process" in child
    assert "__main__" in child
    assert done.stdout.count("sum 3.0") == 2  # the worker's own store goes on


@needs_mpi
def test_a_child_of_a_rank_that_no_launcher_has_started_is_an_error_at_once(tmp_path: Path) -> None:
    mpi = mpirun.find(os.environ, 2)
    inherited = {name: value for name, value in mpirun.clean(os.environ).items() if not name.startswith("KVMPI_")}
    env = inherited | mpi.env(str(tmp_path), "", crowded=True, one_host=True)
    command = [*mpi.command(2, local=True), sys.executable, str(PROGRAM), "mpi", "spawn", "beside"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=HANGS_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (child,) = (line for line in done.stdout.splitlines() if "child: " in line)
    assert "child: ConfigError: process" in child
    assert "is not this rank of its MPI job: process" in child
    assert "__main__" in child
    assert done.stdout.count("sum 3.0") == 2  # the ranks go on


def test_a_child_has_the_place_of_a_worker_that_has_closed_its_store(
    job: Callable[..., CompletedProcess[str]],
) -> None:
    done = job("-n 2 -c 2 -s 1", PROGRAM, "dist_sync", "spawn", "after")
    assert done.stdout.count("child: 3.0") == 2, done.stdout


def in_child(config: Config) -> str:
    """What a forked child that wants the place is told."""
    read_end, write_end = os.pipe()
    if not (pid := os.fork()):
        try:
            Place(config)
            os.write(write_end, b"has it")
        except ConfigError as error:
            os.write(write_end, str(error).encode())
        finally:
            os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as answers:
        said = answers.read()
    os.waitpid(pid, 0)
    return said


def test_a_place_is_free_when_all_that_took_it_have_given_it_back(tmp_path: Path) -> None:
    config = Config(role="worker", job_dir=str(tmp_path), rank=3, num_workers=4)
    first, second = Place(config), Place(config)
    assert f"is not worker 3 of this job: process {os.getpid()} is" in in_child(config)
    first.give_back()
    first.give_back()
    assert "is not worker 3" in in_child(config)
    assert in_child(Config(role="worker", job_dir=str(tmp_path), rank=2, num_workers=4)) == "has it"
    second.give_back()
    assert in_child(config) == "has it"


@pytest.mark.parametrize("role", ["", "server"])
def test_only_workers_of_a_job_have_places(tmp_path: Path, role: str) -> None:
    Place(Config(role=role, job_dir=str(tmp_path), rank=0))
    Place(Config(role="worker", job_dir=str(tmp_path / "of another host"), rank=0)).give_back()
    assert not list(tmp_path.iterdir())
