"""Broadcast and tell from every root, and what happens when a rank does not take part."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from collective_helpers import at_once, on_host, vectors

from kvmpi.arrays import DTYPES
from kvmpi.collectives import Collectives, SoloComm
from kvmpi.collectives.memory_comm import MemoryComm
from kvmpi.deadline import Deadline
from kvmpi.errors import KVTimeoutError, PeerLostError

RunRanks = Callable[..., list[Any]]


@pytest.mark.parametrize("algorithm", ["ring", "naive", "auto"])
@pytest.mark.parametrize(("size", "root"), [(size, root) for size in (1, 2, 3, 4) for root in range(size)])
def test_every_rank_gets_the_roots_values(run_ranks: RunRanks, size: int, root: int, algorithm: str) -> None:
    def rank_main(comm: MemoryComm) -> list[np.ndarray]:
        collectives = Collectives(comm, algorithm, 128)
        buffers = [vectors(comm.rank, 1, count, "float32")[0] for count in (0, 1, 31, 33, 4097)]
        for buffer in buffers:
            collectives.broadcast(buffer, root, Deadline(20), "test")
        return buffers

    expected = [vectors(root, 1, count, "float32")[0] for count in (0, 1, 31, 33, 4097)]
    for rank, buffers in enumerate(run_ranks(size, rank_main)):
        for buffer, wanted in zip(buffers, expected, strict=True):
            np.testing.assert_array_equal(buffer, wanted, err_msg=f"rank {rank}")


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_every_dtype(run_ranks: RunRanks, dtype: str) -> None:
    def rank_main(comm: MemoryComm) -> np.ndarray:
        buffer = vectors(comm.rank, 1, 1000, dtype)[0]
        Collectives(comm, "ring", 100).broadcast(buffer, 1, Deadline(20), "test")
        return buffer

    expected = vectors(1, 1, 1000, dtype)[0]
    for buffer in run_ranks(3, rank_main):
        assert buffer.tobytes() == expected.tobytes()


def test_two_roots_in_a_row_do_not_mix(run_ranks: RunRanks) -> None:
    def rank_main(comm: MemoryComm) -> list[int]:
        collectives = Collectives(comm, "ring", 64)
        seen = []
        for i in range(20):
            buffer = np.full(100, 100 * comm.rank + i, "i4")
            collectives.broadcast(buffer, i % 3, Deadline(20), "test")
            assert (buffer == buffer[0]).all()
            seen.append(int(buffer[0]))
        return seen

    assert run_ranks(3, rank_main) == [[100 * (i % 3) + i for i in range(20)]] * 3


@pytest.mark.parametrize("length", [0, 1, 1023, 1024, 1025, 500_000])
@pytest.mark.parametrize("root", [0, 2])
def test_tell(run_ranks: RunRanks, root: int, length: int) -> None:
    text = np.random.default_rng(length).bytes(length)

    def rank_main(comm: MemoryComm) -> list[bytes]:
        collectives = Collectives(comm)
        first = collectives.tell(text if comm.rank == root else b"ignored", root, Deadline(20), "test")
        return [first, collectives.tell(b"next", root, Deadline(20), "test")]

    assert run_ranks(4, rank_main) == [[text, b"next"]] * 4


def test_who_has_waited_for_servers_in_vain_can_still_tell_the_others(run_ranks: RunRanks) -> None:
    """Its deadline has passed then, and an error about that would stand in the place of the one that it has."""

    def rank_main(comm: MemoryComm) -> bytes:
        deadline = Deadline(20)
        if comm.rank == 0:
            deadline.expires_s = time.monotonic()
        return Collectives(comm).tell(b"why", 0, deadline, "test")

    assert run_ranks(3, rank_main) == [b"why"] * 3


def test_a_worker_alone_tells_itself() -> None:
    assert Collectives(SoloComm()).tell(b"text", 0, Deadline(1), "test") == b"text"


@pytest.mark.parametrize("what", ["ring", "naive", "broadcast", "naive broadcast", "tell"])
def test_a_rank_that_never_comes_ends_the_others(run_ranks: RunRanks, what: str) -> None:
    """Who depends on the absent rank fails within twice the timeout, and fails at once from then on.

    It has never been there, or was there when ranks found out who shares a host.
    """
    timeout_s = 1.0

    def check(absent: int, met: bool) -> None:
        def act(collectives: Collectives) -> None:
            deadline = Deadline(timeout_s)
            buffer = np.ones(5000, "f4")
            if what.endswith("broadcast"):
                collectives.broadcast(buffer, absent, deadline, "pull of key 'k'")
            elif what == "tell":
                collectives.tell(b"text", absent, deadline, "pull of key 'k'")
            else:
                collectives.allreduce(on_host([buffer], "float32"), buffer, "float32", deadline, "push of key 'k'")

        def rank_main(comm: MemoryComm) -> str:
            collectives = Collectives(comm, "naive" if "naive" in what else "ring", 512)
            if met:
                one = np.ones(1, "f4")
                collectives.allreduce(on_host([one], "float32"), one, "float32", Deadline(20), "first")
            if comm.rank == absent:
                return ""
            start_s = time.monotonic()
            with pytest.raises(KVTimeoutError, match=r"of key 'k'.*MPI rank") as caught:
                act(collectives)
            assert timeout_s <= time.monotonic() - start_s < 2 * timeout_s
            assert "look at that worker, or raise KVMPI_TIMEOUT_S" in str(caught.value)
            start_s = time.monotonic()
            with pytest.raises(PeerLostError, match="earlier failure"):
                act(collectives)
            assert time.monotonic() - start_s < timeout_s / 2
            return str(caught.value)

        texts = run_ranks(3, rank_main, absent=() if met else (absent,))
        neighbour = texts[(absent + 1) % 3]
        if what != "naive" or absent == 0:  # naive: everyone waits for rank 0, which is here
            assert f"MPI rank {absent}" in neighbour

    at_once(check, [(absent, met) for absent in range(3) for met in (False, True)])
