"""A worker's place in its job, which only one process of a host has at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading

from kvmpi.config import Config
from kvmpi.errors import ConfigError

#: Of who has a place that another process wants, as part of a sentence.
HAS_STARTED = (
    "is, has a store or MPI in use, and has probably started this one. A program that is imported once more, as by the "
    "workers of a DataLoader with 'spawn' or 'forkserver', makes its store or group behind if __name__ == '__main__':"
)
_guard = threading.Lock()
#: By file: the descriptor through which this process holds it, and how many places that counts for.
_held: dict[str, tuple[int, int]] = {}


class Place:
    """Worker ``config.rank`` of the job that the environment tells of: this process, until it gives that back or ends.

    What a worker starts inherits its environment, and would be taken for it: servers would hear two processes as one
    client, and MPI would wait for ever. Nothing is held outside of a job, or where the file system has no locks.

    Raises:
        ConfigError: another process has the place.
    """

    def __init__(self, config: Config) -> None:
        self._path = ""
        if config.role != "worker" or not config.job_dir:
            return
        path = os.path.join(config.job_dir, f"worker-{config.rank}.place")
        with _guard:
            fd, count = _held.get(path) or (_open(path), 0)
            if fd < 0:
                return
            if count == 0 and not _lock(fd):
                holder = os.pread(fd, 20, 0).decode(errors="replace").strip() or "another"
                os.close(fd)
                raise ConfigError(
                    f"process {os.getpid()} is not worker {config.rank} of this job: process {holder} {HAS_STARTED}"
                    ". What is a job of its own starts by 'kvmpi run PROGRAM'"
                )
            _held[path] = fd, count + 1
        self._path = path

    def give_back(self) -> None:
        """Idempotent."""
        with _guard:
            path, self._path = self._path, ""
            if path in _held:  # not in a forked child, which has none
                fd, count = _held.pop(path)
                if count > 1:
                    _held[path] = fd, count - 1
                else:
                    os.close(fd)


def _open(path: str) -> int:
    """-1 where that cannot be: in a container, the job's folder may be there to be read only."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        return -1


def _lock(fd: int) -> bool:
    """Whether nobody else has it. Such a lock is the process's: what it forks does not share it, unlike flock's."""
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:  # a file system without locks
        return True
    with contextlib.suppress(OSError):  # a full disk: others will not know which process it is
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return True


def _forget() -> None:
    """In a forked child: the places are its parent's. The lock must be as nobody has left it."""
    global _guard
    _guard = threading.Lock()
    for fd, _ in _held.values():
        os.close(fd)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
