"""Memory with 256 MiB of keys: what workers and servers hold beyond the arrays of the program."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs" / "memory.py"
KEYS_MIB = 256
SLACK_MIB = 64  # the interpreter with its libraries on a server, buffers of chunks
# What a process maps of others' memory counts for each of them: two values of a key, which take turns on its server,
# and the blocks in which a client hands over what it pushes, 16 MiB for each server. A server does not write to a value
# that a client still holds: it makes another.
MAPPED_VALUES, MAPPED_MIB = 2, 16


@pytest.mark.parametrize(
    ("options", "store", "rule", "servers", "state", "shared"),
    [
        ("-n 2 -c 1", "mpi", "none", 0, 0, "off"),
        ("-n 2 -c 1 -s 2", "dist_sync_mpi", "momentum", 2, 1, "auto"),
        ("-n 4 -c 4 -s 2", "dist_sync", "none", 2, 0, "auto"),
        ("-n 4 -c 4 -s 2", "dist_sync", "none", 2, 0, "off"),
        ("-n 2 -c 2 -s 1", "dist_async", "momentum", 1, 1, "auto"),
    ],
)
def test_memory_is_bounded(job, options, store, rule, servers, state, shared):
    done = job(options, PROGRAM, store, rule, shared_payloads=shared)
    clients, maps = int(options.split()[3]), shared == "auto"
    peaks = re.findall(r"peak (worker|server) (\d+) MiB", done.stdout)
    workers = [int(mib) for role, mib in peaks if role == "worker"]
    of_servers = [int(mib) for role, mib in peaks if role == "server"]
    assert len(workers) == int(options.split()[1])
    assert len(of_servers) == servers
    assert max(workers) <= (2 + maps * MAPPED_VALUES) * KEYS_MIB + SLACK_MIB, peaks
    for mib in of_servers:
        shard = KEYS_MIB // servers
        mapped = maps * clients * servers * MAPPED_MIB
        assert shard < mib <= (2 + state + maps) * shard + mapped + SLACK_MIB, peaks
