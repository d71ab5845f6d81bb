"""Shared by all tests: jobs of real processes, started as a user starts them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Job = Callable[..., "subprocess.CompletedProcess[str]"]


def run_job(
    options: str, program: Path, *arguments: object, timeout_s: float = 120.0, **settings: object
) -> subprocess.CompletedProcess[str]:
    """``kvmpi run OPTIONS PROGRAM ARGUMENTS`` with ``KVMPI_*`` settings; output is captured."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("KVMPI_")}
    env.update({f"KVMPI_{name.upper()}": str(value) for name, value in settings.items()})
    env.setdefault("OMP_NUM_THREADS", "1")
    command = [sys.executable, "-m", "kvmpi", "run", *options.split(), "--", str(program), *map(str, arguments)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout_s, check=False)


@pytest.fixture
def job() -> Job:
    """``run_job``, which must end with status 0: otherwise the test fails and shows what the job printed."""

    def run(options: str, program: Path, *arguments: object, **settings: object) -> subprocess.CompletedProcess[str]:
        done = run_job(options, program, *arguments, **settings)  # type: ignore[arg-type]
        assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    return run
