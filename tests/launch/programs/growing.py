"""Pushes to keys of several sizes until there is a file ``stop``, and looks at every value that it reads.

growing.py STORE
"""

import sys
import time
from pathlib import Path

import numpy as np

import kvmpi

COUNTS = {"large": 100_000, "small": 5, **{f"layer {i}": 20_000 + i for i in range(12)}}

with kvmpi.create(sys.argv[1]) as kv:
    names, n = list(COUNTS), kv.num_workers
    kv.init([*names, "stop"], [*(np.zeros(count, "f4") for count in COUNTS.values()), np.zeros(1, "f4")])
    kv.set_optimizer(kvmpi.optim.Test(lr=-1.0))
    outs = [np.empty(count, "f4") for count in COUNTS.values()]
    patterns = [np.arange(count, dtype="f4") % 8 for count in COUNTS.values()]
    pushed = [pattern + kv.rank for pattern in patterns]
    sums = [n * pattern + n * (n - 1) / 2 for pattern in patterns]
    step, wrong, stop = 0, 0, np.zeros(1, "f4")
    while not stop[0]:
        step += 1
        kv.pushpull(names, pushed, outs)
        wrong += sum(int((out != step * each).sum()) for each, out in zip(sums, outs, strict=True))
        # All read the same sum, and so stop after the same step.
        kv.pushpull("stop", np.array([kv.rank == 0 and Path("stop").exists()], "f4"), stop)
        if kv.rank == 0 and step == 3:
            Path("runs").touch()
        time.sleep(0.03)
    print(f"{wrong} wrong after {step} steps", flush=True)
