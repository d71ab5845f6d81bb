"""Training loops as people write them, run by workers with ``DistributedOptimizer`` and by one process without.

A loop gets a model, an optimizer and, for each step, shards: (rank, x, y) of those whose data it trains on. A worker
has one shard, the process that is the oracle has all of them; the loss is the mean of the shards' losses.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import kvmpi
from kvmpi.config import client_bounds
from kvmpi.torch import DistributedOptimizer

STEPS, BATCH = 6, 4
Shard = tuple[int, torch.Tensor, torch.Tensor]
Shards = Callable[[int], list[Shard]]


def mlp(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 3)).to(dtype)


def shard(step: int, rank: int, dtype: torch.dtype = torch.float64) -> Shard:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(BATCH, 5, generator=generator, dtype=torch.float64).to(dtype)
    return rank, x, torch.randint(0, 3, (BATCH,), generator=generator)


def loss_of(model: Any, shards: list[Shard]) -> torch.Tensor:
    return sum(nn.functional.cross_entropy(model(x), y) for _, x, y in shards) / len(shards)


def flat(tensors: Any) -> torch.Tensor:
    return torch.cat([t.detach().double().reshape(-1) for t in tensors])


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def adagrad(model: nn.Module) -> torch.optim.Optimizer:
    """Which has states of its parameters before it steps."""
    return torch.optim.Adagrad(model.parameters(), lr=0.05, lr_decay=0.1, initial_accumulator_value=0.1)


def expect(error: type[BaseException], text: str, call: Callable[[], Any]) -> None:
    """``call`` must raise ``error`` with ``text`` in it."""
    said = None
    try:
        call()
    except error as caught:
        said = str(caught)
    assert said is not None, f"no {error.__name__}"
    assert text in said, said


@contextlib.contextmanager
def training(store: str, make: Any = mlp, optimizer: Any = sgd, rule: Any = None, **options: Any) -> Iterator[Any]:
    """A store that updates, by ``rule(store)`` or else the optimizer's, a model, and its optimizer."""
    with kvmpi.create(store) as kv:
        if rule is not None:
            kv.set_optimizer(rule(kv))
        model = make(kv.rank)
        update = True if rule is None else None
        options = {"update_on_kvstore": update, "bucket_bytes": 150, "overlap": True, **options}
        yield kv, model, DistributedOptimizer(optimizer(model), kv, model, **options)


def no_sync(optimizer: Any) -> Any:
    return optimizer.no_sync() if isinstance(optimizer, DistributedOptimizer) else contextlib.nullcontext()


def clients_of(kv: kvmpi.KVStore) -> list[list[int]]:
    """The ranks of the workers of each client."""
    if kv.num_clients == kv.num_workers:
        return [[rank] for rank in range(kv.num_workers)]
    return [list(range(*bounds)) for bounds in client_bounds(kv.num_workers, kv.num_clients)]


def same_in_all(
    kv: kvmpi.KVStore,
    loop: Callable[..., Any],
    make: Callable[[int], nn.Module] = mlp,
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd,
    get: Callable[[int, int], Any] = shard,
    tolerance: float = 1e-12,
    parameters_only: bool = False,
    alone: Callable[..., Any] | None = None,
    oracle: Callable[[int], nn.Module] | None = None,
    **options: Any,
) -> tuple[nn.Module, nn.Module]:
    """Run ``loop`` in all workers together, and it, or ``alone``, here alone; weights and what they return must
    be the same. ``oracle``: what makes the model here, if not ``make``."""
    plain, model = (oracle or make)(0), make(kv.rank)  # worker 0's weights count
    # Where tests run, all cores compute: by default nothing would leave during a backward.
    options = {"bucket_bytes": 150, "overlap": True, **options}
    given = model.named_parameters() if parameters_only else model
    distributed = DistributedOptimizer(optimizer(model), kv, given, **options)
    mine = loop(model, distributed, lambda step: [get(step, kv.rank)])
    distributed.synchronize()
    theirs = (alone or loop)(plain, optimizer(plain), lambda step: [get(step, rank) for rank in range(kv.num_workers)])
    difference = (flat(model.parameters()) - flat(plain.parameters())).abs().max()
    assert difference <= tolerance, f"{loop.__name__}: weights differ by {difference}"
    assert mine == theirs, f"{loop.__name__}: {mine}, expected {theirs}"
    distributed.detach()
    return model, plain


# ---- loops


def plain_steps(model: Any, optimizer: Any, shards: Shards, steps: int = STEPS) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, shards(step)).backward()
        optimizer.step()


