"""Run by test_horovod on 3 ranks: Horovod's operations against what torch computes in float64.

``horovod_checks.py SIZE compiled``: those of a compiler alone, in a job of fewer: it takes longer than all others.
"""

from __future__ import annotations

import enum
import os
import sys
from collections import OrderedDict

import numpy as np
import pytest
import torch
from horovod_optimizers import changing, close, compiled, hooked, optimizers, raises, schedulers, sharing

import kvmpi.horovod as hvd
from kvmpi.errors import (
    ConfigError,
    DTypeMismatchError,
    NotLaunchedError,
    OrderMismatchError,
    ShapeMismatchError,
    UnsupportedError,
)

torch.set_num_threads(1)

OPS = {
    hvd.Sum: lambda rows: rows.sum(0),
    hvd.Average: lambda rows: rows.mean(0),
    hvd.Min: lambda rows: rows.amin(0),
    hvd.Max: lambda rows: rows.amax(0),
    hvd.Product: lambda rows: rows.prod(0),
}


def value(rank: int, *shape: int) -> torch.Tensor:
    """Small multiples of 1/2, by rank and index: sums and means of them are exact for one rank, two and four."""
    count = int(np.prod(shape))
    return (((torch.arange(count) * 7 + rank * 3) % 5) / 2).reshape(shape)


def rows(size: int, *shape: int) -> torch.Tensor:
    return torch.stack([value(rank, *shape).double() for rank in range(size)])


def allreduces(rank: int, size: int) -> None:
    for op, oracle in OPS.items():
        expected = oracle(rows(size, 3, 4))
        mine = value(rank, 3, 4)
        close(hvd.allreduce(mine, op=op), expected, str(op))
        close(mine, value(rank, 3, 4), "allreduce leaves its tensor alone")
        close(hvd.synchronize(hvd.allreduce_async(mine, op=op)), expected, str(op))
        close(mine, value(rank, 3, 4), "allreduce_async leaves its tensor alone")
        assert hvd.allreduce_(mine, op=op) is mine
        close(mine, expected, f"{op} in place")
        mine = value(rank, 3, 4)
        handle = hvd.allreduce_async_(mine, name="x", op=op)
        assert hvd.synchronize(handle) is mine
        assert hvd.poll(handle)
        close(mine, expected, f"{op} in place, later")
    close(hvd.allreduce(value(rank, 5)), rows(size, 5).mean(0), "the default is the average")
    close(hvd.allreduce(value(rank, 5), average=False), rows(size, 5).sum(0), "average=False")
    halves = hvd.allreduce(value(rank, 5), compression=hvd.Compression.fp16, op=hvd.Sum)
    assert halves.dtype == torch.float32
    close(halves, rows(size, 5).sum(0), "by way of float16")
    scaled = hvd.allreduce(value(rank, 5), op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0)
    close(scaled, 1.5 * rows(size, 5).sum(0), "scaled")
    close(hvd.allreduce(torch.tensor(float(rank))), torch.tensor((size - 1) / 2), "without dimensions")
    for factors in ({"prescale_factor": 0.5}, {"postscale_factor": 0.5}):
        whole = hvd.allreduce(torch.tensor([4, 6]), op=hvd.Sum, **factors)
        assert torch.equal(whole, torch.tensor([2, 3]) * size), f"{factors}: {whole}"
    large = torch.full((size + 1, 2), 40_000.0, dtype=torch.float16)  # two of them are too large
    assert (hvd.reducescatter(large) == 40_000).all()
    assert (hvd.reducescatter(large[:size]) == 40_000).all()
    large.requires_grad_()
    hvd.broadcast(large, 0).backward(torch.full_like(large, 40_000.0))
    assert (large.grad == (40_000 if rank == 0 else 0)).all(), large.grad
    several = [value(rank, 3), value(rank, 0), value(rank, 2, 2)]
    for found, shape in zip(hvd.grouped_allreduce(several, op=hvd.Sum), ((3,), (0,), (2, 2)), strict=True):
        close(found, rows(size, *shape).sum(0), "grouped")
    hvd.grouped_allreduce_(several, op=hvd.Sum)
    close(several[2], rows(size, 2, 2).sum(0), "grouped in place")
    handle = hvd.grouped_allreduce_async([value(rank, 3)], op=hvd.Sum)
    close(hvd.synchronize(handle)[0], rows(size, 3).sum(0), "grouped, later")
    weights = value(rank, 4).requires_grad_()
    (hvd.allreduce(weights, op=hvd.Sum) * (rank + 1)).sum().backward()
    close(weights.grad, torch.full((4,), size * (size + 1) / 2), "the gradient of a sum is the sum of gradients")
    steps = torch.tensor([-7 - rank, 7 + rank])
    expected = torch.tensor([-7 * size, 7 * size]) + torch.tensor([-1, 1]) * sum(range(size))
    assert torch.equal(hvd.allreduce(steps), torch.div(expected, size, rounding_mode="trunc"))
    with raises(DTypeMismatchError, "truth values have no mean"):
        hvd.allreduce(torch.ones(2, dtype=torch.bool))
    with raises(UnsupportedError, "Adasum"):
        hvd.allreduce(torch.ones(2), op=hvd.Adasum)
    with raises(ConfigError, "both given"):
        hvd.allreduce(torch.ones(2), average=True, op=hvd.Sum)
    if size > 1:
        ones, other = torch.ones(size), (hvd.Average, hvd.Sum)[min(rank, 1)]
        for call, options in (
            (hvd.allreduce, {"op": other}),
            (hvd.allreduce, {"postscale_factor": 0.5 + rank}),
            (hvd.reducescatter, {"op": other}),
            (hvd.reducescatter, {"postscale_factor": 0.5 + rank}),
            (lambda tensor, op: hvd.sparse_allreduce_async(tensor.to_sparse(), op=op).wait(), {"op": other}),
        ):
            with raises(OrderMismatchError, "by Average"):
                call(ones, **options)


