"""A landing place that moves while chunks arrive, from another thread."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from kvmpi.ps.landing import Landing


@pytest.mark.parametrize("moves_after", [0, 1, 7, 20])
def test_everything_is_at_the_last_place_whenever_it_moved(moves_after: int) -> None:
    value = np.arange(2001, dtype="f4")
    cuts = [slice(i, min(i + 100, 2001)) for i in range(0, 2001, 100)]
    first, last = np.full(2001, -1, "f4"), np.full(2001, -2, "f4")
    landing = Landing(first)
    for i, where in enumerate(np.random.default_rng(moves_after).permutation(len(cuts))):
        if i == moves_after:
            landing.move(last)
        landing.put(cuts[where], value[cuts[where]])
    np.testing.assert_array_equal(landing.buffer, value)
    assert landing.buffer is last
    assert np.count_nonzero(first != -1) <= 100 * moves_after, "what came later must not go to the place before"


def test_a_move_in_another_thread_loses_nothing() -> None:
    value = np.arange(1 << 16, dtype="f4")
    for _ in range(20):
        landing = Landing(np.full(value.size, -1, "f4"))
        last = np.full(value.size, -2, "f4")
        mover = threading.Thread(target=landing.move, args=(last,))
        for i in range(0, value.size, 1 << 12):
            if i == 1 << 14:
                mover.start()
            landing.put(slice(i, i + (1 << 12)), value[i : i + (1 << 12)])
        mover.join()
        np.testing.assert_array_equal(last, value)
