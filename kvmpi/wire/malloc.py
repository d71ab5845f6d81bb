"""What the C library keeps of the memory in which messages arrive."""

from __future__ import annotations

import ctypes
import sys


def keep_large_buffers(largest_bytes: int) -> None:
    """Let malloc keep and reuse buffers of up to ``largest_bytes`` instead of mapping each one anew (glibc only).

    ZeroMQ allocates every received message; without this, page faults cost more than the transfer.
    """
    libc = _glibc()
    if libc is None:
        return
    m_trim_threshold, m_top_pad, m_mmap_threshold = -1, -2, -3
    libc.mallopt(m_mmap_threshold, min(largest_bytes, 32 << 20))
    libc.mallopt(m_trim_threshold, 32 << 20)
    libc.mallopt(m_top_pad, 4 << 20)


def give_memory_back() -> None:
    """Let the system have what malloc keeps free (glibc only). It takes some milliseconds."""
    libc = _glibc()
    if libc is not None:
        libc.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    try:
        libc = ctypes.CDLL(None)
        return libc if libc.mallopt and libc.malloc_trim else None
    except (OSError, AttributeError):
        return None  # musl has neither, and no such threshold
