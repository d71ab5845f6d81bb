"""Waiting ends soon after what it waits for, or at the deadline, and leaves the core to others meanwhile."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from kvmpi.collectives import library, waiting
from kvmpi.collectives.algorithm import Act, Scratch, Tensor
from kvmpi.collectives.comm import SoloComm
from kvmpi.collectives.cost import Choice
from kvmpi.collectives.waiting import Habit, Patience, wait_all
from kvmpi.deadline import Deadline
from kvmpi.errors import KVTimeoutError, ranks_in_words
from kvmpi.trace import stall


class Flag:
    """A request that is done from a point in time on."""

    def __init__(self, after_s: float) -> None:
        self.due_s, self.polls = waiting.time.monotonic() + after_s, 0

    def test(self) -> bool:
        self.polls += 1
        return waiting.time.monotonic() >= self.due_s


class Clock:
    """Virtual time: to ask for it takes a quarter of a microsecond, a nap 60 us more than it should."""

    def __init__(self) -> None:
        self.now_s, self.naps, self.yields, self.yield_s = time.monotonic(), 0, 0, 0.5e-6

    def monotonic(self) -> float:
        self.now_s += 0.25e-6
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.naps += 1
        self.now_s += seconds + 60e-6

    def let_others_run(self) -> None:
        self.yields += 1
        self.now_s += self.yield_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """How it waits, apart from how busy this machine is."""
    clock = Clock()
    monkeypatch.setattr(waiting, "time", clock)
    monkeypatch.setattr(waiting, "_yield_core", clock.let_others_run)
    monkeypatch.setattr(waiting, "_neighbours", waiting._Neighbours())
    monkeypatch.setattr(waiting, "_bare_polls", waiting._BARE_POLLS_CROWDED)
    return clock


def test_waits_for_every_request() -> None:
    flags = [Flag(0.05), Flag(0.0), Flag(0.1)]
    wait_all(flags, Deadline(10), lambda: "never")
    assert time.monotonic() >= flags[2].due_s


def test_nothing_to_wait_for_is_no_wait() -> None:
    wait_all([], Deadline(0), lambda: "never")
    wait_all([Flag(0.0)], Deadline(0), lambda: "what is done is done, whatever the time")


def test_compiled_code_lets_others_run_where_there_are_more_ranks_than_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "num_cores", lambda: 4)
    monkeypatch.setattr(waiting, "_bare_polls", waiting._bare_polls)
    for num_ranks, is_crowded in ((4, False), (5, True), (1, False)):
        waiting.expect_cores(num_ranks)
        assert waiting.looks()[1] == is_crowded
        assert (waiting.looks()[0] < 50) == is_crowded


@pytest.mark.parametrize("timeout_s", [0.0, 0.02, 0.3])
def test_gives_up_at_the_deadline_with_the_text_of_that_moment(timeout_s: float) -> None:
    flags = [Flag(0.0), Flag(3600)]
    start_s = time.monotonic()
    with pytest.raises(KVTimeoutError, match="1 of 2 came"):
        wait_all(flags, Deadline(timeout_s), lambda: f"{sum(flag.test() for flag in flags)} of 2 came")
    assert timeout_s <= time.monotonic() - start_s < timeout_s + 1.0


def test_a_long_wait_polls_seldom() -> None:
    flag = Flag(1.0)
    start_s = time.thread_time()
    wait_all([flag], Deadline(10), lambda: "never")
    assert flag.polls < 20_000
    assert time.thread_time() - start_s < 0.25, "waited with the core in use"


def test_progress_begins_the_wait_anew(clock: Clock) -> None:
    """After progress come polls again, not the long naps that the wait before had reached."""
    patience = Patience(Deadline(None), lambda: "never", Habit())
    end_s = clock.monotonic() + 0.1
    while clock.monotonic() < end_s:
        patience.pause()
    naps = clock.naps
    assert naps > 50
    patience.progress()
    for _ in range(10):
        patience.pause()
    assert clock.naps == naps


def test_who_meets_neighbours_that_compute_yields_to_them_seldom(clock: Clock) -> None:
    """A yield that takes long is the last for a while; when they are gone, yields come back."""

    def waits(seconds: float) -> tuple[int, int]:
        """How many waits there were, of which nobody knows how long they usually take, and how many yields."""
        yields, count, end_s = clock.yields, 0, clock.monotonic() + seconds
        while clock.monotonic() < end_s:
            wait_all([Flag(1e-3)], Deadline(3600), lambda: "never", Habit())
            count += 1
        return count, clock.yields - yields

    clock.yield_s = 2e-3
    count, met = waits(0.6)
    assert count > 100
    assert 3 <= met <= 5, "one at once, and then after 50, 150, 350 ms"
    clock.yield_s = 0.5e-6
    waits(0.9)  # in which the last pause ends
    count, met = waits(0.1)
    assert met > count, "they are gone"


def test_polls_in_which_a_library_yields_count_as_yields(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    flag, test = Flag(0.1), Flag.test

    def slow(self: Flag) -> bool:
        clock.now_s += 1e-3
        return test(self)

    monkeypatch.setattr(Flag, "test", slow)
    wait_all([flag], Deadline(3600), lambda: "never")
    assert waiting._neighbours.compute
    assert flag.polls < 75
    assert clock.naps > 40, "it napped between them"


@pytest.mark.parametrize("own_core", [False, True])
def test_waits_that_are_long_as_a_rule_are_slept_through(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, own_core: bool
) -> None:
    """The first ones poll; then it is known that this is in vain, until they are short again."""
    monkeypatch.setattr(waiting, "_bare_polls", 500 if own_core else 16)
    habit = Habit()

    def wait(seconds: float) -> tuple[int, int, float]:
        """How often it polled, how often it napped, and how much later than it could it ended."""
        flag, naps = Flag(seconds), clock.naps
        wait_all([flag], Deadline(3600), lambda: "never", habit)
        return flag.polls, clock.naps - naps, clock.monotonic() - flag.due_s

    first, _, _ = wait(5e-3)
    for _ in range(10):
        wait(5e-3)
    polls, naps, late_s = wait(5e-3)
    assert first > 100
    assert polls < 20
    assert 1 <= naps < 20
    assert late_s < 1.5e-3
    short = [wait(20e-6) for _ in range(40)]
    assert short[0][:2] == (2, 1), "a nap at once, since such waits are long"
    assert all(naps == 0 and polls > 20 for polls, naps, _ in short[20:]), "they are short now: polls again"


def test_who_may_come_late_naps_longer_and_seldom(clock: Clock) -> None:
    def waits(nap_share: float) -> tuple[int, float]:
        """Naps of ten waits, and how much later than it could the last one ended."""
        habit, naps = Habit(nap_share), clock.naps
        for _ in range(10):
            flag = Flag(2e-3)
            wait_all([flag], Deadline(3600), lambda: "never", habit)
        return clock.naps - naps, clock.monotonic() - flag.due_s

    punctual, late = waits(0.125), waits(0.5)
    assert late[0] < 0.6 * punctual[0]
    assert late[1] < 1.2e-3


def test_who_is_woken_sleeps_until_then_and_polls_as_before(clock: Clock) -> None:
    sleeps: list[float] = []

    def waiter(seconds: float) -> None:
        sleeps.append(seconds)
        clock.now_s += 5e-3  # somebody wakes it

    habit, polls, naps = Habit(), 0, clock.naps
    for wait in range(8):
        patience, sleeps[:] = Patience(Deadline(3600), lambda: "never", habit, waiter), []
        polls = 0
        while len(sleeps) < 2:
            patience.pause()
            polls += 1
        patience.progress()
        assert polls <= 4 or wait < 4, "such waits are long as a rule: no polls"
    assert polls >= 2
    assert sleeps == [waiting._WOKEN_NAP_S] * 2
    assert clock.naps == naps, "it does not nap, since who naps is not woken"
    patience = Patience(Deadline(0.1), lambda: "nothing came", habit, waiter)
    give_up = (patience.pause() for _ in range(1000))
    with pytest.raises(KVTimeoutError, match="nothing came"):
        list(give_up)


def test_a_long_wait_now_and_then_is_not_usual() -> None:
    habit = Habit()
    for number in range(100):
        habit.learn(3600.0 if number % 4 == 0 else 20e-6)
        assert habit.usual_s < waiting._POLLING_S
    for number in range(100):
        habit.learn(3600.0 if number % 2 == 0 else 20e-6)
    assert habit.usual_s > waiting._POLLING_S, "every other one is"
    for _ in range(20):
        habit.learn(20e-6)
    assert habit.usual_s < waiting._POLLING_S


def test_a_waiting_rank_lets_other_threads_run() -> None:
    """A training thread makes progress while two others wait."""
    waiters = [threading.Thread(target=wait_all, args=([Flag(0.6)], Deadline(10), str)) for _ in range(2)]
    for waiter in waiters:
        waiter.start()
    counted, end_s = 0, time.monotonic() + 0.5
    while time.monotonic() < end_s:
        counted += 1
    for waiter in waiters:
        waiter.join()
    alone, end_s = 0, time.monotonic() + 0.5
    while time.monotonic() < end_s:
        alone += 1
    assert counted > alone / 10


class Steps:
    """A collective of a library: messages one after the other, each sent when it is asked after the last came."""

    def __init__(self) -> None:
        self.left, self.due_s = 6, waiting.time.monotonic() + 100e-6

    def test(self) -> bool:
        if self.left and waiting.time.monotonic() >= self.due_s:
            self.left -= 1
            self.due_s = waiting.time.monotonic() + 100e-6
        return not self.left


class LibraryComm(SoloComm):
    size, has_collectives = 2, True

    def iallreduce(self, buffer: object) -> Steps:
        return Steps()


def test_a_library_that_moves_on_when_it_is_asked_is_not_taught_to_be_slow(clock: Clock) -> None:
    """A nap makes such a wait longer, and the longer waits are as a rule, the longer the naps."""
    algorithm, took_s = library.Library(LibraryComm()), []
    for _ in range(200):
        began_s = clock.monotonic()
        act = Act("test", "allreduce", Choice("mpi", 1, 0), 0, 2, Deadline(10), Scratch())
        algorithm.allreduce([Tensor([np.zeros(3)], np.zeros(3))], "float64", act)
        took_s.append(clock.monotonic() - began_s)
    assert max(took_s[100:]) < 2 * 600e-6
    assert not clock.naps, "a nap is longer than one of its messages takes"


def test_a_wait_is_over_when_it_has_failed(clock: Clock) -> None:
    """Also where the error, with all that it refers to, is kept."""
    before = set(stall._waiting)
    with pytest.raises(KVTimeoutError, match="for nothing") as caught:
        wait_all([Flag(100.0)], Deadline(2.0), lambda: "for nothing")
    assert caught.value.__traceback__ is not None
    assert set(stall._waiting) == before


def test_many_ranks_are_named_in_few_words_and_workers_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [ranks_in_words(ranks) for ranks in ([], [4], [5, 4], [7, 2, 3, 4], range(64))] == [
        "", "4", "4, 5", "2 to 4, 7", "0 to 63"
    ]  # fmt: skip
    monkeypatch.setattr(stall._process, "first_worker", 100)
    text = f"sum on MPI rank 3 of 64: MPI rank {ranks_in_words([0, 2, 3, 4, 9])} did not start within 3.0 s; look"
    assert stall._with_workers(text) == (
        "sum on MPI rank 3 of 64: MPI rank 0, 2 to 4, 9 (worker 100, 102 to 104, 109) did not start"
    )
