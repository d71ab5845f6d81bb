"""A client is killed in the middle of its training, the others go on, and it comes back: ``returning.py STORE DIES``.

Client DIES is killed after 20 steps. Its next process waits until the others are 10 steps further, and joins them; they
all stop 15 steps after that. Each worker compares what it reads in the end with what must be in it.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import kvmpi

STORE, DIES = sys.argv[1], int(sys.argv[2])
DIES_AT = 20
died, back = Path("died"), Path("back")
#: In the order of ``init``, and in that of pushes; of "seldom" in every seventh step only.
COUNTS = {"seldom": 40, "wide": 5000, "narrow": 3}
ORDER = ("wide", "seldom", "narrow")


def pushed(rank: int, step: int, count: int) -> np.ndarray:
    """Small whole numbers that depend on everything, so that sums are exact."""
    return ((np.arange(count) + 3 * rank + step) % 8).astype("f4")


def is_pushed(key: str, step: int) -> bool:
    return key != "seldom" or step % 7 == 3


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < deadline, "the others do not get on"
        time.sleep(0.02)


def note(path: Path, number: int) -> None:
    Path(f"{path}.new").write_text(str(number))
    os.replace(f"{path}.new", path)


with kvmpi.create(STORE) as kv:
    is_back = kv.client_rank == DIES and died.exists()
    if is_back:
        wait_for(lambda: min(int(path.read_text()) for path in Path().glob("client-?")) >= DIES_AT + 10)
    for key, count in COUNTS.items():
        kv.init(key, np.zeros(count, "f4"))
    kv.set_optimizer(kvmpi.optim.Test(lr=-1.0))
    kv.barrier()
    outs = {key: np.empty(count, "f4") for key, count in COUNTS.items()}
    if is_back and kv.mpi_rank == 0:
        note(back, kv.resumed_step)
    step = kv.resumed_step
    # All that read the note read it before the same step, since it is there before anybody can have done its step.
    while not (back.exists() and step >= int(back.read_text()) + 15):
        for key in ORDER:
            if is_pushed(key, step):
                kv.pushpull(key, pushed(kv.rank, step, COUNTS[key]), outs[key])
        step += 1
        if kv.client_rank == DIES and step == DIES_AT and not died.exists() and kv.mpi_rank == 0:
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if kv.client_rank != DIES and kv.mpi_rank == 0:
            note(Path(f"client-{kv.client_rank}"), step)
        if step % 10 == 0:
            kv.barrier()
        time.sleep(0.03)  # or the others do many steps while one starts
    kv.barrier()
    returned_at = int(back.read_text())
    of_client = 2 if STORE.endswith("mpi") else 1  # workers of client 0

    def expected(key: str, in_from: int) -> np.ndarray:
        """With client DIES in the steps from ``in_from`` on: what it repeats of those before is not added."""
        total = np.zeros(COUNTS[key])
        for rank in range(kv.num_workers):
            away = range(DIES_AT, in_from) if max(0, rank - of_client + 1) == DIES else range(0)
            for i in range(step):
                if i not in away and is_pushed(key, i):
                    total += pushed(rank, i, COUNTS[key]).astype("f8")
        return total

    for key, out in outs.items():
        kv.pull(key, out)
    wrong = {
        in_from: {key: int((out != expected(key, in_from)).sum()) for key, out in outs.items()}
        for in_from in range(returned_at, returned_at + 4)
    }
    # The same step for all keys.
    in_from = min(wrong, key=lambda at: sum(wrong[at].values()))
    for key, count in wrong[in_from].items():
        print(f"{key}: {count} wrong, in from step {in_from}, away for {returned_at - DIES_AT}", flush=True)
