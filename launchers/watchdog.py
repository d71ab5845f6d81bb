"""Ends every process of a job once the launcher is done or dead, and removes the job's folders.

The launcher runs this file by path as the first process of a job and holds the only write end of a pipe that is our
standard input. End of file means that the launcher has finished or was killed; nothing else ends the watchdog. It
lives in a session of its own and its environment names no job, so that no sweep, not even that of another job,
finds it. Only the standard library is used, so that it starts in a few milliseconds.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Iterable


def find_processes(job_id: str, proc: str = "/proc") -> list[int]:
    """Every living process whose environment at its start held ``KVMPI_JOB_ID=job_id``; none where there is no /proc.

    Children inherit it whatever they do to their process group, session or parent, which is why it finds the
    helpers of helpers too.
    """
    needle = f"\0KVMPI_JOB_ID={job_id}\0".encode()
    found = []
    try:
        names = os.listdir(proc)
    except OSError:
        return []
    for name in names:
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            with open(f"{proc}/{name}/environ", "rb") as file:
                environ = file.read()
        except OSError:  # it has ended, or belongs to somebody else
            continue
        if needle in b"\0" + environ + b"\0":
            found.append(int(name))
    return found


def kill_all(job_id: str, deadline_s: float = 30.0) -> int:
    """SIGKILL the processes of the job until none is left; the number of those that could not be killed in time.

    Two scans in a row must find nothing: a process can fork behind the back of one scan.
    """
    end = time.monotonic() + deadline_s
    empty_scans = 0
    while True:
        pids = find_processes(job_id)
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass
        empty_scans = 0 if pids else empty_scans + 1
        if empty_scans == 2 or time.monotonic() > end:
            return len(pids)
        if pids:
            time.sleep(0.005)


def remove(paths: Iterable[str], since_s: float) -> None:
    """Remove folders with all that is in them; of a path that ends in ``*``, the orphans born after ``since_s``."""
    for path in paths:
        path = path.removeprefix("+")
        if path.endswith("*"):
            for orphan in find_orphans(path[:-1], since_s):
                try:
                    os.unlink(orphan)
                except OSError:
                    pass
        elif path:
            shutil.rmtree(path, ignore_errors=True)


def find_orphans(prefix: str, since_s: float, proc: str = "/proc") -> list[str]:
    """Our own files below ``prefix`` that are younger than ``since_s`` (seconds since 1970) and mapped by no process.

    For shared memory whose names the MPI chooses: MPICH leaves it behind whenever a rank does not end properly.
    """
    folder, start = os.path.split(prefix)
    try:
        names = [name for name in os.listdir(folder) if name.startswith(start)]
    except OSError:
        return []
    orphans = []
    for path in [os.path.join(folder, name) for name in names]:
        try:
            status = os.stat(path)
        except OSError:
            continue
        if status.st_uid == os.getuid() and status.st_ctime >= since_s:
            orphans.append(path)
    if not orphans:
        return []
    mapped = b""
    for pid in filter(str.isdigit, os.listdir(proc)):
        try:
            with open(f"{proc}/{pid}/maps", "rb") as file:
                mapped += b"".join(line for line in file if prefix.encode() in line)
        except OSError:
            continue
    return [path for path in orphans if path.encode() not in mapped]


def _kill_groups(groups: Iterable[int]) -> None:
    for group in groups:
        try:
            os.killpg(group, signal.SIGKILL)
        except OSError:
            pass


def main(argv: list[str]) -> int:
    """``argv``: the job id, then what to remove (see ``remove``). Standard input: ``+GROUP`` or ``-GROUP`` lines.

    A folder with ``+`` in front is made first. The process groups matter only where there is no /proc to search.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    job_id, paths = argv[0], argv[1:]
    since_s = time.time()
    for path in paths:
        if path.startswith("+"):
            os.makedirs(path[1:], 0o700, exist_ok=True)
    groups: set[int] = set()
    for line in sys.stdin:
        (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    if not os.path.isdir("/proc/self"):
        _kill_groups(groups)
    left = kill_all(job_id)
    remove(paths, since_s)
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
