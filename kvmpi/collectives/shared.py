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

import contextvars
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvmpi.collectives.algorithm import Act, Tensor, pack, shared_bytes, unpack
from kvmpi.collectives.cross_memory import address_of
from kvmpi.collectives.host_group import IN_ARENA, RELAY_BYTES, SLOT_BYTES, HostGroup
from kvmpi.collectives.host_sum import BLOCK_BYTES, Copies, HostSum, Posted, block_for, fits, pieces_of
from kvmpi.collectives.ring import drive
from kvmpi.collectives.terms import HostTerms
from kvmpi.deadline import Deadline
from kvmpi.kernels import host
from kvmpi.trace import timeline

Buffer = npt.NDArray[Any]

#: A private vector up to this size is copied to where others have it mapped: cheaper than that each looks it up.
STAGE_BYTES = 4 << 20
#: Lengths of vectors whose views are kept at hand.
_MOST_VIEWS = 1024


class _Views:
    """Of vectors of one length and dtype: slots by call, parts by rank, and where small data goes in and out."""

    __slots__ = ("block", "parts", "relay", "relay_place", "slots", "stage", "stage_place")

    block: Buffer
    slots: list[list[Buffer]]
    parts: list[list[slice]]

    def __init__(self) -> None:
        self.relay: Buffer | None = None
        self.stage: Buffer | None = None
        self.relay_place = self.stage_place = 0


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
        self._views: dict[tuple[int, np.dtype[Any]], _Views] = {}
        self._stage: Buffer | None = None
        self._quietly = _quiet_context()

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

    def sum_one(self, vector: Buffer, out: Buffer, deadline: Deadline, what: Callable[[], str]) -> None:
        """``allreduce`` of one vector that needs no widening, where ranks can attach: the same steps without detours.

        Half of the time of a small sum is Python's, so no objects are made here that the next call would make again.
        """
        if vector.nbytes <= self.slot_bytes:
            self._sum_one_slot(vector, out, deadline, what)
            return
        group = self._group
        views = self._views.get((vector.size, vector.dtype)) or self._views_of(vector, deadline, what)
        result, place = out, group.place_of(out)
        if views.relay is not None and (place is None or not group.is_common_place(place)):
            result, place = views.relay, views.relay_place
        if place is None:
            place = address_of(out)
        source = group.place_of(vector)
        if source is None:
            source = address_of(vector)
            if views.stage is not None:
                source = views.stage_place
                for peer in group.others:
                    for part in views.parts[peer]:
                        np.copyto(views.stage[part], vector[part])
        group.begin(deadline, what)
        group.post((2, place, source))
        group.await_posts(group.others, deadline, what)
        posted = [(peer, *group.places_of(peer, 0, 3)) for peer in group.others]
        terms = [(peer, term) for peer, number, _, first in posted for term in (
            (first,) if number == 2 else group.places_of(peer, 2, number - 1)
        )]  # fmt: skip
        copies = result is not out
        with np.errstate(all="ignore"):
            for part in views.parts[group.index]:
                target, total = result[part], vector[part]
                for peer, term in terms:
                    total = np.add(total, group.fetch(peer, term, part, views.block[: target.size]), out=target)
                group.advance()
                if copies:
                    np.copyto(out[part], target)
        start_ns = timeline.now() if timeline.on else 0
        common = True
        for peer, _, theirs, _ in posted:
            same = theirs == place and theirs & IN_ARENA
            common = common and bool(same)
            taken, parts = 0, views.parts[peer]
            while taken < len(parts):
                if (ready := group.blocks_of(peer)) == taken:
                    group.await_blocks(peer, taken + 1, deadline, what)
                    continue
                for part in parts[taken:ready]:
                    if not same:
                        group.read(peer, theirs, part, out[part])
                    elif copies:
                        np.copyto(out[part], result[part])
                taken = ready
        if start_ns:
            own = sum(part.stop - part.start for part in views.parts[group.index])
            timeline.span("exchange", start_ns, nbytes=out.nbytes - own * out.itemsize)
        group.finish(() if common else group.others, deadline, what)

    def _sum_one_slot(self, vector: Buffer, out: Buffer, deadline: Deadline, what: Callable[[], str]) -> None:
        group = self._group
        call = group.begin(deadline, what)
        views = self._views.get((vector.size, vector.dtype)) or self._views_of(vector, deadline, what)
        slots = views.slots[call % 2]
        np.copyto(slots[group.index], vector)
        group.post()
        group.await_posts(group.others, deadline, what)
        self._quietly(_add_up, slots, views.block, out)
        group.finish()

    def _views_of(self, like: Buffer, deadline: Deadline, what: Callable[[], str]) -> _Views:
        """What sums of vectors like this one need; kept for the next."""
        if len(self._views) >= _MOST_VIEWS:
            self._views.clear()
        group, count, dtype = self._group, like.size, like.dtype
        views = self._views[count, dtype] = _Views()
        if like.nbytes <= self.slot_bytes:
            views.slots = [[group.slot(rank, count, dtype, call) for rank in range(group.size)] for call in (0, 1)]
            views.block = np.empty(count if group.size > 2 else 0, dtype)
            return views
        block_count = max(1, self._block_bytes // dtype.itemsize)
        pieces = pieces_of((count,), group.size, block_count)
        views.parts = [[slice(piece.start, piece.stop) for piece in of_rank] for of_rank in pieces]
        views.block = np.empty(min(block_count, count), dtype)
        relay = group.relay(deadline, what) if like.nbytes <= self._relay_bytes else None
        if relay is not None:
            views.relay = relay[: like.nbytes].view(dtype)
            views.relay_place = group.place_of(views.relay) or 0
        if like.nbytes <= STAGE_BYTES:
            if self._stage is None:
                self._stage = shared_bytes(STAGE_BYTES)
            views.stage = self._stage[: like.nbytes].view(dtype)
            views.stage_place = group.place_of(views.stage) or 0
            if not views.stage_place:
                views.stage = None  # no room in the arena
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
        block = block_for(dtype, self._block_bytes, act)
        pieces = pieces_of(tuple(tensor.out.size for tensor in tensors), group.size, block[0].size)
        sums: dict[int, HostSum] = {}
        for number, start, stop in pieces[group.index]:
            if number not in sums:
                sums[number] = HostSum(group, posted, number, tensors[number].vectors, dtype, block)
            tensor, result = tensors[number], posted.results[number]
            done = result[start:stop]
            sums[number].finish(None, start, stop, done)
            group.advance()
            for target in tensor.copies if result is tensor.out else (tensor.out, *tensor.copies):
                np.copyto(target[start:stop], done)
        machines = [Copies(group, peer, posted, tensors, pieces[peer]) for peer in group.others]
        own = sum(stop - start for _, start, stop in pieces[group.index])
        others = sum(tensor.out.size for tensor in tensors) - own
        drive(machines, act.deadline, act.describe, others * tensors[0].out.itemsize)
        # Results that all ranks share are written again only when all have begun the next call.
        common = all(posted.result_of(peer, i) is None for peer in group.others for i in range(len(tensors)))
        group.finish(() if common else group.others, act.deadline, act.describe)

    # ---- the others

    def reduce_scatter(self, vectors: Sequence[Buffer], out: Buffer, dtype: str, act: Act) -> None:
        group, tensors = self._group, [Tensor(vectors, out)]
        posted = Posted(group, tensors, act, with_results=False)
        total = HostSum(group, posted, 0, vectors, dtype, block_for(dtype, self._block_bytes, act))
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


def _quiet_context() -> Callable[..., Any]:
    """``run(function, *arguments)`` without warnings of NumPy's about overflow, for one thread at a time.

    Entering a context takes an eighth of the time that ``np.errstate`` takes to make one.
    """
    context, before = contextvars.Context(), np.geterr()
    context.run(np.seterr, all="ignore")
    kept_by_context = np.geterr() == before and context.run(np.geterr)["over"] == "ignore"
    np.seterr(**before)  # older NumPy keeps this by thread, and has changed the caller's
    if kept_by_context:
        return context.run

    def run(function: Callable[..., Any], *arguments: Any) -> Any:
        with np.errstate(all="ignore"):
            return function(*arguments)

    return run


def _add_up(slots: Sequence[Buffer], partial: Buffer, out: Buffer) -> None:
    """``out`` becomes the sum; partial sums stay out of it, since other ranks may share that memory."""
    total = slots[0]
    for other in slots[1:-1]:
        total = np.add(total, other, out=partial)
    np.add(total, slots[-1], out=out)
