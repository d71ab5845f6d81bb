"""Clocks of ranks on several hosts, which only MPI connects."""

from __future__ import annotations

import time

from rank_threads import RunRanks

from kvmpi.collectives import clocks
from kvmpi.collectives.memory_comm import MemoryComm
from kvmpi.trace.clocks import OffsetEstimate

AHEAD_NS = [0, 0, 7_000_000_000, -3_000_000_000, 0]  # of true time, by rank
HOSTS = "aabca"


def test_ranks_elsewhere_compare_their_clocks_with_rank_0(run_ranks: RunRanks) -> None:
    def rank_main(comm: MemoryComm) -> dict[str, OffsetEstimate]:
        found: dict[str, OffsetEstimate] = {}

        def hear(name: str, asked_ns: int, answered_ns: int, heard_ns: int) -> None:
            found.setdefault(name, OffsetEstimate()).hear(asked_ns, answered_ns, heard_ns)

        ahead_ns = AHEAD_NS[comm.rank]
        clocks.compare_clocks(comm, HOSTS[comm.rank], lambda: time.monotonic_ns() + ahead_ns, hear)
        return found

    estimates = run_ranks(5, rank_main, hosts=HOSTS)
    assert [list(found) for found in estimates] == [[], [], ["a"], ["a"], []]
    for rank in (2, 3):
        estimate = estimates[rank]["a"]
        assert abs(estimate.offset_ns - (AHEAD_NS[0] - AHEAD_NS[rank])) <= estimate.round_trip_ns / 2
        assert estimate.round_trip_ns < 1_000_000_000
