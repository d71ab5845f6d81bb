"""``kvmpi bench waiting``: what training keeps of its speed while collectives beside it wait for other ranks."""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence

import numpy as np

import kvmpi
from kvmpi.benchmarks.jobs import refuse_ranks
from kvmpi.benchmarks.options import at_least, duration, numbers
from kvmpi.benchmarks.report import exit_status
from kvmpi.benchmarks.runner import Runner
from kvmpi.machine import num_cores

_SETTLE_S = 0.2  # until waiting threads have reached their longest naps
_SHAPE = (192, 192)


def main(_: str, argv: Sequence[str]) -> int:
    """Run ``kvmpi bench waiting ARGV``; the exit status."""
    parser = argparse.ArgumentParser(
        prog="kvmpi bench waiting", allow_abbrev=False,
        description="Ranks train - Python and NumPy - while sums that they have started wait for a rank that is late, "
        "and while further ranks wait in such a sum. Compared with the same training when nobody waits.",
    )  # fmt: skip
    parser.add_argument("-n", "--ranks", metavar="N,...", default="2,4", help="numbers of ranks (default 2,4)")
    parser.add_argument("--seconds", type=duration, default=1.0, metavar="S", help="of one measurement (default 1)")
    parser.add_argument(
        "--rounds", type=at_least(1), default=5, metavar="R", help="measurements of each kind (default 5)"
    )
    args = parser.parse_args(argv)
    try:
        ranks = numbers("-n", args.ranks, least=2)
    except ValueError as error:
        parser.error(str(error))
    if "KVMPI_ROLE" in os.environ:
        _rank(args)
        return 0
    return exit_status(lambda: _bench(args, ranks))


def _bench(args: argparse.Namespace, ranks: Sequence[int]) -> int:
    refuse_ranks("waiting")
    options = ["--seconds", str(args.seconds), "--rounds", str(args.rounds)]
    with Runner() as runner:
        for number in ranks:
            status = runner.show([sys.executable, "-m", "kvmpi", "run", "-n", str(number), "--", __file__, *options])
            if status:
                return status
    return 0


def _train(seconds: float) -> float:
    """Steps a second of something that needs the interpreter and a core."""
    matrix, steps = np.eye(*_SHAPE, dtype=np.float32), 0
    start_s = time.perf_counter()
    while (elapsed_s := time.perf_counter() - start_s) < seconds:
        matrix = matrix @ matrix
        sum(range(500))
        steps += 1
    return steps / elapsed_s


def _rank(args: argparse.Namespace) -> None:
    cores = num_cores()
    with kvmpi.create("mpi") as kv:
        late = kv.num_workers - 1
        trains = kv.rank < min(cores, late)
        gradient, out = np.ones(1_000_000, np.float32), np.empty(1_000_000, np.float32)
        kv.init("g", gradient)
        found: dict[str, list[float]] = {"alone": [], "waiting": []}
        for _ in range(args.rounds):
            for kind in found:
                kv.barrier()
                work = None
                if kind == "waiting" and kv.rank != late:
                    work = kv.pushpull("g", gradient, out, async_op=True)
                time.sleep(_SETTLE_S)
                if trains:
                    found[kind].append(_train(args.seconds))
                elif work is None or kv.rank == late:
                    time.sleep(args.seconds)
                if kind == "waiting" and kv.rank == late:
                    time.sleep(_SETTLE_S)
                    kv.pushpull("g", gradient, out)
                elif work is not None:
                    work.wait()
        if kv.rank == 0:
            alone, waiting = (statistics.median(found[kind]) for kind in found)
            print(
                f"{kv.num_workers} ranks on {cores} cores, {min(cores, late)} training: {alone:.0f} steps/s alone, "
                f"{waiting:.0f} while collectives wait: {waiting / alone:.1%}"
            )


if __name__ == "__main__":
    sys.exit(main("waiting", sys.argv[1:]))
