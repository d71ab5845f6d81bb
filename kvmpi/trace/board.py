"""Where one thread leaves the newest picture of what it does, for others that ask: who asks can never hold it up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

Picture = dict[str, Any]

#: A picture is made again as long as somebody has asked within this time.
_INTEREST_S = 5.0


class Board:
    """The owner calls ``step`` now and then; any other thread calls ``read``.

    Args:
        make: the picture at ``now_s`` (of ``time.monotonic``); runs in the owner's thread, and only if somebody asks.
        every_s: how old a picture may become.
    """

    def __init__(self, make: Callable[[float], Picture], every_s: float = 1.0) -> None:
        self._make, self._every_s = make, every_s
        self._changed = threading.Condition()
        self._asked_s = self._made_s = -1e9
        self._number = 0
        self._picture: Picture = {}

    def step(self, now_s: float) -> None:
        """Make a new picture if it is time to."""
        if now_s - self._asked_s <= _INTEREST_S and now_s - self._made_s >= self._every_s:
            self.renew(now_s)

    def renew(self, now_s: float) -> Picture:
        """Make a new picture in any case."""
        picture = self._make(now_s)
        with self._changed:
            self._picture, self._made_s = picture, now_s
            self._number += 1
            self._changed.notify_all()
        return picture

    def read(self, timeout_s: float = 2.0) -> tuple[int, Picture]:
        """The newest picture and its number; number 0 if there was none in time."""
        now_s = time.monotonic()
        with self._changed:
            self._asked_s = now_s
            if now_s - self._made_s > 2 * self._every_s:
                before = self._number
                self._changed.wait_for(lambda: self._number > before, timeout_s)
            return self._number, self._picture
