"""A training loop in small, for docs/timeline.md: a network of three layers in NumPy, its gradients through a store.

kvmpi run -n 4 -c 2 -s 2 --timeline step.json docs/timeline_step.py
"""

from __future__ import annotations

import numpy as np

import kvmpi

SHAPES = {"layer 1": (784, 1000), "layer 2": (1000, 500), "layer 3": (500, 10)}
BATCH, STEPS = 64, 8


def main() -> None:
    """Eight steps."""
    with kvmpi.create("dist_sync_mpi") as kv:
        rng = np.random.default_rng(kv.rank)
        weights = {name: kv.empty(shape) for name, shape in SHAPES.items()}
        gradients = {name: kv.empty(shape) for name, shape in SHAPES.items()}
        for name, weight in weights.items():
            weight[:] = np.random.default_rng(0).standard_normal(weight.shape) / np.sqrt(len(weight))
            kv.init(name, weight)
        kv.set_optimizer(kvmpi.optim.SGD(lr=0.01, momentum=0.9, rescale_grad=1 / (BATCH * kv.num_workers)))
        for _ in range(STEPS):
            below = [rng.standard_normal((BATCH, 784)).astype("f4")]
            for weight in weights.values():
                below.append(np.maximum(below[-1] @ weight, 0))
            error, works = below.pop() - 1, []
            for name in reversed(SHAPES):  # what is known first travels while the rest is computed
                np.matmul(below[-1].T, error, out=gradients[name])
                works.append(kv.pushpull(name, gradients[name], weights[name], async_op=True))
                error = (error @ weights[name].T) * (below.pop() > 0) if below else error
            for work in works:
                work.wait()
            kv.clock()


if __name__ == "__main__":
    main()
