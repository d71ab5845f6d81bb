"""Workers that are all stopped for longer than a call may take, while one waits for the others, go on with it.

stopped.py FOLDER TYPE...
"""

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

import kvmpi

TIMEOUT_S = 3.0

folder = Path(sys.argv[1])
for name in sys.argv[2:]:
    with kvmpi.create(name, timeout_s=TIMEOUT_S) as kv:
        pids = np.zeros(kv.num_workers, "int64")
        pids[kv.rank] = os.getpid()
        kv.init(["w", "pids"], [np.zeros(5, "f4"), np.zeros_like(pids)])
        kv.pushpull("pids", pids)
        continued = folder / f"continued-{name}"
        value = np.full(5, kv.rank + 1, "f4")
        if kv.rank == 0:
            who = shlex.join(map(str, pids))
            script = f"kill -STOP {who}; sleep {1.5 * TIMEOUT_S}; kill -CONT {who}; : > {shlex.quote(str(continued))}"
            work = kv.pushpull("w", value, async_op=True)
            began_s = time.monotonic()
            with subprocess.Popen(["/bin/sh", "-c", script]):
                work.wait(TIMEOUT_S)
                assert time.monotonic() - began_s > TIMEOUT_S, "they were stopped while this was under way"
        else:
            while not continued.exists():
                time.sleep(0.01)
            kv.pushpull("w", value)
        assert (value == kv.num_workers * (kv.num_workers + 1) / 2).all(), value
        kv.barrier()
        print(name, "went on")
