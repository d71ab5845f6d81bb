"""``kvmpi bench startup``: from the command to the end of the first step, beside an mpirun that only imports torch."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from kvmpi.benchmarks.jobs import refuse_ranks
from kvmpi.benchmarks.options import at_least
from kvmpi.benchmarks.report import check_torch, exit_status
from kvmpi.benchmarks.runner import Runner
from kvmpi.launchers import mpirun

BARE = "import torch, mpi4py.MPI"
#: A worker; ``T`` are seconds of the clock that all processes of a host share.
WORKER = """\
import time
T = [time.monotonic()]
import torch
import kvmpi.torch
T.append(time.monotonic())
with kvmpi.create("dist_sync_mpi") as kv:
    T.append(time.monotonic())
    weights = torch.zeros(1000)
    kv.init(0, weights)
    kv.set_optimizer(kvmpi.optim.SGD(lr=1.0))
    kv.pushpull(0, torch.ones(1000), weights)
    T.append(time.monotonic())
    assert (weights == -kv.num_workers).all(), weights
print("times", *T, flush=True)
"""
PHASES = ("start", "imports", "kvmpi.create", "first step")


def main(name: str, argv: Sequence[str]) -> int:
    """The exit status: 1 if a job has failed."""
    parser = argparse.ArgumentParser(
        prog=f"kvmpi bench {name}",
        description="Seconds from the command until all workers have done a step through servers, in turns with a bare "
        "mpirun of as many Pythons that import torch and mpi4py, start to end.",
    )
    add = parser.add_argument
    add("-n", "--workers", type=at_least(1), default=8, help="default 8")
    add("-c", "--clients", type=at_least(1), default=2, help="default 2")
    add("-s", "--servers", type=at_least(0), default=2, help="default 2")
    add("--rounds", type=at_least(1), default=3, help="how often each is started (default 3)")
    args = parser.parse_args(argv)
    return exit_status(lambda: _bench(args))


def _bench(args: argparse.Namespace) -> int:
    refuse_ranks("startup")
    check_torch("startup")
    mpi = mpirun.find(mpirun.clean(os.environ), args.workers)
    bare = [*mpi.command(args.workers, local=True), sys.executable, "-c", BARE]
    bare_s: list[float] = []
    ends_s: list[list[float]] = []
    with Runner() as runner:
        env = {**mpirun.with_home(mpirun.clean(os.environ)), **mpi.env(runner.folder, "", crowded=True, one_host=True)}
        program = Path(runner.folder, "first_step.py")
        program.write_text(WORKER)
        shape = [f"-n{args.workers}", f"-c{args.clients}", f"-s{args.servers}"]
        ours = [sys.executable, "-m", "kvmpi", "run", *shape, str(program)]
        for _ in range(args.rounds):
            started_s = time.monotonic()
            status, said = runner.run(bare, env, with_errors=True)
            bare_s.append(time.monotonic() - started_s)
            if status == 0:
                started_s = time.monotonic()
                status, said = runner.run(ours, with_errors=True)
                times = [line.split()[3:] for line in said.splitlines() if " times " in line]
            if status != 0 or len(times) != args.workers:
                print(said, file=sys.stderr)
                return 1
            ends_s.append([max(map(float, column)) - started_s for column in zip(*times, strict=True)])
    _show(args, median(bare_s), [median(column) for column in zip(*ends_s, strict=True)])
    return 0


def _show(args: argparse.Namespace, bare_s: float, ends_s: list[float]) -> None:
    ours = f"kvmpi run -n {args.workers} -c {args.clients} -s {args.servers}"
    lines = [(f"mpirun -n {args.workers} python -c '{BARE}'", "", bare_s)]
    lines += [(ours, phase, end_s) for phase, end_s in zip(PHASES, ends_s, strict=True)]
    print(f"{'command':<58} {'slowest has done':<16} {'s':>6} {'ratio':>6}")
    for command, phase, end_s in lines:
        print(f"{command:<58} {phase:<16} {end_s:>6.2f} {end_s / bare_s:>6.2f}")
    print(f"medians of {args.rounds}; the ratio is to the bare mpirun")
