"""Lists of keys that are exchanged with servers again and again, in place, into other arrays, and otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kvmpi
from kvmpi import arrays, optim
from kvmpi.errors import ConfigError, KVError, ShapeMismatchError
from kvmpi.store import core
from kvmpi.store.dist import DistStore

#: Of these only the small ones travel together; keys that are ints are taken in their own order.
SHAPES = {7: (3, 5), 2: (0,), 9: (40_000,), 1: (1,), 4: (17,), 3: (2, 2, 2), 8: (16_384,), 5: (16_385,)}
Make = Callable[[np.ndarray], Any]


def numbers(key: int, *seeds: int) -> np.ndarray:
    return np.random.default_rng([key, *seeds]).integers(-99, 99, SHAPES[key]).astype("f4")


def make_torch(array: np.ndarray) -> Any:
    return pytest.importorskip("torch").from_numpy(array.copy())


@pytest.fixture(params=["dist_sync", "dist_async_mpi"])
def kv(request: pytest.FixtureRequest) -> Any:
    with kvmpi.create(request.param, timeout_s=20) as store:
        store.init(list(SHAPES), [numbers(key) for key in SHAPES])
        store.set_optimizer(optim.Test(lr=-1))
        yield store


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What has been looked at from the beginning."""
    found: list[str] = []
    enter = DistStore._enter_keys

    def spy(self: Any, call: Any, *rest: Any) -> Any:
        found.append(call.op)
        return enter(self, call, *rest)

    monkeypatch.setattr(DistStore, "_enter_keys", spy)
    return found


@pytest.mark.parametrize("make", [np.array, make_torch], ids=["numpy", "torch"])
@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "into others"])
def test_each_time_is_exact_and_from_the_third_on_nothing_is_looked_at(
    kv: Any, looks: list[str], make: Make, in_place: bool
) -> None:
    keys = list(SHAPES)
    values = [make(np.empty(SHAPES[key], "f4")) for key in keys]
    outs = None if in_place else [make(np.full(SHAPES[key], np.nan, "f4")) for key in keys]
    expected = {key: numbers(key).astype("f8") for key in keys}
    arrays.read(values[0])  # else the first tensor of a process is looked at once more
    for step in range(1, 6):
        for key, value in zip(keys, values, strict=True):
            value[...] = make(numbers(key, step))
        kv.pushpull(keys, values, outs)
        for key, got in zip(keys, values if outs is None else outs, strict=True):
            expected[key] += numbers(key, step)
            np.testing.assert_array_equal(np.asarray(got), expected[key], err_msg=f"key {key}, step {step}")
    assert looks == ["pushpull"] * 2
    assert kv.stats()["phases"]["push"]["calls"] == 5 * len(keys)
    assert kv._observe().totals["steps"] == 5


def test_other_arrays_and_what_is_wrong_are_looked_at(kv: Any, looks: list[str]) -> None:
    keys = list(SHAPES)
    values = [np.zeros(SHAPES[key], "f4") for key in keys]
    for _ in range(4):
        kv.pushpull(keys, values)
        for value in values:
            value[...] = 0
    before = len(looks)
    others = [np.ones(SHAPES[key], "f4") for key in keys]
    kv.pushpull(keys, others)
    for key, got in zip(keys, others, strict=True):
        np.testing.assert_array_equal(got, numbers(key) + 1, err_msg=str(key))
    wrong = [values[0].T, *values[1:]]
    with pytest.raises(ShapeMismatchError, match="pushpull of key 7"):
        kv.pushpull(keys, wrong)
    values[0].flags.writeable = False
    with pytest.raises(KVError, match="read-only"):
        kv.pushpull(keys, values)
    assert len(looks) == before + 3
    kv.pushpull(keys, [np.zeros(SHAPES[key], "f4") for key in keys], others)
    for key, got in zip(keys, others, strict=True):
        np.testing.assert_array_equal(got, numbers(key) + 1, err_msg=f"{key}: nothing else was pushed")


def test_what_is_pushed_from_where_another_key_is_pulled_into_stays_right(kv: Any, looks: list[str]) -> None:
    """That is copied, every time."""
    one, two = np.empty(17, "f4"), np.empty((3, 5), "f4")
    room = np.empty(17, "f4")
    expected = {4: numbers(4).astype("f8"), 7: numbers(7).astype("f8")}
    for step in range(1, 6):
        one[...], two[...] = numbers(4, step), numbers(7, step)
        pushed = room[:15].reshape(3, 5)  # what key 7 pushes lies where key 4's value comes
        pushed[...] = two
        kv.pushpull([4, 7], [one, pushed], [room, two])
        for key, got in ((4, room), (7, two)):
            expected[key] += numbers(key, step)
            np.testing.assert_array_equal(got, expected[key], err_msg=f"key {key}, step {step}")
    assert looks == ["pushpull"] * 5


