"""A worker that sleeps, with a grandchild that cares about no group, session or closed pipe; says when it is there."""

from __future__ import annotations

import os
import subprocess
import time

if os.environ["KVMPI_CLIENT_RANK"] == "0":
    from mpi4py import MPI

    MPI.COMM_WORLD.Barrier()
subprocess.Popen(["sleep", "1000"], start_new_session=True, close_fds=True)
print("stuck", flush=True)
time.sleep(1000)
