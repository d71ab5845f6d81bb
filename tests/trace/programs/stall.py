"""Worker 3 comes late to a push, in a call that Python cannot interrupt; worker 0 has its own handler for SIGUSR1.

stall.py FILE: the call ends when there is such a file.
"""

from __future__ import annotations

import ctypes
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np

import kvmpi

COUNT = 100_000


def long_call(file: Path) -> None:
    """Waits for a lock of the system's: signals do not end that, as they end a sleep."""
    libc, lock, is_held = ctypes.CDLL(None), ctypes.create_string_buffer(128), threading.Event()

    def hold() -> None:
        libc.pthread_mutex_lock(lock)
        is_held.set()
        until_s = time.monotonic() + 60.0
        while not file.exists() and time.monotonic() < until_s:
            time.sleep(0.02)
        libc.pthread_mutex_unlock(lock)

    threading.Thread(target=hold).start()
    is_held.wait()
    libc.pthread_mutex_lock(lock)


def main() -> None:
    kv = kvmpi.create("dist_sync_mpi")
    value = np.ones(COUNT, "f4")
    kv.init("w", value)
    for _ in range(2):
        kv.pushpull("w", np.ones(COUNT, "f4"), value)
        kv.clock()
    if kv.rank == 3:
        long_call(Path(sys.argv[1]))
        print("the long call is over", file=sys.stderr, flush=True)
    kv.pushpull("w", np.ones(COUNT, "f4"), value)
    time.sleep(1.5)  # that the wait is over is noticed every half second
    kv.close()


if __name__ == "__main__":
    import os

    if os.environ["KVMPI_RANK"] == "0":
        signal.signal(signal.SIGUSR1, lambda *_: print("the user's handler", file=sys.stderr, flush=True))
    main()
