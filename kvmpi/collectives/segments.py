"""Sums in segments in compiled code: what lies where is worked out once for tensors that lie where they lay before."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvmpi.arrays import address_of
from kvmpi.collectives.algorithm import Act, Batch, Tensor
from kvmpi.collectives.cross_memory import Source
from kvmpi.collectives.host_group import HostGroup, Target
from kvmpi.collectives.host_sum import Delivery, block_for, parts_of, pieces_of, places_of, read_first, words_of
from kvmpi.collectives.native import CopyList, NativeTerms
from kvmpi.kernels import host
from kvmpi.trace import timeline

Buffer = npt.NDArray[Any]

#: Plans that are kept: of a step's buckets there are some dozens.
_MOST_PLANS = 256
#: Copies of results from this size on go past the caches, which most of them would have left before anybody reads.
PAST_CACHES_BYTES = 4 << 20


class _Addends(msgspec.Struct):
    """``native.Terms``."""

    sources: Sequence[Source]
    dtype: str
    sum_dtype: np.dtype[Any]
    scale: float


class _Plan:
    """What this rank does for tensors that lie where they lie, and with scratch from where that begins.

    Attributes:
        before, after: copies to and from what stands in for private memory.
        words: what is posted.
        numbers: of the tensors of which this rank sums something.
        start, stop: which elements it sums, counted from the first of those tensors.
        scratch_bytes: how much it takes.
        seen: what others had posted when ``terms`` were made, in the order of ``HostGroup.others``.
        terms: None if there is nothing to sum.
    """

    def __init__(
        self, group: HostGroup, tensors: Sequence[Tensor], dtype: str, act: Act, block_bytes: int, stage_bytes: int
    ) -> None:
        begin, counts = act.scratch.used, tuple(tensor.out.size for tensor in tensors)
        pieces = pieces_of(counts, group.size, max(1, sum(counts)))[group.index]
        delivery = Delivery(group, tensors, parts_of(pieces, len(tensors)), act, stage_bytes)
        self.before, self.after = CopyList(delivery.before, for_others=True), CopyList(delivery.after)
        self.words = array("Q", words_of(delivery.mine))
        self.numbers = [piece.tensor for piece in pieces]
        self.start = pieces[0].start if pieces else 0
        self.stop = self.start + sum(piece.stop - piece.start for piece in pieces)
        self.nbytes = sum(tensor.out.nbytes for tensor in tensors)
        self.block = block_for(dtype, block_bytes, act)
        self.scratch_bytes = act.scratch.used - begin
        self.seen: list[bytes] = []
        self.terms: NativeTerms | None = None


class SegmentSums:
    """``Shared`` for what does not fit into a slot: every rank sums a segment of all tensors end to end.

    Args:
        block_bytes: what is summed, and delivered, at a time.
        stage_bytes: see ``Delivery``.
    """

    def __init__(self, group: HostGroup, block_bytes: int, stage_bytes: int) -> None:
        self._group, self._block_bytes, self._stage_bytes = group, block_bytes, stage_bytes
        self._plans: dict[tuple[Any, ...], _Plan] = {}
        self._memory: Buffer | None = None  # scratch that the plans are made for

    def sum(self, tensors: Sequence[Tensor], dtype: str, act: Act) -> None:
        """Sum the tensors, on every rank; not through slots.

        Raises:
            KVTimeoutError, PeerLostError: others may still write to the tensors, which ``HostGroup`` keeps.
        """
        group = self._group
        try:
            plan = self._plan_of(tensors, dtype, act)
            plan.before.run()
            group.begin(act.deadline, act.describe)
            group.post(plan.words)
            group.await_posts(group.others, act.deadline, act.describe)
            if not plan.seen or any(
                group.posted(peer, len(seen)) != seen for peer, seen in zip(group.others, plan.seen, strict=True)
            ):
                self._see(plan, tensors, dtype, act.scale)
            if plan.terms is not None and not plan.terms.sum_segment(plan.start, plan.stop):
                for peer in group.others:
                    group.check(peer)
            start_ns = timeline.now() if timeline.on else 0
            group.finish(group.others, act.deadline, act.describe)
            if start_ns:
                own = (plan.stop - plan.start) * tensors[0].out.itemsize
                timeline.span("exchange", start_ns, nbytes=plan.nbytes - own)
        except BaseException:
            group.give_up(*tensors, act.scratch)
            raise
        plan.after.run()

    def _plan_of(self, tensors: Sequence[Tensor], dtype: str, act: Act) -> _Plan:
        """The plan for tensors that lie there; what it takes of scratch is taken."""
        scratch = act.scratch
        if scratch.memory is not self._memory:  # as after every call that took more than there was
            self._plans.clear()
            self._memory = scratch.memory
        key: list[Any] = [dtype, act.scale, scratch.used]
        if isinstance(tensors, Batch) and tensors.serial:
            key.append(tensors.serial)
        else:
            for tensor in tensors:
                key += (tensor.out.size, address_of(tensor.out), len(tensor.vectors), len(tensor.copies))
                for buffer in (*tensor.vectors, *tensor.copies):
                    key.append(address_of(buffer))
        found = self._plans.get(tuple(key))
        if found is not None:
            scratch(found.scratch_bytes, np.uint8)
            return found
        firsts = [read_first(tensor) for tensor in tensors]
        found = _Plan(self._group, firsts, dtype, act, self._block_bytes, self._stage_bytes)
        if len(self._plans) >= _MOST_PLANS:
            self._plans.clear()
        self._plans[tuple(key)] = found
        return found

    def _see(self, plan: _Plan, tensors: Sequence[Tensor], dtype: str, scale: float) -> None:
        """Make of what the others have posted what compiled code does."""
        group, num_tensors = self._group, len(tensors)
        theirs = {peer: places_of(group, peer, num_tensors) for peer in group.others}
        mine = places_of(group, group.index, num_tensors)
        past_caches = plan.nbytes >= PAST_CACHES_BYTES
        sum_dtype = host.STORAGE[host.ACCUMULATE[dtype]]
        outs, terms, aims = [], [], []
        for number in plan.numbers:
            tensor, (own, _) = read_first(tensors[number]), mine[number]
            outs.append(tensor.out)
            targets = [Target(group.source(group.index, place).address, past_caches=past_caches) for place in own[1:]]
            sources = [Source(address_of(vector)) for vector in tensor.vectors]
            for peer in group.others:
                results, vectors = theirs[peer][number]
                sources += [group.source(peer, place) for place in vectors]
                targets += [
                    group.target(peer, place)
                    for place in results
                    if not any(group.are_one(place, result) for result in own)
                ]
            terms.append(_Addends(sources, dtype, sum_dtype, scale))
            aims.append(targets)
        if outs:
            plan.terms = NativeTerms(outs, terms, plan.block, targets=aims)
        plan.seen = [group.posted(peer, 8 * sum(1 + len(r) + len(v) for r, v in theirs[peer])) for peer in group.others]
