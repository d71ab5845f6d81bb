"""Client 0 is slow: others come as far ahead as the bound lets them, and no further, by all that anybody reads.

bounded.py TYPE...
"""

import sys
import time

import numpy as np

import kvmpi

BOUND, STEPS = 2, 8
#: More than a client pushes; of a value in float32 all digits are exact.
BASE = 32
SHAPES = {"w": (7, 3), "b": (5,)}


def given(kv, key):
    """Digit c of a value in base 32 is how often client c has pushed, times something that depends on where it is."""
    index = np.arange(np.prod(SHAPES[key]), dtype="f8").reshape(SHAPES[key])
    return float(BASE**kv.client_rank) * (index % 7 + 1) / kv.mpi_size


def counts(value):
    """How often each of three clients has pushed, at least and at most in any element."""
    index = np.arange(value.size, dtype="f8").reshape(value.shape)
    pushes = value.astype("f8") / (index % 7 + 1)
    assert (pushes == np.rint(pushes)).all(), value
    digits = [pushes // BASE**client % BASE for client in range(3)]
    return [int(digit.min()) for digit in digits], [int(digit.max()) for digit in digits]


def slow_step(kv, outs, step, others):
    """Wait until all others have come as far as they may; and look whether they stay there."""
    until_s, far = time.monotonic() + 60.0, min(STEPS, step + BOUND + 1)
    while any(counts(outs[key])[0][other] < far for key in SHAPES for other in others):
        assert time.monotonic() < until_s, f"step {step}: others have not come to {far}: {outs}"
        kv.pull([*SHAPES], [*outs.values()])
    time.sleep(0.05)
    kv.pull([*SHAPES], [*outs.values()])
    for key in SHAPES:
        assert all(counts(outs[key])[1][other] == far for other in others), (step, key, outs[key])


for name in sys.argv[1:]:
    with kvmpi.create(name, staleness=BOUND) as kv:
        outs = {key: np.zeros(shape, "f4") for key, shape in SHAPES.items()}
        values = [given(kv, key).astype("f4") for key in SHAPES]
        kv.init([*SHAPES], [np.zeros(shape, "f4") for shape in SHAPES.values()])
        kv.set_optimizer(kvmpi.optim.Test(lr=-1.0))
        others = [other for other in range(kv.num_clients) if other != kv.client_rank]
        for step in range(STEPS):
            if kv.client_rank == 0:
                slow_step(kv, outs, step, others)
            if step % 2:
                kv.pushpull([*SHAPES], values, [*outs.values()])
            else:
                kv.push([*SHAPES], values)
                kv.pull([*SHAPES], [*outs.values()])
            for key, out in outs.items():
                least, most = counts(out)
                assert least[kv.client_rank] == most[kv.client_rank] == step + 1, (step, out)
                assert all(least[other] >= step + 1 - BOUND for other in others), (step, key, out)
        kv.barrier()
        for key, out in zip(SHAPES, outs.values(), strict=True):
            kv.pull(key, out)
            total = sum(STEPS * BASE**client for client in range(kv.num_clients))
            index = np.arange(out.size, dtype="f8").reshape(out.shape)
            assert (out == total * (index % 7 + 1)).all()
        ages = kv.stats()["staleness"]
        assert sum(ages.values()) == STEPS * len(SHAPES) * (kv.mpi_rank == 0), ages
        assert max(ages, default=0) <= len(others) * (2 * BOUND + 1), ages
        print(name, kv.num_clients, "bounded")
