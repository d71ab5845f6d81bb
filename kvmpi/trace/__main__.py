"""``python -m kvmpi.trace FILE``: make a timeline of the parts that a job has left whose launcher could not do it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from kvmpi.errors import ConfigError
from kvmpi.trace.merge import merge


def main(argv: Sequence[str]) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m kvmpi.trace",
        description="Make a timeline of the parts that a job has left whose launcher could not do it.",
    )
    parser.add_argument("file", metavar="FILE", help="as given to --timeline; the parts are in FILE.parts")
    parser.add_argument("--keep", action="store_true", help="leave the parts where they are")
    options = parser.parse_args(argv)
    try:
        merged = merge(options.file, keep=options.keep)
    except ConfigError as error:
        print(f"kvmpi.trace: {error}", file=sys.stderr)
        return 1
    print(f"{options.file}: {merged.spans} spans of {len(merged.processes)} processes")
    if merged.dropped:
        print(f"{merged.dropped} more were dropped")
    for names, what in ((merged.truncated, "cut off"), (merged.unaligned, "of a clock that nobody has compared")):
        if names:
            print(f"{what}: {', '.join(names)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
