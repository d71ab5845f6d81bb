"""Memory with 256 MiB of keys: what workers and servers hold beyond the arrays of the program."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs" / "memory.py"
KEYS_MIB = 256
SLACK_MIB = 64  # the interpreter with its libraries on a server, buffers of chunks


@pytest.mark.parametrize(
    ("options", "store", "rule", "servers", "state"),
    [
        ("-n 2 -c 1", "mpi", "none", 0, 0),
        ("-n 2 -c 1 -s 2", "dist_sync_mpi", "momentum", 2, 1),
        ("-n 4 -c 4 -s 2", "dist_sync", "none", 2, 0),
        ("-n 2 -c 2 -s 1", "dist_async", "momentum", 1, 1),
    ],
)
def test_memory_is_bounded(job, options, store, rule, servers, state):
    done = job(options, PROGRAM, store, rule)
    peaks = re.findall(r"peak (worker|server) (\d+) MiB", done.stdout)
    workers = [int(mib) for role, mib in peaks if role == "worker"]
    of_servers = [int(mib) for role, mib in peaks if role == "server"]
    assert len(workers) == int(options.split()[1])
    assert len(of_servers) == servers
    assert max(workers) <= 2 * KEYS_MIB + SLACK_MIB, peaks
    for mib in of_servers:
        shard = KEYS_MIB // servers
        assert shard < mib <= (2 + state) * shard + SLACK_MIB, peaks
