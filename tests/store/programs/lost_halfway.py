"""Client 0 is killed while it does what one has to do for all; the others' call has done it all the same.

lost_halfway.py save|assign|load FOLDER
"""

import os
import signal
import sys
from pathlib import Path

import numpy as np

import kvmpi
from kvmpi.store import checkpoint

STEPS, AFTER, COUNT = 8, 4, 5000


def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


what, folder = sys.argv[1], Path(sys.argv[2])
waits = os.environ.get("KVMPI_ON_CLIENT_LOSS") != "shrink"
with kvmpi.create("dist_sync") as kv:
    out = np.empty(COUNT, "f4")
    kv.init("w", np.zeros(COUNT, "f4"))
    kv.set_optimizer(kvmpi.optim.Test(lr=-1.0))
    kv.save(folder / "before")
    for step in range(kv.resumed_step, STEPS):
        kv.push("w", np.ones(COUNT, "f4"))
        kv.pull("w", out)
        if step + 1 != AFTER:
            continue
        if kv.rank == 0 and not (folder / "died").exists():
            (folder / "died").touch()
            checkpoint.write = kv._ps.put_state = die
        if what == "save":
            kv.save(folder / "saved")
            assert (folder / "saved").exists(), "a save that wrote nothing"
        elif what == "assign":
            kv.assign("w", np.full(COUNT, 1000, "f4"))
        else:
            kv.load(folder / "before")
    assert (folder / "died").exists()
    begun = {"save": AFTER * kv.num_workers, "assign": 1000, "load": 0}[what]
    expected = begun + (STEPS - AFTER) * (kv.num_workers if waits else kv.num_workers - 1)
    assert (out == expected).all(), (out, expected)
    if what == "save":
        kv.load(folder / "saved")
        kv.pull("w", out)
        assert (out == begun).all(), (out, begun)
    print("done all the same", flush=True)
