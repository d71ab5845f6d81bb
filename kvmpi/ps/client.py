"""The master's view of the servers: where each key lives, how far it is, and what to ask whom."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvmpi import optim
from kvmpi.arrays import DTYPES
from kvmpi.config import Config
from kvmpi.deadline import Deadline
from kvmpi.engine import Work
from kvmpi.errors import ConfigError, KVError, ProtocolError, names_in_words
from kvmpi.kernels import host, quantize
from kvmpi.kernels.rows import Rows
from kvmpi.ps import codec, placement
from kvmpi.ps.asks import SCHEDULER, Ask, Operation
from kvmpi.ps.feedback import Feedback
from kvmpi.ps.landing import Landing
from kvmpi.ps.layout import KeyLayout
from kvmpi.ps.link import Link
from kvmpi.ps.participant import OnReply, Participant, about
from kvmpi.ps.row_chunks import WIRE_ID, ArrivingRows, RowChunks, take_rows
from kvmpi.ps.rulebook import check_length, rule_change
from kvmpi.ps.steps import Turn, position
from kvmpi.trace import Recorder, timeline
from kvmpi.wire import Message, as_array
from kvmpi.wire import messages as m
from kvmpi.wire.entries import RuleInForce

Buffer = npt.NDArray[Any]
Key = int | str

#: Arrays that a rule may keep of a value beside it: a copy in a wider dtype, and two moments.
_MOST_STATES = 3
#: Keys of one request of many that a message names.
_MOST_IN_LABEL = 3


class _Piece(NamedTuple):
    """What is pushed to one chunk: ``rows`` of it, or (-1) all; ``sent_bytes``: as the codec encodes it."""

    rows: int
    nbytes: int
    sent_bytes: int
    payloads: Callable[[], Sequence[Buffer]]
    on_reply: OnReply


class _Push(NamedTuple):
    """A push of one key with what goes to each chunk, and its place among all of the client's: None for the next."""

    key: Key
    pieces: Sequence[_Piece]
    turn: Turn | None


class Exchange(NamedTuple):
    """One key of a pushpull: ``value`` to be pushed and ``out`` to be filled, as of ``PsClient.pushpull``."""

    key: Key
    value: Buffer
    out: Buffer
    turn: Turn


@dataclass(slots=True)
class SavedChunk:
    """What a server remembers of elements ``start:stop`` of a key; of the first also the store's ``rule``."""

    start: int
    stop: int
    updates: int
    arrays: dict[str, Buffer] = field(default_factory=dict)
    rule: optim.Rule | None = None


