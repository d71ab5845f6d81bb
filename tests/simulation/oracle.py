"""What must hold in a simulated job after every step of it, computed apart from the code that is under test.

A push adds ``BASE ** client`` to every element, so that a value tells how often each client's pushes are in it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache
from operator import lt
from typing import Any

import numpy as np
from simulation.cluster import NO_PART, Cluster, SimulatedServer
from simulation.network import Violation
from simulation.past import Interval, Pair, Past
from simulation.plan import KEYS, MOST_CLIENTS, Plan

from kvmpi.kernels.rows import Rows
from kvmpi.ps.part import Part
from kvmpi.ps.slot import Slot
from kvmpi.ps.snapshots import ChunkCopy, PartCopy
from kvmpi.wire import messages as m

#: Larger than the pushes of a client in all lives of a job, so that digits do not run over; with 4 clients float32 is
#: still exact.
BASE = 64

#: What was counted in a chunk that nobody has looked at.
_NEVER: tuple[int, Counts] = (-1, ())
#: Of a part that nobody has looked at.
_UNSEEN = (-1, -1)

Touches = tuple[int, ...]
"""By client, which of its pushes of a key have some elements: a set of steps."""
Counts = tuple[tuple[Touches, tuple[int, ...]], ...]
"""Which pushes the elements of a chunk have, and how many of each client's are in them."""


