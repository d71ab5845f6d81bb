"""Softmax regression, each worker with examples of its own: ``softmax.py GO_ON``.

All wait before step ``HOLDS_AT`` until there is a file ``GO_ON``.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np

FEATURES, CLASSES, BATCH, STEPS, HOLDS_AT = 30, 5, 16, 60, 25
LR, MOMENTUM = 0.2, 0.9


def batch(rank: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    """Examples, and their classes as rows with a 1: the largest of their first features."""
    x = np.random.default_rng([rank, step]).standard_normal((BATCH, FEATURES))
    return x, np.eye(CLASSES)[x[:, :CLASSES].argmax(1)]


def gradient(weights: np.ndarray, rank: int, step: int) -> np.ndarray:
    x, wanted = batch(rank, step)
    powers = np.exp(x @ weights)
    return x.T @ (powers / powers.sum(1, keepdims=True) - wanted) / BATCH


def main(go_on: Path) -> None:
    import kvmpi

    with kvmpi.create("dist_sync_mpi") as kv:
        weights = np.zeros((FEATURES, CLASSES), "f4")
        kv.init("w", weights)
        kv.set_optimizer(kvmpi.optim.SGD(lr=LR, momentum=MOMENTUM, rescale_grad=1 / kv.num_workers))
        if kv.resumed_step:
            kv.pull("w", weights)
            print(f"goes on after step {kv.resumed_step}", flush=True)
        for step in range(kv.resumed_step, STEPS):
            until_s = time.monotonic() + 120.0
            while step == HOLDS_AT and not go_on.exists():
                assert time.monotonic() < until_s
                time.sleep(0.02)
            kv.pushpull("w", gradient(weights, kv.rank, step).astype("f4"), weights)
            if kv.rank == 0 and step % 10 == 9:
                print(f"step {step + 1} is done", flush=True)
            time.sleep(0.02)
        print(f"end {json.dumps(weights.tolist())}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
