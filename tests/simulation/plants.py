"""Mistakes that are planted into the code: each breaks one of the invariants that simulated jobs are held to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from kvmpi.errors import KVError
from kvmpi.ps import barriers, consistency, exchanges, part, replay, rounds, shard, snapshot_book, snapshots
from kvmpi.ps.asks import Operation
from kvmpi.ps.barriers import Barriers
from kvmpi.ps.client import PsClient
from kvmpi.ps.feedback import Feedback
from kvmpi.ps.membership import Membership
from kvmpi.ps.order import Order, Span
from kvmpi.ps.part import Part
from kvmpi.ps.rounds import Rounds
from kvmpi.ps.scheduler import SchedulerState
from kvmpi.ps.server import ServerState
from kvmpi.ps.session import ClientSession
from kvmpi.ps.shard import Shard
from kvmpi.ps.singles import Singles
from kvmpi.ps.slot import Slot
from kvmpi.ps.snapshot_book import SnapshotBook
from kvmpi.ps.snapshots import ServerSnapshots, Taking
from kvmpi.ps.steps import Found
from kvmpi.wire import entries
from kvmpi.wire import messages as m


def _applies_what_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Shard.push

    def push(self: Shard, client: int, route: bytes, message: Any, payloads: Any) -> Any:
        slot = self._slot(message.key, message.chunk, client)
        slot.steps[client] = min(slot.steps.get(client, 0), message.step - 1)
        return real(self, client, route, message, payloads)

    monkeypatch.setattr(Shard, "push", push)


def _acknowledges_before_others_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Part, "hold", lambda self, replies, now_s: [*self._stream(now_s), *replies])


def _reads_what_is_not_there_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consistency.Synchronous, "readable", lambda self, reached, pushed: True)


def _reads_when_too_far_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """By one push."""
    monkeypatch.setattr(
        consistency.BoundedStaleness, "readable", lambda self, reached, pushed: reached >= pushed - self.staleness - 1
    )


def _waits_for_who_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where staleness is bounded, and others need not wait for a client."""
    monkeypatch.setattr(Membership, "is_awaited", lambda self, client: client not in self.finished)


def _takes_who_begins_anew_for_far_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where staleness is bounded: as if all others had to wait until it has come to where they are."""
    monkeypatch.setattr(Singles, "begin_anew", lambda self, slot, client: slot.forget_steps(client))


def _closes_rounds_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    def end_round(slot: Any, *, keep: bool) -> None:
        count, slot.cursor = slot.cursor, 0
        pushed = slot.accumulator
        slot.close_round(count, keep=True)
        slot.accumulator = pushed
        slot.close_round(count, keep=True)
        slot.rounds -= 1

    monkeypatch.setattr(Rounds, "end_round", staticmethod(end_round))


def _replays_what_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Part.follow

    def follow(self: Part, route: bytes, message: Any, payloads: Any, now_s: float) -> Any:
        if hasattr(message, "seq") and not hasattr(message, "index") and message.seq <= self.seq:
            message.seq = self.seq + 1
        return real(self, route, message, payloads, now_s)

    monkeypatch.setattr(Part, "follow", follow)


def _copies_all_but_who_has_entered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "_entered_after", lambda clients, client, incarnation: -1)


def _takes_a_part_over_without_its_values(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Part.report

    def report(self: Part) -> Any:
        self.complete = self.complete or self.chain.joiner == self.server
        return real(self)

    monkeypatch.setattr(Part, "report", report)


def _forgets_open_rounds_when_it_hands_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Shard, "hand_over", lambda self: None)


def _counts_what_was_not_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of keys that are exchanged together and whose time is over, all are taken for done."""
    cancel = ClientSession._cancel

    def patched(self: ClientSession, operation: Operation, error: KVError) -> None:
        for ask in operation.asks:
            ask.answered = True
        cancel(self, operation, error)

    monkeypatch.setattr(ClientSession, "_cancel", patched)


def _asks_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ClientSession, "_send_again", lambda self, ask: None)


def _answers_when_another_may_be_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Part._take_place

    def take_place(self: Part, chain: m.Chain) -> None:
        real(self, chain)
        self.is_shared = False

    monkeypatch.setattr(Part, "_take_place", take_place)


