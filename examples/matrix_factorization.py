"""Factorise a table of ratings over several workers: ``kvmpi run -n 4 -c 4 -s 2 matrix_factorization.py``.

Every user and every item has a vector of a few numbers, whose product is the rating. The vectors are rows of two keys;
a worker pulls and pushes the rows of its mini-batch and no others. Started with plain ``python`` it is a job of one
worker.
"""

from __future__ import annotations

import argparse
import os
import sys
from os.path import expanduser

import numpy as np

import kvmpi


def read(path: str) -> tuple[np.ndarray, np.ndarray, int, int]:
    """Pairs of user and item numbers of shape ``(n, 2)``, their ratings, and how many users and items there are.

    A line of the file is ``USER ITEM RATING``, with names of any kind; more columns are ignored, and so is a header.
    """
    users: dict[str, int] = {}
    items: dict[str, int] = {}
    pairs, ratings = [], []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            words = line.replace(",", " ").split()
            try:
                user, item, rating = words[0], words[1], float(words[2])
            except (IndexError, ValueError):
                if words and number > 1:
                    sys.exit(f"--ratings {path}, line {number}: expected USER ITEM RATING")
                continue
            pairs.append((users.setdefault(user, len(users)), items.setdefault(item, len(items))))
            ratings.append(rating)
    return np.array(pairs).reshape(-1, 2), np.array(ratings, "f4"), len(users), len(items)


def generate(
    num_users: int = 2000, num_items: int = 1000, count: int = 40_000
) -> tuple[np.ndarray, np.ndarray, int, int]:
    """Ratings that three hidden numbers of each user and item explain, but for some noise; few are rated often."""
    rng = np.random.default_rng(7)
    pairs = np.stack([(rng.random(count) ** 2 * n).astype(int) for n in (num_users, num_items)], axis=1)
    users, items = rng.standard_normal((num_users, 3)), rng.standard_normal((num_items, 3))
    ratings = 3.5 + 0.5 * (users[pairs[:, 0]] * items[pairs[:, 1]]).sum(1) + 0.1 * rng.standard_normal(count)
    return pairs, ratings.astype("f4"), num_users, num_items


def start_values(count: int, rank: int, seed: int) -> np.ndarray:
    """Small random vectors."""
    return (0.3 * np.random.default_rng(seed).standard_normal((count, rank))).astype("f4")


def batches(count: int, batch_size: int, epoch: int, worker: int, num_workers: int) -> list[np.ndarray]:
    """One worker's mini-batches of the ratings 0 .. count-1: as many for every worker, and all in a new order."""
    order = np.random.default_rng(epoch).permutation(count)[worker::num_workers]
    number = count // num_workers // batch_size
    return np.split(order[: number * batch_size], number)


def rmse(kv: kvmpi.KVStore, pairs: np.ndarray, ratings: np.ndarray, mean: float, rank: int) -> float:
    """The root of the mean squared error."""
    users, items = (np.empty((len(pairs), rank), "f4") for _ in range(2))
    kv.row_sparse_pull(["users", "items"], [users, items], [pairs[:, 0], pairs[:, 1]])
    return float(np.sqrt(np.mean((mean + (users * items).sum(1) - ratings) ** 2)))


def main(argv: list[str] | None = None) -> list[float]:
    """The RMSE on ratings that were kept apart, after each epoch."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add(
        "--ratings",
        type=expanduser,
        default="",
        metavar="FILE",
        help="lines of USER ITEM RATING; without it they are made up",
    )
    add("--store", default="dist_sync", help="store type (default dist_sync)")
    add("--rank", type=int, default=4, help="numbers of a user or an item (default 4)")
    add("--epochs", type=int, default=12, help="default 12")
    add("--batch-size", type=int, default=100, help="ratings of each worker between two exchanges (default 100)")
    add("--lr", type=float, default=0.5, help="learning rate of Adagrad (default 0.5)")
    add("--decay", type=float, default=0.02, help="how strongly large vectors are punished (default 0.02)")
    args = parser.parse_args(argv)
    if args.store == "local" and os.environ.get("KVMPI_NUM_WORKERS", "1") != "1":
        parser.error("--store local: every worker would train alone, on the same ratings; take mpi or dist_sync")
    if min(args.rank, args.epochs, args.batch_size) < 1:
        parser.error("--rank, --epochs and --batch-size must be at least 1")

    try:
        pairs, ratings, num_users, num_items = read(args.ratings) if args.ratings else generate()
    except OSError as error:
        parser.error(f"--ratings {args.ratings}: {error.strerror}")
    apart = np.arange(len(ratings)) % 10 == 9  # every tenth rating is for testing
    test, test_ratings, pairs, ratings = pairs[apart], ratings[apart], pairs[~apart], ratings[~apart]

    found = []
    with kvmpi.create(args.store) as kv:
        if not len(test) or len(ratings) < args.batch_size * kv.num_workers:
            few = f"{len(ratings)} ratings for training and {len(test)} for testing are too few"
            sys.exit(f"{few} for batches of {args.batch_size} on {kv.num_workers} workers")
        mean = float(ratings.mean())
        kv.init(["users", "items"], [start_values(num_users, args.rank, 1), start_values(num_items, args.rank, 2)])
        kv.set_optimizer(kvmpi.optim.Adagrad(args.lr))  # on the servers, and of the rows that are pushed only
        kv.barrier()
        if kv.rank == 0:
            print(
                f"{len(ratings)} ratings of {num_users} users and {num_items} items; "
                f"{kv.num_workers} workers, {kv.num_servers} servers ({kv.type})"
            )
        steps, done = 0, kv.resumed_step  # of a job that goes on, or a client that is back, the keys have seen some
        for epoch in range(1, args.epochs + 1):
            for chosen in batches(len(ratings), args.batch_size, epoch, kv.rank, kv.num_workers):
                steps += 1
                if steps <= done:
                    continue
                ids = [pairs[chosen, 0], pairs[chosen, 1]]
                users, items = (np.empty((len(chosen), args.rank), "f4") for _ in range(2))
                kv.row_sparse_pull(["users", "items"], [users, items], ids)  # a row as often as its id stands there
                error = (mean + (users * items).sum(1) - ratings[chosen])[:, None]
                gradients = [error * items + args.decay * users, error * users + args.decay * items]
                kv.push(["users", "items"], list(zip(ids, gradients, strict=True)))  # equal ids are summed
            kv.barrier()
            if steps <= done and epoch < args.epochs:
                continue
            found.append(rmse(kv, test, test_ratings, mean, args.rank))
            if kv.rank == 0:
                print(f"epoch {epoch}: RMSE {found[-1]:.4f}", flush=True)
        phases = kv.stats()["phases"]
        if kv.rank == 0 and "push" in phases:
            moved = phases["push"]["bytes"] + phases["pull"]["bytes"]
            dense = 2 * max(0, steps - done) * (num_users + num_items) * args.rank * 4
            print(f"worker 0 moved {moved / 1e6:.1f} MB; whole keys would have been {dense / 1e6:.1f} MB")
    return found


if __name__ == "__main__":
    main()
