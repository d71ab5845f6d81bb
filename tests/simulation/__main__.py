"""``python tests/simulation [--seed N] [--count N]``: jobs with faults, from seeds; says which fail, and how.

A seed that fails does so every time: ``--seed N`` shows it alone. A million seeds take half a day on one core.
"""

from __future__ import annotations

import argparse
import gc
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from rich.console import Console
from rich.progress import Progress
from simulation import disk
from simulation.lives import play
from simulation.network import Violation

_BLOCK = 50


def begin() -> None:
    """In each process: a job is thrown away as a whole, when it is over, and not looked through again and again."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    gc.freeze()
    gc.disable()


def run_block(first: int) -> tuple[list[tuple[int, str]], Counter[str]]:
    """Try some seeds; those that fail and why, and which faults have fired."""
    failed, fired = [], Counter[str]()
    for seed in range(first, min(first + _BLOCK, arguments.seed + arguments.count)):
        try:
            fired.update(play(seed).fired)
        except Violation as violation:
            failed.append((seed, str(violation)))
        gc.collect()
    return failed, fired


def main() -> int:
    """The exit status: 1 if a seed failed."""
    logging.disable(logging.CRITICAL)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # as of ``timeout``: clear up first
    with tempfile.TemporaryDirectory(prefix=f"{disk.PREFIX}{os.getpid()}-", dir=disk.folder) as disk.folder:
        return play_all()


def play_all() -> int:
    """The exit status."""
    fired: Counter[str] = Counter()
    failed: list[int] = []
    started_s = time.monotonic()
    blocks = range(arguments.seed, arguments.seed + arguments.count, _BLOCK)
    console = Console(stderr=True)
    with (
        multiprocessing.get_context("fork").Pool(min(arguments.processes, len(blocks)), begin) as pool,
        Progress(console=console, transient=True, disable=not console.is_terminal) as progress,
    ):
        task = progress.add_task("seeds", total=arguments.count)
        for found, counts in pool.imap_unordered(run_block, blocks):
            progress.advance(task, _BLOCK)
            fired.update(counts)
            for seed, text in found:
                failed.append(seed)
                print(f"seed {seed}: {text}", flush=True)
    seconds = time.monotonic() - started_s
    faults = ", ".join(f"{count} x {name}" for name, count in sorted(fired.items()))
    print(f"{arguments.count} simulated jobs in {seconds:.0f} s, {len(failed)} failed {sorted(failed)[:20] or ''}")
    print(f"faults: {faults}")
    return 1 if failed else 0


parser = argparse.ArgumentParser(prog="python tests/simulation", description=(__doc__ or "").splitlines()[0])
parser.add_argument("--seed", type=int, default=0, help="the first seed (default 0)")
parser.add_argument("--count", type=int, default=1, help="how many seeds (default 1)")
parser.add_argument("--processes", type=int, default=1, help="processes that share them (default 1)")

if __name__ == "__main__":
    arguments = parser.parse_args()
    sys.exit(main())
