"""Worlds of many ranks, as threads: that sums are right there, and how many messages what ranks agree on takes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from collective_helpers import all_vectors, assert_is_sum, on_host, vectors

from kvmpi.collectives import Call, Collectives
from kvmpi.collectives.comm import Request
from kvmpi.collectives.exchange import GroupCollectives
from kvmpi.collectives.forming import exchange
from kvmpi.collectives.memory_comm import MemoryComm
from kvmpi.collectives.schedule import segment_bounds
from kvmpi.deadline import Deadline
from kvmpi.errors import KVTimeoutError

RunRanks = Callable[..., list[Any]]

SIZE = 33
#: Ranks of each host.
LAYOUTS = {"one host": [33], "uneven hosts": [1, 15, 17], "hosts of one": [1] * 33}


def hosts_of(layout: list[int]) -> list[str]:
    return [f"host {number}" for number, size in enumerate(layout) for _ in range(size)]


def within(seconds: float = 25.0) -> Deadline:
    return Deadline(seconds)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_operation_of_33_ranks(run_ranks: RunRanks, layout: str) -> None:
    counts = (1, 10, SIZE + 1, 1213)

    def rank_main(comm: MemoryComm) -> list[np.ndarray]:
        collectives, rank, found = GroupCollectives(comm), comm.rank, []
        for count in counts:
            [own] = vectors(rank, 1, count, "float32")
            total, gathered, sent = np.empty_like(own), np.full_like(own, 77), own.copy()
            part = slice(*segment_bounds(count, SIZE)[rank])
            collectives.agree(Call(f"sum of {count}"), within())
            collectives.allreduce(on_host([own], "float32"), total, "float32", within(), "sum")
            segment = np.empty_like(own[part])
            collectives.reduce_scatter(on_host([own], "float32"), segment, "float32", within(), "scatter")
            collectives.allgather(segment, gathered, within(), "gather")
            collectives.broadcast(sent, count % SIZE, within(), "broadcast")
            found += [total, gathered, sent]
        sends = [np.full(dest % 3, 100 * rank + dest) for dest in range(SIZE)]
        receives = [np.zeros(rank % 3, np.int64) for _ in range(SIZE)]
        collectives.exchange(sends, receives, within(), "exchange")
        assert all((part == 100 * source + rank).all() for source, part in enumerate(receives))
        largest = np.empty(10, "f4")
        collectives.fold(vectors(rank, 1, 10, "float32")[0], largest, "float32", "max", within(), "max")
        return [*found, largest]

    outs = run_ranks(SIZE, rank_main, hosts=hosts_of(LAYOUTS[layout]) if layout != "one host" else None)
    for number, count in enumerate(counts):
        terms = all_vectors(SIZE, 1, count, "float32")
        assert_is_sum(outs[0][3 * number], terms, "float32")
        assert_is_sum(outs[0][3 * number + 1], terms, "float32")
        np.testing.assert_array_equal(outs[0][3 * number + 2], terms[count % SIZE])
    np.testing.assert_array_equal(outs[0][-1], np.max(all_vectors(SIZE, 1, 10, "float32"), axis=0))
    assert len({b"".join(out.tobytes() for out in found) for found in outs}) == 1, "ranks with other bits"


class Counting(MemoryComm):
    """Counts messages that are sent, by rank."""

    sent: Counter[int]

    def isend(self, buffer: Any, dest: int, tag: int) -> Request:
        self.sent[self.rank] += 1
        return super().isend(buffer, dest, tag)


def counted(comm: MemoryComm, sent: Counter[int]) -> Counting:
    found = Counting(comm._world, comm.rank, comm._context)
    found.sent = sent
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, SIZE])
def test_words_of_all_reach_everybody_in_few_messages(run_ranks: RunRanks, size: int) -> None:
    sent, outside = Counter[int](), 2
    ranks = [rank for rank in range(size + 1) if rank != outside]  # as those of a host are not all, or begin elsewhere
    words = {rank: np.array([rank, rank * rank, 7], np.uint64) for rank in range(size + 1)}

    def rank_main(comm: MemoryComm) -> list[np.ndarray]:
        if comm.rank not in ranks:
            return []
        return exchange(counted(comm, sent), ranks, words[comm.rank], 40, within(), "test")

    outs = run_ranks(size + 1, rank_main)
    for rank in ranks:
        np.testing.assert_array_equal(outs[rank], [words[other] for other in ranks])
        assert sent[rank] == math.ceil(math.log2(len(ranks))), "what is learned is passed on"


def test_who_is_missing_is_named_though_ranks_wait_for_others_that_wait(run_ranks: RunRanks) -> None:
    def rank_main(comm: MemoryComm) -> None:
        one = np.ones(10, "f4")
        Collectives(comm).allreduce(on_host([one], "float32"), one, "float32", Deadline(1.0), "push of key 'w'")

    outcomes = run_ranks(SIZE, rank_main, absent=(20,), errors=True)
    for rank, error in enumerate(outcomes):
        if rank != 20:
            assert isinstance(error, KVTimeoutError), f"rank {rank}: {error!r}"
            assert "push of key 'w'" in str(error)
            assert "No answer from MPI rank 20:" in str(error), f"rank {rank}: {error}"
