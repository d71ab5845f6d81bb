"""Vectors of a real device in the collectives, with ranks that are threads: all of them use one card at once.

The same tests with vectors of the host show that what they expect is right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from collective_helpers import all_vectors, assert_is_sum, on_host, vectors
from device_checks import needs_gpu, placed

from kvmpi import arrays
from kvmpi.arrays import DTYPES
from kvmpi.collectives import Collectives
from kvmpi.collectives.memory_comm import MemoryComm
from kvmpi.deadline import Deadline

RunRanks = Callable[..., list[Any]]

RANKS = 3
each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=needs_gpu)])


@each_device
@pytest.mark.parametrize("algorithm", ["auto", "ring", "multi_ring", "host_ring", "shared", "naive"])
@pytest.mark.parametrize("on_devices", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int16"])
def test_sums_of_device_vectors(run_ranks: RunRanks, device: str, algorithm: str, on_devices: int, dtype: str) -> None:
    counts = (0, 1, 1013, 70_001)

    def rank_main(comm: MemoryComm) -> list[np.ndarray]:
        outs = []
        for count in counts:  # few chunks where there are many elements
            collectives = Collectives(comm, algorithm, 256 if count < 2000 else 8192, num_rings=3)
            own = vectors(comm.rank, 3, count, dtype)
            devices = [placed(vector, dtype, i, device) for i, vector in enumerate(own[:on_devices])]
            outs.append(np.full(count, 77, DTYPES[dtype]))
            sources = devices + on_host(own[on_devices:], dtype)
            collectives.allreduce(sources, outs[-1], dtype, Deadline(20.0), "test")
        return outs

    for outs in zip(*run_ranks(RANKS, rank_main), strict=True):
        assert_is_sum(outs[0], all_vectors(RANKS, 3, outs[0].size, dtype), dtype)
        assert len({out.tobytes() for out in outs}) == 1


@pytest.mark.parametrize("device", [pytest.param("cuda:0", marks=needs_gpu)])
@pytest.mark.parametrize("algorithm", ["ring", "multi_ring", "shared"])
def test_what_the_streams_of_all_ranks_still_compute_is_in_the_sum(
    run_ranks: RunRanks, device: str, algorithm: str
) -> None:
    import cupy

    count, adds = 1 << 22, 100

    def rank_main(comm: MemoryComm) -> np.ndarray:
        out = np.empty(count, "f4")
        with cupy.cuda.Stream(non_blocking=True):
            mine = [cupy.full(count, comm.rank, "f4"), cupy.arange(count, dtype="f4") % 100]
            for _ in range(adds):
                for vector in mine:
                    vector += 1
            sources = [arrays.read(vector) for vector in mine]
            Collectives(comm, algorithm).allreduce(sources, out, "float32", Deadline(20.0), "test")
        return out

    expected = RANKS * (2 * adds + np.arange(count, dtype="f4") % 100) + sum(range(RANKS))
    for out in run_ranks(RANKS, rank_main):
        np.testing.assert_array_equal(out, expected)
