"""Ends every process of a job once the launcher is done or dead, and removes the job's folders.

The launcher runs this file by path as the first process of a job and holds the only write end of a pipe that is our
standard input. End of file means that the launcher has finished or was killed; nothing else ends the watchdog. It
lives in a session of its own and its environment names no job, so that no sweep, not even that of another job,
finds it. Only the standard library is used, so that it starts in a few milliseconds.

Where a process of the job has no watchdog of the launcher on its host, because only a batch system reaches it, the
one that stands for it there starts one of its own with ``guard``, for that process alone.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterable, Sequence

#: How long a process may take to start a program before a scan goes on without it; a matter of microseconds, or of
#: a time slice where the processors are busy.
EXEC_S = 1.0
#: How long what Python starts to clear up after a program may take for that, when all others are dead.
TRACKER_S = 1.0


def find_processes(job_id: str, proc: str = "/proc", marks: Iterable[str] = ()) -> list[int]:
    """Every living process whose environment at its start held ``KVMPI_JOB_ID=job_id``; none where there is no /proc.

    Children inherit it whatever they do to their process group, session or parent, which is why it finds the
    helpers of helpers too. With ``marks``, ``NAME=VALUE``, only those that held all of these as well.
    """
    needles = [f"\0{mark}\0".encode() for mark in (f"KVMPI_JOB_ID={job_id}", *marks)]
    found = []
    try:
        names = os.listdir(proc)
    except OSError:
        return []
    give_up = time.monotonic() + EXEC_S
    for name in names:
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            environ = _read_environ(f"{proc}/{name}", give_up)
        except OSError:  # it has ended, or belongs to somebody else
            continue
        whole = b"\0" + environ + b"\0"
        if all(needle in whole for needle in needles):
            found.append(int(name))
    return found


def _read_environ(process: str, give_up: float) -> bytes:
    """The environment of a process; of one that is just starting a program (execve), that of this program.

    While a process starts a program, its environment and its command line are empty. So an environment is empty only
    if it is so after there was a command line; zombies and the kernel's own threads have neither, and no program.
    """
    has_started = False
    while True:
        with open(f"{process}/environ", "rb") as file:
            environ = file.read()
        if environ or has_started or time.monotonic() > give_up:
            return environ
        os.readlink(f"{process}/exe")
        with open(f"{process}/cmdline", "rb") as file:
            has_started = bool(file.read())
        if not has_started:
            time.sleep(0.001)


def kill_all(job_id: str, deadline_s: float = 30.0, marks: Sequence[str] = ()) -> int:
    """SIGKILL the processes of the job until none is left; the number of those that could not be killed in time.

    Two scans in a row must find nothing: a process can fork behind the back of one scan.
    """
    begin = time.monotonic()
    empty_scans = 0
    while True:
        pids = find_processes(job_id, marks=marks)
        is_early = time.monotonic() < begin + TRACKER_S
        for pid in pids:
            if is_early and _is_tracker(pid):
                continue
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass
        empty_scans = 0 if pids else empty_scans + 1
        if empty_scans == 2 or time.monotonic() > begin + deadline_s:
            return len(pids)
        if pids:
            time.sleep(0.005)


def _is_tracker(pid: int) -> bool:
    """Whether this is multiprocessing's, which removes shared memory and semaphores when their program is dead."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return b"multiprocessing.resource_tracker" in file.read()
    except OSError:
        return False


def remove(paths: Iterable[str], since_s: float) -> None:
    """Remove folders with all that is in them; of a path that ends in ``*``, the orphans born after ``since_s``."""
    for path in paths:
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


def hold(folder: str) -> int:
    """Make a folder if it is not there, and share it: a descriptor whose lock says that somebody uses it.

    Where the file system has no locks, as Lustre by default, nothing says so.
    """
    while True:
        os.makedirs(folder, 0o700, exist_ok=True)
        try:
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(fd, fcntl.LOCK_SH)
            except OSError:  # a file system without locks
                pass
            if os.stat(folder).st_ino == os.fstat(fd).st_ino:
                return fd
            os.close(fd)
        except FileNotFoundError:
            pass  # whoever used it before us has just removed it


def is_held(folder: str) -> bool:
    """Whether somebody holds a folder, also one whose process is not seen here, as in another container."""
    try:
        fd = os.open(folder, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        pass
    finally:
        os.close(fd)
    return False


def let_go(folder: str, fd: int) -> None:
    """Remove a folder that was held, unless somebody else holds it, or may: whoever is the last cleans up."""
    try:
        fcntl.flock(fd, fcntl.LOCK_UN)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return
    shutil.rmtree(folder, ignore_errors=True)


def guard(job_id: str, folders: Sequence[str], marks: Sequence[str]) -> int:
    """Start a watchdog that acts when this process has ended, however that comes; a descriptor that must stay open.

    Args:
        folders: made if they are not there, and removed in the end unless other watchdogs hold them.
        marks: ``NAME=VALUE``, in the environment of whom it kills, besides the number of the job.
    """
    read_end, write_end = os.pipe()
    middle = os.fork()
    if middle == 0:
        try:
            os.setsid()
            if os.fork() == 0:
                nothing = os.open(os.devnull, os.O_RDWR)
                for fd, target in ((read_end, 0), (nothing, 1), (nothing, 2)):
                    os.dup2(fd, target)
                os.closerange(3, 256)
                env = {name: value for name, value in os.environ.items() if not name.startswith("KVMPI_")}
                words = ["-I", "-S", os.path.abspath(__file__), job_id]
                words += [*(f"+{folder}" for folder in folders), *(f"={mark}" for mark in marks)]
                os.chdir("/")
                os.execve(sys.executable, [sys.executable, *words], env)
        finally:
            os._exit(0)
    os.close(read_end)
    os.waitpid(middle, 0)  # so that it is no child of ours: we wait for ours, and kill those that are left
    return write_end


def main(argv: list[str]) -> int:
    """``argv``: the job id, then what to remove (see ``remove``). Standard input: ``+GROUP`` or ``-GROUP`` lines.

    A folder with ``+`` in front is made first, and not removed while others hold it; what has ``=`` in front is a mark
    (see ``find_processes``). The process groups matter only where there is no /proc to search.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    job_id, marks = argv[0], [word[1:] for word in argv[1:] if word.startswith("=")]
    paths = [word for word in argv[1:] if not word.startswith(("=", "+"))]
    since_s = time.time()
    held = [(word[1:], hold(word[1:])) for word in argv[1:] if word.startswith("+")]
    groups: set[int] = set()
    for line in sys.stdin:
        (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    if not os.path.isdir("/proc/self"):
        _kill_groups(groups)
    left = kill_all(job_id, marks=marks)
    remove(paths, since_s)
    for folder, fd in held:
        let_go(folder, fd)
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
