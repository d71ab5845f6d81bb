"""Checks of ``DistributedOptimizer`` about what has no gradients: statistics of normalisation, tables of odd dtypes."""

from __future__ import annotations

import unittest.mock
from typing import Any

import torch
from optimizer_loops import convolutions, expect, flat, image_shard, mlp, plain_steps, same_in_all, sgd, statistics
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import kvmpi
from kvmpi.config import client_bounds
from kvmpi.errors import ConfigError, DTypeMismatchError, ShapeMismatchError
from kvmpi.torch import DistributedOptimizer
from kvmpi.torch.parameters import next_key


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
    layouts = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr)
    for i, layout in enumerate(layouts):
        blocks = {"blocksize": (2, 2)} if layout is torch.sparse_bsr else {}
        table = torch.zeros(4, 6).scatter_(1, torch.arange(4)[:, None] + kv.rank % 2 * 2, 5.0 + kv.rank)
        model.register_buffer(f"sparse{i}", table.to_sparse(layout=layout, **blocks))
    model.register_buffer("nowhere", torch.zeros(3, device="meta"))
    optimizer = DistributedOptimizer(sgd(model), kv, model)
    for i in range(len(layouts)):
        assert torch.equal(model.get_buffer(f"sparse{i}").to_dense(), torch.eye(4, 6) * 5.0)
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
    model.register_buffer("sparse", torch.eye(4)[: 1 + kv.rank].to_sparse_csr())
    expect(ShapeMismatchError, "sparse ones as many entries", lambda: DistributedOptimizer(sgd(model), kv, model))
    del model.sparse
    both = TwoTensor(torch.ones(3), torch.ones(3))
    model.wrapped = nn.Parameter(both)
    expect(ConfigError, "wrapped is of TwoTensor", lambda: DistributedOptimizer(sgd(model), kv, model))
    lazy = nn.LazyLinear(3)
    expect(ConfigError, "weight has no shape yet", lambda: DistributedOptimizer(sgd(lazy), kv, lazy))


