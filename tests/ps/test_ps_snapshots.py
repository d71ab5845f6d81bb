"""What is copied when, and how a server goes on from a snapshot."""

from __future__ import annotations

import gc
import itertools
import logging
import weakref
from pathlib import Path

import numpy as np
import pytest
from ps_helpers import STORE, Machine, random_floats, round_of, stored, whole_numbers

from kvmpi import optim
from kvmpi.errors import ConfigError, DTypeMismatchError, ShapeMismatchError
from kvmpi.ps import snapshot_files as files
from kvmpi.ps.snapshots import PartCopy, ServerSnapshots, Taking
from kvmpi.wire import messages as m

COUNT = 9
CLIENTS = 2


def snapshots(machine: Machine) -> ServerSnapshots:
    assert machine.state.snapshots is not None
    return machine.state.snapshots


def news(machine: Machine) -> list[tuple[int, str]]:
    found = [(one.number, one.stage) for one in snapshots(machine).take_messages() if isinstance(one, m.SnapshotNews)]
    assert all(stage in ("begun", "written", "dropped", "missed") for _, stage in found)
    return found


def taken(machine: Machine) -> Taking:
    taking = snapshots(machine).take_ready()
    assert taking is not None
    assert taking.parts is not None
    return taking


def part_of(taking: Taking) -> PartCopy:
    assert taking.parts is not None
    return taking.parts[0]


def value_of(taking: Taking, key: str = "k", store: int = STORE) -> np.ndarray:
    (chunk,) = (chunk for chunk in part_of(taking)[store].chunks if chunk.key == key)
    return chunk.arrays["value"]


def state_of(machine: Machine) -> dict[str, bytes]:
    """Everything that a client can learn of the key, and how many updates it has."""
    reply = machine.replies[machine.send(0, m.GetState, "k", 0)][-1]
    assert isinstance(reply.message, m.State)
    arrays = {name: a.tobytes() for name, a in zip(reply.message.names, reply.payloads, strict=True)}
    return {**arrays, "updates": str(reply.message.updates).encode()}


def step(machine: Machine, number: int, key: str = "k") -> None:
    for client in range(machine.num_clients):
        machine.push(client, key, number, np.full(COUNT, 1.0 + client, "f4"))


# ---- going on


