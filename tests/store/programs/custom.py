"""A rule of the program's own runs on the servers, and a server without it says what is missing."""

import numpy as np
from custom_rules import Doubler

import kvmpi

with kvmpi.create("dist_sync") as kv:
    value = np.arange(3, dtype="f4")
    kv.init("w", value)
    kv.set_optimizer(Doubler(gain=3.0))
    out = np.empty_like(value)
    kv.pushpull("w", value + kv.rank, out)
    n = kv.num_workers
    assert (out == 2 * value + 3 * (n * value + n * (n - 1) / 2)).all(), out
    print("custom rule", flush=True)
