"""Pushes and pulls of rows on one server: sums against float64, what is asked again, what does not fit, replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from ps_helpers import Machine, bfloat16, deadline, from_bfloat16, route

from kvmpi import optim
from kvmpi.errors import KVError, ProtocolError, UnsupportedError
from kvmpi.kernels.rows import Rows
from kvmpi.ps import replay
from kvmpi.ps.row_chunks import ArrivingRows
from kvmpi.ps.shard import Shard
from kvmpi.wire import messages as m

ROWS, WIDTH = 6, 2
START = np.arange(12, dtype="f4").reshape(ROWS, WIDTH)


def machine_for(
    mode: str, num_clients: int, rule: optim.Rule | None = None, dtype: str = "float32", **how: Any
) -> Machine:
    machine = Machine(mode, num_clients, **how)
    start = bfloat16(START.reshape(-1)) if dtype == "bfloat16" else START.reshape(-1).astype(dtype)
    for client in range(num_clients):
        assert machine.ok(machine.init(client, "k", start, dtype, shape=[ROWS, WIDTH]))
    if rule is not None:
        machine.rule(rule)
    return machine


def rows_of(client: int, step: int, ids: list[int]) -> np.ndarray:
    """Small whole numbers, which depend on everything."""
    return np.array([[100 * step + 10 * client + i, i + 1] for i in ids], "f4").reshape(len(ids), WIDTH)


def push(machine: Machine, client: int, step: int, ids: list[int], *, fused: bool = False, **how: Any) -> int:
    values = how.get("values", rows_of(client, step, ids))
    payloads = [np.array(ids, "<u4"), values]
    fields = ("k", 0, step, how.get("codec", "none"), fused, False, 0, how.get("rows", len(ids)))
    return machine.send(client, m.Push, *fields, payloads=payloads, request=how.get("request", 0))


def pull(machine: Machine, client: int, min_round: int, ids: list[int]) -> int:
    return machine.send(client, m.Pull, "k", 0, min_round, 0, len(ids), payloads=[np.array(ids, "<u4")])


def answer(machine: Machine, request: int) -> tuple[list[int], list[list[float]]]:
    """The rows that were changed, as an answer says."""
    assert machine.ok(request)
    last = machine.replies[request][-1]
    assert isinstance(last.message, m.Value)
    ids, values = last.payloads
    assert last.message.rows == ids.size
    return ids.tolist(), values.reshape(-1, WIDTH).tolist()


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16", "int32"])
@pytest.mark.parametrize("rule", [None, optim.Test(lr=-1.0)], ids=repr)
def test_rounds_of_rows(rule: optim.Rule | None, dtype: str) -> None:
    """Client c pushes in every step other rows; half types are exact for what is pushed here."""
    if rule is not None and dtype == "int32":
        rule = optim.Test(lr=-1.0)
    machine = machine_for("sync", 3, rule, dtype)
    expected = START.astype("f8")
    chosen = [[[0, 2], [2, 5], []], [[], [], []], [[1], [1], [1]], [[0, 1, 2, 3, 4, 5], [3], [0, 5]]]
    for step, of_clients in enumerate(chosen, 1):
        total: dict[int, np.ndarray] = {}
        requests = []
        for client in (2, 0, 1):
            ids = of_clients[client]
            values = np.array([[client + 1, i] for i in ids], "f4").reshape(len(ids), WIDTH)
            for i, row in zip(ids, values, strict=True):
                total[i] = total.get(i, np.zeros(WIDTH)) + row
            wire = bfloat16(values.reshape(-1)) if dtype == "bfloat16" else values.astype(dtype)
            requests.append(push(machine, client, step, ids, values=wire, fused=client == 0))
        for i, row in total.items():
            expected[i] = row if rule is None else expected[i] + row
        found = machine.read("k", step, dtype=dtype)
        as_float = from_bfloat16(found) if dtype == "bfloat16" else found
        np.testing.assert_array_equal(as_float.reshape(ROWS, WIDTH).astype("f8"), expected)
        last = machine.replies[requests[1]][-1]
        assert last.payloads[0].tolist() == sorted(total)
        assert last.payloads[1].tobytes() == found.reshape(ROWS, WIDTH)[sorted(total)].tobytes()
        some = machine.replies[pull(machine, 1, step, [0, 5])][-1]
        assert some.payloads[0].tobytes() == found.reshape(ROWS, WIDTH)[[0, 5]].tobytes()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_round_with_a_whole_array_is_of_the_whole_value(order: tuple[int, int]) -> None:
    machine = machine_for("sync", 2, optim.SGD(lr=1.0, momentum=0.5))
    whole = np.arange(12, dtype="f4") + 1
    for step, (of_rows, of_all) in enumerate([order, order], 1):
        one = push(machine, of_rows, step, [1, 3], values=np.full((2, 2), 10.0, "f4"), fused=True)
        machine.push(of_all, "k", step, whole)
        assert machine.value(one) is not None, "the answer is the whole value"
    pushed = whole.reshape(ROWS, WIDTH).astype("f8")
    pushed[[1, 3]] += 10
    np.testing.assert_array_equal(machine.read("k", 2).reshape(ROWS, WIDTH), START - 2.5 * pushed)
    # From here on rows alone: of all others the momentum stays with them.
    before = machine.read("k", 2).copy().reshape(ROWS, WIDTH)
    for client in range(2):
        push(machine, client, 3, [4], values=np.zeros((1, 2), "f4"))
    after = machine.read("k", 3).reshape(ROWS, WIDTH)
    np.testing.assert_array_equal(after[[0, 1, 2, 3, 5]], before[[0, 1, 2, 3, 5]])
    assert (after[4] != before[4]).all()


def test_a_compressed_push() -> None:
    machine = machine_for("sync", 1, optim.Test(lr=-1.0))
    push(machine, 0, 1, [2], values=np.array([[0.5, 3]], "f2"), codec="fp16")
    np.testing.assert_array_equal(machine.read("k", 1)[4:6], [4.5, 8.0])


# ---- once and again


@pytest.mark.parametrize("replicas", [0, 1])
def test_what_is_repeated_is_answered_and_not_added(replicas: int) -> None:
    machine = machine_for("sync", 2, optim.Test(lr=-1.0), replicas=replicas)
    first = push(machine, 0, 1, [1, 2], fused=True)
    push(machine, 0, 1, [1, 2], fused=True, request=first)
    second = push(machine, 1, 1, [2], fused=True)
    expected = answer(machine, first)
    assert expected == answer(machine, second)
    assert expected[0] == [1, 2]
    for _ in range(2):
        push(machine, 0, 1, [1, 2], fused=True, request=first)
        assert answer(machine, first) == expected
        machine.send(1, m.Query, "k", 0, 1, True, request=second)
        assert answer(machine, second) == expected
    np.testing.assert_array_equal(machine.read("k", 1).reshape(ROWS, WIDTH)[3:], START[3:])


@pytest.mark.parametrize("replicas", [0, 1])
@pytest.mark.parametrize("rule", [None, optim.Test(lr=-1.0)], ids=repr)
def test_what_is_made_again_with_other_rows_is_answered_with_these_too(rule: optim.Rule | None, replicas: int) -> None:
    machine = machine_for("sync", 2, rule, replicas=replicas, on_client_loss="wait")
    push(machine, 0, 1, [2], fused=True)
    machine.lose(0)
    assert machine.ok(machine.hello(0, 2, at=b"reborn"))

    def again(ids: list[int], request: int = 0) -> int:
        """As a client asks after every silence: what has been accepted without its payload."""
        if any(isinstance(reply.message, m.Accepted) for reply in machine.replies.get(request, ())):
            return machine.send(b"reborn", m.Query, "k", 0, 1, True, request=request)
        values, fields = np.full((len(ids), WIDTH), 7, "f4"), ("k", 0, 1, "none", True, False, 0, len(ids))
        return machine.send(b"reborn", m.Push, *fields, payloads=[np.array(ids, "<u4"), values], request=request)

    expected = START.copy()
    expected[[2, 4]] = rows_of(0, 1, [2])[0], rows_of(1, 1, [4])[0]
    if rule is not None:
        expected[[2, 4]] += START[[2, 4]]
    in_open_round = again([0, 5])
    again([0, 5], in_open_round)
    of_other = push(machine, 1, 1, [4], fused=True)
    for _ in range(2):  # once more where the answer was lost
        assert answer(machine, in_open_round) == ([0, 2, 4, 5], expected[[0, 2, 4, 5]].tolist())
        again([0, 5], in_open_round)
    assert answer(machine, of_other) == ([2, 4], expected[[2, 4]].tolist()), "who was in the round gets what it changed"
    assert answer(machine, again([1])) == ([1, 2, 4], expected[[1, 2, 4]].tolist())
    np.testing.assert_array_equal(machine.read("k", 1, client=1).reshape(ROWS, WIDTH), expected)


@pytest.mark.parametrize("held", [False, True])
def test_a_push_to_a_round_that_does_without_its_client_is_answered_with_its_rows_too(*, held: bool) -> None:
    machine = machine_for("sync", 2, optim.Test(lr=-1.0), on_client_loss="shrink")
    machine.lose(0)
    assert machine.ok(machine.hello(0, 2, at=b"reborn"))
    assert machine.ok(machine.send(b"reborn", m.Return))
    assert machine.ok(machine.send(b"reborn", m.Enter, 1))
    fields, payloads = ("k", 0, 1, "none", True, False, 0, 1), [np.array([0], "<u4"), rows_of(0, 1, [0])]
    if held:
        request = machine.send(b"reborn", m.Push, *fields, payloads=payloads)
        push(machine, 1, 1, [4])
    else:
        push(machine, 1, 1, [4])
        request = machine.send(b"reborn", m.Push, *fields, payloads=payloads)
    assert answer(machine, request) == ([0, 4], [START[0].tolist(), (START[4] + rows_of(1, 1, [4])[0]).tolist()])


def test_asynchronous_pushes_are_answered_with_their_own_rows() -> None:
    machine = machine_for("async", 2, optim.Test(lr=-1.0))
    one = push(machine, 0, 1, [1], fused=True)
    push(machine, 1, 1, [1, 2])
    assert answer(machine, one) == ([1], (START[[1]] + rows_of(0, 1, [1])).tolist())
    push(machine, 0, 1, [1], fused=True, request=one)  # later, and so it is a newer value
    assert answer(machine, one) == ([1], (START[[1]] + rows_of(0, 1, [1]) + rows_of(1, 1, [1])).tolist())


def test_a_pull_waits_for_its_round() -> None:
    machine = machine_for("sync", 2)
    push(machine, 1, 1, [0, 4])
    reader = pull(machine, 1, 1, [4, 5])
    assert machine.last(reader) is None
    push(machine, 0, 1, [4])
    expected = [rows_of(0, 1, [4])[0] + rows_of(1, 1, [4])[0], START[5]]
    np.testing.assert_array_equal(machine.replies[reader][-1].payloads[0].reshape(-1, WIDTH), expected)


# ---- mistakes, also of clients that mean ill


BAD: dict[str, Callable[[Machine], int]] = {
    "unsorted": lambda machine: push(machine, 0, 1, [2, 1]),
    "twice": lambda machine: push(machine, 0, 1, [2, 2]),
    "too large": lambda machine: push(machine, 0, 1, [0, ROWS]),
    "negative": lambda machine: push(machine, 0, 1, [2**32 - 1]),
    "another count": lambda machine: push(machine, 0, 1, [1, 2], rows=1),
    "far more": lambda machine: push(machine, 0, 1, [1], rows=2**60),
    "rows too short": lambda machine: push(machine, 0, 1, [1, 2], values=np.ones((1, 2), "f4")),
    "rows too long": lambda machine: push(machine, 0, 1, [1], values=np.ones(3, "f4")),
    "another dtype": lambda machine: push(machine, 0, 1, [1], values=np.ones((1, 2), "f8")),
    "one frame": lambda machine: machine.send(0, m.Push, "k", 0, 1, "none", True, False, 0, 1, payloads=[b"\1\0\0\0"]),
    "rows for a whole array": lambda machine: machine.send(0, m.Push, "k", 0, 1, "none", True, payloads=[b"", b""]),
    "less than nothing": lambda machine: push(machine, 0, 1, [], rows=-2),
    "a pull of no such row": lambda machine: pull(machine, 0, 0, [1, 60]),
    "a pull with a value": lambda machine: machine.send(0, m.Pull, "k", 0, 0, payloads=[b"\1\0\0\0"]),
    "a pull without ids": lambda machine: machine.send(0, m.Pull, "k", 0, 0, 0, 1),
    "half an id": lambda machine: machine.send(0, m.Pull, "k", 0, 0, 0, 1, payloads=[b"\1\0"]),
}  # fmt: skip


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("what", BAD)
def test_bad_rows_are_refused_and_nothing_is_harmed(what: str, mode: str) -> None:
    machine = machine_for(mode, 2, optim.Test(lr=-1.0))
    assert isinstance(machine.error(BAD[what](machine)), ProtocolError)
    good = [push(machine, client, 1, [client, 3]) for client in range(2)]
    assert all(machine.ok(request) for request in good)
    expected = START.copy()
    for client in range(2):
        expected[[client, 3]] += rows_of(client, 1, [client, 3])
    np.testing.assert_array_equal(machine.read("k").reshape(ROWS, WIDTH), expected)


def test_keys_without_rows_take_none() -> None:
    for shape in ([], [0, 3], [4, 0]):
        machine = Machine("sync", 1)
        count = int(np.prod(shape))
        machine.init(0, "k", np.zeros(count, "f4"), shape=shape)
        assert isinstance(machine.error(push(machine, 0, 1, [0], values=np.zeros(0, "f4"))), ProtocolError)
        if count == 0:
            assert machine.ok(push(machine, 0, 1, [], values=np.zeros(0, "f4")))


@pytest.mark.parametrize("rule", [optim.Elastic(0.5), optim.Outer()], ids=repr)
def test_rows_for_a_rule_of_whole_weights_fail_alone(rule: optim.Rule) -> None:
    machine = machine_for("sync", 2, rule)
    assert isinstance(machine.error(push(machine, 0, 1, [1])), UnsupportedError)
    requests = [machine.push(client, "k", 1, START.reshape(-1), fused=True) for client in range(2)]
    assert all(machine.value(request) is not None for request in requests), "the others' round goes on"


def test_rows_are_judged_by_the_rule_of_their_round() -> None:
    """Client 0 has pushed to round 1 and chosen the rule of the rounds after it; client 1 is slower."""
    machine = machine_for("sync", 2, optim.Test())
    push(machine, 0, 1, [1])
    machine.rule(optim.Outer(), ordinal=2, clients=[0])
    late = push(machine, 1, 1, [1])
    assert machine.ok(late)
    assert isinstance(machine.error(push(machine, 1, 2, [1])), UnsupportedError)


def test_a_rule_that_fails_ends_the_round_without_effect() -> None:
    machine = machine_for("sync", 1, optim.SGD(lr=0.1), dtype="int32")
    request = push(machine, 0, 1, [1], values=np.ones((1, 2), "i4"), fused=True)
    assert isinstance(machine.error(request), KVError)
    last = machine.last(request)
    assert isinstance(last, m.Failure)
    assert last.used
    np.testing.assert_array_equal(machine.slot("k").value.reshape(ROWS, WIDTH), START)


# ---- other servers, snapshots


def copy_of(shard: Shard) -> Shard:
    """What a server has that was given everything."""
    other = Shard(1, shard.store, shard.mode, shard.num_clients, lambda *_: False)
    for entry, payloads in replay.dump(shard)[1:]:
        replay.apply(other, entry, [memoryview(payload.tobytes()) for payload in payloads], keep=False)
    return other


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("rule", [optim.SGD(lr=0.1, momentum=0.9), optim.Adam(), None], ids=repr)
def test_the_log_and_the_state_make_the_same_elsewhere(rule: optim.Rule | None, mode: str) -> None:
    if rule is None and mode == "async":
        return
    machine = machine_for(mode, 2, rule)
    shard = machine.state.parts[0].shards[1]
    follower = copy_of(shard)
    logged: list[Any] = []
    shard._log = shard.rounds._log = shard.singles._log = lambda entry, payloads: (
        bool(logged.append((entry, payloads))) or True
    )
    shard.rounds.is_followed = lambda: True
    rng = np.random.default_rng(5)
    for step in range(1, 9):
        for client in range(2):
            ids = np.flatnonzero(rng.random(ROWS) < 0.4).tolist()
            if (step + client) % 5:
                push(machine, client, step, ids, fused=True)
            else:
                machine.push(client, "k", step, rng.standard_normal(12).astype("f4"), fused=True)
        for entry, payloads in logged:
            frames = [memoryview(bytes(payload.tobytes())) for payload in payloads]
            replay.apply(follower, entry, frames, keep=False)
        logged.clear()
        joiner = copy_of(shard)
        for other in (follower, joiner):
            mine, theirs = shard.slots["k", 0], other.slots["k", 0]
            assert mine.value.tobytes() == theirs.value.tobytes(), f"step {step}"
            assert {n: a.tobytes() for n, a in mine.state.items()} == {n: a.tobytes() for n, a in theirs.state.items()}
            assert (mine.touched is None) == (theirs.touched is None)
            assert mine.touched is None or mine.touched.tolist() == theirs.touched.tolist()
            assert (mine.rounds, mine.steps) == (theirs.rounds, theirs.steps)


def test_what_an_open_round_has_is_handed_over() -> None:
    """The next head goes on with the rows that this one has accepted."""
    machine = machine_for("sync", 2, optim.Test(lr=-1.0))
    shard = machine.state.parts[0].shards[1]
    next_head, logged = copy_of(shard), []
    push(machine, 0, 1, [1, 2])
    shard._log = lambda entry, payloads: bool(logged.append((entry, payloads)))
    shard.hand_over()
    for entry, payloads in logged:
        replay.apply(next_head, entry, [memoryview(payload.tobytes()) for payload in payloads], keep=False)
    frames = [memoryview(np.array([2], "<u4").tobytes()), memoryview(rows_of(1, 1, [2]).tobytes())]
    next_head.handle(1, route(1), m.Push(9, "k", 0, 1, "none", False, False, 0, 1), frames)
    expected = START.copy()
    expected[[1, 2]] += rows_of(0, 1, [1, 2])
    expected[[2]] += rows_of(1, 1, [2])
    np.testing.assert_array_equal(next_head.slots["k", 0].value.reshape(ROWS, WIDTH), expected)


# ---- many chunks, real sockets


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("placement", ["uniform", "hash"])
def test_rows_find_their_chunks(start_job: Callable[..., Any], placement: str, mode: str) -> None:
    job = start_job(3, placement=placement, chunk_bytes=50_000)
    clients = job.connect(2, mode)
    shape, width = (1003, 5, 60), 300
    start = np.random.default_rng(1).integers(0, 99, (1003, 300)).astype("f4")
    for rank, client in enumerate(clients):
        client.add_keys([("big", shape, "float32")])
        client.init("big", start.reshape(-1) if rank == 0 else None, deadline()).wait()
        if mode == "async":
            client.set_rule(optim.Test(lr=-1.0), deadline()).wait()
    expected = start.astype("f8")
    layout = clients[0]._layouts["big"]
    assert len(layout.chunks) >= 24
    assert (len({chunk.server for chunk in layout.chunks}) == 3) == (placement == "uniform")
    for step in range(1, 4):
        works, arriving, named = [], [], []
        for rank, client in enumerate(clients):
            rng = np.random.default_rng([step, rank])
            ids = np.flatnonzero(rng.random(1003) < [0.01, 0.5, 1.0][step - 1])
            values = rng.integers(0, 9, (ids.size, width)).astype("f4")
            if mode == "sync" and rank == 0:
                expected[
                    np.union1d(
                        ids, np.flatnonzero(np.random.default_rng([step, 1]).random(1003) < [0.01, 0.5, 1][step - 1])
                    )
                ] = 0
            expected[ids] += values
            named.append(ids)
            arriving.append(ArrivingRows(client.rows_of("big")))
            works.append(client.push_rows("big", Rows(ids, values), deadline(), changed=arriving[-1]))
            if mode == "async":
                works[-1].wait()
        for work in works:
            work.wait()
        for ids, came in zip(named, arriving, strict=True):
            found = came.rows()
            np.testing.assert_array_equal(found.ids, np.union1d(*named) if mode == "sync" else ids)
            if mode == "sync":
                np.testing.assert_array_equal(found.values, expected[found.ids])
        wanted = np.array([0, 7, 501, 1002])
        out = np.empty((4, width), "f4")
        clients[1].pull_rows("big", wanted, out, deadline()).wait()
        np.testing.assert_array_equal(out, expected[wanted])
        clients[1].pull_rows("big", np.empty(0, "i8"), np.empty((0, width), "f4"), deadline()).wait()
    whole = np.empty(start.size, "f4")
    clients[0].pull("big", whole, deadline()).wait()
    np.testing.assert_array_equal(whole.reshape(1003, 300), expected)
    sent = clients[0]._recorder.snapshot()["phases"]["push"]["bytes"]
    assert sent == sum((4 + 4 * width) * np.flatnonzero(np.random.default_rng([s, 0]).random(1003) < p).size
                       for s, p in ((1, 0.01), (2, 0.5), (3, 1.0)))  # fmt: skip


def test_a_key_of_few_wide_rows_is_used_as_a_whole(start_job: Callable[..., Any]) -> None:
    job = start_job(2, chunk_bytes=4096)
    (client,) = job.connect(1)
    client.add_keys([("wide", (3, 100_000), "float32"), ("one chunk", (3, 300), "float32")])
    with pytest.raises(UnsupportedError, match="'wide' cannot be pushed or pulled by rows"):
        client.rows_of("wide")
    client.rows_of("one chunk")
