"""Who sends, receives and adds which elements in which step of a ring: arithmetic that holds no data.

The elements are cut into one segment per rank, and each segment into chunks. In step t a rank sends one segment to the
right and receives another from the left; the segment sent in step t is the one received in step t-1, so chunks flow
around without waiting for whole steps:

    reduce, t = 0 .. P-2:      send segment i-t,   receive i-t-1 and add it to the own one
    gather, t = P-1 .. 2P-3:   send segment i+1-u, receive i-u,  u = t-(P-1)

An allreduce takes all steps, with i the rank's place in the ring. A reduce-scatter takes the first half and an
allgather the second, with i one less, so that segment i is the one that rank i ends up with, or begins with.

Source: Patarasuk & Yuan, JPDC 69(2):117-124, 2009, doi:10.1016/j.jpdc.2008.09.002.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Range = tuple[int, int]


def segment_bounds(count: int, num_segments: int) -> list[Range]:
    """Half-open element ranges covering ``range(count)``; lengths differ by at most one, longer first."""
    base, extra = divmod(count, num_segments)
    starts = [i * base + min(i, extra) for i in range(num_segments + 1)]
    return list(pairwise(starts))


def part_of(segments: Sequence[Range], ring: int, num_rings: int) -> list[list[Range]]:
    """What ``ring`` of ``num_rings`` carries of each segment: an equal part."""
    parts = []
    for start, stop in segments:
        first, last = segment_bounds(stop - start, num_rings)[ring]
        parts.append([(start + first, start + last)])
    return parts


def chunks_of(segments: Sequence[Sequence[Range]], max_chunk_count: int) -> list[list[Range]]:
    """The ranges of each segment cut into chunks of at most ``max_chunk_count`` elements.

    The same number in every segment, the last ones empty where a segment has fewer.
    """
    cut = []
    for ranges in segments:
        pieces = [(start, stop, -(-(stop - start) // max_chunk_count)) for start, stop in ranges]
        cut.append(
            [(start + a, start + b) for start, stop, n in pieces if n for a, b in segment_bounds(stop - start, n)]
        )
    longest = max(1, max(map(len, cut)))
    return [chunks + [(0, 0)] * (longest - len(chunks)) for chunks in cut]


def segments_of_step(step: int, place: int, size: int) -> tuple[int, int]:
    """(segment to send, segment to receive) in ``step`` of the ``2 * (size - 1)`` steps, at ``place`` in the ring."""
    if step < size - 1:
        return (place - step) % size, (place - step - 1) % size
    gather = step - (size - 1)
    return (place + 1 - gather) % size, (place - gather) % size


class Schedule:
    """All that one rank of a ring sends and receives, in order: transfer after transfer, chunk after chunk of a step.

    What is received in one step is sent in the next: two segments of partial sums take turns. A chunk has the same
    place in both, so that it replaces the chunk of its number and no other.

    Attributes:
        num_steps: of ``num_chunks`` transfers each.
        num_chunks: of each segment.
        longest_chunk: elements.
        kept_count: elements of all partial sums that are kept at one time.
        num_kept: the first so many transfers bring partial sums, which are kept until they are sent.
        num_summed: the first so many bring partial sums; those that are not kept become results.
        sends: of each transfer, start and stop of the elements, and the place among partial sums; -1: they are results.
        receives: likewise what comes in.
    """

    def __init__(
        self, chunks: Sequence[Sequence[Range]], place: int, *, reduces: bool = True, gathers: bool = True
    ) -> None:
        size, reduce_steps = len(chunks), len(chunks) - 1
        steps = range(0 if reduces else reduce_steps, 2 * reduce_steps if gathers else reduce_steps)
        place = place if reduces and gathers else (place - 1) % size
        self.num_chunks = len(chunks[0])
        self.num_steps = len(steps)
        self.longest_chunk = max(stop - start for segment in chunks for start, stop in segment)
        self.num_kept = (reduce_steps - 1) * self.num_chunks if reduces else 0
        self.num_summed = reduce_steps * self.num_chunks if reduces else 0
        turns = min(2, reduce_steps)
        self.kept_count = turns * self.num_chunks * self.longest_chunk if reduces else 0
        self.sends, self.receives = list[tuple[int, int, int]](), list[tuple[int, int, int]]()
        for step in steps:
            sent, received = segments_of_step(step, place, size)
            for number in range(self.num_chunks):
                # The own part counts as received in step -1.
                before, now = (
                    ((turn % turns) * self.num_chunks + number) * self.longest_chunk for turn in (step, step + 1)
                )
                self.sends.append((*chunks[sent][number], before if step < reduce_steps else -1))
                self.receives.append((*chunks[received][number], now if step < reduce_steps - 1 else -1))

    @functools.cached_property
    def tables(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """``receives`` and ``sends`` of shape ``(transfers, 3)``, for compiled code."""
        return np.array(self.receives, np.int64), np.array(self.sends, np.int64)

    @functools.cached_property
    def completed(self) -> list[Range]:
        """The chunks that become final, in that order; without those that an allgather begins with."""
        return [(start, stop) for start, stop, _ in self.receives[self.num_kept :]]


@functools.lru_cache(maxsize=256)
def even_schedules(
    count: int, size: int, place: int, num_rings: int, max_chunk_count: int, *, reduces: bool = True,
    gathers: bool = True,
) -> tuple[Schedule, ...]:  # fmt: skip
    """Of ``num_rings`` that carry equal parts of ``count`` elements: those of the rank at ``place``.

    Kept, because the same tensors come again and again.
    """
    segments = segment_bounds(count, size)
    return tuple(
        Schedule(
            chunks_of(part_of(segments, ring, num_rings), max_chunk_count), place, reduces=reduces, gathers=gathers
        )
        for ring in range(num_rings)
    )


class HostRings(NamedTuple):
    """Of rings between hosts, which carry the segments of some ranks each, what a rank does and what it waits for.

    Attributes:
        own: of the ring that this rank drives; None if it drives none.
        completed: of each ring, ``Schedule.completed``.
    """

    own: Schedule | None
    completed: tuple[list[Range], ...]


@functools.lru_cache(maxsize=64)
def host_rings(
    hosts: tuple[tuple[int, ...], ...], rank: int, count: int, max_chunk_count: int, *, reduces: bool = True,
    gathers: bool = True,
) -> HostRings:  # fmt: skip
    """For ``rank`` of ranks on ``hosts``: as many ranks of each host as all hosts have drive a ring each.

    Kept, because the same tensors come again and again: with many ranks this takes longer than to sum a small one.
    """
    place = next(number for number, ranks in enumerate(hosts) if rank in ranks)
    segments, num_rings = segment_bounds(count, sum(map(len, hosts))), min(map(len, hosts))
    own, completed = None, list[list[Range]]()
    for ring in range(num_rings):
        shares = [[segments[member] for member in ranks[ring::num_rings]] for ranks in hosts]
        schedule = Schedule(chunks_of(shares, max_chunk_count), place, reduces=reduces, gathers=gathers)
        completed.append(schedule.completed)
        if ring == hosts[place].index(rank):
            own = schedule
    return HostRings(own, tuple(completed))
