"""The last client is late in a step: pushes that fit in no window were over before all of them had left.

They count all the same, in every part of the key: their calls have returned.
"""

import time

import numpy as np

import kvmpi
from kvmpi.errors import KVTimeoutError

STEPS, COUNT, TIMEOUT_S = 4, 4_000_000, 4.0

with kvmpi.create("dist_sync", timeout_s=TIMEOUT_S) as kv:
    out, missed = np.zeros(COUNT, "f4"), 0
    kv.init("w", out)
    kv.set_optimizer(kvmpi.optim.Test(lr=-1.0))
    for step in range(STEPS):
        if kv.rank == 0 and step == 1:
            time.sleep(2.5 * TIMEOUT_S)
        kv.push("w", np.full(COUNT, (step + 1) * 10**kv.rank, "f4"))
        deadline_s = time.monotonic() + 60
        while True:
            assert time.monotonic() < deadline_s
            try:
                kv.pull("w", out)
                break
            except KVTimeoutError:
                missed += 1
        expected = sum(s + 1 for s in range(step + 1)) * sum(10**rank for rank in range(kv.num_workers))
        assert (out == expected).all(), (kv.rank, step, out, expected)
    assert missed or not kv.rank
print("late right", flush=True)
