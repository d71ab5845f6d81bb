"""Run by test_torch_cuda: the torch front ends with parameters on a device, against one process with all the data.

cuda_training.py STORE... [CHECK=NAME]...
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import cuda_groups
import optimizer_loops as loops
import torch
from cuda_models import BATCH, STEPS, adam, flat, images, make, on_device, one, shard_of, side_stream, wide, wide_shard
from device_checks import DEVICE, ON_GPU, Checks, one_host_for_each
from torch import nn

import kvmpi
from kvmpi.torch import DiLoCo, ElasticAveraging, Trainer

torch.set_num_threads(1)
KIND = DEVICE.partition(":")[0]
TOLERANCE = 1e-9  # float64; a device adds in another order each time

# The same loop in all workers, and in one process on the same device.
same_in_all = partial(loops.same_in_all, make=make(loops.mlp), get=on_device(loops.shard), tolerance=TOLERANCE)


def loops_of_people(store: str) -> None:
    every = (
        loops.plain_steps, loops.accumulation, loops.clipping, loops.closures, loops.gradients_in_place,
        loops.schedules, loops.zeroed_by_the_model, loops.only_without_sync, loops.accumulation_that_exchanges,
        loops.set_by_hand,
    )  # fmt: skip
    for number, loop in enumerate(every):
        for optimizer in (loops.sgd, adam):
            with kvmpi.create(store, timeout_s=20) as kv:
                same_in_all(kv, loop, optimizer=optimizer, overlap=bool(number % 2))


def weights_of_the_store(store: str) -> None:
    """The store updates weights: pushed during the backward pass, or in the step."""
    for push in ("backward", "step"):
        every = [loops.plain_steps, loops.accumulation, loops.schedules]
        for loop in [*every, loops.clipping] if push == "step" else every:
            for optimizer in (loops.sgd, adam):
                with kvmpi.create(store, timeout_s=20) as kv:
                    same_in_all(kv, loop, optimizer=optimizer, push=push, update_on_kvstore=True)


def overflows(store: str) -> None:
    """Worker 0's loss overflows in step 2: nobody steps, and all scale down; also with fused optimizers."""

    def loop(model: Any, optimizer: Any, shards: Any) -> list[float]:
        scaler, scales = torch.amp.GradScaler(KIND, init_scale=64.0, growth_interval=3), []
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = loops.loss_of(model, found := shards(step))
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

    def fused(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=0.01, fused=True)

    for optimizer in (loops.sgd, adam, fused):
        with kvmpi.create(store, timeout_s=20) as kv:
            same_in_all(kv, loop, optimizer=optimizer)
    with kvmpi.create(store, timeout_s=20) as kv:
        same_in_all(kv, loop, optimizer=loops.sgd, push="step", update_on_kvstore=True)


def half_precision(store: str) -> None:
    """Autocast in float16 under a scaler; each shard by itself, as gradients of one cast weight add up in float16."""

    def loop(model: Any, optimizer: Any, shards: Any) -> list[float]:
        scaler, scales = torch.amp.GradScaler(KIND, init_scale=1024.0, growth_interval=100), []
        for step in range(STEPS):
            optimizer.zero_grad()
            for each in (found := shards(step)):
                with torch.autocast(KIND, torch.float16):
                    loss = loops.loss_of(model, [each]) / len(found)
                scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return scales

    def single(step: int, rank: int) -> Any:
        return loops.shard(step, rank, torch.float32)

    for optimizer in (loops.sgd, adam):
        with kvmpi.create(store, timeout_s=20) as kv:
            kind: dict[str, Any] = {"make": make(lambda seed: loops.mlp(seed, torch.float32)), "get": on_device(single)}
            # A step of Adam is as large for a gradient of rounding errors as for any other.
            tolerance = 1e-4 if optimizer is loops.sgd else 5e-3
            same_in_all(kv, loop, optimizer=optimizer, **{**kind, "tolerance": tolerance})


