"""Workers of one client with different numbers of batches, and what goes wrong after some have joined."""

from __future__ import annotations

import functools
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jobs import run_job

import kvmpi
from kvmpi.collectives.memory_comm import MemoryComm
from kvmpi.config import Config
from kvmpi.errors import (
    ConfigError,
    KeyNotInitializedError,
    KVError,
    KVTimeoutError,
    ShapeMismatchError,
    UnsupportedError,
)
from kvmpi.store.replicated import ReplicatedStore

RunRanks = Callable[..., list[Any]]

PROGRAMS = Path(__file__).parent / "programs"


@pytest.mark.parametrize(("options", "turns", "names", "settings"), [
    ("-n 2", "13", ["mpi"], {}),
    ("-n 3 -c 1 -s 2", "0123", ["mpi", "dist_sync_mpi", "dist_async_mpi"], {}),
    ("-n 4 -c 2 -s 2", "0123", ["dist_sync_mpi", "dist_async_mpi", "dist_sync"], {}),
    ("-n 4 -c 1 -s 1", "12", ["dist_sync_mpi"], {"engine": "naive"}),
    ("-n 3 -c 1 -s 1", "03", ["mpi", "dist_sync_mpi"], {"allreduce": "mpi", "shared_input": "stage"}),
    ("-n 3", "02", ["mpi"], {"allreduce": "shared", "shared_input": "stage", "bucket_bytes": 1000}),
])  # fmt: skip
def test_uneven_batches(job, tmp_path, options, turns, names, settings):
    """``turns``: which ways to share the batches out; where many jobs would show the same, two of them."""
    done = job(options, PROGRAMS / "joining.py", tmp_path, turns, *names, **settings)
    for name in names:
        assert done.stdout.count(f"joining {name} right") == int(options.split()[1])


@pytest.mark.parametrize("hosts", [None, "aab", "abab", "aabb", "abc"])
@pytest.mark.parametrize("algorithm", ["auto", "ring", "multi_ring", "hierarchical", "host_ring", "naive"])
def test_every_algorithm_on_one_host_and_on_several(run_ranks: RunRanks, algorithm: str, hosts: str | None) -> None:
    """Small and large keys of three dtypes in one list, each worker in turn being the first and the last to join."""
    size = 3 if hosts is None else len(hosts)
    shapes = [((3,), "f4"), ((100_003,), "f4"), ((40_001,), "f8"), ((0,), "i4"), ((70_000,), "f2")]
    keys = list(range(len(shapes)))

    @functools.cache
    def value(rank: int, step: int, key: int) -> Any:
        shape, dtype = shapes[key]
        return ((np.arange(shape[0]) + 7 * rank + 3 * step + key) % 11).astype(dtype)

    @functools.cache
    def sum_of(ranks: tuple[int, ...], step: int, key: int) -> Any:
        return sum(value(rank, step, key).astype("f8") for rank in ranks)

    def rank_main(comm: MemoryComm, first: int) -> None:
        counts = [(rank - first) % size * 2 for rank in range(size)]
        kv = ReplicatedStore("mpi", Config(allreduce=algorithm, timeout_s=20.0, bucket_bytes=600_000), comm)
        kv.init(keys, [np.zeros(shape, dtype) for shape, dtype in shapes])
        outs = [np.zeros(shape, dtype) for shape, dtype in shapes]
        for step in range(counts[comm.rank]):
            kv.pushpull(keys, [value(comm.rank, step, key).copy() for key in keys], outs)
            left = tuple(rank for rank in range(size) if counts[rank] > step)
            for key in keys:
                assert np.array_equal(outs[key], sum_of(left, step, key)), f"key {key}, step {step}, {counts}"
        kv.join()
        kv.pull(keys, outs)
        last = counts.index(max(counts))
        for key in keys:
            np.testing.assert_array_equal(outs[key], value(last, max(counts) - 1, key))
        kv.close()

    for first in range(size):
        run_ranks(size, lambda comm, first=first: rank_main(comm, first), hosts=hosts)


def store_of(comm: MemoryComm, timeout_s: float = 20.0) -> ReplicatedStore:
    kv = ReplicatedStore("mpi", Config(timeout_s=timeout_s), comm)
    kv.init("w", np.zeros(5))
    return kv


