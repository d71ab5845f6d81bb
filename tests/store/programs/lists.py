"""List calls: keys of all sizes and dtypes are summed together, each element once, wherever the arrays lie."""

import sys
import unittest.mock

import numpy as np
from raising import raises

import kvmpi
from kvmpi.store import core

SEED = 5
TURNS = 3
#: Bytes of a large key: the workers of a host share its value.
LARGE = 300_001


#: Whole numbers, of which every turn, key and worker has others: those behind a place of its own. Their sums are exact
#: in float32, too, and to compute and compare those is most of what this takes.
TABLE = np.random.default_rng(SEED).integers(-100, 100, LARGE + 100_000).astype("float32")


def whole(turn, i, rank, count):
    place = (7919 * turn + 1009 * rank + 101 * i) % (TABLE.size - count)
    return TABLE[place : place + count]


def check(kv, turn):
    """One random list, the same on all workers, pushed and pulled in several ways."""
    n, shared = kv.num_workers, np.random.default_rng([SEED, turn])
    counts = [int(c) for c in shared.choice([0, 1, 2, 63, 1000, 4097, 65_536, 70_001, LARGE], shared.integers(1, 14))]
    dtypes = [str(d) for d in shared.choice(["float32", "float64", "int32"], len(counts), p=[0.7, 0.2, 0.1])]
    keys = [f"{turn}.{i}" for i in range(len(counts))]
    of = [[whole(turn, i, rank, c) for rank in range(n)] for i, c in enumerate(counts)]
    sums = [sum(values) for values in of]
    kv.init(keys, [np.zeros(c, d) for c, d in zip(counts, dtypes, strict=True)])
    own = [values[kv.rank].astype(d) for values, d in zip(of, dtypes, strict=True)]

    if turn % 3 == 1:  # one block of kv.empty, cut into the arrays of one dtype
        block, start = kv.empty(sum(counts), "float32"), 0
        for i, c in enumerate(counts):
            if dtypes[i] == "float32":
                block[start : start + c] = own[i]
                own[i] = block[start : start + c]
            start += c
    elif turn % 3 == 2 and n <= 2:  # importing torch takes longer than all the rest
        import torch

        own = [torch.from_numpy(a) for a in own]

    def right(arrays, factor=1):
        for key, found, expected in zip(keys, arrays, sums, strict=True):
            assert (np.asarray(found) == factor * expected).all(), f"key {key}"

    outs = [np.full(c, -1, d) for c, d in zip(counts, dtypes, strict=True)]
    more = [np.full(c, -1, d) for c, d in zip(counts, dtypes, strict=True)]
    strided = [np.full((c, 2), -1, d)[:, 0] for c, d in zip(counts, dtypes, strict=True)]
    kv.pushpull(keys, [[a, a] for a in own], [list(three) for three in zip(outs, more, strided, strict=True)])
    for arrays in (outs, more, strided):
        right(arrays, 2)
    kv.pull(keys, more)
    right(more, 2)
    if kv.is_capable("view"):
        views = [kv.view(key) for key in keys]
        right(views, 2)
        assert not any(view.flags.writeable for view in views)
    if kv.is_capable("allreduce"):
        kept = [np.asarray(a).copy() for a in own]
        pairs = [list(pair) for pair in zip(outs, strided, strict=True)]
        kv.allreduce(keys, [[a, b, b] for a, b in zip(own, kept, strict=True)], pairs)
        for arrays in (outs, strided):
            right(arrays, 3)
        vectors = [[np.asarray(a).copy() for _ in range(3)] for a in own]
        kv.allreduce(keys, vectors, [[third, first] for first, _, third in vectors])  # over what is still to be added
        for i in (0, 2):
            right([three[i] for three in vectors], 3)
        assert all((np.asarray(a) == b).all() for a, b in zip(own, kept, strict=True))
        if n > 1:
            kv.allreduce(keys, own)  # in place, also where kv.empty is
            right(own)
            for a, b in zip(own, kept, strict=True):
                a[:] = b if isinstance(a, np.ndarray) else torch.from_numpy(b)
        kv.pull(keys, outs)
        right(outs, 2)  # as before
    work = kv.pushpull(keys, own, async_op=True)  # in place
    work.wait()
    right(own)
    kv.pull(keys, outs)
    right(outs)
    if kv.is_capable("view"):
        right([kv.view(key) for key in keys])