@contextlib.contextmanager
def compiler_keeps_out() -> Iterator[None]:
    """What it says where it looks into what is not arithmetic of tensors is an error."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Dynamo does not know how to trace")
        yield


def compiled_steps(model: Any, optimizer: Any, shards: Shards) -> None:
    """All of a step is compiled together, with what the backward pass calls."""

    @torch.compile(backend="eager")
    def train(given: list[Shard]) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, given)
        loss.backward()
        optimizer.step()
        return loss.detach()

    with compiler_keeps_out():
        for step in range(STEPS):
            train(shards(step))


def gradients_in_place(model: Any, optimizer: Any, shards: Shards) -> None:
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        loss_of(model, shards(step)).backward()
        optimizer.step()


def zeroed_by_the_model(model: Any, optimizer: Any, shards: Shards) -> None:
    for step in range(STEPS):
        model.zero_grad()
        loss_of(model, shards(step)).backward()
        optimizer.step()


def schedules(model: Any, optimizer: Any, shards: Shards) -> list[float]:
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
    decay = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    rates = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, shards(step)).backward()
        optimizer.step()
        warm.step()
        decay.step()
        rates.append(optimizer.param_groups[-1]["lr"])
    return rates


def accumulation(model: Any, optimizer: Any, shards: Shards) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(2):
            with no_sync(optimizer):
                (loss_of(model, shards(100 * part + step)) / 3).backward()
        (loss_of(model, shards(200 + step)) / 3).backward()
        optimizer.step()


def accumulation_that_exchanges(model: Any, optimizer: Any, shards: Shards) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(3):
            loss_of(model, shards(100 * part + step)).backward()
        optimizer.step()


def only_without_sync(model: Any, optimizer: Any, shards: Shards) -> None:
    """The step exchanges what no backward has."""
    for step in range(STEPS):
        optimizer.zero_grad()
        with no_sync(optimizer):
            loss_of(model, shards(step)).backward()
        optimizer.step()


def clipping(model: Any, optimizer: Any, shards: Shards) -> list[float]:
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, shards(step)).backward()
        norms.append(round(nn.utils.clip_grad_norm_(model.parameters(), 0.1).item(), 10))
        optimizer.step()
    return norms


def closures(model: Any, optimizer: Any, shards: Shards) -> None:
    for step in range(STEPS):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, shards(step))
            loss.backward()
            return loss

        optimizer.step(closure)


def scaled(model: Any, optimizer: Any, shards: Shards) -> list[float]:
    """Worker 0's loss overflows in step 2: nobody steps, and all scale down."""
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
    scales = []
    for step in range(STEPS):
        optimizer.zero_grad()
        found = shards(step)
        loss = loss_of(model, found)
        if step == 2 and any(rank == 0 for rank, _, _ in found):
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        if step % 2:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


def autocast(model: Any, optimizer: Any, shards: Shards) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        for one in (found := shards(step)):  # by itself, since gradients of one cast weight add up in bfloat16
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(model, [one])
            loss.backward()
        if len(found) > 1:  # of the loss, a third would be rounded elsewhere on the way back
            for p in model.parameters():
                p.grad /= len(found)
        optimizer.step()


def set_by_hand(model: Any, optimizer: Any, shards: Shards) -> None:
    """After a backward that has left a parameter out, which gets a gradient that differs from worker to worker."""
    for step in range(STEPS):
        optimizer.zero_grad()
        found, last = shards(step), model[4]
        losses = [nn.functional.cross_entropy(model[:4](x) @ last.weight.t(), y) for _, x, y in found]
        (sum(losses) / len(found)).backward()
        if step % 3:
            last.bias.grad = sum(torch.full_like(last.bias, step + 2.0**rank) for rank, _, _ in found) / len(found)
        optimizer.step()


def all_by_hand(model: Any, optimizer: Any, shards: Shards) -> None:
    """Without a backward pass, and nothing is zeroed."""
    params = [*model.parameters()]
    for step in range(STEPS):
        for p, grad in zip(params, torch.autograd.grad(loss_of(model, shards(step)), params), strict=True):
            p.grad = grad
        optimizer.step()


def closures_by_hand(model: Any, optimizer: Any, shards: Shards) -> None:
    params = [*model.parameters()]
    for step in range(STEPS):

        def closure(step: int = step) -> torch.Tensor:
            loss = loss_of(model, shards(step))
            for p, grad in zip(params, torch.autograd.grad(loss, params), strict=True):
                p.grad = grad
            return loss.detach()

        optimizer.step(torch.enable_grad()(closure))


def one_has_failed(model: Any, optimizer: Any, shards: Shards) -> None:
    """A worker's backward fails at the loss, its program goes on, and steps with what the others have."""

    def fails(grad: torch.Tensor) -> None:
        raise MemoryError("no room")

    for step in range(STEPS):
        optimizer.zero_grad()
        found = shards(step)
        for one in found:
            loss = loss_of(model, [one]) / len(found)
            if (step, one[0]) in ((1, 1), (3, 0)):
                loss.register_hook(fails)
            try:
                loss.backward()
            except MemoryError:
                if isinstance(optimizer, DistributedOptimizer):
                    optimizer.synchronize(broken=True)
        optimizer.step()


