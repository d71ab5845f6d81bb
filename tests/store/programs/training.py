"""Least squares with momentum and weight decay, 50 steps: any grouping equals one process on the union of batches."""

import sys

import numpy as np

import kvmpi

STEPS, BATCH, FEATURES = 50, 12, 30
LR, MOMENTUM, DECAY = 0.05, 0.9, 1e-3


def batch(step, rank):
    rng = np.random.default_rng([3, step, rank])
    inputs = rng.standard_normal((BATCH, FEATURES))
    return inputs, inputs @ np.linspace(-1, 1, FEATURES) + 0.1 * rng.standard_normal(BATCH)


def gradient(weights, step, rank):
    inputs, targets = batch(step, rank)
    return inputs.T @ (inputs @ weights - targets)


def alone(n):
    """The oracle: float64, the batches of all workers as one."""
    weights, velocity = np.ones(FEATURES), np.zeros(FEATURES)
    for step in range(STEPS):
        total = sum(gradient(weights, step, rank) for rank in range(n)) / (n * BATCH)
        velocity = MOMENTUM * velocity + total + DECAY * weights
        weights = weights - LR * velocity
    return weights


def check(name, weights, n):
    expected = alone(n)
    error = np.abs(weights - expected).max() / np.abs(expected).max()
    assert error < 1e-6, (name, error)


for name in sys.argv[1:]:
    with kvmpi.create(name) as kv:  # the servers update
        n = kv.num_workers
        weights = np.ones(FEATURES, "f4")
        kv.init("w", weights)
        kv.set_optimizer(kvmpi.optim.SGD(LR, momentum=MOMENTUM, weight_decay=DECAY, rescale_grad=1 / (n * BATCH)))
        for step in range(STEPS):
            kv.pushpull("w", gradient(weights.astype("f8"), step, kv.rank).astype("f4"), weights)
        check(name + " on the servers", weights, n)
        expected = alone(n)
        error = np.abs(weights - expected).max() / np.abs(expected).max()
    with kvmpi.create(name) as kv:  # the workers update
        weights, velocity = np.ones(FEATURES, "f4"), np.zeros(FEATURES, "f4")
        kv.init("g", weights)
        for step in range(STEPS):
            total = gradient(weights.astype("f8"), step, kv.rank).astype("f4")
            kv.push("g", total)
            kv.pull("g", total)
            velocity = np.float32(MOMENTUM) * velocity + total / np.float32(n * BATCH) + np.float32(DECAY) * weights
            weights = weights - np.float32(LR) * velocity
        check(name + " on the workers", weights, n)
        print(f"{name} {n} {kv.num_clients} equal {error:.1e}", flush=True)
