"""A word that goes from one core to another and back, and what there is to say where it does not."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from building import built

from kvmpi.arrays import address_of
from kvmpi.collectives import _native, words

CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


@built
@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
def test_a_word_goes_from_one_core_to_another_and_back() -> None:
    taken_s = words.round_trip_s((CORES[0], CORES[1]))
    assert taken_s is not None
    assert 1e-9 < taken_s < 1e-3
    assert sorted(os.sched_getaffinity(0)) == CORES, "the thread that asks stays where it was"


@built
@pytest.mark.skipif(not CORES, reason="needs sched_getaffinity")
def test_a_core_that_is_not_there_tells_nothing() -> None:
    assert words.round_trip_s((CORES[0], 1 << 14)) is None


@built
def test_each_says_how_often_it_has_been_answered() -> None:
    memory = np.zeros(128, np.uint64)
    own, other = address_of(memory), address_of(memory[64:])
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(_native.exchange_words, other, own, 30, 7, False)
        assert _native.exchange_words(own, other, 30, 7, True) > 0
        assert answer.result() > 0
    assert memory[[0, 64]].tolist() == [210, 210]


@built
def test_nobody_waits_for_ever_for_an_answer() -> None:
    memory = np.zeros(128, np.uint64)
    own, other = address_of(memory), address_of(memory[64:])
    assert _native.exchange_words(own, other, 200, 40, True) == -1.0
    assert memory[[0, 64]].tolist() == [1, 0]
    memory[:] = 0
    assert _native.exchange_words(own, other, 200, 40, False) == -1.0
    assert not memory.any()
