"""Checks of ``DistributedOptimizer(push="step")``: between backward and step gradients are the loop's, on any store."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import optimizer_loops as loops
import torch
from optimizer_buffers import other_buffers, scripted
from optimizer_loops import (
    STEPS,
    adamw,
    clients_of,
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
from kvmpi import optim
from kvmpi.config import Config
from kvmpi.errors import ConfigError
from kvmpi.torch import DistributedOptimizer

MOST = 0.1  # what norms are clipped at


training = partial(loops.training, push="step")


# ---- one client: as one process


def rates_at_the_last_moment(model: Any, optimizer: Any, shards: Any) -> None:
    """Options that are written between backward and step count in this step."""
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, shards(step)).backward()
        for group in optimizer.param_groups:
            group["lr"] = 0.3 / (step + 1)
        optimizer.step()


def zeroed_by_hand(model: Any, optimizer: Any, shards: Any) -> None:
    """Right after the step, when what has left may be under way."""
    for step in range(STEPS):
        loss_of(model, shards(step)).backward()
        optimizer.step()
        for p in model.parameters():
            p.grad.zero_()


def left_out(model: Any, optimizer: Any, shards: Any) -> None:
    """The loop catches an error between backward and step, and goes on with the next batch; or steps twice."""
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, shards(step)).backward()
        try:
            if step == 2:
                raise ArithmeticError("the loss does not look well")
            optimizer.step()
        except ArithmeticError:
            continue
        if step == 4:
            optimizer.step()


def added_to(model: Any, optimizer: Any, shards: Any) -> list[float]:
    """Other tensors in the place of gradients, none at all, and noise."""
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, shards(step)).backward()
        model[0].weight.grad = model[0].weight.grad + 0.01
        model[2].weight.grad = model[2].weight.grad.t().contiguous().t() * 2
        model[4].bias.grad.add_(0.5)
        if step % 2:
            model[0].bias.grad = None
        norms.append(round(nn.utils.clip_grad_norm_(model.parameters(), MOST).item(), 10))
        optimizer.step()
    return norms


def clipped_after_accumulation(model: Any, optimizer: Any, shards: Any) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        with loops.no_sync(optimizer):
            (loss_of(model, shards(100 + step)) / 2).backward()
        (loss_of(model, shards(step)) / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), MOST)
        optimizer.step()


def with_a_penalty(model: Any, optimizer: Any, shards: Any) -> None:
    """On the gradient of the input; then a second loss goes back through the same graph."""
    for step in range(STEPS):
        optimizer.zero_grad()
        total: Any = 0.0
        for _, x, y in (found := shards(step)):
            out = model(x.requires_grad_())
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            total = total + (nn.functional.cross_entropy(out, y) + slope.square().sum()) / len(found)
        total.backward(retain_graph=True)
        (0.5 * total).backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.05)
        optimizer.step()


def zeroed_before_the_step(model: Any, optimizer: Any, shards: Any) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, shards(step)).backward()
        if step == 2:
            optimizer.zero_grad()
        optimizer.step()


EVERY_LOOP = (
    plain_steps, loops.gradients_in_place, loops.zeroed_by_the_model, loops.schedules, loops.accumulation,
    loops.accumulation_that_exchanges, loops.only_without_sync, loops.clipping, loops.closures, loops.scaled,
    loops.checkpointed(True), with_a_penalty, zeroed_before_the_step,
    rates_at_the_last_moment, zeroed_by_hand, left_out, added_to, clipped_after_accumulation,
    loops.set_by_hand, loops.one_has_failed,
)  # fmt: skip


#: Those that tell something of where weights are updated: in a server, or in the worker that has a share.
SOME_LOOPS = (
    plain_steps, loops.schedules, loops.accumulation, loops.clipping, loops.scaled, zeroed_by_hand, left_out,
    loops.set_by_hand, loops.one_has_failed,
)  # fmt: skip


def as_one_process(store: str, chosen: Any = EVERY_LOOP) -> None:
    """One client: whatever a loop does with its gradients, also by default of those that overlap or are large."""
    for number, loop in enumerate(EVERY_LOOP):
        if loop not in chosen:
            continue
        with kvmpi.create(store) as kv:
            options: dict[str, Any] = {"push": "step", "update_on_kvstore": True, "overlap": bool(number % 2)}
            same_in_all(kv, loop, parameters_only=number % 3 == 0, **options)
    with kvmpi.create(store) as kv:
        if not kv.is_capable("async") and kv.num_clients == 1:  # where gradients come back it makes no difference
            same_in_all(kv, loops.clipping, push="step")


def some_as_one_process(store: str) -> None:
    as_one_process(store, SOME_LOOPS)


def models_as_in_one_process(store: str) -> None:
    """What nobody has used has no gradient, and does not move; statistics; layers that are frozen; half types."""

    with kvmpi.create(store) as kv:
        same_in_all(kv, winding_steps, make=winding, optimizer=adamw, push="step", update_on_kvstore=True)
    with kvmpi.create(store) as kv:
        same_in_all(kv, plain_steps, make=convolutions, get=image_shard, push="step", update_on_kvstore=True)
    for which in (loops.one_in_turn, loops.all_sets_in_turn):
        with kvmpi.create(store) as kv:
            same_in_all(kv, loops.freezing(which), push="step", update_on_kvstore=True)
    with kvmpi.create(store) as kv:

        def single(step: int, rank: int) -> Any:
            return shard(step, rank, torch.float32)

        made: dict[str, Any] = {"make": lambda seed: mlp(seed, torch.float32), "get": single, "tolerance": 1e-5}
        same_in_all(kv, loops.autocast, push="step", update_on_kvstore=True, **made)


def groups_of_parameters(store: str) -> None:
    def groups(model: Any) -> torch.optim.Optimizer:
        decayed = [p for p in model.parameters() if p.dim() > 1]
        rest = [p for p in model.parameters() if p.dim() == 1]
        return torch.optim.AdamW([{"params": rest, "lr": 0.02, "weight_decay": 0.0}, {"params": decayed}], lr=0.01)

    def scheduled(model: Any, optimizer: Any, shards: Any) -> None:
        slower, faster = lambda step: 0.5**step, lambda step: 1.0 + 0.5 * step
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, [slower, faster])
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, shards(step)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), MOST)
            optimizer.step()
            schedule.step()

    def grown(model: Any, optimizer: Any, shards: Any) -> None:
        loops.clipping(model, optimizer, shards)
        model[0].requires_grad_(True)
        optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.3})
        loops.clipping(model, optimizer, shards)

    def partly_frozen(seed: int) -> nn.Module:
        model = mlp(seed)
        model[0].requires_grad_(False)
        return model

    def last(model: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(model[2:].parameters(), lr=0.1, momentum=0.9)

    with kvmpi.create(store) as kv:
        same_in_all(kv, scheduled, optimizer=groups, push="step", update_on_kvstore=True)
    with kvmpi.create(store) as kv:
        same_in_all(kv, grown, make=partly_frozen, optimizer=last, push="step", update_on_kvstore=True)


# ---- several clients


def simulated(
    kv: Any, steps: Any, optimizer: Any = sgd, skipped: Any = (), most: float = MOST, absent: Any = lambda step: ()
) -> nn.Module:
    """One process that does what is documented: each client's mean is clipped by itself, then all are averaged.

    Each client counts by its number of workers, as all workers count alike; also those that are ``absent`` in a step.
    """
    model = mlp(0)
    plain = optimizer(model)
    params = list(model.parameters())
    for step in steps:
        total = [torch.zeros_like(p) for p in params]
        for ranks in clients_of(kv):
            found = [torch.zeros_like(p) for p in params]
            for rank in set(ranks) - set(absent(step)):
                grads = torch.autograd.grad(loss_of(model, [shard(step, rank)]), params)
                found = [a + g / len(ranks) for a, g in zip(found, grads, strict=True)]
            norm = sum(float((g**2).sum()) for g in found) ** 0.5
            factor = min(1.0, most / (norm + 1e-6))
            total = [a + g * factor * len(ranks) / kv.num_workers for a, g in zip(total, found, strict=True)]
        if step not in skipped:
            for p, g in zip(params, total, strict=True):
                p.grad = g
            plain.step()
    return model


def same(model: Any, plain: Any, what: str) -> None:
    difference = (flat(model.parameters()) - flat(plain.parameters())).abs().max()
    assert difference <= 1e-12, f"{what}: weights differ by {difference}"


def each_client_by_itself(store: str) -> None:
    """Gradients are the client's mean, which is what is clipped; with the optimizer's rule and with the user's."""
    rules = {
        "own": None,
        "given": lambda kv: optim.SGD(lr=0.1, momentum=0.9, weight_decay=0.01, rescale_grad=1 / kv.num_workers),
    }
    for name, rule in rules.items():
        with training(store, rule=rule) as (kv, model, optimizer):
            plain = mlp(0)
            for step in range(STEPS):
                optimizer.zero_grad()
                loss_of(model, [shard(step, kv.rank)]).backward()
                if step == 0:
                    ranks = next(ranks for ranks in clients_of(kv) if kv.rank in ranks)
                    loss_of(plain, [shard(step, rank) for rank in ranks]).backward()
                    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                        torch.testing.assert_close(p.grad, q.grad, atol=1e-13, rtol=0)
                norm = nn.utils.clip_grad_norm_(model.parameters(), MOST)
                assert norm > MOST, "nothing is clipped"
                optimizer.step()
            optimizer.synchronize()
            same(model, simulated(kv, range(STEPS)), f"{store}, {name} rule")
    with training(store, average=False) as (kv, model, optimizer):
        loss_of(model, [shard(0, kv.rank)]).backward()
        ranks = next(ranks for ranks in clients_of(kv) if kv.rank in ranks)
        (len(ranks) * loss_of(plain := mlp(0), [shard(0, rank) for rank in ranks])).backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, atol=1e-13, rtol=0)
        optimizer.step()
        optimizer.synchronize()
        summed = torch.optim.SGD((plain := mlp(0)).parameters(), lr=0.1, weight_decay=0.01)
        (kv.num_workers * loss_of(plain, [shard(0, rank) for rank in range(kv.num_workers)])).backward()
        summed.step()
        same(model, plain, f"{store}, sums")


