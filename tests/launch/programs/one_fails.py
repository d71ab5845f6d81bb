"""Worker 1 ends in the middle, as it is told, while others wait for it; STORE HOW."""

import os
import signal
import subprocess
import sys
import time

import numpy as np

import kvmpi

store, how = sys.argv[1:]
if how == "early" and os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")) == "1":
    sys.exit(0)
with kvmpi.create(store) as kv:
    w = np.zeros(10, "f4")
    kv.init("w", w)
    for step in range(1000):
        kv.pushpull("w", np.ones(10, "f4"), w)
        if step == 3 and how == "raise" and kv.rank == 1:
            raise ValueError("worker 1 has had enough")
        if step == 3 and how == "exit" and kv.rank == 1:
            sys.exit(7)
        if step == 3 and how == "silent" and kv.rank == 1:
            os._exit(0)
        if step == 3 and how == "bus" and kv.rank == 1:
            os.kill(os.getpid(), signal.SIGBUS)
        if step == 3 and how.startswith("/sys/fs/cgroup/") and kv.rank == 1:  # with a limit of memory
            with open(f"{how}/cgroup.procs", "w") as file:
                file.write("0")
            print("the limit was no limit", sum(map(len, [bytearray(b"x" * (1 << 20)) for _ in range(1000)])))
        if how == "nested":
            if kv.rank == 0:
                done = subprocess.run([sys.executable, "-m", "kvmpi", "run", "-n", "1", "--", "true"], check=False)
                print("the inner job ended with", done.returncode, flush=True)
            break
        time.sleep(0.02)