def unused_parameters(store: str) -> None:
    with kvmpi.create(store, timeout_s=20) as kv:
        same_in_all(kv, loops.winding_steps, make=make(loops.winding), optimizer=loops.adamw)
    with kvmpi.create(store, timeout_s=20) as kv:
        same_in_all(kv, loops.freezing(loops.one_in_turn))


def batch_normalisation(store: str) -> None:
    """Weights as in one process, and the running statistics of the first worker, or the mean of all."""
    for policy in ("first", "mean"):
        with kvmpi.create(store, timeout_s=20) as kv:
            model, _ = same_in_all(
                kv, loops.plain_steps, make=images, get=on_device(loops.image_shard), norm_buffers=policy
            )
            expected = loops.statistics(policy, kv.num_workers)
            for found, wanted in zip(model.buffers(), expected, strict=True):
                assert found.device.type == KIND
                torch.testing.assert_close(found.cpu(), wanted, atol=1e-8, rtol=0)


def large_layers(store: str) -> None:
    """Kernels that are still running when the next bucket is full; on the default stream and on another."""
    for place in (contextlib.nullcontext, side_stream):
        for options in ({}, {"update_on_kvstore": True}, {"update_on_kvstore": True, "push": "step"}):
            with kvmpi.create(store, timeout_s=20) as kv, place():
                same_in_all(
                    kv, loops.plain_steps, make=make(wide), get=on_device(wide_shard), bucket_bytes=1 << 20, **options
                )


def compiled(store: str) -> None:
    def whole(seed: int) -> Any:
        return torch.compile(make(loops.mlp)(seed), backend="aot_eager")

    for options in ({}, {"update_on_kvstore": True}):
        torch._dynamo.reset()
        with kvmpi.create(store, timeout_s=20) as kv:
            same_in_all(kv, loops.plain_steps, make=whole, **options)
    for options in ({}, {"update_on_kvstore": True}, {"update_on_kvstore": True, "push": "step"}):
        torch._dynamo.reset()
        with kvmpi.create(store, timeout_s=20) as kv:
            same_in_all(kv, loops.compiled_steps, **options)


def trainer(store: str) -> None:
    for update in (True, False):
        for optimizer in (loops.sgd, adam):
            with kvmpi.create(store, timeout_s=20) as kv:
                model, plain = make(loops.mlp)(kv.rank), loops.mlp(0)  # worker 0's weights count
                inner, reference = optimizer(model), optimizer(plain)
                front = Trainer(model.parameters(), inner, kv, update)
                for step in range(STEPS):
                    model.zero_grad()
                    (BATCH * loops.loss_of(model, [shard_of(kv.rank, step)])).backward()
                    front.step(kv.num_workers * BATCH)
                    plain.zero_grad()
                    loops.loss_of(plain, [loops.shard(step, rank) for rank in range(kv.num_workers)]).backward()
                    reference.step()
                one(model, plain, f"{store}, update_on_kvstore={update}, {optimizer.__name__}", TOLERANCE)


def clipped_by_a_trainer(store: str) -> None:
    with kvmpi.create(store, timeout_s=20) as kv:
        model, plain = make(loops.mlp)(0), loops.mlp(0)
        front = Trainer(model.parameters(), loops.sgd(model), kv, update_on_kvstore=False)
        reference = loops.sgd(plain)
        for step in range(STEPS):
            model.zero_grad()
            loops.loss_of(model, [shard_of(kv.rank, step)]).backward()
            front.allreduce_grads()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            front.update(kv.num_workers)
            plain.zero_grad()
            everything = [loops.shard(step, rank) for rank in range(kv.num_workers)]
            (kv.num_workers * loops.loss_of(plain, everything)).backward()
            expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
            assert abs(norm.item() - expected.item()) < 1e-9, (norm, expected)
            for p in plain.parameters():
                p.grad /= kv.num_workers
            reference.step()
        one(model, plain, store, TOLERANCE)


