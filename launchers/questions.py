"""Asks the processes of a job on this host what they wait for: those that have said in its folder that they answer.

A process that has no handler for SIGUSR1 would be ended by it, so nobody else is sent one. Only the standard library is
used: remote_exec loads this file by path.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Collection

#: As ``kvmpi.trace.on_demand`` writes them.
PREFIX = "answers-"


def ask(folder: str, session: int | None = None, group: int | None = None, but: Collection[int] = ()) -> list[str]:
    """Send SIGUSR1 to those who answer; their names, sorted.

    Args:
        session, group: of one session or process group only, if that is given.
        but: not of these sessions.
    """
    asked = []
    try:
        files = [name for name in os.listdir(folder) if name.startswith(PREFIX)]
    except OSError:
        return []
    for file in files:
        pid = int(file.removeprefix(PREFIX))
        try:
            own = os.getsid(pid)
            if not handles(pid) or session not in (None, own) or group not in (None, os.getpgid(pid)) or own in but:
                continue
            with open(os.path.join(folder, file), encoding="utf-8") as opened:
                name = opened.read()
            os.kill(pid, signal.SIGUSR1)
        except OSError:
            continue  # it has ended
        asked.append(name)
    return sorted(asked)


def ask_ranks(pid: int) -> bool:
    """Have an mpirun or a jsrun pass the question on to its ranks, wherever they are; whether it takes signals at all.

    There, rank_exec asks those who answer.
    """
    if not handles(pid):
        return False
    os.kill(pid, signal.SIGUSR1)
    return True


def handles(pid: int) -> bool:
    """Whether the process catches SIGUSR1: the number may be another process's by now."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
            caught = next(line.split()[1] for line in file if line.startswith("SigCgt:"))
    except (OSError, StopIteration):
        return not os.path.isdir("/proc/self")
    return bool(int(caught, 16) >> (signal.SIGUSR1 - 1) & 1)
