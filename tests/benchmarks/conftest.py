"""Runs ``kvmpi bench`` as a user does, and ranks as threads."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from kvmpi.collectives.memory_comm import MemoryComm, MemoryWorld

Bench = Callable[..., "subprocess.CompletedProcess[str]"]
RunRanks = Callable[[int, Callable[[MemoryComm], Any]], list[Any]]


@pytest.fixture
def bench(tmp_path) -> Bench:
    """``kvmpi bench WORDS``, in a folder of its own."""

    def run(*words: object, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
        env = {name: value for name, value in os.environ.items() if not name.startswith("KVMPI_")}
        command = [sys.executable, "-m", "kvmpi", "bench", *map(str, words)]
        return subprocess.run(
            command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=timeout_s, check=False
        )

    return run


@pytest.fixture(scope="session")
def run_threads() -> RunRanks:
    """``run_threads(size, fn)``: what ``fn(comm)`` returns on each rank of a world in memory."""

    def run(size: int, fn: Callable[[MemoryComm], Any]) -> list[Any]:
        results: list[Any] = [None] * size
        errors: list[BaseException] = []

        def main(comm: MemoryComm) -> None:
            try:
                results[comm.rank] = fn(comm)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=main, args=(comm,), daemon=True) for comm in MemoryWorld(size).comms()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30.0)
        if errors:
            raise errors[0]
        assert not any(thread.is_alive() for thread in threads), "a rank hangs"
        return results

    return run
