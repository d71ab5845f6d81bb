"""A job for ``test_networks``: rounds whose sums are known, and pauses.

Arguments: store type, seconds of a pause, the rounds that begin with one, separated by commas.
It says ``pause K`` when it begins the K-th pause.
"""

from __future__ import annotations

import sys
import time

import numpy as np

import kvmpi
from kvmpi.collectives import probing

COUNT, ROUNDS = 50_000, 9


def pushed(rank: int, step: int) -> np.ndarray:
    """Small whole numbers that depend on everything, so that sums are exact."""
    return ((np.arange(COUNT) + 3 * rank + step) % 8).astype("f4")


if __name__ == "__main__":
    # Pauses are short here: of what nobody sends over, all is probed every second, and is found at once.
    probing.PAUSE_S, probing._SELDOM_S = 1, probing._SOON_S
    store_type, pause_s, pauses = sys.argv[1], float(sys.argv[2]), [int(word) for word in sys.argv[3].split(",")]
    with kvmpi.create(store_type) as kv:
        kv.init("w", np.zeros(COUNT, "f4"))
        kv.set_optimizer(kvmpi.optim.Test(lr=-1.0))
        out = np.empty(COUNT, "f4")
        for step in range(ROUNDS):
            if step in pauses:
                if kv.rank == 0:
                    print(f"pause {pauses.index(step)}", flush=True)
                time.sleep(pause_s)
            kv.pushpull("w", pushed(kv.rank, step), out)
        expected = sum(pushed(rank, step).astype("f8") for rank in range(kv.num_workers) for step in range(ROUNDS))
        print(f"end: {int((out != expected).sum())} wrong elements", flush=True)
