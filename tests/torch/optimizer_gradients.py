"""Checks of ``DistributedOptimizer`` where gradients come back: all loops of optimizer_loops, and more."""

from __future__ import annotations

import tempfile
import unittest.mock
import warnings
import weakref
from pathlib import Path
from typing import Any

import optimizer_loops as loops
import torch
from optimizer_absences import without_a_batch
from optimizer_buffers import (
    compressed,
    compressed_in_other_buckets,
    converted_statistics,
    half_statistics,
    images,
    odd_buffers,
    other_buffers,
    scripted,
)
from optimizer_loops import (
    STEPS,
    Winding,
    adamw,
    convolutions,
    expect,
    flat,
    image_shard,
    loss_of,
    mlp,
    plain_steps,
    same_in_all,
    sgd,
    shard,
    winding,
    winding_steps,
)
from torch import nn

import kvmpi
from kvmpi.config import Config
from kvmpi.errors import ConfigError, KVError
from kvmpi.torch import DiLoCo, DistributedOptimizer, Trainer


def every_loop(kv: kvmpi.KVStore) -> None:
    """A backward pass inside another one, for which torch reads its compiler, is the same with servers."""
    inner = (loops.checkpointed(True),) if kv.type == "mpi" else ()
    for loop in (plain_steps, loops.gradients_in_place, loops.zeroed_by_the_model, loops.schedules, loops.accumulation,
                 loops.accumulation_that_exchanges, loops.only_without_sync, loops.clipping, loops.closures,
                 loops.scaled, loops.checkpointed(False), *inner, loops.set_by_hand,
                 loops.all_by_hand, loops.one_has_failed):  # fmt: skip
        same_in_all(kv, loop)
    same_in_all(kv, plain_steps, optimizer=adamw, parameters_only=True, overlap=False)


def parameter_groups(kv: kvmpi.KVStore) -> None:
    def groups(model: Any) -> torch.optim.Optimizer:
        decayed = [p for p in model.parameters() if p.dim() > 1]
        rest = [p for p in model.parameters() if p.dim() == 1]
        return torch.optim.AdamW([{"params": rest, "lr": 0.02, "weight_decay": 0.0}, {"params": decayed}], lr=0.01)

    same_in_all(kv, loops.schedules, optimizer=groups)


def groups_that_are_added(kv: kvmpi.KVStore) -> None:
    def loop(model: Any, optimizer: Any, shards: Any) -> None:
        plain_steps(model, optimizer, shards)
        model[0].requires_grad_(True)
        optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.3})
        plain_steps(model, optimizer, shards)

    def make(seed: int) -> nn.Module:
        model = mlp(seed)
        model[0].requires_grad_(False)
        return model

    same_in_all(kv, loop, make=make, optimizer=lambda m: torch.optim.SGD(m[2:].parameters(), lr=0.1, momentum=0.9))
    # Statistics of layers that were not there before are exchanged as well.
    model = mlp(kv.rank)
    optimizer = DistributedOptimizer(sgd(model), kv, model)
    plain_steps(model, optimizer, lambda step: [shard(step, kv.rank)], 1)
    torch.manual_seed(kv.rank)
    model[3] = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 6)).double()
    model[3].register_buffer("constant", torch.randn(4))
    model[3][1].requires_grad_(False)
    optimizer.add_param_group({"params": model[3][0].parameters()})
    begun = flat([*model[3][1].parameters(), model[3].constant])
    first = begun.clone()
    kv.broadcast(kv.keys[-1] + 1, first, first)
    assert torch.equal(begun, first), "what is not trained of new layers begins alike"
    plain_steps(model, optimizer, lambda step: [shard(step, kv.rank)])
    mine = flat(model.buffers())
    first = mine.clone()
    kv.broadcast(kv.keys[-1] + 1, first, first)
    assert torch.equal(mine, first), f"{mine}, on worker 0 {first}"
    optimizer.detach()


