"""Run under mpirun by ``test_mpi.py``: how messages of a ring travel over TCP between ranks that compute."""

from __future__ import annotations

import os
import time

import numpy as np

from kvmpi.collectives import mpi_comm
from kvmpi.collectives.waiting import wait_all
from kvmpi.deadline import Deadline

os.environ.update(OMPI_MCA_btl="tcp,self", MPIR_CVAR_NOLOCAL="1")  # ranks of one host, as if they were on two
BYTES, ASLEEP_S = 1 << 20, 2.0


def main() -> None:
    comm = mpi_comm.world()
    assert comm.size == 2
    sent, received = np.full(BYTES, 7, np.uint8), np.zeros(BYTES, np.uint8)
    ready = np.zeros(1, np.uint8)
    for _ in range(2):  # the first message opens the connection
        if comm.rank == 0:
            wait_all([comm.irecv(ready, 1, 1)], Deadline(30), lambda: "rank 1 is not ready")
            began_s = time.monotonic()
            wait_all([comm.isend(sent, 1, 2)], Deadline(30), lambda: "not sent")
            took_s = time.monotonic() - began_s
        else:
            receive = comm.irecv(received, 0, 2)
            wait_all([comm.isend(ready, 0, 1)], Deadline(30), lambda: "nobody listens")
            time.sleep(ASLEEP_S)  # computes, and says nothing to MPI
            wait_all([receive], Deadline(30), lambda: "nothing came")
            assert (received == 7).all()
            received[:] = 0
    if comm.rank == 0:
        assert took_s < ASLEEP_S / 2, f"it took {took_s:.2f} s to send what the receiver had asked for"
        print("sent without the receiver's help", flush=True)
    comm.free()


if __name__ == "__main__":
    main()
