"""Sleeping until something can be read: from any of several sockets, or because another thread says so."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any, Protocol

import zmq


class Source(Protocol):
    """What can be waited for."""

    @property
    def handles(self) -> Sequence[zmq.Socket[Any] | int]:
        """Sockets and descriptors, of which one is readable when the source is; always the same ones."""


class Waker:
    """Wakes a thread that sleeps in ``Readiness.wait``; ``wake`` may be called from any thread."""

    def __init__(self) -> None:
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)

    @property
    def handles(self) -> list[int]:
        return [self._read.fileno()]

    def wake(self) -> None:
        try:
            self._write.send(b"\0")
        except (BlockingIOError, OSError):
            pass  # full: a wake-up is pending already; closed: nobody sleeps any more

    def clear(self) -> None:
        try:
            while len(self._read.recv(4096)) == 4096:
                pass
        except BlockingIOError:
            pass

    def close(self) -> None:
        self._read.close()
        self._write.close()


class Readiness:
    """A fixed set of sources to wait on."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._poller = zmq.Poller()
        self._sources: dict[zmq.Socket[Any] | int, Source] = {}
        for source in sources:
            for handle in source.handles:
                self._sources[handle] = source
                self._poller.register(handle, zmq.POLLIN)

    def wait(self, timeout_s: float) -> list[Source]:
        """Sleep until something can be read, at most ``timeout_s``; which of the sources can, maybe twice."""
        ready = self._poller.poll(max(0, int(timeout_s * 1000 + 0.999)))
        return [self._sources[handle] for handle, _ in ready]
