"""Collectives among the ranks of one host, each reading straight from the others' memory.

Every rank sums one segment of the result, block by block while a block is in its cache, out of all ranks' vectors; then
it copies the other segments from where their ranks have put them, as far as these are. No rank's data is staged unless
the system refuses reads from another process; what lies in an ``Arena`` is mapped, and read without a system call.

Cost per rank for S bytes: (P-1)/P * S read and added, (P-1)/P * S copied; three latencies. A segment is added in rank
order from its owner on, each vector by itself: the same bits on every rank and in every run, and those of ``ring``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvmpi.collectives.algorithm import Act
from kvmpi.collectives.host_group import MAX_BUFFERS, HostGroup, Remote
from kvmpi.collectives.ring import Range, Scratch, chunks_of, drive
from kvmpi.kernels import host

Buffer = npt.NDArray[Any]

#: A block and what is added to it stay in a core's cache.
BLOCK_BYTES = 256 << 10


class GroupTerms:
    """The vectors of all ranks of a host, this rank's first, as ``ring.Terms``; others' are read when they are added.

    The ranks have posted a result and then their vectors.
    """

    def __init__(self, group: HostGroup, vectors: Sequence[Buffer], dtype: str, block_count: int, scratch: Scratch):
        self._group, self._vectors, self._dtype, self._block_count = group, vectors, dtype, block_count
        self._half = dtype in host.HALF
        self.sum_dtype = host.STORAGE[host.ACCUMULATE[dtype]]
        count, storage = vectors[0].size, vectors[0].dtype
        self._remotes: list[tuple[int, Remote]] = [
            (peer, remote) for peer in group.others for remote in group.remotes_of(peer, count, storage)[1:]
        ]
        longest = min(block_count, count)
        self._fetched = scratch(longest, storage)
        self._wide = scratch(longest if self._half else 0, np.float32)

    def own(self, start: int, stop: int, into: Buffer) -> Buffer:
        """See ``ring.Terms``: what this host contributes."""
        self._sum(None, start, stop, into, narrow=False)
        return into

    def add(self, incoming: Buffer, start: int, stop: int, into: Buffer) -> None:
        """See ``ring.Terms``."""
        self._sum(incoming, start, stop, into, narrow=False)

    def finish(self, incoming: Buffer | None, start: int, stop: int, into: Buffer) -> None:
        """See ``ring.Terms``. Without ``incoming``, the result is what this host contributes."""
        self._sum(incoming, start, stop, into, narrow=self._half)

    def _sum(self, incoming: Buffer | None, start: int, stop: int, into: Buffer, *, narrow: bool) -> None:
        with np.errstate(all="ignore"):
            for first in range(start, stop, self._block_count):
                last = min(first + self._block_count, stop)
                target = into[first - start : last - start]
                before = None if incoming is None else incoming[first - start : last - start]
                self._sum_block(before, slice(first, last), self._wide[: last - first] if narrow else target)
                if narrow:
                    host.narrow(self._wide[: last - first], target, self._dtype)

    def _sum_block(self, total: Buffer | None, block: slice, target: Buffer) -> None:
        own = [vector[block] for vector in self._vectors]
        if self._half and total is None:
            host.widen(own.pop(0), self._dtype, target)
            total = target
        elif total is None:
            total = own.pop(0)
        elif self._half:
            np.copyto(target, total)
        for term in own:
            total = self._plus(total, term, target)
        for peer, remote in self._remotes:
            total = self._plus(total, self._group.fetch(peer, remote, block, self._fetched[: target.size]), target)
        if not self._half and total is not target:
            np.copyto(target, total)

    def _plus(self, total: Buffer, term: Buffer, target: Buffer) -> Buffer:
        if self._half:
            host.add_widened(target, "float32", term, self._dtype)
        else:
            np.add(total, term, out=target)
        return target


class Copies:
    """A ``ring.Machine`` that copies a rank's results as they become final.

    Args:
        remote: where they are; None where the memory is this rank's own result, so that they need only be awaited.
        order: element ranges in the order in which they are announced by ``HostGroup.advance``.
    """

    def __init__(self, group: HostGroup, peer: int, remote: Remote | None, out: Buffer, order: Sequence[Range]) -> None:
        self._group, self._peer, self._remote, self._out, self._order = group, peer, remote, out, order
        self._taken = 0

    @property
    def done(self) -> bool:
        return self._taken == len(self._order)

    def stuck(self) -> str:
        return f"MPI rank {self._group.members[self._peer]} did not sum its part"

    def advance(self) -> bool:
        ready = min(self._group.blocks_of(self._peer), len(self._order))
        if ready == self._taken:
            return False
        while self._remote is not None and self._taken < ready:
            start, stop = self._order[self._taken]
            self._taken += 1
            while self._taken < ready and self._order[self._taken][0] == stop:
                stop = self._order[self._taken][1]
                self._taken += 1
            if start < stop:
                self._group.read(self._peer, self._remote, slice(start, stop), self._out[start:stop])
        self._taken = ready
        return True


def post(
    group: HostGroup, result: Buffer | None, vectors: Sequence[Buffer], dtype: str, act: Act
) -> tuple[Buffer, list[Buffer]]:
    """Post ``result`` and ``vectors``, or what stands in for them where others cannot read them; await the others'.

    Returns:
        The result and the vectors that the others will read.
    """
    if len(vectors) > MAX_BUFFERS - 1:
        total = act.scratch(vectors[0].size, vectors[0].dtype)
        host.sum_vectors(total, vectors, dtype)
        vectors = [total]
    found = [vectors[0][:0] if result is None else result, *vectors]
    if not group.attaches:
        for i, buffer in enumerate(found):
            if buffer.size and group.place_of(buffer) is None:
                found[i] = act.scratch(buffer.size, buffer.dtype)
                if i > 0:
                    np.copyto(found[i], buffer)
    group.post(found)
    group.await_posts(group.others, act.deadline, act.what)
    return found[0], found[1:]


class Shared:
    """See ``Algorithm``; for ranks that are all on one host."""

    def __init__(self, group: HostGroup, block_bytes: int = BLOCK_BYTES) -> None:
        self._group, self._block_bytes = group, block_bytes

    def allreduce(self, vectors: Sequence[Buffer], out: Buffer, dtype: str, act: Act) -> None:
        group, block_count = self._group, max(1, self._block_bytes // out.itemsize)
        result, vectors = post(group, out, vectors, dtype, act)
        terms = GroupTerms(group, vectors, dtype, block_count, act.scratch)
        chunks = chunks_of([[segment] for segment in act.segments(out.size)], block_count)
        for start, stop in chunks[group.index]:
            terms.finish(None, start, stop, result[start:stop])
            group.advance()
            if result is not out:
                np.copyto(out[start:stop], result[start:stop])
        drive([self._copies(peer, out, chunks[peer]) for peer in group.others], act.deadline, act.what)
        group.finish(group.others, act.deadline, act.what)

    def _copies(self, peer: int, out: Buffer, order: Sequence[Range]) -> Copies:
        same = self._group.same_first(peer)
        remote = None if same else self._group.remotes_of(peer, out.size, out.dtype)[0]
        return Copies(self._group, peer, remote, out, order)

    def reduce_scatter(self, vectors: Sequence[Buffer], out: Buffer, dtype: str, act: Act) -> None:
        group = self._group
        _, vectors = post(group, None, vectors, dtype, act)
        terms = GroupTerms(group, vectors, dtype, max(1, self._block_bytes // out.itemsize), act.scratch)
        terms.finish(None, *act.segments(vectors[0].size)[group.index], out)
        group.finish(group.others, act.deadline, act.what)

    def allgather(self, out: Buffer, act: Act) -> None:
        group, segments = self._group, act.segments(out.size)
        start, stop = segments[group.index]
        result = out
        if not group.attaches and group.place_of(out) is None:
            result = act.scratch(out.size, out.dtype)
            np.copyto(result[start:stop], out[start:stop])
        group.post([result])
        group.await_posts(group.others, act.deadline, act.what)
        for peer in group.others:
            if not group.same_first(peer):
                part = slice(*segments[peer])
                group.read(peer, group.remotes_of(peer, out.size, out.dtype)[0], part, out[part])
        group.finish(group.others, act.deadline, act.what)

    def broadcast(self, buffer: Buffer, root: int, act: Act) -> None:
        group = self._group
        posted = buffer
        if group.index == root and not group.attaches and group.place_of(buffer) is None:
            posted = act.scratch(buffer.size, buffer.dtype)
            np.copyto(posted, buffer)
        group.post([posted])
        if group.index == root:
            group.finish(group.others, act.deadline, act.what)
            return
        group.await_posts([root], act.deadline, act.what)
        if not group.same_first(root):
            remote = group.remotes_of(root, buffer.size, buffer.dtype)[0]
            group.read(root, remote, slice(0, buffer.size), buffer)
        group.finish([], act.deadline, act.what)
