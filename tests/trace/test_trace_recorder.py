"""What a recorder counts, also of calls that it works out later."""

from __future__ import annotations

import random
import threading
import time

import pytest

from kvmpi import trace
from kvmpi.trace import Recorder


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """``clock[0]`` is the time."""
    now = [100.0]
    monkeypatch.setattr(trace.time, "perf_counter", lambda: now[0])
    return now


def test_time_in_which_something_is_under_way_is_counted_once(clock: list[float]) -> None:
    """However calls overlap, and however late a thread says what it did: against a grid of tenths of a second."""
    rng = random.Random(3)
    for _ in range(200):
        recorder, busy, late = Recorder(), set[int](), []
        calls = sorted((rng.randrange(100), rng.randrange(1, 30)) for _ in range(rng.randrange(1, 12)))
        calls.sort(key=lambda call: sum(call))
        for start, length in calls:
            busy.update(range(start, start + length))
            clock[0] = (start + length) / 10
            if rng.random() < 0.3:
                recorder.add_brief("reduce", start / 10, clock[0], 8)
            elif rng.random() < 0.3:
                late.append((start / 10, clock[0]))
            else:
                recorder.add("push", length / 10, 8)
        for start_s, end_s in rng.sample(late, len(late)):
            recorder.add_brief("reduce", start_s, end_s, 8)
        assert recorder.busy_s == pytest.approx(len(busy) / 10)
        phases = recorder.snapshot()["phases"]
        assert sum(phase["calls"] for phase in phases.values()) == len(calls)
        assert sum(phase["bytes"] for phase in phases.values()) == 8 * len(calls)
        assert sum(phase["seconds"] for phase in phases.values()) == pytest.approx(sum(n for _, n in calls) / 10)


def test_brief_calls_are_worked_out_when_there_are_many() -> None:
    recorder = Recorder()
    for number in range(trace._MOST_BRIEF + 5):
        recorder.add_brief("reduce", number, number + 0.5, 1)
        assert len(recorder._brief) < trace._MOST_BRIEF
    assert recorder.snapshot()["phases"]["reduce"]["calls"] == trace._MOST_BRIEF + 5
    assert recorder.busy_s == pytest.approx((trace._MOST_BRIEF + 5) / 2)


def test_calls_of_several_threads_are_all_counted() -> None:
    recorder, each = Recorder(), 3 * trace._MOST_BRIEF

    def count() -> None:
        for number in range(each):
            start_s = time.perf_counter()
            if number % 3:
                recorder.add_brief("reduce", start_s, time.perf_counter(), 1)
            else:
                recorder.add("reduce", time.perf_counter() - start_s, 1)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert recorder.snapshot()["phases"]["reduce"]["calls"] == 4 * each
    assert recorder.busy_s <= recorder.snapshot()["phases"]["reduce"]["seconds"] + 1e-9
