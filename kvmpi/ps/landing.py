"""Where the chunks of a value are put as they arrive, while the caller may still choose another place."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt

Buffer = npt.NDArray[Any]


class Landing:
    """A flat buffer of shape ``(count,)`` that fills chunk by chunk; every method may be called from any thread."""

    def __init__(self, buffer: Buffer) -> None:
        self._lock = threading.Lock()
        self._buffer = buffer
        self._landed: list[slice] = []

    @property
    def buffer(self) -> Buffer:
        """Where the chunks are."""
        return self._buffer

    def put(self, where: slice, chunk: Buffer) -> None:
        """``chunk`` has arrived: the elements ``where`` of the value."""
        with self._lock:
            np.copyto(self._buffer[where], chunk)
            self._landed.append(where)

    def move(self, buffer: Buffer) -> None:
        """Take ``buffer`` instead; what has arrived is copied there."""
        with self._lock:
            for where in self._landed:
                np.copyto(buffer[where], self._buffer[where])
            self._buffer = buffer
