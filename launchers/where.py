"""Finds out where a job is to run: this host, hosts that the user names, or those of an allocation."""

from __future__ import annotations

import os
import pwd
import re
import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from kvmpi.errors import ConfigError
from kvmpi.launchers import jsrun, reach
from kvmpi.launchers.batch import Resources
from kvmpi.launchers.hosts import (
    ADDRESS,
    IN_BRACKETS,
    Host,
    Layout,
    expand_slurm,
    lay_out,
    merge,
    of_address,
    of_lsf,
    of_slurm,
    read_hostfile,
    without_user,
)
from kvmpi.launchers.job import Places
from kvmpi.launchers.remote_exec import interface_on, own_address
from kvmpi.machine import addresses_of, family_of

#: By which Slurm says where a process is: this need not be a name that anything else knows.
_NODE = "SLURMD_NODENAME"
#: Names that are looked up at once.
_LOOKUPS = 32


def find(
    *, launcher: str, hostfile: str, hosts: str, server_hosts: str, remote_shell: str, network: str,
    bounds: Sequence[tuple[int, int]], num_servers: int, environ: Mapping[str, str], batch_dir: str = "",
    asked: Resources | None = None, client_hosts: int = 1,
    by_jsrun: bool | None = None, jsrun_options: Sequence[str] = (),
) -> Places | None:  # fmt: skip
    """Where everything runs; None: all on this host, or on those that an ``mpirun`` finds by itself.

    Args:
        batch_dir: a folder that all hosts of a batch system share.
        asked: what each of its jobs asks for, besides the number of its tasks.
        client_hosts: how many hosts a client of such a job is spread over.
        by_jsrun: inside a job of LSF, whether jsrun starts processes; None: if it is there.
        jsrun_options: what workers ask it for.
    Raises:
        ConfigError: the hosts make no sense, are not to be found, or cannot be reached.
    """
    found, kind = _choose(launcher, hostfile, hosts, environ, by_jsrun)
    if jsrun_options and kind != "jsrun":
        raise ConfigError("--jsrun-option: no jsrun starts the processes of this job; see --launcher lsf and --jsrun")
    if kind == "batch":
        if server_hosts:
            raise ConfigError(f"--server-hosts: {launcher} chooses the hosts")
        return _submitted(launcher, batch_dir, asked or Resources(), bounds, num_servers, network, client_hosts)
    if asked is not None and (option := asked.named()):
        raise ConfigError(f"{option} is for jobs that are submitted; add --launcher slurm or --launcher lsf")
    if client_hosts != 1:
        raise ConfigError("--client-hosts is for clients that a batch system places; see --launcher")
    if not found:
        is_node = any(_allocated(environ, kind) for kind in ("srun", "blaunch"))  # one script is for one node and many
        if server_hosts or (network and not is_node):
            raise ConfigError("--server-hosts and --interface are for a job on several hosts; see --hosts, --hostfile")
        return None
    for_servers = []
    if server_hosts:
        for_servers = [host.name for host in _parse("--server-hosts", server_hosts) for _ in range(host.slots)]
    if kind == "jsrun":
        options = jsrun.parse(jsrun_options)
        layout, cores = jsrun.place(found, bounds, num_servers, for_servers, options)
        # Also on the host of this process, if steps may run there: JSM knows which of its cores are in use.
        return Places(layout, jsrun.way(found, cores, options), "", _own_address(network, layout.names[0]), network)
    groups = of_slurm(environ) if kind == "srun" else []
    way = reach.ssh(remote_shell) if kind == "ssh" else allocation(environ, kind)[1]
    assert way is not None
    if len(groups) > 1 and not for_servers:
        # What was asked for apart is for something else, if it is not needed for workers.
        *before, last = groups
        if sum(host.slots for group in before for host in group) >= bounds[-1][1]:
            for_servers = [host.name for host in last]
    layout = lay_out(found, bounds, num_servers, for_servers)
    here = find_here(layout.names, environ)
    others = [name for name in layout.names if name != here]
    address = _own_address(network, others[0] if others else "") if others or network else "127.0.0.1"
    for_mpi = interface_on(network) if ":" in network else network
    return Places(layout, way, here, address, network, for_mpi)


def _own_address(network: str, other: str) -> str:
    try:
        return own_address(network, without_user(other))
    except (OSError, ValueError) as error:
        if network:
            raise ConfigError(f"--interface {network}: {error}") from None
        raise ConfigError(
            f"host {other}: {error}; name a network with --interface, or hosts by names that this one can look up"
        ) from None


def _submitted(
    system: str, folder: str, asked: Resources, bounds: Sequence[tuple[int, int]], num_servers: int, network: str,
    client_hosts: int,
) -> Places:  # fmt: skip
    """Servers and clients as jobs of their own; the scheduler stays here, where whoever waits for the job is."""
    servers = tuple(f"server-{rank}" for rank in range(num_servers))
    clients = tuple((Host(f"client-{i}", end - first),) for i, (first, end) in enumerate(bounds))
    resources = {name: replace(asked, tasks=1) for name in servers}
    resources |= {host.name: replace(asked, tasks=host.slots, hosts=client_hosts) for (host,) in clients}
    if client_hosts < 1 or client_hosts > min(host.slots for (host,) in clients):
        raise ConfigError(f"--client-hosts {client_hosts}: expected 1 or more, and a worker of each client for each")
    try:
        address = own_address(network, "")
    except (OSError, ValueError) as error:
        raise ConfigError(f"no address of this host for others: {error}; name a network with --interface") from None
    way = reach.batch(system, os.path.abspath(folder), resources)
    return Places(Layout(servers, clients), way, "", address, network)


