"""A network in memory with a clock of its own: messages are lost, repeated, late or cut off, and processes stop.

Everything is decided by one seed, so that what went wrong once goes wrong again.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
import random
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvmpi.engine import Work
from kvmpi.wire import Message, decode, encode

TICK_S = 0.1
_HEALTHY_DELAY_S = 0.001
#: So many times as long as others some copies are under way: much else has happened by then.
_LATE = 10.0
_NO_FRAMES: tuple[bytes, ...] = ()
Program = Generator[list[Work], None, None]
Inbox = Callable[[str, Message, list[memoryview]], None]


class Violation(AssertionError):
    """Something happened that must never happen."""


@dataclass
class Faults:
    """What happens to each message until the network heals, and how often anything happened.

    Attributes:
        bytes_per_s: what passes from one process to another; what is sent beyond waits for its turn.
    """

    bytes_per_s: float = math.inf
    drop: float = 0.0
    duplicate: float = 0.0
    delay_s: float = 0.001
    heal_s: float = 0.0
    fired: dict[str, int] = field(default_factory=dict)

    def count(self, name: str) -> None:
        self.fired[name] = self.fired.get(name, 0) + 1


@dataclass(slots=True)
class _Way:
    """From one process to another: when the last message arrives, and when the next may pass where that is limited."""

    from_server: bool
    in_order: bool
    last_s: float = 0.0
    free_at_s: float = 0.0


class Network:
    """Delivers messages between named processes, in the order of their arrival times, as ``run`` moves the clock.

    Attributes:
        cut: directions, (from, to) as names without incarnations, in which nothing passes.
        stopped: until when a process does nothing; what comes meanwhile waits.
        slow: until when a process is slow, and for how many seconds at most a message waits until it is taken.
        after_each_step: called with the name of the process that something has happened to.
    """

    def __init__(self, seed: int, faults: Faults) -> None:
        self.now_s = 0.0
        self.faults = faults
        self.seed, self.random = seed, random.Random(seed)
        self.cut: set[tuple[str, str]] = set()
        self.stopped: dict[str, float] = {}
        self.slow: dict[str, tuple[float, float]] = {}
        self.after_each_step: Callable[[str], None] = lambda name: None
        self._sequence = itertools.count()
        self._events: list[tuple[float, int, str, Callable[..., None], tuple[Any, ...]]] = []
        self._inboxes: dict[str, Inbox] = {}
        self._ticks: dict[str, Callable[[float], None]] = {}
        self._ways: dict[tuple[str, str], _Way] = {}
        self._coming = 0
        self._changed = True  # programs have begun, or were killed

    def attach(self, name: str, inbox: Inbox, tick: Callable[[float], None] | None = None) -> None:
        """``inbox(sender, message, payloads)`` is called for what arrives at ``name``, ``tick(now_s)`` now and then."""
        self._inboxes[name] = inbox
        if tick is not None:
            self._ticks[name] = tick

    def detach(self, name: str) -> None:
        """``name`` is dead: what is under way to it is lost."""
        self._inboxes.pop(name, None)
        self._ticks.pop(name, None)
        self.stopped.pop(name, None)

    def is_there(self, name: str) -> bool:
        """Whether a process of that name is alive."""
        return name in self._inboxes

    def was_stopped(self, name: str) -> bool:
        """Whether a process that is there has been stopped at least once."""
        return name in self.stopped

    def kill(self, name: str, programs: dict[str, Program]) -> None:
        """End a process that runs a program, where it is."""
        self.detach(name)
        programs.pop(name).close()
        self._changed = True

    def start_later(self, at_s: float, start: Callable[[], None]) -> None:
        """Start another process at that time; the job is not over before."""
        self._coming += 1

        def begin() -> None:
            self._coming -= 1
            self._changed = True
            start()

        self.at(at_s, begin)

    def send(
        self, source: str, target: str, message: Message, payloads: Sequence[np.ndarray], *, reliable: bool = False
    ) -> None:
        """Put a message on its way. ``reliable``: nothing happens to it but cuts, stops and death."""
        header = encode(message)
        now_s, random, faults = self.now_s, self.random.random, self.faults
        copies, delay_s, is_ill = 1, _HEALTHY_DELAY_S, now_s < faults.heal_s
        if is_ill and not reliable:
            delay_s = faults.delay_s
            if random() < faults.drop:
                faults.count("drop")
                return
            if random() < faults.duplicate:
                faults.count("duplicate")
                copies = 2
        if self.slow and target in self.slow:
            until_s, slow_s = self.slow[target]
            delay_s += slow_s if now_s < until_s else 0.0
        frames = [payload.tobytes() for payload in payloads] if payloads else _NO_FRAMES
        way = self._ways.get((source, target)) or self._way(source, target)
        if is_ill and faults.bytes_per_s < math.inf:
            nbytes = len(header) + sum(map(len, frames))
            now_s = self._take_turn(way, copies * nbytes / faults.bytes_per_s)
        # A socket reads lent memory when it gets round to it: what a server sends must not change until then.
        lent = payloads if payloads and way.from_server else ()
        what = source, target, header, frames, lent
        last_s, in_order = way.last_s, reliable or way.in_order
        for copy in range(copies):
            late = copy and not in_order and random() < 0.3
            at_s = now_s + delay_s * random() * (_LATE if late else 1.0)
            if late:
                faults.count("late copy")
            elif at_s < last_s:
                if in_order:
                    # What is lost with a connection is sent again in order; nothing overtakes on it.
                    at_s = last_s
                else:
                    faults.count("overtake")
            else:
                last_s = at_s
            heapq.heappush(self._events, (at_s, next(self._sequence), target, self._deliver, what))
        way.last_s = last_s

    def _way(self, source: str, target: str) -> _Way:
        from_server = source.startswith("server")
        found = self._ways[source, target] = _Way(from_server, from_server and target.startswith("server"))
        return found

    def _take_turn(self, way: _Way, seconds: float) -> float:
        """A message takes so long from its source to its target; when it has passed."""
        if way.free_at_s > self.now_s:
            self.faults.count("congestion")
        way.free_at_s = max(way.free_at_s, self.now_s) + seconds
        return way.free_at_s

    def _deliver(
        self, source: str, target: str, header: bytes, frames: Sequence[bytes], lent: Sequence[np.ndarray]
    ) -> None:
        if lent and [payload.tobytes() for payload in lent] != frames:
            raise Violation(f"{source} changed what it had lent to {target} in a {type(decode(header)).__name__}")
        if self.cut and (source.partition(".")[0], target.partition(".")[0]) in self.cut:
            self.faults.count("cut")
            return
        until_s = self.stopped.get(target)
        if until_s is not None and self.now_s < until_s:
            self.faults.count("stop")
            self.at(until_s, self._deliver, target, (source, target, header, frames, ()))
            return
        inbox = self._inboxes.get(target)
        if inbox is not None:
            inbox(source, decode(header), [memoryview(bytearray(frame)) for frame in frames] if frames else [])

    def at(self, at_s: float, event: Callable[..., None], name: str = "", arguments: tuple[Any, ...] = ()) -> None:
        """Call ``event``, which is something that happens to process ``name``, at that time."""
        heapq.heappush(self._events, (at_s, next(self._sequence), name, event, arguments))

    def pause(self, seconds: float) -> Work:
        """What a program waits for that does nothing for so long."""
        work = Work("a pause")
        self.at(self.now_s + seconds, work.finish)
        return work

    def run(self, programs: dict[str, Program], limit_s: float) -> None:
        """Run all programs to their ends. A program yields the Works that it waits for; their errors are thrown in it.

        Raises:
            Violation: a program still waits at ``limit_s``.
        """
        # What each program waits for, and those that can go on; the others need not be looked at after every event.
        waiting: dict[str, list[Work]] = {}
        ready: list[str] = []
        next_tick_s, self._changed = self.now_s, True
        while True:
            if self._changed:
                self._changed = False
                for name in waiting.keys() - programs.keys():
                    del waiting[name]  # it was killed
                for name in [name for name in programs if name not in waiting]:
                    waiting[name] = []  # it has been started
                    ready.append(name)
            while ready:
                name = ready.pop(0)
                if name not in programs:
                    continue
                failed = next((error for work in waiting[name] if (error := work.error()) is not None), None)
                try:
                    program = programs[name]
                    works = waiting[name] = next(program) if failed is None else program.throw(failed)
                except StopIteration:
                    del waiting[name], programs[name]
                else:
                    _when_done(works, functools.partial(ready.append, name))
            if not programs and not self._coming:
                return
            while not ready and not self._changed:
                next_tick_s = self._advance(next_tick_s)
                if self.now_s > limit_s:
                    raise Violation(f"still waiting at {limit_s} s: {waiting}")

    def rest(self, until_s: float) -> None:
        """Let time pass without programs."""
        next_tick_s = self.now_s
        while self.now_s < until_s:
            next_tick_s = self._advance(next_tick_s)

    def _advance(self, next_tick_s: float) -> float:
        """The next event, or the next tick of all; when the tick after that is."""
        if self._events and self._events[0][0] <= next_tick_s:
            self.now_s, _, name, event, arguments = heapq.heappop(self._events)
            event(*arguments)
            self.after_each_step(name)
            return next_tick_s
        self.now_s = next_tick_s
        for name, tick in list(self._ticks.items()):
            if name in self._ticks and self.now_s >= self.stopped.get(name, 0.0):
                tick(self.now_s)
                self.after_each_step(name)
        return next_tick_s + TICK_S


def _when_done(works: Sequence[Work], then: Callable[[], None]) -> None:
    """Call ``then`` when all of them are done, with or without errors."""
    left = 1 + len(works)

    def one_is_done(_: object = None) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            then()

    for work in works:
        work.add_done_callback(one_is_done)
    one_is_done()