MISTAKES: dict[str, tuple[Callable[[Any], object], type[KVError], str]] = {
    "init": (lambda kv: kv.init("new", np.zeros(3)), UnsupportedError, "has joined, which init cannot do without"),
    "client": (lambda kv: kv.client, UnsupportedError, "has joined, which client cannot do without"),
    "unknown key": (lambda kv: kv.push("x", np.zeros(5)), KeyNotInitializedError, "never initialised"),
    "one shape": (
        lambda kv: kv.push("w", np.zeros(6 if kv.rank == 1 else 5)), ShapeMismatchError, "(6,), the key has (5,)",
    ),
    "no optimizer": (lambda kv: kv.set_hyperparams(lr=1.0), ConfigError, "there is no optimizer"),
}  # fmt: skip


@pytest.mark.parametrize("joined", [0, 2])
@pytest.mark.parametrize("what", list(MISTAKES))
def test_a_mistake_is_an_error_on_all_and_join_can_go_on(run_ranks: RunRanks, what: str, joined: int) -> None:
    """What the others must not do, or do wrongly. Those who catch it go on to the right sums."""
    mistake, kind, text = MISTAKES[what]

    def rank_main(comm: MemoryComm) -> None:
        kv = store_of(comm)
        call = kv.join if comm.rank == joined else lambda: mistake(kv)
        with pytest.raises(kind) as caught:
            call()
        assert text in str(caught.value)
        out = np.zeros(5)
        for step in range(3 if comm.rank != joined else 0):
            kv.pushpull("w", np.arange(5.0) + comm.rank + step, out)
            left = [np.arange(5.0) + rank + step for rank in range(3) if rank != joined]
            np.testing.assert_array_equal(out, sum(left))
        kv.join()
        kv.close()

    run_ranks(3, rank_main)


@pytest.mark.parametrize("joined", [0, 1])
def test_a_mistake_on_the_store_of_the_client(run_ranks: RunRanks, joined: int) -> None:
    """The others go on after it, on both stores; ``join`` goes along with them, and tells of it at its end."""

    def rank_main(comm: MemoryComm) -> None:
        kv, out = store_of(comm), np.zeros(5)
        kv.client.init("g", np.zeros(5))
        if comm.rank == joined:
            with pytest.raises(KeyNotInitializedError):
                kv.join()
        else:
            with pytest.raises(KeyNotInitializedError):
                kv.client.push("x", out)
            for store, key in ((kv.client, "g"), (kv, "w"), (kv.client, "g")):
                store.pushpull(key, np.arange(5.0), out)
                np.testing.assert_array_equal(out, np.arange(5.0))
        kv.join()
        kv.client.pull("g", out)
        np.testing.assert_array_equal(out, np.arange(5.0))
        with pytest.raises(KVError, match="has called join"):
            kv.client.push("g", out)
        kv.close()

    run_ranks(2, rank_main)


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("joined", [0, 1])
def test_an_exchange_that_fails_everywhere(run_ranks: RunRanks, joined: int, async_op: bool) -> None:
    """An updater raises. Where the others wait, they raise; so does ``join``, unless they did not wait at once."""

    def rank_main(comm: MemoryComm) -> None:
        kv = store_of(comm)
        failures = iter([False, True, False])

        def update(key: Any, pushed: Any, stored: Any) -> None:
            if next(failures):
                raise ZeroDivisionError("in the updater")
            stored += pushed

        kv.set_updater(update)
        out = np.zeros(5)

        def pushpull() -> None:
            work = kv.pushpull("w", np.ones(5), out, async_op=async_op)
            if work is not None:
                work.wait()

        if comm.rank != joined:
            pushpull()
            with pytest.raises(ZeroDivisionError):
                pushpull()
            pushpull()
        elif not async_op:
            with pytest.raises(ZeroDivisionError):
                kv.join()
        kv.join()
        kv.pull("w", out)
        assert (out == 2.0).all()
        kv.close()

    run_ranks(2, rank_main)


