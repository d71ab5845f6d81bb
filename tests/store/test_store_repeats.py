"""What is remembered of calls is bounded, whatever calls there are."""

from __future__ import annotations

import sys

import numpy as np

from kvmpi.collectives import Call
from kvmpi.store import repeats
from kvmpi.store.repeats import Repeat, Repeats

NUM_KEYS = 500


def test_calls_with_other_arrays_each_time_are_looked_at_seldom_and_leave_little() -> None:
    known, keys = Repeats(), list(range(NUM_KEYS))
    kept, looked_at = [], 0
    for _ in range(300):
        kept.append([np.empty(1, "f4") for _ in keys])
        signature = known.signature("pushpull", 1.0, keys, kept[-1], None)
        if signature is not None:
            looked_at += 1
            assert known.find(signature) is None
            assert not known.made(signature)
    assert repeats._PATIENCE <= looked_at <= repeats._PATIENCE + 300 // repeats._RARELY + 1
    assert not known._known
    assert sys.getsizeof(known._made) < 1 << 20


def test_known_calls_are_so_many_keys_at_most_and_the_newest_stays() -> None:
    known, keys = Repeats(), tuple(range(NUM_KEYS))
    calls = (Call("pushpull"), Call("pushpull"))
    for number in range(100):
        signature = ("pushpull", 1.0, keys, (number,), None)
        repeat = Repeat([], [], calls)
        known.keep(signature, repeat)
        assert known.find(signature) is repeat
        assert len(known._known) * NUM_KEYS <= repeats._MOST_KEYS


def test_a_call_that_is_made_again_is_looked_at_every_time() -> None:
    known, array = Repeats(), np.empty(3)
    first = known.signature("pushpull", 1.0, "k", array, None)
    assert first is not None
    assert not known.made(first)
    assert known.made(first)
    known.keep(first, Repeat([], [], (Call("pushpull"), Call("pushpull"))))
    for _ in range(3 * repeats._PATIENCE):
        again = known.signature("pushpull", 1.0, "k", array, None)
        assert again == first
        assert known.find(again) is not None


def test_a_sum_in_place_is_known_wherever_its_arrays_lie() -> None:
    known, keys, repeat = Repeats(), ["k", "l"], Repeat([], [], (Call("allreduce"), Call("allreduce")))
    kept = [[np.empty((2, 3), "f4"), np.empty(5)] for _ in range(4)]
    first, second, third = (known.signature("allreduce", 0.5, keys, arrays, None) for arrays in kept[:3])
    assert first is not None
    assert second is not None
    assert third is not None
    assert not known.made(first)
    assert known.like(second) is None
    assert known.made(second), "one like it"
    known.keep(second, repeat)
    assert known.find(third) is None
    assert known.like(third) is repeat
    one, other = kept[3]
    others = [
        ("allreduce", 1.0, keys, kept[3], None), ("allreduce", 0.5, keys[::-1], kept[3][::-1], None),
        ("allreduce", 0.5, keys, [one.T, other], None), ("allreduce", 0.5, keys, [one, other.astype("f4")], None),
        ("allreduce", 0.5, keys, kept[3], kept[2]), ("pushpull", 0.5, keys, kept[3], None),
        ("allreduce", 0.5, keys, [one.reshape(3, 2), other], None),
    ]  # fmt: skip
    for call in others:
        signature = known.signature(*call)
        assert signature is None or known.like(signature) is None, call[:3]
