"""Elastic, Outer and Test against plain float64 formulas; blocks, aliasing, half types and memory for every rule."""

from __future__ import annotations

import tracemalloc
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmpi import optim
from kvmpi.errors import ConfigError, DTypeMismatchError, ShapeMismatchError
from kvmpi.kernels import host
from kvmpi.kernels.rows import Rows
from kvmpi.optim import rule as rule_module

TINY_BLOCK_BYTES = 256  # 64 float32 elements
SIZES = [0, 1, 63, 64, 65, 1001]
RULES = [
    optim.SGD(lr=0.1),
    optim.SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01, rescale_grad=0.5),
    optim.SGD(lr=0.1, momentum=0.9),
    optim.Adam(lr=0.01, weight_decay=0.1, rescale_grad=0.5),
    optim.AdamW(lr=0.01),
    optim.Adagrad(lr=0.1, lr_decay=0.1, weight_decay=0.1, initial_accumulator_value=0.1),
    optim.Elastic(alpha=0.25),
    optim.Outer(),
    optim.Outer(momentum=0.5, nesterov=False),
    optim.Test(lr=0.3, rescale_grad=2.0),
]
rules = pytest.mark.parametrize("rule", RULES, ids=repr)


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(rule_module, "BLOCK_BYTES", TINY_BLOCK_BYTES)
    monkeypatch.setattr(host, "BLOCK_BYTES", TINY_BLOCK_BYTES // 2)


def vector(count: int, seed: int, dtype: str = "float32") -> np.ndarray:
    return np.random.default_rng([7, seed, count]).standard_normal(count).astype(dtype)


def half(values: np.ndarray, dtype: str) -> np.ndarray:
    out = host.empty(values.size, dtype)
    host.narrow(values.astype("f4"), out, dtype)
    return out


# Elastic averaging.


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("num_clients", [1, 2, 5])
def test_elastic_moves_towards_every_client_from_one_center(small_blocks, num_clients, dtype):
    center = vector(1001, 0, dtype)
    weights = [vector(1001, 1 + client, dtype) for client in range(num_clients)]
    old = center.astype("f8")
    expected = old + sum(0.15 * (w.astype("f8") - old) for w in weights)
    optim.Elastic(0.15).apply(center, np.sum(weights, axis=0, dtype=dtype), {}, 1, num_clients)
    bound = 4 * (num_clients + 1) * np.finfo(dtype).eps * (np.abs(old) + np.sum(np.abs(weights), axis=0))
    assert (np.abs(center - expected) <= bound).all()


def test_elastic_conserves_worker_plus_center():
    center, worker = vector(1001, 0), vector(1001, 1)
    rule, alpha = optim.Elastic(0.3), np.float32(0.3)
    before = center.astype("f8") + worker
    size = np.abs(center) + np.abs(worker)
    for step in range(1, 101):
        new = np.empty_like(center)
        rule.apply_into(new, center, worker, {}, step)
        worker -= alpha * (worker - center)  # the center that the push met
        center = new
    # Both sides move by the same float32 number, so only the two additions of a step round.
    assert (np.abs(center.astype("f8") + worker - before) <= 100 * 2 * 2.0**-24 * size).all()
    assert rule.replies_old
    assert not any(other.replies_old for other in RULES if other.name != "elastic")


# DiLoCo's outer step.


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("num_clients", [1, 3])
def test_outer_against_its_formula(small_blocks, num_clients, nesterov):
    rule = optim.Outer(lr=0.7, momentum=0.9, nesterov=nesterov)
    center, state = vector(1001, 0), {}
    expected, buffer = center.astype("f8"), np.zeros(1001)
    for step in range(1, 11):
        pushes = [vector(1001, 100 * step + client) for client in range(num_clients)]
        rule.apply(center, np.sum(pushes, axis=0, dtype="f4"), state, step, num_clients)
        mean = np.mean(pushes, axis=0, dtype="f8")
        buffer = 0.9 * buffer + mean
        expected = expected - 0.7 * (mean + 0.9 * buffer if nesterov else buffer)
        np.testing.assert_allclose(center, expected, rtol=0, atol=200 * np.finfo("f4").eps)


@pytest.mark.parametrize("nesterov", [False, True])
def test_outer_without_momentum_gives_the_mean_of_the_weights(nesterov):
    center = vector(1001, 0)
    weights = [vector(1001, 1 + client) for client in range(4)]
    pushed = np.sum([center - w for w in weights], axis=0, dtype="f4")
    state = {}
    optim.Outer(lr=1, momentum=0, nesterov=nesterov).apply(center, pushed, state, 1, 4)
    np.testing.assert_allclose(center, np.mean(weights, axis=0, dtype="f8"), rtol=0, atol=16 * np.finfo("f4").eps)
    assert state == {}


def test_who_averages():
    assert {rule.name for rule in RULES if rule.averages} == {"elastic", "outer"}


# Test: exact arithmetic.


@pytest.mark.parametrize("dtype", list(host.STORAGE))
def test_test_rule_adds_exactly(dtype):
    start, push = np.arange(50) % 7, np.arange(50) % 5
    if dtype in host.HALF:
        stored, pushed = half(start, dtype), push.astype("f4")
        expected = half(start + 3 * push, dtype)
    else:
        stored, pushed, expected = (x.astype(dtype) for x in (start, push, start + 3 * push))
    for step in (1, 2, 3):
        optim.update(optim.Test(), stored, dtype, pushed, {}, step)
    np.testing.assert_array_equal(stored, expected)


def test_test_rule_on_integers_wraps_and_refuses_fractions():
    stored = np.array([250, 0], "u1")
    optim.Test().apply(stored, np.array([10, 255], "u1"), {}, 1)
    np.testing.assert_array_equal(stored, [4, 255])
    optim.Test(lr=-300).apply(stored, np.array([1, 1], "u1"), {}, 2)
    np.testing.assert_array_equal(stored, [(4 + 300) % 256, (255 + 300) % 256])
    with pytest.raises(ConfigError, match="whole number"):
        optim.Test(lr=0.5).apply(stored, stored.copy(), {}, 3)


@pytest.mark.parametrize("rule", [r for r in RULES if r.name != "test"], ids=repr)
def test_other_rules_refuse_integers(rule):
    with pytest.raises(DTypeMismatchError, match="int32"):
        rule.apply(np.ones(3, "i4"), np.ones(3, "i4"), {}, 1)


# Every rule: blocks, aliasing, state.


@rules
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("count", SIZES)
def test_blocks_and_aliasing_do_not_change_bits(monkeypatch, rule, count, dtype):
    def run(way: str) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        stored, state = vector(count, 0, dtype), {}
        for step in (1, 2, 3):
            pushed = vector(count, step, dtype)
            old, push = stored.copy(), pushed.copy()
            if way == "in place":
                rule.apply(stored, pushed, state, step, 2)
                np.testing.assert_array_equal(pushed, push)
                continue
            out = pushed if way == "into pushed" else np.empty_like(stored)
            rule.apply_into(out, stored, pushed, state, step, 2)
            np.testing.assert_array_equal(stored, old)
            if way == "into new":
                np.testing.assert_array_equal(pushed, push)
            stored = out
        return stored, state

    whole, whole_state = run("in place")
    monkeypatch.setattr(rule_module, "BLOCK_BYTES", TINY_BLOCK_BYTES)
    for way in ("in place", "into new", "into pushed"):
        value, state = run(way)
        np.testing.assert_array_equal(value, whole, err_msg=way)
        assert state.keys() == whole_state.keys() == rule.slots().keys()
        for name in state:
            np.testing.assert_array_equal(state[name], whole_state[name])
            assert state[name].dtype == dtype


@rules
def test_state_made_beforehand_is_the_state_made_on_the_way(rule):
    results = []
    for state in ({}, rule.init_state(100, "float64")):
        stored = vector(100, 0, "float64")
        rule.apply(stored, vector(100, 1, "float64"), state, 1)
        results.append(stored)
    np.testing.assert_array_equal(*results)


@rules
@settings(max_examples=15, deadline=None)
@given(cut=st.integers(0, 200))
def test_parts_of_a_vector_can_be_updated_alone(rule, cut):
    """A server holds a key in chunks: the same bits as in one piece."""
    whole, state = vector(200, 0), rule.init_state(200)
    parts, part_state = whole.copy(), rule.init_state(200)
    for step in (1, 2):
        pushed = vector(200, step)
        rule.apply(whole, pushed, state, step, 3)
        for part in (slice(0, cut), slice(cut, 200)):
            rule.apply(parts[part], pushed[part], {k: v[part] for k, v in part_state.items()}, step, 3)
    np.testing.assert_array_equal(parts, whole)


def test_wrong_lengths_and_dtypes():
    rule = optim.SGD(lr=0.1, momentum=0.9)
    three = np.ones(3, "f4")
    for stored, pushed, state, error in (
        (three, np.ones(1, "f4"), {}, ShapeMismatchError),
        (three, np.ones(3, "f8"), {}, DTypeMismatchError),
        (three.astype("f2"), three.astype("f2"), {}, DTypeMismatchError),
        (three, three, {"momentum": np.zeros(2, "f4")}, ShapeMismatchError),
        (three, three, {"momentum": np.zeros(3, "f8")}, DTypeMismatchError),
    ):
        with pytest.raises(error):
            rule.apply(stored, pushed, state, 1)
    np.testing.assert_array_equal(three, 1)
    bits = np.zeros(3, "u2")
    for kwargs, error in (
        ({"pushed": np.ones(2, "f4")}, ShapeMismatchError),
        ({"pushed": np.ones(3, "f8")}, DTypeMismatchError),
        ({"pushed": three, "master": np.ones(2, "f4")}, ShapeMismatchError),
        ({"pushed": three, "out": np.zeros(2, "u2")}, ShapeMismatchError),
    ):
        with pytest.raises(error):
            optim.update(rule, bits, "bfloat16", state={}, step=1, **kwargs)
    with pytest.raises(DTypeMismatchError, match="kept"):
        optim.update(rule, bits, "float32", three, {}, 1)


# Half types.


@rules
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("count", [0, 1, 65, 1001])
def test_half_types_round_once_per_update(small_blocks, rule, dtype, count):
    stored, state = half(vector(count, 0), dtype), {}
    wide, wide_state = optim.make_master(stored, dtype), {}
    for step in (1, 2, 3):
        pushed = vector(count, step)
        out = host.empty(count, dtype)
        optim.update(rule, stored, dtype, pushed, {k: v.copy() for k, v in state.items()}, step, 2, out=out)
        optim.update(rule, stored, dtype, pushed, state, step, 2)
        rule.apply(wide, pushed, wide_state, step, 2)
        expected = half(wide, dtype)
        np.testing.assert_array_equal(stored, expected)
        np.testing.assert_array_equal(out, expected)
        host.widen(expected, dtype, wide)
        assert all(array.dtype == np.float32 for array in state.values())


@rules
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_master_copy_takes_the_update(small_blocks, rule, dtype):
    stored, state = half(vector(1001, 0), dtype), {}
    master = optim.make_master(stored, dtype)
    wide, wide_state = master.copy(), {}
    for step in (1, 2, 3):
        pushed = vector(1001, step)
        old, out = stored.copy(), host.empty(1001, dtype)
        optim.update(rule, stored, dtype, pushed, state, step, 2, master=master, out=out)
        np.testing.assert_array_equal(stored, old)
        rule.apply(wide, pushed, wide_state, step, 2)
        np.testing.assert_array_equal(master, wide)
        np.testing.assert_array_equal(out, half(wide, dtype))
        stored = out


def test_master_copy_keeps_small_steps():
    """1000 steps of 1e-4 from 1.0: bfloat16 alone never moves, with a master copy it arrives."""
    rule, pushed = optim.SGD(lr=1e-4, multi_precision=True), np.ones(3, "f4")
    alone, kept = half(np.ones(3), "bfloat16"), half(np.ones(3), "bfloat16")
    master = optim.make_master(kept, "bfloat16")
    for step in range(1, 1001):
        optim.update(rule, alone, "bfloat16", pushed, {}, step)
        optim.update(rule, kept, "bfloat16", pushed, {}, step, master=master)
    np.testing.assert_array_equal(alone, half(np.ones(3), "bfloat16"))
    np.testing.assert_array_equal(kept, half(np.full(3, 0.9), "bfloat16"))


# Memory.


@rules
def test_no_temporaries_of_the_size_of_the_vector(rule):
    count = (64 << 20) // 4
    stored, pushed = np.ones(count, "f4"), np.ones(count, "f4")
    state = rule.init_state(count)
    bits = np.zeros(count // 8, "u2")
    part_state = {name: array[: bits.size] for name, array in state.items()}
    tracemalloc.start()
    try:
        rule.apply(stored, pushed, state, 1, 2)
        rule.apply_into(pushed, stored, pushed, state, 2, 2)
        optim.update(rule, bits, "bfloat16", pushed[: bits.size], part_state, 3)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes <= 3 * rule_module.BLOCK_BYTES + (64 << 10)


# Rules of one's own.


@dataclass(frozen=True)
class Sign(optim.Rule):
    lr: float = 0.25

    def compute(self, b):
        b.out[...] = b.stored - self.lr * np.sign(b.pushed)


class Normalized(optim.Rule):
    """Needs the norm of the whole vector, so it overrides apply; and it is no dataclass."""

    def __init__(self, lr, floor=1.0):
        self.lr, self.floor = lr, floor

    def apply(self, stored, pushed, state, step, count=1):
        stored -= self.lr * pushed / max(float(np.linalg.norm(pushed)), self.floor)


class Stumbles(optim.Rule):
    """Raises when much of the vector has been updated."""

    def __init__(self, whole=False):
        self.whole, self.left = whole, 5

    def slots(self):
        return {"seen": 7.0}

    def compute(self, b):
        b.out[...] = b.stored - b.pushed
        b.state["seen"] += 1
        self.left -= 1
        if not self.left:
            raise ValueError("of the program")


class StumblesOverAll(Stumbles):
    def apply(self, stored, pushed, state, step, count=1):
        self.ensure_state(state, stored.size, stored.dtype)
        stored[:500] -= pushed[:500]
        state["seen"] += 1
        raise ValueError("of the program")


@pytest.mark.parametrize("kind", [Stumbles, StumblesOverAll])
@pytest.mark.parametrize("way", ["float32", "bfloat16", "bfloat16 master", "float32 rows", "bfloat16 master rows"])
@pytest.mark.parametrize("known", [False, True])
def test_a_rule_that_raises_leaves_no_trace(small_blocks, kind, way, known):
    dtype, *more = way.split()
    count, pushed = 1001, vector(1001, 1)
    if "rows" in more and kind is StumblesOverAll:
        return  # which is refused
    stored = half(vector(count, 0), dtype) if dtype == "bfloat16" else vector(count, 0)
    master = optim.make_master(stored, dtype) if "master" in more else None
    state = {"seen": vector(count, 2)} if known else {}
    before = [stored.copy(), None if master is None else master.copy(), {n: a.copy() for n, a in state.items()}]
    rule, update, given = kind(), optim.update, pushed
    if "rows" in more:
        update, given = optim.update_rows, Rows(np.arange(count), pushed.reshape(-1, 1))
    with pytest.raises(ValueError, match="of the program"):
        update(rule, stored, dtype, given, state, 1, master=master)
    np.testing.assert_array_equal(stored, before[0])
    if master is not None:
        np.testing.assert_array_equal(master, before[1])
    if "rows" in more and not known:
        assert (state.pop("seen") == 7).all()
    assert state.keys() == before[2].keys()
    for name, array in state.items():
        np.testing.assert_array_equal(array, before[2][name])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rule", [Sign(), Normalized(lr=0.5)], ids=["compute", "apply"])
def test_a_rule_of_ones_own(small_blocks, rule, dtype):
    start, pushed = vector(1001, 0), vector(1001, 1)
    if dtype == "bfloat16":
        host.widen(half(start, dtype), dtype, start)
    if isinstance(rule, Sign):
        value = start - np.float32(0.25) * np.sign(pushed)
    else:
        value = start - np.float32(0.5) * pushed / np.float32(np.linalg.norm(pushed))
    expected = half(value, dtype) if dtype == "bfloat16" else value
    stored = half(start, dtype) if dtype == "bfloat16" else start.copy()
    out = np.empty_like(stored)
    optim.update(rule, stored, dtype, pushed, {}, 1, out=out)
    np.testing.assert_array_equal(out, expected)
    if dtype == "bfloat16":
        master = optim.make_master(stored, dtype)
        optim.update(rule, stored.copy(), dtype, pushed, {}, 1, master=master, out=out)
        np.testing.assert_array_equal(master, value)
    optim.update(rule, stored, dtype, pushed, {}, 1)
    np.testing.assert_array_equal(stored, expected)
    push = pushed.copy()
    if dtype == "float32":
        rule.apply_into(push, start, push, {}, 1)
        np.testing.assert_array_equal(push, expected)


def test_a_rule_without_an_update():
    with pytest.raises(NotImplementedError, match="compute"):
        optim.Rule().apply(np.ones(1, "f4"), np.ones(1, "f4"), {}, 1)
