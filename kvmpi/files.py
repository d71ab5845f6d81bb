"""Files that are there as a whole or not at all."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def replacing(path: str, *, over: bool = True) -> Iterator[str]:
    """The name of a temporary file beside ``path``, which takes its place at the end of the block, safe on the disk.

    If the block raises, ``path`` is what it was and the temporary file is gone.

    Args:
        over: what is at ``path`` is replaced; else it stays, and that is a FileExistsError.
    Raises:
        OSError: the file cannot be made, written or renamed.
    """
    folder = os.path.dirname(os.path.abspath(path))
    handle, temporary = tempfile.mkstemp(prefix=".kvmpi-", dir=folder)
    os.close(handle)
    try:
        yield temporary
        sync(temporary)
        if over:
            os.replace(temporary, path)
        else:
            _put(temporary, path)
        sync(folder)
    except BaseException:
        if os.path.exists(temporary):
            os.unlink(temporary)
        raise


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
