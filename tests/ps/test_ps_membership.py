"""Clients that leave, die and come back: others are told what concerns them, and nobody waits for ever."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from ps_helpers import STORE, Machine, pushes_still_work, whole_numbers
from simulation.copies import of_shard

from kvmpi import optim
from kvmpi.errors import ClientLostError, ProtocolError
from kvmpi.ps import replay
from kvmpi.ps.shard import Shard
from kvmpi.wire import MAX_HEADER_BYTES, encode
from kvmpi.wire import messages as m

COUNT = 5


def leave(machine: Machine, client: int, how: str) -> None:
    if how == "bye":
        assert machine.ok(machine.send(client, m.Bye))
    else:
        machine.lose(client)


@pytest.mark.parametrize("how", ["bye", "lost"])
def test_others_who_wait_for_a_client_that_is_gone_are_told(how: str) -> None:
    machine = Machine("sync", 3)
    machine.init_all("k", whole_numbers(COUNT))
    pushes_still_work(machine)
    fused = machine.push(0, "k", 2, whole_numbers(COUNT, 0), fused=True)
    held = machine.push(2, "k", 2, whole_numbers(COUNT, 2))
    reader = machine.pull(0, "k", 2)
    waiting_for_all = machine.pull(0, "k", 1)
    assert machine.ok(waiting_for_all)
    leave(machine, 1, how)
    late = machine.pull(2, "k", 2)
    again = machine.push(0, "k", 2, whole_numbers(COUNT, 0), fused=True)
    asked = machine.send(0, m.Query, "k", 0, 2, request=fused)
    for request in (fused, held, reader, late, again, asked):
        error = machine.error(request)
        assert isinstance(error, ClientLostError)
        for part in ("'k'", "round 2", "client 1", "kv.join" if how == "bye" else "KVMPI_ON_CLIENT_LOSS"):
            assert part in str(error)
    np.testing.assert_array_equal(machine.read("k", 1, 2), np.sum(
        [whole_numbers(COUNT, 50, client, 1) for client in range(3)], axis=0, dtype="f8"))  # fmt: skip


def test_a_round_to_which_the_lost_client_has_contributed_is_completed() -> None:
    machine = Machine("sync", 2)
    machine.init_all("k", whole_numbers(COUNT))
    machine.push(0, "k", 1, whole_numbers(COUNT, 0))
    machine.lose(0)
    fused = machine.push(1, "k", 1, whole_numbers(COUNT, 1), fused=True)
    np.testing.assert_array_equal(machine.value(fused), whole_numbers(COUNT, 0) + whole_numbers(COUNT, 1))
    assert isinstance(machine.error(machine.push(1, "k", 2, whole_numbers(COUNT), fused=True)), ClientLostError)


@pytest.mark.parametrize("how", ["bye", "lost"])
def test_nobody_waits_for_a_value_that_client_0_took_with_it(how: str) -> None:
    machine = Machine("sync", 3)
    early = machine.init(1, "k", whole_numbers(COUNT))
    leave(machine, 0, how)
    late = machine.init(2, "k", whole_numbers(COUNT))
    for request in (early, late):
        assert isinstance(machine.error(request), ClientLostError)


@pytest.mark.parametrize(("mode", "policy"), [("sync", "shrink"), ("async", "fail")])
@pytest.mark.parametrize("how", ["bye", "lost"])
def test_where_others_go_on_without_client_0_the_lowest_that_is_there_gives_the_value(
    mode: str, policy: str, how: str
) -> None:
    machine = Machine(mode, 4, on_client_loss=policy)
    values = [whole_numbers(COUNT, client) for client in range(4)]
    early = {client: machine.init(client, "k", values[client]) for client in (2, 3)}
    leave(machine, 0, how)
    assert [machine.last(early[client]) for client in (2, 3)] == [None, None], "client 1 is there"
    early[1] = machine.init(1, "k", values[1])
    assert machine.last(early[1]) == m.Waiting(early[1], [1]), "it is asked for the value"
    leave(machine, 1, how)
    assert machine.last(early[2]) == m.Waiting(early[2], [2]), "now it is its turn"
    assert machine.last(machine.init(3, "k", values[3], gives=True, request=early[3])) == m.Waiting(early[3], [2])
    for client in (2, 3):
        assert machine.ok(machine.init(client, "k", values[client], gives=client == 2, request=early[client]))
        np.testing.assert_array_equal(machine.read("k", 0, client), values[2])


def test_another_process_of_client_0_gives_the_value_if_nobody_has() -> None:
    machine = Machine("sync", 2, on_client_loss="shrink")
    early = machine.init(1, "k", whole_numbers(COUNT, 1))
    machine.lose(0)
    assert machine.last(early) == m.Waiting(early, [1])
    assert machine.ok(machine.hello(0, 2, at=b"again"))
    machine.init(1, "k", whole_numbers(COUNT, 1), gives=True, request=early)
    assert machine.last(early) == m.Waiting(early, [0])
    machine.send(b"again", m.Init, "k", 0, 1, COUNT, [COUNT], "float32", payloads=[whole_numbers(COUNT, 0)])
    assert machine.ok(early)
    np.testing.assert_array_equal(machine.read("k", 0, 1), whole_numbers(COUNT, 0))


def test_where_others_wait_for_client_0_it_gives_the_value_when_it_is_back() -> None:
    machine = Machine("sync", 3, on_client_loss="wait")
    early = machine.init(1, "k", whole_numbers(COUNT, 1))
    machine.lose(0)
    machine.lose(2)
    late = machine.init(1, "other", whole_numbers(COUNT, 1))
    assert [machine.error(request) for request in (early, late)] == [None, None]
    assert machine.ok(machine.hello(0, 2, at=b"again"))
    for key in ("k", "other"):
        assert machine.ok(
            machine.send(b"again", m.Init, key, 0, 1, COUNT, [COUNT], "float32", payloads=[whole_numbers(COUNT, 0)])
        )
        np.testing.assert_array_equal(machine.read(key, 0, 1), whole_numbers(COUNT, 0))
    assert machine.ok(early)
    assert machine.ok(late)


def test_async_goes_on_without_a_client() -> None:
    machine = Machine("async", 2)
    machine.init_all("k", np.zeros(COUNT, "f4"))
    machine.rule(optim.Test(lr=-1.0))
    machine.lose(0)
    assert machine.ok(machine.push(1, "k", 1, np.ones(COUNT, "f4"), fused=True))
    assert isinstance(machine.last(machine.push(0, "k", 1, np.ones(COUNT, "f4"))), m.Moved)


def test_a_new_incarnation_of_an_async_client_counts_from_the_beginning() -> None:
    machine = Machine("async", 2)
    machine.init_all("k", np.zeros(COUNT, "f4"))
    rule = optim.Test(lr=-1.0)
    machine.rule(rule)
    for step in (1, 2):
        machine.push(0, "k", step, np.ones(COUNT, "f4"))
    assert machine.ok(machine.hello(0, 2, at=b"reborn"))
    assert isinstance(machine.error(machine.hello(0, 1)), ProtocolError)
    machine.lose(0, incarnation=1)  # the news of the old one comes late
    assert machine.ok(machine.send(b"reborn", m.SetRule, 1, rule.name, rule.hyperparams()))
    assert machine.ok(
        machine.send(b"reborn", m.Init, "k", 0, 1, COUNT, [COUNT], "float32", payloads=[bytes(4 * COUNT)])
    )
    for step in (1, 2):
        push = machine.send(b"reborn", m.Push, "k", 0, step, "none", True, payloads=[np.ones(COUNT, "f4")])
        np.testing.assert_array_equal(machine.value(push), np.full(COUNT, 2.0 + step))
    assert isinstance(machine.last(machine.pull(0, "k", 0)), m.Moved), "the old process is no longer heard"
    assert isinstance(machine.error(machine.hello(0, 1)), ProtocolError)


def test_a_new_incarnation_of_an_async_client_goes_on_where_it_was_if_somebody_may_wait_for_it() -> None:
    machine = Machine("async", 2, on_client_loss="wait")
    machine.init_all("k", np.zeros(COUNT, "f4"))
    machine.rule(optim.Test(lr=-1.0))
    said = {1: (-1, 0), 2: (-3, 1), 3: (4, 2)}  # another key was pushed in between
    for step, (at, done) in said.items():
        fields = ("k", 0, step, "none", False, False, 0, -1, False, at, done)
        assert machine.ok(machine.send(0, m.Push, *fields, payloads=[np.ones(COUNT, "f4")]))
    machine.push(1, "k", 1, np.full(COUNT, 10, "f4"))
    machine.lose(0)
    assert machine.ok(machine.hello(0, 2, at=b"reborn"))
    asked = machine.send(b"reborn", m.Init, "k", 0, 1, COUNT, [COUNT], "float32", payloads=[np.zeros(COUNT, "f4")])
    found = machine.last(asked)
    assert isinstance(found, m.Found)
    assert (found.version, found.at, found.done) == (3, {2: -3, 3: 4}, 2)
    for step, count in ((3, 13), (4, 14)):  # what is there is not added again
        push = machine.send(b"reborn", m.Push, "k", 0, step, "none", True, payloads=[np.ones(COUNT, "f4")])
        np.testing.assert_array_equal(machine.value(push), np.full(COUNT, count))


def test_a_new_incarnation_of_a_sync_client_is_refused_and_the_others_are_told() -> None:
    machine = Machine("sync", 2)
    machine.init_all("k", whole_numbers(COUNT))
    fused = machine.push(0, "k", 1, whole_numbers(COUNT), fused=True)
    again = machine.hello(1, 2, at=b"reborn")
    assert isinstance(machine.error(again), ClientLostError)
    assert isinstance(machine.error(fused), ClientLostError)
    assert machine.ok(machine.send(0, m.Bye))
    assert not machine.state.parts[0].shards, "nobody is left for whom the store is kept"


def test_the_same_client_may_come_back_on_another_route() -> None:
    machine = Machine("sync", 2)
    machine.init_all("k", whole_numbers(COUNT))
    machine.push(0, "k", 1, whole_numbers(COUNT, 0))
    assert machine.ok(machine.hello(1, 1, at=b"elsewhere"))
    assert machine.ok(machine.send(b"elsewhere", m.Push, "k", 0, 1, "none", True, payloads=[whole_numbers(COUNT, 1)]))
    np.testing.assert_array_equal(machine.read("k", 1), whole_numbers(COUNT, 0) + whole_numbers(COUNT, 1))


def test_a_loss_before_the_store_was_opened_is_remembered() -> None:
    machine = Machine("sync", 2, hello=False)
    machine.lose(1)
    assert machine.ok(machine.hello(0))
    machine.init(0, "k", whole_numbers(COUNT))
    assert isinstance(machine.error(machine.push(0, "k", 1, whole_numbers(COUNT), fused=True)), ClientLostError)
    assert isinstance(machine.error(machine.hello(1)), ClientLostError)


@pytest.mark.parametrize("how", ["bye", "lost"])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_store_that_everyone_has_left_is_forgotten(mode: str, how: str) -> None:
    machine = Machine(mode, 3)
    machine.init_all("k", whole_numbers(COUNT))
    for client in range(3):
        assert machine.state.parts[0].shards
        leave(machine, client, how)
    state = machine.state
    assert [*state._sessions, *state._routes] == []
    # No round of an asynchronous store fails for want of a client: one that is lost may come back.
    assert bool(state.parts[0].shards) == (mode == "async" and how == "lost")
    assert machine.ok(machine.send(0, m.Bye))


def test_two_stores_do_not_see_each_other() -> None:
    machines = [Machine("sync", 1, hello=False), Machine("async", 2, hello=False)]
    state = machines[0].state
    for number, machine in enumerate(machines):
        machine.state = state
        for client in range(machine.num_clients):
            assert machine.ok(machine.hello(client, store=number, at=f"{number}/{client}".encode()))
    for number in range(2):
        machine = machines[number]
        at = f"{number}/0".encode()
        value = whole_numbers(COUNT, number)
        assert machine.ok(machine.send(at, m.Init, "k", 0, 1, COUNT, [COUNT], "float32", payloads=[value]))
    for number in range(2):
        got = machines[number].value(machines[number].send(f"{number}/0".encode(), m.Pull, "k", 0, 0))
        np.testing.assert_array_equal(got, whole_numbers(COUNT, number))
    machines[0].lose(0, store=0)
    assert list(state.parts[0].shards) == [1]


def copy_of(shard: Shard, policy: str = "fail") -> Shard:
    """What a server has that joins the chain."""
    copy = Shard(1, STORE, shard.mode, shard.num_clients, lambda *_: False, policy)
    for entry, arrays in replay.dump(shard)[1:]:
        replay.apply(copy, entry, [memoryview(array.tobytes()) for array in arrays], keep=False)
    return copy


@pytest.mark.parametrize(
    ("mode", "policy"), [("sync", "shrink"), ("sync", "wait"), ("async", "wait"), ("ssp:2", "wait")]
)
def test_a_copy_of_a_store_knows_what_has_become_of_its_clients(mode: str, policy: str) -> None:
    """Whatever they do, in whatever order."""
    done: Counter[str] = Counter()
    for seed in range(25):
        choose, machine = random.Random(seed), Machine(mode, 3, on_client_loss=policy)
        machine.rule(optim.Test(lr=-1.0))
        machine.init_all(0, whole_numbers(COUNT))
        processes, steps, num_keys = [1, 1, 1], [0, 0, 0], 1
        for _ in range(40):
            client, what = (
                choose.randrange(3),
                choose.choice(["lose", "begin", "return", "enter", "finish", "push", "key"]),
            )
            if what == "lose":
                machine.lose(client, processes[client])
            elif what == "begin":
                processes[client], steps[client] = processes[client] + 1, 0
                machine.hello(client, processes[client])
            elif what == "return":
                machine.send(client, m.Return)
            elif what == "enter":
                machine.send(client, m.Enter, choose.randrange(6))
            elif what == "finish" and choose.random() < 0.3:
                machine.send(client, m.Finish)
            elif what == "push":
                steps[client] += 1
                machine.push(client, 0, steps[client], whole_numbers(COUNT, client))
            elif what == "key":
                machine.init(client, num_keys, whole_numbers(COUNT), gives=True)
                num_keys += 1
            if (shard := machine.state.parts[0].shards.get(STORE)) is None:
                break
            assert of_shard(copy_of(shard, policy)) == of_shard(shard), f"seed {seed}, after {what}"
            clients = shard.clients
            done.update({
                "gone": len(clients.gone), "entering": len(clients.entering), "entered": len(clients.entered),
                "finished": len(clients.finished), "guest": sum(map(clients.is_guest, range(3))),
            })  # fmt: skip
    kinds = ["gone", "finished", *(("entering", "entered", "guest") if policy == "shrink" else ())]
    assert min(done[kind] for kind in kinds) > 50, done


def test_a_store_is_kept_for_a_client_that_is_back_when_the_last_of_the_others_leaves() -> None:
    machine = Machine("sync", 2, on_client_loss="shrink")
    machine.init_all("k", whole_numbers(COUNT))
    machine.lose(1)
    assert machine.ok(machine.hello(1, 2, at=b"again"))
    assert machine.ok(machine.send(0, m.Bye))
    np.testing.assert_array_equal(machine.value(machine.send(b"again", m.Pull, "k", 0, 0)), whole_numbers(COUNT))


def test_when_a_process_before_has_entered_is_of_no_account_for_new_keys() -> None:
    machine = Machine("sync", 2, on_client_loss="shrink")
    machine.init_all("k", whole_numbers(COUNT))
    for incarnation in (2, 3):
        machine.lose(1, incarnation - 1)
        assert machine.ok(machine.hello(1, incarnation))
        assert machine.ok(machine.send(1, m.Return))
        if incarnation == 2:
            assert machine.ok(machine.send(1, m.Enter, 3))
    assert machine.ok(machine.init(0, "new", whole_numbers(COUNT)))
    pushed = machine.push(0, "new", 1, whole_numbers(COUNT, 0), fused=True)
    assert isinstance(machine.last(pushed), m.Accepted), "rounds wait until it has said when it enters"
    assert machine.ok(machine.send(1, m.Enter, 1))
    np.testing.assert_array_equal(machine.value(pushed), whole_numbers(COUNT, 0))


def test_a_copy_of_a_store_knows_how_a_round_has_failed() -> None:
    @optim.register("fails before it is copied")
    class Fails(optim.Test):
        def compute(self, b: Any) -> None:
            raise ValueError("on purpose")

    machine = Machine("sync", 2)
    machine.init_all("k", whole_numbers(COUNT))
    machine.rule(Fails())
    for client in range(2):
        machine.push(client, "k", 1, whole_numbers(COUNT, client))
    shard = machine.state.parts[0].shards[STORE]
    assert "on purpose" in str(shard.slots["k", 0].failed)
    assert of_shard(copy_of(shard)) == of_shard(shard)


def test_a_copy_of_a_store_knows_which_keys_were_in_its_snapshot_however_many() -> None:
    machine = Machine("sync", 1)
    shard = machine.state.parts[0].shards[STORE]
    shard.saved = frozenset([*range(3000), *(f"the key number {i}, of a long name" for i in range(6000))])
    lengths = [len(encode(m.Log(0, 1, 1, 0, entry))) for entry, _ in replay.dump(shard)]
    assert sum(lengths) > 3 * MAX_HEADER_BYTES // 4
    assert max(lengths) <= MAX_HEADER_BYTES // 2, "what is said of one entry fits"
    assert len(lengths) < 10
    assert copy_of(shard).saved == shard.saved
