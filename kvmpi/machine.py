"""Which machine this is, and how much of it is ours."""

from __future__ import annotations

import os
import socket


def host_name() -> str:
    """Tells whether two processes share a host: name and boot, since names alone may repeat."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
    except OSError:
        boot = ""
    return f"{os.uname().nodename}/{boot}" if hasattr(os, "uname") else socket.gethostname()


def num_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
