"""Checks of ``hvd.DistributedOptimizer``, run by ``horovod_checks.py``: against one process with all samples."""

from __future__ import annotations

import copy
import gc
import re
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import kvmpi.horovod as hvd
from kvmpi.errors import ConfigError, KVError, UnsupportedError


def close(found: torch.Tensor, expected: torch.Tensor, what: str = "") -> None:
    torch.testing.assert_close(found.double(), expected.double(), rtol=1e-6, atol=1e-6, msg=lambda m: f"{what}: {m}")


def raises(kind: type[Exception], text: str) -> Any:
    return pytest.raises(kind, match=re.escape(text))


def model() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Tanh(), nn.Linear(9, 3)).eval()


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def start(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def one_process(size: int, passes: int = 1, factor: float = 1.0) -> nn.Module:
    """The samples of all ranks, the gradient a mean over ranks and a sum over passes."""
    net = model().double()
    optimizer = start(net)
    for step in range(3):
        optimizer.zero_grad()
        for part in range(passes):
            for r in range(size):
                (factor / size * net(batch(10 * step + part, r).double()).square().mean()).backward()
        optimizer.step()
    return net


def same_weights(net: nn.Module, expected: nn.Module, what: str, tolerance: float = 1e-6) -> None:
    for found, wanted in zip(net.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(found.double(), wanted, atol=tolerance, rtol=0, msg=lambda m: f"{what}: {m}")


def optimizers(rank: int, size: int) -> None:
    variants: list[tuple[dict[str, Any], int, float]] = [
        ({}, 1, 1.0),
        ({"op": hvd.Sum}, 1, size),
        ({"gradient_predivide_factor": 2.0}, 1, 1.0),
        ({"backward_passes_per_step": 2}, 2, 1.0),
        ({"compression": hvd.Compression.fp16}, 1, 1.0),
    ]
    for options, passes, factor in variants:
        net = model()
        with torch.no_grad():
            net[0].weight.mul_(1 + rank)  # rank 0's weights count
        optimizer = hvd.DistributedOptimizer(start(net), named_parameters=net.named_parameters(), **options)
        hvd.broadcast_parameters(net.state_dict(), root_rank=0)
        assert isinstance(optimizer, torch.optim.SGD)
        for step in range(3):
            optimizer.zero_grad()
            for part in range(passes):
                net(batch(10 * step + part, rank)).square().mean().backward()
            optimizer.step()
        same_weights(net, one_process(size, passes, factor), str(options), 2e-3 if "compression" in options else 1e-6)
    # State and options reach ranks that have none.
    other = start(copy.deepcopy(net)) if rank else optimizer
    if rank:
        other.param_groups[0]["lr"] = 5.0
    hvd.broadcast_optimizer_state(other, root_rank=0)
    assert other.param_groups[0]["lr"] == 0.1
    momentum = [state["momentum_buffer"] for state in other.state_dict()["state"].values()]
    assert len(momentum) == 6
    close(hvd.allreduce(momentum[0]), momentum[0], "the state is the same everywhere")

    # Clipping between synchronize and step; a parameter that only one rank has used; a scheduler.
    net = model()
    unused = nn.Parameter(torch.ones(3, dtype=torch.float64))
    inner = torch.optim.SGD([*net.parameters(), unused], lr=1.0)
    optimizer = hvd.DistributedOptimizer(inner, [*net.named_parameters(), ("unused", unused)])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    loss = net(batch(0, rank)).square().mean() + (unused.sum() if rank == 0 else 0)
    loss.backward()
    if size > 1:
        with raises(KVError, "between loss.backward() and optimizer.step()"):
            optimizer.zero_grad()
    optimizer.synchronize()
    close(unused.grad, torch.full((3,), 1 / size), "used by one rank only")
    norm = nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
    assert norm > 1e-3
    before = net[0].weight.detach().clone()
    with optimizer.skip_synchronize():
        optimizer.step()
    assert 0 < (net[0].weight - before).norm() <= 1.1e-3, "the step was that of clipped gradients"
    scheduler.step()
    assert inner.param_groups[0]["lr"] == 0.5

    # What is changed on its way would be different everywhere.
    if size > 1:
        net = model()
        optimizer = hvd.DistributedOptimizer(start(net), net.named_parameters())
        net(batch(0, rank)).square().mean().backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
        with raises(KVError, "was changed after loss.backward() (clipped"):
            optimizer.step()
        for replaced in (lambda grad: grad / 2, lambda grad: None):
            net = model()
            optimizer = hvd.DistributedOptimizer(start(net), net.named_parameters())
            net(batch(0, rank)).square().mean().backward()
            net[3].bias.grad = replaced(net[3].bias.grad)
            with raises(KVError, "the gradient of 3.bias was changed after loss.backward()"):
                optimizer.step()
    for fused in (False, True):
        net, alone = model(), model()
        inner, plain = (torch.optim.SGD(m.parameters(), lr=0.1, fused=fused) for m in (net, alone))
        optimizer = hvd.DistributedOptimizer(inner, net.named_parameters())
        scaler, plain_scaler = (torch.amp.GradScaler("cpu", init_scale=64.0) for _ in range(2))
        for step in range(4):
            optimizer.zero_grad()
            plain.zero_grad()
            loss = net(batch(step, rank)).square().mean()
            plain_loss = sum(alone(batch(step, r)).square().mean() for r in range(size)) / size
            if step == 1:  # the last rank overflows, and nobody steps
                loss, plain_loss = loss * (torch.inf if rank == size - 1 else 1.0), plain_loss * torch.inf
            scaler.scale(loss).backward()
            plain_scaler.scale(plain_loss).backward()
            if size > 1 and step == 0:
                with raises(KVError, "GradScaler.step() while gradients are on their way"):
                    scaler.step(optimizer)
            optimizer.synchronize()
            for each, parameters in ((optimizer, net), (plain, alone)):
                (scaler if each is optimizer else plain_scaler).unscale_(each)
                nn.utils.clip_grad_norm_(parameters.parameters(), 1e-2)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
            scaler.update()
            plain_scaler.step(plain)
            plain_scaler.update()
        same_weights(net, alone.double(), f"scaled and clipped, fused={fused}")
        assert scaler.get_scale() == plain_scaler.get_scale() == 32.0
    if size > 1:
        net(batch(0, rank)).mean().backward()
        with raises(KVError, "more than backward_passes_per_step=1 times"):
            net(batch(0, rank)).mean().backward()
    net = model()
    optimizer = hvd.DistributedOptimizer(start(net), net.named_parameters())
    optimizer.set_backward_passes_per_step(2)
    for step in range(3):
        optimizer.zero_grad()
        for part in range(2):
            net(batch(10 * step + part, rank)).square().mean().backward()
        optimizer.step()
    same_weights(net, one_process(size, 2), "passes that are set later")
    with raises(UnsupportedError, "Adasum"):
        hvd.DistributedOptimizer(start(net), net.named_parameters(), op=hvd.Adasum)
    with raises(ConfigError, "names twice: a"):
        hvd.DistributedOptimizer(start(net), [("a", p) for p in net.parameters()])
    with raises(ConfigError, "lacks 5"):
        hvd.DistributedOptimizer(start(net), list(net.named_parameters())[:1])
    with raises(ConfigError, "goes with op=hvd.Average"):
        hvd.DistributedOptimizer(start(net), op=hvd.Sum, gradient_predivide_factor=2.0)


def changing(rank: int, size: int) -> None:
    """Parameters come and go, or a closure computes gradients; against one process that does the same."""

    def train(net: nn.Module, optimizer: Any, ranks: list[int], what: str, passes: int = 1) -> None:
        def loss(part: int) -> torch.Tensor:
            dtype = net[0].weight.dtype
            return sum(net(batch(10 * step + part, r).to(dtype)).square().mean() for r in ranks) / len(ranks)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            total = loss(0)
            total.backward()
            return total

        for step in range(5):
            if what == "unfrozen" and step == 2:
                net[3].requires_grad_(True)
            if what == "frozen" and step == 2:
                net[0].requires_grad_(False)
                optimizer.zero_grad()
            if what == "frozen for a while" and step in (1, 3):
                net[0].requires_grad_(step == 3)
                optimizer.zero_grad()
            if what == "added" and step == 2:
                net[0].requires_grad_(True)
                optimizer.add_param_group({"params": list(net[0].parameters()), "lr": 0.05})
            if "closure" in what:
                optimizer.step(closure)
                continue
            optimizer.zero_grad()
            for part in range(passes):
                loss(part).backward()
            optimizer.step()

    def begin(net: nn.Module, what: str) -> torch.optim.Optimizer:
        if what == "unfrozen":
            net[3].requires_grad_(False)
        if what == "added":
            net[0].requires_grad_(False)
            return torch.optim.SGD([*net[1].parameters(), *net[3].parameters()], lr=0.1, momentum=0.9)
        if what == "closure of L-BFGS":
            return torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=3)
        if what == "closure of a line search":
            return torch.optim.LBFGS(net.parameters(), max_iter=6, line_search_fn="strong_wolfe")
        return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)

    variants = [(what, passes) for what in ("unfrozen", "frozen", "frozen for a while") for passes in (1, 2)]
    closures = ("closure", "closure of L-BFGS", "closure of a line search")
    for what, passes in [*variants, ("added", 1), *((closure, 1) for closure in closures)]:
        alone, net = model().double(), model()
        if what == "closure of a line search":
            net.double()  # rounded otherwise, it would go on or end elsewhere
        train(alone, begin(alone, what), list(range(size)), what, passes)
        optimizer = hvd.DistributedOptimizer(begin(net, what), net.named_parameters(), backward_passes_per_step=passes)
        train(net, optimizer, [rank], what, passes)
        same_weights(net, alone, f"{what}, {passes} passes", 1e-5)
    # One after the other for the same model, as where learning rates are tried; the first has gone, or must not go on.
    for keep in (False, True):
        net, kept = model(), None
        for _ in range(2):
            net.load_state_dict(model().state_dict())
            first, kept = kept, None
            kept = hvd.DistributedOptimizer(start(net), net.named_parameters())
            for step in range(3):
                kept.zero_grad()
                net(batch(10 * step, rank)).square().mean().backward()
                kept.step()
            if not keep:
                gone, kept = weakref.ref(kept), None
                gc.collect()
                assert gone() is None
                assert not net[0].weight._post_accumulate_grad_hooks or size == 1
        same_weights(net, one_process(size), "the second optimizer of a model")
        if keep and size > 1:
            with raises(KVError, "another hvd.DistributedOptimizer was made for 0.weight since"):
                first.step()


