"""Asks the processes of a job on this host what they wait for, and ranks below an mpirun, wherever they are, to end.

Those are asked who have said in the job's folder that they answer: a process that has no handler for SIGUSR1 would be
ended by it. Only the standard library is used: remote_exec loads this file by path.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Collection

#: As ``kvmpi.trace.on_demand`` writes them.
PREFIX = "answers-"
#: Both Open MPI and hydra pass this one on to their ranks, and nobody needs it there: rank_exec makes SIGTERM of it.
#: SIGTERM itself they take as an order to kill the ranks within a second.
END = signal.SIGALRM


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


def end_ranks(pid: int) -> bool:
    """Have an mpirun pass on to its ranks that they are to end; whether it has ranks, on this host too, and does so."""
    if not (handles(pid, END) and any(b"rank_exec.py" in _read(f"/proc/{below}/cmdline") for below in _below(pid))):
        return False
    os.kill(pid, END)
    return True


def _below(pid: int) -> list[int]:
    """The children of a process, and theirs."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []
    children = [int(word) for thread in threads for word in _read(f"/proc/{pid}/task/{thread}/children").split()]
    return [*children, *(below for child in children for below in _below(child))]


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


def handles(pid: int, number: int = signal.SIGUSR1) -> bool:
    """Whether the process catches the signal: its number may be another process's by now."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
            caught = next(line.split()[1] for line in file if line.startswith("SigCgt:"))
    except (OSError, StopIteration):
        return not os.path.isdir("/proc/self")
    return bool(int(caught, 16) >> (number - 1) & 1)
