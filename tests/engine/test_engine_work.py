"""Work: a promise that anything may create and finish."""

from __future__ import annotations

import signal
import sys
import threading
import time
from typing import Any

import pytest
from engine_helpers import TIMEOUT_S

from kvmpi.deadline import Deadline
from kvmpi.engine import Engine, Work
from kvmpi.errors import ConfigError, KVError, KVTimeoutError


def test_finish_and_wait() -> None:
    work = Work("reply")
    assert not work.done()
    assert work.error() is None
    threading.Timer(0.02, work.finish).start()
    work.wait(TIMEOUT_S)
    assert work.done()
    work.wait(0)  # again


@pytest.mark.parametrize("timeout_s", [-1, 0, 0.02])
def test_wait_past_timeout_names_the_work(timeout_s: float) -> None:
    work = Work("reply of server 3")
    with pytest.raises(KVTimeoutError, match="reply of server 3"):
        work.wait(timeout_s)
    assert not work._gates  # a caller that polls leaves nothing behind
    work.finish()
    work.wait(timeout_s)


@pytest.mark.parametrize("timeout_s", ["x", [1.0], float("nan"), 1j])
def test_what_is_no_number_of_seconds_is_refused(timeout_s: Any) -> None:
    work = Work()
    with pytest.raises(ConfigError, match="expected seconds"):
        work.wait(timeout_s)
    assert not work._gates
    with pytest.raises(ConfigError, match="expected seconds"):
        Deadline(timeout_s)


def test_an_infinite_timeout_waits_for_ever() -> None:
    work = Work()
    threading.Timer(0.02, work.finish).start()
    work.wait(float("inf"))


def test_failed_work_raises_on_every_wait() -> None:
    work, error = Work("reply"), ConnectionError("gone")
    work.finish(error)
    lengths = []
    for _ in range(3):
        with pytest.raises(ConnectionError, match="gone") as raised:
            work.wait()
        assert raised.value is error
        lengths.append(len(raised.traceback))
    assert len(set(lengths)) == 1, "the traceback grows with every wait"
    assert work.error() is error


@pytest.mark.parametrize("error", [None, ValueError("late")])
def test_second_finish_is_an_error(error: BaseException | None) -> None:
    work = Work("reply")
    work.finish()
    with pytest.raises(KVError, match="reply was finished twice"):
        work.finish(error)
    work.wait()  # the first finish counts


def test_only_one_of_many_finishers_wins() -> None:
    for _ in range(50):
        work, start, refused = Work(), threading.Barrier(4), []

        def finish(work: Work = work, start: threading.Barrier = start, refused: list[int] = refused) -> None:
            start.wait(TIMEOUT_S)
            try:
                work.finish()
            except KVError:
                refused.append(1)

        threads = [threading.Thread(target=finish) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)
        assert len(refused) == 3


def test_callbacks_run_once_with_the_work_and_without_locks() -> None:
    work, seen = Work(), []

    def callback(finished: Work) -> None:
        assert finished is work
        finished.add_done_callback(lambda w: seen.append("nested"))  # would deadlock under the Work's lock
        seen.append("callback")

    work.add_done_callback(callback)
    assert seen == []
    work.finish()
    assert seen == ["nested", "callback"]
    work.add_done_callback(callback)  # finished already: at once
    assert seen == ["nested", "callback"] * 2


def test_a_callback_that_raises_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    work, seen = Work("reply"), []
    work.add_done_callback(lambda w: 1 // 0)
    work.add_done_callback(seen.append)
    work.finish()
    assert seen == [work]
    assert "ZeroDivisionError" in caplog.text


def test_callbacks_of_operations_run_without_the_engines_lock(engine: Engine) -> None:
    var, finished = engine.variable(), threading.Event()
    work = engine.push(lambda: time.sleep(0.01), writes=[var])

    def callback(_: Work) -> None:
        engine.push(int, writes=[var], lane="inline")
        engine.raise_pending(var)
        finished.set()

    work.add_done_callback(callback)
    assert finished.wait(TIMEOUT_S)
    engine.wait(var, TIMEOUT_S)
    assert var.version == 2


def test_a_callback_holds_up_its_own_thread_only(threaded: Engine) -> None:
    """Callbacks should not block; if one does, the other thread of the lane takes what has become ready."""
    var, pushed, verdicts = threaded.variable(), threading.Event(), []
    first = threaded.push(lambda: pushed.wait(TIMEOUT_S), writes=[var])
    second = threaded.push(int, writes=[var])
    finished = threading.Event()
    first.add_done_callback(lambda work: (verdicts.append(second.wait_done(TIMEOUT_S)), finished.set()))
    pushed.set()
    assert finished.wait(2 * TIMEOUT_S)
    assert verdicts == [True]


def test_many_waiters_are_all_woken() -> None:
    work, woken = Work(), []
    threads = [threading.Thread(target=lambda: woken.append(work.wait(TIMEOUT_S))) for _ in range(8)]
    for thread in threads:
        thread.start()
    while len(work._gates or ()) < 8:
        time.sleep(0.001)
    work.finish()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert len(woken) == 8


def test_only_the_engine_finishes_an_operation(threaded: Engine) -> None:
    with pytest.raises(KVError, match="only its engine"):
        threaded.push(int, name="push").finish()


@pytest.mark.skipif(sys.platform == "win32", reason="needs setitimer")
@pytest.mark.parametrize("waiting", ["work", "wait_all", "variable", "close"])
def test_keyboard_interrupt_while_waiting_leaves_the_engine_usable(threaded: Engine, waiting: str) -> None:
    var, release = threaded.variable(), threading.Event()
    work = threaded.push(lambda: release.wait(TIMEOUT_S), writes=[var])
    wait: Any = {
        "work": lambda: work.wait(TIMEOUT_S),
        "wait_all": lambda: threaded.wait_all(TIMEOUT_S),
        "variable": lambda: threaded.wait(var, TIMEOUT_S),
        "close": lambda: threaded.close(TIMEOUT_S),
    }[waiting]

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.03)
        with pytest.raises(KeyboardInterrupt):
            wait()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert not work._gates
    assert not threaded._drained
    release.set()
    threaded.push(int, writes=[var])
    threaded.wait_all(TIMEOUT_S)
    assert var.version == 2


@pytest.mark.parametrize("kind", ["threaded", "naive"])
def test_keyboard_interrupt_inside_an_inline_function_reaches_the_caller_once(new_engine: Any, kind: str) -> None:
    engine = new_engine(kind)
    var = engine.variable()

    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.push(interrupted, writes=[var], lane="inline")
    engine.push(int, writes=[var]).wait(TIMEOUT_S)
    engine.wait_all(TIMEOUT_S)
