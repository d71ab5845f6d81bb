"""Pushes that fetch their round's value for the pull behind them: always the right value, and fetched only once."""

import sys
import time
from pathlib import Path

import numpy as np

import kvmpi
from kvmpi import optim

COUNTS = [0, 1, 1001, 300_001, 1_200_003]  # the last is large enough to be lent by a client that is alone
ROUNDS = 4
#: What elements differ by, for the longest.
BY_INDEX = (np.arange(max(COUNTS)) % 97).astype("f4")


def pushed(key, rank, step):
    """Whole numbers that depend on everything, so that their sums are exact."""
    values = BY_INDEX[: COUNTS[key]] + np.float32(3 * step + key)
    values *= rank + 1
    return values


def total(key, n, step):
    """Every rank's numbers are so many times the same: the sum, of numbers that float32 has exactly."""
    values = BY_INDEX[: COUNTS[key]] + np.float32(3 * step + key)
    values *= sum(range(1, n + 1))
    return values


def calls(kv, phase):
    return kv.stats()["phases"].get(phase, {}).get("calls", 0)


def check(out, expected, what):
    assert np.array_equal(out, expected), (what, out[:4], expected[:4])


def patterns(kv, name):
    n, master = kv.num_workers, kv.mpi_rank == 0
    keys = range(len(COUNTS))
    for key in keys:
        kv.init(key, np.zeros(COUNTS[key], "f4"))
    outs = [np.full(count, -1, "f4") for count in COUNTS]
    for key in keys:
        kv.pull(key, outs[key])
        check(outs[key], np.zeros(COUNTS[key]), "init")
    asked = calls(kv, "pull")
    assert asked == (len(COUNTS) if master else 0)

    for step in range(1, ROUNDS + 1):
        for key in keys:
            value = pushed(key, kv.rank, step)
            kv.push(key, value, priority=-key)
            value[:] = -7  # ours again
        for key in keys:
            kv.pull(key, [outs[key], other := np.empty_like(outs[key])])
            check(outs[key], total(key, n, step), f"{name} round {step}")
            check(other, total(key, n, step), f"{name} round {step}, second array")
    assert calls(kv, "pull") == asked, "a pull went to the servers, though the push had asked for the value"

    for key in keys:  # a value stays what it was, whoever writes to what was pulled
        kv.push(key, pushed(key, kv.rank, 9))
        kv.pull(key, outs[key])
        outs[key][:] = -3
        again = np.empty_like(outs[key])
        kv.pull(key, again)
        check(again, total(key, n, 9), f"{name} second pull")

    for key in keys:  # the value of the last push counts; an exchange in between; without a pull nothing is fetched
        for step in (10, 11):
            kv.push(key, pushed(key, kv.rank, step))
        kv.pull(key, outs[key])
        check(outs[key], total(key, n, 11), f"{name} two pushes")
        kv.push(key, pushed(key, kv.rank, 12))
        kv.pushpull(key, pushed(key, kv.rank, 13), outs[key])
        check(outs[key], total(key, n, 13), f"{name} pushpull")
        kv.pull(key, outs[key])
        check(outs[key], total(key, n, 13), f"{name} pull after pushpull")

    for key in keys:  # nobody waits until the end
        value = pushed(key, kv.rank, 14)
        works = [kv.push(key, value, async_op=True), kv.pull(key, outs[key], async_op=True)]
        for work in works:
            work.wait()
        check(outs[key], total(key, n, 14), f"{name} async_op")
        kv.push(key, pushed(key, kv.rank, 15))
        kv.pull(key, outs[key], async_op=True).wait()
        check(outs[key], total(key, n, 15), f"{name} async_op pull")


def held_back(kv, flag):
    """A push that has to wait for other clients has what was there when it was made, also through a read-only view."""
    n, count = kv.num_workers, 1001
    kv.init("w", np.zeros(count, "f4"))
    if kv.rank == 0 and kv.num_clients > 1:
        deadline_s = time.monotonic() + 30
        while not flag.exists() and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert flag.exists(), "nobody went ahead"
        time.sleep(0.05)  # by now the others' second push waits for this client's first
    base, out = np.empty(count, "f4"), np.empty(count, "f4")
    seen = base.view()
    seen.flags.writeable = False
    for step in (1, 2):
        if step == 2 and kv.rank == n - 1:
            flag.touch()
        base[:] = kv.rank + step
        kv.push("w", seen)
        base[:] = 66
    kv.pull("w", out)
    check(out, np.full(count, sum(rank + 2 for rank in range(n))), "held back")


def rules(kv):
    """A rule with another answer for a pull than for an exchange; weights that are restored."""
    n, count = kv.num_workers, 1001
    kv.init("w", np.zeros(count, "f4"))
    kv.set_optimizer(optim.SGD(lr=1.0))
    out, weight = np.empty(count, "f4"), np.zeros(count)
    for step in range(3):
        kv.push("w", np.full(count, kv.rank + step, "f4"))
        kv.pull("w", out)
        weight -= sum(rank + step for rank in range(n))
        check(out, weight, "sgd")
    kv.save(sys.argv[1])
    kv.push("w", np.ones(count, "f4"))
    kv.load(sys.argv[1])
    kv.pull("w", out)
    check(out, weight, "load after a push that fetched the value")
    kv.set_optimizer(optim.Elastic(alpha=0.5))
    for _ in range(3):
        kv.push("w", np.full(count, 8, "f4"))
        kv.pull("w", out)
        weight = weight + 0.5 * (8 * kv.num_clients - kv.num_clients * weight)
        check(out, weight, "elastic")


for name in ("dist_sync", "dist_sync_mpi"):
    with kvmpi.create(name) as kv:
        patterns(kv, name)
    with kvmpi.create(name) as kv:
        kv.set_gradient_compression({"type": "fp16"})
        kv.init(0, np.zeros(5000, "f4"))
        out = np.empty(5000, "f4")
        for step in range(3):
            kv.pull(0, out)
            kv.push(0, np.full(5000, kv.rank + step, "f4"))
        kv.pull(0, out)
        check(out, np.full(5000, sum(rank + 2 for rank in range(kv.num_workers))), "fp16")
    with kvmpi.create(name) as kv:
        held_back(kv, Path(f"{sys.argv[1]}.{name}"))
    with kvmpi.create(name) as kv:
        rules(kv)
    print(f"ahead {name} right", flush=True)
