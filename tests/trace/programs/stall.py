"""Worker 3 comes late to a push, in a call that Python cannot interrupt; worker 0 has its own handler for SIGUSR1."""

from __future__ import annotations

import hashlib
import signal
import sys
import time

import numpy as np

import kvmpi

COUNT = 100_000


def long_call(seconds: float) -> None:
    begin = time.monotonic()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 200_000)
    number = int(200_000 * seconds / (time.monotonic() - begin))
    hashlib.pbkdf2_hmac("sha256", b"", b"", number)


def main() -> None:
    kv = kvmpi.create("dist_sync_mpi")
    value = np.ones(COUNT, "f4")
    kv.init("w", value)
    for _ in range(2):
        kv.pushpull("w", np.ones(COUNT, "f4"), value)
        kv.clock()
    if kv.rank == 3:
        long_call(float(sys.argv[1]))
        print("the long call is over", file=sys.stderr, flush=True)
    kv.pushpull("w", np.ones(COUNT, "f4"), value)
    time.sleep(1.5)  # that the wait is over is noticed every half second
    kv.close()


if __name__ == "__main__":
    import os

    if os.environ["KVMPI_RANK"] == "0":
        signal.signal(signal.SIGUSR1, lambda *_: print("the user's handler", file=sys.stderr, flush=True))
    main()
