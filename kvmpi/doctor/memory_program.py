"""Run for checks of memory: shows a buffer, reads that of another process, or measures how fast memory is.

memory_program.py show          prints PID and ADDRESS of bytes 0, 1, ... 255, and ends with its standard input
memory_program.py read PID ADDRESS
memory_program.py rates         says ready, waits for a line, and prints bytes per second of copies and additions
"""

from __future__ import annotations

import os
import statistics
import sys
import time

import numpy as np

from kvmpi.arrays import address_of
from kvmpi.collectives import cross_memory

COUNT = 8_000_000
_SECONDS = 0.3


def show() -> int:
    """Bytes that a process of the same host may read."""
    cross_memory.admit_peers()
    shown = np.arange(256, dtype=np.uint8)
    print(f"{os.getpid()} {address_of(shown)}", flush=True)
    sys.stdin.read()
    return int(shown[0])


def read(pid: int, address: int) -> int:
    """What another process shows; 0 if it can be read and is right, 3 if the system refuses."""
    if not cross_memory.available():
        print("this system has no process_vm_readv")
        return 3
    into = np.zeros(256, np.uint8)
    try:
        cross_memory.CrossMemory(pid).read(address, into)
    except PermissionError as error:
        print(error.strerror)
        return 3
    return 0 if (into == np.arange(256)).all() else 1


def rates() -> int:
    """Result bytes per second of a copy and of an addition, while others do the same."""
    a, b, c = (np.full(COUNT, value, np.float32) for value in (1, 2, 0))
    np.add(a, b, out=c)
    print("ready", flush=True)
    sys.stdin.readline()
    found = []
    for work in (lambda: np.copyto(c, a), lambda: np.add(a, b, out=c)):
        times_s, end_s = [], time.perf_counter() + _SECONDS
        while time.perf_counter() < end_s:
            start_s = time.perf_counter()
            work()
            times_s.append(time.perf_counter() - start_s)
        found.append(c.nbytes / statistics.median(times_s))
    print(*found, flush=True)
    return 0


if __name__ == "__main__":
    kind, *rest = sys.argv[1:]
    sys.exit(show() if kind == "show" else rates() if kind == "rates" else read(int(rest[0]), int(rest[1])))
