"""Several tensors summed as one: every element of every tensor once, whatever their sizes and wherever they lie."""

from __future__ import annotations

import gc
import threading
import tracemalloc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from collective_helpers import assert_is_sum, on_host
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmpi.arrays import DTYPES
from kvmpi.collectives import Collectives, host_group, shared
from kvmpi.collectives.memory_comm import MemoryComm
from kvmpi.deadline import Deadline

RunRanks = Callable[..., list[Any]]

TIMEOUT_S = 20.0


def values(rank: int, tensor: int, vector: int, count: int, dtype: str) -> np.ndarray:
    rng = np.random.default_rng([rank, tensor, vector, count])
    if dtype == "bfloat16":
        return (rng.standard_normal(count).astype("f4").view("u4") >> 16).astype("u2")
    if dtype == "int16":
        return rng.integers(-(2**15), 2**15, count, dtype="i2")
    return rng.standard_normal(count).astype(dtype)


def check(
    run_ranks: RunRanks, algorithm: str, hosts: str, counts: list[int], numbers: list[int], dtype: str,
    *, adjacent: bool = False, in_place: bool = False, common: bool = False, mapped: bool = False,
    scale: float = 1.0, attach: bool = True, chunk_bytes: int = 256,
) -> None:  # fmt: skip
    """``numbers`` of vectors of each tensor, in turn. ``adjacent``: all first vectors lie in one block."""
    size = len(hosts)
    numbers = [numbers[i % len(numbers)] for i in range(len(counts))]

    def rank_main(comm: MemoryComm) -> list[np.ndarray]:
        collectives, found = Collectives(comm, algorithm, chunk_bytes, attach=attach), []
        for turn in range(2):
            block, start, tensors, kept = np.empty(sum(counts), DTYPES[dtype]), 0, [], []
            for i, (count, number) in enumerate(zip(counts, numbers, strict=True)):
                own = [values(comm.rank + turn, i, j, count, dtype) for j in range(number)]
                if adjacent:
                    block[start : start + count] = own[0]
                    own[0] = block[start : start + count]
                elif mapped:
                    own = [collectives.empty(count, dtype) for _ in own]
                    for j, vector in enumerate(own):
                        vector[:] = values(comm.rank + turn, i, j, count, dtype)
                start += count
                out = own[0] if in_place else np.empty(count, DTYPES[dtype])
                if common:
                    out = collectives.shared_empty(count, dtype, Deadline(TIMEOUT_S))
                copies = [np.empty(count, DTYPES[dtype]) for _ in range(i % 3)]
                tensors.append((on_host(own, dtype), out, copies))
                kept.append([out, *copies])
            collectives.allreduce_many(tensors, dtype, Deadline(TIMEOUT_S), "test", scale)
            for results in kept:
                assert len({result.tobytes() for result in results}) == 1, "a copy differs from the result"
            found += [results[0].copy() for results in kept]
        return found

    results = run_ranks(size, rank_main, hosts=hosts)
    for turn in range(2):
        for i, (count, number) in enumerate(zip(counts, numbers, strict=True)):
            terms = [values(rank + turn, i, j, count, dtype) for rank in range(size) for j in range(number)]
            found = [result[turn * len(counts) + i] for result in results]
            assert_is_sum(found[0], terms, dtype, scale)
            assert len({out.tobytes() for out in found}) == 1, f"ranks differ in tensor {i}"


