"""Copies for other cores: the same bytes whichever way they go, and the way that is quicker on simulated processors."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from jobs import HANGS_S

from kvmpi.collectives import _native, handover

INTO_CACHES, PAST_CACHES = 0, 1


class Habit(ctypes.Structure):
    """``struct habit`` of handover.h."""

    _fields_ = (
        ("costs", ctypes.c_int64 * 2),
        ("way", ctypes.c_int32),
        ("left", ctypes.c_int32),
        ("every", ctypes.c_int32),
    )


@pytest.fixture(scope="module")
def compiled() -> ctypes.CDLL:
    library = ctypes.CDLL(_native.__file__)
    library.learn.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_int64)
    return library


def copied(library: ctypes.CDLL, habit: Habit, costs: Callable[[int], tuple[int, int]], count: int) -> Iterator[int]:
    """The ways of ``count`` copies, of which the i-th costs what ``costs(i)`` says of its way."""
    for i in range(count):
        way = library.way_of_next(ctypes.byref(habit))
        library.learn(ctypes.byref(habit), way, costs(i)[way])
        yield way


def in_new_thread(function: Callable[[], None]) -> None:
    failed = list[BaseException]()

    def run() -> None:
        try:
            function()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(HANGS_S)
    assert not thread.is_alive()
    if failed:
        raise failed[0]


@pytest.mark.parametrize("copy", [handover.hand_over, handover._copy], ids=["compiled", "numpy"])
def test_both_ways_copy_those_bytes_and_no_others(copy: Callable[[np.ndarray, np.ndarray], None]) -> None:
    """Of any length, from any address to any other. Of each size a thread's first two copies go both ways."""
    source = np.random.default_rng(1).integers(0, 256, 300_000, "u1")

    def copy_all() -> None:
        for length in (0, 1, 15, 16, 17, 63, 64, 65, 1023, 1024, 1025, 4097, 65_536, 262_145):
            for first in (0, 1, 7, 15, 16):
                for start in (0, 1, 8, 33):
                    for _ in range(2):
                        out = np.full(length + 64, 7, "u1")
                        expected = out.copy()
                        expected[first : first + length] = source[start : start + length]
                        copy(out[first : first + length], source[start : start + length])
                        np.testing.assert_array_equal(out, expected)

    in_new_thread(copy_all)


@pytest.mark.parametrize("dtype", ["f4", "f8", "f2", "u2", "i1", "i8"])
def test_elements_of_every_size(dtype: str) -> None:
    source = np.arange(5001).astype(dtype)
    source.flags.writeable = False
    out = np.zeros(5001, dtype)
    handover.hand_over(out, source)
    np.testing.assert_array_equal(out, source)


def test_what_does_not_fit_is_refused_and_nothing_is_copied(compiled: ctypes.CDLL) -> None:
    out, read_only = np.zeros(10), np.zeros(10)
    read_only.flags.writeable = False
    for to, source, error in (
        (out, np.ones(11), ValueError),
        (out[:9], np.ones(10), ValueError),
        (out[::2], np.ones(5), ValueError),
        (out[:5], np.ones(10)[::2], ValueError),
        (read_only, np.ones(10), ValueError),
        (out, 1.0, TypeError),
    ):
        with pytest.raises(error):
            handover.hand_over(to, source)  # type: ignore[arg-type]
    assert not out.any()
    assert not read_only.any()


@pytest.mark.parametrize("quicker", [INTO_CACHES, PAST_CACHES])
@pytest.mark.parametrize("factor", [1.3, 2, 12])
def test_the_quicker_way_is_taken(compiled: ctypes.CDLL, quicker: int, factor: float) -> None:
    """And the other one so rarely that it costs next to nothing."""
    costs = [int(1000 * factor)] * 2
    costs[quicker] = 1000
    ways = list(copied(compiled, Habit(), lambda i: (costs[0], costs[1]), 100_000))
    assert set(ways[:2]) == {INTO_CACHES, PAST_CACHES}
    assert sum(way != quicker for way in ways[:200]) <= 10
    assert 90 <= sum(way != quicker for way in ways) <= 120  # once in a thousand, and at first more often
    assert sum(costs[way] for way in ways) <= 1.015 * 1000 * len(ways)


@pytest.mark.parametrize("quicker", [INTO_CACHES, PAST_CACHES])
def test_when_ranks_move_to_other_cores_the_other_way_is_found(compiled: ctypes.CDLL, quicker: int) -> None:
    """At once where the way taken has become slow; where the other has become quick, when it is tried again."""
    habit, before, after = Habit(), [1000, 1000], [1000, 1000]
    before[1 - quicker] = 12_000
    after[quicker] = 12_000
    assert list(copied(compiled, habit, lambda i: (before[0], before[1]), 10_000))[-1] == quicker
    ways = list(copied(compiled, habit, lambda i: (after[0], after[1]), 5000))
    assert sum(way == quicker for way in ways[-1000:]) <= 5
    assert ways.index(1 - quicker) <= 1024
    grown_slow = [1000, 1000]
    grown_slow[1 - quicker] = 40_000
    grown_slow[quicker] = 12_000
    ways = list(copied(compiled, habit, lambda i: (grown_slow[0], grown_slow[1]), 2000))
    assert ways[:100].count(quicker) >= 60
    assert ways[-100:].count(quicker) >= 98


@pytest.mark.parametrize("quicker", [INTO_CACHES, PAST_CACHES])
def test_interruptions_do_not_mislead(compiled: ctypes.CDLL, quicker: int) -> None:
    """The first copies touch new memory, and one copy in thirty is interrupted for a thousand times as long."""
    random = np.random.default_rng(3)
    noise = random.uniform(0.9, 1.1, (20_000, 2))
    noise[random.random((20_000, 2)) < 1 / 30] = 1000
    noise[:2] = 500
    costs = [2000, 2000]
    costs[quicker] = 1000
    taken = lambda i: (int(costs[0] * noise[i, 0]), int(costs[1] * noise[i, 1]))  # noqa: E731
    ways = list(copied(compiled, Habit(), taken, 20_000))
    assert sum(way == quicker for way in ways[1000:]) >= 0.97 * 19_000
