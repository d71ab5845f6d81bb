"""Starts a child so that it cannot outlive the launcher, and signals whole process groups."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path

WATCHDOG = str(Path(__file__).with_name("watchdog.py"))
PR_SET_PDEATHSIG = 1
OTHERS_S, AGAIN_S = 15.0, 5.0  # for other hosts, all at once, to clear up; and for a second try


def exit_status(returncode: int) -> int:
    """The exit status of a shell: 128 + signal for a process that a signal has killed."""
    return 128 - returncode if returncode < 0 else returncode


def is_stopped(pid: int) -> bool:
    """Whether a process of this host waits for SIGCONT, as far as the system says so."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b") ")[2][:1] in (b"T", b"t")
    except OSError:
        return False


def describe_end(returncode: int) -> str:
    """``was killed by SIGSEGV`` or ``ended with exit status 3``."""
    if returncode < 0:
        return f"was killed by {_signal_name(-returncode)}"
    text = f"ended with exit status {returncode}"
    if 128 < returncode <= 128 + 64:  # shells and mpiruns pass a signal on like that; a program may mean anything by it
        text += f", as when {_signal_name(returncode - 128)} has killed what it had started"
    return text


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _die_with_parent() -> Callable[[], None] | None:
    """What a child does between fork and exec, or None where the system has no parent-death signal.

    The launcher has one thread, so running Python there is safe, and the thread that forks lives as long as it does
    (the signal is sent when the forking *thread* ends).
    """
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    parent = os.getpid()

    def setup() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # the launcher died between fork and prctl
            os._exit(128 + signal.SIGKILL)

    return setup


def start(
    command: Sequence[str], env: Mapping[str, str], *, stdout: int, stderr: int, pass_fds: Sequence[int] = (),
    stdin: int = subprocess.DEVNULL,
) -> subprocess.Popen[bytes]:  # fmt: skip
    """Start ``command`` as the leader of a session and process group of its own, by default without standard input.

    A session of its own also keeps the terminal's Ctrl-C away: the launcher alone decides how the job ends.
    """
    return subprocess.Popen(
        list(command),
        env=dict(env),
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        pass_fds=tuple(pass_fds),
        start_new_session=True,
        preexec_fn=_die_with_parent(),
    )


def signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal to the group that ``process`` leads, if it has not been waited for (its number is then safe)."""
    if process.returncode is None:
        try:
            os.killpg(process.pid, number)
        except OSError:
            pass


def bury_orphans(own: Container[int]) -> None:
    """As the first process of a container, take note of the ends of those whose parents have ended.

    Nobody else can, and until then they count as processes. Those that are in ``own`` somebody waits for.
    """
    if os.getpid() != 1:
        return
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid not in own:
            os.waitpid(ended.si_pid, 0)


class Watchdog:
    """The launcher's end of the watchdog process (see watchdog.py) of this host, or of another.

    Args:
        paths: see ``watchdog.remove``.
        reach: makes of a command one that runs it on another host.
    Attributes:
        others: those of other hosts, which end with this one.
    """

    def __init__(
        self, job_id: str, paths: Sequence[str], reach: Callable[[Sequence[str]], Sequence[str]] | None = None
    ) -> None:
        self._job_id, self._here = job_id, reach is None
        self.others: list[Watchdog] = []
        self._finished = False
        self._paths = tuple(paths)
        self._since_s = time.time()
        read_end, self._write_end = os.pipe()  # close-on-exec: no child holds the write end
        env = {name: value for name, value in os.environ.items() if not name.startswith("KVMPI_")}
        command = [sys.executable, "-I", "-S", WATCHDOG, job_id, *self._paths]
        self._command = list(command if reach is None else reach(command))
        self._env = env
        try:
            self._process = self._start(read_end)
        finally:
            os.close(read_end)

    @property
    def pids(self) -> list[int]:
        """Of this process's children, those that are its and the others'."""
        return [watchdog._process.pid for watchdog in (self, *self.others)]

    def add(self, group: int) -> None:
        """Tell it of a process group, for systems without /proc."""
        self._tell(f"+{group}\n")

    def discard(self, group: int) -> None:
        """The leader of the group has ended and its number may be used again."""
        self._tell(f"-{group}\n")

    def _tell(self, line: str) -> None:
        try:
            os.write(self._write_end, line.encode())
        except OSError:  # it was killed; finish() does its work then
            pass

    def release(self) -> None:
        """Let it end what is left of the job."""
        if self._write_end >= 0:
            os.close(self._write_end)
            self._write_end = -1

    def finish(self, timeout_s: float = 60.0) -> None:
        """Let it, and the others, end what is left of the job, and wait for that. Idempotent."""
        if self._finished:
            return
        self._finished = True
        for watchdog in (self, *self.others):
            watchdog.release()
        if not self._has_ended(timeout_s):
            from kvmpi.launchers import watchdog as here

            here.kill_all(self._job_id)
            here.remove(self._paths, self._since_s)
        until_s = time.monotonic() + OTHERS_S
        left = [watchdog for watchdog in self.others if not watchdog._has_ended(until_s - time.monotonic())]
        # They were killed, and others do their work; or their hosts are not to be reached, and what is there neither.
        again = [watchdog._start(subprocess.DEVNULL) for watchdog in left]
        until_s = time.monotonic() + AGAIN_S
        for process in again:
            _end(process, until_s - time.monotonic())

    def _has_ended(self, timeout_s: float) -> bool:
        """Whether it has done its work, in this time."""
        return _end(self._process, timeout_s) == 0

    def _start(self, stdin: int) -> subprocess.Popen[bytes]:
        nothing = subprocess.DEVNULL  # our output would keep ``kvmpi run | tee`` waiting for the watchdog
        return subprocess.Popen(
            self._command, env=self._env, cwd="/", stdin=stdin, stdout=nothing, stderr=nothing, start_new_session=True
        )


def _end(process: subprocess.Popen[bytes], timeout_s: float) -> int:
    """Wait for a process; kill one that takes longer."""
    try:
        return process.wait(max(0.0, timeout_s))
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
