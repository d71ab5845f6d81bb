"""Collectives by rings over all ranks: one, or several that share the tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt

from kvmpi.collectives.algorithm import Act, Tensor, pack, unpack
from kvmpi.collectives.comm import Comm
from kvmpi.collectives.ring import Chain, Ring, chunks_of, drive, part_of
from kvmpi.collectives.terms import HostTerms

Buffer = npt.NDArray[Any]


class Rings:
    """See ``Algorithm``. How many rings, each on an equal part of every segment, is part of the choice."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._ranks = range(comm.size)

    def allreduce(self, tensors: Sequence[Tensor], dtype: str, act: Act) -> None:
        packed = pack(tensors, act)
        self._run(packed.out.size, packed.out, HostTerms(packed.vectors, dtype), act)
        unpack(tensors, packed)

    def reduce_scatter(self, vectors: Sequence[Buffer], out: Buffer, dtype: str, act: Act) -> None:
        self._run(vectors[0].size, out, HostTerms(vectors, dtype), act, gather=False)

    def allgather(self, out: Buffer, act: Act) -> None:
        self._run(out.size, out, None, act)

    def _run(self, count: int, out: Buffer, terms: HostTerms | None, act: Act, *, gather: bool = True) -> None:
        segments = act.segments(count)
        max_chunk_count = act.chunk_count((out if terms is None else terms.sum_dtype).itemsize)
        num_rings = act.choice.num_rings
        rings = [
            Ring(
                self._comm, self._ranks, chunks_of(part_of(segments, number, num_rings), max_chunk_count), out,
                terms, gather=gather, base=0 if gather else segments[act.rank][0], number=number, scratch=act.scratch,
            )
            for number in range(num_rings)
        ]  # fmt: skip
        drive(rings, act.deadline, act.describe)

    def broadcast(self, buffer: Buffer, root: int, act: Act) -> None:
        ranks = [(root + i) % act.size for i in self._ranks]
        drive([Chain(self._comm, ranks, buffer, act.chunk_count(buffer.itemsize))], act.deadline, act.describe)
