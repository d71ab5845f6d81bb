"""Rounds without a client: they fail, wait for its return, or go on; and clients that have no more to push."""

from __future__ import annotations

import numpy as np
import pytest
from ps_helpers import Machine, round_of, route, whole_numbers
from simulation.cluster import Cluster
from simulation.network import Faults, Network, Program

from kvmpi import optim
from kvmpi.config import Config
from kvmpi.errors import ClientLostError, ProtocolError
from kvmpi.wire import messages as m

COUNT = 5


def pushed(client: int, step: int) -> np.ndarray:
    return whole_numbers(COUNT, client, step)


def machine_with(policy: str, num_clients: int = 3, replicas: int = 0) -> Machine:
    machine = Machine("sync", num_clients, on_client_loss=policy, replicas=replicas)
    machine.init_all("k", whole_numbers(COUNT))
    return machine


def sum_of(clients: list[int], step: int) -> np.ndarray:
    return np.sum([pushed(client, step) for client in clients], axis=0, dtype="f8")


@pytest.mark.parametrize("replicas", [0, 1])
def test_shrink_closes_the_open_round_and_all_that_follow_without_the_lost(replicas: int) -> None:
    machine = machine_with("shrink", replicas=replicas)
    fused = [machine.push(client, "k", 1, pushed(client, 1), fused=True) for client in (0, 2)]
    assert all(machine.value(request) is None for request in fused if machine.last(request) is not None)
    machine.lose(1)
    for request in fused:
        np.testing.assert_array_equal(machine.value(request), sum_of([0, 2], 1))
    for step in (2, 3):
        for client in (2, 0):
            machine.push(client, "k", step, pushed(client, step))
        np.testing.assert_array_equal(machine.read("k", step), sum_of([0, 2], step))


# ---- clients that were left out, and are back


def reborn(machine: Machine, client: int, at: bytes = b"reborn", incarnation: int = 2) -> bytes:
    assert machine.ok(machine.hello(client, incarnation, at=at))
    return at


def comes_back(machine: Machine, at: bytes) -> int:
    """The last round that does not wait for the client."""
    passed = machine.last(machine.send(at, m.Return))
    assert isinstance(passed, m.Ack)
    return passed.version


def test_a_client_that_is_back_is_in_all_rounds_after_its_entry() -> None:
    machine = machine_with("shrink")
    machine.init_all("j", np.zeros(COUNT, "f4"))
    machine.lose(1)
    for step in (1, 2):
        for client in (0, 2):
            machine.push(client, "k", step, pushed(client, step))
    machine.push(0, "j", 1, pushed(0, 1))
    machine.push(2, "j", 1, pushed(2, 1))
    machine.push(0, "k", 3, pushed(0, 3))
    at = reborn(machine, 1)
    early = machine.send(at, m.Push, "k", 0, 1, "none", False, payloads=[pushed(1, 1)])
    assert isinstance(machine.error(early), ProtocolError), "it has not entered"
    machine.push(2, "k", 3, pushed(2, 3))
    np.testing.assert_array_equal(machine.read("k", 3), sum_of([0, 2], 3), "nobody waits for a guest")
    assert comes_back(machine, at) == 3
    for key, step in (("k", 4), ("j", 2)):
        for client in (0, 2):
            machine.push(client, key, step, pushed(client, step))
    assert machine.value(machine.pull(0, "k", 4)) is None, "it is not known yet which round is its first"
    assert machine.value(machine.pull(0, "j", 2)) is None
    assert machine.ok(machine.send(at, m.Enter, 3))
    np.testing.assert_array_equal(machine.read("j", 2), sum_of([0, 2], 2), "rounds before that are over")
    for client in (0, 2):
        machine.push(client, "j", 3, pushed(client, 3))
    np.testing.assert_array_equal(machine.read("j", 3), sum_of([0, 2], 3))
    for key in ("k", "j"):
        found = machine.send(at, m.Init, key, 0, 1, COUNT, [COUNT], "float32")
        assert machine.last(found) == m.Ack(found, 3)
    held = machine.send(at, m.Push, "k", 0, 4, "none", True, payloads=[pushed(1, 4)])
    np.testing.assert_array_equal(machine.value(held), sum_of([0, 1, 2], 4))
    machine.send(at, m.Return)
    machine.send(at, m.Enter, 9)  # said again, and late
    for client in (0, 2):
        machine.push(client, "k", 5, pushed(client, 5))
    assert machine.value(machine.pull(0, "k", 5)) is None
    held = machine.send(at, m.Push, "k", 0, 5, "none", True, payloads=[pushed(1, 5)])
    np.testing.assert_array_equal(machine.value(held), sum_of([0, 1, 2], 5))


