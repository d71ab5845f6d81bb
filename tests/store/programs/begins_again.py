"""The only client is killed after some steps; its next process puts nothing back that was put before the first.

begins_again.py assign|load FOLDER
"""

import os
import signal
import sys
from pathlib import Path

import numpy as np

import kvmpi

STEPS, AFTER, COUNT = 7, 4, 5000
what, folder = sys.argv[1], Path(sys.argv[2])
is_back = (folder / "killed").exists()
with kvmpi.create("dist_sync") as kv:
    out = np.empty(COUNT, "f4")
    kv.init("w", np.zeros(COUNT, "f4"))
    kv.set_optimizer(kvmpi.optim.Test(lr=-1.0))
    if what == "load" and not is_back:
        kv.save(folder / "begin")
    if what == "load":
        kv.load(folder / "begin")
    else:
        kv.assign("w", np.full(COUNT, 1000, "f4"))
    assert kv.resumed_step == (AFTER if is_back else 0)
    for step in range(kv.resumed_step, STEPS):
        kv.push("w", np.ones(COUNT, "f4"))
        kv.pull("w", out)
        if step + 1 == AFTER:
            (folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
    expected = (1000 if what == "assign" else 0) + STEPS
    assert (out == expected).all(), (out, expected)
    print("as trained", flush=True)
