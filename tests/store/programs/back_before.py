"""Client 1 is killed before anybody has pushed, and comes back to what the others have done for all, or are about to.

back_before.py save|assign|load FOLDER
"""

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

import kvmpi

STEPS, COUNT = 3, 5000
what, folder = sys.argv[1], Path(sys.argv[2])
is_back = (folder / "killed").exists()
with kvmpi.create("dist_sync") as kv:
    out = np.empty(COUNT, "f4")
    kv.init("w", np.zeros(COUNT, "f4"))
    kv.set_optimizer(kvmpi.optim.Test(lr=-1.0))
    kv.save(folder / "before")
    if kv.rank == 1 and not is_back:
        (folder / "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "save":
        kv.save(folder / "saved")
        assert (folder / "saved").exists()
    elif what == "assign":
        kv.assign("w", np.full(COUNT, 1000, "f4"))
    else:
        kv.load(folder / "before")
    if is_back:
        (folder / "back").touch()
    until_s = time.monotonic() + 60
    while kv.rank == 0 and not (folder / "back").exists():
        assert time.monotonic() < until_s, "client 1 does not come through"
        time.sleep(0.05)
    for _ in range(STEPS):
        kv.push("w", np.ones(COUNT, "f4"))
        kv.pull("w", out)
    expected = (1000 if what == "assign" else 0) + STEPS * kv.num_workers
    assert (out == expected).all(), (out, expected)
    print("through", flush=True)