def moves(rank: int, size: int) -> None:
    gathered = hvd.allgather(value(rank, rank + 1, 3))
    close(gathered, torch.cat([value(r, r + 1, 3) for r in range(size)]), "allgather of different lengths")
    none = hvd.allgather(torch.empty(0, 2) if rank else torch.ones(1, 2))
    close(none, torch.ones(1, 2), "allgather of nothing but one row")
    root = size - 1
    mine = value(rank, 2, 2)
    close(hvd.broadcast(mine, root), value(root, 2, 2), "broadcast")
    close(mine, value(rank, 2, 2), "broadcast leaves its tensor alone")
    assert hvd.broadcast_(mine, root) is mine
    close(mine, value(root, 2, 2), "broadcast in place")
    sent = value(rank, 2 * size, 3)
    parts = [value(r, 2 * size, 3).chunk(size)[rank] for r in range(size)]
    close(hvd.alltoall(sent), torch.cat(parts), "alltoall")
    splits = [[(r + to) % 3 for to in range(size)] for r in range(size)]
    sent = value(rank, sum(splits[rank]), 2)
    output, received = hvd.alltoall(sent, splits=torch.tensor(splits[rank]))
    expected = [value(r, sum(splits[r]), 2).split(splits[r])[rank] for r in range(size)]
    close(output, torch.cat(expected), "alltoall with splits")
    assert received.tolist() == [splits[r][rank] for r in range(size)]
    for length in (size, 2 * size + 1):
        for op in (hvd.Sum, hvd.Average):
            total = OPS[op](rows(size, length, 2))
            part = torch.tensor_split(total, size)[rank]
            close(hvd.reducescatter(value(rank, length, 2), op=op), part, f"reducescatter of {length} rows")
            mine = torch.complex(value(rank, length, 2), value(rank + 1, length, 2))
            imaginary = OPS[op](torch.stack([value(r + 1, length, 2).double() for r in range(size)]))
            found, part = (
                hvd.reducescatter(mine, op=op),
                torch.tensor_split(torch.complex(total, imaginary), size)[rank],
            )
            torch.testing.assert_close(found, part.to(found.dtype), rtol=1e-6, atol=1e-6)
    hvd.barrier()
    with raises(ConfigError, "ranks go from 0"):
        hvd.broadcast(mine, size)
    if size > 1:
        with raises(ShapeMismatchError, "shape (2,) on MPI rank 0 and (3,)"):
            hvd.allgather(torch.ones(2, 2 if rank == 0 else 3))
        with raises(OrderMismatchError, "allreduce of 'a'"):
            hvd.allreduce(torch.ones(2), name="b" if rank == 1 else "a")
        with raises(ShapeMismatchError, "splits"):
            hvd.alltoall(torch.ones(3), splits=[1] * size if rank == 1 and size != 3 else [7] * size)
        with raises(ShapeMismatchError, f"{size + 1} rows are no {size} equal parts"):
            hvd.alltoall(torch.ones(size if rank else size + 1))


def other_devices_by_default(rank: int, size: int) -> None:
    """A program that has called ``torch.set_default_device`` names no device; what travels is copied to the host's."""
    mine, expected = value(rank, 4, 3).t(), rows(size, 4, 3)
    with torch.device("meta"):  # none of these is contiguous
        close(hvd.allreduce(mine, op=hvd.Sum), expected.sum(0).t())
        close(hvd.broadcast(mine, size - 1), expected[-1].t())
        close(hvd.allgather(mine), torch.cat([part.t() for part in expected]))
        found = hvd.broadcast_object({"none": mine[:0], "some": mine}, 0)
        close(found["none"], mine[:0])
        close(found["some"], expected[0].t())


