"""What a job is, in a file of its private folder, by which ``kvmpi top`` finds it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence

NAME = "job.json"


def write(
    folder: str, job_id: str, words: Sequence[str], shape: tuple[int, int, int], *, launcher: bool = True
) -> None:
    """To be called by the process whose end is the job's.

    Args:
        words: the program and its arguments.
        shape: how many workers, clients and servers there are.
        launcher: whether this process has started all others, and asks them what they wait for if it is asked.
    """
    card = {
        "job": job_id, "program": list(words), "started_s": time.time(), "pid": os.getpid(), "launcher": launcher,
        "workers": shape[0], "clients": shape[1], "servers": shape[2],
    }  # fmt: skip
    with open(os.path.join(folder, NAME), "w", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        json.dump(card, file)
