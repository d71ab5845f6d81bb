"""Snapshots as the scheduler knows them, without I/O: what is due, what is complete, what to keep, what to resume."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping

import msgspec

from kvmpi.wire import messages as m

#: Complete snapshots that are kept.
KEPT = 2
#: How much further ahead than at first the scheduler's number may be, if servers were there too soon.
_MOST_MARGIN = 16


class Manifest(msgspec.Struct, frozen=True):
    """What makes a snapshot complete: its parts with their checksums, and how far each store is."""

    number: int
    files: tuple[tuple[int, int], ...]  # by part: bytes and checksum
    steps: Mapping[int, int]


class _Pending(msgspec.Struct):
    files: dict[int, m.PartFile] = msgspec.field(default_factory=dict)
    steps: dict[int, int] = msgspec.field(default_factory=dict)
    # By part: the stores that its server knew when it was copied.
    stores: dict[int, frozenset[int]] = msgspec.field(default_factory=dict)

    @property
    def is_worth_it(self) -> bool:
        """Whether there is anything in it, and all of each store: none that some servers had forgotten by then."""
        return bool(self.steps) and all(stores.issuperset(self.steps) for stores in self.stores.values())


class SnapshotBook:
    """What the scheduler knows of snapshots.

    Args:
        num_parts: parts of the values.
        seconds: begin a snapshot so often; 0: servers begin by themselves.
        resumed: the snapshot that the job goes on from.
    Attributes:
        complete: numbers of the snapshots that this job can go back to, in ascending order.
        missed: the last snapshot that was given up for another one.
        ahead: whether the last one that has begun is beyond what servers have come to.
    """

    def __init__(self, num_parts: int, seconds: float = 0.0, resumed: Manifest | None = None) -> None:
        self.num_parts, self._seconds, self.resumed = num_parts, seconds, resumed
        self.complete = [resumed.number] if resumed is not None else []
        self._base = self._newest = resumed.number if resumed is not None else 0
        self._pending: dict[int, _Pending] = {}
        # Of which all parts are written, and the manifest is still to be.
        self._whole: set[int] = set()
        self._dropped: list[int] = []
        # Still ahead, and nothing that servers say of them counts any more.
        self._withdrawn: set[int] = set()
        self._stale: list[int] = []
        self.missed, self.ahead = 0, False
        self._closed = False
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
        self._seconds, self._closed = 0.0, True

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
        if now_s < self._due_s:
            return None
        # Nothing new since the last one, or the last one is still ahead.
        if max(self._rounds.values()) <= self._newest and not self._withdraw():
            return None
        self._due_s = now_s + self._seconds
        return self._announce()

    def _withdraw(self) -> bool:
        """Whether the last number is given up for a nearer one: it is far ahead, since servers have become slower."""
        furthest = max(self._rounds.values())
        limit = furthest + 2 * self._margin * self._stride
        far = {self._newest, *(number for number in self._pending if number > limit)}
        there = max([furthest, *(self._pending.keys() - far), *self._whole, *self.complete])
        if self._newest <= limit or there >= self._newest:
            return False
        self._withdrawn = {number for number in self._withdrawn if number > furthest} | far
        self._dropped += sorted(far)
        self._pending = {number: pending for number, pending in self._pending.items() if number not in far}
        self.missed, self._newest = self._newest, there
        return True

    def _announce(self) -> int:
        """A number a bit beyond all that is known, which every server can reach."""
        self._newest = max(self._newest, *self._rounds.values()) + self._margin * self._stride
        while self._newest in self._withdrawn:
            self._newest += 1
        self.ahead = True
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
        if number in self._withdrawn:
            return None, None
        if message.stage == "begun":
            if number <= self._newest:
                return None, None
            self._newest, self.ahead = number, False
            self._open(number)
            return number, None
        if number in self._whole or number in self.complete:
            return None, None  # by now it can do without a server that has left it out
        pending = self._pending.get(number)
        if message.stage != "written":
            return self._give_up(number, try_another=message.stage == "missed" or self._seconds > 0), None
        if pending is None:
            self._newest = max(self._newest, number)  # dropped before anyone else has begun
            return None, None
        for file in message.files:
            if 0 <= file.part < self.num_parts:
                pending.files[file.part] = file
                pending.stores[file.part] = frozenset(message.stores)
        for store, step in message.steps.items():
            pending.steps[store] = min(step, pending.steps.get(store, step))
        if len(pending.files) < self.num_parts:
            return None, None
        if not pending.is_worth_it:  # the stores have ended meanwhile; what was complete before is to stay
            return self._give_up(number, try_another=False), None
        del self._pending[number]
        self._whole.add(number)
        files = tuple((pending.files[part].nbytes, pending.files[part].checksum) for part in range(self.num_parts))
        return None, Manifest(number, files, pending.steps)

    def _give_up(self, number: int, *, try_another: bool) -> int | None:
        """A server does not take part in a snapshot; the one that all are to take instead."""
        if number not in self._dropped:
            self._dropped.append(number)
        self._pending.pop(number, None)
        self._newest = max(self._newest, number)
        if not try_another or self._closed or number < self._newest or not self._rounds:
            return None
        if self._margin >= _MOST_MARGIN:
            return None
        # It was too near, or at a place where nobody can tell what belongs to it: once more, and further ahead.
        self._margin *= 2
        self.missed = number
        return self._announce()

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
