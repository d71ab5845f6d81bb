"""Memory that the processes of a host show each other: an arena of one's own, and a view of another process's.

An arena is a memfd. It has no name in any file system, so that nothing is left of it whatever ends its processes, and
it takes nothing of /dev/shm, which is small in containers. It is sealed against shrinking, which would kill those who
read it, and peers map it for reading only. A peer opens it by /proc/PID/fd/N. The kernel allows that to the same user
alone, as it does with the Unix socket between the two, whose folder is private. Passing the descriptor over a socket
would need a second socket for each pair, since ZeroMQ passes none.

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
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from kvmpi.wire.pool import ALIGN_BYTES, Pool

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Buffer: TypeAlias = "npt.NDArray[Any]"

TOKEN_BYTES = 16
_MAX_MAPPED_BYTES = 1 << 40
_NAME = "kvmpi-payloads"


class _Mapped:
    """A mapping as an array, once there are payloads: a scheduler, which has none, starts without NumPy."""

    _map: mmap.mmap

    @cached_property
    def _bytes(self) -> Buffer:
        import numpy as np

        return np.frombuffer(self._map, np.uint8)

    @cached_property
    def _address(self) -> int:
        return int(self._bytes.__array_interface__["data"][0])


class Arena(_Mapped):
    """Memory that others can read. It lives until the last reference to it is dropped; any thread may use it.

    Args:
        size_bytes: of address space, by default as much as the machine has memory: only what is used costs anything.
    Attributes:
        fd: by which peers find it while it lives.
        token: what is at its beginning.

    Raises:
        OSError: the system has no such memory.
    """

    def __init__(self, size_bytes: int | None = None) -> None:
        if not hasattr(os, "memfd_create"):
            raise OSError("no memfd on this system")
        if size_bytes is None:
            size_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        self.size_bytes, self.pid = size_bytes, os.getpid()
        self.fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self.fd).atexit = False
        os.ftruncate(self.fd, size_bytes)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self._map = _map(self.fd, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE)
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self._map[:TOKEN_BYTES] = self.token
        self._lock = threading.Lock()  # guards the pool, the orphans, and how many arrays there are
        self._pool = Pool(TOKEN_BYTES, size_bytes)
        self._orphans: list[_Orphan] = []
        self._arrays = 0
        self._dropped: deque[int] = deque()  # where arrays were that nobody refers to any more

    @property
    def num_blocks(self) -> int:
        """How many blocks are not free."""
        with self._lock:
            self._absorb()
            return self._pool.num_taken

    def empty(self, count: int, dtype: np.dtype[Any]) -> Buffer | None:
        """Uninitialised memory of shape ``(count,)``, free with its last view; None if there is no room."""
        import numpy as np

        nbytes = count * dtype.itemsize
        offset = self._take(max(nbytes, 1), arrays=1)
        if offset is None:
            return None
        block = _Block(self._address + offset, nbytes, offset, self._dropped, self, read_only=False)
        return np.asarray(block).view(dtype)

    def offset_of(self, payload: Buffer) -> int | None:
        """Where a contiguous array begins in this arena, if it is in it, and where a block might."""
        offset = int(payload.__array_interface__["data"][0]) - self._address
        inside = 0 <= offset <= self.size_bytes - payload.nbytes and offset % ALIGN_BYTES == 0
        return offset if inside else None

    def place(self, payload: Buffer) -> int | None:
        """Copy a contiguous array of at least one byte into a block of its own; where, or None if there is no room."""
        offset = self._take(payload.nbytes)
        if offset is not None:
            self._bytes[offset : offset + payload.nbytes] = payload.reshape(-1).view("u1")
        return offset

    def free(self, offsets: list[int]) -> None:
        """Nobody reads these placed blocks any more."""
        with self._lock:
            for offset in offsets:
                self._pool.give(offset)

    def abandon(self, offsets: list[int], arrays: Sequence[object], reader: View | None) -> None:
        """There is no way left for ``reader`` to give back placed blocks and arrays: they are kept until it is gone."""
        with self._lock:
            self._orphans.append(_Orphan(reader, offsets, arrays))
        self.sweep()

    def sweep(self) -> None:
        """Free what was lent to readers that are gone."""
        with self._lock:
            gone = [orphan for orphan in self._orphans if orphan.reader is not None and orphan.reader.gone()]
            self._orphans = [orphan for orphan in self._orphans if all(orphan is not other for other in gone)]
        self.free([offset for orphan in gone for offset in orphan.offsets])

    def _take(self, nbytes: int, arrays: int = 0) -> int | None:
        with self._lock:
            self._absorb()
            offset = self._pool.take(nbytes)
            self._arrays += arrays if offset is not None else 0
        return offset

    def _absorb(self) -> None:
        """Under the lock: arrays that are gone are free memory. With the last of them it goes back to the system."""
        freed = len(self._dropped)
        for _ in range(freed):
            self._pool.give(self._dropped.popleft())
        self._arrays -= freed
        if freed and not self._arrays:
            self._give_back()

    def give_back(self) -> None:
        """Let the system have what is free, though it may be wanted again."""
        with self._lock:
            self._absorb()
            self._give_back()

    def _give_back(self) -> None:
        for start, stop in self._pool.free_ranges if hasattr(mmap, "MADV_REMOVE") else ():
            first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, stop // mmap.PAGESIZE * mmap.PAGESIZE
            if first < last:
                self._map.madvise(mmap.MADV_REMOVE, first, last - first)


def _map(fd: int, size_bytes: int, prot: int) -> mmap.mmap:
    try:
        return mmap.mmap(fd, size_bytes, prot=prot)
    except ValueError as error:
        raise OSError(str(error)) from None


class _Orphan(NamedTuple):
    """What a reader has that can no longer say when it has done with it."""

    reader: View | None
    offsets: list[int]
    arrays: Sequence[object]


class View(_Mapped):
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
            self._map = _map(opened, size_bytes, mmap.PROT_READ)
        finally:
            os.close(opened)
        self._inode = (status.st_dev, status.st_ino)
        self.size_bytes = size_bytes
        self.token = self._map[:TOKEN_BYTES]

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
        import numpy as np

        return np.asarray(
            _Block(self._address + offset, nbytes, ticket, returned, (self._bytes, keep), read_only=True)
        ).data


class _Block:
    """What arrays and memoryviews of a block refer to; ``number`` is put into ``dropped`` with the last of them.

    Garbage collection calls that at any moment, in any thread: it must wait for no lock.
    """

    __slots__ = ("__array_interface__", "_dropped", "_keep", "_number")

    def __init__(
        self, address: int, nbytes: int, number: int, dropped: deque[int], keep: object, *, read_only: bool
    ) -> None:
        self.__array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, read_only), "version": 3}
        self._number, self._dropped, self._keep = number, dropped, keep

    def __del__(self) -> None:
        self._dropped.append(self._number)
