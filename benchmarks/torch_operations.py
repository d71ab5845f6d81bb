"""What each operation of torch.distributed takes on CPU tensors, kvmpi beside gloo, in the same processes and in turns.

Run ``kvmpi run -n 2 benchmarks/torch_operations.py [--sizes 4K,4M] [--rounds 20]``. Results of both are verified first.
Sizes are bytes of what a rank has before the operation, of what it has after it for all_gather and gather. Times are
medians of rounds, of several calls each where they are short, after a barrier; the slowest rank's.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import kvmpi.torch.c10d  # noqa: F401 - registers the backend
from kvmpi.benchmarks.sizes import format_bytes, parse_sizes
from kvmpi.benchmarks.table import Table

#: A call, and what its result is to be; None where a rank has none.
Operation = tuple[Callable[[], object], torch.Tensor, torch.Tensor | None]

#: Calls of one round, up to a size.
_CALLS = ((64 << 10, 20), (1 << 20, 4))


def operations(group: dist.ProcessGroup, count: int) -> dict[str, Operation]:
    """All of them on ``count`` elements of float32."""
    rank, size = dist.get_rank(), dist.get_world_size()
    part = max(1, count // size)
    ramp, ranks = torch.arange(count) % 7, [float(each) for each in range(size)]
    mine, small = (ramp + rank).float(), torch.full((part,), float(rank))
    whole, gathered = torch.empty(part * size), torch.empty(part * size)
    parts = list(gathered.chunk(size))
    joined = torch.tensor(ranks).repeat_interleave(part)
    spread = torch.cat([torch.full((part,), 10.0 * rank + dest) for dest in range(size)])
    summed, largest, cast, reduced, out = (torch.empty_like(mine) for _ in range(5))
    own, ours, got, arrived = torch.empty(part), torch.empty(part), torch.empty(part * size), torch.empty(count)
    following, before = (rank + 1) % size, (rank - 1) % size

    def all_reduce(into: torch.Tensor, op: dist.ReduceOp.RedOpType) -> None:
        into.copy_(mine)
        dist.all_reduce(into, op, group)

    def broadcast() -> None:
        if rank == 0:
            cast.copy_(mine)
        dist.broadcast(cast, 0, group)

    def reduce() -> None:
        reduced.copy_(mine)
        dist.reduce(reduced, 0, group=group)

    def all_gather() -> None:
        dist.all_gather(parts, small, group)

    def gather() -> None:
        dist.gather(small, parts if rank == 0 else None, 0, group)

    def scatter() -> None:
        dist.scatter(own, list(spread.chunk(size)) if rank == 0 else None, 0, group)

    def exchange() -> None:
        sends = dist.P2POp(dist.isend, mine, following, group), dist.P2POp(dist.irecv, arrived, before, group)
        for work in dist.batch_isend_irecv(list(sends)):
            work.wait()

    # Before torch 2.13 they have other names, of which it warns.
    all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    total = size * ramp.float() + sum(ranks)
    columns = torch.cat([torch.full((part,), 10.0 * source + rank) for source in range(size)])
    return {
        "all_reduce": (lambda: all_reduce(summed, dist.ReduceOp.SUM), summed, total),
        "all_reduce_max": (lambda: all_reduce(largest, dist.ReduceOp.MAX), largest, ramp.float() + size - 1),
        "broadcast": (broadcast, cast, ramp.float()),
        "reduce": (reduce, reduced, total if rank == 0 else None),
        "all_gather": (all_gather, gathered, joined),
        "all_gather_single": (lambda: all_gather_single(whole, small, group), whole, joined),
        "reduce_scatter_single": (
            lambda: reduce_scatter_single(ours, spread, group=group), ours,
            torch.full((part,), 10.0 * sum(ranks) + size * rank),
        ),
        "all_to_all_single": (lambda: dist.all_to_all_single(got, spread, group=group), got, columns),
        "gather": (gather, gathered, joined if rank == 0 else None),
        "scatter": (scatter, own, torch.full((part,), float(rank))),
        "isend_irecv": (exchange, arrived, ramp.float() + before),
        "barrier": (lambda: dist.barrier(group), out, None),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sizes", default="4,4K,64K,256K,1M,4M,32M", help="bytes (%(default)s)")
    parser.add_argument("--rounds", type=int, default=20, help="of each operation and size (%(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("kvmpi")
    groups = {"kvmpi": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    rank, size = dist.get_rank(), dist.get_world_size()
    names = list(operations(groups["gloo"], 1))
    columns = {"operation": 9, "size": 8, "kvmpi_us": 9, "gloo_us": 9, "gloo/kvmpi": 10}
    table = Table(columns, {"operation": names})
    if rank == 0:
        print(f"{size} ranks, torch {torch.__version__}, one thread each")
        print(table.header(), flush=True)
    for number, count in enumerate(parse_sizes(args.sizes, 4)):
        nbytes = 4 * count
        calls = next((times for most, times in _CALLS if nbytes <= most), 1)
        of_groups = {name: operations(group, count) for name, group in groups.items()}
        for operation in names:
            if number and operation == "barrier":  # it has no size
                continue
            for name, found in of_groups.items():
                call, result, expected = found[operation]
                call()
                if expected is not None and not torch.equal(result, expected):
                    raise SystemExit(f"{operation} of {nbytes} bytes by {name}: wrong result on rank {rank}")
            times: dict[str, list[float]] = {name: [] for name in groups}
            for _ in range(args.rounds):
                for name, group in groups.items():
                    call = of_groups[name][operation][0]
                    dist.barrier(group)
                    began_s = time.perf_counter()
                    for _ in range(calls):
                        call()
                    times[name].append((time.perf_counter() - began_s) / calls)
            took = torch.tensor([statistics.median(times[name]) for name in groups], dtype=torch.float64)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            ours_s, gloo_s = took.tolist()
            if rank == 0:
                row = {"operation": operation, "size": format_bytes(nbytes).replace(" ", "_")}
                row |= {"kvmpi_us": 1e6 * ours_s, "gloo_us": 1e6 * gloo_s, "gloo/kvmpi": f"{gloo_s / ours_s:.2f}"}
                print(table.line(row), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
