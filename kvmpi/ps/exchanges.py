"""A client's pushes and pulls: each key's chunks as requests to their servers, one step of the key after the other."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvmpi.arrays import DTYPES
from kvmpi.config import Config
from kvmpi.deadline import Deadline
from kvmpi.engine import Work
from kvmpi.errors import KVError, ProtocolError, names_in_words
from kvmpi.kernels import quantize
from kvmpi.kernels.rows import Rows
from kvmpi.ps import codec, placement
from kvmpi.ps.asks import NOWHERE, Ask, Operation
from kvmpi.ps.feedback import Feedback
from kvmpi.ps.landing import Landing
from kvmpi.ps.layout import KeyLayout
from kvmpi.ps.link import Link
from kvmpi.ps.participant import OnReply, Participant, about
from kvmpi.ps.row_chunks import ArrivingRows, RowChunks, take_rows
from kvmpi.ps.steps import Turn, position
from kvmpi.trace import Recorder, timeline
from kvmpi.wire import Message
from kvmpi.wire import messages as m

Buffer = npt.NDArray[Any]
Key = int | str

#: Keys of one request of many that a message names.
_MOST_IN_LABEL = 3


class _Piece(msgspec.Struct):
    """What is pushed to one chunk: ``rows`` of it, or (-1) all; ``seen``: the version of the chunk that it comes
    from."""

    rows: int
    nbytes: int
    seen: int
    payloads: Callable[[], Sequence[Buffer]]
    on_reply: OnReply


class _Push(msgspec.Struct):
    """A push of one key with what goes to each chunk, ``sent_bytes`` as the codec encodes it, and its place among all
    of the client's. Once begun it has a ``step`` of its key, and requests."""

    key: Key
    layout: KeyLayout
    pieces: Sequence[_Piece]
    sent_bytes: int
    turn: Turn
    step: int = 0
    asks: list[Ask] = []


class Exchange(msgspec.Struct):
    """One key of several that are exchanged: ``value`` is pushed, and the answer goes to ``out``, if one is wanted."""

    key: Key
    value: Buffer
    out: Buffer | Landing | None
    turn: Turn | None


def _encoded(chosen: codec.Codec, piece: Buffer, dtype: str) -> Sequence[Buffer]:
    return (chosen.encode(piece, dtype),)


