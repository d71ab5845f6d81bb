"""Calls on arrays of a device, by a stand-in: who waits for what, and where results go."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kvmpi
from kvmpi import arrays
from kvmpi.arrays import Vector
from kvmpi.collectives import nccl, selection
from kvmpi.collectives.memory_comm import MemoryComm
from kvmpi.config import Config
from kvmpi.errors import KVError, KVTimeoutError, PeerLostError
from kvmpi.store.replicated import ReplicatedStore

sys.path.insert(0, str(Path(__file__).parents[1] / "collectives"))

from nccl_stand_in import StandInModules, Wire

RunRanks = Callable[..., list[Any]]


class OnDevice:
    """An array of CuPy, as far as ``kvmpi.arrays`` is told below."""

    def __init__(
        self, cupy: Any, values: np.ndarray, *, contiguous: bool = True, ready: Any = None, fence: Any = None
    ) -> None:
        self.flat = cupy.asarray(values)
        self.dtype, self.shape, self.device, self.data = values.dtype, values.shape, self.flat.device, self.flat.data
        self.strides, self.itemsize = values.strides, values.itemsize
        self.flags = SimpleNamespace(c_contiguous=contiguous)
        self.contiguous, self.ready, self.fence = contiguous, ready, fence

    @property
    def values(self) -> np.ndarray:
        return self.flat.memory


class Event:
    """Of a device; ``asked`` counts how often it was looked at."""

    def __init__(self, done: bool = True) -> None:
        self._done, self.asked = done, 0

    @property
    def done(self) -> bool:
        self.asked += 1
        return self._done


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """``kvmpi.arrays`` takes an ``OnDevice`` for an array of CuPy."""
    read, fence, memory = arrays.read, arrays.fence, arrays.device_memory_of

    def read_it(a: Any) -> Vector:
        return Vector(a.flat, a.dtype.name, "cuda:0", a.contiguous, a.ready) if isinstance(a, OnDevice) else read(a)

    def memory_of(a: Any) -> Any:
        return (a.flat if a.contiguous else None) if isinstance(a, OnDevice) else memory(a)

    monkeypatch.setitem(arrays._LIBRARIES, OnDevice, "cupy")
    monkeypatch.setattr(arrays, "read", read_it)
    monkeypatch.setattr(arrays, "fence", lambda a: a.fence if isinstance(a, OnDevice) else fence(a))
    monkeypatch.setattr(arrays, "device_memory_of", memory_of)


def test_a_worker_alone_sums_in_several_threads(stand_in: Any, known: None) -> None:
    """Each with memory of its own: what is staged for one key is not overwritten by another's."""
    gpu, cupy, _ = stand_in(early=True)
    original, count = gpu.sum_many_to_host, 4096

    def slow(jobs: Any, dtype: str) -> None:
        original(jobs, dtype)
        time.sleep(0.05)

    gpu.sum_many_to_host = slow
    kv = ReplicatedStore("local", Config())
    kv.init([1, 2], [np.zeros(count, "f4")] * 2)
    pushed = [OnDevice(cupy, np.full(count, i, "f4")) for i in (1, 2)]
    outs = [np.empty(count, "f4") for _ in pushed]
    for _ in range(3):
        works = [
            kv.allreduce(i + 1, x, out=out, scale=0.5, async_op=True)
            for i, (x, out) in enumerate(zip(pushed, outs, strict=True))
        ]
        for work in works:
            work.wait()
        assert [set(out.tolist()) for out in outs] == [{0.5}, {1.0}]
    kv.close()


def test_results_are_not_written_before_earlier_work_is_done_on_any_worker(
    run_ranks: RunRanks,
    stand_in: Any,
    known: None,
) -> None:
    """Also by workers whose own array nobody reads, since the sum is there already."""
    _, cupy, _ = stand_in(early=True)

    def rank_main(comm: MemoryComm) -> tuple[int, float]:
        kv = ReplicatedStore("mpi", Config(allreduce="ring", timeout_s=10.0), comm)
        kv.init(1, np.zeros(4, "f4"))
        event = Event()
        event.synchronize = lambda: None  # type: ignore[attr-defined]
        x = OnDevice(cupy, np.full(4, 3, "f4"), ready=event, fence=event)
        kv.pushpull(1, x, reduced=True)
        kv.close()
        return event.asked, float(x.values[0])

    for asked, value in run_ranks(3, rank_main):
        assert asked
        assert value == 3


