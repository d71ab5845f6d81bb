"""How to run a command on another host: ssh, or what a batch system has for the hosts of an allocation."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass

from kvmpi.errors import ConfigError


@dataclass(frozen=True)
class Reach:
    """The words before a command that run it on a host, with its standard input and output, and end with its status.

    Attributes:
        kind: "ssh", "srun" or "blaunch".
        words: its own words, before the name of the host.
    """

    kind: str
    words: tuple[str, ...]

    def command(self, host: str, command: Sequence[str]) -> tuple[str, ...]:
        """``command`` on ``host``."""
        if self.kind == "ssh":  # which passes one line on to a shell there
            return (*self.words, host, shlex.join(command))
        if self.kind == "srun":
            return (*self.words, f"--nodelist={host}", *command)
        return (*self.words, host, *command)

    def agent(self) -> str:
        """A script for those who expect something like ssh: ``SCRIPT HOST WORDS...``, the words being for a shell."""
        last = '"$host"'
        if self.kind == "ssh":
            run = f'{shlex.join(self.words)} {last} "$*"'
        elif self.kind == "srun":
            run = f'{shlex.join(self.words)} --nodelist={last} sh -c "$*"'
        else:
            run = f'{shlex.join(self.words)} {last} sh -c "$*"'
        # Options of ssh, such as -x, come before the host.
        return f'#!/bin/sh\nwhile case "$1" in -*) true;; *) false;; esac; do shift; done\nhost=$1\nshift\nexec {run}\n'


def ssh(words: str) -> Reach:
    """A remote shell that takes ``HOST COMMAND``; ``ssh`` itself is told never to ask for a password.

    Raises:
        ConfigError: there is no such program.
    """
    split = shlex.split(words)
    if not split or shutil.which(split[0]) is None:
        raise ConfigError(f"remote shell {words!r} was not found; name one with --remote-shell")
    if split[0].rpartition("/")[2] == "ssh":
        split += ["-o", "BatchMode=yes", "-o", "ConnectTimeout=20"]
    return Reach("ssh", tuple(split))


def srun() -> Reach:
    """For the nodes of a Slurm allocation; steps share their resources, or each would wait for the one before."""
    _require("srun")
    words = ("srun", "--overlap", "--nodes=1", "--ntasks=1", "--input=0", "--unbuffered", "--kill-on-bad-exit=0")
    return Reach("srun", (*words, "--export=ALL", "--mpi=none", "--quiet"))


def blaunch() -> Reach:
    """For the hosts of an LSF job."""
    _require("blaunch")
    return Reach("blaunch", ("blaunch",))


def _require(name: str) -> None:
    if shutil.which(name) is None:
        raise ConfigError(f"this process runs in an allocation, but {name} was not found on PATH")
