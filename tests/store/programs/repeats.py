"""Calls that are made again: known by where their arrays lie, right whatever has happened in between.

    repeats.py FOLDER

Numbers are whole, so sums are exact in every dtype; each depends on worker, step, key and element.
"""

import gc
import os
import sys
import time
import weakref

import numpy as np
from raising import raises

import kvmpi
from kvmpi.errors import (
    ConfigError,
    DTypeMismatchError,
    KeyKindError,
    KVError,
    OrderMismatchError,
    ShapeMismatchError,
    UnsupportedError,
)
from kvmpi.store.repeats import kept_for_late_ranks

SEED, STEPS, TIMEOUT_S = 23, 45, 20
#: Importing torch takes longer than all the rest.
WITH_TORCH = int(os.environ["KVMPI_NUM_WORKERS"]) == 2
if WITH_TORCH:
    import torch

#: Key, shape, dtype: of what goes by slots, in segments, and is a value that workers of a host share.
KEYS = [
    ("none", (0, 3), "float32"), ("one", (), "float64"), ("few", (5, 7), "float32"), ("half", (1000,), "float16"),
    ("slot", (65_536,), "float32"), ("more", (70_001,), "float32"), ("whole", (4097,), "int32"),
    ("large", (300, 1000), "float32"), ("wide", (120_001,), "float64"),
]  # fmt: skip
if WITH_TORCH:
    KEYS.append(("brain", (130_000,), "bfloat16"))
NAMES = [name for name, _, _ in KEYS]
FORMS = {name: (shape, dtype) for name, shape, dtype in KEYS}
GROUPS = [NAMES, NAMES[2:6], NAMES[::-1], *([name] for name in NAMES)]


#: Whole numbers, of which every worker, step and key has others: those behind a place of its own. Their sums are exact
#: in float32, too, and to compute and compare those is most of what this takes.
TABLE = np.random.default_rng(SEED).integers(-9, 10, 400_000).astype("float32")


def numbers(name, step, rank):
    count = int(np.prod(FORMS[name][0], dtype=int))
    place = (7919 * step + 1009 * rank + 101 * NAMES.index(name)) % (TABLE.size - count)
    return TABLE[place : place + count]


def made(kv, name, home):
    shape, dtype = FORMS[name]
    if dtype == "bfloat16":
        return torch.full(shape, -1, dtype=torch.bfloat16)
    if home == "empty":
        return kv.empty(shape, dtype)
    if home == "torch" and WITH_TORCH:
        return torch.full(shape, -1, dtype=getattr(torch, dtype))
    return np.full(shape, -1, dtype)


def fill(array, values):
    if isinstance(array, np.ndarray):
        array.reshape(-1)[...] = values
    else:
        array.view(-1).copy_(torch.from_numpy(np.array(values, float)) if np.ndim(values) else torch.tensor(values))


def flat(array):
    return np.asarray(array if isinstance(array, np.ndarray) else array.double()).reshape(-1)


def right(arrays, names, expected, *what):
    for name, array in zip(names, arrays, strict=True):
        found, wanted = flat(array), np.broadcast_to(expected[name], flat(array).shape)
        assert (found == wanted).all(), (name, *what, np.flatnonzero(found != wanted)[:3], found[:3], wanted[:3])


class Hits:
    """Counts how many calls were known, and how many not."""

    def __init__(self, kv):
        self.found, self.missed = 0, 0
        again = kv._again

        def counting(*call):
            work = again(*call)
            self.found += work is not None
            self.missed += work is None
            return work

        kv._again = counting


