"""Memory of this process that the other ranks of its host can map: arrays in it take part in sums without a copy."""

from __future__ import annotations

import bisect
import mmap
import os
import secrets
import threading
import weakref
from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt

from kvmpi.arrays import address_of

Buffer = npt.NDArray[Any]

TOKEN_BYTES = 16
#: Blocks begin at cache lines; large ones at pages, so that freed memory can go back to the system.
_ALIGN_BYTES = 64
_PAGE_BYTES = mmap.PAGESIZE
_GIVE_BACK_BYTES = 1 << 20
#: Addresses for all arenas of a host, each of which every rank maps: half of the 128 TiB that a process has on x86-64.
_ALL_BYTES = 64 << 40


def usual_bytes(memory_bytes: int, num_cores: int) -> int:
    """How large an arena is on a host of that much memory: all of it, if each of as many ranks as cores can map all."""
    return min(memory_bytes, _ALL_BYTES // max(1, num_cores))


class Arena:
    """A shared mapping, as a rule as large as the machine's memory, of which only what is used costs anything.

    No name in the file system refers to it: it is gone with the last process that maps it, whatever ended that.

    Raises:
        OSError: the system has no such memory.
    """

    def __init__(self, size_bytes: int | None = None) -> None:
        if size_bytes is None:
            size_bytes = usual_bytes(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), os.cpu_count() or 1)
        self.size_bytes = -(-size_bytes // _PAGE_BYTES) * _PAGE_BYTES
        self.fd = os.memfd_create("kvmpi", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.fd, self.size_bytes)
            self._map = mmap.mmap(self.fd, self.size_bytes)
        except BaseException:
            os.close(self.fd)
            raise
        self.pid = os.getpid()
        self.bytes = np.frombuffer(self._map, np.uint8)
        self.address = address_of(self.bytes)
        #: At the beginning of the arena, by which another process knows that it has mapped the right one.
        self.token = np.frombuffer(secrets.token_bytes(TOKEN_BYTES), np.uint64)
        self.bytes[:TOKEN_BYTES] = self.token.view(np.uint8)
        self._lock = threading.Lock()  # guards the list of free ranges
        self._returned: deque[tuple[int, int]] = deque()
        self._free: list[tuple[int, int]] = [(_ALIGN_BYTES, self.size_bytes)]  # (start, stop), in order, never touching

    def empty(self, count: int, dtype: np.dtype[Any]) -> Buffer | None:
        """Uninitialised memory of shape ``(count,)``, free with its last view; None if there is no room."""
        nbytes = count * dtype.itemsize
        start = self._take(max(nbytes, 1))
        if start is None:
            return None
        block = _Block(self, start, nbytes)
        weakref.finalize(block, self._give, start, max(nbytes, 1)).atexit = False
        return np.asarray(block).view(dtype)

    def offset_of(self, buffer: Buffer) -> int | None:
        """Where in the arena a contiguous buffer begins; None if it lies elsewhere."""
        offset = address_of(buffer) - self.address
        return offset if offset >= 0 and offset + buffer.nbytes <= self.size_bytes else None

    def _take(self, nbytes: int) -> int | None:
        align, length = _rounded(nbytes)
        with self._lock:
            self._absorb()
            for i, (start, stop) in enumerate(self._free):
                first = -(-start // align) * align
                if first + length <= stop:
                    self._free[i : i + 1] = [(a, b) for a, b in ((start, first), (first + length, stop)) if a < b]
                    return first
        return None

    def _give(self, start: int, nbytes: int) -> None:
        if os.getpid() != self.pid:
            return  # a forked child drops its references: the memory is still its parent's
        # The garbage collector calls this at any moment, also in the middle of _take: it must not wait for the lock.
        self._returned.append((start, nbytes))
        while self._returned and self._lock.acquire(blocking=False):
            try:
                self._absorb()
            finally:
                self._lock.release()

    def _absorb(self) -> None:
        """Under the lock: what was returned is free again."""
        while self._returned:
            start, nbytes = self._returned.popleft()
            align, length = _rounded(nbytes)
            if align == _PAGE_BYTES and hasattr(mmap, "MADV_REMOVE"):
                self._map.madvise(mmap.MADV_REMOVE, start, length)
            stop = start + length
            i = bisect.bisect(self._free, (start, stop))
            if i < len(self._free) and self._free[i][0] == stop:
                stop = self._free.pop(i)[1]
            if i > 0 and self._free[i - 1][1] == start:
                i -= 1
                start = self._free.pop(i)[0]
            self._free.insert(i, (start, stop))


def _rounded(nbytes: int) -> tuple[int, int]:
    """Alignment and length of a block for so many bytes."""
    align = _ALIGN_BYTES if nbytes < _GIVE_BACK_BYTES else _PAGE_BYTES
    return align, -(-nbytes // align) * align


class _Block:
    """What an array in the arena refers to: while one of its views lives, so does this."""

    owns_memory = True

    def __init__(self, arena: Arena, start: int, nbytes: int) -> None:
        self._arena = arena
        address = arena.address + start
        self.__array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}


_lock = threading.Lock()
_mine: Arena | None = None  # in a forked child still the parent's, whose blocks it may refer to
_refused: OSError | None = None


def own() -> Arena:
    """This process's arena, made at first use; a forked child makes its own.

    Raises:
        OSError: the system has no such memory.
    """
    global _mine, _refused
    with _lock:
        if _mine is None or _mine.pid != os.getpid():
            if _refused is not None:
                raise _refused
            try:
                _mine = Arena()
            except (OSError, AttributeError, ValueError) as error:
                _refused = OSError(f"no shared memory here: {error}")
                raise _refused from None
        return _mine
