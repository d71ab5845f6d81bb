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
from kvmpi.collectives.devices import parts_of
from kvmpi.collectives.native import MOST_PIECE_BYTES, NativeRings
from kvmpi.collectives.ring import TAG_RING, Chain, Machine, Ring, drive, habit_of
from kvmpi.collectives.schedule import Range, Schedule, even_schedules, part_of
from kvmpi.collectives.terms import HostTerms

Buffer = npt.NDArray[Any]

#: Tensors up to this size are packed with those beside them, for rings that do not need that.
PACKED_BYTES = 64 << 10


class Rings:
    """See ``Algorithm``. How many rings, each on an equal part of every segment, is part of the choice.

    Where every message has a connection, compiled rings take the place of ``Ring``, if there are any (``use_native``).
    Vectors on devices are summed there, each ring's part on a stream of its own, while the rings before it exchange.
    """

    def __init__(self, comm: Comm, *, use_native: bool = True) -> None:
        self._comm, self._native = comm, use_native
        self._ranks = range(comm.size)

    def allreduce(self, tensors: Sequence[Tensor], dtype: str, act: Act) -> None:
        channels = [] if any(tensor.devices for tensor in tensors) else self._channels(act.choice.num_rings)
        if channels:
            runs = runs_of(tensors)
            found = [pack(run, act) for run in runs]
            terms = [HostTerms(tensor.vectors, dtype, act.scale, rounds=act.rounds) for tensor in found]
            self._run_compiled(channels, [tensor.out for tensor in found], terms, act)
            for run, packed in zip(runs, found, strict=True):
                unpack(run, packed)
            return
        packed = pack(tensors, act)
        vectors, start = packed.vectors, None
        if packed.devices:
            from kvmpi.kernels import gpu

            parts = parts_of(packed.devices, dtype)
            staged = [gpu.pinned_empty(packed.out.size, dtype) for _ in parts]
            vectors, start = [*vectors, *staged], partial(_start_sums, parts, staged, dtype)
        own = HostTerms(vectors, dtype, act.scale, rounds=act.rounds)
        self._run(packed.out.size, packed.out, own, act, start=start)
        unpack(tensors, packed)

    def reduce_scatter(self, vectors: Sequence[Buffer], out: Buffer, dtype: str, act: Act) -> None:
        count, terms = vectors[0].size, HostTerms(vectors, dtype, act.scale)
        if channels := self._channels(act.choice.num_rings):
            self._run_compiled(channels, [out], [terms], act, count=count, gathers=False)
        else:
            self._run(count, out, terms, act, gathers=False)

    def allgather(self, out: Buffer, act: Act) -> None:
        if channels := self._channels(act.choice.num_rings):
            self._run_compiled(channels, [out], [], act)
        else:
            self._run(out.size, out, None, act)

    def _run_compiled(
        self, channels: Sequence[Channel], outs: Sequence[Buffer], terms: Sequence[HostTerms], act: Act, *,
        count: int | None = None, gathers: bool = True,
    ) -> None:  # fmt: skip
        """``count``: elements, where ``outs`` are not all."""
        count = sum(out.size for out in outs) if count is None else count
        storage = terms[0].sum_dtype if terms else outs[0].dtype
        # They do not wait for whole chunks.
        schedules = self._schedules(count, 2 * act.chunk_count(storage.itemsize), act, bool(terms), gathers)
        together = NativeRings(
            channels, schedules, min(act.choice.chunk_bytes, MOST_PIECE_BYTES), outs, terms,
            base=0 if gathers else act.segments(count)[act.rank][0], scratch=act.scratch,
        )  # fmt: skip
        drive([together], act.deadline, act.describe, count * outs[0].itemsize)

    def _schedules(
        self, count: int, max_chunk_count: int, act: Act, reduces: bool, gathers: bool
    ) -> Sequence[Schedule]:
        rings = act.choice.num_rings
        return even_schedules(count, act.size, act.rank, rings, max_chunk_count, reduces=reduces, gathers=gathers)

    def _run(
        self, count: int, out: Buffer, terms: HostTerms | None, act: Act, *, gathers: bool = True,
        start: Callable[[list[Range], int], list[Any]] | None = None,
    ) -> None:  # fmt: skip
        """``start`` begins what a ring has to wait for, given its ranges and its number."""
        max_chunk_count = act.chunk_count((out if terms is None else terms.sum_dtype).itemsize)
        base = 0 if gathers else act.segments(count)[act.rank][0]
        machines, rings = list[Machine](), list[Ring]()
        for number, schedule in enumerate(self._schedules(count, max_chunk_count, act, terms is not None, gathers)):
            ring = Ring(self._comm, self._ranks, schedule, out, terms, base=base, number=number, scratch=act.scratch)
            rings.append(ring)
            if start is None:
                machines.append(ring)
            else:
                ranges = part_of(act.segments(count), number, act.choice.num_rings)
                machines.append(_Then(start([r for part in ranges for r in part], number), ring))
        # Devices wake nobody.
        waiter = rings[0].waiter if start is None else None
        with np.errstate(all="ignore"):
            drive(machines, act.deadline, act.describe, count * out.itemsize, habit_of(rings), waiter)

    def _channels(self, num_rings: int) -> list[Channel]:
        """The connections of each ring, where compiled rings can use them; none unless all have some."""
        if not self._native or not native.is_built():
            return []
        left, right = self._ranks[self._comm.rank - 1], self._ranks[(self._comm.rank + 1) % self._comm.size]
        found = [self._comm.channel(left, right, TAG_RING + number) for number in range(num_rings)]
        return [channel for channel in found if channel is not None] if all(found) else []

    def broadcast(self, buffer: Buffer, root: int, act: Act) -> None:
        ranks = [(root + i) % act.size for i in self._ranks]
        chain = Chain(self._comm, ranks, buffer, act.chunk_count(buffer.itemsize))
        drive([chain], act.deadline, act.describe, buffer.nbytes, waiter=chain.waiter)


def runs_of(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Tensors that follow each other, cut where a large one stays by itself: to pack it costs more than it saves."""
    found = list[list[Tensor]]()
    small = False
    for tensor in tensors:
        was_small, small = small, tensor.out.nbytes < PACKED_BYTES
        if small and was_small:
            found[-1].append(tensor)
        else:
            found.append([tensor])
    return found


def _start_sums(
    parts: Sequence[Sequence[Any]], staged: Sequence[Buffer], dtype: str, ranges: list[Range], number: int
) -> list[Any]:
    """Sum ``ranges`` of device vectors, of each part into memory of the host, on a stream of ring ``number``."""
    from kvmpi.kernels import gpu

    found = []
    for devices, target in zip(parts, staged, strict=True):
        with gpu.own_stream(devices[0].device, number) as stream:
            for start, stop in ranges:
                if start < stop:
                    vectors = [vector[start:stop] for vector in devices]
                    found.append(gpu.start_sum(target[start:stop], vectors, dtype, stream=stream))
    return found


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
