"""Several ``kvmpi bench`` on the ranks of one job: rank 0 says the end of each, and every rank its exit statuses.

several.py ARG... [+ ARG...]...
"""

from __future__ import annotations

import os
import sys

from kvmpi import cli
from kvmpi.benchmarks import peers
from kvmpi.launchers.rank_exec import mpi_rank

peers.BUCKET_BYTES = 100_000  # several of a small model
words, statuses = sys.argv[1:], []
while words:
    end = words.index("+") if "+" in words else len(words)
    statuses.append(cli.main(["bench", *words[:end]]))
    words = words[end + 1 :]
    if mpi_rank(dict(os.environ)) == 0:
        print("end", flush=True)
sys.stderr.write(f"statuses {statuses}\n")
