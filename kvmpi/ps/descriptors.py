"""Sees to it that a scheduler or a server has descriptors for its peers, and says so where it has none."""

from __future__ import annotations

import errno
import logging
import os
import resource

from kvmpi.config import Config
from kvmpi.errors import ConfigError

_WANTED = 1 << 16
#: For what such a process has before anybody connects, and for those who are about to go.
_OWN = 36
#: For a scheduler, a server and a client of theirs in one process; libzmq aborts it where it gets none.
_EMBEDDED = 64
_LOOK_S, _COMPLAIN_S = 1.0, 60.0
_HELP = "raise the limit of open files, ulimit -n (ulimit -Hn says how far it goes)"

_log = logging.getLogger(__name__)


def allow_many(config: Config, role: str) -> None:
    """Strangers may hold a connection each until their handshake is over; members must find a descriptor then too.

    Raises:
        ConfigError: not even the members of the job can all have one.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED if hard == resource.RLIM_INFINITY else min(hard, _WANTED)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    # A client has a connection for its store; and one to the scheduler, for reports.
    connections = 1 + (role == "scheduler" and config.report_s > 0)
    least = _OWN + connections * config.num_clients + config.num_servers
    if wanted < least:
        raise ConfigError(
            f"the {role} may have {wanted} descriptors, and needs {least} for {config.num_clients} clients and "
            f"{config.num_servers} servers; {_HELP}"
        )


def allow_embedded() -> None:
    """As ``allow_many``, in a program that has what it may have for itself.

    Raises:
        ConfigError: too few are left.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        left = soft - len(os.listdir("/dev/fd"))
    except FileNotFoundError:  # without /proc, nobody knows
        return
    if soft == resource.RLIM_INFINITY or left >= _EMBEDDED:
        return
    if hard != resource.RLIM_INFINITY and hard < soft + _EMBEDDED:
        raise ConfigError(f"servers in this process need {_EMBEDDED} descriptors, and {max(left, 0)} are left; {_HELP}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft + _EMBEDDED, hard))


class Shortage:
    """Looks whether there is a descriptor left: libzmq has whoever connects otherwise wait, and says nothing."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._look_s = self._complain_s = 0.0

    def look(self, now_s: float) -> None:
        """Complain where there is none, if it is time for that. That may pass: strangers are sent away."""
        if now_s < self._look_s:
            return
        self._look_s = now_s + _LOOK_S
        try:
            os.close(os.open(os.devnull, os.O_RDONLY))
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE) and now_s >= self._complain_s:
                self._complain_s = now_s + _COMPLAIN_S
                _log.error("%s: no descriptors are left for others that connect, and they wait; %s", self._name, _HELP)
