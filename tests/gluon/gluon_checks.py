"""Run by test_gluon_jobs, by an interpreter with MXNet, as 2 workers in 1 client with 1 server: every store type.

What is right is said by MXNet itself, alone: its own optimizers on the samples of both workers.
"""

from __future__ import annotations

import sys
from pathlib import Path
from unittest import mock

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

import kvmpi.mxnet
from kvmpi import errors
from kvmpi.mxnet import ndarrays

SYNC = ("kvmpi_mpi", "kvmpi_dist_sync", "kvmpi_dist_sync_mpi")
ASYNC = ("kvmpi_dist_async", "kvmpi_dist_async_mpi")
ALL = ("kvmpi_local", *SYNC, *ASYNC)
WORKERS, BATCH, STEPS = 2, 4, 6
RANK = 0


def optimizers():
    schedule = mx.lr_scheduler.FactorScheduler(step=2, factor=0.5, base_lr=0.1)
    return {
        "sgd": ("sgd", {"learning_rate": 0.1}),
        "momentum": ("sgd", {"momentum": 0.9, "wd": 0.02, "lr_scheduler": schedule}),
        "nag": ("nag", {"learning_rate": 0.05, "momentum": 0.8}),
        "adam": ("adam", {"learning_rate": 0.01, "wd": 0.01, "epsilon": 1e-12}),
    }


def make_net(seed):
    """A convolution too: its weights are kept in a layout of oneDNN's. Biases have rates of their own."""
    mx.random.seed(seed)
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Conv2D(16, 3, in_channels=2), gluon.nn.Dense(5, activation="tanh", in_units=256))
    net.add(gluon.nn.Dense(3, in_units=5))
    net.initialize(mx.init.Xavier())
    net.hybridize()
    biases = net.collect_params(".*bias")
    biases.setattr("lr_mult", 2.0)
    biases.setattr("wd_mult", 0.0)
    return net


def samples(step, workers):
    rngs = [np.random.default_rng([step, worker]) for worker in workers]
    x = np.concatenate([rng.standard_normal((BATCH, 2, 6, 6)) for rng in rngs])
    y = np.concatenate([rng.integers(0, 3, BATCH) for rng in rngs])
    return mx.nd.array(x), mx.nd.array(y)


def train(net, trainer, steps, workers):
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
    for step in steps:
        x, y = samples(step, workers)
        if step == STEPS - 1:  # a shorter last batch
            keep = mx.nd.array([i for i in range(len(y)) if i % BATCH < 3])
            x, y = x.take(keep), y.take(keep)
        with autograd.record():
            loss = loss_of(net(x), y)
        loss.backward()
        trainer.step(WORKERS * (BATCH if step < STEPS - 1 else 3))


def weights(net):
    return np.concatenate([p.data().asnumpy().astype("f8").ravel() for p in net.collect_params().values()])


def alone(optimizer):
    """MXNet's own trainer, without any store, with the samples of both workers."""
    net = make_net(0)
    name, options = optimizers()[optimizer]
    train(net, gluon.Trainer(net.collect_params(), name, options, kvstore=None), range(STEPS), range(WORKERS))
    return weights(net)


def close_to(found, expected, what, bound=2e-6):
    error = np.abs(found - expected).max()
    assert error < bound, f"{what}: {error}"


def training():
    """Two workers equal one; a store is named by a string, as users do, also where MXNet would make none."""
    expected = {optimizer: alone(optimizer) for optimizer in optimizers()}
    pairs = [
        ("kvmpi_mpi", "sgd"),
        ("kvmpi_dist_sync", "momentum"),
        ("kvmpi_dist_sync_mpi", "nag"),
        ("kvmpi_mpi", "adam"),
    ]
    plans = [(kind, optimizer, update) for kind, optimizer in pairs for update in (True, False)]
    plans += [("kvmpi_mpi", "momentum", True), ("kvmpi_dist_sync_mpi", "momentum", True)]
    for number, (kind, optimizer, update) in enumerate(plans):
        make = (gluon.Trainer, kvmpi.mxnet.Trainer)[number % 3 == 0]
        net = make_net(0)  # gluon broadcasts weights in its first step only, when there are gradients already
        name, options = optimizers()[optimizer]
        trainer = make(net.collect_params(), name, options, kvstore=kind, update_on_kvstore=update)
        train(net, trainer, range(STEPS), [RANK])
        store = trainer._kvstore
        assert (store.type, store.num_workers, trainer._update_on_kvstore) == (kind, WORKERS, update)
        # Adam divides small gradients, with the rounding of their sums, by themselves.
        bound = 1e-5 if optimizer == "adam" else 2e-6
        close_to(weights(net), expected[optimizer], f"{kind}, {optimizer}, {make.__module__}, {update}", bound)
        store.close()


