"""A client of an asynchronous store, the only one that is left, dies after some steps and is started again.

Then a server is killed. What was pushed is there.

all_return.py FOLDER VICTIM (a server, or -1)
"""

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
from jobs import environs_with

import kvmpi

STEPS, DIES_AFTER = 10, 5
folder, victim = Path(sys.argv[1]), int(sys.argv[2])
with kvmpi.create("dist_async") as kv:
    value, last = np.zeros(3, "f4"), kv.rank == kv.num_workers - 1
    again = (folder / f"died-{kv.rank}").exists()
    kv.init("w", value)
    kv.set_optimizer(kvmpi.optim.SGD(lr=1.0))
    if last and not again:  # the others have closed the store by then
        deadline_s = time.monotonic() + 20
        while len(list(folder.glob("closed-*"))) < kv.num_workers - 1:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
    for step in range(DIES_AFTER if again else 0, STEPS):
        if last and not again and step == DIES_AFTER:
            (folder / f"died-{kv.rank}").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        kv.push("w", -np.ones(3, "f4"))
        kv.pull("w", value)
    if last and victim >= 0:
        job = environs_with(f"KVMPI_JOB_ID={os.environ['KVMPI_JOB_ID']}")
        of_server = {"KVMPI_ROLE": "server", "KVMPI_RANK": str(victim)}.items()
        killed = [pid for pid, environ in job.items() if of_server <= environ.items()]
        assert killed
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        kv.push("w", np.zeros(3, "f4"))
    kv.pull("w", value)
    if last:
        print(f"found {value.tolist()}", flush=True)
(folder / f"closed-{os.environ['KVMPI_RANK']}").touch()