def diloco(store: str) -> None:
    """Two local steps, then an outer one; the oracle has a model for each worker."""
    with kvmpi.create(store, timeout_s=20) as kv:
        workers, center = range(kv.num_workers), loops.mlp(0)
        model = make(loops.mlp)(kv.rank)
        outer = DiLoCo(model.parameters(), kv, interval=2, lr=0.7, momentum=0.9, nesterov=True)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        weights = [p.detach().clone() for p in center.parameters()]
        moving = [torch.zeros_like(p) for p in weights]
        for first in range(0, STEPS, 2):
            total = [torch.zeros_like(p) for p in weights]
            for rank in workers:
                local = loops.mlp(0)
                for p, value in zip(local.parameters(), weights, strict=True):
                    p.data.copy_(value)
                plain = torch.optim.SGD(local.parameters(), lr=0.1)
                for step in (first, first + 1):
                    plain.zero_grad()
                    loops.loss_of(local, [loops.shard(step, rank)]).backward()
                    plain.step()
                total = [t + p.detach() / len(workers) for t, p in zip(total, local.parameters(), strict=True)]
            for i, mean in enumerate(total):
                change = weights[i] - mean
                moving[i] = 0.9 * moving[i] + change
                weights[i] = weights[i] - 0.7 * (change + 0.9 * moving[i])
            for step in (first, first + 1):
                inner.zero_grad()
                loops.loss_of(model, [shard_of(kv.rank, step)]).backward()
                inner.step()
                outer.step()
            difference = (flat(model.parameters()) - flat(weights)).abs().max()
            assert difference < TOLERANCE, f"{store}, after step {first + 1}: {difference}"


def streaming(store: str) -> None:
    """Fragments that travel while local steps go on, rounded and not: bit for bit what weights of the host become."""
    for dtype in (None, torch.bfloat16) if store.startswith("dist") else (None,):  # what goes to servers is rounded
        found = []
        for device in (DEVICE, "cpu"):
            with kvmpi.create(store, timeout_s=20) as kv:
                weights = [torch.linspace(-1, 1, count).to(device) for count in (1, 1013, 70_001)]
                outer = DiLoCo(weights, kv, 4, fragments=2, overlap=2, mixing=0.25, pseudo_gradient_dtype=dtype)
                exchanged = 0
                for step in range(12):
                    for w in weights:
                        w += (kv.rank + 1) * 2.0 ** -(step % 5)
                    exchanged += outer.step()
                outer.finish()
                assert exchanged >= 4, exchanged
                found.append([*weights, *outer.pull_center()])
        for one_of_device, wanted in zip(*found, strict=True):
            assert torch.equal(one_of_device.cpu(), wanted.cpu()), (store, dtype)


def elastic_averaging(store: str) -> None:
    """All workers of the client have moved by one; weights and center meet half way, and their sum stays."""
    alpha = 0.3
    with kvmpi.create(store, timeout_s=20) as kv:
        model = make(loops.mlp)(kv.rank)
        elastic = ElasticAveraging(model.parameters(), kv, alpha=alpha, interval=1)
        weights = center = flat(loops.mlp(0).parameters())
        for _ in range(4):
            for p in model.parameters():
                p.data += 1
            elastic.step()
            weights = weights + 1
            weights, center = weights - alpha * (weights - center), center + alpha * (weights - center)
            for found, wanted, what in (
                (model.parameters(), weights, "weights"), (elastic.pull_center(), center, "center"),
            ):  # fmt: skip
                difference = (flat(found) - wanted).abs().max()
                assert difference < TOLERANCE, f"{store}: {what} differ by {difference}"


CHECKS: tuple[Callable[[str], None], ...] = (
    loops_of_people, weights_of_the_store, overflows, half_precision, unused_parameters, batch_normalisation,
    large_layers, compiled, trainer, clipped_by_a_trainer, diloco, streaming, elastic_averaging,
)  # fmt: skip


def main(words: list[str]) -> int:
    if ON_GPU:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    one_host_for_each()
    checks = Checks([word.partition("=")[2] for word in words if "=" in word])
    for store in (word for word in words if "=" not in word):
        for check in CHECKS if store != "groups" else ():
            checks.run(check, store)
        if store == "groups":
            for each in cuda_groups.CHECKS:
                checks.run(each)
    return checks.finish()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
