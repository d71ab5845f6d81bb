"""Steps of a job whose timeline is looked at: a key summed through servers, another pushed and pulled, a barrier."""

from __future__ import annotations

import os
import signal
import sys
import time

import numpy as np

import kvmpi

STEPS, COUNT = 3, 300_000


def main(end: str) -> None:
    kv = kvmpi.create("dist_sync_mpi")
    value, outs = np.empty(COUNT, "f4"), [np.zeros(COUNT, "f4"), np.zeros(COUNT, "f4")]
    small = np.zeros(10, "f4")
    kv.init("w", np.zeros(COUNT, "f4"))
    kv.init("b", np.zeros(10, "f4"))
    for step in range(STEPS):
        value[:] = kv.rank + step
        kv.pushpull("w", value, outs)
        assert (outs[1] == sum(rank + step for rank in range(kv.num_workers))).all()
        kv.push("b", small)
        kv.pull("b", small)
        kv.clock()
    kv.barrier()
    if end == "killed":
        time.sleep(2.5)  # its spans are written every second
        if kv.rank == kv.num_workers - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
    kv.close()


if __name__ == "__main__":
    main(sys.argv[1])
