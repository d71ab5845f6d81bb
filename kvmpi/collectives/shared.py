"""Collectives among the ranks of one host, each reading straight from the others' memory.

Every rank sums one segment of the result, block by block while a block is in its cache, out of all ranks' vectors; then
it copies the other segments from where their ranks have put them, as far as these are. No rank's data is staged unless
the system refuses reads from another process; what lies in an ``Arena`` is mapped, and read without a system call.

Results go straight to ``out`` where that is memory that all ranks of the host see as one, and nothing is left to copy;
small ones go through such memory, which spares the ranks a last meeting; others are read from each rank's ``out``.

Cost per rank for S bytes: (P-1)/P * S read and added, (P-1)/P * S copied; two or three latencies. A segment is added
in rank order from its owner on, each vector by itself: the same bits on every rank and in every run, and of a single
tensor those of ``ring``. Data that fits into a slot is summed whole by every rank, in rank order: one latency.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvmpi.collectives.algorithm import Act, Tensor, pack, unpack
from kvmpi.collectives.host_group import RELAY_BYTES, SLOT_BYTES, HostGroup
from kvmpi.collectives.host_sum import BLOCK_BYTES, Copies, HostSum, Posted, fits
from kvmpi.collectives.ring import chunks_of, drive
from kvmpi.collectives.terms import HostTerms
from kvmpi.deadline import Deadline
from kvmpi.kernels import host

Buffer = npt.NDArray[Any]

#: Sizes of small vectors whose views are kept at hand.
_MOST_VIEWS = 1024


class Shared:
    """See ``Algorithm``; for ranks that are all on one host.

    Args:
        slot_bytes, relay_bytes: what is larger does not go that way; the same on every rank.
    """

    def __init__(
        self, group: HostGroup, block_bytes: int = BLOCK_BYTES, *, slot_bytes: int = SLOT_BYTES,
        relay_bytes: int = RELAY_BYTES,
    ) -> None:  # fmt: skip
        self._group, self._block_bytes = group, block_bytes
        self.slot_bytes, self._relay_bytes = min(slot_bytes, SLOT_BYTES), min(relay_bytes, RELAY_BYTES)
        self._views: dict[tuple[int, np.dtype[Any]], list[tuple[list[Buffer], Buffer]]] = {}

    # ---- allreduce

    def allreduce(self, tensors: Sequence[Tensor], dtype: str, act: Act) -> None:
        count = sum(tensor.out.size for tensor in tensors)
        if count * host.STORAGE[host.ACCUMULATE[dtype]].itemsize <= self.slot_bytes:
            self._sum_slots(tensors, count, dtype, act)
            return
        if not fits(tensors):
            packed = pack(tensors, act)
            self._sum_segments([packed], dtype, act)
            unpack(tensors, packed)
            return
        self._sum_segments(self._relayed(tensors, count, act), dtype, act)

    def sum_small(self, vector: Buffer, out: Buffer, deadline: Deadline, what: Callable[[], str]) -> None:
        """``allreduce`` of one vector that needs no widening and fits into a slot, without detours."""
        group = self._group
        call = group.begin(deadline, what)
        views = self._views.get((vector.size, vector.dtype))
        if views is None:
            views = self._views_of(vector.size, vector.dtype)
        slots, partial = views[call % 2]
        np.copyto(slots[group.index], vector)
        group.post()
        group.await_posts(group.others, deadline, what)
        with np.errstate(all="ignore"):
            _add_up(slots, partial, out)
        group.finish()

    def _views_of(self, count: int, dtype: np.dtype[Any]) -> list[tuple[list[Buffer], Buffer]]:
        """For calls of even and of odd number: every rank's slot, and memory for partial sums."""
        if len(self._views) >= _MOST_VIEWS:
            self._views.clear()
        group, partial = self._group, np.empty(count if self._group.size > 2 else 0, dtype)
        views = [([group.slot(rank, count, dtype, call) for rank in range(group.size)], partial) for call in (0, 1)]
        self._views[count, dtype] = views
        return views

    def _sum_slots(self, tensors: Sequence[Tensor], count: int, dtype: str, act: Act) -> None:
        """Every rank offers the sum of its vectors in its slot, and adds up all ranks' slots."""
        group, half = self._group, dtype in host.HALF
        storage = host.STORAGE[host.ACCUMULATE[dtype]]
        call = group.begin(act.deadline, act.describe)
        slot, start = group.slot(group.index, count, storage, call), 0
        for tensor in tensors:
            part = slot[start : start + tensor.out.size]
            start += part.size
            own = HostTerms(tensor.vectors, dtype).own(0, part.size, part)
            if own is not part:
                np.copyto(part, own)
        group.post()
        group.await_posts(group.others, act.deadline, act.describe)
        direct = len(tensors) == 1 and not half
        total = tensors[0].out if direct else act.scratch(count, storage)
        slots = [group.slot(rank, count, storage, call) for rank in range(group.size)]
        with np.errstate(all="ignore"):
            _add_up(slots, act.scratch(count if group.size > 2 else 0, storage), total)
        group.finish()
        start = 0
        for tensor in tensors:
            part = total[start : start + tensor.out.size]
            start += part.size
            if half:
                host.narrow(part, tensor.out, dtype)
            elif not direct:
                np.copyto(tensor.out, part)
            for copy in tensor.copies:
                np.copyto(copy, tensor.out)

    def _relayed(self, tensors: Sequence[Tensor], count: int, act: Act) -> Sequence[Tensor]:
        """The same tensors with results in memory that all ranks share, if they have room there, copied from there."""
        itemsize = tensors[0].out.itemsize
        if count * itemsize > self._relay_bytes:
            return tensors
        relay = self._group.relay(act.deadline, act.describe)
        if relay is None or self._group.is_common(tensors[0].out):
            return tensors
        results, start = relay[: count * itemsize].view(tensors[0].out.dtype), 0
        found = []
        for tensor in tensors:
            result = results[start : start + tensor.out.size]
            start += result.size
            found.append(Tensor(tensor.vectors, result, (tensor.out, *tensor.copies)))
        return found

    def _sum_segments(self, tensors: Sequence[Tensor], dtype: str, act: Act) -> None:
        """Every rank sums one segment of all tensors end to end, and copies the others' results."""
        group = self._group
        posted = Posted(group, tensors, act)
        total = HostSum(group, posted, tensors, dtype, self._block_bytes, act.scratch)
        chunks = chunks_of([[segment] for segment in act.segments(total.cut.count)], total.block_count)
        wide = act.scratch(total.block_count if len(tensors) > 1 else 0, tensors[0].out.dtype)
        for start, stop in chunks[group.index]:
            if start == stop:
                continue
            pieces = total.cut.pieces(start, stop)
            piece = pieces[0]
            if len(pieces) == 1:
                total.finish(None, start, stop, posted.results[piece.tensor][piece.start : piece.stop])
            else:
                total.finish(None, start, stop, wide[: stop - start])
            for piece in pieces:
                result, tensor = posted.results[piece.tensor], tensors[piece.tensor]
                part = slice(piece.start, piece.stop)
                if len(pieces) > 1:
                    np.copyto(result[part], wide[piece.at : piece.at + piece.stop - piece.start])
                for target in tensor.copies if result is tensor.out else (tensor.out, *tensor.copies):
                    np.copyto(target[part], result[part])
            group.advance()
        machines = [
            Copies(group, peer, posted, tensors, total.cut, [chunk for chunk in chunks[peer] if chunk[0] < chunk[1]])
            for peer in group.others
        ]
        drive(machines, act.deadline, act.describe)
        # Results that all ranks share are written again only when all have begun the next call.
        common = all(posted.result_of(peer, i) is None for i in range(len(tensors)) for peer in group.others)
        group.finish(() if common else group.others, act.deadline, act.describe)

    # ---- the others

    def reduce_scatter(self, vectors: Sequence[Buffer], out: Buffer, dtype: str, act: Act) -> None:
        group, tensors = self._group, [Tensor(vectors, out)]
        posted = Posted(group, tensors, act, with_results=False)
        total = HostSum(group, posted, tensors, dtype, self._block_bytes, act.scratch)
        total.finish(None, *act.segments(vectors[0].size)[group.index], out)
        group.finish(group.others, act.deadline, act.describe)

    def allgather(self, out: Buffer, act: Act) -> None:
        group, segments = self._group, act.segments(out.size)
        start, stop = segments[group.index]
        if segments[0][1] * out.itemsize <= self.slot_bytes:
            call = group.begin(act.deadline, act.describe)
            np.copyto(group.slot(group.index, stop - start, out.dtype, call), out[start:stop])
            group.post()
            group.await_posts(group.others, act.deadline, act.describe)
            for peer in group.others:
                start, stop = segments[peer]
                np.copyto(out[start:stop], group.slot(peer, stop - start, out.dtype, call))
            group.finish()
            return
        posted = Posted(group, [Tensor((), out)], act, own=slice(start, stop))
        for peer in group.others:
            posted.copy_result(peer, 0, slice(*segments[peer]), out)
        group.finish(group.others, act.deadline, act.describe)

    def broadcast(self, buffer: Buffer, root: int, act: Act) -> None:
        group = self._group
        if buffer.nbytes <= self.slot_bytes:
            call = group.begin(act.deadline, act.describe)
            if group.index == root:
                np.copyto(group.slot(root, buffer.size, buffer.dtype, call), buffer)
            group.post()
            if group.index != root:
                group.await_posts([root], act.deadline, act.describe)
                np.copyto(buffer, group.slot(root, buffer.size, buffer.dtype, call))
            group.finish()
            return
        own = slice(0, buffer.size) if group.index == root else slice(0, 0)
        posted = Posted(group, [Tensor((), buffer)], act, own=own, wait_for=[root] if group.index != root else [])
        if group.index != root:
            posted.copy_result(root, 0, slice(0, buffer.size), buffer)
        group.finish(group.others if group.index == root else (), act.deadline, act.describe)


def _add_up(slots: Sequence[Buffer], partial: Buffer, out: Buffer) -> None:
    """``out`` becomes the sum; partial sums stay out of it, since other ranks may share that memory."""
    total = slots[0]
    for other in slots[1:-1]:
        total = np.add(total, other, out=partial)
    np.add(total, slots[-1], out=out)
