"""Stores whose staleness is bounded: who waits for whom, who does not count, and where one goes on that comes back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ps_helpers import STORE, Machine, whole_numbers

from kvmpi import optim
from kvmpi.errors import ConfigError
from kvmpi.ps import consistency, replay
from kvmpi.ps.membership import Membership
from kvmpi.ps.observing import observe
from kvmpi.ps.shard import Shard
from kvmpi.wire import entries
from kvmpi.wire import messages as m

COUNT = 5
START = whole_numbers(COUNT)


def pushed(client: int, step: int) -> np.ndarray:
    return whole_numbers(COUNT, client, step)


def value_of(*pushes: int) -> np.ndarray:
    """The value when each client has pushed so often: in whatever order, as all is added."""
    terms = [pushed(client, step) for client, steps in enumerate(pushes) for step in range(1, steps + 1)]
    return np.sum([START, *terms], axis=0, dtype="f8")


class Bounded(Machine):
    """A store, and how often each of its clients has pushed."""

    def __init__(self, staleness: int, num_clients: int, rule: optim.Rule | None = None, **how: Any) -> None:
        super().__init__(f"ssp:{staleness}", num_clients, **how)
        self.init_all("k", START)
        self.rule(rule or optim.Test(lr=-1.0))
        self.steps = [0] * num_clients

    def go(self, client: int, *, fused: bool = False) -> int:
        self.steps[client] += 1
        step = self.steps[client]
        return self.push(client, "k", step, pushed(client, step), fused=fused)

    def reads(self, client: int) -> int:
        return self.pull(client, "k", self.steps[client])


def is_held(machine: Machine, request: int) -> bool:
    return not isinstance(machine.last(request), m.Value)


@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize("fused", [False, True])
def test_a_read_waits_until_all_have_come_near(staleness: int, *, fused: bool) -> None:
    machine = Bounded(staleness, 3)
    for step in range(1, staleness + 1):  # nobody else has pushed: so far one may go
        assert machine.ok(machine.go(0, fused=fused))
        np.testing.assert_array_equal(machine.value(machine.reads(0)), value_of(step, 0, 0))
    answer = machine.go(0, fused=fused)
    # The push counts at once, for everyone who may read; only its sender waits.
    np.testing.assert_array_equal(machine.value(machine.reads(1)), value_of(staleness + 1, 0, 0))
    held = answer if fused else machine.reads(0)
    machine.go(1)
    assert is_held(machine, held)
    machine.go(2)
    np.testing.assert_array_equal(machine.value(held), value_of(staleness + 1, 1, 1))
    for client in (2, 2, 1):  # those behind do not wait: each is no further than the first
        if machine.steps[client] < machine.steps[0]:
            assert machine.ok(machine.go(client, fused=fused))
            assert machine.ok(machine.reads(client))


def test_who_asks_again_is_told_whom_it_waits_for_and_keeps_its_place() -> None:
    machine = Bounded(1, 3)
    machine.go(1)
    for _ in range(3):
        held = machine.go(0, fused=True)
        assert isinstance(machine.last(held), m.Accepted) == (machine.steps[0] > 1)
    reader = machine.reads(0)
    for again in (machine.send(0, m.Query, "k", 0, 3, request=held), machine.pull(0, "k", 3, request=reader)):
        waiting = machine.last(again)
        assert isinstance(waiting, m.Waiting)
        assert waiting.clients == [1, 2]
    machine.push(0, "k", 3, pushed(0, 3), fused=True, request=held)  # the word that it is accepted was lost
    assert [type(reply.message) for reply in machine.replies[held]][-2:] == [m.Accepted, m.Waiting]
    assert observe(machine.state, 0)[1] == [1, 2]
    (wait,) = machine.state.waits(5.0)
    assert wait.what == f"a read after push 3 of key 'k' (chunk 0) in store {STORE}"
    assert wait.whom == "no push from client 1 (last request 5.0 s ago), client 2 (last request 5.0 s ago)"
    for client in (2, 2, 1):
        assert is_held(machine, held)
        machine.go(client)
    answer = machine.last(held)
    assert isinstance(answer, m.Value)
    assert (answer.version, answer.later) == (7, 3)  # it was the fourth update
    np.testing.assert_array_equal(machine.value(held), value_of(3, 2, 2))
    np.testing.assert_array_equal(machine.value(reader), value_of(3, 2, 2))
    assert machine.state.waits(6.0) == []


def test_rows_and_values_that_were_met_wait_too() -> None:
    machine = Bounded(0, 2)
    ids, rows = np.array([1, 3], "<u4"), np.array([10.0, 30.0], "f4")
    one = machine.send(0, m.Push, "k", 0, 1, "none", True, False, 0, 2, payloads=[ids, rows])
    machine.send(0, m.Query, "k", 0, 1, request=one)  # which does not say them
    some = machine.send(0, m.Pull, "k", 0, 1, 0, 1, payloads=[ids[:1]])
    assert [is_held(machine, one), is_held(machine, some)] == [True, True]
    machine.go(1)
    expected = value_of(0, 1) + np.array([0, 10, 0, 30, 0])
    for request, which in ((one, [1, 3]), (some, [1])):
        np.testing.assert_array_equal(machine.replies[request][-1].payloads[-1], expected[which])
    np.testing.assert_array_equal(machine.replies[one][-1].payloads[0], ids)

    machine = Bounded(0, 2, optim.Elastic(alpha=0.5))
    first = machine.go(0, fused=True)
    assert is_held(machine, first)
    second = machine.go(1, fused=True)
    center = (START + pushed(0, 1).astype("f8")) / 2
    np.testing.assert_array_equal(machine.value(first), START)
    np.testing.assert_array_equal(machine.value(second), center)


@pytest.mark.parametrize("policy", ["fail", "wait", "shrink"])
@pytest.mark.parametrize("how", ["lost", "closed", "finished"])
def test_who_is_gone_does_not_count_but_where_all_wait_for_it(policy: str, how: str) -> None:
    machine = Bounded(0, 3, on_client_loss=policy)
    machine.go(2)
    held = [machine.reads(2), machine.go(0, fused=True)]
    match how:
        case "lost":
            machine.lose(1)
        case "closed":
            machine.send(1, m.Bye)
        case "finished":
            assert machine.ok(machine.send(1, m.Finish))
    waits = how == "lost" and policy == "wait"
    assert [is_held(machine, request) for request in held] == [waits, waits]
    if waits:
        assert machine.ok(machine.hello(1, 2, at=b"reborn"))
        assert [is_held(machine, request) for request in held] == [True, True]
        machine.send(b"reborn", m.Push, "k", 0, 1, "none", False, payloads=[pushed(1, 1)])
    np.testing.assert_array_equal(machine.value(held[0]), value_of(1, 1 if waits else 0, 1))


@pytest.mark.parametrize(("own", "base"), [(1, 4), (6, 6)])
def test_who_begins_anew_is_where_the_slowest_of_the_others_is_or_where_it_was(own: int, base: int) -> None:
    """For others. Its own reads count from the beginning: it has done as little of its program."""
    machine = Bounded(1, 3, on_client_loss="shrink")
    for client, steps in enumerate((own, 5, 4)):
        for _ in range(steps):
            machine.go(client)
    shard = machine.state.parts[0].shards[STORE]
    (state,) = (entry for entry, _ in replay.dump(shard) if isinstance(entry, entries.SlotState))
    machine.lose(0)
    assert machine.ok(machine.hello(0, 2, at=b"reborn"))
    assert state.bases == {}, "it may still have to be sent, and what has come since after it"
    copy = Shard(1, STORE, shard.mode, 3, lambda *record: False, "shrink")
    for entry, payloads in replay.dump(shard)[1:]:
        replay.apply(copy, entry, [memoryview(payload.tobytes()) for payload in payloads], keep=False)
    assert copy.slots["k", 0].clock(0) == shard.slots["k", 0].clock(0) == base
    assert machine.ok(machine.send(b"reborn", m.Pull, "k", 0, 0))
    while machine.steps[2] < base + 1:
        machine.go(2)
    while machine.steps[1] < base + 1:
        machine.go(1)
        assert machine.ok(machine.reads(1))
    machine.go(1)
    held = machine.reads(1)
    machine.go(2)
    assert is_held(machine, held)
    answer = machine.send(b"reborn", m.Push, "k", 0, 1, "none", True, payloads=[pushed(0, 1)])
    assert not is_held(machine, answer)
    assert not is_held(machine, held)


def test_a_client_that_nobody_has_seen_is_not_at_the_beginning_either() -> None:
    machine = Machine("ssp:0", 2, hello=False)
    assert machine.ok(machine.hello(0))
    assert machine.ok(machine.init(0, "k", START))
    machine.rule(optim.Test(lr=-1.0), clients=[0])
    machine.lose(1)
    for step in (1, 2):
        assert machine.ok(machine.push(0, "k", step, pushed(0, step), fused=True))
    assert machine.ok(machine.hello(1, 2))
    assert machine.slot("k").clock(1) == 2


def test_nobody_looks_at_all_clients_for_each_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether they have to wait or not."""
    machine, looks = Bounded(0, 120), 0
    real = Membership.is_awaited

    def is_awaited(self: Membership, client: int) -> bool:
        nonlocal looks
        looks += 1
        return real(self, client)

    monkeypatch.setattr(Membership, "is_awaited", is_awaited)
    for _ in range(3):
        held = [machine.go(client, fused=True) for client in range(1, 120)]
        assert all(is_held(machine, request) for request in held)
        machine.go(0)
        assert not any(is_held(machine, request) for request in held)
    np.testing.assert_array_equal(machine.value(machine.reads(7)), value_of(*[3] * 120))
    assert looks < 20 * 120


