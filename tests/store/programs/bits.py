"""Random floats through every synchronous path: sums against float64, and the same bits on every worker."""

import sys
import zlib

import numpy as np

import kvmpi

for name in sys.argv[1:]:
    with kvmpi.create(name) as kv:
        n = kv.num_workers
        for key, count in enumerate([1, 7, 1000, 300_001]):
            parts = [
                [np.random.default_rng([key, r, d]).standard_normal(count).astype("f4") for d in range(2)]
                for r in range(n)
            ]
            flat = [part for parts_of_rank in parts for part in parts_of_rank]
            exact, bound = np.sum(flat, axis=0, dtype="f8"), np.sum(np.abs(flat), axis=0, dtype="f8")
            kv.init(key, np.zeros(count, "f4"))
            out = np.empty(count, "f4")
            kv.push(key, parts[kv.rank])
            kv.pull(key, out)
            assert (np.abs(out - exact) <= 2 * n * np.finfo("f4").eps * bound).all(), (name, key)
            again = np.empty(count, "f4")
            kv.pushpull(key, parts[kv.rank], again)
            assert (again == out).all(), "the same pushes give the same bits"
            print(f"bits {name} {key} {zlib.crc32(out)}", flush=True)