def random_steps(kv, folder):
    """The same calls on all workers, with arrays in several places, which differ between workers."""
    n, me, choose = kv.num_workers, kv.rank, np.random.default_rng(SEED)
    mine = np.random.default_rng([SEED, me])
    kv.init(NAMES, [made(kv, name, "plain") for name in NAMES])
    if "KVMPI_ALLREDUCE" not in os.environ:  # of 256 KiB, which go by slots, every rank writes all
        assert [kv._replicas[name].common for name in ("slot", "more")] == [False, True]
    values = {name: np.float64(-1) for name in NAMES}
    values.update(dict.fromkeys(NAMES, 0.0))
    kv.pushpull(NAMES, zeros := [made(kv, name, "plain") for name in NAMES])
    values = {name: np.float64(-n) for name in NAMES}
    right(zeros, NAMES, values)
    homes = [(home, {name: (made(kv, name, home), made(kv, name, home)) for name in NAMES})
             for home in ("plain", "empty", "torch")]  # fmt: skip
    hits, step, pending = Hits(kv), 0, []

    def finish():
        while pending:
            work, *checked = pending.pop(0)
            work.wait()
            right(*checked)

    for turn in range(STEPS):
        names = GROUPS[choose.integers(len(GROUPS))] if turn % 2 else NAMES
        op, in_place, async_op = choose.choice(["pushpull", "allreduce"]), choose.random() < 0.6, choose.random() < 0.3
        scale = float(choose.choice([1.0, 1.0, 2.0])) if op == "allreduce" else 1.0
        if scale != 1.0:
            names = [name for name in names if FORMS[name][1] not in ("int32",)] or ["few"]
        home, places = homes[mine.integers(len(homes))]
        shown = op == "pushpull" and not in_place and mine.random() < 0.5
        views = [kv.view(name) for name in names] if shown else []
        for _ in range(choose.integers(1, 6)):
            step += 1
            finish()
            own, outs = [places[name][0] for name in names], views or [places[name][1] for name in names]
            for name, array, out in zip(names, own, outs, strict=True):
                fill(array, numbers(name, step, me))
                if not shown:
                    fill(out, 77)
            sums = {name: scale * sum(numbers(name, step, rank) for rank in range(n)) for name in names}
            if op == "pushpull":
                values.update(sums)
            key, given, targets = (names, own, outs) if len(names) > 1 or step % 2 else (names[0], own[0], outs[0])
            more = {"scale": scale} if op == "allreduce" else {}
            work = getattr(kv, op)(key, given, None if in_place else targets, async_op=async_op, **more)
            checked = (own if in_place else outs, names, sums, op, home, step)
            if async_op:
                pending.append((work, *checked))
            else:
                right(*checked)
                if not in_place:
                    right(own, names, {name: numbers(name, step, me) for name in names}, "input", op, home, step)
        finish()
        name = NAMES[choose.integers(len(NAMES))]
        what = choose.integers(7)
        if what == 0:  # values that are not shared change places with the buffers of sums
            kv.push(name, filled(kv, name, me + 1))
            values[name] = np.float64(sum(range(1, n + 1)))
        elif (
            what == 1 and len(FORMS[name][0]) == 2 and FORMS[name][0][0] and n > 1
        ):  # every worker has its own from now
            rows = np.full((1, FORMS[name][0][1]), 3, FORMS[name][1])
            kv.push(name, (np.array([1]), rows))
            now = np.array(np.broadcast_to(values[name], int(np.prod(FORMS[name][0]))), float)
            now.reshape(FORMS[name][0])[1] = 3 * n
            values[name] = now
        elif what == 2:
            kv.save(f"{folder}/repeats")
            kv.load(f"{folder}/repeats")
        elif what == 3 and mine.random() < 0.5:  # this worker's arrays are others from now on
            places[name] = made(kv, name, home), made(kv, name, home)
        out = filled(kv, name, 5)
        kv.pull(name, out)
        right([out], [name], values, "value", step)
        right([kv.view(name)], [name], values, "view", step)
    assert hits.found > STEPS, (hits.found, hits.missed)
    assert hits.missed > 20, (hits.found, hits.missed)


def shown(kv):
    """Results in the store's own memory, which views show: nothing is copied."""
    n, me = kv.num_workers, kv.rank
    shapes = {"v": (7,), "w": (300_001,), "x": (3, 50_000)}
    names = list(shapes)
    kv.init(names, [np.zeros(shape, "f4") for shape in shapes.values()])
    own = [kv.empty(shape, "f4") for shape in shapes.values()]
    views = [kv.view(name) for name in names]
    hits = Hits(kv)
    for step in range(6):
        copied = kv.stats()["phases"].get("copy", {"bytes": 0})["bytes"]
        for i, array in enumerate(own):
            array[...] = step + i + 10 * me
        work = kv.pushpull(names, own, views, async_op=step > 3)
        if work is not None:
            work.wait()
        for i, view in enumerate(views):
            expected = sum(step + i + 10 * rank for rank in range(n))
            assert (view == expected).all(), (step, names[i])
            assert not view.flags.writeable
            if shapes[names[i]] != (7,) and "KVMPI_ALLREDUCE" not in os.environ:
                assert np.shares_memory(view, kv.view(names[i]))
        if "KVMPI_ALLREDUCE" not in os.environ:  # of what workers do not share there are two
            assert kv.stats()["phases"].get("copy", {"bytes": 0})["bytes"] - copied <= 2 * 7 * 4
    assert hits.found == 4, hits.found
    first = own[0].copy()
    kv.pushpull("v", first, [views[0], first])  # two arrays get it
    assert (first == views[0]).all()
    other = np.zeros(7, "f4")
    other.flags.writeable = False
    for op, out in ((kv.pushpull, other), (kv.pushpull, views[1][:7]), (kv.allreduce, views[0]), (kv.pull, other)):
        with raises(UnsupportedError, match="read-only"):
            op("v", *([first] if op != kv.pull else []), out)
    kv.set_optimizer(kvmpi.optim.SGD(lr=0.5))
    before = [kv.view(name).copy() for name in names]
    views = [kv.view(name) for name in names]
    for array in own:
        array[...] = 1 + me
    for times in (1, 2, 3):
        kv.pushpull(names, own, views)
        for view, was in zip(views, before, strict=True):
            assert (view == was - times * 0.5 * sum(range(1, n + 1))).all(), times
    kv.set_optimizer(kvmpi.optim.Elastic(alpha=0.5))
    with raises(UnsupportedError, match="read-only"):  # the center that the push met is no longer there
        kv.pushpull("v", first, kv.view("v"))


