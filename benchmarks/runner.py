"""Jobs that run to their ends one after the other, while whoever measures them only waits."""

from __future__ import annotations

import os
import secrets
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from types import TracebackType

from kvmpi.benchmarks.jobs import InterruptedBySignal, JobFailedError
from kvmpi.launchers import processes
from kvmpi.launchers.mpirun import LITTER
from kvmpi.launchers.signals import SignalCatcher

_GRACE_S = 10.0  # for kvmpi run to end its job


class Runner:
    """A context manager, after which no process of the jobs is left, nor its ``folder``; also after a kill -9.

    Attributes:
        folder: for files of the jobs.
    """

    def __enter__(self) -> Runner:
        self._id = secrets.token_hex(8)
        self.folder = tempfile.mkdtemp(prefix="kvmpi-bench-")
        self._watchdog = processes.Watchdog(self._id, (self.folder, *LITTER))
        self._signals = SignalCatcher()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watchdog.finish()
        self._signals.close()

    def run(
        self, command: Sequence[str], env: Mapping[str, str] | None = None, *, with_errors: bool = False
    ) -> tuple[int, str]:
        """The exit status of ``command``, and its standard output; ``with_errors``: with standard error among it.

        Raises:
            InterruptedBySignal: Ctrl-C and the like; the job has been told, and has ended.
        """
        env = {**(os.environ if env is None else env), "KVMPI_JOB_ID": self._id}
        with tempfile.TemporaryFile() as output:
            fd = output.fileno()
            try:
                process = processes.start(command, env, stdout=fd, stderr=fd if with_errors else 2)
            except OSError as error:
                raise JobFailedError(f"{command[0]} could not be started: {error.strerror}") from None
            self._watchdog.add(process.pid)
            while process.poll() is None and not self._signals.caught:
                self._sleep(None)
            if self._signals.caught:
                self._end(process)
                raise InterruptedBySignal(self._signals.caught[0])
            self._watchdog.discard(process.pid)
            output.seek(0)
            return processes.exit_status(process.returncode), output.read().decode(errors="replace")

    def show(self, command: Sequence[str]) -> int:
        """The exit status of a job whose rank 0 has something to print."""
        status, said = self.run(command)
        print(said.replace("[worker 0] ", ""), end="", flush=True)
        return status

    def _sleep(self, seconds: float | None) -> None:
        """Until a signal comes; that a child has ended is one."""
        select.select([self._signals.wakeup_fd], [], [], seconds)
        try:
            os.read(self._signals.wakeup_fd, 4096)
        except BlockingIOError:
            pass

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            processes.signal_group(process, number)
            end_s = time.monotonic() + _GRACE_S
            while process.poll() is None and (left_s := end_s - time.monotonic()) > 0:
                self._sleep(left_s)
