"""Clients that keep to their windows are all answered: a server does not take them for peers that never read.

windows.py FILE: with windows that are small, or not
"""

import os
import sys
import time

import numpy as np

import kvmpi

STEPS, MOST_S = 300, 20.0


def timed(call, *arguments):
    """A request that is not answered is made again only after ``KVMPI_RETRY_S``."""
    started_s = time.monotonic()
    call(*arguments)
    assert time.monotonic() - started_s < MOST_S, call


def many_small(kv):
    """More than the steps in which a server knows what is unread."""
    keys = [f"k{i}" for i in range(8)]
    kv.init(keys, [np.zeros(1024, "f4") for _ in keys])
    outs = [np.empty(1024, "f4") for _ in keys]
    for step in range(STEPS):
        timed(kv.pushpull, keys, [np.full(1024, step + kv.rank, "f4") for _ in keys], outs)
        assert all((out == sum(step + rank for rank in range(kv.num_workers))).all() for out in outs)


def what_is_kept(kv):
    """Of a half type that has seven times its bytes: a master copy and two moments, in float32."""
    count = 12 << 20
    kv.init("half", np.zeros(count, "f2"))
    kv.set_optimizer(kvmpi.optim.Adam(lr=0.5, multi_precision=True))
    half = np.ones(count, "f2")
    kv.pushpull("half", half)
    for _ in range(2):
        timed(kv.save, sys.argv[1])
    kv.push("half", np.ones(count, "f2"))
    timed(kv.load, sys.argv[1])
    kv.pull("half", out := np.empty(count, "f2"))
    assert (out == half).all()


with kvmpi.create("dist_sync", retry_s=2 * MOST_S) as kv:
    many_small(kv) if "KVMPI_WINDOW_BYTES" in os.environ else what_is_kept(kv)
print("windows right", flush=True)
