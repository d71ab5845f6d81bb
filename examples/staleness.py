"""What old gradients do: digits, a worker that is slow, and a store type of your choice.

``kvmpi run -n 4 -c 4 -s 1 staleness.py --store NAME``: ``dist_sync`` waits for the slow one, ``dist_async`` does not,
and ``dist_softsync`` updates when enough gradients are there; with ``--aware`` old ones count less. Every worker goes
as often through its share of the images.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import numpy.typing as npt
from sklearn.datasets import load_digits

import kvmpi

Array = npt.NDArray[np.float32]
STORES = ("dist_sync", "dist_async", "dist_ssp", "dist_softsync")


class Network:
    """Class scores of images of 64 pixels, by two layers; ``gradients`` are of the mean cross-entropy."""

    def __init__(self, hidden: int, seed: int) -> None:
        random = np.random.default_rng(seed)
        sizes = [(64, hidden), (hidden,), (hidden, 10), (10,)]
        self.weights = [
            (random.standard_normal(size) * (2 / size[0]) ** 0.5 * (len(size) > 1)).astype("f4") for size in sizes
        ]

    def scores(self, images: Array) -> tuple[Array, Array]:
        """What the first layer and the second say."""
        first, bias, second, last = self.weights
        inner = np.maximum(images @ first + bias, 0)
        return inner, inner @ second + last

    def gradients(self, images: Array, labels: npt.NDArray[np.int64]) -> list[Array]:
        inner, scores = self.scores(images)
        scores = np.exp(scores - scores.max(1, keepdims=True))
        wrong = scores / scores.sum(1, keepdims=True)
        wrong[np.arange(len(labels)), labels] -= 1
        wrong /= len(labels)
        within = (wrong @ self.weights[2].T) * (inner > 0)
        return [images.T @ within, within.sum(0), inner.T @ wrong, wrong.sum(0)]


def main(argv: list[str] | None = None) -> float:
    """The share of the test images that are recognised at the end."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--store", default="dist_async", choices=STORES, help="default dist_async")
    add("--aware", action="store_true", help="a gradient that is n updates old is applied with lr / n")
    add("--softsync", type=int, default=1, metavar="N", help="of dist_softsync: updates of a part of N (default 1)")
    add("--lr", type=float, default=0.3, help="default 0.3")
    add("--epochs", type=int, default=10, help="default 10")
    add("--batch-size", type=int, default=16, help="of each worker (default 16)")
    add("--step-ms", type=float, default=2.0, help="what a step takes at least (default 2)")
    add("--slow-ms", type=float, default=12.0, help="the same, for the last worker (default 12)")
    add("--seed", type=int, default=0, help="of weights and order (default 0)")
    args = parser.parse_args(argv)
    if min(args.epochs, args.batch_size, args.softsync) < 1:
        parser.error("--epochs, --batch-size and --softsync must be at least 1")

    digits = load_digits()
    images, labels = (digits.data / 16).astype("f4"), digits.target
    test = np.arange(len(images)) % 5 == 0
    with kvmpi.create(args.store, softsync=args.softsync) as kv:
        network = Network(64, args.seed)
        keys = [*range(len(network.weights))]
        kv.init(keys, network.weights)
        of_update = kv.pushes_per_update * kv.mpi_size  # workers whose gradients are in one update
        kv.set_optimizer(kvmpi.optim.SGD(lr=args.lr, rescale_grad=1 / of_update, staleness_aware=args.aware))
        kv.pull(keys, network.weights)
        kv.barrier()
        mine = np.flatnonzero(~test)[kv.rank :: kv.num_workers]
        per_epoch = (~test).sum() // kv.num_workers // args.batch_size  # the same for every worker
        pause_s = (args.slow_ms if kv.rank == kv.num_workers - 1 else args.step_ms) / 1e3
        random, begun_s = np.random.default_rng([args.seed, kv.rank]), time.monotonic()
        for _ in range(args.epochs):
            order = random.permutation(mine)[: per_epoch * args.batch_size].reshape(per_epoch, -1)
            for chosen in order:
                kv.pushpull(keys, network.gradients(images[chosen], labels[chosen]), network.weights)
                time.sleep(pause_s)
        took_s = time.monotonic() - begun_s
        kv.barrier()
        kv.pull(keys, network.weights)
        accuracy = float((network.scores(images[test])[1].argmax(1) == labels[test]).mean())
        if kv.rank in (0, kv.num_workers - 1):
            ages = kv.stats()["staleness"]
            mean = sum(age * count for age, count in ages.items()) / max(1, sum(ages.values()))
            print(
                f"worker {kv.rank}: {took_s:.1f} s, gradients {mean:.1f} updates old, {max(ages, default=0)} at most; "
                f"accuracy {accuracy:.2%}",
                flush=True,
            )
        return accuracy


if __name__ == "__main__":
    main()
