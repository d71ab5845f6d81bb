"""Run by test_gluon_jobs, by an interpreter with MXNet, as 2 workers in 1 client with 1 server: the check it is told.

What changes between two pushes - batch sizes, learning rates, what a file says - and lists of keys with sparse arrays.
What is right is said by MXNet itself: its updater and its local store.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from unittest import mock

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

import kvmpi.mxnet
from kvmpi import errors, optim

SYNC = ("kvmpi_mpi", "kvmpi_dist_sync", "kvmpi_dist_sync_mpi")
WORKERS, BATCH = 2, 8
RANK = 0


def gradients(step, shape):
    """By worker."""
    return [np.random.default_rng([step, worker]).standard_normal(shape).astype("f4") for worker in range(WORKERS)]


def close_to(found, expected, what, bound=2e-6):
    np.testing.assert_allclose(found.asnumpy(), expected.asnumpy(), rtol=bound, atol=bound, err_msg=what)


def fails(kind, words, call, *args, **options):
    try:
        call(*args, **options)
    except kind as error:
        said = str(error)
    else:
        said = f"no {kind.__name__} at all"
    assert words in said, f"expected {words!r}: {said}"


def batch_sizes():
    """Every second batch of worker 1 is short: that counts for its own gradients, also where learning rates change."""
    of_pushes()
    of_trainers()
    of_integers()


def of_pushes():

    def run(kind, name, dtype, in_place, by_rows=False, **options):
        mine = mx.optimizer.create(name, learning_rate=0.1, rescale_grad=1 / BATCH, **options)
        plain = mx.optimizer.create(name, learning_rate=0.1, **options)
        kv, updater = mx.kv.create(kind), mx.optimizer.get_updater(plain)
        value, expected = (mx.nd.arange(12, dtype=dtype).reshape((4, 3)) for _ in range(2))
        kv.broadcast("w", value, value)
        kv.set_optimizer(mine)
        for step in range(6):
            sizes = [BATCH, BATCH - 3 * (step % 2)]
            if step == 4:
                mine.set_learning_rate(0.02)
                plain.set_learning_rate(0.02)
            mine.rescale_grad = 1 / sizes[RANK]
            pushed = gradients(step, (4, 3))
            own = mx.nd.array(pushed[RANK], dtype=dtype)
            if by_rows:
                kv.push("w", own.tostype("row_sparse"))
                kv.pull("w", out=value)
            elif in_place:
                kv.pushpull("w", own)
                value = own
            else:
                kv.pushpull("w", own, out=value)
            updater(0, mx.nd.array(sum(g / n for g, n in zip(pushed, sizes, strict=True)), dtype=dtype), expected)
            close_to(value, expected, f"{kind}, {name}, {dtype}, step {step}", 4e-3 if dtype == "float16" else 2e-6)
        kv.close()

    for kind in (*SYNC, "kvmpi_dist_async_mpi"):
        run(kind, "sgd", "float32", in_place=False, momentum=0.9, wd=0.02)
    run("kvmpi_dist_sync", "adam", "float32", in_place=True)
    run("kvmpi_dist_sync", "sgd", "float16", in_place=False, multi_precision=True)
    run("kvmpi_dist_sync", "sgd", "float32", in_place=False, by_rows=True)
    halves = np.linspace(-1, 1, 99).astype("f2")
    np.testing.assert_array_equal(
        kvmpi.mxnet.ndarrays.times(1.6, halves), (halves * np.full(99, 1.6, "f4")).astype("f2")
    )


def of_trainers():
    """gluon's trainer says the batch size: before it has a store, or after, where weights are sparse. It warns once."""
    for kind in SYNC:
        net = gluon.nn.Dense(1, in_units=3, use_bias=False)
        net.initialize(mx.init.Zero())
        trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.5}, kvstore=kind,
                                update_on_kvstore=True)  # fmt: skip
        expected, rate = np.zeros(3), 0.5
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for step in range(6):
                rate = 0.25 if step > 3 else 0.5
                trainer.set_learning_rate(rate)
                sizes, rows = [BATCH, BATCH - 3 * (step % 2)], gradients(step, (BATCH, 3))
                with autograd.record():
                    loss = net(mx.nd.array(rows[RANK][: sizes[RANK]])).sum()
                loss.backward()
                trainer.step(sizes[RANK])
                expected -= rate * sum(x[:n].mean(axis=0) for x, n in zip(rows, sizes, strict=True))
                found = net.weight.data().asnumpy().ravel()
                np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5, err_msg=f"{kind}, step {step}")
        words = [str(one.message) for one in said if "rescale_grad" in str(one.message)]
        assert len(words) == RANK, words
        assert all("rescale_grad 0.125" in text and "with 0.2 " in text and "by 1.6" in text for text in words), words
        trainer._kvstore.close()

        table = gluon.contrib.nn.SparseEmbedding(6, 2)
        table.initialize(mx.init.Zero())
        trainer = gluon.Trainer(table.collect_params(), "sgd", {"learning_rate": 1.0}, kvstore=kind)
        for _ in range(2):
            with autograd.record():
                loss = (table(mx.nd.array([RANK, 2])) * 3).sum()
            loss.backward()
            with mock.patch.object(
                kvmpi.mxnet.ndarrays, "times", side_effect=AssertionError("gradients were multiplied")
            ):
                trainer.step(BATCH)
        (parameter,) = table.collect_params().values()
        each = np.array([1, 1, 2, 0, 0, 0]) * -2 * 3 / BATCH
        found = parameter._reduce().tostype("default").asnumpy()
        np.testing.assert_allclose(found, np.stack([each, each], axis=1), err_msg=kind)
        trainer._kvstore.close()


