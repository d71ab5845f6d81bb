"""What one call has to do with several keys, devices and workers at a time, where they meet in one array, sum or error.

one_call.py TYPE...
"""

import re
import sys

import numpy as np
from raising import raises

import kvmpi

SIZES = (5, 200_000, 3_000_000)  # the last one is more than a bucket


def shared_mib():
    """What this process has of memory that is shared with others."""
    with open("/proc/self/status") as status:
        return int(re.search(r"RssShmem:\s+(\d+) kB", status.read())[1]) >> 10


def one_array_for_several(kv):
    """Under two keys, and for several devices of one: each time it counts with what it was."""
    n = kv.num_workers
    for size in SIZES:
        x, out = np.empty(size, "f4"), np.empty(size, "f4")
        kv.init([f"a{size}", f"b{size}"], [x, x])
        for _ in range(2):
            x[:] = kv.rank + 1
            kv.pushpull([f"a{size}", f"b{size}"], [x, x])
            for key in "ab":
                kv.pull(f"{key}{size}", out)
                assert (out == n * (n + 1) / 2).all(), (key, size, np.unique(out)[:5])
        for memory in (np.empty(size, "f4"), kv.empty(size)):
            memory[:], other = kv.rank + 1, np.full(size, 10.0, "f4")
            kv.pushpull(f"a{size}", [memory, other, memory], out=memory)
            assert (memory == n * (n + 1) + 10 * n).all(), (size, np.unique(memory)[:5])
        if kv.is_capable("allreduce"):
            for devices in (2, 3):
                x[:] = kv.rank + 1
                kv.allreduce(f"a{size}", [x] * devices)
                assert (x == devices * n * (n + 1) / 2).all(), (size, np.unique(x)[:5])
            x[:] = kv.rank + 1
            kv.allreduce([f"a{size}", f"b{size}"], [x, x])
            assert (x == n * (n + 1) / 2).all(), (size, np.unique(x)[:5])


def what_is_summed_already(kv):
    """Integers, and what a float cannot divide by three: the value itself, once for each client."""
    for dtype, value in (("i1", 100), ("i8", 2**53 + 1), ("f4", np.float32(0.1)), ("f2", np.float16(0.1))):
        for size in SIZES[:2]:
            key, out = f"{dtype} {size}", np.empty(size, dtype)
            kv.init(key, np.zeros(size, dtype))
            for call in (lambda given, key=key: kv.push(key, given, reduced=True),
                         lambda given, key=key, out=out: kv.pushpull(key, given, out, reduced=True)):  # fmt: skip
                call(np.full(size, value, dtype))
                kv.pull(key, out)
                expected = np.zeros(1, dtype)
                for _ in range(kv.num_clients):  # as they wrap around, or are rounded
                    expected += np.array(value, dtype)
                assert (out == expected).all(), (key, out[:3], expected)


def some_have_joined(name):
    """What the others have summed counts once then, too; and so do rows."""
    with kvmpi.create(name) as kv:
        kv.init(["k", "rows"], [np.zeros(7, "i8"), np.zeros((4, 2), "i8")])
        if kv.mpi_rank == kv.mpi_size // 2 and kv.mpi_size > 1:
            kv.join()
            return
        out, rows = np.empty(7, "i8"), np.empty((4, 2), "i8")
        kv.push("k", np.full(7, 2**53 + 1), reduced=True)
        kv.push("rows", (np.array([2]), np.full((1, 2), 2**53 + 1)), reduced=True)
        kv.pull("k", out)
        kv.pull("rows", rows)
        assert (out == kv.num_clients * (2**53 + 1)).all(), out
        assert (rows[2] == kv.num_clients * (2**53 + 1)).all(), rows
        assert not rows[[0, 1, 3]].any(), rows
        kv.join()


def means_that_fit_where_sums_do_not(name):
    """The greatest number of float16 is 65504."""
    with kvmpi.create(name) as kv:
        weights, out = np.full(1000, 40_000 + 32 * (kv.mpi_rank % 2), "f2"), np.empty(1000, "f2")
        kv.init(["one", "devices"], [weights - weights] * 2)
        kv.set_optimizer(kvmpi.optim.Elastic(alpha=0.5))
        kv.push(["one", "devices"], [weights, [weights, weights, weights]])
        mean = np.mean([40_000 + 32 * (rank % 2) for rank in range(kv.mpi_size)])
        for key in ("one", "devices"):
            kv.pull(key, out)
            assert np.abs(out.astype("f8") / (mean / 2) - 1).max() < 2**-10, (key, out[:3], mean / 2)


def an_updater_that_fails_for_one_key(name):
    with kvmpi.create(name) as kv:
        keys, out = ["a", "b", "c"], np.empty(10, "f4")
        kv.init(keys, [np.zeros(10, "f4")] * 3)
        failures = ["b"] if kv.rank == kv.num_workers - 1 else []

        def update(key, pushed, stored):
            if key in failures:
                failures.remove(key)
                raise ArithmeticError("not this one")
            stored += pushed

        try:  # on one worker alone
            kv.set_updater(update) if kv.rank == 0 else kv.pull("a", out)
            assert kv.num_workers == 1
        except kvmpi.errors.OrderMismatchError:
            assert kv.num_workers > 1
        for inside in (lambda: kv.pull("a", out), lambda: kv.view("a"), lambda: kv.push("b", out)):
            kv.set_updater(lambda key, pushed, stored, inside=inside: inside())
            with raises(kvmpi.KVError, match="inside the updater of key 'a'"):
                kv.push("a", np.ones(10, "f4"))
        try:  # of no keys, where others have some
            kv.push([], []) if kv.rank == 0 else kv.push(["a"], [np.ones(10, "f4")])
            assert kv.num_workers == 1
        except kvmpi.errors.OrderMismatchError:
            assert kv.num_workers > 1
        kv.set_updater(update)
        fails, raised = bool(failures), None
        try:
            kv.push(keys, [np.ones(10, "f4")] * 3)
            kv.wait_all()
        except ArithmeticError as error:
            raised = error
        assert (raised is not None) is fails, raised
        for key in keys:
            kv.pull(key, out)
            assert (out == (0 if fails and key == "b" else kv.num_workers)).all(), (key, out[0])


def values_that_workers_share_no_longer(name, change):
    with kvmpi.create(name) as kv:
        value = np.ones(8 << 20, "f4")  # 32 MiB
        kv.init("k", value)
        before = shared_mib()
        change(kv)
        kv.barrier()
        after = shared_mib()
        assert kv.mpi_size == 1 or kv.rank or before - after > 25, (before, after)
        kv.pull("k", value)
        assert (value == 1).all()


for name in sys.argv[1:]:
    with kvmpi.create(name) as kv:
        one_array_for_several(kv)
        what_is_summed_already(kv)
        replicated, alone = kv.is_capable("updater"), kv.num_clients == 1
    some_have_joined(name)
    if alone:
        means_that_fit_where_sums_do_not(name)
    if replicated:
        an_updater_that_fails_for_one_key(name)
        values_that_workers_share_no_longer(name, lambda kv: kv.set_optimizer(kvmpi.optim.SGD(lr=0.5)))
        values_that_workers_share_no_longer(name, lambda kv: kv.set_updater(lambda key, pushed, stored: None))
    print(f"{name} right", flush=True)
