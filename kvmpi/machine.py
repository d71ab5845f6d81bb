"""Which machine this is, and how much of it is ours.

Only the standard library is used: launchers load this file by its path, since the package takes longer.
"""

from __future__ import annotations

import functools
import math
import os
import socket
from collections.abc import Callable


@functools.cache
def host_name() -> str:
    """Tells whether two processes share a host: name and boot, since names alone may repeat."""
    boot = read_text("/proc/sys/kernel/random/boot_id")
    return f"{os.uname().nodename}/{boot}" if hasattr(os, "uname") else socket.gethostname()


def read_text(path: str) -> str:
    """The text of a small file without blanks around it; empty where there is none."""
    try:
        with open(path, errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


def bound_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def num_cores() -> int:
    """Cores that this process may keep busy: a container may run on all of a machine's, but not on all at once."""
    return max(1, int(min(bound_cores(), quota_cores())))


def quota_cores(read: Callable[[str], str] = read_text) -> float:
    """The smallest quota of processor time above this process, in cores; infinite without one.

    Version 2 has ``cpu.max`` with ``QUOTA PERIOD``, version 1 ``cpu.cfs_quota_us`` and ``cpu.cfs_period_us``
    (https://docs.kernel.org/admin-guide/cgroup-v2.html, https://docs.kernel.org/scheduler/sched-bwc.html).
    """
    least = math.inf
    for folder in _cgroups(read, "cpu"):
        quota, _, period = read(f"{folder}/cpu.max").partition(" ")
        if not period:
            quota, period = read(f"{folder}/cpu.cfs_quota_us"), read(f"{folder}/cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(period):
            least = min(least, int(quota) / int(period))
    return least


def limit_bytes(read: Callable[[str], str] = read_text) -> float:
    """The smallest limit of memory above this process; infinite without one."""
    least = math.inf
    for folder in _cgroups(read, "memory"):
        text = read(f"{folder}/memory.max") or read(f"{folder}/memory.limit_in_bytes")
        if text.isdigit() and int(text) < 1 << 60:  # version 1 writes "none" as a number near 2**63
            least = min(least, float(text))
    return least


def _cgroups(read: Callable[[str], str], controller: str) -> list[str]:
    """The folders of this process's groups, and of those above them."""
    found = []
    for line in read("/proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0":
            base = "/sys/fs/cgroup"
        elif controller in controllers.split(","):
            base = f"/sys/fs/cgroup/{controllers}"
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        found += [f"{base}/{'/'.join(parts[:count])}".rstrip("/") for count in range(len(parts) + 1)]
    return found