def sharing(rank: int, size: int) -> None:
    """Autograd makes one gradient for two parameters that are added: it is reduced for each of them."""

    def backward(a: nn.Parameter, b: nn.Parameter) -> None:
        ((a.unsqueeze(0) + b.unsqueeze(0)) * (1.0 + rank)).sum().backward()

    def two(count: int) -> list[nn.Parameter]:
        return [nn.Parameter(torch.zeros(count, dtype=torch.float64)) for _ in range(2)]

    backward(*(plain := two(3)))
    assert plain[0].grad.data_ptr() == plain[1].grad.data_ptr(), "the check is to be of one memory"
    for count, at_the_end in ((3, False), (3, True), (20, True)):
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(both := two(count), lr=1.0), op=hvd.Sum)
        if at_the_end:
            optimizer.set_backward_passes_per_step(2)
        backward(*both)
        optimizer.step()
        for p in both:
            close(p, torch.full((count,), -sum(1.0 + r for r in range(size))), f"{count} elements")
    if size > 1:  # one leaves by itself, while the other is still to come
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(both := two(20), lr=1.0))
        with raises(KVError, "shares its memory with another that is on its way"):
            backward(*both)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(both := two(20), lr=1.0))
        both[1].sum().backward()  # the last ones leave first
        both[0].grad = both[1].grad
        with raises(KVError, "shares its memory with another that is on its way"):
            optimizer.step()
        for p in (both := two(20)):
            p.register_hook(torch.clone)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(both, lr=1.0), op=hvd.Sum)
        backward(*both)
        optimizer.step()
        close(both[0], both[1], "as the message says")


