"""Borrowed lanes: whoever waits does the lane's work, in the lane's order, and nobody waits for ever by that."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import pytest
from engine_helpers import TIMEOUT_S

from kvmpi.engine import Engine, Work
from kvmpi.engine.threaded import ThreadedEngine
from kvmpi.errors import ConfigError, KVError, KVTimeoutError


@pytest.fixture
def threaded(new_engine: Callable[..., Engine]) -> ThreadedEngine:
    engine = new_engine()
    assert isinstance(engine, ThreadedEngine)
    return engine


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class Trace:
    """What ran, and in which thread."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.threads: list[int] = []

    def note(self, name: str) -> None:
        self.names.append(name)
        self.threads.append(threading.get_ident())


def test_a_waiting_borrower_runs_the_lane_in_its_order(engine: Engine) -> None:
    trace, me = Trace(), threading.get_ident()
    with engine.borrow("reduce"):
        works = [engine.push(lambda i=i: trace.note(str(i)), lane="reduce", name=str(i)) for i in range(5)]
        works[3].wait()
    works[4].wait(TIMEOUT_S)
    assert trace.names == ["0", "1", "2", "3", "4"]
    assert trace.threads[:4] == [me] * 4
    engine.close(TIMEOUT_S)


def test_who_waits_runs_nothing_that_comes_after(threaded: ThreadedEngine) -> None:
    trace = Trace()
    with threaded.borrow("reduce"):
        works = [threaded.push(lambda i=i: trace.note(str(i)), lane="reduce", name=str(i)) for i in range(5)]
        works[1].wait()
        assert trace.names == ["0", "1"]
        works[2].wait()
        assert trace.names == ["0", "1", "2"]
    works[4].wait(TIMEOUT_S)
    assert trace.names == ["0", "1", "2", "3", "4"]


def test_what_is_left_at_the_end_runs_on_the_lane_itself(threaded: ThreadedEngine) -> None:
    trace, me = Trace(), threading.get_ident()
    for _ in range(3):  # before the lane has a thread, and while that is parked
        with threaded.borrow("reduce"):
            threaded.push(lambda: trace.note("mine"), lane="reduce").wait()
            rest = threaded.push(lambda: trace.note("rest"), lane="reduce")
        rest.wait(TIMEOUT_S)
        threaded.push(lambda: trace.note("after"), lane="reduce").wait(TIMEOUT_S)
        wait_until(lambda: threaded._lanes["reduce"].parked)  # type: ignore[attr-defined]
    assert trace.names == ["mine", "rest", "after"] * 3
    assert [ident == me for ident in trace.threads] == [True, False, False] * 3


def test_a_lane_at_work_is_not_lent(threaded: ThreadedEngine) -> None:
    trace, release = Trace(), threading.Event()
    started = threading.Event()

    def block() -> None:
        started.set()
        assert release.wait(TIMEOUT_S)

    threaded.push(block, lane="reduce")
    assert started.wait(TIMEOUT_S)
    with threaded.borrow("reduce"):
        work = threaded.push(lambda: trace.note("behind"), lane="reduce")
        threading.Timer(0.05, release.set).start()
        work.wait()
    assert trace.threads[0] != threading.get_ident()


def test_a_wait_for_another_lane_gives_the_lane_back(threaded: ThreadedEngine) -> None:
    """The operation that is waited for can run only after one of the lane that somebody else pushes meanwhile."""
    value, pushed = threaded.variable("value"), threading.Event()
    trace = Trace()

    def elsewhere() -> None:
        assert pushed.wait(TIMEOUT_S)

    with threaded.borrow("reduce"):
        threaded.push(elsewhere, writes=[value], lane="cpu")
        last = threaded.push(lambda: trace.note("last"), reads=[value], lane="reduce")

        def push_behind() -> None:
            threaded.push(lambda: trace.note("behind"), lane="reduce")
            pushed.set()

        other = threading.Timer(0.05, push_behind)
        other.start()
        last.wait()  # nothing of the lane can run yet
        other.join()
    threaded.wait_all(TIMEOUT_S)
    assert trace.names == ["last", "behind"]
    assert threading.get_ident() not in trace.threads


def test_a_wait_with_a_timeout_gives_the_lane_back_and_keeps_its_time(threaded: ThreadedEngine) -> None:
    release = threading.Event()
    with threaded.borrow("reduce"):
        work = threaded.push(lambda: release.wait(TIMEOUT_S), lane="reduce", name="slow")
        with pytest.raises(KVTimeoutError, match="slow"):
            work.wait(0.05)
        release.set()
        work.wait(TIMEOUT_S)


