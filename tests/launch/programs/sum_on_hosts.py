"""A worker that says where it is and what the sum of all workers' ranks plus one is; with "wait" it then stays.

With "threads" it says how many threads it is to compute with, too, and whether its MPI yields, and with "place" where
torch and frameworks think that it is; with TEST_WORDS in its environment, what they are.
"""

import os
import socket
import sys
import time

import numpy as np

import kvmpi
from kvmpi.launchers.cores import THREADS, YIELD

with kvmpi.create("mpi" if "mpi" in sys.argv else "dist_sync_mpi") as kv:
    kv.init("w", np.zeros(100_000, "f4"))
    out = np.empty(100_000, "f4")
    kv.pushpull("w", np.full(100_000, kv.rank + 1, "f4"), out)
    print(socket.gethostname(), "got", out[0], flush=True)
    if "threads" in sys.argv:
        yields = os.environ.get(YIELD, "0")
        print(socket.gethostname(), "threads", os.environ[THREADS], "yield", yields, flush=True)
    if "place" in sys.argv:
        import kvmpi.torch.c10d

        place = [os.environ[name] for name in ("RANK", "GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")]
        print(socket.gethostname(), "place", *place, flush=True)
    if "TEST_WORDS" in os.environ:
        print(socket.gethostname(), "words", ascii(os.environ["TEST_WORDS"]), flush=True)
    if "wait" in sys.argv:
        time.sleep(1000)
