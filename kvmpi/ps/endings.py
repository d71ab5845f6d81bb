"""Which processes have ended, as the launcher says, and which are silent, as it is told: FIFOs in the job's folder."""

from __future__ import annotations

import logging
import os
from contextlib import suppress

import msgspec

from kvmpi.config import ENDINGS_FILE, LOSSES_FILE

_log = logging.getLogger(__name__)

_READ_BYTES = 1 << 16


class Ending(msgspec.Struct, frozen=True):
    """The end of one process. ``how`` is the end of a sentence, ``start`` how many were in its place before.

    ``returns``: it may be started again.
    """

    role: str
    rank: int
    start: int
    how: str
    returns: bool = True


def _open(folder: str, name: str) -> int:
    """The launcher's FIFO, if it has one; else -1. As reader and writer: it is not to be closed without the other."""
    try:
        return os.open(os.path.join(folder, name), os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC) if folder else -1
    except OSError:
        return -1


class Endings:
    """What the launcher has said, while there was no scheduler too."""

    def __init__(self, folder: str) -> None:
        self._rest, self._fd = b"", _open(folder, ENDINGS_FILE)

    @property
    def handles(self) -> list[int]:
        return [self._fd] if self._fd >= 0 else []

    def take(self) -> list[Ending]:
        """What has been said since."""
        try:
            self._rest += os.read(self._fd, _READ_BYTES) if self._fd >= 0 else b""
        except BlockingIOError:
            return []
        *lines, self._rest = self._rest.split(b"\n")
        found = []
        for line in lines:
            try:
                found.append(msgspec.json.decode(line, type=Ending))
            except msgspec.DecodeError as error:
                _log.error("scheduler: the launcher says %r (%s)", line[:200], error)
        return found

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Losses:
    """What the launcher is told: who is silent, and every ``every_s`` that the scheduler is not."""

    def __init__(self, folder: str, every_s: float) -> None:
        self._fd, self._every_s, self._next_s = _open(folder, LOSSES_FILE), every_s, 0.0

    def tell(self, role: str, rank: int) -> None:
        """A server, or the master of a client, is taken for lost, whether it is alive or not."""
        self._say(msgspec.json.encode({"role": role, "rank": rank}))

    def live(self, now_s: float) -> None:
        """The scheduler goes on."""
        if now_s >= self._next_s:
            self._next_s = now_s + self._every_s
            self._say(b"")

    def _say(self, line: bytes) -> None:
        if self._fd >= 0:
            with suppress(OSError):  # nobody reads, and processes are left to themselves
                os.write(self._fd, line + b"\n")

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
