"""Values that were handed out never change, a chunk keeps no more memory than it needs, what has ended keeps none."""

from __future__ import annotations

import gc
import tracemalloc
import weakref
from typing import Any

import numpy as np
import pytest
from ps_helpers import Machine, random_floats, route

from kvmpi import optim
from kvmpi.kernels.rows import Rows
from kvmpi.ps.asks import Ask, Operation
from kvmpi.ps.session import ClientSession
from kvmpi.ps.slot import ADOPT_FROM_BYTES, Slot
from kvmpi.wire import LEND_FROM_BYTES
from kvmpi.wire import messages as m

BIG = 1 << 18  # elements: 1 MiB of float32

RULES = [None, optim.SGD(lr=0.1), optim.SGD(lr=0.1, momentum=0.9), optim.Elastic(0.25), optim.Outer()]


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("num_clients", [1, 3])
def test_what_was_handed_out_never_changes(rule: optim.Rule | None, mode: str, dtype: str, num_clients: int) -> None:
    if rule is None and mode == "async":
        return
    count, rng = 50, np.random.default_rng(3)
    machine = Machine(mode, num_clients)
    machine.init_all("k", random_floats(count, 0).astype(dtype), dtype)
    if rule is not None:
        machine.rule(rule)
    kept: list[tuple[np.ndarray, bytes, str]] = []
    for step in range(1, 1 + 90 // num_clients):
        for client in range(num_clients):
            value = random_floats(count, client, step).astype(dtype)
            machine.push(client, "k", step, value, fused=bool(rng.integers(2)))
            if rng.random() < 0.5:
                machine.pull(client, "k", step)
        if rng.random() < 0.2:
            machine.send(0, m.GetState, "k", 0)
        for replies in machine.replies.values():
            for reply in replies:
                kept += [(payload, payload.tobytes(), f"{reply.message} of step {step}") for payload in reply.payloads]
        machine.replies.clear()
        rng.shuffle(kept)
        del kept[40:]  # some are let go, so that memory is used again
        for payload, then, what in kept:
            assert payload.tobytes() == then, f"{what} was changed by step {step}"
    assert len(kept) == 40


@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize("elements", [n // 4 for n in (ADOPT_FROM_BYTES - 4, ADOPT_FROM_BYTES, LEND_FROM_BYTES - 4)])
def test_what_came_and_was_sent_on_is_not_written_even_if_nobody_seems_to_hold_it(
    rule: optim.Rule | None, elements: int
) -> None:
    """A frame leaves as it is, and nobody says when."""
    came = [random_floats(elements, step) for step in range(6)]
    slot = Slot("k", 0, elements, "float32", came[0], rule, 0)
    sent: list[tuple[np.ndarray, np.ndarray]] = []

    def send() -> bool:
        """Whether a frame is sent; the view that was lent is dropped."""
        lent = slot.lend()
        is_frame = any(lent.base is array for array in came)
        assert lent.flags.writeable is not is_frame
        sent.extend([(lent.base, lent.copy())] if is_frame else [])
        return is_frame

    for step in range(1, 6):
        is_frame = send()
        assert is_frame is (elements * 4 >= ADOPT_FROM_BYTES) or (step > 1 and rule is not None)
        slot.add(came[step], "float32")
        slot.close_round(1)
    # Rows, and values that are loaded, are written to what there is.
    send()
    if rule is None or not rule.averages:
        slot.add(Rows(np.array([0]), np.ones((1, elements), "f4")), "float32")
        slot.close_round(1)
        send()
    slot.restore(0, {"value": random_floats(elements, 7)})
    for memory, then in sent:
        np.testing.assert_array_equal(memory, then)


def _peak_of_rounds(machine: Machine, num_clients: int, rounds: range, fused: bool, dtype: str = "f4") -> int:
    """Most bytes that the server took during the rounds, above what it had before the first."""
    frames = [memoryview(random_floats(BIG, client).astype(dtype).tobytes()) for client in range(num_clients)]
    gc.collect()
    tracemalloc.start()
    for step in rounds:
        for client in range(num_clients):
            replies = machine.state.handle(route(client), m.Push(step, "k", 0, step, "none", fused), [frames[client]])
            del replies  # as if it had been sent
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


# In whole vectors of float32. What is counted is new memory: the value is there already.
@pytest.mark.parametrize(("rule", "vectors"), [
    (None, 1),  # an accumulator
    (optim.SGD(lr=0.1), 1),
    (optim.SGD(lr=0.1, momentum=0.9), 2),  # and state
    (optim.Adam(), 3),
    (optim.Elastic(0.25), 3),  # the value is new in each round, and the old one is kept for a client that asks again
])  # fmt: skip
def test_a_synchronous_chunk_needs_one_accumulator(rule: optim.Rule | None, vectors: int) -> None:
    machine = Machine("sync", 4)
    machine.init_all("k", random_floats(BIG))
    if rule is not None:
        machine.rule(rule)
    peak = _peak_of_rounds(machine, 4, range(1, 9), fused=False)
    assert peak <= (vectors + 0.75) * 4 * BIG, f"{peak / 4 / BIG:.2f} vectors"


def test_an_asynchronous_update_in_place_needs_nothing() -> None:
    machine = Machine("async", 2)
    machine.init_all("k", random_floats(BIG))
    machine.rule(optim.SGD(lr=0.1))
    peak = _peak_of_rounds(machine, 2, range(1, 9), fused=True)
    assert peak <= 0.75 * 4 * BIG, f"{peak / 4 / BIG:.2f} vectors"


def test_memory_that_comes_back_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds whose replies are still under way cost a buffer; afterwards two take turns."""
    monkeypatch.setattr("kvmpi.ps.slot._can_adopt", lambda wire: False)  # as of memory that clients share
    machine = Machine("sync", 2)
    machine.init_all("k", random_floats(BIG))
    slot, made = machine.slot("k"), []
    empty = slot._empty
    slot._empty = lambda count, dtype: made.append(count) or empty(count, dtype)
    for step in range(1, 21):
        terms = [random_floats(BIG, step, client) for client in range(2)]
        request, _ = (machine.push(client, "k", step, term, fused=True) for client, term in enumerate(terms))
        value = machine.value(request)
        assert value is not None
        np.testing.assert_allclose(value, np.sum(terms, axis=0, dtype="f8"), rtol=1e-5, atol=1e-5)
        del value
        machine.replies.clear()
    assert 1 <= len(made) <= 3


def test_waiting_requests_do_not_pile_up() -> None:
    machine = Machine("sync", 3)
    machine.init_all("k", random_floats(5))
    for _ in range(100):
        machine.push(1, "k", 1, random_floats(5), fused=True)
        machine.pull(2, "k", 1)
        machine.pull(2, "k", 7)
    slot = machine.slot("k")
    assert len(slot.held) == len(slot.readers) == 1
    machine.push(0, "k", 1, random_floats(5))
    assert len({id(machine.read("k")) for _ in range(100)}) == 1, "each answer has an array of its own"


def test_the_arrays_of_what_has_ended_wait_for_no_collector() -> None:
    session, ended = ClientSession(100, 1.0), []

    def begin(timeout_s: float) -> weakref.ref[Any]:
        array = np.zeros(3, "f4")
        ask = Ask(0, m.Push, ("k", 0, 1, "none", False), cost_bytes=12, payloads=lambda: (array,))
        operation = Operation("push", timeout_s, 0.0, lambda error: ended.append((ask.number, type(error).__name__)))
        session.submit(operation, [ask])
        return weakref.ref(array)

    gc.disable()
    try:
        arrays = [begin(9.0), begin(1.0)]
        numbers = [message.request for _, message, _ in session.sendable(0.0)]  # type: ignore[attr-defined]
        session.receive(m.Ack(numbers[0], 0), [])
        assert [array() is None for array in arrays] == [True, False]
        session.tick(2.0)
        assert [array() is None for array in arrays] == [True, True]
    finally:
        gc.enable()
    assert ended == [(numbers[0], "NoneType"), (numbers[1], "KVTimeoutError")]
