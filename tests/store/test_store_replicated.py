"""The store without servers, its workers as threads of this process."""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kvmpi
from kvmpi.collectives.arena import own
from kvmpi.collectives.memory_comm import MemoryComm
from kvmpi.config import Config
from kvmpi.errors import ConfigError, DTypeMismatchError, OrderMismatchError, ShapeMismatchError, UnsupportedError
from kvmpi.store import base
from kvmpi.store.replicated import ReplicatedStore

RunRanks = Callable[..., list[Any]]


@pytest.mark.parametrize(
    ("settings", "told"),
    [([{"bucket_bytes": 1 << 20}, {"bucket_bytes": 1 << 21}], "KVMPI_BUCKET_BYTES=2097152"),
     ([{}, {"sharded_update": "on"}], "KVMPI_SHARDED_UPDATE=on")],
)  # fmt: skip
def test_workers_that_would_sum_in_other_ways_get_an_error(
    run_ranks: RunRanks, settings: list[dict[str, Any]], told: str
) -> None:
    def rank_main(comm: MemoryComm) -> None:
        kv = ReplicatedStore("mpi", Config(timeout_s=20.0, **settings[comm.rank]), comm)
        with pytest.raises(ConfigError, match=rf"{told} on MPI rank 1"):
            kv.init(["a", "b"], [np.zeros(5), np.zeros(5)])
        kv.abort()

    run_ranks(2, rank_main)


def test_a_scale_that_cannot_be_is_an_error_on_all_and_nothing_is_lost(run_ranks: RunRanks) -> None:
    def rank_main(comm: MemoryComm) -> None:
        kv = ReplicatedStore("mpi", Config(timeout_s=20.0), comm)
        kv.init(["f", "i"], [np.zeros(5), np.zeros(5, "i4")])
        value, out = np.arange(5.0) + comm.rank, np.full(5, 7.0)
        with pytest.raises(ConfigError, match=r"scale=0\.5 on MPI rank 0, .*scale=0\.25 on MPI rank 1"):
            kv.allreduce("f", value, out, scale=0.5 / (1 + comm.rank))
        for scale in (float("inf"), float("nan"), "2", 10**400):
            with pytest.raises(ConfigError, match=f"scale={scale!r}; expected a finite number"):
                kv.allreduce("f", value, out, scale=scale if comm.rank else 0.5)
        with pytest.raises(DTypeMismatchError, match=r"key 'i': a vector of int32 cannot be scaled by 0\.5"):
            kv.allreduce(["f", "i"], [value, np.ones(5, "i4")], [out, np.ones(5, "i4")], scale=0.5)
        np.testing.assert_array_equal(out, np.full(5, 7.0))
        kv.allreduce("f", value, out, scale=0.5)
        np.testing.assert_array_equal(out, np.arange(5.0) + 0.5)
        kv.close()

    run_ranks(2, rank_main)