def half_types(kv: kvmpi.KVStore) -> None:
    def single(step: int, rank: int) -> Any:
        return shard(step, rank, torch.float32)

    same_in_all(kv, loops.autocast, make=lambda s: mlp(s, torch.float32), get=single, tolerance=1e-5)
    same_in_all(kv, loops.scaled, make=lambda s: mlp(s, torch.float32), get=single, tolerance=1e-5,
                optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1, fused=True))  # fmt: skip

    def mixed(seed: int) -> nn.Module:
        model = mlp(seed, torch.bfloat16)
        model[2].float()
        return model

    def loop(model: Any, optimizer: Any, shards: Any) -> None:
        for step in range(2):
            optimizer.zero_grad()
            for _, x, y in shards(step):
                x = model[1](model[0](x)).float()
                loss = nn.functional.cross_entropy(model[4](torch.tanh(model[2](x)).bfloat16()).float(), y)
                (loss / len(shards(step))).backward()
            optimizer.step()

    def sgd_once(model: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    same_in_all(kv, loop, make=mixed, optimizer=sgd_once, tolerance=0.01, get=lambda s, r: shard(s, r, torch.bfloat16))


def graphs_that_change(kv: kvmpi.KVStore) -> None:
    # AdamW moves what has a gradient of zero, and leaves alone what has none.
    model, _ = same_in_all(kv, winding_steps, make=winding, optimizer=adamw)
    assert isinstance(model, Winding)


def frozen_in_turn(kv: kvmpi.KVStore) -> None:
    """Keys and memory do not grow with the number of times, and gradients of what is frozen stay what they are."""

    def last_alone(seed: int) -> nn.Module:
        model = mlp(seed)
        model[:4].requires_grad_(False)
        return model

    same_in_all(kv, loops.other_layers_in_turn, make=last_alone)
    made, empty = [], kv.empty

    def counted(*arguments: Any, **options: Any) -> Any:
        made.append(arguments)
        return empty(*arguments, **options)

    kv.empty = counted
    for which in (loops.one_in_turn, loops.all_sets_in_turn):
        for in_place in (False, True):
            found = []
            for steps in (8, 22):  # seven sets of layers
                keys, blocks = len(kv.keys), len(made)
                same_in_all(
                    kv, loops.freezing(which, steps, set_to_none=not in_place), bucket_bytes=10**6, overlap=True
                )
                same_in_all(kv, loops.freezing(which, steps, set_to_none=not in_place), overlap=False)
                found.append((len(kv.keys) - keys, len(made) - blocks))
            assert found[0] == found[1], f"{which.__name__}: {found} keys and blocks"
    kv.empty = empty


def converted(kv: kvmpi.KVStore) -> None:
    """After ``model.to``, gradients of the new dtype are exchanged; also there and back, which moves ``p.grad``."""

    def loop(model: Any, optimizer: Any, shards: Any) -> None:
        plain_steps(model, optimizer, shards, 2)
        model.float()
        model.double()
        for p in model.parameters():
            p.grad.mul_(3.0)
        optimizer.step()  # with these gradients, and not with what the block still has
        plain_steps(model, optimizer, shards, 2)
        model.float()
        single = [lambda step, first=first: [(r, x.float(), y) for r, x, y in shards(first + step)] for first in (2, 4)]
        loops.gradients_in_place(model, optimizer, single[0])
        model[2].requires_grad_(False)
        plain_steps(model, optimizer, single[1], 2)

    for parts in (1, 10**6):
        sgd_once = lambda m: torch.optim.SGD(m.parameters(), lr=0.1)  # noqa: E731
        same_in_all(kv, loop, optimizer=sgd_once, tolerance=1e-5, bucket_bytes=parts)


def no_copies(kv: kvmpi.KVStore) -> None:
    """The gradients of a bucket lie end to end in one block, which is what the store gets, and stay there."""
    model = mlp(kv.rank)
    optimizer = DistributedOptimizer(sgd(model), kv, model, bucket_bytes=400)
    plain_steps(model, optimizer, lambda step: [shard(step, kv.rank)], 2)
    places = {name: p.grad.data_ptr() for name, p in model.named_parameters()}
    plain_steps(model, optimizer, lambda step: [shard(step, kv.rank)], 2)
    assert places == {name: p.grad.data_ptr() for name, p in model.named_parameters()}
    for bucket in optimizer._exchange._buckets:
        start = bucket.blocks[0].data_ptr()
        assert bucket.blocks[0].numel() == sum(bucket.grads[i].numel() for i in bucket.indices)
        for i in bucket.indices:
            assert optimizer._params.tensors[i].grad.data_ptr() == bucket.arrays[i].data_ptr() == start
            start += bucket.grads[i].numel() * 8
    optimizer.detach()


def summed_where_they_are(kv: kvmpi.KVStore) -> None:
    """Large gradients stay where autograd has made them, small ones lie in a block; unless all are to stay."""
    for overlap in (True, False):
        model, plain, made = mlp(kv.rank), mlp(0), dict[str, int]()
        for name, p in model.named_parameters():
            p.register_post_accumulate_grad_hook(lambda p, name=name, made=made: made.update({name: p.grad.data_ptr()}))
        optimizer = DistributedOptimizer(sgd(model), kv, model, bucket_bytes=400, overlap=overlap)
        plain_steps(model, optimizer, lambda step: [shard(step, kv.rank)])
        plain_steps(plain, sgd(plain), lambda step: [shard(step, rank) for rank in range(kv.num_workers)])
        assert (flat(model.parameters()) - flat(plain.parameters())).abs().max() < 1e-12
        for name, p in model.named_parameters():
            assert (p.grad.data_ptr() == made[name]) == (p.numel() * 8 >= 100), name
        loops.gradients_in_place(model, optimizer, lambda step: [shard(step, kv.rank)])
        places = {name: p.grad.data_ptr() for name, p in model.named_parameters()}
        loops.gradients_in_place(model, optimizer, lambda step: [shard(step, kv.rank)])
        assert places == made == {name: p.grad.data_ptr() for name, p in model.named_parameters()}
        buckets = optimizer._exchange._buckets
        kept = {i: grad.data_ptr() for bucket in buckets for i, grad in bucket._kept.items()}
        large = [i for i, p in enumerate(optimizer._params.tensors) if p.numel() * 8 >= 100]
        assert kept == {i: optimizer._params.tensors[i].grad.data_ptr() for i in large}, "not in memory of kv.empty"
        optimizer.detach()


def gradients_that_others_hold(kv: kvmpi.KVStore) -> None:
    """What has a graph, is the gradient of two, or has gaps, is copied before it is summed."""
    model, plain = mlp(kv.rank), mlp(0)
    optimizer = DistributedOptimizer(sgd(model), kv, model, overlap=False)
    graphs = []

    def backward(model: Any, ranks: Any, kept: bool) -> None:
        loss_of(model, [shard(0, rank) for rank in ranks]).backward(create_graph=kept)

    with warnings.catch_warnings(record=True) as caught:  # and torch's, of a cycle of references
        warnings.simplefilter("always")
        model[0].weight.register_post_accumulate_grad_hook(lambda p: graphs.append((p.grad, p.grad.detach().clone())))
        backward(model, [kv.rank], True)
        backward(plain, range(kv.num_workers), True)
    assert sum("have no graph" in str(warning.message) for warning in caught) == 1, caught
    ((graph, before),) = graphs
    assert graph.requires_grad, "the test is to be of a graph"
    assert torch.equal(graph, before), "a gradient that has a graph was changed"
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad.detach(), atol=1e-13, rtol=0)
        mine.grad = theirs.grad = None
    optimizer.detach()
    held = [nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in ((7, 5), (7, 5), (6, 7))]
    shared = torch.full((7, 5), 1.0 + kv.rank, dtype=torch.float64)
    gaps = torch.full((6, 14), 2.0 + kv.rank, dtype=torch.float64)[:, ::2]
    for overlap in (True, False):
        optimizer = DistributedOptimizer(
            torch.optim.SGD(held, lr=1.0), kv, bucket_bytes=1, overlap=overlap, average=False
        )
        for p, grad in zip(held, (shared.clone(),) * 2 + (gaps,), strict=True):
            p.grad = grad
        optimizer.step()
        for p, value in zip(held, (1.0, 1.0, 2.0), strict=True):
            assert torch.equal(p.grad, torch.full_like(p, sum(value + rank for rank in range(kv.num_workers)))), p.grad
        assert torch.equal(gaps, torch.full_like(gaps, 2.0 + kv.rank))
        optimizer.detach()
    for a, b in ((0, 1), (1, 0)):  # of one the other leaves first, when it is still to come
        held = [nn.Parameter(torch.zeros(7, 5, dtype=torch.float64)) for _ in range(2)]
        optimizer = DistributedOptimizer(torch.optim.SGD(held), kv, bucket_bytes=1, overlap=True)
        loss = ((held[a].unsqueeze(0) + held[b].unsqueeze(0)) * (1.0 + kv.rank)).sum()
        if a == 0:
            expect(ConfigError, "shares its memory with another", loss.backward)
            optimizer._exchange.close()  # nor can the rest of the pass be made good
        else:
            loss.backward()
            mean = sum(1.0 + rank for rank in range(kv.num_workers)) / kv.num_workers
            assert all(torch.equal(p.grad, torch.full_like(p, mean)) for p in held)
            optimizer.detach()


