"""Workers with fewer batches join: sums, means and values are right to the last batch of the last worker.

    joining.py FOLDER TURNS TYPE...

Every check runs for several ways to share the batches out, those of TURNS. Each push depends on worker, step and
element, so that one that is lost, counted twice or in a wrong step shows.
"""

import functools
import os
import sys
import time

import numpy as np

import kvmpi

#: Importing torch takes longer than all the rest. Jobs of two workers show what is different with it.
WITH_TORCH = int(os.environ["KVMPI_NUM_WORKERS"]) <= 2
if WITH_TORCH:
    import torch

#: Key, shape, dtype; of the largest, workers of a host share the value.
KEYS = [
    ("one", (), "float64"), ("few", (7, 3), "float32"), ("none", (0, 4), "float32"), ("bytes", (33,), "uint8"),
    ("half", (1000,), "float16"), ("brain", (257,), "bfloat16" if WITH_TORCH else "float32"),
    ("many", (90_001,), "float32"), ("whole", (4097,), "int32"),
]  # fmt: skip
NAMES = [name for name, _, _ in KEYS]


def batches(n, turn):
    """How many each worker has: the first none, the last few, all of them others, or every second few."""
    even_odd = [6 - 4 * (r % 2) for r in range(n)]
    return [[0] + [3] * (n - 1), [4] * (n - 1) + [1], [2 * r + 1 for r in range(n)], even_odd][turn]


@functools.cache  # to draw them and to add them up is most of what a worker would do
def data(rank, step, i):
    """Small whole numbers: their sums are exact in every dtype."""
    count = int(np.prod(KEYS[i][1], dtype=int))
    drawn = np.random.default_rng([11, rank, step, i]).integers(0, 9, count, "int32")
    drawn.flags.writeable = False  # it is what sums are compared with, too
    return drawn


def array(values, i):
    _, shape, dtype = KEYS[i]
    if dtype == "bfloat16":
        return torch.tensor(values, dtype=torch.bfloat16).reshape(shape)
    return np.array(values, dtype).reshape(shape)


def sums(counts, step, i):
    return sum_of(tuple(r for r in range(len(counts)) if counts[r] > step), step, i)


@functools.cache
def sum_of(left, step, i):
    return sum((data(r, step, i) for r in left), np.zeros((), "int32"))


def check(found, expected, *what):
    flat = (found if isinstance(found, np.ndarray) else found.float().numpy()).reshape(-1)
    assert (flat == np.broadcast_to(expected, flat.shape)).all(), (*what, flat[:4], expected)


def exchange(kv, step, own, outs):
    """One step, in one of the ways to push and pull."""
    if step % 4 == 0:
        kv.pushpull(NAMES, own, outs)
    elif step % 4 == 1:
        for key, value, out in zip(NAMES, own, outs, strict=True):
            kv.push(key, value)
            kv.pull(key, out)
    elif step % 4 == 2:
        # Each client in an order of its own: a round is over only if nobody waits for it before the next key.
        order = range(len(KEYS)) if kv.client_rank % 2 else reversed(range(len(KEYS)))
        works = [kv.pushpull(NAMES[i], own[i], outs[i], async_op=True) for i in order]
        for work in works:
            work.wait()
    else:
        kv.push(NAMES, own, async_op=True)
        kv.pull(NAMES, outs)
        kv.barrier()


def comes(kv, keys, outs, right):
    """Pull until ``right()``: other clients may still push. Workers of a client see the same, and pull as often."""
    deadline_s = time.monotonic() + 30.0
    while True:
        kv.pull(keys, outs)
        try:
            return right()
        except AssertionError:
            if kv.num_clients == 1 or time.monotonic() > deadline_s:
                raise


def refused(kv):
    """After the join: no push."""
    for op in (lambda: kv.push(NAMES, zeros()), lambda: kv.pushpull("one", np.zeros(()))):
        try:
            op()
        except kvmpi.KVError as error:
            text = str(error)
        else:
            text = "nothing"
        assert "has called join" in text
    kv.join()  # once more does nothing, even on one worker alone
    if kv.rank == 0:
        kv.join()


def zeros():
    return [array(np.zeros(int(np.prod(shape, dtype=int))), i) for i, (_, shape, _) in enumerate(KEYS)]


def synchronous(name, turn):
    """Without a rule: the value is the sum of the round."""
    with kvmpi.create(name) as kv:
        counts, outs = batches(kv.num_workers, turn), zeros()
        kv.init(NAMES, zeros())
        for step in range(counts[kv.rank]):
            exchange(kv, step, [array(data(kv.rank, step, i), i) for i in range(len(KEYS))], outs)
            for i, out in enumerate(outs):
                check(out, sums(counts, step, i), name, turn, step, KEYS[i])
            if kv.is_capable("allreduce"):
                summed = [array(data(kv.rank, step, i), i) for i in range(len(KEYS))]
                kv.allreduce(NAMES, summed)
                for i, out in enumerate(summed):
                    check(out, sums(counts, step, i), name, turn, step, KEYS[i], "allreduce")
                floats = [i for i, (_, _, dtype) in enumerate(KEYS) if "float" in dtype]
                halved = [array(data(kv.rank, step, i), i) for i in floats]
                kv.allreduce([NAMES[i] for i in floats], halved, scale=0.5)
                for i, out in zip(floats, halved, strict=True):
                    check(out, 0.5 * sums(counts, step, i), name, turn, step, KEYS[i], "allreduce, halved")
        kv.join()

        def right():
            for i, out in enumerate(outs):
                check(out, sums(counts, max(counts) - 1, i), name, turn, "after", KEYS[i])

        comes(kv, NAMES, outs, right)
        refused(kv)


