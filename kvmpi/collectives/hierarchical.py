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

from kvmpi.collectives.algorithm import Act
from kvmpi.collectives.comm import Comm
from kvmpi.collectives.host_group import HostGroup
from kvmpi.collectives.ring import Chain, Machine, Range, Ring, chunks_of, completion_order, drive
from kvmpi.collectives.shared import BLOCK_BYTES, Copies, GroupTerms, post
from kvmpi.collectives.topology import Layout

Buffer = npt.NDArray[Any]


class Hierarchical:
    """See ``Algorithm``; for two hosts or more. Where they have different numbers of ranks, the fewest drive rings.

    Args:
        group: the ranks of this rank's host.
        chunk_bytes: bytes of one message at most; the same on every rank.
    """

    def __init__(self, comm: Comm, layout: Layout, group: HostGroup, chunk_bytes: int) -> None:
        self._comm, self._layout, self._group, self._chunk_bytes = comm, layout, group, chunk_bytes
        self._host = layout.host_of(comm.rank)
        self._num_rings = min(map(len, layout.hosts))

    def _chunks(self, ring: int, segments: Sequence[Range], itemsize: int) -> list[list[Range]]:
        """Of each host: the segments of the ranks that ``ring`` carries, in chunks."""
        shares = [[segments[rank] for rank in ranks[ring :: self._num_rings]] for ranks in self._layout.hosts]
        return chunks_of(shares, max(1, self._chunk_bytes // itemsize))

    def _ring_of(self, ring: int) -> list[int]:
        return [ranks[ring] for ranks in self._layout.hosts]

    def allreduce(self, vectors: Sequence[Buffer], out: Buffer, dtype: str, act: Act) -> None:
        group = self._group
        result, vectors = post(group, out, vectors, dtype, act)
        terms = GroupTerms(group, vectors, dtype, max(1, BLOCK_BYTES // out.itemsize), act.scratch)
        segments = act.segments(out.size)
        machines: list[Machine] = []
        for ring in range(self._num_rings):
            chunks = self._chunks(ring, segments, terms.sum_dtype.itemsize)
            if ring == group.index:
                machines.insert(0, Ring(
                    self._comm, self._ring_of(ring), chunks, result, terms, scratch=act.scratch, on_chunk=group.advance,
                ))  # fmt: skip
            else:
                machines.append(self._copies(ring, out, completion_order(chunks, self._host, reduces=True)))
        drive(machines, act.deadline, act.what)
        if result is not out and group.index < self._num_rings:
            for segment in self._chunks(group.index, segments, terms.sum_dtype.itemsize):
                for start, stop in segment:
                    np.copyto(out[start:stop], result[start:stop])
        group.finish(group.others, act.deadline, act.what)

    def _copies(self, peer: int, out: Buffer, order: Sequence[Range]) -> Copies:
        same = self._group.same_first(peer)
        return Copies(
            self._group, peer, None if same else self._group.remotes_of(peer, out.size, out.dtype)[0], out, order
        )

    def reduce_scatter(self, vectors: Sequence[Buffer], out: Buffer, dtype: str, act: Act) -> None:
        count = vectors[0].size
        segments = act.segments(count)
        if any(len(ranks) != self._num_rings for ranks in self._layout.hosts):
            # Some segments would be summed by a rank that they do not belong to.
            whole = act.scratch(count, out.dtype)
            self.allreduce(vectors, whole, dtype, act)
            np.copyto(out, whole[slice(*segments[act.rank])])
            return
        group = self._group
        _, vectors = post(group, None, vectors, dtype, act)
        terms = GroupTerms(group, vectors, dtype, max(1, BLOCK_BYTES // out.itemsize), act.scratch)
        chunks = self._chunks(group.index, segments, terms.sum_dtype.itemsize)
        ring = Ring(
            self._comm, self._ring_of(group.index), chunks, out, terms, gather=False, base=segments[act.rank][0],
            scratch=act.scratch,
        )  # fmt: skip
        drive([ring], act.deadline, act.what)
        group.finish(group.others, act.deadline, act.what)

    def allgather(self, out: Buffer, act: Act) -> None:
        group, segments = self._group, act.segments(out.size)
        start, stop = segments[act.rank]
        result = out
        if not group.attaches and group.place_of(out) is None:
            result = act.scratch(out.size, out.dtype)
            np.copyto(result[start:stop], out[start:stop])
        group.post([result])
        group.await_posts(group.others, act.deadline, act.what)
        machines: list[Machine] = []
        for peer in group.others:
            # What lies on this host already: the driver of a ring needs it first.
            self._read_segment(peer, result, segments[group.members[peer]])
        for ring in range(self._num_rings):
            chunks = self._chunks(ring, segments, out.itemsize)
            if ring == group.index:
                machines.insert(0, Ring(self._comm, self._ring_of(ring), chunks, result, on_chunk=group.advance))
            else:
                machines.append(self._copies(ring, result, completion_order(chunks, self._host, reduces=False)))
        drive(machines, act.deadline, act.what)
        if result is not out:
            np.copyto(out, result)
        group.finish(group.others, act.deadline, act.what)

    def _read_segment(self, peer: int, out: Buffer, segment: Range) -> None:
        if not self._group.same_first(peer):
            part = slice(*segment)
            self._group.read(peer, self._group.remotes_of(peer, out.size, out.dtype)[0], part, out[part])

    def broadcast(self, buffer: Buffer, root: int, act: Act) -> None:
        group, layout = self._group, self._layout
        first = layout.host_of(root)
        leaders = [root, *(ranks[0] for host, ranks in enumerate(layout.hosts) if host != first)]
        leader = group.members.index(root) if first == self._host else 0
        posted = buffer
        if group.index == leader and not group.attaches and group.place_of(buffer) is None:
            posted = act.scratch(buffer.size, buffer.dtype)
            if act.rank == root:
                np.copyto(posted, buffer)
        group.post([posted])
        max_chunk_count = max(1, self._chunk_bytes // buffer.itemsize)
        chunks = chunks_of([[(0, buffer.size)]], max_chunk_count)[0]
        if group.index == leader:
            if act.rank == root:
                group.advance(len(chunks))
            drive([Chain(self._comm, leaders, posted, max_chunk_count, on_chunk=group.advance)], act.deadline, act.what)
            if posted is not buffer and act.rank != root:
                np.copyto(buffer, posted)
            group.finish(group.others, act.deadline, act.what)
            return
        group.await_posts([leader], act.deadline, act.what)
        drive([self._copies(leader, buffer, chunks)], act.deadline, act.what)
        group.finish([], act.deadline, act.what)
