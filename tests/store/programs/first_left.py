"""Client 0 is killed; the others go on without it, save, and load what they have saved.

first_left.py STORE FOLDER
"""

import os
import signal
import sys
from pathlib import Path

import numpy as np

import kvmpi

COUNT = 5000
name, folder = sys.argv[1], Path(sys.argv[2])
with kvmpi.create(name) as kv:
    index, out = np.arange(COUNT, dtype="f4"), np.empty(COUNT, "f4")
    kv.init("w", index)
    kv.set_optimizer(kvmpi.optim.Test(lr=-1.0))
    kv.save(folder / "before")
    assert (folder / "before").exists()
    kv.push("w", index)
    if kv.client_rank == 0:
        if kv.mpi_rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        kv.barrier()
    for _ in range(3):
        kv.push("w", np.ones(COUNT, "f4"))
    kv.pull("w", out)
    saved = out.copy()
    kv.save(folder / "after")
    assert (folder / "after").exists(), "a save that wrote nothing"
    kv.push("w", index)
    for path, expected in (("after", saved), ("before", index), ("after", saved)):
        kv.load(folder / path)
        kv.pull("w", out)
        assert (out == expected).all(), (path, out, expected)
    print("all there", flush=True)
