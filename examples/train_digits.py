"""An ordinary PyTorch program with several workers: ``kvmpi run -n 2 train_digits.py``, or ``python`` for one alone.

Four places, (1) to (4), make it one. ``train_images.py`` is the program for all of kvmpi's algorithms.
"""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import kvmpi
from kvmpi.torch import DistributedOptimizer


def main(argv: list[str] | None = None) -> float:
    """The share of the test images that are recognised at the end."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    stores = ("mpi", "dist_sync", "dist_sync_mpi")
    parser.add_argument("--store", default="mpi", choices=stores, help="default mpi")
    parser.add_argument("--epochs", type=int, default=10, help="default 10")
    parser.add_argument("--batch-size", type=int, default=32, help="of each worker (default 32)")
    parser.add_argument("--checkpoint", type=Path, help="written after every epoch; if it is there, training goes on")
    args = parser.parse_args(argv)
    if min(args.epochs, args.batch_size) < 1:
        parser.error("--epochs and --batch-size must be at least 1")
    if args.checkpoint:
        args.checkpoint = args.checkpoint.expanduser()  # --checkpoint=~/x, of which shells leave ~ to us
        args.checkpoint.parent.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # workers share the cores of a host

    digits = load_digits()
    images, labels = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(digits.target)
    train, test_images, test_labels = TensorDataset(images[:1500], labels[:1500]), images[1500:], labels[1500:]

    # (1) This process is one of the workers: number kv.rank of kv.num_workers.
    with kvmpi.create(args.store) as kv:
        # (2) Each worker has its own share of the data.
        sampler = DistributedSampler(train, kv.num_workers, kv.rank)
        batches = DataLoader(train, args.batch_size, sampler=sampler)

        model = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10),
        )  # fmt: skip
        saved = torch.load(args.checkpoint) if args.checkpoint and args.checkpoint.exists() else None
        if saved:
            model.load_state_dict(saved["model"])
        # (3) All go on with worker 0's weights, and gradients become their mean over all workers, during backward.
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), kv, model)
        done = saved["epochs"] if saved else 0
        if saved:
            optimizer.load_state_dict(saved["optimizer"])
        # Half a cosine over all epochs, also if there are more now than when it began.
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda epoch: (1 + math.cos(math.pi * epoch / args.epochs)) / 2, last_epoch=done - 1
        )

        def accuracy() -> float:
            model.eval()
            with torch.no_grad():
                share = float((model(test_images).argmax(1) == test_labels).float().mean())
            model.train()
            return share

        if done >= args.epochs and kv.rank == 0:
            print(f"{args.checkpoint} has {done} epochs, nothing is left to do: accuracy {accuracy():.2%}", flush=True)
        for epoch in range(done, args.epochs):
            sampler.set_epoch(epoch)  # another order in each
            for x, y in batches:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # of the mean: alike in all workers
                optimizer.step()
            schedule.step()
            # (4) All have the same weights: one of them speaks, and writes.
            if kv.rank == 0:
                print(f"epoch {epoch + 1}: accuracy {accuracy():.2%}", flush=True)
                if args.checkpoint:
                    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epochs": epoch + 1}
                    written = args.checkpoint.with_name(args.checkpoint.name + ".tmp")
                    torch.save(state, written)
                    os.replace(written, args.checkpoint)  # as a whole, whenever this is interrupted
        return accuracy()


if __name__ == "__main__":
    main()
