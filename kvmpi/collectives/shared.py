"""Allreduce and broadcast among the ranks of one host, each reading straight from the others' memory.

Every rank sums one segment of the result, block by block while a block is in its cache, out of all ranks' vectors; then
it copies the other segments from where their ranks have put them, as far as these are. No rank's data is staged; what
lies in an ``Arena`` is mapped, and read without a system call.

Cost per rank for S bytes: (P-1)/P * S read and added, (P-1)/P * S copied; three latencies. A segment is added in rank
order from its owner on, each vector by itself: the same bits on every rank and in every run, and those of ``ring``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvmpi.collectives.host_group import MAX_BUFFERS, HostGroup, Remote
from kvmpi.collectives.ring import segment_bounds
from kvmpi.deadline import Deadline
from kvmpi.kernels import host

Buffer = npt.NDArray[Any]

MAX_VECTORS = MAX_BUFFERS - 1
#: A block and what is added to it stay in a core's cache.
BLOCK_BYTES = 256 << 10


def shared_allreduce(
    group: HostGroup, sources: Sequence[Buffer], out: Buffer, dtype: str, *, block_bytes: int, deadline: Deadline,
    label: str, scratch: Callable[[int, np.dtype[Any]], Buffer],
) -> None:  # fmt: skip
    """Sum all vectors of all ranks into ``out`` of every rank.

    Args:
        sources: 1 to ``MAX_VECTORS`` vectors of shape ``(count,)``; ``out`` may be the first.
        block_bytes: the same on every rank.
        scratch: ``scratch(count, dtype)`` gives memory that is free during the call.
    Raises:
        KVTimeoutError: names the ranks that were waited for, and what for; the group is then unusable.
        PeerLostError: a rank has ended.
    """
    what = f"{label}: allreduce"
    rank, size, itemsize = group.rank, group.size, out.itemsize
    others = [(rank + i) % size for i in range(1, size)]
    block_count = max(1, block_bytes // itemsize)
    segments = segment_bounds(out.size, size)
    group.post([out, *sources])
    group.await_posts(others, deadline, what)
    posted = {peer: group.remotes_of(peer, out) for peer in others}

    start, stop = segments[rank]
    longest = min(block_count, stop - start)
    incoming = scratch(longest, out.dtype)
    wide = np.empty(longest if dtype in host.HALF else 0, np.float32)
    with np.errstate(all="ignore"):
        for i, first in enumerate(range(start, stop, block_count)):
            block = slice(first, min(first + block_count, stop))
            _sum_block(group, posted, sources, out, block, dtype, incoming, wide)
            group.advance(i + 1)

    for peer in others:
        _gather(group, peer, posted[peer][0], out, segments[peer], block_count, deadline, what)
    group.finish(others, deadline, what)


def _sum_block(
    group: HostGroup, posted: dict[int, list[Remote]], sources: Sequence[Buffer], out: Buffer, block: slice, dtype: str,
    incoming: Buffer, wide: Buffer,
) -> None:  # fmt: skip
    """``out[block]`` becomes the sum of all vectors of all ranks, this rank's first."""
    count = block.stop - block.start
    target = out[block]
    half = dtype in host.HALF
    if half:
        total = wide[:count]
        host.widen(sources[0][block], dtype, total)
        for source in sources[1:]:
            host.add_widened(total, "float32", source[block], dtype)
    else:
        total = sources[0][block]
        for source in sources[1:]:
            np.add(total, source[block], out=target)
            total = target
    for peer, remotes in posted.items():
        for remote in remotes[1:]:
            term = group.fetch(peer, remote, block, incoming[:count])
            if half:
                host.add_widened(total, "float32", term, dtype)
            else:
                np.add(total, term, out=target)
                total = target
    if half:
        host.narrow(total, target, dtype)


def _gather(
    group: HostGroup, peer: int, remote: Remote, out: Buffer, segment: tuple[int, int], block_count: int,
    deadline: Deadline, what: str,
) -> None:  # fmt: skip
    """Copy ``peer``'s segment of the result, block by block as they are done."""
    start, stop = segment
    patience = group.patience(deadline, what, "did not sum its part", lambda: [peer])
    while start < stop:
        ready = min(segment[0] + group.blocks_of(peer) * block_count, stop)
        if ready > start:
            group.read(peer, remote, slice(start, ready), out[start:ready])
            start = ready
            patience.progress()
        else:
            patience.pause()


def shared_broadcast(group: HostGroup, buffer: Buffer, root: int, *, deadline: Deadline, label: str) -> None:
    """Copy ``buffer`` of ``root`` to every rank, each reading it for itself. Raises as ``shared_allreduce``."""
    what = f"{label}: broadcast"
    group.post([buffer])
    if group.rank == root:
        group.finish([rank for rank in range(group.size) if rank != root], deadline, what)
        return
    group.await_posts([root], deadline, what)
    group.read(root, group.remotes_of(root, buffer)[0], slice(0, buffer.size), buffer)
    group.finish([], deadline, what)
