"""Checks of ``DistributedOptimizer`` about what has no gradients: statistics of normalisation, tables of odd dtypes."""

from __future__ import annotations

from typing import Any

import torch
from optimizer_loops import convolutions, expect, flat, image_shard, mlp, plain_steps, same_in_all, sgd, statistics
from torch import nn

import kvmpi
from kvmpi.config import client_bounds
from kvmpi.errors import DTypeMismatchError
from kvmpi.torch import DistributedOptimizer


def images(kv: kvmpi.KVStore) -> None:
    for policy in ("first", "mean"):
        model, _ = same_in_all(kv, plain_steps, make=convolutions, get=image_shard, norm_buffers=policy)
        expected = statistics(policy, kv.num_workers)
        for buffer, value in zip(model.buffers(), expected, strict=True):
            torch.testing.assert_close(buffer, value, atol=1e-12, rtol=0)
    assert model[0].weight.grad.stride() == model[0].weight.stride() != model[0].weight.contiguous().stride()
    model, _ = same_in_all(kv, plain_steps, make=convolutions, get=image_shard, norm_buffers="own")
    mean = flat(model.buffers())
    kv.init(kv.keys[-1] + 1, mean)
    kv.pushpull(kv.keys[-1], mean)
    assert not torch.allclose(mean / kv.num_workers, flat(model.buffers()))


def odd_buffers(kv: kvmpi.KVStore) -> None:
    """Buffers of dtypes in which nobody computes are alike everywhere too; parameters of such are refused by name."""
    model = mlp(kv.rank)
    kinds = (torch.uint16, torch.uint64, torch.float8_e5m2, torch.complex64, torch.bool)

    def bits(table: torch.Tensor) -> torch.Tensor:
        return table.view(torch.uint8)

    for i, dtype in enumerate(kinds):
        table = (torch.arange(12.0).reshape(3, 4) + i + 20 * kv.rank).to(dtype)
        model.register_buffer(f"table{i}", table.T if i % 2 else table)
    model.register_buffer("number", torch.tensor(7 + kv.rank, dtype=torch.uint32))
    optimizer = DistributedOptimizer(sgd(model), kv, model)
    for i, dtype in enumerate(kinds):
        table = (torch.arange(12.0).reshape(3, 4) + i).to(dtype)
        found = model.get_buffer(f"table{i}").contiguous()
        assert torch.equal(bits(found), bits((table.T if i % 2 else table).contiguous())), dtype
    assert model.number.item() == 7
    optimizer.detach()
    odd = torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    optimizer = torch.optim.SGD([odd], lr=0.1)
    refused = "phase is of torch.complex64"
    expect(DTypeMismatchError, refused, lambda: DistributedOptimizer(optimizer, kv, [("phase", odd)]))


def converted_statistics(kv: kvmpi.KVStore) -> None:
    """Those of all workers stay alike when a model is converted, or given others."""

    def loop(model: Any, optimizer: Any, change: Any, dtype: torch.dtype) -> None:
        steps = [[(rank, x.to(dtype), y)] for rank, x, y in (image_shard(step, kv.rank) for step in range(3))]
        plain_steps(model, optimizer, lambda step: [image_shard(step, kv.rank)], 2)
        change(model)
        plain_steps(model, optimizer, lambda step: steps[step], 3)

    changes = {
        "float": (lambda model: model.float(), torch.float32),
        "there and back": (lambda model: model.float().double(), torch.float64),
        "assigned": (lambda model: model[1].load_state_dict(nn.BatchNorm2d(4).double().state_dict(), assign=True),
                     torch.float64),
    }  # fmt: skip
    for policy in ("first", "mean"):
        for name, (change, dtype) in changes.items():
            model = convolutions(kv.rank)
            optimizer = DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.1), kv, model, norm_buffers=policy
            )
            loop(model, optimizer, change, dtype)
            mine = flat(model.buffers())
            first = mine.clone()
            kv.init(kv.keys[-1] + 1, first)
            kv.pull(kv.keys[-1], first)
            assert torch.equal(mine, first), f"{policy}, {name}: {mine - first}"
            optimizer.detach()


def compressed(kv: kvmpi.KVStore) -> None:
    """Gradients travel in few bits; statistics, and what workers tell each other of their loops, as they are."""
    if not kv.is_capable("compression"):
        return
    clients, steps, n = client_bounds(kv.num_workers, kv.num_clients), 5, kv.num_workers

    def drawn(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(100 * step + rank)
        gradient = torch.randint(-16, 17, (2, 3), generator=generator).float()  # eighths of it, and fourths, are exact
        return torch.randn(5, 3, generator=generator), gradient / 2

    for kind, policy in (("2bit", "first"), ("1bit", "mean")):
        kv.set_gradient_compression({"type": kind, "threshold": 0.25})
        model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2, bias=False))
        inner = torch.optim.SGD(model.parameters(), lr=0.5)
        optimizer = DistributedOptimizer(inner, kv, model, update_on_kvstore=False, norm_buffers=policy)
        left = [torch.zeros(2, 3, dtype=torch.float64) for _ in clients]
        expected, plain = model[1].weight.detach().double(), nn.BatchNorm1d(3)
        for step in range(steps):
            batch, gradient = drawn(step, kv.rank)
            optimizer.zero_grad()
            (model[0](batch).sum() * 0 + (model[1].weight * gradient).sum()).backward()
            optimizer.step()
            for client, (start, stop) in enumerate(clients):
                wanted = left[client] + sum(drawn(step, rank)[1].double() / n for rank in range(start, stop))
                codes = wanted.sign() * 0.25 * (wanted.abs() >= 0.25) if kind == "2bit" else 2.0 * (wanted > 0.25) - 1
                left[client] = wanted - codes
                expected = expected - 0.5 * codes
            before, after = [b.clone() for b in plain.buffers()], []
            for rank in range(n if policy == "mean" else 1):
                for buffer, value in zip(plain.buffers(), before, strict=True):
                    buffer.copy_(value)
                plain(drawn(step, rank)[0])
                after.append([b.clone() for b in plain.buffers()])
            for buffer, *each in zip(plain.buffers(), *after, strict=True):
                buffer.copy_(torch.stack(each).double().mean(dim=0))
            what = f"{kind}, step {step}"
            torch.testing.assert_close(model[1].weight.detach().double(), expected, atol=1e-6, rtol=0, msg=what)
            for found, value in zip(model.buffers(), plain.buffers(), strict=True):
                torch.testing.assert_close(found, value, atol=1e-6, rtol=0, msg=f"{what}: {found}, expected {value}")
        optimizer.detach()
    kv.set_gradient_compression({"type": "none"})
