"""Order of lanes, dependencies, concurrency of reads, returned Works and the inline lane."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import struct
import sys
import threading
import weakref
from collections.abc import Callable

import pytest
from engine_helpers import TIMEOUT_S, Finisher

from kvmpi.engine import Engine, Work, create_engine
from kvmpi.engine.naive import NaiveEngine
from kvmpi.engine.threaded import ThreadedEngine
from kvmpi.errors import ConfigError, KVTimeoutError


def blocker(engine: Engine, lane: str, writes: tuple[object, ...] = ()) -> threading.Event:
    """Occupies a thread of the lane until the event is set; returns when it does."""
    started, release = threading.Event(), threading.Event()

    def block() -> None:
        started.set()
        assert release.wait(TIMEOUT_S)

    engine.push(block, writes=writes, lane=lane, name="blocker")
    assert started.wait(TIMEOUT_S)
    return release


def test_create_engine() -> None:
    assert isinstance(create_engine(), ThreadedEngine)
    assert isinstance(create_engine("naive"), NaiveEngine)
    with pytest.raises(ConfigError, match="'threaded', 'naive'"):
        create_engine("thread")
    with pytest.raises(ConfigError, match="num_threads=0"):
        create_engine(num_threads=0)


def test_add_lane_and_push_check_their_arguments(engine: Engine) -> None:
    with pytest.raises(ConfigError, match="'reduce' exists"):
        engine.add_lane("reduce")
    with pytest.raises(ConfigError, match="exactly 1"):
        engine.add_lane("other", ordered=True, num_threads=2)
    with pytest.raises(ConfigError, match="no lane 'gpu'"):
        engine.push(int, lane="gpu")
    mine, foreign = engine.variable("mine"), create_engine().variable("foreign")
    with pytest.raises(ConfigError, match="foreign"):
        engine.push(int, reads=[mine], writes=[foreign])
    with pytest.raises(ConfigError, match="'key'"):
        engine.push(int, writes=[mine, "key"])
    engine.push(int, writes=[mine]).wait(TIMEOUT_S)  # what was refused holds nothing
    assert mine.version == 1


def test_versions_count_completed_writes(engine: Engine) -> None:
    var = engine.variable("v")
    assert (var.name, var.version) == ("v", 0)
    for _ in range(10):
        engine.push(int, reads=[var])
    engine.wait_all(TIMEOUT_S)
    assert var.version == 0
    for _ in range(10):
        engine.push(int, reads=[var], writes=[var, var])
    engine.wait(var, TIMEOUT_S)
    assert var.version == 10


def test_version_grows_only_when_the_returned_work_finishes(threaded: Engine) -> None:
    var, promise = threaded.variable("v"), Work("reply")
    work = threaded.push(lambda: promise, writes=[var], name="pull")
    with pytest.raises(KVTimeoutError, match=r"pull: .*returned a Work"):
        work.wait(0.05)
    with pytest.raises(KVTimeoutError, match=r"variable 'v'.*pull"):
        threaded.wait(var, 0.01)
    assert var.version == 0
    promise.finish()
    work.wait(TIMEOUT_S)
    assert var.version == 1


def test_ordered_lane_is_first_in_first_out(threaded: Engine) -> None:
    """Also when the head waits for a variable, and whatever the priorities say."""
    var, seen = threaded.variable(), []
    release = blocker(threaded, "io", writes=(var,))
    for i in range(100):
        threaded.push(lambda i=i: seen.append(i), [var] if i % 10 == 0 else [], lane="reduce", priority=i)
    other = threaded.push(lambda: seen.append("broadcast"), lane="broadcast")
    other.wait(TIMEOUT_S)
    assert seen == ["broadcast"]  # the head of "reduce" is blocked, the other lane is not
    release.set()
    threaded.wait_all(TIMEOUT_S)
    assert seen == ["broadcast", *range(100)]


def test_ordered_lane_runs_one_at_a_time(threaded: Engine) -> None:
    running, overlaps = [], []

    def run(i: int) -> None:
        running.append(i)
        overlaps.append(len(running))
        threading.Event().wait(0.001)
        running.remove(i)

    for i in range(50):
        threaded.push(lambda i=i: run(i), lane="reduce")
    threaded.wait_all(TIMEOUT_S)
    assert set(overlaps) == {1}


def test_returned_work_does_not_block_an_ordered_lane(threaded: Engine) -> None:
    promise = Work("reply")
    first = threaded.push(lambda: promise, lane="reduce")
    threaded.push(int, lane="reduce").wait(TIMEOUT_S)
    assert not first.done()
    promise.finish()
    first.wait(TIMEOUT_S)


def test_unordered_lane_takes_larger_priority_first(threaded: Engine) -> None:
    seen: list[tuple[int, int]] = []
    release = blocker(threaded, "io")
    expected = []
    for number, priority in enumerate([0, 5, -3, 5, 0, 9, -3]):
        expected.append((-priority, number))
        threaded.push(lambda p=priority, n=number: seen.append((-p, n)), lane="io", priority=priority)
    release.set()
    threaded.wait_all(TIMEOUT_S)
    assert seen == sorted(expected)  # by priority, then by push order


def test_unordered_lane_passes_over_what_is_blocked(threaded: Engine) -> None:
    var, seen = threaded.variable(), []
    release = blocker(threaded, "reduce", writes=(var,))
    threaded.push(lambda: seen.append("blocked"), reads=[var], lane="io", priority=9)
    threaded.push(lambda: seen.append("free"), lane="io").wait(TIMEOUT_S)
    assert seen == ["free"]
    release.set()
    threaded.wait_all(TIMEOUT_S)
    assert seen == ["free", "blocked"]


def test_reads_run_together_and_a_write_waits_for_all(new_engine: Callable[..., Engine]) -> None:
    engine = new_engine("threaded", 4)
    var = engine.variable()
    together, order, pushed = threading.Barrier(4), [], threading.Event()

    def read() -> None:
        together.wait(TIMEOUT_S)  # breaks unless four reads are inside at once
        order.append("read")

    # The first write holds a thread of the same lane until all are queued: its completion must start four threads.
    engine.push(lambda: (pushed.wait(TIMEOUT_S), order.append("write 1")), writes=[var])
    for _ in range(4):
        engine.push(read, reads=[var])
    engine.push(lambda: order.append("write 2"), writes=[var])
    engine.push(lambda: order.append("late"), reads=[var])
    pushed.set()
    engine.wait_all(TIMEOUT_S)
    assert order == ["write 1", *["read"] * 4, "write 2", "late"]


def test_wait_for_a_variable_ignores_reads_and_other_variables(threaded: Engine) -> None:
    var, other, release = threaded.variable(), threaded.variable(), threading.Event()
    threaded.push(int, writes=[var])
    threaded.push(lambda: release.wait(TIMEOUT_S), reads=[var], writes=[other])
    threaded.wait(var, TIMEOUT_S)
    with pytest.raises(KVTimeoutError):
        threaded.wait(other, 0.01)
    release.set()
    threaded.wait(other, TIMEOUT_S)


def test_returned_work_finishes_the_operation(engine: Engine, finisher: Finisher) -> None:
    var, seen = engine.variable(), []
    for i in range(100):
        engine.push(lambda i=i: (seen.append(i), finisher.promise())[1], writes=[var])
    engine.wait_all(TIMEOUT_S)
    assert seen == list(range(100))
    assert var.version == 100


def test_returned_work_that_is_finished_already(engine: Engine) -> None:
    done, failed = Work(), Work()
    done.finish()
    failed.finish(ValueError("lost"))
    engine.push(lambda: done).wait(TIMEOUT_S)
    with pytest.raises(ValueError, match="lost"):
        engine.push(lambda: failed).wait(TIMEOUT_S)
    engine.push(lambda: failed)
    with pytest.raises(ValueError, match="lost"):  # delivered before, but not for this operation
        engine.wait_all(TIMEOUT_S)


def test_an_operation_may_push_and_return_another(engine: Engine) -> None:
    var = engine.variable()
    outer = engine.push(lambda: engine.push(int, writes=[var], lane="io"), lane="reduce")
    outer.wait(TIMEOUT_S)
    assert var.version == 1


def test_any_other_return_value_means_finished(engine: Engine) -> None:
    engine.push(lambda: 42).wait(TIMEOUT_S)


def test_inline_runs_in_the_pushing_thread_if_nothing_blocks_it(engine: Engine) -> None:
    seen = []
    assert engine.push(lambda: seen.append(threading.get_ident()), lane="inline").done()
    assert seen == [threading.get_ident()]


def test_inline_runs_in_the_thread_that_frees_it(threaded: Engine) -> None:
    var, threads = threaded.variable(), []
    release = blocker(threaded, "reduce", writes=(var,))
    threaded.push(lambda: threads.append(threading.current_thread().name), reads=[var], lane="inline")
    assert threads == []
    release.set()
    threaded.wait_all(TIMEOUT_S)
    assert threads == ["kvmpi-reduce"]


def test_a_long_chain_of_inline_operations_does_not_recurse(threaded: Engine) -> None:
    """Each operation finishes the promise of the next but one: a naive completion would nest 5,000 deep."""
    num_ops = 5_000
    promises = [Work(str(i)) for i in range(num_ops + 1)]
    variables = [threaded.variable() for _ in range(num_ops)]
    for i in range(num_ops):
        threaded.push(lambda i=i: promises[i], writes=[variables[i]], lane="inline")
        threaded.push(lambda i=i: promises[i + 1].finish(), reads=[variables[i]], lane="inline")
    promises[0].finish()
    threaded.wait_all(TIMEOUT_S)
    assert promises[num_ops].done()


def test_threads_start_with_the_first_operation_of_their_lane(threaded: Engine) -> None:
    def lanes() -> set[str]:
        return {t.name for t in threading.enumerate() if t in threaded._threads}

    assert lanes() == set()
    threaded.push(int, lane="reduce").wait(TIMEOUT_S)
    assert lanes() == {"kvmpi-reduce"}
    assert all(thread.daemon for thread in threaded._threads)


def test_finished_operations_are_freed(engine: Engine, finisher: Finisher) -> None:
    """What a function captured goes with it, although its Work, variable and lane live on and its thread idles."""

    class Array:
        pass

    var, works, refs = engine.variable(), [], []
    for lane in ("reduce", "cpu", "inline"):
        for finishes_elsewhere in (False, True):
            array = Array()
            refs.append(weakref.ref(array))
            works.append(
                engine.push(
                    lambda a=array, later=finishes_elsewhere: finisher.promise() if later and a else None,
                    writes=[var],
                    lane=lane,
                )
            )
            del array
    engine.wait_all(TIMEOUT_S)
    engine.push(int, lane="reduce").wait(TIMEOUT_S)  # the threads have passed on to something else
    engine.push(int, lane="cpu").wait(TIMEOUT_S)
    finisher.stop()
    gc.collect()
    assert [ref() for ref in refs] == [None] * len(refs)
    ref = weakref.ref(var)
    del var
    assert ref() is None, "a finished operation keeps its variables"


def test_no_growth_over_many_operations(threaded: Engine) -> None:
    variables = [threaded.variable() for _ in range(10)]

    def pass_by(num_ops: int) -> int:
        for i in range(num_ops):
            threaded.push(int, reads=[variables[i % 7]], writes=[variables[9]] if i % 50 == 0 else [])
        threaded.wait_all(TIMEOUT_S)
        gc.collect()
        return len(gc.get_objects())

    before = pass_by(1_000)
    assert pass_by(20_000) - before < 500


@pytest.mark.skipif(sys.platform != "linux" or os.uname().machine != "x86_64", reason="asks Linux for what it knows")
def test_threads_of_lanes_ask_for_short_slices_and_for_nothing_else() -> None:
    def look() -> tuple[int, int, int]:
        """Policy, niceness and slice of the thread that asks."""
        attributes = ctypes.create_string_buffer(56)
        assert ctypes.CDLL(None).syscall(315, 0, attributes, 56, 0) == 0  # sched_getattr
        policy, nice = os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK, os.getpriority(os.PRIO_PROCESS, 0)
        return policy, nice, int(struct.unpack_from("=Q", attributes, 24)[0])

    engine, found, usual = create_engine(), [], look()
    engine.add_lane("ordered", ordered=True)
    for lane in ("cpu", "ordered"):
        engine.push(lambda: found.append(look()), lane=lane, name="look").wait()
    assert look() == usual, "the caller's own stays as it was"
    engine.close(TIMEOUT_S)
    version = tuple(map(int, re.findall(r"\d+", os.uname().release)[:2]))
    assert found == [(*usual[:2], 100_000 if version >= (6, 12) else usual[2])] * 2
