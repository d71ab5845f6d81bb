"""Closing an engine: it waits, stops its threads, and gives up on what is stuck."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

import pytest
from engine_helpers import TIMEOUT_S

from kvmpi.engine import Engine, Work, create_engine
from kvmpi.errors import KVError, KVTimeoutError


@pytest.mark.parametrize("kind", ["threaded", "naive"])
def test_close_waits_and_is_idempotent(kind: str) -> None:
    engine, seen = create_engine(kind), []
    engine.add_lane("reduce", ordered=True)
    for lane in ("cpu", "reduce", "inline"):
        engine.push(lambda: (time.sleep(0.02), seen.append(1)), lane=lane)
    engine.close(TIMEOUT_S)
    assert seen == [1, 1, 1]
    engine.close()
    for attempt in (lambda: engine.push(int), lambda: engine.add_lane("late")):
        with pytest.raises(KVError, match="closed"):
            attempt()
    engine.wait_all(TIMEOUT_S)


def test_close_stops_the_threads() -> None:
    engine = create_engine(num_threads=4)
    together = threading.Barrier(4)
    for _ in range(4):
        engine.push(lambda: together.wait(TIMEOUT_S))
    engine.close(TIMEOUT_S)
    assert len(engine._threads) == 4
    assert not any(thread.is_alive() for thread in engine._threads)


def test_operations_may_push_while_close_waits() -> None:
    engine, seen = create_engine(), []
    engine.push(lambda: (time.sleep(0.05), engine.push(lambda: seen.append("second")), seen.append("first")))
    engine.close(TIMEOUT_S)
    assert sorted(seen) == ["first", "second"]


def test_close_waits_for_what_is_pushed_at_the_last_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the moment when nothing is pending and the moment when the engine is closed."""
    engine, seen = create_engine(), []
    wait_drained = engine._wait_drained

    def push_after(timeout_s: float | None) -> bool:
        drained = wait_drained(timeout_s)
        if not seen:
            seen.append("pushed")
            engine.push(lambda: (time.sleep(0.02), seen.append("ran")))
        return drained

    monkeypatch.setattr(engine, "_wait_drained", push_after)
    engine.close(TIMEOUT_S)
    assert seen == ["pushed", "ran"]


def test_close_gives_up_on_a_stuck_operation_and_names_it() -> None:
    engine, release, ran = create_engine(num_threads=1), threading.Event(), []
    engine.add_lane("reduce", ordered=True)
    var = engine.variable("v")
    stuck = engine.push(lambda: release.wait(TIMEOUT_S), writes=[var], lane="reduce", name="allreduce of key 7")
    behind = engine.push(lambda: ran.append("behind"), lane="reduce", name="behind")
    waits = engine.push(lambda: ran.append("waits"), reads=[var], lane="inline", name="waits")
    reply = Work("reply")
    network = engine.push(lambda: reply, name="pull")
    start_s = time.monotonic()
    with pytest.raises(KVTimeoutError) as raised:
        engine.close(0.1)
    assert time.monotonic() - start_s < 5
    for text in ("allreduce of key 7 (running", "behind (queued", "waits (waits for 1", "pull (its function has"):
        assert text in str(raised.value)
    for work in (stuck, behind, waits, network):  # nobody waits for ever
        with pytest.raises(KVTimeoutError, match="gave up"):
            work.wait(TIMEOUT_S)
    engine.close(0.1)  # idempotent
    with pytest.raises(KVError, match="closed"):
        engine.push(int)
    reply.finish()  # too late, and harmless
    release.set()
    for thread in engine._threads:
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()
    assert ran == []
    assert isinstance(stuck.error(), KVTimeoutError), "the late completion has changed the outcome"
    assert isinstance(network.error(), KVTimeoutError)


def test_close_wakes_who_waits_for_what_it_abandons() -> None:
    engine, reply, outcomes = create_engine(), Work("reply"), []
    work = engine.push(lambda: reply, name="pull")

    def waiter(wait: Callable[[], None]) -> None:
        try:
            wait()
            outcomes.append("silent")
        except KVTimeoutError:
            outcomes.append("timeout")

    threads = [threading.Thread(target=waiter, args=(wait,), daemon=True) for wait in (work.wait, engine.wait_all)]
    for thread in threads:
        thread.start()
    while not (work._gates and engine._drained):
        time.sleep(0.001)
    with pytest.raises(KVTimeoutError):
        engine.close(0.05)
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()
    assert sorted(outcomes) == ["silent", "timeout"]  # wait_all has nothing left to report


def test_naive_close_gives_up_on_another_threads_operation() -> None:
    engine, reply = create_engine("naive"), Work("reply")
    errors: list[BaseException | None] = []
    pusher = threading.Thread(target=lambda: errors.append(engine.push(lambda: reply, name="pull").error()))
    pusher.start()
    while not engine._active:
        time.sleep(0.001)
    with pytest.raises(KVTimeoutError, match="pull"):
        engine.wait_all(0.02)
    with pytest.raises(KVTimeoutError, match="pull"):
        engine.close(0.02)
    reply.finish()
    pusher.join(TIMEOUT_S)
    assert isinstance(errors[0], KVTimeoutError)