def _leaves_out_who_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Membership.is_needed
    monkeypatch.setattr(
        Membership, "is_needed", lambda self, client: real(self, client) and client + 1 < self.num_clients
    )


def _answers_with_an_old_value(monkeypatch: pytest.MonkeyPatch) -> None:
    real, old = Rounds.read, {}

    def read(slot: Any, reader: Any) -> Any:
        now = real(slot, reader)
        was = old.setdefault(slot, (now.message.version, now.payloads[0].copy()))
        if now.message.version % 3:
            return now
        return now._replace(message=m.Value(reader.request, was[0]), payloads=(was[1],))

    monkeypatch.setattr(Rounds, "read", staticmethod(read))


def _hears_who_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ServerState, "_end", lambda self, route: None)


def _hears_the_process_before(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ServerState._hello

    def hello(self: ServerState, route: bytes, message: m.Hello, now_s: float) -> Any:
        before = dict(self._sessions)
        out = real(self, route, message, now_s)
        self._sessions = {**before, **self._sessions}
        return out

    monkeypatch.setattr(ServerState, "_hello", hello)


def _copies_whatever_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ServerSnapshots.begin

    def begin(self: ServerSnapshots, number: int, *missed: int) -> None:
        consistency.Synchronous.in_rounds = False
        try:
            real(self, number, *missed)
        finally:
            consistency.Synchronous.in_rounds = True

    def step(self: ServerSnapshots, shard: Shard) -> int:
        return self.steps.get(shard.store, 0) + self._newest - self.base  # as if it were of that round

    monkeypatch.setattr(ServerSnapshots, "begin", begin)
    monkeypatch.setattr(ServerSnapshots, "_step", step)


def _takes_every_push_for_one_of_the_step_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a key that is pushed in some steps only always came after those that are pushed in all."""
    monkeypatch.setattr(Order, "note", lambda self, keys, step, **how: Span(step, step))


def _copies_before_all_have_pushed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ServerSnapshots, "_is_past", lambda self, shard, step: True)


def _keeps_one_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SnapshotBook, "obsolete", lambda self, there: [n for n in there if n < self.complete[-1]])


def _begins_without_the_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Part, "resume", lambda self, copy, keys: None)


def _counts_the_snapshot_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only who comes back to a job that was resumed is told of such a round."""
    real = Shard._passed

    def passed(self: Shard, client: int) -> int:
        before = max((slot.updates - slot.rounds for slot in self.slots.values()), default=0) if self.saved else 0
        return real(self, client) + before

    monkeypatch.setattr(Shard, "_passed", passed)


def _knows_pushes_of_the_job_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where there are no rounds, whose clients count from the beginning."""
    real = part.restore

    def restore(shard: Shard, saved: Any, keys: Any) -> None:
        real(shard, saved, keys)
        for slot in shard.slots.values() if not shard.discipline.in_rounds else ():
            slot.steps = dict.fromkeys(range(shard.num_clients), slot.updates // shard.num_clients)

    monkeypatch.setattr(part, "restore", restore)


def _goes_on_where_the_furthest_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where there are no rounds: in them all are equally far."""

    def step(self: ServerSnapshots, shard: Shard) -> int:
        return self.steps.get(shard.store, 0) + max((slot.rounds for slot in shard.slots.values()), default=0)

    monkeypatch.setattr(ServerSnapshots, "_step", step)


def _writes_what_is_there_by_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes in no rounds is changed where it is."""

    def dump(slot: Slot) -> Any:
        return ["value", *slot.state], [slot.value, *slot.state.values()]

    monkeypatch.setattr(Slot, "dump", dump)


def _completes_what_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that all clients have left is forgotten, with what snapshots still lack of it."""
    monkeypatch.setattr(ServerSnapshots, "end", lambda self, part, store: None)
    monkeypatch.setattr(snapshot_book._Pending, "is_worth_it", True)
    monkeypatch.setattr(Taking, "stores", [0])  # else a server that none is left on writes no files


def _enters_a_round_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Shard.enter
    monkeypatch.setattr(Shard, "enter", lambda self, client, step: real(self, client, step + 1))


def _goes_on_while_somebody_enters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Membership, "bring_back", lambda self, client: self.entering.add(client))
    real = Membership.enter

    def enter(self: Membership, client: int, step: int) -> None:
        self.gone.pop(client, None)
        real(self, client, step)

    monkeypatch.setattr(Membership, "enter", enter)


