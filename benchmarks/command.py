"""``kvmpi bench``: a table of benchmarks, each in a module that is imported only when it is used."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence

#: Name -> (module with ``main(name, argv) -> int``, one line of help). To add a benchmark, add a line.
BENCHMARKS = {
    "allreduce": ("kvmpi.benchmarks.collectives", "sums that every rank gets, beside MPI_Allreduce, gloo and others"),
    "reduce_scatter": ("kvmpi.benchmarks.collectives", "sums of which every rank gets a segment"),
    "allgather": ("kvmpi.benchmarks.collectives", "every rank's segment on every rank"),
    "broadcast": ("kvmpi.benchmarks.collectives", "rank 0's vector on every rank"),
    "devices": ("kvmpi.benchmarks.devices", "sums of a GPU's vectors in host memory, and copies back to the vectors"),
    "ps": ("kvmpi.benchmarks.ps", "push and pull through parameter servers, beside MXNet"),
    "figure12": ("kvmpi.benchmarks.figure12", "epochs of five algorithms on hosts of a lab, as in MXNET-MPI"),
    "predict": ("kvmpi.benchmarks.figure12", "how far kvmpi plan is off, on hosts of a lab"),
    "startup": ("kvmpi.benchmarks.startup", "from the command to the first step, beside an mpirun that imports torch"),
    "timeline": ("kvmpi.benchmarks.timeline", "what exchanges cost while a timeline is written"),
    "train": ("kvmpi.benchmarks.train", "steps of training with gradients exchanged, beside DistributedDataParallel"),
    "tune": ("kvmpi.benchmarks.tune", "latencies and bandwidths, by which auto chooses, into a file"),
    "waiting": ("kvmpi.benchmarks.waiting", "what training keeps of its speed while collectives wait"),
}


def main(argv: Sequence[str]) -> int:
    """Run ``kvmpi bench NAME ARG...``; the exit status. A benchmark parses its own arguments."""
    words = list(argv)
    parser = argparse.ArgumentParser(
        prog="kvmpi bench",
        description="Measure this machine. Each benchmark starts the processes that it needs and says what it finds. "
        "Results are verified, and what is wrong is counted; only tune and waiting do not look at them.",
        epilog="kvmpi bench NAME --help has the options of each.",
    )
    subparsers = parser.add_subparsers(dest="benchmark", metavar="NAME")
    for name, (_, text) in BENCHMARKS.items():
        subparsers.add_parser(name, help=text, add_help=False)
    name = parser.parse_args(words[:1]).benchmark
    if name is None:
        parser.print_help()
        return 0
    module = importlib.import_module(BENCHMARKS[name][0])
    status: int = module.main(name, words[1:])
    return status
