"""FIFOs by which the launcher tells the scheduler who has ended, and hears who is silent and that it lives itself."""

from __future__ import annotations

import errno
import json
import os

from kvmpi.config import ENDINGS_FILE, LOSSES_FILE
from kvmpi.errors import ConfigError
from kvmpi.launchers.output import LineSplitter


def make_fifo(path: str) -> None:
    """Make a FIFO of mode 0600.

    Raises:
        ConfigError: the file system has none, like those of USB sticks, or of Windows below WSL.
        OSError: it cannot be made there for another reason.
    """
    try:
        os.mkfifo(path, 0o600)
    except OSError as error:  # which does not say where
        if error.errno in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
            raise ConfigError(
                f"{os.path.dirname(path)}: its file system has no FIFOs ({error.strerror}), which a job needs; set "
                "TMPDIR to a folder on a local disk"
            ) from None
        raise OSError(error.errno, error.strerror, path) from None


def _make(folder: str, name: str) -> int:
    path = os.path.join(folder, name)
    make_fifo(path)
    # As reader and writer: what is written stays there while there is no scheduler, and it does not read as ended.
    return os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)


class Endings:
    """What the scheduler is told; one that is started again hears what was said before."""

    def __init__(self, folder: str) -> None:
        self._fd = _make(folder, ENDINGS_FILE)

    def tell(self, role: str, rank: int, start: int, how: str, *, returns: bool = True) -> None:
        """A server, or a client as a whole, has ended for certain.

        Args:
            start: how many were started in its place before.
            how: the end of a sentence.
            returns: it may be started again.
        """
        line = json.dumps({"role": role, "rank": rank, "start": start, "how": how, "returns": returns})
        try:
            os.write(self._fd, line.encode() + b"\n")
        except OSError:
            pass  # nobody reads: heartbeats will be missed

    def close(self) -> None:
        os.close(self._fd)


class Losses:
    """What the scheduler says, now and then no more than that it lives.

    Attributes:
        fd: readable when it says something; whoever reads it has ``feed`` understand that, and closes it.
    """

    def __init__(self, folder: str) -> None:
        self.fd, self._splitter = _make(folder, LOSSES_FILE), LineSplitter()

    def feed(self, chunk: bytes) -> list[tuple[str, int]]:
        """Of what was read from ``fd``: role and rank of servers and clients that count as lost."""
        found = []
        for line in filter(None, self._splitter.feed(chunk)):
            said = json.loads(line)
            found.append((str(said["role"]), int(said["rank"])))
        return found
