"""Each worker updates its share: values, files and mistakes, against rules written down here in float64.

    sharded.py FOLDER

What is pushed depends on worker, step, key and element, so that nothing of it can be in the place of anything else.
"""

import contextlib
import functools
import sys
import unittest.mock

import numpy as np
import safetensors.numpy
from raising import raises

import kvmpi
from kvmpi.errors import DTypeMismatchError, KVError, ShapeMismatchError, UnsupportedError
from kvmpi.store.replica import Replica

STEPS = 4
SHAPES = {"none": (0, 3), "one": (), "few": (5,), "odd": (7, 11), "rows": (40, 3), "large": (100_001,), "half": (1003,)}
NAMES = list(SHAPES)
DTYPES = {name: "float16" if name == "half" else "float32" for name in NAMES}
RATE, MOMENTUM, DECAY = 0.125, 0.5, 0.25
ON = {"sharded_update": "on", "timeout_s": 60.0}


@functools.cache  # to compute them anew for every check would be most of what a worker does
def drawn(name, step, rank):
    count = int(np.prod(SHAPES[name], dtype=int))
    numbers = (np.arange(count) * 7 + 13 * rank + 5 * step + 3 * NAMES.index(name)) % 9 - 4
    return numbers.astype(DTYPES[name]).reshape(SHAPES[name])


def gradient(name, step, rank):
    return drawn(name, step, rank).copy()


@functools.cache
def total_of(name, step, ranks):
    """In float64, in which it is exact."""
    return sum((drawn(name, step, rank).astype(float) for rank in ranks), np.zeros(SHAPES[name]))


class Momentum:
    """SGD with momentum and weight decay."""

    def __init__(self):
        self.values = {name: np.zeros(SHAPES[name]) for name in NAMES}
        self.velocity = {name: np.zeros(SHAPES[name]) for name in NAMES}

    def update(self, names, step, ranks, rate=RATE):
        for name in names:
            total = total_of(name, step, tuple(ranks))
            self.velocity[name] = MOMENTUM * self.velocity[name] + total + DECAY * self.values[name]
            self.values[name] = self.values[name] - rate * self.velocity[name]


def create(**settings):
    kv = kvmpi.create("mpi", **{**ON, **settings})
    kv.init(NAMES, [np.zeros(SHAPES[name], DTYPES[name]) for name in NAMES])
    return kv


def sgd(**more):
    return kvmpi.optim.SGD(lr=RATE, momentum=MOMENTUM, weight_decay=DECAY, **more)


def outs(names=NAMES):
    return [np.full(SHAPES[name], np.nan, DTYPES[name]) for name in names]


def right(found, model, names=NAMES, *what):
    for name, array in zip(names, found, strict=True):
        eps = 0.02 if name == "half" else 1e-5  # of what is rounded in each step
        close(array.astype(float), model.values[name], eps, f"{name} {what}")


def close(found, expected, eps=1e-5, what=""):
    assert found.shape == expected.shape, what
    near = np.abs(found - expected) <= eps * (1 + np.abs(expected))  # which no NaN is
    assert near.all(), (what, found[~near][:3], expected[~near][:3])


def pulled(kv, model, *what):
    found = outs()
    kv.pull(NAMES, found)
    right(found, model, NAMES, *what)