def overlap(kv):
    """What one key is pulled into is what another pushes: keys that travel together are read before one is written."""
    for count in (100_001, 600_001):  # what is large is not staged
        names = [f"a {count}", f"b {count}"]
        kv.init(names, [np.zeros(count), np.zeros(count)])
        ways = [kv.pushpull, kv.allreduce] if kv.is_capable("allreduce") else [kv.pushpull]
        n, ranks, index = kv.num_workers, sum(range(kv.num_workers)), np.arange(count + 3.0)
        for sums in ways:
            a, b = np.full(count, 1.0 + kv.rank), np.full(count, 100.0 + kv.rank)
            sums(names, [a, b], [b, a])
            assert (b == n + ranks).all()
            assert (a == 100 * n + ranks).all()
            vectors = [index[:count] * factor for factor in (1.0, 2.0, 4.0)]
            sums(names[0], vectors, [vectors[2], vectors[0]])  # over what is still to be added
            assert all((vector == 7 * n * index[:count]).all() for vector in vectors[::2])
            shifted = index.copy()  # over itself, but not where it lies
            sums(names[0], shifted[:count], shifted[3:])
            assert (shifted[3:] == n * index[:count]).all()
            shifted = index.copy()
            sums(names[0], shifted[3:], shifted[:count])
            assert (shifted[:count] == n * index[3:]).all()


def pushed_views(kv):
    """What is pushed is the value of the same or another key of the call, read in place: the value before the call."""
    n, index = kv.num_workers, np.arange(LARGE) % 1000.0
    kv.init(["a", "b", "c"], [np.zeros(LARGE)] * 3)
    kv.push(["a", "b"], [index, 7 * index])
    kv.push("a", kv.view("a"))
    assert (kv.view("a") == n**2 * index).all()
    for order in (1, -1):
        before = kv.view("a").copy()
        kv.push("a", [kv.view("a"), index][::order])
        assert (kv.view("a") == n * (before + index)).all()
    a, b = kv.view("a").copy(), kv.view("b").copy()
    kv.push(["a", "b"], [kv.view("b"), kv.view("a")], async_op=True)
    kv.push("c", kv.view("a")[::-1])  # of what the call before has made
    kv.wait_all()
    for key, expected in (("a", n * b), ("b", n * a), ("c", n * n * b[::-1])):
        assert (kv.view(key) == expected).all(), key


