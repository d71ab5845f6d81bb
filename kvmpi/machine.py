"""Which machine this is, and how much of it is ours.

Only the standard library is used: launchers load this file by its path, since the package takes longer.
"""

from __future__ import annotations

import errno
import functools
import math
import os
import socket
import struct
import sys
from collections.abc import Callable

_SIOCGIFADDR = 0x8915
#: Of /proc/net/if_inet6: a scope, and flags (https://github.com/torvalds/linux/blob/master/include/uapi/linux/if_addr.h).
_LINK_ONLY = "20"
_TEMPORARY, _UNUSABLE = 0x01, 0x08 | 0x20 | 0x40  # another host has it, it is on its way out, or not yet looked for
#: The number of Linux's system call sched_setattr, by machine, and what it takes: size, policy, flags, nice, priority,
#: slice in nanoseconds, deadline, period, two utilisations (https://man7.org/linux/man-pages/man2/sched_setattr.2.html).
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274, "riscv64": 274, "ppc64le": 355, "s390x": 345}
_SCHED_ATTR = struct.Struct("=IIQiIQQQII")
#: On all machines (https://man7.org/linux/man-pages/man2/clone.2.html).
_CLONE3 = 435
_SHORT_SLICE_NS = 100_000
_RESET_ON_FORK = 1  # threads that this one makes have slices as usual


@functools.cache
def host_name() -> str:
    """Tells whether two processes share a host: name and boot, since names alone may repeat."""
    boot = read_text("/proc/sys/kernel/random/boot_id")
    return f"{os.uname().nodename}/{boot}" if hasattr(os, "uname") else socket.gethostname()


