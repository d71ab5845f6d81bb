"""The arithmetic of the ring, by itself: who sends which elements when, and what is added where."""

from __future__ import annotations

import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmpi.collectives import ring, rings
from kvmpi.collectives.algorithm import Act, Scratch
from kvmpi.collectives.comm import Request
from kvmpi.collectives.cost import Choice
from kvmpi.collectives.memory_comm import MemoryComm, MemoryWorld
from kvmpi.collectives.schedule import (
    Schedule,
    chunks_of,
    even_schedules,
    host_rings,
    part_of,
    segment_bounds,
    segments_of_step,
)
from kvmpi.deadline import Deadline

SIZES = range(2, 18)


@given(count=st.integers(0, 1 << 40), num_segments=st.integers(1, 300))
def test_segments_cover_everything_once_longer_ones_first(count: int, num_segments: int) -> None:
    bounds = segment_bounds(count, num_segments)
    lengths = [stop - start for start, stop in bounds]
    assert len(bounds) == num_segments
    assert bounds[0][0] == 0
    assert bounds[-1][1] == count
    assert all(left[1] == right[0] for left, right in pairwise(bounds))
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] - lengths[-1] <= 1


@given(
    count=st.integers(0, 5000), size=st.integers(1, 9), num_rings=st.integers(1, 8), max_chunk_count=st.integers(1, 700)
)
def test_chunks_of_all_rings_cover_every_segment_once_and_are_equally_many(
    count: int, size: int, num_rings: int, max_chunk_count: int
) -> None:
    segments = segment_bounds(count, size)
    rings = [chunks_of(part_of(segments, ring, num_rings), max_chunk_count) for ring in range(num_rings)]
    for chunks in rings:
        assert len({len(chunked) for chunked in chunks}) == 1
        longest = max(-(-(stop - start) // num_rings) for start, stop in segments)
        assert len(chunks[0]) <= max(1, -(-longest // max_chunk_count)), "more chunks than needed"
        assert all(stop - start <= max_chunk_count for chunked in chunks for start, stop in chunked)
    for segment, (start, stop) in enumerate(segments):
        assert [i for chunks in rings for a, b in chunks[segment] for i in range(a, b)] == list(range(start, stop))


@given(
    sizes=st.lists(st.integers(1, 12), min_size=2, max_size=6), count=st.integers(0, 3000),
    max_chunk_count=st.integers(1, 700), gathers=st.booleans(),
)  # fmt: skip
def test_rings_between_hosts_bring_every_element_once_whatever_ranks_these_have(
    sizes: list[int], count: int, max_chunk_count: int, gathers: bool
) -> None:
    stops = np.cumsum(sizes).tolist()
    hosts = tuple(tuple(range(stop - size, stop)) for size, stop in zip(sizes, stops, strict=True))
    found = []
    for rank in range(stops[-1]):
        rings = host_rings(hosts, rank, count, max_chunk_count, gathers=gathers)
        assert len(rings.completed) == min(sizes)
        place = next(ranks.index(rank) for ranks in hosts if rank in ranks)
        assert (rings.own is None) == (place >= min(sizes)), "who drives a ring"
        assert rings.own is None or rings.own.completed == rings.completed[place]
        own = [i for start, stop in rings.own.completed for i in range(start, stop)] if rings.own else []
        if gathers:
            assert sorted(i for ring in rings.completed for a, b in ring for i in range(a, b)) == list(range(count))
        found += own
    assert gathers or sorted(found) == list(range(count)), "parts of a reduce-scatter"
    again = host_rings(hosts, stops[-1] - 1, count, max_chunk_count, gathers=gathers)
    assert again is rings, "what a call of many ranks needs is made once"


def test_a_segment_may_consist_of_several_ranges() -> None:
    assert chunks_of([[(0, 5), (20, 23)], [(5, 9)], []], 3) == [
        [(0, 3), (3, 5), (20, 23)], [(5, 7), (7, 9), (0, 0)], [(0, 0)] * 3
    ]  # fmt: skip


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("reduces", [False, True])
def test_everything_that_is_not_there_from_the_beginning_becomes_final_once(size: int, reduces: bool) -> None:
    chunks = [[(10 * i, 10 * i + 5), (10 * i + 5, 10 * i + 10)] for i in range(size)]
    for place in range(size):
        order = Schedule(chunks, place, reduces=reduces).completed
        assert sorted(order) == [chunk for i in range(size) for chunk in chunks[i] if reduces or i != place]


@pytest.mark.parametrize("size", SIZES)
def test_each_send_is_what_the_right_neighbour_receives(size: int) -> None:
    for step in range(2 * (size - 1)):
        for rank in range(size):
            sent, _ = segments_of_step(step, rank, size)
            _, expected = segments_of_step(step, (rank + 1) % size, size)
            assert sent == expected, f"step {step}, rank {rank} of {size}"


@pytest.mark.parametrize("size", SIZES)
def test_each_step_sends_what_the_step_before_received(size: int) -> None:
    for rank in range(size):
        assert segments_of_step(0, rank, size)[0] == rank
        for step in range(1, 2 * (size - 1)):
            assert segments_of_step(step, rank, size)[0] == segments_of_step(step - 1, rank, size)[1]


@pytest.mark.parametrize("size", SIZES)
def test_every_segment_is_summed_over_every_rank_once_and_reaches_every_rank(size: int) -> None:
    """The ring with lists of ranks in place of numbers: a sum is the list of those who contributed, in order."""
    held: list[dict[int, list[int]]] = [{} for _ in range(size)]  # of each rank: segment -> partial sum
    contributed: list[list[int]] = [[] for _ in range(size)]
    results: list[dict[int, list[int]]] = [{} for _ in range(size)]
    for step in range(2 * (size - 1)):
        messages = []
        for rank in range(size):
            segment, _ = segments_of_step(step, rank, size)
            if step == 0:
                contributed[rank].append(segment)
                held[rank][segment] = [rank]
            messages.append(held[rank][segment] if step < size - 1 else results[rank][segment])
        for rank in range(size):
            _, segment = segments_of_step(step, rank, size)
            incoming = messages[(rank - 1) % size]
            if step < size - 1:
                contributed[rank].append(segment)
                held[rank][segment] = [*incoming, rank]
                if step == size - 2:
                    results[rank][segment] = held[rank][segment]
            else:
                assert segment not in results[rank], "received twice"
                results[rank][segment] = incoming
    for rank in range(size):
        assert sorted(contributed[rank]) == list(range(size)), f"rank {rank} contributes to every segment once"
        # In ring order, starting with the owner: the same on every rank, so the same bits.
        assert results[rank] == {s: [(s + i) % size for i in range(size)] for s in range(size)}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("reduces", "gathers"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize(("count", "max_chunk_count"), [(0, 4), (3, 4), (257, 4), (1000, 1000)])
def test_a_rank_sends_what_it_received_a_step_before_and_overwrites_nothing_that_is_still_to_be_sent(
    size: int, reduces: bool, gathers: bool, count: int, max_chunk_count: int
) -> None:
    schedules = [
        even_schedules(count, size, place, 1, max_chunk_count, reduces=reduces, gathers=gathers)[0]
        for place in range(size)
    ]
    own = segment_bounds(count, size)
    for place, schedule in enumerate(schedules):
        n = schedule.num_chunks
        right = schedules[(place + 1) % size]
        assert [part[:2] for part in schedule.sends] == [part[:2] for part in right.receives]
        assert len(schedule.sends) == n * schedule.num_steps == n * (size - 1) * (reduces + gathers)
        assert schedule.sends[n:] == schedule.receives[:-n]
        first = place if reduces and gathers else (place - 1) % size if reduces else place
        assert [i for a, b, _ in schedule.sends[:n] for i in range(a, b)] == list(range(*own[first]))
        assert [at >= 0 for *_, at in schedule.receives] == [
            t < schedule.num_kept for t in range(len(schedule.receives))
        ]
        assert [at >= 0 for *_, at in schedule.sends] == [t < schedule.num_summed for t in range(len(schedule.sends))]
        for t in range(schedule.num_kept):
            # There is room when send t - n has been delivered; what came before transfer t and was not sent stays.
            at = schedule.receives[t][2]
            assert at + schedule.longest_chunk <= schedule.kept_count
            staying = schedule.sends[max(0, t - n + 1) : t + n]
            assert all(abs(other - at) >= schedule.longest_chunk for *_, other in staying)


@pytest.mark.parametrize(("count", "num_rings", "late"), [(1 << 14, 2, False), (1 << 15, 1, False), (1 << 17, 2, True)])
def test_only_who_has_many_chunks_under_way_may_come_late(
    monkeypatch: pytest.MonkeyPatch, count: int, num_rings: int, late: bool
) -> None:
    """Of a segment; where there are few, each waits for the one before it."""
    habits = []
    monkeypatch.setattr(rings, "drive", lambda *arguments: habits.append(arguments[-2]))
    act = Act("test", "allgather", Choice("multi_ring", num_rings, 16 << 10), 0, 2, Deadline(10), Scratch())
    rings.Rings(MemoryWorld(2).comms()[0]).allgather(np.zeros(count, np.float32), act)
    assert habits == [ring.STREAMS if late else ring.NEIGHBOURS]
    assert ring.STREAMS.nap_share > ring.NEIGHBOURS.nap_share


def test_rings_wait_by_what_wakes_them_where_there_is_such(monkeypatch: pytest.MonkeyPatch) -> None:
    waiters = []
    monkeypatch.setattr(rings, "drive", lambda *arguments: waiters.append(arguments[-1]))
    act = Act("test", "allgather", Choice("ring", 1, 16), 0, 2, Deadline(10), Scratch())
    comm = MemoryWorld(2).comms()[0]
    rings.Rings(comm).allgather(np.zeros(8, np.float32), act)
    monkeypatch.setattr(comm, "waiter", lambda peers: time.sleep if set(peers) == {1} else None)
    rings.Rings(comm).allgather(np.zeros(8, np.float32), act)
    assert waiters == [None, time.sleep]


def test_sends_are_asked_about_only_when_something_waits_for_them() -> None:
    """Each time runs the library's progress engine; but partial sums are kept until they are delivered."""
    asked = []

    class Asked:
        def __init__(self, request: Request) -> None:
            self._test = request.test

        def test(self) -> bool:
            asked.append(self)
            return self._test()

    def ring_of(comm: MemoryComm, out: np.ndarray) -> ring.Ring:
        send = comm.isend
        comm.isend = lambda *arguments: Asked(send(*arguments))
        return ring.Ring(comm, range(2), Schedule([[(0, 2), (2, 4)], [(4, 6), (6, 8)]], comm.rank, reduces=False), out)

    outs = [np.arange(8.0) + 10 * rank for rank in range(2)]
    first, second = (ring_of(comm, out) for comm, out in zip(MemoryWorld(2).comms(), outs, strict=True))
    first.advance()
    assert not asked, "nothing has come yet, and there is room for more sends"
    for _ in range(10):
        second.advance()
        first.advance()
    assert first.done
    assert second.done
    assert asked, "who has all must know that the other has, too"
    assert outs[0].tolist() == outs[1].tolist() == [0, 1, 2, 3, 14, 15, 16, 17]
