"""Run by test_torch_interrupts: worker 1 alone is out of luck in the middle of training, or nobody ever ends."""

from __future__ import annotations

import itertools
import os
import signal
import sys
from pathlib import Path

import torch
from optimizer_loops import loss_of, mlp, sgd, shard

import kvmpi
from kvmpi.torch import DistributedOptimizer

torch.set_num_threads(1)


def train(kv: kvmpi.KVStore, how: str, folder: Path) -> None:
    model = mlp(kv.rank)
    optimizer = DistributedOptimizer(sgd(model), kv, model, bucket_bytes=150, overlap=True)
    training = str(folder / f"{kv.rank}.{os.getpid()}.training")
    for step in range(1000) if how != "endless" else itertools.count():
        if step == 3 and kv.rank == 1 and how != "endless":
            if how in ("interrupt", "give_up"):
                os.kill(os.getpid(), signal.SIGINT)
            raise ArithmeticError("only worker 1 is out of luck")
        optimizer.zero_grad()
        loss_of(model, [shard(step, kv.rank)]).backward()
        optimizer.step()
        if how == "endless" and not step:
            # The whole name at once: Ctrl-C may come with it, and pathlib makes names in handlers of its own.
            os.close(os.open(training, os.O_CREAT))
    print("went on to the end")


def main() -> None:
    store, how, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    kv = kvmpi.create(store)
    if how != "give_up":
        train(kv, how, folder)
        return
    try:
        try:
            train(kv, how, folder)
        finally:
            kv.close()
    except (KeyboardInterrupt, kvmpi.KVError) as error:
        print(f"gave up after {type(error).__name__}")


if __name__ == "__main__":
    main()
