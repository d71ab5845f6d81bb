"""Pushes that are updates of their own, or several of them together, without rounds; and reads that may have to wait.

In an asynchronous store a push is an update at once. Where pushes are gathered, it is one together with those that
come next, whoever they are from, and is answered at once all the same. What is gathered lasts like a value: it is
logged push by push, and each server of a chain makes an update of it where it is enough for the clients that take part.

Where staleness is bounded a push is an update at once as well. What waits is its answer, and pulls, as long as a client
that takes part has pushed the key less often than the reader's own pushes allow. A reader counts by its own pushes; a
client that has begun anew counts, for others, as if it had been where they were. So whoever has done least of its
program never waits, if all clients make the same calls in the same order, and nobody waits for ever.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from kvmpi.arrays import DTYPES
from kvmpi.errors import ProtocolError, UnsupportedError
from kvmpi.kernels.rows import Rows
from kvmpi.ps.consistency import Consistency
from kvmpi.ps.membership import Membership
from kvmpi.ps.reply import MAX_NAMED, Reply, failure
from kvmpi.ps.rounds import Buffer, Log, Rounds, changed, is_of_this_server
from kvmpi.ps.slot import Reader, Slot, Waiter
from kvmpi.ps.standing import Standing
from kvmpi.trace import timeline
from kvmpi.wire import as_array, entries
from kvmpi.wire import messages as m

_BYTES = DTYPES["uint8"]


class Singles:
    """How pushes become updates, one by one, in one part of a store, and who may read the value.

    Args:
        rounds: what an update and a read are in any store.
        log: called with every change before it is made.
    """

    def __init__(
        self, num_clients: int, discipline: Consistency, clients: Membership, rounds: Rounds, log: Log
    ) -> None:  # fmt: skip
        self._num_clients, self._discipline, self._clients = num_clients, discipline, clients
        self._rounds, self._log, self._gathers = rounds, log, discipline.gathers

    def push(
        self, client: int, route: bytes, slot: Slot, message: m.Push, wire: Buffer | Rows, wire_dtype: str,
        payloads: list[memoryview],
    ) -> list[Reply]:  # fmt: skip
        """The next push of a client.

        Raises:
            UnsupportedError: there is no rule, or one that cannot be applied to several pushes together.
            ProtocolError: it comes from a version that there never was.
        """
        rule = slot.rules[-1].rule
        if rule is None:
            raise UnsupportedError(
                f"push of key {message.key!r} by client {client}: an asynchronous store needs an update rule; "
                "call kv.set_optimizer(...) on all workers first"
            )
        if message.seen < 0:
            raise ProtocolError(f"push of key {message.key!r} by client {client}: there is no version {message.seen}")
        if self._gathers and rule.replies_old:
            raise UnsupportedError(
                f"push of key {message.key!r} by client {client}: {rule!r} answers each push with the "
                "value that it met, and here several are an update together; use dist_async or dist_sync"
            )
        keep = False
        if self._rounds.is_followed():
            single = entries.Single(
                message.key, message.chunk, client, message.step, message.codec, message.rows, message.fused,
                message.at, message.done, message.seen,
            )  # fmt: skip
            keep = self._log(single, tuple(as_array(payload, _BYTES) for payload in payloads))
        else:
            self._log(None, ())
        start_ns = timeline.now() if timeline.on else 0
        if self._gathers:
            slot.gather(wire, wire_dtype, message.seen, keep=keep)
            if start_ns:
                self._rounds.span("reduce", start_ns, slot, wire, message.step, client)
            return self._end_gathered(client, route, slot, message, wire)
        answer = slot.apply_alone(wire, wire_dtype, message.seen)
        if start_ns:
            self._rounds.span("update", start_ns, slot, wire, message.step, client)
        slot.note_single(client, message, answer)
        self._note_push(slot, client)
        self._rounds.on_update(slot)
        replies = self.go_on_with(slot)
        if not message.fused:
            return [*replies, Reply(route, m.Ack(message.request, slot.rounds))]
        if answer is slot.value and not (isinstance(wire, Rows) or self._discipline.holds_reads):  # as a rule
            return [*replies, Reply(route, m.Value(message.request, slot.rounds), (slot.lend(),))]
        ids = wire.ids if isinstance(wire, Rows) else None
        waiter = Waiter(route, message.request, message.fused, message.step, ids, version=slot.rounds)
        if self._may_read(slot, client, message.step):
            return [*replies, self._answer(slot, client, waiter)]
        # A copy: the message's memory goes back.
        slot.waiting[client] = waiter if ids is None else waiter._replace(ids=ids.copy())
        return [*replies, Reply(route, m.Accepted(message.request))]

    def _end_gathered(self, client: int, route: bytes, slot: Slot, message: m.Push, wire: Buffer | Rows) -> list[Reply]:
        """A push has been added to others: it counts, and if there are enough of them they are an update."""
        slot.note_single(client, message, slot.value)
        version = slot.rounds + 1  # that of the update in which it is
        error = self.settle(slot)
        if error is not None:
            return [failure(route, message.request, error, used=True)]
        if slot.rounds == version:
            self._rounds.on_update(slot)
        if not message.fused:
            return [Reply(route, m.Ack(message.request, version))]
        if isinstance(wire, Rows):
            return [changed(slot, message.request, route, wire.ids, slot.rounds - version)]
        return [Reply(route, m.Value(message.request, slot.rounds, later=slot.rounds - version), (slot.lend(),))]

    def settle(self, slot: Slot) -> Exception | None:
        """Make an update of what is gathered, if that is enough for the clients that take part; why it came to nothing.

        Raises:
            Exception: it came to nothing for want of something that another server may have.
        """
        if not (slot.gathered and self._discipline.complete(slot.gathered, self._clients.num_here)):
            return None
        start_ns, total = timeline.now() if timeline.on else 0, slot.accumulator
        try:
            slot.apply_gathered()
        except Exception as error:  # a rule that does not fit this key, or a user's own
            if is_of_this_server(error):
                raise
            return error
        if start_ns and total is not None:
            self._rounds.span("update", start_ns, slot, total, slot.rounds)
        return None

    def answer_again(self, client: int, slot: Slot, message: m.Push | m.Query, waiter: Waiter) -> list[Reply]:
        """A push that is in the value asks again."""
        is_last = message.step == slot.steps.get(client)
        if not message.fused:
            if is_last and client in slot.met_by:
                self._log(entries.Answered(message.key, message.chunk, client), ())
                del slot.met_by[client]
            return [Reply(waiter.route, m.Ack(message.request, slot.rounds))]
        if not is_last or self._may_read(slot, client, message.step):
            return [self._answer(slot, client, waiter)]
        before = slot.waiting.get(client)
        if before is not None and before.step == waiter.step:  # it says less than the first time
            waiter = before._replace(route=waiter.route, request=waiter.request)
        slot.waiting[client] = waiter
        waits = m.Waiting(message.request, self._missing(slot, client, message.step))
        return [Reply(waiter.route, m.Accepted(message.request)), Reply(waiter.route, waits)]

    @staticmethod
    def _answer(slot: Slot, client: int, waiter: Waiter) -> Reply:
        """What a push gets that asks for the value."""
        route, request = waiter.route, waiter.request
        if waiter.step == slot.steps.get(client) and client in slot.met_by:
            version, met = slot.met_by[client]
            return Reply(route, m.Value(request, version, old=True), (met,))
        later = slot.rounds - waiter.version if waiter.version else 0
        if waiter.ids is not None:
            return changed(slot, request, route, waiter.ids, later)
        return Reply(route, m.Value(request, slot.rounds, later=later), (slot.lend(),))

    def pull(self, client: int, slot: Slot, reader: Reader) -> list[Reply]:
        """A client asks for the value."""
        if self._may_read(slot, client, reader.min_round):
            return [self._rounds.read(slot, reader)]
        known = slot.readers.get(client) == reader
        slot.readers[client] = reader
        if not known:
            return []
        return [Reply(reader.route, m.Waiting(reader.request, self._missing(slot, client, reader.min_round)))]

    # ---- who waits for whom

    def go_on_with(self, slot: Slot) -> list[Reply]:
        """Answer those that need to wait for nobody any more."""
        if not (slot.waiting or slot.readers):
            return []
        replies, standing = list[Reply](), self._standing(slot)
        if standing.seen == (ends := standing.ends):
            return []  # as it was when each of them had to wait
        standing.seen = ends
        for client, waiter in list(slot.waiting.items()):
            if self._is_near(slot, standing, client, waiter.step):
                del slot.waiting[client]
                replies.append(self._answer(slot, client, waiter))
        for client, reader in list(slot.readers.items()):
            if self._is_near(slot, standing, client, reader.min_round):
                if timeline.on and reader.arrived_ns:
                    self._rounds.span("pull", reader.arrived_ns, slot, slot.value, reader.min_round, client)
                del slot.readers[client]
                replies.append(self._rounds.read(slot, reader))
        return replies

    def awaited(self, slot: Slot) -> tuple[int, list[int]]:
        """After how many pushes the furthest of those reads that wait, and for whom; nobody waits: 0, for nobody."""
        waiting = [(waiter.step, client) for client, waiter in list(slot.waiting.items())]
        waiting += [(reader.min_round, client) for client, reader in list(slot.readers.items())]
        pushed, client = max(waiting, default=(0, -1))
        return pushed, self._missing(slot, client, pushed) if waiting else []

    def begin_anew(self, slot: Slot, client: int) -> None:
        """Another process of ``client`` counts its pushes from the beginning. Others that may have to wait for it take
        it to be where the slowest of them is, or where it was itself if that is further."""
        if self._discipline.holds_reads:
            slowest = min((slot.clock(other) for other in self._awaited(but=client)), default=0)
            slot.bases[client] = max(slot.clock(client), slowest)
        slot.forget_steps(client)

    def _may_read(self, slot: Slot, client: int, pushed: int) -> bool:
        """Whether ``client``, which has pushed so often, may have the value."""
        return not self._discipline.holds_reads or self._is_near(slot, self._standing(slot), client, pushed)

    def _is_near(self, slot: Slot, standing: Standing, client: int, pushed: int) -> bool:
        if self._discipline.readable(standing.slowest, pushed):
            return True
        # Nobody waits for itself.
        awaited = self._clients.is_awaited(client)
        return awaited and self._discipline.readable(standing.slowest_but(slot.clock(client)), pushed)

    def _standing(self, slot: Slot) -> Standing:
        """How far those are that take part."""
        as_of = self._clients.changes, slot.rounds
        if slot.standing is None or slot.standing.as_of != as_of:
            slot.standing = Standing(as_of, (slot.clock(client) for client in self._awaited()))
        return slot.standing

    def _note_push(self, slot: Slot, client: int) -> None:
        """A push is in the value: who knew how far all are knows it still."""
        standing, changes = slot.standing, self._clients.changes
        if standing is not None and standing.as_of == (changes, slot.rounds - 1):
            standing.as_of = changes, slot.rounds
            if self._clients.is_awaited(client):
                standing.move(slot.clock(client) - 1)

    def _awaited(self, but: int = -1) -> Iterator[int]:
        """Clients that take part, ``but`` one."""
        return (other for other in range(self._num_clients) if other != but and self._clients.is_awaited(other))

    def _missing(self, slot: Slot, client: int, pushed: int) -> list[int]:
        """Whom ``client``, which has pushed so often, has to wait for: the first of them."""
        late = (
            other for other in self._awaited(but=client) if not self._discipline.readable(slot.clock(other), pushed)
        )
        return list(islice(late, MAX_NAMED))