def rules():
    """The same gradients to the store and to MXNet's own updater, while the learning rate changes."""
    kv, made = mx.kv.create("kvmpi_local"), optimizers()
    made["half"] = ("sgd", {"learning_rate": 0.1, "momentum": 0.9, "multi_precision": True})
    made["test"] = ("test", {"rescale_grad": 0.5})
    for name, (kind, options) in made.items():
        dtype = "float16" if name == "half" else "float32"
        mine, plain = (
            mx.optimizer.create(kind, **options),
            mx.optimizer.create(kind, **optimizers().get(name, (0, options))[1]),
        )
        updater, rng = mx.optimizer.get_updater(plain), np.random.default_rng(3)
        expected = mx.nd.array(rng.standard_normal((4, 5)), dtype=dtype)
        found = expected.copy()
        kv.init(name, expected)
        kv.set_optimizer(mine)
        for step in range(6):
            gradient = mx.nd.array(rng.standard_normal((4, 5)), dtype=dtype)
            if step == 4 and mine.lr_scheduler is None:
                mine.set_learning_rate(0.03)
                plain.set_learning_rate(0.03)
            if step in (2, 5):
                mine.set_lr_mult({name: 0.5} if step == 2 else {})
                plain.set_lr_mult({0: 0.5} if step == 2 else {})
            kv.pushpull(name, gradient, out=found)
            updater(0, gradient, expected)
        tolerance = 1e-3 if name == "half" else 1e-6
        np.testing.assert_allclose(found.asnumpy(), expected.asnumpy(), rtol=tolerance, atol=tolerance, err_msg=name)
    kv.close()


def asynchronous():
    """Workers push in turn; or sum, where they are one client. MXNet's updater does the same updates."""
    for kind in ASYNC:
        kv = mx.kv.create(kind)
        value = mx.nd.arange(6).reshape((2, 3))
        optimizer = mx.optimizer.SGD(learning_rate=0.25, momentum=0.5)
        kv.set_optimizer(optimizer)
        kv.broadcast("w", value, value)
        updater = mx.optimizer.get_updater(mx.optimizer.SGD(learning_rate=0.25, momentum=0.5))
        expected, out = value.copy(), mx.nd.zeros((2, 3))
        for step in range(3):
            gradients = [mx.nd.array([[1, 2, 3], [4, 5, worker * 7 + step]]) for worker in range(WORKERS)]
            if kind.endswith("mpi"):
                kv.pushpull("w", gradients[RANK], out=out)
                updater("w", gradients[0] + gradients[1], expected)
            else:
                for worker in range(WORKERS):
                    if worker == RANK:
                        kv.push("w", gradients[worker])
                    kv.barrier()
                    updater("w", gradients[worker], expected)
                kv.pull("w", out=out)
                kv.barrier()
            np.testing.assert_allclose(out.asnumpy(), expected.asnumpy(), rtol=1e-6, err_msg=kind)
        optimizer.set_learning_rate(0.0)  # reaches the servers with the next push
        if kind.endswith("mpi"):
            kv.pushpull("w", mx.nd.ones((2, 3)), out=out)
            updater.optimizer.set_learning_rate(0.0)
            updater("w", 2 * mx.nd.ones((2, 3)), expected)
            np.testing.assert_allclose(out.asnumpy(), expected.asnumpy(), rtol=1e-6, err_msg=kind)
        kv.close()


