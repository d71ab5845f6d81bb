"""One worker of ``ps.py``: times push, pull and pushpull of one key for each size; worker 0 prints a JSON line a size.

The same program serves kvmpi and MXNet, so that both are measured by the same loop.
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np


class KvmpiStore:
    """kvmpi's ``dist_sync``."""

    def __init__(self) -> None:
        import kvmpi

        self._kv = kvmpi.create("dist_sync")
        self.rank, self.num_workers = self._kv.rank, self._kv.num_workers

    def prepare(self, key, count):
        self._kv.init(key, np.zeros(count, "f4"))
        return np.full(count, self.rank + 1, "f4"), np.empty(count, "f4")

    def push(self, key, value):
        self._kv.push(key, value)

    def pull(self, key, out):
        self._kv.pull(key, out)

    def pushpull(self, key, value, out):
        self._kv.pushpull(key, value, out)

    def first(self, out):
        return float(out[0]), float(out[-1])

    def imbalance(self):
        return self._kv.stats()["imbalance"]

    def close(self):
        self._kv.close()


class MXNetStore:
    """Apache MXNet's ``dist_sync``; a pull is waited for, since its engine is asynchronous."""

    def __init__(self) -> None:
        import mxnet

        self._mx, self._kv = mxnet, mxnet.kv.create("dist_sync")
        self.rank, self.num_workers = self._kv.rank, self._kv.num_workers

    def prepare(self, key, count):
        self._kv.init(key, self._mx.nd.zeros(count))
        return self._mx.nd.full(count, self.rank + 1), self._mx.nd.zeros(count)

    def push(self, key, value):
        self._kv.push(key, value)

    def pull(self, key, out):
        self._kv.pull(key, out)
        out.wait_to_read()

    def pushpull(self, key, value, out):
        self._kv.pushpull(key, value, out)
        out.wait_to_read()

    def first(self, out):
        values = out.asnumpy()
        return float(values[0]), float(values[-1])

    def imbalance(self):
        return float("nan")

    def close(self):
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("system", choices=["kvmpi", "mxnet"])
    parser.add_argument("--sizes", type=int, nargs="+", required=True, help="bytes of the key")
    options = parser.parse_args()
    store = KvmpiStore() if options.system == "kvmpi" else MXNetStore()
    for index, size in enumerate(options.sizes):
        key = index
        value, out = store.prepare(key, max(1, size // 4))
        # The same count on every worker, or the rounds of the synchronous store would not match.
        iterations = max(8, min(300, (512 << 20) // (size + (1 << 19)) // store.num_workers))
        pushes, pulls, both, fused = [], [], [], []
        wrong = 0
        expected = store.num_workers * (store.num_workers + 1) / 2
        for i in range(iterations + 3):
            start = time.perf_counter()
            store.push(key, value)
            middle = time.perf_counter()
            store.pull(key, out)
            end = time.perf_counter()
            wrong += store.first(out) != (expected, expected)
            again = time.perf_counter()
            store.pushpull(key, value, out)
            done = time.perf_counter()
            wrong += store.first(out) != (expected, expected)
            if i >= 3:
                pushes.append(middle - start)
                pulls.append(end - middle)
                both.append(end - start)
                fused.append(done - again)
        if store.rank == 0:
            line = {"size_B": size, "iters": iterations, "wrong": wrong, "imbalance": store.imbalance()}
            for name, times in {"push": pushes, "pull": pulls, "push+pull": both, "pushpull": fused}.items():
                line[f"{name}_p50_s"], line[f"{name}_p99_s"] = (float(np.percentile(times, q)) for q in (50, 99))
            print("RESULT " + json.dumps(line), flush=True)
    store.close()


if __name__ == "__main__":
    main()