def test_wait_all_and_close_inside_the_block(threaded: ThreadedEngine) -> None:
    trace = Trace()
    with threaded.borrow("reduce"):
        threaded.push(lambda: trace.note("a"), lane="reduce")
        threaded.wait_all(TIMEOUT_S)
        threaded.push(lambda: trace.note("b"), lane="reduce")
        threaded.close(TIMEOUT_S)
    assert trace.names == ["a", "b"]


def test_operations_may_not_wait_for_their_engine(threaded: ThreadedEngine) -> None:
    with threaded.borrow("reduce"):
        for wait in (threaded.wait_all, threaded.close):
            with pytest.raises(KVError, match="waits for itself"):
                threaded.push(lambda wait=wait: wait(0.2), lane="reduce").wait()
    threaded.close(TIMEOUT_S)


def test_an_operation_that_waits_for_a_later_one_of_its_lane_does_not_run_it_early(threaded: ThreadedEngine) -> None:
    trace = Trace()

    def first() -> None:
        later = threaded.push(lambda: trace.note("later"), lane="reduce", name="later")
        assert not threaded.borrows
        assert not threaded.run_borrowed()
        threaded._run_borrowed(later, None)  # what a wait without a timeout begins with
        with pytest.raises(KVTimeoutError, match="later"):
            later.wait(0.05)
        trace.note("first")

    with threaded.borrow("reduce"):
        threaded.push(first, lane="reduce").wait()
    threaded.wait_all(TIMEOUT_S)
    assert trace.names == ["first", "later"]


@pytest.mark.parametrize("error", [ValueError("bad"), KeyboardInterrupt()])
def test_what_an_operation_raises_reaches_its_waiter_and_the_lane_goes_on(
    threaded: ThreadedEngine, error: BaseException
) -> None:
    def fail() -> None:
        raise error

    trace = Trace()
    with threaded.borrow("reduce"):
        with pytest.raises(type(error)):
            threaded.push(fail, lane="reduce").wait()
        threaded.push(lambda: trace.note("next"), lane="reduce").wait()
    threaded.push(lambda: trace.note("after"), lane="reduce").wait(TIMEOUT_S)
    assert trace.names == ["next", "after"]