def test_what_an_earlier_call_has_left_is_raised_and_what_is_closed_says_so(kv: Any) -> None:
    keys = list(SHAPES)
    values = [np.zeros(SHAPES[key], "f4") for key in keys]
    for _ in range(3):
        kv.pushpull(keys, values)
        for value in values:
            value[...] = 0

    def fail() -> None:
        raise KVError("left by an earlier call")

    state = kv._keys[4]
    kv._engine.push(fail, writes=[state.value], lane="inline", name="a failure")
    with pytest.raises(KVError, match="left by an earlier call"):
        kv.pushpull(keys, values)
    kv.pushpull(keys, values)
    np.testing.assert_array_equal(values[0], numbers(7))
    kv.close()
    with pytest.raises(KVError, match="closed"):
        kv.pushpull(keys, values)


def test_who_has_joined_pushes_no_more_though_the_call_is_known(kv: Any) -> None:
    keys, given = [9, 4], [np.zeros(SHAPES[9], "f4"), np.zeros(SHAPES[4], "f4")]
    for _ in range(4):
        for key, array in ((keys, given), (9, given[0]), (4, given[1])):
            for array_ in given:
                array_[...] = 0
            kv.push(key, array)
            kv.pushpull(key, array)
    kv.join()
    for call in (kv.pushpull, kv.push):
        for key, array in ((keys, given), (4, given[1])):
            with pytest.raises(KVError, match="has called join"):
                call(key, array)
    kv.pull(4, given[1])
    np.testing.assert_array_equal(given[1], numbers(4))


def test_autograd_hears_of_what_is_written(kv: Any) -> None:
    torch = pytest.importorskip("torch")
    keys = [4, 1]
    values = [torch.zeros(17), torch.zeros(1)]
    for _ in range(4):
        before = [value._version for value in values]
        kv.pushpull(keys, values)
        assert all(value._version > was for value, was in zip(values, before, strict=True))
        for value in values:
            value.zero_()


