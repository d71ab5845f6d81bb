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


def checkpoint_meanwhile(rank: int, size: int) -> None:
    """Training goes on while it is written, in a group of its own; plain torch reads it, and DDP goes on from there."""
    import torch.distributed.checkpoint as parts
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range, ranks: list[int]) -> None:
        for step in steps:
            optimizer.zero_grad()
            (sum(net(batch(step, r)).square().mean() for r in ranks) / len(ranks)).backward()
            optimizer.step()

    def start(net: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
        return net, torch.optim.AdamW(net.parameters(), lr=0.1)

    trained, optimizer = start(nn.parallel.DistributedDataParallel(network()))
    train(trained, optimizer, range(2), [rank])
    writers = dist.new_group()
    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        dist.broadcast_object_list(folders, 0)
        state = {"weights": trained.module.state_dict(), "states": optimizer.state_dict(), "steps": 2}
        writing = parts.async_save(state, checkpoint_id=folders[0], process_group=writers)
        train(trained, optimizer, range(2, 4), [rank])
        writing.result()
        dist.barrier()
        if rank == 0:
            dcp_to_torch_save(folders[0], f"{folder}/whole")
        dist.barrier()
        found = torch.load(f"{folders[0]}/whole", weights_only=False)
        dist.barrier()
    dist.destroy_process_group(writers)
    states = {int(number): state for number, state in found["states"]["state"].items()}  # the file has strs
    for net, ranks in ((network(), [*range(size)]), (nn.parallel.DistributedDataParallel(network()), [rank])):
        getattr(net, "module", net).load_state_dict(found["weights"])
        fresh, other = start(net)
        other.load_state_dict(copy.deepcopy({**found["states"], "state": states}))
        train(fresh, other, range(found["steps"], 4), ranks)
        for mine, wanted in zip(fresh.parameters(), trained.parameters(), strict=True):
            close(mine, wanted)


def parts_of_parts(rank: int, size: int) -> None:
    """Two dimensions of ranks: FSDP2 over one, tensor parallel or copies over the other; clipped by the norm of all."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = dist.init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("outer", "inner"))
    for in_parts in (True, False):
        alone, sharded = network(), network()
        if in_parts:
            parallelize_module(sharded, mesh["inner"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        for layer in (sharded[0], sharded[2], sharded):
            fully_shard(layer, mesh=mesh["outer"] if in_parts else mesh)
        optimizers = [torch.optim.AdamW(net.parameters(), lr=0.1) for net in (sharded, alone)]
        num_shares = size // 2 if in_parts else size
        for step in range(3):
            mine = batch(step, rank // 2 if in_parts else rank)
            every = torch.cat([batch(step, r) for r in range(num_shares)])
            for net, optimizer, x in ((sharded, optimizers[0], mine), (alone, optimizers[1], every)):
                optimizer.zero_grad()
                net(x).square().mean().backward()
                nn.utils.clip_grad_norm_(net.parameters(), 0.05)
                optimizer.step()
        for found, wanted in zip(sharded.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(found.full_tensor(), wanted, atol=1e-9, rtol=0)


def averaged_now_and_then(rank: int, size: int) -> None:
    """Local SGD: what DDP's hook sums inside groups of one rank, an averager makes one of every other step."""
    from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as local
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    parallel = nn.parallel.DistributedDataParallel(network())
    own, _ = dist.new_subgroups(1)
    parallel.register_comm_hook(local.PostLocalSGDState(None, own, 0), local.post_localSGD_hook)
    averager = PeriodicModelAverager(period=2, warmup_steps=0)
    optimizer = PostLocalSGDOptimizer(torch.optim.SGD(parallel.parameters(), lr=0.1), averager)
    nets = [network() for _ in range(size)]
    for step in range(4):
        optimizer.zero_grad()
        parallel(batch(step, rank)).square().mean().backward()
        optimizer.step()
        for r, net in enumerate(nets):
            net.zero_grad()
            net(batch(step, r)).square().mean().backward()
            with torch.no_grad():
                for p in net.parameters():
                    p -= 0.1 * p.grad
        if step % 2 == 0:
            with torch.no_grad():
                for each in zip(*(net.parameters() for net in nets), strict=True):
                    mean = torch.stack(each).mean(0)
                    for p in each:
                        p.copy_(mean)
    for found, wanted in zip(parallel.parameters(), nets[rank].parameters(), strict=True):
        close(found, wanted)


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
    if size == 4:
        parts_of_parts(rank, size)
        averaged_now_and_then(rank, size)
        return
    for check in (optimizer_in_parts, checkpoint_of_parts, checkpoint_meanwhile, layers_in_parts, gradients_divided):
        check(rank, size)
    if size > 1:
        layers_in_turn(rank, size)
