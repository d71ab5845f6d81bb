"""Ctrl-C on worker 0, in a sum that it makes itself: it hears so at once, and that its store is of no more use.

    interrupted.py FOLDER

The other worker, which comes late, gets an error in time.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
from raising import raises

import kvmpi
from kvmpi.errors import KVTimeoutError, PeerLostError

TIMEOUT_S = 2.0

kv = kvmpi.create("mpi", timeout_s=TIMEOUT_S)
value = np.ones(100_001)
kv.init("w", value)
for _ in range(4):
    kv.allreduce("w", value)
if kv.rank == 0:
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    start = time.monotonic()
    with raises(KeyboardInterrupt):
        kv.allreduce("w", value)
    assert time.monotonic() - start < TIMEOUT_S / 2
    with raises(PeerLostError, match="KeyboardInterrupt"):
        kv.allreduce("w", value)
else:
    time.sleep(0.6)
    with raises((KVTimeoutError, PeerLostError)):
        kv.allreduce("w", value)
kv.close()
print("interrupted right", flush=True)
(Path(sys.argv[1]) / f"interrupted {kv.rank}").touch()  # the job ends with the first of us
deadline = time.monotonic() + 20
while not all((Path(sys.argv[1]) / f"interrupted {rank}").exists() for rank in range(2)):
    assert time.monotonic() < deadline
    time.sleep(0.02)
