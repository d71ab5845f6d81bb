"""The rate changes in steps 3, 5 and 14, there to one that it had before; worker 0 dies in step 9, and saves in 12."""

from __future__ import annotations

import os
import signal

import numpy as np

import kvmpi

with kvmpi.create("dist_sync") as kv:
    kv.init("w", np.zeros(5, "f4"))
    kv.set_optimizer(kvmpi.optim.Test(lr=-1.0))
    kv.set_hyperparams(lr=-2.0)
    out = np.zeros(5, "f4")
    for step in range(kv.resumed_step, 20):
        for lr in {3: [-5.0], 5: [-10.0], 14: [-2.0, -3.0, -2.0]}.get(step, []):
            kv.set_hyperparams(lr=lr)
        if step == 9 and kv.rank == 0 and not os.path.exists("died"):
            open("died", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        kv.pushpull("w", np.ones(5, "f4"), out)
        if step == 12:
            kv.save("saved")
    print(f"end {kv.rank} {out[0]:.0f}", flush=True)
