"""Pushes of one and two bits in real jobs: every value is what codes stand for, and nothing that was left gets lost.

    compressed.py FOLDER TYPE...

Gradients and thresholds are quarters, a few at a time: float32 has all sums of them exactly, those of the oracle too.
"""

import sys
from pathlib import Path

import numpy as np

import kvmpi
from kvmpi import errors

COUNTS = {"none": 0, "one": 1, "odd": 1001, "large": 600_001}


#: Quarters, of which every worker, step and key has others: those behind a place of its own.
TABLE = (np.random.default_rng(1).integers(-9, 10, 700_000) / 4).astype("f4")


def given(key, rank, step):
    place = (7919 * step + 1009 * rank + 101 * len(key)) % (TABLE.size - COUNTS[key])
    return TABLE[place : place + COUNTS[key]]


def gradient(key, rank, step):
    return given(key, rank, step).copy()


class Oracle:
    """What a round of ``kv`` adds up to."""

    def __init__(self, kv, kind, threshold):
        self.kind, self.threshold = kind, threshold
        of_client = kv.num_workers // kv.num_clients
        self.clients = [range(c * of_client, (c + 1) * of_client) for c in range(kv.num_clients)]
        self.left = {key: [np.zeros(count, "f4") for _ in self.clients] for key, count in COUNTS.items()}

    def round(self, key, step):
        total, t = np.zeros(COUNTS[key], "f4"), np.float32(self.threshold)
        for i, ranks in enumerate(self.clients):
            wanted = self.left[key][i]
            for rank in ranks:
                wanted += given(key, rank, step)
            if self.kind == "2bit":
                meant = np.sign(wanted) * np.where(np.abs(wanted) >= t, t, np.float32(0))
            else:
                meant = np.where(wanted > t, np.float32(1), np.float32(-1))
            wanted -= meant  # what is left
            total += meant
        return total


def check(out, expected, *what):
    assert np.array_equal(out, expected), (*what, out[:4], expected[:4])


def refused(call, argument, *words):
    try:
        call(argument)
        said = "nothing"
    except errors.KVError as error:
        said = str(error)
    assert all(word in said for word in words), said


def rounds(kv, kind, threshold, folder):
    keys = list(COUNTS)
    kv.set_gradient_compression({"type": kind, "threshold": threshold})
    oracle, step = Oracle(kv, kind, threshold), 0

    def outs():
        return [np.empty(count, "f4") for count in COUNTS.values()]

    for how in ("pushpull", "push and pull", "one by one", "asynchronous", "in place", "push and pull"):
        step += 1
        values, out = [gradient(key, kv.rank, step) for key in keys], outs()
        if how == "pushpull":
            kv.pushpull(keys, values, out)
        elif how == "push and pull":
            kv.push(keys, values)
            kv.pull(keys, out)
        elif how == "one by one":
            for key, value, into in zip(keys, values, out, strict=True):
                kv.push(key, value)
                kv.pull(key, into)
        elif how == "asynchronous":
            works = [kv.pushpull(k, v, o, async_op=True) for k, v, o in zip(keys, values, out, strict=True)]
            for work in works:
                work.wait()
        else:
            out = values
            kv.pushpull(keys, values)
        for key, value in zip(keys, out, strict=True):
            check(value, oracle.round(key, step), kv.type, kind, how, key)

    pushed = kv.stats()["phases"].get("push", {}).get("bytes", 0)
    if kv.mpi_rank == 0:  # chunks are padded to bytes
        bits = sum(COUNTS.values()) * int(kind[0])
        assert step * bits / 8 <= pushed - kv.before <= step * (bits / 8 + 8 * len(keys)), (pushed - kv.before, bits)
    kv.save(folder / f"{kv.type}-{kind}")
    kv.load(folder / f"{kv.type}-{kind}")  # values that come from elsewhere: what was left is forgotten
    oracle, step = Oracle(kv, kind, threshold), step + 1
    out = outs()
    kv.pushpull(keys, [gradient(key, kv.rank, step) for key in keys], out)
    for key, value in zip(keys, out, strict=True):
        check(value, oracle.round(key, step), kv.type, kind, "after load", key)


