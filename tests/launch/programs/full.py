"""The folder for temporary files is full in the middle of a job, and then a server dies: ``full.py FOLDER``."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
from jobs import environs_with, wait_for

import kvmpi

STEPS, COUNT = 30, 5000
folder = Path(sys.argv[1])


def fill() -> None:
    with suppress(OSError), open(folder / "fill", "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    assert os.statvfs(folder).f_bavail == 0


def servers() -> list[int]:
    environs = environs_with(f"KVMPI_JOB_ID={os.environ['KVMPI_JOB_ID']}")
    return sorted(pid for pid, environ in environs.items() if environ.get("KVMPI_ROLE") == "server")


def replace_a_server() -> None:
    before = servers()
    os.kill(before[0], signal.SIGKILL)
    wait_for(lambda: len(servers()) == len(before) and servers() != before, "another server in its place")


with kvmpi.create("dist_sync") as kv:
    out, pushed = np.empty(COUNT, "f4"), np.arange(COUNT, dtype="f4") + kv.rank
    kv.init("w", np.zeros(COUNT, "f4"))
    kv.set_optimizer(kvmpi.optim.Test(lr=-1.0))
    for step in range(STEPS):
        kv.barrier()  # which the scheduler saves
        if step == STEPS // 3 and kv.rank == 0:
            fill()
            replace_a_server()
        kv.push("w", pushed)
    kv.pull("w", out)
    n = kv.num_workers
    right = (out == STEPS * (n * np.arange(COUNT, dtype="f8") + n * (n - 1) / 2)).all()
    assert os.statvfs(folder).f_bavail == 0
    print("all right" if right else f"wrong: {out[:5]}", flush=True)
