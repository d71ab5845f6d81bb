"""A job for ``chaos``: every round adds what is known beforehand; each worker writes how far it is.

Arguments: store type, folder for the notes, bytes of a large key. It ends with the round in the note ``rounds``.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import numpy as np

import kvmpi

store_type, folder, nbytes = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
counts = {"large": nbytes // 4, "bias": 3, 7: 1000}


def pushed(rank: int, step: int, count: int) -> np.ndarray:
    """Small whole numbers that depend on everything, so that sums are exact."""
    return ((np.arange(count) + 3 * rank + step) % 8).astype("f4")


with kvmpi.create(store_type) as kv:
    for key in ("large", "bias"):
        kv.init(key, np.zeros(counts[key], "f4"))
    numbered = kvmpi.create(store_type)
    numbered.init(7, np.zeros(counts[7], "f4"))
    for store in (kv, numbered):
        store.set_optimizer(kvmpi.optim.Test(lr=-1.0))
    outs = {key: np.empty(count, "f4") for key, count in counts.items()}
    note = os.open(folder / f"worker-{kv.rank}", os.O_CREAT | os.O_WRONLY)
    rounds = min(kv.resumed_step, numbered.resumed_step)
    while not (last := (folder / "rounds").read_text()) or rounds < int(last):
        step = rounds
        for key in counts:
            store = numbered if key == 7 else kv
            if store.resumed_step <= step:
                store.pushpull(key, pushed(kv.rank, step, counts[key]), outs[key])
        rounds = step + 1
        os.pwrite(note, b"%10d" % rounds, 0)
        time.sleep(0.02)
    if "softsync" in store_type:  # or the last pushes wait for others that never come
        for store in (kv, numbered):
            store.join()
    for key, count in counts.items():
        expected = np.zeros(count)
        for step in range(min(8, rounds)):  # what is pushed repeats itself
            times = (rounds - step + 7) // 8
            expected += times * sum(pushed(rank, step, count).astype("f8") for rank in range(kv.num_workers))
        wrong, until_s = count, time.monotonic() + 500
        while wrong:
            (numbered if key == 7 else kv).pull(key, outs[key])
            wrong = int((outs[key] != expected).sum())
            # Without rounds others may still be pushing; nothing may ever be too much.
            if store_type.startswith("dist_sync") or (outs[key] > expected).any() or time.monotonic() > until_s:
                break
            time.sleep(0.05)
        print(f"end: key {key} has {wrong} wrong elements", flush=True)
    numbered.close()
