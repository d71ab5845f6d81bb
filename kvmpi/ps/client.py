"""The master's view of the servers: where each key lives, which rule holds, and what servers remember."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import deepcopy
from typing import Any

import msgspec
import numpy.typing as npt

from kvmpi import optim
from kvmpi.arrays import DTYPES
from kvmpi.config import Config
from kvmpi.deadline import Deadline
from kvmpi.engine import Work
from kvmpi.errors import ConfigError, ProtocolError
from kvmpi.kernels import host
from kvmpi.ps import placement
from kvmpi.ps.asks import SCHEDULER, Ask
from kvmpi.ps.exchanges import Exchanges, Key
from kvmpi.ps.layout import KeyLayout
from kvmpi.ps.link import Link
from kvmpi.ps.participant import OnReply, about
from kvmpi.ps.row_chunks import WIRE_ID
from kvmpi.ps.rulebook import check_length, rule_change
from kvmpi.trace import Recorder
from kvmpi.wire import Message, as_array
from kvmpi.wire import messages as m
from kvmpi.wire.entries import RuleInForce

Buffer = npt.NDArray[Any]

#: Arrays that a rule may keep of a value beside it: a copy in a wider dtype, and two moments.
_MOST_STATES = 3


class SavedChunk(msgspec.Struct):
    """What a server remembers of elements ``start:stop`` of a key; of the first also the store's ``rule``."""

    start: int
    stop: int
    updates: int
    arrays: dict[str, Buffer] = msgspec.field(default_factory=dict)
    rule: optim.Rule | None = None