@pytest.mark.parametrize("joined", [0, 1])
def test_a_store_that_is_closed_before_all_have_joined(run_ranks: RunRanks, joined: int) -> None:
    def rank_main(comm: MemoryComm) -> None:
        kv = store_of(comm)
        if comm.rank == joined:
            with pytest.raises(UnsupportedError, match="let all workers join before one closes the store"):
                kv.join()
            kv.abort()
        else:
            kv.close()

    run_ranks(2, rank_main)


@pytest.mark.parametrize("joined", [0, 1])
@pytest.mark.parametrize("late", ["makes no call", "stays away from a sum"])
def test_a_worker_that_is_not_heard_of_is_named_on_all(run_ranks: RunRanks, late: str, joined: int) -> None:
    """Of three, one has joined, one pushes, and the last does nothing for too long."""
    timeout_s, over = 1.0, threading.Event()

    def rank_main(comm: MemoryComm) -> float:
        kv = store_of(comm, timeout_s)
        if comm.rank == 2:
            if late == "stays away from a sum":  # it agrees to the push, and is stopped
                kv._reduce.allreduce_many = lambda *_: over.wait(20.0)  # type: ignore[method-assign,assignment,return-value]
                kv.push("w", np.ones(5), async_op=True)
            over.wait(20.0)
            kv.abort()
            return 0.0
        start_s = time.monotonic()
        call = kv.join if comm.rank == joined else lambda: kv.push("w", np.ones(5))
        with pytest.raises(KVTimeoutError, match="MPI rank 2"):
            call()
        seconds = time.monotonic() - start_s
        assert kv.broken
        if comm.rank == joined:
            over.set()
        kv.abort()
        return seconds

    assert max(run_ranks(3, rank_main)) < 4.5 * timeout_s


@pytest.mark.parametrize("last", [0, 2])
def test_a_worker_that_is_lost_to_the_clients_own_store_ends_the_wait_for_it(run_ranks: RunRanks, last: int) -> None:
    """All join the store, and one never joins ``kv.client``, as if it were stopped in between."""
    timeout_s, over = 1.0, threading.Event()

    def rank_main(comm: MemoryComm) -> float:
        kv = store_of(comm, timeout_s)
        assert kv.client is not kv
        inner = kv._client_store
        if comm.rank == last:
            kv._client_store = None
            kv.join()
            over.wait(20.0)
            kv._client_store = inner
            kv.abort()
            return 0.0
        start_s = time.monotonic()
        with pytest.raises(KVTimeoutError, match=f"MPI rank {last}"):
            kv.join()
        seconds = time.monotonic() - start_s
        assert kv.broken
        time.sleep(0.5)
        over.set()
        kv.abort()
        return seconds

    assert max(run_ranks(3, rank_main)) < 4.5 * timeout_s


@pytest.mark.parametrize(("joined", "victim", "number", "word"), [
    (1, 1, signal.SIGKILL, ""), (0, 2, signal.SIGKILL, ""), (0, 2, signal.SIGSTOP, "KVTimeoutError"),
    (1, 1, signal.SIGSTOP, "KVTimeoutError"),
])  # fmt: skip
def test_a_worker_is_lost_after_one_has_joined(joined, victim, number, word):
    start_s = time.monotonic()
    done = run_job("-n 3", PROGRAMS / "joined_dies.py", joined, victim, int(number), settings={"timeout_s": 3})
    assert done.returncode != 0
    assert "end" not in done.stdout
    if word:
        assert f"{word}" in done.stderr
        assert f"MPI rank {victim}" in done.stderr
    assert time.monotonic() - start_s < 30.0


def test_a_rule_that_one_worker_does_not_know_is_an_error_on_all(run_ranks: RunRanks, monkeypatch: Any) -> None:
    """Registered in a module that the worker which has joined did not import."""

    def unknown(name: str, _: object) -> kvmpi.optim.Rule:
        raise ConfigError(f"no update rule is registered as {name!r}")

    monkeypatch.setattr(kvmpi.optim, "create", unknown)

    def rank_main(comm: MemoryComm) -> None:
        kv = store_of(comm)
        call = kv.join if comm.rank == 0 else lambda: kv.set_optimizer(kvmpi.optim.SGD(lr=1.0))
        with pytest.raises(ConfigError, match="no update rule is registered"):
            call()
        kv.join()
        kv.close()

    run_ranks(2, rank_main)
