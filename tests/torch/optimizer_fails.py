"""Run by test_torch_optimizer_jobs: worker 1 alone is interrupted, or raises, in the middle of training."""

from __future__ import annotations

import os
import signal
import sys

import torch
from optimizer_loops import loss_of, mlp, sgd, shard

import kvmpi
from kvmpi.torch import DistributedOptimizer

torch.set_num_threads(1)


def main() -> None:
    kv = kvmpi.create("mpi")
    model = mlp(kv.rank)
    optimizer = DistributedOptimizer(sgd(model), kv, model)
    for step in range(1000):
        if step == 3 and kv.rank == 1:
            if sys.argv[1] == "interrupt":
                os.kill(os.getpid(), signal.SIGINT)
            raise ArithmeticError("only worker 1 is out of luck")
        optimizer.zero_grad()
        loss_of(model, [shard(step, kv.rank)]).backward()
        optimizer.step()
    print("went on to the end")


if __name__ == "__main__":
    main()
