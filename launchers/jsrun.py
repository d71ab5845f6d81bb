"""Starts processes by jsrun, IBM's Job Step Manager inside an LSF job: what each one asks for, and in which words."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvmpi.errors import ConfigError, names_in_words
from kvmpi.launchers.hosts import Host, Layout, of_lsf
from kvmpi.launchers.reach import Reach

#: What users may say about the resource sets of workers, in jsrun's long and short words.
_OPTIONS = {
    "--tasks_per_rs": "-a", "--bind": "-b", "--cpu_per_rs": "-c", "--launch_distribution": "-d", "--env": "-E",
    "--env_no_propagate": "-D", "--env_eval": "-F", "--gpu_per_rs": "-g", "--rs_per_socket": "-K",
    "--latency_priority": "-l", "--memory_per_rs": "-m", "--smpiargs": "-M", "--rs_per_host": "-r",
    "--use_spindle": "-L", "--pre_post_exec": "-P", "--progress": "-Z", "--print_placement": "",
}  # fmt: skip
_REPEATED = ("--env", "--env_no_propagate", "--env_eval")
#: A server copies and adds what comes over the network: one core has enough to do with that.
SERVER_CORES = 1


@dataclass(frozen=True)
class Jsrun(Reach):
    """Job steps: one for each server and each worker that is alone, one for the ranks of each client.

    A step has its cores to itself, so that JSM keeps the steps of a job apart. Standard input goes to rank 0 alone.

    Attributes:
        hosts: all of the allocation that steps may run on.
        cores: physical cores of each resource set of workers.
        options: what else is asked for them, by its long name.
    """

    hosts: tuple[str, ...] = ()
    cores: int = 1
    options: tuple[tuple[str, str], ...] = ()

    @property
    def is_apart(self) -> bool:
        return True

    @property
    def threads(self) -> int:
        """Cores that each worker has."""
        return max(1, self.cores // tasks_per_set(self.options))

    def command(self, host: str, command: Sequence[str]) -> tuple[str, ...]:
        """``command``, a server or the like, on ``host``."""
        others = ",".join(name for name in self.hosts if name != host)
        away = {"--exclude_hosts": others} if others else {}
        return (*_step({"--cpu_per_rs": str(SERVER_CORES), **away, "--smpiargs": "off"}), *command)

    def process(self, role: str, host: str, command: Sequence[str]) -> tuple[str, ...]:
        """A worker goes where there is room."""
        if role != "worker":
            return self.command(host, command)
        own = ("--tasks_per_rs", "--smpiargs")
        chosen = [pair for pair in self.options if pair[0] not in own]
        return (*_step({"--cpu_per_rs": str(self.cores), "--smpiargs": "off"}, chosen), *command)

    def ranks(self, size: int) -> tuple[str, ...]:
        """The words before the program of a client of ``size`` ranks."""
        asked = {"--nrs": str(size // tasks_per_set(self.options)), "--cpu_per_rs": str(self.cores)}
        return _step(asked, self.options)

    def library_env(self, shm_dir: str) -> dict[str, str]:
        """What the MPI of ranks needs in its environment, if it is an Open MPI; which one it is, the site decides."""
        folders = {f"OMPI_MCA_{name}_backing_directory": shm_dir for name in ("btl_sm", "osc_sm") if shm_dir}
        return {"OMPI_MCA_osc": "^ucx", **folders}

    def agent(self, names: Iterable[str] = ()) -> str:
        return ""  # nobody is started by an mpirun


def _step(asked: Mapping[str, str], chosen: Sequence[tuple[str, str]] = ()) -> tuple[str, ...]:
    # By default jsrun binds each task to a single core, whatever its set has.
    usual = {"--nrs": "1", "--tasks_per_rs": "1", "--launch_distribution": "packed", "--bind": "rs"}
    single = {name: value for name, value in chosen if name not in _REPEATED}
    pairs = [*{**usual, **asked, **single, "--exit_on_error": "1", "--stdin_rank": "0"}.items()]
    pairs += [pair for pair in chosen if pair[0] in _REPEATED]
    return ("jsrun", *(word for pair in pairs for word in pair))


def is_there(environ: Mapping[str, str]) -> bool:
    """Whether this process is in an LSF job and jsrun is on its path."""
    return bool(of_lsf(environ)) and shutil.which("jsrun", path=environ.get("PATH")) is not None


def compute_hosts(found: Sequence[Host], is_here: bool) -> list[Host]:
    """Hosts on which steps run: without the first, with its one slot, if that only starts the job."""
    only_starts = len(found) > 1 and is_here and found[0].slots == 1
    return list(found[1:] if only_starts else found)


def parse(words: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Options of ``--jsrun-option`` as pairs of a long name and a value: ``--gpu_per_rs=1``, ``-g1``.

    Raises:
        ConfigError: jsrun has no such option, or it is one that kvmpi decides.
    """
    long = {short: name for name, short in _OPTIONS.items() if short}
    found = []
    for word in words:
        match = re.fullmatch(r"(--[a-z_]+)[= ](.*)|(-[a-zA-Z]) ?=?(.+)", word)
        name = "" if match is None else match[1] or long.get(match[3], match[3])
        if match is None or name not in _OPTIONS:
            raise ConfigError(
                f"--jsrun-option {word}: expected one of {', '.join(_OPTIONS)}, as --gpu_per_rs=1; how many there are, "
                "and where input and output go, kvmpi decides itself"
            )
        value = match[2] if match[1] else match[4]
        if name in ("--tasks_per_rs", "--rs_per_host") and (not value.isdigit() or int(value) < 1):
            raise ConfigError(f"--jsrun-option {word}: {value!r} is no number")
        found.append((name, value))
    return tuple(found)


