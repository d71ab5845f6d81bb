"""Where the chunks of a value are put as they arrive, while the caller may still choose another place."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt

Buffer = npt.NDArray[Any]


class Landing:
    """A flat buffer of shape ``(count,)`` that fills chunk by chunk; every method may be called from any thread.

    Chunks in memory of a server are held there until they are wanted, since each copy of them costs as much as their
    whole way here.
    """

    def __init__(self, buffer: Buffer) -> None:
        self._lock = threading.Lock()
        self._buffer = buffer
        self._moved = False
        self._landed: list[slice] = []
        self._held: list[tuple[slice, Buffer]] = []

    @property
    def buffer(self) -> Buffer:
        """Where the chunks are."""
        with self._lock:
            self._copy_held(self._buffer)
            self._landed += [where for where, _ in self._held]
            self._held = []
            return self._buffer

    def put(self, where: slice, chunk: Buffer) -> None:
        """``chunk`` has arrived: the elements ``where`` of the value."""
        with self._lock:
            if chunk.flags.writeable or self._moved:
                np.copyto(self._buffer[where], chunk)
                self._landed.append(where)
            else:
                self._held.append((where, chunk))

    @property
    def holds(self) -> bool:
        """Whether chunks are in a server's memory."""
        with self._lock:
            return bool(self._held)

    def copy_to(self, buffer: Buffer, *, last: bool) -> None:
        """Copy what has arrived into another buffer; ``last``: nobody wants it from here any more."""
        with self._lock:
            self._copy_all(buffer)
            if last:
                self._held = []

    def move(self, buffer: Buffer) -> None:
        """Take ``buffer`` instead; what has arrived is copied there."""
        with self._lock:
            self._copy_all(buffer)
            self._landed += [where for where, _ in self._held]
            self._held, self._buffer, self._moved = [], buffer, True

    def _copy_all(self, buffer: Buffer) -> None:
        for where in self._landed:
            np.copyto(buffer[where], self._buffer[where])
        self._copy_held(buffer)

    def _copy_held(self, buffer: Buffer) -> None:
        for where, chunk in self._held:
            np.copyto(buffer[where], chunk)
