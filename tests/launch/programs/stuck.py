"""A worker that sleeps, with a grandchild that cares about no group, session or closed pipe; says when it is there.

With the argument ``alone`` it has none.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

if os.environ["KVMPI_CLIENT_RANK"] == "0":
    from mpi4py import MPI

    MPI.COMM_WORLD.Barrier()
if "alone" not in sys.argv:
    subprocess.Popen(["sleep", "1000"], start_new_session=True, close_fds=True)
print("stuck", flush=True)
time.sleep(1000)