def compressed():
    """MXNet's 2bit: what each worker has left out so far is in its next push."""
    kv = mx.kv.create("kvmpi_dist_sync")
    kv.set_gradient_compression({"type": "2bit", "threshold": 0.5})
    value, out, left = mx.nd.zeros((3, 5)), mx.nd.zeros((3, 5)), np.zeros((WORKERS, 3, 5))
    kv.broadcast("w", value, value)
    for step in range(4):
        gradients = [np.random.default_rng([step, worker]).integers(-4, 5, (3, 5)) / 4 for worker in range(WORKERS)]
        left += gradients
        sent = np.where(left >= 0.5, 0.5, np.where(left <= -0.5, -0.5, 0))
        left -= sent
        kv.pushpull("w", mx.nd.array(gradients[RANK]), out=out)
        np.testing.assert_array_equal(out.asnumpy(), sent.sum(axis=0))
    kv.close()


def sparse_training():
    """Embeddings with sparse gradients, and with sparse weights, equal MXNet's own updater on all workers' rows."""

    def ids(step, worker):
        rng = np.random.default_rng([7, step, worker])
        return mx.nd.array(rng.integers(0, 40, step + worker + 1))

    def make(block):
        mx.random.seed(5)
        net = block()
        net.initialize(mx.init.Uniform(0.5))
        return net

    def dense():
        return gluon.nn.Embedding(50, 3, sparse_grad=True)

    def sparse():
        return gluon.contrib.nn.SparseEmbedding(50, 3)

    momentum = {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.1}
    plans = [
        ("kvmpi_local", dense, "sgd", momentum, gluon.Trainer),
        ("kvmpi_mpi", dense, "sgd", {"learning_rate": 0.1}, gluon.Trainer),
        ("kvmpi_mpi", sparse, "sgd", momentum, gluon.Trainer),
        ("kvmpi_dist_sync", dense, "sgd", {**momentum, "lazy_update": False}, kvmpi.mxnet.Trainer),
        ("kvmpi_dist_sync", sparse, "adam", optimizers()["adam"][1], kvmpi.mxnet.Trainer),
        ("kvmpi_dist_sync_mpi", dense, "sgd", momentum, kvmpi.mxnet.Trainer),
        ("kvmpi_dist_sync_mpi", sparse, "sgd", {"learning_rate": 0.1}, gluon.Trainer),
    ]
    for kind, block, optimizer, options, make_trainer in plans:
        workers = [RANK] if kind == "kvmpi_local" else range(WORKERS)
        net = make(block)
        (parameter,) = net.collect_params().values()
        trainer = make_trainer(net.collect_params(), optimizer, options, kvstore=kind)
        expected = make(dense).weight.data().copy()
        if parameter._stype == "row_sparse":
            expected = expected.tostype("row_sparse")
        updater = mx.optimizer.get_updater(mx.optimizer.create(optimizer, rescale_grad=1 / BATCH, **options))
        for step in range(STEPS):
            with autograd.record():
                loss = (net(ids(step, RANK)) - RANK).square().sum()
            loss.backward()
            weights_now = expected.tostype("default").asnumpy()
            total = np.zeros((50, 3), "f4")
            for worker in workers:
                for i in ids(step, worker).asnumpy().astype(int):
                    total[i] += 2 * (weights_now[i] - worker)
            updater(0, mx.nd.array(total).tostype("row_sparse"), expected)
            trainer.step(BATCH)
        store = trainer._kvstore
        found = parameter._reduce() if parameter._stype == "row_sparse" else parameter.data()
        what = f"{kind}, {parameter._stype}, {optimizer}, {options}"
        bound = 1e-5 if optimizer == "adam" else 2e-6
        close_to(found.tostype("default").asnumpy(), expected.tostype("default").asnumpy(), what, bound)
        moved = store.store.stats()["phases"].get("push", {"bytes": 0})["bytes"]
        assert moved < STEPS * 50 * 3 * 4 or not options.get("lazy_update", True), f"{what}: whole keys travel"
        store.close()


