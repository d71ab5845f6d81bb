"""Lists of many keys that are pushed, and then pulled, as MXNet's programs do: small ones go to servers together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import kvmpi
from kvmpi import optim
from kvmpi.errors import KVError
from kvmpi.ps import PsClient

DTYPES = ("float32", "float16", "int64")
#: Key, elements, dtype; larger ones lie between the small.
KEYS = [(key, (key * 37) % 300 + (40_000 if key % 11 == 5 else 0), DTYPES[key // 3 % 3]) for key in range(40)]
KEYS[7] = (7, 0, "float32")


def numbers(key: int, count: int, dtype: str, *seeds: int) -> np.ndarray:
    return np.random.default_rng([key, *seeds]).integers(-9, 9, count).astype(dtype)


def values_of(step: int) -> list[np.ndarray]:
    return [numbers(key, count, dtype, step) for key, count, dtype in KEYS]


@pytest.fixture(params=["dist_sync", "dist_sync_mpi", "dist_async", "dist_ssp", "dist_softsync"])
def kv(request: pytest.FixtureRequest) -> Iterator[Any]:
    with kvmpi.create(request.param, timeout_s=20) as store:
        store.init([key for key, _, _ in KEYS], values_of(0))
        store.set_optimizer(optim.Test(lr=-1))
        yield store


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is asked of servers."""
    found: list[str] = []
    start = PsClient._start

    def spy(self: Any, label: str, asks: Any, deadline: Any, priority: int = 0, phase: str = "", *rest: Any,
            **how: Any) -> Any:  # fmt: skip
        found.append(phase)
        return start(self, label, asks, deadline, priority, phase, *rest, **how)

    monkeypatch.setattr(PsClient, "_start", spy)
    return found


def test_values_are_those_of_every_push_before(kv: Any, starts: list[str]) -> None:
    keys = [key for key, _, _ in KEYS]
    expected = [value.astype("f8") for value in values_of(0)]
    outs = [np.empty(count, dtype) for _, count, dtype in KEYS]
    for step in range(1, 6):
        pushed = values_of(step)
        kv.push(keys, pushed)
        for value in pushed:
            value[...] = 99  # it is the caller's again
        if step == 3:  # nobody pulls it
            expected = [total + value for total, value in zip(expected, values_of(step), strict=True)]
            continue
        kv.pull(keys, outs)
        if step == 4:  # once more, when the value has been given out
            kv.pull(keys, outs)
        for i, value in enumerate(values_of(step)):
            expected[i] += value
            np.testing.assert_array_equal(outs[i], expected[i], err_msg=f"key {keys[i]}, step {step}")
    pushes = 5 * len(keys)
    assert kv.stats()["phases"]["push"]["calls"] == pushes
    assert starts.count("push") < pushes / 4, "small ones go together"
    pulls = kv.stats()["phases"]["pull"]["calls"]
    assert pulls >= len(keys)
    assert starts.count("pull") < pulls / 4


def test_several_arrays_of_a_key_and_calls_of_some_keys(kv: Any) -> None:
    """What one call has fetched ahead for many, others take in parts; a pull fills arrays that are not plain, too."""
    small = [(key, count, dtype) for key, count, dtype in KEYS if 0 < count < 300]
    keys = [key for key, _, _ in small]
    expected = {key: numbers(key, count, dtype, 0).astype("f8") for key, count, dtype in small}
    for step in range(1, 4):
        kv.push(keys, [[numbers(*of, step), numbers(*of, step, 1)] for of in small])
        for of in small:
            expected[of[0]] += numbers(*of, step).astype("f8") + numbers(*of, step, 1)
        for some in (small[::2], small[1::2], small[::5]):
            outs = [[np.empty(count, dtype), np.empty(2 * count, dtype)[::2]] for _, count, dtype in some]
            kv.pull([key for key, _, _ in some], outs)
            for (key, _, _), found in zip(some, outs, strict=True):
                for out in found:
                    np.testing.assert_array_equal(out, expected[key], err_msg=f"key {key}, step {step}")


