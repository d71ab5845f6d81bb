"""How far clocks are apart, from messages that take longer one way than the other."""

from __future__ import annotations

import numpy as np
import pytest

from kvmpi.trace.clocks import OffsetEstimate, offsets_to

MS = 1_000_000


@pytest.mark.parametrize("offset_ns", [0, -3_600_000_000_000, 17 * MS + 123])
@pytest.mark.parametrize("seed", range(5))
def test_the_estimate_is_off_by_half_of_the_shortest_way_at_most(offset_ns: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    estimate, shortest_ns, now_ns = OffsetEstimate(), None, 5_000_000_000
    for _ in range(40):
        there_ns = int(0.1 * MS + rng.exponential(5 * MS))
        back_ns = int(0.4 * MS + rng.exponential(20 * MS))  # four times as long even at best
        estimate.hear(now_ns, now_ns + there_ns + offset_ns, now_ns + there_ns + back_ns)
        shortest_ns = min(there_ns + back_ns, shortest_ns or 1 << 62)
        assert estimate.offset_ns is not None
        assert estimate.round_trip_ns == shortest_ns
        assert abs(estimate.offset_ns - offset_ns) <= shortest_ns / 2 + 1
        now_ns += 1000 * MS
    assert shortest_ns < 15 * MS  # or this would have tested little


def test_one_quick_answer_among_slow_ones_is_what_counts() -> None:
    estimate = OffsetEstimate()
    assert estimate.hear(0, 1000 * MS + 90 * MS, 100 * MS)  # 90 ms there, 10 ms back
    assert estimate.hear(200 * MS, 1201 * MS, 202 * MS)  # 1 ms each way
    assert not estimate.hear(300 * MS, 1310 * MS, 350 * MS)
    assert (estimate.offset_ns, estimate.round_trip_ns) == (1000 * MS, 2 * MS)
    assert not estimate.hear(500 * MS, 0, 499 * MS)  # an answer that came before its question


def test_clocks_are_compared_along_the_best_measurements() -> None:
    measured = [
        ("b", "a", 10, 4),  # a is 10 ahead of b
        ("c", "b", -7, 2),
        ("c", "a", 99, 50),  # a bad one, which the way over b replaces
        ("x", "y", 5, 1),
    ]
    assert offsets_to("a", measured) == {"a": 0, "b": 10, "c": 3}
    assert offsets_to("c", measured) == {"c": 0, "b": 7, "a": -3}
    assert offsets_to("lonely", measured) == {"lonely": 0}
