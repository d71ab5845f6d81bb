"""Arrays that lie in each other's memory, on a device by a stand-in: what one key is pulled into another may push."""

from __future__ import annotations

import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmpi import arrays
from kvmpi.deadline import Deadline
from kvmpi.store.call import Invocation, KeyState, Part, keep_apart, overlap

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))

from device_stand_in import Machine, StandInArray

CALL = Invocation("pushpull", Deadline(10.0))


class DeviceArray(StandInArray):
    """With what is asked of arrays that users give."""

    def __init__(self, machine: Machine, memory: np.ndarray) -> None:
        super().__init__(machine, memory, 0)
        self.strides, self.itemsize = memory.strides, memory.itemsize

    def reshape(self, count: int) -> DeviceArray:
        return DeviceArray(self.machine, self.memory.reshape(count))

    def copy(self) -> DeviceArray:
        return DeviceArray(self.machine, self.memory.copy())

    def part(self, start: int, stop: int) -> DeviceArray:
        return DeviceArray(self.machine, self.memory[start:stop])


@pytest.fixture
def array(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``array(values)`` on the stand-in's device."""
    machine = Machine(lambda *_: None, set(), early=True)
    cupy = machine.module()
    cupy.ndarray = DeviceArray
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    return lambda values: DeviceArray(machine, np.array(values, "f4"))


def part(key: str, pushed: list[DeviceArray], outs: list[DeviceArray]) -> Part:
    state = KeyState(key, pushed[0].shape, "float32", 0, "cupy")
    vectors = [arrays.read(each) for each in pushed]
    return Part(state, vectors, outs, in_place=pushed == outs)


def test_one_array_of_several_keys(array: Any) -> None:
    x, y = array([1, 2, 3]), array([4, 5, 6])
    assert overlap([part("a", [x], [x]), part("b", [x], [x])])
    assert not overlap([part("a", [x], [x]), part("b", [y], [y])])
    parts = [part("a", [x], [x]), part("b", [x], [x]), part("c", [y], [y])]
    keep_apart(parts, CALL)
    copied = [p.vectors[0].address != out.data.ptr for p, out in zip(parts, (x, x, y), strict=True)]
    assert copied == [True, True, False]
    assert [p.vectors[0].buffer.memory.tolist() for p in parts] == [[1, 2, 3], [1, 2, 3], [4, 5, 6]]
    assert parts[0].vectors[0].ready is not None


def test_what_is_pulled_into_the_middle_of_what_is_pushed(array: Any) -> None:
    x = array(range(8))
    inside, exactly = part("a", [x.part(0, 4)], [x.part(2, 6)]), part("b", [x.part(0, 4)], [x.part(0, 4)])
    keep_apart([inside], CALL)
    keep_apart([exactly], CALL)
    assert inside.vectors[0].buffer.memory.tolist() == [0, 1, 2, 3]
    assert inside.vectors[0].address != x.data.ptr
    assert exactly.vectors[0].address == x.data.ptr


def host_part(key: int, pushed: list[np.ndarray], outs: list[np.ndarray]) -> Part:
    state = KeyState(key, pushed[0].shape, "float32", 0, "numpy")
    return Part(state, [arrays.read(each) for each in pushed], outs, in_place=True)


@given(st.data())
def test_copied_is_what_would_be_overwritten_and_nothing_else(data: st.DataObject) -> None:
    memory = np.arange(24, dtype="f4")
    pieces = st.builds(lambda start, count: memory[start : start + count], st.integers(0, 20), st.integers(1, 4))
    lists = st.lists(pieces, min_size=1, max_size=3)
    keys = data.draw(st.lists(st.tuples(lists, st.booleans(), lists), min_size=1, max_size=6))
    keys = [(pushed, pushed if same else outs) for pushed, same, outs in keys]
    parts = [host_part(key, pushed, outs) for key, (pushed, outs) in enumerate(keys)]
    keep_apart(parts, CALL)
    for key, (pushed, _) in enumerate(keys):
        for source, vector in zip(pushed, parts[key].vectors, strict=True):
            met = [
                (other, out) for other, (_, outs) in enumerate(keys) for out in outs if np.shares_memory(source, out)
            ]
            meets = any(
                other != key or out.ctypes.data != source.ctypes.data or out.size != source.size for other, out in met
            )
            assert (vector.address != source.ctypes.data) == meets
            assert vector.buffer.tolist() == source.tolist()


def test_many_keys_are_not_compared_with_each_other() -> None:
    values = np.zeros((5000, 8), "f4")
    parts = [host_part(key, [row], [row]) for key, row in enumerate(values)]
    tracemalloc.start()
    keep_apart(parts, CALL)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1000 * len(parts)
    assert all(part.vectors[0].address == row.ctypes.data for part, row in zip(parts, values, strict=True))
