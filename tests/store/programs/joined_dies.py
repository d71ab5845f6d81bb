"""One worker joins and is killed while the others go on; or they stop before they have joined.

joined_dies.py JOINED VICTIM SIGNAL
"""

import os
import sys
import threading
import time

import numpy as np

import kvmpi

joined, victim, signal = map(int, sys.argv[1:])

with kvmpi.create("mpi") as kv:
    kv.init("w", np.zeros(5))
    out = np.zeros(5)
    if kv.rank == victim:
        threading.Timer(1.0, lambda: os.kill(os.getpid(), signal)).start()
    if kv.rank != joined:
        for _ in range(2000):
            kv.pushpull("w", np.ones(5), out)
            assert out[0] == kv.num_workers - 1
            time.sleep(0.01)
    kv.join()
    print("end", flush=True)
