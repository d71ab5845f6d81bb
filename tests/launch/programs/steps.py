"""Trains some keys with gradients that depend on everything, and saves what the servers have.

    steps.py OUT STEPS RULE STORE [STOP_AT]

With STOP_AT, every worker says so before that step and waits to be killed.
"""

from __future__ import annotations

import sys
import time

import numpy as np

import kvmpi
from kvmpi import optim

OUT, STEPS, RULE, STORE = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
STOP_AT = int(sys.argv[5]) if len(sys.argv) > 5 else -1
RULES = {
    "momentum": optim.SGD(lr=0.05, momentum=0.9, multi_precision=True),
    "adam": optim.Adam(lr=0.01, multi_precision=True),
}
#: In the order of a step. Where workers are clients each key is pushed by a call of its own, and iterations are
#: counted; else all are pushed by one. In a synchronous store only two are pushed in every step.
SHAPES = {
    "third": ((31,), "float32"), "wide": ((700, 11), "float32"), "second": ((5, 3), "float32"),
    "half": ((1003,), "float16"), "once": ((17,), "float16"), "seventh": ((40,), "float32"), "never": ((3,), "float32"),
}  # fmt: skip
STEPS_OF = {} if "async" in STORE else {
    "third": range(0, STEPS, 3), "second": range(1, STEPS, 2), "once": [4], "seventh": range(6, STEPS, 7), "never": [],
}  # fmt: skip


def random(name: str, *seeds: int) -> np.ndarray:
    shape, dtype = SHAPES[name]
    return np.random.default_rng([len(name), *seeds]).standard_normal(shape).astype(dtype)


with kvmpi.create(STORE) as kv:
    print(f"resumed at {kv.resumed_step}", flush=True)
    outs = {name: np.empty(*SHAPES[name]) for name in SHAPES}
    for name in SHAPES:
        kv.init(name, random(name, 99, kv.resumed_step))
    kv.set_optimizer(RULES[RULE])
    for _ in range(0 if STORE.endswith("mpi") else kv.resumed_step):
        kv.clock()
    for step in range(kv.resumed_step, STEPS):
        if step == STOP_AT:
            print("waiting to be killed", flush=True)
            time.sleep(600)
        names = [name for name in SHAPES if step in STEPS_OF.get(name, range(STEPS))]
        for together in [names] if STORE.endswith("mpi") else [[name] for name in names]:
            kv.push(together, [random(name, step, kv.rank) for name in together])
            kv.pull(together, [outs[name] for name in together])
        if not STORE.endswith("mpi"):
            kv.clock()
        time.sleep(0.005)
    kv.save(OUT)