def test_a_signal_between_two_steps_of_the_engine_ends_it_and_all_who_wait(
    threaded: ThreadedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted, complete = [], threaded._complete

    def interrupt(op: Work, *rest: object) -> object:
        if op.name == "first":
            interrupted.append(op)
            raise KeyboardInterrupt
        return complete(op, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(threaded, "_complete", interrupt)
    value = threaded.variable("value")
    with threaded.borrow("reduce"):
        first = threaded.push(lambda: None, writes=[value], lane="reduce", name="first")
        second = threaded.push(lambda: None, reads=[value], lane="cpu", name="second")
        told: list[Work] = []
        second.add_done_callback(told.append)
        with pytest.raises(KeyboardInterrupt):
            first.wait()
    assert interrupted == [first]
    assert told == [second]
    with pytest.raises(KeyboardInterrupt):
        second.wait(TIMEOUT_S)
    with pytest.raises(KVError, match="closed"):
        threaded.push(lambda: None, lane="reduce")
    threaded.close(TIMEOUT_S)


@pytest.mark.parametrize("where", ["_give_back", "_end_loan"])
def test_a_signal_while_a_lane_is_given_back_leaves_it_to_the_next_wait(
    threaded: ThreadedEngine, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    trace, interrupts = Trace(), [KeyboardInterrupt()]
    given = getattr(threaded, where)

    def interrupt(*arguments: object) -> None:
        if interrupts:
            raise interrupts.pop()
        given(*arguments)

    monkeypatch.setattr(threaded, where, interrupt)
    with pytest.raises(KeyboardInterrupt), threaded.borrow("reduce", "broadcast"):
        threaded.push(lambda: trace.note("a"), lane="reduce").wait()
    assert not interrupts
    late = threading.Thread(target=lambda: threaded.push(lambda: trace.note("b"), lane="reduce"), daemon=True)
    late.start()
    late.join(TIMEOUT_S)
    for lane in ("cpu", "reduce", "broadcast"):
        threaded.push(lambda lane=lane: trace.note(lane), lane=lane).wait()
    threaded.wait_all(TIMEOUT_S)
    assert sorted(trace.names) == ["a", "b", "broadcast", "cpu", "reduce"]
    threaded.push(lambda: trace.note("c"), lane="reduce").wait(TIMEOUT_S)
    assert trace.threads[-1] != threading.get_ident()


def test_ctrl_c_in_what_is_run_for_another_thread_is_heard_here_too(threaded: ThreadedEngine) -> None:
    trace, works, pushed = Trace(), list[Work](), threading.Event()

    def interrupted() -> None:
        raise KeyboardInterrupt

    def push_elsewhere() -> None:
        works.append(threaded.push(interrupted, lane="reduce", name="theirs"))
        pushed.set()

    with threaded.borrow("reduce"):
        threaded.push(lambda: trace.note("mine"), lane="reduce")
        threading.Thread(target=push_elsewhere, daemon=True).start()
        assert pushed.wait(TIMEOUT_S)
        last = threaded.push(lambda: trace.note("last"), lane="reduce")
        with pytest.raises(KeyboardInterrupt):
            last.wait()
    last.wait(TIMEOUT_S)
    assert trace.names == ["mine", "last"]
    with pytest.raises(KeyboardInterrupt):
        works[0].wait(TIMEOUT_S)


def test_a_loan_that_a_signal_left_behind_is_used_by_the_next_wait(threaded: ThreadedEngine) -> None:
    trace = Trace()
    threaded.borrow("reduce").__enter__()  # and no exit
    with threaded.borrow("reduce"):
        threaded.push(lambda: trace.note("a"), lane="reduce").wait()
    threaded.push(lambda: trace.note("b"), lane="reduce").wait()
    threaded.push(lambda: trace.note("c"), lane="reduce").wait(TIMEOUT_S)
    assert trace.names == ["a", "b", "c"]
    threaded.close(TIMEOUT_S)


def test_of_two_lanes_the_first_is_given_back_before_the_second_begins(engine: Engine) -> None:
    """What others push on the first lane meanwhile goes on while the second lane's operation waits for it."""
    trace, me = Trace(), threading.get_ident()
    value, others = engine.variable("value"), threading.Event()

    def wait_for_others() -> None:
        trace.note("broadcast")
        if isinstance(engine, ThreadedEngine):
            threading.Thread(target=lambda: engine.push(others.set, lane="reduce"), daemon=True).start()
            assert others.wait(TIMEOUT_S)

    with engine.borrow("reduce", "broadcast"):
        for name in ("a", "b"):
            engine.push(lambda name=name: trace.note(name), writes=[value], lane="reduce")
        engine.push(wait_for_others, reads=[value], lane="broadcast").wait()
    engine.wait_all(TIMEOUT_S)
    assert sorted(trace.names) == ["a", "b", "broadcast"]
    assert trace.threads == [me] * 3


@pytest.mark.parametrize("between", [False, True])
def test_what_is_ready_on_the_second_lane_does_not_wait_for_the_first(
    threaded: ThreadedEngine, *, between: bool
) -> None:
    """Whom the first lane's operation waits for may wait for the second lane's, of a call before; also if that is set
    free ``between`` two operations of the first."""
    trace, value, ran = Trace(), threaded.variable("value"), threading.Event()

    def broadcast() -> None:
        trace.note("broadcast")
        ran.set()

    def reduce() -> None:
        trace.note("reduce")
        assert ran.wait(TIMEOUT_S)

    with threaded.borrow("reduce", "broadcast"):
        if between:
            threaded.push(lambda: None, writes=[value], lane="reduce")
            threaded.push(broadcast, reads=[value], lane="broadcast")
            last = threaded.push(reduce, lane="reduce")
        else:
            threaded.push(broadcast, lane="broadcast")
            last = threaded.push(reduce, lane="reduce")
        assert threaded.run_borrowed()
        last.wait()
    threaded.wait_all(TIMEOUT_S)
    assert sorted(trace.names) == ["broadcast", "reduce"]
    assert threading.get_ident() == trace.threads[trace.names.index("reduce")]


def test_what_was_pushed_later_on_the_second_lane_waits_for_the_first(threaded: ThreadedEngine) -> None:
    """Nobody comes to that before what was pushed before it, and no thread need be woken for it."""
    trace, me, value = Trace(), threading.get_ident(), threaded.variable("value")
    with threaded.borrow("reduce", "broadcast"):
        threaded.push(lambda: None, writes=[value], lane="reduce")
        threaded.push(lambda: trace.note("reduce"), reads=[value], lane="reduce")
        last = threaded.push(lambda: trace.note("broadcast"), reads=[value], lane="broadcast")
        last.wait()
    threaded.wait_all(TIMEOUT_S)
    assert trace.names == ["reduce", "broadcast"]
    assert trace.threads == [me] * 2


def test_what_others_make_ready_wakes_their_thread_though_the_lane_is_wanted(threaded: ThreadedEngine) -> None:
    """Else an operation that this thread waits for could wait for one that only this thread would run."""
    trace, me = Trace(), threading.get_ident()
    value, release = threaded.variable("value"), threading.Event()

    def elsewhere() -> None:
        assert release.wait(TIMEOUT_S)

    threaded.push(elsewhere, writes=[value], lane="cpu")
    earlier = threaded.push(lambda: trace.note("earlier"), writes=[value], lane="broadcast")
    with threaded.borrow("reduce", "broadcast"):
        threaded.push(lambda: trace.note("mine"), lane="reduce").wait()
        release.set()
        wait_until(earlier.done)  # which is no wait of the engine's
    assert trace.names == ["mine", "earlier"]
    assert [ident == me for ident in trace.threads] == [True, False]


def test_what_this_thread_sets_free_it_runs_at_once_if_asked(threaded: ThreadedEngine) -> None:
    trace, me = Trace(), threading.get_ident()
    promise, value = Work("promise"), threaded.variable("value")
    with threaded.borrow("reduce", "broadcast"):
        assert not threaded.borrows
        assert not threaded.run_borrowed()
        threaded.push(lambda: promise, writes=[value], lane="inline")
        last = threaded.push(lambda: trace.note("last"), reads=[value], lane="broadcast")
        assert not threaded.borrows
        promise.finish()
        assert threaded.borrows
        assert not last.done()
        assert threaded.run_borrowed()
        assert last.done()
        assert not threaded.borrows
        for lane in ("reduce", "broadcast"):  # neither that one nor a lane before it is taken any more
            later = threaded.push(lambda: trace.note("later"), lane=lane)
            assert not threaded.borrows
            later.wait(TIMEOUT_S)
    assert trace.names == ["last", "later", "later"]
    assert [ident == me for ident in trace.threads] == [True, False, False]


def test_others_push_behind_what_a_borrower_runs(threaded: ThreadedEngine) -> None:
    trace, pushed = Trace(), list[Work]()

    def push_behind() -> None:
        pushed.append(threaded.push(lambda: trace.note("theirs"), lane="reduce"))

    def mine() -> None:
        other = threading.Thread(target=push_behind, daemon=True)
        other.start()
        other.join(TIMEOUT_S)
        time.sleep(0.02)  # for the lane's thread to begin with theirs, if that could be
        trace.note("mine")

    threaded.push(lambda: None, lane="reduce").wait(TIMEOUT_S)  # the lane has a thread
    wait_until(lambda: threaded._lanes["reduce"].parked)  # type: ignore[attr-defined]
    with threaded.borrow("reduce"):
        threaded.push(mine, lane="reduce").wait()
    pushed[0].wait(TIMEOUT_S)
    assert trace.names == ["mine", "theirs"]


def test_only_ordered_lanes_are_lent(threaded: ThreadedEngine) -> None:
    with pytest.raises(ConfigError, match="'cpu'"):
        threaded.borrow("cpu")


@pytest.mark.parametrize("seed", range(3))
def test_many_threads_that_borrow_push_and_wait(threaded: ThreadedEngine, seed: int) -> None:
    """Every operation runs once, never two of the lane at a time, those of one thread in its order."""
    busy = threading.Lock()
    ran: list[tuple[int, int]] = []
    overlapped: list[int] = []
    value = threaded.variable("value")

    def run(thread: int, number: int) -> None:
        if not busy.acquire(blocking=False):
            overlapped.append(number)
        ran.append((thread, number))
        busy.release()

    def loop(thread: int) -> None:
        choose = random.Random(100 * seed + thread)
        works: list[Work] = []

        def push(number: int) -> None:
            if choose.random() < 0.3:
                threaded.push(lambda: None, writes=[value], lane=choose.choice(["cpu", "inline", "broadcast"]))
            reads = [value] if choose.random() < 0.5 else []
            works.append(threaded.push(lambda: run(thread, number), reads=reads, lane="reduce"))

        number = 0
        while number < 200:
            if choose.random() < 0.6:
                with threaded.borrow(*choose.choice([["reduce"], ["reduce", "broadcast"], ["broadcast"]])):
                    for _ in range(choose.randint(1, 4)):
                        push(number)
                        number += 1
                        if choose.random() < 0.5:
                            choose.choice(works).wait()
                    works[-1].wait()
            else:
                push(number)
                number += 1
                if choose.random() < 0.3:
                    works[-1].wait(TIMEOUT_S)

    threads = [threading.Thread(target=loop, args=(thread,), daemon=True) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()
    threaded.wait_all(TIMEOUT_S)
    assert not overlapped
    for thread in range(4):
        mine = [number for who, number in ran if who == thread]
        assert mine == list(range(len(mine)))
        assert len(mine) >= 200
    threaded.close(TIMEOUT_S)
