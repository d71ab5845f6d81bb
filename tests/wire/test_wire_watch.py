"""One thread that waits for news in the place of another: each hears what is meant for it, whenever the other looks."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvmpi.wire.readiness import Waker
from kvmpi.wire.watch import Watch

pytestmark = pytest.mark.skipif(not hasattr(select, "epoll"), reason="nobody stands in without epoll")
LONG_S = 20.0


class Pipe:
    """A source that has news once something is written to it."""

    def __init__(self) -> None:
        self.read, self.write = os.pipe()
        self.handles = [self.read]


@pytest.fixture
def waker() -> Iterator[Waker]:
    found = Waker()
    yield found
    found.close()


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    found = Pipe()
    yield found
    os.close(found.read)
    os.close(found.write)


def seconds(call: Any) -> tuple[float, Any]:
    start_s = time.monotonic()
    found = call()
    return time.monotonic() - start_s, found


def test_a_wait_may_be_longer_than_the_system_counts(waker: Waker, pipe: Pipe) -> None:
    os.write(pipe.write, b"x")
    assert Watch(waker, [pipe]).wait(4e9) == [pipe]


def test_news_go_to_whoever_waits_at_the_time(waker: Waker, pipe: Pipe) -> None:
    watch = Watch(waker, [pipe])
    os.write(pipe.write, b"x")
    assert watch.wait(LONG_S) == [pipe]
    assert watch.begin_to_stand_in()
    assert watch.wait(0.05) == [], "somebody stands in"
    assert watch.stand_in(LONG_S) == [pipe]
    watch.end_to_stand_in()
    assert watch.wait(LONG_S) == [pipe]


def test_a_nudge_ends_the_time_of_whoever_stands_in_and_nobody_elses(waker: Waker, pipe: Pipe) -> None:
    watch = Watch(waker, [pipe])
    watch.nudge()  # nobody stands in
    watch.begin_to_stand_in()
    assert watch.stand_in(0.05) == []
    timer = threading.Timer(0.1, watch.nudge)
    timer.start()
    took_s, found = seconds(lambda: watch.stand_in(LONG_S))
    timer.join()
    assert (took_s < LONG_S / 2, found) == (True, [])
    watch.nudge()  # too late for it, and not for the thread whose place it took
    watch.end_to_stand_in()
    took_s, found = seconds(lambda: watch.wait(0.2))
    assert (took_s >= 0.19, found) == (True, [])


def test_a_nudge_is_not_taken_by_one_who_had_just_heard_of_news(waker: Waker, pipe: Pipe) -> None:
    """Between what it hears and what it looks at, another thread begins to stand in and is nudged."""
    watch = Watch(waker, [pipe])
    os.write(pipe.write, b"x")
    heard, all_news = list[Any](), watch._all

    class Interrupted:
        def poll(self, timeout_s: float) -> Any:
            heard.extend(all_news.poll(timeout_s))
            watch.begin_to_stand_in()
            os.read(pipe.read, 1)  # the other has read the news, and is told that it need not wait for more
            watch.nudge()
            return heard

        def __getattr__(self, name: str) -> Any:
            return getattr(all_news, name)

    watch._all = Interrupted()  # type: ignore[assignment]
    assert watch.wait(LONG_S) == []
    assert heard, "the test is to be of news"
    took_s, _ = seconds(lambda: watch.stand_in(LONG_S))
    assert took_s < LONG_S / 2, "the nudge is gone"