def _takes_every_key_for_one_of_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where others go on without a client, which finds by its steps where they are."""
    monkeypatch.setattr(Slot, "last_step", property(lambda self: self.rounds))
    monkeypatch.setattr(
        Slot, "open_step", property(lambda self: self.rounds + 1 if self.contributors or self.held else 0)
    )


def _counts_what_is_repeated_after_a_return(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a client that is back was in each round that it pushes to, in whatever chunk that is still open."""
    real = Rounds.go_on_with

    def go_on_with(self: Rounds, slot: Slot) -> Any:
        for rank in slot.entering.keys() & slot.held.keys():
            del slot.entering[rank]
        return real(self, slot)

    monkeypatch.setattr(Rounds, "go_on_with", go_on_with)


def _counts_barriers_from_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PsClient, "_is_waited_for", False)


def _meets_without_who_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if it skipped all barriers until it says where it is."""
    monkeypatch.setattr(Barriers, "bring_back", lambda self, rank: self.returning.update({rank: 1 << 62}))


def _goes_on_after_the_furthest(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if nothing could be missing of keys that are not pushed in every step."""
    monkeypatch.setattr(exchanges, "position", lambda found: max((key.last for key in found), default=0))


def _takes_what_is_repeated_for_new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Found, "before", lambda self, step, position: self.up_to(step))


def _forgets_the_steps_of_barriers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(barriers, "_KEPT_STEPS", 0)


def _takes_the_next_process_for_the_one_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    real = SchedulerState.hear_end
    monkeypatch.setattr(
        SchedulerState, "hear_end", lambda self, role, rank, newest, how: real(self, role, rank, 1 << 60, how)
    )


def _waits_for_who_has_ended_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SchedulerState, "_lose_absent", lambda self, number: {})


def _copies_what_is_put_back_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ServerSnapshots, "before_put", lambda self, shard, slot: None)


def _believes_that_it_is_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Barriers.arrive

    def arrive(self: Barriers, client: int, route: bytes, message: m.Barrier, *now: Any) -> Any:
        message.yes = True
        return real(self, client, route, message, *now)

    monkeypatch.setattr(Barriers, "arrive", arrive)


def _does_again_what_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a client that makes its calls again were the first to come to each of them."""
    real = Barriers._repeat

    def repeat(self: Barriers, client: int, route: bytes, message: m.Barrier) -> Any:
        reply = real(self, client, route, message)
        return reply._replace(message=m.Ack(message.request, self.done, first=client, yes=message.yes))

    monkeypatch.setattr(Barriers, "_repeat", repeat)


def _changes_the_rule_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Slot.change_rule
    monkeypatch.setattr(
        Slot, "change_rule", lambda self, change: real(self, replace(change, from_round=change.from_round + 1))
    )


def _forgets_what_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ClientSession.submit

    def submit(self: ClientSession, operation: Operation, *rest: Any) -> None:
        operation.on_late = None
        real(self, operation, *rest)

    monkeypatch.setattr(ClientSession, "submit", submit)


def _begins_anew_what_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Membership, "is_over", False)


def _forgets_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without rounds, what a client has pushed counts again in another process of it."""
    monkeypatch.setattr(shard, "finds_position", lambda mode, on_client_loss: False)


def _answers_a_repetition_with_what_is_there_by_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a push without rounds is to be answered with what it has met."""
    real = Shard._answer_again

    def answer_again(self: Shard, client: int, slot: Slot, *rest: Any) -> Any:
        slot.met_by.pop(client, None)
        return real(self, client, slot, *rest)

    monkeypatch.setattr(Shard, "_answer_again", answer_again)


def _forgets_what_codes_have_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a push is made again."""
    real = Feedback.settle

    def settle(self: Feedback, chunks: Any, *, counts: bool) -> None:
        real(self, chunks, counts=counts)
        if not counts:
            self._residual[:] = 0.0

    monkeypatch.setattr(Feedback, "settle", settle)


def _gives_memory_back_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """When servers have taken the first chunk of a push."""
    real = ClientSession._count_accepted

    def count_accepted(operation: Operation) -> None:
        operation.unaccepted = min(operation.unaccepted, 1)
        real(operation)

    monkeypatch.setattr(ClientSession, "_count_accepted", staticmethod(count_accepted))


