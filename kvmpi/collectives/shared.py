"""Collectives among the ranks of one host, each working straight in the others' memory.

Every rank sums one segment of the result, block by block while a block is in its cache: it reads the block out of all
ranks' vectors, and writes the sum to all ranks' results. No rank's data is staged unless the system refuses to let a
process read and write another's memory, or that costs more than to copy; what lies in an ``Arena`` is mapped, and
needs no system call. A result in memory that all ranks of the host see as one is written once.

Cost per rank for S bytes: S read, (P-1)/P * S added, S written, which in place is what has just been read; two
meetings. A segment is added in rank order from its owner on, each vector by itself: the same bits on every rank and in
every run, and of a single tensor those of ``ring``. Data that fits into a slot is added in rank order: whole by every
rank, with one meeting; by ranks so many that a second meeting costs less than that, each a part for all.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvmpi.arrays import address_of
from kvmpi.collectives import native
from kvmpi.collectives.algorithm import Act, Tensor, pack, shared_bytes, unpack
from kvmpi.collectives.handover import hand_over
from kvmpi.collectives.host_group import SLOT_BYTES, HostGroup, What
from kvmpi.collectives.host_sum import (
    BLOCK_BYTES,
    ONE_OF_EACH,
    Delivery,
    HostSum,
    Posted,
    block_for,
    fits,
    folded,
    parts_of,
    pieces_of,
    places_of,
    read_first,
)
from kvmpi.collectives.native import NativeTerms, SlotSum
from kvmpi.collectives.segments import SegmentSums
from kvmpi.collectives.terms import HostTerms, times
from kvmpi.deadline import Deadline
from kvmpi.kernels import host
from kvmpi.trace import timeline

Buffer = npt.NDArray[Any]

#: Private memory up to this size is copied to and from where others have it mapped: these copies stay in the cache,
#: while the system takes a quarter of a microsecond for each page of another process that it looks up.
STAGE_BYTES = 4 << 20
#: Adding up whole slots reads all of them, adding up a part of each and copying the others' sums as much as two. What
#: is saved by the second has to be this much to be worth its second meeting.
PARTS_FROM_BYTES = 128 << 10
#: Parts of slots begin at multiples of so many elements, so that no two ranks write to one cache line.
_PART_ELEMENTS = 64
#: Lengths of vectors whose views are kept at hand.
_MOST_VIEWS = 1024
#: No element has more.
_ITEM_BYTES = 16


class _Views:
    """Of vectors of one length and dtype: slots by call, parts by rank, and what stands in for private memory."""

    __slots__ = ("block", "compiled", "parts", "slots", "stage", "stage_place")

    block: Buffer
    slots: list[list[Buffer]]
    parts: list[list[slice]]
    compiled: list[SlotSum]

    def __init__(self) -> None:
        self.stage: Buffer | None = None
        self.stage_place = 0


class Shared:
    """See ``Algorithm``; for ranks that are all on one host.

    Args:
        slot_bytes, stage_bytes: what is larger does not go that way; the same on every rank.
        use_native: whether compiled code sums in slots, where it has been built.
    """

    def __init__(
        self, group: HostGroup, block_bytes: int = BLOCK_BYTES, *, slot_bytes: int = SLOT_BYTES,
        stage_bytes: int = STAGE_BYTES, use_native: bool = True,
    ) -> None:  # fmt: skip
        self._group, self._block_bytes, self._compiled = group, block_bytes, use_native and native.is_built()
        self.slot_bytes, self._stage_bytes = min(slot_bytes, SLOT_BYTES), min(stage_bytes, STAGE_BYTES)
        self._segments = SegmentSums(group, block_bytes, self._stage_bytes)
        self._views: dict[tuple[int, int], _Views] = {}  # by length and number of the dtype, which is quick to hash
        # Of all views: of a length for every sum there would soon be much.
        self._stage: Buffer | None = None
        self._block_memory = np.empty(max(block_bytes, self.slot_bytes, _ITEM_BYTES), np.uint8)
        self._quietly = _quiet_context()

    # ---- allreduce

    def allreduce(self, tensors: Sequence[Tensor], dtype: str, act: Act) -> None:
        count = sum(tensor.out.size for tensor in tensors)
        if count * host.STORAGE[host.ACCUMULATE[dtype]].itemsize <= self.slot_bytes:
            self._sum_slots(tensors, count, dtype, act)
            return
        if not fits(len(tensors)):  # of numbers that are the same on all ranks: all must post the same tensors
            packed = pack(tensors, act)
            self._sum_segments([packed], dtype, act)
            unpack(tensors, packed)
            return
        self._sum_segments(folded(tensors, dtype, act), dtype, act)

    def sum_one(self, vector: Buffer, out: Buffer, deadline: Deadline, label: str) -> None:
        """``allreduce`` of one vector that needs no widening, where ranks can attach: the same steps without detours.

        Half of the time of a small sum is Python's, so no objects are made here that the next call would make again.
        """
        group = self._group
        views = self._views.get((vector.size, vector.dtype.num)) or self._views_of(vector)
        if views.compiled:
            call = group.call + 1
            run = views.compiled[call % 2].run
            found = run(call, vector, out, native.NOT_BEGUN)
            if found:
                group.begun()
                while found != native.SUMMED:
                    if found == native.OFFERED:
                        group.await_posts(group.others, deadline, self._describing(label))
                    else:
                        group.await_sums(deadline, self._describing(label))
                    found = run(call, vector, out, found)
                return
        what = self._describing(label)
        if vector.nbytes <= self.slot_bytes:
            self._sum_one_slot(vector, out, views, deadline, what)
        else:
            self._sum_one_segment(vector, out, views, deadline, what)

    def _describing(self, label: str) -> What:
        group = self._group
        return lambda: f"{label}: shared allreduce on MPI rank {group.members[group.index]} of {group.size}"

    def _sum_one_slot(self, vector: Buffer, out: Buffer, views: _Views, deadline: Deadline, what: What) -> None:
        group = self._group
        call = group.begin(deadline, what)
        slots = views.slots[call % 2]
        hand_over(slots[group.index], vector)
        group.post()
        group.await_posts(group.others, deadline, what)
        self._quietly(self._sum_offered, slots, views.block, out, deadline, what)
        group.finish()

    def _sum_one_segment(self, vector: Buffer, out: Buffer, views: _Views, deadline: Deadline, what: What) -> None:
        group = self._group
        source, place, stage = group.place_of(vector), group.place_of(out), views.stage
        if source is None:
            source = address_of(vector)
            if stage is not None:
                source = views.stage_place
                for peer in group.others:
                    for part in views.parts[peer]:
                        hand_over(stage[part], vector[part])
        late = stage if place is None else None
        if place is None:
            place = address_of(out) if stage is None else views.stage_place
        group.begin(deadline, what)
        group.post((ONE_OF_EACH, place, source))
        try:
            group.await_posts(group.others, deadline, what)
            targets, terms = [], []
            for peer in group.others:
                head, theirs, term = group.places_of(peer, 0, 3)
                results, vectors = ((theirs,), (term,)) if head == ONE_OF_EACH else places_of(group, peer, 1)[0]
                targets += [(peer, theirs) for theirs in results if not group.are_one(theirs, place)]
                terms += [(peer, term) for term in vectors]
            with np.errstate(all="ignore"):
                for part in views.parts[group.index]:
                    target, total = out[part], vector[part]
                    for peer, term in terms:
                        total = np.add(total, group.fetch(peer, term, part, views.block[: target.size]), out=target)
                    for peer, theirs in targets:
                        group.deliver(peer, theirs, part, target)
            start_ns = timeline.now() if timeline.on else 0
            group.finish(group.others, deadline, what)
            if start_ns:
                own = sum(part.stop - part.start for part in views.parts[group.index])
                timeline.span("exchange", start_ns, nbytes=out.nbytes - own * out.itemsize)
        except BaseException:
            group.give_up(vector, out, stage)
            raise
        if late is not None:
            for peer in group.others:
                for part in views.parts[peer]:
                    np.copyto(out[part], late[part])

    def _views_of(self, like: Buffer) -> _Views:
        """What sums of vectors like this one need; kept for the next."""
        if len(self._views) >= _MOST_VIEWS:
            self._views.clear()
        group, count, dtype = self._group, like.size, like.dtype
        views = self._views[count, dtype.num] = _Views()
        views.compiled = []
        if like.nbytes <= self.slot_bytes:
            views.slots = [[group.slot(rank, count, dtype, call) for rank in range(group.size)] for call in (0, 1)]
            views.block = self._block(count if group.size > 2 else 0, dtype)
            if self._compiled and native.sums_slots(dtype):
                part = self._part(count, dtype)
                views.compiled = [SlotSum(group.slot_memory(count, dtype, call), part) for call in (0, 1)]
            return views
        block_count = max(1, self._block_bytes // dtype.itemsize)
        pieces = pieces_of((count,), group.size, block_count)
        views.parts = [[slice(piece.start, piece.stop) for piece in of_rank] for of_rank in pieces]
        views.block = self._block(min(block_count, count), dtype)
        if like.nbytes <= self._stage_bytes:
            if self._stage is None:
                self._stage = shared_bytes(self._stage_bytes)
            stage = self._stage[: like.nbytes].view(dtype)
            place = group.place_of(stage)
            if place is not None:  # else there was no room in the arena
                views.stage, views.stage_place = stage, place
        return views

    def _block(self, count: int, dtype: np.dtype[Any]) -> Buffer:
        return self._block_memory[: count * dtype.itemsize].view(dtype)

    def _sum_slots(self, tensors: Sequence[Tensor], count: int, dtype: str, act: Act) -> None:
        """Every rank offers the sum of its vectors in its slot, and adds up all ranks' slots."""
        group, half = self._group, dtype in host.HALF
        slots = self._offered([tensor.vectors for tensor in tensors], count, dtype, act)
        direct = len(tensors) == 1 and not half and act.scale == 1.0  # other ranks may share that memory, too
        total = tensors[0].out if direct else act.scratch(count, slots[0].dtype)
        with np.errstate(all="ignore"):
            partial = act.scratch(count if group.size > 2 else 0, slots[0].dtype)
            self._sum_offered(slots, partial, total, act.deadline, act.describe)
        group.finish()
        times(total, act.scale)
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

    def _part(self, count: int, dtype: np.dtype[Any]) -> int:
        """How many elements of a slot each rank adds up for all; 0 if every rank adds up the whole slots."""
        size = self._group.size
        if (size - 2) * count * dtype.itemsize < PARTS_FROM_BYTES:
            return 0
        return -(-count // (size * _PART_ELEMENTS)) * _PART_ELEMENTS

    def _sum_offered(self, slots: list[Buffer], partial: Buffer, out: Buffer, deadline: Deadline, what: What) -> None:
        """Add up what all ranks have posted in their slots."""
        group, part = self._group, self._part(out.size, out.dtype)
        if not part:
            _add_up(slots, partial, out)
            return
        parts = [slice(rank * part, (rank + 1) * part) for rank in range(group.size)]
        own = parts[group.index]
        # Over this rank's own numbers, which nobody else reads.
        _add_up([slot[own] for slot in slots], partial[own], slots[group.index][own])
        group.say_summed()
        group.await_sums(deadline, what)
        for slot, of_rank in zip(slots, parts, strict=True):
            np.copyto(out[of_rank], slot[of_rank])

    def _offered(self, of_tensors: Sequence[Sequence[Buffer]], count: int, dtype: str, act: Act) -> list[Buffer]:
        """Every rank's slot, with the sums of its vectors of each tensor, ``count`` elements in all."""
        group, storage = self._group, host.STORAGE[host.ACCUMULATE[dtype]]
        call = group.begin(act.deadline, act.describe)
        slots = [group.slot(rank, count, storage, call) for rank in range(group.size)]
        start = 0
        for vectors in of_tensors:
            part = slots[group.index][start : start + vectors[0].size]
            start += part.size
            own = HostTerms(vectors, dtype).own(0, part.size, part)
            if own is not part:
                hand_over(part, own)
        group.post()
        group.await_posts(group.others, act.deadline, act.describe)
        return slots

    def _sum_segments(self, tensors: Sequence[Tensor], dtype: str, act: Act) -> None:
        """Every rank sums one segment of all tensors end to end, and delivers it."""
        if self._compiled:
            self._segments.sum(tensors, dtype, act)
            return
        group = self._group
        tensors = [read_first(tensor) for tensor in tensors]
        block = block_for(dtype, self._block_bytes, act)
        pieces = pieces_of(tuple(tensor.out.size for tensor in tensors), group.size, block[0].size)[group.index]
        delivery = Delivery(group, tensors, parts_of(pieces, len(tensors)), act, self._stage_bytes)
        with self._exposed(*tensors, act.scratch):
            delivery.begin(act)
            sums: dict[int, HostSum] = {}
            for number, start, stop in pieces:
                if number not in sums:
                    sums[number] = HostSum(group, delivery, number, tensors[number].vectors, dtype, block, act.scale)
                sums[number].finish(None, start, stop, tensors[number].out[start:stop])
                delivery.deliver(number, slice(start, stop))
            start_ns = timeline.now() if timeline.on else 0
            group.finish(group.others, act.deadline, act.describe)
            if start_ns:
                nbytes = sum(tensor.out.nbytes for tensor in tensors)
                own = sum(stop - start for _, start, stop in pieces)
                timeline.span("exchange", start_ns, nbytes=nbytes - own * tensors[0].out.itemsize)
        delivery.settle()

    @contextlib.contextmanager
    def _exposed(self, *memory: Any) -> Iterator[None]:
        """Other ranks write to ``memory`` inside; if that does not end well, it had better stay where it is."""
        try:
            yield
        except BaseException:
            self._group.give_up(*memory)
            raise

    # ---- the others

    def reduce_scatter(self, vectors: Sequence[Buffer], out: Buffer, dtype: str, act: Act) -> None:
        group, count = self._group, vectors[0].size
        if count * host.STORAGE[host.ACCUMULATE[dtype]].itemsize <= self.slot_bytes:
            self._scatter_slots(vectors, out, dtype, act)
            return
        posted = Posted(group, [Tensor(vectors, out)], act, with_results=False)
        block = block_for(dtype, self._block_bytes, act)
        total = HostSum(group, posted, 0, vectors, dtype, block, act.scale)
        start, stop = act.segments(count)[group.index]
        if self._compiled:
            NativeTerms([out], [total], block, base=start).sum_segment(start, stop)
        else:
            total.finish(None, start, stop, out)
        group.finish(group.others, act.deadline, act.describe)

    def _scatter_slots(self, vectors: Sequence[Buffer], out: Buffer, dtype: str, act: Act) -> None:
        """Every rank offers the sum of its vectors in its slot, and adds up its segment of all ranks' slots."""
        group, own = self._group, slice(*act.segments(vectors[0].size)[self._group.index])
        parts = [slot[own] for slot in self._offered([vectors], vectors[0].size, dtype, act)]
        half = dtype in host.HALF
        total = act.scratch(out.size, parts[0].dtype) if half else out
        with np.errstate(all="ignore"):
            _add_up(parts, act.scratch(out.size if group.size > 2 else 0, total.dtype), total)
        group.finish()
        times(total, act.scale)
        if half:
            host.narrow(total, out, dtype)

    def allgather(self, out: Buffer, act: Act) -> None:
        group, segments = self._group, act.segments(out.size)
        start, stop = segments[group.index]
        if segments[0][1] * out.itemsize <= self.slot_bytes:
            call = group.begin(act.deadline, act.describe)
            hand_over(group.slot(group.index, stop - start, out.dtype, call), out[start:stop])
            group.post()
            group.await_posts(group.others, act.deadline, act.describe)
            for peer in group.others:
                start, stop = segments[peer]
                np.copyto(out[start:stop], group.slot(peer, stop - start, out.dtype, call))
            group.finish()
            return
        delivery = Delivery(group, [Tensor((), out)], [slice(start, stop)], act)
        with self._exposed(out, act.scratch):
            delivery.begin(act)
            block_count = max(1, self._block_bytes // out.itemsize)
            for first in range(start, stop, block_count):
                delivery.deliver(0, slice(first, min(first + block_count, stop)))
            group.finish(group.others, act.deadline, act.describe)
        delivery.settle()

    def broadcast(self, buffer: Buffer, root: int, act: Act) -> None:
        group = self._group
        if buffer.nbytes <= self.slot_bytes:
            call = group.begin(act.deadline, act.describe)
            if group.index == root:
                hand_over(group.slot(root, buffer.size, buffer.dtype, call), buffer)
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
            group.check(root)  # else it may be something else by now
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
