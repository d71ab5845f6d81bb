"""What batch systems understand and say: commands that submit, look after and cancel a job, and what they answer."""

from __future__ import annotations

import os
import re
import shlex
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

#: Before a job runs, while it runs, and after it.
WAITS, RUNS, ENDED = "waits", "runs", "ended"
#: Behind its name, what is said of one that waits.
QUEUED = " waits in the queue ("


@dataclass(frozen=True)
class Resources:
    """What a job asks for.

    Attributes:
        tasks, hosts: processor slots, and how many hosts they are spread over evenly.
        queue, project, time: as the system writes them; empty is its default.
        requeue: it may be run again after its host has failed.
        extra: further options of its submit command.
    """

    tasks: int = 1
    hosts: int = 1
    queue: str = ""
    project: str = ""
    time: str = ""
    requeue: bool = False
    extra: tuple[str, ...] = ()

    def named(self) -> str:
        """The first option of ``kvmpi run`` that says more than how large the job is; empty: there is none."""
        options = {
            "--queue": self.queue, "--project": self.project, "--wall-time": self.time, "--requeue": self.requeue,
            "--submit-option": self.extra,
        }  # fmt: skip
        return next((name for name, value in options.items() if value), "")


class BatchSystem(ABC):
    """Commands as words, and the meaning of what they print.

    Attributes:
        waits, runs: its words for the states of a job that has not ended.
    """

    name = ""
    waits: frozenset[str] = frozenset()
    runs: frozenset[str] = frozenset()

    @abstractmethod
    def submit(self, name: str, script: str, out: str, err: str, asked: Resources) -> list[str]:
        """The command that submits ``script``; ``out`` and ``err`` are for what the system itself writes."""

    @abstractmethod
    def number(self, answer: str) -> str:
        """The number of the job, from what ``submit`` has printed.

        Raises:
            ValueError: it is not there.
        """

    @abstractmethod
    def look(self, numbers: Sequence[str]) -> list[str]:
        """The command that says how jobs are: a line for each, its number and the system's word for its state."""

    def words(self, answer: str) -> dict[str, str]:
        """What ``look`` has printed: a word for each job that the system knows."""
        return dict(line.split()[:2] for line in answer.splitlines() if len(line.split()) > 1)

    def state(self, word: str) -> str:
        """Whether a job of which the system says this word waits, runs or has ended."""
        return WAITS if word in self.waits else RUNS if word in self.runs else ENDED

    @abstractmethod
    def cancel(self, numbers: Sequence[str]) -> list[str]:
        """The command that ends jobs."""

    @abstractmethod
    def cancel_named(self, name: str) -> list[str]:
        """The command that ends all jobs of a name, whose numbers nobody knows any more."""


class Slurm(BatchSystem):
    """sbatch, squeue, scancel (https://slurm.schedmd.com)."""

    name = "slurm"
    waits = frozenset(("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT"))
    runs = frozenset(("RUNNING", "SUSPENDED", "COMPLETING", "RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED"))

    def submit(self, name: str, script: str, out: str, err: str, asked: Resources) -> list[str]:
        words = ["sbatch", "--parsable", f"--job-name={name}", f"--nodes={asked.hosts}", f"--ntasks={asked.tasks}"]
        words += [f"--ntasks-per-node={-(-asked.tasks // asked.hosts)}"] if asked.hosts > 1 else []
        out, err = (path.replace("%", "%%") for path in (out, err))  # %j would be the number of the job
        words += [f"--output={out}", f"--error={err}", "--open-mode=append"]
        words += ["--requeue" if asked.requeue else "--no-requeue"]
        given = {"partition": asked.queue, "account": asked.project, "time": asked.time}
        words += [f"--{option}={value}" for option, value in given.items() if value]
        return [*words, *asked.extra, script]

    def number(self, answer: str) -> str:
        number = answer.strip().partition(";")[0]  # a cluster's name may follow
        if not number.isdigit():
            raise ValueError(f"sbatch has answered {answer.strip()!r}")
        return number

    def look(self, numbers: Sequence[str]) -> list[str]:
        # Without the user it would ask for those of the whole cluster, and leave out what it was not asked for.
        mine = (f"--user={os.getuid()}",) if len(numbers) > 1 else ()
        return ["squeue", "--noheader", "--states=all", *mine, f"--jobs={','.join(numbers)}", "--format=%A %T"]

    def cancel(self, numbers: Sequence[str]) -> list[str]:
        return ["scancel", *numbers]

    def cancel_named(self, name: str) -> list[str]:
        return ["scancel", f"--name={name}"]


class Lsf(BatchSystem):
    """bsub, bjobs, bkill (IBM Spectrum LSF, command reference)."""

    name = "lsf"
    waits = frozenset(("PEND", "PSUSP", "WAIT", "PROV"))
    runs = frozenset(("RUN", "USUSP", "SSUSP", "UNKWN", "ZOMBI"))

    def submit(self, name: str, script: str, out: str, err: str, asked: Resources) -> list[str]:
        # LSF adds a report to the file that it is given, which nobody has asked for.
        nothing = ("-o", "/dev/null", "-e", "/dev/null")
        span = "hosts=1" if asked.hosts == 1 else f"ptile={-(-asked.tasks // asked.hosts)}"
        words = ["bsub", "-J", name, "-n", str(asked.tasks), "-R", f"span[{span}]", *nothing]
        words += ["-r" if asked.requeue else "-rn"]
        for option, value in (("-q", asked.queue), ("-P", asked.project), ("-W", asked.time)):
            words += [option, value] if value else []
        return [*words, *asked.extra, shlex.quote(script)]

    def number(self, answer: str) -> str:
        found = re.search(r"Job <(\d+)> is submitted", answer)
        if found is None:
            raise ValueError(f"bsub has answered {answer.strip()!r}")
        return found[1]

    def look(self, numbers: Sequence[str]) -> list[str]:
        return ["bjobs", "-noheader", "-o", "jobid stat", *numbers]

    def cancel(self, numbers: Sequence[str]) -> list[str]:
        return ["bkill", *numbers]

    def cancel_named(self, name: str) -> list[str]:
        return ["bkill", "-J", name, "0"]  # 0 is all of them, not only the last


SYSTEMS: dict[str, BatchSystem] = {"slurm": Slurm(), "lsf": Lsf()}


def script(command: Sequence[str], out: str, err: str) -> str:
    """What a batch job runs; its output is added to two files."""
    return f"#!/bin/sh\nexec {shlex.join(command)} >>{shlex.quote(out)} 2>>{shlex.quote(err)}\n"