def test_naive_returned_work_frees_the_ordered_lane_for_other_threads(new_engine: Callable[..., Engine]) -> None:
    engine, reply, started = new_engine("naive"), Work("reply"), threading.Event()

    def request() -> Work:
        started.set()
        time.sleep(0.05)  # the other thread is waiting for the lane by now
        return reply

    pusher = threading.Thread(target=lambda: engine.push(request, lane="reduce"), daemon=True)
    pusher.start()
    assert started.wait(TIMEOUT_S)
    other = threading.Thread(target=lambda: engine.push(int, lane="reduce"), daemon=True)
    other.start()
    other.join(5)
    assert not other.is_alive()
    assert pusher.is_alive()
    reply.finish()
    pusher.join(TIMEOUT_S)


def test_wait_all_waits_for_what_was_pushed_before_and_for_nothing_later(engine: Engine) -> None:
    """Else a thread that always has something under way would let another wait for ever."""
    promises = [Work("first"), Work("second")]

    def push(promise: Work) -> None:
        begun = threading.Event()

        def run() -> Work:
            begun.set()
            return promise

        threading.Thread(target=engine.push, args=(run,), daemon=True).start()
        assert begun.wait(TIMEOUT_S)

    push(promises[0])
    waiting = threading.Thread(target=engine.wait_all, daemon=True)
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    push(promises[1])
    promises[0].finish()
    waiting.join(TIMEOUT_S)
    is_late = waiting.is_alive()
    promises[1].finish()
    assert not is_late


def test_wait_all_and_close_inside_an_operation_are_refused(engine: Engine) -> None:
    for what in (engine.wait_all, engine.close):
        with pytest.raises(KVError, match="inside an operation"):
            engine.push(what, lane="reduce").wait(TIMEOUT_S)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, TimeoutError])  # as of a handler of SIGALRM
def test_an_engine_that_a_signal_has_broken_says_so(kind: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    """It came between two of the engine's own steps, which are not known to be whole."""
    engine = create_engine()

    def interrupted(*_: object) -> None:
        raise kind

    with monkeypatch.context() as patch:
        patch.setattr(engine, "_register", interrupted)
        with pytest.raises(kind):
            engine.push(int)
    with pytest.raises(KVError, match=rf"'next' on an engine that is closed: a {kind.__name__} .* create another"):
        engine.push(int, name="next")
    engine.close(TIMEOUT_S)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, TimeoutError])
@pytest.mark.parametrize("when", ["before", "within"])
def test_a_signal_where_a_returned_work_is_done_leaves_nobody_waiting(
    kind: type[BaseException], when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes before the engine is told, or while it goes on from there."""
    engine, returned = create_engine(), Work("returned")
    op, after = engine.push(lambda: returned, name="op"), engine.push(int, name="other")
    after.wait(TIMEOUT_S)  # and "op" has returned its Work, in the order of the lane's threads or soon
    deadline = time.monotonic() + TIMEOUT_S
    while not returned._callbacks and time.monotonic() < deadline:
        time.sleep(0.001)

    def interrupted(*_: object) -> None:
        raise kind

    with monkeypatch.context() as patch:
        patch.setattr(*((Work, "_call_back") if when == "before" else (engine, "_complete")), interrupted)
        with contextlib.suppress(kind):
            returned.finish()
    with pytest.raises(kind):
        op.wait(TIMEOUT_S)
    engine.close(TIMEOUT_S)


def test_what_runs_on_after_a_signal_has_closed_the_engine_is_waited_for_by_join_alone() -> None:
    engine, busy, release = create_engine(), threading.Event(), threading.Event()
    engine.push(lambda: (busy.set(), release.wait(TIMEOUT_S)), lane="cpu", name="stuck")
    assert busy.wait(TIMEOUT_S)
    engine._break(KeyboardInterrupt())  # type: ignore[attr-defined]
    closing = threading.Thread(target=engine.close, daemon=True)
    closing.start()
    closing.join(TIMEOUT_S / 2)
    assert not closing.is_alive()
    with pytest.raises(KVTimeoutError, match="runs on"):
        engine.join(0.01)
    release.set()
    engine.join(TIMEOUT_S)


def test_close_logs_what_nobody_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    engine = create_engine()
    engine.push(lambda: 1 // 0)
    engine.close(TIMEOUT_S)
    assert "ZeroDivisionError" in caplog.text


def test_a_thread_that_is_about_to_start_does_not_disturb(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was wanted while all others were busy, and they have done what it was wanted for."""
    engine = create_engine(num_threads=2)
    starting, go_on = threading.Event(), threading.Event()
    start = threading.Thread.start

    def late(thread: threading.Thread) -> None:
        if thread.name == "kvmpi-cpu":
            starting.set()
            assert go_on.wait(TIMEOUT_S)
        start(thread)

    busy, release = threading.Event(), threading.Event()
    engine.push(lambda: (busy.set(), release.wait(TIMEOUT_S)), lane="cpu", name="first")
    assert busy.wait(TIMEOUT_S)
    monkeypatch.setattr(threading.Thread, "start", late)
    pushing = threading.Thread(target=lambda: engine.push(lambda: None, lane="cpu", name="second"), name="pushing")
    start(pushing)
    assert starting.wait(TIMEOUT_S)
    release.set()
    engine.close(TIMEOUT_S)
    go_on.set()
    pushing.join(TIMEOUT_S)
    assert not pushing.is_alive()
