"""Calls with the same arrays as before: they are not looked at again, and whatever else has changed is noticed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from store_helpers import array

import kvmpi
from kvmpi import arrays, errors, optim
from kvmpi.store import checked


@pytest.fixture
def known(monkeypatch):
    """For each call on one key whether it was known."""
    found, calls, original = [], [], checked.find

    def find(state, call, *arguments):
        memory = original(state, call, *arguments)
        if not calls or calls[-1] is not call:  # a store on servers asks twice for one that is not known
            calls.append(call)
            found.append(memory is not None)
        return memory

    monkeypatch.setattr(checked, "find", find)
    # Else all are looked at, where other tests of the process use a GPU.
    monkeypatch.setattr(arrays, "may_be_on_devices", lambda: False)
    return found


def filled(out, value):
    """``out``, a NumPy array or a torch tensor, with other contents."""
    out[...] = value if isinstance(out, np.ndarray) else torch.from_numpy(value)
    return out


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("key", [3, "weight"])
def test_results_follow_the_contents(store, known, library, key):
    kv, value, out = store, array(0), np.zeros((2, 3), "f4")
    kv.init(key, value)
    if library == "torch":
        value, out = torch.from_numpy(value.copy()), torch.from_numpy(out)
    for step in range(1, 5):
        pushed = array(step)
        kv.pushpull(key, filled(value, pushed), out)
        np.testing.assert_array_equal(out, pushed)
        kv.push(key, filled(value, 2 * pushed))
        kv.pull(key, out)
        np.testing.assert_array_equal(out, 2 * pushed)
        kv.pushpull(key, filled(value, 3 * pushed))
        np.testing.assert_array_equal(value, 3 * pushed)
    assert known == 3 * [False] + 13 * [True]
    assert kv._observe().totals["steps"] == 12


def test_other_arrays_are_looked_at(store, known):
    kv, memory = store, np.zeros(64, "f4")
    kv.init("k", np.zeros((2, 3), "f4"))
    right = memory[:6].reshape(2, 3)
    for _ in range(2):
        kv.push("k", right)
        kv.pull("k", right)
    assert known[-2:] == [True, True]
    wrong = [memory[:6], memory[:6].reshape(3, 2), memory[:7]]
    for other in wrong:
        for call in (kv.push, kv.pull, kv.pushpull):
            with pytest.raises(errors.ShapeMismatchError):
                call("k", other)
    for other in (right.view("i4"), right.view("u4"), memory[:3].view("f2").reshape(2, 3)):
        for call in (kv.push, kv.pull):
            with pytest.raises(errors.DTypeMismatchError):
                call("k", other)
    frozen = right[:]
    frozen.flags.writeable = False
    kv.push("k", frozen)
    for _ in range(2):
        with pytest.raises(errors.UnsupportedError, match="read-only"):
            kv.pull("k", frozen)
        with pytest.raises(errors.UnsupportedError, match="read-only"):
            kv.pushpull("k", frozen)
    with pytest.raises(errors.KeyNotInitializedError):
        kv.push("l", right)
    with pytest.raises(errors.ConfigError, match="priority"):
        kv.push("k", right, priority=float("nan"))
    for call in (kv.push, kv.pull, kv.pushpull):
        with pytest.raises(errors.DTypeMismatchError, match="got None"):
            call("k", None)
    known.clear()
    turned = np.zeros((3, 2), "f4").T  # whose rows do not lie one behind the other
    for step in range(2):
        kv.push("k", right)
        kv.push("k", filled(turned, array(step)))
        kv.pull("k", right)
        np.testing.assert_array_equal(right, array(step))
    assert known == [True, False, True, True, False, True]


def test_arrays_that_overlap_are_read_before_they_are_written(store, known):
    kv, memory = store, np.zeros(30, "f4")
    kv.init(0, np.zeros(20, "f4"))
    for step in range(4):
        pushed = array(step, (20,))
        memory[:20] = pushed
        kv.pushpull(0, memory[:20], memory[10:])
        np.testing.assert_array_equal(memory[10:], pushed)
    assert not any(known)
    same = memory[:20]
    for step in range(4):
        same[:] = array(step, (20,))
        kv.pushpull(0, same, memory[:20])  # exactly there
        np.testing.assert_array_equal(same, array(step, (20,)))
    assert known[4:] == [True, True, True, True]


def test_a_new_rule_is_asked_anew(store, known):
    kv, value = store, np.ones((2, 2), "i8")
    kv.init(0, value)
    for _ in range(2):
        kv.push(0, value)
    kv.set_optimizer(optim.Adam(lr=0.1))
    for _ in range(2):
        with pytest.raises(errors.DTypeMismatchError, match="cannot compute in int64"):
            kv.push(0, value)
    assert known == [False, True, False, False]
    kv.set_optimizer(optim.Test(lr=1))
    for _ in range(2):
        kv.push(0, value)
    assert known[4:] == [False, True]


def test_torch_knows_that_results_were_written(store, known):
    kv, out = store, torch.zeros(3)
    kv.init(0, torch.zeros(3))
    for times in range(1, 5):
        before = out._version
        kv.pull(0, out)
        assert out._version > before
        kv.pushpull(0, torch.ones(3), out)
        assert out._version > before + 1
        if times > 1:
            assert known[-2] is True


def test_leaves_with_gradients_and_views_that_negate(store, known):
    kv, leaf, out = store, torch.nn.Parameter(torch.arange(4.0)), torch.zeros(4)
    negated = torch.complex(torch.zeros(4), torch.arange(4.0)).conj().imag
    assert negated.is_neg()
    kv.init(0, torch.zeros(4))
    for _ in range(3):
        kv.pushpull(0, leaf, out)
        np.testing.assert_array_equal(out, np.arange(4.0))
        kv.pushpull(0, negated, out)
        np.testing.assert_array_equal(out, -np.arange(4.0))
    assert known == [False, False, True, False, True, False]


def test_an_earlier_failure_surfaces(known):
    with kvmpi.create("local", timeout_s=20) as kv:
        value, fails = np.ones(3, "f4"), [False]
        kv.init(0, value)

        def update(key, pushed, stored):
            if fails[0]:
                raise RuntimeError("no more")
            stored += pushed

        kv.set_updater(update)
        for _ in range(2):
            kv.push(0, value)
        fails[0] = True
        failed = kv.push(0, value, async_op=True)
        assert failed.wait_done(20.0)
        fails[0] = False
        with pytest.raises(RuntimeError, match="no more"):
            kv.push(0, value, async_op=True)  # at the call, and not at its wait
        kv.push(0, value)
        out = np.empty_like(value)
        kv.pull(0, out)
        np.testing.assert_array_equal(out, [4, 4, 4])
        assert known[:5] == [False, True, True, True, True]
    with pytest.raises(errors.KVError, match="closed"):
        kv.push(0, value)


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_arrays_that_lie_elsewhere_at_every_step_are_known(store, known, library):
    kv, make = store, np.array if library == "numpy" else torch.tensor
    kv.init(0, make(np.zeros(4, "f4")))
    arrays.plain(make(np.zeros(4, "f4")), (4,), "float32")  # else the first tensor of a process is looked at once more
    kept = []
    for step in range(20):
        value, out = make(np.full(4, step, "f4")), make(np.full(4, np.nan, "f4"))
        kv.pushpull(0, value, out)
        np.testing.assert_array_equal(out, np.full(4, step))
        kept += [value, out]
    assert known == [False] + 19 * [True]


def test_torch_tensors_that_are_not_what_they_seem_are_looked_at(store, known):
    kv, value = store, torch.arange(4.0)
    kv.init(0, value)
    kv.pushpull(0, value.clone())
    memory = torch.zeros(40, dtype=torch.uint8)
    odd = torch.frombuffer(memory.numpy()[1:17], dtype=torch.float32)  # whose elements compiled code cannot read there
    for out in (odd, torch.zeros(8)[::2], torch.zeros(4, 1)[:, 0]):
        kv.pushpull(0, value, out)
        np.testing.assert_array_equal(out, np.arange(4.0))
    assert known == [False, False, False, True]
    freed = torch.zeros(4)
    freed.untyped_storage().resize_(0)
    with pytest.raises(errors.UnsupportedError, match="memory has been freed"):
        kv.pushpull(0, value, freed)
    with pytest.raises(errors.DTypeMismatchError):
        kv.pushpull(0, value.double())
    with pytest.raises(errors.ShapeMismatchError):
        kv.pushpull(0, value, torch.zeros(5))
    assert known[4:] == [False, False, False]
