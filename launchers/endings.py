"""Tells the scheduler which processes have ended, so that nobody waits for their heartbeats: a FIFO in its folder."""

from __future__ import annotations

import json
import os
import time

from kvmpi.config import ENDINGS_FILE


class Endings:
    """The launcher's end. A scheduler that is started again reads what was said before."""

    def __init__(self, folder: str) -> None:
        path = os.path.join(folder, ENDINGS_FILE)
        os.mkfifo(path, 0o600)
        # As a reader too: what is written stays there while there is no scheduler.
        self._fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)

    def tell(self, role: str, rank: int, how: str) -> None:
        """A server, or a client as a whole, has ended for certain.

        Args:
            how: the end of a sentence.
        """
        line = json.dumps({"role": role, "rank": rank, "at_ns": time.time_ns(), "how": how})
        try:
            os.write(self._fd, line.encode() + b"\n")
        except OSError:
            pass  # nobody reads: heartbeats will be missed

    def close(self) -> None:
        os.close(self._fd)
