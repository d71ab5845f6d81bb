"""Run by test_torch_torchrun in processes that torchrun, or something like it, has started: no MPI is there."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist

import kvmpi
import kvmpi.horovod as hvd
import kvmpi.torch
import kvmpi.torch.c10d
from kvmpi.errors import ConfigError, KVTimeoutError, PeerLostError

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.set_num_threads(1)


def term(rank: int, count: int) -> np.ndarray:
    return np.random.default_rng([rank, count]).standard_normal(count).astype(np.float32)


def sums() -> None:
    with kvmpi.create("mpi") as kv, kvmpi.create("allreduce") as other:
        assert (kv.rank, kv.num_workers, other.num_workers) == (RANK, SIZE, SIZE)
        for count in (1, 1001, 300_007):
            for store in (kv, other):
                out = np.empty(count, np.float32)
                store.init(count, np.zeros(count, np.float32))
                store.pushpull(count, term(RANK, count), out=out)
                right = np.sum([term(rank, count).astype(np.float64) for rank in range(SIZE)], axis=0)
                np.testing.assert_allclose(out, right, rtol=1e-5, atol=1e-5)
        kv.barrier()


def gloo_beside() -> None:
    """On the same port as torch's own group."""
    dist.init_process_group("gloo")
    found = torch.tensor([float(RANK)])
    dist.all_reduce(found)
    assert float(found) == sum(range(SIZE))
    dist.destroy_process_group()


def training() -> None:
    """As one process with all samples."""

    def trained(kv: kvmpi.KVStore | None, samples: torch.Tensor) -> list[torch.Tensor]:
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if kv is not None:
            optimizer = kvmpi.torch.DistributedOptimizer(optimizer, kv, model.named_parameters())
        for _ in range(5):
            optimizer.zero_grad()
            model(samples).square().mean().backward()
            optimizer.step()
        return [parameter.detach().clone() for parameter in model.parameters()]

    samples = torch.randn(4 * SIZE, 8, generator=torch.Generator().manual_seed(1)).double()
    alone = trained(None, samples)
    with kvmpi.create("mpi") as kv:
        for found, right in zip(trained(kv, samples[4 * RANK : 4 * RANK + 4]), alone, strict=True):
            torch.testing.assert_close(found, right, rtol=1e-9, atol=1e-12)


def hybrid() -> None:
    """Under an unmodified DDP, which knows all ranks, a store of two clients: as one process with all samples."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).double()
    alone = copy.deepcopy(model)
    samples = torch.randn(4 * SIZE, 8, generator=torch.Generator().manual_seed(1)).double()
    dist.init_process_group("kvmpi")
    with kvmpi.create("dist_sync_mpi") as kv:
        assert (dist.get_world_size(), kv.num_clients, kv.num_servers) == (SIZE, 2, 1)
        ddp = torch.nn.parallel.DistributedDataParallel(model)
        ddp.register_comm_hook(None, kvmpi.torch.ddp_comm_hook(kv))
        for module, share in ((ddp, samples[4 * RANK : 4 * RANK + 4]), (alone, samples)):
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
            for _ in range(5):
                optimizer.zero_grad()
                module(share).square().mean().backward()
                optimizer.step()
        for found, right in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(found, right, rtol=1e-9, atol=1e-12)
    dist.destroy_process_group()


def what_is_refused() -> None:
    child = [sys.executable, "-c", "import kvmpi; kvmpi.create('mpi')"]
    done = subprocess.run(child, capture_output=True, text=True, timeout=60, check=False)
    said = f"is not this rank of its job of torch's: process {os.getpid()}"
    assert done.returncode, "two processes as one rank"
    assert said in done.stderr, done.stderr


def forks() -> None:
    """MPI forbids them; here there is none."""
    with kvmpi.create("mpi") as kv, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kv.init(99, np.zeros(3, np.float32))
        model = torch.nn.Linear(2, 1)
        kvmpi.torch.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), kv, model)  # would warn
        if not (pid := os.fork()):
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        assert not caught, [str(one.message) for one in caught]
        out = np.empty(3, np.float32)
        kv.pushpull(99, np.ones(3, np.float32), out=out)
        assert (out == SIZE).all()
    assert "mpi4py.MPI" not in sys.modules


def meeting_elsewhere() -> None:
    """At an address that the program names, and not where the environment says."""
    address, os.environ["MASTER_ADDR"] = os.environ["MASTER_ADDR"], "127.0.0.1"
    agents = os.environ.pop("TORCHELASTIC_USE_AGENT_STORE")
    dist.init_process_group("kvmpi", init_method=f"tcp://{address}:29501", rank=RANK, world_size=SIZE)
    found = torch.tensor([float(RANK)])
    dist.all_reduce(found)
    assert float(found) == sum(range(SIZE))
    dist.destroy_process_group()
    os.environ |= {"MASTER_ADDR": address, "TORCHELASTIC_USE_AGENT_STORE": agents}


def horovod() -> None:
    hvd.init()
    assert (hvd.rank(), hvd.size(), hvd.local_size()) == (RANK, SIZE, SIZE)
    assert hvd.allreduce(torch.tensor([float(RANK)]), op=hvd.Sum).item() == sum(range(SIZE))
    hvd.shutdown()


def killed() -> None:
    """The last rank dies; the others learn which it was."""
    kv = kvmpi.create("mpi")
    kv.init("w", np.zeros(1000, np.float32))
    kv.barrier()
    if RANK == SIZE - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises((PeerLostError, KVTimeoutError)) as caught:
        kv.pushpull("w", np.ones(1000, np.float32), out=np.empty(1000, np.float32))
    print(f"rank {RANK}: {caught.value}", flush=True)


def absent() -> None:
    with pytest.raises(KVTimeoutError) as caught:
        kvmpi.create("mpi", timeout_s=2.0)
    print(f"rank {RANK}: {caught.value}", flush=True)


def no_port() -> None:
    del os.environ["MASTER_PORT"]
    with pytest.raises(ConfigError, match="has not set RANK and MASTER_PORT"):
        kvmpi.create("mpi")


for check in sys.argv[1:]:
    globals()[check]()
print(f"rank {RANK}: all checks passed", flush=True)