def read_text(path: str) -> str:
    """The text of a small file without blanks around it; empty where there is none."""
    try:
        with open(path, errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


def bound_cores() -> int:
    """Cores that this process may run on."""
    try:
        return len(os.sched_getaffinity(0))
    except (AttributeError, OSError):  # not on Linux, or a sandbox does not say
        return os.cpu_count() or 1


def refuses_affinity() -> bool:
    """Whether a sandbox refuses sched_getaffinity, which hwloc, and so every MPI, then asks again and again for ever.

    It takes any error for one that a larger mask would help against (``hwloc_linux_find_kernel_nr_cpus``,
    https://github.com/open-mpi/hwloc/blob/master/hwloc/topology-linux.c).
    """
    try:
        os.sched_getaffinity(0)
    except AttributeError:  # a system without that call has other ways
        return False
    except OSError:
        return True
    return False


def refuses_clone3() -> bool:
    """Whether a filter of system calls refuses clone3 in a way upon which glibc 2.34 and later make no thread.

    They call clone where clone3 is not known; the filter of Docker before 20.10.10 says that it is not permitted
    (https://github.com/moby/moby/issues/42680).
    """
    if not sys.platform.startswith("linux"):
        return False
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall(ctypes.c_long(_CLONE3), None, ctypes.c_size_t(0))  # with arguments that no kernel takes
    return ctypes.get_errno() == errno.EPERM


def num_cores() -> int:
    """Cores that this process may keep busy: a container may run on all of a machine's, but not on all at once."""
    return max(1, int(min(bound_cores(), quota_cores())))


def quota_cores(read: Callable[[str], str] = read_text) -> float:
    """The smallest quota of processor time above this process, in cores; infinite without one.

    Version 2 has ``cpu.max`` with ``QUOTA PERIOD``, version 1 ``cpu.cfs_quota_us`` and ``cpu.cfs_period_us``
    (https://docs.kernel.org/admin-guide/cgroup-v2.html, https://docs.kernel.org/scheduler/sched-bwc.html).
    """
    least = math.inf
    for folder in _cgroups(read, "cpu"):
        quota, _, period = read(f"{folder}/cpu.max").partition(" ")
        if not period:
            quota, period = read(f"{folder}/cpu.cfs_quota_us"), read(f"{folder}/cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(period):
            least = min(least, int(quota) / int(period))
    return least


def limit_bytes(read: Callable[[str], str] = read_text) -> float:
    """The smallest limit of memory above this process; infinite without one."""
    least = math.inf
    for folder in _cgroups(read, "memory"):
        text = read(f"{folder}/memory.max") or read(f"{folder}/memory.limit_in_bytes")
        if text.isdigit() and int(text) < 1 << 60:  # version 1 writes "none" as a number near 2**63
            least = min(least, float(text))
    return least


def spare_bytes(read: Callable[[str], str] = read_text) -> float:
    """What this process's groups may still take of their limits of memory; files that are cached give way."""
    least = math.inf
    for folder in _cgroups(read, "memory"):
        limit = read(f"{folder}/memory.max") or read(f"{folder}/memory.limit_in_bytes")
        used = read(f"{folder}/memory.current") or read(f"{folder}/memory.usage_in_bytes")
        if limit.isdigit() and used.isdigit() and int(limit) < 1 << 60:
            lines = [line.split() for line in read(f"{folder}/memory.stat").splitlines()]
            figures = {words[0]: int(words[1]) for words in lines if len(words) == 2}
            prefix = "total_" if "total_inactive_file" in figures else ""  # version 1: with the groups below it
            cached = sum(figures.get(f"{prefix}{name}_file", 0) for name in ("active", "inactive"))
            least = min(least, max(0.0, float(int(limit) - int(used) + cached)))
    return least


def room_for_threads(read: Callable[[str], str] = read_text) -> float:
    """How many processes and threads more the groups of this process may have; infinite without a limit."""
    least = math.inf
    for folder in _cgroups(read, "pids"):
        limit, current = read(f"{folder}/pids.max"), read(f"{folder}/pids.current")
        if limit.isdigit() and current.isdigit():
            least = min(least, int(limit) - int(current))
    return least


def _cgroups(read: Callable[[str], str], controller: str) -> list[str]:
    """The folders of this process's groups, and of those above them."""
    found = []
    for line in read("/proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0":
            base = "/sys/fs/cgroup"
        elif controller in controllers.split(","):
            base = f"/sys/fs/cgroup/{controllers}"
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        found += [f"{base}/{'/'.join(parts[:count])}".rstrip("/") for count in range(len(parts) + 1)]
    return found


def has_fabric() -> bool:
    """Whether this host has a card whose hardware moves messages: InfiniBand and its kin, or HPE's Slingshot."""
    return any(os.path.isdir(path) and os.listdir(path) for path in ("/sys/class/infiniband", "/sys/class/cxi"))


def addresses(read: Callable[[str], str] = read_text) -> list[tuple[str, str]]:
    """Network interfaces, each with an address by which other hosts may reach it: IPv4 first, and then IPv6.

    An interface has one of IPv4 at most here, and maybe several of IPv6, but none that is of its link alone.
    """
    found = [(name, address) for _, name in socket.if_nameindex() if (address := _address_of(name))]
    of_ipv6 = []
    for text, index, _, scope, flags, name in map(str.split, read("/proc/net/if_inet6").splitlines()):
        if scope != _LINK_ONLY and not int(flags, 16) & _UNUSABLE:
            address = socket.inet_ntop(socket.AF_INET6, bytes.fromhex(text))
            of_ipv6.append((int(flags, 16) & _TEMPORARY, int(index, 16), name, address))
    return found + [(name, address) for _, _, name, address in sorted(of_ipv6)]


def interfaces() -> dict[str, str]:
    """The address of every network interface that has one: that of IPv4, if it has both."""
    found: dict[str, str] = {}
    for name, address in addresses():
        found.setdefault(name, address)
    return found


def addresses_of(host: str) -> list[str]:
    """The addresses of a host, which is given by its name or by one of them: IPv4 first.

    Raises:
        OSError: nobody knows that name.
    """
    found = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)
    return list(dict.fromkeys(str(at[0]) for family, *_, at in sorted(found, key=lambda one: one[0] != socket.AF_INET)))


def family_of(address: str) -> socket.AddressFamily:
    """Which protocol a numeric address is of."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _address_of(interface: str) -> str:
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface[:15].encode()))
        except OSError:
            return ""
    return socket.inet_ntoa(answer[20:24])


def link_mbit(interface: str) -> int:
    """The speed of an interface's link, in Mbit/s; 0 if nobody knows."""
    speed = read_text(f"/sys/class/net/{interface}/speed")
    return int(speed) if speed.isdigit() and int(speed) < 1 << 31 else 0  # -1, which some write unsigned


def take_short_slices() -> None:
    """Ask the system to let this thread run soon when it has something to do, as it never runs for long.

    Linux 6.12 and later gives a thread that asks for short slices the core earlier, and not more of it. Elsewhere, and
    where that is not allowed, nothing happens.
    """
    number = _SCHED_SETATTR.get(os.uname().machine) if sys.platform == "linux" else None
    if number is None:
        return
    try:
        import ctypes

        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            nice = os.getpriority(os.PRIO_PROCESS, 0)
            asked = _SCHED_ATTR.pack(
                _SCHED_ATTR.size, os.SCHED_OTHER, _RESET_ON_FORK, nice, 0, _SHORT_SLICE_NS, 0, 0, 0, 0
            )
            ctypes.CDLL(None).syscall(number, 0, ctypes.create_string_buffer(asked), 0)
    except (OSError, ImportError, AttributeError):
        pass
