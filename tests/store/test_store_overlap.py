"""What goes on of one asynchronous call while the sum of another is under way, or its update."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvmpi import optim
from kvmpi.collectives.memory_comm import MemoryComm
from kvmpi.config import Config
from kvmpi.store.replicated import ReplicatedStore

RunRanks = Callable[..., list[Any]]

SIZE = 3
TIMEOUT_S = 20.0
KEYS = ("a", "b", "c")


def store_of(comm: MemoryComm) -> ReplicatedStore:
    kv = ReplicatedStore("mpi", Config(timeout_s=TIMEOUT_S), comm)
    for key in KEYS:
        kv.init(key, np.zeros(5))
    return kv


def agreements(kv: ReplicatedStore) -> int:
    return int(kv.stats()["phases"]["wait"]["calls"])


def wait_for(condition: Callable[[], bool]) -> None:
    until_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(1e-3)


def test_workers_agree_on_a_call_while_they_sum_another(run_ranks: RunRanks) -> None:
    meeting = threading.Barrier(SIZE)

    def rank_main(comm: MemoryComm) -> None:
        kv = store_of(comm)
        outs = [np.zeros(5) for _ in KEYS]
        release = threading.Event()
        kv._engine.push(lambda: release.wait(TIMEOUT_S), lane="reduce", name="a sum that takes long")
        before = agreements(kv)
        works = [
            kv.pushpull(key, np.full(5, comm.rank + 1.0), out, async_op=True)
            for key, out in zip(KEYS, outs, strict=True)
        ]
        wait_for(lambda: agreements(kv) == before + len(KEYS))
        assert not any(work.done() for work in works)
        meeting.wait(TIMEOUT_S)
        release.set()
        for work, out in zip(works, outs, strict=True):
            work.wait()
            assert out.tolist() == [6.0] * 5
        kv.close()

    run_ranks(SIZE, rank_main)


def test_some_may_wait_for_a_call_that_others_do_not_wait_for(run_ranks: RunRanks) -> None:
    """Agreements keep the order of calls, whichever thread makes them and however late it is."""

    def rank_main(comm: MemoryComm) -> None:
        kv, works, outs = store_of(comm), [], []
        agree = kv._reduce.agree

        def late(*arguments: Any) -> Any:
            if threading.current_thread().name.endswith("agree"):
                time.sleep(1e-3)
            return agree(*arguments)

        kv._reduce.agree = late  # type: ignore[method-assign]
        for step in range(30):
            for number, key in enumerate(KEYS):
                out = np.zeros(5)
                async_op = (step + number + comm.rank) % 3 != 0
                work = kv.pushpull(key, np.full(5, step * (comm.rank + 1.0)), out, async_op=async_op)
                works.append(work)
                outs.append((out, 6.0 * step))
                # Which nobody sums: the next call's agreement is the first that could overtake its own.
                works.append(kv.pull(key, out, async_op=True))
        for work in filter(None, works):
            work.wait()
        assert all(out.tolist() == [total] * 5 for out, total in outs)
        kv.close()

    run_ranks(SIZE, rank_main)


def test_a_sum_does_not_wait_for_the_update_of_another_key(
    run_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But the next sum of the same key does, which would replace what the update reads."""
    update = optim.update

    def slow(rule: Any, value: Any, *arguments: Any, **options: Any) -> None:
        # Threads of an engine belong to one rank: its values are known by where they lie.
        for store, release, updating in stores:
            if store._replicas["a"].value is value:
                updating.set()
                assert release.wait(TIMEOUT_S)
        update(rule, value, *arguments, **options)

    stores: list[tuple[ReplicatedStore, threading.Event, threading.Event]] = []
    monkeypatch.setattr(optim, "update", slow)
    meeting = threading.Barrier(SIZE)

    def rank_main(comm: MemoryComm) -> None:
        kv, release, updating = store_of(comm), threading.Event(), threading.Event()
        stores.append((kv, release, updating))
        kv.set_optimizer(optim.Test(lr=-1.0))
        out = np.zeros(5)
        late = kv.push("a", np.ones(5), async_op=True)
        kv.pushpull("b", np.ones(5), out, async_op=True).wait()
        assert out.tolist() == [3.0] * 5
        assert updating.wait(TIMEOUT_S)
        assert not late.done()
        again = kv.push("a", np.ones(5), async_op=True)
        meeting.wait(TIMEOUT_S)
        time.sleep(0.05)
        release.set()
        again.wait()
        kv.pull("a", out)
        assert out.tolist() == [6.0] * 5
        kv.close()

    run_ranks(SIZE, rank_main)


def test_an_update_that_fails_elsewhere_is_an_error_of_its_call(
    run_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    update, failing = optim.update, [True] * SIZE

    def fails(*arguments: Any, **options: Any) -> None:
        if failing:
            failing.pop()
            raise ZeroDivisionError("in the rule")
        update(*arguments, **options)

    monkeypatch.setattr(optim, "update", fails)
    meeting = threading.Barrier(SIZE)

    def rank_main(comm: MemoryComm) -> None:
        kv = store_of(comm)
        kv.set_optimizer(optim.Test(lr=-1.0))
        with pytest.raises(ZeroDivisionError):
            kv.push("a", np.ones(5), async_op=True).wait()
        meeting.wait(TIMEOUT_S)
        out = np.zeros(5)
        kv.pushpull("a", np.ones(5), out, async_op=True).wait()
        assert out.tolist() == [3.0] * 5
        kv.close()

    run_ranks(SIZE, rank_main)


def test_an_updater_is_called_in_the_order_of_calls_on_all_workers(run_ranks: RunRanks) -> None:
    """It may remember what it has done, and then values would differ."""

    def rank_main(comm: MemoryComm) -> list[str]:
        kv, order = store_of(comm), []

        def updater(key: Any, pushed: Any, stored: Any) -> None:
            time.sleep(1e-3 * ((comm.rank + len(order)) % 3))
            order.append(key)

        kv.set_updater(updater)
        for work in [kv.push(key, np.ones(5), async_op=True, priority=ord(key)) for key in KEYS * 5]:
            work.wait()
        kv.close()
        return order

    assert run_ranks(SIZE, rank_main) == [list(KEYS * 5)] * SIZE
