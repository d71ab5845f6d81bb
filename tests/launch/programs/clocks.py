"""Many steps, in a job whose first process in every place has a clock that is an hour ahead of that of the next.

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
        kv.init("w", out)
        kv.set_optimizer(kvmpi.optim.Test(lr=-1.0))
        for step in range(kv.resumed_step, 300):
            kv.pushpull("w", np.ones(1000, "f4"), out)
            time.sleep(0.02)
            if step == 5:
                (folder / "runs").touch()
        print(f"end {kv.rank} {out.min():.0f} {out.max():.0f}", flush=True)
