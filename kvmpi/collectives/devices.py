"""Vectors on devices, on their way to algorithms: they are waited for, and summed into memory of the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt

from kvmpi.arrays import Vector
from kvmpi.collectives.algorithm import Act, Scratch
from kvmpi.collectives.waiting import wait_devices
from kvmpi.kernels import host

Buffer = npt.NDArray[Any]


def settle(tensors: Sequence[Sequence[Vector]], act: Act) -> None:
    """Wait until devices have computed what is to be summed.

    Raises:
        KVTimeoutError: one has not in time.
    """
    events = [source.ready for sources in tensors for source in sources if source.ready is not None]
    late = "the device has not computed in time what is summed"
    wait_devices(events, act.deadline, lambda: f"{act.describe()}: {late}")


def to_host(tensors: Sequence[Sequence[Vector]], dtype: str, scratch: Scratch) -> list[list[Buffer]]:
    """Of each tensor the vectors of host memory, and what those on devices sum up to."""
    found, jobs = list[list[Buffer]](), []
    for sources in tensors:
        found.append([source.buffer for source in sources if source.on_host])
        on_devices = [source.settled() for source in sources if not source.on_host]
        for together in parts_of(on_devices, dtype):
            jobs.append((scratch(sources[0].count, host.STORAGE[dtype]), together))
            found[-1].append(jobs[-1][0])
    if jobs:
        from kvmpi.kernels import gpu

        with gpu.own_stream(jobs[0][1][0].device):
            gpu.sum_many_to_host(jobs, dtype)
    return found


def sum_to_host(sources: Sequence[Vector], out: Buffer, dtype: str) -> None:
    """Sum vectors that are all on devices into ``out``."""
    from kvmpi.kernels import gpu

    with gpu.own_stream(sources[0].buffer.device):
        gpu.sum_vectors_to_host(out, [source.settled() for source in sources], dtype)


def parts_of(vectors: Sequence[Any], dtype: str) -> list[Sequence[Any]]:
    """Which vectors of devices are one vector of the host: all, or each by itself where a sum of some would be rounded,
    and what it is added to once more."""
    if dtype in host.HALF:
        return [[vector] for vector in vectors]
    return [vectors] if vectors else []