@settings(max_examples=80, deadline=None)
@given(
    counts=st.lists(st.integers(0, 300), min_size=1, max_size=12), numbers=st.lists(st.integers(1, 3), min_size=1),
    where=st.sampled_from(["shared aa", "shared aaa", "hierarchical aabb", "hierarchical aab", "ring abc", "naive ab"]),
    dtype=st.sampled_from(["float32", "bfloat16", "int16"]), adjacent=st.booleans(), in_place=st.booleans(),
    way=st.sampled_from(["slots", "parts", "stage", "attach", "refused"]), mapped=st.booleans(),
)  # fmt: skip
def test_any_list_of_sizes(
    run_ranks: RunRanks, counts: list[int], numbers: list[int], where: str, dtype: str, adjacent: bool,
    in_place: bool, way: str, mapped: bool,
) -> None:  # fmt: skip
    algorithm, hosts = where.split()
    with pytest.MonkeyPatch.context() as patch:
        if way == "parts":
            patch.setattr(shared, "PARTS_FROM_BYTES", 0)
        elif way != "slots":
            patch.setattr(shared, "SLOT_BYTES", 0)
        if way != "stage":
            patch.setattr(shared, "STAGE_BYTES", 0)
        check(
            run_ranks, algorithm, hosts, counts, numbers, dtype, adjacent=adjacent, in_place=in_place, mapped=mapped,
            attach=way != "refused",
        )  # fmt: skip


def test_an_empty_tensor_is_the_first_where_ranks_may_not_attach(
    run_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "SLOT_BYTES", 0)
    check(run_ranks, "shared", "aa", [0, 3, 700], [1], "float32", attach=False)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("where", [
    "shared a", "shared aa slots", "shared aaa parts", "shared aaa stage", "shared aaa attach", "hierarchical aab",
    "hierarchical aabb", "ring abc", "multi_ring ab", "host_ring aab", "naive abc", "auto aa",
])  # fmt: skip
def test_sums_times_a_scale(run_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch, where: str, dtype: str) -> None:
    """Every element once, by whoever finishes it, and half types before they are rounded."""
    algorithm, hosts, *way = where.split()
    if way == ["parts"]:
        monkeypatch.setattr(shared, "PARTS_FROM_BYTES", 0)
    elif way and way != ["slots"]:
        monkeypatch.setattr(shared, "SLOT_BYTES", 0)
    if way == ["attach"]:
        monkeypatch.setattr(shared, "STAGE_BYTES", 0)
    for counts, scale, in_place in (
        ([700], 0.25, False), ([700, 1, 0, 55, 300], -1 / 3, True), ([70_001], -1 / 3, False),
    ):  # fmt: skip
        chunk_bytes = 256 if max(counts) < 2000 else 8192
        check(
            run_ranks, algorithm, hosts, counts, [1, 2], dtype, scale=scale, in_place=in_place, chunk_bytes=chunk_bytes
        )  # fmt: skip


@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize("slot_bytes", [0, 1 << 20])
@pytest.mark.parametrize("algorithm", ["shared", "hierarchical"])
def test_results_in_common_memory(
    run_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch, algorithm: str, slot_bytes: int, scale: float
) -> None:
    monkeypatch.setattr(shared, "SLOT_BYTES", slot_bytes)
    hosts = "aaaa" if algorithm == "shared" else "aabb"
    check(run_ranks, algorithm, hosts, [700, 1, 0, 55, 300], [1, 2], "float32", common=True, scale=scale)
    check(run_ranks, algorithm, hosts, [700], [1], "float32", common=True, scale=scale)