def ways_to_push(kv):
    """Lists and single keys, fused and in two calls, in place and into arrays of any layout, at once and later."""
    assert not kv.sharded_update  # as long as there is no rule
    kv.set_optimizer(sgd())
    assert kv.sharded_update == (kv.num_workers > 1)
    model, ranks = Momentum(), range(kv.num_workers)
    for step in range(STEPS):
        given, found = [gradient(name, step, kv.rank) for name in NAMES], outs()
        model.update(NAMES, step, ranks)
        if step == 0:
            kv.pushpull(NAMES, given, found)
        elif step == 1:
            works = [kv.pushpull(*each, async_op=True) for each in zip(NAMES, given, found, strict=True)]
            for work in works:
                work.wait()
        elif step == 2:
            kv.pushpull(NAMES, given)
            found = given
        else:
            kv.push(NAMES, given, async_op=True)
            wide = [np.full((*array.shape, 2), np.nan, array.dtype)[..., 0] for array in found]
            kv.pull(NAMES, [[array, other] for array, other in zip(found, wide, strict=True)], async_op=True).wait()
            right(wide, model, NAMES, "strided")
        right(found, model, NAMES, step)
        pulled(kv, model, step)
        pulled(kv, model, step, "again")
    own = [kv.empty(SHAPES[name], DTYPES[name]) for name in NAMES]
    for array, name in zip(own, NAMES, strict=True):
        array[...] = gradient(name, STEPS, kv.rank)
    model.update(NAMES, STEPS, ranks)
    kv.pushpull(NAMES, own)
    right(own, model, NAMES, "empty")
    model.update(["odd", "few"], 7, [*ranks, *ranks])  # two devices of each worker
    several = [[gradient(name, 7, kv.rank)] * 2 for name in ("odd", "few")]
    found = outs(["odd", "few"])
    kv.pushpull(["odd", "few"], several, found)
    right(found, model, ["odd", "few"], "devices")
    return model


