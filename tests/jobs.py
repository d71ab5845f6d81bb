"""Jobs of real processes, started as a user starts them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

#: Seconds that no job takes, also on a slow machine that does other things, and less than a call of a store may take.
HANGS_S = 240.0
#: The same of jobs that check much one after the other; their calls may take less.
LONG_JOB_HANGS_S = 900.0
#: Runs several programs in each worker.
IN_TURN = Path(__file__).with_name("in_turn.py")


def run_job(
    options: str,
    program: Path,
    *arguments: object,
    timeout_s: float = HANGS_S,
    settings: Mapping[str, object] = MappingProxyType({}),
) -> subprocess.CompletedProcess[str]:
    """``kvmpi run OPTIONS PROGRAM ARGUMENTS`` with ``KVMPI_*`` settings; output is captured."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("KVMPI_")}
    env.update({f"KVMPI_{name.upper()}": str(value) for name, value in settings.items()})
    command = [sys.executable, "-m", "kvmpi", "run", *options.split(), "--", str(program), *map(str, arguments)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout_s, check=False)


def run_in_turn(
    options: str,
    words: Sequence[object],
    timeout_s: float = HANGS_S,
    settings: Mapping[str, object] = MappingProxyType({}),
) -> subprocess.CompletedProcess[str]:
    """A job in which each worker runs several programs, as ``in_turn.py`` has them."""
    return run_job(options, IN_TURN, *words, timeout_s=timeout_s, settings=settings)


def wait_for(condition: Callable[[], object], what: str, timeout_s: float = HANGS_S) -> None:
    """Look until something is so; ``what`` is said if it does not come in time.

    A look that takes long, as one at all processes does, is taken less often: what is waited for needs the processor.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        began = time.monotonic()
        if condition():
            return
        ended = time.monotonic()
        assert ended < deadline, f"{what}: not within {timeout_s} s"
        time.sleep(min(max(0.01, 10 * (ended - began)), 0.1))


def await_lines(job: subprocess.Popen[str], count: int, end: str, timeout_s: float = HANGS_S) -> None:
    """Until ``job`` has printed so many lines, which all end so; it is killed if that takes too long."""
    assert job.stdout is not None
    limit = threading.Timer(timeout_s, job.kill)
    limit.start()
    lines = [job.stdout.readline() for _ in range(count)]
    limit.cancel()
    assert all(line.endswith(end + "\n") for line in lines), lines


def command_line(pid: int) -> str:
    """A process's words, separated by spaces; nothing if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
    except OSError:
        return ""


def is_mpirun(pid: int) -> bool:
    program = os.path.basename(command_line(pid).partition(" ")[0])
    return program.startswith(("mpirun", "prterun", "mpiexec"))


def environs_with(mark: str) -> dict[int, dict[str, str]]:
    """The environment of every living process in which ``mark``, ``NAME=VALUE``, stands, by pid."""
    found = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                text = file.read()
        except OSError:
            continue
        if mark.encode() not in text:
            continue
        environ = text.decode(errors="replace").split("\0")
        if mark in environ:
            found[int(name)] = dict(item.split("=", 1) for item in environ if "=" in item)
    return found
