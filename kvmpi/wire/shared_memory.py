"""Memory that the processes of a host show each other: an arena of one's own, and a view of another process's.

An arena is a memfd. It has no name in any file system, so that nothing is left of it whatever ends its processes, and
it takes nothing of /dev/shm, which is small in containers. Its owner maps it and seals it: nobody can shrink it, which
would kill those who read it, or write to it by another mapping. A peer opens it by /proc/PID/fd/N. The kernel allows
that to the same user alone, as it does with the Unix socket between the two, whose folder is private. Passing the
descriptor over a socket would need a second socket for each pair, since ZeroMQ passes none.

In another container the same PID may be somebody else's. So a peer looks before it opens, and proves by a random token
at the arena's beginning that it has mapped the right one.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import stat
import threading
import weakref
from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt

from kvmpi.wire.pool import Pool

Buffer = npt.NDArray[Any]

TOKEN_BYTES = 16
#: Of address space; memory is taken as it is used, and used again. Each peer is lent KVMPI_SHARED_BYTES at most.
ARENA_BYTES = 1 << 30
_MAX_MAPPED_BYTES = 1 << 40
_NAME = "kvmpi-payloads"
_SEAL_FUTURE_WRITE = 0x10  # fcntl.F_SEAL_FUTURE_WRITE, which Python has no name for before 3.13; Linux 5.1


class Arena:
    """Memory that others can read. It lives until the last reference to it is dropped; any thread may use it.

    Attributes:
        fd: by which peers find it while it lives.
        token: what is at its beginning.

    Raises:
        OSError: the system has no such memory.
    """

    def __init__(self, size_bytes: int = ARENA_BYTES) -> None:
        if not hasattr(os, "memfd_create"):
            raise OSError("no memfd on this system")
        self.size_bytes, self.pid = size_bytes, os.getpid()
        self.fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self.fd).atexit = False
        os.ftruncate(self.fd, size_bytes)
        try:
            mapped = mmap.mmap(self.fd, size_bytes)
        except ValueError as error:
            raise OSError(str(error)) from None
        _seal(self.fd)
        self._bytes = np.frombuffer(mapped, np.uint8)
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self._bytes[:TOKEN_BYTES] = np.frombuffer(self.token, np.uint8)
        self._lock = threading.Lock()  # guards the pool and the orphans
        self._pool = Pool(TOKEN_BYTES, size_bytes)
        self._orphans: list[tuple[View, list[int]]] = []

    @property
    def num_blocks(self) -> int:
        """How many blocks are not free."""
        return self._pool.num_taken

    def place(self, payload: Buffer) -> int | None:
        """Copy a contiguous array of at least one byte into a block of its own; where, or None if there is no room."""
        with self._lock:
            offset = self._pool.take(payload.nbytes)
        if offset is not None:
            np.copyto(self._bytes[offset : offset + payload.nbytes], payload.reshape(-1).view(np.uint8))
        return offset

    def free(self, offsets: list[int]) -> None:
        """Nobody reads these blocks any more."""
        with self._lock:
            for offset in offsets:
                self._pool.give(offset)

    def abandon(self, offsets: list[int], reader: View | None) -> None:
        """There is no way left for ``reader`` to give these blocks back: they are free when it is gone."""
        with self._lock:
            if reader is not None:
                self._orphans.append((reader, offsets))
        self.sweep()

    def sweep(self) -> None:
        """Free what was lent to readers that are gone."""
        with self._lock:
            gone = [orphan for orphan in self._orphans if orphan[0].gone()]
            self._orphans = [orphan for orphan in self._orphans if orphan not in gone]
        self.free([offset for _, offsets in gone for offset in offsets])


def _seal(fd: int) -> None:
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals | _SEAL_FUTURE_WRITE)
    except OSError:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)


class View:
    """Another process's arena, mapped for reading.

    Attributes:
        token: what was found at its beginning.

    Raises:
        OSError: it is not to be had, or is no arena.
    """

    def __init__(self, pid: int, fd: int, size_bytes: int) -> None:
        self._path = f"/proc/{pid}/fd/{fd}"
        if pid < 1 or fd < 0 or not TOKEN_BYTES <= size_bytes <= _MAX_MAPPED_BYTES:
            raise OSError(f"{self._path} with {size_bytes} bytes is no arena")
        # Of a process that is not meant it may be anything, and opening a device or a FIFO has effects.
        if not os.readlink(self._path).startswith(f"/memfd:{_NAME}"):
            raise OSError(f"{self._path} is no arena")
        opened = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        try:
            status = os.fstat(opened)
            sealed = fcntl.fcntl(opened, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
            regular = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
            if not (regular and sealed and status.st_size == size_bytes):
                raise OSError(f"{self._path} is not as it should be")
            try:
                mapped = mmap.mmap(opened, size_bytes, prot=mmap.PROT_READ)
            except ValueError as error:
                raise OSError(str(error)) from None
        finally:
            os.close(opened)
        self._inode = (status.st_dev, status.st_ino)
        self._bytes = np.frombuffer(mapped, np.uint8)
        self._address = int(self._bytes.__array_interface__["data"][0])
        self.size_bytes = size_bytes
        self.token = self._bytes[:TOKEN_BYTES].tobytes()

    def gone(self) -> bool:
        """Whether its owner has ended, or has dropped it and everything that it was lent."""
        try:
            status = os.stat(self._path)
        except OSError:
            return True
        return (status.st_dev, status.st_ino) != self._inode

    def block(self, offset: int, nbytes: int, ticket: int, returned: deque[int], keep: object) -> memoryview:
        """These bytes. When the last reference to them is dropped, in any thread, ``ticket`` is put into ``returned``.

        Args:
            keep: stays alive as long.
        """
        assert offset >= 0
        assert nbytes > 0
        assert 0 <= offset < offset + nbytes <= self.size_bytes
        return np.asarray(_Block(self._address + offset, nbytes, ticket, returned, (self._bytes, keep))).data


class _Block:
    """What a memoryview of a block refers to."""

    __slots__ = ("__array_interface__", "_keep", "_returned", "_ticket")

    def __init__(self, address: int, nbytes: int, ticket: int, returned: deque[int], keep: object) -> None:
        self.__array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, True), "version": 3}
        self._ticket, self._returned, self._keep = ticket, returned, keep

    def __del__(self) -> None:
        self._returned.append(self._ticket)
