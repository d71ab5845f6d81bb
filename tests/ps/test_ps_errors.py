"""Bad requests go back to whoever sent them, and leave no trace."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ps_helpers import STORE, Machine, pushes_still_work, route, whole_numbers

from kvmpi import optim
from kvmpi.errors import (
    ConfigError,
    DTypeMismatchError,
    KeyNotInitializedError,
    KVError,
    ProtocolError,
    ShapeMismatchError,
    UnsupportedError,
)
from kvmpi.ps.scheduler import SchedulerState
from kvmpi.ps.server import MAX_CLIENTS
from kvmpi.ps.shard import Shard
from kvmpi.wire import MAX_HEADER_BYTES, encode, entries
from kvmpi.wire import messages as m

COUNT = 5


# ---- init


def test_early_clients_wait_for_client_0_and_get_its_value() -> None:
    machine = Machine("sync", 3)
    early = [machine.init(client, "k", whole_numbers(COUNT)) for client in (2, 1)]
    assert [machine.last(request) for request in early] == [None, None]
    machine.init(2, "k", whole_numbers(COUNT), chunk=0)
    again = machine.send(2, m.Init, "k", 0, 1, COUNT, [COUNT], "float32", request=early[0])
    assert machine.last(again) == m.Waiting(again, [0])
    assert machine.ok(machine.init(0, "k", whole_numbers(COUNT)))
    assert machine.ok(early[1])
    np.testing.assert_array_equal(machine.read("k", 0, 1), whole_numbers(COUNT))


def test_a_repeated_init_does_not_set_the_value_back() -> None:
    machine = Machine("sync", 1)
    machine.init_all("k", whole_numbers(COUNT))
    pushes_still_work(machine)
    assert machine.ok(machine.init(0, "k", whole_numbers(COUNT)))
    np.testing.assert_array_equal(machine.read("k", 1), whole_numbers(COUNT, 50, 0, 1))


def test_the_server_keeps_its_own_copy_of_the_initial_value() -> None:
    machine = Machine("sync", 1)
    mine = bytearray(whole_numbers(COUNT).tobytes())
    frames = [memoryview(mine)]
    machine.state.handle(route(0), m.Init(1, "k", 0, 1, COUNT, [COUNT], "float32"), frames)
    mine[:] = bytes(len(mine))
    np.testing.assert_array_equal(machine.read("k"), whole_numbers(COUNT))


MISMATCHES: dict[str, tuple[dict[str, Any], type[KVError]]] = {
    "shape": ({"shape": [COUNT, 1]}, ShapeMismatchError),
    "dtype": ({"dtype": "int32"}, DTypeMismatchError),
    "chunks": ({"num_chunks": 2}, ConfigError),
    "elements in the chunk": ({"count": COUNT + 1}, ConfigError),
}


def test_many_chunks_with_clients_that_wait_for_them_cost_no_more_each(monkeypatch: pytest.MonkeyPatch) -> None:
    checks, real = 0, Shard._check_same

    def check_same(*arguments: Any) -> None:
        nonlocal checks
        checks += 1
        real(*arguments)

    monkeypatch.setattr(Shard, "_check_same", check_same)
    num_chunks, machine = 50, Machine("sync", 4)
    made = {"num_chunks": num_chunks, "shape": [num_chunks]}
    early = [machine.init(c, "k", np.zeros(1, "f4"), chunk=i, **made) for c in (1, 2, 3) for i in range(num_chunks)]
    other = machine.init(3, "k", np.zeros(1, "f4"), chunk=7, num_chunks=num_chunks + 1, shape=[num_chunks])
    early.pop(2 * num_chunks + 7)  # it has said another thing since
    for chunk in range(num_chunks):
        assert machine.ok(machine.init(0, "k", np.zeros(1, "f4"), chunk=chunk, **made))
    assert all(machine.ok(request) for request in early)
    assert isinstance(machine.error(other), ConfigError), "the first chunk shows it"
    assert checks < 4 * 3 * num_chunks


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("name", MISMATCHES)
def test_a_mismatch_at_init_is_told_to_the_offender_only(name: str, early: bool) -> None:
    changes, expected = MISMATCHES[name]
    machine = Machine("sync", 3)
    if not early:
        machine.init(0, "k", whole_numbers(COUNT))
    offender = machine.init(1, "k", whole_numbers(COUNT), **changes)
    fine = machine.init(2, "k", whole_numbers(COUNT))
    if early:
        machine.init(0, "k", whole_numbers(COUNT))
    error = machine.error(offender)
    assert type(error) is expected
    assert "'k'" in str(error)
    assert "client 1" in str(error)
    assert machine.ok(fine)
    assert machine.ok(machine.init(1, "k", whole_numbers(COUNT)))
    pushes_still_work(machine)


def test_a_mismatch_does_not_blame_client_0_for_what_another_gave() -> None:
    machine = Machine("sync", 3, on_client_loss="shrink")
    machine.lose(0)
    assert machine.ok(machine.init(1, "k", whole_numbers(COUNT), gives=True))
    error = machine.error(machine.init(2, "k", whole_numbers(COUNT + 1)))
    assert isinstance(error, ShapeMismatchError)
    assert "client 2 has shape (6,), the client that gave its value has (5,)" in str(error)


def test_an_early_client_with_another_number_of_chunks_is_not_left_waiting() -> None:
    machine = Machine("sync", 2)
    offender = machine.init(1, "k", whole_numbers(COUNT), chunk=5, num_chunks=6)
    machine.init(0, "k", whole_numbers(COUNT))
    assert isinstance(machine.error(offender), ConfigError)


def test_client_0_itself_cannot_mix_layouts() -> None:
    machine = Machine("sync", 1)
    assert machine.ok(machine.init(0, "k", whole_numbers(COUNT), num_chunks=2))
    other = machine.init(0, "k", whole_numbers(COUNT).astype("f8"), dtype="float64", chunk=1, num_chunks=2)
    assert isinstance(machine.error(other), DTypeMismatchError)
    assert isinstance(machine.error(machine.init(0, "k", whole_numbers(COUNT), chunk=2, num_chunks=2)), ProtocolError)


@pytest.mark.parametrize("count", [COUNT + 1, -1, 1 << 62])
def test_an_init_whose_count_is_not_that_of_its_payload_is_refused(count: int) -> None:
    machine = Machine("sync", 1)
    assert isinstance(machine.error(machine.init(0, "k", whole_numbers(COUNT), count=count)), ProtocolError)
    machine.init_all("k", whole_numbers(COUNT))
    pushes_still_work(machine)


def test_an_unknown_dtype_is_refused() -> None:
    machine = Machine("sync", 1)
    assert isinstance(machine.error(machine.init(0, "k", whole_numbers(COUNT), dtype="object")), DTypeMismatchError)


# ---- malformed requests


BAD_PUSHES: dict[str, tuple[dict[str, Any], type[KVError]]] = {
    "a byte short": ({"value": whole_numbers(COUNT).tobytes()[:-1]}, ProtocolError),
    "an element more": ({"value": whole_numbers(COUNT + 1)}, ProtocolError),
    "empty": ({"value": b""}, ProtocolError),
    "unknown key": ({"key": "nobody"}, KeyNotInitializedError),
    "int for str": ({"key": 7}, KeyNotInitializedError),
    "unknown codec": ({"codec": "zip"}, UnsupportedError),
    "skipped step": ({"step": 3}, ProtocolError),
    "huge step": ({"step": 1 << 63}, ProtocolError),
    "step 0": ({"step": 0}, ProtocolError),
    "negative step": ({"step": -1}, ProtocolError),
}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("name", BAD_PUSHES)
def test_a_bad_push_is_refused_and_leaves_no_trace(name: str, mode: str, fused: bool) -> None:
    machine = Machine(mode, 2)
    machine.init_all("k", np.zeros(COUNT, "f4"))
    machine.rule(optim.Test(lr=-1.0))
    changes, expected = BAD_PUSHES[name]
    good = {"client": 0, "key": "k", "step": 1, "value": whole_numbers(COUNT), "codec": "none", "fused": fused}
    error = machine.error(machine.push(**{**good, **changes}))  # type: ignore[arg-type]
    assert type(error) is expected
    machine.push(0, "k", 1, whole_numbers(COUNT, 0))
    machine.push(1, "k", 1, whole_numbers(COUNT, 1))
    np.testing.assert_array_equal(machine.read("k", 1), whole_numbers(COUNT, 0) + whole_numbers(COUNT, 1))


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("steps", [
    (0, 0, 0, (1 << 64) - 1), (0, 0, (1 << 64) - 1, (1 << 64) - 1), (0, (1 << 64) - 1, 0, 0), (1 << 63, 0, 0, 0),
    (-(1 << 63), 0, 0, 0), (0, 0, 2, 1), (0, -1, 0, 0), (0, 0, -1, 0),
], ids=str)  # fmt: skip
def test_a_push_of_steps_that_cannot_be_is_refused(mode: str, steps: tuple[int, ...]) -> None:
    """at, done, earliest and latest: servers count on with them, and number snapshots by them."""
    machine = Machine(mode, 1)
    machine.init_all("k", np.zeros(COUNT, "f4"))
    machine.rule(optim.Test(lr=-1.0))
    fields = ("k", 0, 1, "none", False, False, 0, -1, False, *steps)
    sent = machine.send(0, m.Push, *fields, payloads=[whole_numbers(COUNT)], request=0)
    assert type(machine.error(sent)) is ProtocolError
    machine.push(0, "k", 1, whole_numbers(COUNT))
    np.testing.assert_array_equal(machine.read("k", 1), whole_numbers(COUNT))


SHAPES: dict[str, dict[str, Any]] = {
    "other number of elements": {"shape": [COUNT + 2]},
    "negative": {"shape": [-COUNT]},
    "negative twice": {"shape": [-1, -COUNT]},
    "too large a chunk": {"shape": [COUNT - 1], "num_chunks": 2},
    "more chunks than elements": {"num_chunks": 1 << 62},
    "more dimensions than an array can have": {"shape": [1] * 64 + [COUNT]},
}


@pytest.mark.parametrize("name", SHAPES)
def test_an_impossible_shape_is_refused(name: str) -> None:
    machine = Machine("sync", 2)
    assert isinstance(machine.error(machine.init(0, "k", whole_numbers(COUNT), **SHAPES[name])), ProtocolError)
    machine.init_all("k", whole_numbers(COUNT))
    pushes_still_work(machine)


STATES: dict[str, tuple[int, list[str]]] = {
    "negative": (-1, ["value"]),
    "so many updates that the next one could not be counted": ((1 << 64) - 1, ["value"]),
    "a name twice": (0, ["value", "value"]),
    "what only servers keep": (0, ["value", "met"]),
}


@pytest.mark.parametrize("name", STATES)
def test_impossible_states_are_refused(name: str) -> None:
    machine = Machine("sync", 2)
    machine.init_all("k", whole_numbers(COUNT))
    updates, names = STATES[name]
    request = machine.send(1, m.PutState, "k", 0, updates, names, payloads=[whole_numbers(COUNT)] * len(names))
    assert isinstance(machine.error(request), ProtocolError)
    pushes_still_work(machine)


@pytest.mark.parametrize(("kind", "fields"), [
    (m.Pull, ("k", 0, 0)), (m.Query, ("k", 0, 0)), (m.GetState, ("k", 0)), (m.SetRule, (1, "sgd", {"lr": 1.0})),
    (m.Finish, ()),
])  # fmt: skip
def test_payloads_where_none_belong_are_refused(kind: Any, fields: tuple[Any, ...]) -> None:
    machine = Machine("sync", 2)
    machine.init_all("k", whole_numbers(COUNT))
    error = machine.error(machine.send(0, kind, *fields, payloads=[b"1234"] * 3))
    assert isinstance(error, ProtocolError)
    assert "3 frames" in str(error)
    pushes_still_work(machine)


LONG = "x" * (MAX_HEADER_BYTES - 1000)


@pytest.mark.parametrize(("kind", "fields", "payloads"), [
    (m.Init, (LONG, 0, 1, COUNT, [COUNT], "float32"), 1),
    (m.SetRule, (1, "sgd", {"lr": 1.0, "momentum": [0.5] * (len(LONG) // 9)}), 0),
    (m.PutState, ("k", 0, 0, [LONG]), 1),
])  # fmt: skip
def test_what_could_not_be_handed_on_to_other_servers_is_refused(kind: Any, fields: Any, payloads: int) -> None:
    """It would be sent again and again, and hold up every answer behind it."""
    machine = Machine("sync", 2)
    machine.init_all("k", whole_numbers(COUNT))
    seq = machine.state.parts[0].seq
    encode(kind(99, *fields))
    error = machine.error(machine.send(0, kind, *fields, payloads=[whole_numbers(COUNT)] * payloads))
    assert isinstance(error, ProtocolError | ConfigError)
    assert machine.state.parts[0].seq == seq
    pushes_still_work(machine)


def test_a_codec_is_not_of_any_length() -> None:
    """An asynchronous push is logged with what its codec is called, and its header may be as long as that of a log."""
    machine = Machine("async", 2)
    machine.init_all("k", whole_numbers(COUNT))
    machine.rule(optim.Test(lr=-1.0))
    seq, codec = machine.state.parts[0].seq, "2bit:0.5".ljust(len(LONG), "0")
    error = machine.error(machine.push(0, "k", 1, b"12", codec=codec))
    assert isinstance(error, UnsupportedError)
    assert machine.state.parts[0].seq == seq
    assert machine.ok(machine.push(0, "k", 1, b"12", codec="2bit:0.5"))


def test_a_server_that_is_alone_has_nobody_to_tell_which_chunks_are_ahead() -> None:
    machine = Machine("sync", 2)
    machine.rule(optim.SGD(lr=1.0))
    for i in range(80):
        machine.init_all(key := f"{i} {'x' * 4000}", whole_numbers(COUNT))
        assert machine.ok(machine.push(0, key, 1, whole_numbers(COUNT)))
    assert machine.ok(machine.send(0, m.SetHyperparams, 1, {"lr": 2.0}, 0))


@pytest.mark.parametrize("message", [
    m.Extend(0, 1), m.Log(0, 1, 5, STORE, entries.Gone(0, "so they say", 1)),
    m.Install(0, 1, 0, 1, 5, STORE, entries.Begin()),
])  # fmt: skip
def test_a_client_cannot_speak_like_a_server(message: Any) -> None:
    machine = Machine("sync", 2)
    machine.init_all("k", whole_numbers(COUNT))
    (reply,) = machine.state.handle(route(1), message, [])
    assert isinstance(reply.message, m.Failure)
    assert machine.state.parts[0]._before is None
    pushes_still_work(machine)


@pytest.mark.parametrize("payloads", [[], [bytes(4 * COUNT)] * 2])
def test_a_wrong_number_of_frames_is_refused(payloads: list[bytes]) -> None:
    machine = Machine("sync", 1)
    machine.init_all("k", whole_numbers(COUNT))
    request = machine.send(0, m.Push, "k", 0, 1, "none", False, payloads=payloads)
    assert isinstance(machine.error(request), ProtocolError)
    pushes_still_work(machine)


@pytest.mark.parametrize("kind", [m.Pull, m.Query, m.GetState, m.PutState])
def test_unknown_keys_are_named(kind: Any) -> None:
    machine = Machine("sync", 1)
    fields = {m.Pull: (0,), m.Query: (0,), m.GetState: (), m.PutState: (0, [])}[kind]
    error = machine.error(machine.send(0, kind, "nobody", 0, *fields))
    assert isinstance(error, KeyNotInitializedError)
    assert "'nobody'" in str(error)


@pytest.mark.parametrize("part", [-1, 2, (1 << 64) - 1])
def test_a_part_that_the_job_does_not_have_is_not_said_to_be_elsewhere(part: int) -> None:
    """Nobody has it: whoever asks would look for it until its time is over."""
    machine = Machine("sync", 2, parts=2)
    machine.init_all("k", whole_numbers(COUNT))
    error = machine.error(machine.send(0, m.Pull, "k", 0, 0, part))
    assert isinstance(error, ProtocolError)
    assert f"no part {part}" in str(error)
    pushes_still_work(machine)


def test_a_session_begins_with_hello() -> None:
    machine = Machine("sync", 2, hello=False)
    for request in (machine.pull(0, "k", 0), machine.push(0, "k", 1, b""), machine.init(0, "k", whole_numbers(COUNT))):
        assert isinstance(machine.last(request), m.Moved), "the sender may be known to the process before this one"
    assert machine.ok(machine.send(0, m.Bye)), "a good-bye may be repeated"
    assert not machine.state.parts[0].shards


HELLOS: dict[str, dict[str, Any]] = {
    "negative client": {"client": -1},
    "client beyond the number": {"client": 2},
    "nobody": {"client": 0, "num_clients": 0},
    "a crowd": {"client": 0, "num_clients": MAX_CLIENTS + 1},
    "other number of clients": {"client": 0, "num_clients": 3},
    "other mode": {"client": 0, "mode": "async"},
    "unknown mode": {"client": 0, "mode": "magic", "store": 9},
    "another client on this route": {"client": 1, "at": route(0)},
    "another store on this route": {"client": 0, "store": 5, "at": route(0)},
}


@pytest.mark.parametrize("name", HELLOS)
def test_an_impossible_hello_is_refused_and_hurts_nobody(name: str) -> None:
    machine = Machine("sync", 2)
    machine.init_all("k", whole_numbers(COUNT))
    request = machine.hello(**{"at": b"stranger", **HELLOS[name]})
    assert isinstance(machine.error(request), ProtocolError | ConfigError)
    pushes_still_work(machine)
    assert len(machine.state.parts[0].shards) == 1


def test_what_only_the_scheduler_says_is_refused_from_a_client() -> None:
    machine = Machine("sync", 2)
    machine.init_all("k", whole_numbers(COUNT))
    replies = machine.state.handle(route(1), m.View(9, 0, [], [], [m.Lost(0, STORE, 1 << 60, "so they say")]), [])
    assert isinstance(replies[0].message, m.Failure)
    assert machine.state.handle(route(1), m.Heartbeat(3), [])[0].message.error == "ProtocolError"  # type: ignore[attr-defined]
    pushes_still_work(machine)


def test_an_unexpected_exception_is_a_failure_for_that_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine("sync", 2)
    machine.init_all("k", whole_numbers(COUNT))

    def no_memory(*args: Any) -> None:
        raise MemoryError("none left")

    with monkeypatch.context() as patch:
        patch.setattr(machine.slot("k"), "_empty", no_memory)
        request = machine.push(0, "k", 1, whole_numbers(COUNT, 50, 0, 1))
    error = machine.error(request)
    assert type(error) is KVError
    assert "MemoryError" in str(error)
    assert machine.ok(machine.push(0, "k", 1, whole_numbers(COUNT, 50, 0, 1), request=request)), "it may be tried again"
    pushes_still_work(machine)


def test_an_answer_always_fits_into_a_header() -> None:
    machine = Machine("sync", MAX_CLIENTS, hello=False)
    for client in (0, 1, MAX_CLIENTS - 1):
        assert machine.ok(machine.hello(client))
    shape = [1] * 50_000
    machine.init(0, "k" * 60_000, whole_numbers(1), shape=shape)
    machine.init(1, "k" * 60_000, whole_numbers(1), shape=[*shape, 1])
    machine.init(0, "k", whole_numbers(COUNT))
    held = machine.push(MAX_CLIENTS - 1, "k", 1, whole_numbers(COUNT))
    machine.push(MAX_CLIENTS - 1, "k", 1, whole_numbers(COUNT), request=held)
    assert isinstance(machine.last(held), m.Waiting)
    machine.pull(0, "\ud800", 0)
    machine.pull(0, "x" * 100_000, 0)
    for replies in machine.replies.values():
        for reply in replies:
            assert len(encode(reply.message)) < 10_000


KEYS = st.sampled_from(["k", "nobody", 0])
INTS = st.sampled_from([-1, 0, 1, 2, 3, 1 << 63])
PAYLOADS = st.lists(st.sampled_from([b"", bytes(4 * COUNT), bytes(2 * COUNT), bytes(3)]), max_size=2)
REQUESTS = st.one_of(
    st.builds(m.Hello, INTS, st.sampled_from([STORE, 2]), st.sampled_from(["sync", "async", "?"]), INTS, INTS, INTS),
    st.builds(m.Init, INTS, KEYS, INTS, INTS, INTS, st.just([COUNT]), st.sampled_from(["float32", "float16", "?"])),
    st.builds(m.Push, INTS, KEYS, INTS, INTS, st.sampled_from(["none", "fp16", "bf16", "?"]), st.booleans()),
    st.builds(m.Pull, INTS, KEYS, INTS, INTS),
    st.builds(m.Query, INTS, KEYS, INTS, INTS),
    st.builds(m.SetRule, INTS, INTS, st.sampled_from(["sgd", "elastic", "?"]), st.just({"lr": 1.0})),
    st.builds(m.SetHyperparams, INTS, INTS, st.just({"lr": 1.0}), INTS),
    st.builds(m.GetState, INTS, KEYS, INTS),
    st.builds(m.PutState, INTS, KEYS, INTS, INTS, st.sampled_from([[], ["value"], ["momentum"]])),
    st.builds(m.Bye, INTS),
    st.builds(m.Ack, INTS, INTS),
    st.builds(m.View, INTS, INTS, st.just([]), st.just([]), st.lists(st.builds(m.Lost, INTS, INTS, INTS, st.just("")))),
    st.builds(m.Extend, INTS, INTS),
    st.builds(m.Log, INTS, INTS, INTS, INTS, st.just(entries.Gone(0, "so they say", 1))),
    st.builds(m.Install, INTS, INTS, INTS, INTS, INTS, INTS, st.just(entries.Begin())),
    st.just(ProtocolError("no message")),
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from([b"stranger", b"other"]), REQUESTS, PAYLOADS), max_size=40))
def test_strangers_cannot_disturb_a_store(requests: list[tuple[bytes, Any, list[bytes]]]) -> None:
    """Whatever two peers outside the store send: no exception leaves the server, and the store's rounds are right."""
    machine = Machine("sync", 2)
    machine.init_all("k", whole_numbers(COUNT))
    for at, message, payloads in requests:
        if isinstance(message, m.Hello) and message.store == STORE:
            message.store = 2  # a peer that says it is client 0, with a later incarnation, would be believed
        for reply in machine.state.handle(at, message, [memoryview(payload) for payload in payloads]):
            assert reply.route == at
            encode(reply.message)
    pushes_still_work(machine)


def test_nobody_answers_a_failure() -> None:
    """Two that did would never stop."""
    machine = Machine("sync", 1)
    scheduler = SchedulerState(1, 10.0)
    scheduler.handle(b"here", m.Register(1, "client", 0, 1, 1, 1, "host", []), 0.0)
    for at in (route(0), b"here", b"a stranger"):
        for request in (-1, 7):
            said = m.Failure(request, "ProtocolError", "no request of mine")
            assert list(machine.state.handle(at, said, [])) == []
            assert scheduler.handle(at, said, 0.0) == []
    machine.init_all("k", np.zeros(COUNT, "f4"))
    pushes_still_work(machine)
