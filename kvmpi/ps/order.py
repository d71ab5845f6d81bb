"""To which step of its program a push belongs, as far as the order of all pushes tells.

The **overall step** of a push (``steps.py``) only says which key has been pushed most by then. A key that is pushed in
some steps only and comes between the last key of one step and the first of the next may belong to either: the program
knows, and its pushes look the same. What tells is:

- A call with several keys belongs to one step; which of them is named first tells nothing.
- ``kv.clock()``, if the program calls it in every step.
- A process begins with the first push of a step, and pushes its keys in the same order in every step. So a key is known
  to come early in a step if it came before one that has been pushed in every step since, and late in it if such a key
  came after it. That a key which has been pushed as often as any other was pushed in the same steps is taken for true,
  but not of the first step of a process, nor of the second if the call that began the first had the key; nor where the
  clock has moved before it, and not between it and the key that begins the next step.

Where nothing tells, a push says both steps, and a snapshot that would have to know is not taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvmpi.wire.entries import Key


class Span(NamedTuple):
    """A push belongs to one of the steps ``earliest`` .. ``latest``, of which there is at most one more than one.

    0: nobody has said.
    """

    earliest: int = 0
    latest: int = 0


UNSAID = Span()


def common(spans: Sequence[Span], otherwise: int) -> Span:
    """The steps to which a round belongs whose pushes belong to ``spans``.

    All clients run the same program, and some may know more than others. If they contradict each other, it is all that
    any of them says; ``otherwise``, if somebody has said nothing.
    """
    if len(spans) == 1 and spans[0].earliest:  # which most rounds of one client have
        return spans[0]
    if not spans or UNSAID in spans or not all(span.earliest for span in spans):
        return Span(otherwise, otherwise)
    earliest, latest = max(span.earliest for span in spans), min(span.latest for span in spans)
    if earliest > latest:
        earliest, latest = min(span.earliest for span in spans), max(span.latest for span in spans)
    return Span(earliest, latest)


class Order:
    """The order of one client's pushes.

    Calls are told in program order, with the overall step that they end in. The key that **begins** a step is the first
    in it that is pushed in every step, and so are the **full** ones.
    """

    def __init__(self) -> None:
        self._beginner: Key | None = None
        # What was pushed since, and how much of that belongs to the same step for certain; whether the next has begun.
        self._since: list[Key] = []
        self._certain = 0
        # Of these, the keys of the call that began the step: which of them comes first tells nothing.
        self._beside: set[Key] = set()
        self._began_with: set[Key] = set()  # the same of the first step of the process
        self._is_next = False
        # The place there of the first since the clock has moved; 0: it has not.
        self._iteration, self._last_clock = 0, 0
        # The full keys of this step and of the one before.
        self._full: set[Key] = set()
        self._were_full: set[Key] = set()
        # Which keys come before the beginner in a step, and which between it and a full one; whether some do both.
        self._early: set[Key] = set()
        self._late: set[Key] = set()
        self._varies = False
        # The training clock at the last push that belongs to the step for certain; whether it moves in every step.
        self._clock = 0
        self._ticks, self._num_begun = True, 0

    def note(self, keys: Sequence[Key], step: int, *, begins: Key | None, full: Sequence[Key], clock: int) -> Span:
        """A call pushes ``keys``.

        Args:
            begins: the one of them that begins ``step``.
            full: those that have been pushed as often as there are steps.
        """
        if clock != self._last_clock:
            self._iteration, self._last_clock = len(self._since), clock
        if begins is not None:
            self._begin(begins, clock)
            self._since, self._certain, self._is_next, self._iteration = list(keys), len(keys), False, 0
            self._beside = set(keys)
            self._began_with = self._began_with or self._beside
            self._full.update(full)
            return Span(step, step)
        self._since += keys
        if self._beginner is None:
            return Span(step + 1, step + 1)
        is_next = True if self._is_next else self._look(keys, None if full else clock)
        if full and not is_next and self._early.isdisjoint(keys):
            self._certain = len(self._since)
            self._full.update(full)
            if self._num_begun > 2 or (self._num_begun > 1 and self._began_with.isdisjoint(keys)):
                self._clock, is_next = clock, False
        if is_next is None:
            return Span(step, step + 1)
        self._is_next = is_next
        return Span(step + is_next, step + is_next)

    def _look(self, keys: Sequence[Key], clock: int | None) -> bool | None:
        """Whether a call that does not begin a step belongs to the next one all the same; None: nothing tells.

        Args:
            clock: None: one step may have several iterations, in which different keys are pushed.
        """
        all_here = self._were_full <= self._full | self._early
        if clock is not None and self._ticks and self._num_begun > 1 and all_here:
            return clock > self._clock
        if self._varies:
            return None
        if not self._early.isdisjoint(keys):
            return True if all_here else None
        return None if self._late.isdisjoint(keys) else False

    def _begin(self, key: Key, clock: int) -> None:
        """Another step begins, with ``key``: the order of the one before it is known."""
        done, ahead = self._since[: self._certain], list[Key]()
        if self._iteration:  # what came just before, of the same iteration, was of this step already
            done, ahead = done[: self._iteration], done[self._iteration :]
            self._full.difference_update(ahead)
        if not self._were_full <= self._full:
            self._late.clear()  # what was seen before keys that are not full any more
        if self._beginner is None:
            self._early = set(self._since)
        elif key == self._beginner:
            after = set(done) - self._beside
            self._varies |= not self._early.isdisjoint(after)
            self._late |= after
        else:  # the one that has begun steps is not full any more
            at = done.index(key) if key in done and key not in self._beside else len(done)
            self._early, self._late = set(done[:at]) if at < len(done) else set(), set(done[at:])
        self._early.update(ahead)
        if self._num_begun:
            self._ticks &= clock > self._clock
        self._were_full, self._full = self._full, set()
        self._beginner, self._clock = key, clock
        self._num_begun += 1
