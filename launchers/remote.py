"""Processes of a job on other hosts: each is a local one, such as an ssh, that speaks with remote_exec there."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvmpi.launchers import processes
from kvmpi.launchers.reach import BatchReach, Reach

REMOTE_EXEC = str(Path(__file__).with_name("remote_exec.py"))
#: Of the environment that a batch system gives to a process: which hosts and devices are its.
KEPT = ("SLURM_", "SLURMD_", "LSB_", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")

#: How a process has ended that may not have begun.
SILENT = (
    "was not heard of, and what reaches its host ended with exit status 0: that must run the command that it is given, "
    "and pass standard input and standard error on; try it by hand, and see --remote-shell"
)


class RemoteProcess:
    """The launcher's end of a process on another host; it has what the launcher uses of a ``Popen``.

    Attributes:
        returncode: that of the process there where it is known, else that of what reaches the host.
        orders: a pipe to the process there; writable when ``write`` can go on with what it has not taken yet.
        has_begun: whether it is let in: remote_exec runs there, or a batch system has taken the job.
    """

    def __init__(
        self, reach: Reach, host: str, command: Sequence[str], env: Mapping[str, str], *, local_env: Mapping[str, str],
        folders: Sequence[str], files: Mapping[str, str], address: Mapping[str, str], stdout: int, stderr: int,
        role: str = "", is_step: bool = False, spans: bool = False,
    ) -> None:  # fmt: skip
        """Start ``command`` with ``env`` on ``host``.

        Args:
            role: what it is, see ``Reach.process``.
            is_step: ``command`` itself reaches ``host``; of what it starts there, one reads what it is told.
            spans: it is an mpirun, which passes signals on to ranks on several hosts.
            local_env: of the process here.
            folders: of the job, to be made there.
            files: texts of files in the first of them, by name.
            address: ``network`` and ``towards``, by which the process finds the address that it listens on; or nothing.
        Raises:
            OSError: what reaches the host cannot be started.
        """
        self.host, self._word = host, f"kvmpi-{secrets.token_hex(16)}"
        self._is_step = is_step
        self._is_batch, self._reach = reach.is_batch, reach
        spec = {
            "word": self._word, "command": list(command), "env": dict(env), "cwd": os.getcwd(),
            "folders": list(folders), "files": dict(files), "kept": list(KEPT) if reach.kind != "ssh" else [],
            "alone": reach.is_apart, "spans": spans, "mpirun": role == "client" and not is_step,
            "job": env.get("KVMPI_JOB_ID", ""), **address,
        }  # fmt: skip
        # Nobody reads yet, and a user who has many pipes gets small ones: what does not fit is written later.
        self._unsent = json.dumps(spec).encode() + b"\n"
        read_end, self.orders = os.pipe()
        try:
            os.set_blocking(self.orders, False)
            self.write()
            there = reach.process(role, host, (sys.executable, "-I", "-S", REMOTE_EXEC))
            if is_step:
                there, local_env = tuple(command), env
            self._here = processes.start(there, local_env, stdout=stdout, stderr=stderr, stdin=read_end)
        except OSError:
            os.close(self.orders)
            raise
        finally:
            os.close(read_end)
        self.pid = self._here.pid
        self._told: int | None = None
        self.has_begun = False

    def write(self, more: bytes = b"") -> bool:
        """Tell the process there ``more``, behind what it has not taken yet; whether all is written now."""
        self._unsent += more
        try:
            while self._unsent:
                self._unsent = self._unsent[os.write(self.orders, self._unsent) :]
        except BlockingIOError:
            return False
        except OSError:  # nobody will read it
            self._unsent = b""
        return True

    @property
    def returncode(self) -> int | None:
        return self._here.returncode if self._told is None or self._here.returncode is None else self._told

    @property
    def is_told(self) -> bool:
        """Whether it is known how the process there has ended."""
        return self._told is not None

    @property
    def is_silent(self) -> bool:
        """Whether what reaches the host has ended well without a word of the process there, which need not have run."""
        return self._here.returncode == 0 and self._told is None and not self._is_step

    def poll(self) -> int | None:
        """As of ``Popen``."""
        if self._here.poll() is not None and self.orders >= 0:
            os.close(self.orders)
            self.orders = -1
            if isinstance(self._reach, BatchReach) and self._here.returncode == -signal.SIGKILL:
                self._reach.cancel(self.host)  # it cannot have done so itself
        return self.returncode

    def hear(self, line: bytes) -> bytes:
        """What of a line on standard error is the process's own."""
        own, word, text = line.partition(self._word.encode())
        kind, _, value = text.decode(errors="replace").strip().partition(" ")
        if word:
            self.has_begun = True
        if word and kind == "end":
            self._told = os.waitstatus_to_exitcode(int(value))
        if self._told is not None and own.startswith(b"srun: "):
            own = b""  # it says how the process has ended, which we know better
        return own

    def signal(self, number: int) -> None:
        """Have the process there, and all of its group, get a signal; SIGKILL ends what is here at once too."""
        if self._here.returncode is not None:
            return
        if self._is_step:  # which passes it on
            self._here.send_signal(number)
            return
        if number == signal.SIGKILL and not self._is_batch:  # there, somebody has to cancel the job
            processes.signal_group(self._here, number)
            return
        self.write(f"{number}\n".encode())

    def kill_there(self) -> None:
        """Have the process there killed. What reaches it stays, to say so, whenever its host can be reached."""
        if self._here.returncode is None and not self._is_step:
            self.write(f"{int(signal.SIGKILL)}\n".encode())


Child = subprocess.Popen[bytes] | RemoteProcess


def has_ended(child: Child) -> bool:
    """Whether that is certain, of a process that has a return code: another host may only be out of reach."""
    return not isinstance(child, RemoteProcess) or child.is_told


def kill_group(child: Child) -> None:
    """Have a process of the job and its group killed, as soon as its host can be reached."""
    if isinstance(child, RemoteProcess):
        child.kill_there()
    else:
        processes.signal_group(child, signal.SIGKILL)


def signal_group(child: Child, number: int) -> None:
    """Send a signal to a process of the job and its group, wherever it is."""
    if isinstance(child, RemoteProcess):
        child.signal(number)
    else:
        processes.signal_group(child, number)
