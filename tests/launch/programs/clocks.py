"""Steps until there is a file ``stop``, where the first process in every place has a clock an hour ahead of the next's.

Servers import this too.
"""

import os
import time
from pathlib import Path

folder, now_ns = Path(os.environ["TEST_FOLDER"]), time.time_ns
try:
    (folder / f"{os.environ['KVMPI_ROLE']}-{os.environ['KVMPI_RANK']}").touch(exist_ok=False)
    time.time_ns = lambda: now_ns() + 3600 * 10**9
except FileExistsError:
    pass

if __name__ == "__main__":
    import numpy as np

    import kvmpi

    with kvmpi.create("dist_sync_mpi") as kv:
        out = np.zeros(1000, "f4")
        stop = np.zeros(1, "f4")
        kv.init(["w", "stop"], [out, stop])
        kv.set_optimizer(kvmpi.optim.Test(lr=-1.0))
        step = kv.resumed_step
        while not stop[0]:
            kv.pushpull("w", np.ones(1000, "f4"), out)
            # All read the same sum, and so stop after the same step.
            kv.pushpull("stop", np.array([kv.rank == 0 and (folder / "stop").exists()], "f4"), stop)
            time.sleep(0.02)
            step += 1
            if step == 5:
                (folder / "runs").touch()
        print(f"end {kv.rank} {out.min() - 3 * step:.0f} {out.max() - 3 * step:.0f}", flush=True)