class Exchanges(Participant):
    """What a client pushes and pulls. Operations return a ``Work`` at once.

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
        self.set_codec(codec.get("none"))
        self._answered_bytes = 0  # that pushes have brought since one of them has ended

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
        tracks = {}
        for key in keys:
            tracks[key] = self._take_position(key).track
        return dict(zip(tracks, self._steps.take(tracks, self.clock), strict=True))

    def give_up(self, key: Key, turn: Turn) -> None:
        """A push that has a place was not begun."""
        if not turn.begun:
            self._steps.end(self._layouts[key].track, turn, used=False)

    def set_codec(self, chosen: codec.Codec) -> None:
        """How pushes travel from now on. To be called when no push is under way."""
        self._codec = chosen
        self._quantizer = chosen if isinstance(chosen, codec.Quantizer) else None
        self.forget_errors(self._layouts)

    def forget_errors(self, keys: Iterable[Key]) -> None:
        """What quantized pushes of ``keys`` have not said so far is of no use any more."""
        for key in keys:
            self._layouts[key].feedback = None

    def restore_errors(self, parts: Iterable[tuple[Key, Sequence[tuple[int, int]]]]) -> None:
        """What was pushed last to elements ``start:stop`` of a key nobody has used: it is still to be said.

        To be called when that push is done, before the next one.
        """
        for key, some in parts:
            if (feedback := self._layouts[key].feedback) is not None:
                for start, stop in some:
                    feedback.restore(slice(start, stop))

    def move_errors(self, moves: Iterable[tuple[Key, Key, Sequence[tuple[int, int, int]]]]) -> None:
        """What pushes of one key have left out of elements ``start:stop`` is to be said by those of another, of its
        elements from the third number on. Keys of other dtypes than float32 leave nothing out.

        To be called when no push of these keys is under way.
        """
        taken = []
        for source, target, parts in moves:
            layout = self._layouts[target]
            if (feedback := self._layouts[source].feedback) is not None and layout.dtype == "float32":
                taken += [(layout, start, feedback.take(slice(*where))) for *where, start in parts]
        for layout, start, values in taken:
            if layout.feedback is None:
                assert self._quantizer is not None
                layout.feedback = Feedback(self._quantizer, math.prod(layout.shape))
            layout.feedback.add(slice(start, start + values.size), values)

    def abort(self) -> None:
        super().abort()
        self.forget_errors(self._layouts)  # as large as the values: what refers to a closed store must not keep them

    def push(self, key: Key, value: Buffer, deadline: Deadline, priority: int = 0, turn: Turn | None = None) -> Work:
        """Contribute ``value`` (shape ``(count,)``, storage dtype) to the key; done when every server has it.

        ``turn``: its place among all pushes, if others were made since; as in those below.
        """
        return self.exchange_together([Exchange(key, value, None, turn)], deadline, priority)

    def pushpull(
        self, key: Key, value: Buffer, out: Buffer, deadline: Deadline, priority: int = 0, turn: Turn | None = None
    ) -> Work:
        """``push``, and fill ``out`` with the answer; ``out`` may be ``value``."""
        return self.exchange_together([Exchange(key, value, out, turn)], deadline, priority)

    def push_ahead(
        self, key: Key, value: Buffer, landing: Landing, deadline: Deadline, priority: int = 0,
        on_accepted: Callable[[], None] | None = None, turn: Turn | None = None,
    ) -> Work:  # fmt: skip
        """``push``, and the round's value into ``landing``, whose memory may be ``value``; done when it is there.

        ``on_accepted`` is called when every server has ``value``, or when the Work is done.
        """
        return self.exchange_together([Exchange(key, value, landing, turn)], deadline, priority, on_accepted)

    def exchange_together(
        self, exchanges: Sequence[Exchange], deadline: Deadline, priority: int = 0,
        on_accepted: Callable[[], None] | None = None,
    ) -> Work:  # fmt: skip
        """Several small keys, which all end together, in the time that one takes and not much more: ``push``,
        ``push_ahead`` or ``pushpull``, by where their answers go, which is alike for all."""
        out, pushes = exchanges[0].out, [self._push_of(exchange) for exchange in exchanges]
        op, fused = "pushpull" if isinstance(out, np.ndarray) else "push", out is not None
        return self._push_pieces(pushes, op, self._codec.text, deadline, priority, fused, on_accepted)

    def _push_of(self, exchange: Exchange) -> _Push:
        """What goes to each chunk of the key, encoded when it leaves, and where its answer goes.

        Raises:
            KVError: the value has something that cannot be pushed as pushes travel now, or the last push is not over.
        """
        key, value, chosen = exchange.key, exchange.value, self._codec
        layout = self._layout_to_push(key)
        dtype, feedback = layout.dtype, None if self._quantizer is None else self._feedback(key, layout, value)
        pieces = []
        for i, place in enumerate(layout.places):
            where, seen = place.where, layout.seen[i]
            piece = value[where]
            payloads = partial(_encoded, chosen, piece, dtype) if feedback is None else feedback.payloads(where, piece)
            on_reply = partial(self._take_value, key, layout, i, exchange.out, seen, feedback)
            pieces.append(_Piece(-1, place.nbytes, seen, payloads, on_reply))
        turn = exchange.turn or self.next_pushes([key])[key]
        return _Push(key, layout, pieces, layout.sent_bytes(chosen), turn)

    def _layout_to_push(self, key: Key) -> KeyLayout:
        layout = self._layouts[key]
        if layout.pushing:
            raise KVError(
                f"push of key {key!r} on client {self._client}: its last push is not done; wait for that Work"
            )
        return layout

    def _feedback(self, key: Key, layout: KeyLayout, value: Buffer) -> Feedback | None:
        """What earlier pushes of the key have left out, which the codec keeps of float32.

        Raises:
            KVError: ``value`` has something that would be left for ever.
        """
        assert self._quantizer is not None
        if layout.dtype != "float32":
            return None
        if not quantize.all_finite(value):
            raise KVError(
                f"push of key {key!r} on client {self._client}, clock {self.clock}: the values have infinities or "
                f"not-a-numbers, which compression {self._codec.text} cannot carry; nothing was pushed"
            )
        if layout.feedback is None:
            layout.feedback = Feedback(self._quantizer, value.size)
        return layout.feedback

    def _push_pieces(
        self, pushes: Sequence[_Push], op: str, encoded: str, deadline: Deadline, priority: int, fused: bool,
        on_accepted: Callable[[], None] | None = None,
    ) -> Work:  # fmt: skip
        """Push what there is for each chunk of some keys, as one step of each key."""
        # A value in shared memory comes as fast as the word that it will come.
        acknowledge = on_accepted is not None and not self._link.shares
        # Nobody waits for that word, unless it is to be seen in a timeline; without rounds it is said where an answer
        # has to wait, which is seldom.
        may_be_quiet = fused and on_accepted is None and self._in_rounds and not timeline.on
        asks: list[Ask] = []
        keys, steps, behind, nbytes, done = [], [], [], 0, self._steps.done()
        for push in pushes:
            key, layout, turn = push.key, push.layout, push.turn
            layout.pushing = turn.begun = True
            layout.steps = layout.track.begin(layout.steps)
            push.step = step = layout.steps + 1
            for i, piece in enumerate(push.pieces):
                part = layout.places[i].part
                fields = (
                    key, i, step, encoded, fused, acknowledge, part, piece.rows, False, turn.at, done, *turn.span,
                    piece.seen,
                )  # fmt: skip
                push.asks.append(Ask(
                    NOWHERE, m.Push, fields, part, piece.payloads, piece.nbytes, may_be_quiet=may_be_quiet,
                    on_reply=piece.on_reply,
                ))  # fmt: skip
            asks += push.asks
            keys.append(key)
            steps.append(step)
            behind.append(layout.pushes)
            nbytes += push.sent_bytes
        asks += (entry := self._entry())

        is_late = False

        def goes_on() -> bool:
            # The program does not make it again: it counts, and what has not left yet is still to.
            nonlocal is_late
            if is_late := all(push.turn.kept for push in pushes):
                for push in pushes:
                    push.layout.pushing, push.layout.steps = False, push.step
            return is_late

        def count(error: KVError | None) -> None:
            answered_bytes, self._answered_bytes = self._answered_bytes, 0
            if answered_bytes:  # bytes that pushes have brought back; their own are counted when they end
                self._recorder.add("pull", 0.0, answered_bytes, calls=0)
            if entry and error is not None:
                self._goes_on = False  # it is said again, though it may have been heard
            for push in pushes:
                layout = push.layout
                if not is_late:
                    layout.pushing = False
                used = error is None or is_late or any(ask.used for ask in push.asks)
                # With others that have failed, it may have come to a good end itself.
                if used := used or (len(pushes) > 1 and all(ask.answered for ask in push.asks)):
                    layout.steps = max(layout.steps, push.step)
                if layout.feedback is not None:
                    layout.feedback.settle([slice(chunk.start, chunk.stop) for chunk in layout.chunks], counts=used)
                self._steps.end(layout.track, push.turn, used=used)

        label = self._label(op, keys, steps)
        return self._start(
            label, asks, deadline, priority, "push", nbytes, settle=count, on_accepted=on_accepted, goes_on=goes_on,
            behind=behind, calls=len(pushes),
        )  # fmt: skip

    # ---- rows

    def found_by_rows(self, key: Key) -> bool:
        """Whether the last round of a key before this process pushed to it was of rows, where clients step together."""
        return self._layouts[key].found_by_rows

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
        layout, chunks = self._layout_to_push(key), self.rows_of(key)
        # Errors are kept of whole keys only: rows are few enough as they are.
        chosen = self._codec if self._quantizer is None else codec.get("none")
        dtype, pieces, sent_bytes = layout.dtype, [], 0
        for i, (where, ids) in enumerate(chunks.split(rows.ids)):
            piece = rows.values[where].reshape(-1)

            def payloads(ids: Buffer = ids, piece: Buffer = piece) -> Sequence[Buffer]:
                return ids, chosen.encode(piece, dtype)

            seen = layout.seen[i]
            on_reply = self._on_changed(layout, i, changed, seen)
            sent_bytes += ids.nbytes + chosen.wire_bytes(piece.size, dtype)
            pieces.append(_Piece(ids.size, ids.nbytes + piece.nbytes, seen, payloads, on_reply))
        op = "push of rows" if changed is None else "pushpull of rows"
        pushes = [_Push(key, layout, pieces, sent_bytes, turn or self.next_pushes([key])[key])]
        return self._push_pieces(pushes, op, chosen.text, deadline, priority, changed is not None)

    def _on_changed(self, layout: KeyLayout, index: int, changed: ArrivingRows | None, seen: int) -> OnReply:
        def on_reply(message: Message, payloads: list[memoryview]) -> None:
            self._note_version(layout, index, message, pushed=seen, read=changed is not None)
            if changed is not None:
                changed.take(index, message, payloads)
                self._answered_bytes += sum(payload.nbytes for payload in payloads)

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
                        payloads=lambda numbers=numbers: (numbers,),
                        cost_bytes=out[where].nbytes,
                        on_reply=self._on_rows(layout, i, out[where]),
                    )
                )
                nbytes += numbers.nbytes
        label = self._label("pull of rows", [key], [layout.steps])
        return self._start(label, asks, deadline, priority, phase="pull", nbytes=nbytes)

    def _on_rows(self, layout: KeyLayout, index: int, out: Buffer) -> OnReply:
        def on_reply(message: Message, payloads: list[memoryview]) -> None:
            self._note_version(layout, index, message, pushed=None, read=True)
            take_rows(out, message, payloads)

        return on_reply

    def pull(self, key: Key, out: Buffer, deadline: Deadline, priority: int = 0) -> Work:
        """Fill ``out`` (shape ``(count,)``, storage dtype) with the value, not older than this client's last push."""
        return self.pull_together([(key, out)], deadline, priority)

    def pull_together(self, wanted: Sequence[tuple[Key, Buffer]], deadline: Deadline, priority: int = 0) -> Work:
        """``pull`` of several small keys, which all end together."""
        asks: list[Ask] = []
        steps, nbytes = [], 0
        for key, out in wanted:
            layout = self._take_position(key)
            steps.append(layout.steps)
            nbytes += out.nbytes
            asks += [
                Ask(
                    NOWHERE, m.Pull, (key, i, layout.steps, place.part), part=place.part, reads=True,
                    cost_bytes=place.nbytes, on_reply=partial(self._take_value, key, layout, i, out, None, None),
                )
                for i, place in enumerate(layout.places)
            ]  # fmt: skip
        label = self._label("pull", [key for key, _ in wanted], steps)
        return self._start(label, asks, deadline, priority, phase="pull", nbytes=nbytes, calls=len(wanted))

    def _take_value(
        self, key: Key, layout: KeyLayout, index: int, out: Buffer | Landing | None, pushed: int | None,
        feedback: Feedback | None, message: Message, payloads: list[memoryview],
    ) -> None:  # fmt: skip
        """The answer to a pull of a chunk, or to a push that comes from its version ``pushed``."""
        where, _, nbytes, _ = layout.places[index]
        if feedback is not None:
            feedback.note_answer(where)
        if not self._in_rounds:
            self._note_version(layout, index, message, pushed=pushed, read=out is not None)
        if out is None:
            return
        if not isinstance(message, m.Value) or len(payloads) != 1:
            raise ProtocolError(f"expected one value, got a {type(message).__name__} with {len(payloads)} payloads")
        [payload] = payloads
        if payload.nbytes != nbytes:
            raise ProtocolError(f"a chunk of {payload.nbytes} bytes came, expected {nbytes}")
        start_ns, value = timeline.now() if timeline.on else 0, np.frombuffer(payload, DTYPES[layout.dtype])
        if pushed is not None:
            self._answered_bytes += nbytes
        if isinstance(out, Landing):
            out.put(where, value)
        else:
            np.copyto(out[where], value)
        if start_ns:
            timeline.span("copy", start_ns, key, nbytes=nbytes, clock=self.clock, chunk=index)

    def _note_version(
        self, layout: KeyLayout, index: int, message: Message, *, pushed: int | None, read: bool
    ) -> None:  # fmt: skip
        """Which version of a chunk this client has ``read``; and how old was what it has ``pushed``, which comes from
        that version: of the key that is what its first chunk says."""
        if self._in_rounds:
            return
        version = message.version if isinstance(message, (m.Value, m.Ack)) else 0
        if pushed is not None and index == 0:
            later = message.later if isinstance(message, m.Value) else 0
            layout.staleness = max(0, version - later - 1 - pushed)
            self._recorder.staleness(layout.staleness)
        if read:
            layout.seen[index] = version

    # ---- how far it is

    def _label(self, op: str, keys: Sequence[Key], steps: Sequence[int] = ()) -> str:
        of = repr(keys[0]) if len(keys) == 1 else names_in_words([*map(repr, keys)], _MOST_IN_LABEL)
        at = f" at step {steps[0]}" if len(set(steps)) == 1 else ""
        return f"{op} of key {of} {self._who}{at}, clock {self.clock}"

    def _furthest_step(self) -> int:
        return max((layout.steps for layout in self._layouts.values()), default=0)

    def _under_way(self) -> list[Operation]:
        return [operation for layout in self._layouts.values() for operation in [*layout.pushes]]

    def _staleness(self, key: Key) -> int:
        return self._layouts[key].staleness
