"""Calls that fail, and calls that nearly would: when they end, what they have touched by then, and who hears of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from store_helpers import array, pulled

import kvmpi
from kvmpi import optim
from kvmpi.collectives.memory_comm import MemoryComm
from kvmpi.config import Config
from kvmpi.engine import Work
from kvmpi.errors import ConfigError, KVError, KVTimeoutError
from kvmpi.store import commanding, core, replicated
from kvmpi.store.base import KVStore
from kvmpi.store.call import JoinedWork, KeyState
from kvmpi.store.replicated import ReplicatedStore

RunRanks = Callable[..., list[Any]]

TIMEOUT_S = 20.0
KEYS = ["a", "b", "c", "d"]


@pytest.fixture
def in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """No array is so small that its operations run in the caller's thread."""
    monkeypatch.setattr(core, "INLINE_BYTES", 0)


def test_a_list_call_that_fails_ends_when_all_of_it_has(in_threads: None) -> None:
    """Until then the store reads what is pushed, and the caller believes that it may write there."""
    met = []

    def updater(key: str, pushed: Any, stored: Any) -> None:
        if key == "a":
            raise ValueError(f"gradient of {key} is not a number")
        time.sleep(0.02)
        met.append((key, pushed.tolist()))

    with kvmpi.create("local") as kv:
        kv.init(KEYS, [np.zeros(3)] * 4)
        kv.set_updater(updater)
        grads = [np.full(3, 1.0 + i) for i in range(4)]
        with pytest.raises(ValueError, match="gradient of a"):
            kv.push(KEYS, grads)
        for grad in grads:
            grad[:] = -777
        assert sorted(met) == [(key, [1.0 + i] * 3) for i, key in enumerate(KEYS) if i]


def test_a_wait_whose_time_is_over_says_so_although_something_has_failed() -> None:
    first, second = Work("first"), Work("second")
    first.finish(ZeroDivisionError())
    both = JoinedWork([first, second], "both")
    with pytest.raises(KVTimeoutError, match="second: not finished after"):
        both.wait(0.01)
    second.finish()
    with pytest.raises(ZeroDivisionError):
        both.wait(0.01)


def test_to_ask_often_whether_many_operations_are_done_takes_little() -> None:
    """In whatever order they end."""
    asked = 0

    class Counting(Work):
        def done(self) -> bool:
            nonlocal asked
            asked += 1
            return super().done()

    works = [Counting(str(i)) for i in range(1000)]
    together = JoinedWork(works, "all")
    for i in [*range(0, 1000, 2), *range(1, 999, 2)]:
        works[i].finish()
        assert not together.done()
    works[999].finish()
    assert together.done()
    assert asked <= 2 * 1000 + 2


@pytest.mark.parametrize("error", [None, KVError("planted")])
def test_who_waits_for_a_meeting_finds_what_it_has_said(error: KVError | None) -> None:
    """Those who wait for the work alone are woken before its callbacks have been called."""
    met, known = Work("meeting"), []

    def hear() -> None:
        time.sleep(0.05)
        known.append("said")

    both = commanding._then(met, hear)
    threading.Thread(target=met.finish, args=(error,)).start()
    assert both.wait_done(TIMEOUT_S)
    assert known == ["said"]
    assert both.error() is error


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("kind", ["whole", "rows"])
def test_an_updater_runs_once_at_a_time_in_the_order_of_the_program(
    in_threads: None, asynchronous: bool, kind: str
) -> None:
    order, inside = [], []

    def updater(key: str, pushed: Any, stored: Any) -> None:
        inside.append(key)
        time.sleep(0.002)
        assert inside == [key], "another thread is in it"
        order.append(inside.pop())

    with kvmpi.create("local") as kv:
        kv.init(KEYS, [np.zeros((3, 1))] * 4)
        kv.set_updater(updater)
        ones = np.ones((3, 1))
        pushed: Any = ones if kind == "whole" else (np.array([0, 2]), ones[:2])
        if asynchronous:
            for work in [kv.push(key, pushed, async_op=True) for key in KEYS * 3]:
                work.wait()
        else:
            for _ in range(3):
                kv.push(KEYS, [pushed] * 4)
        assert order == KEYS * 3