def of_integers():
    """A push of them cannot be multiplied."""
    kv = mx.kv.create("kvmpi_local")
    kv.init(0, mx.nd.ones(3, dtype="int32"))
    optimizer = mx.optimizer.Test()
    kv.set_optimizer(optimizer)
    optimizer.rescale_grad = 3.0
    fails(errors.UnsupportedError, "int32 cannot be multiplied by 3.0", kv.push, 0, mx.nd.ones(3, dtype="int32"))
    optimizer.rescale_grad = 1.0
    kv.push(0, mx.nd.ones(3, dtype="int32"))
    kv.close()


def lists():
    """Lists of keys with sparse arrays, and lists of arrays for each, as MXNet's local store takes them."""
    shape, values = (5, 2), [np.random.default_rng(key).standard_normal((5, 2)).astype("f4") for key in range(3)]

    def ids(*numbers):
        return mx.nd.array([(number + RANK) % 5 for number in numbers], dtype="int64")

    def rows(count=None):
        if count is not None:
            return [rows() for _ in range(count)]
        return mx.nd.sparse.row_sparse_array(([[7.0, 7.0]], [0]), shape=shape)

    def dense():
        return mx.nd.ones(shape)

    calls = [
        ("row_sparse_pull", [0, 1], lambda: rows(2), {"row_ids": [ids(3, 0, 3), ids(1)]}),
        ("row_sparse_pull", [1, 0], lambda: [rows(2), rows()], {"row_ids": [[ids(1), ids(2, 0)], ids(4)]}),
        ("row_sparse_pull", (0, 1), lambda: (rows(1), rows(2)), {"row_ids": [[ids(1)], [ids(2), ids(0)]]}),
        ("row_sparse_pull", 1, lambda: rows(2), {"row_ids": ids(4, 1)}),
        ("row_sparse_pull", 1, lambda: rows(2), {"row_ids": [ids(4, 1)]}),
        ("row_sparse_pull", 1, lambda: rows(2), {"row_ids": [ids(4, 1), ids(0)]}),
        ("row_sparse_pull", [2], lambda: rows(1), {"row_ids": ids(2)}),
        ("pull", [0, 1, 2], lambda: [dense(), rows(), dense()], {}),
        ("pull", [2, 0], lambda: [[dense(), dense()], rows()], {"ignore_sparse": False}),
        ("pull", [2, 0], lambda: [[dense(), rows()], [rows(), dense()]], {"ignore_sparse": False}),
        ("pull", 0, lambda: [dense(), rows()], {}),
        ("pull", [0, 1], lambda: rows(2), {}),
        ("pull", [0, 1], lambda: rows(2), {"ignore_sparse": False}),
        ("pull", [0, 1], lambda: [dense(), dense().tostype("csr")], {}),
    ]

    def flat(out):
        return [one for each in out for one in flat(each)] if isinstance(out, list | tuple) else [out]

    stores = {kind: mx.kv.create(kind) for kind in ("local", "kvmpi_local", *SYNC)}
    for kv in stores.values():
        kv.init([0, 1, 2], [mx.nd.array(value).tostype("row_sparse") for value in values])
    for op, key, make, options in calls:
        results = {}
        for kind, kv in stores.items():
            out = make()
            getattr(kv, op)(key, out=out, **options)
            results[kind] = flat(out)
        expected = results.pop("local")
        for kind, found in results.items():
            for one, other in zip(found, expected, strict=True):
                what = f"{kind}, {op} of {key}, {options}"
                np.testing.assert_array_equal(one.asnumpy(), other.asnumpy(), err_msg=what)
                if one.stype == "row_sparse":
                    np.testing.assert_array_equal(one.indices.asnumpy(), other.indices.asnumpy(), err_msg=what)
    kv = stores["kvmpi_local"]
    pull = kv.row_sparse_pull
    fails(errors.ConfigError, "2 keys need lists of as many arrays", pull, [0, 1], out=rows(2), row_ids=[ids(1)])
    fails(errors.ConfigError, "2 keys need lists", pull, [0, 1], out=rows(), row_ids=[ids(1), ids(2)])
    fails(errors.ConfigError, "3 arrays, 2 arrays of row ids", pull, 0, out=rows(3), row_ids=[ids(1), ids(2)])
    fails(errors.ConfigError, "row_ids is None", pull, 0, out=rows())
    for kind, kv in stores.items():
        if kind != "local":
            kv.close()


