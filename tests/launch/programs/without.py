"""Runs a program for which the system has not some of its calls: ``without.py ERRNO flock,... PROGRAM [ARG...]``.

A filter of seccomp refuses them with that error to the program and to all that it starts, as the profile of a container
does, or a file system that does not know them (https://man7.org/linux/man-pages/man2/seccomp.2.html).
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys

#: By machine, the numbers of the calls; some have two names, and some only a newer one.
NUMBERS = {
    "x86_64": {"flock": (73,), "mknod": (133, 259), "clone3": (435,), "sched_getaffinity": (204,)},
    "aarch64": {"flock": (32,), "mknod": (33,), "clone3": (435,), "sched_getaffinity": (123,)},
}
_SET_SECCOMP, _FILTER, _NO_NEW_PRIVILEGES = 22, 2, 38
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
NO_FILTERS = 77  # the exit status where the system has none


def refuse(numbers: list[int], error: int) -> bool:
    """Have this process and its children be refused these calls; whether that was possible."""
    count = len(numbers)
    steps = [(_LOAD, 0, 0, 0)]
    steps += [(_JUMP_IF_EQUAL, count - i, 0, number) for i, number in enumerate(numbers)]
    steps += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _ERRNO | error)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = ctypes.create_string_buffer(struct.pack("HP", len(steps), ctypes.addressof(code)))
    prctl = ctypes.CDLL(None).prctl
    return prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) == 0 and prctl(_SET_SECCOMP, _FILTER, program, 0, 0) == 0


def main(name: str, calls: str, *command: str) -> None:
    known = NUMBERS.get(platform.machine(), {})
    numbers = [number for call in calls.split(",") for number in known.get(call, ())]
    if not numbers or not refuse(numbers, getattr(errno, name)):
        sys.exit(NO_FILTERS)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(*sys.argv[1:])