def filled(kv, name, value):
    array = made(kv, name, "plain")
    fill(array, value)
    return array


def learned(kv, call, times=3):
    """Make a call until it is known, at the third time unless other arrays lay there before; check that it is."""
    hits = Hits(kv)
    for _ in range(times):
        call()
    assert hits.found >= times - 2, (hits.found, hits.missed)
    hits.found = 0
    return hits


def memory(kv):
    """Arrays are not kept, what is under way is; where memory is another one, or has another form, it is seen."""
    n, me, count = kv.num_workers, kv.rank, 300_001
    kv.init(["m", "s"], [np.zeros(count, "f4"), np.zeros(10, "f4")])
    held = [np.ones(count, "f4")]
    kept = weakref.ref(held[0])
    learned(kv, lambda: kv.allreduce("m", held[0]))
    held.clear()
    gc.collect()
    assert kept() is None
    out = np.zeros(count, "f4")
    for value in range(6):  # the input is given up at once, long before the last worker has its part
        if me == n - 1:
            time.sleep(0.02)
        work = kv.allreduce("m", np.full(count, value + me, "f4"), out, async_op=True)
        others = [np.full(count, -1, "f4") for _ in range(3)]
        work.wait()
        assert (out == n * value + sum(range(n))).all()
        del others
    for shape in ((10,), (9,), (10, 1), (2, 5)):
        b = np.ones(10, "f4")
        learned(kv, lambda b=b: kv.pushpull("s", b))
        b = np.ones(shape, "f4")
        if shape != (10,):
            with raises(ShapeMismatchError):
                kv.pushpull("s", b)
    b = np.ones(10, "f4")
    hits = learned(kv, lambda: kv.pushpull("s", b))
    b.flags.writeable = False
    with raises(UnsupportedError, match="read-only"):
        kv.pushpull("s", b)
    b.flags.writeable = True
    b[:] = me
    kv.pushpull("s", b)
    assert hits.found == 1  # the call in between was none that can be known
    assert (b == sum(range(n))).all()
    assert (kv.view("s") == b).all()
    kept_after_failure(kv)
    if WITH_TORCH:
        memory_under_way(kv)
        t, other = torch.ones(10), torch.full((10,), 2.0)
        kv.pushpull("s", t)  # of the first tensor nobody knows what it is
        learned(kv, lambda: kv.pushpull("s", t))
        version = t._version
        kv.pushpull("s", t)
        assert t._version > version  # autograd hears of it
        was = t.data_ptr()
        kept, t.data = t.detach(), other
        before = kept.clone()
        kv.pushpull("s", t)
        assert was != t.data_ptr()
        assert torch.equal(t, torch.full((10,), 2.0 * n))
        assert torch.equal(kept, before)  # of whom the store knows nothing any more
        t.requires_grad_()
        kv.pushpull("s", t)
        assert torch.equal(t.detach(), torch.full((10,), 2.0 * n * n))
        t = torch.ones(2, 5).t()  # not contiguous
        for _ in range(4):
            with raises(ShapeMismatchError):
                kv.pushpull("s", t)


def kept_after_failure(kv):
    """Others may write to the arrays of a sum that has failed, long after that."""
    held = [np.ones(10, "f4")]
    learned(kv, lambda: kv.allreduce("s", held[0]))
    sum_batch = kv._reduce.sum_batch

    def fail(*_):
        raise KVError("planted")

    kv._reduce.sum_batch = fail
    with raises(KVError, match="planted"):
        kv.allreduce("s", held[0])
    kv._reduce.sum_batch = sum_batch
    kv.allreduce("s", np.ones(10, "f4"))
    assert any(array is held[0] for arrays in kept_for_late_ranks for array in arrays)