def nothing_leaves_without_sync(kv: kvmpi.KVStore) -> None:
    model, alone = mlp(0), mlp(0)
    optimizer = DistributedOptimizer(sgd(model), kv, model)
    for step in range(2):
        with optimizer.no_sync():
            loss_of(model, [shard(step, kv.rank)]).backward()
        loss_of(alone, [shard(step, kv.rank)]).backward()
        assert torch.equal(flat(p.grad for p in model.parameters()), flat(p.grad for p in alone.parameters()))
    optimizer.step()
    optimizer.detach()


def order_of_the_first_worker(kv: kvmpi.KVStore) -> None:
    """Layers run in another order in each worker; all plan by worker 0's."""

    class Scattered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(5, 5) for _ in range(4)])

        def forward(self, x: torch.Tensor, order: list[int]) -> torch.Tensor:
            for i in order:
                x = self.layers[i](x)
            return x

    model = Scattered().double()
    optimizer = DistributedOptimizer(sgd(model), kv, model, bucket_bytes=1)
    mine = [2, 0, 3, 1] if kv.rank == 0 else [0, 1, 2, 3]
    for step in range(3):
        optimizer.zero_grad()
        model(shard(step, kv.rank)[1], mine).sum().backward()
        optimizer.step()
    planned = [bucket.indices[0] // 2 for bucket in optimizer._exchange._buckets]
    assert list(dict.fromkeys(planned)) == [1, 3, 0, 2], planned
    optimizer.detach()


def compiled(kv: kvmpi.KVStore) -> None:
    def make(seed: int) -> Any:
        return torch.compile(mlp(seed), backend="aot_eager")

    same_in_all(kv, plain_steps, make=make, oracle=mlp)
    same_in_all(kv, loops.compiled_steps, alone=plain_steps)  # a compiler takes longer than all that it compiles


def detached_in_place(kv: kvmpi.KVStore) -> None:
    """As loops of older days set gradients to zero."""

    def loop(model: Any, optimizer: Any, shards: Any) -> None:
        for step in range(STEPS):
            for p in model.parameters():
                if p.grad is not None:
                    p.grad.detach_().zero_()
            loss_of(model, shards(step)).backward()
            optimizer.step()

    same_in_all(kv, loop)


def hooks_of_the_user(kv: kvmpi.KVStore) -> None:
    """What they do before gradients leave counts; on the way it would differ between workers."""

    def halve(p: torch.Tensor) -> None:
        p.grad.mul_(0.5)

    def listening(model: nn.Module) -> nn.Module:
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(halve)
        return model

    same_in_all(kv, plain_steps, make=lambda seed: listening(mlp(seed)))
    same_in_all(kv, lambda model, *rest: plain_steps(listening(model), *rest), overlap=False)
    model = mlp(kv.rank)
    optimizer = DistributedOptimizer(sgd(model), kv, model, bucket_bytes=150, overlap=True)
    listening(model)
    expect(ConfigError, "was changed during the backward pass", loss_of(model, [shard(0, kv.rank)]).backward)
    optimizer.detach()


def resumed(kv: kvmpi.KVStore) -> None:
    """Saved in the middle by worker 0 alone, loaded by all into other models."""

    def start(seed: int, given: Any = None) -> Any:
        model = mlp(seed)
        if given:
            model.load_state_dict(given["model"])
        optimizer = DistributedOptimizer(adamw(model), kv, model)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
        if given:
            optimizer.load_state_dict(given["optimizer"])
            schedule.load_state_dict(given["schedule"])
        return model, optimizer, schedule

    def steps(model: Any, optimizer: Any, schedule: Any, first: int, last: int, ranks: range) -> None:
        for step in range(first, last):
            optimizer.zero_grad()
            loss_of(model, [shard(step, rank) for rank in ranks]).backward()
            optimizer.step()
            schedule.step()

    own = range(kv.rank, kv.rank + 1)
    model, optimizer, schedule = start(kv.rank)
    steps(model, optimizer, schedule, 0, 3, own)
    path = Path(tempfile.gettempdir()) / f"kvmpi-test-{Config.from_env().job_id}-{kv.type}"
    if kv.rank == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
        torch.save(state, path)
    kv.barrier()
    optimizer.detach()
    state = torch.load(path, weights_only=True)
    kv.barrier()
    path.unlink(missing_ok=True)
    model, optimizer, schedule = start(kv.rank + 7, state)
    steps(model, optimizer, schedule, 3, STEPS, own)
    optimizer.detach()
    plain = mlp(0)
    plain_optimizer = adamw(plain)
    steps(plain, plain_optimizer, torch.optim.lr_scheduler.ExponentialLR(plain_optimizer, 0.7), 0, STEPS,
          range(kv.num_workers))  # fmt: skip
    assert (flat(model.parameters()) - flat(plain.parameters())).abs().max() < 1e-12


def two_optimizers(kv: kvmpi.KVStore) -> None:
    def loop(model: Any, optimizers: Any, shards: Any) -> None:
        for step in range(STEPS):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss_of(model, shards(step)).backward()
            for optimizer in optimizers:
                optimizer.step()

    plain, model = mlp(0), mlp(kv.rank)
    own = [torch.optim.SGD(model[:2].parameters(), lr=0.1), torch.optim.AdamW(model[2:].parameters(), lr=0.01)]
    both = [DistributedOptimizer(optimizer, kv, model) for optimizer in own]
    loop(model, both, lambda step: [shard(step, kv.rank)])
    theirs = [torch.optim.SGD(plain[:2].parameters(), lr=0.1), torch.optim.AdamW(plain[2:].parameters(), lr=0.01)]
    loop(plain, theirs, lambda step: [shard(step, rank) for rank in range(kv.num_workers)])
    assert (flat(model.parameters()) - flat(plain.parameters())).abs().max() < 1e-12
    for optimizer in both:
        optimizer.detach()


def sums(kv: kvmpi.KVStore) -> None:
    """Without ``average`` gradients are sums, and cannot be added to."""

    def scaled_sgd(model: Any) -> torch.optim.Optimizer:
        mine = 0.1 / kv.num_workers if isinstance(model, _Mine) else 0.1
        return torch.optim.SGD(model.parameters(), lr=mine)

    class _Mine(nn.Sequential):
        pass

    plain, model = mlp(0), _Mine(*mlp(kv.rank))
    optimizer = DistributedOptimizer(scaled_sgd(model), kv, model, average=False)
    for loop in (plain_steps, loops.all_by_hand):
        loop(model, optimizer, lambda step: [shard(step, kv.rank)])
        loop(plain, scaled_sgd(plain), lambda step: [shard(step, rank) for rank in range(kv.num_workers)])
        assert (flat(model.parameters()) - flat(plain.parameters())).abs().max() < 1e-12, loop.__name__
    optimizer.zero_grad()
    loss_of(model, [shard(0, kv.rank)]).backward()
    expect(ConfigError, "a second backward", lambda: loss_of(model, [shard(0, kv.rank)]).backward())
    optimizer.zero_grad()
    model[:2](shard(0, kv.rank)[1]).sum().backward()
    model[4].bias.grad = torch.ones_like(model[4].bias)
    expect(ConfigError, "the gradient of 4.bias was set after the backward pass", optimizer.step)
    optimizer.detach()


def after_an_error(kv: kvmpi.KVStore) -> None:
    """One worker's backward breaks off in the middle; it synchronises, and all go on."""

    class Breaks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            raise MemoryError("no room")

    model, plain = mlp(kv.rank), mlp(0)
    optimizer, plain_optimizer = DistributedOptimizer(sgd(model), kv, model, bucket_bytes=1), sgd(plain)
    for step in range(4):
        optimizer.zero_grad()
        _, x, y = shard(step, kv.rank)
        hidden = model[:3](x)
        if step == 2 and kv.rank == 1:
            hidden = Breaks.apply(hidden)
        loss = nn.functional.cross_entropy(model[3:](hidden), y)
        try:
            loss.backward()
        except MemoryError:
            optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        plain_optimizer.zero_grad()
        for rank in range(kv.num_workers):
            _, x, y = shard(step, rank)
            hidden = plain[:3](x)
            hidden = hidden.detach() if step == 2 and rank == 1 else hidden
            (nn.functional.cross_entropy(plain[3:](hidden), y) / kv.num_workers).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        plain_optimizer.step()
    assert (flat(model.parameters()) - flat(plain.parameters())).abs().max() < 1e-12
    optimizer.detach()

    def again(x: torch.Tensor) -> Any:
        return torch.utils.checkpoint.checkpoint(model[0], x, use_reentrant=True)

    model = mlp(kv.rank)
    optimizer = DistributedOptimizer(sgd(model), kv, model)
    x = shard(0, kv.rank)[1].requires_grad_()
    expect(KVError, "use_reentrant=False", model[1:](again(x) + again(2 * x)).sum().backward)
    optimizer.synchronize(broken=True)
    optimizer.detach()


def before_any_gradient(kv: kvmpi.KVStore) -> None:
    """A backward that fails at the loss has come to no parameter: who says so takes part, who does not is found out."""

    def fails(grad: torch.Tensor) -> None:
        raise MemoryError("no room")

    model, plain = mlp(kv.rank), mlp(0)
    optimizer, plain_optimizer = DistributedOptimizer(sgd(model), kv, model, bucket_bytes=1), sgd(plain)
    for step, failing in ((0, ()), (1, (1,)), (2, range(kv.num_workers)), (3, ())):
        optimizer.zero_grad()
        loss, failed = loss_of(model, [shard(step, kv.rank)]), False
        if kv.rank in failing:
            loss.register_hook(fails)
        try:
            loss.backward()
        except MemoryError:
            failed = True
        if failing:
            optimizer.synchronize(broken=failed)
            continue
        optimizer.step()
        plain_steps(plain, plain_optimizer, lambda at, s=step: [shard(s, r) for r in range(kv.num_workers)], 1)  # type: ignore[misc]
    assert (flat(model.parameters()) - flat(plain.parameters())).abs().max() < 1e-12
    optimizer.detach()


def summed_with_other_passes(kv: kvmpi.KVStore) -> None:
    """Workers that make different numbers of passes in a step would go on with sums of different steps."""
    model = mlp(0)
    optimizer = DistributedOptimizer(sgd(model), kv, model, bucket_bytes=1)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, [shard(step, kv.rank)]).backward()
        optimizer.step()
    optimizer.zero_grad()
    loss_of(model, [shard(2, kv.rank)]).backward()
    if kv.rank == 0:
        expect(KVError, "in step 3, were summed", lambda: loss_of(model, [shard(2, kv.rank)]).backward())
    else:
        optimizer.step()
        optimizer.zero_grad()
        expect(KVError, "in step 4, were summed", lambda: loss_of(model, [shard(3, kv.rank)]).backward())
    optimizer.synchronize()
    # A backward that has gone through is not broken: to say so makes a pass that others take for their next.
    model = mlp(0)
    optimizer = DistributedOptimizer(sgd(model), kv, model, bucket_bytes=1)
    loss_of(model, [shard(0, kv.rank)]).backward()
    if kv.rank == 0:
        expect(KVError, "in step 1, were summed", lambda: optimizer.synchronize(broken=True))
    else:
        optimizer.step()
        expect(KVError, "in step 2, were summed", lambda: loss_of(model, [shard(1, kv.rank)]).backward())
    # A worker that zeroes gradients before a step has left out a pass, if it has made any.
    for paused in (True, False):
        model = mlp(0)
        optimizer = DistributedOptimizer(sgd(model), kv, model, bucket_bytes=1)
        if paused and kv.rank == 0:
            with optimizer.no_sync():
                loss_of(model, [shard(1, 0)]).backward()
        elif not paused:
            loss_of(model, [shard(1, kv.rank)]).backward()
        if kv.rank == 0:
            optimizer.zero_grad()
        expect(KVError, "synchronize(broken=True)", lambda: loss_of(model, [shard(2, kv.rank)]).backward())  # noqa: B023
    # To zero what is there already is nothing.
    model = mlp(0)
    optimizer = DistributedOptimizer(sgd(model), kv, model, bucket_bytes=1)
    for step in range(2):
        for _ in range(1 + (kv.rank == 0)):
            optimizer.zero_grad()
        loss_of(model, [shard(step, kv.rank)]).backward()
        optimizer.step()
        for _ in range(kv.rank):
            optimizer.zero_grad()
    # Who has no batch, and only steps, need not have zeroed anything.
    model = mlp(0)
    optimizer = DistributedOptimizer(sgd(model), kv, model, bucket_bytes=1)
    for step in range(4):
        if step % 2 == 0 or kv.rank == 0:
            optimizer.zero_grad()
            loss_of(model, [shard(step, kv.rank)]).backward()
        optimizer.step()
    optimizer.detach()


