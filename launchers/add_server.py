"""``kvmpi add-server``: one more server for a running job of this user on this host."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from kvmpi.errors import ConfigError, KVError
from kvmpi.launchers import requests
from kvmpi.launchers.top import choose, find_jobs, folders


def main(argv: Sequence[str]) -> int:
    """Run ``kvmpi add-server ARGV``; the exit status."""
    parser = argparse.ArgumentParser(
        prog="kvmpi add-server", allow_abbrev=False,
        description="Start one more server in a running job of this user on this host.",
    )  # fmt: skip
    parser.add_argument("job", nargs="?", default="", metavar="JOB", help="the job's id, or the beginning of it")
    args = parser.parse_args(argv)
    try:
        card = choose(find_jobs(folders()), args.job, "add-server")
        if not card.get("launcher", True):
            raise ConfigError(
                f"job {card['job']} was not started by kvmpi run, which alone starts further servers; start the job "
                "with more (KVMPI_NUM_SERVERS)"
            )
        print(f"{requests.ask(card['folder'])} of job {card['job']} is starting")
        return 0
    except KVError as error:
        print(f"kvmpi add-server: {error}", file=sys.stderr)
        return 1
