"""Vectors on devices in rings: a ring begins when its part has been summed, and not before. Devices are stand-ins."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from collective_helpers import all_vectors, assert_is_sum, on_host, vectors

from kvmpi import kernels
from kvmpi.arrays import DTYPES, Vector
from kvmpi.collectives import Collectives
from kvmpi.collectives.memory_comm import MemoryComm
from kvmpi.deadline import Deadline
from kvmpi.errors import KVTimeoutError
from kvmpi.kernels import host

RunRanks = Callable[..., list[Any]]


class OnDevice(np.ndarray):
    """Memory of a device, which only the stand-in's kernels may touch."""

    device = types.SimpleNamespace(id=0)


class Late:
    """A transfer whose result is there after so many looks at it."""

    def __init__(self, looks: float, work: Callable[[], None]) -> None:
        self._looks, self._work = looks, work

    def done(self) -> bool:
        self._looks -= 1
        if self._looks == 0:
            self._work()
        return self._looks <= 0


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """In the place of ``kvmpi.kernels.gpu``; ``looks`` says how late sums are, ``streams_used`` on which they ran."""
    stand_in = types.SimpleNamespace(looks=7.0, streams_used=set())

    def start_sum(dst: np.ndarray, sources: list[np.ndarray], dtype: str, *, stream: Any) -> Late:
        stand_in.streams_used.add(stream)
        dst.view(np.uint8)[:] = 0x55
        plain = [source.view(np.ndarray) for source in sources]
        return Late(stand_in.looks, lambda: host.sum_vectors(dst, plain, dtype))

    stand_in.start_sum = start_sum
    stand_in.pinned_empty = host.empty
    stand_in.own_stream = lambda device, number=0: contextlib.nullcontext(number)

    def sum_many_to_host(jobs: list[tuple[np.ndarray, list[np.ndarray]]], dtype: str) -> None:
        for dst, sources in jobs:
            host.sum_vectors(dst, [source.view(np.ndarray) for source in sources], dtype)

    stand_in.sum_many_to_host = sum_many_to_host
    monkeypatch.setitem(sys.modules, "kvmpi.kernels.gpu", stand_in)  # type: ignore[arg-type]
    monkeypatch.setattr(kernels, "gpu", stand_in, raising=False)
    return stand_in


def tensor(comm: MemoryComm, num_vectors: int, count: int, dtype: str, on_devices: int) -> list[Vector]:
    own = vectors(comm.rank, num_vectors, count, dtype)
    devices = [Vector(vector.view(OnDevice), dtype, "cuda:0", True) for vector in own[:on_devices]]
    return devices + on_host(own[on_devices:], dtype)


@pytest.mark.parametrize("algorithm", ["ring", "multi_ring", "host_ring", "shared", "naive"])
@pytest.mark.parametrize("on_devices", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "int16", "bfloat16"])
def test_sums_of_device_vectors(
    run_ranks: RunRanks, gpu: types.SimpleNamespace, algorithm: str, on_devices: int, dtype: str
) -> None:
    def rank_main(comm: MemoryComm) -> np.ndarray:
        collectives = Collectives(comm, algorithm, 256, num_rings=3)
        for count in (0, 1, 1013):
            out = np.empty(count, DTYPES[dtype])
            sources = tensor(comm, 3, count, dtype, on_devices)
            collectives.allreduce(sources, out, dtype, Deadline(20.0), "test")
        return out

    outs = run_ranks(3, rank_main)
    assert_is_sum(outs[0], all_vectors(3, 3, 1013, dtype), dtype)
    assert len({out.tobytes() for out in outs}) == 1
    rings = {"ring": 1, "multi_ring": 3}.get(algorithm, 0)
    assert gpu.streams_used == set(range(rings)), "every ring has a stream of its own"


def test_a_device_that_does_not_answer_is_named(run_ranks: RunRanks, gpu: types.SimpleNamespace) -> None:
    gpu.looks = float("inf")

    def rank_main(comm: MemoryComm) -> None:
        out = np.empty(100, "f4")
        with pytest.raises(KVTimeoutError, match=r"key 1.*a device did not sum its vectors"):
            Collectives(comm, "multi_ring").allreduce(
                tensor(comm, 1, 100, "float32", 1), out, "float32", Deadline(0.3), "push of key 1"
            )

    run_ranks(2, rank_main)


@pytest.mark.parametrize("algorithm", ["multi_ring", "shared"])
def test_a_device_that_does_not_compute_what_is_summed_is_no_wait_for_ever(
    run_ranks: RunRanks, gpu: types.SimpleNamespace, algorithm: str
) -> None:
    """Both of CuPy's events and torch's."""

    def rank_main(comm: MemoryComm) -> None:
        event = types.SimpleNamespace(done=False) if comm.rank else types.SimpleNamespace(query=lambda: False)
        [vector] = tensor(comm, 1, 100, "float32", 1)
        late = Vector(vector.buffer, "float32", "cuda:0", True, event)
        collectives = Collectives(comm, algorithm)
        with pytest.raises(KVTimeoutError, match=r"push of key 1.*the device has not computed in time"):
            collectives.allreduce([late], np.empty(100, "f4"), "float32", Deadline(0.3), "push of key 1")
        assert collectives.broken

    run_ranks(2, rank_main)
