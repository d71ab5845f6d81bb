"""The grammar of keys and values, on plain functions."""

from __future__ import annotations

import numpy as np
import pytest

from kvmpi.errors import ConfigError, DTypeMismatchError, KeyKindError
from kvmpi.store.grammar import groups

A, B, C = (np.full(2, i, "f4") for i in range(3))


def flat(keys, values):
    return [(group.key, group.arrays) for group in groups(keys, values, "push")]


def same(found, expected):
    assert [key for key, _ in found] == [key for key, _ in expected]
    for (_, mine), (_, theirs) in zip(found, expected, strict=True):
        assert len(mine) == len(theirs)
        assert all(a is b for a, b in zip(mine, theirs, strict=True))


def test_the_four_forms():
    same(flat("k", A), [("k", [A])])
    same(flat(3, [A, B]), [(3, [A, B])])
    same(flat([1, 2], [A, B]), [(1, [A]), (2, [B])])
    same(flat(["x", "y"], [[A, B], [C]]), [("x", [A, B]), ("y", [C])])
    same(flat((1, 2), (A, [B, C])), [(1, [A]), (2, [B, C])])
    same(flat([], []), [])


def test_equal_keys_are_joined_wherever_they_stand():
    same(flat([7, 8, 7], [A, B, C]), [(7, [A, C]), (8, [B])])


def test_numpy_integers_are_int_keys():
    assert groups(np.int64(5), A, "push")[0].key == 5
    assert type(groups(np.int64(5), A, "push")[0].key) is int


@pytest.mark.parametrize(
    ("keys", "values", "error"),
    [
        (1.5, A, KeyKindError),
        (None, A, KeyKindError),
        (True, A, KeyKindError),
        (b"k", A, KeyKindError),
        (2**63, A, KeyKindError),
        (A, A, KeyKindError),
        ([1, "a"], [A, B], KeyKindError),
        ([1, 2], [A], ConfigError),
        ([1, 2], A, ConfigError),
        (1, [], ConfigError),
        (1, None, DTypeMismatchError),
        (1, 3.0, DTypeMismatchError),
        (1, [A, None], DTypeMismatchError),
        (1, [[A]], DTypeMismatchError),
        ("k" * 5000, A, ConfigError),
        ("k\ud800", A, ConfigError),
        (["k", "\udfff"], [A, B], ConfigError),
    ],
)
def test_what_is_refused(keys, values, error):
    with pytest.raises(error):
        groups(keys, values, "push")


def test_any_text_is_a_key():
    for key in ("", "w", "gewöhnlich", "重み", "\U0001f9ee", "\0"):
        assert groups(key, A, "push")[0].key == key
