"""Trains two keys for some steps with gradients that depend on everything, and saves what the servers have.

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
SHAPES = {"wide": ((700, 11), "float32"), "half": ((1003,), "float16")}


def random(name: str, *seeds: int) -> np.ndarray:
    shape, dtype = SHAPES[name]
    return np.random.default_rng([len(name), *seeds]).standard_normal(shape).astype(dtype)


with kvmpi.create(STORE) as kv:
    print(f"resumed at {kv.resumed_step}", flush=True)
    outs = {name: np.empty(*SHAPES[name]) for name in SHAPES}
    for name in SHAPES:
        kv.init(name, random(name, 99, kv.resumed_step))
    kv.set_optimizer(RULES[RULE])
    for step in range(kv.resumed_step, STEPS):
        if step == STOP_AT:
            print("waiting to be killed", flush=True)
            time.sleep(600)
        for name, out in outs.items():
            kv.push(name, random(name, step, kv.rank))
            kv.pull(name, out)
        time.sleep(0.005)
    kv.save(OUT)
