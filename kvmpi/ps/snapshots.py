"""Snapshots of all servers, as state machines without I/O: what is due, what is complete, what to keep, what to resume.

A snapshot has a number: the rounds that synchronous chunks have in it, counted from the beginning of the first job. A
chunk is copied when its round with that number is over, whenever that is, so that all copies together are one state
of the training and nobody has to wait for anybody. Chunks of asynchronous stores are copied when their server begins.

A server begins a snapshot when one of its chunks comes to a multiple of ``KVMPI_SNAPSHOT_EVERY``, or when the scheduler
says so: because another server has begun, or because ``KVMPI_SNAPSHOT_SECONDS`` are over. When all parts are written,
the scheduler writes the manifest, without which a snapshot does not exist.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

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

#: Complete snapshots that are kept.
KEPT = 2
#: How much further ahead than at first the scheduler's number may be, if servers were there too soon.
_MOST_MARGIN = 16


# ---- copies


@dataclass(slots=True)
class ChunkCopy:
    """All that lasts of a chunk."""

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


@dataclass(slots=True)
class StoreCopy:
    """One store in one part. ``step``: how many rounds it has seen, or updates divided by its clients."""

    mode: str
    num_clients: int
    step: int
    rule: entries.RuleInForce
    chunks: list[ChunkCopy] = field(default_factory=list)


PartCopy = dict[int, StoreCopy]


def copy_chunk(shard: Shard, slot: Slot) -> ChunkCopy:
    """Copy a chunk as it is after its last round; what is in the open one its clients will push again."""
    names, arrays = slot.dump()
    layout = shard.layouts[slot.key]
    return ChunkCopy(
        slot.key, slot.chunk, layout.num_chunks, slot.count, list(layout.shape), slot.dtype, slot.updates,
        slot.generation, in_force(slot.rule_in_force), dict(zip(names, arrays, strict=True)),
    )  # fmt: skip


def copy_store(shard: Shard, chunks: list[ChunkCopy], step: int) -> StoreCopy:
    """A store of which ``chunks`` have been copied."""
    newest = max((chunk.rule for chunk in chunks), key=lambda rule: rule.generation, default=None)
    if newest is None:
        newest = in_force(RuleChange(0, shard.rulebook.generation, shard.rulebook.rule))
    return StoreCopy(shard.mode, shard.num_clients, step, newest, chunks)


def restore(shard: Shard, saved: StoreCopy, keys: frozenset[Key]) -> None:
    """Make an empty shard what it was; its clients begin to count from 0.

    Args:
        keys: all that the store has in the snapshot, in whatever part.
    """
    shard.rulebook.resume(rule_change(saved.rule))
    shard.saved = keys
    for copy in saved.chunks:
        layout = m.Init(-1, copy.key, copy.chunk, copy.num_chunks, copy.count, copy.shape, copy.dtype)
        arrays = dict(copy.arrays)
        slot = shard.create(layout, arrays.pop("value"))
        change = rule_change(copy.rule)
        slot.change_rule(RuleChange(0, change.generation, change.rule))
        slot.restore(copy.updates, arrays)
        slot.generation = copy.generation


# ---- on a server


@dataclass(slots=True)
class Taking:
    """A snapshot under way: the chunks that have been copied, by part and store, until the last one is.

    ``at_once``: stores that were copied as a whole at the beginning, and how far they were.
    """

    number: int
    chunks: dict[tuple[int, int], dict[tuple[Key, int], ChunkCopy]] = field(default_factory=dict)
    at_once: dict[tuple[int, int], int] = field(default_factory=dict)
    parts: dict[int, PartCopy] | None = None

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
        self._current: Taking | None = None
        self._ready: Taking | None = None
        self._outbox: list[Message] = []
        self._warned: Counter[str] = Counter()

    def resume(self, number: int, steps: Mapping[int, int]) -> None:
        """The job goes on from a snapshot."""
        if number > self.base:
            self.base, self.steps = number, dict(steps)
            self._newest = max(self._newest, number)

    # ---- what the server sees

    def on_update(self, part: int, shard: Shard, slot: Slot) -> None:
        """A chunk has one round, or one update, more."""
        number = self.base + slot.rounds
        current = self._current
        if current is not None and number == current.number:
            if current.parts is None and (part, shard.store) not in current.at_once:
                current.chunks.setdefault((part, shard.store), {})[slot.key, slot.chunk] = copy_chunk(shard, slot)
                self._finish_if_complete(current)
        elif self.every and number % self.every == 0:
            self.begin(number)

    def begin(self, number: int) -> None:
        """Snapshot ``number`` is due, here or on another server."""
        if number <= self._newest:
            return
        self._newest = number
        if self._current is not None and not self._make_way(self._current, number):
            return
        taking = Taking(number)
        for part, store, shard in self._shards():
            copied = taking.chunks.setdefault((part.number, store), {})
            at_once = not shard.discipline.in_rounds or shard.untouched
            if at_once:
                taking.at_once[part.number, store] = self._step(shard)
            for slot in shard.slots.values():
                if at_once or self.base + slot.rounds == number:
                    copied[slot.key, slot.chunk] = copy_chunk(shard, slot)
                elif self.base + slot.rounds > number:
                    self._say(number, "dropped")  # another server has begun, or the scheduler guessed, too late
                    return
        self._current = taking
        self._say(number, "begun")
        self._finish_if_complete(taking)

    def _make_way(self, current: Taking, number: int) -> bool:
        """Whether ``number`` can begin: not while another is written, nor at once if one is still to be completed."""
        if current.parts is not None:
            self._warn("slow", f"snapshot {number} is left out, because {current.number} is still being written")
        elif self._skipped > current.number:  # it has had its time
            self._blame(current, number)
            self._drop(current)
            return True
        self._skipped = number
        self._say(number, "dropped")
        return False

    def _blame(self, current: Taking, number: int) -> None:
        """Say which chunk has not come far enough."""
        for part, store, shard in self._shards():
            copied = current.chunks.get((part.number, store), {})
            for slot in shard.slots.values() if shard.discipline.in_rounds else ():
                if (slot.key, slot.chunk) not in copied:
                    self._warn(
                        f"key {slot.key!r}",
                        f"snapshot {current.number} is given up: key {slot.key!r} of store {store} is at round "
                        f"{self.base + slot.rounds} while others are at {number}; keys that are not pushed in every "
                        "round keep snapshots from being completed",
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
        for part, store, shard in self._shards():
            where = (part.number, store)
            if where not in current.at_once and len(current.chunks.get(where, ())) < len(shard.slots):
                return
        current.parts = {part.number: {} for part in self._heads()}
        for part, store, shard in self._shards():
            where = (part.number, store)
            step = current.at_once.get(where, self.steps.get(store, 0) + current.number - self.base)
            current.parts[part.number][store] = copy_store(shard, list(current.chunks.get(where, {}).values()), step)
        current.chunks = {}
        self._ready = current

    def _step(self, shard: Shard) -> int:
        """How far a store is that does not go in rounds, or does not go at all."""
        updates = min((slot.rounds for slot in shard.slots.values()), default=0)
        return self.steps.get(shard.store, 0) + updates // shard.num_clients

    def heads_changed(self) -> None:
        """This server answers for other parts than before: what is half copied is of no use."""
        if self._current is not None and self._current.parts is None:
            self._drop(self._current)

    def close(self) -> None:
        """The server ends: nothing more will be copied."""
        self.heads_changed()

    def _drop(self, current: Taking) -> None:
        self._current = None
        self._say(current.number, "dropped")

    def _say(
        self, number: int, stage: str, files: Iterable[m.PartFile] = (), steps: dict[int, int] | None = None
    ) -> None:
        self._outbox.append(m.SnapshotNews(number, stage, list(files), steps or {}))

    def round(self) -> int:
        """The number that the furthest chunk is at."""
        rounds = [slot.rounds for _, _, shard in self._shards() for slot in shard.slots.values()]
        return self.base + max(rounds, default=0)

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
            self._say(taking.number, "written", files, taking.steps)


# ---- on the scheduler


@dataclass(frozen=True)
class Manifest:
    """What makes a snapshot complete: its parts with their checksums, and how far each store is."""

    number: int
    files: tuple[tuple[int, int], ...]  # by part: bytes and checksum
    steps: Mapping[int, int]


@dataclass(slots=True)
class _Pending:
    files: dict[int, m.PartFile] = field(default_factory=dict)
    steps: dict[int, int] = field(default_factory=dict)


class SnapshotBook:
    """What the scheduler knows of snapshots.

    Args:
        num_parts: parts of the values.
        seconds: begin a snapshot so often; 0: servers begin by themselves.
        resumed: the snapshot that the job goes on from.
    Attributes:
        complete: numbers of the snapshots that this job can go back to, in ascending order.
    """

    def __init__(self, num_parts: int, seconds: float = 0.0, resumed: Manifest | None = None) -> None:
        self.num_parts, self._seconds, self.resumed = num_parts, seconds, resumed
        self.complete = [resumed.number] if resumed is not None else []
        self._base = self._newest = resumed.number if resumed is not None else 0
        self._pending: dict[int, _Pending] = {}
        # Of which all parts are written, and the manifest is still to be.
        self._whole: set[int] = set()
        self._dropped: list[int] = []
        self._stale: list[int] = []
        self._due_s = math.inf
        # How far the servers were at their last heartbeats, and the most that one has gone in between.
        self._rounds: dict[int, int] = {}
        self._stride = 1
        self._margin = 2

    @property
    def settled(self) -> bool:
        """Whether no snapshot is under way."""
        return not self._pending

    def close(self) -> None:
        """The job ends: nothing more is begun."""
        self._seconds = 0.0

    def heartbeat(self, server: int, number: int) -> None:
        """A server's furthest chunk is at ``number``."""
        number = max(number, self._base)  # it says 0 until it has read its snapshot
        before = self._rounds.get(server, number)
        self._stride = max(1, number - before, self._stride // 2)
        self._rounds[server] = number

    def tick(self, now_s: float) -> int | None:
        """A snapshot that all servers are to take now."""
        if not self._seconds or not self._rounds:
            return None
        if math.isinf(self._due_s):
            self._due_s = now_s + self._seconds
        # Nothing new since the last one, or the last one is still ahead.
        if now_s < self._due_s or max(self._rounds.values()) <= self._newest:
            return None
        self._due_s = now_s + self._seconds
        return self._announce()

    def _announce(self) -> int:
        """A number a bit beyond all that is known, which every server can reach."""
        self._newest = max(self._newest, *self._rounds.values()) + self._margin * self._stride
        self._open(self._newest)
        return self._newest

    def _open(self, number: int) -> None:
        """A snapshot begins; those that were dropped before it are not written to any more, or in vain."""
        self._pending[number] = _Pending()
        self._stale += self._dropped
        self._dropped = []

    def hear(self, message: m.SnapshotNews) -> tuple[int | None, Manifest | None]:
        """A server's news: the snapshot that all are to take because of it, and the one that is complete now."""
        number = message.number
        if message.stage == "begun":
            if number <= self._newest:
                return None, None
            self._newest = number
            self._open(number)
            return number, None
        if number in self._whole or number in self.complete:
            return None, None  # by now it can do without a server that has left it out
        if message.stage == "dropped" and number not in self._dropped:
            self._dropped.append(number)
        pending = self._pending.get(number)
        if pending is None:
            self._newest = max(self._newest, number)  # dropped before anyone else has begun
            return None, None
        if message.stage != "written":
            del self._pending[number]
            if self._seconds and number == self._newest and self._margin < _MOST_MARGIN:
                # It was too near: once more, and further ahead.
                self._margin *= 2
                return self._announce(), None
            return None, None
        for file in message.files:
            if 0 <= file.part < self.num_parts:
                pending.files[file.part] = file
        for store, step in message.steps.items():
            pending.steps[store] = min(step, pending.steps.get(store, step))
        if len(pending.files) < self.num_parts:
            return None, None
        del self._pending[number]
        self._whole.add(number)
        files = tuple((pending.files[part].nbytes, pending.files[part].checksum) for part in range(self.num_parts))
        return None, Manifest(number, files, pending.steps)

    def committed(self, number: int) -> None:
        """The manifest of a snapshot is on the disk."""
        self._whole.discard(number)
        self._margin = max(2, self._margin // 2)
        self.complete = sorted({*self.complete, number})[-KEPT:]
        self._pending = {other: pending for other, pending in self._pending.items() if other > number}

    def given_up(self, number: int) -> None:
        """The manifest of a snapshot cannot be written."""
        self._whole.discard(number)
        self._dropped.append(number)

    def recall(self, complete: Iterable[int]) -> None:
        """These were completed by a scheduler before this one."""
        self.complete = sorted({*self.complete, *complete})[-KEPT:]

    def take_stale(self) -> list[int]:
        """Snapshots that were dropped and whose files can go, once: on a full disk they would keep the next out."""
        stale, self._stale = self._stale, []
        return stale

    def obsolete(self, there: Collection[int]) -> list[int]:
        """Which of the snapshots that are there can go: older ones, and those that were never completed."""
        newest = self.complete[-1] if self.complete else 0
        return sorted(number for number in there if number < newest and number not in self.complete)
