"""What a real job survives, and how long it takes to go on.

``python tests/chaos --kills 50`` kills its processes; ``--partitions 20`` cuts its hosts off (Linux, root);
``--pusher 60`` has clients that never read flood servers for 60 s.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from chaos.floods import Flood
from chaos.harness import Chaos
from chaos.partitions import Partitions


def main() -> int:
    """The exit status: 1 if the job failed, was wrong, or left something."""
    parser = argparse.ArgumentParser(prog="python tests/chaos", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=50, help="how many (default 50)")
    parser.add_argument("--partitions", type=int, metavar="N", help="cut so many hosts off instead, most for 5 s")
    parser.add_argument("--pusher", type=float, metavar="SECONDS", help="instead, clients that ask and never read")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of victims and moments (default 0)")
    parser.add_argument("--store", default="dist_sync_mpi", help="type of the store (default dist_sync_mpi)")
    parser.add_argument("--mib", type=int, default=1, help="size of the largest key (default 1)")
    arguments = parser.parse_args()
    if arguments.pusher is not None:
        floods = [
            Flood(arguments.pusher, replicas=replicas, transport=transport).run()
            for transport, replicas in (("ipc", 0), ("tcp", 0), ("tcp", 1))
        ]
        print(*floods, sep="\n")
        return 0 if all(flood.is_right for flood in floods) else 1
    store_type, nbytes = arguments.store, arguments.mib << 20
    if arguments.partitions is not None:
        cuts = Partitions(arguments.seed, arguments.partitions, store_type=store_type, nbytes=nbytes).run()
        print(cuts.output)
        print(cuts)
        print(
            f"exit status {cuts.status}; left behind: {cuts.left or 'nothing'}; without effect: {cuts.idle or 'none'}"
        )
        return 0 if cuts.is_right else 1
    report = Chaos(arguments.seed, arguments.kills, store_type=store_type, nbytes=nbytes).run()
    print(report.output)
    print(report)
    print(f"exit status {report.status}; left behind: {report.left or 'nothing'}")
    return 0 if report.is_right else 1


if __name__ == "__main__":
    sys.exit(main())
