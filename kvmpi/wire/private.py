"""Files and folders that only this user may touch: checked before anything secret is read from or put into them."""

from __future__ import annotations

import os
import stat

from kvmpi.errors import ConfigError

_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def check_folder(path: str) -> None:
    """Make sure that what lies in the folder ``path`` was put there by this user.

    Raises:
        ConfigError: it does not exist, is a symbolic link, belongs to somebody else, can be entered or written by
            others, or lies below a folder in which anybody could put another in its place.
    """
    try:
        status = os.lstat(path)
    except OSError as error:
        raise ConfigError(f"folder {path}: {error.strerror}") from None
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"{path} is not a folder (symbolic links are not followed)")
    _check_owner(path, status)
    if status.st_mode & _OTHERS:
        raise ConfigError(f"folder {path} has mode {_mode(status)}, others may use it; chmod 700 {path}")
    # Who owns the folders above is not asked: in a container, those of root may seem to be anybody's.
    above = os.path.dirname(os.path.realpath(path))
    while True:
        status = os.stat(above)
        if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
            raise ConfigError(
                f"folder {path} could be replaced by others: {above} has mode {_mode(status)}; use another (TMPDIR)"
            )
        if above == os.path.dirname(above):
            return
        above = os.path.dirname(above)


def read_file(path: str, max_bytes: int) -> bytes:
    """At most ``max_bytes`` of a file that only this user can read or write.

    Raises:
        ConfigError: there is no such regular file (symbolic links are not followed), it is too large, belongs to
            somebody else, or others may use it.
    """
    try:
        # Not blocking: a FIFO in its place would hold us up. What is opened is what is checked and read.
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"{path} is not a regular file")
        _check_owner(path, status)
        if status.st_mode & _OTHERS:
            raise ConfigError(f"{path} has mode {_mode(status)}, others may use it; chmod 600 {path}")
        content = os.read(fd, max_bytes + 1)
    finally:
        os.close(fd)
    if len(content) > max_bytes:
        raise ConfigError(f"{path} has more than {max_bytes} bytes")
    return content


def create_file(path: str, content: bytes) -> bool:
    """Write a file of mode 0600; false if something lies at ``path`` already, which is then left alone.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return False
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
    try:
        with open(fd, "wb") as file:
            os.fchmod(fd, 0o600)  # a default access list of the folder may have given more
            file.write(content)
    except OSError as error:
        os.unlink(path)
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
    return True


def _check_owner(path: str, status: os.stat_result) -> None:
    if status.st_uid != os.geteuid():
        raise ConfigError(f"{path} belongs to user {status.st_uid}, not to user {os.geteuid()} who runs this process")


def _mode(status: os.stat_result) -> str:
    return f"{stat.S_IMODE(status.st_mode):04o}"
