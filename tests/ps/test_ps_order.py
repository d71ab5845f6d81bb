"""To which steps of a program its pushes may belong, against what the program does."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from kvmpi.ps.order import Span, common
from kvmpi.ps.steps import Found, Steps, Track

OFTEN = "often"


class Program:
    """Pushes ``keys`` in their order, each in every so many steps from one on, in calls with one or several of them.

    Args:
        ticks: it counts its iterations.
        start: its first step is the one after that.
        fails: which of the calls since it has waited last it finds failed when it waits, and makes again.
        parts: which calls it makes as one for each of their keys, in that order.
    """

    def __init__(self, keys: list[str], every: dict[str, tuple[int, int]], calls: list[list[str]], *, ticks: bool,
                 start: int = 0, fails: random.Random | None = None,
                 parts: random.Random | None = None) -> None:  # fmt: skip
        self.keys, self.every, self.calls, self.ticks, self.start = keys, every, calls, ticks, start
        self.fails, self.parts = fails, parts

    @classmethod
    def random(cls, seed: int) -> Program:
        choose = random.Random(seed)
        keys = choose.sample([OFTEN, "a", "b", "c", "d"], 5)
        every = {key: (choose.choice([1, 2, 3, 5, 100]), choose.randrange(5)) for key in keys} | {OFTEN: (1, 0)}
        # A key that is pushed in every step but one looks like one that is pushed in every step.
        every = {key: (n, 0) if n == 1 else (n, first) for key, (n, first) in every.items()}
        calls, rest = [], keys
        while rest:
            size = choose.choice([1, 1, 1, 2, 3])
            calls, rest = [*calls, rest[:size]], rest[size:]
        fails = random.Random(f"{seed} fails") if seed % 2 else None
        parts = random.Random(f"{seed} parts") if seed % 3 == 0 else None
        return cls(keys, every, calls, ticks=choose.random() < 0.3, start=choose.randrange(6), fails=fails, parts=parts)

    def run(self, num_steps: int) -> Iterator[tuple[int, list[str], Span]]:
        """Each call: its step in this process, its keys, and what its pushes say."""
        steps, tracks, clock = Steps(counts=True), {key: Track() for key in self.keys}, 0
        for step in range(self.start + 1, self.start + 1 + num_steps):
            wanted = [
                [key for key in call if (step - 1) % self.every[key][0] == self.every[key][1]]
                for whole in self.calls
                for call in ([[key] for key in whole] if self.parts and self.parts.random() < 0.4 else [whole])
            ]
            while wanted:
                num_calls = self.fails.randint(1, len(wanted)) if self.fails else len(wanted)
                now, wanted, again, ends = wanted[:num_calls], wanted[num_calls:], [], []
                for pushed in filter(None, now):
                    turns = steps.take({key: tracks[key] for key in pushed}, clock)
                    (span,) = {turn.span for turn in turns}
                    yield step - self.start, pushed, span
                    used = {key: self.fails is None or self.fails.random() < 0.8 for key in pushed}
                    again.append([key for key in pushed if not used[key]])
                    ends += [(tracks[key], turn, used[key]) for key, turn in zip(pushed, turns, strict=True)]
                for track, turn, used in ends:
                    steps.end(track, turn, used=used)
                wanted = again + wanted
            clock += self.ticks


@pytest.mark.parametrize("block", range(10))
def test_a_push_belongs_to_one_of_the_steps_that_it_says(block: int) -> None:
    num_sharp = num_calls = 0
    for seed in range(200 * block, 200 * block + 200):
        program = Program.random(seed)
        for step, keys, span in program.run(25):
            assert span.earliest <= step <= span.latest <= span.earliest + 1, (
                f"seed {seed}: {keys} in step {step} say {span}; {program.every}, {program.calls}"
            )
            num_sharp += span.earliest == span.latest
            num_calls += 1
    assert num_sharp > 0.75 * num_calls, "little is gained by saying so little"


FIRST, LAST, MIDDLE = ["s", OFTEN, "z"], [OFTEN, "z", "s"], [OFTEN, "s", "z"]
SELDOM = {OFTEN: (1, 0), "z": (1, 0), "s": (3, 1)}


@pytest.mark.parametrize("keys", [FIRST, LAST, MIDDLE], ids=["first", "last", "middle"])
@pytest.mark.parametrize(("calls", "ticks"), [("alone", True), ("together", False), ("alone", False)])
def test_what_tells_to_which_step_a_key_belongs(keys: list[str], calls: str, ticks: bool) -> None:
    """One call with others, iterations that are counted, or another key after it: not when it is seen first."""
    program = Program(keys, SELDOM, [keys] if calls == "together" else [[key] for key in keys], ticks=ticks)
    said = [(step, span) for step, pushed, span in program.run(20) if "s" in pushed]
    if calls == "alone":
        assert said.pop(0)[1].earliest < 3
    for step, span in said:
        nothing_tells = calls == "alone" and not ticks and keys != MIDDLE
        expected = (step - 1, step) if keys == FIRST else (step, step + 1)
        assert span == (expected if nothing_tells else (step, step))


def test_what_was_seen_in_the_first_step_holds() -> None:
    """A key that came before all others then is the first of a step whenever it comes."""
    every = {**SELDOM, "s": (3, 0)}
    program = Program(FIRST, every, [[key] for key in FIRST], ticks=False)
    for step, pushed, span in program.run(20):
        if "s" in pushed:
            assert span == (step, step)


@pytest.mark.parametrize("keys", [FIRST, LAST, MIDDLE], ids=["first", "last", "middle"])
@pytest.mark.parametrize("misses", [1, 2])
def test_where_iterations_are_counted_a_key_may_begin_late(keys: list[str], misses: int) -> None:
    """Without that one that misses the first step alone looks like one that is pushed in all of them."""
    steps, tracks = Steps(counts=True), {key: Track() for key in keys}
    for step in range(1, 20):
        for key in keys:
            if key == "s" and step <= misses:
                continue
            (turn,) = steps.take({key: tracks[key]}, clock=step - 1)
            assert turn.span.earliest <= step <= turn.span.latest, f"{key} in step {step} says {turn.span}"
            assert turn.span == (step, step) or step <= misses + 1, f"{key} in step {step}"


def test_iterations_of_one_step_that_push_different_keys_are_of_that_step() -> None:
    """As where a program trains two models in turn, and counts iterations of each."""
    steps, tracks = Steps(counts=True), {key: Track() for key in "ab"}
    for step in range(1, 20):
        for i, key in enumerate("ab"):
            (turn,) = steps.take({key: tracks[key]}, clock=2 * step + i)
            assert turn.span == (step, step) or step == 1


@pytest.mark.parametrize("first", [1, 2, 3])
@pytest.mark.parametrize("goes_on", [False, True])
def test_a_later_iteration_of_a_step_may_push_a_key_that_is_not_in_all_of_them(first: int, goes_on: bool) -> None:
    """The clock has moved since the step began, and that does not tell: a key of every step is still to come."""
    steps, tracks, start = Steps(counts=True), {key: Track() for key in "abc"}, 6 * goes_on
    if goes_on:
        steps.begin_after(start)
        for key, found in (("a", {5: -5, 6: -6}), ("b", {5: 5, 6: 6}), ("c", {2: 3 + first})):
            tracks[key].found = Found(max(found), found, 5)
    for step in range(start + 1, start + 20):
        for i, keys in enumerate(["a", "cb"]):
            for key in keys:
                if key != "c" or step % 3 == first % 3:
                    (turn,) = steps.take({key: tracks[key]}, clock=2 * step + i)
                    assert turn.span.earliest <= step <= turn.span.latest, f"{key} in step {step} says {turn.span}"


def test_an_order_that_changes_tells_nothing() -> None:
    """What came before all others comes between them, and then after them."""
    steps, tracks = Steps(counts=True), {key: Track() for key in "sab"}
    said = {}
    for step, keys in enumerate(["sab", "ab", "asb", "abs", "ab"], start=1):
        for key in keys:
            (turn,) = steps.take({key: tracks[key]})
            said[step, key] = turn.span
            assert key != "a" or step == 1 or turn.span == (step, step)
    assert said[3, "s"] == (3, 4)
    assert said[3, "b"] == (3, 3)
    assert said[4, "s"] == (4, 5)


def test_what_comes_before_the_key_that_begins_the_first_step_of_a_process_that_goes_on_is_of_that_step() -> None:
    """Servers have four steps of the process before; a key that is pushed in the second, fifth, ... comes first."""
    steps, tracks = Steps(counts=True), {"s": Track(), OFTEN: Track()}
    steps.begin_after(4)
    tracks["s"].found, tracks[OFTEN].found = Found(1, {1: 2}, 3), Found(4, {3: -3, 4: -4}, 3)
    for step in range(5, 20):
        for key in ("s", OFTEN):
            if key == OFTEN or step % 3 == 2:
                (turn,) = steps.take({key: tracks[key]})
                assert turn.span == (step, step), f"{key} in step {step}"


def test_a_round_belongs_to_the_steps_that_all_its_clients_say() -> None:
    assert common([Span(3, 4), Span(4, 4)], 9) == (4, 4), "some know more than others"
    assert common([Span(3, 4), Span(3, 4)], 9) == (3, 4)
    assert common([Span(3, 3), Span(5, 5)], 9) == (3, 5), "they contradict each other"
    assert common([Span(3, 3), Span()], 9) == common([], 9) == (9, 9)


def test_what_is_made_again_after_others_has_its_place_before_them() -> None:
    """Servers compare it with pushes of other clients, which have not failed."""
    steps, tracks = Steps(counts=True), {key: Track() for key in ("early", OFTEN)}
    for step in range(1, 9):
        (first,) = (None,) if step % 2 else steps.take({"early": tracks["early"]})
        (turn,) = steps.take({OFTEN: tracks[OFTEN]})
        assert turn.at == -step
        if first is not None:
            steps.end(tracks["early"], first, used=False)
            assert steps.done() == first.step - 1, "what has failed is not over"
            (again,) = steps.take({"early": tracks["early"]})
            assert (again.at, again.span) == (first.at, first.span)
            steps.end(tracks["early"], again, used=True)
        steps.end(tracks[OFTEN], turn, used=True)
    assert tracks["early"].number == 4