class PsClient(Participant):
    """Client ``client``'s conversation with all servers about one store. Operations return a ``Work`` at once.

    Buffers that are passed to an operation must stay unchanged until its Work is done. An operation on a key may be
    started when the one before it on that key is done; different keys run side by side.

    A push that fails is not counted: the next push of the key is taken as its repetition, and servers that had it
    already add nothing. So a caller who tries again contributes once, and rounds of other clients stay in step. Only
    one that is kept (see ``Turn``) goes on when its Work has ended because of its deadline, and the next waits for it.
    """

    def __init__(
        self, config: Config, *, store: int, mode: str, client: int, num_clients: int, recorder: Recorder,
        link: Link | None = None,
    ) -> None:  # fmt: skip
        super().__init__(config, store, mode, client, num_clients, recorder, link)
        self._layouts: dict[Key, KeyLayout] = {}
        self._placement = placement.create(config.placement, max(1, config.num_servers))
        self._before_last_keys: tuple[frozenset[Key], placement.Placement] | None = None
        self._codec = codec.get("none")
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

    @property
    def position(self) -> int:
        if self._position is not None:
            return self._position
        after = position([found for layout in self._layouts.values() if (found := layout.track.found) is not None])
        return min(after, self.entered_after) if self._has_entered else after

    def _take_position(self, key: Key) -> KeyLayout:
        """The key, at the overall step where the process before this one has stopped: the same for all keys.

        What that process has pushed beyond counts as pushed: servers take the repetition for one.
        """
        if self._position is None:
            self._position = self.position
            self._steps.begin_after(self._position)
        layout = self._layouts[key]
        if (found := layout.track.found) is not None:
            layout.steps = found.up_to(self.position) if self._steps.finds else found.count
        return layout

    def next_pushes(self, keys: Sequence[Key]) -> dict[Key, Turn]:
        """The next pushes of ``keys``, which one call of the program makes, take their places among this client's: to
        be called in program order."""
        tracks = {key: self._take_position(key).track for key in keys}
        return dict(zip(tracks, self._steps.take(tracks, self.clock), strict=True))

    def give_up(self, key: Key, turn: Turn) -> None:
        """A push that has a place was not begun."""
        if not turn.begun:
            self._steps.end(self._layouts[key].track, turn, used=False)

    def set_codec(self, chosen: codec.Codec) -> None:
        """How pushes travel from now on. To be called when no push is under way."""
        self._codec = chosen
        self.forget_errors(self._layouts)

    def forget_errors(self, keys: Iterable[Key]) -> None:
        """What quantized pushes of ``keys`` have not said so far is of no use any more."""
        for key in keys:
            self._layouts[key].feedback = None

    def restore_errors(self, key: Key, parts: Iterable[tuple[int, int]]) -> None:
        """What was pushed last to elements ``start:stop`` of the key nobody has used: it is still to be said.

        To be called when that push is done, before the next one.
        """
        if (feedback := self._layouts[key].feedback) is not None:
            for start, stop in parts:
                feedback.restore(slice(start, stop))

    def abort(self) -> None:
        super().abort()
        self.forget_errors(self._layouts)  # as large as the values: what refers to a closed store must not keep them

    def push(self, key: Key, value: Buffer, deadline: Deadline, priority: int = 0, turn: Turn | None = None) -> Work:
        """Contribute ``value`` (shape ``(count,)``, storage dtype) to the key; done when every server has it.

        ``turn``: its place among all pushes, if others were made since; as in those below.
        """
        return self._exchange(key, value, None, deadline, priority, turn)

    def pushpull(
        self, key: Key, value: Buffer, out: Buffer, deadline: Deadline, priority: int = 0, turn: Turn | None = None
    ) -> Work:
        """``push``, and fill ``out`` with the answer; ``out`` may be ``value``."""
        return self._exchange(key, value, out, deadline, priority, turn)

    def push_ahead(
        self, key: Key, value: Buffer, landing: Landing, deadline: Deadline, priority: int = 0,
        on_accepted: Callable[[], None] | None = None, turn: Turn | None = None,
    ) -> Work:  # fmt: skip
        """``push``, and the round's value into ``landing``, whose memory may be ``value``; done when it is there.

        ``on_accepted`` is called when every server has ``value``, or when the Work is done.
        """
        return self._exchange(key, value, landing, deadline, priority, turn, on_accepted)

    def pushpull_together(self, exchanges: Sequence[Exchange], deadline: Deadline, priority: int = 0) -> Work:
        """``pushpull`` of several small keys, which all end together, in the time that one takes and not much more."""
        pushes = [_Push(key, self._pieces_of(key, value, out), turn) for key, value, out, turn in exchanges]
        return self._push_pieces(pushes, "pushpull", self._codec, deadline, priority, fused=True)

    def _exchange(
        self, key: Key, value: Buffer, out: Buffer | Landing | None, deadline: Deadline, priority: int,
        turn: Turn | None, on_accepted: Callable[[], None] | None = None,
    ) -> Work:  # fmt: skip
        pieces = self._pieces_of(key, value, out)
        op = "pushpull" if isinstance(out, np.ndarray) else "push"
        pushes = [_Push(key, pieces, turn)]
        return self._push_pieces(
            pushes, op, self._codec, deadline, priority, fused=out is not None, on_accepted=on_accepted
        )

    def _pieces_of(self, key: Key, value: Buffer, out: Buffer | Landing | None) -> list[_Piece]:
        """What goes to each chunk of the key, encoded when it leaves, and where its answer goes.

        Raises:
            KVError: ``value`` has something that cannot be pushed as pushes travel now.
        """
        layout, chosen = self._layouts[key], self._codec
        dtype, feedback = layout.dtype, self._feedback(key, value)

        def payloads(where: slice, piece: Buffer) -> Callable[[], Sequence[Buffer]]:
            return (lambda: (chosen.encode(piece, dtype),)) if feedback is None else feedback.payloads(where, piece)

        pieces = []
        for i, chunk in enumerate(layout.chunks):
            where = slice(chunk.start, chunk.stop)
            piece = value[where]
            sent_bytes = chosen.wire_bytes(piece.size, dtype)
            on_reply = self._on_value(key, layout, i, out, pushed=True, feedback=feedback)
            pieces.append(_Piece(-1, piece.nbytes, sent_bytes, payloads(where, piece), on_reply))
        return pieces

    def _feedback(self, key: Key, value: Buffer) -> Feedback | None:
        """What earlier pushes of the key have left out, if the codec keeps it.

        Raises:
            KVError: ``value`` has something that would be left for ever.
        """
        layout = self._layouts[key]
        if not isinstance(self._codec, codec.Quantizer) or layout.dtype != "float32":
            return None
        if not quantize.all_finite(value):
            raise KVError(
                f"push of key {key!r} on client {self._client}, clock {self.clock}: the values have infinities or "
                f"not-a-numbers, which compression {self._codec.text} cannot carry; nothing was pushed"
            )
        if layout.feedback is None:
            layout.feedback = Feedback(self._codec, value.size)
        return layout.feedback

    def _push_pieces(
        self, pushes: Sequence[_Push], op: str, encoded: codec.Codec, deadline: Deadline, priority: int, *,
        fused: bool, on_accepted: Callable[[], None] | None = None,
    ) -> Work:  # fmt: skip
        """Push what there is for each chunk of some keys, as one step of each key."""
        for key, _, _ in pushes:
            if self._layouts[key].pushing:
                raise KVError(
                    f"push of key {key!r} on client {self._client}: its last push is not done; wait for that Work"
                )
        # A value in shared memory comes as fast as the word that it will come.
        acknowledge = on_accepted is not None and not self._link.shares
        # Nobody waits for that word, unless it is to be seen in a timeline; without rounds it is said where an answer
        # has to wait, which is seldom.
        may_be_quiet = fused and on_accepted is None and self._in_rounds and not timeline.on
        begun: list[tuple[KeyLayout, Turn, int, list[Ask]]] = []
        asks: list[Ask] = []
        for key, pieces, turn in pushes:
            layout, turn = self._layouts[key], turn or self.next_pushes([key])[key]
            layout.pushing = turn.begun = True
            layout.steps = layout.track.begin(layout.steps)
            step, done = layout.steps + 1, self._steps.done()
            asks_of_key = [
                about(
                    part := layout.part(i), m.Push,
                    (key, i, step, encoded.text, fused, acknowledge, part, piece.rows, False, turn.at, done,
                     *turn.span),
                    cost_bytes=piece.nbytes, may_be_quiet=may_be_quiet, payloads=piece.payloads,
                    on_reply=piece.on_reply,
                )
                for i, piece in enumerate(pieces)
            ]  # fmt: skip
            asks += asks_of_key
            begun.append((layout, turn, step, asks_of_key))
        asks += (entry := self._entry())

        is_late = False

        def goes_on() -> bool:
            # The program does not make it again: it counts, and what has not left yet is still to.
            nonlocal is_late
            if is_late := all(turn.kept for _, turn, _, _ in begun):
                for layout, _, step, _ in begun:
                    layout.pushing, layout.steps = False, step
            return is_late

        def count(error: KVError | None) -> None:
            if entry and error is not None:
                self._goes_on = False  # it is said again, though it may have been heard
            for layout, turn, step, asks_of_key in begun:
                if not is_late:
                    layout.pushing = False
                used = error is None or is_late or any(ask.used for ask in asks_of_key)
                # With others that have failed, it may have come to a good end itself.
                if used := used or (len(begun) > 1 and all(ask.answered for ask in asks_of_key)):
                    layout.steps = max(layout.steps, step)
                if layout.feedback is not None:
                    layout.feedback.settle([slice(chunk.start, chunk.stop) for chunk in layout.chunks], counts=used)
                self._steps.end(layout.track, turn, used=used)

        steps = {step for _, _, step, _ in begun}
        label = self._label(op, [push.key for push in pushes], min(steps) if len(steps) == 1 else None)
        nbytes = sum([piece.sent_bytes for push in pushes for piece in push.pieces])
        return self._start(
            label, asks, deadline, priority, "push", nbytes, settle=count, on_accepted=on_accepted, goes_on=goes_on,
            behind=[layout.pushes for layout, _, _, _ in begun], calls=len(begun),
        )  # fmt: skip

    # ---- rows

    def rows_of(self, key: Key) -> RowChunks:
        """How the rows of a key are spread over its chunks.

        Raises:
            UnsupportedError: the key is not cut at rows.
        """
        layout = self._layouts[key]
        if layout.by_rows is None:
            layout.by_rows = RowChunks(key, layout.chunks, placement.width_of(layout.shape), layout.dtype)
        return layout.by_rows

    def push_rows(
        self, key: Key, rows: Rows, deadline: Deadline, priority: int = 0, changed: ArrivingRows | None = None,
        turn: Turn | None = None,
    ) -> Work:  # fmt: skip
        """Contribute some rows to the key, in storage dtype; done when every server has them.

        With ``changed``, that gets all rows which the update has changed, with their new values, and then it is done.
        """
        layout, chunks = self._layouts[key], self.rows_of(key)
        # Errors are kept of whole keys only: rows are few enough as they are.
        chosen = codec.get("none") if isinstance(self._codec, codec.Quantizer) else self._codec
        dtype = layout.dtype
        pieces = []
        for i, (where, ids) in enumerate(chunks.split(rows.ids)):
            piece = rows.values[where].reshape(-1)

            def payloads(ids: Buffer = ids, piece: Buffer = piece) -> Sequence[Buffer]:
                return ids, chosen.encode(piece, dtype)

            on_reply = self._on_changed(layout, i, changed)
            sent_bytes = ids.nbytes + chosen.wire_bytes(piece.size, dtype)
            pieces.append(_Piece(ids.size, ids.nbytes + piece.nbytes, sent_bytes, payloads, on_reply))
        op = "push of rows" if changed is None else "pushpull of rows"
        pushes = [_Push(key, pieces, turn)]
        return self._push_pieces(pushes, op, chosen, deadline, priority, fused=changed is not None)

    def _on_changed(self, layout: KeyLayout, index: int, changed: ArrivingRows | None) -> OnReply:
        def on_reply(message: Message, payloads: list[memoryview]) -> None:
            self._note_version(layout, index, message, pushed=True, read=changed is not None)
            if changed is not None:
                changed.take(index, message, payloads)
                self._count_answer(sum(payload.nbytes for payload in payloads))

        return on_reply

    def pull_rows(self, key: Key, ids: Buffer, out: Buffer, deadline: Deadline, priority: int = 0) -> Work:
        """Fill ``out`` (shape ``(ids.size, width)``, storage dtype) with rows ``ids``, ascending, of the value.

        It is not older than this client's last push.
        """
        layout, chunks = self._take_position(key), self.rows_of(key)
        asks, nbytes = [], out.nbytes
        for i, (where, numbers) in enumerate(chunks.split(ids)):
            if numbers.size:
                part = layout.part(i)
                asks.append(
                    about(
                        part,
                        m.Pull,
                        (key, i, layout.steps, part, numbers.size),
                        reads=True,
                        payloads=_all((numbers,)),
                        cost_bytes=out[where].nbytes,
                        on_reply=self._on_rows(layout, i, out[where]),
                    )
                )
                nbytes += numbers.nbytes
        label = self._label("pull of rows", [key], layout.steps)
        return self._start(label, asks, deadline, priority, phase="pull", nbytes=nbytes)

    def _on_rows(self, layout: KeyLayout, index: int, out: Buffer) -> OnReply:
        def on_reply(message: Message, payloads: list[memoryview]) -> None:
            self._note_version(layout, index, message, pushed=False, read=True)
            take_rows(out, message, payloads)

        return on_reply

    def pull(self, key: Key, out: Buffer, deadline: Deadline, priority: int = 0) -> Work:
        """Fill ``out`` (shape ``(count,)``, storage dtype) with the value, not older than this client's last push."""
        layout = self._take_position(key)
        asks = [
            about(
                layout.part(i), m.Pull, (key, i, layout.steps, layout.part(i)), reads=True,
                cost_bytes=(chunk.stop - chunk.start) * out.itemsize,
                on_reply=self._on_value(key, layout, i, out, pushed=False),
            )
            for i, chunk in enumerate(layout.chunks)
        ]  # fmt: skip
        label = self._label("pull", [key], layout.steps)
        return self._start(label, asks, deadline, priority, phase="pull", nbytes=out.nbytes)

    def _on_value(
        self, key: Key, layout: KeyLayout, index: int, out: Buffer | Landing | None, *, pushed: bool,
        feedback: Feedback | None = None,
    ) -> OnReply:  # fmt: skip
        chunk = layout.chunks[index]
        where = slice(chunk.start, chunk.stop)

        def on_reply(message: Message, payloads: list[memoryview]) -> None:
            if feedback is not None:
                feedback.note_answer(where)
            self._note_version(layout, index, message, pushed=pushed, read=out is not None)
            if out is None:
                return
            if not isinstance(message, m.Value) or len(payloads) != 1:
                raise ProtocolError(f"expected one value, got a {type(message).__name__} with {len(payloads)} payloads")
            start_ns = timeline.now() if timeline.on else 0
            value = as_array(payloads[0], DTYPES[layout.dtype])
            if value.size != where.stop - where.start:
                raise ProtocolError(f"a chunk of {value.size} elements came, expected {where.stop - where.start}")
            if pushed:
                self._count_answer(value.nbytes)
            if isinstance(out, Landing):
                out.put(where, value)
            else:
                np.copyto(out[where], value)
            if start_ns:
                timeline.span("copy", start_ns, key, nbytes=value.nbytes, clock=self.clock, chunk=index)

        return on_reply

    def _count_answer(self, nbytes: int) -> None:
        """Bytes that a push brings back; its own are counted when it ends."""
        self._recorder.add("pull", 0.0, nbytes, calls=0)

    def _note_version(self, layout: KeyLayout, index: int, message: Message, *, pushed: bool, read: bool) -> None:
        """How old was what this client had; the first chunk speaks for the key."""
        if index != 0:
            return
        version = message.version if isinstance(message, (m.Value, m.Ack)) else 0
        if pushed and not self._in_rounds:
            later = message.later if isinstance(message, m.Value) else 0
            layout.staleness = max(0, version - later - 1 - layout.seen_version)
            self._recorder.staleness(layout.staleness)
        if read:
            layout.seen_version = version

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

    def _label(self, op: str, keys: Sequence[Key], step: int | None = None) -> str:
        at = "" if step is None else f" at step {step}"
        of = repr(keys[0]) if len(keys) == 1 else names_in_words([*map(repr, keys)], _MOST_IN_LABEL)
        return f"{op} of key {of} on client {self._client} of {self._num_clients}{at}, clock {self.clock}"

    def _furthest_step(self) -> int:
        return max((layout.steps for layout in self._layouts.values()), default=0)

    def _under_way(self) -> list[Operation]:
        return [operation for layout in self._layouts.values() for operation in [*layout.pushes]]

    def _staleness(self, key: Key) -> int:
        return self._layouts[key].staleness

    def imbalance(self) -> float:
        """The most loaded server's bytes over the mean."""
        return self._placement.imbalance()

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
