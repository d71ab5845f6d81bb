"""A worker of the doctor's trial job: every worker pushes its number, and looks whether the sum comes back."""

from __future__ import annotations

import sys

import numpy as np

import kvmpi


def main() -> int:
    """The exit status: 0 if the sum is right."""
    with kvmpi.create("dist_sync_mpi") as kv:
        kv.init("w", np.zeros(100_000, np.float32))
        out = np.empty(100_000, np.float32)
        kv.pushpull("w", np.full(100_000, kv.rank + 1, np.float32), out)
        expected = kv.num_workers * (kv.num_workers + 1) / 2
        if (out == expected).all():
            return 0
        print(f"worker {kv.rank} got {out[0]} instead of {expected}")
        return 1


if __name__ == "__main__":
    sys.exit(main())