@pytest.mark.parametrize("stops", [[20], [5, 10, 35]], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("rule", [
    optim.SGD(lr=0.1, momentum=0.9, multi_precision=True), optim.Adam(lr=0.01, multi_precision=True),
    optim.Adam(lr=0.01), optim.Outer(),
], ids=repr)  # fmt: skip
def test_forty_rounds_are_the_same_with_resumes_in_between(
    rule: optim.Rule, dtype: str, stops: list[int], tmp_path: Path
) -> None:
    def begin(resumed: tuple[int, PartCopy, dict[int, int]] | None) -> Machine:
        machine = Machine("sync", CLIENTS, every=5, resumed=resumed)
        first = random_floats(COUNT, 0, 0 if resumed is None else 1)  # what a resumed job says does not count
        machine.init_all("k", stored(first, dtype), dtype)
        machine.rule(rule)
        return machine

    def go_on(machine: Machine, first: int, last: int) -> None:
        for number in range(first + 1, last + 1):
            values = [stored(random_floats(COUNT, number, client), dtype) for client in range(CLIENTS)]
            round_of(machine, number - first, values)

    whole = begin(None)
    go_on(whole, 0, 40)
    machine, at = begin(None), 0
    for stop in stops:
        go_on(machine, at, stop - 1)
        if (ready := snapshots(machine).take_ready()) is not None:  # one that came before, and is written by now
            snapshots(machine).written(ready, [])
        go_on_from = stop - 1
        values = [stored(random_floats(COUNT, stop, client), dtype) for client in range(CLIENTS)]
        round_of(machine, go_on_from + 1 - at, values)
        taking = taken(machine)
        assert taking.number == stop
        assert taking.steps == {STORE: stop}
        machine.push(0, "k", stop + 1 - at, stored(random_floats(COUNT, 77), dtype))  # an open round dies with the job
        files.write_part(str(tmp_path), stop, 0, part_of(taking))
        machine, at = begin((stop, files.read_part(str(tmp_path), stop, 0), taking.steps)), stop
    go_on(machine, at, 40)
    assert state_of(machine) == state_of(whole)


def two_rounds(rule: optim.Rule) -> PartCopy:
    """What a snapshot after two rounds has."""
    machine = Machine("sync", CLIENTS, every=2)
    machine.init_all("k", whole_numbers(COUNT))
    machine.rule(rule)
    step(machine, 1)
    step(machine, 2)
    return part_of(taken(machine))


def resumed(rule: optim.Rule, clients: int = CLIENTS) -> tuple[Machine, np.ndarray]:
    """A machine that goes on from two rounds, and the value that it begins with."""
    copy = two_rounds(rule)
    value = copy[STORE].chunks[0].arrays["value"].copy()
    return Machine("sync", clients, every=2, resumed=(2, copy, {STORE: 2})), value


def test_the_same_rule_keeps_its_state_and_takes_other_hyperparameters() -> None:
    machine, value = resumed(optim.SGD(lr=1.0, momentum=0.5))
    machine.init_all("k", np.zeros(COUNT, "f4"))
    np.testing.assert_array_equal(machine.read("k"), value)
    machine.rule(optim.SGD(lr=2.0, momentum=0.5))
    step(machine, 1)
    # Pushes add up to 3 in each round; momentum 3, 4.5, 5.25.
    np.testing.assert_array_equal(machine.read("k", 1), value - 2.0 * 5.25)
    assert machine.slot("k").updates == 3


def test_without_a_choice_the_rule_of_the_snapshot_stays() -> None:
    machine, value = resumed(optim.SGD(lr=1.0, momentum=0.5))
    machine.init_all("k", np.zeros(COUNT, "f4"))
    step(machine, 1)
    np.testing.assert_array_equal(machine.read("k", 1), value - 5.25)


@pytest.mark.parametrize("choices", [[optim.Adagrad(lr=1.0)], [optim.SGD(lr=1.0), optim.SGD(lr=1.0, momentum=0.5)]])
@pytest.mark.parametrize("clients", [CLIENTS, 3])
def test_another_rule_and_a_second_choice_begin_empty(clients: int, choices: list[optim.Rule]) -> None:
    machine, value = resumed(optim.SGD(lr=1.0, momentum=0.5), clients)
    machine.init_all("k", np.zeros(COUNT, "f4"))
    for ordinal, rule in enumerate(choices, start=1):
        machine.rule(rule, ordinal)
    step(machine, 1)
    assert machine.slot("k").updates == 1
    if len(choices) > 1:
        np.testing.assert_array_equal(machine.read("k", 1), value - sum(range(1, clients + 1)))


def test_init_checks_what_the_snapshot_has() -> None:
    machine, _ = resumed(optim.SGD(lr=1.0))
    error = machine.error(machine.init(0, "k", whole_numbers(COUNT + 1)))
    assert isinstance(error, ShapeMismatchError)
    assert "the snapshot has" in str(error)
    assert isinstance(machine.error(machine.init(0, "k", whole_numbers(COUNT), "float64")), DTypeMismatchError)
    # A chunk that the snapshot has not, of a key that it has: the key was cut or placed in another way.
    for client in range(CLIENTS):
        error = machine.error(machine.init(client, "k", whole_numbers(COUNT), chunk=1, num_chunks=1))
        assert isinstance(error, ConfigError)
        assert "KVMPI_PLACEMENT" in str(error)
    assert machine.ok(machine.init(0, "new", whole_numbers(COUNT)))


def test_the_number_of_clients_may_change() -> None:
    machine, value = resumed(optim.SGD(lr=1.0), clients=3)
    machine.init_all("k", np.zeros(COUNT, "f4"))
    machine.rule(optim.SGD(lr=1.0))
    step(machine, 1)
    np.testing.assert_array_equal(machine.read("k", 1), value - 6.0)


# ---- what is copied, and when


def begin(every: int = 2, keys: str = "ab", mode: str = "sync") -> Machine:
    machine = Machine(mode, CLIENTS, every=every)
    for key in keys:
        machine.init_all(key, np.zeros(COUNT, "f4"))
    machine.rule(optim.SGD(lr=1.0))
    return machine


def test_every_chunk_is_copied_at_its_own_time() -> None:
    machine = begin()
    for number in (1, 2, 3):
        step(machine, number, "a")
    assert news(machine) == [(2, "begun")]
    step(machine, 1, "b")
    assert snapshots(machine).take_ready() is None
    step(machine, 2, "b")
    step(machine, 3, "b")
    taking = taken(machine)
    assert taking.number == 2
    assert taking.steps == {STORE: 2}
    for key in "ab":
        np.testing.assert_array_equal(value_of(taking, key), np.full(COUNT, -6.0))
        np.testing.assert_array_equal(machine.read(key, 3), np.full(COUNT, -9.0))
    snapshots(machine).written(taking, [m.PartFile(0, 5, 7)])
    assert [(one.files, one.steps) for one in snapshots(machine).take_messages()] == [  # type: ignore[attr-defined]
        ([m.PartFile(0, 5, 7)], {STORE: 2})
    ]
    for key in "ab":
        step(machine, 4, key)
    assert taken(machine).number == 4


def test_a_key_that_comes_late_is_waited_for() -> None:
    machine = begin(keys="a")
    snapshots(machine).begin(4)
    for number in (1, 2):
        step(machine, number, "a")
    machine.init_all("b", np.zeros(COUNT, "f4"))
    for number in (3, 4):
        step(machine, number, "a")
    assert snapshots(machine).take_ready() is None
    for number in (1, 2, 3, 4):
        step(machine, number, "b")
    assert {chunk.key for chunk in part_of(taken(machine))[STORE].chunks} == {"a", "b"}


def test_while_one_is_written_no_other_begins(caplog: pytest.LogCaptureFixture) -> None:
    machine = begin(keys="a")
    for number in range(1, 41):
        step(machine, number, "a")
    taking = taken(machine)
    assert taking.number == 2
    assert news(machine) == [(2, "begun"), *((number, "dropped") for number in range(4, 41, 2))]
    assert snapshots(machine).take_ready() is None
    assert 1 <= len(caplog.records) <= 5  # not one for each
    snapshots(machine).written(taking, None)
    assert news(machine) == [(2, "dropped")]
    step(machine, 41, "a")
    step(machine, 42, "a")
    assert taken(machine).number == 42


def test_a_key_that_stays_behind_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    """If clients do not say to which steps pushes belong; others have the time to say it."""
    machine = begin()
    for number in range(1, 13):
        step(machine, number, "a")
        snapshots(machine).hear_done({})
    assert snapshots(machine).take_ready() is None
    named = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "key 'b' of store 1 is at step 0, and its clients are done with step 0, while others are at 10" in named[0]
    assert len(named) == 1
    dropped = [(number, "dropped") for number in (4, 6, 8)]
    assert news(machine) == [(2, "begun"), *dropped, (2, "dropped"), (10, "begun"), (12, "dropped")]


def put(machine: Machine, key: str, value: float) -> None:
    assert machine.ok(machine.send(0, m.PutState, key, 0, 0, ["value"], payloads=[np.full(COUNT, value, "f4")]))


@pytest.mark.parametrize("copied", ["", "a", "ab"])
def test_what_is_put_back_between_two_copies_is_in_none_or_the_snapshot_is_missed(copied: str) -> None:
    machine = begin(every=0)
    snapshots(machine).begin(2)
    for number in (1, 2):
        for key in copied:
            step(machine, number, key)
    for key in "ab":
        put(machine, key, 100.0)
    if copied == "ab":
        expected = -6.0
    else:
        machine.state.hear_done({STORE: 2})
        assert news(machine) == [(2, "begun"), (2, "missed")]
        assert snapshots(machine).take_ready() is None
        snapshots(machine).begin(4, 2)
        machine.state.hear_done({STORE: 4})
        expected = 100.0
    taking = taken(machine)
    assert [value_of(taking, key)[0] for key in "ab"] == [expected, expected]


def test_a_server_that_hears_of_a_snapshot_after_values_were_put_back_misses_it() -> None:
    """Others may have copied what was there before."""
    machine = begin(every=0, keys="a")
    put(machine, "a", 0.0)
    step(machine, 1, "a")
    step(machine, 2, "a")
    put(machine, "a", 100.0)
    snapshots(machine).begin(2)
    assert news(machine) == [(2, "missed")]
    snapshots(machine).begin(3)
    step(machine, 3, "a")
    np.testing.assert_array_equal(value_of(taken(machine), "a"), np.full(COUNT, 97.0))


def test_what_has_gone_too_far_is_left_out() -> None:
    machine = begin(every=0, keys="a")
    step(machine, 1, "a")
    step(machine, 2, "a")
    snapshots(machine).begin(1)
    assert news(machine) == [(1, "missed")]
    snapshots(machine).begin(2)  # just there
    np.testing.assert_array_equal(value_of(taken(machine), "a"), np.full(COUNT, -6.0))


def test_a_server_with_nothing_is_done_at_once() -> None:
    machine = Machine("sync", CLIENTS, every=5)
    snapshots(machine).begin(5)
    assert part_of(taken(machine))[STORE].chunks == []
    snapshots(machine).begin(5)
    assert snapshots(machine).take_ready() is None


def test_a_key_that_is_made_while_a_snapshot_is_ahead_is_in_it() -> None:
    """Also where there was none: on the whole server, or in one of its parts; and where servers begin by themselves."""
    for made_before, every in itertools.product(((), (0,)), (0, 2)):
        machine = Machine("sync", CLIENTS, every=every, parts=2)
        for part in made_before:
            machine.init_all("w", np.zeros(COUNT, "f4"), part=part)
        snapshots(machine).begin(2, ahead=True)  # by the scheduler
        machine.init_all("k", np.zeros(COUNT, "f4"), part=1)
        for number in (1, 2):
            for key in [*(["w"] if made_before else []), "k"]:
                step(machine, number, key)
        machine.state.hear_done({STORE: 2})
        (chunk,) = (taken(machine).parts or {})[1][STORE].chunks
        np.testing.assert_array_equal(chunk.arrays["value"], np.full(COUNT, 3.0))


def test_a_server_without_keys_waits_until_none_can_come() -> None:
    machine = Machine("sync", CLIENTS, every=0)
    snapshots(machine).begin(5, ahead=True)
    for _ in range(20):
        machine.state.hear_done({STORE: 4})
    assert snapshots(machine).take_ready() is None
    machine.state.hear_done({STORE: 5})
    assert part_of(taken(machine))[STORE].chunks == []


def test_a_store_that_nobody_pushes_holds_no_snapshot_up() -> None:
    machine = begin(every=0, keys="a")
    for client in range(CLIENTS):
        assert machine.ok(machine.hello(client, store=STORE + 1, at=b"idle %d" % client))
    snapshots(machine).begin(1, ahead=True)
    step(machine, 1, "a")
    for _ in range(20):
        machine.state.hear_done({STORE: 1})
    assert part_of(taken(machine))[STORE + 1].chunks == []


def test_a_store_that_is_pushed_after_it_was_taken_for_one_that_nobody_pushes_gives_the_snapshot_up() -> None:
    """The first step took long, and its key is made late: elsewhere others are in the snapshot."""
    machine = Machine("sync", CLIENTS, every=0)
    snapshots(machine).begin(3, ahead=True)
    for _ in range(8):
        machine.state.hear_done({STORE: 0})
    assert part_of(taken(machine))[STORE].chunks == []
    assert [news.stage for news in snapshots(machine).take_messages()] == ["begun"]
    machine.init_all("k", np.zeros(COUNT, "f4"))
    step(machine, 1, "k")
    step(machine, 2, "k")
    told = [(news.number, news.stage) for news in snapshots(machine).take_messages()]
    assert told == [(3, "missed")]


def test_what_all_clients_have_left_before_it_was_copied_is_in_no_snapshot() -> None:
    machine = begin(every=0, keys="a")
    step(machine, 1, "a")
    snapshots(machine).begin(3, ahead=True)
    for client in range(CLIENTS):
        machine.send(client, m.Bye, 1)
    assert not machine.state.parts[0].shards
    assert snapshots(machine).take_ready() is None
    assert news(machine) == [(3, "begun"), (3, "dropped")]
    snapshots(machine).begin(5)  # this server knows no store any more, and says so
    assert taken(machine).stores == []


def test_asynchronous_stores_are_copied_as_they_are() -> None:
    machine = begin(every=2, mode="async")
    for number in (1, 2):
        step(machine, number, "a")
    taking = taken(machine)
    assert (taking.number, taking.steps) == (2, {STORE: 0})  # nothing of "b" yet
    np.testing.assert_array_equal(value_of(taking, "a"), np.full(COUNT, -6.0))
    snapshots(machine).written(taking, [])
    for number in (1, 2, 3):
        step(machine, number, "b")
    snapshots(machine).begin(7)
    taking = taken(machine)
    assert (taking.number, taking.steps) == (7, {STORE: 2})  # the fewest updates, 4, of 2 clients
    copy = part_of(taking)
    again = Machine("async", CLIENTS, every=4, resumed=(7, copy, taking.steps))
    for key in "ab":
        again.init_all(key, np.zeros(COUNT, "f4"))
    again.rule(optim.SGD(lr=1.0))
    np.testing.assert_array_equal(again.read("b"), np.full(COUNT, -9.0))
    step(again, 1, "a")
    taking = taken(again)
    assert (taking.number, taking.steps) == (8, {STORE: 2})  # nothing of "b" since


def test_what_is_put_back_in_an_asynchronous_store_keeps_no_snapshot_out() -> None:
    """It has more updates than steps: by their number all that come next would be too late."""
    machine = begin(every=0, keys="a", mode="async")
    for number in (1, 2):
        step(machine, number, "a")
    put(machine, "a", 100.0)
    snapshots(machine).begin(3)
    np.testing.assert_array_equal(value_of(taken(machine), "a"), np.full(COUNT, 100.0))


def test_beside_a_synchronous_store_an_asynchronous_one_does_not_say_when() -> None:
    machine = begin(every=2, keys="a")
    beside = {client: b"beside %d" % client for client in range(CLIENTS)}
    for client, at in beside.items():
        assert machine.ok(machine.hello(client, store=STORE + 1, mode="async", at=at))
    shape = (0, 1, COUNT, [COUNT], "float32")
    for at in beside.values():
        first = [np.zeros(COUNT, "f4")] if at == beside[0] else []
        assert machine.ok(machine.send(at, m.Init, "x", *shape, payloads=first))
        assert machine.ok(machine.send(at, m.SetRule, 1, "sgd", {"lr": 1.0}))

    def push_beside(numbers: range) -> None:
        for number in numbers:
            for at in beside.values():
                value = np.full(COUNT, 1.0, "f4")
                machine.send(at, m.Push, "x", 0, number, "none", False, False, 0, -1, False, payloads=[value])

    push_beside(range(1, 12))
    assert snapshots(machine).round() == 0
    step(machine, 1, "a")
    step(machine, 2, "a")
    assert news(machine) == [(2, "begun")]
    assert {store: one.step for store, one in part_of(taken(machine)).items()} == {STORE: 2, STORE + 1: 11}
    push_beside(range(12, 14))
    assert snapshots(machine).round() == 2
    assert news(machine) == []


def test_an_asynchronous_store_that_comes_while_a_snapshot_is_taken_is_in_it() -> None:
    machine = begin(every=0, keys="a")
    snapshots(machine).begin(1)
    assert machine.ok(machine.hello(0, store=STORE + 1, mode="async", num_clients=1, at=b"late"))
    assert machine.ok(
        machine.send(b"late", m.Init, "x", 0, 1, COUNT, [COUNT], "float32", payloads=[np.zeros(COUNT, "f4")])
    )
    assert machine.ok(machine.send(b"late", m.SetRule, 1, "sgd", {"lr": 1.0}))
    step(machine, 1, "a")
    assert snapshots(machine).take_ready() is None
    machine.send(b"late", m.Push, "x", 0, 1, "none", False, False, 0, -1, False, payloads=[np.full(COUNT, 5.0, "f4")])
    np.testing.assert_array_equal(value_of(taken(machine), "x", STORE + 1), np.full(COUNT, -5.0))


def test_a_store_that_nobody_has_opened_again_is_passed_on() -> None:
    copy = two_rounds(optim.SGD(lr=1.0))
    value = copy[STORE].chunks[0].arrays["value"].copy()
    machine = Machine("sync", CLIENTS, hello=False, every=2, resumed=(2, copy, {STORE: 2}))
    for client in range(CLIENTS):
        assert machine.ok(machine.hello(client, store=STORE + 1))
    snapshots(machine).begin(4)
    taking = taken(machine)
    np.testing.assert_array_equal(value_of(taking), value)
    assert taking.steps == {STORE: 2}


def test_other_heads_end_what_is_half_copied() -> None:
    machine = begin()
    step(machine, 1, "a")
    step(machine, 2, "a")
    view = m.View(machine.state.epoch + 1, 0, [m.Chain(2, [1])], [m.ServerInfo(1, 1, "host", [])], [])
    machine.state.adopt(view)
    assert news(machine) == [(2, "begun"), (2, "dropped")]


def test_a_server_goes_back_to_a_nearer_snapshot() -> None:
    machine = begin(every=0, keys="a")
    snapshots(machine).begin(5000)
    for _ in range(2):  # a word that comes twice changes nothing
        snapshots(machine).begin(2, 5000)
    step(machine, 1, "a")
    step(machine, 2, "a")
    assert news(machine) == [(5000, "begun"), (2, "begun")]
    taking = taken(machine)
    assert taking.number == 2
    snapshots(machine).written(taking, [])
    snapshots(machine).begin(4, 5000)
    assert news(machine) == [(2, "written"), (4, "begun")]


def test_hyperparameters_by_key_stay(tmp_path: Path) -> None:
    """A key's own without a choice, and those of the choice where there is one, with the state that was there."""
    rule = optim.SGD(lr=1.0, momentum=0.5).for_keys([4], lr=3.0)
    machine = Machine("sync", 1, every=2)
    for key in (3, 4):
        machine.init_all(key, np.zeros(COUNT, "f4"))
    machine.rule(rule)
    for number in (1, 2):
        for key in (3, 4):
            machine.push(0, key, number, np.ones(COUNT, "f4"))
    files.write_part(str(tmp_path), 2, 0, part_of(taken(machine)))
    for choice, rates in ((None, (1.0, 3.0)), (rule.with_hyperparams(**{"lr@4": 7.0}), (1.0, 7.0))):
        machine = Machine("sync", 1, every=2, resumed=(2, files.read_part(str(tmp_path), 2, 0), {STORE: 2}))
        if choice is not None:
            machine.rule(choice)
        for key, rate, before in zip((3, 4), rates, (1.0, 3.0), strict=True):
            machine.init_all(key, np.zeros(COUNT, "f4"))
            machine.push(0, key, 1, np.ones(COUNT, "f4"))
            np.testing.assert_array_equal(machine.read(key, 1), np.full(COUNT, -2.5 * before - 1.75 * rate, "f4"))


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_values_of_a_store_that_all_have_left_are_no_garbage_that_waits_to_be_collected(mode: str) -> None:
    """Nothing tells the garbage collector how large they are."""
    machine = begin(keys="a", mode=mode)
    for number in (1, 2):
        step(machine, number, "a")
    assert taken(machine).number == 2
    gc.disable()
    try:
        gone = weakref.ref(machine.slot("a").value)
        for client in range(CLIENTS):
            assert machine.ok(machine.send(client, m.Bye))
        assert gone() is None
    finally:
        gc.enable()