def overflows(store: str) -> None:
    """The last worker's loss overflows: no client steps, its own scale goes down, and momentum is what it was."""
    with training(store) as (kv, model, optimizer):
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=100)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = loss_of(model, [shard(step, kv.rank)])
            if step in (2, 3) and kv.rank == kv.num_workers - 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            if step != 3:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), MOST)
            scaler.step(optimizer)
            scaler.update()
        optimizer.synchronize()
        last = kv.client_rank == kv.num_clients - 1
        assert scaler.get_scale() == (16.0 if last else 64.0), scaler.get_scale()
        same(model, simulated(kv, range(STEPS), skipped=(2, 3)), f"{store}, overflows")
    with training(store) as (kv, model, optimizer):  # without unscale_, scaler.step does it
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=100)
        for step in range(STEPS):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, [shard(step, kv.rank)])).backward()
            scaler.step(optimizer)
            scaler.update()
        optimizer.synchronize()
        same(model, simulated(kv, range(STEPS), most=1e9), f"{store}, scaled")


def without_a_batch(store: str) -> None:
    """Who has no backward in a step pushes what others of its client have made of it; if all have none, zeros."""

    def absent(step: int) -> list[int]:
        return [[0], [n - 1], [], [*range(n - 1)], [*range(1, n)]][step]

    for enabled in (False, True):
        with training(store) as (kv, model, optimizer):
            n = kv.num_workers
            scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=100, enabled=enabled)
            for step in range(5):
                optimizer.zero_grad()
                loss = scaler.scale(loss_of(model, [shard(step, kv.rank)]))
                if kv.rank not in absent(step):
                    loss.backward()
                    scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), MOST)
                scaler.step(optimizer)
                scaler.update()
            optimizer.synchronize()
            same(model, simulated(kv, range(5), absent=absent), f"{store}, scaler {enabled}")
            if enabled and kv.num_clients == n > 1:
                optimizer.zero_grad()
                scaler.scale(loss_of(model, [shard(0, 0)]))
                scaler.unscale_(optimizer)
                expect(ConfigError, "leave unscale_ out", partial(scaler.step, optimizer))