def forks(kv: kvmpi.KVStore) -> None:
    """A DataLoader that forks is a warning, once, where the loop asks for it; only if there is MPI, and for all."""

    def distributed(model: nn.Module, own: kvmpi.KVStore) -> None:
        DistributedOptimizer(sgd(model), own, model)

    def trainer(model: nn.Module, own: kvmpi.KVStore) -> None:
        Trainer(model.parameters(), sgd(model), own)

    def averaging(model: nn.Module, own: kvmpi.KVStore) -> None:
        DiLoCo(model.parameters(), own)

    for make in (distributed, trainer, averaging):
        found = []
        with (
            kvmpi.create(kv.type) as own,
            unittest.mock.patch.multiple("kvmpi.torch.forks", _warned=False, _speakers=weakref.WeakSet()),
        ):
            make(mlp(0), own)
            for _ in range(2):
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    assert sum(map(float, torch.utils.data.DataLoader([1.0, 2.0], num_workers=1))) == 3.0
                found += [w for w in caught if w.category is RuntimeWarning]
        assert len(found) == (kv.mpi_size > 1), (make, [str(w.message) for w in found])
        for warning in found:
            assert "multiprocessing_context='forkserver'" in str(warning.message)
            assert warning.filename == __file__, warning.filename


def uneven_batches(kv: kvmpi.KVStore) -> None:
    """The workers with the most batches have what one process has; who has none contributes zeros to every mean.

    The last check of a store.
    """
    batches = [2, 5] if kv.num_workers == 2 else [5, 0, 3, 5]
    model, plain = convolutions(kv.rank), convolutions(0)
    optimizer, plain_optimizer = DistributedOptimizer(sgd(model), kv, model, bucket_bytes=1), sgd(plain)
    for step in range(batches[kv.rank]):
        optimizer.zero_grad()
        loss_of(model, [image_shard(step, kv.rank)]).backward()
        optimizer.step()
    optimizer.join()
    for step in range(max(batches)):
        plain_optimizer.zero_grad()
        for rank in range(kv.num_workers):
            if batches[rank] > step:
                (loss_of(plain, [image_shard(step, rank)]) / kv.num_workers).backward()
        plain_optimizer.step()
    if batches[kv.rank] == max(batches):
        assert (flat(model.parameters()) - flat(plain.parameters())).abs().max() < 1e-12, f"{kv.type}, {batches}"
        assert flat(model.buffers()).abs().min() > 0


