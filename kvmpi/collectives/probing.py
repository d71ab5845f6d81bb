"""Keeps TCP connections without traffic known to the firewalls on their way: the system probes them (keepalive).

A firewall, or what translates addresses, forgets a connection that has been silent for some minutes, as while one rank
evaluates. What is sent over it from then on vanishes, and the next sum waits for what never comes.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
import threading

#: Seconds between two probes of a connection without traffic, of which so many may stay without an answer. It must last
#: for longer than most calls may take: what is sent after a partition gets through, if nobody has given up.
PAUSE_S, _PROBES = 5, 127
#: Seconds between two looks for connections of MPI's, which makes them when they are needed first: at first, and later.
_SOON_S, _SELDOM_S = 0.5, 60.0
_SO_ACCEPTCONN, _SO_PROTOCOL = 30, 38  # of Linux

_watching = threading.Lock()
_watcher: threading.Thread | None = None


def options() -> list[tuple[int, int, int]]:
    """Level, name and value of each option of a socket that is to be probed."""
    found = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    if sys.platform == "linux":  # elsewhere the times are the system's
        times = ((socket.TCP_KEEPIDLE, PAUSE_S), (socket.TCP_KEEPINTVL, PAUSE_S), (socket.TCP_KEEPCNT, _PROBES))
        found += [(socket.IPPROTO_TCP, name, value) for name, value in times]
    return found


def watch() -> None:
    """Have the connections of this process that nobody has probed, which MPI's are, be probed from now on.

    MPI has no setting for that, and says to nobody which descriptors are its own. Linux only.
    """
    global _watcher
    with _watching:
        if sys.platform == "linux" and (_watcher is None or not _watcher.is_alive()):  # a forked child has no thread
            _watcher = threading.Thread(target=_watch, name="kvmpi-probing", daemon=True)
            _watcher.start()


def _watch() -> None:
    never, pause_s = threading.Event(), _SOON_S
    while not never.wait(pause_s):
        probe_all()
        pause_s = min(2 * pause_s, _SELDOM_S)


def probe_all() -> int:
    """Have all TCP connections of this process that are not probed be probed; how many these are."""
    # Python's own sockets for such descriptors could make them non-blocking, see socket.setdefaulttimeout.
    libc = ctypes.CDLL(None, use_errno=True)
    value, size = ctypes.c_int(), ctypes.c_uint(ctypes.sizeof(ctypes.c_int))

    def ask(fd: int, name: int) -> int:
        failed = libc.getsockopt(fd, socket.SOL_SOCKET, name, ctypes.byref(value), ctypes.byref(size))
        return -1 if failed else value.value

    found = 0
    for fd in map(int, os.listdir("/proc/self/fd")):
        # Where it is closed meanwhile, or is something else by now, the system says so, or probes that: no harm.
        wanted = {_SO_PROTOCOL: socket.IPPROTO_TCP, _SO_ACCEPTCONN: 0, socket.SO_KEEPALIVE: 0}
        if all(ask(fd, name) == each for name, each in wanted.items()):
            found += 1
            for level, name, each in options():
                libc.setsockopt(fd, level, name, ctypes.byref(ctypes.c_int(each)), size)
    return found