def _answers_a_repetition_with_its_own_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where others have changed more in that round."""
    monkeypatch.setattr(rounds, "distinct", lambda touched, ids: ids)


def _reads_the_first_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many of them as others are asked for."""
    real = Slot.take
    monkeypatch.setattr(Slot, "take", lambda self, ids: real(self, ids - ids.min(initial=ids.size)))


def _takes_every_push_for_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """On servers that follow, where old ones count less."""
    real = replay.apply

    def apply(shard: Shard, entry: Any, payloads: Any, **how: Any) -> None:
        if isinstance(entry, entries.Single) and (slot := shard.slots.get((entry.key, entry.chunk))) is not None:
            entry = msgspec.structs.replace(entry, seen=slot.rounds)
        real(shard, entry, payloads, **how)

    monkeypatch.setattr(replay, "apply", apply)


def _takes_pushes_for_older(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Slot.apply_alone
    monkeypatch.setattr(Slot, "apply_alone", lambda self, wire, dtype, seen: real(self, wire, dtype, seen - 1))


def _knows_what_it_has_read_of_the_first_chunk_only(monkeypatch: pytest.MonkeyPatch) -> None:
    real = PsClient._note_version

    def note(self: PsClient, layout: Any, index: int, *rest: Any, **how: Any) -> None:
        if index == 0:
            real(self, layout, index, *rest, **how)
            layout.seen[:] = layout.seen[:1] * len(layout.seen)

    monkeypatch.setattr(PsClient, "_note_version", note)


def _gathers_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        consistency.SoftSynchronous, "complete", lambda self, pushes, num_clients: pushes > self.size(num_clients)
    )


def _copies_nothing_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of pushes that are gathered, a server that is given a part gets how many they are, and no sum."""
    real = replay._restore_slot

    def restore(shard: Shard, entry: Any, payloads: Any, **how: Any) -> None:
        entry.gathered = 0
        real(shard, entry, payloads, **how)
        shard.slots[entry.key, entry.chunk].accumulator = None

    monkeypatch.setattr(replay, "_restore_slot", restore)


def _forgets_what_waits_with_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if pushes that are gathered were in no snapshot."""
    real = snapshots.copy_chunk

    def copy_chunk(*arguments: Any) -> snapshots.ChunkCopy:
        copy = real(*arguments)
        for name in (Slot.GATHERED, Slot.GATHERED_ROWS):
            copy.arrays.pop(name, None)
        copy.gathered = 0
        return copy

    monkeypatch.setattr(snapshots, "copy_chunk", copy_chunk)


def _gathers_by_all_clients_that_there_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """On servers that follow: as if none had gone."""
    real = replay.apply

    def apply(shard: Shard, entry: Any, payloads: Any, **how: Any) -> None:
        monkeypatch.setattr(Membership, "num_here", property(lambda self: self.num_clients))
        try:
            real(shard, entry, payloads, **how)
        finally:
            monkeypatch.setattr(Membership, "num_here", num_here)

    num_here = Membership.num_here
    monkeypatch.setattr(replay, "apply", apply)


def _keeps_what_is_in_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Slot.apply_gathered

    def apply_gathered(self: Slot) -> None:
        total = self.accumulator
        total = total.copy() if isinstance(total, np.ndarray) else None
        real(self)
        self.accumulator = total

    monkeypatch.setattr(Slot, "apply_gathered", apply_gathered)


