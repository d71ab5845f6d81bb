"""A scheduler and servers as child processes of a worker, for jobs that no launcher of ours has started."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from kvmpi.config import ENDINGS_FILE, Config
from kvmpi.deadline import Deadline
from kvmpi.errors import ConfigError, KVTimeoutError

#: Nothing in the current folder takes the place of a module that the process needs: it comes last.
_MAIN = (
    "import runpy, sys; sys.path.sort(key=lambda folder: not folder); "
    "runpy.run_module('kvmpi.ps', run_name='__main__', alter_sys=True)"
)


class _Child(NamedTuple):
    label: str
    role: str
    rank: int
    process: subprocess.Popen[bytes]
    ready_fd: int  # on which it says that it listens


class Children:
    """What this process has started. They end with it, however that comes.

    Args:
        folder: of the job on this host, which is removed in the end.
        grace_s: for one that is asked to end, before it is killed.
        say: how people hear of one that ends too early.
    """

    def __init__(self, folder: str, grace_s: float, say: Callable[[str], None]) -> None:
        self._folder, self._grace_s, self._say = folder, grace_s, say
        self._lock = threading.Lock()  # guards what follows
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._closing = False

    @property
    def labels(self) -> list[str]:
        """Those that run."""
        return list(self._running)

    def start_scheduler(self, config: Config) -> str:
        """Start the scheduler of a job; the endpoint where it listens. Raises as ``start_servers`` does."""
        # By this it learns at once who has ended, where those are children of the same process.
        with contextlib.suppress(OSError):
            os.mkfifo(os.path.join(self._folder, ENDINGS_FILE), 0o600)
        return self._await(self._start("scheduler", 0, config), config.timeout_s)

    def start_servers(self, config: Config, ranks: Sequence[int]) -> None:
        """Start some servers of a job, and return when they listen.

        Raises:
            ConfigError: one cannot be started, or has ended, and has said why.
            KVTimeoutError: one has said nothing for as long as a call may take.
        """
        for child in [self._start("server", rank, config) for rank in ranks]:
            self._await(child, config.timeout_s)

    def _start(self, role: str, rank: int, config: Config) -> _Child:
        read_end, write_end = os.pipe()
        label = role if role == "scheduler" else f"{role} {rank}"
        env = {name: value for name, value in os.environ.items() if not name.startswith("KVMPI_")}
        env |= replace(config, role=role, rank=rank, ready_fd=write_end).to_env()
        words = [sys.executable, "-c", _MAIN, role, str(os.getpid())]
        try:
            # In a session of its own: a signal for all of the parent's group would end it before the others are done.
            with _on_all_cores():
                process = subprocess.Popen(
                    words, env=env, stdin=subprocess.DEVNULL, pass_fds=(write_end,), start_new_session=True
                )
        except OSError as error:
            os.close(read_end)
            raise ConfigError(f"{label} could not be started: {sys.executable}: {error.strerror}") from None
        finally:
            os.close(write_end)
        child = _Child(label, role, rank, process, read_end)
        with self._lock:
            self._running[label] = process
        return child

    def _await(self, child: _Child, timeout_s: float) -> str:
        """What it says when it listens."""
        try:
            text = _read_line(child.ready_fd, child.label, timeout_s)
        finally:
            os.close(child.ready_fd)
        if not text:
            how = _ending(child.process.wait())
            raise ConfigError(f"{child.label} has ended with {how} before it listened; see what it says")
        threading.Thread(target=self._follow, args=(child,), name="kvmpi-children", daemon=True).start()
        return text

    def _follow(self, child: _Child) -> None:
        """Return when the process has ended; tell of it, if nobody has asked it to."""
        code = child.process.wait()
        with self._lock:
            if self._closing:
                return
            del self._running[child.label]
        how = f"has ended with {_ending(code)}"
        self._say(f"kvmpi: {child.label}, which process {os.getpid()} has started, {how}")
        line = json.dumps({"role": child.role, "rank": child.rank, "start": 0, "how": how, "returns": False})
        with contextlib.suppress(OSError):  # the scheduler is elsewhere, or gone, and will miss heartbeats
            fd = os.open(os.path.join(self._folder, ENDINGS_FILE), os.O_WRONLY | os.O_NONBLOCK)
            try:
                os.write(fd, line.encode() + b"\n")
            finally:
                os.close(fd)

    def close(self) -> None:
        """End them, and remove the job's folder. Idempotent."""
        with self._lock:
            self._closing = True
        scheduler = self._running.get("scheduler")
        servers = [process for process in self._running.values() if process is not scheduler]
        _end(servers, self._grace_s)  # which tell the scheduler that they leave
        _end([] if scheduler is None else [scheduler], self._grace_s)
        shutil.rmtree(self._folder, ignore_errors=True)


@contextlib.contextmanager
def _on_all_cores() -> Iterator[None]:
    """What this thread starts is not bound to the cores to which an mpirun has bound this process: it has enough to do
    there."""
    try:
        bound = os.sched_getaffinity(0)
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    except (OSError, AttributeError):  # a sandbox, or a system without
        yield
        return
    try:
        yield
    finally:
        os.sched_setaffinity(0, bound)


def _end(processes: Sequence[subprocess.Popen[bytes]], grace_s: float) -> None:
    for process in processes:
        process.terminate()
    deadline_s = time.monotonic() + grace_s
    for process in processes:
        try:
            process.wait(max(0.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _read_line(fd: int, label: str, timeout_s: float) -> str:
    """What a process says when it listens; empty if it has closed ``fd`` without."""
    deadline, text = Deadline(timeout_s), b""
    listening = select.poll()
    listening.register(fd, select.POLLIN)
    while not text.endswith(b"\n"):
        if not listening.poll(1000 * deadline.remaining_s()):
            raise KVTimeoutError(f"{label} has not said within {timeout_s:.1f} s that it listens")
        if not (more := os.read(fd, 4096)):
            return ""
        text += more
    return text.decode(errors="replace").strip()


def _ending(code: int) -> str:
    return f"status {code}" if code >= 0 else f"signal {-code}"
