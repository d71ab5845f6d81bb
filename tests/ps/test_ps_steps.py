"""Where another process of a client goes on, and which of its pushes are repetitions, against what the program does."""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest

from kvmpi.ps.steps import Found, Mark, Steps, Track, Turn, position


class Pushed(NamedTuple):
    """A push as servers see it: which of its key, and what comes with it."""

    key: str
    number: int
    at: int
    done: int


class Program:
    """Pushes ``keys`` in their order, each in every so many steps from one on; "often" in all of them."""

    def __init__(self, seed: int) -> None:
        self.choose = random.Random(seed)
        self.every = {key: (self.choose.choice([1, 2, 3, 4, 50]), self.choose.randrange(4)) for key in "abc"}
        self.every["often"] = (1, 0)
        self.keys = self.choose.sample(sorted(self.every), len(self.every))

    def keys_of(self, step: int) -> list[str]:
        """What is pushed in step 1, 2, ..."""
        return [key for key in self.keys if self.nth(key, step) > self.nth(key, step - 1)]

    def nth(self, key: str, step: int) -> int:
        """How often a key is pushed up to a step."""
        every, first = self.every[key]
        return max(0, (step - 1 - first) // every + 1)


class Process:
    """One process of a client, which pushes without waiting, but for each key's pushes for each other."""

    def __init__(self, program: Program, found: dict[str, Found]) -> None:
        self.steps, self.program = Steps(counts=True), program
        self.position = position(found.values())
        self.steps.begin_after(self.position)
        self.tracks = {key: Track() for key in program.every}
        self.sent: dict[str, int] = {}
        for key, one in found.items():
            self.tracks[key].found = one
            self.sent[key] = one.up_to(self.position)
        self.under_way: dict[str, Turn] = {}

    def push(self, key: str) -> Pushed:
        if key in self.under_way:
            self.end(key)
        track = self.tracks[key]
        (turn,) = self.steps.take({key: track})
        self.sent[key] = track.begin(self.sent.get(key, 0)) + 1
        self.under_way[key] = turn
        return Pushed(key, self.sent[key], turn.at, self.steps.done())

    def end(self, key: str) -> None:
        self.steps.end(self.tracks[key], self.under_way.pop(key), used=True)


class Servers:
    """What lasts of each key, in two chunks."""

    def __init__(self) -> None:
        self.pushed: dict[tuple[str, int], list[Pushed]] = {}
        self.marks: dict[tuple[str, int], Mark] = {}

    def add(self, push: Pushed, chunk: int) -> None:
        there = self.pushed.setdefault((push.key, chunk), [])
        if push.number == len(there) + 1:
            there.append(push)
            self.marks.setdefault((push.key, chunk), Mark()).note(push.at, push.done)
        assert push.number <= len(there), "a client pushes step by step"

    def count(self, key: str) -> int:
        return max(len(self.pushed.get((key, chunk), [])) for chunk in (0, 1))

    def found(self, key: str) -> Found:
        merged = None
        for chunk in (0, 1):
            count = len(self.pushed.get((key, chunk), []))
            mark = self.marks.get((key, chunk), Mark())
            merged = Found(count, mark.numbered(count), mark.done).merged(merged)
        assert merged is not None
        return merged


@pytest.mark.parametrize("block", range(10))
def test_a_process_repeats_what_is_missing_and_nothing_else(block: int) -> None:
    """A client is lost again and again, at any moment, with any of its pushes under way."""
    for seed in range(200 * block, 200 * block + 200):
        program, servers = Program(seed), Servers()
        choose, last, known = program.choose, 0, 0
        for _ in range(4):
            process = Process(program, {key: servers.found(key) for key in program.every})
            assert known <= process.position <= last or process.position == 0 == known // 2, f"seed {seed}"
            losable: list[tuple[Pushed, int]] = []
            waited = 0
            for step in range(process.position + 1, process.position + 1 + choose.randrange(6)):
                fresh = False
                for key in program.keys_of(step):
                    losable = [(push, chunk) for push, chunk in losable if push.key != key or servers.add(push, chunk)]
                    push = process.push(key)
                    fresh |= push.number > servers.count(key)
                    assert push.number == program.nth(key, step), f"seed {seed}: {push} in step {step}"
                    chunks = [0, 1]
                    choose.shuffle(chunks)
                    losable += [(push, chunk) for chunk in chunks]
                    last = step
                    while losable and choose.random() < 0.7:
                        push, chunk = losable.pop(choose.randrange(len(losable)))
                        servers.add(push, chunk)
                        if not any(other.key == push.key for other, _ in losable) and push.key in process.under_way:
                            process.end(push.key)
                if choose.random() < 0.5:
                    for push, chunk in losable:
                        servers.add(push, chunk)
                    losable.clear()
                    for key in list(process.under_way):
                        process.end(key)
                    known, waited = max(known, (waited - 1) * fresh), step


def test_a_push_that_has_failed_is_not_over_until_it_was_made_again() -> None:
    steps, often, seldom = Steps(counts=True), Track(), Track()
    failed = steps.take({"k": seldom})[0]
    steps.end(seldom, failed, used=False)
    for _ in range(3):
        steps.end(often, steps.take({"k": often})[0], used=True)
    turn = steps.take({"k": often})[0]
    assert (turn.step, steps.done()) == (4, 0)
    again = steps.take({"k": seldom})[0]
    assert (again.step, seldom.number) == (4, 1)
    steps.end(seldom, again, used=True)
    assert steps.done() == 3


def test_a_push_that_is_made_again_begins_the_step_that_it_began() -> None:
    """Else the process after this one would take its next push of that key for a repetition."""
    steps, key, other = Steps(counts=True), Track(), Track()
    for used in (False, False, True):
        (turn,) = steps.take({"k": key})
        assert turn.at == -1
        steps.end(key, turn, used=used)
        if other.number == 0:
            assert steps.take({"o": other})[0].at == 1
    assert steps.take({"k": key})[0].at == -2


def test_nothing_is_counted_where_nobody_waits_for_a_client() -> None:
    steps, track = Steps(counts=False), Track()
    assert [steps.take({"k": track})[0].step for _ in range(3)] == [0, 0, 0]
    assert steps.done() == 0


def test_a_chunk_keeps_few_steps() -> None:
    mark = Mark()
    for step in range(1, 1000):
        mark.note(step, step - 1)
    assert mark.numbered(999) == {998: 998, 999: 999}
    for step in range(1000, 3000):  # something else is never done
        mark.note(step, 998)
    assert mark.numbered(2999) == {step: step for step in range(2999 - 1023, 3000)}
    assert mark.done == 2999 - 1023, "what is older is given up"


def test_a_key_of_which_no_steps_are_known_is_pushed_in_every_step() -> None:
    often, seldom = Found(9, {}, 0), Found(7, {}, 0)
    assert position([often, seldom]) == 7
    assert [key.up_to(7) for key in (often, seldom)] == [7, 7]
    assert [key.before(7, 7) for key in (often, seldom)] == [7, 7], "the first of a step"
    assert [key.before(8, 7) for key in (often, seldom)] == [7, 7], "and another"