folder = Path(sys.argv[1])
for name in sys.argv[2:]:
    with kvmpi.create(name) as kv:
        for key, count in COUNTS.items():
            kv.init(key, np.full(count, 3.5, "f4"))
        for kind, threshold in (("2bit", 0.5), ("2bit", 1.25), ("1bit", 0.25)):
            kv.before = kv.stats()["phases"].get("push", {}).get("bytes", 0)
            rounds(kv, kind, threshold, folder)
        # Rows and other dtypes travel as they are.
        kv.init("table", np.zeros((50, 3), "f4"))
        kv.init("wide", np.zeros(9))
        rows = np.full((2, 3), 1 / 8, "f4") * (kv.rank + 1)
        kv.push("table", (np.array([4, 7]), rows))
        kv.push("wide", np.arange(9) / 3 * (kv.rank + 1))
        factor, table, wide = sum(range(1, kv.num_workers + 1)), np.zeros((50, 3), "f4"), np.empty(9)
        kv.pull(["table", "wide"], [table, wide])
        check(table[[4, 7]], np.full((2, 3), factor / 8), "rows")
        assert np.allclose(wide, np.arange(9) / 3 * factor, rtol=1e-15), wide
        # Mistakes are told to all, and change nothing.
        refused(kv.set_gradient_compression, {"type": "2bit", "threshold": 0}, "above 0")
        if kv.mpi_size > 1:
            odd = 0.5 + (kv.mpi_rank == kv.mpi_size - 1)
            refused(kv.set_gradient_compression, {"type": "2bit", "threshold": odd}, "2bit:0.5", "2bit:1.5")
        refused(kv.restore_errors, {"even": [(0, 1)]}, "'even'", "never initialised")
        refused(kv.move_errors, {("odd", "even"): [(0, 1, 0)]}, "'even'", "never initialised")
        refused(kv.move_errors, {("large", "odd"): [(0, 9, 993)]}, "key 'odd'", "993", "has 1001 elements")
        refused(kv.set_optimizer, kvmpi.optim.Elastic(alpha=0.5), "elastic is sent weights")
        kv.set_gradient_compression({"type": "none"})
        kv.set_optimizer(kvmpi.optim.Elastic(alpha=0.5))
        refused(kv.set_gradient_compression, {"type": "2bit"}, "elastic is sent weights")
        # An asynchronous store, and rules: SGD steps by what codes stand for.
    with kvmpi.create(name.replace("sync", "async")) as kv:
        kv.init("odd", np.zeros(COUNTS["odd"], "f4"))
        kv.set_optimizer(kvmpi.optim.SGD(lr=0.25))
        kv.set_gradient_compression({"type": "2bit", "threshold": 0.5})
        oracle, out = Oracle(kv, "2bit", 0.5), np.empty(COUNTS["odd"], "f4")
        for step in range(4):
            kv.push("odd", gradient("odd", kv.rank, step))
        kv.barrier()
        kv.pull("odd", out)
        check(out, -0.25 * sum(oracle.round("odd", step) for step in range(4)), "asynchronous")
        kv.barrier()
    if kv.mpi_size > 1:  # worker 0 joins before the others choose; its client goes on without what it would give
        with kvmpi.create(name) as kv:
            kv.init(["odd", "new"], [np.zeros(COUNTS["odd"], "f4"), np.zeros(150, "f4")])
            left, out = np.zeros((kv.num_clients, COUNTS["odd"])), np.empty(COUNTS["odd"], "f4")
            if kv.rank:
                kv.set_gradient_compression({"type": "2bit", "threshold": 0.75})
            of_client = kv.num_workers // kv.num_clients
            for step in range(3):
                before = left.copy()
                for rank in range(1, kv.num_workers):
                    left[rank // of_client] += gradient("odd", rank, step)
                total = np.where(left >= 0.75, 0.75, np.where(left <= -0.75, -0.75, 0))
                left -= total
                if kv.rank:
                    kv.pushpull("odd", gradient("odd", kv.rank, step), out)
                    check(out, total.sum(axis=0), "joined", step)
                if step == 1:  # nobody uses some of it, which is to be said again
                    left[:, 300:500] = before[:, 300:500]
                    if kv.rank:
                        kv.restore_errors({"odd": [(300, 400), (400, 500)]})
                    # Others change places, and some go to a key to which nothing was pushed yet.
                    moves = {("odd", "odd"): [(100, 300, 0), (0, 100, 200)], ("odd", "new"): [(600, 700, 50)]}
                    new, left[:, 600:700] = left[:, 600:700].copy(), 0
                    left[:, :300] = np.roll(left[:, :300], 200, axis=1)
                    if kv.rank:
                        kv.move_errors(moves)
            if kv.rank:
                kv.pushpull("new", np.full(150, 0.25 / of_client, "f4"), moved := np.empty(150, "f4"))
                given_now = 0.25 * (of_client - (np.arange(kv.num_clients) == 0)) / of_client
                wanted = np.repeat(given_now[:, None], 150, axis=1)
                wanted[:, 50:] += new
                check(moved, (np.sign(wanted) * 0.75 * (np.abs(wanted) >= 0.75)).sum(axis=0), "moved")
            kv.join()
            kv.pull("odd", out)
            check(out, total.sum(axis=0), "joined")
    print(f"compressed {name} right", flush=True)