def memory_under_way(kv):
    """What is summed stays, also where its tensor has got other memory meanwhile."""
    n, me = kv.num_workers, kv.rank
    a = np.ones(10, "f4")
    t = torch.from_numpy(a)
    kv.pushpull("s", t)
    learned(kv, lambda: kv.pushpull("s", t))
    a[:] = 1 + me
    if me == n - 1:
        time.sleep(0.05)
    work = kv.pushpull("s", t, async_op=True)
    t.data = torch.zeros(10)
    kept = weakref.ref(a)
    del a
    gc.collect()
    assert kept() is not None or work.done()
    work.wait()
    assert (kv.view("s") == n + sum(range(n))).all()
    assert torch.equal(t, torch.zeros(10))


def mistakes(kv):
    """What one worker does wrong is an error on all, also where others know the call; the next call is right."""
    n, me = kv.num_workers, kv.rank
    kv.init(["x", "y", "i"], [np.zeros(50, "f4"), np.zeros(50, "f4"), np.zeros(50, "i4")])
    i = np.ones(50, "i4")
    learned(kv, lambda: kv.allreduce("i", i))
    with raises(DTypeMismatchError, match="scaled"):
        kv.allreduce("i", i, scale=0.5)
    a, b, off = np.ones(50, "f4"), np.ones(50, "f4"), np.ones(7, "f4")
    learned(kv, lambda: kv.pushpull(["x", "y"], [a, b]))
    learned(kv, lambda: kv.allreduce("x", a, scale=0.5))
    a[:], b[:] = 1, 2
    last = me == n - 1
    for async_op in (False, True):

        def made_by(call, async_op=async_op):
            work = call()
            if async_op:
                work.wait()

        with raises(ShapeMismatchError):
            made_by(lambda s=async_op: kv.pushpull(["x", "y"], [a, off if last else b], async_op=s))
        with raises(OrderMismatchError):
            made_by(lambda s=async_op: kv.pushpull(["y", "x"][:1] if last else ["x", "y"], [a] if last else [a, b],
                                                   async_op=s))  # fmt: skip
        with raises(ConfigError, match="scale"):
            made_by(lambda s=async_op: kv.allreduce("x", a, scale=0.25 if last else 0.5, async_op=s))
        with raises(ConfigError, match="scale"):
            made_by(lambda s=async_op: kv.allreduce("x", a, scale="0.5" if last else 0.5, async_op=s))
        with raises(ConfigError, match="priority"):
            made_by(lambda s=async_op: kv.allreduce("x", a, None, float("nan") if last else 0, s, scale=0.5))
        assert (a == 1).all()
        assert (b == 2).all()
    # Whoever has not waited yet for what a mistake of another worker has ended gets no error of that from another call.
    learned(kv, lambda: kv.allreduce("y", b))
    b[:] = 2
    work = None
    try:
        work = kv.allreduce("x", off if last else a, async_op=True)
    except ShapeMismatchError:
        assert last
    deadline = time.monotonic() + TIMEOUT_S
    while work is not None and not work.done():  # the error is there, and nobody has seen it
        assert time.monotonic() < deadline
        time.sleep(0.001)
    kv.allreduce("y", b)
    assert (b == 2 * n).all()
    if work is not None:
        with raises(ShapeMismatchError):
            work.wait()
    table = np.ones((2, 50), "f4")
    learned(kv, lambda: kv.allreduce(["x", "y"], [a, b], list(table)))
    with raises(ConfigError, match="list"):
        kv.allreduce(["x", "y"], [a, b], table)
    b[:] = 2
    kv.pushpull(["x", "y"], [a, b])
    assert (a == n).all()
    assert (b == 2 * n).all()
    kv.allreduce("x", a, scale=0.5)
    assert (a == 0.5 * n * n).all()
    hits = Hits(kv)
    for _ in range(4):  # of several devices: as ever
        b[:] = 1
        kv.pushpull("x", [b, b], a)
        assert (a == 2 * n).all()
    assert hits.found == 0