class Codebook(nn.Module):
    """Buffers as people have them: written by way of ``.data``, in place, anew, from some step on, or never."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layer = nn.Linear(3, 2).double()
        self.register_buffer("codes", torch.randn(4, 3).T.half())
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("last", torch.zeros(5, 3), persistent=False)
        self.register_buffer("late", torch.zeros(2, dtype=torch.complex64))
        self.register_buffer("own", torch.zeros(1))  # of another size on each worker
        self.register_buffer("mask", torch.ones(3).bool())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = x.detach().float()
        self.codes.data.mul_(0.5).add_(seen.mean(0, keepdim=True).half().T)
        self.count += int(x.abs().sum() * 100)
        self.last = self.last / 2 + seen
        if x[0, 0] > 0:  # on some workers
            self.late += x[0, 0]
        return self.layer(x * self.mask)


def other_buffers(kv: kvmpi.KVStore, **options: Any) -> None:
    """Those that change follow the first worker, of the client where weights come back."""
    with unittest.mock.patch("kvmpi.torch.other_buffers._LOOK_EVERY", 8):
        for policy in ("first", "mean", "own"):
            _follow(kv, policy, 12, **options)


def _follow(kv: kvmpi.KVStore, policy: str, steps: int, **options: Any) -> None:
    def batch(step: int, rank: int) -> torch.Tensor:
        x = torch.randn(5, 3, generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.float64)
        x[0, 0] = -1.0 if step < steps // 2 + rank % 2 else x[0, 0].abs()
        return x

    first = 0
    if policy == "own" or (options and kv.mpi_size == 1):
        first = kv.rank
    elif options:
        first = max(start for start, _ in client_bounds(kv.num_workers, kv.num_clients) if start <= kv.rank)
    model, plain = Codebook(kv.rank), Codebook(0)
    optimizer = DistributedOptimizer(sgd(model), kv, model, norm_buffers=policy, **options)
    num_keys, untouched = set[int](), model.mask._version
    for step in range(steps):
        model.own = torch.full((1 + kv.rank,), float(step))
        optimizer.zero_grad()
        model(batch(step, kv.rank)).sum().backward()
        optimizer.step()
        num_keys |= {len(kv.keys)} if step > 4 else set()
        with torch.no_grad():
            plain(batch(step, first))
    for name, expected in plain.named_buffers():
        if name != "own":
            found = model.get_buffer(name)
            assert torch.equal(found, expected), f"{policy}: {name} {found}, expected {expected}"
    assert torch.equal(model.own, torch.full((1 + kv.rank,), steps - 1.0))
    assert model.mask._version == untouched, "what does not change is left alone"
    assert all(b.untyped_storage().resizable() for b in model.buffers()), "as observers do with theirs"
    assert options or len(num_keys) <= 2, "keys for each of those that change, once"
    optimizer.detach()


def scripted(kv: kvmpi.KVStore, **options: Any) -> None:
    """TorchScript, which takes no hooks, and hides which layers normalise."""
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    compiled = torch.jit.script(model)
    optimizer = DistributedOptimizer(torch.optim.SGD(compiled.parameters(), lr=0.1), kv, compiled, **options)
    for step in range(3):
        optimizer.zero_grad()
        x = torch.randn(6, 5, generator=torch.Generator().manual_seed(10 * step + kv.rank))
        compiled(x.double()).sum().backward()
        optimizer.step()
    optimizer.synchronize()
    mine = torch.cat([flat(compiled.parameters()), flat(compiled.buffers())])
    first = mine.clone()
    key = next_key(kv.client)
    kv.client.init(key, first)
    kv.client.pull(key, first)
    assert torch.equal(mine, first), mine - first
    optimizer.detach()
    if kv.optimizer is not None:
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), kv, model, **options)
        expect(AttributeError, "call optimizer.detach() before", lambda: torch.jit.script(model))
        optimizer.detach()
        torch.jit.script(model)


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


def half_statistics(kv: kvmpi.KVStore) -> None:
    """The mean of half types is one where their sum is not: it is more than they hold."""
    for dtype in (torch.float16, torch.bfloat16):
        model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2).to(dtype))
        optimizer = DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), kv, model, update_on_kvstore=False, norm_buffers="mean"
        )
        means = [
            torch.tensor([1.0 + 2.0**-7 * (rank % 3), -(2.0**rank)], dtype=dtype) for rank in range(kv.num_workers)
        ]
        model[1].running_mean, model[1].running_var = means[kv.rank].clone(), torch.full((2,), 60_000.0, dtype=dtype)
        model[0](torch.ones(4, 3)).sum().backward()
        optimizer.step()
        optimizer.synchronize()
        assert torch.equal(model[1].running_var, torch.full((2,), 60_000.0, dtype=dtype)), model[1].running_var
        expected = torch.stack(means).double().mean(dim=0).to(dtype)
        assert torch.equal(model[1].running_mean, expected), f"{model[1].running_mean}, expected {expected}"
        optimizer.detach()


def compressed(kv: kvmpi.KVStore) -> None:
    """Gradients travel in few bits; statistics, and what workers tell each other of their loops, as they are.

    What is left of a parameter waits until any worker uses it again.
    """
    if not kv.is_capable("compression"):
        return
    clients, steps, n = client_bounds(kv.num_workers, kv.num_clients), 5, kv.num_workers

    def drawn(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(100 * step + rank)
        gradient = torch.randint(-16, 17, (2, 3), generator=generator).float()  # eighths of it, and fourths, are exact
        return torch.randn(5, 3, generator=generator), gradient / 2

    def users(step: int) -> list[int]:
        """Who uses the last layer."""
        return [[*range(n)], [], [n - 1], [], [0]][step]

    for kind, policy in (("2bit", "first"), ("1bit", "mean")):
        kv.set_gradient_compression({"type": kind, "threshold": 0.25})
        model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2, bias=False), nn.Linear(3, 2, bias=False))
        inner = torch.optim.SGD(model.parameters(), lr=0.5)
        optimizer = DistributedOptimizer(inner, kv, model, update_on_kvstore=False, norm_buffers=policy)
        left = [[torch.zeros(2, 3, dtype=torch.float64) for _ in clients] for _ in range(2)]
        expected, plain = [model[i].weight.detach().double() for i in (1, 2)], nn.BatchNorm1d(3)
        for step in range(steps):
            batch, gradient = drawn(step, kv.rank)
            optimizer.zero_grad()
            used = model[1].weight + model[2].weight * 2 if kv.rank in users(step) else model[1].weight
            (model[0](batch).sum() * 0 + (used * gradient).sum()).backward()
            optimizer.step()
            for layer, some in enumerate((range(n), users(step))):
                for client, (start, stop) in enumerate(clients if some else []):
                    wanted = left[layer][client] + sum(
                        (1 + layer) * drawn(step, rank)[1].double() / n for rank in range(start, stop) if rank in some
                    )
                    codes = (
                        wanted.sign() * 0.25 * (wanted.abs() >= 0.25) if kind == "2bit" else 2.0 * (wanted > 0.25) - 1
                    )
                    left[layer][client] = wanted - codes
                    expected[layer] = expected[layer] - 0.5 * codes
                assert (model[1 + layer].weight.grad is not None) == bool(some), f"{kind}, step {step}, layer {layer}"
            before, after = [b.clone() for b in plain.buffers()], []
            for rank in range(n if policy == "mean" else 1):
                for buffer, value in zip(plain.buffers(), before, strict=True):
                    buffer.copy_(value)
                plain(drawn(step, rank)[0])
                after.append([b.clone() for b in plain.buffers()])
            for buffer, *each in zip(plain.buffers(), *after, strict=True):
                buffer.copy_(torch.stack(each).double().mean(dim=0))
            what = f"{kind}, step {step}"
            for layer in range(2):
                found = model[1 + layer].weight.detach().double()
                torch.testing.assert_close(found, expected[layer], atol=1e-6, rtol=0, msg=f"{what}, layer {layer}")
            for found, value in zip(model.buffers(), plain.buffers(), strict=True):
                torch.testing.assert_close(found, value, atol=1e-6, rtol=0, msg=f"{what}: {found}, expected {value}")
        optimizer.detach()
    kv.set_gradient_compression({"type": "none"})


def compressed_in_other_buckets(kv: kvmpi.KVStore) -> None:
    """What was left of a gradient goes with it, in whichever company it travels; frozen, it waits."""
    if not kv.is_capable("compression"):
        return
    clients = client_bounds(kv.num_workers, kv.num_clients)
    counts = {"a": 6, "b": 4, "c": 8, "added": 5}

    def drawn(name: str, step: int, rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * step + 10 * rank + len(name) + counts[name])
        return torch.randint(-4, 5, (counts[name],), generator=generator) / 8.0

    kv.set_gradient_compression({"type": "2bit", "threshold": 0.5})
    model = nn.ParameterDict({name: nn.Parameter(torch.zeros(counts[name])) for name in "abc"})
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = DistributedOptimizer(inner, kv, model.named_parameters(), average=False, bucket_bytes=48, overlap=True)
    left = {name: [torch.zeros(count) for _ in clients] for name, count in counts.items()}
    expected = {name: torch.zeros(count) for name, count in counts.items()}
    num_keys = list[int]()
    for step in range(9):
        if step in (3, 5):
            model["b"].requires_grad_(step == 5)
        if step == 6:
            model["added"] = nn.Parameter(torch.zeros(counts["added"]))
            optimizer.add_param_group({"params": [model["added"]]})
        trained = [name for name in ("a", "c", "b", "added") if name in model and model[name].requires_grad]
        optimizer.zero_grad()
        torch.stack([(model[name] * drawn(name, step, kv.rank)).sum() for name in trained]).sum().backward()
        optimizer.step()
        num_keys.append(len(kv.keys))
        for name in trained:
            for client, (start, stop) in enumerate(clients):
                wanted = left[name][client] + sum(drawn(name, step, rank) for rank in range(start, stop))
                codes = wanted.sign() * 0.5 * (wanted.abs() >= 0.5)
                left[name][client] = wanted - codes
                expected[name] = expected[name] - codes
        for name in model:
            found = model[name].detach()
            assert torch.equal(found, expected[name]), f"step {step}, {name}: {found}, expected {expected[name]}"
    assert num_keys[0] < num_keys[1] or num_keys[2] < num_keys[3], f"the same buckets all the time: {num_keys}"
    optimizer.detach()
    kv.set_gradient_compression({"type": "none"})
