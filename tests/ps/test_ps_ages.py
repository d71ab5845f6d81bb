"""Pushes that count the less the older they are: what the value is, whoever reads and pushes when, on all servers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ps_helpers import STORE, Machine, bfloat16, from_bfloat16, random_floats, route, whole_numbers

from kvmpi import optim
from kvmpi.errors import ProtocolError, UnsupportedError
from kvmpi.ps import replay
from kvmpi.ps.shard import Shard
from kvmpi.wire import messages as m

COUNT, WIDTH, CLIENTS = 12, 3, 3
RULES = [
    optim.SGD(lr=0.1, staleness_aware=True),
    optim.SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01, rescale_grad=0.5, staleness_aware=True),
]


class Expected:
    """SGD in float64, with each gradient divided by its age."""

    def __init__(self, rule: optim.SGD, start: np.ndarray) -> None:
        self._rule, self.value = rule, start.astype("f8")
        self._momentum = np.zeros_like(self.value)
        self.updates = 0
        self.read = dict.fromkeys(range(CLIENTS), 0)

    def pull(self, client: int) -> None:
        self.read[client] = self.updates

    def push(self, client: int, gradient: np.ndarray, rows: np.ndarray | None = None) -> None:
        rule, table = self._rule, self.value.reshape(-1, WIDTH)
        momentum = self._momentum.reshape(-1, WIDTH)
        which = np.arange(len(table)) if rows is None else rows
        age = self.updates - self.read[client]
        scaled = rule.rescale_grad * gradient.astype("f8").reshape(-1, WIDTH) / max(1, age)
        scaled = scaled + rule.weight_decay * table[which]
        momentum[which] = rule.momentum * momentum[which] + scaled
        step = scaled + rule.momentum * momentum[which] if rule.nesterov else scaled
        table[which] -= rule.lr * step
        self.updates += 1


class Aged:
    """A server, the log of one of its stores, and what the value is to be."""

    def __init__(self, rule: optim.SGD, mode: str = "async", dtype: str = "float32") -> None:
        self.dtype, self.records = dtype, []
        self.shard = Shard(0, STORE, mode, CLIENTS, self._log)
        self.shard.rounds.is_followed = lambda: True
        self.other = Shard(1, STORE, mode, CLIENTS, lambda *_: False)
        start = random_floats(COUNT, 1)
        self._request = 0
        for client in range(CLIENTS):
            self.shard.join(client, 1)
            payloads = [memoryview(self._stored(start).tobytes())] if client == 0 else []
            self._ask(client, m.Init, "k", 0, 1, COUNT, [COUNT // WIDTH, WIDTH], dtype, payloads=payloads)
            self._ask(client, m.SetRule, 1, rule.name, rule.hyperparams())
        self.expected = Expected(rule, self.value())
        self.steps = dict.fromkeys(range(CLIENTS), 0)

    def _log(self, entry: Any, payloads: tuple[np.ndarray, ...]) -> bool:
        self.records.append((entry, [memoryview(payload.tobytes()) for payload in payloads]))
        return True

    def _stored(self, values: np.ndarray) -> np.ndarray:
        return bfloat16(values) if self.dtype == "bfloat16" else values.astype(self.dtype)

    def _ask(self, client: int, kind: Any, *fields: Any, payloads: list[memoryview] | None = None) -> Any:
        self._request += 1
        replies = self.shard.handle(client, route(client), kind(self._request, *fields), payloads or [])
        return replies[-1].message if replies else None

    def value(self) -> np.ndarray:
        kept = self.shard.slots["k", 0].value
        return from_bfloat16(kept).astype("f8") if self.dtype == "bfloat16" else kept.astype("f8")

    def pull(self, client: int) -> None:
        answer = self._ask(client, m.Pull, "k", 0, self.steps[client])
        assert answer.version == self.expected.updates
        self.expected.pull(client)

    def push(self, client: int, *, fused: bool, rows: np.ndarray | None = None, codec: str = "none") -> None:
        self.steps[client] += 1
        step = self.steps[client]
        shape = (COUNT if rows is None else rows.size * WIDTH,)
        gradient = random_floats(shape[0], client, step)
        wire = gradient.astype("f2") if codec == "fp16" else self._stored(gradient)
        sent = wire.astype("f8") if self.dtype != "bfloat16" else from_bfloat16(wire)
        payloads = [memoryview(wire.tobytes())]
        if rows is not None:
            payloads.insert(0, memoryview(rows.astype("<u4").tobytes()))
        seen = self.expected.read[client]
        count = -1 if rows is None else rows.size
        fields = ("k", 0, step, codec, fused, False, 0, count, False, 0, 0, 0, 0, seen)
        answer = self._ask(client, m.Push, *fields, payloads=payloads)
        assert answer.version == self.expected.updates + 1
        self.expected.push(client, sent, rows)
        if fused:
            self.expected.pull(client)

    def follow(self) -> None:
        """Another server makes all changes that are logged."""
        for entry, payloads in self.records:
            replay.apply(self.other, entry, payloads, keep=False)
        self.records.clear()

    def arrays(self, shard: Shard) -> dict[str, bytes]:
        names, arrays = shard.slots["k", 0].dump()
        return {name: array.tobytes() for name, array in zip(names, arrays, strict=True)}


@pytest.mark.parametrize("mode", ["async", "ssp:100"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("rule", RULES, ids=["plain", "momentum"])
def test_a_push_counts_the_less_the_older_it_is(rule: optim.SGD, dtype: str, mode: str) -> None:
    """In whatever order clients read and push; and followers of the log have the same bits."""
    aged, choose = Aged(rule, mode, dtype), np.random.default_rng([len(dtype), rule.momentum > 0])
    ages = set()
    for turn in range(60):
        client = int(choose.integers(CLIENTS))
        if choose.random() < 0.4:
            aged.pull(client)
            continue
        ages.add(aged.expected.updates - aged.expected.read[client])
        rows = np.flatnonzero(choose.random(COUNT // WIDTH) < 0.6) if rule.momentum == 0 and turn % 3 == 0 else None
        codec = "fp16" if dtype == "float32" and choose.random() < 0.3 else "none"
        aged.push(client, fused=choose.random() < 0.3, rows=rows, codec=codec)
        if turn % 7 == 0:
            aged.follow()
    assert {0, 1, 2, 3} <= ages
    exact = {"float32": 1e-5, "float64": 1e-13, "bfloat16": 0.2}[dtype]
    np.testing.assert_allclose(aged.value(), aged.expected.value, atol=exact, rtol=exact)
    aged.follow()
    assert aged.arrays(aged.other) == aged.arrays(aged.shard)


def test_without_it_or_at_most_one_update_old_nothing_is_divided() -> None:
    for aware, others, expected in ((True, 1, 2.0), (True, 2, 2.5), (True, 4, 4.25), (False, 4, 5.0)):
        machine = Machine("async", 2)
        machine.init_all("k", np.zeros(3, "f4"))
        machine.rule(optim.SGD(lr=1.0, staleness_aware=aware))
        for step in range(1, others + 1):
            fields = ("k", 0, step, "none", True, False, 0, -1, False, 0, 0, 0, 0, step - 1)
            assert machine.ok(machine.send(1, m.Push, *fields, payloads=[-np.ones(3, "f4")]))
        assert machine.ok(machine.push(0, "k", 1, -np.ones(3, "f4")))
        np.testing.assert_array_equal(machine.read("k", 1), np.full(3, expected, "f4"))


def test_it_may_be_switched_on_later_and_for_some_keys() -> None:
    machine = Machine("async", 2)
    for key in ("k", "j"):
        machine.init_all(key, np.zeros(2, "f4"))
    machine.rule(optim.SGD(lr=1.0).for_keys(["k"], staleness_aware=True))
    for key in ("k", "j"):
        for step in range(1, 5):
            machine.push(1, key, step, np.zeros(2, "f4"))
        machine.push(0, key, 1, np.full(2, -8.0, "f4"))
    assert [machine.read(key, 1)[0] for key in ("k", "j")] == [2.0, 8.0]
    for client in range(2):
        assert machine.ok(machine.send(client, m.SetHyperparams, 1, {"staleness_aware": True}, 0))
    for key in ("k", "j"):
        machine.push(0, key, 2, np.full(2, -10.0, "f4"))
    assert [machine.read(key, 2)[0] for key in ("k", "j")] == [4.0, 10.0]


def test_whole_numbers_cannot_be_divided() -> None:
    @optim.register("aware of whole numbers")
    class Aware(optim.Test):
        integers = True
        staleness_aware = True

    machine = Machine("async", 2)
    machine.init_all("k", np.zeros(2, "i4"), "int32")
    machine.rule(Aware())
    for step in (1, 2):
        assert machine.ok(machine.push(1, "k", step, np.ones(2, "i4")))
    error = machine.error(machine.push(0, "k", 1, np.ones(2, "i4")))
    assert isinstance(error, UnsupportedError)
    assert "2 updates old" in str(error)
    assert "int32" in str(error)
    np.testing.assert_array_equal(machine.read("k", 0, dtype="int32"), [2, 2])


def test_there_is_no_version_before_the_first() -> None:
    machine = Machine("async", 1)
    machine.init_all("k", np.zeros(2, "f4"))
    machine.rule(RULES[0])
    fields = ("k", 0, 1, "none", False, False, 0, -1, False, 0, 0, 0, 0, -1)
    error = machine.error(machine.send(0, m.Push, *fields, payloads=[whole_numbers(2)]))
    assert isinstance(error, ProtocolError)
