"""Which step of its program each push of a client belongs to, so that another process of it finds where to go on.

A program pushes some keys in every step and others in some steps only, and only the program knows in which. So each
push says its **overall step**: the most pushes of any key, itself included. It also says up to which overall step all
of the client's pushes are **done**, as they stay then. Servers keep both, and nothing has to be guessed of what they do
not have.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Mapping

import msgspec

from kvmpi.ps.order import UNSAID, Order, Span
from kvmpi.wire.entries import Key

#: So many pushes of a client are remembered in a chunk. One that is older and not done never will be.
_MOST_KEPT = 1024


def finds_position(mode: str, on_client_loss: str) -> bool:
    """Whether another process of a client finds how far the one before it was, and goes on from there.

    In a store ``mode``: "sync", or any without rounds. Where others go on without it and there are no rounds, it begins
    anew.
    """
    return on_client_loss == "wait" or (mode == "sync" and on_client_loss == "shrink")


class Mark:
    """What a chunk keeps of one client's pushes: the overall steps of the last ones, and what is done of all keys.

    A step is negative where the push has begun it: no key was pushed so often before. Steps before those that are done
    are not kept: no process goes on before them.
    """

    __slots__ = ("done", "steps")

    def __init__(self, done: int = 0, steps: Collection[int] = ()) -> None:
        self.done, self.steps = done, list(steps)

    def note(self, step: int, done: int) -> None:
        """One push more lasts."""
        self.done = max(self.done, done)
        self.steps.append(step)
        if len(self.steps) > _MOST_KEPT:
            self.done = max(self.done, abs(self.steps[1]))
        while len(self.steps) > 1 and abs(self.steps[0]) < self.done:
            del self.steps[0]

    def numbered(self, last: int) -> dict[int, int]:
        """By number of the push its overall step; the last one has number ``last``."""
        return dict(enumerate(self.steps, last - len(self.steps) + 1))


class Found:
    """What servers have of one key's pushes by a process before this one, from all chunks of the key.

    Where somebody has not said to which steps pushes belong, the key is taken for one that is pushed in every step.

    Attributes:
        count: pushes that last in every chunk.
        last: overall step of the last of these; 0 if there is none.
        done: overall step up to which nothing of any key is missing.
    """

    __slots__ = ("_begun", "_steps", "count", "done", "last")

    def __init__(self, count: int, steps: Mapping[int, int], done: int) -> None:
        self.count, self.done = count, done
        self.last = abs(steps.get(count, 0)) if steps else count
        self._steps = {number: abs(step) for number, step in steps.items()}
        self._begun = max((-step for step in steps.values()), default=0)  # the last step that began with this key

    def merged(self, other: Found | None) -> Found:
        """With what there is of another chunk."""
        if other is None:
            return self
        fewest = min(self, other, key=lambda found: found.count)
        merged = Found(fewest.count, {**self._steps, **other._steps}, max(self.done, other.done))
        merged.last, merged._begun = fewest.last, max(self._begun, other._begun)
        return merged

    def up_to(self, step: int) -> int:
        """How many pushes there are up to the overall step ``step``, in some chunk at least."""
        if not self._steps:
            return min(self.count, step)
        return max((number for number, at in self._steps.items() if at <= step), default=min(self._steps) - 1)

    def before(self, step: int, position: int) -> int:
        """How many come before the first push of the process that goes on after ``position``, made at ``step``.

        Keys come in the same order in every step. So if this push comes before those that begin steps, and the key has
        one of this very step, it came before them as well: its push is made again.
        """
        begins_next = step == position and (not self._steps or self._steps.get(step) == step <= self._begun)
        return self.up_to(step if begins_next else step - 1)


def position(found: Collection[Found]) -> int:
    """The overall step after which a process goes on, so that no push is missing before: as far as is known.

    Each client's pushes of a key last in their order. So nothing is missing up to the step that the last pushes of all
    keys have come to; nor is it up to one that the client itself knew to be done. After a single step nobody can say
    which of its keys are pushed in every step, with one of which the next begins: such a process begins anew.
    """
    after = max(max((key.done for key in found), default=0), min((key.last for key in found), default=0))
    return after if after > 1 else 0


class Turn(msgspec.Struct, eq=False):
    """A push has its place among all of a client.

    Attributes:
        step: its overall step; 0 where nobody wants to know.
        at: the same as servers keep it: negative if the push begins that step.
        begun: whether it has been sent.
        kept: the program's call has returned, and it does not make the push again: if nobody answers in time, all the
            same it is one, and goes on until it has come. Its memory stays unchanged until then.
        span: the steps that it may belong to, for snapshots.
    """

    step: int = 0
    at: int = 0
    begun: bool = False
    kept: bool = False
    span: Span = UNSAID


class Track:
    """How far the program is with one key, though its pushes may wait for each other.

    Attributes:
        found: pushes by processes before this one, until the program has pushed itself.
        number: of the last push that has a turn.
    """

    __slots__ = ("_before", "failed", "found", "number")

    def __init__(self) -> None:
        self.found: Found | None = None
        self.number = 0
        self.failed: Turn | None = None
        self._before: int | None = None

    def go_on(self, before: int) -> None:
        """The first push of this process has a turn: the one after number ``before``."""
        self.found, self.number, self._before = None, before, before

    def begin(self, steps: int) -> int:
        """A push is sent, as it seems after so many; after how many it really is."""
        before, self._before = self._before, None
        return steps if before is None else before


class Steps:
    """The overall steps of one process of a client. Turns are taken in program order, and may end in any thread.

    Args:
        counts: whether anybody wants to know; else all this costs nothing.
        finds: whether a process finds by these steps where to go on; else it does by how often keys were pushed.
    """

    def __init__(self, *, counts: bool, finds: bool = True) -> None:
        self.counts, self.finds = counts, finds and counts
        self._lock = threading.Lock()  # guards all below, and tracks
        self._step = self._position = 0
        self._under_way: Counter[int] = Counter()
        self._order = Order()

    def begin_after(self, step: int) -> None:
        """Go on where the process before has stopped."""
        self._step = self._position = step

    def take(self, tracks: Mapping[Key, Track], clock: int = 0) -> list[Turn]:
        """The program pushes some keys with one call, and has done ``clock`` iterations if it counts them."""
        with self._lock:
            turns = [self._take(track) for track in tracks.values()]
            if self.counts and turns:
                span = self._span(dict(zip(tracks, turns, strict=True)), tracks, clock)
                for turn in turns:
                    turn.span = span
            return turns

    def _span(self, turns: Mapping[Key, Turn], tracks: Mapping[Key, Track], clock: int) -> Span:
        """To which steps a call belongs. One that makes pushes again which have failed: to the same, unless these are
        over; in the order of all pushes they had their places the first time."""
        failed = (track.failed.span for track in tracks.values() if track.failed is not None)
        again = next((span for span in failed if span.latest >= self._step), None)
        if again is not None:
            turns = {key: turn for key, turn in turns.items() if tracks[key].failed is None}
            if not turns:
                return again
        begins = next((key for key, turn in turns.items() if turn.at < 0), None)
        full = [key for key in turns if tracks[key].number == self._step]
        noted = self._order.note([*turns], self._step, begins=begins, full=full, clock=clock)
        return again or noted

    def _take(self, track: Track) -> Turn:
        if (found := track.found) is not None:
            track.go_on(found.before(self._step, self._position) if self.finds else found.count)
        track.number += 1
        if not self.counts:
            return Turn()
        begins = track.number > self._step
        self._step = max(self._step, track.number)
        failed = track.failed
        if failed is not None and failed.span.latest >= self._step:
            # Made again in the same step: it may have reached servers before, and is in its place there.
            self._under_way[failed.step] += 1
            return Turn(failed.step, failed.at)
        self._under_way[self._step] += 1
        return Turn(self._step, -self._step if begins else self._step)

    def done(self, *, ends: bool = False) -> int:
        """The overall step up to which all pushes are over, and the next has begun, or is about to; or there is none,
        since the program ``ends``."""
        if not (self.counts or ends):
            return self._position
        with self._lock:
            return min(self._under_way, default=self._step + 1 if ends else max(self._step, self._position + 1)) - 1

    def end(self, track: Track, turn: Turn, *, used: bool) -> None:
        """A push is over; unless it was ``used``, the next one of its key takes its place."""
        with self._lock:
            if used:
                self._release(turn)
                if track.failed is not None:
                    self._release(track.failed)
                    track.failed = None
                return
            track.number -= 1
            if track.failed is None:
                track.failed = turn  # not over until it was made again
            else:
                self._release(turn)

    def _release(self, turn: Turn) -> None:
        if turn.step:
            self._under_way[turn.step] -= 1
            if not self._under_way[turn.step]:
                del self._under_way[turn.step]