def agreed_to_leave_out(store: str) -> None:
    """A loop that leaves a step out for a reason of its own asks all, where clients wait for each other."""
    with training(store) as (kv, model, optimizer):
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, [shard(step, kv.rank)]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), MOST)
            if not kv.any(step == 1 + kv.rank):
                optimizer.step()
        optimizer.synchronize()
        same(model, simulated(kv, range(STEPS), skipped=range(1, 1 + kv.num_workers)), store)


def uneven_batches(store: str) -> None:
    """Masters join first, and others go on: what they have is pushed for them."""
    every = {2: [[2, 5], [0, 3]], 3: [[1, 4, 4], [4, 2, 4]], 4: [[5, 0, 3, 5], [0, 5, 2, 5]]}
    with kvmpi.create(store) as kv:
        num_workers = kv.num_workers
    for batches in every[num_workers]:
        with training(store) as (kv, model, optimizer):
            loops.plain_steps(model, optimizer, lambda step, kv=kv: [shard(step, kv.rank)], batches[kv.rank])
            optimizer.join()
            plain = mlp(0)
            plain_optimizer = sgd(plain)
            for step in range(max(batches)):
                plain_optimizer.zero_grad()
                for rank in range(kv.num_workers):
                    if batches[rank] > step:
                        (loss_of(plain, [shard(step, rank)]) / kv.num_workers).backward()
                plain_optimizer.step()
            if max(batches[rank] for rank in clients_of(kv)[kv.client_rank]) == max(batches):
                same(model, plain, f"{store}, {batches}")


