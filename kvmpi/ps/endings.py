"""Which processes of a job have ended, as its launcher says that has waited for them: a FIFO in the job's folder."""

from __future__ import annotations

import logging
import os

import msgspec

from kvmpi.config import ENDINGS_FILE

_log = logging.getLogger(__name__)

_READ_BYTES = 1 << 16


class Ending(msgspec.Struct, frozen=True):
    """The end of one process. ``how`` is the end of a sentence, ``at_ns`` when the launcher knew of it (Unix time)."""

    role: str
    rank: int
    at_ns: int
    how: str


class Endings:
    """The scheduler's end. What a launcher has said while there was no scheduler is there for the next one."""

    def __init__(self, folder: str) -> None:
        self._rest = b""
        self._fd = -1
        if folder:
            try:
                # As a writer too: a FIFO without any is readable for ever.
                self._fd = os.open(os.path.join(folder, ENDINGS_FILE), os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            except OSError:
                pass  # whoever has started this job says nothing

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
