"""Ranks as threads: ``run_ranks(size, fn)`` calls ``fn(comm)`` once for each rank of a world in memory.

``hosts`` names each rank's host, where they are to be on several.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from kvmpi.collectives.memory_comm import MemoryComm, MemoryWorld

RunRanks = Callable[..., list[Any]]

TIMEOUT_S = 30.0


@pytest.fixture(scope="session")
def run_ranks() -> RunRanks:
    """Results by rank. The first error is raised again, unless ``errors``: then it stands in place of the result."""

    def run(
        size: int, fn: Callable[[MemoryComm], Any], *, absent: tuple[int, ...] = (), errors: bool = False,
        hosts: str | None = None,
    ) -> list[Any]:  # fmt: skip
        outcomes: list[Any] = [None] * size
        failed: list[BaseException] = []

        def rank_main(comm: MemoryComm) -> None:
            try:
                outcomes[comm.rank] = fn(comm)
            except BaseException as error:
                outcomes[comm.rank] = error
                failed.append(error)

        threads = [
            threading.Thread(target=rank_main, args=(comm,), name=f"rank {comm.rank}", daemon=True)
            for comm in MemoryWorld(size, hosts).comms()
            if comm.rank not in absent
        ]
        for thread in threads:
            thread.start()
        deadline_s = time.monotonic() + TIMEOUT_S
        for thread in threads:
            # A rank that failed leaves the others waiting: do not wait for them, unless they are to fail as well.
            while thread.is_alive() and time.monotonic() < deadline_s and (errors or not failed):
                thread.join(0.02)
        if failed and not errors:
            raise failed[0]
        stuck = [thread.name for thread in threads if thread.is_alive()]
        assert not stuck, f"still running after {TIMEOUT_S} s: {stuck}"
        return outcomes

    return run
