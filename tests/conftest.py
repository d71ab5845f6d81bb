"""Fixtures that all tests share."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from jobs import run_job
from rank_threads import run_ranks  # noqa: F401 - a fixture

Job = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def job() -> Job:
    """``run_job``, which must end with status 0: otherwise the test fails and shows what the job printed."""

    def run(
        options: str, program: Path, *arguments: object, timeout_s: float = 120.0, **settings: object
    ) -> subprocess.CompletedProcess[str]:
        done = run_job(options, program, *arguments, timeout_s=timeout_s, settings=settings)
        assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    return run