@pytest.mark.parametrize("type_name", ["local", "dist_sync"])
def test_a_device_that_is_stuck_is_waited_for_in_vain_and_not_for_ever(
    stand_in: Any, known: None, type_name: str
) -> None:
    _, cupy, _ = stand_in(early=True)
    stuck = OnDevice(cupy, np.zeros(4, "f4"), ready=Event(done=False))
    with kvmpi.create(type_name, timeout_s=0.5) as kv:
        with pytest.raises(KVTimeoutError, match="init: the device has not computed in time"):
            kv.init(0, stuck)
        kv.init([1, 2], [np.zeros(4, "f4")] * 2)
        also = np.zeros(4, "f4")
        with pytest.raises(KVTimeoutError, match="pushpull: the device has not computed in time"):
            kv.pushpull([1, 2], [stuck, also], [also, stuck])  # what is pushed is copied, since it is overwritten


def test_a_worker_whose_device_is_stuck_takes_part_in_nothing_more(
    run_ranks: RunRanks,
    stand_in: Any,
    known: None,
) -> None:
    """The others are in the broadcast already, and would take the next key's value for this one's."""
    _, cupy, _ = stand_in(early=True)

    def rank_main(comm: MemoryComm) -> None:
        kv = ReplicatedStore("mpi", Config(timeout_s=0.5 if comm.rank == 0 else 1.5), comm)
        stuck = OnDevice(cupy, np.zeros(4, "f4"), ready=Event(done=comm.rank > 0))
        with pytest.raises(KVTimeoutError, match="has not computed in time" if comm.rank == 0 else "MPI rank 0"):
            kv.init([0, 1], [stuck, np.ones(4, "f4")])
        assert kv.broken
        with pytest.raises(PeerLostError):
            kv.init(2, np.zeros(4, "f4"))
        with contextlib.suppress(KVError):
            kv.close()

    run_ranks(2, rank_main)


def test_who_cannot_write_its_results_begins_no_other_sum(
    run_ranks: RunRanks,
    stand_in: Any,
    known: None,
) -> None:
    """The others are in the sum already, and would take the next for it."""
    _, cupy, _ = stand_in(early=True)

    def rank_main(comm: MemoryComm) -> None:
        timeout_s = 0.5 if comm.rank == 0 else 3.0
        kv = ReplicatedStore("mpi", Config(allreduce="ring", timeout_s=timeout_s), comm)
        kv.init(1, np.zeros(4, "f4"))
        first, second = np.full(4, 10.0**comm.rank, "f4"), np.full(4, 5 * 10.0**comm.rank, "f4")
        if comm.rank == 0:
            stuck = OnDevice(cupy, np.zeros(4, "f4"), fence=Event(done=False))
            with pytest.raises(KVTimeoutError, match="the device is not through in time"):
                kv.allreduce(1, first, out=stuck)
            assert kv.broken
            with pytest.raises(PeerLostError):
                kv.allreduce(1, second)
            kv.close()
            return
        works = [kv.allreduce(1, first, out=np.zeros(4, "f4"), async_op=True), kv.allreduce(1, second, async_op=True)]
        for work in works:
            with pytest.raises((KVTimeoutError, PeerLostError)):
                work.wait()
        with contextlib.suppress(KVError):
            kv.close()

    run_ranks(2, rank_main)


def test_nccl_fills_arrays_that_it_cannot_write_to(
    run_ranks: RunRanks,
    compile_for_host: Any,
    known: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By way of the host, beside those on its device."""
    wire, of_lane = Wire(2), threading.local()
    by_rank: dict[int, StandInModules] = {}
    connect = selection.connect

    def connect_lane(comm: MemoryComm, *words: Any) -> Any:
        of_lane.modules = by_rank[comm.rank]
        return connect(comm, *words)

    monkeypatch.setattr(selection, "connect", connect_lane)
    monkeypatch.setattr(nccl, "_Modules", lambda: of_lane.modules)

    def rank_main(comm: MemoryComm) -> tuple[Any, ...]:
        modules = by_rank[comm.rank] = StandInModules(wire, compile_for_host, f"bus {comm.rank}")
        kv = ReplicatedStore("mpi", Config(allreduce="nccl", timeout_s=10.0), comm)
        kv.init(1, np.zeros(4, "f4"))
        x = OnDevice(modules.cupy, np.full(4, 1 + comm.rank, "f4"))
        y, strided = OnDevice(modules.cupy, np.zeros(4, "f4")), np.zeros(8, "f4")
        kv.allreduce(1, x, out=[y, strided[::2]])
        kv.close()
        return y.values.tolist(), strided.tolist(), x.values.tolist()

    for rank, (y, strided, x) in enumerate(run_ranks(2, rank_main)):
        assert y == [3.0] * 4
        assert strided == [3.0, 0.0] * 4
        assert x == [1.0 + rank] * 4
