"""SIGUSR1: the stacks of all threads through a pipe, written in the handler, so that it works whatever a thread does.

The handler is faulthandler's. It runs in C, so a main thread that is in a long call into a library answers too. What it
writes goes to a thread of ours instead of to standard error, which adds what the process waits for.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import signal
import threading
from pathlib import Path

NUMBER = getattr(signal, "SIGUSR1", 0)
#: Room for the stacks of many threads: what finds no room is cut off.
_PIPE_BYTES = 1 << 20
#: Stacks are complete when nothing more has come for so long.
_QUIET_S = 0.1
_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)(?: \[[^\]]*\])? ?")

_write_end = -1


def file_name(pid: int) -> str:
    """Of the file in the job's folder by which a process says that it answers to SIGUSR1."""
    return f"answers-{pid}"


def install(name: str, job_dir: str) -> int:
    """Answer to SIGUSR1 from now on, and say so in the job's folder; what becomes readable when it comes.

    Returns:
        -1: the program has a handler of its own, or the system has no such signal.
    """
    global _write_end
    if not NUMBER or is_taken():
        return -1
    import faulthandler

    read_end, _write_end = os.pipe()
    os.set_blocking(read_end, False)
    os.set_blocking(_write_end, False)  # the handler must not wait for a thread that waits for it
    if hasattr(fcntl, "F_SETPIPE_SZ"):
        with contextlib.suppress(OSError):
            fcntl.fcntl(_write_end, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    faulthandler.register(NUMBER, file=_write_end, all_threads=True, chain=False)
    if job_dir:
        with contextlib.suppress(OSError):
            Path(job_dir, file_name(os.getpid())).write_text(name, encoding="utf-8")
    return read_end


def is_taken() -> bool:
    """Whether somebody handles, or ignores, the signal already, in Python or elsewhere."""
    if signal.getsignal(NUMBER) is not signal.SIG_DFL:
        return True
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as file:
            masks = [line.split()[1] for line in file if line.startswith(("SigCgt:", "SigIgn:"))]
    except OSError:
        return False
    return any(int(mask, 16) >> (NUMBER - 1) & 1 for mask in masks)


def read(fd: int) -> str:
    """The stacks that are coming through the pipe, with the names of threads, but for the thread that calls.

    First the main one, then those of the program, in the order in which they began, then kvmpi's own.
    """
    found = b""
    ready = select.poll()
    ready.register(fd, select.POLLIN)
    while ready.poll(1000 * _QUIET_S):
        try:
            found += os.read(fd, 1 << 16)
        except BlockingIOError:
            break
    names = {f"{thread.ident:x}": thread.name for thread in threading.enumerate() if thread.ident}

    def named(match: re.Match[str]) -> str:
        return f"thread {names.get(match[1].lstrip('0'), match[1])} "

    stacks = [_THREAD.sub(named, stack) for stack in found.decode(errors="replace").split("\n\n") if stack.strip()]
    mine = f"thread {threading.current_thread().name} "
    stacks = [stack.rstrip("\n") + "\n" for stack in stacks[::-1] if not stack.startswith(mine)]
    return "\n".join(sorted(stacks, key=_whose))


def _whose(stack: str) -> int:
    """0 for the main thread's, 1 for one of the program, 2 for one of kvmpi."""
    return 0 if stack.startswith("thread MainThread ") else 2 if stack.startswith("thread kvmpi-") else 1


def _forked() -> None:
    """A child says its stacks itself: the pipe is the parent's."""
    if _write_end >= 0:
        import faulthandler

        with contextlib.suppress(OSError, RuntimeError, ValueError):
            faulthandler.register(NUMBER, file=2, all_threads=True, chain=False)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
