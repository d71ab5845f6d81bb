"""How to run a command on another host: ssh, or what a batch system has for the hosts of an allocation."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from kvmpi.errors import ConfigError
from kvmpi.launchers import module_main
from kvmpi.launchers.batch import SYSTEMS, Resources
from kvmpi.launchers.hosts import as_name

CANCEL_S = 20.0  # for a batch system to take note
#: Beyond 10 connections that have not proved who they are, sshd refuses some (MaxStartups); one is our watchdog's.
_MOST_ENTERING = 8
#: A batch system is the site's, and takes a job in a fraction of a second; some limit the rate of what they are asked.
_MOST_SUBMITTING = 4


@dataclass(frozen=True)
class Reach:
    """The words before a command that run it on a host, with its standard input and output, and end with its status.

    Attributes:
        kind: "ssh", "srun" or "blaunch"; of a ``BatchReach`` the batch system, "slurm" or "lsf".
        words: its own words, before the name of the host.
        groups: the number of the group of each host in a heterogeneous job of Slurm.
    """

    kind: str
    words: tuple[str, ...]
    groups: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_batch(self) -> bool:
        """Whether "hosts" are jobs of a batch system, each with one process, on a host of its choice."""
        return False

    @property
    def is_apart(self) -> bool:
        """Whether processes have folders of their own where they run, and clear up after themselves.

        Otherwise the launcher reaches every host a second time, for a watchdog.
        """
        return self.is_batch

    @property
    def most_entering(self) -> int | None:
        """How many processes may be on their way through one entrance at once; None: as many as there are."""
        return _MOST_ENTERING if self.kind == "ssh" else None

    def entrance(self, host: str) -> str:
        """What lets processes in that go to ``host``: all that have the same name here go through it."""
        return host

    def command(self, host: str, command: Sequence[str]) -> tuple[str, ...]:
        """``command`` on ``host``."""
        if self.kind == "ssh":  # which passes one line on to a shell there
            return (*self.words, host, shlex.join(command))
        if self.kind == "srun":
            group = (f"--het-group={self.groups[host]}",) if host in self.groups else ()
            return (*self.words, *group, f"--nodelist={host}", *command)
        return (*self.words, host, *command)

    def process(self, role: str, host: str, command: Sequence[str]) -> tuple[str, ...]:
        """``command`` on ``host``, which starts a process of the job there."""
        return self.command(host, command)

    def agent(self, names: Iterable[str] = ()) -> str:
        """A script for those who expect something like ssh: ``SCRIPT HOST WORDS...``, the words being for a shell.

        Args:
            names: hosts that it is asked for by their ``as_name``.
        """
        words = shlex.join(self.words)
        cases = " ".join(f"{name}) group=--het-group={number};;" for name, number in self.groups.items())
        prepare = f"case $host in {cases} esac\n" if cases else ""
        run = {
            "ssh": f'{words} "$host" "$*"',
            "srun": f'{words} {"$group " if cases else ""}--nodelist="$host" sh -c "$*"',
            "blaunch": f'{words} "$host" sh -c "$*"',
        }[self.kind]
        others = {as_name(name): name for name in names if as_name(name) != name}
        meant = " ".join(f"{word}) host={shlex.quote(name)};;" for word, name in others.items())
        prepare += f"case $host in {meant} esac\n" if others else ""
        # Options of ssh, such as -x, come before the host.
        skip = 'while case "$1" in -*) true;; *) false;; esac; do shift; done'
        return f"#!/bin/sh\n{skip}\nhost=$1\nshift\n{prepare}exec {run}\n"


@dataclass(frozen=True)
class BatchReach(Reach):
    """Each process is a job of a batch system, with the resources that stand under its name.

    Attributes:
        folder: on a file system that all hosts share.
    """

    folder: str = ""
    resources: Mapping[str, Resources] = field(default_factory=dict)

    @property
    def is_batch(self) -> bool:
        return True

    @property
    def most_entering(self) -> int | None:
        return _MOST_SUBMITTING

    def entrance(self, host: str) -> str:
        return self.kind

    def _name(self, host: str) -> str:
        return f"{os.path.basename(self.folder)}-{host}"

    def cancel(self, host: str) -> None:
        """End the job of this name, after the process here that stood for it has been killed."""
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            words = SYSTEMS[self.kind].cancel_named(self._name(host))
            nothing = subprocess.DEVNULL
            subprocess.run(words, stdin=nothing, stdout=nothing, stderr=nothing, timeout=CANCEL_S, check=False)

    def submission(self, host: str) -> list[str]:
        """The command that submits the job of this name; all it asks for stands in it."""
        name = self._name(host)
        base = os.path.join(self.folder, name)
        return SYSTEMS[self.kind].submit(name, f"{base}.sh", f"{base}.out", f"{base}.err", self.resources[host])

    def command(self, host: str, command: Sequence[str]) -> tuple[str, ...]:
        asked = json.dumps(asdict(self.resources[host]))
        return (*self.words, self.kind, self.folder, self._name(host), asked, "--", *command)

    def agent(self, names: Iterable[str] = ()) -> str:
        return ""  # what helps a client to its other hosts is made where it runs, see client_exec.py


def ssh(words: str) -> Reach:
    """A remote shell that takes ``HOST COMMAND``; ``ssh`` itself is told never to ask for a password.

    Raises:
        ConfigError: there is no such program.
    """
    split = shlex.split(words)
    found = shutil.which(split[0]) if split else None
    if found is None:
        raise ConfigError(f"remote shell {words!r} was not found; name one with --remote-shell")
    if not os.path.isabs(found):  # who starts it may be in another folder
        split[0] = os.path.abspath(found)
    if split[0].rpartition("/")[2] == "ssh":
        # Of equal options ssh takes the first, which is the user's. It says nothing for as long as a process there says
        # nothing: a firewall would forget it, and how that process ends would never be heard of.
        alive = ("ServerAliveInterval=60", "ServerAliveCountMax=15")
        for option in ("BatchMode=yes", "ConnectTimeout=20", *alive):
            split += ["-o", option]
    return Reach("ssh", tuple(split))


def srun(groups: Mapping[str, int] | None = None) -> Reach:
    """For the nodes of a Slurm allocation; steps share their resources, or each would wait for the one before."""
    _require("srun")
    # Inside of a step, srun would bind what it starts on other nodes as that step is bound here.
    words = (
        "env",
        "-u",
        "SLURM_CPU_BIND",
        "srun",
        "--overlap",
        "--nodes=1",
        "--ntasks=1",
        "--input=0",
        "--unbuffered",
        "--kill-on-bad-exit=0",
    )
    return Reach("srun", (*words, "--export=ALL", "--mpi=none", "--quiet"), groups or {})


def blaunch() -> Reach:
    """For the hosts of an LSF job; without a shell in between, words arrive as they are."""
    _require("blaunch")
    return Reach("blaunch", ("blaunch", "-no-shell"))


def batch(system: str, folder: str, resources: Mapping[str, Resources]) -> Reach:
    """For a batch system, from outside of its allocations."""
    _require({"slurm": "sbatch", "lsf": "bsub"}[system])
    return BatchReach(system, module_main.command("kvmpi.launchers.batch_exec"), {}, folder, resources)


def _require(name: str) -> None:
    if shutil.which(name) is None:
        raise ConfigError(f"the batch system's {name} was not found on PATH")
