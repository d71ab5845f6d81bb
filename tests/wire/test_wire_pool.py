"""The arithmetic of shared memory: ranges never overlap, and all of them come back."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvmpi.wire.pool import ALIGN_BYTES, Pool


@given(
    start=st.integers(0, 200),
    stop=st.integers(300, 5000) | st.sampled_from([5, 9, 30]).map(ALIGN_BYTES.__mul__),  # also such as can be full
    steps=st.lists(st.tuples(st.booleans(), st.integers(1, 2000)), max_size=60),
)
def test_ranges_do_not_overlap_and_all_come_back(start: int, stop: int, steps: list[tuple[bool, int]]) -> None:
    pool, taken = Pool(start, stop), {}
    for gives, number in steps:
        if gives and taken:
            offset = sorted(taken)[number % len(taken)]
            pool.give(offset)
            del taken[offset]
        elif (offset := pool.take(number)) is not None:
            taken[offset] = offset + number
            assert offset % ALIGN_BYTES == 0
            assert start <= offset < offset + number <= stop
        ends = sorted(taken.items())
        assert all(before[1] <= after[0] for before, after in pairwise(ends))
        assert pool.num_taken == len(taken)
        free = pool.free_ranges
        assert all(a < b for a, b in free), "an empty range is none"
        assert all(a[1] < b[0] for a, b in pairwise(free)), "free ranges that touch are one"
        assert not any(a < stop_ and start_ < b for a, b in free for start_, stop_ in taken.items())
    for offset in taken:
        pool.give(offset)
    assert pool.free_ranges == Pool(start, stop).free_ranges


@given(nbytes=st.integers(1, 10_000))
def test_a_range_is_had_exactly_if_there_is_room(nbytes: int) -> None:
    pool = Pool(0, 5 * ALIGN_BYTES)
    assert (pool.take(nbytes) is None) == (nbytes > 5 * ALIGN_BYTES)


def test_what_ends_a_full_pool_can_be_given_back() -> None:
    pool = Pool(0, 3 * ALIGN_BYTES)
    offsets = [pool.take(ALIGN_BYTES) for _ in range(3)]
    assert offsets == [0, ALIGN_BYTES, 2 * ALIGN_BYTES]
    assert pool.free_ranges == []
    pool.give(2 * ALIGN_BYTES)
    assert pool.take(ALIGN_BYTES) == 2 * ALIGN_BYTES


def test_the_lowest_free_range_is_taken_first() -> None:
    pool = Pool(0, 10 * ALIGN_BYTES)
    first, second, third = (pool.take(ALIGN_BYTES) for _ in range(3))
    assert None not in (first, second, third)
    pool.give(second or 0)
    pool.give(first or 0)
    assert pool.take(2 * ALIGN_BYTES) == first
