"""Every operation of every algorithm, on every layout of hosts, against sums in float64: ranks as threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from collective_helpers import all_vectors, allreduce, assert_is_sum, on_host, vectors
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmpi.arrays import DTYPES
from kvmpi.collectives import Collectives, SoloComm, selection
from kvmpi.collectives.memory_comm import MemoryComm
from kvmpi.collectives.schedule import segment_bounds
from kvmpi.deadline import Deadline
from kvmpi.errors import ConfigError, UnsupportedError

RunRanks = Callable[..., list[Any]]

TIMEOUT_S = 20.0
ALGORITHMS = ("ring", "multi_ring", "host_ring", "shared", "hierarchical", "naive", "auto")
#: One letter for each rank: the host that it is on.
ONE_HOST = ("aa", "aaa", "aaaa", "aaaaaaa")
HOSTS = ("ab", "abc", "aabb", "abab", "aab", "abcab", "aaabbcc", "aabbccc")


#: The naive one does not ask for hosts, and the default is one of the others.
LAYOUTS = {
    "ring": HOSTS + ONE_HOST, "multi_ring": HOSTS + ONE_HOST, "host_ring": (*HOSTS, "aaa"), "shared": ONE_HOST,
    "hierarchical": (*HOSTS, "aaa"), "naive": ("aa", "aab", "aaabbcc"), "auto": ("aaa", "abc", "aab", "aaabbcc"),
}  # fmt: skip
CASES = [(algorithm, hosts, "mpi") for algorithm in ALGORITHMS for hosts in LAYOUTS[algorithm]]
CASES += [(algorithm, hosts, "tcp") for algorithm in ("ring", "multi_ring", "hierarchical") for hosts in HOSTS]
CASES += [("auto", hosts, "tcp") for hosts in ("abc", "aab")]
CASES += [
    (algorithm, hosts, "tcp, not compiled")
    for algorithm in ("ring", "multi_ring", "hierarchical") for hosts in ("abc", "abab", "aab", "aabbccc")
]  # fmt: skip


def collectives_of(comm: MemoryComm, algorithm: str, **options: Any) -> Collectives:
    return Collectives(comm, algorithm, options.pop("chunk_bytes", 256), **{"num_rings": 3, **options})


@pytest.mark.parametrize(("algorithm", "hosts", "transport"), CASES)
def test_everything_on_every_layout(
    run_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch, algorithm: str, hosts: str, transport: str
) -> None:
    """One job for many checks: sums and gathers of several sizes, in and out of place, and a broadcast."""
    size = len(hosts)
    monkeypatch.setattr(selection, "LINKED_FROM_BYTES", 1)
    # Every count with every number of vectors, and both with both places.
    cases = [
        (count, num, (i + j) % 2 == 1) for i, count in enumerate((1013, 0, 1, 5)) for j, num in enumerate((2, 1, 8))
    ]

    def rank_main(comm: MemoryComm, cases: list[tuple[int, int, bool]] = cases) -> list[np.ndarray]:
        carrier, _, rest = transport.partition(", ")
        collectives = collectives_of(comm, algorithm, ring_transport=carrier, use_native=not rest)
        deadline, found = Deadline(TIMEOUT_S), []
        for count, num_vectors, in_place in cases:
            start, stop = segment_bounds(count, size)[comm.rank]
            own = vectors(comm.rank, num_vectors, count, "float32")
            out = own[0] if in_place else np.full(count, 77, "f4")
            collectives.allreduce(on_host(own, "float32"), out, "float32", deadline, "sum")

            own = vectors(comm.rank, num_vectors, count, "float32")
            part = own[0][start:stop] if in_place else np.full(stop - start, 77, "f4")
            before = [vector.copy() for vector in own]
            collectives.reduce_scatter(on_host(own, "float32"), part, "float32", deadline, "scatter")
            for i, (vector, old) in enumerate(zip(own, before, strict=True)):
                if i or not in_place:
                    np.testing.assert_array_equal(vector, old, err_msg=f"vector {i} of rank {comm.rank} was changed")

            whole = np.full(count, 77, "f4")
            if in_place:
                whole[start:stop] = part
            collectives.allgather(whole[start:stop] if in_place else part, whole, deadline, "gather")
            text = vectors(comm.rank, 1, count, "int64")[0]
            collectives.broadcast(text, count % size, deadline, "cast")
            np.testing.assert_array_equal(text, vectors(count % size, 1, count, "int64")[0])
            found += [out, whole]
        collectives.close()
        return found

    results = run_ranks(size, rank_main, hosts=hosts)
    for rank, found in enumerate(results):
        assert [out.tobytes() for out in found] == [out.tobytes() for out in results[0]], f"rank {rank} differs"
    for i, (count, num_vectors, _) in enumerate(cases):
        for out in results[0][2 * i : 2 * i + 2]:
            assert_is_sum(out, all_vectors(size, num_vectors, count, "float32"), "float32")
    again = run_ranks(size, lambda comm: rank_main(comm, cases[:3]), hosts=hosts)
    assert [out.tobytes() for out in again[0]] == [out.tobytes() for out in results[0][:6]], "another run: other bits"


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize(
    ("algorithm", "hosts"),
    [("multi_ring", "aaa"), ("shared", "aaa"), ("hierarchical", "aabb"), ("hierarchical", "aab"), ("naive", "aaa")],
)  # fmt: skip
def test_every_dtype(run_ranks: RunRanks, algorithm: str, hosts: str, dtype: str) -> None:
    size, count = len(hosts), 1213

    def rank_main(comm: MemoryComm) -> tuple[np.ndarray, np.ndarray]:
        collectives, deadline = collectives_of(comm, algorithm, chunk_bytes=128), Deadline(TIMEOUT_S)
        own, out = vectors(comm.rank, 3, count, dtype), np.empty(count, DTYPES[dtype])
        collectives.allreduce(on_host(own, dtype), out, dtype, deadline, "sum")
        start, stop = segment_bounds(count, size)[comm.rank]
        part, whole = np.empty(stop - start, DTYPES[dtype]), np.empty(count, DTYPES[dtype])
        collectives.reduce_scatter(on_host(own, dtype), part, dtype, deadline, "scatter")
        collectives.allgather(part, whole, deadline, "gather")
        return out, whole

    results = run_ranks(size, rank_main, hosts=hosts)
    for out in results[0]:
        assert_is_sum(out, all_vectors(size, 3, count, dtype), dtype)
    assert len({out.tobytes() for out, _ in results}) == 1
    assert len({whole.tobytes() for _, whole in results}) == 1


@settings(max_examples=50, deadline=None)
@given(
    hosts=st.text("abc", min_size=2, max_size=6), count=st.integers(0, 500), num_vectors=st.integers(1, 9),
    chunk_bytes=st.integers(1, 600), in_place=st.booleans(), dtype=st.sampled_from(["float32", "float16", "int8"]),
    algorithm=st.sampled_from(["multi_ring", "hierarchical"]), num_rings=st.integers(1, 8), attach=st.booleans(),
)  # fmt: skip
def test_sums_of_any_shape_on_any_hosts(
    run_ranks: RunRanks, hosts: str, count: int, num_vectors: int, chunk_bytes: int, in_place: bool, dtype: str,
    algorithm: str, num_rings: int, attach: bool,
) -> None:  # fmt: skip
    size = len(hosts)

    def rank_main(comm: MemoryComm) -> np.ndarray:
        own = vectors(comm.rank, num_vectors, count, dtype)
        return allreduce(
            comm, algorithm, own, dtype, in_place=in_place, chunk_bytes=chunk_bytes, num_rings=num_rings, attach=attach
        )

    outs = run_ranks(size, rank_main, hosts=hosts)
    assert_is_sum(outs[0], all_vectors(size, num_vectors, count, dtype), dtype)
    assert len({out.tobytes() for out in outs}) == 1


@pytest.mark.parametrize(
    ("algorithm", "hosts"), [("shared", "aaa"), ("hierarchical", "aabb"), ("hierarchical", "baaab")]
)
def test_where_ranks_cannot_read_from_each_other_everything_is_staged(
    run_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch, algorithm: str, hosts: str
) -> None:
    from kvmpi.collectives import cross_memory

    monkeypatch.setattr(cross_memory, "_process_vm_readv", None)
    size = len(hosts)

    def rank_main(comm: MemoryComm) -> list[np.ndarray]:
        collectives, deadline, found = collectives_of(comm, algorithm), Deadline(TIMEOUT_S), []
        for turn in range(4):
            own = vectors(comm.rank, 2, 1013, "float32")
            out = collectives.empty(1013, "float32") if turn % 2 else own[0]
            collectives.allreduce(on_host(own, "float32"), out, "float32", deadline, "sum")
            start, stop = segment_bounds(1013, size)[comm.rank]
            whole = np.zeros(1013, "f4")
            collectives.reduce_scatter(
                on_host(vectors(comm.rank, 2, 1013, "float32"), "float32"), whole[start:stop], "float32", deadline, "s"
            )
            collectives.allgather(whole[start:stop], whole, deadline, "gather")
            cast = vectors(comm.rank, 1, 999, "int64")[0]
            collectives.broadcast(cast, turn % size, deadline, "cast")
            np.testing.assert_array_equal(cast, vectors(turn % size, 1, 999, "int64")[0])
            found += [out.copy(), whole]
        return found

    results = run_ranks(size, rank_main, hosts=hosts)
    for found in results:
        for out, first in zip(found, results[0], strict=True):
            assert out.tobytes() == first.tobytes()
            assert_is_sum(out, all_vectors(size, 2, 1013, "float32"), "float32")


@pytest.mark.parametrize(
    ("algorithm", "hosts"), [("shared", "aaa"), ("hierarchical", "aabb"), ("hierarchical", "baaab")]
)
def test_a_result_in_common_memory_is_written_once_and_read_by_all(
    run_ranks: RunRanks, algorithm: str, hosts: str
) -> None:
    size, count = len(hosts), 5003

    def rank_main(comm: MemoryComm) -> list[np.ndarray]:
        collectives, deadline, found = collectives_of(comm, algorithm), Deadline(TIMEOUT_S), []
        out = collectives.shared_empty(count, "float32", deadline)
        for turn in range(5):
            own = [vector + turn for vector in vectors(comm.rank, 2, count, "float32")]
            collectives.allreduce(on_host(own, "float32"), out, "float32", deadline, "sum")
            found.append(out.copy())  # the others begin the next sum meanwhile, and must not write yet
        found.append(out)
        return found

    results = run_ranks(size, rank_main, hosts=hosts)
    for turn in range(5):
        terms = [vector + turn for vector in all_vectors(size, 2, count, "float32")]
        for found in results:
            assert_is_sum(found[turn], terms, "float32")
            assert found[turn].tobytes() == results[0][turn].tobytes()
    for rank, found in enumerate(results):
        mate = hosts.index(hosts[rank])
        assert np.shares_memory(found[5], results[mate][5]) or found[5].ctypes.data == results[mate][5].ctypes.data


@pytest.mark.parametrize("hosts", ["a", *ONE_HOST[:1], *HOSTS])
def test_ranks_know_on_how_many_hosts_they_are(run_ranks: RunRanks, hosts: str) -> None:
    def rank_main(comm: MemoryComm) -> tuple[int, int]:
        collectives = Collectives(comm)
        before = collectives.num_hosts
        collectives.broadcast(np.zeros(3), 0, Deadline(TIMEOUT_S), "test")
        return before, collectives.num_hosts

    expected = (1 if len(hosts) == 1 else 0, len(set(hosts)))
    assert run_ranks(len(hosts), rank_main, hosts=hosts) == [expected] * len(hosts)


def test_common_memory_of_a_worker_alone_is_its_own() -> None:
    out = Collectives(SoloComm()).shared_empty(5, "bfloat16", Deadline(1))
    assert out.shape == (5,)
    assert out.dtype == np.uint16


@pytest.mark.parametrize(("algorithm", "hosts", "why"), [
    ("shared", "aab", r"different hosts, 0, 1 \| 2"), ("mpi", "aa", "needs an MPI communicator"),
])  # fmt: skip
def test_what_is_not_possible_says_why_on_every_rank(run_ranks: RunRanks, algorithm: str, hosts: str, why: str) -> None:
    def rank_main(comm: MemoryComm) -> None:
        with pytest.raises(UnsupportedError, match=why):
            allreduce(comm, algorithm, vectors(comm.rank, 1, 5, "float32"), "float32")

    run_ranks(len(hosts), rank_main, hosts=hosts)


@pytest.mark.parametrize("num_rings", [0, 9])
def test_there_are_one_to_eight_rings(num_rings: int) -> None:
    with pytest.raises(ConfigError, match="1 to 8"):
        Collectives(SoloComm(), "multi_ring", num_rings=num_rings)


def test_what_the_default_takes_is_told(run_ranks: RunRanks) -> None:
    def choice(comm: MemoryComm) -> str:
        return Collectives(comm).choice("allreduce", 1 << 20, "float32").algorithm

    assert run_ranks(4, choice, hosts="aabb") == ["hierarchical"] * 4
    assert run_ranks(4, choice, hosts="aaaa") == ["shared"] * 4
