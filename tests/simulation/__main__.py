"""``python tests/simulation [--seed N] [--count N]``: jobs with faults, from seeds; says which fail, and how.

A seed that fails does so every time. A million seeds take about a night on one core; give each core its own range.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from simulation.network import Violation
from simulation.scenario import Job


def main() -> int:
    """The exit status: 1 if a seed failed."""
    parser = argparse.ArgumentParser(prog="python tests/simulation", description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="the first seed (default 0)")
    parser.add_argument("--count", type=int, default=1, help="how many seeds (default 1)")
    arguments = parser.parse_args()
    fired: Counter[str] = Counter()
    failed = []
    started_s = time.monotonic()
    for seed in range(arguments.seed, arguments.seed + arguments.count):
        try:
            fired.update(Job(seed).run().fired)
        except Violation as violation:
            failed.append(seed)
            print(f"seed {seed}: {violation}", flush=True)
    seconds = time.monotonic() - started_s
    print(f"{arguments.count} seeds in {seconds:.1f} s, {len(failed)} failed: {failed[:20]}; faults: {dict(fired)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
