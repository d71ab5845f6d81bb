"""Pushes as most are take a short way through a round: whatever is sent, it ends as the long way does."""

from __future__ import annotations

from collections.abc import Iterator
from operator import itemgetter
from typing import Any

import numpy as np
import pytest

from kvmpi import optim
from kvmpi.ps.rounds import Rounds
from kvmpi.ps.row_chunks import WIRE_ID
from kvmpi.ps.server import ServerState
from kvmpi.wire import messages as m

COUNT, WIDTH = 12, 3
KEYS = {"a": "float32", "b": "float64", "c": "int32", "d": "float16", "e": "float32"}
RULES = [None, optim.SGD(lr=0.1, momentum=0.9), optim.Elastic(alpha=0.25)]


class Server:
    """A server of one part with ``num_clients`` clients, and what it has answered."""

    def __init__(self, num_clients: int, rule: optim.Rule | None, on_client_loss: str) -> None:
        self.state = ServerState(0, on_client_loss)
        self.state.adopt(m.View(1, 0, [m.Chain(1, [0])], [m.ServerInfo(0, 1, "host", [])], []))
        for client in range(num_clients):
            self.say(client, m.Hello(1, 1, "sync", client, num_clients, 1))
        for client in range(num_clients):
            if rule is not None:
                self.say(client, m.SetRule(2, 1, rule.name, rule.hyperparams()))
            for key, dtype in KEYS.items():
                shape = [COUNT // WIDTH, WIDTH]
                given = [np.arange(COUNT).astype(dtype)] if client == 0 else []
                self.say(client, m.Init(3, key, 0, 1, COUNT, shape, dtype), *given)

    def say(self, client: int, message: m.Message, *payloads: np.ndarray) -> list[Any]:
        """What is sent because of it, to whom; in which order to different clients makes no difference."""
        frames = [memoryview(bytearray(payload.tobytes())) for payload in payloads]
        sent = [
            (reply.route, reply.message, [payload.tobytes() for payload in reply.payloads])  # type: ignore[union-attr]
            for reply in self.state.handle(f"b{client}".encode(), message, frames, 1.0)
        ]
        return sorted(sent, key=itemgetter(0))

    def all(self) -> dict[str, Any]:
        """Everything that the chunks remember."""
        slots = self.state.parts[0].shards[1].slots
        return {
            key: (
                slot.value.tobytes(), {name: array.tobytes() for name, array in slot.state.items()}, slot.rounds,
                slot.updates, slot.cursor, slot.contributors, slot.steps, slot.latest, str(slot.failed),
                None if slot.met is None else slot.met.tobytes(), sorted(slot.held), sorted(slot.waiting),
                sorted(slot.readers), {client: mark.steps for client, mark in slot.marks.items()}, slot.open_spans,
                slot.open_steps,
            )
            for (key, _), slot in slots.items()
        }  # fmt: skip


def messages(seed: int, num_clients: int, *, takes_rows: bool) -> Iterator[tuple[int, m.Message, list[np.ndarray]]]:
    """What clients say that mostly do as they should: each pushes every key once a step, in an order of its own."""
    random = np.random.default_rng(seed)
    steps = {(client, key): 0 for client in range(num_clients) for key in KEYS}
    here, counts = list(range(num_clients)), bool(seed % 3 == 1)
    for number in range(10, 260):
        key = list(KEYS)[random.integers(len(KEYS))]
        behind = sorted(here, key=lambda client: (steps[client, key], random.random()))
        ahead = steps[behind[-1], key] - steps[behind[0], key]
        client = behind[-1] if random.random() < 0.1 and ahead < 2 else behind[0]
        dtype, step, odd = KEYS[key], steps[client, key] + 1, random.random()
        value = (random.integers(0, 50, COUNT) + client).astype(dtype)
        said: dict[str, Any] = {"fused": bool(random.random() < 0.6), "quiet": bool(random.random() < 0.5)}
        if counts and random.random() < 0.9:
            said |= {"at": step, "done": step - 1, "earliest": step, "latest": step}
        if odd < 0.05:
            yield client, m.Push(number, key, 0, step - 1, "none", **said), [value]  # again
        elif odd < 0.08:
            yield client, m.Push(number, key, 0, step + 1, "none", **said), [value]
        elif odd < 0.10:
            yield client, m.Push(number, key, 0, step, "none", **said), [value[:-1]]
        elif odd < 0.12:
            yield client, m.Push(number, key, 0, step, "none", **said), []
        elif odd < 0.13:
            yield client, m.Push(number, key, 0, step, "none", **(said | {"earliest": 5})), [value]
        elif odd < 0.14:
            yield client, m.Push(number, key, 1, step, "none", **said), [value]
        elif odd < 0.20:
            yield client, m.Pull(number, key, 0, step - 1), []
        elif odd < 0.23:
            yield client, m.Query(number, key, 0, step - 1), []
        elif odd < 0.25 and number > 220 and len(here) > 1:
            here.remove(client)
            yield client, m.Finish(number) if odd < 0.24 else m.Bye(number), []
        else:
            rows = odd < 0.30 and takes_rows
            steps[client, key] = step
            if rows:
                ids = np.sort(random.choice(COUNT // WIDTH, 2, replace=False)).astype(WIRE_ID)
                yield client, m.Push(number, key, 0, step, "none", **said, rows=2), [ids, value[: 2 * WIDTH]]
            elif odd < 0.35:
                narrow = value.astype("float16") if dtype == "float32" else value
                yield client, m.Push(number, key, 0, step, "fp16", **said), [narrow]
            elif odd < 0.40 and said["fused"]:
                yield client, m.Push(number, key, 0, step, "none", **said, acknowledge=True), [value]
            else:
                yield client, m.Push(number, key, 0, step, "none", **said), [value]


@pytest.mark.parametrize("rule", RULES, ids=["assign", "sgd", "elastic"])
@pytest.mark.parametrize("num_clients", [1, 2, 3])
@pytest.mark.parametrize("seed", [0, 1, 3, 4])  # a lost client fails the round, or not; counts of steps, or none
def test_the_short_way_is_the_long_one(
    monkeypatch: pytest.MonkeyPatch, num_clients: int, rule: optim.Rule | None, seed: int
) -> None:
    real, taken = Rounds.push_plain, list[bool]()

    def counted(self: Rounds, *args: Any) -> Any:
        replies = real(self, *args)
        taken.append(replies is not None)
        return replies

    on_client_loss = ["fail", "shrink"][seed % 2]
    said = list(messages(seed, num_clients, takes_rows=not isinstance(rule, optim.Elastic)))
    ways = []
    for short in (True, False):
        monkeypatch.setattr(Rounds, "push_plain", counted if short else lambda *_: None)
        server = Server(num_clients, rule, on_client_loss)
        ways.append([(server.say(*each[:2], *each[2]), server.all()) for each in said])
    for each, (short_says, short_is), (long_says, long_is) in zip(said, *ways, strict=True):
        assert short_says == long_says, f"seed {seed}: after {each[:2]}"
        assert short_is == long_is, f"seed {seed}: after {each[:2]}"
    assert sum(taken) >= (100 if num_clients == 1 else 25), f"seed {seed}: {sum(taken)} of {len(taken)} took it"
