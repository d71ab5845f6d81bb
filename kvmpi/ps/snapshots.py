"""Snapshots on a server, as a state machine without I/O: what is copied when, and how a server goes on from copies.

A snapshot has a number N: it holds the pushes of the steps up to N of each synchronous store (``order.py``), counted
from the beginning of the first job, and no others. So all copies together are one state of the training, and nobody has
to wait for anybody. A chunk is copied

- when its round number N is over: it is pushed in every step;
- else before its first round of a later step is over;
- else, since nobody pushes it, when every client has said that its pushes up to step N are done.

Chunks of asynchronous stores are copied when their server begins. Their step is the number of pushes in them divided by
their clients; it counts only on servers that have nothing of a synchronous store. Pushes that wait for others, to be an
update together, are copied as they wait.

A server begins a snapshot when one of its chunks comes to a multiple of ``KVMPI_SNAPSHOT_EVERY``, or is about to go
beyond, or when the scheduler says so: because another server has begun, or because ``KVMPI_SNAPSHOT_SECONDS`` are over.
When all parts are written, the scheduler writes the manifest, without which a snapshot does not exist.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvmpi.ps.row_chunks import WIRE_ID
from kvmpi.ps.rulebook import in_force, rule_change
from kvmpi.ps.shard import Shard
from kvmpi.ps.slot import RuleChange, Slot
from kvmpi.wire import Message, entries
from kvmpi.wire import messages as m
from kvmpi.wire.entries import Key

if TYPE_CHECKING:
    from kvmpi.ps.part import Part

Buffer = npt.NDArray[Any]

_log = logging.getLogger(__name__)

#: A snapshot is given up for another one that is due when the scheduler has said so often how far all clients are. If
#: those of a store are done with nothing by then, it is taken for one that nobody pushes.
_MOST_HEARD = 8
#: After so many snapshots that are missed because nobody knows to which step a push belongs, there is a warning.
_MANY_UNCLEAR = 3


# ---- copies


class ChunkCopy(msgspec.Struct):
    """All that lasts of a chunk. ``by_rows``: its last round was of rows. ``gathered``: how many pushes wait to be an
    update together; ``arrays`` have their sum."""

    key: Key
    chunk: int
    num_chunks: int
    count: int
    shape: list[int]
    dtype: str
    updates: int
    generation: int
    rule: entries.RuleInForce
    arrays: dict[str, Buffer]
    by_rows: bool = False
    gathered: int = 0


class StoreCopy(msgspec.Struct):
    """One store in one part. ``step``: how many rounds it has seen, or updates divided by its clients."""

    mode: str
    num_clients: int
    step: int
    rule: entries.RuleInForce
    chunks: list[ChunkCopy] = msgspec.field(default_factory=list)


PartCopy = dict[int, StoreCopy]


def copy_chunk(shard: Shard, slot: Slot, rule: RuleChange) -> ChunkCopy:
    """Copy a chunk as it is after its last round; what is in the open one its clients will push again."""
    names, arrays = slot.dump()
    names_gathered, arrays_gathered = slot.dump_gathered()
    named = dict(zip([*names, *names_gathered], [*arrays, *arrays_gathered], strict=True))
    layout = shard.layouts[slot.key]
    return ChunkCopy(
        slot.key, slot.chunk, layout.num_chunks, slot.count, list(layout.shape), slot.dtype, slot.updates,
        slot.generation, in_force(rule), named, slot.touched is not None, slot.gathered,
    )  # fmt: skip


def copy_store(shard: Shard, chunks: list[ChunkCopy], step: int) -> StoreCopy:
    """A store of which ``chunks`` have been copied."""
    newest = max((chunk.rule for chunk in chunks), key=lambda rule: rule.generation, default=None)
    if newest is None:
        newest = shard.rulebook.newest
    return StoreCopy(shard.mode, shard.num_clients, step, newest, chunks)


def restore(shard: Shard, saved: StoreCopy, keys: frozenset[Key]) -> None:
    """Make an empty shard what it was; its clients begin to count from 0.

    Args:
        keys: all that the store has in the snapshot as a whole, in whatever part. What there is of others is left out:
            they were made when some parts had been copied.
    """
    shard.rulebook.resume(rule_change(saved.rule))
    shard.saved = keys
    for copy in saved.chunks:
        if copy.key not in keys:
            continue
        layout = m.Init(-1, copy.key, copy.chunk, copy.num_chunks, copy.count, copy.shape, copy.dtype)
        arrays = dict(copy.arrays)
        slot = shard.create(layout, arrays.pop("value"))
        change = rule_change(copy.rule)
        slot.change_rule(RuleChange(0, change.generation, change.rule))
        slot.restore_gathered(copy.gathered, arrays)
        slot.restore(copy.updates, arrays)
        slot.generation = copy.generation
        # Which rows they were nobody asks any more, as the clients of that round are gone.
        slot.touched = np.empty(0, WIRE_ID) if copy.by_rows else None


# ---- on a server


Where = tuple[int, int]
"""A store in a part: the numbers of both."""


class Taking(msgspec.Struct):
    """A snapshot under way: the chunks that have been copied, until a store has all of them, and all stores have.

    ``ahead``: nobody had come to that number when the scheduler chose it. ``heard``: how often it has said meanwhile
    how far all clients are.
    """

    number: int
    ahead: bool = False
    chunks: dict[Where, dict[tuple[Key, int], ChunkCopy]] = msgspec.field(default_factory=dict)
    whole: dict[Where, StoreCopy] = msgspec.field(default_factory=dict)
    parts: dict[int, PartCopy] | None = None
    heard: int = 0

    def has(self, where: Where, slot: Slot) -> bool:
        """Whether a chunk has been copied, or is left out because it was made when its store had been."""
        return where in self.whole or (slot.key, slot.chunk) in self.chunks.get(where, ())

    @property
    def stores(self) -> list[int]:
        """The stores that were here, also those of which this server has no chunk."""
        return sorted({number for stores in (self.parts or {}).values() for number in stores})

    @property
    def steps(self) -> dict[int, int]:
        """How far each store is in it, in the parts of this server."""
        found: dict[int, int] = {}
        for stores in (self.parts or {}).values():
            for number, store in stores.items():
                if store.chunks:
                    found[number] = min(store.step, found.get(number, store.step))
        return found


class ServerSnapshots:
    """The snapshots of server ``rank``, of the parts that it answers for; one at a time, for the sake of its memory.

    Args:
        every: begin when a chunk comes to a multiple of this many rounds or updates; 0: when the scheduler says so.
        heads: the parts that this server answers for.
    Attributes:
        base: the number that the job was resumed from; round 1 of this job has the number after it.
    """

    def __init__(self, rank: int, every: int, heads: Callable[[], list[Part]]) -> None:
        self.rank, self.every, self._heads = rank, every, heads
        self.base = 0
        self.steps: dict[int, int] = {}
        self._newest = 0
        self._skipped = 0
        self._put_after = 0  # the step after which a client has last put state back, as far as is known here
        # By store: the last snapshot for which it was taken for one that nobody pushes.
        self._bare: dict[int, int] = {}
        # By store: the step of this job that every client is done with.
        self._done: dict[int, int] = {}
        # And the last one of those that have left.
        self._furthest: dict[int, int] = {}
        self._current: Taking | None = None
        self._ready: Taking | None = None
        self._outbox: list[Message] = []
        self._warned: Counter[str] = Counter()
        self._unclear = 0

    def resume(self, number: int, steps: Mapping[int, int]) -> None:
        """The job goes on from a snapshot."""
        if number > self.base:
            self.base, self.steps = number, dict(steps)
            self._newest = max(self._newest, number)

    # ---- what the server sees

    def before_update(self, part: int, shard: Shard, slot: Slot) -> None:
        """A synchronous round of a chunk is about to be over."""
        earliest, latest = self.base + slot.span.earliest, self.base + slot.span.latest
        if self.every and (due := (earliest - 1) // self.every * self.every) > self._newest:
            self.begin(due)  # no chunk of this server has come to that number, since none is pushed in every step
        if (number := self._bare.pop(shard.store, 0)) >= max(1, earliest):
            self._give_up(number)  # it only took long until it was pushed, and is not in it
        if len(slot.open_steps) == len(slot.contributors):
            self._hear(shard.store, slot.open_done)
        current, where = self._copying, (part, shard.store)
        if current is None or latest <= current.number or current.has(where, slot):
            return
        if earliest <= current.number:
            self._miss(current, shard, slot)
            return
        self._copy(current, where, shard, slot)
        self._finish_if_complete(current)

    def on_update(self, part: int, shard: Shard, slot: Slot) -> None:
        """A chunk has one round, or one update, more."""
        number = self._number(shard, shard.progress(slot))
        current, where = self._copying, (part, shard.store)
        # An asynchronous store that is not in it has come since it began.
        in_rounds = shard.discipline.in_rounds
        if current is not None and not current.has(where, slot) and (number == current.number or not in_rounds):
            self._copy(current, where, shard, slot)
            self._finish_if_complete(current)
        if self.every and number > self._newest and number % self.every == 0:
            self.begin(number)

    def before_put(self, shard: Shard, slot: Slot) -> None:
        """A client is about to put back what a chunk had, or another value: between two steps, and nothing says which.

        So chunks that are copied and those that are still to be would not be of one state.
        """
        if not shard.discipline.in_rounds:
            return
        after = max(slot.rounds, slot.latest, self._done.get(shard.store, 0))
        self._put_after = max(self._put_after, self.base + after)
        current = self._copying
        if current is not None and any(
            store == shard.store and (part.number, store) not in current.whole for part, store, _ in self._shards()
        ):
            self._give_up(current.number)

    def hear_done(self, done: Mapping[int, int]) -> None:
        """The scheduler says, by store, which step all clients are done with."""
        if self._current is not None:
            self._current.heard += 1
        for store, step in done.items():
            self._hear(store, step)
        self.look()

    def hear_end(self, store: int, done: int) -> None:
        """A client leaves a store, after that step."""
        self._furthest[store] = max(done, self._furthest.get(store, 0))

    def end(self, part: int, store: int) -> None:
        """A part forgets a store that all clients have left: of what is not copied by now nothing ever will be."""
        if (current := self._copying) is not None and (part, store) not in current.whole:
            self._drop(current)

    def _hear(self, store: int, done: int) -> None:
        before = self._done.get(store, 0)
        if done > before:
            self._done[store] = done
            if (current := self._copying) is not None and self.base + before < current.number <= self.base + done:
                self.look()

    def look(self) -> None:
        """Copy what nobody will push any more before it would be too late. To be called when clients have gone."""
        current = self._copying
        for part, store, shard in self._shards() if current is not None else ():
            assert current is not None
            where = (part.number, store)
            if where in current.whole or not self._is_past(shard, current.number - self.base):
                continue
            copied = current.chunks.setdefault(where, {})
            for slot in shard.slots.values():
                if (slot.key, slot.chunk) not in copied:
                    if self.base + slot.latest > current.number:  # of a part that has just come to this server
                        self._drop(current)
                        return
                    if slot.contributors and self.base + slot.span.earliest <= current.number:
                        self._miss(current, shard, slot)
                        return
                    self._copy(current, where, shard, slot)
        if current is not None:
            self._finish_if_complete(current)

    def _is_past(self, shard: Shard, step: int) -> bool:
        """Whether no push of that step, or of one before, is still to come."""
        if shard.clients.deserted:
            return self._furthest.get(shard.store, 0) >= step
        return self._done.get(shard.store, 0) >= step

    def begin(self, number: int, missed: int = 0, *, ahead: bool = False) -> None:
        """Snapshot ``number`` is due, here or on another server; ``missed`` will not be completed, nor, if that is
        larger than ``number``, will anything else that is. ``ahead``: no server has come to it."""
        goes_back = number < missed <= self._newest
        if (current := self._copying) is not None and (
            current.number == missed or (goes_back and current.number > number)
        ):
            self._current = None
        if goes_back:
            self._newest = number - 1
        if number <= self._newest:
            return
        self._newest = number
        if self._current is not None and not self._make_way(self._current, number):
            return
        if number <= self._put_after:
            self._say(number, "missed")  # other servers may have copied what was there before
            return
        taking = Taking(number, ahead)
        for part, store, shard in self._shards():
            where = (part.number, store)
            if not shard.discipline.in_rounds or shard.untouched:
                chunks = [copy_chunk(shard, slot, slot.rule_in_force) for slot in shard.slots.values()]
                taking.whole[where] = copy_store(shard, chunks, self._step(shard))
                continue
            for slot in shard.slots.values():
                if self.base + slot.latest > number:
                    self._say(number, "missed")  # another server has begun, or the scheduler guessed, too late
                    return
                if self.base + slot.rounds == number:
                    self._copy(taking, where, shard, slot)
        self._current = taking
        self._say(number, "begun")
        self.look()

    @property
    def _copying(self) -> Taking | None:
        """The snapshot for which something is still to be copied."""
        return None if self._current is None or self._current.parts is not None else self._current

    def _copy(self, current: Taking, where: Where, shard: Shard, slot: Slot) -> None:
        # Of a key that is pushed in every step a change of the rule that is for the next will be said again.
        rule = slot.rule_in_force if self.base + slot.rounds == current.number else slot.next_rule
        current.chunks.setdefault(where, {})[slot.key, slot.chunk] = copy_chunk(shard, slot, rule)

    def _miss(self, current: Taking, shard: Shard, slot: Slot) -> None:
        """A round may be of the last step of a snapshot, or of the next one, or is of both."""
        self._give_up(current.number)
        self._unclear += 1
        if self._unclear >= _MANY_UNCLEAR:
            earliest, latest = self.base + slot.span.earliest, self.base + slot.span.latest
            self._warn(
                f"key {slot.key!r}",
                f"snapshot {current.number} is left out: a push of key {slot.key!r} of store {shard.store} belongs to "
                f"step {earliest} or to step {latest}, and nothing tells to which; push the key in one call with one "
                "that is pushed in every step, or call kv.clock() after every step; and push it on all clients in the "
                "same steps",
            )

    def _make_way(self, current: Taking, number: int) -> bool:
        """Whether ``number`` can begin: not while another is written, nor at once if one is still to be completed."""
        if current.parts is not None:
            if current.stores:  # else it is of nothing
                self._warn("slow", f"snapshot {number} is left out, because {current.number} is still being written")
        elif self._skipped > current.number and current.heard >= _MOST_HEARD:  # it has had its time
            self._blame(current, number)
            self._drop(current)
            return True
        self._skipped = number
        self._say(number, "dropped")
        return False

    def _blame(self, current: Taking, number: int) -> None:
        """Say which chunk has not come far enough."""
        for part, store, shard in self._shards():
            where = (part.number, store)
            for slot in shard.slots.values() if where not in current.whole else ():
                if (slot.key, slot.chunk) not in current.chunks.get(where, ()):
                    self._warn(
                        f"key {slot.key!r}",
                        f"snapshot {current.number} is given up: key {slot.key!r} of store {store} is at step "
                        f"{self.base + slot.latest}, and its clients are done with step "
                        f"{self.base + self._done.get(store, 0)}, while others are at {number}",
                    )
                    return

    def _warn(self, about: str, text: str) -> None:
        self._warned[about] += 1
        count = self._warned[about]
        if count & (count - 1) == 0:  # the first time, the second, the fourth ...: a log must not fill a disk
            _log.warning("server %d: %s", self.rank, text)

    def _shards(self) -> Iterable[tuple[Part, int, Shard]]:
        return ((part, store, shard) for part in self._heads() for store, shard in part.shards.items())

    def _finish_if_complete(self, current: Taking) -> None:
        """If every chunk is copied, the copies can be written."""
        complete, bare = True, dict[Where, Shard]()
        for part, store, shard in self._shards():
            where = (part.number, store)
            if where not in current.whole:
                copied = current.chunks.get(where, {})
                if not shard.slots:
                    bare[where] = shard
                elif len(copied) < len(shard.slots):
                    complete = False
                else:
                    self._end_store(current, where, shard)
        if not complete:
            return
        has_come = {store for (_, store), saved in current.whole.items() if saved.chunks}
        for where, shard in bare.items():
            if shard.store in has_come or self._stays_bare(current, shard):
                self._end_store(current, where, shard)
            else:
                complete = False
        if complete:
            current.parts = {part.number: {} for part in self._heads()}
            for (number, store), saved in current.whole.items():
                if number in current.parts:
                    current.parts[number][store] = saved
            current.chunks, current.whole = {}, {}
            self._ready = current

    def _end_store(self, current: Taking, where: Where, shard: Shard) -> None:
        """All that a store has in a part is copied."""
        step = self.steps.get(shard.store, 0) + current.number - self.base
        current.whole[where] = copy_store(shard, list(current.chunks.get(where, {}).values()), step)

    def _stays_bare(self, current: Taking, shard: Shard) -> bool:
        """Whether a store without chunks on this server has none here in the snapshot: what is made until anybody comes
        to its number may be pushed by then."""
        if not shard.discipline.in_rounds or not current.ahead or self._is_past(shard, current.number - self.base):
            return True
        # One that nobody pushes, as if it were for barriers alone, must not keep all others from being written.
        if current.heard < _MOST_HEARD or self._done.get(shard.store, 0):
            return False
        self._bare[shard.store] = current.number
        return True

    def _step(self, shard: Shard) -> int:
        """How far a store is that does not go in rounds, or does not go at all."""
        pushes = min((shard.progress(slot) for slot in shard.slots.values()), default=0)
        return self.steps.get(shard.store, 0) + pushes // shard.num_clients

    def heads_changed(self) -> None:
        """This server answers for other parts than before: what is half copied is of no use."""
        if (current := self._copying) is not None:
            self._drop(current)

    def close(self) -> None:
        """The server ends: nothing more will be copied."""
        self.heads_changed()

    def _give_up(self, number: int) -> None:
        """The scheduler is to try another number."""
        if self._copying is not None and self._copying.number == number:
            self._current = None
        self._say(number, "missed")

    def _drop(self, current: Taking) -> None:
        self._current = None
        self._say(current.number, "dropped")

    def _say(self, number: int, stage: str) -> None:
        self._outbox.append(m.SnapshotNews(number, stage))

    def round(self) -> int:
        """The number that the furthest chunk is at."""
        return max(
            (
                self._number(shard, max(shard.progress(slot), slot.latest))
                for _, _, shard in self._shards()
                for slot in shard.slots.values()
            ),
            default=self.base,
        )

    def _number(self, shard: Shard, rounds: int) -> int:
        """The step of a chunk that has seen so many rounds, or pushes. Those of an asynchronous store do not say when
        it is time for a snapshot while a synchronous one does, which others may be far behind or ahead of."""
        if shard.discipline.in_rounds:
            return self.base + rounds
        if any(other.discipline.in_rounds and other.slots for _, _, other in self._shards()):
            return self.base
        return self.base + rounds // shard.num_clients

    # ---- what the daemon does

    def take_messages(self) -> list[Message]:
        """What the scheduler is to be told."""
        messages, self._outbox = self._outbox, []
        return messages

    def take_ready(self) -> Taking | None:
        """Copies that are to be written, once."""
        ready, self._ready = self._ready, None
        return ready

    def written(self, taking: Taking, files: list[m.PartFile] | None) -> None:
        """The copies are in files, or could not be written."""
        self._current = None
        if files is None:
            self._say(taking.number, "dropped")
        else:
            self._unclear = 0
            self._outbox.append(m.SnapshotNews(taking.number, "written", files, taking.steps, taking.stores))