def remembered_once(kv):
    """A worker remembers of each value what it updates."""
    for name, replica in kv._replicas.items():
        count = int(np.prod(SHAPES[name], dtype=int))
        most = -(-count // kv.num_workers)
        assert all(array.size <= most for array in replica.state.values()), name
        assert replica.state, name


def files(kv, model, folder):
    """A file is that of a store whose workers update everything; each of them goes on from the other's."""
    ranks = range(kv.num_workers)
    kv.save(f"{folder}/shared")
    kv.save_optimizer_states(f"{folder}/shared states")
    pulled(kv, model, "saved")
    found = safetensors.numpy.load_file(f"{folder}/shared")
    names = list(kv.keys)
    for name in NAMES[:-1]:
        number = names.index(name)
        close(found[f"{number}/value"], model.values[name].reshape(-1))
        momentum = next(found[key] for key in found if key.startswith(f"{number}/") and not key.endswith("value"))
        close(momentum, model.velocity[name].reshape(-1))
    for settings in ({"sharded_update": "off"}, {}):
        other, again = create(**settings), Momentum()
        again.values, again.velocity = dict(model.values), dict(model.velocity)
        if settings:
            other.load(f"{folder}/shared")
        else:
            other.set_optimizer(sgd())
            other.assign(NAMES, [np.array(model.values[name], DTYPES[name]) for name in NAMES])
            other.load_optimizer_states(f"{folder}/shared states")
        again.update(NAMES, 11, ranks)
        found = outs()
        other.pushpull(NAMES, [gradient(name, 11, kv.rank) for name in NAMES], found)
        right(found, again, NAMES, "loaded", settings)
        other.save(f"{folder}/whole")
        other.close()
    kv.load(f"{folder}/whole")  # which was updated since
    model.update(NAMES, 11, ranks)
    pulled(kv, model, "loaded")
    if kv.num_workers > 1:
        model.update(NAMES, 12, ranks)
        kv.pushpull(NAMES, [gradient(name, 12, kv.rank) for name in NAMES])
        remembered_once(kv)
        pulled(kv, model, "shared again")


def other_calls(kv, model):
    """What looks at all of a value, or of what is remembered, finds it."""
    ranks = range(kv.num_workers)
    kv.push("rows", gradient("rows", 21, kv.rank))
    model.update(["rows"], 21, ranks)
    found = np.full((3, 3), np.nan, "float32")
    kv.row_sparse_pull("rows", found, np.array([39, 0, 20]))
    close(found, model.values["rows"][[39, 0, 20]])
    kv.push("rows", gradient("rows", 28, kv.rank))
    model.update(["rows"], 28, ranks)
    # Some rows, of which the velocity moves alone.
    ids = np.array([1, 38])
    kv.push("rows", (ids, np.full((2, 3), 1.0 + kv.rank, "float32")))
    total = sum(1.0 + rank for rank in ranks)
    velocity, values = model.velocity["rows"].copy(), model.values["rows"].copy()
    velocity[ids] = MOMENTUM * velocity[ids] + total + DECAY * values[ids]
    values[ids] -= RATE * velocity[ids]
    model.velocity["rows"], model.values["rows"] = velocity, values
    pulled(kv, model, "rows")
    kv.push("rows", gradient("rows", 22, kv.rank))
    model.update(["rows"], 22, ranks)
    pulled(kv, model, "rows again")
    kv.set_hyperparams(lr=2 * RATE)
    kv.push("odd", gradient("odd", 23, kv.rank))
    model.update(["odd"], 23, ranks, 2 * RATE)
    pulled(kv, model, "hyperparams")
    kv.assign("odd", np.full(SHAPES["odd"], 3, "float32"))
    model.values["odd"] = np.full(SHAPES["odd"], 3.0)
    close(kv.view("odd"), model.values["odd"])
    kv.push("odd", gradient("odd", 24, kv.rank))  # what was remembered is still there
    model.update(["odd"], 24, ranks, 2 * RATE)
    pulled(kv, model, "assigned")
    if kv.sharded_update:
        with raises(UnsupportedError, match="view of key 'odd' on worker .*pull brings all shares together"):
            kv.view("odd")
    kv.push("few", gradient("few", 25, 0), reduced=True)
    model.update(["few"], 25, [0], 2 * RATE)
    pulled(kv, model, "reduced")
    kv.set_optimizer(sgd())  # without a memory
    model.velocity = {name: np.zeros(SHAPES[name]) for name in NAMES}
    pulled(kv, model, "anew")
    model.update(NAMES, 26, ranks)
    kv.push(NAMES, [gradient(name, 26, kv.rank) for name in NAMES])
    pulled(kv, model, "a second rule")

    def add(key, pushed, stored):
        stored += pushed

    kv.set_updater(add)
    assert not kv.sharded_update
    kv.push("few", gradient("few", 27, kv.rank))
    model.values["few"] = model.values["few"] + sum(gradient("few", 27, rank).astype(float) for rank in ranks)
    pulled(kv, model, "an updater")
    close(kv.view("few"), model.values["few"])


def lists_again():
    """Lists that are known: other arrays, in another order, rows, a mistake, and another rule in between."""
    with create() as kv:
        kv.set_optimizer(sgd())
        model, ranks, found = Momentum(), range(kv.num_workers), outs()
        turned = NAMES[::-1]
        for step in range(12):
            names = turned if step % 4 == 3 else NAMES
            model.update(names, step, ranks)
            given = [gradient(name, step, kv.rank) for name in names]
            if step in (6, 7):  # a list that is known, and one that is not
                wrong = [*given[:-1], given[-1].astype("float64")]
                with raises(DTypeMismatchError, match="key 'none'" if names is turned else "key 'half'"):
                    kv.push(names, wrong)
                with raises(ShapeMismatchError, match="key"):
                    kv.pull(names, [*found[1:], found[0]])
            kv.push(names, given, async_op=step % 2 == 0)
            if step == 8:
                assert len(kv._lists._known) == (3 if kv.sharded_update else 0), kv._lists._known.keys()
                kv.push("rows", (np.array([2]), np.ones((1, 3), "float32")))
                velocity, values = model.velocity["rows"].copy(), model.values["rows"].copy()
                velocity[2] = MOMENTUM * velocity[2] + kv.num_workers + DECAY * values[2]
                values[2] -= RATE * velocity[2]
                model.velocity["rows"], model.values["rows"] = velocity, values
            kv.pull(NAMES, found)
            right(found, model, NAMES, "again", step)
            for array in found:
                array[...] = np.nan
            if step == 9:
                kv.set_optimizer(sgd())
                model.velocity = {name: np.zeros(SHAPES[name]) for name in NAMES}


def adam(kv, folder):
    """A rule with two memories and a count of steps, with a master copy of a half type."""
    kv.set_optimizer(kvmpi.optim.AdamW(lr=0.01, weight_decay=0.1, multi_precision=True))
    values = {name: np.zeros(SHAPES[name]) for name in NAMES}
    first, second = ({name: np.zeros(SHAPES[name]) for name in NAMES} for _ in range(2))
    for step in range(1, 5):
        for name in NAMES:
            total = total_of(name, step, tuple(range(kv.num_workers)))
            first[name] = 0.9 * first[name] + 0.1 * total
            second[name] = 0.999 * second[name] + 0.001 * total**2
            values[name] = values[name] * (1 - 0.01 * 0.1)
            rate = 0.01 / (1 - 0.9**step)
            values[name] -= rate * first[name] / (np.sqrt(second[name] / (1 - 0.999**step)) + 1e-8)
        found = outs()
        kv.pushpull(NAMES, [gradient(name, step, kv.rank) for name in NAMES], found)
        for name, array in zip(NAMES, found, strict=True):
            eps = 1e-3 if name == "half" else 1e-5
            close(array.astype(float), values[name], eps, name)
        if step == 2:  # and goes on
            kv.save(f"{folder}/adam")
            masters = safetensors.numpy.load_file(f"{folder}/adam")
            number = list(kv.keys).index("half")
            close(masters[f"{number}/master"], values["half"])
    kv.close()


def own_rule():
    """One of a user's may raise on some workers only: all of them apply it to everything."""

    @kvmpi.optim.register("thrice")
    class Thrice(kvmpi.optim.Rule):
        def compute(self, b):
            b.out[...] = b.stored + 3 * b.pushed

    with create() as kv:
        kv.set_optimizer(Thrice())
        assert not kv.sharded_update
        found = np.empty(SHAPES["odd"], "float32")
        kv.pushpull("odd", gradient("odd", 1, kv.rank), found)
        total = sum(gradient("odd", 1, rank).astype(float) for rank in range(kv.num_workers))
        np.testing.assert_array_equal(found, 3 * total)
        kv.set_optimizer(kvmpi.optim.Elastic(0.5))
        assert not kv.sharded_update


def joined():
    """Who has no batches left updates its share all the same, and has the values in the end."""
    with create() as kv:
        kv.set_optimizer(sgd())
        model = Momentum()
        for step in range(kv.num_workers + 1):
            ranks = [rank for rank in range(kv.num_workers) if step <= rank]
            if kv.rank not in ranks:
                break
            model.update(NAMES, step, ranks)
            given, found = [gradient(name, step, kv.rank) for name in NAMES], outs()
            if step % 2:
                kv.push(NAMES, given)
                kv.push("few", gradient("few", 31, 0), reduced=True)
                model.update(["few"], 31, [0])
                kv.pull(NAMES, found)
            else:
                kv.pushpull(NAMES, given, found)
            right(found, model, NAMES, "joining", step)
        kv.join()
        model = Momentum()
        for step in range(kv.num_workers):
            model.update(NAMES, step, [rank for rank in range(kv.num_workers) if step <= rank])
            if step % 2:
                model.update(["few"], 31, [0])
        pulled(kv, model, "joined")


def one_fails(folder):
    """What one worker alone has no room for, all hear of when they bring together what they have."""
    for method in ("apply", "narrow_to", "widen"):
        with create() as kv:
            kv.set_optimizer(sgd())
            if not kv.sharded_update:
                return
            last = kv.num_workers - 1
            is_last = kv.rank == last
            fails = unittest.mock.patch.object(Replica, method, side_effect=MemoryError("no room"))
            own, nothing = raises(MemoryError, match="no room"), contextlib.nullcontext()
            with fails if is_last else nothing:
                with own if is_last and method != "widen" else nothing:
                    kv.push("odd", gradient("odd", 1, kv.rank))
                if method == "widen":
                    with own if is_last else raises(KVError, match=f"worker {last} has failed, as its own error"):
                        kv.save(f"{folder}/parted")
            kv.pull("odd", np.empty(SHAPES["odd"], "float32"))
            kv.push("few", gradient("few", 1, kv.rank))
            if method == "widen":  # it has room again
                kv.save(f"{folder}/parted")
                continue
            for call in (lambda: kv.save(f"{folder}/parted"), lambda: kv.set_optimizer(sgd())):
                with raises(KVError, match=f"of key 'odd' worker {last} remembers something else than worker 0"):
                    call()


folder = sys.argv[1]
with create() as kv:
    model = ways_to_push(kv)
    files(kv, model, folder)
    other_calls(kv, model)
adam(create(bucket_bytes=1000), folder)
own_rule()
lists_again()
joined()
one_fails(folder)
print("right")