def test_its_push_may_come_while_rounds_before_its_entry_are_open() -> None:
    machine = machine_with("shrink")
    machine.lose(0)
    machine.push(1, "k", 1, pushed(1, 1))
    at = reborn(machine, 0)
    comes_back(machine, at)
    machine.send(at, m.Enter, 2)
    held = machine.send(at, m.Push, "k", 0, 3, "none", True, payloads=[pushed(0, 3)])
    machine.push(2, "k", 1, pushed(2, 1))
    np.testing.assert_array_equal(machine.read("k", 1, client=2), sum_of([1, 2], 1))
    for step in (2, 3):
        for client in (1, 2):
            machine.push(client, "k", step, pushed(client, step))
    np.testing.assert_array_equal(machine.value(held), sum_of([0, 1, 2], 3))


def test_a_client_cannot_enter_before_rounds_that_have_passed_it() -> None:
    machine = machine_with("shrink")
    machine.push(1, "k", 1, pushed(1, 1))
    machine.lose(0)  # whose turn is before the first's
    at = reborn(machine, 0)
    assert comes_back(machine, at) == 1
    assert isinstance(machine.error(machine.send(at, m.Enter, 0)), ProtocolError)
    machine.push(2, "k", 1, pushed(2, 1))
    np.testing.assert_array_equal(machine.read("k", 1, client=1), sum_of([1, 2], 1))


def push_in(machine: Machine, client: int | bytes, key: str, number: int, at: int, value: np.ndarray, done: int) -> int:
    """A fused push that says its overall step."""
    fields = (key, 0, number, "none", True, False, 0, -1, False, at, done)
    return machine.send(client, m.Push, *fields, payloads=[value])


def found(machine: Machine, at: bytes, key: str) -> object:
    """What a client that is back learns of a key, but for the number of its request."""
    told = machine.last(machine.send(at, m.Init, key, 0, 1, COUNT, [COUNT], "float32"))
    return (told.version, told.at, told.done) if isinstance(told, m.Found) else told


