"""Several ``kvmpi bench`` on the ranks of one job, each with its status on a line behind what it prints.

several.py ARG... [+ ARG...]...
"""

from __future__ import annotations

import sys

from kvmpi import cli
from kvmpi.benchmarks import peers

peers.BUCKET_BYTES = 100_000  # several of a small model
words = sys.argv[1:]
while words:
    end = words.index("+") if "+" in words else len(words)
    status = cli.main(["bench", *words[:end]])
    words = words[end + 1 :]
    print("status", status, flush=True)