def again(kv):
    """The same lists again and again. What one worker knows may be new to another, whose arrays have moved."""
    shapes = {7: (3, 5), 2: (0,), 9: (40_000,), 1: (1,), 4: (17,), 8: (16_385,)}
    n, keys, looked_at = kv.num_workers, list(shapes), []
    groups = core.groups

    def spy(*given, **how):
        looked_at.append(given[2])
        return groups(*given, **how)

    def make():
        return [np.empty(shape, "f4") for shape in shapes.values()]

    def fill(turn):
        for i, value in enumerate(values):
            value[...] = whole(turn, i, kv.rank, value.size).reshape(value.shape)

    def right(arrays, turn):
        for i, array in enumerate(arrays):
            expected = sum(whole(turn, i, rank, array.size) for rank in range(n))
            assert (array == expected.reshape(array.shape)).all(), f"key {keys[i]}, turn {turn}"

    kv.init(keys, make())
    values, outs = make(), make()
    with unittest.mock.patch.object(core, "groups", spy):
        for turn in range(9):
            if turn in (4, 6) and kv.rank == turn // 2 % n:
                values = [value.copy() for value in values]
            for _ in range(2):  # in place, and into others
                fill(turn)
                kv.pushpull(keys, values)
                right(values, turn)
                fill(turn)
                kv.pushpull(keys, values, outs)
                right(outs, turn)
            fill(100 + turn)
            kv.push(keys, values)
            for value in values:
                value[...] = -1  # they are the caller's again
            kv.pull(keys, outs)
            right(outs, 100 + turn)
    if kv.num_servers and kv.mpi_size > 1:
        moved = sum(kv.rank == turn // 2 % n for turn in (4, 6))
        times = {op: looked_at.count(op) for op in ("pushpull", "push", "pull")}
        # What is new once is known after two times, and pushpull looks at what is pushed and at what is pulled into.
        assert times == {"pushpull": 6 * (1 + moved), "push": 2 * (1 + moved), "pull": 2}, (times, moved)


def uneven(kv):
    """Many small keys, of which workers push different numbers of vectors; more than a page of places holds."""
    n, keys, count = kv.num_workers, list(range(600)), 250  # more bytes in all than are offered in a slot
    numbers = [(1, 4, 9, 2)[rank % 4] for rank in range(n)]
    kv.init(keys, [np.zeros(count, "f4")] * len(keys))
    for num_keys, number_of in ((600, numbers), (300, numbers[::-1]), (300, [20] + [1] * (n - 1))):
        used = keys[:num_keys]
        own = [[np.full(count, k + v + kv.rank, "f4") for v in range(number_of[kv.rank])] for k in used]
        outs = [np.zeros(count, "f4") for _ in used]
        before = kv.stats()["phases"].get("broadcast", {"calls": 0})["calls"]
        kv.pushpull(used, own, outs)
        if kv.num_servers and kv.mpi_size > 1:
            told = kv.stats()["phases"]["broadcast"]["calls"] - before
            assert 0 < told <= 3, f"{told} messages of the master with {num_keys} values of {4 * count} bytes"
        for k, out in zip(used, outs, strict=True):
            assert (out == sum(k + v + rank for rank in range(n) for v in range(number_of[rank]))).all(), k


def rules(kv, path):
    """An optimizer after plain sums: every worker updates a value of its own from then on, and all get the same."""
    keys, counts = ["small", "large"], [10, LARGE]
    kv.init(keys, [np.ones(c, "f4") for c in counts])
    kv.pushpull(keys, [np.full(c, 1.0, "f4") for c in counts])
    kv.set_optimizer(kvmpi.optim.SGD(lr=1.0))
    outs = [np.empty(c, "f4") for c in counts]
    for step in (1, 2):
        kv.pushpull(keys, [np.full(c, 1.0, "f4") for c in counts], outs)
        for out in outs:
            assert (out == kv.num_workers - step * kv.num_workers).all()
    kv.save(path)
    kv.push(keys, [np.full(c, 7.0, "f4") for c in counts])
    kv.load(path)
    kv.pull(keys, outs)
    for out in outs:
        assert (out == -kv.num_workers).all()


def rules_of_keys(kv, path):
    """A rule that is another one for one of the keys; a key may have a name that looks like an option of it."""
    n, keys, counts = kv.num_workers, ["small", "lr@large"], [10, LARGE]
    kv.init(keys, [np.ones(c, "f4") for c in counts])
    expected = np.ones(2)

    def push(*rates):
        outs = [np.empty(c, "f4") for c in counts]
        kv.pushpull(keys, [np.full(c, 1.0, "f4") for c in counts], outs)
        expected[:] -= n * np.array(rates)
        for out, value in zip(outs, expected, strict=True):
            assert (out == value).all(), (out[0], value)

    kv.set_optimizer(kvmpi.optim.SGD(lr=1.0).for_keys(["lr@large"], lr=0.25))
    push(1.0, 0.25)
    kv.set_hyperparams(lr=2.0)
    push(2.0, 0.25)
    kv.set_hyperparams(**{"lr@lr@large": 0.5})
    push(2.0, 0.5)
    kv.save(path)
    kv.set_optimizer(kvmpi.optim.SGD(lr=1.0))
    push(1.0, 1.0)
    kv.load(path)
    expected[:] += n
    push(2.0, 0.5)
    with raises(kvmpi.errors.ConfigError, match="no hyperparameter rate"):
        kv.set_hyperparams(**{"rate@small": 1.0})


for name in sys.argv[2:]:
    with kvmpi.create(name, bucket_bytes=3_000_000) as kv:
        first = TURNS * (kv.num_workers % 2)  # jobs of other sizes have other lists
        for turn in range(first, first + TURNS):
            check(kv, turn)
        overlap(kv)
        if kv.is_capable("view"):
            pushed_views(kv)
    with kvmpi.create(name) as kv:
        again(kv)
    with kvmpi.create(name) as kv:
        uneven(kv)
    with kvmpi.create(name) as kv:
        rules(kv, f"{sys.argv[1]}/{name}")
    with kvmpi.create(name) as kv:
        rules_of_keys(kv, f"{sys.argv[1]}/{name}.keys")
    print(f"lists {name} right", flush=True)
