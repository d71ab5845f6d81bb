"""Collectives by rings over all ranks: one, or several that share the tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from kvmpi.collectives import native
from kvmpi.collectives.algorithm import Act, Tensor, pack, unpack
from kvmpi.collectives.comm import Channel, Comm
from kvmpi.collectives.native import MOST_PIECE_BYTES, NativeRings
from kvmpi.collectives.ring import TAG_RING, Chain, Machine, Ring, drive, habit_of
from kvmpi.collectives.schedule import Range, even_schedules, part_of
from kvmpi.collectives.terms import HostTerms

Buffer = npt.NDArray[Any]


class Rings:
    """See ``Algorithm``. How many rings, each on an equal part of every segment, is part of the choice.

    Where every message has a connection, compiled rings take the place of ``Ring``, if there are any (``use_native``).
    Vectors on devices are summed there, each ring's part on a stream of its own, while the rings before it exchange.
    """

    def __init__(self, comm: Comm, *, use_native: bool = True) -> None:
        self._comm, self._native = comm, use_native
        self._ranks = range(comm.size)

    def allreduce(self, tensors: Sequence[Tensor], dtype: str, act: Act) -> None:
        packed = pack(tensors, act)
        vectors, start = packed.vectors, None
        if packed.devices:
            from kvmpi.kernels import gpu

            staged = gpu.pinned_empty(packed.out.size, dtype)
            vectors, start = [*vectors, staged], partial(_start_sums, packed.devices, staged, dtype)
        self._run(packed.out.size, packed.out, HostTerms(vectors, dtype, act.scale), act, start=start)
        unpack(tensors, packed)

    def reduce_scatter(self, vectors: Sequence[Buffer], out: Buffer, dtype: str, act: Act) -> None:
        self._run(vectors[0].size, out, HostTerms(vectors, dtype, act.scale), act, gather=False)

    def allgather(self, out: Buffer, act: Act) -> None:
        self._run(out.size, out, None, act)

    def _run(
        self, count: int, out: Buffer, terms: HostTerms | None, act: Act, *, gather: bool = True,
        start: Callable[[list[Range], int], list[Any]] | None = None,
    ) -> None:  # fmt: skip
        """``start`` begins what a ring has to wait for, given its ranges and its number."""
        max_chunk_count = act.chunk_count((out if terms is None else terms.sum_dtype).itemsize)
        num_rings, base = act.choice.num_rings, 0 if gather else act.segments(count)[act.rank][0]
        channels = self._channels(num_rings) if start is None and self._native and native.is_built() else []
        if channels:  # which do not wait for whole chunks
            max_chunk_count *= 2
        schedules = even_schedules(
            count, act.size, act.rank, num_rings, max_chunk_count, reduces=terms is not None, gathers=gather
        )
        if channels:
            piece_bytes = min(act.choice.chunk_bytes, MOST_PIECE_BYTES)
            together = NativeRings(channels, schedules, piece_bytes, out, terms, base=base, scratch=act.scratch)
            drive([together], act.deadline, act.describe, count * out.itemsize)
            return
        machines, rings = list[Machine](), list[Ring]()
        for number, schedule in enumerate(schedules):
            ring = Ring(self._comm, self._ranks, schedule, out, terms, base=base, number=number, scratch=act.scratch)
            rings.append(ring)
            if start is None:
                machines.append(ring)
            else:
                ranges = part_of(act.segments(count), number, num_rings)
                machines.append(_Then(start([r for part in ranges for r in part], number), ring))
        # Devices wake nobody.
        waiter = rings[0].waiter if start is None else None
        with np.errstate(all="ignore"):
            drive(machines, act.deadline, act.describe, count * out.itemsize, habit_of(rings), waiter)

    def _channels(self, num_rings: int) -> list[Channel]:
        """The connections of each ring; none unless all have some."""
        left, right = self._ranks[self._comm.rank - 1], self._ranks[(self._comm.rank + 1) % self._comm.size]
        found = [self._comm.channel(left, right, TAG_RING + number) for number in range(num_rings)]
        return [channel for channel in found if channel is not None] if all(found) else []

    def broadcast(self, buffer: Buffer, root: int, act: Act) -> None:
        ranks = [(root + i) % act.size for i in self._ranks]
        chain = Chain(self._comm, ranks, buffer, act.chunk_count(buffer.itemsize))
        drive([chain], act.deadline, act.describe, buffer.nbytes, waiter=chain.waiter)


def _start_sums(devices: Sequence[Any], staged: Buffer, dtype: str, ranges: list[Range], number: int) -> list[Any]:
    """Sum ``ranges`` of device vectors into host memory, on a stream of ring ``number``."""
    from kvmpi.kernels import gpu

    stream = gpu.streams(devices[0].device.id, number + 1)[number]
    return [
        gpu.start_sum(staged[start:stop], [vector[start:stop] for vector in devices], dtype, stream=stream)
        for start, stop in ranges
        if start < stop
    ]


class _Then:
    """A ring that begins when transfers from devices are done; meanwhile those before it travel."""

    def __init__(self, transfers: list[Any], ring: Ring) -> None:
        self._transfers, self._ring = transfers, ring

    @property
    def done(self) -> bool:
        return not self._transfers and self._ring.done

    def stuck(self) -> str:
        return "a device did not sum its vectors" if self._transfers else self._ring.stuck()

    def advance(self) -> bool:
        moved = False
        while self._transfers and self._transfers[0].done():
            self._transfers.pop(0)
            moved = True
        return moved if self._transfers else self._ring.advance() or moved
