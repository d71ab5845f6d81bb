"""Train a classifier of small images with any of kvmpi's algorithms: ``kvmpi run -n 4 -c 2 -s 2 train_images.py``.

The same program is all of them: ALGORITHMS says which store type each needs, what the servers run, and what the loop
does after ``loss.backward()``. Started with plain ``python`` it runs as a job of one worker.

For gradients alone, two lines of a loop are enough: see ``train_digits.py``. Here they go through a Trainer, since that
can ``skip`` the batches which a job that is started again, or resumed, has done before.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from os.path import expanduser
from typing import Any

import image_data
import image_models
import numpy as np
import torch
from torch import Tensor, nn
from training_report import Report, at_least, count

import kvmpi
from kvmpi.config import Config
from kvmpi.torch import DiLoCo, ElasticAveraging, Trainer


class GradientExchange:
    """Every batch: gradients to the store, which updates the weights; new weights back."""

    def __init__(self, kv: kvmpi.KVStore, model: nn.Module, optimizer: torch.optim.Optimizer, args: Any) -> None:
        self._trainer = Trainer(model.named_parameters(), optimizer, kv)
        # A store sums; the loss is a mean over this worker's batch. So what is left is to divide by the number of
        # workers in one update: all of them, or in an asynchronous store those of one client, or some.
        self._divisor = kv.mpi_size * kv.pushes_per_update if kv.is_capable("async") else kv.num_workers

    def step(self) -> None:
        self._trainer.step(self._divisor)

    def batches_done(self, kv: kvmpi.KVStore) -> int:
        """How many batches the weights have seen that the store gave us: after a restart or a resume, some."""
        return kv.resumed_step

    def skip(self) -> None:
        """Instead of ``step``, for one of these."""
        self._trainer.skip(self._divisor)

    def center(self, out: Iterable[Tensor]) -> bool:
        """Put the weights of the center into ``out``, if this algorithm has a center."""
        return False


class ElasticExchange:
    """Synchronous SGD inside the client; every INTERVAL batches its weights and a center pull at each other."""

    def __init__(self, kv: kvmpi.KVStore, model: nn.Module, optimizer: torch.optim.Optimizer, args: Any) -> None:
        self._client_size, self._interval = kv.mpi_size, args.interval
        self._inside = Trainer(model.named_parameters(), optimizer, kv.client)
        self._outside = self._make(kv, model, args)

    def _make(self, kv: kvmpi.KVStore, model: nn.Module, args: Any) -> ElasticAveraging | DiLoCo:
        return ElasticAveraging(model.named_parameters(), kv, args.alpha, args.interval)

    def step(self) -> None:
        self._inside.step(self._client_size)
        self._outside.step()

    def batches_done(self, kv: kvmpi.KVStore) -> int:
        return kv.resumed_step * int(self._interval)

    def skip(self) -> None:
        self._inside.skip(self._client_size)

    def center(self, out: Iterable[Tensor]) -> bool:
        self._outside.pull_center(out)
        return True


class DiLoCoExchange(ElasticExchange):
    """Synchronous SGD inside the client; every INTERVAL batches the servers do an outer step on all changes."""

    def _make(self, kv: kvmpi.KVStore, model: nn.Module, args: Any) -> ElasticAveraging | DiLoCo:
        return DiLoCo(model.named_parameters(), kv, args.interval, args.outer_lr, args.outer_momentum)


@dataclass(frozen=True)
class Algorithm:
    store: str  # the store type
    server: str  # what the servers run
    loop: type[GradientExchange | ElasticExchange]  # what a worker does after each backward
    optimizer: str = "sgd"  # default of --optimizer


ALGORITHMS = {
    "local": Algorithm("local", "nothing: one worker", GradientExchange),
    "dist-sgd": Algorithm("dist_sync", "SGD, once per round of all workers", GradientExchange),
    "mpi-sgd": Algorithm("dist_sync_mpi", "SGD, once per round of all clients", GradientExchange),
    "dist-asgd": Algorithm("dist_async", "SGD, for each worker's gradients as they come", GradientExchange),
    "mpi-asgd": Algorithm("dist_async_mpi", "SGD, for each client's gradients as they come", GradientExchange),
    "dist-ssp": Algorithm("dist_ssp", "the same; no worker gets far ahead of another", GradientExchange),
    "mpi-ssp": Algorithm("dist_ssp_mpi", "the same; no client gets far ahead of another", GradientExchange),
    "dist-softsync": Algorithm("dist_softsync", "SGD, for as many gradients as there are workers", GradientExchange),
    "mpi-softsync": Algorithm("dist_softsync_mpi", "SGD, for as many gradients as there are clients", GradientExchange),
    "dist-esgd": Algorithm("dist_async", "Elastic, for each worker's weights", ElasticExchange),
    "mpi-esgd": Algorithm("dist_async_mpi", "Elastic, for each client's weights", ElasticExchange),
    "diloco": Algorithm("dist_sync_mpi", "Outer, once per round of all clients", DiLoCoExchange, "adamw"),
}


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    table = "\n".join(f"  {name:<13} {a.store:<17} {a.server}" for name, a in ALGORITHMS.items())
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0],
        epilog=f"algorithms, their store types, and what the servers run:\n{table}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--algorithm", choices=list(ALGORITHMS), default="mpi-esgd", metavar="NAME", help="default mpi-esgd; see below")
    add(
        "--data", type=expanduser, default="digits",
        help="digits (default), or a folder or tar: train/CLASS/*.jpg, test/CLASS/*.jpg",
    )  # fmt: skip
    add("--model", choices=("cnn", "resnet20"), default="cnn", help="default cnn")
    add("--epochs", type=at_least(1), default=10, help="default 10")
    add("--batch-size", type=at_least(1), default=16, help="of each worker (default 16)")
    add("--optimizer", choices=("sgd", "adamw"), help="default sgd; diloco: adamw")
    add("--lr", type=float, help="learning rate (default: sgd 0.1, asynchronous 0.2, adamw 0.006)")
    add("--momentum", type=float, help="of sgd (default 0.9, asynchronous 0)")
    add("--weight-decay", type=float, default=1e-4, help="default 0.0001")
    add("--schedule", choices=("cosine", "constant"), default="cosine", help="of the learning rate (default cosine)")
    add("--interval", type=at_least(1), help="batches between exchanges of weights (default 64, at most half an epoch)")
    add("--alpha", type=float, help="of elastic averaging (default 0.9 / number of clients)")
    add("--outer-lr", type=float, default=0.7, help="of DiLoCo (default 0.7)")
    add("--outer-momentum", type=float, default=0.9, help="of DiLoCo (default 0.9)")
    add("--augment", action="store_true", help="mirror and move training images at random")
    add("--limit", type=at_least(0), default=0, metavar="N", help="use N training images only")
    add("--seed", type=int, default=0, help="of weights and order (default 0)")
    add(
        "--log", type=expanduser, default="", metavar="FILE",
        help="write JSON lines: the settings, then an object for each epoch",
    )  # fmt: skip
    add("--target-accuracy", type=float, default=0.0, metavar="A", help="exit with status 1 below it, e.g. 0.95")
    args = parser.parse_args(argv)
    return args


def fill_in(args: argparse.Namespace, kv: kvmpi.KVStore, num_batches: int) -> None:
    """Defaults that depend on the algorithm and on the job."""
    algorithm = ALGORITHMS[args.algorithm]
    if args.optimizer is None:
        args.optimizer = algorithm.optimizer
    # Between reading weights and applying its gradients, an asynchronous client misses about one step of each other
    # client. That acts like momentum by itself (Mitliagkas et al. 2016), and bounds the step that is stable.
    stale = algorithm.loop is GradientExchange and kv.is_capable("async")
    if args.momentum is None:
        args.momentum = 0.0 if stale else 0.9
    if args.lr is None:
        args.lr = 0.006 if args.optimizer == "adamw" else min(0.2, 0.8 / kv.num_clients) if stale else 0.1
    if args.alpha is None:
        args.alpha = 0.9 / kv.num_clients
    if args.interval is None:
        args.interval = min(64, max(1, num_batches // 2))


def make_optimizer(args: argparse.Namespace, model: nn.Module) -> torch.optim.Optimizer:
    """What applies gradients: in this process, or in the store, which has the same ones."""
    if args.optimizer == "adamw":
        return torch.optim.AdamW(model.parameters(), args.lr, weight_decay=args.weight_decay)
    return torch.optim.SGD(model.parameters(), args.lr, args.momentum, weight_decay=args.weight_decay)


def accuracy(model: nn.Module, images: image_data.Images) -> float:
    """The share of ``images`` that ``model`` recognises."""
    model.eval()
    right = 0
    with torch.no_grad():
        for start in range(0, len(images), 500):
            x, y = images.batch(np.arange(start, min(start + 500, len(images))))
            right += int((model(x).argmax(1) == y).sum())
    model.train()
    return right / len(images)


def refresh_norms(model: nn.Module, images: image_data.Images, batch_size: int) -> None:
    """Batch-norm statistics for weights that no worker has trained with, from some of the training images."""
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    if norms:
        some = [np.arange(i, i + batch_size) % len(images) for i in range(0, 32 * batch_size, batch_size)]
        torch.optim.swa_utils.update_bn((images.batch(chosen)[0] for chosen in some), model)


def train(args: argparse.Namespace, kv: kvmpi.KVStore, report: Report) -> float:
    """All epochs; the last accuracy on worker 0, 1.0 on the others."""
    data = image_data.load(args.data, kv.rank, kv.num_workers, with_test=kv.rank == 0, limit=args.limit)
    if data.train_count < kv.num_workers:
        sys.exit(f"{data.train_count} training images for {kv.num_workers} workers: there is none for some")
    _, channels, size, _ = data.train.pixels.shape
    num_batches = max(1, data.train_count // kv.num_workers // args.batch_size)  # the same for every worker
    fill_in(args, kv, num_batches)
    model = image_models.create(args.model, channels, size, len(data.classes), args.seed)
    optimizer = make_optimizer(args, model)
    loop = ALGORITHMS[args.algorithm].loop(kv, model, optimizer, args)
    deployed = copy.deepcopy(model)
    steps = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs) if args.schedule == "cosine" else None

    done = loop.batches_done(kv)
    again = f"; goes on after batch {done}" if done else ""
    job = {"workers": kv.num_workers, "clients": kv.num_clients, "servers": kv.num_servers, "store": kv.type}
    report.header(
        f"{args.algorithm}: {count(kv.num_workers, 'worker')}, {count(kv.num_clients, 'client')}, "
        f"{count(kv.num_servers, 'server')} ({kv.type}); "
        f"{data.train_count} images, {num_batches} batches of {args.batch_size} per worker and epoch{again}",
        {**vars(args), **job},
        again=bool(done),
    )
    elapsed_s = result = 0.0

    def measure() -> float:
        """Of what this job would be trained for: the center, where there is one."""
        has_center = loop.center(deployed.parameters())  # all workers ask for it, worker 0 looks at it
        if data.test is None:
            return 0.0
        if has_center:
            refresh_norms(deployed, data.train, args.batch_size)
        return accuracy(deployed if has_center else model, data.test)

    for epoch in range(1, args.epochs + 1):
        rng = np.random.default_rng([args.seed, epoch, kv.rank, 1])
        kv.barrier()
        start_s, total_loss = time.perf_counter(), 0.0
        report.start(epoch, num_batches)
        order = image_data.batches(data.train, args.batch_size, num_batches, epoch, args.seed, kv.rank)
        for i, chosen in enumerate(order, num_batches * (epoch - 1)):
            x, y = data.train.batch(chosen)
            x = image_data.augment(x, rng) if args.augment else x
            if i < done:
                loop.skip()
                continue
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            loop.step()
            kv.clock()
            step, batch_loss = i + 1, loss.item()
            total_loss += batch_loss
            kv.report(step, loss=batch_loss)
            report.advance(batch_loss)
        kv.barrier()
        epoch_s = time.perf_counter() - start_s
        elapsed_s += epoch_s
        report.finish()
        if steps is not None:
            steps.step()
        if num_batches * epoch <= done:  # was only for the barriers, and the learning rate
            continue
        result = measure()
        if data.test is not None:
            kv.report(step, accuracy=result)
            num_trained = min(num_batches, num_batches * epoch - done)
            report.epoch(epoch, total_loss / num_trained, result, epoch_s, elapsed_s)
    if done >= num_batches * args.epochs:
        refresh_norms(model, data.train, args.batch_size)
        result = measure()
        report.say(f"all {count(args.epochs, 'epoch')} were done before, nothing is left to do: accuracy {result:.2%}")
    return result if kv.rank == 0 else 1.0


def main(argv: list[str] | None = None) -> int:
    """The exit status."""
    args = arguments(argv)
    config = Config.from_env()
    if args.algorithm == "local" and config.num_workers > 1:
        print("--algorithm local is for one worker: start it with plain python, or with -n 1", file=sys.stderr)
        return 2
    try:
        store = kvmpi.create(ALGORITHMS[args.algorithm].store)
    except kvmpi.errors.ConfigError as error:  # a job of the wrong shape
        print(f"--algorithm {args.algorithm}: {error}", file=sys.stderr)
        return 2
    with store as kv:
        with contextlib.closing(Report(active=kv.rank == 0, tty=config.tty, log=args.log)) as report:
            result = train(args, kv, report)
    if result < args.target_accuracy:
        print(f"accuracy {result:.2%} is below --target-accuracy {args.target_accuracy:.2%}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
