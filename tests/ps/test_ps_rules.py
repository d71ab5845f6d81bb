"""Update rules on a server: arithmetic in every dtype, when a change is in force, and rules that fail."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from ps_helpers import STORE, Machine, as_float, random_floats, round_of, stored, whole_numbers

from kvmpi import optim
from kvmpi.errors import ConfigError, DTypeMismatchError, KVError, ProtocolError
from kvmpi.ps import replay
from kvmpi.ps.rulebook import Rulebook
from kvmpi.ps.shard import Shard
from kvmpi.wire import MAX_HEADER_BYTES, encode, entries
from kvmpi.wire import messages as m

COUNT = 9
EPS32 = float(np.finfo("f4").eps)


def small(count: int, *seeds: int) -> np.ndarray:
    return np.random.default_rng([count, *seeds]).integers(-20, 20, count).astype("f4")


DTYPES = ["float32", "float64", "float16", "bfloat16", "int8", "int16", "int32", "int64", "uint8"]


@pytest.mark.parametrize("with_rule", [False, True], ids=["assign", "test"])
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_sums_and_updates(dtype: str, mode: str, with_rule: bool) -> None:
    if mode == "async" and not with_rule:
        return  # refused, see test_ps_rounds
    machine = Machine(mode, 3)
    start = np.abs(small(COUNT, 0)) + 40
    machine.init_all("k", stored(start, dtype), dtype)
    if with_rule:
        machine.rule(optim.Test(lr=-1.0))
    expected = start.astype("f8")
    for step in (1, 2):
        values = [np.abs(small(COUNT, step, client)) for client in range(3)]
        values = [np.minimum(value, 9) for value in values]  # stays below int8's and uint8's limits
        total = np.sum(values, axis=0, dtype="f8")
        expected = expected + total if with_rule else total
        requests = round_of(machine, step, [stored(value, dtype) for value in values], fused=True)
        final = machine.value(requests[-1], dtype)
        assert final is not None
        np.testing.assert_array_equal(as_float(final, dtype), expected)
        np.testing.assert_array_equal(as_float(machine.read("k", step, dtype=dtype), dtype), expected)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_multi_precision_keeps_what_a_half_type_would_round_away(mode: str, dtype: str) -> None:
    machine = Machine(mode, 1)
    machine.init_all("k", stored(np.full(COUNT, 64.0), dtype), dtype)
    machine.rule(optim.SGD(lr=0.001, multi_precision=True))
    one = stored(np.ones(COUNT), dtype)
    for step in range(1, 1001):
        machine.push(0, "k", step, one)
    # 64 - 1000 * 0.001 = 63; without a master, 64 - 0.001 rounds to 64 every time.
    np.testing.assert_array_equal(as_float(machine.read("k", 0, dtype=dtype), dtype), np.full(COUNT, 63.0))
    assert machine.ok(machine.send(0, m.SetHyperparams, 1, {"multi_precision": False}, 0))
    machine.push(0, "k", 1001, one)
    np.testing.assert_array_equal(as_float(machine.read("k", 0, dtype=dtype), dtype), np.full(COUNT, 63.0))
    assert machine.slot("k").master is None


@pytest.mark.parametrize("num_clients", [1, 2, 3])
def test_half_types_are_summed_in_float32_and_rounded_once(num_clients: int) -> None:
    machine = Machine("sync", num_clients)
    machine.init_all("k", np.zeros(COUNT, "f2"), "float16")
    values = [(2048 + np.arange(COUNT) * (client + 1)).astype("f2") for client in range(num_clients)]
    round_of(machine, 1, values)
    exact = np.sum(values, axis=0, dtype="f8")
    np.testing.assert_array_equal(machine.read("k", 1, dtype="float16"), exact.astype("f2"))


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("codec", ["fp16", "bf16"])
def test_half_types_on_the_wire_are_widened_before_they_are_added(codec: str, mode: str) -> None:
    machine = Machine(mode, 2)
    machine.init_all("k", whole_numbers(COUNT))
    machine.rule(optim.Test(lr=-1.0))
    values = [random_floats(COUNT, client) for client in range(2)]
    if codec == "fp16":
        sent = [value.astype("f2") for value in values]
        values = [value.astype("f4") for value in sent]
    else:  # the upper half of a float32
        sent = [(value.view("u4") >> 16).astype("u2") for value in values]
        values = [(half.astype("u4") << 16).view("f4") for half in sent]
    for client, half in enumerate(sent):
        assert machine.ok(machine.push(client, "k", 1, half, codec=codec))
    exact = whole_numbers(COUNT).astype("f8") + values[0].astype("f8") + values[1]
    bound = 3 * EPS32 * (np.abs(whole_numbers(COUNT)) + 10)
    assert (np.abs(machine.read("k") - exact) <= bound).all()


@pytest.mark.parametrize("num_clients", [1, 2, 3, 7])
def test_elastic_rounds_move_once_against_one_center(num_clients: int) -> None:
    alpha = 0.25
    machine = Machine("sync", num_clients)
    center = small(COUNT, 9).astype("f8")
    machine.init_all("k", center.astype("f4"))
    machine.rule(optim.Elastic(alpha))
    for step in range(1, 4):
        weights = [small(COUNT, step, client) for client in range(num_clients)]
        requests = round_of(machine, step, weights, fused=True)
        for request in requests:
            np.testing.assert_array_equal(machine.value(request), center, err_msg=f"{step=}: not the center it met")
        center = center + alpha * sum(w - center for w in weights)
        np.testing.assert_array_equal(machine.read("k", step), center, err_msg=f"{step=}")


def test_async_elastic_answers_each_push_with_the_center_that_it_met() -> None:
    machine = Machine("async", 3)
    center = small(COUNT, 9).astype("f8")
    machine.init_all("k", center.astype("f4"))
    machine.rule(optim.Elastic(0.5))
    for step in (1, 2):
        for client in (2, 0, 1):
            w = small(COUNT, step, client)
            np.testing.assert_array_equal(machine.value(machine.push(client, "k", step, w, fused=True)), center)
            center = center + 0.5 * (w - center)
            np.testing.assert_array_equal(machine.read("k"), center)


def test_what_an_async_elastic_push_has_met_is_kept_until_its_sender_has_it() -> None:
    machine = Machine("async", 3)
    machine.init_all("k", small(COUNT, 9))
    machine.rule(optim.Elastic(0.5))
    slot, values = machine.slot("k"), [small(COUNT, 1, client) for client in range(3)]
    first = machine.push(0, "k", 1, values[0], fused=True)
    met = machine.value(first).copy()  # type: ignore[union-attr]
    machine.push(1, "k", 1, values[1], fused=True)
    machine.push(2, "k", 1, values[2])
    assert sorted(slot.met_by) == [0, 1], "the third has not asked for it"
    machine.push(0, "k", 1, values[0], fused=True, request=first)
    assert machine.last(first) == m.Value(first, 1, old=True)
    np.testing.assert_array_equal(machine.value(first), met)

    # A server that joins the chain has it too.
    shard = machine.state.parts[0].shards[STORE]
    copy = Shard(1, STORE, "async", 3, lambda *_: False)
    for entry, payloads in replay.dump(shard)[1:]:
        frames = [memoryview(bytearray(payload.tobytes())) for payload in payloads]
        replay.apply(copy, entry, frames, keep=False)
    there = copy.slots["k", 0].met_by
    assert {client: version for client, (version, _) in there.items()} == {0: 1, 1: 2}
    np.testing.assert_array_equal(there[0][1], met)

    assert machine.ok(machine.send(0, m.Query, "k", 0, 1, False))
    machine.lose(1)
    assert not slot.met_by
    machine.push(0, "k", 2, values[0], fused=True)
    machine.send(0, m.Query, "k", 0, 1, False)  # late, and of the push before
    machine.push(0, "k", 1, values[0])
    assert list(slot.met_by) == [0]
    machine.push(0, "k", 3, values[0])
    assert not slot.met_by


@pytest.mark.parametrize("num_clients", [1, 2, 4])
def test_outer_steps_once_on_the_mean_of_a_round_with_nesterov_momentum(num_clients: int) -> None:
    machine = Machine("sync", num_clients)
    value, buffer = random_floats(COUNT, 5).astype("f8"), np.zeros(COUNT)
    machine.init_all("k", value.astype("f4"))
    value = value.astype("f4").astype("f8")
    machine.rule(optim.Outer(lr=0.7, momentum=0.9, nesterov=True))
    for step in range(1, 5):
        deltas = [random_floats(COUNT, step, client) for client in range(num_clients)]
        round_of(machine, step, deltas)
        mean = np.mean(deltas, axis=0, dtype="f8")
        buffer = 0.9 * buffer + mean
        value = value - 0.7 * (mean + 0.9 * buffer)
        got = machine.read("k", step)
        assert (np.abs(got - value) <= 20 * num_clients * step * EPS32 * (1 + np.abs(value))).all(), f"{step=}"


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_momentum_remembers_over_updates(mode: str) -> None:
    machine = Machine(mode, 2)
    machine.init_all("k", np.zeros(COUNT, "f4"))
    machine.rule(optim.SGD(lr=1.0, momentum=0.5))
    value, buffer = np.zeros(COUNT), np.zeros(COUNT)
    for step in range(1, 5):
        pushes = [64.0 * small(COUNT, step, client) for client in range(2)]
        for update in [np.sum(pushes, axis=0)] if mode == "sync" else pushes:
            buffer = 0.5 * buffer + update
            value = value - buffer
        round_of(machine, step, [push.astype("f4") for push in pushes])
        np.testing.assert_array_equal(machine.read("k", step), value)


# ---- calls that all clients make


def test_repeats_of_a_rule_change_nothing_and_keep_momentum() -> None:
    machine = Machine("sync", 3)
    machine.init_all("k", np.zeros(COUNT, "f4"))
    rule = optim.SGD(lr=1.0, momentum=0.5)
    machine.rule(rule, clients=[1])
    round_of(machine, 1, [np.ones(COUNT, "f4")] * 3)
    machine.rule(rule, clients=[0, 2, 1, 1])
    round_of(machine, 2, [np.ones(COUNT, "f4")] * 3)
    np.testing.assert_array_equal(machine.read("k", 2), np.full(COUNT, -3.0 - (1.5 + 3.0)))


def test_a_differing_copy_is_refused_for_that_client_only() -> None:
    machine = Machine("sync", 2)
    machine.init_all("k", np.zeros(COUNT, "f4"))
    machine.rule(optim.SGD(lr=1.0), clients=[0])
    other = machine.send(1, m.SetRule, 1, "sgd", {"lr": 2.0})
    error = machine.error(other)
    assert isinstance(error, ConfigError)
    assert "client 1" in str(error)
    assert machine.ok(machine.send(1, m.SetRule, 1, "sgd", optim.SGD(lr=1.0).hyperparams()))
    assert machine.ok(machine.send(0, m.SetHyperparams, 1, {"lr": 0.5}, 0))
    assert isinstance(machine.error(machine.send(1, m.SetHyperparams, 1, {"lr": 0.25}, 0)), ConfigError)
    round_of(machine, 1, [np.ones(COUNT, "f4")] * 2)
    np.testing.assert_array_equal(machine.read("k", 1), np.full(COUNT, -1.0))


@pytest.mark.parametrize("ordinal", [0, -1, 2, 1 << 40])
def test_calls_out_of_turn_are_refused(ordinal: int) -> None:
    machine = Machine("sync", 1)
    assert isinstance(machine.error(machine.send(0, m.SetRule, ordinal, "sgd", {"lr": 1.0})), ProtocolError)


def test_refused_calls_do_not_use_up_their_number() -> None:
    machine = Machine("sync", 1)
    machine.init_all("k", np.zeros(COUNT, "f4"))
    for name, hyperparams in [
        ("no such", {}),
        ("sgd", {"lr": -1.0}),
        ("sgd", {"speed": 1.0}),
        ("adam", {"betas": 3.0}),
    ]:
        assert isinstance(machine.error(machine.send(0, m.SetRule, 1, name, hyperparams)), ConfigError), name
    assert isinstance(machine.error(machine.send(0, m.SetHyperparams, 1, {"lr": 1.0}, 0)), ConfigError)
    machine.rule(optim.SGD(lr=1.0))
    assert isinstance(machine.error(machine.send(0, m.SetHyperparams, 1, {"momentum": -1.0}, 0)), ConfigError)
    assert machine.ok(machine.send(0, m.SetHyperparams, 1, {"lr": 3.0}, 0))
    machine.push(0, "k", 1, np.ones(COUNT, "f4"))
    np.testing.assert_array_equal(machine.read("k", 1), np.full(COUNT, -3.0))


@pytest.mark.parametrize("first", [0, 1])
def test_hyperparams_are_in_force_from_the_callers_next_round(first: int) -> None:
    """Client 0 is a step ahead. Whoever calls first, after its second push, rounds 1 and 2 see the old rate."""
    machine = Machine("sync", 2)
    machine.init_all("k", np.zeros(COUNT, "f4"))
    machine.rule(optim.SGD(lr=1.0))
    one = np.ones(COUNT, "f4")

    def call(client: int) -> None:
        assert machine.ok(machine.send(client, m.SetHyperparams, 1, {"lr": 10.0}, 2))

    machine.push(0, "k", 1, one)
    if first == 0:
        machine.push(1, "k", 1, one)
        machine.push(0, "k", 2, one)
        call(0)
        machine.push(1, "k", 2, one)
    else:
        machine.push(1, "k", 1, one)
        machine.push(1, "k", 2, one)  # held: it is not client 1's turn
        call(1)
        machine.push(0, "k", 2, one)
    assert machine.slot("k").rounds == 2
    np.testing.assert_array_equal(machine.read("k", 2), np.full(COUNT, -4.0))
    call(1 - first)
    round_of(machine, 3, [one, one])
    np.testing.assert_array_equal(machine.read("k", 3), np.full(COUNT, -24.0))


def test_a_call_that_differs_is_named_with_the_clock_of_who_made_it() -> None:
    machine = Machine("sync", 2)
    machine.init_all("k", np.zeros(COUNT, "f4"))
    machine.rule(optim.SGD(lr=1.0))
    assert machine.ok(machine.send(0, m.SetHyperparams, 1, {"lr": 10.0}, 2))
    differs = machine.error(machine.send(1, m.SetHyperparams, 1, {"lr": 20.0}, 5))
    assert isinstance(differs, ConfigError)
    assert "client 1 at clock 5 says {'lr': 20.0}" in str(differs)


def test_a_new_rule_starts_with_empty_state_from_the_right_round() -> None:
    machine = Machine("sync", 2)
    machine.init_all("k", np.zeros(COUNT, "f4"))
    machine.rule(optim.SGD(lr=1.0, momentum=0.5))
    one = np.ones(COUNT, "f4")
    machine.push(0, "k", 1, one)
    machine.rule(optim.SGD(lr=1.0, momentum=0.25), ordinal=2, clients=[0])  # client 0 is ahead
    machine.push(1, "k", 1, one)
    np.testing.assert_array_equal(machine.read("k", 1), np.full(COUNT, -2.0))
    round_of(machine, 2, [one, one])
    np.testing.assert_array_equal(machine.read("k", 2), np.full(COUNT, -4.0), err_msg="momentum of the old rule")


def test_keys_made_after_a_rule_have_it() -> None:
    machine = Machine("sync", 1)
    machine.rule(optim.SGD(lr=1.0))
    assert machine.ok(machine.send(0, m.SetHyperparams, 1, {"lr": 2.0}, 0))
    machine.init_all("k", np.zeros(COUNT, "f4"))
    machine.push(0, "k", 1, np.ones(COUNT, "f4"))
    np.testing.assert_array_equal(machine.read("k", 1), np.full(COUNT, -2.0))


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_learning_rate_schedule_costs_no_memory(mode: str) -> None:
    machine = Machine(mode, 2)
    machine.init_all("idle", np.zeros(COUNT, "f4"))
    machine.rule(optim.SGD(lr=1.0))
    for ordinal in range(1, 300):
        for client in (0, 1):
            assert machine.ok(machine.send(client, m.SetHyperparams, ordinal, {"lr": 1.0 + ordinal}, ordinal))
    assert len(machine.slot("idle").rules) <= 2
    round_of(machine, 1, [])
    for client in (0, 1):
        machine.push(client, "idle", 1, np.ones(COUNT, "f4"))
    np.testing.assert_array_equal(machine.read("idle", 1), np.full(COUNT, -600.0))


# ---- a process that was started again


def reborn(machine: Machine, client: int) -> bytes:
    assert machine.ok(machine.hello(client, 2, at=b"reborn"))
    if machine.state.parts[0].shards[1].clients.shrinks:
        assert machine.ok(machine.send(b"reborn", m.Return))
        assert machine.ok(machine.send(b"reborn", m.Enter, 3))
    return b"reborn"


@pytest.mark.parametrize("made_by_all", [False, True])
@pytest.mark.parametrize("policy", ["wait", "shrink"])
def test_who_goes_on_may_make_calls_again_or_leave_them_out(policy: str, made_by_all: bool) -> None:
    """The program changes the rate at steps 1, 2 and 5; the process before this one has ended in step 3."""
    machine = Machine("sync", 2, on_client_loss=policy)
    machine.init_all("k", np.zeros(COUNT, "f4"))
    machine.rule(optim.Test(lr=-1.0))
    book = machine.state.parts[0].shards[1].rulebook

    def change(at: int | bytes, ordinal: int, lr: float, step: int, *, pushed: bool = False) -> int:
        request = machine.send(at, m.SetHyperparams, ordinal, {"lr": lr}, 0, 0, step, pushed)
        assert machine.ok(request)
        answer = machine.last(request)
        assert isinstance(answer, m.Ack)
        return answer.version

    def both(ordinal: int, lr: float, step: int) -> None:
        assert [change(client, ordinal, lr, step) for client in (0, 1)] == [ordinal, ordinal]

    both(1, -2.0, 1)
    both(2, -3.0, 2)
    machine.lose(1)
    again = reborn(machine, 1)
    generation = book.generation
    assert machine.ok(machine.send(again, m.SetRule, 1, "test", optim.Test(lr=-1.0).hyperparams(), 0, 3))
    assert book.generation == generation, "it is no other choice"
    if made_by_all:
        assert change(again, 1, -2.0, 3) == 1
        assert change(again, 2, -3.0, 3) == 2
    if policy == "wait":  # the other may be further, or not
        assert change(0, 3, -2.0, 5) == 3
    # The same rate as that of call 1, which was made in a step that is done.
    assert change(again, 3 if made_by_all else 1, -2.0, 5, pushed=True) == 3
    assert change(again, 3 if made_by_all else 1, -2.0, 5, pushed=True) == 3, "the answer was lost"
    assert change(again, 4, -5.0, 6, pushed=True) == 4
    assert [change(0, number, lr, step) for number, lr, step in ((3, -2.0, 5), (4, -5.0, 6))] == [3, 4]
    assert book.rule is not None
    assert book.rule.hyperparams()["lr"] == -5.0


def test_a_call_of_the_next_step_is_new_though_the_process_has_not_pushed_yet() -> None:
    machine = Machine("sync", 1, on_client_loss="wait")
    machine.init_all("k", np.zeros(COUNT, "f4"))
    machine.rule(optim.Test(lr=-1.0))
    for ordinal, lr in enumerate((-2.0, -4.0, -2.0), start=1):
        assert machine.ok(machine.send(0, m.SetHyperparams, ordinal, {"lr": lr}, 0, 0, ordinal))
    machine.lose(0)
    again = reborn(machine, 0)
    request = machine.send(again, m.SetHyperparams, 1, {"lr": -4.0}, 0, 0, 4)
    assert machine.last(request) == m.Ack(request, 4), "it had that rate before, in a step that is done"
    rulebook = machine.state.parts[0].shards[1].rulebook
    assert rulebook.rule is not None
    assert rulebook.rule.hyperparams()["lr"] == -4.0


# ---- rules that fail


@optim.register("test_fragile")
@dataclass(frozen=True)
class Fragile(optim.Rule):
    """stored += pushed, but 13 brings bad luck."""

    def compute(self, b: optim.Block) -> None:
        if (b.pushed == 13).any():
            raise ZeroDivisionError("thirteen")
        np.add(b.stored, b.pushed, out=b.out)


def test_a_rule_that_fails_ends_its_round_for_all_and_leaves_the_rest_unharmed() -> None:
    machine = Machine("sync", 2)
    machine.init_all("k", np.zeros(COUNT, "f4"))
    machine.rule(Fragile())
    machine.init_all("other", np.zeros(COUNT, "f4"))
    plain = machine.push(0, "k", 1, np.full(COUNT, 6, "f4"))
    reader = machine.pull(0, "k", 1)
    fused = machine.push(1, "k", 1, np.full(COUNT, 7, "f4"), fused=True)
    assert machine.ok(plain)
    for request in (fused, reader, machine.pull(1, "k", 1), machine.push(1, "k", 1, np.zeros(COUNT, "f4"), fused=True)):
        error = machine.error(request)
        assert type(error) is KVError
        assert "thirteen" in str(error)
    assert machine.last(fused).used, "the others have gone on: this client must not push step 1 again"  # type: ignore[union-attr]
    requests = round_of(machine, 2, [np.full(COUNT, 2, "f4"), np.full(COUNT, 3, "f4")], fused=True)
    for request in requests:
        np.testing.assert_array_equal(machine.value(request), np.full(COUNT, 5.0))
    np.testing.assert_array_equal(machine.read("other"), np.zeros(COUNT))


def test_a_rule_that_fails_on_an_async_push_leaves_no_trace() -> None:
    machine = Machine("async", 2)
    machine.init_all("k", np.zeros(COUNT, "f4"))
    machine.rule(Fragile())
    assert machine.ok(machine.push(0, "k", 1, np.full(COUNT, 6, "f4")))
    assert "thirteen" in str(machine.error(machine.push(1, "k", 1, np.full(COUNT, 13, "f4"), fused=True)))
    np.testing.assert_array_equal(machine.read("k"), np.full(COUNT, 6.0))
    assert machine.ok(machine.push(1, "k", 1, np.full(COUNT, 7, "f4")))
    np.testing.assert_array_equal(machine.read("k"), np.full(COUNT, 13.0))
    assert machine.slot("k").rounds == machine.slot("k").updates == 2


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_rule_that_cannot_compute_in_the_dtype_says_so(mode: str) -> None:
    machine = Machine(mode, 1)
    machine.init_all("k", np.arange(COUNT, dtype="i4"), "int32")
    machine.rule(optim.SGD(lr=1.0))
    request = machine.push(0, "k", 1, np.ones(COUNT, "i4"), fused=True)
    assert isinstance(machine.error(request), DTypeMismatchError)
    np.testing.assert_array_equal(machine.read("k", 0, dtype="int32"), np.arange(COUNT))


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_hyperparameters_by_key(mode: str) -> None:
    """Also of keys that come later; and a chunk remembers those of its own key alone."""
    machine = Machine(mode, 1)
    machine.init_all(3, np.zeros(COUNT, "f4"))
    machine.rule(optim.SGD(lr=1.0).for_keys([4, 5], lr=10.0, momentum=0.5))
    machine.init_all(4, np.zeros(COUNT, "f4"))
    expected = {3: 0.0, 4: 0.0}
    for step, rates in enumerate([(1.0, 10.0), (2.0, 10.0), (2.0, 7.0)], 1):
        if step > 1:
            changed = {"lr": 2.0} if step == 2 else {"lr@4": 7.0}
            assert machine.ok(machine.send(0, m.SetHyperparams, step - 1, changed, 0))
        for key, rate, gradient in ((3, rates[0], 1.0), (4, rates[1], 2.0 - 0.5 ** (step - 1))):
            machine.push(0, key, step, np.ones(COUNT, "f4"))
            expected[key] -= rate * gradient
            np.testing.assert_allclose(machine.read(key, step if mode == "sync" else 0), np.full(COUNT, expected[key]))
    assert machine.slot(4).rule_in_force.rule == optim.SGD(lr=7.0, momentum=0.5)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_what_one_client_says_long_before_the_others_is_not_kept_for_ever(mode: str) -> None:
    """A server that joins is told all of it in one message; what is still kept is compared."""
    machine = Machine(mode, 2)
    machine.init_all("k", whole_numbers(COUNT))
    machine.rule(optim.SGD(lr=1.0))
    for ordinal in range(1, 6001):
        assert machine.ok(machine.send(0, m.SetHyperparams, ordinal, {"lr": 1.0 / ordinal}, 0))
    rulebook = machine.state.parts[0].shards[1].rulebook
    state = rulebook.dump()
    assert len(encode(m.Install(0, 1, 0, 1, 1, 1, state))) < MAX_HEADER_BYTES / 2
    copy = Rulebook(1, in_rounds=mode == "sync")
    copy.restore(state)
    assert copy.dump() == state
    for ordinal in (1, 2, 3):
        assert machine.ok(machine.send(1, m.SetHyperparams, ordinal, {"lr": 1.0 / ordinal}, 0))
    other = machine.send(1, m.SetHyperparams, 5999, {"lr": 7.0}, 0)
    assert isinstance(machine.error(other), ConfigError), "it is not what the other has said"
    for ordinal in range(4, 6001):
        assert machine.ok(machine.send(1, m.SetHyperparams, ordinal, {"lr": 1.0 / ordinal}, 0))
    assert len(encode(m.Install(0, 1, 0, 1, 1, 1, rulebook.dump()))) < MAX_HEADER_BYTES / 2
    assert rulebook.rule is not None
    assert rulebook.rule.hyperparams()["lr"] == 1.0 / 6000


def test_a_rule_that_has_become_too_long_to_be_handed_on_is_refused() -> None:
    machine = Machine("sync", 1)
    machine.init_all("k", whole_numbers(COUNT))
    machine.rule(optim.SGD(lr=1.0))
    errors = []
    for ordinal in range(1, 10):
        changes = {f"lr@layer {ordinal}.{i} of a long name": 0.5 for i in range(1000)}
        errors.append(machine.error(machine.send(0, m.SetHyperparams, ordinal, changes, 0)))
        if errors[-1] is not None:
            break
    assert isinstance(errors[-1], ConfigError)
    assert "limit 131072" in str(errors[-1])
    state = machine.state.parts[0].shards[1].rulebook.dump()
    assert len(encode(m.Install(0, 1, 0, 1, 1, 1, state))) <= MAX_HEADER_BYTES
    assert machine.ok(machine.send(0, m.SetHyperparams, len(errors), {"lr": 0.25}, 0)), "it can go on with another"


def test_what_is_said_of_chunks_with_a_call_is_said_once_and_no_more_than_there_are() -> None:
    machine = Machine("sync", 3)
    for key in range(20):
        machine.init_all(key, whole_numbers(COUNT))
    machine.rule(optim.SGD(lr=1.0))
    for key in range(20):
        for step in (1, 2, 3):  # the last one is out of turn
            machine.push(0, key, step, whole_numbers(COUNT))
        machine.push(1, key, 1, whole_numbers(COUNT))
    logged: list[entries.HyperCall] = []
    shard = machine.state.parts[0].shards[STORE]
    shard._log = lambda entry, payloads: bool(logged.append(entry))  # type: ignore[assignment,func-returns-value,arg-type]
    for client in range(3):
        assert machine.ok(machine.send(client, m.SetHyperparams, 1, {"lr": 0.5}, 0))
    assert [len(entry.ahead) for entry in logged] == [20, 0, 0]
    assert {pushed for _, _, pushed in logged[0].ahead} == {2}
    assert [change.from_round for change in machine.slot(7).rules][-1] == 3, "after what the first one has pushed"