def ahead(name, turn):
    """The last push of a client brings its round's value for the pull behind it, but not for those after the join."""
    with kvmpi.create(name) as kv:
        counts, out = batches(kv.num_workers, turn), np.zeros(5)
        kv.init("w", out)
        for step in range(counts[kv.rank]):
            kv.push("w", np.full(5, 10.0 * kv.rank + step))
            kv.wait_all()  # the value is here before it is asked for
            kv.pull("w", out)
            check(out, sum(10.0 * r + step for r in range(len(counts)) if counts[r] > step), name, turn, step, "ahead")
        kv.join()
        last = max(counts) - 1
        whole = sum(10.0 * r + last for r in range(len(counts)) if counts[r] > last)
        comes(kv, "w", out, lambda: check(out, whole, name, turn, "after", "ahead"))


def updates(name, turn, path):
    """With a rule that adds: nothing is lost. Hyperparameters, checkpoints and barriers in between."""
    with kvmpi.create(name) as kv:
        counts = batches(kv.num_workers, turn)
        kv.init("w", np.zeros(5))
        out = np.zeros(5)
        kv.set_optimizer(kvmpi.optim.Test(lr=-1.0))
        last, alone = max(counts), kv.num_clients == 1
        for step in range(counts[kv.rank]):
            if alone and step == last - 1:  # one worker is left, or all but the first
                kv.set_optimizer(kvmpi.optim.Test(lr=-3.0))
                kv.set_hyperparams(lr=-10.0)
                kv.clock()
                kv.save(f"{path}/{name}{turn}")
                kv.push("w", np.full(5, 1e6))
                kv.load(f"{path}/{name}{turn}")
                assert kv.num_dead() == 0
                kv.barrier()
            kv.push("w", np.full(5, 1.0 + kv.rank), priority=step)
        kv.join()
        kv.barrier()
        factor = [10 if alone and step == last - 1 else 1 for step in range(last)]
        whole = sum(factor[step] * (1 + r) for r, count in enumerate(counts) for step in range(count))
        comes(kv, "w", out, lambda: check(out, whole, name, turn))
        assert kv.optimizer.lr == (-10.0 if alone else -1.0)
        if alone:
            assert kv._clock == 1


def means(name, turn):
    """Elastic takes the mean over the workers that are left; a push of two devices counts as two."""
    with kvmpi.create(name) as kv:
        if kv.num_clients > 1:
            return
        counts, center = batches(kv.num_workers, turn), 0.0
        kv.init("w", np.zeros(5))
        kv.set_optimizer(kvmpi.optim.Elastic(0.5))
        out = np.zeros(5)
        for step in range(max(counts)):
            left = [r for r in range(len(counts)) if counts[r] > step]
            center += 0.5 * (np.mean([10.0 * r + step for r in left]) - center)
            if kv.rank in left:
                mine = np.full(5, 10.0 * kv.rank + step)
                kv.push("w", [mine, mine])
                kv.pull("w", out)
                assert np.allclose(out, center, rtol=1e-12), (name, turn, step, out, center)
        kv.join()
        kv.pull("w", out)
        assert np.allclose(out, center, rtol=1e-12), (name, turn, "after", out, center)


def islands(name, turn):
    """Sums inside the client every step, and through the servers every second: both stores are joined at once."""
    with kvmpi.create(name) as kv:
        counts, inner = batches(kv.num_workers, turn), kv.client
        mine = [kv.rank - kv.mpi_rank + i for i in range(kv.mpi_size)]
        inner.init("g", np.zeros(9))
        kv.init("w", np.zeros(9))
        out = np.zeros(9)
        for step in range(counts[kv.rank]):
            left = [r for r in range(len(counts)) if counts[r] > step]
            inner.pushpull("g", np.arange(9.0) * (kv.rank + 1) + step, out)
            check(out, sum(np.arange(9.0) * (r + 1) + step for r in left if r in mine), name, turn, step)
            if step % 2:
                kv.pushpull("w", np.arange(9.0) + kv.rank, out)
                check(out, sum(np.arange(9.0) + r for r in left), name, turn, step)
        kv.join()
        inner.pull("g", out)


for name in sys.argv[3:]:
    for turn in map(int, sys.argv[2]):
        if not name.startswith("dist_async"):
            synchronous(name, turn)
            ahead(name, turn)
            islands(name, turn)
        updates(name, turn, sys.argv[1])
        means(name, turn)
    print(f"joining {name} right", flush=True)
