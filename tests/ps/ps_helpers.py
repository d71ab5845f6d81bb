"""A server's state machine with clients that a test moves by hand, and contributions that depend on everything."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvmpi import optim
from kvmpi.arrays import DTYPES
from kvmpi.deadline import Deadline
from kvmpi.errors import KVError, rebuild
from kvmpi.ps.client import PsClient
from kvmpi.ps.reply import Reply
from kvmpi.ps.server import ServerState
from kvmpi.ps.slot import Slot
from kvmpi.ps.snapshots import PartCopy
from kvmpi.wire import Message
from kvmpi.wire import messages as m

STORE = 1
TIMEOUT_S = 60.0


def route(client: int) -> bytes:
    return f"client {client}".encode()


def whole_numbers(count: int, *seeds: int) -> np.ndarray:
    """float32 whole numbers of which many can be added exactly."""
    return np.random.default_rng([count, *seeds]).integers(-1000, 1000, count).astype("f4")


def random_floats(count: int, *seeds: int) -> np.ndarray:
    return np.random.default_rng([count, *seeds]).standard_normal(count).astype("f4")


class Machine:
    """One store on one server. ``send`` returns the request's number, ``replies`` keeps all that came for it.

    Args:
        every: the server takes a snapshot after so many rounds.
        resumed: the number of a snapshot, what is in it, and how far its stores are.
        parts: which it answers for; keys are in the first, unless their ``init_all`` says another.
    """

    def __init__(
        self, mode: str, num_clients: int, *, hello: bool = True, replicas: int = 0, on_client_loss: str = "fail",
        every: int | None = None, resumed: tuple[int, PartCopy, dict[int, int]] | None = None, parts: int = 1,
    ) -> None:  # fmt: skip
        self.state = ServerState(0, on_client_loss, every)
        self.replicas, self.parts = replicas, parts
        self.part_of: dict[Any, int] = {}
        self.lost: list[m.Lost] = []
        self.resumed_from: tuple[int, dict[int, int]] = (0, {})
        if resumed is not None:
            number, copy, steps = resumed
            keys = {store: frozenset(chunk.key for chunk in saved.chunks) for store, saved in copy.items()}
            self.state.resume({0: copy}, keys)
            self.resumed_from = (number, steps)
        self._adopt()
        self.mode, self.num_clients = mode, num_clients
        self.numbers = itertools.count(1)
        self.replies: dict[int, list[Reply]] = {}
        if hello:
            for client in range(num_clients):
                assert self.ok(self.hello(client))

    def hello(self, client: int, incarnation: int = 1, **fields: Any) -> int:
        values = {"store": STORE, "mode": self.mode, "num_clients": self.num_clients, "at": route(client), **fields}
        return self.send(
            values["at"], m.Hello, values["store"], values["mode"], client, values["num_clients"], incarnation
        )

    def send(
        self, client: int | bytes, kind: type[Message], *fields: Any, payloads: Sequence[Any] = (), request: int = 0
    ) -> int:
        request = request or next(self.numbers)
        at = client if isinstance(client, bytes) else route(client)
        frames = [memoryview(bytearray(np.asarray(p).tobytes() if not isinstance(p, bytes) else p)) for p in payloads]
        self.take(self.state.handle(at, kind(request, *fields), frames))
        return request

    def take(self, replies: Sequence[Reply]) -> None:
        for reply in replies:
            self.replies.setdefault(reply.message.request, []).append(reply)  # type: ignore[attr-defined]

    # ---- requests

    def init(
        self, client: int, key: Any, value: np.ndarray, dtype: str = "float32", *, request: int = 0,
        gives: bool = False, **changes: Any,
    ) -> int:  # fmt: skip
        fields = {"chunk": 0, "num_chunks": 1, "count": value.size, "shape": [value.size], "dtype": dtype, **changes}
        payloads, part = [value] if client == 0 or gives else (), self.part_of.get(key, 0)
        return self.send(client, m.Init, key, *fields.values(), part, payloads=payloads, request=request)

    def init_all(self, key: Any, value: np.ndarray, dtype: str = "float32", *, part: int = 0) -> None:
        self.part_of[key] = part
        for client in range(self.num_clients):
            assert self.ok(self.init(client, key, value, dtype))

    def push(
        self,
        client: int,
        key: Any,
        step: int,
        value: Any,
        *,
        fused: bool = False,
        codec: str = "none",
        request: int = 0,
        quiet: bool = False,
    ) -> int:
        fields = (key, 0, step, codec, fused, False, self.part_of.get(key, 0), -1, quiet)
        return self.send(client, m.Push, *fields, payloads=[value], request=request)

    def pull(self, client: int, key: Any, min_round: int, request: int = 0) -> int:
        return self.send(client, m.Pull, key, 0, min_round, request=request)

    def rule(self, rule: optim.Rule, ordinal: int = 1, clients: Sequence[int] | None = None) -> None:
        for client in range(self.num_clients) if clients is None else clients:
            assert self.ok(self.send(client, m.SetRule, ordinal, rule.name, rule.hyperparams()))

    # ---- answers

    def last(self, request: int) -> Message | None:
        replies = self.replies.get(request)
        return replies[-1].message if replies else None

    def ok(self, request: int) -> bool:
        """Whether the last answer is neither missing, nor a failure, nor that others are missing."""
        last = self.last(request)
        if isinstance(last, m.Failure):
            raise rebuild(last.error, last.text)
        return last is not None and not isinstance(last, m.Waiting)

    def error(self, request: int) -> KVError | None:
        last = self.last(request)
        return rebuild(last.error, last.text) if isinstance(last, m.Failure) else None

    def value(self, request: int, dtype: str = "float32") -> np.ndarray | None:
        """The value that was answered: the very memory that the server hands to its socket."""
        if not self.ok(request) or not isinstance(self.last(request), m.Value):
            return None
        (payload,) = self.replies[request][-1].payloads
        assert payload.dtype == DTYPES[dtype]
        return payload

    def read(self, key: Any, min_round: int = 0, client: int = 0, dtype: str = "float32") -> np.ndarray:
        value = self.value(self.pull(client, key, min_round), dtype)
        assert value is not None, f"key {key!r} cannot be read at round {min_round}"
        return value

    def slot(self, key: Any, chunk: int = 0) -> Slot:
        return self.state.parts[0].shards[STORE].slots[key, chunk]

    def lose(self, client: int, incarnation: int = 1, why: str = "was lost", store: int = STORE) -> None:
        self.lost.append(m.Lost(client, store, incarnation, why))
        self._adopt()

    def _adopt(self) -> None:
        """The scheduler says that this server is alone and has everything, and who is lost."""
        view = m.View(
            self.state.epoch + 1, self.replicas, [m.Chain(1, [0])] * self.parts,
            [m.ServerInfo(0, 1, "host", [])], self.lost,
        )  # fmt: skip
        view.snapshot, view.steps = self.resumed_from
        self.take(self.state.adopt(view))


def round_of(machine: Machine, step: int, values: list[np.ndarray], *, fused: bool = False) -> list[int]:
    return [machine.push(client, "k", step, value, fused=fused) for client, value in enumerate(values)]


def bfloat16(values: np.ndarray) -> np.ndarray:
    """Whole numbers up to 256 are exact: the upper half of their float32 bits."""
    return (np.ascontiguousarray(values, "f4").view("u4") >> 16).astype("u2")


def from_bfloat16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype("u4") << 16).view("f4")


def stored(values: np.ndarray, dtype: str) -> np.ndarray:
    return bfloat16(values) if dtype == "bfloat16" else values.astype(dtype)


def as_float(values: np.ndarray, dtype: str) -> np.ndarray:
    return (from_bfloat16(values) if dtype == "bfloat16" else values).astype("f8")


def deadline() -> Deadline:
    return Deadline(TIMEOUT_S)


def initialise(clients: list[PsClient], counts: dict[Any, int], rule: optim.Rule | None = None) -> None:
    for rank, client in enumerate(clients):
        client.add_keys([(key, (count,), "float32") for key, count in counts.items()])
        works = [client.init(k, whole_numbers(n) if rank == 0 else None, deadline()) for k, n in counts.items()]
        if rule is not None:
            works.append(client.set_rule(rule, deadline()))
        for work in works:
            work.wait(TIMEOUT_S)


def pushes_still_work(machine: Machine, count: int = 5) -> None:
    """A first round with everyone gives the right sum."""
    values = [whole_numbers(count, 50, client, 1) for client in range(machine.num_clients)]
    round_of(machine, 1, values)
    np.testing.assert_array_equal(machine.read("k", 1), np.sum(values, axis=0, dtype="f8"))
