"""What stores of every type, in one process, keep and forget: states of optimizers, masters, clocks and libraries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from store_helpers import ALL, array, pulled

import kvmpi
from kvmpi import errors, optim

COUNT = 1000


def steps_of(kv: Any, key: Any, numbers: range, dtype: str = "f4") -> None:
    for number in numbers:
        kv.push(key, array(number, COUNT).astype(dtype))


def of_sgd(value: np.ndarray, numbers: range, lr: float, momentum: float) -> np.ndarray:
    """SGD in float64, from no momentum on."""
    value, velocity = value.astype("f8"), 0.0
    for number in numbers:
        gradient = array(number, COUNT).astype("f8")
        velocity = gradient + momentum * velocity
        value = value - lr * velocity
    return value


@pytest.mark.parametrize("how", ["nothing", "save and load", "states", "assign", "another rule"])
@pytest.mark.parametrize("name", ALL)
def test_a_new_optimizer_remembers_nothing_of_the_last(name: str, how: str, tmp_path: Path) -> None:
    """Also if its first push comes after what reads, and writes again, all that the store knows."""
    file, first = tmp_path / "file", array(99, COUNT)
    with kvmpi.create(name, timeout_s=20) as kv:
        kv.init("w", first)
        kv.set_optimizer(optim.Adam(lr=0.1) if how == "another rule" else optim.SGD(lr=0.5, momentum=0.5))
        steps_of(kv, "w", range(3))
        before = pulled(kv, "w", first)
        kv.set_optimizer(optim.SGD(lr=0.25, momentum=0.5))
        if how in ("save and load", "another rule"):
            kv.save(file)
            kv.load(file)
        elif how == "states":
            kv.save_optimizer_states(file)
            kv.load_optimizer_states(file)
        elif how == "assign":
            kv.assign("w", before)
        np.testing.assert_array_equal(pulled(kv, "w", first), before)
        steps_of(kv, "w", range(3, 6))
        expected = of_sgd(before, range(3, 6), 0.25, 0.5)
        np.testing.assert_allclose(pulled(kv, "w", first), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ALL)
def test_states_do_not_touch_values_and_a_master_that_fits_goes_on(name: str, tmp_path: Path) -> None:
    rule, file, first = optim.SGD(lr=0.01, momentum=0.5, multi_precision=True), tmp_path / "states", array(5, COUNT)
    first = first.astype("f2")
    with kvmpi.create(name, timeout_s=20) as kv:
        kv.init("w", first)
        kv.set_optimizer(rule)
        steps_of(kv, "w", range(4), "f2")
        kv.save_optimizer_states(file)
        halfway = pulled(kv, "w", first)
        steps_of(kv, "w", range(4, 8), "f2")
        end = pulled(kv, "w", first)
    with kvmpi.create(name, timeout_s=20) as kv:  # the same values: it goes on with the same bits
        kv.init("w", halfway)
        kv.set_optimizer(rule)
        kv.load_optimizer_states(file)
        np.testing.assert_array_equal(pulled(kv, "w", first), halfway)
        steps_of(kv, "w", range(4, 8), "f2")
        assert pulled(kv, "w", first).tobytes() == end.tobytes()
    changed = halfway.copy()
    changed[::2] += 3  # of every second one the master is another's
    with kvmpi.create(name, timeout_s=20) as kv:
        kv.init("w", changed)
        kv.set_optimizer(rule)
        kv.load_optimizer_states(file)
        np.testing.assert_array_equal(pulled(kv, "w", first), changed)
        steps_of(kv, "w", range(4, 8), "f2")
        found = pulled(kv, "w", first)
        assert found[1::2].tobytes() == end[1::2].tobytes()
        np.testing.assert_allclose(found[::2].astype("f8"), end[::2].astype("f8") + 3, rtol=0, atol=0.01)


@pytest.mark.parametrize("name", ALL)
def test_clock_and_library_come_back_from_a_file(name: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    with kvmpi.create(name, timeout_s=20) as kv:
        kv.init(["numpy", "torch"], [np.ones(3, "f4"), torch.ones(2, 3)])
        for _ in range(5):
            kv.clock()
        kv.save(file)
    with kvmpi.create(name, timeout_s=20) as kv:
        kv.load(file)
        assert (kv._keys["numpy"].library, kv._keys["torch"].library) == ("numpy", "torch")
        if kv.is_capable("updater"):
            seen = []
            kv.set_updater(lambda key, pushed, stored: seen.append(type(stored)))
            kv.push(["numpy", "torch"], [np.ones(3, "f4"), torch.ones(2, 3)])
            assert seen == [np.ndarray, torch.Tensor]
        else:
            assert kv._ps.clock == 5
        assert kv.clock() == 6


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("rule", [optim.SGD(lr=0.5), optim.Elastic(alpha=0.5), optim.Outer()], ids=repr)
def test_integers_are_refused_where_a_rule_cannot_compute_in_them(name: str, rule: optim.Rule) -> None:
    with kvmpi.create(name, timeout_s=20) as kv:
        kv.init(["i", "f"], [np.arange(3), np.ones(3, "f4")])
        kv.set_optimizer(rule)
        for call in (kv.push, kv.pushpull):
            with pytest.raises(errors.DTypeMismatchError, match=r"of key 'i' on worker 0: .*cannot compute in int64"):
                call(["f", "i"], [np.ones(3, "f4"), np.arange(3)])
        np.testing.assert_array_equal(pulled(kv, "f", np.ones(3, "f4")), 1)
        kv.set_optimizer(optim.Test(lr=-0.5))
        with pytest.raises(errors.ConfigError, match=r"update 1 of key 'i'.*expected a whole number"):
            kv.pushpull("i", np.arange(3))


def test_arguments_that_make_no_sense(any_store: Any) -> None:
    kv = any_store
    kv.init("k", array(1))
    for priority in (None, "high", float("nan")):
        for call in (kv.push, kv.pull, kv.pushpull):
            with pytest.raises(errors.ConfigError, match="priority="):
                call("k", array(2), priority=priority)
    for path in (None, 3, [b"x"], "a\0b"):
        for call in (kv.save, kv.load, kv.save_optimizer_states, kv.load_optimizer_states):
            with pytest.raises(errors.ConfigError, match="expected the name of a file"):
                call(path)
    for shape in (-1, (2, -1), "x", None, (2.0,)):
        with pytest.raises(errors.ConfigError, match="empty: shape"):
            kv.empty(shape)
    assert kv.empty(np.int64(3)).shape == (3,)
    assert kv.empty([2, np.int32(3)]).shape == (2, 3)
    if kv.is_capable("updater"):
        with pytest.raises(errors.ConfigError, match="expected a function"):
            kv.set_updater(3)
    if kv.num_servers:
        for seconds in (-1, "5", None, float("nan")):
            with pytest.raises(errors.ConfigError, match=r"num_dead: timeout_s=.*, expected seconds, from 0 on"):
                kv.num_dead(seconds)
        assert kv.num_dead(np.int64(60)) == 0
    kv.pull("k", out := array(0), priority=np.int64(2))
    np.testing.assert_array_equal(out, array(1))


def test_a_backward_that_needs_what_was_overwritten_fails(any_store: Any) -> None:
    kv, ones = any_store, torch.ones(4, 3)
    kv.init("k", ones)
    calls = {
        "pull": lambda w: kv.pull("k", w),
        "pushpull": lambda w: kv.pushpull("k", ones, w),
        "in place": lambda w: kv.pushpull("k", w.detach()),
        "rows": lambda w: kv.row_sparse_pull("k", w, torch.arange(4)),
        "later": lambda w: kv.pull("k", w, async_op=True).wait(),
    }
    for name, call in calls.items():
        w = torch.ones(4, 3, requires_grad=True)
        loss = (w * w).sum()
        call(w)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        (w * w).sum().backward()
        assert torch.equal(w.grad, 2 * w), name
    kv.push("k", w := torch.ones(4, 3, requires_grad=True) * 2)  # what is only read stays as it is
    (w * w).sum().backward()
    with torch.inference_mode():
        kv.pull("k", torch.ones(4, 3))


def test_plug_in_types(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvmpi.store import factory

    monkeypatch.setattr(factory, "_FACTORIES", dict(factory._FACTORIES))
    local = factory._FACTORIES["local"]
    made = []
    for name in ("mine", "device"):  # the second is an alias of another type, as long as nobody takes it
        kvmpi.register_store(name, lambda config, name=name: made.append(name) or local(config))
        with kvmpi.create(name) as kv:
            kv.init(0, array(0))
    assert made == ["mine", "device"]
    for name, function in ((None, local), ("", local), ("other", 3)):
        with pytest.raises(errors.ConfigError, match="register_store"):
            kvmpi.register_store(name, function)
    kvmpi.register_store("nothing", lambda config: None)
    with pytest.raises(errors.ConfigError, match="returned None"):
        kvmpi.create("nothing")
