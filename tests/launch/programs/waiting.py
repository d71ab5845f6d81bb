"""Two clients, two of whose pushes are an update; of a third the job is killed, and goes on: ``waiting.py``."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

import kvmpi

COUNT = 3000


def pushed(number: int) -> np.ndarray:
    """Small whole numbers, so that sums are exact."""
    return ((np.arange(COUNT) + 3 * number) % 8).astype("f4")


with kvmpi.create("dist_softsync", softsync=1) as kv:
    kv.init(["waits", "goes on"], [np.zeros(COUNT, "f4"), np.zeros(1, "f4")])
    kv.set_optimizer(kvmpi.optim.Test(lr=-1.0))
    out = np.empty(COUNT, "f4")
    if not kv.resumed_step:
        for number in range(3) if kv.rank == 0 else ():
            kv.push("waits", pushed(number))
        kv.pull("waits", out)
        Path(f"there-{kv.rank}").touch()
        while True:  # until everybody is killed: so that there are snapshots
            kv.push("goes on", np.ones(1, "f4"))
            time.sleep(0.01)
    kv.pull("waits", out)
    assert (out == pushed(0) + pushed(1)).all(), out
    kv.barrier()
    if kv.rank == 1:
        kv.push("waits", pushed(3))
    kv.barrier()
    kv.pull("waits", out)
    assert (out == sum(map(pushed, range(4)))).all(), out
    print("right", flush=True)
    kv.barrier()