@pytest.mark.parametrize("where", [
    "shared aa slots", "shared aaa stage", "shared aaa attach", "hierarchical aab", "ring abc", "naive ab", "shared a",
])  # fmt: skip
def test_a_vector_that_stands_twice_counts_twice(
    run_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """As where one array is given for several devices, also if the sum goes there."""
    algorithm, hosts, *way = where.split()
    if way and way != ["slots"]:
        monkeypatch.setattr(shared, "SLOT_BYTES", 0)
    if way == ["attach"]:
        monkeypatch.setattr(shared, "STAGE_BYTES", 0)
    size, count = len(hosts), 70_001

    def rank_main(comm: MemoryComm) -> np.ndarray:
        collectives = Collectives(comm, algorithm)
        twice, once = (values(comm.rank, 0, j, count, "float64") for j in range(2))
        sources = on_host([twice, once, twice], "float64")
        collectives.allreduce_many([(sources, np.empty(count), [twice])], "float64", Deadline(TIMEOUT_S), "test")
        return twice

    terms = [values(rank, 0, j, count, "float64") for rank in range(size) for j in (0, 1, 0)]
    for found in run_ranks(size, rank_main, hosts=hosts):
        np.testing.assert_allclose(found, np.sum(terms, axis=0), rtol=1e-12, atol=1e-12)


def test_sums_of_many_lengths_take_no_more_memory_than_one(run_ranks: RunRanks) -> None:
    def rank_main(comm: MemoryComm) -> list[int]:
        collectives, taken = Collectives(comm, "shared"), list[int]()
        for turn in range(40):
            own = np.ones(600_000 + turn, "f4")
            collectives.allreduce(on_host([own], "float32"), own, "float32", Deadline(TIMEOUT_S), "test")
            assert (own == comm.size).all()
            taken.append(tracemalloc.get_traced_memory()[0])
        return taken

    tracemalloc.start()
    try:
        taken = run_ranks(3, rank_main)[0]
    finally:
        tracemalloc.stop()
    assert taken[-1] - taken[2] < 16 << 20, [nbytes >> 20 for nbytes in taken]


@pytest.mark.parametrize("calls", [1 << 31, 1 << 32])
@pytest.mark.parametrize("transport", ["mpi", "tcp"])
def test_a_group_may_make_more_calls_than_a_word_tells_apart(run_ranks: RunRanks, calls: int, transport: str) -> None:
    together = threading.Barrier(4)

    def rank_main(comm: MemoryComm) -> None:
        collectives = Collectives(comm, "hierarchical", ring_transport=transport)
        for turn in range(6):
            own = np.full(100_000, comm.rank + turn, "f4")
            collectives.allreduce(on_host([own], "float32"), own, "float32", Deadline(TIMEOUT_S), "test")
            assert (own == 6 + 4 * turn).all()
            if turn == 0:
                together.wait(TIMEOUT_S)
                group = collectives._selection.topology.group  # type: ignore[union-attr]
                group.call = calls - 3
                group._mine[host_group._POSTED] = group._mine[host_group._FINISHED] = group.call
                together.wait(TIMEOUT_S)
        assert group.call > calls

    run_ranks(4, rank_main, hosts="aabb")


def test_more_than_can_be_posted_are_packed(run_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "SLOT_BYTES", 0)
    packed: list[int] = []
    pack = shared.pack

    def counting(tensors: Any, act: Any) -> Any:
        packed.append(len(tensors))
        return pack(tensors, act)

    monkeypatch.setattr(shared, "pack", counting)
    many = host_group.MAX_PLACES // 3 + 1
    check(run_ranks, "shared", "aa", [1 + i % 3 for i in range(many)], [1], "float32")
    assert packed == [many] * 4


def test_memory_of_a_group_that_is_gone_is_given_back(run_ranks: RunRanks) -> None:
    def rank_main(comm: MemoryComm) -> None:
        collectives = Collectives(comm, "shared")
        own = np.arange(200_000, dtype="f4")
        collectives.allreduce(on_host([own], "float32"), own, "float32", Deadline(TIMEOUT_S), "test")

    for _ in range(3):
        run_ranks(3, rank_main)
        gc.collect()
    host_group.free_retired()
    before = len(host_group._retired)
    run_ranks(3, rank_main)
    gc.collect()
    host_group.free_retired()
    assert len(host_group._retired) <= before


def test_a_group_may_be_collected_while_others_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many that a collection begins meanwhile."""
    waits = np.zeros(host_group.PAGE_WORDS, np.int64)
    waits[host_group._POSTED] = 1
    monkeypatch.setattr(host_group, "_retired", {})
    for _ in range(5000):
        host_group._retire([waits], 0, [])

    class Group:
        def __init__(self) -> None:
            self.itself = self
            weakref.finalize(self, host_group._retire, [waits], 0, [])

    threshold = gc.get_threshold()
    gc.collect()
    gc.disable()
    Group()
    gc.set_threshold(50)
    gc.enable()
    try:
        host_group.free_retired()
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    assert len(host_group._retired) == 5001