def line_searches(kv: kvmpi.KVStore) -> None:
    """All go on and end by the same losses."""

    def lbfgs(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(model.parameters(), max_iter=6, line_search_fn="strong_wolfe")

    for loop in (loops.closures, loops.closures_by_hand):
        same_in_all(kv, loop, optimizer=lbfgs, tolerance=1e-6)


def graphs_that_are_there_before(kv: kvmpi.KVStore) -> None:
    """Both losses are computed before the first backward, whose running statistics are exchanged."""

    def two_losses(model: Any, optimizer: Any, shards: Any) -> None:
        for step in range(STEPS):
            optimizer.zero_grad()
            first, second = loss_of(model, shards(2 * step)), loss_of(model, shards(2 * step + 1))
            first.backward()
            second.backward()
            optimizer.step()

    same_in_all(kv, two_losses, make=convolutions, get=image_shard)


def sums_twice(kv: kvmpi.KVStore) -> None:
    """A second step with the same gradients, which are sums over all workers: they stay what they are."""
    plain, model = mlp(0), mlp(kv.rank)
    reference = sgd(plain)
    optimizer = DistributedOptimizer(sgd(model), kv, model, average=False, bucket_bytes=150, overlap=True)
    for step in range(STEPS):
        reference.zero_grad()
        for rank in range(kv.num_workers):
            loss_of(plain, [shard(step, rank)]).backward()
        optimizer.zero_grad()
        loss_of(model, [shard(step, kv.rank)]).backward()
        for _ in range(2):
            reference.step()
            optimizer.step()
    assert (flat(model.parameters()) - flat(plain.parameters())).abs().max() < 1e-12
    loss_of(model, [shard(STEPS, kv.rank)]).backward()
    expect(
        ConfigError,
        "after optimizer.step",
        lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]}),
    )


