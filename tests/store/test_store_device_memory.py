"""Arrays on a device that lie in each other's memory, by a stand-in: what one key is pulled into another may push."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

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
    state = KeyState(key, pushed[0].shape, "float32", 0, "cupy", None, None)  # type: ignore[arg-type]
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
