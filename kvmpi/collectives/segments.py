"""Sums in segments in compiled code: what lies where is worked out once for tensors that lie where they lay before."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvmpi.arrays import address_of
from kvmpi.collectives.algorithm import Act, Tensor
from kvmpi.collectives.cross_memory import Source
from kvmpi.collectives.host_group import HostGroup, Target
from kvmpi.collectives.host_sum import Delivery, parts_of, pieces_of, places_of, read_first, words_of
from kvmpi.collectives.native import CopyList, NativeTerms
from kvmpi.kernels import host
from kvmpi.trace import timeline

#: Plans that are kept: of a step's buckets there are some dozens.
_MOST_PLANS = 256
#: Copies of results from this size on go past the caches, which most of them would have left before anybody reads.
PAST_CACHES_BYTES = 4 << 20


@dataclass(slots=True)
class _Addends:
    """``native.Terms``."""

    sources: Sequence[Source]
    dtype: str
    sum_dtype: np.dtype[Any]
    scale: float


class _Plan:
    """What this rank does for tensors that lie where they lie.

    Attributes:
        before, after: copies from and to what stands in for private memory.
        words: what is posted.
        numbers: of the tensors of which this rank sums something.
        start, stop: which elements it sums, counted from the first of those tensors.
        scratch_bytes: how much it takes, from where that began.
        seen: what others had posted when ``terms`` were made, in the order of ``HostGroup.others``.
        terms: None if there is nothing to sum.
    """

    __slots__ = ("after", "before", "nbytes", "numbers", "scratch_bytes", "seen", "start", "stop", "terms", "words")

    terms: NativeTerms | None
    seen: list[bytes]

    def __init__(self, group: HostGroup, tensors: Sequence[Tensor], act: Act, stage_bytes: int) -> None:
        counts = tuple(tensor.out.size for tensor in tensors)
        pieces = pieces_of(counts, group.size, max(1, sum(counts)))[group.index]
        begin = act.scratch.address
        delivery = Delivery(group, tensors, parts_of(pieces, len(tensors)), act, stage_bytes)
        self.scratch_bytes = act.scratch.address - begin
        self.before, self.after = CopyList(delivery.before), CopyList(delivery.after)
        self.words = array("Q", words_of(delivery.mine))
        self.numbers = [piece.tensor for piece in pieces]
        self.start = pieces[0].start if pieces else 0
        self.stop = self.start + sum(piece.stop - piece.start for piece in pieces)
        self.nbytes = sum(tensor.out.nbytes for tensor in tensors)
        self.seen, self.terms = [], None


class SegmentSums:
    """``Shared`` for what does not fit into a slot: every rank sums a segment of all tensors end to end.

    Args:
        block_bytes: what is summed, and delivered, at a time.
        stage_bytes: see ``Delivery``.
    """

    def __init__(self, group: HostGroup, block_bytes: int, stage_bytes: int) -> None:
        self._group, self._block_bytes, self._stage_bytes = group, block_bytes, stage_bytes
        self._plans: dict[tuple[Any, ...], _Plan] = {}

    def sum(self, tensors: Sequence[Tensor], dtype: str, act: Act) -> None:
        """Sum the tensors, on every rank; not through slots.

        Raises:
            KVTimeoutError, PeerLostError: others may still write to the tensors, which ``HostGroup`` keeps.
        """
        group = self._group
        try:
            key = _places(tensors, dtype, act)
            plan = self._plans.get(key)
            if plan is None:
                plan = _Plan(group, [read_first(tensor) for tensor in tensors], act, self._stage_bytes)
            else:
                act.scratch(plan.scratch_bytes, np.uint8)
            plan.before.run()
            group.begin(act.deadline, act.describe)
            group.post(plan.words)
            group.await_posts(group.others, act.deadline, act.describe)
            if not plan.seen or any(
                group.posted(peer, len(seen)) != seen for peer, seen in zip(group.others, plan.seen, strict=True)
            ):
                self._see(plan, tensors, dtype, act)
                if act.scratch.is_lasting:
                    self._keep(key, plan)
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

    def _keep(self, key: tuple[Any, ...], plan: _Plan) -> None:
        if len(self._plans) >= _MOST_PLANS and key not in self._plans:
            self._plans.clear()
        self._plans[key] = plan

    def _see(self, plan: _Plan, tensors: Sequence[Tensor], dtype: str, act: Act) -> None:
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
            terms.append(_Addends(sources, dtype, sum_dtype, act.scale))
            aims.append(targets)
        if outs:
            block_count = max(1, self._block_bytes // outs[0].itemsize)
            plan.terms = NativeTerms(outs, terms, act.scratch, block_count=block_count, targets=aims)
        plan.seen = [group.posted(peer, 8 * sum(1 + len(r) + len(v) for r, v in theirs[peer])) for peer in group.others]


def _places(tensors: Sequence[Tensor], dtype: str, act: Act) -> tuple[Any, ...]:
    """All that a plan goes by."""
    found: list[Any] = [dtype, act.scale, act.scratch.address]
    for tensor in tensors:
        found += (tensor.out.size, address_of(tensor.out), len(tensor.copies))
        for buffer in (*tensor.vectors, *tensor.copies):
            found.append(address_of(buffer))
    return tuple(found)
