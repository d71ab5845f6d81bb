"""Reads and writes in the memory of another process of this host: Linux's cross-memory attach, one copy, no staging."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from typing import Any, NamedTuple

import numpy.typing as npt

from kvmpi.arrays import address_of
from kvmpi.errors import PeerLostError

Buffer = npt.NDArray[Any]

_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _load(name: str) -> Any:
    if not sys.platform.startswith("linux"):
        return None
    try:
        function = getattr(ctypes.CDLL(None, use_errno=True), name)
    except (OSError, AttributeError):
        return None
    vector = ctypes.POINTER(_IoVec)
    function.argtypes = [ctypes.c_int, vector, ctypes.c_ulong, vector, ctypes.c_ulong, ctypes.c_ulong]
    function.restype = ctypes.c_ssize_t
    return function


_process_vm_readv = _load("process_vm_readv")
_process_vm_writev = _load("process_vm_writev")


def available() -> bool:
    """Whether this system has the calls; it may still refuse to serve them."""
    return _process_vm_readv is not None and _process_vm_writev is not None


def admit_peers() -> None:
    """Let processes of the same user read and write here, where a security module (Yama) asks to be told."""
    try:
        with open("/proc/sys/kernel/yama/ptrace_scope") as file:
            scope = file.read().strip()
    except OSError:
        return
    if scope == "1":
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)


class Source(NamedTuple):
    """Where a vector begins, in the memory of process ``pid``; 0: in this one's."""

    address: int
    pid: int = 0


def refusal(verb: str, pid: int, number: int) -> Exception:
    """What it means that process ``pid`` could not be read from or written to, because of error ``number``."""
    if number in (errno.EPERM, errno.EACCES, errno.ENOSYS):
        return PermissionError(number, f"cannot {verb} process {pid}: {os.strerror(number)}")
    return PeerLostError(f"cannot {verb} process {pid}: {os.strerror(number)}; it has probably ended")


class CrossMemory:
    """The memory of process ``pid``, for one thread at a time."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._local, self._remote = _IoVec(), _IoVec()

    def read(self, address: int, into: Buffer) -> None:
        """Copy ``into.nbytes`` bytes from ``address`` there.

        Raises:
            PermissionError: the system refuses.
            PeerLostError: that process has ended, or has no such memory any more.
        """
        self._copy(_process_vm_readv, "read from", address, into)

    def write(self, address: int, block: Buffer) -> None:
        """Copy ``block`` to ``address`` there; raises as ``read`` does."""
        self._copy(_process_vm_writev, "write to", address, block)

    def _copy(self, call: Any, verb: str, address: int, here: Buffer) -> None:
        position, end = address_of(here), here.nbytes
        done = 0
        while done < end:
            self._local.base, self._local.length = position + done, end - done
            self._remote.base, self._remote.length = address + done, end - done
            copied = call(self.pid, self._local, 1, self._remote, 1, 0)
            if copied <= 0:
                raise refusal(verb, self.pid, ctypes.get_errno())
            done += copied