def elsewhere(kv):
    """Sums in place of arrays that are others each time, as gradients are."""
    n, me = kv.num_workers, kv.rank
    shapes = {"p": (30, 10), "q": (300_001,), "none": (0, 3), "r": (70_000,)}
    names = list(shapes)
    kv.init(names, [np.zeros(shape, "f4") for shape in shapes.values()])
    hits, kept = Hits(kv), []
    for step in range(8):
        own = [np.full(shape, step + me + i, "f4") for i, shape in enumerate(shapes.values())]
        kept.append(own)  # so that the next ones lie elsewhere
        given = [torch.from_numpy(array) for array in own] if WITH_TORCH and step % 2 else own
        work = kv.allreduce(names, given, async_op=step > 4, scale=0.5)
        if step > 4:
            del given
            work.wait()
        for i, array in enumerate(own):
            assert (array == 0.5 * sum(step + rank + i for rank in range(n))).all(), (step, i)
    assert hits.found == (4 if WITH_TORCH else 6), hits.found  # of each library, two are looked at
    # What is not like it is none of it.
    for wrong in (np.ones((10, 30), "f4"), np.ones((30, 10), "f8"), np.ones((30, 10), ">f4")):
        with raises((ShapeMismatchError, DTypeMismatchError)):
            kv.allreduce(names, [wrong, *own[1:]], scale=0.5)
    before = hits.found
    both = np.ones(600, "f4")
    kv.init(["p2", "p3"], [np.zeros(300, "f4")] * 2)
    for start in (300, 300, 300, 299):
        both[:] = 1
        kv.allreduce(["p2", "p3"], [both[:300], both[start : start + 300]])
        if start == 300:
            assert (both == n).all()
    assert hits.found == before + 1, "arrays that share memory are looked at"
    for _ in range(4):
        if me == n - 1:
            time.sleep(0.02)
        array = np.full(300, me + 1.0, "f4")
        last = weakref.ref(array)
        work = kv.allreduce("p2", array, async_op=True)
        del array
        assert last() is not None or work.done(), "what is under way stays"
        work.wait()
    # One worker knows the call, others make another.
    count = 2 if me == n - 1 else 4
    with raises(OrderMismatchError):
        kv.allreduce(names[:count], [np.ones(shape, "f4") for shape in shapes.values()][:count], scale=0.5)


def rules(kv):
    """An optimizer after plain sums: the same call is another one from then on."""
    n = kv.num_workers
    kv.init([1, 2], [np.zeros(10, "f4"), np.zeros(300_001, "f4")])
    arrays = [np.ones(10, "f4"), np.ones(300_001, "f4")]
    learned(kv, lambda: kv.pushpull([1, 2], arrays))
    with raises(KeyKindError):
        kv.pushpull([1.0, 2.0], arrays)  # which are equal to the keys
    outs = [np.zeros(10, "f4"), np.zeros(300_001, "f4")]
    learned(kv, lambda: kv.allreduce([1, 2], arrays, outs))
    for array in arrays:
        array[:] = 1
    kv.pushpull([1, 2], arrays)
    kv.set_optimizer(kvmpi.optim.SGD(lr=0.5))
    value = float(n)
    for _ in range(3):
        for array in arrays:
            array[:] = 1
        kv.pushpull([1, 2], arrays)
        value -= 0.5 * n
        for array in arrays:
            assert (array == value).all()
        for array in arrays:
            array[:] = 3
        kv.allreduce([1, 2], arrays, outs)
        for out in outs:
            assert (out == 3 * n).all()


def joining(kv):
    """The last worker joins; the others' calls are known, and sum without it."""
    n, me = kv.num_workers, kv.rank
    kv.init(["j", "k"], [np.zeros(1000, "f4"), np.zeros(300_001, "f4")])
    arrays = [np.ones(1000, "f4"), np.ones(300_001, "f4")]
    learned(kv, lambda: kv.pushpull(["j", "k"], arrays))
    if me < n - 1:
        hits = Hits(kv)
        for step in range(4):
            for array in arrays:
                array[:] = step + me
            kv.pushpull(["j", "k"], arrays, async_op=True).wait() if step % 2 else kv.pushpull(["j", "k"], arrays)
            for array in arrays:
                assert (array == sum(step + rank for rank in range(n - 1))).all()
        assert hits.found == 4
    kv.join()
    for key, array in zip(["j", "k"], arrays, strict=True):
        kv.pull(key, array)
        assert (array == sum(3 + rank for rank in range(n - 1))).all()


def main():
    for check in (memory, mistakes, elsewhere, shown, rules, joining):
        with kvmpi.create("mpi", timeout_s=TIMEOUT_S) as kv:
            check(kv)
    with kvmpi.create("mpi", timeout_s=TIMEOUT_S, bucket_bytes=1_000_000) as kv:
        random_steps(kv, sys.argv[1])
    print("repeats right", flush=True)


main()
