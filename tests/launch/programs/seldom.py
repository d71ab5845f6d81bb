"""A client is killed again and again in its first steps, with keys that are pushed in some steps only: ``seldom.py``.

Others wait for it. It dies between the pushes of a step as well, of which some are over and some were never made. Each
worker compares what it reads in the end with what must be in it.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np

import kvmpi

STEPS, DIES = 9, 1
#: Each key, in the order of every step, and the steps that it is pushed in.
KEYS = {"early": range(2, STEPS, 2), "often": range(1, STEPS + 1), "late": range(1, STEPS, 3), "never": range(0)}
#: After which push of which step.
DIES_AFTER = {("early", 2), ("often", 3), ("often", 4), ("late", 7), ("often", STEPS)}
COUNT = 3000


def pushed(key: str, rank: int, step: int) -> np.ndarray:
    """Small whole numbers that depend on everything, so that sums are exact."""
    return ((np.arange(COUNT) + 3 * rank + step + len(key)) % 8).astype("f4")


with kvmpi.create("dist_sync") as kv:
    for key in KEYS:
        kv.init(key, np.zeros(COUNT, "f4"))
    kv.set_optimizer(kvmpi.optim.Test(lr=-1.0))
    print(f"resumed at {kv.resumed_step}", flush=True)
    out = np.empty(COUNT, "f4")
    for step in range(kv.resumed_step + 1, STEPS + 1):
        for key, steps in KEYS.items():
            if step not in steps:
                continue
            kv.push(key, pushed(key, kv.rank, step))
            if key != "late":  # which may still be on its way
                kv.pull(key, out)
            died = Path(f"died-{key}-{step}")
            if kv.rank == DIES and (key, step) in DIES_AFTER and not died.exists():
                died.touch()
                time.sleep(0.2)
                os.kill(os.getpid(), signal.SIGKILL)
        if step % 2 == 0:
            kv.barrier()
    kv.barrier()
    for key, steps in KEYS.items():
        kv.pull(key, out)
        expected = sum((pushed(key, rank, step) for rank in range(kv.num_workers) for step in steps), np.zeros(COUNT))
        print(f"{key}: {int((out != expected).sum())} wrong", flush=True)
    kv.barrier()
