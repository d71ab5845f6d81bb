"""``kvmpi bench train``: what the exchange of gradients adds to a step, beside DistributedDataParallel over gloo."""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from kvmpi.benchmarks.report import complain
from kvmpi.benchmarks.table import Table
from kvmpi.errors import UnsupportedError

#: What a step costs without any exchange; the others are compared with it.
ALONE = "alone"
_DDP = "ddp:gloo"
WAYS = (ALONE, "kvmpi", "kvmpi:late", "trainer", _DDP)
_MODELS = ("resnet20", "gpt")
_CHECKED_STEPS = 3
_COLUMNS = {"model": 8, "ranks": 5, "way": 10, "step_ms": 8, "exposed_ms": 10, "of_ddp": 6, "wrong": 5}


def main(name: str, argv: Sequence[str]) -> int:
    """Run ``kvmpi bench train ARGV``; the exit status."""
    parser = argparse.ArgumentParser(
        prog=f"kvmpi bench {name}", allow_abbrev=False,
        description="Ranks of one host train small models on random data. alone: no exchange. kvmpi: gradients leave "
        "during the backward pass (DistributedOptimizer); late: after it, by the same optimizer. trainer: after it, by "
        "kvmpi.torch.Trainer. ddp:gloo: DistributedDataParallel. Medians of rounds in which all take turns; exposed_ms "
        "is what a step takes longer than alone, of_ddp that divided by DistributedDataParallel's.",
    )  # fmt: skip
    parser.add_argument("-n", "--ranks", metavar="N,...", default="2", help="numbers of ranks (default 2)")
    parser.add_argument("--models", default=",".join(_MODELS), metavar="NAME,...", help="default resnet20,gpt")
    parser.add_argument("--rounds", type=int, default=10, metavar="R", help="rounds (default 10)")
    parser.add_argument("--steps", type=int, default=10, metavar="S", help="steps of each in a round (default 10)")
    args = parser.parse_args(argv)
    if unknown := sorted(set(args.models.split(",")) - set(_MODELS)):
        parser.error(f"--models {','.join(unknown)}: known are {', '.join(_MODELS)}")
    if any(not n.isdecimal() or int(n) < 2 for n in args.ranks.split(",")):
        parser.error(f"--ranks {args.ranks}: expected numbers from 2 on, separated by commas")
    if min(args.rounds, args.steps) < 1:
        parser.error("--rounds and --steps must be at least 1")
    if "KVMPI_ROLE" in os.environ:
        return _rank(args)
    table = _table()
    print(table.header(), flush=True)
    options = ["--models", args.models, "--rounds", str(args.rounds), "--steps", str(args.steps)]
    for ranks in args.ranks.split(","):
        command = [sys.executable, "-m", "kvmpi", "run", "-n", ranks, "--", __file__, "-n", ranks, *options]
        job = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        print(job.stdout.replace("[worker 0] ", ""), end="", flush=True)
        if job.returncode:
            return job.returncode
    return 0


def _table() -> Table:
    return Table(_COLUMNS, {"model": _MODELS, "way": WAYS})


def _rank(args: argparse.Namespace) -> int:
    import torch

    import kvmpi
    from kvmpi.benchmarks import peers
    from kvmpi.config import Config

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    status = 0
    ranks = Config.from_env().num_workers
    torch.set_num_threads(max(1, cores // ranks))
    ways = list(WAYS)
    for model in args.models.split(","):
        with kvmpi.create("mpi") as kv:
            try:
                peers.start_gloo()
            except UnsupportedError as error:
                ways = [way for way in WAYS if way != _DDP]
                if kv.rank == 0:
                    print(f"# {_DDP} left out: {error}")
            wrong, times_s = _measure(kv, model, ways, args)
            status |= int(any(wrong.values()))
            if kv.rank == 0:
                _show(model, ranks, wrong, {way: statistics.median(found) for way, found in times_s.items()})
            peers.stop_gloo()
    return status


def _measure(
    kv: Any, model: str, ways: Sequence[str], args: argparse.Namespace
) -> tuple[dict[str, int], dict[str, list[float]]]:
    """Of each way: how many weights were wrong, and the seconds that a step took in each round."""
    import torch
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    steps, weights = {}, {}
    for way in sorted(ways, key=lambda way: way != "trainer"):  # whose keys begin at 0; the others take what is free
        steps[way], weights[way] = _start(kv, model, way)
    for way in ways:
        for _ in range(_CHECKED_STEPS):
            steps[way]()
    wrong = {}
    for way in ways:
        found, expected = (torch.cat([w.detach().flatten() for w in weights[of]]) for of in (way, ways[-1]))
        close = torch.isclose(found, expected, rtol=1e-3, atol=1e-4)
        wrong[way] = 0 if way == ALONE else int((~close).sum())
    times_s: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(args.rounds):
        for way in ways:
            world.Barrier()
            start_s = time.perf_counter()
            for _ in range(args.steps):
                steps[way]()
            times_s[way].append(world.allreduce(time.perf_counter() - start_s, MPI.MAX) / args.steps)
    return wrong, times_s


def _start(kv: Any, name: str, way: str) -> tuple[Callable[[], None], list[Any]]:
    """A step of one way, and the weights that it changes."""
    import torch

    from kvmpi.benchmarks.train_models import MODELS
    from kvmpi.torch import DistributedOptimizer, Trainer

    make, data, batch = MODELS[name]
    torch.manual_seed(0)
    model: Any = make()
    weights = list(model.parameters())
    inputs, targets = data(kv.rank, batch)
    optimizer: Any = torch.optim.SGD(weights, lr=0.01, momentum=0.9)
    trainer: Any = None
    late: Callable[[], Any] = nullcontext
    if way.startswith("kvmpi"):
        # Statistics of batch normalisation stay with each worker, in all ways alike.
        optimizer = DistributedOptimizer(optimizer, kv, model, norm_buffers="own")
        late = optimizer.no_sync if way.endswith("late") else nullcontext
    elif way == "trainer":
        trainer = Trainer(weights, optimizer, kv, update_on_kvstore=False)
    elif way != ALONE:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # newer versions of torch rename the first option
            model = torch.nn.parallel.DistributedDataParallel(
                model, broadcast_buffers=False, gradient_as_bucket_view=True
            )

    def step() -> None:
        optimizer.zero_grad()
        with late():
            torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        if trainer is None:
            optimizer.step()
        else:
            trainer.step(kv.num_workers)

    return step, weights


def _show(model: str, ranks: int, wrong: dict[str, int], times_s: dict[str, float]) -> None:
    exposed_ms = {way: 1e3 * (found - times_s[ALONE]) for way, found in times_s.items()}
    ddp_ms = exposed_ms.get(_DDP, 0.0)
    for way, found in times_s.items():
        row = {"model": model, "ranks": ranks, "way": way, "step_ms": 1e3 * found, "wrong": wrong[way]}
        row["exposed_ms"] = None if way == ALONE else exposed_ms[way]
        row["of_ddp"] = f"{exposed_ms[way] / ddp_ms:.2f}" if way != ALONE and ddp_ms > 0 else None
        print(_table().line(row), flush=True)
        if wrong[way]:
            complain(f"WRONG: {model}, {way}: {wrong[way]} weights after {_CHECKED_STEPS} steps")


if __name__ == "__main__":
    sys.exit(main("train", sys.argv[1:]))