def test_a_store_that_is_closed_has_given_back_all_its_communicators(
    run_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some MPI libraries have 2,000 of them, and each takes memory."""
    freed = list[MemoryComm]()
    monkeypatch.setattr(MemoryComm, "free", lambda comm: freed.append(comm))

    def rank_main(comm: MemoryComm) -> None:
        made: list[MemoryComm] = [comm]
        duplicate = MemoryComm.duplicate

        def noting(self: MemoryComm) -> MemoryComm:
            made.append(found := duplicate(self))
            found.duplicate = noting.__get__(found)  # type: ignore[method-assign]
            return found

        comm.duplicate = noting.__get__(comm)  # type: ignore[method-assign]
        kv = ReplicatedStore("mpi", Config(timeout_s=20.0), comm)
        kv.client.init("a", np.zeros(5))
        kv.close()
        assert [comm for comm in made if comm not in freed] == []
        assert len(freed) == len(set(map(id, freed)))

    run_ranks(2, rank_main)


@pytest.mark.parametrize(("late", "calls"), [(0, "nothing"), (2, "nothing"), (2, "barrier")])
def test_a_worker_may_close_long_after_others_and_makes_no_other_call_then(
    run_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, late: int, calls: str
) -> None:
    """As one that evaluates what all have trained. Nobody's process is to end with an error because of that."""
    freed, together, gone = list[MemoryComm](), threading.Barrier(2), threading.Barrier(3)
    monkeypatch.setattr(MemoryComm, "free", lambda comm: freed.append(comm))
    monkeypatch.setattr(base, "_CLOSE_TIMEOUT_S", 1.0)

    def rank_main(comm: MemoryComm) -> None:
        kv = ReplicatedStore("mpi", Config(timeout_s=20.0), comm)
        kv.init("w", np.zeros(3))
        (gone if comm.rank == late else together).wait(20.0)
        if comm.rank == late and calls == "barrier":
            with pytest.raises(OrderMismatchError, match="MPI rank 0 of this client has left"):
                kv.barrier()
            return kv.abort()
        kv.close()
        assert kv.closed
        assert not kv.broken
        if comm.rank != late:
            gone.wait(20.0)
        return None

    run_ranks(3, rank_main)
    told = [record.getMessage() for record in caplog.records if "has closed its store before others" in record.message]
    assert len(told) == 2, told
    assert any(f"MPI rank {late} " in text for text in told)
    assert not freed, "who is late may still use them"


@pytest.mark.parametrize("hosts", ["ab", "aabb"])
@pytest.mark.parametrize("places", ["private", "own"])
def test_gradients_are_rounded_between_hosts_if_that_is_wanted_and_weights_are_not(
    run_ranks: RunRanks, hosts: str, places: str
) -> None:
    """What the ranks of a host share, too; calls that are made again, a list of keys, and values that stay."""
    count, size = 100_000, len(hosts)
    base = np.random.default_rng(0).standard_normal((size, 3, count)).astype("f4")

    def rank_main(comm: MemoryComm) -> None:
        kv = ReplicatedStore("mpi", Config(ring_compression="bf16", timeout_s=20.0), comm)
        assert kv.ring_compression == "bf16"
        keys = ["a", "b", "c"]
        kv.init(keys, [np.zeros(count, "f4")] * 3)
        outs, values = ([kv.empty(count) if places == "own" else np.empty(count, "f4") for _ in keys] for _ in "ab")
        for step in range(1, 9):  # the later ones as they were described before
            for number, value in enumerate(values):
                value[:] = step * base[comm.rank, number]
            kv.pushpull(keys, values, outs) if step % 2 else kv.allreduce(keys, values, outs)
            for number, out in enumerate(outs):
                expected = step * base[:, number].astype("f8").sum(axis=0)
                bound = (size + 2) / 256 * step * np.abs(base[:, number]).sum(axis=0)
                assert (np.abs(out - expected) <= bound).all()
                assert not np.array_equal(out, expected.astype("f4"))
                assert np.array_equal(out.view("u4") & 0xFFFF, np.zeros(count))
            if step % 2:
                pulled = np.empty(count, "f4")
                kv.pull("c", pulled)
                assert np.array_equal(pulled, outs[2])
        kv.set_optimizer(kvmpi.optim.Elastic(1.0))
        kv.push("a", base[comm.rank, 0])
        kv.pull("a", outs[0])
        np.testing.assert_allclose(outs[0], base[:, 0].astype("f8").mean(axis=0), rtol=1e-5, atol=1e-6)
        kv.close()

    run_ranks(size, rank_main, hosts=hosts)


def test_a_view_of_a_torch_key_is_the_value_and_warns_of_nothing() -> None:
    torch = pytest.importorskip("torch")
    with kvmpi.create("local") as kv, warnings.catch_warnings():
        warnings.simplefilter("error")
        kv.init("w", torch.arange(6.0).reshape(2, 3))
        kv.push("w", torch.ones(2, 3))
        assert torch.equal(kv.view("w"), torch.ones(2, 3))
        assert kv.view("w").data_ptr() == kv.view("w").data_ptr()


def test_a_result_may_go_to_the_view_of_its_key() -> None:
    with kvmpi.create("local") as kv:
        kv.init([1, 2], [np.zeros((3, 3), "f4"), np.zeros(0, "i8")])
        views, pushed = [kv.view(1), kv.view(2)], [np.ones((3, 3), "f4"), np.zeros(0, "i8")]
        for step in range(1, 6):
            pushed[0][:] = step
            work = kv.pushpull([1, 2], pushed, views, async_op=step > 3)
            if work is not None:
                work.wait()
            assert (views[0] == step).all()
            kv.pushpull(np.int64(1), 2 * pushed[0], out=[views[0], other := np.zeros((3, 3), "f4")])
            assert (views[0] == 2 * step).all()
            assert (other == 2 * step).all()
        for foreign in (np.zeros((3, 3), "f4"), views[0].T, views[0].reshape(9), views[0][:1], views[0].view("i4")):
            foreign.flags.writeable = False
            with pytest.raises((UnsupportedError, ShapeMismatchError, DTypeMismatchError)):
                kv.pushpull(1, pushed[0], out=foreign)
        assert (kv.view(1) == 10).all()


@pytest.mark.parametrize("bucket_bytes", [1, 100, 1 << 20])  # one or two at a time, or all
def test_views_of_torch_keys_that_are_pushed_again_and_again_are_what_they_were_before_each_call(
    run_ranks: RunRanks, bucket_bytes: int
) -> None:
    """Such may be written to, and so the call might be taken for one that is known; sums are made where values lie."""
    torch = pytest.importorskip("torch")

    def rank_main(comm: MemoryComm) -> None:
        kv = ReplicatedStore("mpi", Config(timeout_s=20.0, bucket_bytes=bucket_bytes), comm)
        a, b = torch.arange(15.0).reshape(3, 5), torch.arange(100.0, 115.0)
        keys, own = ["a", "c", "b", "d"], torch.full((7,), 1.0 + comm.rank)
        kv.init(keys, [a, own, b, own])
        outs = [torch.zeros(3, 5), torch.zeros(7), torch.zeros(15), torch.zeros(7)]
        for step in range(12):
            pushed = [kv.view("b").reshape(3, 5), own, kv.view("a").reshape(15), own]
            kv.pushpull(keys, pushed, outs if step % 2 else list(map(kv.view, keys)))
            a, b = 2 * b.reshape(3, 5), 2 * a.reshape(15)
            for key, out, right in zip(keys, outs, (a, torch.full((7,), 3.0), b, torch.full((7,), 3.0)), strict=True):
                assert torch.equal(kv.view(key), right), f"key {key}, step {step}"
                assert not step % 2 or torch.equal(out, right), f"key {key}, step {step}"
        kv.close()

    run_ranks(2, rank_main)


@pytest.mark.parametrize("size", [1, 3])
def test_views_that_are_pushed_together_are_what_they_were_before_the_call(run_ranks: RunRanks, size: int) -> None:
    """A rule changes values where they are, key by key, while the next key's sum may be still to read them."""

    def rank_main(comm: MemoryComm) -> None:
        kv = ReplicatedStore("mpi" if size > 1 else "local", Config(timeout_s=20.0, bucket_bytes=1000), comm)
        index, updater = np.arange(300.0), lambda key, pushed, stored: np.add(stored, pushed, out=stored)
        kv.init(["a", "b"], [index, 7 * index])
        a, b = index, 7 * index
        for begin in (lambda: kv.set_optimizer(kvmpi.optim.Test(lr=-1.0)), lambda: kv.set_updater(updater)):
            begin()
            for views in ([kv.view("b"), kv.view("a")], [kv.view("b")[::-1], [kv.view("a"), kv.view("b")]]):
                pushed_a, pushed_b = views[0].copy(), np.sum(views[1], axis=0) if type(views[1]) is list else views[1]
                a, b = a + size * pushed_a, b + size * pushed_b
                kv.push(["a", "b"], views)
                np.testing.assert_array_equal(kv.view("a"), a)
                np.testing.assert_array_equal(kv.view("b"), b)
        kv.close()

    run_ranks(size, rank_main)


def test_a_store_that_is_closed_and_still_referred_to_has_given_back_what_its_ranks_share(run_ranks: RunRanks) -> None:
    """The garbage collector counts objects, and would let it lie for long."""
    count, stores = 4 << 20, list[ReplicatedStore]()

    def used_bytes() -> int:
        return own().size_bytes - sum(stop - start for start, stop in own()._free)

    def rank_main(comm: MemoryComm) -> int:
        kv = ReplicatedStore("mpi", Config(timeout_s=20.0), comm)
        stores.append(kv)
        kv.init("w", np.ones(count, "f4"))
        kv.init("small", np.ones(count // 4, "f4"))
        for _ in range(3):  # by way of shared memory
            kv.pushpull("small", np.ones(count // 4, "f4"), np.empty(count // 4, "f4"))
        used = used_bytes()
        kv.close()
        return used

    gc.collect()  # of tests before
    before = used_bytes()
    used = max(run_ranks(2, rank_main))  # with the value, which is there when either rank looks
    assert used >= before + 4 * count
    assert used_bytes() <= before + (1 << 20)
