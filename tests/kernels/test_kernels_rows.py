"""Row-sparse vectors: sums of rows against dense float64 sums, whatever the ids."""

from __future__ import annotations

import numpy as np
import pytest

from kvmpi.arrays import DTYPES
from kvmpi.kernels import rows as by_rows
from kvmpi.kernels.rows import Rows

NUM_ROWS = 50


def dense(ids: np.ndarray, values: np.ndarray) -> np.ndarray:
    found = np.zeros((NUM_ROWS, values.shape[1]))
    for i, row in zip(ids.tolist(), values.astype("f8"), strict=True):
        found[i] += row
    return found


def floats(values: np.ndarray, dtype: str) -> np.ndarray:
    return (values.astype("u4") << 16).view("f4") if dtype == "bfloat16" else values


def drawn(seed: int, n: int, width: int, dtype: str = "float32") -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng([seed, n, width])
    ids, values = rng.integers(0, NUM_ROWS, n), rng.integers(0, 9, (n, width)).astype("f4")  # exact sums everywhere
    return ids, (values.view("u4") >> 16).astype("u2") if dtype == "bfloat16" else values.astype(DTYPES[dtype])


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16", "int64", "uint8"])
@pytest.mark.parametrize(("n", "width"), [(0, 3), (1, 1), (7, 3), (200, 1), (90, 4), (3, 0), (900, 2)])
def test_equal_ids_are_summed_and_sorted(n: int, width: int, dtype: str) -> None:
    ids, values = drawn(1, n, width, dtype)
    found = by_rows.summed(ids, values, dtype)
    np.testing.assert_array_equal(found.ids, sorted(set(ids.tolist())))
    assert found.values.dtype == DTYPES[dtype]
    np.testing.assert_array_equal(
        dense(found.ids, floats(found.values, dtype)), dense(ids, floats(values, dtype)), strict=True
    )
    assert not np.shares_memory(found.values, values)


def test_half_types_are_rounded_once() -> None:
    """In float16 2048 + 1 is 2048, three times; in float32 the sum is 2051, which rounds to 2052."""
    values = np.array([[2048], [1], [1], [1]], "f2")
    assert by_rows.summed(np.zeros(4, "i8"), values, "float16").values.item() == 2052.0


@pytest.mark.parametrize(("first", "second"), [
    ([1, 3, 9], [1, 3]), ([1], [0, 2]), ([], [4]), ([4], []), ([], []), ([0, 5, 49], [5, 6, 49]),
])  # fmt: skip
def test_sums_of_two(first: list[int], second: list[int]) -> None:
    rng = np.random.default_rng([len(first), len(second)])
    one, two = (Rows(np.array(ids, "u4"), rng.standard_normal((len(ids), 3))) for ids in (first, second))
    expected = dense(one.ids, one.values) + dense(two.ids, two.values)
    matrix = dense(one.ids, one.values).reshape(-1)
    by_rows.add_into(matrix, two)
    total = by_rows.added(Rows(one.ids, one.values.copy()), two)
    assert total.ids.tolist() == sorted({*first, *second})
    np.testing.assert_array_equal(dense(total.ids, total.values), expected)
    np.testing.assert_array_equal(matrix.reshape(expected.shape), expected)


def test_rows_are_taken_in_any_order_and_put_back() -> None:
    matrix = np.arange(12.0)
    np.testing.assert_array_equal(by_rows.take(matrix, 3, np.array([3, 0, 3])), [[9, 10, 11], [0, 1, 2], [9, 10, 11]])
    by_rows.put(matrix, np.array([1]), np.full((1, 3), -1.0))
    assert matrix.tolist() == [0, 1, 2, -1, -1, -1, 6, 7, 8, 9, 10, 11]
    for width in (0, 4):
        nothing = np.empty(0)
        assert by_rows.take(nothing, width, np.arange(0 if width else 5)).shape == (0 if width else 5, width)
        none = by_rows.no_rows(width, "float64")
        by_rows.put(nothing, none.ids, none.values)


@pytest.mark.parametrize(("count", "width"), [(0, 0), (0, 4), (3, 0)])
def test_rows_without_elements_go_into_a_value_without_elements(count: int, width: int) -> None:
    """A round in which one client pushes the whole value, and another one rows of it."""
    value, rows = np.zeros(count * width, "f4"), Rows(np.arange(count), np.zeros((count, width), "f4"))
    by_rows.add_into(value, rows)
    by_rows.put(value, rows.ids, rows.values)
    assert by_rows.take(value, width, np.arange(count)).shape == (count, width)


@pytest.mark.parametrize("dtype", ["i8", "u4"])
@pytest.mark.parametrize("sizes", [(0,), (1,), (300,), (0, 0), (7, 0, 200)])
def test_ids_of_several(sizes: tuple[int, ...], dtype: str) -> None:
    several = [np.random.default_rng([*sizes, i]).integers(0, NUM_ROWS, n).astype(dtype) for i, n in enumerate(sizes)]
    before = [ids.tolist() for ids in several]
    found = by_rows.distinct(*several)
    np.testing.assert_array_equal(found, np.array(sorted(set().union(*before)), dtype), strict=True)
    assert [ids.tolist() for ids in several] == before