@pytest.mark.parametrize("late", [False, True])
def test_a_client_that_is_back_is_in_the_rounds_of_the_same_steps_of_keys_that_are_pushed_less_often(
    late: bool,
) -> None:
    """Key "k" is pushed in every step, "seldom" in steps 1, 4, 7 and 10. The client enters after step 7, and the others
    end that before or after it: either way it is not in their third push of "seldom", and in the next."""
    machine = machine_with("shrink")
    machine.init_all("seldom", np.zeros(COUNT, "f4"))
    machine.lose(1)
    for step in range(1, 8):
        for client in (0, 2):
            push_in(machine, client, "k", step, -step, pushed(client, step), step - 1)
            if step in (1, 4):
                push_in(machine, client, "seldom", 1 + step // 3, step, pushed(client, step), step - 1)
    at = reborn(machine, 1)

    def end_step_7() -> None:
        push_in(machine, 0, "seldom", 3, 7, pushed(0, 7), 6)
        if late:
            assert found(machine, at, "seldom") == (2, {2: 4, 3: 7}, 3), (
                "its next push is not in the round that is open"
            )
        push_in(machine, 2, "seldom", 3, 7, pushed(2, 7), 6)

    assert comes_back(machine, at) == 7
    if not late:
        end_step_7()
    assert machine.ok(machine.send(at, m.Enter, 7))
    if late:
        end_step_7()
    np.testing.assert_array_equal(machine.read("seldom", 3), sum_of([0, 2], 7), "nobody waits for it")
    assert found(machine, at, "k") == (7, {6: -6, 7: -7}, 6)
    assert found(machine, at, "seldom") == (3, {3: 7}, 6)
    for client in (0, 2):
        push_in(machine, client, "seldom", 4, 10, pushed(client, 10), 9)
    assert machine.value(machine.pull(0, "seldom", 4)) is None, "it is waited for"
    held = push_in(machine, at, "seldom", 4, 10, pushed(1, 10), 9)
    np.testing.assert_array_equal(machine.value(held), sum_of([0, 1, 2], 10))


def test_what_it_pushes_in_a_step_before_its_entry_is_answered_and_not_added() -> None:
    machine = machine_with("shrink")
    machine.lose(0)
    push_in(machine, 1, "k", 1, -1, pushed(1, 1), 0)
    at = reborn(machine, 0)
    assert comes_back(machine, at) == 1
    machine.send(at, m.Enter, 2)  # another part is so far
    repeated = push_in(machine, at, "k", 1, -1, pushed(0, 1), 0)
    assert machine.value(repeated) is None, "not before the round is over: who is told of its end may rely on that"
    push_in(machine, 2, "k", 1, -1, pushed(2, 1), 0)
    np.testing.assert_array_equal(machine.value(repeated), sum_of([1, 2], 1))
    repeated = push_in(machine, at, "k", 2, -2, pushed(0, 2), 1)
    machine.lose(1)
    machine.lose(2)
    np.testing.assert_array_equal(machine.value(repeated), sum_of([1, 2], 1), "nobody is left for round 2: it is over")
    held = push_in(machine, at, "k", 3, -3, pushed(0, 3), 2)
    np.testing.assert_array_equal(machine.value(held), pushed(0, 3))
    assert found(machine, at, "k") is not None


@pytest.mark.parametrize(("number", "at_step"), [(3, 3), (4, 5)])
def test_a_first_push_that_is_not_where_the_others_are_is_an_error(number: int, at_step: int) -> None:
    """The program is not the same in every step, or not the others'."""
    machine = machine_with("shrink", 2)
    machine.lose(1)
    push_in(machine, 0, "k", 1, -1, pushed(0, 1), 0)
    push_in(machine, 0, "k", 2, -2, pushed(0, 2), 1)
    at = reborn(machine, 1)
    comes_back(machine, at)
    machine.send(at, m.Enter, 3)
    wrong = push_in(machine, at, "k", number, 5, pushed(1, 3), 3)
    push_in(machine, 0, "k", 3, at_step, pushed(0, 3), 2)
    error = machine.error(wrong)
    assert isinstance(error, ProtocolError)
    assert f"makes push {number} in step 5; that of the others in step {at_step} is number 3" in str(error)


def test_a_client_that_dies_between_return_and_entry_is_left_out_again() -> None:
    machine = machine_with("shrink", 2)
    machine.lose(1)
    comes_back(machine, reborn(machine, 1))
    held = machine.push(0, "k", 1, pushed(0, 1), fused=True)
    assert machine.value(held) is None
    machine.lose(1, incarnation=2)
    np.testing.assert_array_equal(machine.value(held), pushed(0, 1))
    assert comes_back(machine, reborn(machine, 1, b"again", 3)) == 1


def test_who_is_back_follows_the_changes_of_hyperparameters_that_the_others_make() -> None:
    """It has missed some, and what it says is the same as what they have said, whatever its number."""
    machine = machine_with("shrink", 2)
    machine.rule(optim.Test(lr=-1.0))
    machine.lose(1)
    for ordinal in (1, 2):
        assert machine.ok(machine.send(0, m.SetHyperparams, ordinal, {"lr": -2.0 * ordinal}, 0))
    at = reborn(machine, 1)
    comes_back(machine, at)
    machine.send(at, m.Enter, 0)
    for ordinal in (3, 4):
        assert machine.ok(machine.send(0, m.SetHyperparams, ordinal, {"lr": -2.0 * ordinal}, 0))
        assert machine.ok(machine.send(at, m.SetHyperparams, ordinal - 2, {"lr": -2.0 * ordinal}, 0))
    before = machine.read("k").astype("f8")
    machine.push(0, "k", 1, pushed(0, 1))
    machine.send(at, m.Push, "k", 0, 1, "none", False, payloads=[pushed(1, 1)])
    np.testing.assert_array_equal(machine.read("k", 1), before + 8.0 * sum_of([0, 1], 1))
    assert machine.state.parts[0].shards[1].rulebook.dump().calls[1].made == 4


def test_where_a_process_has_entered_that_is_dead_says_nothing_of_the_next() -> None:
    machine = machine_with("shrink")
    machine.lose(1)
    at = reborn(machine, 1)
    comes_back(machine, at)
    machine.send(at, m.Enter, 2)
    machine.lose(1, incarnation=2)
    at = reborn(machine, 1, b"again", 3)
    assert comes_back(machine, at) == 0
    for client in (0, 2):
        machine.push(client, "k", 1, pushed(client, 1))
    assert machine.value(machine.pull(0, "k", 1)) is None, "it has not said yet whether it is in this round"
    machine.send(at, m.Enter, 0)
    held = machine.send(at, m.Push, "k", 0, 1, "none", True, payloads=[pushed(1, 1)])
    np.testing.assert_array_equal(machine.value(held), sum_of([0, 1, 2], 1))


def test_a_client_whose_last_process_closed_the_store_may_come_back() -> None:
    """A ``with`` statement closes it also on the way out of a program that fails."""
    machine = machine_with("shrink")
    assert machine.ok(machine.send(1, m.Bye))
    for client in (0, 2):
        machine.push(client, "k", 1, pushed(client, 1))
    at = reborn(machine, 1)
    assert comes_back(machine, at) == 1
    machine.send(at, m.Enter, 1)
    for client in (0, 2):
        machine.push(client, "k", 2, pushed(client, 2))
    held = machine.send(at, m.Push, "k", 0, 2, "none", True, payloads=[pushed(1, 2)])
    np.testing.assert_array_equal(machine.value(held), sum_of([0, 1, 2], 2))


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_nobody_comes_back_to_a_store_that_all_others_have_left_in_good_order(mode: str) -> None:
    """A store that begins with the first values again would look as if nothing had been learned."""
    machine = Machine(mode, 2, on_client_loss="shrink")
    machine.init_all("k", whole_numbers(COUNT))
    machine.lose(1)
    assert machine.ok(machine.send(0, m.Bye))
    refused = machine.hello(1, 2, at=b"reborn")
    assert isinstance(machine.error(refused), ClientLostError)
    assert "is over" in str(machine.error(refused))


def test_what_a_client_has_pushed_to_the_open_round_before_it_was_lost_counts() -> None:
    machine = machine_with("shrink")
    for client in (0, 1):
        machine.push(client, "k", 1, pushed(client, 1))
    machine.lose(1)
    machine.push(2, "k", 1, pushed(2, 1))
    np.testing.assert_array_equal(machine.read("k", 1), sum_of([0, 1, 2], 1))


def test_a_mean_over_fewer_clients_divides_by_their_number() -> None:
    machine = Machine("sync", 3, on_client_loss="shrink")
    machine.init_all("k", np.zeros(COUNT, "f4"))
    machine.rule(optim.Outer(lr=1.0, momentum=0.0, nesterov=False))
    machine.lose(0)
    for client in (1, 2):
        machine.push(client, "k", 1, pushed(client, 1))
    np.testing.assert_allclose(machine.read("k", 1, client=1), -sum_of([1, 2], 1) / 2, rtol=1e-6)


def test_when_everybody_is_lost_no_round_is_closed() -> None:
    machine = machine_with("shrink", 2)
    machine.lose(0)
    machine.lose(1)
    assert machine.slot("k").rounds == 0, "the values are kept for who may come back"


def test_wait_holds_the_round_until_another_process_has_pushed() -> None:
    machine = machine_with("wait")
    values = [pushed(client, 1) for client in range(3)]
    round_of(machine, 1, values)
    fused = [machine.push(client, "k", 2, pushed(client, 2), fused=True) for client in (0, 2)]
    machine.lose(1)
    assert not any(isinstance(machine.last(request), m.Failure) for request in fused)
    assert machine.ok(machine.hello(1, 2, at=b"reborn"))
    found = machine.send(b"reborn", m.Init, "k", 0, 1, COUNT, [COUNT], "float32")
    assert machine.last(found) == m.Ack(found, 1), "one round has its push"
    late = machine.send(b"reborn", m.Push, "k", 0, 2, "none", True, payloads=[pushed(1, 2)])
    for request in (*fused, late):
        np.testing.assert_array_equal(machine.value(request), sum_of([0, 1, 2], 2))


@pytest.mark.parametrize("replicas", [0, 1])
def test_what_the_lost_process_has_pushed_counts_once(replicas: int) -> None:
    """The new one pushes that round again, since it cannot know."""
    machine = machine_with("wait", 2, replicas)
    machine.push(0, "k", 1, pushed(0, 1))  # in the open round
    machine.lose(0)
    assert machine.ok(machine.hello(0, 2, at=b"reborn"))
    found = machine.send(b"reborn", m.Init, "k", 0, 1, COUNT, [COUNT], "float32", payloads=[np.zeros(COUNT, "f4")])
    assert machine.last(found) == m.Ack(found, 0), "an open round may be lost with its server"
    again = machine.send(b"reborn", m.Push, "k", 0, 1, "none", True, payloads=[np.full(COUNT, 1e6, "f4")])
    machine.push(1, "k", 1, pushed(1, 1))
    np.testing.assert_array_equal(machine.value(again), sum_of([0, 1], 1))


@pytest.mark.parametrize("policy", ["fail", "wait", "shrink"])
def test_a_client_that_ends_with_an_error_is_one_that_is_lost(policy: str) -> None:
    machine = machine_with(policy, 2)
    held = machine.push(0, "k", 1, pushed(0, 1), fused=True)
    assert machine.ok(machine.send(1, m.Bye, 0, "ValueError: bad data"))
    if policy == "shrink":
        np.testing.assert_array_equal(machine.value(held), pushed(0, 1))
    elif policy == "wait":
        assert machine.value(held) is None
    else:
        assert "client 1 has ended with ValueError: bad data" in str(machine.error(held))


def test_nobody_waits_for_a_client_that_has_closed_the_store() -> None:
    machine = machine_with("wait", 2)
    held = machine.push(0, "k", 1, pushed(0, 1), fused=True)
    assert machine.ok(machine.send(1, m.Bye))
    assert isinstance(machine.error(held), ClientLostError)


@pytest.mark.parametrize("policy", ["fail", "wait", "shrink"])
def test_rounds_go_on_without_a_client_that_has_finished(policy: str) -> None:
    machine = machine_with(policy)
    round_of(machine, 1, [pushed(client, 1) for client in range(3)])
    waiting = machine.push(0, "k", 2, pushed(0, 2), fused=True)
    machine.push(2, "k", 2, pushed(2, 2))
    finish = machine.send(1, m.Finish)
    assert machine.ok(finish)
    np.testing.assert_array_equal(machine.value(waiting), sum_of([0, 2], 2))
    machine.send(1, m.Finish, request=finish)
    assert machine.ok(finish), "said again"
    np.testing.assert_array_equal(machine.read("k", 1, client=1), sum_of([0, 2], 2))
    assert machine.ok(machine.send(1, m.Bye))
    for client in (0, 2):
        machine.push(client, "k", 3, pushed(client, 3))
    np.testing.assert_array_equal(machine.read("k", 3), sum_of([0, 2], 3))


def test_a_client_that_waits_is_told_only_of_those_who_are_needed() -> None:
    machine = machine_with("shrink", 5)
    machine.lose(1)
    machine.send(3, m.Finish)
    held = machine.push(4, "k", 1, pushed(4, 1), fused=True)
    machine.push(4, "k", 1, pushed(4, 1), fused=True, request=held)
    waiting = machine.last(held)
    assert isinstance(waiting, m.Waiting)
    assert waiting.clients == [0, 2]
    assert machine.replies[held][-1].route == route(4)


def test_who_has_joined_cannot_push_again() -> None:
    """Its step would be taken for one of the rounds that have gone on without it."""
    machine = machine_with("fail")
    machine.push(0, "k", 1, pushed(0, 1))
    machine.push(1, "k", 1, pushed(1, 1))
    assert machine.ok(machine.send(1, m.Finish))
    assert machine.ok(machine.push(1, "k", 1, pushed(1, 1))), "a copy that comes late is answered as ever"
    refused = machine.send(1, m.Push, "k", 0, 2, "none", False, payloads=[pushed(1, 2)])
    assert "has joined" in str(machine.error(refused))
    machine.push(2, "k", 1, pushed(2, 1))
    for client in (0, 2):
        machine.push(client, "k", 2, pushed(client, 2))
    np.testing.assert_array_equal(machine.read("k", 2), sum_of([0, 2], 2))


@pytest.mark.parametrize("held", [False, True])
def test_what_a_client_has_said_to_be_done_is_known_though_its_push_is_in_no_round_yet(held: bool) -> None:
    """Its push is in the open round, or ``held``: the one before it in that round has not come."""
    machine = machine_with("wait", 2)
    for client in (0, 1):
        push_in(machine, client, "k", 1, -1, pushed(client, 1), 0)
    client = int(held)
    push_in(machine, client, "k", 2, -5, pushed(client, 2), 4)
    machine.lose(client)
    at = reborn(machine, client)
    steps = {1: -1} if held else {1: -1, 2: -5}
    assert found(machine, at, "k") == (1, steps, 4)
    assert found(machine, route(1 - client), "k") == (1, {1: -1}, 0)


def test_who_comes_back_goes_on_where_it_is_with_the_keys_of_every_round() -> None:
    """Keys that are pushed less often, or never, say nothing about that."""
    config = Config(num_workers=2, num_clients=2, num_servers=1, on_client_loss="wait")
    network = Network(0, Faults())
    ps = Cluster(config, network, "sync").client(1, 2)
    found = {"weight": 10, "bias": 9, "seldom": 3, "never": 0}
    ps.add_keys([(key, (COUNT,), "float32") for key in found])
    at = {"weight": {9: 9, 10: 10}, "bias": {9: 9}, "seldom": {3: 7}, "never": {}}
    for key, count in found.items():
        ps._layouts[key].hear(m.Found(1, count, at[key], 9 if key == "weight" else 0), [])
    assert ps.position == 9
    assert {key: ps._take_position(key).steps for key in found} == {"weight": 9, "bias": 9, "seldom": 3, "never": 0}
    assert ps.position == 9


def test_who_says_yes_hears_yes_also_where_others_have_met_before_it_was_started() -> None:
    """Its program meets others from the beginning, or skips that: then it asks at a barrier that is over."""
    config = Config(num_workers=2, num_clients=2, num_servers=1, on_client_loss="wait")
    network = Network(0, Faults())
    cluster = Cluster(config, network, "sync")
    heard: dict[str, list[str]] = {}

    def asks(client: int, incarnation: int, *answers: str, joins: bool = False) -> Program:
        ps = cluster.client(client, 2, incarnation)
        yield [ps.register(incarnation, cluster.deadline())]
        yield [ps.open_sessions(incarnation, cluster.deadline())]
        if joins:
            yield [ps.finish(cluster.deadline())]
        for answer in answers:
            said = [answer]
            yield [ps.barrier(cluster.deadline(), said=said)]
            heard.setdefault(f"{client}.{incarnation}", []).extend(said)

    network.run({"client 0.1": asks(0, 1, "0", "1"), "client 1.1": asks(1, 1, "0", "0")}, 10.0)
    assert heard == {"0.1": ["0", "1"], "1.1": ["0", "1"]}
    network.run({"client 1.2": asks(1, 2, "1", "0")}, 10.0)
    assert heard["1.2"] == ["1", "1"]
    network.run({"client 1.3": asks(1, 3, "1", joins=True)}, 10.0)
    assert heard["1.3"] == ["0"], "who has joined says no, and hears what the others have"
