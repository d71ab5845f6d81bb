"""Files that are there as a whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager

#: Between a temporary file's beginning, which says whose place it is to take, and its end, which is random.
_MOST_NAME_BYTES, _RANDOM_BYTES = 200, 6


@contextmanager
def replacing(path: str, *, over: bool = True) -> Iterator[str]:
    """The name of a temporary file beside ``path``, which takes its place at the end of the block, safe on the disk.

    If the block raises, ``path`` is what it was and the temporary file is gone. A file that is replaced keeps its mode,
    a new one has what the umask leaves; of a symbolic link what it leads to is replaced. Nor does the temporary file
    allow others more than the one that it is to replace. What processes that were killed have left of earlier attempts
    at the same file is removed.

    Args:
        over: what is at ``path`` is replaced; else it stays, and that is a FileExistsError.
    Raises:
        OSError: the file cannot be made, written or renamed, or what is there is no file.
    """
    mode = _mode_of(path)
    target = os.path.realpath(path)
    folder, name = os.path.split(target)
    beginning = f".kvmpi-{os.fsdecode(os.fsencode(name)[:_MOST_NAME_BYTES])}-"
    _remove_left(folder, beginning)
    handle, temporary = _make(folder, beginning, mode)
    try:
        yield temporary
        sync(temporary)
        if mode is not None:  # last, as a mode may keep its owner from syncing the file, and from removing what is left
            os.chmod(temporary, mode)
        if over:
            os.replace(temporary, target)
        else:
            _put(temporary, target)
        sync(folder)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    finally:
        os.close(handle)


def _mode_of(path: str) -> int | None:
    """Of the file that is to be replaced; None if there is none.

    It is asked for by the name that was given: what a name in /dev/fd leads to may have no other.
    """
    if not os.path.basename(path):  # which realpath would take for the name without the slash
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    try:
        found = os.stat(path).st_mode
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(found):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if not stat.S_ISREG(found):
        raise OSError(errno.EINVAL, "no regular file, which cannot be replaced; give the name of one", path)
    return stat.S_IMODE(found)


def _make(folder: str, beginning: str, mode: int | None) -> tuple[int, str]:
    """A new file that this process holds for as long as it lives or until the descriptor is closed, and its name.

    Args:
        mode: of the file that it is to replace; None if there is none.
    """
    # The kernel takes away what the umask says, which nobody can read without a moment in which it is another.
    allowed = 0o666 if mode is None else mode & 0o666 | 0o600
    while True:
        path = os.path.join(folder, beginning + secrets.token_hex(_RANDOM_BYTES))
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, allowed)
        # Before it was held, another process may have taken it for one that was left.
        if _hold(handle) is not False and os.fstat(handle).st_nlink:
            return handle, path
        os.close(handle)


def _hold(handle: int) -> bool | None:
    """Whether this process holds a file now; None where the file system has no such locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _remove_left(folder: str, beginning: str) -> None:
    """Remove files that are called so and that nobody holds."""
    length = len(beginning) + 2 * _RANDOM_BYTES
    with os.scandir(folder) as entries:
        left = [entry.path for entry in entries if entry.name.startswith(beginning) and len(entry.name) == length]
    for path in left:
        with contextlib.suppress(OSError):  # somebody else's, or gone
            handle = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                if _hold(handle):
                    os.unlink(path)
            finally:
                os.close(handle)


def _put(temporary: str, path: str) -> None:
    """Give a file its name, if nobody has it: of several processes that try one succeeds."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without links
        if os.path.exists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path) from None
        os.replace(temporary, path)
    else:
        os.unlink(temporary)


def sync(path: str) -> None:
    """Have what was written to a file, or into a folder, on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
