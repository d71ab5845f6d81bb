"""Works until SIGTERM, and then does something that takes longer than an mpirun leaves its ranks, with a server."""

import signal
import time

import numpy as np

import kvmpi

asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(time.monotonic()))
with kvmpi.create("dist_sync_mpi") as kv:
    kv.init(["w", "stop"], [np.zeros(5, "f4"), np.zeros(1, "f4")])
    stop, told = np.zeros(1, "f4"), False
    while not stop[0]:
        stop[0] = len(asked)
        kv.pushpull("stop", stop)
        if not told:
            told = True
            print(f"worker {kv.rank} is at work", flush=True)
    time.sleep(2)
    out = np.ones(5, "f4")
    kv.pushpull("w", out)
    print(f"worker {kv.rank} has summed {out[0]} after 2 s", flush=True)
