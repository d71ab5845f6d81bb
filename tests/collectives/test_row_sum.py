"""Sums of rows over ranks against a dense float64 sum, whether rows or the union's vector travel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvmpi.arrays import DTYPES
from kvmpi.collectives import Collectives, broadcast_rows, sum_rows, union_of_ids
from kvmpi.collectives.memory_comm import MemoryComm
from kvmpi.deadline import Deadline
from kvmpi.kernels.rows import Rows

RunRanks = Callable[..., list[Any]]
NUM_ROWS = 60

#: What each rank has, of how many ranks: from all alike to nothing in common, and nobody has anything.
IDS: dict[str, Callable[[int, int], list[int]]] = {
    "the same": lambda rank, size: [3, 4, 5, 59],
    "nothing in common": lambda rank, size: list(range(rank, NUM_ROWS, size)),
    "some": lambda rank, size: [r for r in range(NUM_ROWS) if (r * (rank + 2)) % 5 < 2],
    "one has none": lambda rank, size: [] if rank == 0 else [7, 8 + rank],
    "none": lambda rank, size: [],
}


def rows_of(rank: int, ids: list[int], width: int, dtype: str) -> Rows:
    values = np.random.default_rng([rank, width]).standard_normal((NUM_ROWS, width))[ids].reshape(len(ids), width)
    return Rows(np.array(ids, "i8"), (values * 8).astype(DTYPES[dtype]))


@pytest.mark.parametrize("overlap", IDS)
@pytest.mark.parametrize(("size", "algorithm"), [(1, "auto"), (2, "auto"), (3, "ring"), (4, "auto"), (4, "naive")])
def test_every_rank_has_the_sum(run_ranks: RunRanks, size: int, algorithm: str, overlap: str) -> None:
    kinds = [(1, "float32"), (5, "float64"), (3, "float16"), (0, "float32"), (2, "int64")]

    def rank_main(comm: MemoryComm) -> list[Rows]:
        collectives = Collectives(comm, algorithm, 128)
        mine = IDS[overlap](comm.rank, size)
        return [
            sum_rows(collectives, rows_of(comm.rank, mine, width, dtype), dtype, Deadline(20), "test")
            for width, dtype in kinds
        ]

    found = run_ranks(size, rank_main)
    union = sorted({r for rank in range(size) for r in IDS[overlap](rank, size)})
    for i, (width, dtype) in enumerate(kinds):
        parts = [rows_of(rank, IDS[overlap](rank, size), width, dtype) for rank in range(size)]
        exact, bound = np.zeros((2, NUM_ROWS, width))
        for part in parts:
            exact[part.ids] += part.values
            bound[part.ids] += abs(part.values.astype("f8"))
        eps = 0.0 if dtype == "int64" else np.finfo(DTYPES[dtype]).eps
        for rank in range(size):
            rows = found[rank][i]
            assert rows.ids.tolist() == union
            assert rows.values.dtype == DTYPES[dtype]
            assert (abs(rows.values - exact[union]) <= size * eps * bound[union]).all(), (width, dtype, rank)
            assert rows.values.tobytes() == found[0][i].values.tobytes(), "ranks have different bits"


def test_the_fewer_bytes_travel(run_ranks: RunRanks) -> None:
    """Four ranks that share their rows send about twice the union each, not four times."""

    def rank_main(comm: MemoryComm) -> list[int]:
        sizes = []
        for overlap in ("the same", "nothing in common"):
            collectives = Collectives(comm, "auto")
            rows = rows_of(comm.rank, IDS[overlap](comm.rank, 4), 200, "float32")
            sum_rows(collectives, rows, "float32", Deadline(20), "test")
            phases = collectives._recorder.snapshot()["phases"]
            sizes.append({phase: found["bytes"] for phase, found in phases.items()})
        return sizes

    same, different = run_ranks(4, rank_main)[0]
    assert same["reduce"] == 4 * 200 * 4
    assert same["broadcast"] < 200  # counts and ids
    assert "reduce" not in different
    assert different["broadcast"] == 60 * 200 * 4 + 4 * 8 + 60 * 8


@pytest.mark.parametrize("size", [1, 2, 3])
def test_what_ranks_want_and_what_one_has(run_ranks: RunRanks, size: int) -> None:
    def rank_main(comm: MemoryComm) -> tuple[np.ndarray, list[Rows]]:
        collectives = Collectives(comm)
        wanted = union_of_ids(collectives, np.array([2 * comm.rank, 40], "i8"), Deadline(20), "test")
        sent = [rows_of(comm.rank, ids, 3, "float32") for ids in ([1, comm.rank + 5], [])]
        return wanted, [broadcast_rows(collectives, rows, size - 1, Deadline(20), "test") for rows in sent]

    for wanted, (some, none) in run_ranks(size, rank_main):
        assert wanted.tolist() == sorted({*range(0, 2 * size, 2), 40})
        expected = rows_of(size - 1, [1, size + 4], 3, "float32")
        np.testing.assert_array_equal(some.ids, expected.ids)
        np.testing.assert_array_equal(some.values, expected.values)
        assert none.values.shape == (0, 3)