def test_a_sum_that_is_pushed_waits_for_those_who_read_the_value_before(
    run_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks of a host have one memory for a large value."""
    count, pushed, deliver = 100_000, threading.Event(), replicated.deliver
    outs = [np.zeros(count), np.zeros(count)]

    def late(to: Any, flat: Any) -> None:
        if any(out is outs[1] for out in to):
            pushed.wait(0.3)  # by then rank 0 would have written
        deliver(to, flat)

    monkeypatch.setattr(replicated, "deliver", late)

    def rank_main(comm: MemoryComm) -> None:
        kv = ReplicatedStore("mpi", Config(timeout_s=TIMEOUT_S), comm)
        kv.init("w", np.zeros(count))
        assert kv._replicas["w"].common, "else the test cannot fail"
        kv.push("w", np.ones(count), reduced=True)
        pull = kv.pull("w", outs[comm.rank], async_op=True)
        push = kv.push("w", np.full(count, -1.0), reduced=True, async_op=True)
        pull.wait()
        push.wait()
        if comm.rank == 0:
            pushed.set()
        assert (outs[comm.rank] == 1).all()
        kv.close()

    run_ranks(2, rank_main)


CALLS: dict[str, Callable[[KVStore], object]] = {
    "set_hyperparams": lambda kv: kv.set_hyperparams(lr=0.25),
    "set_optimizer": lambda kv: kv.set_optimizer(optim.SGD(lr=0.25)),
    "set_updater": lambda kv: kv.set_updater(lambda key, pushed, stored: np.add(stored, pushed, out=stored)),
    "assign": lambda kv: kv.assign("w", np.full(4, 5.0)),
    "broadcast": lambda kv: kv.broadcast("new", np.ones(4), np.zeros(4)),
    "client": lambda kv: kv.client,
    "barrier": lambda kv: kv.barrier(),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_has_failed_on_one_worker_before_is_an_error_of_the_call_on_all(run_ranks: RunRanks, name: str) -> None:
    def rank_main(comm: MemoryComm) -> list[float]:
        kv = ReplicatedStore("mpi", Config(timeout_s=5.0), comm)
        kv.init("w", np.zeros(4))
        kv.set_optimizer(optim.SGD(lr=1.0))
        if comm.rank == 0:
            kv._engine.push(lambda: 1 // 0, writes=[kv._engine.variable("planted")], name="planted")
        with pytest.raises(ZeroDivisionError if comm.rank == 0 else KVError):
            CALLS[name](kv)
        CALLS[name](kv)  # again, now that all have heard of it
        kv.push("w", np.ones(4))
        out = pulled(kv, "w", np.zeros(4))
        kv.close()
        return out.tolist()

    first, second = run_ranks(2, rank_main)
    assert first == second != [0.0] * 4


def test_two_keys_are_not_pulled_into_one_memory(any_store: KVStore) -> None:
    """Whose value would be there at the end, on which worker?"""
    values = [array(0), array(1)]
    any_store.init(KEYS[:2], values)
    block = np.empty((4, 3), "f4")
    for outs in ([block[:2], block[:2]], [block[1:3], block[:2]]):
        with pytest.raises(ConfigError, match="pull of keys 'a' and 'b': their results would go to the same memory"):
            any_store.pull(KEYS[:2], outs)
    both = np.empty((2, 6), "f4")  # columns of one block lie between each other, and apart
    any_store.pull(KEYS[:2], [both[:, ::2], both[:, 1::2]])
    np.testing.assert_array_equal(both[:, ::2], values[0])
    np.testing.assert_array_equal(both[:, 1::2], values[1])
    any_store.pull(KEYS[:2], [[block[:2], block[:2]], block[2:]])  # of one key: the same numbers
    np.testing.assert_array_equal(block, np.concatenate(values))


def test_who_waits_for_several_operations_is_woken_once() -> None:
    """They end about in the order in which they were begun."""
    works = [Work(f"operation {i}") for i in range(5)]
    waiting = threading.Thread(target=JoinedWork(works, "all").wait, daemon=True)
    waiting.start()
    until_s = time.monotonic() + 20
    while works[-1]._gates is None:
        assert time.monotonic() < until_s
        time.sleep(1e-3)
    assert all(work._gates is None for work in works[:-1])
    for work in works:
        assert waiting.is_alive()
        work.finish()
    waiting.join(20)
    assert not waiting.is_alive()


def test_time_that_is_up_is_told_of_the_first_operation_that_is_late() -> None:
    works = [Work(f"operation {i}") for i in range(4)]
    works[0].finish()
    works[3].finish()
    with pytest.raises(KVTimeoutError, match="operation 1: not finished"):
        JoinedWork(works, "all").wait(0.05)


@pytest.mark.parametrize("op", ["push", "pushpull"])
def test_what_compression_cannot_carry_keeps_only_its_own_key_back(op: str) -> None:
    """Others of the list are pushed, however often such a call was made before."""
    keys, bad = ["a", "b", "c", "d"], "c"
    with kvmpi.create("dist_sync") as kv:
        kv.init(keys, [np.zeros(3, "f4") for _ in keys])
        kv.set_gradient_compression({"type": "2bit", "threshold": 0.5})
        values, outs = [np.full(3, 0.5, "f4") for _ in keys], [np.empty(3, "f4") for _ in keys]
        for fails in (False, False, False, True, False):
            values[2].fill(np.nan if fails else 0.5)
            for value in (*values[:2], values[3]):
                value.fill(-0.5 if fails else 0.5)
            if op == "push":
                kv.push(keys, values)
            else:
                with pytest.raises(KVError, match="push of key 'c'") if fails else nullcontext():
                    kv.pushpull(keys, values, outs)
            for key in keys:
                out = np.zeros(3, "f4")
                if key == bad and fails and op == "push":
                    with pytest.raises(KVError, match="push of key 'c'"):
                        kv.pull(key, out)
                kv.pull(key, out)
                assert (out == (-0.5 if fails and key != bad else 0.5)).all(), f"{op}, {key}: {out}"


@pytest.mark.parametrize("when", ["while it waits", "just before"])
def test_a_pull_raises_what_the_push_that_brings_its_value_fails_with(
    when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with kvmpi.create("dist_sync", timeout_s=TIMEOUT_S) as kv:
        value, out = np.ones(5, "f4"), np.zeros(5, "f4")
        kv.init("w", value)
        kv.push("w", value)
        kv.pull("w", out)
        pushed, error = Work("a push"), KVError("lost on its way")
        with monkeypatch.context() as patch:
            for name in ("push_ahead", "exchange_together"):
                patch.setattr(kv._ps, name, lambda *_: pushed)  # type: ignore[attr-defined]
            kv.push("w", value)
        look = kv._work_ahead  # type: ignore[attr-defined]

        def and_fail(state: KeyState) -> Work | None:
            found = look(state)
            if when == "just before":
                pushed.finish(error)
            else:
                threading.Timer(0.05, pushed.finish, [error]).start()
            return found

        monkeypatch.setattr(kv, "_work_ahead", and_fail)
        with pytest.raises(KVError, match="lost on its way"):
            kv.pull("w", out)
        monkeypatch.undo()
        np.testing.assert_array_equal(out, value)
        kv.push("w", 2 * value)
        kv.pull("w", out)
        np.testing.assert_array_equal(out, 2 * value)


def test_after_a_push_that_a_signal_has_interrupted_a_pull_asks_the_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    with kvmpi.create("dist_sync", timeout_s=TIMEOUT_S) as kv:
        value, out = np.ones(5, "f4"), np.zeros(5, "f4")
        kv.init("w", value)
        kv.push("w", value)
        kv.pull("w", out)

        def interrupted(*_: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            for name in ("push_ahead", "exchange_together"):
                patch.setattr(kv._ps, name, interrupted)  # type: ignore[attr-defined]
            with pytest.raises(KeyboardInterrupt):
                kv.push("w", 2 * value)
        out.fill(np.nan)
        work = kv.pull("w", out, async_op=True)
        assert work is not None
        work.wait(TIMEOUT_S)
        np.testing.assert_array_equal(out, value)
        kv.push("w", 3 * value)
        kv.pull("w", out)
        np.testing.assert_array_equal(out, 3 * value)
