"""Runs ``kvmpi bench`` as a user does, ranks as threads, and a stand-in for devices."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvmpi.collectives.memory_comm import MemoryComm

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))

from device_fixtures import compile_for_host, import_gpu, stand_in  # noqa: F401 - fixtures
from jobs import HANGS_S

Bench = Callable[..., "subprocess.CompletedProcess[str]"]
RunRanks = Callable[[int, Callable[[MemoryComm], Any]], list[Any]]


@pytest.fixture
def bench(tmp_path) -> Bench:
    """``kvmpi bench WORDS``, in a folder of its own."""

    def run(*words: object, timeout_s: float = HANGS_S) -> subprocess.CompletedProcess[str]:
        env = {name: value for name, value in os.environ.items() if not name.startswith("KVMPI_")}
        command = [sys.executable, "-m", "kvmpi", "bench", *map(str, words)]
        return subprocess.run(
            command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=timeout_s, check=False
        )

    return run
