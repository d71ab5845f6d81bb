"""``python tests/chaos [--kills 50] [--seed N]``: kills processes of a real job, and says how long it took to go on."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from chaos.harness import Chaos


def main() -> int:
    """The exit status: 1 if the job failed, was wrong, or left something."""
    parser = argparse.ArgumentParser(prog="python tests/chaos", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=50, help="how many (default 50)")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of victims and moments (default 0)")
    parser.add_argument("--store", default="dist_sync_mpi", help="type of the store (default dist_sync_mpi)")
    parser.add_argument("--mib", type=int, default=1, help="size of the largest key (default 1)")
    arguments = parser.parse_args()
    report = Chaos(arguments.seed, arguments.kills, store_type=arguments.store, nbytes=arguments.mib << 20).run()
    print(report.output)
    print(report)
    print(f"exit status {report.status}; left behind: {report.left or 'nothing'}")
    return 0 if report.is_right else 1


if __name__ == "__main__":
    sys.exit(main())