def other_devices_by_default(kv: kvmpi.KVStore) -> None:
    """A program that has called ``torch.set_default_device`` names no device; what travels is the host's."""
    shards = [[shard(step, rank) for rank in range(kv.num_workers)] for step in range(STEPS)]
    plain, model = mlp(0), mlp(kv.rank)
    loops.closures(plain, sgd(plain), lambda step: shards[step])
    with torch.device("meta"):
        optimizer = DistributedOptimizer(sgd(model), kv, model, bucket_bytes=150, overlap=True)
        loops.closures(model, optimizer, lambda step: [shards[step][kv.rank]])
    difference = (flat(model.parameters()) - flat(plain.parameters())).abs().max()
    assert difference < 1e-12, f"weights differ by {difference}"
    optimizer.detach()


#: Where weights of 100 bytes are large.
DIRECT_CHECKS = (summed_where_they_are, gradients_that_others_hold)
CHECKS = (
    every_loop, parameter_groups, groups_that_are_added, half_types, graphs_that_change, frozen_in_turn, converted,
    images, odd_buffers, other_buffers, scripted, compressed, compressed_in_other_buckets, no_copies, compiled,
    nothing_leaves_without_sync,
    order_of_the_first_worker, detached_in_place, hooks_of_the_user, converted_statistics, half_statistics, resumed,
    two_optimizers, sums, after_an_error,
    before_any_gradient, summed_with_other_passes, forks, line_searches, graphs_that_are_there_before,
    sums_twice, other_devices_by_default, without_a_batch, uneven_batches,
)  # fmt: skip