def test_what_is_known_of_all_changes_with_who_takes_part() -> None:
    machine = Bounded(0, 3)
    for client in (1, 2, 2):
        machine.go(client)
    held = machine.reads(1)
    assert is_held(machine, held)
    assert not is_held(machine, machine.pull(0, "k", 1)), "nobody waits for itself"
    assert machine.ok(machine.hello(0, 2, at=b"reborn"))  # nobody has seen that the one before it is gone
    assert not is_held(machine, held)
    held = machine.reads(2)
    assert is_held(machine, held)
    machine.go(1)
    assert is_held(machine, held)
    machine.send(b"reborn", m.Push, "k", 0, 1, "none", False, payloads=[pushed(0, 1)])
    assert not is_held(machine, held)
    # Another server has been the head for a while, and this one has followed it.
    shard = machine.state.parts[0].shards[STORE]
    for client, step in ((1, 3), (0, 2)):
        single = entries.Single("k", 0, client, step, "none")
        replay.apply(shard, single, [memoryview(pushed(client, step).tobytes())], keep=False)
    assert not is_held(machine, machine.go(2, fused=True))


@pytest.mark.parametrize("mode", ["ssp", "ssp:", "ssp:-1", "ssp:many", "async:1", "sync:0", "bsp", "ssp:" + 5000 * "9"])
def test_modes_that_are_none(mode: str) -> None:
    with pytest.raises(ConfigError, match="consistency") as caught:
        consistency.discipline(mode)
    assert len(str(caught.value)) < 200


def test_clients_must_have_the_same_bound() -> None:
    machine = Bounded(2, 2)
    error = machine.error(machine.hello(1, 2, mode="ssp:3"))
    assert isinstance(error, ConfigError)
    assert "creates a ssp:3 store for 2 clients, another client created it ssp:2" in str(error)
