"""Run by test_torch_c10d on 1 to 4 ranks: every operation of the backend against what torch computes in float64."""

from __future__ import annotations

import copy
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from c10d_extensions import extensions
from torch import nn
from torch.distributed import ReduceOp

import kvmpi.torch.c10d
from kvmpi.errors import (
    ConfigError,
    DTypeMismatchError,
    KVTimeoutError,
    OrderMismatchError,
    ShapeMismatchError,
    UnsupportedError,
)

warnings.simplefilter("ignore", FutureWarning)  # torch has new names for all_gather_into_tensor and others
torch.set_num_threads(1)

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
COUNTS = (0, 1, 5, 1000)
#: Elements that loops take several at a time, and some that are left over.
MANY = 1003
OPS: dict[Any, Callable[[torch.Tensor], torch.Tensor]] = {
    ReduceOp.SUM: lambda rows: rows.sum(0),
    ReduceOp.AVG: lambda rows: mean(rows),
    ReduceOp.PRODUCT: lambda rows: rows.prod(0),
    ReduceOp.MIN: lambda rows: rows.amin(0),
    ReduceOp.MAX: lambda rows: rows.amax(0),
}
BITS = {ReduceOp.BAND: "bitwise_and", ReduceOp.BOR: "bitwise_or", ReduceOp.BXOR: "bitwise_xor"}


def mean(rows: torch.Tensor) -> torch.Tensor:
    """Of integers rounded toward zero."""
    return torch.div(rows.sum(0), len(rows), rounding_mode=None if rows.is_floating_point() else "trunc")