def tasks_per_set(options: Sequence[tuple[str, str]]) -> int:
    """Workers in each resource set."""
    return int(dict(options).get("--tasks_per_rs", "1"))


def place(
    hosts: Sequence[Host], bounds: Sequence[tuple[int, int]], num_servers: int, server_hosts: Sequence[str],
    options: Sequence[tuple[str, str]],
) -> tuple[Layout, int]:  # fmt: skip
    """Where everything will be, and the cores of a resource set of workers: as many as there are for all of them.

    JSM fills hosts in their order, too, but is not told where: a client that is started again goes where there is room.

    Args:
        hosts: with their physical cores as slots.
    Raises:
        ConfigError: all of that does not fit.
    """
    chosen, tasks = dict(options), tasks_per_set(options)
    for number, (first, end) in enumerate(bounds):
        if end - first > 1 and (end - first) % tasks:
            raise ConfigError(f"client {number} has {end - first} workers, and --tasks_per_rs={tasks} must divide them")
    names = list(server_hosts) or [host.name for host in reversed(hosts)]
    servers = tuple(names[i % len(names)] for i in range(num_servers))
    left = {host.name: host.slots - SERVER_CORES * servers.count(host.name) for host in hosts}
    most = int(chosen.get("--rs_per_host", 0)) or bounds[-1][1]

    def fill(cores: int) -> tuple[tuple[Host, ...], ...] | None:
        free, clients = dict(left), []
        for first, end in bounds:
            each = tasks if end - first > 1 else 1
            wanted, homes = (end - first) // each, []
            for name in free:
                count = min(most, free[name] // cores, wanted)
                free[name] -= count * cores
                wanted -= count
                homes += [Host(name, count * each)] if count else []
            if wanted:
                return None
            clients.append(tuple(homes))
        return tuple(clients)

    given = chosen.get("--cpu_per_rs", "")
    if given:
        tried = [int(given)] if given.isdigit() and int(given) > 0 else []
    else:
        tried = list(range(max(left.values()), 0, -1))
        # Steps may come to JSM in another order: workers should not find room where a server is to be.
        tried.sort(key=lambda cores: any(left[host.name] // cores != host.slots // cores for host in hosts))
    for cores in tried if min(left.values()) >= 0 and set(servers) <= set(left) else ():
        if (clients := fill(cores)) is not None:
            return Layout(servers, clients), cores
    listed = names_in_words([f"{host.name} {host.slots}" for host in hosts])
    asked = " ".join(f"{name}={value}" for name, value in options)
    raise ConfigError(
        f"{bounds[-1][1]} workers and {num_servers} servers{f' with {asked}' if asked else ''} do not fit the cores of "
        f"the allocation ({listed})"
    )


def way(hosts: Sequence[Host], cores: int = 1, options: Sequence[tuple[str, str]] = ()) -> Jsrun:
    """See ``Jsrun``."""
    return Jsrun("jsrun", ("jsrun",), {}, tuple(host.name for host in hosts), cores, tuple(options))