@pytest.fixture
def grouped(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The pushes and pulls whose keys and arrays have been looked at."""
    found: list[str] = []
    groups = core.groups

    def spy(key: Any, value: Any, op: str, **how: Any) -> Any:
        found.append(op)
        return groups(key, value, op, **how)

    monkeypatch.setattr(core, "groups", spy)
    return found


@pytest.mark.parametrize("make", [np.array, make_torch], ids=["numpy", "torch"])
def test_pushes_and_pulls_too(kv: Any, grouped: list[str], make: Make) -> None:
    keys = list(SHAPES)
    values = [make(np.empty(SHAPES[key], "f4")) for key in keys]
    outs = [make(np.full(SHAPES[key], np.nan, "f4")) for key in keys]
    expected = {key: numbers(key).astype("f8") for key in keys}
    arrays.read(values[0])
    for step in range(1, 6):
        for key, value in zip(keys, values, strict=True):
            value[...] = make(numbers(key, step))
        kv.push(keys, values)
        for value in values:
            value[...] = -1  # they are the caller's again
        kv.pull(keys, outs)
        for key, got in zip(keys, outs, strict=True):
            expected[key] += numbers(key, step)
            np.testing.assert_array_equal(np.asarray(got), expected[key], err_msg=f"key {key}, step {step}")
    assert grouped == ["push", "pull"] * 2
    assert kv.stats()["phases"]["push"]["calls"] == 5 * len(keys)
    assert kv._observe().totals["steps"] == 5
    others = [make(np.full(SHAPES[key], np.nan, "f4")) for key in keys]
    kv.pull(keys, others)
    for key, got in zip(keys, others, strict=True):
        np.testing.assert_array_equal(np.asarray(got), expected[key], err_msg=f"key {key}, other arrays")
    assert grouped == ["push", "pull"] * 2 + ["pull"]


@pytest.mark.parametrize("op", ["push", "pull"])
def test_they_raise_what_an_earlier_call_has_left(kv: Any, grouped: list[str], op: str) -> None:
    keys = list(SHAPES)
    given = [np.zeros(SHAPES[key], "f4") for key in keys]
    for _ in range(3):
        getattr(kv, op)(keys, given)
    kv.wait_all()  # else what fails has its turn after pushes that nobody waits for

    def fail() -> None:
        raise KVError("left by an earlier call")

    kv._engine.push(fail, writes=[kv._keys[4].value], lane="inline", name="a failure")
    with pytest.raises(KVError, match="left by an earlier call"):
        getattr(kv, op)(keys, given)
    getattr(kv, op)(keys, given)
    assert len(grouped) == 3, "only the call that finds an error is looked at again"
    with pytest.raises(ShapeMismatchError, match=f"{op} of key 7"):
        getattr(kv, op)(keys, [given[0].reshape(-1), *given[1:]])
    kv.close()
    with pytest.raises(KVError, match="closed"):
        getattr(kv, op)(keys, given)


@pytest.mark.parametrize("op", ["push", "pushpull"])
def test_a_push_that_is_known_is_one_of_whole_arrays(kv: Any, op: str) -> None:
    keys, given = [9, 4], [np.zeros(SHAPES[9], "f4"), np.zeros(SHAPES[4], "f4")]
    for _ in range(3):
        getattr(kv, op)(keys, given)
        for array in given:
            array[...] = 0
    kv.push(4, (np.array([2]), np.ones(1, "f4")))
    assert kv._keys[4].by_rows
    getattr(kv, op)(keys, given)
    assert not kv._keys[4].by_rows
    kv.pull(keys, given)
    expected = numbers(4)
    expected[2] += 1
    np.testing.assert_array_equal(given[1], expected)


@pytest.mark.parametrize("waits", [True, False], ids=["waits", "async"])
@pytest.mark.parametrize("make", [np.array, make_torch], ids=["numpy", "torch"])
def test_one_key_is_looked_at_once_wherever_its_arrays_lie(
    kv: Any, looks: list[str], make: Make, *, waits: bool
) -> None:
    def finish(work: Any) -> None:
        assert (work is None) == waits
        if work is not None:
            work.wait()

    kept, expected = [], {key: numbers(key).astype("f8") for key in SHAPES}
    arrays.read(make(np.zeros(1, "f4")))  # else the first tensor of a process is looked at once more
    for step in range(1, 6):
        for key in SHAPES:
            value, out = make(numbers(key, step)), make(np.full(SHAPES[key], np.nan, "f4"))
            finish(kv.pushpull(key, value, out, async_op=not waits))
            expected[key] += numbers(key, step)
            np.testing.assert_array_equal(np.asarray(out), expected[key], err_msg=f"key {key}, step {step}")
            finish(kv.push(key, value, async_op=not waits))
            value[...] = -1  # it is the caller's again
            expected[key] += numbers(key, step)
            finish(kv.pull(key, out, async_op=not waits))
            np.testing.assert_array_equal(np.asarray(out), expected[key], err_msg=f"key {key}, step {step}")
            kept += [value, out]
    assert looks == ["pushpull", "push", "pull"] * len(SHAPES)
    assert kv.stats()["phases"]["push"]["calls"] == 10 * len(SHAPES)
    assert kv._observe().totals["steps"] == 10


@pytest.mark.parametrize("op", ["push", "pull", "pushpull"])
def test_one_key_that_is_known_still_has_its_errors(kv: Any, looks: list[str], op: str) -> None:
    given = np.zeros(SHAPES[4], "f4")
    call = getattr(kv, op)
    for _ in range(2):
        call(4, given)
        given[...] = 0

    def fail() -> None:
        raise KVError("left by an earlier call")

    for variable in (kv._keys[4].value, kv._keys[4].sent):
        kv.wait_all()  # else what fails has its turn after a push that nobody waits for
        kv._engine.push(fail, writes=[variable], lane="inline", name="a failure")
        with pytest.raises(KVError, match="left by an earlier call"):
            call(4, given)
        call(4, given)
    with pytest.raises(ShapeMismatchError, match=f"{op} of key 4"):
        call(4, given[1:])
    with pytest.raises(ConfigError, match="priority"):
        call(4, given, priority="high")
    assert len(looks) == 1 + 2 + 2
    kv.push(4, (np.array([2]), np.ones(1, "f4")))
    assert kv._keys[4].by_rows
    call(4, given)
    assert kv._keys[4].by_rows == (op == "pull")
    assert len(looks) == 1 + 2 + 2 + 1
    kv.close()
    with pytest.raises(KVError, match="closed"):
        call(4, given)


def test_results_come_into_tensors_that_are_not_aligned(kv: Any) -> None:
    """NumPy and compiled code get at a copy of them only."""
    torch = pytest.importorskip("torch")
    keys, values = [4, 1], [torch.ones(17), torch.ones(1)]
    odd = torch.frombuffer(bytearray(17 * 4 + 1), dtype=torch.float32, offset=1)
    outs = [odd, torch.zeros(1)]
    for step in range(1, 6):
        kv.pushpull(keys, values, outs)
        np.testing.assert_array_equal(np.array(odd.tolist()), numbers(4) + step, err_msg=f"step {step}")
