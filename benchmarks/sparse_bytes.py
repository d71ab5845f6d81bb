"""What travels between a worker and its servers in one step of an embedding: rows against the whole key.

Run ``kvmpi run -n 2 -c 2 -s 2 benchmarks/sparse_bytes.py [--rows 50000] [--width 128] [--share 0.01]``. Each step
pushes a gradient and brings the worker's weights up to date. Bytes are those of ``kv.stats()``: payloads that worker 0
has sent and received. Times are medians of the steps.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

import kvmpi


def measure(args: argparse.Namespace, *, sparse: bool) -> tuple[float, float, float]:
    """Bytes pushed, bytes pulled and seconds of one step."""
    with kvmpi.create(args.store) as kv:
        rng = np.random.default_rng(kv.rank)
        kv.init("w", np.zeros((args.rows, args.width), "f4"))
        kv.set_optimizer(kvmpi.optim.SGD(lr=0.1))
        count = max(1, round(args.share * args.rows))
        seconds = []
        for step in range(args.steps):
            ids = np.sort(rng.choice(args.rows, count, replace=False))
            rows = rng.standard_normal((count, args.width)).astype("f4")
            gradient, weights = np.zeros((args.rows, args.width), "f4"), np.empty((args.rows, args.width), "f4")
            gradient[ids] = rows
            kv.barrier()
            start_s = time.perf_counter()
            kv.push("w", (ids, rows) if sparse else gradient)
            if sparse:
                kv.row_sparse_pull("w", rows, ids)
            else:
                kv.pull("w", weights)
            seconds.append(time.perf_counter() - start_s)
            assert ((rows if sparse else weights[ids]) != 0).any(), f"step {step} moved nothing"
        phases = kv.stats()["phases"]
        if kv.rank == 0:
            return (
                phases["push"]["bytes"] / args.steps,
                phases["pull"]["bytes"] / args.steps,
                statistics.median(seconds),
            )
    return 0.0, 0.0, 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--share", type=float, default=0.01, help="of the rows that a worker has in each step")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--store", default="dist_sync", help="store type; one with servers (default dist_sync)")
    args = parser.parse_args()
    found = {name: measure(args, sparse=name == "rows") for name in ("whole key", "rows")}
    if found["rows"][0]:
        print(f"{args.rows} x {args.width} float32, {args.share:.2%} of the rows in a step ({args.store})")
        print(f"{'':<10} {'push MB':>9} {'pull MB':>9} {'ms':>8}")
        for name, (pushed, pulled, seconds) in found.items():
            print(f"{name:<10} {pushed / 1e6:>9.3f} {pulled / 1e6:>9.3f} {1e3 * seconds:>8.1f}")
        ratio = sum(found["whole key"][:2]) / sum(found["rows"][:2])
        print(f"{ratio:.0f} times fewer bytes", flush=True)


if __name__ == "__main__":
    main()
