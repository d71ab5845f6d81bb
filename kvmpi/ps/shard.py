"""One server's part of one store, as a state machine without I/O: messages in, messages out.

Exactly once: a push carries its client's step for the key. A step that is already in a round is answered again, never
added again. A synchronous round holds one push of each client, added in client order so that sums do not depend on
arrival; a push whose turn has not come is held unacknowledged, which is what stops its sender at the end of its window.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvmpi import optim
from kvmpi.arrays import DTYPES
from kvmpi.errors import (
    ClientLostError,
    ConfigError,
    DTypeMismatchError,
    KeyNotInitializedError,
    KVError,
    ProtocolError,
    ShapeMismatchError,
    UnsupportedError,
)
from kvmpi.kernels import host
from kvmpi.ps import codec, consistency
from kvmpi.ps.slot import Contribution, RuleChange, Slot
from kvmpi.wire import Message, as_array
from kvmpi.wire import messages as m

Buffer = npt.NDArray[Any]


class Reply(NamedTuple):
    """A message to send to the peer at ``route``."""

    route: bytes
    message: Message
    payloads: tuple[Buffer, ...] = ()


class _Waiting(NamedTuple):
    route: bytes
    message: m.Init


class Shard:
    """The chunks of one store that this server owns.

    Args:
        mode: name of a consistency discipline.
        num_clients: clients 0 .. num_clients-1 take part.
    """

    def __init__(self, server: int, store: int, mode: str, num_clients: int) -> None:
        self.server, self.store, self.mode, self.num_clients = server, store, mode, num_clients
        self._discipline = consistency.get(mode)
        self._slots: dict[tuple[m.Key, int], Slot] = {}
        self._layouts: dict[m.Key, m.Init] = {}
        self._uninitialised: dict[tuple[m.Key, int], dict[int, _Waiting]] = {}
        self._rule: optim.Rule | None = None
        self._generation = 0
        self._rule_calls: list[tuple[str, dict[str, Any]]] = []
        self._hyper_calls: list[dict[str, Any]] = []
        self._gone: dict[int, str] = {}

    # ---- dispatch

    def handle(self, client: int, route: bytes, message: Message, payloads: list[memoryview]) -> list[Reply]:
        """What to send because ``client`` sent ``message``.

        Raises:
            KVError: the request is invalid; nothing was changed, and only this client needs to know.
        """
        match message:
            case m.Push():
                return self._push(client, route, message, payloads)
            case m.Pull():
                return self._pull(client, route, message)
            case m.Query():
                self._slot(message.key, message.chunk, client)
                return [self._waiting(message, route)]
            case m.Init():
                return self._init(client, route, message, payloads)
            case m.SetRule():
                return self._set_rule(client, route, message)
            case m.SetHyperparams():
                return self._set_hyperparams(client, route, message)
            case m.GetState():
                slot = self._slot(message.key, message.chunk, client)
                names, arrays = slot.dump()
                return [Reply(route, m.State(message.request, slot.updates, names), tuple(arrays))]
            case m.PutState():
                return self._put_state(client, route, message, payloads)
            case m.Bye():
                return [*self.lose(client, "has closed the store"), Reply(route, m.Ack(message.request, 0))]
        raise ProtocolError(f"server {self.server}: a {type(message).__name__} is no request to a server")

    @property
    def deserted(self) -> bool:
        """Whether every client has left."""
        return len(self._gone) == self.num_clients

    def lose(self, client: int, why: str) -> list[Reply]:
        """``client`` will push no more: whoever waits for it is told."""
        self._gone[client] = why
        if not self._discipline.in_rounds:
            return []
        replies: list[Reply] = []
        for (key, _), slot in self._slots.items():
            slot.held = {where: held for where, held in slot.held.items() if where[1] != client}
            slot.fused.pop(client, None)
            for readers in slot.readers.values():
                readers.pop(client, None)
            replies += self._fail_stuck(key, slot)
        for (key, chunk), waiting in list(self._uninitialised.items()):
            waiting.pop(client, None)
            if client == 0:
                error = ClientLostError(f"key {key!r}: client 0, which has its value, {why}")
                replies += [_failure(w.route, w.message.request, error) for w in waiting.values()]
                del self._uninitialised[key, chunk]
        return replies

    def _fail_stuck(self, key: m.Key, slot: Slot) -> list[Reply]:
        """Errors for all who wait for the open round, if a client that is gone has not contributed to it."""
        if not any(slot.steps.get(gone, 0) <= slot.rounds for gone in self._gone):
            return []
        error = ClientLostError(self._blame(key, slot.rounds + 1))
        waiting = [(held.route, held.request) for held in slot.held.values()]
        waiting += slot.fused.values()
        waiting += [reader for readers in slot.readers.values() for reader in readers.values()]
        slot.held, slot.fused, slot.readers = {}, {}, {}
        return [_failure(route, request, error) for route, request in waiting]

    def _blame(self, key: m.Key, round_: int) -> str:
        gone = ", ".join(f"client {client} {why}" for client, why in sorted(self._gone.items()))
        return f"key {key!r} on server {self.server}: round {round_} cannot be completed, because {gone}"

    def _slot(self, key: m.Key, chunk: int, client: int) -> Slot:
        slot = self._slots.get((key, chunk))
        if slot is None:
            raise KeyNotInitializedError(
                f"key {key!r} (chunk {chunk}) is not on server {self.server}, asked for by client {client}; call init first"
            )
        return slot

    # ---- init

    def _init(self, client: int, route: bytes, message: m.Init, payloads: list[memoryview]) -> list[Reply]:
        where = (message.key, message.chunk)
        if message.dtype not in DTYPES:
            raise DTypeMismatchError(f"key {message.key!r}: dtype {message.dtype!r} is not carried")
        slot = self._slots.get(where)
        if slot is not None:
            self._check_same(client, message)
            return [Reply(route, m.Ack(message.request, slot.rounds))]
        if client != 0:
            waiting_here = self._uninitialised.setdefault(where, {})
            known = client in waiting_here
            waiting_here[client] = _Waiting(route, message)
            return [Reply(route, m.Waiting(message.request, [0]))] if known else []
        value = self._array(message.key, payloads, message.dtype, message.count, "init").copy()
        self._slots[where] = Slot(message.count, message.dtype, value, self._rule, self._generation)
        self._layouts.setdefault(message.key, message)
        replies = [Reply(route, m.Ack(message.request, 0))]
        for other, early in self._uninitialised.pop(where, {}).items():
            try:
                self._check_same(other, early.message)
                replies.append(Reply(early.route, m.Ack(early.message.request, 0)))
            except KVError as error:
                replies.append(_failure(early.route, early.message.request, error))
        return replies

    def _check_same(self, client: int, message: m.Init) -> None:
        mine = self._layouts[message.key]
        text = f"init of key {message.key!r}: client {client} has {{}} {{}}, client 0 has {{}}; all must be equal"
        if message.shape != mine.shape:
            raise ShapeMismatchError(text.format("shape", tuple(message.shape), tuple(mine.shape)))
        if message.dtype != mine.dtype:
            raise DTypeMismatchError(text.format("dtype", message.dtype, mine.dtype))
        if message.num_chunks != mine.num_chunks:
            raise ConfigError(text.format("KVMPI_CHUNK_BYTES or KVMPI_PLACEMENT other than client 0, giving chunks:",
                                          message.num_chunks, mine.num_chunks))  # fmt: skip

    def _array(self, key: m.Key, payloads: list[memoryview], dtype: str, count: int, what: str) -> Buffer:
        if len(payloads) != 1:
            raise ProtocolError(f"{what} of key {key!r}: {len(payloads)} payload frames, expected 1")
        array = as_array(payloads[0], DTYPES[dtype])
        if array.size != count:
            raise ProtocolError(f"{what} of key {key!r}: {array.size} elements in this chunk, expected {count}")
        return array

    # ---- push and pull

    def _push(self, client: int, route: bytes, message: m.Push, payloads: list[memoryview]) -> list[Reply]:
        slot = self._slot(message.key, message.chunk, client)
        wire_dtype = codec.get(message.codec).wire_dtype(slot.dtype)
        wire = self._array(message.key, payloads, wire_dtype, slot.count, "push")
        contribution = Contribution(route, message.request, message.fused, wire, wire_dtype)
        if self._discipline.in_rounds:
            return self._push_in_round(client, slot, message, contribution)
        if message.step <= slot.steps.get(client, 0):
            return [self._value(slot, contribution) if message.fused else self._ack(slot, contribution)]
        if slot.rules[-1].rule is None:
            raise UnsupportedError(
                f"push of key {message.key!r} by client {client}: an asynchronous store needs an update rule; "
                "call kv.set_optimizer(...) on all workers first"
            )
        value = slot.apply_alone(contribution)
        slot.steps[client] = message.step
        if not message.fused:
            return [self._ack(slot, contribution)]
        return [self._value(slot, contribution, value)]

    def _push_in_round(self, client: int, slot: Slot, message: m.Push, contribution: Contribution) -> list[Reply]:
        if message.step <= slot.steps.get(client, 0):
            if not message.fused:
                return [self._ack(slot, contribution)]
            if message.step <= slot.rounds:
                return [self._value(slot, contribution)]
            slot.fused[client] = (contribution.route, contribution.request)
            return [self._ack(slot, contribution)]
        known = (message.step, client) in slot.held
        slot.held[message.step, client] = contribution
        if known:
            return [self._waiting(message, contribution.route)]
        return self._drain(message.key, slot)

    def _drain(self, key: m.Key, slot: Slot) -> list[Reply]:
        """Add the held pushes whose turn has come; close rounds that are complete."""
        replies: list[Reply] = []
        while True:
            round_ = slot.rounds + 1
            while (contribution := slot.held.pop((round_, slot.cursor), None)) is not None:
                slot.add(contribution)
                slot.steps[slot.cursor] = round_
                if contribution.fused:
                    slot.fused[slot.cursor] = (contribution.route, contribution.request)
                slot.cursor += 1
                if not (contribution.fused and slot.cursor == self.num_clients):
                    replies.append(self._ack(slot, contribution))
            if not self._discipline.complete(slot.cursor, self.num_clients):
                return replies + self._fail_stuck(key, slot)
            met = slot.close_round(slot.cursor)
            slot.cursor = 0
            for route, request in slot.fused.values():
                payload = slot.lend() if met is slot.value else met
                replies.append(Reply(route, m.Value(request, slot.rounds), (payload,)))
            slot.fused = {}
            replies += self._release_readers(slot)

    def _release_readers(self, slot: Slot) -> list[Reply]:
        replies = []
        for min_round in [r for r in slot.readers if self._discipline.readable(slot.rounds, r)]:
            for route, request in slot.readers.pop(min_round).values():
                replies.append(Reply(route, m.Value(request, slot.rounds), (slot.lend(),)))
        return replies

    def _pull(self, client: int, route: bytes, message: m.Pull) -> list[Reply]:
        slot = self._slot(message.key, message.chunk, client)
        if self._discipline.readable(slot.rounds, message.min_round):
            return [Reply(route, m.Value(message.request, slot.rounds), (slot.lend(),))]
        readers = slot.readers.setdefault(message.min_round, {})
        known = client in readers
        readers[client] = (route, message.request)
        return [self._waiting(message, route)] if known else self._fail_stuck(message.key, slot)

    def _waiting(self, message: m.Push | m.Pull | m.Query, route: bytes) -> Reply:
        """Tell a sender that repeats itself whom its round still lacks."""
        slot = self._slots[message.key, message.chunk]
        round_ = slot.rounds + 1
        missing = [
            client
            for client in range(self.num_clients)
            if slot.steps.get(client, 0) < round_ and (round_, client) not in slot.held
        ]
        return Reply(route, m.Waiting(message.request, missing))

    def _ack(self, slot: Slot, to: Contribution) -> Reply:
        return Reply(to.route, m.Ack(to.request, slot.rounds))

    def _value(self, slot: Slot, to: Contribution, value: Buffer | None = None) -> Reply:
        payload = slot.lend() if value is None or value is slot.value else value
        return Reply(to.route, m.Value(to.request, slot.rounds), (payload,))

    # ---- rules

    def _set_rule(self, client: int, route: bytes, message: m.SetRule) -> list[Reply]:
        call = (message.rule, dict(message.hyperparams))
        if self._repeated(client, "set_optimizer", message.ordinal, call, self._rule_calls):
            return [Reply(route, m.Ack(message.request, self._generation))]
        rule = optim.create(message.rule, message.hyperparams)
        self._rule_calls.append(call)
        self._generation += 1
        self._install(client, rule)
        return [Reply(route, m.Ack(message.request, self._generation))]

    def _set_hyperparams(self, client: int, route: bytes, message: m.SetHyperparams) -> list[Reply]:
        call = dict(message.hyperparams)
        if not self._repeated(client, "set_hyperparams", message.ordinal, call, self._hyper_calls):
            if self._rule is None:
                raise ConfigError("set_hyperparams: the servers have no optimizer yet; call kv.set_optimizer first")
            rule = self._rule.with_hyperparams(**call)
            self._hyper_calls.append(call)
            self._install(client, rule)
        return [Reply(route, m.Ack(message.request, self._generation))]

    def _repeated(self, client: int, what: str, ordinal: int, call: Any, calls: list[Any]) -> bool:
        """Whether this is another client's, or a repeated, copy of a call that is already in force."""
        if ordinal == len(calls) + 1:
            return False
        if not 1 <= ordinal <= len(calls):
            raise ProtocolError(f"{what} number {ordinal} of client {client} on server {self.server} skips a number")
        if calls[ordinal - 1] != call:
            raise ConfigError(
                f"{what} call {ordinal}: client {client} says {call}, an earlier client said {calls[ordinal - 1]}; "
                "all clients must make the same calls"
            )
        return True

    def _install(self, client: int, rule: optim.Rule) -> None:
        """Put ``rule`` in force, in rounds from the one after this client's last push of each chunk."""
        self._rule = rule
        for slot in self._slots.values():
            from_round = slot.steps.get(client, 0) + 1 if self._discipline.in_rounds else 0
            slot.rules.append(RuleChange(from_round, self._generation, rule))

    # ---- checkpoints

    def _put_state(self, client: int, route: bytes, message: m.PutState, payloads: list[memoryview]) -> list[Reply]:
        slot = self._slot(message.key, message.chunk, client)
        if len(message.names) != len(payloads):
            raise ProtocolError(
                f"state of key {message.key!r}: {len(payloads)} payloads for {len(message.names)} names"
            )
        arrays = {}
        for name, payload in zip(message.names, payloads, strict=True):
            dtype = slot.dtype if name == "value" else host.ACCUMULATE[slot.dtype]
            arrays[name] = self._array(message.key, [payload], dtype, slot.count, f"state {name!r}")
        slot.restore(message.updates, arrays)
        return [Reply(route, m.Ack(message.request, slot.rounds))]


def _failure(route: bytes, request: int, error: KVError) -> Reply:
    return Reply(route, m.Failure(request, type(error).__name__, str(error)))
