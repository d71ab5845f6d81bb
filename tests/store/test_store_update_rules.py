"""Update rules in every store type, in one process: of kvmpi, of torch, of the user, and values that are assigned."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from store_helpers import array, pulled

import kvmpi
from kvmpi import errors, optim
from kvmpi.config import Config
from kvmpi.store.replicated import ReplicatedStore


def test_optimizer_runs_in_the_store(any_store):
    rule = optim.SGD(lr=0.1, momentum=0.9, weight_decay=0.01)
    any_store.init("w", array(0))
    any_store.set_optimizer(rule)
    weights, velocity = array(0).astype("f8"), np.zeros((2, 3))
    lr = 0.1
    for step in range(1, 6):
        gradient = array(step)
        any_store.push("w", gradient)
        velocity = 0.9 * velocity + gradient + 0.01 * weights
        weights = weights - lr * velocity
        if step == 3:
            any_store.set_hyperparams(lr=0.02)
            lr = 0.02
    np.testing.assert_allclose(pulled(any_store, "w", array(0)), weights, rtol=1e-5, atol=1e-6)
    assert any_store.optimizer.hyperparams()["lr"] == 0.02
    with pytest.raises(errors.ConfigError, match="momentum"):
        any_store.set_hyperparams(learning_rate=1.0)


def test_torch_optimizer_becomes_a_rule(any_store):
    weight = torch.nn.Parameter(torch.from_numpy(array(0)))
    twin = torch.nn.Parameter(torch.from_numpy(array(0).astype("f8")))
    any_store.init(0, weight)
    any_store.set_optimizer(torch.optim.AdamW([weight], lr=0.01, weight_decay=0.1))
    reference = torch.optim.AdamW([twin], lr=0.01, weight_decay=0.1)
    for step in range(1, 5):
        gradient = torch.from_numpy(array(step))
        any_store.pushpull(0, gradient, weight)
        twin.grad = torch.from_numpy(array(step).astype("f8"))
        reference.step()
    np.testing.assert_allclose(weight.detach(), twin.detach(), rtol=1e-5, atol=1e-7)
    with pytest.raises(errors.UnsupportedError, match="LBFGS"):
        any_store.set_optimizer(torch.optim.LBFGS([weight]))


def test_multi_precision_keeps_small_updates(any_store):
    any_store.init("w", np.ones(5, "f2"))
    any_store.set_optimizer(optim.SGD(lr=1.0, multi_precision=True))
    for _ in range(8):
        any_store.push("w", np.full(5, 1e-4, "f2"))
    expected = np.float16(1 - 8 * float(np.float16(1e-4)))
    np.testing.assert_array_equal(pulled(any_store, "w", np.empty(5, "f2")), np.full(5, expected))


def test_elastic_pushpull_returns_the_center_that_the_push_met(any_store):
    any_store.init("w", array(0))
    any_store.set_optimizer(optim.Elastic(alpha=0.25))
    center, weights = array(0).astype("f8"), array(1)
    for _ in range(3):
        met = np.empty_like(weights)
        any_store.pushpull("w", weights, met)
        np.testing.assert_allclose(met, center, rtol=1e-6)
        center = center + 0.25 * (weights - center)
        before = weights + met
        weights = weights - np.float32(0.25) * (weights - met)
        np.testing.assert_allclose(weights + pulled(any_store, "w", met), before, rtol=1e-6)


def test_updater():
    for name in ["local", "mpi"]:
        with kvmpi.create(name) as kv:
            assert kv.is_capable("updater")
            kv.init(4, np.ones((2, 2), "f4"))
            seen = []

            def update(key, pushed, stored, seen=seen):
                seen.append((key, pushed.shape))
                stored += 2 * pushed

            kv.set_updater(update)
            kv.push(4, [np.ones((2, 2), "f4"), np.full((2, 2), 2, "f4")])
            np.testing.assert_array_equal(pulled(kv, 4, np.empty((2, 2), "f4")), np.full((2, 2), 7))
            assert seen == [(4, (2, 2))]
    with kvmpi.create("dist_sync") as kv, pytest.raises(errors.UnsupportedError, match="register"):
        kv.set_updater(print)


def test_an_error_in_an_updater_surfaces_and_the_store_goes_on():
    with kvmpi.create("local") as kv:
        kv.init("w", np.ones(2, "f4"))
        fail = [True]

        def update(key, pushed, stored):
            if fail[0]:
                raise ZeroDivisionError("planted")
            stored += pushed

        kv.set_updater(update)
        with pytest.raises(ZeroDivisionError, match="planted"):
            kv.push("w", np.ones(2, "f4"))
        kv.push("w", np.ones(2, "f4"), async_op=True)
        with pytest.raises(ZeroDivisionError):
            kv.wait_all()
        kv.wait_all()
        fail[0] = False
        kv.push("w", np.ones(2, "f4"))
        np.testing.assert_array_equal(pulled(kv, "w", np.empty(2, "f4")), [2, 2])


@pytest.mark.parametrize("name", ["wait_all", "join", "barrier", "close"])
def test_an_updater_that_waits_for_the_store_is_told_that_it_would_wait_for_itself(name):
    with kvmpi.create("local", timeout_s=1.0) as kv:
        kv.init("w", np.ones(2, "f4"))
        kv.set_updater(lambda key, pushed, stored: getattr(kv, name)())
        with pytest.raises(errors.KVError, match=f"{name} inside the updater of key 'w': it would wait for itself"):
            kv.push("w", np.ones(2, "f4"))


def test_assigned_values_are_what_the_optimizer_goes_on_from(store):
    """With the momentum that it has; of half types also the master copy is of the new value."""
    store.set_optimizer(optim.SGD(lr=1.0, momentum=0.5, multi_precision=True))
    store.init(["f4", "f2"], [np.zeros(3, "f4"), np.zeros(3, "f2")])
    for dtype in ("f4", "f2"):
        store.push(dtype, np.ones(3, dtype))
        store.assign(dtype, np.full(3, 100, dtype))
        assert (pulled(store, dtype, np.empty(3, dtype)) == 100).all()
        store.push(dtype, np.ones(3, dtype))
        assert (pulled(store, dtype, np.empty(3, dtype)) == 98.5).all()
    store.assign(["f2", "f4"], [torch.ones(3, dtype=torch.float16), np.arange(9, dtype="f4")[::3]])
    assert (pulled(store, "f2", np.empty(3, "f2")) == 1).all()
    assert (pulled(store, "f4", np.empty(3, "f4")) == [0, 3, 6]).all()
    with pytest.raises(errors.KeyNotInitializedError, match="assign of key 'none'"):
        store.assign("none", np.ones(3, "f4"))
    with pytest.raises(errors.ShapeMismatchError):
        store.assign("f4", np.ones(4, "f4"))
    with pytest.raises(errors.DTypeMismatchError):
        store.assign(["f2", "f4"], [np.ones(3, "f4")] * 2)
    assert (pulled(store, "f2", np.empty(3, "f2")) == 1).all()


@pytest.mark.parametrize("name", ["local", "mpi"])
def test_of_an_optimizer_and_an_updater_the_last_one_counts(name):
    def double(key, pushed, stored):
        stored += 2 * pushed

    def push(by):
        nonlocal value
        kv.push("w", array(1))
        value = value + by * array(1)
        np.testing.assert_allclose(pulled(kv, "w", array(0)), value, rtol=1e-6)

    with kvmpi.create(name) as kv:
        kv.init("w", array(0))
        value = array(0)
        kv.set_updater(double)
        push(2)
        kv.set_optimizer(optim.Test(lr=-1.0))
        push(1)
        kv.set_updater(double)
        push(2)
        assert kv.optimizer is None
        with pytest.raises(errors.ConfigError, match="no optimizer"):
            kv.set_hyperparams(lr=1.0)


def test_a_mean_over_different_numbers_of_devices_is_refused(run_ranks):
    """One of the ranks would divide by another number: values of ranks would differ, or be too large."""

    def rank_main(comm):
        kv = ReplicatedStore("mpi", Config(timeout_s=20.0), comm)
        kv.init("w", np.zeros(3))
        kv.set_optimizer(optim.Elastic(1.0))
        with pytest.raises(errors.DTypeMismatchError, match=r"averaged over 1 devices .* averaged over 2 devices"):
            kv.push("w", [np.ones(3)] * (comm.rank + 1))
        kv.allreduce("w", [np.ones(3)] * (comm.rank + 1), out := np.zeros(3))
        np.testing.assert_array_equal(out, np.full(3, 3.0))
        kv.push("w", [np.full(3, 1.0 + comm.rank)] * 2)
        np.testing.assert_array_equal(pulled(kv, "w", np.zeros(3)), np.full(3, 1.5))
        kv.close()

    run_ranks(2, rank_main)


def test_an_array_that_cannot_be_carried_is_named_by_its_key(any_store):
    any_store.init(["w", "v"], [array(0), array(0)])
    for call in (
        lambda: any_store.push(["w", "v"], [array(1), array(1).astype("c8")]),
        lambda: any_store.pull(["w", "v"], [array(1), array(1).astype(">f4")]),
    ):
        with pytest.raises(errors.DTypeMismatchError, match="key 'v'"):
            call()
    with pytest.raises(errors.DTypeMismatchError, match=r"'u'.*complex64"):
        any_store.init("u", array(0).astype("c8"))


def test_an_array_that_cannot_be_written_is_named_by_its_key(any_store):
    any_store.init(["w", "v"], [array(0), array(0)])
    fixed = array(1)
    fixed.flags.writeable = False
    for call in (
        lambda: any_store.pull(["w", "v"], [array(1), fixed]),
        lambda: any_store.pushpull(["w", "v"], [array(1), fixed]),
        lambda: any_store.row_sparse_pull(["w", "v"], [array(1), fixed], [[0, 1], [1, 0]]),
    ):
        with pytest.raises(errors.UnsupportedError, match="key 'v' on worker 0: out is a read-only"):
            call()


def test_a_master_copy_that_is_not_wanted_any_more_is_not_taken_up_again(any_store):
    """Halves are too small a step for what is stored: they show in the master copy alone, which begins anew."""
    any_store.init("w", torch.full((4,), 256.0, dtype=torch.bfloat16))
    any_store.set_optimizer(optim.SGD(lr=1.0, multi_precision=True))
    half, out, found = torch.full((4,), 0.5, dtype=torch.bfloat16), torch.empty(4, dtype=torch.bfloat16), []
    for wanted in (True, False, True, True):
        any_store.set_hyperparams(multi_precision=wanted)
        any_store.pushpull("w", half, out)
        found.append(out[0].item())
    assert found == [256.0, 256.0, 256.0, 255.0]