def resumed(store: str) -> None:
    """From a file of a run that pushed in backward, and the other way round: its scale is not this one's."""
    path = Path(tempfile.gettempdir()) / f"kvmpi-test-{Config.from_env().job_id}-{store}-step"
    for ways in (("backward", "step"), ("step", "backward"), ("step", "step")):
        with training(store, optimizer=adamw, push=ways[0]) as (kv, model, optimizer):
            plain_steps(model, optimizer, lambda step, kv=kv: [shard(step, kv.rank)], 3)
            weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            kv.save_optimizer_states(path)

        def loaded(seed: int, weights: Any = weights) -> nn.Module:
            model = mlp(seed)
            model.load_state_dict(weights)
            return model

        with training(store, loaded, adamw, push=ways[1]) as (kv, model, optimizer):
            kv.load_optimizer_states(path)
            plain_steps(model, optimizer, lambda step, kv=kv: [shard(step + 3, kv.rank)], 2)
            model.load_state_dict({name: 2 * tensor for name, tensor in model.state_dict().items()})
            plain_steps(model, optimizer, lambda step, kv=kv: [shard(step + 5, kv.rank)], 1)
            optimizer.synchronize()
            kv.barrier()
            if kv.rank == 0:
                path.unlink()
            plain = mlp(0)
            plain_optimizer, shards = adamw(plain), lambda step, kv=kv: [shard(step, r) for r in range(kv.num_workers)]
            plain_steps(plain, plain_optimizer, shards, 5)
            plain.load_state_dict({name: 2 * tensor for name, tensor in plain.state_dict().items()})
            plain_steps(plain, plain_optimizer, lambda step, shards=shards: shards(step + 5), 1)
            # The scale of AdamW's gradients matters only beside its eps.
            same(model, plain, f"{store}, {ways}")


def asynchronous(store: str) -> None:
    """Gradients that do not depend on weights: each client's, clipped, counts by itself; also what one leaves out."""
    with kvmpi.create(store) as kv:
        torch.manual_seed(kv.rank)
        model = nn.ParameterDict({"used": torch.randn(40), "unused": torch.ones(3)}).double()
        start = torch.manual_seed(0) and torch.randn(40).double()
        decayed = torch.optim.SGD(model.parameters(), lr=0.5, weight_decay=0.0)
        optimizer = DistributedOptimizer(decayed, kv, model, bucket_bytes=1, push="step")
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100)

        def grad(rank: int, step: int) -> torch.Tensor:
            return torch.arange(40) + rank + step

        for step in range(STEPS):
            optimizer.zero_grad()
            loss = (model["used"] * grad(kv.rank, step)).sum()
            if step == 2 and kv.rank == 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        optimizer.synchronize()
        kv.barrier()
        names = optimizer._params.names
        kv.pull(optimizer._params.keys[names.index("used")], model["used"].detach())
        expected = start.clone()
        for step in range(STEPS):
            for ranks in clients_of(kv):
                mean = sum(grad(rank, step) for rank in ranks).double() / len(ranks)
                if step != 2 or 1 not in ranks:
                    expected -= 0.5 * mean * min(1.0, 1.0 / (mean.norm() + 1e-6))
        assert (model["used"].detach() - expected).abs().max() < 1e-12
        assert torch.equal(model["unused"].detach(), torch.ones(3).double())