class Oracle:
    """Which pushes were begun, and of which a client was told the end; what the values may be because of them.

    Sets of steps are bits of an int: bit s is step s. Of a key that is pushed in some steps only these alone count, as
    step 1, 2, ... of the key.

    Args:
        past: the snapshot that the job goes on from.
        staleness: by how many pushes who reads may be ahead of others; None: of any number.
        slack: how many pushes of a chunk may wait for others, without which they are no update.
    Attributes:
        gone: clients that rounds go on without, or may.
        num_done: how many pushes clients were told the end of.
    """

    def __init__(
        self, cluster: Cluster, plan: Plan, past: Past | None = None, staleness: int | None = None, slack: int = 0
    ) -> None:  # fmt: skip
        self._staleness, self._slack = staleness, slack
        # Clients whose places others may pass: they have done their steps, or were lost where nobody waits for them.
        self._passable: set[int] = set()
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
        self._seen: dict[tuple[int, Any], dict[int, tuple[int, ...]]] = {}
        # By client, key, chunk: which process of it was sent which version.
        self._versions: dict[tuple[int, Any, int], tuple[int, int]] = {}
        # By chunk: after which round it was counted, and what. By part: the last entry of its log and the version of
        # its chain when it was looked at.
        self._counted: dict[Slot, tuple[int, Counts]] = {}
        self._looked_at: dict[Part, tuple[int, int]] = {}
        # By key: of each element, which pushes have it; and where chunks begin.
        self._touches = {
            key: [*zip(*(plan.touches(client, key) for client in last_steps), strict=True)] for key in KEYS
        }
        self._starts: dict[Any, list[int]] = {} if past is None else {**past.starts}
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

    def end(self, client: int) -> None:
        """A client has done its steps."""
        self._passable.add(client)

    def told(self) -> dict[tuple[int, Any], int]:
        """Of which pushes anybody has been told the end by now, for ``check_read``."""
        return dict(self._done)

    def note_chunks(self, key: Any, starts: list[int]) -> None:
        """The elements with which the chunks of a key begin, for all clients."""
        if self._starts.setdefault(key, starts) != starts:
            raise Violation(
                f"the chunks of key {key!r} begin at {starts} for one client, {self._starts[key]} for another"
            )

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
        self._passable.add(client)
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

    def may_have_lost(self, client: int) -> bool:
        """Whether nobody was told the end of a push that a client has begun."""
        return any(self._begun[client, key] & ~self._done[client, key] for key in self._keys)

    def last_begun(self, client: int) -> int:
        """The last step of which a client has pushed anything."""
        return max(self._begun[client, key].bit_length() - 1 - self._shift[client] for key in self._keys)

    def _bounds(self, client: int, key: Any, rounds: int, touches: int = -1) -> tuple[int, int]:
        """How often pushes of a client are in a value after so many synchronous rounds, at least and at most.

        Args:
            touches: of those that have the elements in question.
        """
        mask = _bits(1, rounds) & touches
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
            mark = min(self._least_mark(number), self._saves_done)
            return Past(number, begun, done, mark=mark, starts=self._starts)
        written = self._written[number]
        fewest = min(done for part in written.values() for done, _ in part.values())
        step = self._resumed_step + fewest
        return Past(number, step=step, written=written, base=dict(self._base), before=self._past, starts=self._starts)

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
        for touches, counts in self._count(where, chunk.key, chunk.chunk, chunk.arrays["value"]):
            for client, count in enumerate(counts):
                least, most = self._bounds(client, chunk.key, rounds, touches[client])
                if not least <= count <= most:
                    raise Violation(f"{where} holds {count} pushes of client {client}, {least} to {most} expected")

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
        rows: np.ndarray | None = None, later: bool = False, stale: bool = False, met: bool = False,
        pushed: int = 0,
    ) -> None:  # fmt: skip
        """What a client reads after its ``step``-th push, and after anybody was ``told`` of the end of some pushes.

        It may be ``later`` than that: who has nothing more to push reads on, who repeats a step reads what is there.
        One that was stopped may have a ``stale`` value, while another process in its place has pushed. What a push has
        ``met`` is what was there before it. ``rows``: what it reads if that is not all. ``pushed``: how often this
        process has pushed the key, with those before it if it goes on where they were.
        """
        where = f"client {client} reads {key!r} after step {step}"
        which = (np.arange(value.size) if rows is None else rows).tolist()
        numbers = value[which].tolist()
        if not self._additive:
            if np.isnan(numbers).any():
                raise Violation(f"{where}: not filled")
            return
        ahead = later or self._cluster.config.on_client_loss == "shrink"
        most = self._saves_begun if ahead else self._plan.saves_before(max(step, self._resumed + 1))
        # Where all were lost before one of them had done it, those that are back may go on behind it.
        self._check_marks(where, numbers, min(self._least_mark(step), self._saves_done), most)
        elements = {element: _digits(number, self.num_clients) for element, number in zip(which, numbers, strict=True)}
        by_touches: dict[Touches, set[tuple[int, ...]]] = {}
        for element, digits in elements.items():
            by_touches.setdefault(self._touches[key][element], set()).add(digits)
        for touches, found in by_touches.items():
            expected = [0] * self.num_clients
            for other in range(self.num_clients):
                counts, of_other = sorted({digits[other] for digits in found}), touches[other]
                if self._sync:
                    least, most = self._bounds(other, key, self._pushes(key, step) - met, of_other)
                    most = self._weigh(key, self._begun[other, key] & of_other) if later else most
                    if counts[-1] > most or counts[0] < least:
                        raise Violation(
                            f"{where}: rounds hold {counts} pushes of client {other}, {least} to {most} expected"
                        )
                    continue
                before, before_most = self._from_snapshot(other, key)
                this = self._bit(client, key, step) if met and other == client else 0
                # Of what a process before this one has pushed some chunks know no more what it has met.
                most = before_most + (self._begun[other, key] & of_other & ~(0 if later else this)).bit_count()
                known = (told.get((other, key), 0) & of_other).bit_count()
                expected[other] = before + known
                if counts[0] < before + known - self._slack:
                    raise Violation(f"{where}: {counts} pushes of client {other}, who knew of {before} + {known}")
                if self._staleness is not None and not met and other != client and other not in self._passable:
                    first = self._pushes(key, self._resumed_step) + 1
                    near = before + (_bits(first, first - 1 + pushed - self._staleness) & of_other).bit_count()
                    if counts[0] < near:
                        raise Violation(
                            f"{where}, its push {pushed}: {counts} pushes of client {other}, whose first {near} must "
                            f"be there: a reader may be ahead by {self._staleness}"
                        )
                own = self._done[other, key] & of_other & ~this if other == client and not stale else 0
                least = before + own.bit_count() if own else 0
                expected[other] = max(expected[other], least)
                if counts[0] < least - self._slack or counts[-1] > most:
                    raise Violation(f"{where}: {counts} pushes of client {other}, {least} to {most} expected")
            for digits in found if self._slack else ():
                lacks = sum(max(0, least - count) for least, count in zip(expected, digits, strict=True))
                if lacks > self._slack:
                    raise Violation(f"{where}: {digits} pushes, {expected} expected: {self._slack} of them may wait")
        if self._sync or stale:
            return
        fewest = self._resumed_step * self.num_clients - self._slack
        if any(sum(digits) < fewest for digits in elements.values()):
            raise Violation(f"{where}: {elements} pushes, fewer than in the {self._resumed_step} steps before")
        seen = self._seen.setdefault((client, key), {})
        if any(_is_less(digits, seen.get(element, digits)) for element, digits in elements.items()):
            raise Violation(f"{where}: {elements} pushes, it has seen {seen}: time goes back")
        seen |= elements

    def check_changed(self, client: int, key: Any, rows: Iterable[int], step: int, *, repeats: bool) -> None:
        """The rows that a fused push of rows is answered with: all that its round has changed, its own at least."""
        own, there = self._plan.rows(client, key, step), set(rows)
        assert own is not None
        push = 1 << self._pushes(key, step)
        needed = {
            element for element, touches in enumerate(self._touches[key])
            if any(touches[other] & self._needed[other, key] & push for other in range(self.num_clients))
        } if self._sync and not repeats else set()  # fmt: skip
        if missing := (needed | {*own}) - there:
            raise Violation(f"client {client} is not told of rows {sorted(missing)} of {key!r} in step {step}: {there}")

    # ---- what servers have

    @property
    def is_told(self) -> bool:
        """Whether a client was told the end of a push since servers were checked."""
        return bool(self._told)

    def check_servers(self, process: SimulatedServer | None) -> None:
        """After something has happened to a server, or to another process."""
        if not self._additive:
            return
        if self._told:
            told, self._told = self._told, set()
            for each in self._cluster.processes.values():
                self._check_parts(each.rank, each.state.parts.values(), told)
        elif process is not None:
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
                if told is not None and slot.key not in told and self._counted.get(slot, _NEVER)[0] == _progress(slot):
                    continue
                where = f"server {server}, part {part.number}, key {slot.key!r}"
                self._check_marks(where, slot.value.tolist(), self._saves_done, self._saves_begun)
                if not self._sync and self._past is not None:
                    self._num_chunks[slot.key] = shard.layouts[slot.key].num_chunks
                for touches, counts in self._counts_of(slot):
                    for client, count in enumerate(counts):
                        least, most = self._in_slot(part.number, slot, client, touches[client], count)
                        if not least <= count <= most:
                            told_of = self._weigh(slot.key, self._done[client, slot.key] & touches[client])
                            raise Violation(
                                f"{where}: {count} pushes of client {client} after {slot.rounds} rounds, {most} were "
                                f"begun and {least} must be there: it was told of {told_of}"
                            )

    def _in_slot(self, part: int, slot: Slot, client: int, touches: int, count: int) -> Interval:
        """How many pushes of a client may be in elements of a chunk that have ``count``."""
        where = client, slot.key
        if self._sync:
            # Without replicas a push is acknowledged in its round, which may still be open.
            before = self._pushes(slot.key, self._resumed)
            least, most = self._bounds(*where, before + slot.rounds, touches)
            if self._replicas:
                least = max(least, self._weigh(slot.key, self._done[where] & touches))
            return least, most
        if self._past is not None:
            return self._narrow(part, slot, client, count)
        return (self._done[where] & touches).bit_count(), (self._begun[where] & touches).bit_count()

    def _counts_of(self, slot: Slot) -> Counts:
        """How many pushes of each client are in a chunk, or wait for others there; looked at once for each round."""
        progress, counts = self._counted.get(slot, _NEVER)
        if progress != _progress(slot):
            where, value = f"key {slot.key!r}", slot.value
            if slot.gathered:
                if slot.gathered > self._slack:
                    raise Violation(f"{where}: {slot.gathered} pushes wait for others, {self._slack} may")
                value = slot.value.copy()
                if isinstance(slot.accumulator, Rows):
                    value[slot.accumulator.ids] += slot.accumulator.values[:, 0]
                else:
                    value += slot.accumulator
            counts = self._count(where, slot.key, slot.chunk, value)
            self._counted[slot] = _progress(slot), counts
        return counts

    def _count(self, where: str, key: Any, chunk: int, value: np.ndarray) -> Counts:
        """How many pushes of each client are in the elements of a chunk."""
        numbers = value.tolist()
        if not numbers:
            return ()
        start = self._starts[key][chunk]
        found: dict[Touches, set[float]] = {}
        for touches, number in zip(self._touches[key][start : start + len(numbers)], numbers, strict=True):
            found.setdefault(touches, set()).add(number)
        if len(differ := max(found.values(), key=len)) > 1:
            raise Violation(f"{where}: elements of one chunk differ: {sorted(differ)}")
        return tuple((touches, _digits(number, self.num_clients)) for touches, (number,) in found.items())

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


def _progress(slot: Slot) -> int:
    """Grows with every round, and with every push that is gathered."""
    return slot.rounds + slot.pushes


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
