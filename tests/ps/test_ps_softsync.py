"""Stores whose servers gather pushes: when they are an update, of what, and that none is lost or counted twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ps_helpers import STORE, Machine, route, whole_numbers

from kvmpi import optim
from kvmpi.errors import ConfigError, KVError, UnsupportedError
from kvmpi.ps import consistency, replay, snapshot_files
from kvmpi.ps.shard import Shard
from kvmpi.ps.slot import ADOPT_FROM_BYTES
from kvmpi.wire import entries
from kvmpi.wire import messages as m

COUNT = 6
START = whole_numbers(COUNT)


def pushed(client: int, step: int) -> np.ndarray:
    return whole_numbers(COUNT, client, step)


class Gathering(Machine):
    """A store that adds up what is pushed, by clients that count their steps."""

    def __init__(self, splits: int, num_clients: int, rule: optim.Rule | None = None, **how: Any) -> None:
        super().__init__(f"softsync:{splits}", num_clients, **how)
        self.init_all("k", START)
        self.rule(rule or optim.Test(lr=-1.0))
        self.steps = [0] * num_clients
        self.sum = START.astype("f8")

    def go(self, client: int, *, fused: bool = False) -> int:
        self.steps[client] += 1
        self.sum += pushed(client, self.steps[client])
        return self.push(client, "k", self.steps[client], pushed(client, self.steps[client]), fused=fused)

    def now(self, client: int = 0) -> np.ndarray:
        return self.read("k", self.steps[client], client)


@pytest.mark.parametrize(
    ("splits", "clients", "size"), [(1, 1, 1), (1, 4, 4), (2, 4, 2), (2, 5, 2), (3, 4, 1), (4, 4, 1), (9, 4, 1)]
)
def test_so_many_pushes_are_an_update_whoever_they_are_from(splits: int, clients: int, size: int) -> None:
    """Also all of one client; each is answered at once, with the value that is there."""
    assert consistency.discipline(f"softsync:{splits}").size(clients) == size
    machine, choose = Gathering(splits, clients), np.random.default_rng([splits, clients])
    before, updates = START.astype("f8"), 0
    for number in range(1, 6 * size + 1):
        client, fused = int(choose.integers(clients)) if number > size else 0, bool(choose.random() < 0.5)
        answer = machine.go(client, fused=fused)
        if number % size == 0:
            before, updates = machine.sum.copy(), updates + 1
        message = machine.last(answer)
        in_update = (number - 1) // size + 1
        if fused:
            assert (message.version, message.version - message.later) == (updates, in_update)
            np.testing.assert_array_equal(machine.value(answer), before)
        else:
            assert message == m.Ack(answer, in_update)
        for reader in range(clients):
            np.testing.assert_array_equal(machine.now(reader), before)
    assert updates == 6


def test_what_is_asked_again_is_not_added_again() -> None:
    machine = Gathering(1, 3)
    first = machine.go(0, fused=True)
    for _ in range(3):
        machine.push(0, "k", 1, pushed(0, 1), fused=True, request=first)
        machine.push(0, "k", 1, pushed(0, 1))
        machine.send(0, m.Query, "k", 0, 1, request=first)
    machine.go(1)
    np.testing.assert_array_equal(machine.now(), START)
    machine.go(0)
    machine.push(0, "k", 2, pushed(0, 2))
    np.testing.assert_array_equal(machine.now(), machine.sum)
    assert machine.slot("k").rounds == 1


@pytest.mark.parametrize("policy", ["fail", "wait", "shrink"])
@pytest.mark.parametrize("how", ["lost", "closed", "finished"])
def test_with_fewer_clients_fewer_pushes_are_enough(how: str, policy: str) -> None:
    """At once; and what a client has pushed before it has gone counts."""
    machine = Gathering(1, 3, on_client_loss=policy)
    machine.go(2)
    machine.go(0)
    np.testing.assert_array_equal(machine.now(), START)
    match how:
        case "lost":
            machine.lose(2)
        case "closed":
            machine.send(2, m.Bye)
        case "finished":
            assert machine.ok(machine.send(2, m.Finish))
    np.testing.assert_array_equal(machine.now(), machine.sum)
    machine.go(1)
    assert machine.slot("k").gathered == 1
    machine.go(1)
    np.testing.assert_array_equal(machine.now(), machine.sum)
    if how == "lost":  # another process of it is here: again it takes three
        assert machine.ok(machine.hello(2, 2, at=b"reborn"))
        for client in (0, 0):
            machine.go(client)
        assert machine.slot("k").gathered == 2
        machine.go(0)
        np.testing.assert_array_equal(machine.now(), machine.sum)


def test_the_last_pushes_are_an_update_when_clients_leave() -> None:
    """Nothing that is gathered is lost: the last client that is left sees it."""
    machine = Gathering(1, 4)
    for client in (0, 1):
        machine.go(client)
    for client in (3, 2):
        machine.send(client, m.Bye)
    np.testing.assert_array_equal(machine.now(), machine.sum)
    machine.go(0)
    assert machine.slot("k").gathered == 1
    machine.send(1, m.Bye)
    np.testing.assert_array_equal(machine.now(), machine.sum)


def test_rows_and_whole_pushes_are_gathered_together() -> None:
    machine = Gathering(1, 3)
    machine.go(0)
    ids, rows = np.array([1, 4], "<u4"), np.array([10.0, 40.0], "f4")
    expected = machine.sum.copy()
    for client in (1, 2):
        fields = ("k", 0, 1, "none", True, False, 0, 2)
        answer = machine.send(client, m.Push, *fields, payloads=[ids, client * rows])
        expected[ids] += client * rows
    message = machine.last(answer)
    assert (message.rows, message.version, message.later) == (2, 1, 0)
    np.testing.assert_array_equal(machine.replies[answer][-1].payloads[1], expected[ids])
    np.testing.assert_array_equal(machine.now(), expected)


def test_a_rule_that_fails_is_told_to_who_has_pushed_last() -> None:
    @optim.register("fails at 13")
    class Fails(optim.Test):
        def compute(self, b: Any) -> None:
            if b.pushed[0] == 13:
                raise ValueError("13")
            super().compute(b)

    machine = Machine("softsync:1", 2)
    machine.init_all("k", np.zeros(2, "f4"))
    machine.rule(Fails())
    assert machine.ok(machine.push(0, "k", 1, np.full(2, 6.0, "f4")))
    request = machine.push(1, "k", 1, np.full(2, 7.0, "f4"))
    assert isinstance(machine.error(request), KVError)
    assert machine.last(request).used
    for client in range(2):
        assert machine.ok(machine.push(client, "k", 2, np.full(2, 1.0, "f4")))
    np.testing.assert_array_equal(machine.read("k", 2), [2, 2])
    assert machine.slot("k").rounds == 1


def test_a_snapshot_is_due_when_gathered_pushes_are_an_update() -> None:
    """After every second push of each of two clients, and not before the last of these is in the value."""
    machine = Gathering(1, 2, every=2)
    snapshots = machine.state.snapshots
    assert snapshots is not None
    for number in range(1, 9):
        machine.go(number % 2)
        taking = snapshots.take_ready()
        assert (taking is not None) == (number % 4 == 0), number
        if taking is not None:
            assert taking.number == number // 2
            assert taking.parts is not None
            (chunk,) = taking.parts[0][STORE].chunks
            np.testing.assert_array_equal(chunk.arrays["value"], machine.sum)
            snapshots.written(taking, [])


@pytest.mark.parametrize("names", [["value"], []])
def test_pushes_that_wait_are_over_with_the_value_that_they_were_for(names: list[str]) -> None:
    """As all before them are where another value is put in its place; not where none is, as with a rule's state."""
    machine = Gathering(1, 3)
    for client in (0, 1):
        machine.go(client)
    other = whole_numbers(COUNT, 9)
    assert machine.ok(machine.send(0, m.PutState, "k", 0, 0, names, payloads=[other for _ in names]))
    machine.sum = other.astype("f8") if names else machine.sum
    for _ in range(3 if names else 1):
        machine.go(2)
    np.testing.assert_array_equal(machine.now(), machine.sum)
    assert (machine.slot("k").gathered, machine.slot("k").rounds) == (0, 1)
    assert machine.slot("k").pushes == sum(machine.steps)


