"""Shares of several tensors: sums that are scattered by them, and gathered again, on every layout of hosts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from collective_helpers import all_vectors, assert_is_sum, on_host, vectors
from hypothesis import given
from hypothesis import strategies as st

from kvmpi.arrays import DTYPES
from kvmpi.collectives import Collectives, selection, share_of
from kvmpi.collectives.memory_comm import MemoryComm
from kvmpi.collectives.shares import Shares
from kvmpi.deadline import Deadline

RunRanks = Callable[..., list[Any]]

TIMEOUT_S = 20.0
CASES = [
    *((algorithm, hosts) for algorithm in ("ring", "multi_ring", "hierarchical")
      for hosts in ("ab", "abc", "aabb", "abab", "aab", "aaabbcc")),
    ("naive", "ab"), ("naive", "aab"), ("auto", "abc"), ("auto", "aab"), ("auto", "aaabbcc"),
    *((algorithm, hosts) for algorithm in ("shared", "auto") for hosts in ("aa", "aaa", "aaaa", "aaaaaaa")),
]  # fmt: skip
#: Elements and vectors of the tensors of a call: with nothing, with less than one for each rank, with several vectors.
CALLS = [
    ("float32", [(1013, 1), (0, 1), (1, 1), (5, 1), (64, 1)]), ("float32", [(1013, 2), (5, 1), (700, 3)]),
    ("float64", [(7, 1)]), ("float16", [(333, 1), (90, 2)]), ("bfloat16", [(333, 2), (1, 1)]), ("int32", [(130, 2)]),
    ("float32", [(0, 1)]), ("float32", [(70_001, 1), (9, 1)]),
]  # fmt: skip


@given(count=st.integers(0, 60), size=st.integers(1, 9))
def test_shares_are_all_of_a_tensor_in_the_order_of_ranks(count: int, size: int) -> None:
    found = [i for rank in range(size) for i in range(count)[share_of(count, size, rank)]]
    assert found == list(range(count))
    assert max(len(range(count)[share_of(count, size, rank)]) for rank in range(size)) == -(-count // size)


@given(counts=st.lists(st.integers(0, 40), min_size=1, max_size=6), size=st.integers(1, 7))
def test_what_is_packed_lies_share_by_share_and_comes_back(counts: list[int], size: int) -> None:
    shares = Shares(counts, size)
    tensors = [1000 * number + np.arange(count) for number, count in enumerate(counts)]
    packed = np.full(shares.count, -1)
    shares.pack(tensors, packed)
    for rank, part in enumerate(packed.reshape(size, shares.length)):
        own = shares.split(part, rank)
        for tensor, found, count in zip(tensors, own, counts, strict=True):
            np.testing.assert_array_equal(found, tensor[share_of(count, size, rank)])
    back = [[np.full(count, -2), np.full(count, -2)] for count in counts]
    shares.unpack(packed, back)
    for tensor, targets in zip(tensors, back, strict=True):
        for target in targets:
            np.testing.assert_array_equal(target, tensor)
    shares.pack([None for _ in tensors], packed)
    shares.unpack(packed, back)
    assert not any(target.any() for targets in back for target in targets)


@pytest.mark.parametrize(("algorithm", "hosts"), CASES)
def test_sums_are_scattered_and_gathered(
    run_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch, algorithm: str, hosts: str
) -> None:
    """One job for many checks. What is pushed stays as it is; only the own share of what is gathered is looked at."""
    size = len(hosts)
    monkeypatch.setattr(selection, "LINKED_FROM_BYTES", 1)

    def rank_main(comm: MemoryComm) -> list[list[np.ndarray]]:
        both = [Collectives(comm, algorithm, chunk_bytes, ring_transport="tcp") for chunk_bytes in (256, 8192)]
        deadline, results = Deadline(TIMEOUT_S), []
        for number, (dtype, tensors) in enumerate(CALLS):
            scale = 1.0 if number % 2 or "int" in dtype else 0.25
            collectives = both[max(tensors)[0] > 2000]  # few chunks where there are many elements
            given = [vectors(comm.rank, num, count, dtype) for count, num in tensors]
            before = [vector.copy() for some in given for vector in some]
            own = collectives.sum_shares([on_host(some, dtype) for some in given], dtype, deadline, "scatter", scale)
            for vector, old in zip((vector for some in given for vector in some), before, strict=True):
                np.testing.assert_array_equal(vector, old, err_msg=f"a vector of rank {comm.rank} was changed")
            wholes = [np.full(count, 77, DTYPES[dtype]) for count, _ in tensors]
            for whole, part in zip(wholes, own, strict=True):
                whole[share_of(whole.size, size, comm.rank)] = part
            copies = [np.full(count, 66, DTYPES[dtype]) for count, _ in tensors]
            found = [(whole, [whole, copy]) for whole, copy in zip(wholes, copies, strict=True)]
            collectives.gather_shares(found, deadline, "gather")
            for whole, copy in zip(wholes, copies, strict=True):
                np.testing.assert_array_equal(whole, copy)
            results.append(wholes)
        collectives.gather_shares([], deadline, "nothing")
        for each in both:
            each.close()
        return results

    by_rank = run_ranks(size, rank_main, hosts=hosts)
    for number, (dtype, tensors) in enumerate(CALLS):
        scale = 1.0 if number % 2 or "int" in dtype else 0.25
        for place, (count, num) in enumerate(tensors):
            assert len({results[number][place].tobytes() for results in by_rank}) == 1
            assert_is_sum(by_rank[0][number][place], all_vectors(size, num, count, dtype), dtype, scale)
