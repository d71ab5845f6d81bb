"""Compares the clock of every rank on another host with rank 0's, for the timeline."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from kvmpi.collectives.comm import Comm, Request
from kvmpi.collectives.waiting import wait_all
from kvmpi.deadline import Deadline
from kvmpi.errors import KVTimeoutError
from kvmpi.trace import parts, timeline

_TAG = 12
_NAME_BYTES = 128
#: Questions of each rank: the one with the quickest answer counts.
QUESTIONS = 16
#: A rank without a timeline takes no part; the others do not wait longer for it.
_PATIENCE_S = 5.0


def compare_clocks(
    comm: Comm, name: str = "", now: Callable[[], int] = time.monotonic_ns,
    hear: Callable[[str, int, int, int], None] = timeline.hear_clock,
) -> None:  # fmt: skip
    """Collective over the ranks whose timeline is on. Costs two messages where the clock is rank 0's.

    Args:
        name: of this rank's clock (default: of the boot of this host).
        hear: gets the name of rank 0's clock, and the times of a question, of its answer there, and of that here.
    """
    mine = np.frombuffer((name or parts.clock_name()).encode()[:_NAME_BYTES].ljust(_NAME_BYTES), np.uint8)
    deadline = Deadline(_PATIENCE_S)
    try:
        if comm.rank == 0:
            _answer(comm, mine, now, deadline)
        else:
            _ask(comm, mine, now, hear, deadline)
    except KVTimeoutError:
        pass  # then this clock is not compared, and the launcher says so


def _answer(comm: Comm, mine: npt.NDArray[Any], now: Callable[[], int], deadline: Deadline) -> None:
    names = np.empty((comm.size, _NAME_BYTES), np.uint8)
    others = range(1, comm.size)
    _finish([comm.irecv(names[rank], rank, _TAG) for rank in others], deadline)
    _finish([comm.isend(mine, rank, _TAG) for rank in others], deadline)
    question, answer = np.empty(1, np.int64), np.empty(1, np.int64)
    for rank in others:
        for _ in range(QUESTIONS if names[rank].tobytes() != mine.tobytes() else 0):
            _finish([comm.irecv(question, rank, _TAG)], deadline)
            answer[0] = now()
            _finish([comm.isend(answer, rank, _TAG)], deadline)


def _ask(
    comm: Comm, mine: npt.NDArray[Any], now: Callable[[], int], hear: Callable[[str, int, int, int], None],
    deadline: Deadline,
) -> None:  # fmt: skip
    theirs = np.empty(_NAME_BYTES, np.uint8)
    _finish([comm.isend(mine, 0, _TAG), comm.irecv(theirs, 0, _TAG)], deadline)
    if theirs.tobytes() == mine.tobytes():
        return
    question, answer = np.zeros(1, np.int64), np.empty(1, np.int64)
    for _ in range(QUESTIONS):
        receive, asked_ns = comm.irecv(answer, 0, _TAG), now()
        _finish([comm.isend(question, 0, _TAG), receive], deadline)
        hear(theirs.tobytes().decode().strip(), asked_ns, int(answer[0]), now())


def _finish(requests: list[Request], deadline: Deadline) -> None:
    wait_all(requests, deadline, lambda: "comparing clocks")