def schedulers(rank: int, size: int) -> None:
    """Made before or after the optimizer is distributed; torch warns if it thinks that there was no step."""
    alone = model().double()
    inner = start(alone)
    rate = torch.optim.lr_scheduler.StepLR(inner, 1, 0.5)
    for step in range(3):
        inner.zero_grad()
        for r in range(size):
            (1 / size * alone(batch(step, r).double()).square().mean()).backward()
        inner.step()
        rate.step()
    for before in (True, False):
        net = model()
        inner = start(net)
        if before:
            torch.optim.lr_scheduler.StepLR(inner, 1, 0.5)  # which is dropped, while its traces are not
            rate = torch.optim.lr_scheduler.StepLR(inner, 1, 0.5)
        optimizer = hvd.DistributedOptimizer(inner, net.named_parameters())
        if not before:
            rate = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        del inner
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for step in range(3):
                optimizer.zero_grad()
                net(batch(step, rank)).square().mean().backward()
                optimizer.step()
                rate.step()
        same_weights(net, alone, f"a scheduler made {'before' if before else 'after'}")
        every = hvd.allgather(net[0].weight.detach()[None])
        assert torch.equal(every[0], every[-1]), "weights differ between ranks"
    optimizer = start(model())
    rate = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer = hvd.DistributedOptimizer(optimizer)
    with pytest.warns(UserWarning, match="before `optimizer.step"):
        rate.step()