def values():
    """Sums over devices and workers, of every dtype, in the arrays' own memory."""
    for kind in ("kvmpi_local", *SYNC):
        kv = mx.kv.create(kind)
        assert (kv.type, kv.rank, kv.num_workers) == (kind, *((0, 1) if kind == "kvmpi_local" else (RANK, WORKERS)))
        workers = [RANK] if kind == "kvmpi_local" else range(WORKERS)
        for dtype in ("float32", "float64", "float16", "int32", "int64", "int8", "uint8"):
            first = mx.nd.array(np.arange(6) + 10 * RANK, dtype=dtype).reshape((3, 2))
            copies = [mx.nd.zeros((3, 2), ctx=mx.cpu(i), dtype=dtype) for i in range(2)]
            kv.broadcast(dtype, first, copies)
            source = RANK if kind == "kvmpi_local" else 0
            for copy in copies:
                assert (copy.asnumpy() == (np.arange(6) + 10 * source).reshape(3, 2)).all(), (kind, dtype)
            mine = [mx.nd.array([[1, 2], [3, 4], [5, 6 + RANK]], ctx=mx.cpu(i), dtype=dtype) for i in range(2)]
            total = sum(2 * np.array([[1, 2], [3, 4], [5, 6 + worker]]) for worker in workers)
            with mock.patch.object(mx.nd.NDArray, "asnumpy", side_effect=AssertionError("an array was copied")):
                kv.pushpull(dtype, mine, out=copies)
                kv.pushpull(dtype, mine)
            for found in (*copies, *mine):
                assert (found.asnumpy() == total).all(), (kind, dtype, found)
        out = [mx.nd.zeros((3, 2)), mx.nd.zeros((3, 2), dtype="float64")]
        kv.push(["float32", "float64"], [mx.nd.ones((3, 2)), mx.nd.ones((3, 2), dtype="float64") * 2])
        kv.pull(["float32", "float64"], out=out)
        for i, found in enumerate(out):
            assert (found.asnumpy() == (i + 1) * len(workers)).all(), (kind, found)
        kv.close()


def copies():
    """Arrays whose memory cannot be used: what is in another layout, or on a device, crosses by way of copies."""
    net = make_net(0)
    net(samples(0, [0])[0]).wait_to_read()
    weight = net[0].weight.data()
    if mx.runtime.Features().is_enabled("MKLDNN"):
        assert ndarrays._memory(weight, weight.to_dlpack_for_read) is None, "nothing is in oneDNN's layout any more"
    before, kv = weight.asnumpy(), mx.kv.create("kvmpi_mpi")
    for key, here in enumerate((ndarrays._HERE, frozenset())):
        with mock.patch.object(ndarrays, "_HERE", here):
            kv.init(key, weight)
            kv.pushpull(key, weight * (RANK + 1), out=weight)
            np.testing.assert_allclose(weight.asnumpy(), 3 * before, rtol=1e-6)
            mx.nd.array(before).copyto(weight)
            net(samples(0, [0])[0]).wait_to_read()
    kv.close()