def groups_of_tensors(rank: int, size: int) -> None:
    """The grouped forms of what moves rows, and sums of sparse tensors."""
    shapes = [lambda r: (r + 1, 3), lambda r: (2,), lambda r: (0, 4)]
    mine = [value(rank, *shape(rank)) for shape in shapes]
    whole = [torch.cat([value(r, *shape(r)) for r in range(size)]) for shape in shapes]
    later = hvd.grouped_allgather_async(mine, name="x")
    for name, every in (("now", hvd.grouped_allgather(mine)), ("later", hvd.synchronize(later))):
        assert isinstance(every, list)
        for found, expected in zip(every, whole, strict=True):
            close(found, expected, f"grouped_allgather, {name}")
    lengths = (size, 2 * size + 1)
    mine = [value(rank, length, 2) for length in lengths]
    later = hvd.grouped_reducescatter_async(mine, op=hvd.Sum, postscale_factor=2.0)
    now = hvd.grouped_reducescatter(mine, op=hvd.Sum, prescale_factor=2.0, compression=hvd.Compression.fp16)
    for every in (now, hvd.synchronize(later)):
        for found, length in zip(every, lengths, strict=True):
            expected = torch.tensor_split(2 * rows(size, length, 2).sum(0), size)[rank]
            close(found, expected, f"grouped_reducescatter of {length} rows")
    for op, share in ((hvd.Sum, 1), (hvd.Average, 1 / size)):
        dense = torch.zeros(size + 2, 2, dtype=torch.float64)
        for r in range(size):
            dense[[r, r + 1]] += share * (r + 1)
        sparse = torch.sparse_coo_tensor([[rank, rank + 1]], torch.full((2, 2), rank + 1.0), (size + 2, 2))
        handle = hvd.sparse_allreduce_async(sparse, "embedding", op)
        close(handle().to_dense(), dense, f"a sparse {op}")  # Horovod's is called
        assert hvd.synchronize(handle).layout is torch.sparse_coo
        close(sparse.to_dense()[rank], torch.full((2,), rank + 1.0), "it leaves its tensor alone")
    with raises(ConfigError, "use hvd.allreduce for dense ones"):
        hvd.sparse_allreduce_async(torch.ones(2), "x", hvd.Sum)


class Stranger:
    pass


class Kind(str, enum.Enum):
    SMALL = "small"


class Seconds(float):
    pass


class Steps(enum.IntEnum):
    FEW = 3


def objects(rank: int, size: int) -> None:
    obj = {
        "list": [1, -2.5, None, True, "ä", b"\0", "name\udcff"], "tuple": (0.9, 0.999), 3: {"set": {1, 2}},
        "large": 1 << 80,
        "ordered": OrderedDict([("b", 1), ("a", 2)]), "tensor": torch.arange(6).reshape(2, 3).bfloat16(),
        "scalar": torch.tensor(2.0), "empty": torch.empty(0, 4), "array": np.arange(4.0).reshape(2, 2),
        "infinite": float("inf"), "number": np.float32(1.5), "double": np.float64(0.1), "whole": np.int64(7),
        "truth": np.bool_(True), "frozen": frozenset({1}), "sets": {frozenset({1, 2}), (3, 4)},
        frozenset({"key"}): 5, "fields": np.array([(1, 2.5)], dtype=[("a", "i4"), ("b", "f8", (1,))]),
        "when": np.array(["2026-01-02"], dtype="datetime64[D]"), "columns": np.asfortranarray(np.eye(2)),
    }  # fmt: skip
    found = hvd.broadcast_object(obj if rank == size - 1 else None, root_rank=size - 1)
    assert list(found) == list(obj)
    for key in (
        "list",
        "tuple",
        3,
        "large",
        "ordered",
        "infinite",
        "number",
        "double",
        "whole",
        "truth",
        "frozen",
        "sets",
        frozenset({"key"}),
    ):
        assert found[key] == obj[key], key
        assert type(found[key]) is type(obj[key]), key
    for key in ("tensor", "scalar", "empty"):
        assert torch.equal(found[key], obj[key]), key
        assert found[key].dtype == obj[key].dtype, key
    for key in ("array", "fields", "when", "columns"):
        assert found[key].dtype == obj[key].dtype, key
        np.testing.assert_array_equal(found[key], obj[key])
    assert hvd.allgather_object({"rank": rank, "text": "x" * rank}) == [
        {"rank": r, "text": "x" * r} for r in range(size)
    ]
    plain = ["small", "text", b"octets", 2.5, 3, ""]
    narrowed = hvd.broadcast_object(
        [Kind.SMALL, np.str_("text"), np.bytes_(b"octets"), Seconds(2.5), Steps.FEW, np.str_()]
    )
    if rank:  # the root has its own
        assert narrowed == plain
        assert [type(item) for item in narrowed] == [type(item) for item in plain]
    for root in range(min(2, size)):
        with raises(UnsupportedError, "Stranger is not sent between ranks: it would have to be pickled"):
            hvd.broadcast_object({"a": [Stranger()]} if rank == root else None, root_rank=root)
    if size > 1:
        with raises(OrderMismatchError, "broadcast_object of None from 0"):
            hvd.broadcast_object(rank, root_rank=min(rank, 1))
        assert hvd.broadcast_object(rank) == 0
    with raises(UnsupportedError, "Stranger is not sent between ranks"):
        hvd.allgather_object(Stranger() if rank == size - 1 else 1)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=np.float64(0.1) if rank == 0 else 5.0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0, model=torch.nn.Linear(1, 1))
    assert optimizer.param_groups[0]["lr"] == 0.1
    optimizer.param_groups[0]["lr"] = Stranger() if rank == 0 else 5.0
    with raises(UnsupportedError, "Stranger is not sent between ranks"):
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)


