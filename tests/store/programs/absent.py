"""The last worker never makes the call: all others end in KVTimeoutError that names it."""

import sys
import time

import numpy as np

import kvmpi

kv = kvmpi.create(sys.argv[1])
kv.init("w", np.ones(4, "f4"))
if kv.rank == kv.num_workers - 1:
    time.sleep(600)
start = time.monotonic()
try:
    kv.pushpull("w", np.ones(4, "f4"))
except kvmpi.KVTimeoutError as error:
    print(f"late after {time.monotonic() - start:.1f} s: {error}", flush=True)
    time.sleep(2)  # the launcher ends the job with the first of us; let the others say it too
    raise