#: By name: what plants it, and a pattern of the violation that has to be found.
PLANTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "double apply": (_applies_what_is_repeated, "pushes"),
    "lost acknowledgement": (_acknowledges_before_others_have_it, "was told of"),
    "stale read": (_reads_what_is_not_there_yet, "rounds hold"),
    "read too far ahead": (_reads_when_too_far_ahead, "may be ahead by"),
    "waiting for who is lost": (_waits_for_who_is_lost, "still waiting"),
    "begun too far behind": (_takes_who_begins_anew_for_far_behind, "still waiting"),
    "round closed twice": (_closes_rounds_twice, "pushes"),
    "live client left out": (_leaves_out_who_is_alive, "must be there"),
    "returned client left out": (_enters_a_round_too_late, "must be there"),
    "steps taken for rounds": (_takes_every_key_for_one_of_every_step, "still waiting|must be there"),
    "round of others joined": (_counts_what_is_repeated_after_a_return, "were begun"),
    "rounds pass who enters": (_goes_on_while_somebody_enters, "have passed it"),
    "old value": (_answers_with_an_old_value, "goes back"),
    "resurrected client": (_hears_who_is_lost, "which is dead"),
    "resurrected incarnation": (_hears_the_process_before, "which is dead"),
    "snapshot of several rounds": (_copies_whatever_is_there, "after step|snapshot .* (holds|has)"),
    "snapshot of two steps": (_takes_every_push_for_one_of_the_step_before, "snapshot .* (holds|has)"),
    "snapshot before its step": (_copies_before_all_have_pushed, "snapshot .* (holds|has)"),
    "one snapshot kept": (_keeps_one_snapshot, "was complete and whole"),
    "snapshot not read": (_begins_without_the_snapshot, "must be there"),
    "snapshot counted twice": (_counts_the_snapshot_twice, "enters after"),
    "steps of the job before": (_knows_pushes_of_the_job_before, "must be there"),
    "resumed too far": (_goes_on_where_the_furthest_is, "steps before"),
    "snapshot of what has ended": (_completes_what_has_ended, "lacks some"),
    "snapshot not copied": (_writes_what_is_there_by_then, "were begun"),
    "barriers counted from 1": (_counts_barriers_from_1, "has not come to it|still waiting"),
    "met without who is back": (_meets_without_who_is_back, "has not come to it"),
    "gone on too far": (_goes_on_after_the_furthest, "still waiting|must be there|rounds hold"),
    "repetition counted": (_takes_what_is_repeated_for_new, "still waiting|were begun"),
    "barriers without steps": (_forgets_the_steps_of_barriers, "still waiting"),
    "snapshot while values are put back": (_copies_what_is_put_back_meanwhile, "more than one exchange"),
    "saved by nobody": (_believes_that_it_is_saved, "nobody has begun to|was put back last"),
    "done again": (_does_again_what_is_done, "was put back last"),
    "rule of another round": (_changes_the_rule_too_late, "pushes"),
    "late push forgotten": (_forgets_what_is_late, "still waiting|comes after|rounds hold"),
    "store begun anew": (_begins_anew_what_is_over, "must be there|goes back"),
    "answer of a repetition": (_answers_a_repetition_with_what_is_there_by_then, "pushes"),
    "place forgotten": (_forgets_where_it_was, "goes on after step|pushes of client"),
    "error forgotten": (_forgets_what_codes_have_left, "must be there|rounds hold"),
    "memory in use": (_gives_memory_back_too_early, "no sum of pushes"),
    "rows of others": (_answers_a_repetition_with_its_own_rows, "is not told of rows"),
    "other rows": (_reads_the_first_rows, "pushes of client|who knew of"),
    "too many gathered": (_gathers_too_many, "may"),
    "snapshot without what waits": (_forgets_what_waits_with_the_job, "must be there"),
    "copy without what waits": (_copies_nothing_that_waits, "other bits|must be there"),
    "clients that are gone gathered for": (_gathers_by_all_clients_that_there_were, "other bits"),
    "gathered twice": (_keeps_what_is_in_an_update, "were begun"),
    "copy of a newer push": (_takes_every_push_for_new, "other bits"),
    "older push": (_takes_pushes_for_older, "is to change"),
    "version of another chunk": (_knows_what_it_has_read_of_the_first_chunk_only, "it was sent"),
    "log replayed twice": (_replays_what_is_sent_again, "other bits|logs of its servers end"),
    "copy without who has entered": (_copies_all_but_who_has_entered, "other bits"),
    "successor without values": (_takes_a_part_over_without_its_values, "not on server"),
    "open rounds forgotten": (_forgets_open_rounds_when_it_hands_over, "still waiting|has not pushed step"),
    "value of a head that was replaced": (_answers_when_another_may_be_the_head, "who knew of"),
    "end of the process before": (_takes_the_next_process_for_the_one_that_has_ended, "ClientLostError"),
    "waiting for who has ended": (_waits_for_who_has_ended_before, "still waiting"),
    "requests that are not sent again": (_asks_only_once, "still waiting"),
    "late beside others": (_counts_what_was_not_answered, "no sum of pushes|pushes of client"),
}
