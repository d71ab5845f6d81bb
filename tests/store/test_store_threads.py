"""Several threads of one worker that call one store: each call is made as a whole, before the next."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvmpi
from kvmpi import optim
from kvmpi.collectives.memory_comm import MemoryComm
from kvmpi.config import Config
from kvmpi.errors import KVError
from kvmpi.store.replicated import ReplicatedStore

RunRanks = Callable[..., list[Any]]

TIMEOUT_S = 20.0
#: Elements of which an update takes some time.
COUNT = 1_000_000
#: How long a thread is slow, if no other overtakes it.
SLOW_S = 0.3


@pytest.mark.parametrize("how", ["push", "pushpull of devices", "async"])
@pytest.mark.parametrize("name", ["dist_sync", "dist_async"])
def test_what_two_threads_push_to_one_key_counts_once_each(name: str, how: str) -> None:
    """The first is slow between its sum and what it sends."""
    with kvmpi.create(name, timeout_s=TIMEOUT_S) as kv:
        kv.init("w", np.zeros(10))
        kv.set_optimizer(optim.Test(lr=-1.0))
        summed, overtaken = threading.Event(), threading.Event()
        send = kv._ask_op  # type: ignore[attr-defined]

        def slowly(*given: Any, **more: Any) -> Any:
            if not summed.is_set():
                summed.set()
                overtaken.wait(SLOW_S)
            else:
                overtaken.set()
            return send(*given, **more)

        def make(value: float) -> None:
            if how == "pushpull of devices":
                kv.pushpull("w", [np.full(10, value - 1.0), np.ones(10)])
            elif how == "async":
                given = [np.full(10, value - 1.0), np.ones(10)]
                kv.push("w", given, async_op=True).wait()  # type: ignore[union-attr]
            else:
                kv.push("w", np.full(10, value))

        kv._ask_op = slowly  # type: ignore[attr-defined]
        first = threading.Thread(target=make, args=(2.0,))
        first.start()
        assert summed.wait(TIMEOUT_S)
        make(100.0)
        first.join(TIMEOUT_S)
        out = np.empty(10)
        kv.pull("w", out)
        np.testing.assert_array_equal(out, np.full(10, 102.0))


@pytest.mark.parametrize("op", ["pushpull", "allreduce"])
def test_sums_are_in_the_order_of_the_agreements_whatever_thread_is_slow(run_ranks: RunRanks, op: str) -> None:
    """On rank 1 the thread that has agreed first is slow to sum."""

    def rank_main(comm: MemoryComm) -> None:
        kv = ReplicatedStore("mpi", Config(timeout_s=TIMEOUT_S), comm)
        kv.init(["a", "b"], [np.zeros(5), np.zeros(5)])
        agreed, overtaken = threading.Event(), threading.Event()
        enter = kv._enter_keys

        def slowly(call: Any, key: Any, *given: Any) -> Any:
            parts = enter(call, key, *given)
            if key == "a":
                agreed.set()
                overtaken.wait(SLOW_S * comm.rank)
            else:
                overtaken.set()
            return parts

        kv._enter_keys = slowly  # type: ignore[method-assign]
        a, b = np.full(5, 1.0 + comm.rank), np.full(5, 10.0 + comm.rank)
        first = threading.Thread(target=lambda: getattr(kv, op)("a", a))
        first.start()
        assert agreed.wait(TIMEOUT_S)
        getattr(kv, op)("b", b)
        first.join(TIMEOUT_S)
        np.testing.assert_array_equal(a, np.full(5, 3.0))
        np.testing.assert_array_equal(b, np.full(5, 21.0))
        kv.close()

    run_ranks(2, rank_main)


def test_what_one_thread_saves_or_loads_while_another_pushes_is_of_one_moment(tmp_path: Path) -> None:
    """All elements of the value are equal at any moment, and so are those of its momentum."""
    path = tmp_path / "saved"
    with kvmpi.create("local") as kv, kvmpi.create("local") as other:
        kv.init("w", np.zeros(COUNT, "f4"))
        kv.set_optimizer(optim.SGD(lr=1.0, momentum=0.5))
        gradient, out, pushed, over = np.ones(COUNT, "f4"), np.empty(COUNT, "f4"), threading.Event(), threading.Event()

        def push() -> None:
            while not over.is_set():
                kv.push("w", gradient)
                pushed.set()

        thread = threading.Thread(target=push)
        thread.start()
        try:
            assert pushed.wait(TIMEOUT_S)
            for _ in range(5):
                kv.save(path)
                other.load(path)
                other.pushpull("w", gradient, out)
                assert out.min() == out.max()
            for _ in range(5):
                kv.load(path)
                kv.pull("w", out)
                assert out.min() == out.max()
        finally:
            over.set()
            thread.join(TIMEOUT_S)


def test_a_child_forked_while_a_thread_makes_a_call_is_told_so_at_once() -> None:
    with kvmpi.create("dist_sync", timeout_s=TIMEOUT_S) as kv:
        kv.init("w", np.zeros(10))
        inside, done = threading.Event(), threading.Event()
        enter = kv._enter_keys

        def stop(*given: Any) -> Any:
            inside.set()
            done.wait(TIMEOUT_S)
            return enter(*given)

        kv._enter_keys = stop  # type: ignore[method-assign]
        thread = threading.Thread(target=lambda: kv.push("w", np.ones(10)))
        thread.start()
        assert inside.wait(TIMEOUT_S)
        child = os.fork()
        if child == 0:
            threading.Timer(TIMEOUT_S, lambda: os._exit(2)).start()
            try:
                kv.push("w", np.ones(10))
            except KVError as error:
                os._exit(0 if "forked without its threads" in str(error) else 3)
            os._exit(1)
        _, status = os.waitpid(child, 0)
        done.set()
        thread.join(TIMEOUT_S)
        assert os.waitstatus_to_exitcode(status) == 0


@pytest.mark.parametrize("name", ["local", "dist_sync", "dist_async"])
def test_a_store_is_closed_once_by_threads_that_close_it_together(name: str) -> None:
    kv = kvmpi.create(name, timeout_s=TIMEOUT_S)
    kv.init("w", np.zeros(10))
    settle, settled = kv._settle, list[int]()  # type: ignore[attr-defined]
    begun = threading.Barrier(3)

    def slowly(deadline: Any) -> None:
        settled.append(threading.get_ident())
        time.sleep(SLOW_S)
        settle(deadline)

    kv._settle = slowly  # type: ignore[attr-defined]
    errors: list[Exception] = []

    def close() -> None:
        begun.wait(TIMEOUT_S)
        try:
            kv.close()
            assert kv.closed, "it returns when the store is closed"
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=close) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert not any(thread.is_alive() for thread in threads)
    assert not errors
    assert len(settled) == 1