def hooked(rank: int, size: int) -> None:
    """Hooks of a step are called once, also after a state was read (on the root it is not)."""
    net = model()
    optimizer = hvd.DistributedOptimizer(start(net), net.named_parameters())
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    for read in (lambda: None, lambda: hvd.broadcast_optimizer_state(optimizer, 0),
                 lambda: optimizer.load_state_dict(optimizer.state_dict())):  # fmt: skip
        read()
        optimizer.zero_grad()
        net(batch(0, rank)).square().mean().backward()
        optimizer.step()
        assert calls == ["before", "after"], calls
        calls.clear()


def compiled(rank: int, size: int) -> None:
    """All of a step is compiled together, and every operation in the middle of a function that is."""
    net = model()
    optimizer = hvd.DistributedOptimizer(start(net), net.named_parameters())

    @torch.compile(backend="eager")
    def train(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()

    # What it says where it looks into what is not arithmetic of tensors.
    warnings.filterwarnings("error", "Dynamo does not know how to trace")
    for step in range(3):
        train(batch(10 * step, rank))
    same_weights(net, one_process(size), "compiled")

    @torch.compile(backend="eager")
    def talk(x: torch.Tensor) -> list[torch.Tensor]:
        x = x * 1
        handle = hvd.allreduce_async(x, op=hvd.Sum)
        hvd.barrier()
        later = hvd.synchronize(handle)
        found = [
            hvd.allreduce(x, op=hvd.Sum), later, hvd.allgather(x[:1]), hvd.broadcast(x, 0), hvd.alltoall(x),
            hvd.reducescatter(x, op=hvd.Sum), torch.tensor(hvd.broadcast_object(hvd.rank(), 0) + hvd.size()),
            hvd.grouped_allreduce([x, x], op=hvd.Sum)[1],
        ]  # fmt: skip
        return [each + 1 for each in found]

    every = [torch.arange(size) + 10.0 * r for r in range(size)]
    total = sum(every)
    mine = every[rank].clone().requires_grad_()
    expected = [
        total, total, torch.stack([each[0] for each in every]), every[0], torch.stack([each[rank] for each in every]),
        total[rank : rank + 1], torch.tensor(size), total,
    ]  # fmt: skip
    found = talk(mine)
    for one, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(one.detach(), wanted + 1)

    @torch.compile(backend="eager")
    def back(x: torch.Tensor) -> None:
        hvd.allreduce(x, op=hvd.Sum).square().sum().backward()

    back(mine)
    torch.testing.assert_close(mine.grad, 2 * total * size)
