"""Train a model with kvmpi and with DistributedDataParallel: the two loss curves in one picture, and how far apart.

Without options: 2 workers, a small network on scikit-learn's digits, 200 steps. Both trainings start from the same
weights and see the same images in the same order. ``--model resnet20 --data cifar10.tar`` is the real thing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from os.path import expanduser
from pathlib import Path
from typing import Any

import image_data
import image_models
import numpy as np
import torch
from torch import nn
from training_report import at_least

import kvmpi
from kvmpi.torch import DistributedOptimizer

#: What is compared, and how the picture shows it: the second is drawn over the first.
WAYS = {
    "ddp": {"label": "DistributedDataParallel, gloo", "color": "#E69F00", "linewidth": 4},
    "kvmpi": {"label": "kvmpi, mpi-sgd", "color": "#0072B2", "linewidth": 1.2},
}


def train(args: argparse.Namespace, way: str) -> None:
    """One worker: all steps; loss and seconds of each go into a file of its own."""
    kv = kvmpi.create("mpi")  # tells DistributedDataParallel's workers too which of them is which
    rank, size = kv.rank, kv.num_workers
    torch.set_num_threads(1)
    data = image_data.load(args.data, rank, size, with_test=False, limit=args.limit)
    _, channels, pixels, _ = data.train.pixels.shape
    model = image_models.create(args.model, channels, pixels, len(data.classes), args.seed)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4)
    if way == "ddp":
        torch.distributed.init_process_group("gloo", init_method=f"file://{args.out}/ddp", rank=rank, world_size=size)
        forward: nn.Module = nn.parallel.DistributedDataParallel(model)
    else:
        forward, optimizer = model, DistributedOptimizer(optimizer, kv, model)

    rng = np.random.default_rng([args.seed, rank])
    losses, seconds = [], []
    for chosen in image_data.batches(data.train, args.batch_size, args.steps, 1, args.seed, rank):
        x, y = data.train.batch(chosen)
        x = image_data.augment(x, rng)
        start_s = time.perf_counter()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(forward(x), y)
        loss.backward()
        optimizer.step()
        seconds.append(time.perf_counter() - start_s)
        losses.append(loss.item())
    (Path(args.out) / f"{way}-{rank}.json").write_text(json.dumps({"losses": losses, "seconds": seconds}))
    if way == "ddp":
        torch.distributed.destroy_process_group()
    kv.close()


def run(args: argparse.Namespace, way: str, folder: str) -> dict[str, np.ndarray]:
    """A job of ``-n`` workers; the mean loss of each step, and how long it took."""
    print(f"{WAYS[way]['label']}: {args.n} workers, {args.steps} steps", flush=True)
    options = [f"--{name.replace('_', '-')}={value}" for name, value in vars(args).items() if name not in ("n", "out")]
    program = [__file__, *options, f"--out={folder}", f"--worker={way}"]
    subprocess.run([sys.executable, "-m", "kvmpi", "run", f"-n{args.n}", "--", *program], check=True)
    found = [json.loads((Path(folder) / f"{way}-{rank}.json").read_text()) for rank in range(args.n)]
    return {name: np.mean([worker[name] for worker in found], axis=0) for name in ("losses", "seconds")}


def draw(args: argparse.Namespace, curves: dict[str, np.ndarray], apart: float) -> None:
    """The losses of both over the steps."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    plt.rcParams.update({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False})
    figure, axes = plt.subplots(figsize=(7.5, 4.2), layout="constrained")
    for way, style in WAYS.items():
        axes.plot(np.arange(1, args.steps + 1), curves[way], **style)
    subject = f"{args.model} on {Path(args.data).name}, {args.n} workers with batches of {args.batch_size}"
    axes.set(xlabel="step", ylabel="training loss", title=f"{subject}\nlargest relative difference {apart:.1e}")
    axes.grid(color="0.9")
    axes.legend(frameon=False)
    figure.savefig(args.out, dpi=150)
    plt.close(figure)


def arguments(argv: list[str] | None = None) -> tuple[argparse.Namespace, str]:
    """The command line, and which way this process trains if it is a worker."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("-n", type=at_least(1), default=2, metavar="WORKERS", help="default 2; more of them add in another order")
    add(
        "--data",
        type=expanduser,
        default="digits",
        help="digits (default), or a folder or tar: train/CLASS/*.jpg, test/CLASS/*.jpg",
    )
    add("--model", choices=("cnn", "resnet20"), default="cnn", help="default cnn")
    add("--steps", type=at_least(1), default=200, help="default 200")
    add("--batch-size", type=at_least(1), default=16, help="of each worker (default 16)")
    add("--lr", type=float, default=0.1, help="default 0.1")
    add("--limit", type=at_least(0), default=0, metavar="N", help="use N training images only")
    add("--seed", type=int, default=0, help="of weights and order (default 0)")
    add("--tolerance", type=float, default=1e-5, metavar="R", help="exit with status 1 above it (default 1e-5)")
    add("--out", type=expanduser, default="losses.png", metavar="FILE", help="the picture (default losses.png)")
    add("--worker", choices=list(WAYS), default="", help=argparse.SUPPRESS)
    args: Any = parser.parse_args(argv)
    if not Path(args.out).absolute().parent.is_dir():
        parser.error(f"--out {args.out}: there is no such folder")
    way = args.worker
    del args.worker
    return args, way


def main(argv: list[str] | None = None) -> int:
    """The exit status."""
    args, way = arguments(argv)
    if way:
        train(args, way)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        try:
            results = {way: run(args, way, folder) for way in WAYS}
        except subprocess.CalledProcessError as error:  # the job has said why
            return error.returncode
    curves = {way: result["losses"] for way, result in results.items()}
    apart = float(np.max(np.abs(curves["kvmpi"] - curves["ddp"]) / np.abs(curves["ddp"])))
    for way, result in results.items():
        print(
            f"{WAYS[way]['label']:<30} first loss {result['losses'][0]:.4f}, last {result['losses'][-1]:.4f}, "
            f"{1e3 * np.median(result['seconds']):.1f} ms a step"
        )
    print(f"largest relative difference of a step's loss: {apart:.1e}")
    draw(args, curves, apart)
    print(f"picture: {args.out}")
    if not apart <= args.tolerance:
        print(f"that is more than --tolerance {args.tolerance:g}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
