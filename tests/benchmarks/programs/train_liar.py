"""A rank of ``kvmpi bench train`` twice: its DistributedOptimizer exchanges nothing, or spoils the last rank's weights.

train_liar.py ARG...

A line with the exit status follows each.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

import kvmpi.torch
from kvmpi.benchmarks import train

right = kvmpi.torch.DistributedOptimizer


def nothing(optimizer: Any, kv: Any, model: Any, **options: Any) -> Any:
    optimizer.synchronize = lambda: None
    return optimizer


def last(optimizer: Any, kv: Any, model: Any, **options: Any) -> Any:
    made = right(optimizer, kv, model, **options)
    if kv.rank == kv.num_workers - 1:
        with torch.no_grad():
            next(model.parameters())[0] += 1
    return made


if __name__ == "__main__":
    for lie in (nothing, last):
        kvmpi.torch.DistributedOptimizer = lie
        print("status", train.main("train", sys.argv[1:]), flush=True)