def states(folder):
    """A trainer that goes on from save_states has the bits of one that was not interrupted."""
    for kind, optimizer in (("kvmpi_dist_sync_mpi", "momentum"), ("kvmpi_mpi", "adam"), ("kvmpi_dist_sync", "adam")):
        name, _ = optimizers()[optimizer]
        path, ends, middle = str(folder / f"{kind}-{optimizer}"), [], []
        for start in (0, STEPS // 2):
            net = make_net(0)
            trainer = gluon.Trainer(
                net.collect_params(), name, optimizers()[optimizer][1], kvstore=mx.kv.create(kind),
                update_on_kvstore=True,
            )  # fmt: skip
            if start:
                for param, saved in zip(net.collect_params().values(), middle, strict=True):
                    param.set_data(mx.nd.array(saved))
                trainer.load_states(path)
                assert trainer.optimizer.num_update == start
            train(net, trainer, range(start, STEPS // 2), [RANK])
            if not start:
                trainer.save_states(path)
                middle = [param.data().asnumpy() for param in net.collect_params().values()]
            train(net, trainer, range(STEPS // 2, STEPS), [RANK])
            ends.append(weights(net))
            trainer._kvstore.close()
        assert (ends[0] == ends[1]).all(), f"{kind}, {optimizer}: {np.abs(ends[0] - ends[1]).max()}"


def module():
    """The API before gluon: keys are names, and the store is set up before the optimizer."""

    def fit(kv, workers):
        out = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=3, name="fc")
        mod = mx.mod.Module(mx.sym.SoftmaxOutput(out, name="softmax"))
        mod.bind([("data", (BATCH * len(workers), 4))], [("softmax_label", (BATCH * len(workers),))])
        mod.init_params(arg_params={"fc_weight": mx.nd.ones((3, 4)), "fc_bias": mx.nd.zeros(3)}, aux_params={})
        mod.init_optimizer(kvstore=kv, optimizer="sgd", optimizer_params={"learning_rate": 0.5, "momentum": 0.9})
        for step in range(3):
            x, y = samples(step, workers)
            mod.forward_backward(mx.io.DataBatch([x[:, 0, 0, :4]], [y]))
            mod.update()
        return np.concatenate([v.asnumpy().ravel() for _, v in sorted(mod.get_params()[0].items())])

    expected = fit("local", range(WORKERS))
    assert np.abs(expected - fit("local", [RANK])).max() > 1e-3
    store = mx.kv.create("kvmpi_dist_sync")
    close_to(fit(store, [RANK]), expected, "module")
    store.close()


def mistakes():
    kv = mx.kv.create("kvmpi_dist_sync_mpi")
    kv.init(0, mx.nd.ones(3))

    def fails(kind, words, call, *args):
        try:
            call(*args)
        except kind as error:
            said = str(error)
        else:
            said = f"no {kind.__name__} at all"
        assert words in said, f"expected {words!r}: {said}"

    def pushed_with(optimizer):
        kv.set_optimizer(optimizer)
        kv.push(0, mx.nd.ones(3))

    fails(errors.UnsupportedError, "update_on_kvstore=False", pushed_with, mx.optimizer.AdaGrad())
    fails(errors.UnsupportedError, "clip_gradient=1.0", pushed_with, mx.optimizer.SGD(clip_gradient=1.0))
    fails(errors.UnsupportedError, "wd=0.5", pushed_with, mx.optimizer.NAG(momentum=0.9, wd=0.5))
    fails(errors.UnsupportedError, "has no equivalent", pushed_with, object())
    kv.set_optimizer(kvmpi.optim.Test(lr=-1))
    fails(errors.UnsupportedError, "tostype('default')", kv.push, 0, mx.nd.ones((3, 2)).tostype("csr"))
    fails(errors.UnsupportedError, "no NDArray of storage type row_sparse", kv.row_sparse_pull, 0, mx.nd.ones(3))
    fails(errors.DTypeMismatchError, "dtype bool", kv.push, 0, mx.nd.ones(3).astype("bool"))
    fails(errors.DTypeMismatchError, "dtype float64, the key has float32", kv.push, 0, mx.nd.ones(3, dtype="float64"))
    fails(errors.UnsupportedError, "fp16", kv.set_gradient_compression, {"type": "3bit", "threshold": 0.5})
    fails(ValueError, "unknown capability", kv.is_capable, "flying")
    assert kv.is_capable("optimizer")
    out = mx.nd.zeros(3)
    kv.pull(0, out=out)
    assert (out.asnumpy() == 1).all(), "something was pushed after all"
    kv.close()
    table = gluon.nn.Embedding(3, 2, sparse_grad=True)
    table.initialize()
    trainer = gluon.Trainer(table.collect_params(), "sgd", kvstore="kvmpi_mpi", update_on_kvstore=False)
    fails(errors.ConfigError, "leave that to the store", trainer.step, 1)
    net = make_net(0)
    trainer = gluon.Trainer(net.collect_params(), "rmsprop", {}, kvstore="kvmpi_dist_sync")
    fails(errors.UnsupportedError, "MXNet's RMSProp", train, net, trainer, range(1), [RANK])


def main():
    global RANK
    with kvmpi.create("dist_sync") as kv:
        RANK = kv.rank
    training()
    rules()
    asynchronous()
    sparse_training()
    compressed()
    values()
    copies()
    states(Path(sys.argv[1]))
    module()
    mistakes()
    print("all checks passed")


if __name__ == "__main__":
    main()
