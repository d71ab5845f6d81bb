"""Sums of float32 that travel between hosts as half types: right up to rounding, the same bits everywhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from collective_helpers import on_host
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmpi.collectives import Collectives, selection
from kvmpi.collectives.memory_comm import MemoryComm
from kvmpi.deadline import Deadline
from kvmpi.errors import KVError

RunRanks = Callable[..., list[Any]]

TIMEOUT_S = 20.0
#: Largest relative error of rounding to nearest.
ULP = {"fp16": 2.0**-11, "bf16": 2.0**-8}


def own(rank: int, number: int, count: int, *, exact: bool) -> np.ndarray:
    """One vector of a rank; exact: of whole numbers whose sums over 28 vectors fit into 8 bits."""
    rng = np.random.default_rng((rank, number))
    return (rng.integers(-9, 10, count) if exact else rng.standard_normal(count)).astype("f4")


@settings(max_examples=40, deadline=None)
@given(
    hosts=st.sampled_from(["ab", "abc", "abcd", "abcdefg", "aab", "aabb", "abab", "aabbbcc"]),
    compression=st.sampled_from(sorted(ULP)), count=st.one_of(st.integers(1, 40), st.integers(1000, 20_000)),
    num_vectors=st.integers(1, 4), in_place=st.booleans(), num_rings=st.integers(1, 4), num_chunks=st.integers(1, 5),
    scale=st.sampled_from([1.0, 0.37]), cuts=st.lists(st.integers(0, 20_000), max_size=5), exact=st.booleans(),
    algorithm=st.sampled_from(["ring", "multi_ring", "hierarchical", "auto"]),
    transport=st.sampled_from(["tcp", "mpi"]),
)  # fmt: skip
def test_sums_are_right_and_the_same_bits_everywhere(
    run_ranks: RunRanks, hosts: str, compression: str, count: int, num_vectors: int, in_place: bool, num_rings: int,
    num_chunks: int, scale: float, cuts: list[int], exact: bool, algorithm: str, transport: str,
) -> None:  # fmt: skip
    """Ranks of compiled code, of Python, and some of each; several tensors, copies of results, vectors of their own."""
    size, scale = len(hosts), 1.0 if exact else scale

    def rank_main(compiled: Sequence[int], comm: MemoryComm) -> np.ndarray:
        options: Any = {"num_rings": num_rings, "ring_transport": transport, "use_native": comm.rank in compiled}
        chunk_bytes = max(8, 2 * count // (size * num_rings * num_chunks))
        collectives = Collectives(comm, algorithm, chunk_bytes, compression=compression, **options)
        out = np.full(count, np.nan, "f4")
        tensors = []
        for first, last in pairwise([0, *sorted(min(cut, count) for cut in cuts), count]):
            parts = [own(comm.rank, i, count, exact=exact)[first:last].copy() for i in range(num_vectors)]
            target = parts[0] if in_place else np.empty_like(parts[0])
            tensors.append((on_host(parts, "float32"), target, (out[first:last],)))
        collectives.allreduce_many(tensors, "float32", Deadline(TIMEOUT_S), "sum", scale=scale)
        assert np.array_equal(np.concatenate([target for _, target, _ in tensors]), out)
        collectives.close()
        return out

    terms = [own(rank, i, count, exact=exact).astype("f8") for rank in range(size) for i in range(num_vectors)]
    expected, magnitude = scale * sum(terms), scale * sum(map(np.abs, terms))
    found = set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selection, "LINKED_FROM_BYTES", 1)
        for compiled in (range(size), range(0, size, 2), ()):
            for out in run_ranks(size, partial(rank_main, compiled), hosts=hosts):
                found.add(out.tobytes())
                if exact:
                    np.testing.assert_array_equal(out, expected)
                else:  # what each rank gives is rounded, what each host sends on, and the sum
                    assert (np.abs(out - expected) <= (size + 2) * ULP[compression] * magnitude + 1e-6).all()
    assert len(found) == 1


@pytest.mark.parametrize(
    ("hosts", "count", "dtype", "algorithm", "share"),
    [
        ("abcd", 1 << 17, "float32", "auto", 1 / 2), ("abcd", 1 << 17, "float64", "auto", 1),
        ("ab", 1 << 15, "float32", "auto", 1), ("aa", 1 << 17, "float32", "auto", 1),
        ("abcd", 1 << 17, "float32", "naive", 1), ("aabbcc", 1 << 17, "float32", "hierarchical", 1 / 2),
        ("abcd", 1 << 18, "float16", "ring", 2 / 3), ("abcd", 1 << 17, "exact", "auto", 1),
    ],
)  # fmt: skip
def test_only_large_float32_between_hosts_is_rounded_and_takes_half_the_bytes(
    run_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch, hosts: str, count: int, dtype: str, algorithm: str,
    share: float,
) -> None:  # fmt: skip
    """Of half types, only their partial sums; and nothing of what the caller wants to be exact."""
    sent: dict[str, int] = {}
    original = MemoryComm.isend

    def isend(self: Any, buffer: Any, dest: int, tag: int) -> Any:
        sent[mode] = sent.get(mode, 0) + buffer.nbytes
        return original(self, buffer, dest, tag)

    monkeypatch.setattr(MemoryComm, "isend", isend)
    results: dict[str, list[np.ndarray]] = {}
    for mode in ("none", "bf16"):

        def rank_main(comm: MemoryComm, mode: str = mode) -> np.ndarray:
            collectives = Collectives(comm, algorithm, compression=mode)
            of = "float32" if dtype == "exact" else dtype
            vector, out = own(comm.rank, 0, count, exact=False).astype(of), np.empty(count, of)
            tensors = [(on_host([vector], of), out, ())]
            collectives.allreduce_many(tensors, of, Deadline(TIMEOUT_S), "sum", exact=dtype == "exact")
            collectives.close()
            return out

        results[mode] = run_ranks(len(hosts), rank_main, hosts=hosts)
    assert np.array_equal(results["none"][0], results["bf16"][0]) == (share == 1)
    assert abs(sent.get("bf16", 1) / sent.get("none", 1) - share) < 0.05


def test_settings_that_differ_are_an_error_on_all_ranks(run_ranks: RunRanks) -> None:
    from kvmpi.collectives import Call

    def rank_main(comm: MemoryComm) -> str:
        collectives = Collectives(comm, compression="bf16" if comm.rank else "none")
        with pytest.raises(KVError) as caught:
            collectives.agree(Call("push"), Deadline(TIMEOUT_S))
        return str(caught.value)

    for said in run_ranks(2, rank_main, hosts="ab"):
        assert "KVMPI_RING_COMPRESSION=none" in said
        assert "KVMPI_RING_COMPRESSION=bf16" in said
