"""Run by test_torch_c10d on 3 ranks: some leave a process group, by an error that they catch, or before the others.

``early``: ranks that are in a call hear of it at once. ``late``: all of them end in good order, also after another
program that has made process groups.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from raising import raises

import kvmpi.horovod as hvd
import kvmpi.torch.c10d  # noqa: F401 - registers the backend
from kvmpi.errors import OrderMismatchError

torch.set_num_threads(1)


@contextlib.contextmanager
def within(seconds: float, what: str) -> Iterator[None]:
    """Timeouts are torch's, half an hour, unless said otherwise."""
    start_s = time.monotonic()
    yield
    took_s = time.monotonic() - start_s
    assert took_s < seconds, f"{what} took {took_s:.1f} s"


def early(rank: int) -> None:
    for leaving in (0, 1):
        group = dist.new_group()
        with within(20, f"hearing of rank {leaving}"):
            if rank == leaving:
                dist.destroy_process_group(group)
            else:
                with raises(OrderMismatchError, match=f"MPI rank {leaving} of this process group has left"):
                    dist.all_reduce(torch.ones(3), group=group)
    hvd.init()
    with within(20, "hearing of rank 2"):
        if rank == 2:
            hvd.shutdown()
        else:
            with raises(OrderMismatchError, match="MPI rank 2 of this client has left"):
                hvd.allreduce(torch.ones(3))

    # A program that survives a bad batch; rank 1 does not even destroy the group.
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(5, 2))
    with within(20, "the end of training"):
        try:
            for step in range(5):
                if rank == 1 and step == 2:
                    raise ArithmeticError("a bad batch")
                model(torch.randn(4, 5)).sum().backward()
        except ArithmeticError:
            print("leaves", flush=True)
            return
        except RuntimeError as error:  # torch makes this of it
            print("MPI rank 1 of this process group has left" in str(error) and "has heard", flush=True)


def late(rank: int) -> None:
    with within(1, "leaving together"):
        group = dist.new_group()
        dist.all_reduce(torch.ones(3), group=group)
        dist.destroy_process_group(group)
    board = dist.distributed_c10d._get_default_store()
    for last in (0, 2):
        group = dist.new_group()
        dist.all_reduce(torch.ones(3), group=group)
        if rank == last:  # stays, as if it wrote a checkpoint: the others must not need it to leave
            board.wait([f"{other} has left {last}" for other in range(3) if other != last], timedelta(seconds=20))
        dist.destroy_process_group(group)
        board.set(f"{rank} has left {last}", "yes")
    dist.all_reduce(torch.ones(3))
    dist.destroy_process_group()
    print("in good order", flush=True)


if __name__ == "__main__":
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("kvmpi")
    {"early": early, "late": late}[sys.argv[1]](dist.get_rank())