def test_what_a_push_has_met_cannot_be_asked_for() -> None:
    machine = Gathering(1, 2, optim.Elastic(alpha=0.5))
    error = machine.error(machine.go(0))
    assert isinstance(error, UnsupportedError)
    assert "Elastic" in str(error)


@pytest.mark.parametrize("mode", ["softsync", "softsync:0", "softsync:-1", "softsync:x"])
def test_modes_that_are_none(mode: str) -> None:
    with pytest.raises(ConfigError, match="consistency"):
        consistency.discipline(mode)


@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize("waiting", [0, 1, 2])
def test_what_waits_when_a_snapshot_is_taken_is_an_update_of_the_resumed_job(
    tmp_path: Path, waiting: int, *, by_rows: bool
) -> None:
    """With the pushes that come next, as if nothing had happened; each is counted in one job."""
    ids, rows = np.array([1, 4], "<u4"), np.array([10.0, 40.0], "f4")

    def push(machine: Gathering, client: int) -> None:
        if not by_rows:
            machine.go(client)
            return
        machine.steps[client] += 1
        fields = ("k", 0, machine.steps[client], "none", False, False, 0, 2)
        assert machine.ok(machine.send(client, m.Push, *fields, payloads=[ids, rows * (client + 1)]))
        machine.sum[ids] += rows * (client + 1)

    machine = Gathering(1, 3, every=0)
    for number in range(6 + waiting):
        push(machine, number % 2)
    assert machine.slot("k").gathered == waiting
    snapshots = machine.state.snapshots
    snapshots.begin(2)
    taking = snapshots.take_ready()
    assert taking.steps == {STORE: 2}
    (part,) = (number for number, stores in taking.parts.items() if stores)
    snapshot_files.write_part(str(tmp_path), 2, part, taking.parts[part])
    copy = snapshot_files.read_part(str(tmp_path), 2, part)
    again = Gathering(1, 3, every=0, resumed=(2, copy, taking.steps))
    np.testing.assert_array_equal(again.now(), machine.now())
    again.sum = machine.sum.copy()
    for _ in range(3 - waiting):
        np.testing.assert_array_equal(again.now(), machine.now())
        push(again, 2)
    np.testing.assert_array_equal(again.now(), again.sum)
    assert (again.slot("k").rounds, again.slot("k").gathered, again.slot("k").pushes) == (1, 0, 3 - waiting)
    again.state.snapshots.begin(3)
    assert again.state.snapshots.take_ready().steps == {STORE: 2 + (3 - waiting) // 3}


@pytest.mark.parametrize("mode", ["sync", "async", "ssp:1"])
def test_a_store_of_another_mode_goes_on_without_what_waits(mode: str) -> None:
    machine = Gathering(1, 2, every=0)
    for client in (0, 1, 0):
        machine.go(client)
    machine.state.snapshots.begin(1)
    taking = machine.state.snapshots.take_ready()
    (copy,) = (part for part in taking.parts.values() if part)
    again = Machine(mode, 2, every=0, resumed=(1, copy, taking.steps))
    again.init_all("k", START)
    again.rule(optim.Test(lr=-1.0))
    for client in range(2):
        assert again.ok(again.push(client, "k", 1, pushed(client, 7)))
    np.testing.assert_array_equal(again.read("k", 1), machine.now() + pushed(0, 7) + pushed(1, 7))


# ---- on several servers


class Followed:
    """A shard, one that makes all changes by its log, and one that is given all now and then."""

    def __init__(self, rule: optim.Rule, dtype: str, clients: int) -> None:
        self.records: list[Any] = []
        self.head = Shard(0, STORE, "softsync:2", clients, self._log)
        self.head.rounds.is_followed = lambda: True
        self.follower = Shard(1, STORE, "softsync:2", clients, lambda *_: False)
        self._request = 0
        for client in range(clients):
            self.head.join(client, 1)
            start = [memoryview(START.astype(dtype).tobytes())] if client == 0 else []
            self.ask(client, m.Init, "k", 0, 1, COUNT, [COUNT // 2, 2], dtype, payloads=start)
            self.ask(client, m.SetRule, 1, rule.name, rule.hyperparams())

    def _log(self, entry: Any, payloads: tuple[np.ndarray, ...]) -> bool:
        self.records.append((entry, payloads))  # as they are: what comes later must not change them
        return True

    def ask(self, client: int, kind: Any, *fields: Any, payloads: Any = ()) -> Any:
        self._request += 1
        return self.head.handle(client, route(client), kind(self._request, *fields), list(payloads))

    def follow(self) -> None:
        for entry, payloads in self.records:
            replay.apply(self.follower, entry, [memoryview(p.tobytes()) for p in payloads], keep=True)
        self.records.clear()

    def copy(self) -> None:
        """Another follows from here on."""
        self.follow()
        copy = Shard(2, STORE, "softsync:2", self.head.num_clients, lambda *_: False)
        for entry, payloads in replay.dump(self.head)[1:]:
            replay.apply(copy, entry, [memoryview(p.tobytes()) for p in payloads], keep=False)
        self.follower = copy

    def compare(self) -> None:
        def all_of(shard: Shard) -> list[Any]:
            (state,) = ((e, p) for e, p in replay.dump(shard) if isinstance(e, entries.SlotState))
            return [state[0], [payload.tobytes() for payload in state[1]]]

        assert all_of(self.follower) == all_of(self.head)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("aware", [False, True])
def test_servers_that_follow_have_the_same_bits(dtype: str, *, aware: bool) -> None:
    """Whatever is gathered when a copy is made, and whoever goes when."""
    followed = Followed(optim.SGD(lr=0.5, momentum=0.5, staleness_aware=aware), dtype, 7)
    choose, steps, gone, gathered = np.random.default_rng(5), [0] * 7, set[int](), set[int]()
    for turn in range(150):
        client = int(choose.integers(7))
        if client in gone:
            continue
        if turn in (50, 90, 110):
            gone.add(client)
            if turn == 90:
                followed.ask(client, m.Finish)
            else:
                followed.head.lose(client, "was lost")
            continue
        steps[client] += 1
        rows = np.flatnonzero(choose.random(COUNT // 2) < 0.5).astype("<u4") if choose.random() < 0.4 else None
        values = choose.standard_normal(COUNT if rows is None else 2 * rows.size).astype(dtype)
        payloads = [memoryview(bytearray(values.tobytes()))]
        if rows is not None:
            payloads.insert(0, memoryview(rows.tobytes()))
        seen = max(0, followed.head.slots["k", 0].rounds - int(choose.integers(5)))
        count = -1 if rows is None else rows.size
        fields = ("k", 0, steps[client], "none", turn % 2 == 0, False, 0, count, False, 0, 0, 0, 0, seen)
        followed.ask(client, m.Push, *fields, payloads=payloads)
        gathered.add(followed.head.slots["k", 0].gathered)
        if turn % 11 == 0:
            followed.copy()
        if turn % 5 == 0:
            followed.follow()
            followed.compare()
    followed.follow()
    followed.compare()
    assert gathered == {0, 1, 2}
    assert followed.head.slots["k", 0].pushes == sum(steps)


def test_what_is_logged_stays_as_it_is() -> None:
    """Also a push whose memory is large enough to become the sum: it may still have to be sent to another server."""
    count = ADOPT_FROM_BYTES // 4
    records: list[Any] = []

    def log(entry: Any, payloads: tuple[np.ndarray, ...]) -> bool:
        records.append((entry, payloads))
        return True

    shard = Shard(0, STORE, "softsync:1", 3, log)
    shard.rounds.is_followed = lambda: True
    values = [whole_numbers(count, client) for client in range(3)]
    for client in range(3):
        shard.join(client, 1)
        start = [memoryview(bytes(4 * count))] if client == 0 else []
        shard.handle(client, route(client), m.Init(1, "k", 0, 1, count, [count], "float32"), start)
        rule = optim.Test(lr=-1.0)
        shard.handle(client, route(client), m.SetRule(2, 1, rule.name, rule.hyperparams()), [])
    for client, value in enumerate(values):
        frame = memoryview(bytearray(value.tobytes()))
        shard.handle(client, route(client), m.Push(3, "k", 0, 1, "none", False), [frame])
    np.testing.assert_array_equal(shard.slots["k", 0].value, np.sum(values, axis=0, dtype="f8"))
    logged = [payloads[0] for entry, payloads in records if isinstance(entry, entries.Single)]
    for value, payload in zip(values, logged, strict=True):
        np.testing.assert_array_equal(payload.view("f4"), value)
