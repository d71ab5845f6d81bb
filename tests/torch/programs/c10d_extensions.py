"""Checks of what PyTorch builds on process groups, run by ``c10d_checks.py``: against what one process computes."""

from __future__ import annotations

import copy
import tempfile

import torch
import torch.distributed as dist
from torch import nn


def network() -> nn.Sequential:
    torch.manual_seed(6)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3)).double()


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(50 * step + rank), dtype=torch.float64)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


def optimizer_in_parts(rank: int, size: int) -> None:
    """ZeRO: each rank has the states of a part of the parameters."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    parallel, alone = nn.parallel.DistributedDataParallel(network()), network()
    optimizer = ZeroRedundancyOptimizer(parallel.parameters(), torch.optim.AdamW, lr=0.1)
    expected = torch.optim.AdamW(alone.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        parallel(batch(step, rank)).square().mean().backward()
        optimizer.step()
        expected.zero_grad()
        (sum(alone(batch(step, r)).square().mean() for r in range(size)) / size).backward()
        expected.step()
    for found, wanted in zip(parallel.parameters(), alone.parameters(), strict=True):
        close(found, wanted)


def checkpoint_of_parts(rank: int, size: int) -> None:
    """Each rank writes the part that it has of a model and of its optimizer, and others read it."""
    import torch.distributed.checkpoint as parts
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (size,))
    made = []
    for _ in range(2):
        net = network()
        fully_shard(net, mesh=mesh)
        made.append((net, torch.optim.AdamW(net.parameters(), lr=0.1)))
    (trained, optimizer), (fresh, other) = made
    trained(batch(0, rank)).square().mean().backward()
    optimizer.step()
    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        dist.broadcast_object_list(folders, 0)
        weights, states = get_state_dict(trained, optimizer)
        parts.save({"weights": weights, "states": states}, checkpoint_id=folders[0])
        weights, states = get_state_dict(fresh, other)
        parts.load({"weights": weights, "states": states}, checkpoint_id=folders[0])
        set_state_dict(fresh, other, model_state_dict=weights, optim_state_dict=states)
        dist.barrier()  # before the first rank removes the folder
    start = network()
    for found, wanted, first in zip(fresh.parameters(), trained.parameters(), start.parameters(), strict=True):
        assert torch.equal(found.full_tensor(), wanted.full_tensor())
        assert not torch.equal(found.full_tensor(), first)
        assert torch.equal(
            other.state[found]["exp_avg"].full_tensor(), optimizer.state[wanted]["exp_avg"].full_tensor()
        )


def gradients_divided(rank: int, size: int) -> None:
    """FSDP2 with gradients that are sums over ranks divided by a number of one's own."""
    from torch.distributed.fsdp import fully_shard

    alone, sharded = network().float(), network().float()
    fully_shard(sharded, mesh=dist.init_device_mesh("cpu", (size,)))
    sharded.set_gradient_divide_factor(3.0)
    sharded(batch(0, rank).float()).square().mean().backward()
    (sum(alone(batch(0, r).float()).square().mean() for r in range(size)) / 3).backward()
    for found, wanted in zip(sharded.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(found.grad.full_tensor(), wanted.grad, atol=1e-6, rtol=0)


def layers_in_turn(rank: int, size: int) -> None:
    """A pipeline: each rank has a layer, and micro-batches go from one to the next."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    torch.manual_seed(7)
    layers = [nn.Linear(5, 5).double() for _ in range(size)]
    whole, x = copy.deepcopy(layers), torch.arange(40.0, dtype=torch.float64).reshape(8, 5) / 40
    schedule = Schedule1F1B(PipelineStage(layers[rank], rank, size, torch.device("cpu")), 4, loss_fn=nn.MSELoss())
    targets = {"target": torch.zeros(8, 5, dtype=torch.float64)} if rank == size - 1 else {}
    found = schedule.step(*[x] if rank == 0 else [], **targets)
    expected = x
    for layer in whole:
        expected = layer(expected)
    expected.square().mean().backward()
    if rank == size - 1:
        close(found, expected)
    close(layers[rank].weight.grad, whole[rank].weight.grad)


def layers_in_parts(rank: int, size: int) -> None:
    """Tensor parallel: each rank has columns of the first layer and rows of the second."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    alone = network()
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallel = parallelize_module(network(), dist.init_device_mesh("cpu", (size,)), plan)
    x = batch(0, 0)
    close(parallel(x), alone(x))
    parallel(x).square().sum().backward()
    alone(x).square().sum().backward()
    close(parallel[0].weight.grad.full_tensor(), alone[0].weight.grad)


def extensions(rank: int, size: int) -> None:
    for check in (optimizer_in_parts, checkpoint_of_parts, layers_in_parts, gradients_divided):
        check(rank, size)
    if size > 1:
        layers_in_turn(rank, size)