def checkpointed(reentrant: bool) -> Callable[..., None]:
    def loop(model: Any, optimizer: Any, shards: Shards) -> None:
        for step in range(STEPS):
            optimizer.zero_grad()
            total: Any = 0.0
            for _, x, y in shards(step):
                hidden = torch.utils.checkpoint.checkpoint(model[:3], x.requires_grad_(), use_reentrant=reentrant)
                total = total + nn.functional.cross_entropy(model[3:](hidden), y)
            (total / len(shards(step))).backward()
            optimizer.step()

    return loop


# ---- a model that uses its parameters in all the ways that there are


class Winding(nn.Module):
    """``never`` is used by no worker, ``odd`` by workers of odd rank in even steps, ``late`` from step 3 on.

    ``first`` is frozen until step 2; ``shared`` stands in two places, and is used there and by itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.shared = nn.Linear(5, 5)
        self.again = self.shared
        self.tied = nn.Linear(5, 5, bias=False)
        self.tied.weight = self.shared.weight
        self.odd = nn.Linear(5, 5)
        self.late = nn.Linear(5, 5)
        self.never = nn.Linear(5, 5)
        self.last = nn.Linear(5, 3)
        self.first.requires_grad_(False)

    def forward(self, x: torch.Tensor, rank: int, step: int) -> torch.Tensor:
        x = self.first(x)
        x = self.again(torch.tanh(self.shared(x)))
        x = x + self.tied(x)
        if step >= 3:
            x = self.late(x)
        if step % 2 == 0 and rank % 2 == 1:
            x = x + self.odd(x)
        return self.last(torch.tanh(x))


def winding(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return Winding().double()


def winding_steps(model: Any, optimizer: Any, shards: Shards) -> list[list[str]]:
    """What has no gradient after a backward is the same as in one process."""
    missing = []
    for step in range(STEPS):
        if step == 2:
            model.first.requires_grad_(True)
        if step == 5:
            model.shared.requires_grad_(False)
        optimizer.zero_grad()
        found = shards(step)
        losses = [nn.functional.cross_entropy(model(x, rank, step), y) for rank, x, y in found]
        (sum(losses) / len(found)).backward()
        missing.append([name for name, p in model.named_parameters() if p.grad is None])
        optimizer.step()
    return missing


def freezing(which: Callable[[int], Any], steps: int = 12, set_to_none: bool = True) -> Callable[..., None]:
    """``which(step)`` of the layers of an ``mlp`` are trained in a step."""

    def loop(model: Any, optimizer: Any, shards: Shards) -> None:
        for step in range(steps):
            for layer in (0, 2, 4):
                model[layer].requires_grad_(layer in which(step))
            optimizer.zero_grad(set_to_none)
            loss_of(model, shards(step)).backward()
            optimizer.step()

    return loop


def other_layers_in_turn(model: Any, optimizer: Any, shards: Shards) -> list[float]:
    """All that was trained is frozen, and what was frozen is trained; gradients are clipped as those of all."""
    norms = []
    for step in range(STEPS):
        for layer in (0, 2, 4):
            model[layer].requires_grad_(layer == (4, 0, 2)[step % 3])
        optimizer.zero_grad()
        loss_of(model, shards(step)).backward()
        norms.append(round(nn.utils.clip_grad_norm_(model.parameters(), 0.1).item(), 10))
        optimizer.step()
    return norms


def one_in_turn(step: int) -> tuple[int, ...]:
    return (0, 2, 4) if step % 2 else (2, 4)


def all_sets_in_turn(step: int) -> tuple[int, ...]:
    """Of three layers there are seven that are not empty."""
    return tuple(layer for bit, layer in enumerate((0, 2, 4)) if (step % 7 + 1) >> bit & 1)


# ---- images


def convolutions(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    body = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=2), nn.BatchNorm2d(4),
        nn.Flatten(), nn.Linear(64, 3),
    )  # fmt: skip
    return body.double().to(memory_format=torch.channels_last)


def image_shard(step: int, rank: int) -> Shard:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(BATCH, 3, 6, 6, generator=generator, dtype=torch.float64)
    return rank, x.to(memory_format=torch.channels_last), torch.randint(0, 3, (BATCH,), generator=generator)


def statistics(policy: str, num_workers: int) -> list[torch.Tensor]:
    """What the buffers of ``convolutions`` are after ``plain_steps`` on images, computed with a model per worker."""
    plain = convolutions(0)
    optimizer, shards = sgd(plain), [[image_shard(step, rank) for rank in range(num_workers)] for step in range(STEPS)]
    current = [b.clone() for b in plain.buffers()]
    for step in range(STEPS):
        after = []
        for found in shards[step]:
            one = convolutions(0)
            one.load_state_dict(plain.state_dict())
            for buffer, value in zip(one.buffers(), current, strict=True):
                buffer.copy_(value)
            one(found[1])
            after.append([b.clone() for b in one.buffers()])
        if policy == "first":
            current = after[0]
        else:
            current = [sum(each).div(num_workers).to(each[0].dtype) for each in zip(*after, strict=True)]
        optimizer.zero_grad()
        loss_of(plain, shards[step]).backward()
        optimizer.step()
    return current
