"""Run by test_store_hosting and test_torch_torchrun in processes that no launcher of ours has started: servers are
children of the workers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import kvmpi
from kvmpi.errors import ConfigError, KVError
from kvmpi.store import hosting

COUNT = 5003


def term(rank: int, step: int) -> np.ndarray:
    return ((np.arange(COUNT) * (rank + 3) + 7 * step) % 61 - 30).astype(np.float32)


def total(ranks: range | list[int], steps: int) -> np.ndarray:
    return np.sum([term(rank, step).astype(np.float64) for rank in ranks for step in range(steps)], axis=0)


def who() -> str:
    """Its children, by which the test sees who starts what."""
    children = hosting._job._children if hosting._job is not None else None
    return "none" if children is None else " and ".join(children.labels) or "a folder"


def rounds() -> None:
    """Whole numbers, so that the order of additions does not matter."""
    for store_type in ("dist_sync", "dist_sync_mpi"):
        with kvmpi.create(store_type) as kv:
            out = np.empty(COUNT, np.float32)
            kv.init("w", np.zeros(COUNT, np.float32))
            kv.set_optimizer(kvmpi.optim.SGD(lr=1.0))
            for step in range(3):
                kv.pushpull("w", term(kv.rank, step), out)
                assert (out == -total(range(kv.num_workers), step + 1)).all()
            print(f"worker {kv.rank} of {kv.num_workers}, client {kv.client_rank} of {kv.num_clients}, "
                  f"{kv.num_servers} servers; children: {who()}", flush=True)  # fmt: skip


def beside() -> None:
    """Sums of all workers, without the servers."""
    with kvmpi.create("mpi") as kv, kvmpi.create("dist_async_mpi") as other:
        kv.init("w", np.zeros(COUNT, np.float32))
        out = np.empty(COUNT, np.float32)
        kv.pushpull("w", term(kv.rank, 5), out)
        assert kv.num_servers == 0 < other.num_servers
        right = np.sum([term(rank, 5).astype(np.float64) for rank in range(kv.num_workers)], axis=0)
        assert (out == right).all()


def refused() -> None:
    """Of a job there is only one."""
    with kvmpi.create("dist_sync") as kv:
        servers, workers = kv.num_servers, kv.num_workers
    with pytest.raises(ConfigError, match=f"num_servers=7: the job of this process has {servers} servers"):
        kvmpi.create("dist_sync", num_servers=7)
    with pytest.raises(ConfigError, match=f"num_clients={workers}: the job of this process has"):
        kvmpi.create("dist_sync", num_clients=workers)


def early() -> None:
    """Worker 0, whose children are the scheduler and servers, has the fewest steps, and closes nothing. Where others
    hold what a server of its does, that dies while worker 0 waits for them."""
    kv = kvmpi.create("dist_async")
    kv.init("w", np.zeros(COUNT, np.float32))
    kv.set_optimizer(kvmpi.optim.SGD(lr=1.0))
    kv.barrier()
    if kv.rank == 0:
        kv.push("w", term(0, 0))
        if kv.is_capable("replication"):
            children = hosting._job._children  # type: ignore[union-attr]
            victim = children._running["server 1"].pid  # type: ignore[union-attr]
            death = threading.Timer(1.5, os.kill, (victim, signal.SIGKILL))
            death.daemon = True  # it comes while this process waits at its end
            death.start()
        return
    time.sleep(1.0)  # worker 0 is at its end
    kv.push("w", term(kv.rank, 0))
    time.sleep(1.0)  # a server is gone
    kv.push("w", term(kv.rank, 1))
    out, right = np.empty(COUNT, np.float32), total([0], 1) + total(range(1, kv.num_workers), 2)
    deadline = time.monotonic() + 60
    while not (out == -right).all():
        kv.pull("w", out)
        assert time.monotonic() < deadline, "some pushes were lost"


def different() -> None:
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK") or os.environ["RANK"])
    with pytest.raises(ConfigError, match=r"workers ask for different jobs: worker 0 for .* worker 1 for"):
        kvmpi.create("dist_sync", num_servers=1 + rank)
    with pytest.raises(ConfigError, match="KVMPI_REPLICAS=1: 2 servers or more are needed, this job has 1"):
        kvmpi.create("dist_sync", num_servers=1, replicas=1)


def cannot_start() -> None:
    """The server's own words are on standard error."""
    with pytest.raises(ConfigError) as caught:
        kvmpi.create("dist_sync", imports="no_such_module_of_rules")
    text = "server 0 has ended with status 1 before it listened"
    assert text in str(caught.value), caught.value
    assert who() == "none"
    print(f"said: {caught.value}", flush=True)


def lost() -> None:
    """A worker that was told so dies; the others hear of it if its servers were needed."""
    victim = int(sys.argv[2])
    kv = kvmpi.create("dist_sync")
    kv.init("w", np.zeros(COUNT, np.float32))
    out = np.empty(COUNT, np.float32)
    if hosting._job is not None and hosting._job._children is not None:
        children = hosting._job._children
        print("children:", *(process.pid for process in children._running.values()), flush=True)
        servers = [str(process.pid) for label, process in children._running.items() if label != "scheduler"]
        if sys.argv[3:] == ["late"]:  # they see only a second later that their parent is gone
            subprocess.Popen(["sh", "-c", "sleep 1; kill -CONT $*", "-", *servers], start_new_session=True)
    kv.barrier()
    if kv.rank == victim:
        for server in servers if sys.argv[3:] == ["late"] else ():
            os.kill(int(server), signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(KVError) as caught:
        kv.pushpull("w", term(kv.rank, 0), out)
    print(f"worker {kv.rank}: {caught.value}", flush=True)


def goes_on() -> None:
    """Killed in the middle, and started again with all others: bit by bit what it would have been."""
    victim, steps = int(sys.argv[2]), 30
    kv = kvmpi.create("dist_sync_mpi")
    out = np.zeros(COUNT, np.float32)
    kv.init("w", out)
    kv.set_optimizer(kvmpi.optim.SGD(lr=0.1, momentum=0.9))
    begin = kv.resumed_step
    print(f"worker {kv.rank} begins at {begin}", flush=True)
    kv.pull("w", out)
    for step in range(begin, steps):
        kv.pushpull("w", term(kv.rank, step), out)
        if step == 25 and kv.rank == victim and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
    kv.close()
    value, velocity = np.zeros(COUNT), np.zeros(COUNT)
    for step in range(steps):
        velocity = 0.9 * velocity + sum(term(rank, step).astype(np.float64) for rank in range(kv.num_workers))
        value -= 0.1 * velocity
    np.testing.assert_allclose(out, value, rtol=1e-4, atol=1e-2)
    print(f"bits {out.tobytes().hex()[:4000]}", flush=True)


CHECKS = sys.argv[1].split(",")
for check in CHECKS:
    globals()[check]()
print(f"checks are right: {sys.argv[1]}", flush=True)
