"""Run several algorithms of train_images.py one after another: a table and two pictures of accuracy and time."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

TRAIN = Path(__file__).with_name("train_images.py")

#: The algorithms, with colours that are told apart in print and by the colour-blind (after Okabe & Ito).
COLOURS = {
    "local": "#000000",
    "dist-sgd": "#0072B2",
    "mpi-sgd": "#56B4E9",
    "dist-asgd": "#D55E00",
    "mpi-asgd": "#E69F00",
    "dist-ssp": "#7F7F7F",
    "mpi-ssp": "#F0E442",
    "dist-softsync": "#B0A8E0",
    "mpi-softsync": "#5D3A9B",
    "dist-esgd": "#009E73",
    "mpi-esgd": "#CC79A7",
    "diloco": "#8A6D3B",
}


@dataclass
class Result:
    """What one run has left behind."""

    algorithm: str
    status: int
    total_s: float
    settings: dict[str, Any] = field(default_factory=dict)
    epochs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def accuracy(self) -> float:
        return self.epochs[-1]["val_accuracy"] if self.epochs else 0.0

    @property
    def mean_epoch_s(self) -> float:
        return statistics.fmean(e["epoch_s"] for e in self.epochs) if self.epochs else 0.0


def run(algorithm: str, workers: int, clients: int, servers: int, folder: Path, options: list[str]) -> Result:
    """One job, shown as it goes. ``dist-*`` takes every worker as a client of its own, ``local`` is one process."""
    log = folder / f"{algorithm}.jsonl"
    log.unlink(missing_ok=True)
    if algorithm == "local":
        workers, clients, servers = 1, 1, 0
    elif algorithm.startswith("dist-"):
        clients = workers
    shape = (f"-n{workers}", f"-c{clients}", f"-s{servers}")
    launch = [sys.executable, "-m", "kvmpi", "run", *shape]
    program = [str(TRAIN), "--algorithm", algorithm, "--log", str(log), *options]
    print(f"$ {' '.join(['kvmpi', *launch[3:], TRAIN.name, *program[1:]])}", flush=True)
    start_s = time.perf_counter()
    status = subprocess.run([*launch, *program], check=False).returncode
    result = Result(algorithm, status, time.perf_counter() - start_s)
    if log.exists():
        lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
        result.settings = next((line for line in lines if line["event"] == "config"), {})
        result.epochs = [line for line in lines if line["event"] == "epoch"]
    print(flush=True)
    return result


def table(results: list[Result], target: float) -> Table:
    """The last thing that one sees."""
    shown = Table()
    shown.add_column("algorithm")
    for name in ("clients", "final accuracy", "mean epoch s", "total s"):
        shown.add_column(name, justify="right")
    for r in results:
        good = r.status == 0 and bool(r.epochs) and r.accuracy >= target
        accuracy = f"{r.accuracy:.2%}" if r.epochs else f"failed ({r.status})"
        clients = str(r.settings.get("clients", "-"))
        colour = "" if good else "red"
        shown.add_row(r.algorithm, clients, accuracy, f"{r.mean_epoch_s:.2f}", f"{r.total_s:.1f}", style=colour)
    return shown


def draw(results: list[Result], folder: Path, target: float) -> list[Path]:
    """Accuracy against time, and mean time of an epoch, as the MXNET-MPI paper's figures 11 to 13 show them."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    plt.rcParams.update({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False})
    first = results[0].settings
    subject = f"{first['model']} on {Path(first['data']).name}, {max(r.settings['workers'] for r in results)} workers"

    figure, axes = plt.subplots(figsize=(7.5, 4.6), layout="constrained")
    for r in results:
        times = [e["elapsed_s"] for e in r.epochs]
        accuracies = [100 * e["val_accuracy"] for e in r.epochs]
        axes.plot(times, accuracies, "o-", color=COLOURS[r.algorithm], label=_label(r), markersize=4, linewidth=1.8)
    if target:
        axes.axhline(100 * target, color="0.5", linestyle="--", linewidth=1, label=f"target {target:.0%}")
    axes.set(xlabel="training time in s", ylabel="validation accuracy in %", title=f"Accuracy over time: {subject}")
    axes.set_xlim(left=0)
    axes.set_ylim(top=100)
    axes.grid(color="0.9")
    axes.legend(frameon=False, loc="best")
    curves = folder / "accuracy.png"
    figure.savefig(curves, dpi=150)

    figure, axes = plt.subplots(figsize=(max(5.5, 1.1 * len(results) + 2), 4.6), layout="constrained")
    bars = axes.bar(
        [_label(r, "\n") for r in results], [r.mean_epoch_s for r in results], width=0.6,
        color=[COLOURS[r.algorithm] for r in results],
    )  # fmt: skip
    axes.bar_label(bars, fmt="%.2f s", padding=2)
    axes.margins(y=0.08)
    axes.set(ylabel="mean time of an epoch in s", title=f"Time of an epoch: {subject}")
    axes.tick_params(axis="x", length=0)
    axes.grid(axis="y", color="0.9")
    axes.set_axisbelow(True)
    times_of_epochs = folder / "epoch_time.png"
    figure.savefig(times_of_epochs, dpi=150)
    plt.close("all")
    return [curves, times_of_epochs]


def _label(r: Result, between: str = ", ") -> str:
    clients = r.settings["clients"]
    return f"{r.algorithm}{between}{clients} client{'s' if clients > 1 else ''}"


def main(argv: list[str] | None = None) -> int:
    """The exit status: 1 if a run failed or missed the target."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0],
        epilog="All other options go to train_images.py: --data, --epochs, --model, --batch-size, ...",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--algorithms", default="dist-sgd,mpi-sgd,dist-asgd,mpi-asgd,dist-esgd,mpi-esgd", help="default: these six")
    add("-n", type=int, default=4, metavar="WORKERS", help="default 4")
    add("-c", type=int, default=2, metavar="CLIENTS", help="of mpi-* and diloco (default 2)")
    add("-s", type=int, default=2, metavar="SERVERS", help="default 2")
    add(
        "--out", type=Path, default=Path("runs/compare"), metavar="DIR", help="logs and pictures (default runs/compare)"
    )
    add("--target-accuracy", type=float, default=0.0, metavar="A", help="exit with status 1 if a run ends below it")
    args, options = parser.parse_known_args(argv)
    names = [name.strip() for name in args.algorithms.split(",") if name.strip()]
    if unknown := [name for name in names if name not in COLOURS]:
        parser.error(f"unknown algorithm {', '.join(unknown)}; known: {', '.join(COLOURS)}")
    if not names:
        parser.error(f"--algorithms names none of {', '.join(COLOURS)}")
    if own := [word for word in options if word.startswith(("--alg", "--lo"))]:
        parser.error(f"{own[0]}: --algorithms says which, and their logs go to --out")
    if min(args.n, args.c) < 1:
        parser.error("-n and -c must be at least 1")
    try:
        args.out = args.out.expanduser()  # --out=~/x, of which shells leave ~ to us
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out {args.out}: {error.strerror}")
    results = []
    for name in names:
        results.append(run(name, args.n, args.c, args.s, args.out, options))
        if results[-1].status > 128 or results[-1].status < 0:  # Ctrl-C, most likely
            break
    Console().print(table(results, args.target_accuracy))
    drawn = [r for r in results if r.epochs]
    if drawn:
        print("pictures:", ", ".join(str(path) for path in draw(drawn, args.out, args.target_accuracy)))
    return int(any(r.status or not r.epochs or r.accuracy < args.target_accuracy for r in results))


if __name__ == "__main__":
    sys.exit(main())