def many_keys():
    """Where every key has rates of its own: as many rules as keys are made, and the servers are told in one call."""
    counts = {}
    for number in (20, 80):
        keys = list(range(number))
        kv = mx.kv.create("kvmpi_local")
        optimizer = mx.optimizer.SGD(learning_rate=0.5, rescale_grad=1.0)
        optimizer.set_lr_mult({key: 1.0 + key for key in keys})
        optimizer.set_wd_mult({key: 2.0 + key for key in keys})
        kv.init(keys, [mx.nd.zeros(1) for _ in keys])
        kv.set_optimizer(optimizer)
        with mock.patch.object(kv.store, "set_hyperparams", wraps=kv.store.set_hyperparams) as told:
            for key in keys:
                kv.push(key, mx.nd.ones(1))
            assert told.call_count == 1, f"{told.call_count} calls in the first step with {number} keys"
        optimizer.set_learning_rate(0.25)
        with mock.patch.object(optim.SGD, "__post_init__", autospec=True, side_effect=optim.SGD.__post_init__) as made:
            kv.push(keys, [mx.nd.ones(1) for _ in keys])
        counts[number] = made.call_count
        out = [mx.nd.zeros(1) for _ in keys]
        kv.pull(keys, out=out)
        found = [float(one.asscalar()) for one in out]
        assert found == [-0.75 * (1.0 + key) for key in keys], found
        kv.close()
    assert 0 < counts[80] <= 4 * counts[20], counts


def loaded(folder):
    """After a file is loaded in the middle of a run, the learning rate is that of the optimizer."""
    for kind in ("kvmpi_local", *SYNC):
        alone = kind == "kvmpi_local"
        path, total = str(folder / f"{kind}-{RANK if alone else 0}"), 1 if alone else WORKERS
        for by in ("load", "load_optimizer_states", "set_hyperparams"):
            kv, out = mx.kv.create(kind), mx.nd.zeros(2)
            optimizer = mx.optimizer.SGD(learning_rate=1.0, wd=0.0)
            optimizer.set_lr_mult({"b": 0.5})
            kv.init(["a", "b"], [mx.nd.zeros(2), mx.nd.zeros(2)])
            kv.set_optimizer(optimizer)

            def step(kv=kv):
                kv.push(["a", "b"], [mx.nd.ones(2), mx.nd.ones(2)])

            step()
            kv.store.save(path)
            optimizer.set_learning_rate(0.125)
            step()
            before = 1.125
            if by == "set_hyperparams":
                kv.store.set_hyperparams(lr=1.0)
            elif by == "load":
                kv.store.load(path)
                before = 1.0
            else:
                kv.store.load_optimizer_states(path)
            for _ in range(2):
                step()
            for key, mult in (("a", 1.0), ("b", 0.5)):
                kv.pull(key, out=out)
                expected = -total * mult * (before + 2 * 0.125)
                assert (out.asnumpy() == expected).all(), f"{kind}, {by}, key {key}: {out.asnumpy()}, not {expected}"
            kv.close()


def main():
    global RANK
    with kvmpi.create("dist_sync") as kv:
        RANK = kv.rank
    checks = {
        "batch_sizes": batch_sizes,
        "lists": lists,
        "many_keys": many_keys,
        "loaded": lambda: loaded(Path(sys.argv[2])),
    }
    checks[sys.argv[1]]()
    print("all checks passed")


if __name__ == "__main__":
    main()
