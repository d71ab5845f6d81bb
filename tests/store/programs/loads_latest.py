"""A client is killed after a save; its next process loads the file, which changes nothing of what was trained since.

loads_latest.py FOLDER
"""

import os
import signal
import sys
from pathlib import Path

import numpy as np

import kvmpi

STEPS, SLOW, SAVED, SLOWER, AFTER, COUNT = 9, 2, 3, 5, 6, 5000
RATES = {SLOW: 0.5, SLOWER: 0.25}
folder = Path(sys.argv[1])
latest, killed = folder / "latest", folder / "killed"
with kvmpi.create("dist_sync") as kv:
    out = np.empty(COUNT, "f4")
    kv.init("w", np.zeros(COUNT, "f4"))
    kv.set_optimizer(kvmpi.optim.SGD(lr=1.0, momentum=0.5))
    if latest.exists():
        kv.load(latest)
    for step in range(kv.resumed_step, STEPS):
        if step in RATES:
            kv.set_hyperparams(lr=RATES[step])
        kv.push("w", np.ones(COUNT, "f4"))
        kv.pull("w", out)
        if step + 1 == SAVED:
            kv.save(latest)
        if step + 1 == AFTER and kv.rank == kv.num_workers - 1 and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
    assert killed.exists()
    value, momentum, rate = 0.0, 0.0, 1.0
    for step in range(STEPS):
        momentum, rate = 0.5 * momentum + kv.num_workers, RATES.get(step, rate)
        value -= rate * momentum
    assert (out == value).all(), (out, value)
    print("as trained", flush=True)
