"""Collectives for several ranks on each of several hosts: memory within a host, rings between hosts.

Every rank drives a ring of its own between the hosts, on its own share of the elements. What such a ring adds at a host
are the vectors of all the host's ranks, read chunk by chunk when a chunk passes; results are copied by the other ranks
of the host as they arrive. So the three phases - sum in the host, ring, spread in the host - run at the same time, and
each byte crosses each host's link once in each half of the ring.

Cost for S bytes, H hosts and L ranks on each: a host sends 2(H-1)/H * S; a rank adds S and copies (L-1)/L * S.
Additions go from host to host in ring order, and on a host from the driver's vectors on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvmpi.collectives import native
from kvmpi.collectives.algorithm import Act, Tensor, pack, unpack
from kvmpi.collectives.comm import Comm
from kvmpi.collectives.host_group import HostGroup
from kvmpi.collectives.host_sum import BLOCK_BYTES, Copies, HostSum, Posted, block_for
from kvmpi.collectives.native import MOST_PIECE_BYTES, NativeRings
from kvmpi.collectives.ring import TAG_RING, Chain, Machine, Ring, drive
from kvmpi.collectives.schedule import HostRings, Schedule, chunks_of, host_rings
from kvmpi.collectives.topology import Layout

Buffer = npt.NDArray[Any]


class Hierarchical:
    """See ``Algorithm``; for two hosts or more. Where they have different numbers of ranks, the fewest drive rings.

    Where a ring's messages have connections, a compiled one takes the place of ``Ring``, if there is any
    (``use_native``).

    Args:
        group: the ranks of this rank's host.
    """

    def __init__(self, comm: Comm, layout: Layout, group: HostGroup, *, use_native: bool = True) -> None:
        self._comm, self._layout, self._group, self._native = comm, layout, group, use_native
        self._host = layout.host_of(comm.rank)
        self._num_rings = min(map(len, layout.hosts))

    def _rings(self, count: int, dtype: np.dtype[Any], act: Act, **half: bool) -> HostRings:
        """``dtype``: of what travels. ``half``: as of ``host_rings``."""
        return host_rings(self._layout.hosts, self._comm.rank, count, act.chunk_count(dtype.itemsize), **half)

    def allreduce(self, tensors: Sequence[Tensor], dtype: str, act: Act) -> None:
        packed = pack(tensors, act)
        self._allreduce(packed, dtype, act)
        unpack(tensors, packed)

    def _allreduce(self, tensor: Tensor, dtype: str, act: Act) -> None:
        group, count = self._group, tensor.out.size
        posted = Posted(group, [tensor], act)
        block = block_for(dtype, BLOCK_BYTES, act)
        terms = HostSum(group, posted, 0, tensor.vectors, dtype, block, act.scale, rounds=act.rounds)
        result, rings = posted.results[0], self._rings(count, terms.sum_dtype, act)
        machines: list[Machine] = [self._copies(rings, posted, tensor.out)]
        if rings.own is not None:
            machines.insert(0, self._ring(rings.own, result, act, terms, announces=True))
        drive(machines, act.deadline, act.describe, tensor.out.nbytes)
        if result is not tensor.out and rings.own is not None:
            for start, stop in rings.own.completed:
                np.copyto(tensor.out[start:stop], result[start:stop])
        group.finish(group.others, act.deadline, act.describe)

    def _copies(self, rings: HostRings, posted: Posted, out: Buffer) -> Copies:
        """What the rings of this host's other ranks bring goes to ``out``."""
        orders = {ring: completed for ring, completed in enumerate(rings.completed) if ring != self._group.index}
        return Copies(self._group, posted, out, orders)

    def _ring(
        self, schedule: Schedule, out: Buffer, act: Act, terms: HostSum | None = None, *, base: int = 0,
        announces: bool = False,
    ) -> Machine:  # fmt: skip
        """The ring of this rank. ``announces``: others of the host copy what becomes final."""
        group, ranks = self._group, [ranks[self._group.index] for ranks in self._layout.hosts]
        left, right = ranks[self._host - 1], ranks[(self._host + 1) % len(ranks)]
        channel = self._comm.channel(left, right, TAG_RING) if self._native and native.is_built() else None
        if channel is None:
            on_chunk = group.advance if announces else None
            return Ring(self._comm, ranks, schedule, out, terms, base=base, scratch=act.scratch, on_chunk=on_chunk)
        return NativeRings(
            [channel], [schedule], min(act.choice.chunk_bytes, MOST_PIECE_BYTES), [out],
            [] if terms is None else [terms], base=base, scratch=act.scratch,
            progress=group.progress() if announces else None, alone=not announces,
        )  # fmt: skip

    def reduce_scatter(self, vectors: Sequence[Buffer], out: Buffer, dtype: str, act: Act) -> None:
        count = vectors[0].size
        segments = act.segments(count)
        if any(len(ranks) != self._num_rings for ranks in self._layout.hosts):
            # Some segments would be summed by a rank that they do not belong to.
            whole = act.scratch(count, out.dtype)
            self._allreduce(Tensor(vectors, whole), dtype, act)
            np.copyto(out, whole[slice(*segments[act.rank])])
            return
        group, tensors = self._group, [Tensor(vectors, out)]
        posted = Posted(group, tensors, act, with_results=False)
        terms = HostSum(group, posted, 0, vectors, dtype, block_for(dtype, BLOCK_BYTES, act), act.scale)
        schedule = self._rings(count, terms.sum_dtype, act, gathers=False).own
        assert schedule is not None
        ring = self._ring(schedule, out, act, terms, base=segments[act.rank][0])
        drive([ring], act.deadline, act.describe, vectors[0].nbytes)
        group.finish(group.others, act.deadline, act.describe)

    def allgather(self, out: Buffer, act: Act) -> None:
        group, segments, tensors = self._group, act.segments(out.size), [Tensor((), out)]
        posted = Posted(group, tensors, act, own=slice(*segments[act.rank]))
        result = posted.results[0]
        for peer in group.others:
            # What lies on this host already: the driver of a ring needs it first.
            posted.copy_result(peer, 0, slice(*segments[group.members[peer]]), result)
        rings = self._rings(out.size, out.dtype, act, reduces=False)
        machines: list[Machine] = [self._copies(rings, posted, result)]
        if rings.own is not None:
            machines.insert(0, self._ring(rings.own, result, act, announces=True))
        drive(machines, act.deadline, act.describe, out.nbytes)
        if result is not out:
            np.copyto(out, result)
        group.finish(group.others, act.deadline, act.describe)

    def broadcast(self, buffer: Buffer, root: int, act: Act) -> None:
        group, layout = self._group, self._layout
        first = layout.host_of(root)
        leaders = [root, *(ranks[0] for host, ranks in enumerate(layout.hosts) if host != first)]
        leader = group.members.index(root) if first == self._host else 0
        max_chunk_count = act.chunk_count(buffer.itemsize)
        tensors, own = [Tensor((), buffer)], slice(0, buffer.size if act.rank == root else 0)
        posted = Posted(group, tensors, act, own=own, wait_for=[leader] if group.index != leader else [])
        chunks = chunks_of([[(0, buffer.size)]], max_chunk_count)[0]
        if group.index != leader:
            copies = Copies(group, posted, buffer, {leader: chunks})
            drive([copies], act.deadline, act.describe, buffer.nbytes)
            group.check(leader)  # else it may be something else by now
            group.finish()
            return
        if act.rank == root:
            group.advance(len(chunks))
        result = posted.results[0]
        chain = Chain(self._comm, leaders, result, max_chunk_count, on_chunk=group.advance)
        drive([chain], act.deadline, act.describe, buffer.nbytes)
        if result is not buffer and act.rank != root:
            np.copyto(buffer, result)
        group.finish(group.others, act.deadline, act.describe)
