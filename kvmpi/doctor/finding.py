"""What a check has found, what surrounds it, and how it asks another program without ever waiting for ever."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from kvmpi.launchers import mpirun, processes
from kvmpi.machine import read_text

Level = Literal["ok", "skipped", "warning", "problem"]
LEVELS: tuple[Level, ...] = ("ok", "skipped", "warning", "problem")

_GRACE_S = 2.0


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        check: its name, a word or two.
        seen: what there is, one line.
        means: what follows from it.
        do: what to do about it; commands stand on lines of their own.
        facts: figures and names behind ``seen``, for programs.
        host: another host that it is about, or empty.
    """

    check: str
    level: Level
    seen: str
    means: str = ""
    do: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    host: str = ""


@dataclass(frozen=True)
class Surroundings:
    """What checks look at, so that tests can put something else there.

    Attributes:
        environ: environment variables.
        job_id: stands in the environment of whatever a check starts, so that a watchdog finds and ends it.
        root: in front of ``/proc``, ``/sys`` and ``/dev``.
        temporary: folder for temporary files.
        workers: how many the user means to start on this host.
        deadline_s: of whatever a check starts on this host.
    """

    environ: Mapping[str, str]
    job_id: str = ""
    root: str = ""
    temporary: str = field(default_factory=tempfile.gettempdir)
    workers: int = 2
    deadline_s: float = 20.0

    def read(self, path: str) -> str:
        """The text of a file such as ``/proc/self/cgroup`` without blanks around it; empty where there is none."""
        return read_text(self.root + path)

    def names(self, path: str) -> list[str]:
        """What is in a folder; nothing where there is none."""
        try:
            return sorted(os.listdir(self.root + path))
        except OSError:
            return []


@dataclass(frozen=True)
class Answer:
    """How another program has answered; ``status`` is None if it had to be ended."""

    status: int | None
    out: str
    err: str
    seconds: float

    def end(self) -> str:
        """``ended with exit status 3`` or ``did not end within 5 s``."""
        if self.status is None:
            return f"did not end within {self.seconds:.0f} s"
        return processes.describe_end(self.status)

    def last_words(self, count: int = 3) -> str:
        """The last lines that it has printed."""
        lines = [line.strip() for line in (self.out + "\n" + self.err).splitlines()]
        # Without those that are rulers, or nothing but the name of who says it.
        said = [line for line in lines if re.sub(r"^\[[\w ]+\]", "", line).strip(" -*=\t")]
        return "\n".join(line[:200] for line in said[-count:])


def ask(
    at: Surroundings, command: Sequence[str], *, timeout_s: float | None = None, env: Mapping[str, str] | None = None
) -> Answer:
    """Run a program; it and its process group are ended at the deadline (default: that of ``at``)."""
    limit_s = at.deadline_s if timeout_s is None else timeout_s
    start_s = time.monotonic()
    environ = {**mpirun.with_home(mpirun.clean(at.environ)), **(env or {}), "KVMPI_JOB_ID": at.job_id}
    # Files, because a pipe would be kept open by what the program leaves behind.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            process = processes.start(command, environ, stdout=out.fileno(), stderr=err.fileno())
        except OSError as error:
            return Answer(127, "", f"{command[0]}: {error.strerror}", 0.0)
        status: int | None
        try:
            status = process.wait(limit_s)
        except BaseException as error:
            for number in (signal.SIGTERM, signal.SIGKILL):
                processes.signal_group(process, number)
                try:
                    process.wait(_GRACE_S)
                    break
                except subprocess.TimeoutExpired:
                    continue
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            status = None
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read(1 << 20).decode(errors="replace"))
        return Answer(status, texts[0], texts[1], limit_s if status is None else time.monotonic() - start_s)
