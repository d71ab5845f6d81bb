"""The last client is late in some steps: the others' pulls end at their deadline, and are made again.

A push whose call has returned counts, whether anybody was there for its round in time or not.
"""

import time

import numpy as np

import kvmpi
from kvmpi.errors import KVTimeoutError

STEPS, LATE, TIMEOUT_S = 6, (1, 3), 1.5
TABLE = (9, 2)

with kvmpi.create("dist_sync", timeout_s=TIMEOUT_S) as kv:
    n, out, rows, missed = kv.num_workers, np.zeros(1001, "f4"), np.zeros(TABLE, "f4"), 0
    kv.init(["w", "table"], [out, rows])
    kv.set_optimizer(kvmpi.optim.Test(lr=-1.0))
    for step in range(STEPS):
        if kv.rank == n - 1 and step in LATE:
            time.sleep(2 * TIMEOUT_S)
        kv.push("w", np.full(1001, (step + 1) * 10**kv.rank, "f4"))
        kv.push("table", (np.array([4]), np.full((1, 2), (step + 1) * 10**kv.rank, "f4")))
        for key, into in (("w", out), ("table", rows)):
            deadline_s = time.monotonic() + 20
            while True:
                assert time.monotonic() < deadline_s
                try:
                    kv.pull(key, into)
                    break
                except KVTimeoutError:
                    missed += 1
        expected = sum(s + 1 for s in range(step + 1)) * sum(10**rank for rank in range(n))
        assert (out == expected).all(), (kv.rank, step, out[0], expected)
        assert (rows[4] == expected).all(), (kv.rank, step, rows[4], expected)
    assert missed >= (len(LATE) if kv.rank < n - 1 else 0), missed
print("late right", flush=True)