def too_late(store: str) -> None:
    """What pushes in backward says what to do."""
    said = "push='step'"
    with training(store, push="backward") as (kv, model, optimizer):
        loss_of(model, [shard(0, kv.rank)]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        expect(ConfigError, said, optimizer.step)
    with training(store, push="backward") as (kv, model, optimizer):
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(loss_of(model, [shard(0, kv.rank)])).backward()
        expect(ConfigError, said, partial(scaler.step, optimizer))
    with training(store, push="backward") as (kv, model, optimizer):
        loss_of(model, [shard(0, kv.rank)]).backward()
        expect(ConfigError, said, loss_of(model, [shard(0, kv.rank)]).backward)
    with training(store, push="backward") as (kv, model, optimizer):
        loss_of(model, [shard(0, kv.rank)]).backward()
        optimizer.zero_grad()
        expect(ConfigError, said, optimizer.step)
    with training(store) as (kv, model, optimizer):
        plain_steps(model, optimizer, lambda step: [shard(step, kv.rank)], 2)
        optimizer.synchronize()
        model.float()
        _, x, y = shard(2, kv.rank)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x.float()), y).backward()
        expect(ConfigError, "0.weight is of torch.float32 now, and the store", optimizer.step)
        model.double()
        plain_steps(model, optimizer, lambda step: [shard(step, kv.rank)], 2)


def two_networks(store: str) -> None:
    """Each with a store: the loss of one leaves gradients in the other, which its loop throws away."""

    def loop(maker: Any, judge: Any, ours: Any, theirs: Any, ranks: Any) -> None:
        says = nn.functional.binary_cross_entropy_with_logits
        true, false = torch.ones(4, 1).double(), torch.zeros(4, 1).double()
        for step in range(STEPS):
            real, noise = [shard(step, rank)[1] for rank in ranks], [shard(step + 99, rank)[1] for rank in ranks]
            theirs.zero_grad()
            losses = [
                says(judge(x), true) + says(judge(maker(z).detach()), false) for x, z in zip(real, noise, strict=True)
            ]
            (sum(losses) / len(ranks)).backward()
            nn.utils.clip_grad_norm_(judge.parameters(), MOST)
            theirs.step()
            if step % 2 == 0:
                ours.zero_grad()
                (sum(says(judge(maker(z)), true) for z in noise) / len(ranks)).backward()
                ours.step()

    def networks() -> tuple[nn.Module, nn.Module]:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 5)).double(), nn.Linear(5, 1).double()

    with kvmpi.create(store) as first, kvmpi.create(store) as second:
        mine, plain = networks(), networks()
        distributed = [
            DistributedOptimizer(adamw(net), kv, net, push="step", update_on_kvstore=True)
            for net, kv in zip(mine, (first, second), strict=True)
        ]
        loop(*mine, *distributed, [first.rank])
        loop(*plain, *map(adamw, plain), range(first.num_workers))
        for net, expected, optimizer in zip(mine, plain, distributed, strict=True):
            optimizer.synchronize()
            same(net, expected, store)


def buffers(store: str) -> None:
    for push in ("step", "backward"):
        with kvmpi.create(store) as kv:
            other_buffers(kv, update_on_kvstore=True, push=push)
        with kvmpi.create(store) as kv:
            scripted(kv, update_on_kvstore=True, push=push)


CHECKS = (
    as_one_process, some_as_one_process, models_as_in_one_process, groups_of_parameters, each_client_by_itself,
    overflows, without_a_batch, agreed_to_leave_out, uneven_batches, resumed, asynchronous, too_late, two_networks,
    buffers,
)  # fmt: skip
