"""What must hold in a simulated job after every step of it, computed apart from the code that is under test.

A push adds ``BASE ** client`` to every element, so that a value tells how often each client's pushes are in it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from operator import lt
from typing import Any

import numpy as np
from simulation.cluster import NO_PART, Cluster
from simulation.network import Violation
from simulation.plan import KEYS, MOST_CLIENTS, Plan

from kvmpi.ps.part import Part
from kvmpi.ps.slot import Slot
from kvmpi.ps.snapshots import ChunkCopy, PartCopy
from kvmpi.wire import messages as m

#: Larger than the pushes of a client in all lives of a job, so that digits do not run over; with 4 clients float32 is
#: still exact.
BASE = 64

#: What was counted in a chunk that nobody has looked at.
_NEVER: tuple[int, tuple[int, ...]] = (-1, ())
#: Of a part that nobody has looked at.
_UNSEEN = (-1, -1)

Pair = tuple[int, Any]
"""(client, key)."""
Interval = tuple[int, int]
"""How many pushes there are, at least and at most."""


@dataclass
class Past:
    """What a snapshot may hold, and what it must, as the job knew that has made it.

    Attributes:
        number: of the snapshot.
        begun, done: of a job in rounds: sets of steps that may and that must be in the values.
        step: of other jobs: how far at least the job is that goes on from here.
        written: pushes of that job that may and that must be in each part, since its server has begun to copy.
        mark: what was put back last at least, before that step.
        base: those of the jobs before it, by client, key and chunk; as far as it is known better than from ``before``.
    """

    number: int
    begun: dict[Pair, int] = field(default_factory=dict)
    done: dict[Pair, int] = field(default_factory=dict)
    step: int = 0
    mark: int = 0
    written: dict[int, dict[Pair, Interval]] = field(default_factory=dict)
    base: dict[tuple[int, Any, int], Interval] = field(default_factory=dict)
    before: Past | None = None

    def interval(self, client: int, key: Any, chunk: int, part: int) -> Interval:
        """How many pushes of a client are in a chunk, which belongs to this part; of a job that has no rounds."""
        least, most = self.base.get((client, key, chunk), (0, 0))
        if (client, key, chunk) not in self.base and self.before is not None:
            least, most = self.before.interval(client, key, chunk, part)
        done, begun = self.written[part][client, key]
        return least + done, most + begun


class Oracle:
    """Which pushes were begun, and of which a client was told the end; what the values may be because of them.

    Sets of steps are bits of an int: bit s is step s. Of a key that is pushed in some steps only these alone count, as
    step 1, 2, ... of the key.

    Args:
        past: the snapshot that the job goes on from.
    Attributes:
        gone: clients that rounds go on without, or may.
        num_done: how many pushes clients were told the end of.
    """

    def __init__(self, cluster: Cluster, plan: Plan, past: Past | None = None) -> None:
        self._pushes, self._overall, self._weigh = plan.pushes, plan.overall, plan.weigh
        self._cluster, self._keys, self._last_steps = cluster, [*KEYS], plan.last_step
        self._plan, self._late, self._resumed = plan, plan.late, past.number if past is not None else 0
        self._saves_done = self._begins_with = past.mark if past is not None else 0
        self._saves_begun = plan.saves_before(self._resumed + 1)
        # Else values are no sums of pushes, and only some of it can be checked.
        self._sync, self._additive = cluster.mode == "sync", plan.rule == "test"
        self._marks = self._additive and bool(plan.saves) and len(plan.last_step) < MOST_CLIENTS
        self._exact = self._sync and cluster.config.on_client_loss != "shrink"
        last_steps = plan.last_step
        self.num_clients, self._replicas = len(last_steps), cluster.config.replicas
        pairs = [(client, key) for client in last_steps for key in self._keys]
        self._past = past
        self._begun = dict.fromkeys(pairs, 0) | (past.begun if past is not None else {})
        self._done = dict.fromkeys(pairs, 0) | (past.done if past is not None else {})
        # In synchronous rounds: of which a client is a part for certain, by key.
        self._needed = {
            (client, key): _bits(1 + plan.pushes(key, self._resumed), plan.pushes(key, last_steps[client]))
            for client, key in pairs
        }
        self._shift = dict.fromkeys(last_steps, 0)
        self.gone: set[int] = set()
        self.num_done = 0
        self._seen: dict[tuple[int, Any], list[tuple[int, ...]]] = {}
        # By client, key, chunk: which process of it was sent which version.
        self._versions: dict[tuple[int, Any, int], tuple[int, int]] = {}
        # By chunk: after which round it was counted, and what. By part: the last entry of its log and the version of
        # its chain when it was looked at.
        self._counted: dict[Slot, tuple[int, tuple[int, ...]]] = {}
        self._looked_at: dict[Part, tuple[int, int]] = {}
        # Keys of which a client was told the end of a push since servers were checked; all if a client has entered.
        self._told: set[Any] = set()
        # Without rounds: what was begun and done when a server began to copy, by server and number; and of each part,
        # by number, what is in it because of that.
        self._copied: dict[tuple[int, int], dict[Pair, Interval]] = {}
        self._written: dict[int, dict[int, dict[Pair, Interval]]] = {}
        # What is known of the pushes that are in a chunk from the snapshot; and of how many chunks a key has.
        self._base: dict[tuple[int, Any, int], Interval] = {}
        self._num_chunks: dict[Any, int] = {}
        self._resumed_step = 0
        cluster.on_version = self.check_version
        cluster.on_news = self.hear_of_snapshot

    # ---- what clients do

    def begin(self, client: int, key: Any, step: int) -> None:
        """A client pushes."""
        self._begun[client, key] |= self._bit(client, key, step)

    def begin_anew(self, client: int) -> None:
        """A client that is in no rounds does all its steps again, which count as others."""
        self._shift[client] += self._plan.steps

    def _bit(self, client: int, key: Any, step: int) -> int:
        return 1 << self._shift[client] + self._pushes(key, step)

    def note_done(self, client: int, key: Any, step: int) -> Callable[[Any], None]:
        """To be called with the push's Work when it is over."""

        bit = self._bit(client, key, step)

        def note(work: Any) -> None:
            if work.error() is None:
                self._done[client, key] |= bit
                self.num_done += 1
                self._told.add(key)

        return note

    def told(self) -> dict[tuple[int, Any], int]:
        """Of which pushes anybody has been told the end by now, for ``check_read``."""
        return dict(self._done)

    def begin_save(self, step: int) -> None:
        """A client is about to read everything and to put it back, between this step and the next."""
        self._saves_begun = max(self._saves_begun, self._plan.saves_before(step + 1))

    def note_saved(self, step: int) -> None:
        """A client was told that one of them has done so."""
        number = self._plan.saves_before(step + 1)
        if number > self._saves_begun:
            raise Violation(f"somebody has saved and restored after step {step}, and nobody has begun to")
        self._saves_done = max(self._saves_done, number)

    def marked(self, value: np.ndarray, step: int) -> np.ndarray:
        """What is put back after a step in the place of ``value``."""
        if not self._marks:
            return value
        unit = BASE**self.num_clients
        return (value % unit + unit * self._plan.saves_before(step + 1)).astype(value.dtype)

    def _least_mark(self, step: int) -> int:
        """What was put back last when a step begins; what was right after a snapshot may be lost with the job."""
        before = (self._plan.saves_before(at + 1) for at in self._plan.saves if self._resumed < at < step)
        return max(before, default=self._begins_with)

    def _check_marks(self, where: str, numbers: Iterable[float], least: int, most: int) -> None:
        found = {int(number) // BASE**self.num_clients for number in numbers} if self._marks else ()
        if any(not least <= mark <= most for mark in found):
            raise Violation(f"{where}: exchange {sorted(found)} was put back last, {least} to {most} expected")

    def leave_out(self, client: int) -> None:
        """Rounds need not have a client any more."""
        self.gone.add(client)
        for key in self._keys:
            self._needed[client, key] = 0

    def enter(self, client: int, step: int, position: int) -> None:
        """A client that was left out goes on after ``position``, and is in the rounds after ``step`` of all keys."""
        self.gone.discard(client)
        if not self._sync:
            return
        furthest = max(
            (self._overall(key, at) for (other, key), begun in self._begun.items()
             for at in range(1, self._last_steps[other] + 1)
             if self._pushes(key, at - 1) < self._pushes(key, at) and begun >> self._pushes(key, at) & 1),
            default=0,
        )  # fmt: skip
        if step > furthest:
            raise Violation(f"client {client} enters after step {step}, nobody has begun more than {furthest}")
        if position > step:
            raise Violation(f"client {client} goes on after step {position}, and enters after step {step}")
        last = self._last_steps[client]
        for key in self._keys:
            pushes = [self._pushes(key, at) for at in range(1, last + 1) if self._overall(key, at) <= step]
            self._needed[client, key] = _bits(max(pushes, default=0) + 1, self._pushes(key, last))
        self._told.update(self._keys)

    def check_position(self, client: int, step: int, *, waits: bool) -> None:
        """Where the next process of a client goes on that others have waited for: no more than two steps are repeated
        of those that it was told to be over; three, if it begins anew.

        Args:
            waits: its processes have waited for all pushes of a step before they began the next.
        """
        last = self._last_steps[client]
        over = 0
        while over < last and all(self._has_all(client, key, over + 1) for key in self._keys):
            over += 1
        over = over if waits else 0
        if not (over - 2 <= step <= max(last, self._resumed) or (step == self._resumed and over <= step + 3)):
            raise Violation(f"client {client} goes on after step {step}, step {over} of {last} was over")

    def _has_all(self, client: int, key: Any, step: int) -> bool:
        """Whether a client was told the end of all pushes of a key in the steps up to this one."""
        needed = _bits(1, self._pushes(key, step))
        return self._done[client, key] & needed == needed

    def last_begun(self, client: int) -> int:
        """The last step of which a client has pushed anything."""
        return max(self._begun[client, key].bit_length() - 1 - self._shift[client] for key in self._keys)

    def _bounds(self, client: int, key: Any, rounds: int) -> tuple[int, int]:
        """How often pushes of a client are in a value after so many synchronous rounds, at least and at most."""
        mask = _bits(1, rounds)
        least = (self._done[client, key] | self._needed[client, key]) & mask
        return self._weigh(key, least), self._weigh(key, self._begun[client, key] & mask)

    # ---- snapshots

    def hear_of_snapshot(self, server: int, news: m.SnapshotNews) -> None:
        """A server has begun to copy, which without rounds means that it has copied, or has written its parts."""
        if news.stage == "begun":
            self._copied[server, news.number] = {
                pair: (done.bit_count(), self._begun[pair].bit_count()) for pair, done in self._done.items()
            }
        elif news.stage == "written":
            parts = self._written.setdefault(news.number, {})
            for file in news.files:
                parts[file.part] = self._copied[server, news.number]

    def past(self, number: int) -> Past:
        """What is in snapshot ``number`` of this job."""
        if self._sync:
            masks = {pair: _bits(1, self._pushes(pair[1], number)) for pair in self._begun}
            begun = {pair: steps & masks[pair] for pair, steps in self._begun.items()}
            done = {pair: (done | self._needed[pair]) & masks[pair] for pair, done in self._done.items()}
            return Past(number, begun, done, mark=min(self._least_mark(number), self._saves_done))
        written = self._written[number]
        fewest = min(done for part in written.values() for done, _ in part.values())
        step = self._resumed_step + fewest
        return Past(number, step=step, written=written, base=dict(self._base), before=self._past)

    def check_whole(self, number: int, parts: Iterable[PartCopy]) -> None:
        """A snapshot is complete: nothing is missing in it of any key that there is when its step is pushed."""
        chunks = [chunk for stores in parts for store in stores.values() for chunk in store.chunks]
        there = Counter(chunk.key for chunk in chunks)
        all_of = {chunk.key: chunk.num_chunks for chunk in chunks}
        for key in self._keys:
            if self._late.get(key, 0) > number:  # who resumes from it leaves out what is there of such a key
                continue
            if there[key] != all_of.get(key, -1):
                raise Violation(f"snapshot {number} lacks some of key {key!r}: {there[key]} chunks are there")

    def check_snapshot(self, number: int, parts: Iterable[PartCopy]) -> None:
        """A snapshot of a job in rounds is complete: it holds the pushes of the steps up to ``number``, and no others.

        Without clients that are left out that is one value for each chunk, and as many updates.
        """
        marks: set[float] = set()
        for store in (store for stores in parts for store in stores.values()):
            if store.step != number:
                raise Violation(f"snapshot {number} says that its store is at step {store.step}")
            for chunk in store.chunks:
                where = f"snapshot {number}: key {chunk.key!r}, chunk {chunk.chunk}"
                rounds = self._pushes(chunk.key, number)
                if self._additive:
                    self._check_copy(where, chunk, rounds)
                    marks |= set(chunk.arrays["value"].tolist()) if chunk.key not in self._late else set()
                if self._exact and chunk.updates != rounds:
                    raise Violation(f"{where} has {chunk.updates} rounds, {rounds} are up to that step")
        units = {number // BASE**self.num_clients for number in marks} if self._marks else set()
        if len(units) > 1:
            raise Violation(f"snapshot {number} holds what was put back by {sorted(units)}: more than one exchange")

    def _check_copy(self, where: str, chunk: ChunkCopy, rounds: int) -> None:
        found = {_digits(number, self.num_clients) for number in chunk.arrays["value"].tolist()}
        for client in range(self.num_clients) if found else ():
            counts = {digits[client] for digits in found}
            least, most = self._bounds(client, chunk.key, rounds)
            if min(counts) < least or max(counts) > most:
                raise Violation(f"{where} holds {sorted(counts)} pushes of client {client}, {least} to {most} expected")

    def knows(self, number: int) -> bool:
        """Whether snapshot ``number`` is of this job."""
        return number > self._resumed

    def check_resumed(self, client: int, step: int) -> None:
        """What a client is told of how far its store was in the snapshot."""
        self._resumed_step = step
        least = self._resumed if self._sync or self._past is None else self._past.step
        if step < least or (self._sync and step > least):
            raise Violation(f"client {client} is told that the snapshot is of step {step}, not of {least}")

    def _narrow(self, part: int, slot: Slot, client: int, count: int) -> Interval:
        """How many pushes may be in a chunk that has ``count``; what that says about the snapshot is kept."""
        assert self._past is not None
        where = (client, slot.key, slot.chunk)
        least, most = self._base.get(where) or self._past.interval(*where, part)
        done, begun = self._done[client, slot.key].bit_count(), self._begun[client, slot.key].bit_count()
        self._base[where] = max(least, count - begun), min(most, count - done)
        return least + done, most + begun

    def _from_snapshot(self, client: int, key: Any) -> Interval:
        """How many pushes of a client an element of ``key`` has from the snapshot."""
        if self._past is None:
            return 0, 0
        found = [interval for (of, what, _), interval in self._base.items() if (of, what) == (client, key)]
        if len(found) < self._num_chunks.get(key, math.inf):
            return 0, BASE  # not all of it has been looked at
        return min(least for least, _ in found), max(most for _, most in found)

    # ---- what clients see

    def check_version(self, client: int, incarnation: int, where: tuple[Any, int], version: int) -> None:
        """A client is sent the value of a chunk: not an older one than before. Another process may be in its place."""
        newest, before = self._versions.get((client, *where), (0, 0))
        if incarnation < newest:
            return
        if version < before:
            raise Violation(f"client {client} gets version {version} of chunk {where} after {before}: time goes back")
        self._versions[(client, *where)] = (incarnation, version)

    def check_read(
        self, client: int, key: Any, value: np.ndarray, step: int, told: dict[tuple[int, Any], int], *,
        later: bool = False, stale: bool = False, met: bool = False,
    ) -> None:  # fmt: skip
        """What a client reads after its ``step``-th push, and after anybody was ``told`` of the end of some pushes.

        It may be ``later`` than that: who has nothing more to push reads on, who repeats a step reads what is there.
        One that was stopped may have a ``stale`` value, while another process in its place has pushed. What a push has
        ``met`` is what was there before it.
        """
        where = f"client {client} reads {key!r} after step {step}"
        if not self._additive:
            if np.isnan(value).any():
                raise Violation(f"{where}: not filled")
            return
        ahead = later or self._cluster.config.on_client_loss == "shrink"
        most = self._saves_begun if ahead else self._plan.saves_before(max(step, self._resumed + 1))
        # Where all were lost before one of them had done it, those that are back may go on behind it.
        self._check_marks(where, value.tolist(), min(self._least_mark(step), self._saves_done), most)
        elements = [_digits(number, self.num_clients) for number in value.tolist()]
        found = set(elements)
        for other in range(self.num_clients) if found else ():
            counts = sorted({digits[other] for digits in found})
            if self._sync:
                least, most = self._bounds(other, key, self._pushes(key, step) - met)
                most = self._weigh(key, self._begun[other, key]) if later else most
                if counts[-1] > most or counts[0] < least:
                    raise Violation(
                        f"{where}: rounds hold {counts} pushes of client {other}, {least} to {most} expected"
                    )
                continue
            before, before_most = self._from_snapshot(other, key)
            this = self._bit(client, key, step) if met and other == client else 0
            # Of what a process before this one has pushed some chunks know no more what it has met.
            most = before_most + (self._begun[other, key] & ~(0 if later else this)).bit_count()
            if counts[0] < before + told.get((other, key), 0).bit_count():
                known = told[other, key].bit_count()
                raise Violation(f"{where}: {counts} pushes of client {other}, who knew of {before} + {known}")
            own = self._done[other, key] & ~this if other == client and not stale else 0
            least = before + own.bit_count() if own else 0
            if counts[0] < least or counts[-1] > most:
                raise Violation(f"{where}: {counts} pushes of client {other}, {least} to {most} expected")
        if self._sync or stale:
            return
        if any(sum(digits) < self._resumed_step * self.num_clients for digits in found):
            raise Violation(f"{where}: {elements} pushes, fewer than in the {self._resumed_step} steps before")
        seen = self._seen.get((client, key), elements)
        if seen != elements and any(map(_is_less, elements, seen)):
            raise Violation(f"{where}: {elements} pushes, it has seen {seen}: time goes back")
        self._seen[client, key] = elements

    # ---- what servers have

    def check_servers(self, name: str) -> None:
        """After something has happened to the process ``name``."""
        if not self._additive:
            return
        if self._told:
            told, self._told = self._told, set()
            for process in self._cluster.processes.values():
                self._check_parts(process.rank, process.state.parts.values(), told)
        elif (process := self._cluster.alive.get(name)) is not None:
            touched, parts = process.touched, process.state.parts
            # What has happened to others because of a message about one is seen at the next tick.
            if touched != NO_PART:
                self._check_parts(process.rank, parts.values() if touched is None else (parts[touched],), self._told)

    def _check_parts(self, server: int, parts: Iterable[Part], told: set[Any]) -> None:
        chains = self._cluster.scheduler._chains
        if chains is None:
            return
        looked_at = self._looked_at
        for part in parts:
            seq, version = part.seq, part.chain.version
            seq_before, version_before = looked_at.get(part, _UNSEEN)
            if seq == seq_before and version == version_before and not told:
                continue
            # One that was stopped may believe to be the head still; whom it answers is checked elsewhere.
            if part.answers and version == chains.chains[part.number].version:
                looked_at[part] = seq, version
                self._check_head(server, part, told if version == version_before else None)

    def _check_head(self, server: int, part: Part, told: set[Any] | None) -> None:
        """The head has everything that was acknowledged, nothing twice, and every client that it needs.

        Args:
            told: chunks of other keys are as they were checked, unless they have another round; None: none was checked.
        """
        for shard in part.shards.values():
            for slot in shard.slots.values():
                if told is not None and slot.key not in told and self._counted.get(slot, _NEVER)[0] == slot.rounds:
                    continue
                where = f"server {server}, part {part.number}, key {slot.key!r}"
                self._check_marks(where, slot.value.tolist(), self._saves_done, self._saves_begun)
                for client, count in enumerate(self._counts_of(slot)):
                    if self._sync:
                        # Without replicas a push is acknowledged in its round, which may still be open.
                        before = self._pushes(slot.key, self._resumed)
                        least, most = self._bounds(client, slot.key, before + slot.rounds)
                        if self._replicas:
                            least = max(least, self._weigh(slot.key, self._done[client, slot.key]))
                    elif self._past is not None:
                        self._num_chunks[slot.key] = shard.layouts[slot.key].num_chunks
                        least, most = self._narrow(part.number, slot, client, count)
                    else:
                        least, most = (steps[client, slot.key].bit_count() for steps in (self._done, self._begun))
                    if not least <= count <= most:
                        told_of = self._weigh(slot.key, self._done[client, slot.key])
                        raise Violation(
                            f"{where}: {count} pushes of client {client} after {slot.rounds} rounds, {most} were begun "
                            f"and {least} must be there: it was told of {told_of}"
                        )

    def _counts_of(self, slot: Slot) -> tuple[int, ...]:
        """How many pushes of each client are in a chunk; looked at once for each round."""
        rounds, counts = self._counted.get(slot, _NEVER)
        if rounds != slot.rounds:
            found = {_digits(number, self.num_clients) for number in set(slot.value.tolist())}
            if len(found) > 1:
                raise Violation(f"key {slot.key!r}: elements of one chunk differ: {sorted(found)}")
            counts = found.pop() if found else ()
            self._counted[slot] = slot.rounds, counts
        return counts

    def check_chains(self) -> None:
        """When all is quiet, every part is held as often as it should be, by servers that are equally far."""
        chains = self._cluster.scheduler._chains
        assert chains is not None
        for number, chain in enumerate(chains.chains):
            if len(chain.members) != min(self._replicas + 1, len(chains.alive)) or chain.joiner >= 0:
                raise Violation(f"part {number} is held by {chain} when all is well again")
            far = {self._cluster.processes[server].state.parts[number].seq for server in chain.members}
            if len(far) > 1:
                raise Violation(f"part {number}: the logs of its servers end at {sorted(far)}")


def _bits(first: int, last: int) -> int:
    """The set of the steps ``first`` .. ``last``."""
    return (1 << last + 1) - (1 << first) if last >= first else 0


@cache
def _digits(number: float, num_clients: int) -> tuple[int, ...]:
    """How many pushes of each client are in an element. Jobs have few different ones."""
    if not number.is_integer() or number < 0:
        raise Violation(f"{number} is no sum of pushes")
    return tuple(int(number) // BASE**client % BASE for client in range(num_clients))


def _is_less(digits: tuple[int, ...], than: tuple[int, ...]) -> bool:
    """Whether there are fewer pushes of any client."""
    return any(map(lt, digits, than))