def value(rank: int, count: int, dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    """Small whole numbers, halves for floats: sums of them are exact in every dtype. By rank and index."""
    numbers = (torch.arange(count) * 7 + rank * 3 + salt) % 5
    return numbers.to(dtype) * (torch.tensor(0.5, dtype=dtype) if dtype in FLOATS else torch.tensor(1, dtype=dtype))


def rows(size: int, count: int, dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    wide = torch.float64 if dtype in FLOATS else torch.int64
    return torch.stack([value(rank, count, dtype, salt).to(wide) for rank in range(size)])


def same(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    expected = expected.to(found.dtype).reshape(found.shape)
    assert torch.equal(found, expected), f"rank {dist.get_rank()}, {what}: {found}, expected {expected}"


def counted(dtype: torch.dtype, op: Any, size: int) -> tuple[int, ...]:
    """How many elements: each dtype has loops of its own for each operation, and what becomes of short tensors is the
    same for all; how ranks share the work, which depends on their number, does not ask for either."""
    if dtype in (torch.float32, torch.int64):
        return COUNTS if size < 3 or op in (ReduceOp.SUM, ReduceOp.AVG) else (MANY,)
    return (MANY,) if size < 3 or op == ReduceOp.SUM else ()


def raises(kind: type[Exception], text: str) -> Any:
    return pytest.raises(kind, match=re.escape(text))


def reductions(rank: int, size: int) -> None:
    for dtype in (*FLOATS, *INTEGERS):
        for op, oracle in OPS.items():
            if op == ReduceOp.AVG and dtype in FLOATS and size == 3:
                continue  # a mean over 3 is not exact
            for count in counted(dtype, op, size):
                expected = oracle(rows(size, count, dtype)) if count else torch.empty(0)
                what = f"{op} of {count} {dtype}"
                tensor = value(rank, count, dtype)
                dist.all_reduce(tensor, op)
                same(tensor, expected, f"all_reduce {what}")
                tensor = value(rank, count, dtype)
                dist.reduce(tensor, size - 1, op)
                same(tensor, expected if rank == size - 1 else value(rank, count, dtype), f"reduce {what}")
                whole = rows(size, size * count, dtype)
                parts = (oracle(whole) if count else whole.sum(0)).chunk(size) if count else [torch.empty(0)] * size
                out = torch.empty(count, dtype=dtype)
                dist.reduce_scatter_tensor(out, value(rank, size * count, dtype), op)
                same(out, parts[rank], f"reduce_scatter_tensor {what}")
                out = torch.empty(count, dtype=dtype)
                dist.reduce_scatter(
                    out, list(value(rank, size * count, dtype).split(count)) if count else [out] * size, op
                )
                same(out, parts[rank], f"reduce_scatter {what}")
    for dtype in INTEGERS:
        for op, name in BITS.items():
            tensor, expected = value(rank, 9, dtype), value(0, 9, dtype)
            for other in range(1, size):
                expected = getattr(torch, name)(expected, value(other, 9, dtype))
            dist.all_reduce(tensor, op)
            same(tensor, expected, f"{op} of {dtype}")
    large = torch.full((3,), 40_000.0, dtype=torch.float16)  # two of them are too large
    tensor = large.clone()
    dist.reduce(tensor, size - 1, ReduceOp.AVG)
    assert torch.equal(tensor, large), f"reduce to a mean: {tensor}"
    for counts in ([3] * size, [r + 1 for r in range(size)]):
        out = torch.empty(counts[rank], dtype=torch.float16)
        dist.reduce_scatter(out, [large[:1].repeat(count) for count in counts], ReduceOp.AVG)
        assert (out == 40_000).all(), f"reduce_scatter to a mean of {counts}: {out}"
    for dtype in FLOATS:  # multiplied before it is rounded
        factor, what = 1.5 / size, f"PREMUL_SUM of {dtype}"
        numbers = torch.tensor([40_000.0, 3.0, 1.0]).to(dtype)  # of float16, two are too large
        expected = (numbers.double() * size * factor).to(dtype)
        premul = dist._make_nccl_premul_sum(factor)
        dist.all_reduce(tensor := numbers.clone(), premul)
        torch.testing.assert_close(tensor, expected, msg=f"all_reduce {what}: {tensor}")
        dist.reduce(tensor := numbers.clone(), 0, premul)
        torch.testing.assert_close(tensor, numbers if rank else expected, msg=f"reduce {what}: {tensor}")
        dist.reduce_scatter_tensor(out := torch.empty_like(numbers), numbers.repeat(size), premul)
        torch.testing.assert_close(out, expected, msg=f"reduce_scatter_tensor {what}: {out}")
        for counts in ([3] * size, [r + 1 for r in range(size)]):
            out = torch.empty(counts[rank], dtype=dtype)
            dist.reduce_scatter(out, [numbers[:1].repeat(count) for count in counts], premul)
            torch.testing.assert_close(out, expected[:1].repeat(counts[rank]), msg=f"reduce_scatter {what}: {out}")
    wide = torch.tensor([-7, 7, (1 << 60) + 1]) - rank  # a number of floating point is none of such
    expected = mean(torch.stack([wide + rank - r for r in range(size)]))
    dist.all_reduce(wide, ReduceOp.AVG)
    same(wide, expected, "mean of integers")
    sparse = torch.sparse_coo_tensor([[0]], torch.tensor([-7 - rank]), (2,), check_invariants=True)
    dist.all_reduce(sparse, ReduceOp.AVG)
    same(sparse.to_dense()[:1], mean(torch.tensor([[-7 - r] for r in range(size)])), "mean of sparse integers")
    lengths = [r + 1 for r in range(size)]  # parts of different lengths
    out = torch.empty(lengths[rank])
    dist.reduce_scatter(out, [value(rank, n, torch.float32, n) for n in lengths])
    same(out, rows(size, lengths[rank], torch.float32, lengths[rank]).sum(0), "uneven reduce_scatter")
    truth = torch.arange(size) == rank
    for op, expected in ((ReduceOp.SUM, torch.ones(size)), (ReduceOp.PRODUCT, torch.zeros(size) + (size == 1))):
        tensor = truth.clone()
        dist.all_reduce(tensor, op)
        same(tensor, expected.bool(), f"{op} of bool")
    tensor = torch.complex(torch.ones(3) * rank, torch.ones(3))
    dist.all_reduce(tensor)
    same(tensor, torch.complex(torch.ones(3) * sum(range(size)), torch.ones(3) * size), "complex")
    conjugate = torch.zeros(3, dtype=torch.complex64).conj()  # a view, which keeps the conjugates of its elements
    dist.reduce_scatter(conjugate, [tensor + r for r in range(size)])
    same(conjugate.resolve_conj(), (tensor + rank) * size, "a conjugate view")
    for op, share in ((ReduceOp.SUM, 1), (ReduceOp.AVG, 1 / size)):
        for width in (0, 2):  # rows r and r + 1 of rank r, and nothing of the last of several ranks
            rank_rows = [[] if size > 1 and r == size - 1 else [r, r + 1] for r in range(size)]
            expected = torch.zeros(size + 2, width)
            for r in range(size):
                expected[rank_rows[r]] += share * (r + 1)
            indices = torch.tensor([rank_rows[rank]], dtype=torch.int64).reshape(1, -1)
            values = torch.full((indices.shape[1], width), rank + 1.0)
            sparse = torch.sparse_coo_tensor(indices, values, (size + 2, width), check_invariants=True)
            dist.all_reduce(sparse, op)
            torch.testing.assert_close(sparse.to_dense(), expected, rtol=1e-6, atol=0)
    strided = torch.zeros(4, 6)[:, ::2]
    strided += value(rank, 12, torch.float32).reshape(4, 3)
    dist.all_reduce(strided)
    same(strided, rows(size, 12, torch.float32).sum(0), "a strided tensor")
    several = [value(rank, n, torch.float32, n) for n in (3, 0, 70)]
    dist.all_reduce_coalesced(several)
    for tensor, n in zip(several, (3, 0, 70), strict=True):
        same(tensor, rows(size, n, torch.float32, n).sum(0), "all_reduce_coalesced")
    outs = [torch.empty(2), torch.empty(5)]
    with dist._coalescing_manager():
        for i, out in enumerate(outs):
            dist.reduce_scatter_tensor(out, value(rank, size * out.numel(), torch.float32, i))
    for i, out in enumerate(outs):
        same(out, rows(size, size * out.numel(), torch.float32, i).sum(0).chunk(size)[rank], "coalesced reduce_scatter")


def moves(rank: int, size: int) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.int64, torch.uint16):
        for count in (0, 1, 1000):
            every = [value(r, count, torch.int64).to(dtype) for r in range(size)]
            mine, what = every[rank], f"of {count} {dtype}"
            tensor = mine.clone()
            dist.broadcast(tensor, size - 1)
            same(tensor, every[-1], f"broadcast {what}")
            out = torch.empty(size * count, dtype=dtype)
            dist.all_gather_into_tensor(out, mine)
            same(out, torch.cat(every), f"all_gather_into_tensor {what}")
            listed = [torch.empty(count, dtype=dtype) for _ in range(size)]
            dist.all_gather(listed, mine)
            same(torch.cat(listed), torch.cat(every), f"all_gather {what}")
            listed = [torch.empty(count, dtype=dtype) for _ in range(size)]
            dist.gather(mine, listed if rank == 0 else None, 0)
            if rank == 0:
                same(torch.cat(listed), torch.cat(every), f"gather {what}")
            out = torch.empty(count, dtype=dtype)
            dist.scatter(out, every if rank == size - 1 else None, size - 1)
            same(out, mine, f"scatter {what}")
            sent = [(value(10 * rank + r, count, torch.int64)).to(dtype) for r in range(size)]
            expected = [(value(10 * r + rank, count, torch.int64)).to(dtype) for r in range(size)]
            listed = [torch.empty(count, dtype=dtype) for _ in range(size)]
            dist.all_to_all(listed, sent)
            same(torch.cat(listed), torch.cat(expected), f"all_to_all {what}")
            out = torch.empty(size * count, dtype=dtype)
            dist.all_to_all_single(out, torch.cat(sent))
            same(out, torch.cat(expected), f"all_to_all_single {what}")
    group, last = dist.group.WORLD, size - 1  # its methods take the root as a number, too
    listed = [torch.empty(3) for _ in range(size)] if rank == last else []
    group.gather(listed, value(rank, 3, torch.float32), last).wait()
    group.scatter(out := torch.empty(3), listed, last).wait()
    same(out, value(rank, 3, torch.float32), "gather and scatter of the group")
    splits = [[(r + 2 * to) % 3 for to in range(size)] for r in range(size)]  # rows of 2 that r sends to another
    sent = value(rank, 2 * sum(splits[rank]), torch.float32).reshape(-1, 2)
    to_me = [splits[r][rank] for r in range(size)]
    out = torch.empty(sum(to_me), 2)
    dist.all_to_all_single(out, sent, to_me, splits[rank])
    expected = [value(r, 2 * sum(splits[r]), torch.float32).reshape(-1, 2).split(splits[r])[rank] for r in range(size)]
    same(out, torch.cat(expected), "all_to_all_single with splits")
    listed = [torch.empty(r + 1) for r in range(size)]
    dist.all_gather(listed, value(rank, rank + 1, torch.float32))
    for r, part in enumerate(listed):
        same(part, value(r, r + 1, torch.float32), "uneven all_gather")
    batch_of_one = value(rank, 8, torch.float32).reshape(1, 8)
    for mine in (batch_of_one[:, 3], batch_of_one[:, ::2][:, :0]):  # both are contiguous, with strides of 8 and 2
        out = torch.empty(size * mine.numel())
        dist.all_gather_into_tensor(out, mine)
        expected = [value(r, 8, torch.float32)[3:4] for r in range(size)]
        same(out, torch.cat(expected)[: out.numel()], "a column of a batch of one")
    dist.broadcast(batch_of_one[:, 3], size - 1)
    same(batch_of_one[0, 3:4], value(size - 1, 8, torch.float32)[3:4], "broadcast into a column of a batch of one")
    found: list[Any] = [None] * size
    dist.all_gather_object(found, {"rank": rank})
    assert found == [{"rank": r} for r in range(size)]
    outs = [torch.empty(size * 2), torch.empty(size * 3)]
    with dist._coalescing_manager():
        for i, out in enumerate(outs):
            dist.all_gather_into_tensor(out, value(rank, i + 2, torch.float32, i))
    for i, out in enumerate(outs):
        same(out, torch.cat([value(r, i + 2, torch.float32, i) for r in range(size)]), "coalesced all_gather")


def named_arguments(rank: int, size: int) -> None:
    """The methods of the group itself, called with the names that the arguments have in each form of torch's."""
    group, short = dist.group.WORLD, timedelta(seconds=60)
    total, last = rows(size, 3, torch.float32).sum(0), size - 1
    every = [value(r, 3, torch.float32) for r in range(size)]

    def check(call: Callable[[torch.Tensor, list[torch.Tensor]], Any], first: Any = None, row: Any = None) -> None:
        """What ``call`` leaves in a tensor that is this rank's, and in a row that is empty."""
        tensor, parts = every[rank].clone(), [torch.zeros(3) for _ in range(size)]
        call(tensor, parts).wait()
        same(tensor, every[rank] if first is None else first, "named arguments")
        same(torch.cat(parts), torch.zeros(3 * size) if row is None else torch.cat(row), "a row of named arguments")

    check(lambda t, _: group.allreduce(tensor=t, op=ReduceOp.SUM, timeout=short), total)
    check(lambda t, _: group.allreduce(tensors=[t], opts=dist.AllreduceOptions()), total)
    check(lambda t, _: group.broadcast(tensor=t, root=last, timeout=short), every[last])
    check(lambda t, _: group.broadcast([t]), every[0])
    check(lambda t, _: group.reduce(tensor=t, root=last, op=ReduceOp.SUM), total if rank == last else None)
    check(lambda t, _: group.reduce([t]), None if rank else total)
    check(lambda t, row: group.allgather(output_tensors=row, input_tensor=t, timeout=short), None, every)
    check(lambda t, row: group.allgather(output_tensors=[row], input_tensors=[t]), None, every)
    check(
        lambda t, row: group.gather(output_tensors=[] if rank else row, input_tensor=t, root=0), None,
        None if rank else every,
    )  # fmt: skip
    sent = [] if rank else every[::-1]
    check(lambda t, _: group.scatter(output_tensor=t, input_tensors=sent, root=0, timeout=short), every[last - rank])
    summed = rows(size, 3, torch.float32).sum(0)
    check(lambda t, _: group.reduce_scatter(output=t, input=[every[rank]] * size, op=ReduceOp.SUM), summed)
    check(lambda t, _: group.reduce_scatter(output_tensors=[t], input_tensors=[[every[rank]] * size]), summed)
    check(lambda t, row: group.alltoall(output_tensors=row, input_tensors=[t] * size), None, every)
    whole, copies = torch.zeros(3 * size), every[rank].repeat(size)
    group.alltoall_base(output=whole, input=copies, output_split_sizes=[], input_split_sizes=[]).wait()
    same(whole, torch.cat(every), "alltoall_base by names")
    group._allgather_base(output=whole.zero_(), input=every[rank]).wait()
    same(whole, torch.cat(every), "_allgather_base by names")
    out = torch.zeros(3)
    group._reduce_scatter_base(outputTensor=out, inputTensor=copies).wait()
    same(out, summed, "_reduce_scatter_base by names")
    work = group.send(tensors=[every[rank]], dstRank=(rank + 1) % size, tag=3)
    group.recv(tensors=[out], srcRank=(rank - 1) % size, tag=3).wait()
    work.wait()
    same(out, every[rank - 1], "messages by names")
    group.barrier(timeout=short).wait()
    group.monitored_barrier(timeout=short, wait_all_ranks=True)


def messages(rank: int, size: int) -> None:
    left, right = (rank - 1) % size, (rank + 1) % size
    big = 3_000_000  # bytes: more than MPI sends without being asked for
    for count in (0, 1, big // 4):
        sending = dist.isend(value(rank, count, torch.float32), right)
        found = torch.empty(count)
        assert dist.recv(found, left) == left
        same(found, value(left, count, torch.float32), f"message of {count}")
        sending.wait()
    # Tags are matched whatever the order, and messages of one tag keep theirs.
    sent = [dist.isend(value(rank, 4, torch.int64, tag), right, tag=tag) for tag in (1, 2, 2)]
    for tag in (2, 1, 2):
        found = torch.empty(4, dtype=torch.int64)
        dist.recv(found, left, tag=tag)
        same(found, value(left, 4, torch.int64, tag), f"tag {tag}")
    for work in sent:
        work.wait()
    # From whoever comes.
    if rank == 0:
        sources = set()
        for _ in range(1, size):
            found = torch.empty(3)
            source = dist.recv(found)
            same(found, value(source, 3, torch.float32), "from any rank")
            sources.add(source)
        assert sources == set(range(1, size))
    else:
        dist.send(value(rank, 3, torch.float32), 0)
    dist.barrier()
    strided = torch.zeros(5, 2).t()
    ops = [
        dist.P2POp(dist.irecv, strided, left),
        dist.P2POp(dist.isend, value(rank, 10, torch.float32), right),
    ]
    works = dist.batch_isend_irecv(ops)
    for work in works:
        work.wait()
    same(strided, value(left, 10, torch.float32), "batch_isend_irecv")
    assert works[0].is_completed()
    assert works[0].is_success()
    future = dist.irecv(found := torch.empty(2), left).get_future()
    dist.send(value(rank, 2, torch.float32), right)
    same(future.wait()[0], value(left, 2, torch.float32), "the future of a message")
    same(found, value(left, 2, torch.float32), "the memory of a message")
    for count in (2, 4):
        sending = dist.isend(torch.ones(3), right)
        with raises(ShapeMismatchError, "message"):
            dist.recv(torch.empty(count), left)
        sending.wait()
    with raises(ValueError, "tags go from 0"):
        dist.isend(torch.ones(1), right, tag=-1)


def groups(rank: int, size: int) -> None:
    evens = dist.new_group(list(range(0, size, 2)))
    head = dist.new_group([0, 1], timeout=timedelta(seconds=60)) if size > 1 else None
    alone = [dist.new_group([r]) for r in range(size)][rank]
    tensor = torch.ones(2)
    dist.all_reduce(tensor, group=alone)
    same(tensor, torch.ones(2), "a group of one")
    if rank % 2 == 0:
        members = range(0, size, 2)
        tensor = value(rank, 6, torch.float32)
        dist.all_reduce(tensor, group=evens)
        same(tensor, rows(size, 6, torch.float32)[members].sum(0), "the even ranks")
        if len(members) > 1 and rank == 0:
            dist.send(torch.ones(3), 2, group=evens)
        elif rank == 2:
            assert dist.recv(torch.empty(3), 0, group=evens) == 0
    # Two groups over the same ranks, used in opposite orders: each has a lane of its own.
    one, two = dist.new_group(), dist.new_group()
    order = [one, two] if rank % 2 == 0 else [two, one]
    tensors = {group: value(rank, 40_000, torch.float32, i) for i, group in enumerate((one, two))}
    works = [dist.all_reduce(tensors[group], group=group, async_op=True) for group in order]
    for work in works:
        work.wait()
    for i, group in enumerate((one, two)):
        same(tensors[group], rows(size, 40_000, torch.float32, i).sum(0), f"group {i} of two")
    dist.destroy_process_group(one)
    dist.barrier()
    if head is not None and rank < 2:
        dist.barrier(group=head)


def asynchronous(rank: int, size: int) -> None:
    tensors = [value(rank, 500, torch.float32, i) for i in range(8)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    futures = [work.get_future().then(lambda f: 2 * f.value()[0]) for work in works]
    for i, future in enumerate(futures):
        same(future.wait(), 2 * rows(size, 500, torch.float32, i).sum(0), "a chain on a future")
    assert all(work.is_completed() and work.exception() is None for work in works)
    assert dist.barrier(async_op=True).wait()

    def again(future: Any) -> Any:  # as PowerSGD does: another collective, awaited in a callback
        return dist.all_reduce(future.value()[0], async_op=True).get_future().wait()

    tensor = torch.ones(3)
    dist.all_reduce(tensor, async_op=True).get_future().then(again).wait()
    same(tensor, torch.full((3,), float(size * size)), "a collective inside a callback")
    # Several chains, as of its buckets: ranks that are slow to begin the next one must not mix them up.
    chains = []
    for i in range(6):
        if i % size == rank:
            time.sleep(0.02)
        tensor = torch.ones(3 + i)
        chains.append(dist.all_reduce(tensor, async_op=True).get_future().then(again).then(again))
    for i, chain in enumerate(chains):
        same(chain.wait()[0], torch.full((3 + i,), float(size**3)), "one of several chains")


def mistakes(rank: int, size: int) -> None:
    """Each is an error on all ranks, and the group goes on."""
    if size > 1:
        with raises(ShapeMismatchError, "tensor 0 has shape (3,) on MPI rank 0 and (4,) on MPI rank"):
            dist.all_reduce(torch.ones(4 if rank == size - 1 else 3))
        with raises(DTypeMismatchError, "dtype float32 on MPI rank 0 and int64"):
            dist.all_reduce(torch.ones(3, dtype=torch.int64 if rank == 1 else torch.float32))
        with raises(OrderMismatchError, "different calls"):
            dist.barrier() if rank == 1 else dist.all_reduce(torch.ones(1))
        for write in (
            lambda tensor: dist.broadcast(tensor if rank == 1 else torch.empty(3), 0),
            lambda tensor: dist.all_reduce(tensor),
            lambda tensor: dist.reduce(tensor, 1),
            lambda tensor: dist.all_gather_into_tensor(tensor.expand(size, 3), torch.ones(3)),
        ):
            with raises(UnsupportedError, "whose elements share memory; pass a clone"):
                write(torch.ones(1).expand(3))
        with raises(UnsupportedError, "layout"):
            dist.all_reduce(torch.eye(2).to_mkldnn() if rank == 1 else torch.eye(2))
        op: Any = dist._make_nccl_premul_sum(2.0) if rank == 1 else ReduceOp.SUM
        ones = torch.ones(3, dtype=torch.int64)
        for reduce in (
            lambda: dist.all_reduce(ones, op),
            lambda: dist.reduce(ones, 0, op),
            lambda: dist.reduce_scatter(ones, [ones] * size, op),
        ):
            with raises(DTypeMismatchError, "sum times 2.0 of torch.int64: only floating point is multiplied"):
                reduce()
        with raises(OrderMismatchError, "different calls"):
            dist.all_reduce(torch.ones(3), dist._make_nccl_premul_sum(2.0 + rank))
        with raises(ShapeMismatchError, "sends 2 elements to MPI rank 0, which expects 1"):
            dist.all_to_all_single(
                torch.empty(size if rank == 0 else size + (rank != 1)),
                torch.ones(size + (rank == 1)),
                [1] * size,
                [2 if rank == 1 and r == 0 else 1 for r in range(size)],
            ) if rank in (0, 1) else dist.all_to_all_single(torch.empty(size), torch.ones(size), [1] * size, [1] * size)
    for call in (
        lambda: dist.broadcast(torch.ones(3), size),
        lambda: dist.reduce(torch.ones(3), size),
        lambda: dist.group.WORLD.gather([], torch.ones(3), size),
        lambda: dist.group.WORLD.scatter(torch.ones(3), [], size),
    ):
        with raises(ConfigError, f"rank {size} as root: ranks of the group go from 0 to {size - 1}"):
            call()
    for call in (lambda: dist.group.WORLD.split_group([0]), lambda: dist.group.WORLD.merge_remote_group(None, 2)):
        with raises(UnsupportedError, "cannot be split or merged; make groups with torch.distributed.new_group"):
            call()
    with raises(DTypeMismatchError, "truth values have no mean"):
        dist.all_reduce(torch.ones(3, dtype=torch.bool), ReduceOp.AVG)
    with raises(DTypeMismatchError, "integers"):
        dist.all_reduce(torch.ones(3), ReduceOp.BXOR)
    for op in (ReduceOp.SUM, ReduceOp.MAX):
        with raises(DTypeMismatchError, "different dtypes"):
            dist.reduce_scatter_tensor(torch.empty(2, dtype=torch.int32), torch.ones(2 * size), op)
    group = dist.group.WORLD._get_backend(torch.device("cpu"))  # torch itself looks at lists
    with raises(DTypeMismatchError, "different dtypes"):
        group.reduce_scatter([torch.empty(2, dtype=torch.int32)], [[torch.ones(2)] * size])
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    same(tensor, torch.full((3,), float(size)), "after mistakes")


def model() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def trained(net: nn.Module, batches: Callable[[int], torch.Tensor]) -> nn.Module:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        optimizer.zero_grad()
        net(batches(step)).square().mean().backward()
        optimizer.step()
    return net


def compiled(rank: int, size: int, expected: nn.Module) -> None:
    """A compiler meets the group in what DDP does with buffers and gradients, and in functions that call it."""
    mine = model()
    mine.register_buffer("steps", torch.full((2,), float(rank)))
    parallel = torch.compile(nn.parallel.DistributedDataParallel(mine), backend="eager")
    trained(parallel, lambda step: batch(step, rank))
    for found, wanted in zip(mine.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-6, rtol=0)
    assert not mine.steps.any()

    parallel = nn.parallel.DistributedDataParallel(model())
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1, momentum=0.9)

    @torch.compile(backend="eager")
    def train(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        parallel(x).square().mean().backward()
        optimizer.step()

    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Dynamo does not know how to trace")  # what it should not have looked into
        for step in range(4):
            train(batch(step, rank))
    for found, wanted in zip(parallel.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-6, rtol=0)

    @torch.compile(backend="eager")
    def talk(x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        dist.all_reduce(x)
        if rank == 0:
            dist.send(x + 1, 1)
        elif rank == 1:
            dist.recv(x, 0)
        dist.barrier()
        return x + 1

    total = size * (size + 1.0)
    assert talk(torch.full((3,), rank + 1.0)).tolist() == [total + 1 + (rank == 1)] * 3


def training(rank: int, size: int) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    expected = trained(model(), lambda step: torch.cat([batch(step, r) for r in range(size)]))
    mine = model()
    if rank:  # rank 0's weights count
        nn.init.zeros_(mine[0].weight)
    parallel = nn.parallel.DistributedDataParallel(mine, bucket_cap_mb=1e-4)
    trained(parallel, lambda step: batch(step, rank))
    for found, wanted in zip(mine.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-6, rtol=0)
    compiled(rank, size, expected)
    uneven(rank, size)
    torch.manual_seed(5)
    words = nn.Sequential(nn.EmbeddingBag(20, 4, sparse=True), nn.Linear(4, 3))
    parallel = nn.parallel.DistributedDataParallel(copy.deepcopy(words))
    bags = [torch.arange(6).reshape(2, 3) * (r + 2) % 20 for r in range(size)]
    parallel(bags[rank]).square().mean().backward()
    words(torch.cat(bags)).square().mean().backward()
    for found, wanted in zip(parallel.module.parameters(), words.parameters(), strict=True):
        torch.testing.assert_close(found.grad.to_dense(), wanted.grad.to_dense(), atol=1e-6, rtol=0)
    sharded = copy.deepcopy(model())
    mesh = dist.init_device_mesh("cpu", (size,))
    for layer in (sharded[0], sharded[2], sharded):
        fully_shard(layer, mesh=mesh)
    trained(sharded, lambda step: batch(step, rank))
    for part, wanted in zip(sharded.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(part.full_tensor(), wanted, atol=1e-6, rtol=0)
    with kvmpi.create("local") as kv, raises(ConfigError, "0.weight is sharded"):
        kvmpi.torch.DiLoCo(sharded.named_parameters(), kv)
    whole = copy.deepcopy(model())
    cpu = torch.device("cpu")
    flat = FullyShardedDataParallel(copy.deepcopy(whole), device_id=cpu)
    sgd = torch.optim.SGD(flat.parameters(), 0.1)
    with kvmpi.create("local") as kv, raises(ConfigError, "sharded") if size > 1 else nullcontext():
        kvmpi.torch.DistributedOptimizer(sgd, kv)
    for i in (0, 2):
        whole[i] = FullyShardedDataParallel(whole[i], device_id=cpu, use_orig_params=True)
    older = FullyShardedDataParallel(whole, device_id=cpu, use_orig_params=True)
    trained(older, lambda step: batch(step, rank))
    with FullyShardedDataParallel.summon_full_params(older):
        for found, wanted in zip(older.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(found, wanted, atol=1e-6, rtol=0)


def uneven(rank: int, size: int) -> None:
    """Rank r has 2 + r batches, and means are over the ranks that still have one."""
    alone, mine = model(), model()
    parallel = nn.parallel.DistributedDataParallel(mine)
    optimizers = [torch.optim.SGD(net.parameters(), 0.1) for net in (alone, mine)]
    with parallel.join(divide_by_initial_world_size=False):
        for step in range(2 + rank):
            optimizers[1].zero_grad()
            parallel(batch(step, rank)).square().mean().backward()
            optimizers[1].step()
    for step in range(1 + size):
        optimizers[0].zero_grad()
        alone(torch.cat([batch(step, r) for r in range(size) if step < 2 + r])).square().mean().backward()
        optimizers[0].step()
    for found, wanted in zip(mine.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-6, rtol=0)


def memory(rank: int, size: int) -> None:
    """What was in a call can be resized, as before; what is under way is kept, though nobody else refers to it."""
    for dtype in FLOATS:
        for tensor in (value(rank, 4, dtype), torch.empty(0, dtype=dtype), value(rank, 8, dtype)[::2]):
            dist.all_reduce(tensor)
            dist.broadcast(tensor, 0)
            tensor.untyped_storage().resize_(100)
    works = [dist.all_reduce(torch.ones(200_000), async_op=True) for _ in range(8)]
    for work in works:
        work.wait()
        same(work.result()[0], torch.full((200_000,), float(size)), "a tensor that only its work refers to")


def absent(rank: int, size: int) -> None:
    """A rank that does not come: an error on the others, in time; other groups go on."""
    group = dist.new_group(timeout=timedelta(seconds=1.5))
    start_s = time.monotonic()
    if rank != 1:
        with raises(KVTimeoutError, "MPI rank 1 of this process group did not make the call"):
            dist.all_reduce(torch.ones(3), group=group)
        with raises(KVTimeoutError, "not done within"):
            dist.recv(torch.empty(1), 1, group=group)
        assert time.monotonic() - start_s < 15, "the timeout of a group is its deadline"
    dist.barrier()


def forks(rank: int, size: int) -> None:
    def fork() -> None:
        """As a DataLoader with workers does."""
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)

    with pytest.warns(RuntimeWarning, match="this process speaks MPI and is being forked"):
        fork()


#: Each where it tells something that it does not tell elsewhere.
CHECKS: dict[int, Sequence[Callable[[int, int], None]]] = {
    1: (reductions, moves, groups, asynchronous, mistakes),
    2: (reductions, moves, groups, asynchronous, mistakes, messages, training, extensions, memory, forks),
    3: (reductions, moves, named_arguments, messages, mistakes),
    4: (reductions, groups, asynchronous, messages, extensions),
}


def main() -> None:
    dist.init_process_group("kvmpi", timeout=timedelta(seconds=90))
    rank, size = dist.get_rank(), dist.get_world_size()
    assert size == int(sys.argv[1])
    assert dist.get_backend() == "kvmpi"
    for check in CHECKS[size]:
        check(rank, size)
    # Once more from the start.
    dist.destroy_process_group()
    dist.init_process_group("kvmpi", timeout=timedelta(seconds=90))
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    same(tensor, torch.full((2,), float(size)), "after another init_process_group")
    print("all checks passed", flush=True)
    if size == 2:
        absent(rank, size)
        print("in time", flush=True)


if __name__ == "__main__":
    main()