def uneven(rank: int, size: int) -> None:
    """Rank r has r + 1 batches; each is summed over those that have one, as zeros of the others leave it."""
    for step in range(rank + 1):
        found = hvd.allreduce(value(rank, 4), op=hvd.Sum)
        close(found, rows(size, 4)[step:].sum(0), f"sum {step} of the ranks that are left")
    assert hvd.join() == size - 1
    if size > 1:
        if rank == 0:
            with raises(UnsupportedError, "has joined"):
                hvd.join()
        else:
            with raises(UnsupportedError, "has joined"):
                hvd.allgather(torch.ones(1))
        assert hvd.join() in range(size)
    close(hvd.allreduce(torch.ones(1), op=hvd.Sum), torch.tensor([float(size)]), "after all have joined")


def fork() -> None:
    """As a DataLoader with workers does."""
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)


def main() -> None:
    if sys.argv[2:] == ["compiled"]:
        hvd.init()
        compiled(hvd.rank(), hvd.size())
        hvd.shutdown()
        print("compiles", flush=True)
        return
    with raises(NotLaunchedError, "call hvd.init() first"):
        hvd.rank()
    wanted = [0] if int(sys.argv[1]) > 1 else [0, 1]
    with raises(UnsupportedError, f"hvd.init with {len(wanted)} ranks in a job of {sys.argv[1]}"):
        hvd.init(comm=wanted)
    assert not hvd.is_initialized()
    hvd.init(comm=list(range(int(sys.argv[1]))))
    hvd.init()
    with raises(UnsupportedError, "start it with as many as it is to have"):
        hvd.init(wanted)
    assert hvd.is_initialized()
    rank, size = hvd.rank(), hvd.size()
    assert size == int(sys.argv[1])
    assert (hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()) == (rank, size, 0, 1)
    with raises(UnsupportedError, "kvmpi run --restart"):
        hvd.elastic.run(main)
    with raises(UnsupportedError, "kvmpi run --timeline FILE"):
        hvd.start_timeline("timeline.json")
    hvd.stop_timeline()
    every = hvd.global_process_set
    assert (every.process_set_id, every.ranks, every.size(), every.rank()) == (0, list(range(size)), size, rank)
    close(hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=every), torch.tensor([float(size)]))
    for refused in (
        lambda: hvd.ProcessSet([0]),
        lambda: hvd.add_process_set([0]),
        lambda: hvd.remove_process_set(every),
        lambda: hvd.init(process_sets=[[0]]),
        lambda: hvd.allreduce(torch.ones(1), process_set=[0]),
        lambda: hvd.broadcast_object(1, process_set=[0]),
    ):
        with raises(UnsupportedError, "torch.distributed.new_group"):
            refused()
    with raises(UnsupportedError, "hvd.SyncBatchNorm: use torch.nn.SyncBatchNorm"):
        hvd.SyncBatchNorm(3)
    with raises(UnsupportedError, "kvmpi run -n NP"):
        hvd.run(main, np=2)
    assert not any(built() for built in (hvd.rocm_built, hvd.ddl_built, hvd.ccl_built))
    with raises(hvd.HorovodInternalError, "ranks go from 0"):
        hvd.broadcast(torch.ones(1), size)
    if size > 1:
        with pytest.warns(RuntimeWarning, match="this process speaks MPI and is being forked"):
            fork()
    for check in (
        allreduces,
        moves,
        other_devices_by_default,
        groups_of_tensors,
        objects,
        optimizers,
        changing,
        sharing,
        schedulers,
        hooked,
        uneven,
    ):
        check(rank, size)
    hvd.shutdown()
    assert not hvd.is_initialized()
    hvd.init()
    assert hvd.size() == size
    print("all checks passed", flush=True)


if __name__ == "__main__":
    main()