class PsClient(Exchanges):
    """Client ``client``'s conversation with all servers about one store."""

    def __init__(
        self, config: Config, *, store: int, mode: str, client: int, num_clients: int, recorder: Recorder,
        link: Link | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            config, store=store, mode=mode, client=client, num_clients=num_clients, recorder=recorder, link=link
        )
        self._placement = placement.create(config.placement, max(1, config.num_servers))
        self._before_last_keys: tuple[frozenset[Key], placement.Placement] | None = None
        self._said: tuple[RuleInForce, optim.Rule | None] | None = None

    def empty(self, count: int, dtype: str) -> Buffer:
        """Uninitialised memory of shape ``(count,)`` in storage dtype; servers on this host read it where it is.

        To be called when this client is connected. Whoever has such memory leaves it unchanged after a failed push too,
        and repeats the push from it or gives it up: servers may be reading it still.
        """
        return self._link.empty(count, DTYPES[dtype])

    # ---- keys

    def add_keys(self, described: Sequence[tuple[Key, tuple[int, ...], str]]) -> None:
        """Decide where new keys live; must be called with the same keys in the same order on every client."""
        sizes = [
            placement.KeySize(key, math.prod(shape), DTYPES[dtype].itemsize, placement.width_of(shape))
            for key, shape, dtype in described
        ]
        self._before_last_keys = (frozenset(size.key for size in sizes), deepcopy(self._placement))
        for (key, shape, dtype), size, parts in zip(described, sizes, self._placement.place(sizes), strict=True):
            # A rule's state is kept in the accumulation dtype: its frames must not be too large to travel either.
            widened = DTYPES[host.ACCUMULATE[dtype]].itemsize
            most_bytes = self._config.max_message_bytes * size.itemsize // widened
            most_rows = self._config.max_message_bytes // WIRE_ID.itemsize
            chunks = placement.cut(parts, size.itemsize, self._config.chunk_bytes, size.width, most_rows, most_bytes)
            self._layouts[key] = KeyLayout(shape, dtype, chunks, placement.digest(key))
            if not self._config.chunk_bytes:
                self._link.carry(max((chunk.stop - chunk.start) * size.itemsize for chunk in chunks))

    def forget_keys(self, keys: Sequence[Key]) -> None:
        """Undo ``add_keys`` of keys whose ``init`` failed."""
        for key in keys:
            self._layouts.pop(key, None)
        if self._before_last_keys is not None and self._before_last_keys[0] == frozenset(keys):
            # Other clients may have succeeded: when this one tries again, it must find the same places.
            self._placement = self._before_last_keys[1]
            self._before_last_keys = None

    def enter(self, deadline: Deadline) -> Work:
        """Take part in rounds if they have gone on without the process before this one; else it is done at once.

        To be called when keys have their ``init``, before anything else is done with them. When it is done, all rounds
        of overall steps after ``entered_after`` have this client, and wait for it. It goes on after ``position``, maybe
        before that: what it repeats of steps up to there is answered when the round is over, and in none.
        """
        work = Work(f"client {self._client} enters rounds")
        if not self.left_out and (not self._has_entered or self._position is not None):
            work.finish()
            return work
        passed = 0

        def hear(message: Message, _: list[memoryview]) -> None:
            nonlocal passed
            passed = max(passed, message.version if isinstance(message, m.Ack) else 0)

        def then(step: Callable[[], None]) -> Callable[[Work], None]:
            return lambda done: step() if (error := done.error()) is None else work.finish(error)

        def returned() -> None:
            asks = [about(part, m.Enter, (passed, part)) for part in range(self._num_parts)]
            asks.append(Ask(SCHEDULER, m.Enter, (passed,)))
            self._start(work.name, asks, deadline).add_done_callback(then(entered))

        def entered() -> None:
            self.left_out, self._has_entered, self.entered_after = False, True, passed
            look(-1)

        def look(before: int) -> None:
            # One chunk's answer may be older than what another knows to be done: until no more is known than before.
            asks = [ask for key, layout in self._layouts.items() for ask in self._init_asks(key, layout, None)]
            for layout in self._layouts.values():
                layout.track.found = None
            again = then(lambda: work.finish() if self.position == before else look(self.position))
            self._start(work.name, asks, deadline).add_done_callback(again)

        if self.left_out:
            asks = [about(part, m.Return, (part,), on_reply=hear) for part in range(self._num_parts)]
            self._start(work.name, asks, deadline).add_done_callback(then(returned))
        else:  # there are more keys now
            look(-1)
        return work

    def init(self, key: Key, value: Buffer | None, deadline: Deadline) -> Work:
        """Create the key; client 0 gives the value, or another if that one is lost. Done when it is readable."""
        return self._start(self._label("init", [key]), self._init_asks(key, self._layouts[key], value), deadline)

    def _init_asks(self, key: Key, layout: KeyLayout, value: Buffer | None) -> list[Ask]:
        asks = []
        for i, chunk in enumerate(layout.chunks):
            part = layout.part(i)
            fields = (key, i, len(layout.chunks), chunk.stop - chunk.start, list(layout.shape), layout.dtype, part)
            how: dict[str, Any] = {"on_reply": layout.hear}
            if value is not None:
                piece = value[chunk.start : chunk.stop]
                given = _all((piece,)), piece.nbytes
                how |= {"withheld": given} if self._client else {"payloads": given[0], "cost_bytes": given[1]}
            asks.append(about(part, m.Init, fields, **how))
        return asks

    def imbalance(self) -> float:
        """The most loaded server's bytes over the mean."""
        return self._placement.imbalance()

    # ---- commands to all servers

    def set_rule(self, rule: optim.Rule, deadline: Deadline) -> Work:
        """Make ``rule`` the update rule; done when every server has it. To be called when no push is under way."""
        check_length(rule, "set_optimizer")
        fields = (rule.name, rule.hyperparams())
        return self._command("set_optimizer", m.SetRule, fields, deadline, counts="rule")

    def set_hyperparams(self, hyperparams: dict[str, Any], deadline: Deadline) -> Work:
        """Change hyperparameters from this client's next push on; done when every server has them.

        To be called when no push is under way: the servers count the rounds that this client has contributed to.
        """
        return self._command("set_hyperparams", m.SetHyperparams, (hyperparams, self.clock), deadline, counts="hyper")

    # ---- what servers remember

    def get_state(self, key: Key, deadline: Deadline) -> tuple[Work, list[SavedChunk]]:
        """Everything the servers hold of a key, in a list that is complete when the Work is done."""
        layout = self._layouts[key]
        saved = [SavedChunk(chunk.start, chunk.stop, 0) for chunk in layout.chunks]

        def keep(into: SavedChunk) -> OnReply:
            def on_reply(message: Message, payloads: list[memoryview]) -> None:
                if not isinstance(message, m.State) or len(message.names) != len(payloads):
                    raise ProtocolError(f"state of key {key!r}: names and payloads do not match")
                into.updates = message.updates
                if message.rule is not None:
                    into.rule = self._rule_of(message.rule)
                for name, payload in zip(message.names, payloads, strict=True):
                    dtype = layout.dtype if name == "value" else host.ACCUMULATE[layout.dtype]
                    array = as_array(payload, DTYPES[dtype])
                    if array.size != into.stop - into.start:
                        raise ProtocolError(f"state {name!r} of key {key!r}: {array.size} elements in a chunk")
                    into.arrays[name] = array

            return on_reply

        itemsize = DTYPES[layout.dtype].itemsize + _MOST_STATES * DTYPES[host.ACCUMULATE[layout.dtype]].itemsize
        asks = [
            about(
                layout.part(i), m.GetState, (key, i, layout.part(i)), reads=True,
                cost_bytes=(chunk.stop - chunk.start) * itemsize, on_reply=keep(saved[i]),
            )
            for i, chunk in enumerate(layout.chunks)
        ]  # fmt: skip
        return self._start(self._label("save", [key]), asks, deadline), saved

    def _rule_of(self, said: RuleInForce) -> optim.Rule | None:
        """The rule that servers say with every key, made once: what differs for many keys is long."""
        if self._said is None or self._said[0] != said:
            rule = None
            with suppress(ConfigError):  # one that only servers have imported
                rule = rule_change(said).rule
            self._said = said, rule
        return self._said[1]

    def put_state(self, key: Key, updates: int, arrays: dict[str, Buffer], deadline: Deadline) -> Work:
        """The inverse: ``arrays`` hold the whole key, each of shape ``(count,)``."""
        layout = self._layouts[key]
        asks = []
        for i, chunk in enumerate(layout.chunks):
            pieces = [array[chunk.start : chunk.stop] for array in arrays.values()]
            fields = (key, i, updates, list(arrays), layout.part(i))
            size = sum(piece.nbytes for piece in pieces)
            asks.append(about(layout.part(i), m.PutState, fields, payloads=_all(pieces), cost_bytes=size))
        return self._start(self._label("load", [key]), asks, deadline)


def _all(parts: Sequence[Buffer]) -> Callable[[], Sequence[Buffer]]:
    return lambda: parts
