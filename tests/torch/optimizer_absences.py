"""Checks of ``DistributedOptimizer`` where a worker has no backward in a step, and others change what comes back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from optimizer_loops import adamw, flat, loss_of, mlp, sgd, shard
from torch import nn

import kvmpi
from kvmpi.torch import DistributedOptimizer

STEPS, MOST = 6, 0.1


def absent(step: int, n: int) -> list[int]:
    """Who has no batch in a step; in one of them nobody has."""
    return [[0], [n - 1], [], [*range(n - 1)], [*range(n)], [*range(1, n)]][step]


def loss_in(model: Any, step: int, ranks: list[int], n: int) -> torch.Tensor:
    """What the mean over ``n`` workers has of those with these ranks."""
    return loss_of(model, [shard(step, rank) for rank in ranks]) * (len(ranks) / n)


def compare(
    kv: kvmpi.KVStore, train: Callable[..., Any], make: Any = mlp, optimizer: Any = sgd, **options: Any
) -> None:
    """``train`` with a rank that may be absent, and in one process with None."""
    plain, model, n = make(0), make(kv.rank), kv.num_workers
    wrapped = DistributedOptimizer(optimizer(model), kv, model, **{"bucket_bytes": 150, "overlap": True, **options})

    def backward(net: Any, rank: int | None, step: int, factor: float) -> bool:
        """Whether there was one."""
        there = [r for r in range(n) if r not in absent(step, n)]
        if rank is None:
            ranks, share = there, n
        else:
            ranks, share = [r for r in there if r == rank], 1
        if ranks:
            (loss_in(net, step, ranks, share) * factor).backward()
        return bool(ranks)

    mine = train(model, wrapped, partial(backward, model, kv.rank))
    theirs = train(plain, optimizer(plain), partial(backward, plain, None))
    difference = (flat(model.parameters()) - flat(plain.parameters())).abs().max()
    assert difference < 1e-12, f"{kv.type}, {train.__name__}: weights differ by {difference}"
    assert mine == theirs, f"{kv.type}, {train.__name__}: {mine}, expected {theirs}"
    wrapped.detach()


def clipped(model: Any, optimizer: Any, backward: Callable[[int, float], bool]) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(step, 1.0)
        nn.utils.clip_grad_norm_(model.parameters(), MOST)
        optimizer.step()


def scaled(model: Any, optimizer: Any, backward: Callable[[int, float], bool]) -> None:
    """With an overflow, which who had no backward finds as well; in a step in which nobody has one, nobody steps."""
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    for step in range(STEPS):
        optimizer.zero_grad()
        if step == 4:
            continue
        factor = float(scaler.scale(torch.ones(()))) * (float("inf") if step == 3 else 1.0)
        if backward(step, factor):
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), MOST)
        scaler.step(optimizer)
        scaler.update()


def closures(model: Any, optimizer: Any, backward: Callable[[int, float], bool]) -> None:
    for step in range(STEPS):

        def closure(step: int = step) -> None:
            optimizer.zero_grad()
            if backward(step, 1.0):
                nn.utils.clip_grad_value_(model.parameters(), 0.02)

        optimizer.step(closure)


def replaced(model: Any, optimizer: Any, backward: Callable[[int, float], bool]) -> None:
    """Others in the place of gradients, or none, in memory of another order, written to where torch hears nothing."""
    for step in range(STEPS):
        optimizer.zero_grad()
        if backward(step, 1.0):
            model[0].weight.grad = model[0].weight.grad * 0.5
            model[2].weight.grad = model[2].weight.grad.t().contiguous().t()
            model[2].bias.grad = None
            model[4].bias.grad.data.mul_(3)
            model[4].weight.grad = model[0].weight.grad.sum() * torch.ones_like(model[4].weight)
        optimizer.step()


def looked_at(model: Any, optimizer: Any, backward: Callable[[int, float], bool]) -> list[float]:
    """Who has no batch takes part before it looks at the norm, which is then that of all."""
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        if not backward(step, 1.0) and isinstance(optimizer, DistributedOptimizer):
            optimizer.synchronize(broken=True)
        norms.append(round(nn.utils.clip_grad_norm_(model.parameters(), MOST).item(), 10))
        if norms[-1] < 0.6:
            optimizer.step()
    return norms


def without_a_batch(kv: kvmpi.KVStore) -> None:
    """Weights are the same on all workers, whatever those with a batch do to gradients."""
    for train in (clipped, scaled, closures, replaced, looked_at):
        compare(kv, train)
    compare(kv, clipped, optimizer=adamw, bucket_bytes=1 << 20)
    compare(kv, clipped, make=wide, overlap=False)


def wide(seed: int) -> nn.Module:
    """Of more numbers than are passed on at a time."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7000), nn.Tanh(), nn.Linear(7000, 9), nn.Tanh(), nn.Linear(9, 3)).double()
