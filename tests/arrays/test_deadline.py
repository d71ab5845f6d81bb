"""One duration becomes one point in time."""

from __future__ import annotations

import math
import os
import time

import pytest

from kvmpi import deadline as module
from kvmpi.deadline import Deadline, RunningTime


def test_none_is_never() -> None:
    deadline = Deadline(None)
    assert deadline.remaining_s() == math.inf
    assert deadline.timeout_s == math.inf
    assert not deadline.expired()


@pytest.mark.parametrize("timeout_s", [0, -1.0])
def test_what_has_passed_leaves_nothing(timeout_s: float) -> None:
    deadline = Deadline(timeout_s)
    assert deadline.expired()
    assert deadline.remaining_s() == 0.0


def test_the_rest_shrinks_and_the_whole_stays() -> None:
    deadline = Deadline(0.05)
    first = deadline.remaining_s()
    assert 0 < first <= 0.05
    while not deadline.expired():
        time.sleep(0.005)
    assert deadline.remaining_s() == 0.0
    assert deadline.timeout_s == 0.05


class Times:
    """The modules' time, which a test moves on."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> Times:
    times = Times()
    monkeypatch.setattr(module, "time", times)
    monkeypatch.setattr(module, "running_time", RunningTime())
    return times


def test_time_in_which_the_process_stood_still_does_not_count(times: Times) -> None:
    early, late = Deadline(30.0), Deadline(5.0)
    module.running_time.tick(1.0)
    times.now_s += 0.5
    asked_s = times.now_s
    times.now_s += 100.0
    assert not late.passed(asked_s)
    assert not late.passed(times.now_s), "who sees it first may be anybody"
    assert late.remaining_s() == pytest.approx(5.0)
    module.running_time.tick(1.0)
    times.now_s += 1.0
    module.running_time.tick(1.0)
    assert early.remaining_s() == pytest.approx(29.0)
    for _ in range(4):
        assert not late.expired()
        module.running_time.tick(1.0)
        times.now_s += 1.0
    assert late.expired()
    assert late.passed(times.now_s)


def test_nothing_is_made_of_a_thread_that_is_late_or_gone(times: Times) -> None:
    """A process that waits, as others do, while that thread is kept from its work must find an end."""
    deadline = Deadline(5.0)
    for _ in range(6):
        module.running_time.tick(1.0)
        times.now_s += 1.9  # a machine with much to do
    assert deadline.expired()
    deadline = Deadline(5.0)
    for _ in range(100):
        times.now_s += 0.1
        deadline.expired()
    assert deadline.expired()


def test_a_child_process_knows_nothing_of_the_thread() -> None:
    """It has none, and would take all of its time for one in which it stood still."""
    module.running_time.tick(-3.0)
    try:
        pid = os.fork()
        if pid == 0:
            deadline = Deadline(0.0)
            os._exit(not (deadline.expired() and module.running_time.stood_s == 0.0))
        assert os.waitpid(pid, 0)[1] == 0
    finally:
        module.running_time.forked()
