"""Synchronous rounds and asynchronous updates of one chunk, whatever the order in which requests arrive."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ps_helpers import Machine, random_floats, whole_numbers

from kvmpi import optim
from kvmpi.errors import ProtocolError, UnsupportedError
from kvmpi.wire import messages as m

COUNT, STEPS = 7, 4
CLIENTS = [1, 2, 3, 7]


class Player:
    """One client that pushes in steps, plainly or fused, and pulls now and then; some of it twice."""

    def __init__(self, machine: Machine, client: int, values: list[np.ndarray], rng: np.random.Generator) -> None:
        self.machine, self.client, self.values, self.rng = machine, client, values, rng
        self.step = 0  # the last push that was sent
        self.fused: dict[int, bool] = {}
        self.quiet: dict[int, bool] = {}
        self.requests: dict[int, int] = {}
        self.reading: dict[int, int] = {}

    def busy(self) -> bool:
        return self.step > 0 and not self._answered(self.step)

    def _answered(self, step: int) -> bool:
        kind = m.Value if self.fused[step] else m.Ack
        return any(isinstance(reply.message, kind) for reply in self.machine.replies.get(self.requests[step], []))

    def done(self) -> bool:
        return self.step == STEPS and not self.busy() and all(self.machine.ok(request) for request in self.reading)

    def act(self) -> None:
        dice = self.rng.random()
        if dice < 0.3 and self.step:
            self._repeat(int(self.rng.integers(1, self.step + 1)))
        elif dice < 0.45 and self.step and not self.busy():
            self._pull()
        elif not self.busy() and self.step < STEPS:
            self.step += 1
            self.fused[self.step], self.quiet[self.step] = bool(self.rng.integers(2)), bool(self.rng.integers(2))
            self.requests[self.step] = self._push(self.step, self.values[self.step - 1])
        elif self.busy() and self.fused[self.step] and self._accepted():
            self.machine.send(self.client, m.Query, "k", 0, self.step, request=self.requests[self.step])

    def _accepted(self) -> bool:
        replies = self.machine.replies.get(self.requests[self.step], [])
        return any(isinstance(reply.message, m.Ack) for reply in replies)

    def _push(self, step: int, value: np.ndarray, request: int = 0) -> int:
        how = {"fused": self.fused[step], "quiet": self.quiet[step], "request": request}
        return self.machine.push(self.client, "k", step, value, **how)  # type: ignore[arg-type]

    def _repeat(self, step: int) -> None:
        answered = self._answered(step)
        # What is added twice must show; but a push that is held may be replaced by its copy.
        self._push(step, self.values[step - 1] + (1e4 if answered else 0), 0 if answered else self.requests[step])

    def _pull(self) -> None:
        waiting = [(request, at) for request, at in self.reading.items() if not self.machine.ok(request)]
        if waiting:
            request, min_round = waiting[0]
            self.machine.pull(self.client, "k", min_round, request)
        else:
            self.reading[self.machine.pull(self.client, "k", self.step)] = self.step


def play(num_clients: int, seed: int, values: list[list[np.ndarray]], rule: optim.Rule | None) -> dict[int, bytes]:
    """One random interleaving to its end: what was read in each round, the same for every reader."""
    rng = np.random.default_rng([num_clients, seed])
    machine = Machine("sync", num_clients)
    machine.init_all("k", whole_numbers(COUNT, 99))
    if rule is not None:
        machine.rule(rule)
    players = [Player(machine, client, values[client], rng) for client in range(num_clients)]
    rounds: dict[int, bytes] = {}
    seen: dict[int, int] = {}
    for _ in range(20_000):
        player = players[int(rng.integers(num_clients))]
        player.act()
        sent = [p.step for p in players]
        for request, replies in machine.replies.items():
            for reply in replies[seen.get(request, 0) :]:
                check(reply, request, players, sent)
                if isinstance(reply.message, m.Value):
                    got = reply.payloads[0].tobytes()
                    assert rounds.setdefault(reply.message.version, got) == got, "two values of one round"
            seen[request] = len(replies)
        if all(p.done() for p in players):
            assert machine.slot("k").rounds == STEPS
            return rounds
    raise AssertionError("not done after 20000 turns")


def check(reply: Any, request: int, players: list[Player], sent: list[int]) -> None:
    """No answer is ahead of the pushes that it needs."""
    message = reply.message
    assert not isinstance(message, m.Failure), message.text
    owner = next(p for p in players if reply.route == f"client {p.client}".encode())
    if isinstance(message, m.Value):
        assert min(sent) >= message.version, f"round {message.version} was read, but pushed are only {sent}"
        assert message.version >= owner.reading.get(request, 0), "a reader got a value from before its own push"
    if isinstance(message, m.Ack):
        for step, pushed_as in owner.requests.items():
            if pushed_as == request:
                assert all(sent[lower] >= step for lower in range(owner.client)), "acknowledged before its turn"
                assert min(sent) >= step - 1, "acknowledged into a round that is not open"


@pytest.mark.parametrize("rule", [None, optim.Test(lr=-2.0), optim.SGD(lr=0.5)], ids=["assign", "test", "sgd"])
@pytest.mark.parametrize("num_clients", CLIENTS)
def test_every_round_is_the_sum_of_one_push_of_each(num_clients: int, rule: optim.Rule | None) -> None:
    values = [[whole_numbers(COUNT, client, step) for step in range(STEPS)] for client in range(num_clients)]
    factor = {None: 0.0, "test": 2.0, "sgd": -0.5}[rule and rule.name]
    expected = whole_numbers(COUNT, 99).astype("f8")
    oracle = {}
    for step in range(STEPS):
        total = np.sum([values[client][step] for client in range(num_clients)], axis=0, dtype="f8")
        expected = total if rule is None else expected + factor * total
        oracle[step + 1] = expected
    for seed in range(12):
        rounds = play(num_clients, seed, values, rule)
        assert rounds
        for round_, got in rounds.items():
            np.testing.assert_array_equal(np.frombuffer(got, "f4"), oracle[round_], err_msg=f"{seed=} {round_=}")


@pytest.mark.parametrize("rule", [None, optim.SGD(lr=0.1, momentum=0.9), optim.Adam(lr=0.01), optim.Outer()], ids=repr)
@pytest.mark.parametrize("num_clients", [2, 3, 7])
def test_rounds_have_the_same_bits_in_every_order_of_arrival(num_clients: int, rule: optim.Rule | None) -> None:
    values = [[random_floats(COUNT, client, step) for step in range(STEPS)] for client in range(num_clients)]
    merged: dict[int, bytes] = {}
    for seed in range(100, 110):
        for round_, got in play(num_clients, seed, values, rule).items():
            assert merged.setdefault(round_, got) == got, f"{seed=}, {round_=}: other bits"
    assert STEPS in merged


@pytest.mark.parametrize("fused", [False, True])
def test_a_repeated_push_never_completes_a_round(fused: bool) -> None:
    machine = Machine("sync", 2)
    machine.init_all("k", whole_numbers(COUNT))
    first = machine.push(0, "k", 1, whole_numbers(COUNT, 0), fused=fused)
    for _ in range(5):
        machine.push(0, "k", 1, whole_numbers(COUNT, 0), fused=fused, request=first)
        machine.push(0, "k", 1, whole_numbers(COUNT, 0), fused=not fused)
    assert machine.slot("k").rounds == 0
    reader = machine.pull(0, "k", 1)
    assert machine.last(reader) is None
    machine.push(1, "k", 1, whole_numbers(COUNT, 1))
    expected = whole_numbers(COUNT, 0).astype("f8") + whole_numbers(COUNT, 1)
    np.testing.assert_array_equal(machine.value(reader), expected)


def test_a_repeated_request_is_told_whom_it_waits_for() -> None:
    machine = Machine("sync", 4)
    machine.init_all("k", whole_numbers(COUNT))
    held = machine.push(3, "k", 1, whole_numbers(COUNT, 3))
    fused = machine.push(0, "k", 1, whole_numbers(COUNT, 0), fused=True)
    assert machine.last(held) is None
    machine.push(3, "k", 1, whole_numbers(COUNT, 3), request=held)
    assert machine.last(held) == m.Waiting(held, [1, 2])
    machine.send(0, m.Query, "k", 0, 1, request=fused)
    assert machine.last(fused) == m.Waiting(fused, [1, 2])
    reader = machine.pull(0, "k", 1)
    machine.pull(0, "k", 1, reader)
    assert machine.last(reader) == m.Waiting(reader, [1, 2])


def test_of_a_quiet_push_nothing_is_said_before_its_answer_unless_it_comes_again() -> None:
    machine = Machine("sync", 3)
    machine.init_all("k", whole_numbers(COUNT))
    values = [whole_numbers(COUNT, client) for client in range(3)]
    loud = machine.push(0, "k", 1, values[0], fused=True)
    assert machine.last(loud) == m.Accepted(loud)
    quiet = machine.push(1, "k", 1, values[1], fused=True, quiet=True)
    assert machine.last(quiet) is None
    machine.push(1, "k", 1, values[1], fused=True, quiet=True, request=quiet)
    said = [reply.message for reply in machine.replies[quiet]]
    assert said == [m.Accepted(quiet), m.Waiting(quiet, [2])]
    last = machine.push(2, "k", 1, values[2], fused=True, quiet=True)
    for request in (loud, quiet, last):
        np.testing.assert_array_equal(machine.value(request), np.sum(values, axis=0, dtype="f8"))
    assert len(machine.replies[last]) == 1


@pytest.mark.parametrize("rule", [None, optim.Elastic(0.5)], ids=["assign", "elastic"])
def test_a_lost_answer_to_a_fused_push_is_given_again(rule: optim.Rule | None) -> None:
    machine = Machine("sync", 2)
    start = whole_numbers(COUNT)
    machine.init_all("k", start)
    if rule is not None:
        machine.rule(rule)
    pushed = [whole_numbers(COUNT, client) for client in (1, 2)]
    requests = [machine.push(client, "k", 1, pushed[client], fused=True) for client in (0, 1)]
    expected = start if rule is not None else pushed[0].astype("f8") + pushed[1]
    for client, request in enumerate(requests):
        np.testing.assert_array_equal(machine.value(request), expected)
        machine.send(client, m.Query, "k", 0, 1, request=request)
        np.testing.assert_array_equal(machine.value(request), expected, err_msg="by a query")
        machine.push(client, "k", 1, pushed[client], fused=True, request=request)
        np.testing.assert_array_equal(machine.value(request), expected, err_msg="by the same push")
    assert machine.slot("k").rounds == 1


def test_a_push_that_skips_a_step_is_refused_and_nothing_is_held() -> None:
    machine = Machine("sync", 2)
    machine.init_all("k", whole_numbers(COUNT))
    assert isinstance(machine.error(machine.push(1, "k", 2, whole_numbers(COUNT))), ProtocolError)
    assert not machine.slot("k").held


def test_pulls_wait_for_the_readers_own_round_only() -> None:
    machine = Machine("sync", 2)
    machine.init_all("k", whole_numbers(COUNT))
    machine.push(0, "k", 1, whole_numbers(COUNT, 0))
    mine, other = machine.pull(0, "k", 1), machine.pull(1, "k", 0)
    assert machine.last(mine) is None
    np.testing.assert_array_equal(machine.value(other), whole_numbers(COUNT))
    machine.push(1, "k", 1, whole_numbers(COUNT, 1))
    assert machine.value(mine) is not None


@pytest.mark.parametrize("num_clients", CLIENTS)
def test_async_applies_each_push_once_and_at_once(num_clients: int) -> None:
    rng = np.random.default_rng(num_clients)
    machine = Machine("async", num_clients)
    machine.init_all("k", whole_numbers(COUNT))
    machine.rule(optim.Test(lr=-1.0))
    expected = whole_numbers(COUNT).astype("f8")
    steps = [0] * num_clients
    for turn in range(60):
        client = int(rng.integers(num_clients))
        if steps[client] and rng.random() < 0.4:
            step = int(rng.integers(1, steps[client] + 1))
            request = machine.push(client, "k", step, np.full(COUNT, 1e5, "f4"), fused=bool(rng.integers(2)))
        else:
            steps[client] += 1
            value = whole_numbers(COUNT, client, steps[client])
            expected = expected + value
            request = machine.push(client, "k", steps[client], value, fused=bool(rng.integers(2)))
        assert machine.ok(request)
        if (got := machine.value(request)) is not None:
            np.testing.assert_array_equal(got, expected, err_msg=f"{turn=}")
        np.testing.assert_array_equal(machine.read("k", 10_000, client), expected, err_msg=f"{turn=}")
    assert machine.slot("k").rounds == sum(steps)


def test_async_needs_a_rule_and_the_refused_step_is_not_used_up() -> None:
    machine = Machine("async", 1)
    machine.init_all("k", whole_numbers(COUNT))
    error = machine.error(machine.push(0, "k", 1, whole_numbers(COUNT, 1)))
    assert isinstance(error, UnsupportedError)
    assert "set_optimizer" in str(error)
    machine.rule(optim.Test(lr=-1.0))
    assert machine.ok(machine.push(0, "k", 1, whole_numbers(COUNT, 1)))
    np.testing.assert_array_equal(machine.read("k"), whole_numbers(COUNT).astype("f8") + whole_numbers(COUNT, 1))