def _choose(
    launcher: str, hostfile: str, listed: str, environ: Mapping[str, str], by_jsrun: bool | None = None
) -> tuple[list[Host], str]:
    """The hosts, and how to reach them; none where all is to be on this one."""
    with_jsrun = launcher in ("auto", "lsf") and not hostfile and not listed and jsrun.is_there(environ)
    if by_jsrun and not with_jsrun:
        raise ConfigError("--jsrun: this is no job of LSF with a jsrun on PATH, or other hosts or launchers are named")
    if with_jsrun and by_jsrun is not False:
        found = of_lsf(environ)
        return jsrun.compute_hosts(found, is_here(found[0].name)), "jsrun"
    if hostfile or listed:
        if hostfile and listed:
            raise ConfigError("--hosts and --hostfile: only one of them can say where")
        if launcher not in ("auto", "mpirun"):
            raise ConfigError(f"--launcher {launcher} knows its hosts; leave out --hosts and --hostfile")
        return read_hostfile(hostfile) if hostfile else _parse("--hosts", listed), "ssh"
    for name, kind in (("slurm", "srun"), ("lsf", "blaunch")):
        if launcher in ("auto", name):
            found = _allocated(environ, kind)
            if len(found) > 1 or (found and (launcher == name or _is_away(found[0].name, kind, environ))):
                return found, kind
            if launcher == name:
                return [], "batch"
    return [], ""


def _is_away(node: str, kind: str, environ: Mapping[str, str]) -> bool:
    """Whether this is not the only node of an allocation: a shell of salloc's may be on one for logins."""
    return kind == "srun" and node != environ.get(_NODE) and not is_here(node)


def _allocated(environ: Mapping[str, str], kind: str) -> list[Host]:
    return [host for group in of_slurm(environ) for host in group] if kind == "srun" else of_lsf(environ)


def allocation(environ: Mapping[str, str], *kinds: str) -> tuple[list[Host], reach.Reach | None]:
    """The hosts of the allocation that this process runs in, and how to reach them; none outside of one.

    Args:
        kinds: "srun", "blaunch": only what these reach.
    Raises:
        ConfigError: what its variables say makes no sense, or the command that reaches them is missing.
    """
    for kind in kinds or ("srun", "blaunch"):
        if found := _allocated(environ, kind):
            groups = of_slurm(environ) if kind == "srun" else []
            numbers = {host.name: i for i, group in enumerate(groups) for host in group} if len(groups) > 1 else {}
            return found, reach.srun(numbers) if kind == "srun" else reach.blaunch()
    return [], None


def _parse(option: str, text: str) -> list[Host]:
    """``a:2, n[01-03]:4``: hosts, also in Slurm's short form, and how many workers each takes."""
    found = []
    for word in re.split(r",(?![^\[]*\])", text):  # not at commas in brackets
        match = re.fullmatch(rf"\s*({ADDRESS}|[^\s:]+)(?::(0*[1-9][0-9]*))?\s*", word)
        if match is None:
            expected = IN_BRACKETS if word.count(":") > 1 else "expected NAME:WORKERS,NAME:WORKERS,..."
            raise ConfigError(f"{option} {text}: {expected}")
        try:
            names = [of_address(match[1])] if re.fullmatch(ADDRESS, match[1]) else expand_slurm(match[1])
        except ConfigError as error:
            raise ConfigError(f"{option} {text}: {error}") from None
        found += [Host(name, int(match[2] or 1)) for name in names]
    return merge(found, f"{option} {text}")


def _own_names() -> tuple[str, ...]:
    return ("localhost", socket.gethostname(), socket.gethostname().partition(".")[0])


def is_here(name: str) -> bool:
    """Whether ``name`` is this host, and this user, if it says one."""
    user, _, name = name.rpartition("@")
    if user and user != _own_user():
        return False
    if name in _own_names():
        return True
    try:
        address = addresses_of(name)[0]
        with socket.socket(family_of(address), socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))  # only one's own
    except OSError:
        return False
    return True


def _own_user() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:  # somebody who has only a number
        return ""


def find_here(names: Sequence[str], environ: Mapping[str, str]) -> str:
    """The first of ``names`` that this host has; empty: none is its."""
    own = {*_own_names(), environ.get(_NODE, "")}
    count = next((i for i, name in enumerate(names) if name in own), len(names))
    pool = ThreadPoolExecutor(_LOOKUPS)  # a name service may take its time for each
    try:
        found = zip(names, pool.map(is_here, names[:count]), strict=False)
        return next((name for name, is_its in found if is_its), "".join(names[count : count + 1]))
    finally:
        pool.shutdown(cancel_futures=True)


def look(
    launcher: str, hostfile: str, hosts: str, remote_shell: str, environ: Mapping[str, str]
) -> tuple[list[Host], str, reach.Reach | None]:
    """The hosts that ``find`` would take for a job, and how they are reached, for those who only want to know.

    Raises:
        ConfigError: as of ``find``.
    """
    found, kind = _choose(launcher, hostfile, hosts, environ)
    if not found:
        return [], "", None
    if kind == "ssh":
        return found, kind, reach.ssh(remote_shell)
    return found, kind, jsrun.way(found) if kind == "jsrun" else allocation(environ, kind)[1]
