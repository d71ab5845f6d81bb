"""What a checkpoint holds: state that is read from a server and put back goes on with the same bits."""

from __future__ import annotations

import numpy as np
import pytest
from ps_helpers import Machine, random_floats, round_of, stored, whole_numbers

from kvmpi import optim
from kvmpi.errors import ProtocolError
from kvmpi.wire import messages as m

COUNT = 9


def dump(machine: Machine, client: int = 0) -> tuple[int, list[str], list[np.ndarray]]:
    reply = machine.replies[machine.send(client, m.GetState, "k", 0)][-1]
    assert isinstance(reply.message, m.State)
    return reply.message.updates, reply.message.names, [array.copy() for array in reply.payloads]


@pytest.mark.parametrize("rule", [
    optim.SGD(lr=0.1, momentum=0.9), optim.Adam(lr=0.01, multi_precision=True), optim.Adagrad(), optim.Outer(),
    optim.Elastic(0.3, multi_precision=True),
], ids=repr)  # fmt: skip
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_a_restored_chunk_goes_on_with_the_same_bits(rule: optim.Rule, mode: str, dtype: str) -> None:
    def value(step: int, client: int) -> np.ndarray:
        return stored(random_floats(COUNT, step, client), dtype)

    def go_on(machine: Machine, first: int, step: int) -> np.ndarray:
        round_of(machine, step, [value(first, client) for client in range(2)])
        return machine.read("k", step, dtype=dtype).copy()

    one = Machine(mode, 2)
    one.init_all("k", value(0, 0), dtype)
    one.rule(rule)
    for step in (1, 2, 3):
        go_on(one, step, step)
    updates, names, arrays = dump(one)
    assert names[0] == "value"
    assert updates == (3 if mode == "sync" else 6)
    other = Machine(mode, 2)
    other.init_all("k", value(9, 9), dtype)
    other.rule(rule)
    go_on(other, 7, 1)  # it has a past of its own, which must not show
    request = other.send(0, m.PutState, "k", 0, updates, names, payloads=arrays)
    assert other.ok(request)
    for step in (4, 5):
        assert go_on(one, step, step).tobytes() == go_on(other, step, step - 2).tobytes(), f"{step=}"
    # The copy of a request that has been served comes too late, after others went on.
    now = other.read("k", dtype=dtype).copy()
    other.send(0, m.PutState, "k", 0, updates, names, payloads=arrays, request=request)
    np.testing.assert_array_equal(other.read("k", dtype=dtype), now)


def test_state_without_a_value_leaves_the_value() -> None:
    machine = Machine("sync", 1)
    machine.init_all("k", whole_numbers(COUNT))
    machine.rule(optim.SGD(lr=1.0, momentum=0.5))
    assert machine.ok(machine.send(0, m.PutState, "k", 0, 3, ["momentum"], payloads=[np.full(COUNT, 2, "f4")]))
    np.testing.assert_array_equal(machine.read("k"), whole_numbers(COUNT))
    machine.push(0, "k", 1, np.ones(COUNT, "f4"))
    np.testing.assert_array_equal(machine.read("k", 1), whole_numbers(COUNT) - 2.0)


@pytest.mark.parametrize(("names", "payloads", "updates"), [
    (["value"], [], 1), ([], [bytes(4 * COUNT)], 1), (["value"], [bytes(4 * COUNT - 1)], 1),
    (["value"], [bytes(4 * COUNT + 4)], 1), (["a", "a"], [bytes(4 * COUNT)] * 2, 1),
    (["value"], [bytes(4 * COUNT)], -1),
])  # fmt: skip
def test_malformed_state_is_refused(names: list[str], payloads: list[bytes], updates: int) -> None:
    machine = Machine("sync", 1)
    machine.init_all("k", whole_numbers(COUNT))
    error = machine.error(machine.send(0, m.PutState, "k", 0, updates, names, payloads=payloads))
    assert isinstance(error, ProtocolError)
    np.testing.assert_array_equal(machine.read("k"), whole_numbers(COUNT))


def test_state_that_the_rule_does_not_know_is_ignored() -> None:
    machine = Machine("async", 1)
    machine.init_all("k", whole_numbers(COUNT))
    machine.rule(optim.SGD(lr=1.0, momentum=0.5))
    assert machine.ok(machine.send(0, m.PutState, "k", 0, 1, ["exp_avg"], payloads=[np.ones(COUNT, "f4")]))
    assert machine.ok(machine.push(0, "k", 1, np.ones(COUNT, "f4")))
    np.testing.assert_array_equal(machine.read("k"), whole_numbers(COUNT) - 1.0)
