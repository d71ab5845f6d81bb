"""Checks of torch.distributed over kvmpi, and of Horovod's API, with tensors on the device under test."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import optimizer_loops as loops
import torch
import torch.distributed as dist
from cuda_models import STEPS, adam, images, make, on_device, one, shard_of, side_stream, wide, wide_shard
from device_checks import DEVICE, ON_GPU
from torch import nn
from torch.distributed import ReduceOp

import kvmpi
import kvmpi.horovod as hvd
import kvmpi.torch.c10d
from kvmpi.torch import ddp_comm_hook

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8)
COUNTS = (0, 1, 1013, 70_001)
LARGE = (16 << 20) if ON_GPU else 100_000
ADDS = 200 if ON_GPU else 3


@contextlib.contextmanager
def group() -> Iterator[tuple[int, int]]:
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        dist.init_process_group("kvmpi")
        try:
            yield dist.get_rank(), dist.get_world_size()
        finally:
            dist.destroy_process_group()


def value(rank: int, count: int, dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    """Even whole numbers up to 8: sums and means of two are exact in every dtype."""
    return (2 * ((torch.arange(count) * 7 + rank * 3 + salt) % 5)).to(dtype).to(DEVICE)


def same(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    assert found.device.type == torch.device(DEVICE).type, f"{what}: on {found.device}"
    assert torch.equal(found.cpu(), expected.to(found.dtype).cpu().reshape(found.shape)), what


def operations() -> None:
    with group() as (rank, size):
        oracles: dict[Any, Callable[[torch.Tensor], torch.Tensor]] = {
            ReduceOp.SUM: lambda t: t.sum(0), ReduceOp.AVG: lambda t: t.sum(0) / size, ReduceOp.MAX: lambda t: t.amax(0)
        }  # fmt: skip
        for dtype in DTYPES:
            for count in COUNTS:
                rows = torch.stack([value(r, count, dtype).double() for r in range(size)])
                for op, oracle in oracles.items():
                    tensor = value(rank, count, dtype)
                    dist.all_reduce(tensor, op)
                    same(tensor, oracle(rows), f"all_reduce {op} of {count} {dtype}")
                what = f"of {count} {dtype}"
                tensor = value(rank, count, dtype)
                dist.broadcast(tensor, size - 1)
                same(tensor, rows[-1], f"broadcast {what}")
                parts = [torch.empty_like(tensor) for _ in range(size)]
                dist.all_gather(parts, value(rank, count, dtype))
                for part, row in zip(parts, rows, strict=True):
                    same(part, row, f"all_gather {what}")
                whole = torch.empty(size * count, dtype=dtype, device=DEVICE)
                dist.all_gather_into_tensor(whole, value(rank, count, dtype))
                same(whole, rows, f"all_gather_into_tensor {what}")
                wide_rows = torch.stack([value(r, size * count, dtype).double() for r in range(size)])
                turned = torch.empty(size * count, dtype=dtype, device=DEVICE)
                dist.all_to_all_single(turned, value(rank, size * count, dtype))
                columns = wide_rows.reshape(size, size, count)[:, rank]
                same(turned, columns, f"all_to_all_single {what}")
                part = torch.empty(count, dtype=dtype, device=DEVICE)
                dist.reduce_scatter_tensor(part, value(rank, size * count, dtype))
                same(part, wide_rows.sum(0).reshape(size, count)[rank], f"reduce_scatter_tensor {what}")
                dist.reduce_scatter(part, list(value(rank, size * count, dtype).reshape(size, count)))
                same(part, wide_rows.sum(0).reshape(size, count)[rank], f"reduce_scatter {what}")
        turned = value(rank, 60, torch.float32).reshape(6, 10).t()
        dist.all_reduce(turned)
        same(turned, sum(value(r, 60, torch.float32).reshape(6, 10).t() for r in range(size)), "a transposed tensor")
        if rank < 2 <= size:
            message = value(rank, 1013, torch.bfloat16)
            if rank == 0:
                dist.send(message, 1)
            else:
                dist.recv(message, 0)
                same(message, value(0, 1013, torch.bfloat16), "recv")
        dist.barrier()


def work_that_is_under_way() -> None:
    with group() as (rank, size):
        tensors = [value(rank, count, torch.float32, i) for i, count in enumerate(COUNTS * 3)]
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        outs = [torch.empty(100, device=DEVICE) for _ in range(size)]
        works.append(dist.all_gather(outs, value(rank, 100, torch.float32), async_op=True))
        for work in reversed(works):
            assert work is not None
            work.wait()
        for i, tensor in enumerate(tensors):
            expected = sum(value(r, len(tensor), torch.float32, i) for r in range(size))
            same(tensor, expected, f"all_reduce {i} that was under way")
        for r, out in enumerate(outs):
            same(out, value(r, 100, torch.float32), "all_gather that was under way")


def streams() -> None:
    """What a stream still computes is sent complete; what it still reads is not overwritten before."""
    with group() as (rank, size):
        for async_op in (False, True):
            x, slow = torch.zeros(LARGE, device=DEVICE), torch.zeros(LARGE, device=DEVICE)
            with side_stream():
                for _ in range(ADDS):
                    x += 1
                work = dist.all_reduce(x, async_op=async_op)
                if work is not None:
                    work.wait()
                x += 1
            same(x, torch.full((LARGE,), size * ADDS + 1.0), f"all_reduce on a stream, async_op={async_op}")
            outs, before = torch.full((size, LARGE), 9.0, device=DEVICE), torch.zeros(size, LARGE, device=DEVICE)
            mine = torch.full((LARGE,), rank + 1.0, device=DEVICE)
            with side_stream():
                for _ in range(ADDS):
                    slow += 1
                before.copy_(outs)
                work = dist.all_gather_into_tensor(outs.view(-1), mine, async_op=async_op)
                if work is not None:
                    work.wait()
                after = outs + 1
            same(before, torch.full((size, LARGE), 9.0), f"what was there before an all_gather, async_op={async_op}")
            same(after[:, 0], torch.arange(size) + 2.0, f"all_gather on a stream, async_op={async_op}")


def data_parallel() -> None:
    """An unmodified DistributedDataParallel, with small buckets and large layers."""
    with group() as (rank, size):
        kinds: list[tuple[Any, Any, dict[str, Any]]] = [
            (make(loops.mlp), loops.shard, {"bucket_cap_mb": 1e-4}), (make(loops.mlp), loops.shard, {}),
            (images, loops.image_shard, {}), (make(wide), wide_shard, {"gradient_as_bucket_view": True}),
        ]  # fmt: skip
        for built, get, options in kinds:
            for optimizer in (loops.sgd, adam) if get is loops.shard else (loops.sgd,):
                plain = built(0)
                parallel = nn.parallel.DistributedDataParallel(built(rank), **options)  # rank 0's weights count
                loops.plain_steps(parallel, optimizer(parallel), lambda step: [on_device(get)(step, rank)])  # noqa: B023
                everything = [lambda step, get=get: [on_device(get)(step, r) for r in range(size)]]
                loops.plain_steps(plain, optimizer(plain), everything[0])
                one(parallel.module, plain, f"DDP, {options}", 1e-9)
        model, plain = make(loops.mlp)(0), loops.mlp(0)
        parallel, optimizer = nn.parallel.DistributedDataParallel(model), loops.sgd(model)
        with parallel.no_sync():
            loops.loss_of(parallel, [shard_of(rank, 1)]).backward()
        loops.loss_of(parallel, [shard_of(rank, 2)]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        reference = loops.sgd(plain)
        for step in (1, 2):
            loops.loss_of(plain, [loops.shard(step, r) for r in range(size)]).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        reference.step()
        one(model, plain, "DDP with no_sync", 1e-9)


def sharded() -> None:
    """FSDP2, unmodified."""
    from torch.distributed.fsdp import fully_shard

    with group() as (rank, size):
        plain, whole = loops.mlp(0), make(loops.mlp)(0)
        mesh = dist.init_device_mesh(torch.device(DEVICE).type, (size,))
        for layer in (whole[0], whole[2], whole):
            fully_shard(layer, mesh=mesh)
        loops.plain_steps(whole, loops.sgd(whole), lambda step: [on_device(loops.shard)(step, rank)])
        loops.plain_steps(plain, loops.sgd(plain), lambda step: [loops.shard(step, r) for r in range(size)])
        for part, wanted in zip(whole.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(part.full_tensor().cpu(), wanted, atol=1e-9, rtol=0)


def hooked() -> None:
    """A store under an unmodified DistributedDataParallel, whose whole step is compiled the second time."""
    for compiled in (False, True):
        torch._dynamo.reset()
        with group() as (rank, size), kvmpi.create("mpi", timeout_s=20) as kv:
            plain = loops.mlp(0)
            parallel = nn.parallel.DistributedDataParallel(make(loops.mlp)(rank))
            parallel.register_comm_hook(None, ddp_comm_hook(kv))
            steps = loops.compiled_steps if compiled else loops.plain_steps
            steps(parallel, loops.sgd(parallel), lambda step: [on_device(loops.shard)(step, rank)])
            loops.plain_steps(plain, loops.sgd(plain), lambda step: [loops.shard(step, r) for r in range(size)])
            one(parallel.module, plain, f"ddp_comm_hook, compiled={compiled}", 1e-9)


def horovod() -> None:
    """Horovod's operations, and its training loop."""
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    try:
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            rows = torch.stack([value(r, 1013, dtype).double() for r in range(size)])
            mine = value(rank, 1013, dtype)
            same(hvd.allreduce(mine, op=hvd.Sum), rows.sum(0), f"allreduce of {dtype}")
            same(hvd.synchronize(hvd.allreduce_async(mine)), rows.mean(0), f"allreduce_async of {dtype}")
            same(mine, rows[rank], "allreduce leaves its tensor alone")
            hvd.allreduce_(mine, op=hvd.Max)
            same(mine, rows.amax(0), f"allreduce_ of {dtype}")
            same(hvd.allgather(value(rank, rank + 1, dtype)), torch.cat([value(r, r + 1, dtype) for r in range(size)]),
                 f"allgather of {dtype}")  # fmt: skip
            same(hvd.broadcast(value(rank, 5, dtype), size - 1), value(size - 1, 5, dtype), f"broadcast of {dtype}")
        for options, passes in (({}, 1), ({"backward_passes_per_step": 2}, 2)):
            for optimizer in (loops.sgd, adam):
                model, plain = make(loops.mlp)(rank), loops.mlp(0)
                inner = hvd.DistributedOptimizer(optimizer(model), model.named_parameters(), **options)
                hvd.broadcast_parameters(model.state_dict(), root_rank=0)
                hvd.broadcast_optimizer_state(inner, root_rank=0)
                reference = optimizer(plain)
                for step in range(STEPS):
                    inner.zero_grad()
                    reference.zero_grad()
                    for part in range(passes):
                        loops.loss_of(model, [shard_of(rank, 100 * part + step)]).backward()
                        everything = [loops.shard(100 * part + step, r) for r in range(size)]
                        loops.loss_of(plain, everything).backward()
                    if step % 2:
                        inner.synchronize()
                        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                        nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
                        with inner.skip_synchronize():
                            inner.step()
                    else:
                        inner.step()
                    reference.step()
                one(model, plain, f"Horovod's optimizer, {options}", 1e-9)
                other = optimizer(copy.deepcopy(model)) if rank else inner
                hvd.broadcast_optimizer_state(other, root_rank=0)
                states = [t for state in other.state_dict()["state"].values() for t in state.values()]
                assert any(t.device.type == torch.device(DEVICE).type for t in states if torch.is_tensor(t))
    finally:
        hvd.shutdown()


CHECKS = (operations, work_that_is_under_way, streams, data_parallel, sharded, hooked, horovod)
