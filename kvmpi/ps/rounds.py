"""Synchronous rounds of a store's chunks: whose push is next, when a round is over, and who is told what."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import filterfalse, islice
from typing import Any

import numpy as np
import numpy.typing as npt

from kvmpi.errors import ClientLostError, ProtocolError, ServerLostError
from kvmpi.kernels.host import HALF
from kvmpi.kernels.rows import Rows, distinct
from kvmpi.ps.consistency import Consistency
from kvmpi.ps.membership import Membership
from kvmpi.ps.order import UNSAID, Span
from kvmpi.ps.reply import MAX_NAMED, Reply, failure, name_and_text
from kvmpi.ps.row_chunks import frames, num_rows
from kvmpi.ps.slot import ADOPT_FROM_BYTES, Contribution, Reader, Slot, Waiter
from kvmpi.trace import timeline
from kvmpi.wire import entries
from kvmpi.wire import messages as m

Buffer = npt.NDArray[Any]
#: Takes None for a round where nobody is to be told of it.
Log = Callable[[entries.Entry | None, tuple[Buffer, ...]], bool]


def nothing(_: Slot) -> None:
    """What is called where nobody wants to know."""


def is_of_this_server(error: Exception) -> bool:
    """Whether an update wants something that another server may have. All else fails on all of them."""
    return isinstance(error.__cause__ or error, (MemoryError, OSError))


def parted(server: int, error: Exception) -> ServerLostError:
    """Why a server ends that cannot make a change which the servers after it make by its log."""
    return ServerLostError(
        f"server {server} ends, so that another goes on in its place, which has what this one lacks for a change: "
        f"{name_and_text(error)[1]}"
    )


def changed(slot: Slot, request: int, route: bytes, ids: Buffer, later: int = 0) -> Reply:
    """Rows of the value, as the answer to a push, after which so many updates have come ``later``."""
    return Reply(route, m.Value(request, slot.rounds, ids.size, later=later), (ids, slot.take(ids)))


def settle_steps(slot: Slot) -> bool:
    """Whether all pushes of the open round say their overall steps; else none does from now on."""
    if len(slot.open_steps) < len(slot.contributors):
        slot.open_steps.clear()
    return bool(slot.open_steps)


def steps_of(slot: Slot) -> tuple[list[int], int, int, int]:
    """The overall steps of the open round, as they are logged."""
    if not settle_steps(slot):
        return [], 0, 0, 0
    steps = [slot.open_steps[client] for client in slot.contributors]
    return steps if len(set(steps)) > 1 else steps[:1], slot.open_done, *slot.span


class Rounds:
    """How pushes of several clients become updates, in one part of a store.

    Args:
        log: called with every change before it is made; whether the payloads' memory must stay as it is.
    Attributes:
        acknowledges: a push is done when its round is over, not when it is in it.
        is_backed: tells whether another server makes all changes too, and could go on in this one's place.
        is_followed: tells whether another is to be told of them.
        before_update, on_update: called when a chunk is about to have another value, and when it has.
    """

    def __init__(
        self, server: int, store: int, num_clients: int, discipline: Consistency, clients: Membership, log: Log
    ) -> None:
        self._server, self._store, self._num_clients = server, store, num_clients
        self._discipline, self._clients, self._log = discipline, clients, log
        self.acknowledges = False
        self.is_backed: Callable[[], bool] = lambda: False
        self.is_followed: Callable[[], bool] = lambda: True
        self.before_update: Callable[[Slot], None] = nothing
        self.on_update: Callable[[Slot], None] = nothing

    def push_plain(
        self, slot: Slot, client: int, route: bytes, message: m.Push, payloads: list[memoryview]
    ) -> list[Reply] | None:
        """A push as most are, at once; None: it is not of that kind, and nothing was done.

        It ends as ``push`` does. With many small keys most time would go into finding out step by step that nothing is
        unusual.
        """
        if not self._is_plain(slot, client, message, payloads):
            return None
        wire, request, step = np.frombuffer(payloads[0], slot.value.dtype), message.request, slot.rounds + 1
        # One that is alone has pushed the sum; of what is large the memory is taken over.
        is_sum = self._num_clients == 1 and wire.nbytes < ADOPT_FROM_BYTES
        if is_sum:
            slot.accumulator = wire
        else:
            slot.add(wire, slot.dtype)
        slot.steps[client] = step
        slot.contributors.append(client)
        if message.at:
            slot.note_step(client, message.at, message.done)
        slot.open_spans.append(Span(message.earliest, message.latest) if message.earliest else UNSAID)
        slot.cursor += 1
        if slot.cursor < self._num_clients:
            if not message.fused:
                replies = [Reply(route, m.Ack(request, slot.rounds))]
            else:
                slot.waiting[client] = Waiter(route, request, True, step)
                replies = [] if message.quiet else [Reply(route, m.Accepted(request))]
            return replies + self.go_on_with(slot) if slot.held else replies
        self.before_update(slot)
        if slot.open_steps:
            settle_steps(slot)
        self._log(None, ())
        self.end_round(slot, keep=is_sum)
        self.on_update(slot)
        replies = []
        if slot.waiting or slot.readers:
            replies = self._answer_waiting(slot)
        if not message.fused:
            replies.append(Reply(route, m.Ack(request, step - 1)))  # as it was when the push got in
        elif slot.failed is None and slot.met is None:
            replies.append(Reply(route, m.Value(request, step), (slot.lend(),)))
        else:
            replies.append(self.answer(slot, Waiter(route, request, True, step)))
        return replies + self.go_on_with(slot) if slot.held else replies

    def _is_plain(self, slot: Slot, client: int, message: m.Push, payloads: list[memoryview]) -> bool:
        """Whether a push is the next one of the client whose turn it is, has all elements of its chunk as they are, all
        clients take part, and no other server is told."""
        clients = self._clients
        total = slot.accumulator
        return not (
            client != slot.cursor or message.step != slot.rounds + 1 or slot.steps.get(client, 0) != slot.rounds
            or message.rows != -1 or message.codec != "none" or message.acknowledge or self.acknowledges
            or len(payloads) != 1 or payloads[0].nbytes != slot.value.nbytes or slot.dtype in HALF
            or client in slot.held or slot.entering or clients.gone or clients.finished or clients.entering
            or (total is not None and isinstance(total, Rows)) or self.is_followed() or timeline.on
        )  # fmt: skip

    def push(self, slot: Slot, client: int, contribution: Contribution) -> list[Reply]:
        """The next push of a client, or its repetition: it is held until its turn has come."""
        known = client in slot.held
        slot.held[client] = contribution
        replies = self.go_on_with(slot)
        if known and not replies:
            return [self.who_is_missing(slot, contribution.request, contribution.route)]
        return replies

    def go_on_with(self, slot: Slot) -> list[Reply]:
        """Add the held pushes whose turn has come; close rounds that are complete."""
        replies: list[Reply] = []
        clients = self._clients
        while True:
            all_take_part = not (clients.gone or clients.finished or slot.entering)
            if all_take_part and not slot.held and slot.cursor < self._num_clients:
                return replies  # as a rule: the next push is still to come
            while slot.cursor < self._num_clients:
                client = slot.cursor
                before_entry = client in slot.entering and self._clients.is_needed(client)
                if before_entry:
                    if not slot.open_step:
                        break  # nobody has pushed yet
                    before_entry = slot.open_step <= slot.entering[client]
                    if not before_entry and client in slot.held and slot.steps[client] != slot.rounds:
                        replies.append(self._misplaced(slot, client, slot.held.pop(client)))
                # A client has at most one push held, its next: at the cursor, that is its push of the open round.
                contribution = None if before_entry else slot.held.pop(client, None)
                if contribution is not None:
                    replies += self._take(slot, contribution, client)
                    continue
                if not before_entry and clients.is_needed(client):
                    break
                slot.cursor += 1
            if not self._discipline.complete(slot.cursor, self._num_clients):
                return replies + self.fail_stuck(slot)
            if not slot.contributors and next(self._repeats(slot), None) is None:  # nobody is left who would push
                slot.cursor = 0
                return replies
            replies += self._close_round(slot)

    def _take(self, slot: Slot, contribution: Contribution, client: int) -> list[Reply]:
        """The push at the cursor: its turn has come."""
        self._add(slot, contribution, client)
        slot.contributors.append(client)
        slot.steps[client] = slot.rounds + 1
        if contribution.at:
            slot.note_step(client, contribution.at, contribution.done)
        slot.open_spans.append(contribution.span)
        replies = self._accept(slot, contribution)
        slot.cursor += 1
        return replies

    def _add(self, slot: Slot, contribution: Contribution, client: int) -> None:
        if not timeline.on:
            slot.add(contribution.wire, contribution.wire_dtype)
            return
        start_ns, step = timeline.now(), slot.rounds + 1
        if contribution.arrived_ns:
            self.span("server queue", contribution.arrived_ns, slot, contribution.wire, step, client)
        slot.add(contribution.wire, contribution.wire_dtype)
        self.span("reduce", start_ns, slot, contribution.wire, step, client)

    def span(
        self, phase: str, start_ns: int, slot: Slot, what: Buffer | Rows, step: int, client: int = timeline.NOTHING
    ) -> None:
        """For the timeline: something that has gone on since then with ``what``."""
        nbytes = sum(frame.nbytes for frame in frames(what))
        timeline.span(
            phase, start_ns, slot.key, nbytes=nbytes, step=step, chunk=slot.chunk, peer=client, store=self._store
        )

    def _misplaced(self, slot: Slot, client: int, push: Contribution) -> Reply:
        """The first push of a client that is back is not where the open round shows that it belongs."""
        error = ProtocolError(
            f"key {slot.key!r} on server {self._server}: client {client}, which is back after step "
            f"{slot.entering[client]}, makes push {slot.steps[client] + 1} in step {abs(push.at)}; that of the others "
            f"in step {slot.open_step} is number {slot.rounds + 1}; every step must have the same keys, in the same "
            "order, each at most once"
        )
        return failure(push.route, push.request, error)

    @staticmethod
    def _repeats(slot: Slot) -> Iterator[int]:
        """Clients that are back, and have pushed to the open round, which does without them."""
        return (client for client in slot.entering if client in slot.held and slot.steps[client] == slot.rounds)

    def _accept(self, slot: Slot, contribution: Contribution) -> list[Reply]:
        """The push at the cursor is in the open round: it is done, or its sender waits for the end of the round."""
        route, request = contribution.route, contribution.request
        if not contribution.fused and not self.acknowledges:
            return [Reply(route, m.Ack(request, slot.rounds))]
        slot.waiting[slot.cursor] = Waiter(route, request, contribution.fused, slot.rounds + 1)
        ends_at_once = slot.cursor + 1 == self._num_clients
        says_nothing = contribution.quiet or (ends_at_once and not contribution.acknowledge)
        return [] if says_nothing else [Reply(route, m.Accepted(request))]

    def _close_round(self, slot: Slot) -> list[Reply]:
        """Update the value with the whole round, if anybody is in it, and answer all who wait for it."""
        replies: list[Reply] = []
        repeated = self._take_repeated(slot, replies) if slot.entering else {}
        if slot.accumulator is None:
            at, done = next(((push.at, push.done) for push in repeated.values()), (0, 0))
            self._log(entries.Skipped(slot.key, slot.chunk, at, done), ())
            slot.note_step(slot.ANYBODY, at, done)
            slot.begin_round()
            slot.skip_round(None)
        else:
            self._update(slot, slot.accumulator)
        self.on_update(slot)
        for client, push in repeated.items():
            slot.steps[client] = slot.rounds
            waiter = Waiter.again(push.route, push.request, push.fused, slot.rounds, push.wire)
            replies.append(self.answer(slot, waiter))
        return replies + self._answer_waiting(slot)

    def _answer_waiting(self, slot: Slot) -> list[Reply]:
        """Whoever has waited for the round that is over."""
        replies: list[Reply] = []
        for client, waiter in [*slot.waiting.items()] if slot.waiting else ():
            if waiter.step <= slot.rounds:
                del slot.waiting[client]
                replies.append(self.answer(slot, waiter))
        for client, reader in [*slot.readers.items()] if slot.readers else ():
            if self._discipline.readable(slot.rounds, reader.min_round):
                if timeline.on and reader.arrived_ns:
                    self.span("pull", reader.arrived_ns, slot, slot.value, reader.min_round, client)
                del slot.readers[client]
                replies.append(self.read(slot, reader))
        return replies

    def _take_repeated(self, slot: Slot, replies: list[Reply]) -> dict[int, Contribution]:
        """The pushes of clients that are back to the open round, which does without them. One that does not belong
        there is refused in ``replies``."""
        repeated = {client: slot.held.pop(client) for client in list(self._repeats(slot))}
        for client, push in list(repeated.items()):
            if abs(push.at) > slot.entering[client]:
                replies.append(self._misplaced(slot, client, repeated.pop(client)))
        return repeated

    def _update(self, slot: Slot, total: Buffer | Rows) -> None:
        """Update the value with ``total``, the sum of the open round."""
        self.before_update(slot)
        if self.is_followed():
            clients = None if len(slot.contributors) == self._num_clients else list(slot.contributors)
            entry = entries.Round(slot.key, slot.chunk, clients, num_rows(total), *steps_of(slot))
            keep = self._log(entry, frames(total))
        else:
            settle_steps(slot)
            keep = self._log(None, ())
        start_ns = timeline.now() if timeline.on else 0
        self.end_round(slot, keep=keep)
        if slot.failed is not None and self.is_backed() and is_of_this_server(slot.failed):
            raise parted(self._server, slot.failed) from slot.failed
        if start_ns:
            self.span("update", start_ns, slot, total, slot.rounds)

    @staticmethod
    def end_round(slot: Slot, *, keep: bool) -> None:
        """Update the value with all that the open round has. ``keep``: its memory must stay as it is."""
        count = len(slot.contributors)
        slot.begin_round()
        try:
            slot.close_round(count, keep=keep)
        except Exception as error:  # a rule that does not fit this key, or a user's own
            slot.skip_round(error)

    def answer(self, slot: Slot, waiter: Waiter) -> Reply:
        """What the pushes of the last round get: of rows, with what has changed also those that were pushed."""
        if not waiter.fused:
            return Reply(waiter.route, m.Ack(waiter.request, slot.rounds))
        if slot.failed is not None:
            return failure(waiter.route, waiter.request, slot.failed, used=True)
        if slot.touched is not None and not waiter.whole:  # else it is not in that round, and others pushed rows only
            ids = slot.touched if waiter.ids is None else distinct(slot.touched, waiter.ids)
            return changed(slot, waiter.request, waiter.route, ids)
        payload = slot.lend() if slot.met is None else slot.met
        return Reply(waiter.route, m.Value(waiter.request, slot.rounds), (payload,))

    def fail_stuck(self, slot: Slot) -> list[Reply]:
        """Errors for all who wait for the open round, if a client that has not pushed to it never will."""
        if not slot.is_awaited or all(slot.steps.get(client, 0) > slot.rounds for client in self._clients.ending()):
            return []
        error = ClientLostError(
            f"key {slot.key!r} on server {self._server}: round {slot.rounds + 1} cannot be completed, because "
            f"{self._clients.blame()}"
        )
        waiting = [(held.route, held.request) for held in slot.held.values()]
        waiting += [(waiter.route, waiter.request) for waiter in slot.waiting.values()]
        waiting += [(reader.route, reader.request) for reader in slot.readers.values()]
        slot.forget_waiting()
        return [failure(route, request, error) for route, request in waiting]

    def who_is_missing(self, slot: Slot, request: int, route: bytes) -> Reply:
        """Tell a sender that repeats itself whom the open round still lacks."""
        return Reply(route, m.Waiting(request, self.missing(slot)))

    def missing(self, slot: Slot) -> list[int]:
        """Whom the open round still lacks: the first of them."""
        late = filterfalse(slot.held.__contains__, range(slot.cursor, self._num_clients))
        awaited = filter(self._clients.is_needed, late)
        step = slot.open_step if slot.entering else 0  # which takes a look at all that are here
        return list(islice((client for client in awaited if step > slot.entering.get(client, -1)), MAX_NAMED))

    @staticmethod
    def read(slot: Slot, reader: Reader) -> Reply:
        """What a pull gets, when the round that it waits for is over."""
        if slot.failed is not None and reader.min_round == slot.rounds:
            return failure(reader.route, reader.request, slot.failed)
        if reader.ids is not None:
            rows = slot.take(reader.ids)
            return Reply(reader.route, m.Value(reader.request, slot.rounds, reader.ids.size), (rows,))
        return Reply(reader.route, m.Value(reader.request, slot.rounds), (slot.lend(),))
