"""Client 0 dies between ``create`` and the first ``init``, to which each worker brings another value.

first_value.py STORE
"""

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

import kvmpi

died = Path("died")
with kvmpi.create(sys.argv[1]) as kv:
    if kv.rank == 0 and not died.exists():
        died.touch()
        time.sleep(0.5)  # others wait for its value by then
        os.kill(os.getpid(), signal.SIGKILL)
    value, out = np.arange(300_000, dtype="f4") * (kv.rank + 1), np.empty(300_000, "f4")
    began_s = time.monotonic()
    kv.init(["w", "v"], [value, value[:5]])
    took_s = time.monotonic() - began_s
    kv.pull("w", out)
    assert len(set(out[1:] / value[1:])) == 1, "one worker's value, all of it"
    print(f"value of worker {out[1] - 1:.0f} after {took_s:.1f} s", flush=True)
    if kv.type == "dist_sync":
        kv.push("w", value)
        kv.pull("w", out)
        print(f"sum {out[1]:.0f}", flush=True)
