"""Sums over ranks as threads: every algorithm, dtype and shape of call, against sums in float64."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from collective_helpers import FLOATS, all_vectors, allreduce, assert_is_sum, on_host, to_bfloat16, to_float64, vectors
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmpi import collectives
from kvmpi.arrays import DTYPES
from kvmpi.collectives import Collectives, SoloComm
from kvmpi.collectives.memory_comm import MemoryComm
from kvmpi.collectives.schedule import segment_bounds
from kvmpi.collectives.waiting import wait_all
from kvmpi.config import Config
from kvmpi.deadline import Deadline
from kvmpi.errors import ConfigError, PeerLostError, UnsupportedError
from kvmpi.kernels import host

RunRanks = Callable[..., list[Any]]

ALGORITHMS = ("ring", "multi_ring", "host_ring", "shared", "naive", "auto")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("count", [0, 1, 2, 5, 1000, 4097])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_sums_over_all_ranks(run_ranks: RunRanks, size: int, count: int, algorithm: str) -> None:
    def rank_main(comm: MemoryComm) -> np.ndarray:
        return allreduce(comm, algorithm, vectors(comm.rank, 1, count, "float32"), "float32")

    outs = run_ranks(size, rank_main)
    for rank, out in enumerate(outs):
        assert_is_sum(out, all_vectors(size, 1, count, "float32"), "float32")
        assert out.tobytes() == outs[0].tobytes(), f"rank {rank} disagrees with rank 0"


@pytest.mark.parametrize("algorithm", ["ring", "shared", "naive"])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("num_vectors", [1, 2, 4])
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_every_dtype_in_many_chunks(
    run_ranks: RunRanks, dtype: str, num_vectors: int, in_place: bool, algorithm: str
) -> None:
    size, count = 3, 1213  # 405 elements of a segment: 13 chunks of float32, 26 of float64

    def rank_main(comm: MemoryComm) -> np.ndarray:
        own = vectors(comm.rank, num_vectors, count, dtype)
        return allreduce(comm, algorithm, own, dtype, in_place=in_place, chunk_bytes=128)

    outs = run_ranks(size, rank_main)
    for rank, out in enumerate(outs):
        assert_is_sum(out, all_vectors(size, num_vectors, count, dtype), dtype)
        assert out.tobytes() == outs[0].tobytes(), f"rank {rank} disagrees with rank 0"
    again = run_ranks(size, rank_main)
    assert again[0].tobytes() == outs[0].tobytes(), "another run gave other bits"


@settings(max_examples=40, deadline=None)
@given(
    size=st.integers(2, 6), count=st.integers(0, 700), num_vectors=st.integers(1, 3),
    chunk_bytes=st.integers(1, 600), in_place=st.booleans(), dtype=st.sampled_from(["float32", "bfloat16", "int8"]),
)  # fmt: skip
def test_ring_of_any_shape(
    run_ranks: RunRanks, size: int, count: int, num_vectors: int, chunk_bytes: int, in_place: bool, dtype: str
) -> None:
    def rank_main(comm: MemoryComm) -> np.ndarray:
        own = vectors(comm.rank, num_vectors, count, dtype)
        return allreduce(comm, "ring", own, dtype, in_place=in_place, chunk_bytes=chunk_bytes)

    outs = run_ranks(size, rank_main)
    assert_is_sum(outs[0], all_vectors(size, num_vectors, count, dtype), dtype)
    assert len({out.tobytes() for out in outs}) == 1


def test_a_million_elements(run_ranks: RunRanks) -> None:
    def rank_main(comm: MemoryComm) -> np.ndarray:
        return allreduce(comm, "ring", vectors(comm.rank, 2, 1_000_003, "float32"), "float32", chunk_bytes=64 << 10)

    outs = run_ranks(4, rank_main)
    assert_is_sum(outs[3], all_vectors(4, 2, 1_000_003, "float32"), "float32")
    assert len({out.tobytes() for out in outs}) == 1


@pytest.mark.parametrize("algorithm", ["ring", "shared", "naive"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_types_are_summed_in_float32_and_rounded_once(run_ranks: RunRanks, dtype: str, algorithm: str) -> None:
    size, num_vectors, count = 4, 3, 500

    def rank_main(comm: MemoryComm) -> np.ndarray:
        return allreduce(comm, algorithm, vectors(comm.rank, num_vectors, count, dtype), dtype, chunk_bytes=64)

    out = run_ranks(size, rank_main)[0]
    terms = all_vectors(size, num_vectors, count, dtype)
    wide = [to_float64(term, dtype).astype("f4") for term in terms]
    expected = np.empty(count, DTYPES[dtype])
    for owner, (start, stop) in enumerate(segment_bounds(count, size)):
        if algorithm != "naive":  # one by one, in ring order from the owner of the segment
            order = [(owner + i) % size for i in range(size)]
            total = np.zeros(stop - start, "f4")
            for rank in order:
                own = [wide[rank * num_vectors + i][start:stop] for i in range(num_vectors)]
                total = own[0] + own[1] + own[2] if rank == owner else total + own[0] + own[1] + own[2]
        else:  # a rank's own in float32, then all in float64
            sums = [sum(wide[r * num_vectors : (r + 1) * num_vectors]) for r in range(size)]
            total = np.sum(sums, axis=0, dtype="f8").astype("f4")[start:stop]
        host.narrow(total.astype("f4"), expected[start:stop], dtype)  # narrowing has tests of its own
    assert out.tobytes() == expected.tobytes()


@pytest.mark.parametrize("algorithm", ["ring", "shared", "naive"])
def test_half_types_do_not_overflow_on_the_way(run_ranks: RunRanks, algorithm: str) -> None:
    """1024 and 1 in float16 is 1024 + 1; adding 0.5 four times to 1024 in float16 would stay at 1024."""

    def rank_main(comm: MemoryComm) -> np.ndarray:
        value = [60000.0, 1024.0] if comm.rank == 0 else [60000.0 if comm.rank < 3 else -60000.0, 0.5]
        return allreduce(comm, algorithm, [np.array(value, "f2")], "float16")

    # 60000 + 60000 + 60000 - 60000 - 60000 passes 65504, the largest float16.
    for out in run_ranks(5, rank_main):
        np.testing.assert_array_equal(out, np.array([60000.0, 1026.0], "f2"))


@pytest.mark.parametrize("algorithm", ["ring", "multi_ring", "shared", "naive"])
def test_special_values_reach_every_rank_without_a_warning(run_ranks: RunRanks, algorithm: str) -> None:
    values = np.array([np.inf, -np.inf, np.nan, 0.0, 1e38, 1e-45], "f4")

    def rank_main(comm: MemoryComm) -> np.ndarray:
        return allreduce(comm, algorithm, [values.copy()], "float32")

    with np.errstate(over="ignore"):
        expected = values + values + values + values
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = run_ranks(4, rank_main)
    for out in found:
        np.testing.assert_array_equal(out, expected)


def test_read_only_vectors_are_summed(run_ranks: RunRanks) -> None:
    def rank_main(comm: MemoryComm) -> np.ndarray:
        own = vectors(comm.rank, 2, 100, "float32")
        for vector in own:
            vector.flags.writeable = False
        return allreduce(comm, "ring", own, "float32")

    assert_is_sum(run_ranks(2, rank_main)[1], all_vectors(2, 2, 100, "float32"), "float32")


def test_one_vector_may_stand_twice(run_ranks: RunRanks) -> None:
    def rank_main(comm: MemoryComm) -> np.ndarray:
        own = vectors(comm.rank, 1, 99, "int32")
        return allreduce(comm, "ring", [own[0], own[0]], "int32", chunk_bytes=16)

    own = all_vectors(3, 1, 99, "int32")
    assert_is_sum(run_ranks(3, rank_main)[0], [*own, *own], "int32")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64"])
@pytest.mark.parametrize("num_vectors", [1, 3])
def test_a_worker_alone_sums_its_vectors(dtype: str, num_vectors: int) -> None:
    own = vectors(0, num_vectors, 1000, dtype)
    assert_is_sum(allreduce(SoloComm(), "ring", own, dtype), own, dtype)


def test_calls_in_a_row_do_not_mix(run_ranks: RunRanks) -> None:
    """Ranks run ahead of each other: messages of one call must never be taken for those of the next."""
    counts = [3, 5000, 1, 64, 0, 777]

    def rank_main(comm: MemoryComm) -> list[np.ndarray]:
        collectives = Collectives(comm, "ring", 64)
        outs = []
        for count in counts:
            out = np.empty(count, "f4")
            collectives.allreduce(
                on_host(vectors(comm.rank, 1, count, "float32"), "float32"), out, "float32", Deadline(20), "test"
            )
            outs.append(out)
        return outs

    for outs in run_ranks(4, rank_main):
        for count, out in zip(counts, outs, strict=True):
            assert_is_sum(out, all_vectors(4, 1, count, "float32"), "float32")


def test_duplicates_carry_messages_of_their_own(run_ranks: RunRanks) -> None:
    def rank_main(comm: MemoryComm) -> list[int]:
        first, second = comm.duplicate(), comm.duplicate()
        order = (first, second) if comm.rank == 0 else (second, first)
        outs = {}
        for duplicate in order:
            peer = 1 - comm.rank
            duplicate.isend(np.array([100 * (duplicate is second) + comm.rank], "u1"), peer, 9)
        for duplicate in reversed(order):
            outs[duplicate] = np.zeros(1, "u1")
            wait_all([duplicate.irecv(outs[duplicate], peer, 9)], Deadline(20), lambda: "no message")
        return [int(outs[first][0]), int(outs[second][0])]

    assert run_ranks(2, rank_main) == [[1, 101], [0, 100]]


def test_contexts_of_many_duplicates_differ() -> None:
    from kvmpi.collectives.memory_comm import MemoryWorld

    comm = MemoryWorld(2).comms()[0]
    children = [comm.duplicate() for _ in range(40)]
    grandchildren = [children[0].duplicate() for _ in range(40)]
    assert len({c._context for c in (comm, *children, *grandchildren)}) == 81


def test_mpi_needs_mpi(run_ranks: RunRanks) -> None:
    def rank_main(comm: MemoryComm) -> np.ndarray:
        return allreduce(comm, "mpi", vectors(comm.rank, 1, 5, "float32"), "float32")

    for error in run_ranks(2, rank_main, errors=True):
        assert isinstance(error, UnsupportedError)


def test_the_settings_know_every_algorithm() -> None:
    (setting,) = [f for f in fields(Config) if f.name == "allreduce"]
    assert setting.metadata["choices"] == collectives.ALGORITHMS


def test_unknown_algorithm_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'tree'.*ring"):
        Collectives(SoloComm(), "tree")


def test_a_failure_between_messages_makes_the_communicator_unusable(run_ranks: RunRanks) -> None:
    """What one rank has sent, another call would take for its own: no sum may come out after that."""

    def rank_main(comm: MemoryComm) -> Any:
        collectives = Collectives(comm, "ring", 64)
        own = vectors(comm.rank, 2, 200, "float32")
        if comm.rank == 1:
            own[1] = own[1][:150]  # the kernels refuse it half way through
        out = np.empty(200, "f4")
        with pytest.raises(Exception):  # noqa: B017 - which one differs between the ranks
            collectives.allreduce(on_host(own, "float32"), out, "float32", Deadline(0.3), "test")
        assert collectives.broken
        with pytest.raises(PeerLostError, match="earlier failure"):
            collectives.allreduce(on_host(own[:1], "float32"), out, "float32", Deadline(5.0), "test")

    run_ranks(2, rank_main)


def test_helpers_agree_with_torch() -> None:
    torch = pytest.importorskip("torch")
    bits = np.arange(0, 0x7F80, dtype="u2")
    values = torch.from_numpy(bits.view("i2")).view(torch.bfloat16).to(torch.float64).numpy()
    np.testing.assert_array_equal(to_float64(bits, "bfloat16"), values)
    np.testing.assert_array_equal(to_bfloat16(values), bits)
    assert {"float16", "bfloat16"} < set(FLOATS)