def test_values_that_come_ahead_and_values_that_are_asked_for(kv: Any) -> None:
    """Of neighbours: what was pulled after the last push is fetched with the next."""
    small = [(key, count, dtype) for key, count, dtype in KEYS if 0 < count < 300]
    keys = [key for key, _, _ in small]
    some = [of for of in small if of[0] % 3]
    outs = {key: np.empty(count, dtype) for key, count, dtype in small}
    for step in range(1, 6):
        kv.push(keys, [numbers(*of, step) for of in small])
        for wanted in [some] if step % 2 else [small, some]:
            for out in outs.values():
                out[...] = 99
            kv.pull([of[0] for of in wanted], [outs[of[0]] for of in wanted])
            for of in wanted:
                expected = np.sum([numbers(*of, pushed).astype("f8") for pushed in range(step + 1)], axis=0)
                np.testing.assert_array_equal(outs[of[0]], expected, err_msg=f"key {of[0]}, step {step}")


def test_what_a_rule_refuses_of_one_key_is_told_once_and_no_other_is_lost(
    kv: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = [(key, count, dtype) for key, count, dtype in KEYS if 0 < count < 300]
    keys, bad = [key for key, _, _ in small], small[3]
    outs = [np.empty(count, dtype) for _, count, dtype in small]
    kv.push(keys, [numbers(*of, 1) for of in small])
    kv.pull(keys, outs)  # so that the next pushes fetch the values
    compute, broken = optim.Test.compute, [bad[1]]

    def fail(self: Any, block: Any) -> None:
        if block.stored.size in broken:
            raise ZeroDivisionError("of a rule")
        compute(self, block)

    monkeypatch.setattr(optim.Test, "compute", fail)
    kv.push(keys, [numbers(*of, 2) for of in small])
    with pytest.raises(KVError, match=rf"key {bad[0]}.*ZeroDivisionError: of a rule"):
        kv.pull(keys, outs)
    broken.clear()
    for last in (2, 3):
        if last == 3:
            kv.push(keys, [numbers(*of, 3) for of in small])
        wanted = small if last == 3 else [of for of in small if of != bad]  # whose round has no value
        found = [np.full(count, 99, dtype) for _, count, dtype in wanted]
        kv.pull([of[0] for of in wanted], found)
        for of, out in zip(wanted, found, strict=True):
            steps = {*range(last + 1)} - ({2} if of == bad else set())
            expected = np.sum([numbers(*of, step).astype("f8") for step in steps], axis=0)
            np.testing.assert_array_equal(out, expected, err_msg=f"key {of[0]}, step {last}")


@pytest.mark.parametrize("pulled", ["a", "b"])
def test_of_small_keys_that_are_pushed_together_some_were_pulled_before(pulled: str) -> None:
    """Their pushes bring values, those of the others do not; arrays are the caller's again after each."""
    keys = ["a", "b"]
    with kvmpi.create("dist_sync", timeout_s=20) as kv:
        kv.init(keys, [np.zeros(5, "f4") for _ in keys])
        values, outs = [np.empty(5, "f4") for _ in keys], [np.empty(5, "f4") for _ in keys]
        for step in range(1, 5):
            for i, value in enumerate(values):
                value.fill(10 * i + step)
            kv.push(keys, values)
            for value in values:
                value.fill(-1)
            kv.pull(pulled, outs[keys.index(pulled)])
            np.testing.assert_array_equal(outs[keys.index(pulled)], 10 * keys.index(pulled) + step)
            kv.wait_all()  # else what is pushed next waits for the push before
        kv.pull(keys, outs)
        np.testing.assert_array_equal(outs, np.full((2, 5), [[4], [14]]))
        assert kv.stats()["phases"]["push"]["calls"] == 4 * 2
