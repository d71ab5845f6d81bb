"""One store in one part of the values, as a state machine without I/O: messages in, messages and log entries out.

Exactly once: a push carries its client's step for the key. A step that is already in a round is answered again, never
added again. A synchronous round holds one push of each client, added in client order so that sums do not depend on
arrival; a push whose turn has not come is held unacknowledged, which is what stops its sender at the end of its window.

Every change of what lasts (values, rules, who has pushed what) is logged first; ``replay.py`` makes it again elsewhere.
What an open round holds does not last: its senders keep it until the round is over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
)
from kvmpi.kernels.rows import Rows
from kvmpi.ps import codec, consistency, requests
from kvmpi.ps.membership import Membership
from kvmpi.ps.order import UNSAID, Span
from kvmpi.ps.placement import width_of
from kvmpi.ps.reply import Reply, failure
from kvmpi.ps.rounds import Log, Rounds, nothing, steps_of
from kvmpi.ps.row_chunks import frames, num_rows
from kvmpi.ps.rulebook import Rulebook
from kvmpi.ps.singles import Singles
from kvmpi.ps.slot import Contribution, Empty, Reader, Slot, Waiter, new_buffer
from kvmpi.ps.steps import finds_position
from kvmpi.trace import timeline
from kvmpi.wire import Message, entries
from kvmpi.wire import messages as m
from kvmpi.wire.entries import Key

Buffer = npt.NDArray[Any]

_WITH_PAYLOADS = (m.Init, m.PutState)  # beside pushes and pulls
#: More updates than any chunk will ever have; each can still be counted, and said in a message.
_MAX_UPDATES = 1 << 53


class Shard:
    """The chunks of one store that belong to one part.

    Args:
        mode: name of a consistency discipline.
        num_clients: clients 0 .. num_clients-1 take part.
        log: called with every change before it is made; whether the payloads' memory must stay as it is.
        on_client_loss: what synchronous rounds do without a client that is lost: "fail", "wait" or "shrink".
    Attributes:
        rounds: what becomes of the pushes of synchronous clients; tells of every new value.
        singles: what becomes of those of others.
        saved: the keys that the store had in the snapshot that it was resumed from, in whatever part.
        empty: makes memory for values.
        before_put: called when a client is about to put a chunk's state back.
    """

    def __init__(
        self, server: int, store: int, mode: str, num_clients: int, log: Log, on_client_loss: str = "fail"
    ) -> None:
        self.empty: Empty = new_buffer
        self.before_put: Callable[[Slot], None] = nothing
        self.server, self.store, self.mode, self.num_clients = server, store, mode, num_clients
        self.saved: frozenset[Key] = frozenset()
        self._log = log
        self._finds = finds_position(mode, on_client_loss)
        self.discipline = consistency.discipline(mode)
        self.slots: dict[tuple[Key, int], Slot] = {}
        self.layouts: dict[Key, m.Init] = {}
        # Clients that wait for another to give a key its value, by chunk.
        self._early: dict[Key, dict[int, dict[int, tuple[bytes, m.Init]]]] = {}
        # By client: up to which overall step it has said that its pushes are done. That stays true, also if the push
        # that said it comes to nothing.
        self._done: dict[int, int] = {}
        self.rulebook = Rulebook(server, in_rounds=self.discipline.in_rounds)
        self.clients = Membership(num_clients, in_rounds=self.discipline.in_rounds, on_loss=on_client_loss)
        self.rounds = Rounds(server, store, num_clients, self.discipline, self.clients, log)
        self.singles = Singles(num_clients, self.discipline, self.clients, self.rounds, log)

    # ---- dispatch

    def handle(self, client: int, route: bytes, message: Message, payloads: list[memoryview]) -> list[Reply]:
        """What to send because ``client`` sent ``message``.

        Raises:
            KVError: the request is invalid; nothing was changed, and only this client needs to know.
        """
        if isinstance(message, m.Push):
            return self.push(client, route, message, payloads)
        if isinstance(message, m.Pull):
            return self._pull(client, route, message, payloads)
        if payloads and not isinstance(message, _WITH_PAYLOADS):
            raise ProtocolError(f"a {type(message).__name__} has no payload, {len(payloads)} frames came with it")
        match message:
            case m.Query():
                slot = self._slot(message.key, message.chunk, client)
                return self._answer_again(client, slot, message, route)
            case m.Init():
                return self._init(client, route, message, payloads)
            case m.SetRule() | m.SetHyperparams():
                return self._set_rule(client, route, message)
            case m.GetState():
                slot = self._slot(message.key, message.chunk, client)
                updates, names, arrays = slot.remembered()
                rule = self.rulebook.newest if message.chunk == 0 else None
                return [Reply(route, m.State(message.request, updates, names, rule), tuple(arrays))]
            case m.PutState():
                return self._put_state(client, route, message, payloads)
            case m.Finish():
                return [*self._finish(client), Reply(route, m.Ack(message.request, 0))]
            case m.Return():
                return [Reply(route, m.Ack(message.request, self._return(client)))]
            case m.Enter():
                return [*self._enter(client, message.step), Reply(route, m.Ack(message.request, 0))]
        raise ProtocolError(f"server {self.server}: a {type(message).__name__} is no request to a server")

    # ---- clients that come and go

    def join(self, client: int, incarnation: int) -> list[Reply]:
        """``client`` opens a session; what others have to be told.

        Raises:
            ProtocolError: a later process of this client is here already.
        """
        if self.clients.knows(client, incarnation):
            return []
        self._log(entries.Joined(client, incarnation), ())
        return self._forget_requests(client) if self.take_in(client, incarnation) else []

    def take_in(self, client: int, incarnation: int) -> bool:
        """``join``, as it was logged; whether the process takes the place of another."""
        was_gone = client in self.clients.gone
        replaces = self.clients.take_in(client, incarnation)
        if (replaces or was_gone) and not self.discipline.in_rounds:  # nothing of the one before it can still come
            for slot in self.slots.values():
                slot.met_by.pop(client, None)
                if not self._finds:
                    self.singles.begin_anew(slot, client)
        return replaces

    @property
    def untouched(self) -> bool:
        """Whether it came from a snapshot, and no client has been here since."""
        return self.rulebook.resumed and not self.clients.incarnations

    def inherit(self, other: Shard) -> None:
        """Take over what ``other``, which is untouched, has of the same store."""
        self.slots, self.layouts, self.saved = other.slots, other.layouts, other.saved
        for slot in self.slots.values() if not self.discipline.gathers else ():
            slot.drop_gathered()
        self.rulebook.restore(other.rulebook.dump())

    def lose(self, client: int, why: str, incarnation: int | None = None) -> list[Reply]:
        """``client`` will push no more: whoever waits for it is told. Not if a later ``incarnation`` of it is here."""
        here = self.clients.incarnations.get(client, -1)
        incarnation = here if incarnation is None else incarnation
        if here > incarnation or (client in self.clients.gone and self.clients.has_ended(client, incarnation)):
            return []
        self._log(entries.Gone(client, why, incarnation), ())
        self.drop(client, why, incarnation)
        return self._forget_requests(client)

    def drop(self, client: int, why: str, incarnation: int) -> None:
        """``lose``, as it was logged."""
        self.clients.lose(client, why, incarnation)
        for slot in self.slots.values():
            slot.met_by.pop(client, None)
        self._settle()

    def _finish(self, client: int) -> list[Reply]:
        if client not in self.clients.finished:
            self._log(entries.Finished(client), ())
            self.finish(client)
        return self.go_on()

    def finish(self, client: int) -> None:
        """``_finish``, as it was logged."""
        self.clients.finish(client)
        self._settle()

    def _settle(self) -> None:
        """With fewer clients, fewer pushes are an update: those that are gathered may be enough now. Of a rule that
        raises hears whoever pushes next."""
        for slot in self.slots.values() if self.discipline.gathers else ():
            self.singles.settle(slot)

    def progress(self, slot: Slot) -> int:
        """How many rounds a chunk has seen in this job; without rounds, how many pushes."""
        return slot.pushes if self.discipline.gathers else slot.rounds

    def _return(self, client: int) -> int:
        """``client`` is back: from now on rounds wait for it. The last overall step of which one does not."""
        if self.clients.can_return(client):
            self._log(entries.Returned(client), ())
            self.bring_back(client)
        return self._passed(client)

    def bring_back(self, client: int) -> None:
        """``_return``, as it was logged."""
        self.clients.bring_back(client)
        for slot in self.slots.values():
            if not slot.contributors:
                slot.cursor = 0  # an open round that nobody has pushed to has not passed anybody
            # A process before this one may have entered at a round that has not come yet: that is of no account.
            slot.entering.pop(client, None)

    def _passed(self, client: int) -> int:
        """The last overall step of which a round of any chunk cannot have ``client`` any more."""
        last = (slot.open_step if client < slot.cursor else slot.last_step for slot in self.slots.values())
        return max(last, default=0)

    def _enter(self, client: int, step: int) -> list[Reply]:
        """``client``, which is back, takes part in the rounds of overall steps after ``step``."""
        if client not in self.clients.entering:
            return []  # said again
        if not self._passed(client) <= step <= _MAX_UPDATES:
            raise ProtocolError(f"client {client} cannot enter after step {step}: rounds have passed it")
        self._log(entries.Entered(client, step), ())
        self.enter(client, step)
        return self.go_on()

    def enter(self, client: int, step: int) -> None:
        """``_enter``, as it was logged."""
        self.clients.enter(client, step)
        for slot in self.slots.values():
            slot.enter(client, step)

    def go_on(self) -> list[Reply]:
        """Close the rounds, or answer the reads, that need to wait for nobody any more."""
        if self.discipline.in_rounds:
            return [reply for slot in self.slots.values() for reply in self.rounds.go_on_with(slot)]
        return [reply for slot in self._held_reads() for reply in self.singles.go_on_with(slot)]

    def _held_reads(self) -> list[Slot]:
        """The chunks, of a store without rounds, that somebody waits to read."""
        return [slot for slot in self.slots.values() if slot.is_awaited] if self.discipline.holds_reads else []

    def _forget_requests(self, client: int) -> list[Reply]:
        """A client's process is gone: what it waits for is dropped, and who does not need it any more goes on."""
        replies = self._forget_early(client) if self._early else []
        if self.discipline.in_rounds or self.discipline.holds_reads:
            for slot in self.slots.values():
                slot.held.pop(client, None)
                slot.waiting.pop(client, None)
                slot.readers.pop(client, None)
            replies += self.go_on()
        return replies

    def _forget_early(self, client: int) -> list[Reply]:
        """It waits for no key's value any more; those who do may wait for another now, or in vain."""
        replies: list[Reply] = []
        giver = self.clients.giver
        for key, early in list(self._early.items()):
            for chunk in [chunk for chunk, waiting in early.items() if waiting.pop(client, None) and not waiting]:
                del early[chunk]
            if giver is None:
                left = [found for waiting in early.values() for found in waiting.values()]
                replies += [failure(route, init.request, self._no_value(key)) for route, init in left]
            elif giver != 0:
                givers = [waiting[giver] for waiting in early.values() if giver in waiting]
                replies += [Reply(route, m.Waiting(init.request, [giver])) for route, init in givers]
            if giver is None or not early:
                del self._early[key]
        return replies

    def _no_value(self, key: Key) -> ClientLostError:
        return ClientLostError(f"key {key!r}: client 0, which has its value, {self.clients.gone[0]}")

    def _slot(self, key: Key, chunk: int, client: int) -> Slot:
        slot = self.slots.get((key, chunk))
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
        if key in self.layouts:
            self._check_same(client, message)
        slot = self.slots.get(where)
        if slot is not None:
            # How far this client is: a process that takes the place of another goes on from there. What is in an
            # open round does not count yet: it may be lost with this server.
            if client in slot.entering:
                lasting, (at, done) = slot.rounds, slot.round_steps(not self.rounds.acknowledges)
            else:
                lasting, (at, done) = slot.lasting_steps(client), slot.last_steps(client, not self.rounds.acknowledges)
                done = max(done, self._done.get(client, 0))
            by_rows = slot.touched is not None
            if not (at or by_rows):
                return [Reply(route, m.Ack(message.request, lasting))]
            return [Reply(route, m.Found(message.request, lasting, at, done if at else 0, by_rows))]
        if key in self.saved:
            raise ConfigError(
                f"init of key {key!r}: chunk {message.chunk} of {message.num_chunks} is elsewhere in the snapshot, or "
                "nowhere; resume with the KVMPI_PLACEMENT, KVMPI_CHUNK_BYTES and order of init that it was made with"
            )
        if not 0 <= message.chunk < message.num_chunks:
            raise ProtocolError(f"init of key {key!r}: there is no chunk {message.chunk} of {message.num_chunks}")
        giver = self.clients.giver
        if client != 0 and not (client == giver and payloads):
            if giver is None:
                raise self._no_value(key)
            early = self._early.setdefault(key, {}).setdefault(message.chunk, {})
            known = client in early
            early[client] = (route, message)
            return [Reply(route, m.Waiting(message.request, [giver]))] if known or client == giver else []
        requests.check_shape(message)
        value = requests.chunk_array(key, payloads, message.dtype, message.count, "init")
        made = (key, message.chunk, message.num_chunks, message.count, message.shape, message.dtype)
        keep, is_first = self._log(entries.Created(*made), (value,)), key not in self.layouts
        self.create(message, value.copy() if keep else value)
        return [Reply(route, m.Ack(message.request, 0)), *self._answer_early(key, message.chunk, is_first=is_first)]

    def create(self, message: m.Init, value: Buffer) -> Slot:
        """A chunk is there."""
        rulebook = self.rulebook
        slot = Slot(
            message.key, message.chunk, message.count, message.dtype, value, rulebook.rule, rulebook.generation,
            width_of(message.shape), self.empty, is_whole=message.num_chunks == 1,
        )  # fmt: skip
        slot.one_mark = self.clients.shrinks
        slot.entering.update(self.clients.entered_after)
        self.slots[message.key, message.chunk] = slot
        self.layouts.setdefault(message.key, message)
        return slot

    def _answer_early(self, key: Key, chunk: int, *, is_first: bool) -> list[Reply]:
        """``chunk`` has got its value: who was here before is done, or sees that it meant another key.

        Those who wait for other chunks see it with the first: who comes later is looked at when it comes.
        """
        replies = []
        early = self._early.pop(key, {})
        for of_chunk in list(early) if is_first else [chunk]:
            waiting = early.get(of_chunk, {})
            for client, (route, message) in list(waiting.items()):
                try:
                    self._check_same(client, message)
                    if of_chunk != chunk:
                        continue
                    replies.append(Reply(route, m.Ack(message.request, 0)))
                except KVError as error:
                    replies.append(failure(route, message.request, error))
                del waiting[client]
            if not waiting:
                early.pop(of_chunk, None)
        if early:
            self._early[key] = early
        return replies

    def _check_same(self, client: int, message: m.Init) -> None:
        key = message.key
        giver = "client 0" if 0 not in self.clients.gone else "the client that gave its value"
        known_by = "the snapshot" if key in self.saved else giver
        slot = self.slots.get((key, message.chunk))
        requests.check_same(client, message, self.layouts[key], None if slot is None else slot.count, known_by)

    # ---- push and pull

    def push(self, client: int, route: bytes, message: m.Push, payloads: list[memoryview]) -> list[Reply]:
        """``handle`` of what comes most often."""
        slot = self._slot(message.key, message.chunk, client)
        requests.check_steps(message, _MAX_UPDATES)
        if self.discipline.in_rounds:
            replies = self.rounds.push_plain(slot, client, route, message, payloads)
            if replies is not None:
                if message.done:
                    self._note_done(client, message.done)
                return replies
        encoding = codec.get(message.codec)
        wire_dtype = encoding.wire_dtype(slot.dtype)
        wire = requests.pushed(slot, message.rows, payloads, encoding)
        before = slot.pushes_before(client, message.step) if slot.entering else slot.steps.get(client, 0)
        if message.step <= before:
            return self._answer_again(client, slot, message, route, wire)
        if message.step != before + 1:
            raise ProtocolError(
                f"push of key {message.key!r} by client {client}: step {message.step} comes after step {before}"
            )
        if message.rows >= 0:
            # Others may have chosen the rule of later rounds already.
            optim.check_by_rows(slot.rule_for(max(message.step, slot.rounds + 1)).rule)
        if self.discipline.in_rounds:
            if not self.clients.takes_part(client):
                raise ProtocolError(
                    f"push of key {message.key!r} by client {client}: rounds have gone on without it; Return and Enter "
                    "come first"
                )
            if client in self.clients.finished:
                raise ProtocolError(
                    f"push of key {message.key!r} by client {client}: it has joined, and that is for good; rounds "
                    "go on without it"
                )
            self._note_done(client, message.done)
            contribution = Contribution(
                route, message.request, message.fused, message.acknowledge, message.quiet, wire, wire_dtype,
                message.at, message.done, Span(message.earliest, message.latest) if message.earliest else UNSAID,
                timeline.now() if timeline.on else 0,
            )  # fmt: skip
            return self.rounds.push(slot, client, contribution)
        return self.singles.push(client, route, slot, message, wire, wire_dtype, payloads)

    def _note_done(self, client: int, done: int) -> None:
        if done > self._done.get(client, 0):
            self._done[client] = done

    def _answer_again(
        self, client: int, slot: Slot, message: m.Push | m.Query, route: bytes, wire: Buffer | Rows | None = None
    ) -> list[Reply]:
        """A push that is in its round asks again."""
        if message.step > max(slot.steps.get(client, 0), slot.rounds if client in slot.entering else 0):
            raise ProtocolError(f"key {message.key!r}: client {client} has not pushed step {message.step}")
        how = route, message.request, message.fused, message.step
        waiter = Waiter(*how) if wire is None else Waiter.again(*how, wire)
        if not self.discipline.in_rounds:
            return self.singles.answer_again(client, slot, message, waiter)
        if message.step < slot.rounds:
            if not message.fused:
                return [Reply(route, m.Ack(message.request, slot.rounds))]
            return [Reply(route, m.Value(message.request, slot.rounds), (slot.lend(),))]
        if message.step == slot.rounds:
            return [self.rounds.answer(slot, waiter)]
        if not message.fused and not self.rounds.acknowledges:
            return [Reply(route, m.Ack(message.request, slot.rounds))]
        slot.waiting[client] = waiter
        replies = [self.rounds.who_is_missing(slot, message.request, route)]
        if wire is None or not isinstance(slot.accumulator, Rows):
            replies.insert(0, Reply(route, m.Accepted(message.request)))
        # Else it says each time what it has pushed: the answer of a round of rows has that too, also if it was lost.
        return replies + self.rounds.fail_stuck(slot)

    def awaited(self) -> Iterator[tuple[Key, int, str, list[int]]]:
        """Rounds, or reads, that somebody waits for: key, chunk, which it is, and the clients that they lack."""
        for slot in list(self.slots.values()) if self.discipline.in_rounds else ():
            if slot.is_awaited:
                yield slot.key, slot.chunk, f"round {slot.rounds + 1}", self.rounds.missing(slot)
        for slot in self._held_reads():
            pushed, missing = self.singles.awaited(slot)
            yield slot.key, slot.chunk, f"a read after push {pushed}", missing

    def _pull(self, client: int, route: bytes, message: m.Pull, payloads: list[memoryview]) -> list[Reply]:
        slot = self._slot(message.key, message.chunk, client)
        if len(payloads) != (message.rows >= 0):
            raise ProtocolError(f"pull of key {slot.key!r}: {len(payloads)} frames came with {message.rows} rows")
        # A copy: the numbers may have to wait for their round, and the message's memory goes back.
        ids = requests.row_ids(slot, payloads[0], message.rows, "pull").copy() if payloads else None
        reader = Reader(route, message.request, message.min_round, ids, timeline.now() if timeline.on else 0)
        if not self.discipline.in_rounds:
            return self.singles.pull(client, slot, reader)
        if self.discipline.readable(slot.rounds, message.min_round):
            return [self.rounds.read(slot, reader)]
        known = slot.readers.get(client) == reader
        slot.readers[client] = reader
        replies = self.rounds.fail_stuck(slot)
        return replies if replies or not known else [self.rounds.who_is_missing(slot, message.request, route)]

    # ---- rules and checkpoints

    def _set_rule(self, client: int, route: bytes, message: m.SetRule | m.SetHyperparams) -> list[Reply]:
        number = self.rulebook.number_of(client, message, again=client in self.clients.entered)
        entry = self.rulebook.entry_of(client, message, number, self.slots)
        if not self.rulebook.has_made(client, message, number):
            self._log(entry, ())
            self.rulebook.apply(entry, self.slots)
        return [Reply(route, m.Ack(message.request, number))]

    def _put_state(self, client: int, route: bytes, message: m.PutState, payloads: list[memoryview]) -> list[Reply]:
        slot = self._slot(message.key, message.chunk, client)
        arrays = requests.state_arrays(slot, message, payloads, _MAX_UPDATES)
        # The copy of a request that was repeated may come after other clients have gone on from what it restored.
        this = (client, self.clients.incarnations[client], message.request)
        if slot.restored is None or slot.restored[0] != client or slot.restored < this:
            self.before_put(slot)
            where = (message.key, message.chunk, client, message.request)
            self._log(entries.Restored(*where, message.updates, message.names), tuple(arrays.values()))
            slot.restore(message.updates, arrays)
            slot.restored = this
        return [Reply(route, m.Ack(message.request, slot.rounds))]

    # ---- handing over

    def hand_over(self) -> None:
        """Another server is to go on with the open rounds: log what is in them."""
        for slot in self.slots.values():
            if slot.accumulator is not None and slot.cursor:
                total = slot.accumulator
                clients, rows = list(slot.contributors), num_rows(total)
                entry = entries.Partial(slot.key, slot.chunk, slot.cursor, clients, rows, *steps_of(slot))
                self._log(entry, tuple(frame.copy() for frame in frames(total)))

    def forget_waiting(self) -> None:
        """Whoever waits for this server will ask another."""
        self._early.clear()
        for slot in self.slots.values():
            slot.forget_waiting()
