"""A client is killed three times, the others wait for it, and all meet at barriers: ``meeting.py skip|again DIES``.

Its next process goes on from ``kv.resumed_step``, and skips the barriers of the steps that are done, or meets them
again. Each worker compares what it reads in the end with what must be in it, and says who had not come to a barrier.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

import kvmpi

AGAIN, DIES = sys.argv[1] == "again", int(sys.argv[2])
STEPS, EVERY = 12, 4
#: After these steps: on the way, where the others wait at a barrier, and where nothing is left to push.
DIES_AFTER = (6, 8, STEPS)
COUNTS = {"wide": 5000, "narrow": 3}


def pushed(rank: int, step: int, count: int) -> np.ndarray:
    """Small whole numbers that depend on everything, so that sums are exact."""
    return ((np.arange(count) + 3 * rank + step) % 8).astype("f4")


def meet(kv: kvmpi.KVStore, number: int, came_back_after: int) -> None:
    """The ``number``-th barrier of the program."""
    Path(f"at-{number}-{kv.rank}").touch()
    kv.barrier()
    if came_back_after and not AGAIN:
        return  # it may have skipped some, and passes others in their place
    missing = [rank for rank in range(kv.num_workers) if not Path(f"at-{number}-{rank}").exists()]
    if missing and (AGAIN or missing != [DIES]):
        print(f"barrier {number} passed without {missing}", flush=True)


def await_others(kv: kvmpi.KVStore, number: int) -> None:
    limit_s = time.monotonic() + 30.0
    others = [Path(f"at-{number}-{rank}") for rank in range(kv.num_workers) if rank != kv.rank]
    while not all(path.exists() for path in others):
        assert time.monotonic() < limit_s, f"nobody came to barrier {number}"
        time.sleep(0.01)


with kvmpi.create("dist_sync") as kv:
    for key, count in COUNTS.items():
        kv.init(key, np.zeros(count, "f4"))
    kv.set_optimizer(kvmpi.optim.Test(lr=-1.0))
    first = kv.resumed_step
    meet(kv, 0, first)
    outs = {key: np.empty(count, "f4") for key, count in COUNTS.items()}
    for step in range(1, STEPS + 1):
        if step > first:
            for key, count in COUNTS.items():
                kv.pushpull(key, pushed(kv.rank, step, count), outs[key])
            first = 0  # from here on as everybody
            died = Path(f"died-{step}")
            if kv.client_rank == DIES and step in DIES_AFTER and not died.exists():
                died.touch()
                if step % EVERY == 0:  # not before the others are at the barrier that comes next
                    await_others(kv, step)
                os.kill(os.getpid(), signal.SIGKILL)
        if step % EVERY == 0 and (AGAIN or step > first):
            meet(kv, step, first)
    meet(kv, STEPS + 1, first)
    for key, count in COUNTS.items():
        kv.pull(key, outs[key])
        expected = sum(
            pushed(rank, step, count).astype("f8") for rank in range(kv.num_workers) for step in range(1, STEPS + 1)
        )
        print(f"{key}: {int((outs[key] != expected).sum())} wrong", flush=True)
    meet(kv, STEPS + 2, first)
