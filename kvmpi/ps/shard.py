"""One server's part of one store, as a state machine without I/O: messages in, messages out.

Exactly once: a push carries its client's step for the key. A step that is already in a round is answered again, never
added again. A synchronous round holds one push of each client, added in client order so that sums do not depend on
arrival; a push whose turn has not come is held unacknowledged, which is what stops its sender at the end of its window.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

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
from kvmpi.ps.calls import SharedCalls
from kvmpi.ps.reply import MAX_NAMED, Reply, failure
from kvmpi.ps.slot import Contribution, Reader, RuleChange, Slot
from kvmpi.wire import Message, as_array
from kvmpi.wire import messages as m

Buffer = npt.NDArray[Any]


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
        # Clients that wait for client 0 to give a key its value.
        self._early: dict[m.Key, dict[tuple[int, int], tuple[bytes, m.Init]]] = {}
        self._rule: optim.Rule | None = None
        self._generation = 0
        self._rule_calls = SharedCalls("set_optimizer", server)
        self._hyper_calls = SharedCalls("set_hyperparams", server)
        self._incarnations: dict[int, int] = {}
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
                slot = self._slot(message.key, message.chunk, client)
                return self._answer_fused(client, slot, message, route)
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

    # ---- clients that come and go

    def join(self, client: int, incarnation: int) -> list[Reply]:
        """``client`` opens a session; what others have to be told.

        Raises:
            ProtocolError: a later process of this client is here already.
        """
        before = self._incarnations.get(client, incarnation)
        if incarnation < before:
            raise ProtocolError(f"server {self.server}: client {client} has a later incarnation already")
        self._incarnations[client] = incarnation
        if incarnation > before:
            if self._discipline.in_rounds:
                return [] if client in self._gone else self.lose(client, "was lost and started again")
            # It counts its steps from the beginning; nothing of the process before it can still come.
            for slot in self._slots.values():
                slot.steps.pop(client, None)
        if not self._discipline.in_rounds:
            self._gone.pop(client, None)
        return []

    def refusal(self, client: int) -> ClientLostError | None:
        """Why ``client`` cannot take part (any more)."""
        if client not in self._gone:
            return None
        return ClientLostError(
            f"client {client} {self._gone[client]}, and the rounds of a synchronous store cannot go on with it; "
            "start the job again"
        )

    @property
    def deserted(self) -> bool:
        """Whether every client has left."""
        return len(self._gone) == self.num_clients

    def lose(self, client: int, why: str) -> list[Reply]:
        """``client`` will push no more: whoever waits for it is told."""
        self._gone[client] = why
        replies: list[Reply] = []
        for key, early in list(self._early.items()):
            for where in [where for where in early if where[1] == client]:
                del early[where]
            if client == 0:
                replies += [failure(route, init.request, self._no_value(key)) for route, init in early.values()]
            if client == 0 or not early:
                del self._early[key]
        if self._discipline.in_rounds:
            for (key, _), slot in self._slots.items():
                slot.held.pop(client, None)
                slot.fused.pop(client, None)
                slot.readers.pop(client, None)
                replies += self._fail_stuck(key, slot)
        return replies

    def _fail_stuck(self, key: m.Key, slot: Slot) -> list[Reply]:
        """Errors for all who wait for the open round, if a client that is gone has not contributed to it."""
        if not any(slot.steps.get(gone, 0) <= slot.rounds for gone in self._gone):
            return []
        error = ClientLostError(
            f"key {key!r} on server {self.server}: round {slot.rounds + 1} cannot be completed, because {self._blame()}"
        )
        waiting = [(held.route, held.request) for held in slot.held.values()]
        waiting += slot.fused.values()
        waiting += [(reader.route, reader.request) for reader in slot.readers.values()]
        slot.held, slot.fused, slot.readers = {}, {}, {}
        return [failure(route, request, error) for route, request in waiting]

    def _blame(self) -> str:
        named = [f"client {client} {why}" for client, why in islice(sorted(self._gone.items()), MAX_NAMED)]
        return ", ".join(named)

    def _no_value(self, key: m.Key) -> ClientLostError:
        return ClientLostError(f"key {key!r}: client 0, which has its value, {self._gone[0]}")

    def _slot(self, key: m.Key, chunk: int, client: int) -> Slot:
        slot = self._slots.get((key, chunk))
        if slot is None:
            raise KeyNotInitializedError(
                f"key {key!r} (chunk {chunk}) is not on server {self.server}, asked for by client {client}; "
                "call init first"
            )
        return slot

    # ---- init

    def _init(self, client: int, route: bytes, message: m.Init, payloads: list[memoryview]) -> list[Reply]:
        key, where = message.key, (message.key, message.chunk)
        if message.dtype not in DTYPES:
            raise DTypeMismatchError(f"key {key!r}: dtype {message.dtype!r} is not carried")
        if key in self._layouts:
            self._check_same(client, message)
        slot = self._slots.get(where)
        if slot is not None:
            return [Reply(route, m.Ack(message.request, slot.rounds))]
        if client != 0:
            if 0 in self._gone:
                raise self._no_value(key)
            early = self._early.setdefault(key, {})
            known = (message.chunk, client) in early
            early[message.chunk, client] = (route, message)
            return [Reply(route, m.Waiting(message.request, [0]))] if known else []
        if not 0 <= message.chunk < message.num_chunks:
            raise ProtocolError(f"init of key {key!r}: there is no chunk {message.chunk} of {message.num_chunks}")
        value = self._array(key, payloads, message.dtype, message.count, "init")
        self._slots[where] = Slot(message.count, message.dtype, value, self._rule, self._generation)
        self._layouts.setdefault(key, message)
        return [Reply(route, m.Ack(message.request, 0)), *self._answer_early(key, message.chunk)]

    def _answer_early(self, key: m.Key, chunk: int) -> list[Reply]:
        """Client 0 has given ``chunk`` its value: who was here before it is done, or sees that it meant another key."""
        replies = []
        early = self._early.pop(key, {})
        for (of_chunk, client), (route, message) in list(early.items()):
            try:
                self._check_same(client, message)
                if of_chunk != chunk:
                    continue
                replies.append(Reply(route, m.Ack(message.request, 0)))
            except KVError as error:
                replies.append(failure(route, message.request, error))
            del early[of_chunk, client]
        if early:
            self._early[key] = early
        return replies

    def _check_same(self, client: int, message: m.Init) -> None:
        mine = self._layouts[message.key]
        text = f"init of key {message.key!r}: client {client} has {{}} {{}}, client 0 has {{}}; all must be equal"
        if message.shape != mine.shape:
            raise ShapeMismatchError(text.format("shape", tuple(message.shape), tuple(mine.shape)))
        if message.dtype != mine.dtype:
            raise DTypeMismatchError(text.format("dtype", message.dtype, mine.dtype))
        cut = "KVMPI_CHUNK_BYTES, KVMPI_MAX_MESSAGE_BYTES or KVMPI_PLACEMENT other than client 0, giving"
        if message.num_chunks != mine.num_chunks:
            raise ConfigError(text.format(f"{cut} chunks:", message.num_chunks, mine.num_chunks))
        slot = self._slots.get((message.key, message.chunk))
        if slot is not None and message.count != slot.count:
            raise ConfigError(text.format(f"{cut} elements in chunk {message.chunk}:", message.count, slot.count))

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
        done = slot.steps.get(client, 0)
        if message.step <= done:
            if message.fused:
                return self._answer_fused(client, slot, message, route)
            return [Reply(route, m.Ack(message.request, slot.rounds))]
        if message.step != done + 1:
            raise ProtocolError(
                f"push of key {message.key!r} by client {client}: step {message.step} comes after step {done}"
            )
        contribution = Contribution(route, message.request, message.fused, message.acknowledge, wire, wire_dtype)
        if self._discipline.in_rounds:
            known = client in slot.held
            slot.held[client] = contribution
            replies = self._drain(message.key, slot)
            return replies if replies or not known else [self._waiting(slot, message.request, route)]
        if slot.rules[-1].rule is None:
            raise UnsupportedError(
                f"push of key {message.key!r} by client {client}: an asynchronous store needs an update rule; "
                "call kv.set_optimizer(...) on all workers first"
            )
        answer = slot.apply_alone(contribution)
        slot.steps[client] = message.step
        if not message.fused:
            return [Reply(route, m.Ack(message.request, slot.rounds))]
        return [Reply(route, m.Value(message.request, slot.rounds), (slot.lend() if answer is slot.value else answer,))]

    def _drain(self, key: m.Key, slot: Slot) -> list[Reply]:
        """Add the held pushes whose turn has come; close rounds that are complete."""
        replies: list[Reply] = []
        while True:
            # A client has at most one push held, its next: at the cursor, that is its push of the open round.
            while (contribution := slot.held.get(slot.cursor)) is not None:
                slot.add(contribution)
                del slot.held[slot.cursor]
                slot.steps[slot.cursor] = slot.rounds + 1
                if contribution.fused:
                    slot.fused[slot.cursor] = (contribution.route, contribution.request)
                slot.cursor += 1
                follows_at_once = contribution.fused and slot.cursor == self.num_clients
                if contribution.acknowledge or not follows_at_once:
                    replies.append(Reply(contribution.route, m.Ack(contribution.request, slot.rounds)))
            if not self._discipline.complete(slot.cursor, self.num_clients):
                return replies + self._fail_stuck(key, slot)
            replies += self._close_round(slot)

    def _close_round(self, slot: Slot) -> list[Reply]:
        """Update the value with the whole round, and answer all who wait for it."""
        count, slot.cursor = slot.cursor, 0
        fused, slot.fused = slot.fused, {}
        try:
            slot.close_round(count)
        except Exception as error:  # a rule that does not fit this key, or a user's own
            slot.skip_round(error)
        replies = [self._round_answer(slot, route, request) for route, request in fused.values()]
        for client, reader in list(slot.readers.items()):
            if self._discipline.readable(slot.rounds, reader.min_round):
                del slot.readers[client]
                replies.append(self._read(slot, reader))
        return replies

    def _round_answer(self, slot: Slot, route: bytes, request: int) -> Reply:
        """What the fused pushes of the last round get."""
        if slot.failed is not None:
            return failure(route, request, slot.failed, used=True)
        return Reply(route, m.Value(request, slot.rounds), (slot.lend() if slot.met is None else slot.met,))

    def _answer_fused(self, client: int, slot: Slot, message: m.Push | m.Query, route: bytes) -> list[Reply]:
        """A fused push that is in its round asks again."""
        if message.step > slot.steps.get(client, 0):
            raise ProtocolError(f"key {message.key!r}: client {client} has not pushed step {message.step}")
        if not self._discipline.in_rounds or message.step < slot.rounds:
            return [Reply(route, m.Value(message.request, slot.rounds), (slot.lend(),))]
        if message.step == slot.rounds:
            return [self._round_answer(slot, route, message.request)]
        slot.fused[client] = (route, message.request)
        replies = [Reply(route, m.Ack(message.request, slot.rounds)), self._waiting(slot, message.request, route)]
        return replies + self._fail_stuck(message.key, slot)

    def _pull(self, client: int, route: bytes, message: m.Pull) -> list[Reply]:
        slot = self._slot(message.key, message.chunk, client)
        reader = Reader(route, message.request, message.min_round)
        if self._discipline.readable(slot.rounds, message.min_round):
            return [self._read(slot, reader)]
        known = slot.readers.get(client) == reader
        slot.readers[client] = reader
        replies = self._fail_stuck(message.key, slot)
        return replies if replies or not known else [self._waiting(slot, message.request, route)]

    def _read(self, slot: Slot, reader: Reader) -> Reply:
        if slot.failed is not None and reader.min_round == slot.rounds:
            return failure(reader.route, reader.request, slot.failed)
        return Reply(reader.route, m.Value(reader.request, slot.rounds), (slot.lend(),))

    def _waiting(self, slot: Slot, request: int, route: bytes) -> Reply:
        """Tell a sender that repeats itself whom the open round still lacks."""
        missing = (client for client in range(slot.cursor, self.num_clients) if client not in slot.held)
        return Reply(route, m.Waiting(request, list(islice(missing, MAX_NAMED))))

    # ---- rules

    def _set_rule(self, client: int, route: bytes, message: m.SetRule) -> list[Reply]:
        call = (message.rule, message.hyperparams)
        if not self._rule_calls.is_repeat(client, message.ordinal, call):
            rule = optim.create(message.rule, message.hyperparams)
            self._generation += 1
            self._install(client, rule)
        self._rule_calls.note(client, message.ordinal, call, self._present())
        return [Reply(route, m.Ack(message.request, self._generation))]

    def _set_hyperparams(self, client: int, route: bytes, message: m.SetHyperparams) -> list[Reply]:
        call = message.hyperparams
        if not self._hyper_calls.is_repeat(client, message.ordinal, call):
            if self._rule is None:
                raise ConfigError("set_hyperparams: the servers have no optimizer yet; call kv.set_optimizer first")
            self._install(client, self._rule.with_hyperparams(**call))
        self._hyper_calls.note(client, message.ordinal, call, self._present())
        return [Reply(route, m.Ack(message.request, self._generation))]

    def _present(self) -> list[int]:
        return [client for client in range(self.num_clients) if client not in self._gone]

    def _install(self, client: int, rule: optim.Rule) -> None:
        """Put ``rule`` in force, in rounds from the one after this client's last push of each chunk."""
        self._rule = rule
        for slot in self._slots.values():
            pushed = slot.steps.get(client, 0) + (client in slot.held)
            from_round = pushed + 1 if self._discipline.in_rounds else 0
            slot.change_rule(RuleChange(from_round, self._generation, rule))

    # ---- checkpoints

    def _put_state(self, client: int, route: bytes, message: m.PutState, payloads: list[memoryview]) -> list[Reply]:
        slot = self._slot(message.key, message.chunk, client)
        if len(message.names) != len(payloads) or len(set(message.names)) != len(message.names) or message.updates < 0:
            raise ProtocolError(
                f"state of key {message.key!r}: {len(payloads)} payloads for the names {message.names} "
                f"after {message.updates} updates"
            )
        arrays = {}
        for name, payload in zip(message.names, payloads, strict=True):
            dtype = slot.dtype if name == "value" else host.ACCUMULATE[slot.dtype]
            arrays[name] = self._array(message.key, [payload], dtype, slot.count, f"state {name!r}")
        # The copy of a request that was repeated may come after other clients have gone on from what it restored.
        if slot.restored is None or slot.restored[0] != route or slot.restored[1] < message.request:
            slot.restore(message.updates, arrays)
            slot.restored = (route, message.request)
        return [Reply(route, m.Ack(message.request, slot.rounds))]
