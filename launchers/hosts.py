"""The hosts of a job and who runs where: host files, what an allocation says, and a layout. No command is run here."""

from __future__ import annotations

import ipaddress
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvmpi.errors import ConfigError, names_in_words

#: One name of Slurm's short form, and one number, ``3`` or ``08-11``, in its brackets.
_NAME = r"(?:[^,\[\]]|\[[^\[\]]+\])+"
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_MOST_HOSTS = 1_000_000  # of one range; names of more would only fill the memory
#: An IPv6 address, in brackets: those of Slurm have no colon in them.
ADDRESS = r"(?:[^\s@\[\]:]+@)?\[[^\[\]\s]*:[^\[\]\s]*\]"
IN_BRACKETS = "an IPv6 address stands in brackets, [fd00::1]:2"


@dataclass(frozen=True)
class Host:
    """A machine, and how many workers it takes."""

    name: str
    slots: int = 1


@dataclass(frozen=True)
class Layout:
    """Where everything is: by rank, the host of each server, and the hosts of each client with their workers."""

    servers: tuple[str, ...]
    clients: tuple[tuple[Host, ...], ...]

    @property
    def names(self) -> list[str]:
        """Every host that something runs on, once, in a fixed order."""
        return list(dict.fromkeys([*(host.name for client in self.clients for host in client), *self.servers]))


def without_user(name: str) -> str:
    """What ``USER@HOST``, of which ssh makes something, is called by others."""
    return name.rpartition("@")[2]


def of_address(word: str) -> str:
    """The name of the host that ``[fd00::1]`` or ``user@[fd00::1]`` means: the same without brackets.

    Raises:
        ConfigError: it is no address, or one that means another host everywhere.
    """
    user, at, address = word.rpartition("@")
    try:
        found = ipaddress.IPv6Address(address.strip("[]"))
    except ValueError as error:
        raise ConfigError(f"{word}: {error}") from None
    if found.is_link_local or found.scope_id:
        raise ConfigError(f"{word} is an address of one link: give one that all hosts reach this one by")
    return f"{user}{at}{found}"


def as_word(host: Host) -> str:
    """The host as ``--hosts`` has it."""
    user, at, name = host.name.rpartition("@")
    return f"{user}{at}[{name}]:{host.slots}" if ":" in name else f"{host.name}:{host.slots}"


def as_name(name: str) -> str:
    """A word for a host that can stand where a colon or an at sign would mean something else, as for an mpirun."""
    return f"kvmpi-{re.sub('[^A-Za-z0-9.-]', '-', name)}" if re.search("[:@]", name) else name


def read_hostfile(path: str) -> list[Host]:
    """A host in each line: ``NAME``, ``NAME slots=N`` as Open MPI has it, or ``NAME:N`` as MPICH has it.

    A name may be an IPv6 address in brackets.

    Raises:
        ConfigError: the file cannot be read, a line says something else, or there is none.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")  # with a byte-order mark or without
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--hostfile {path}: {getattr(error, 'strerror', None) or error}") from None
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where = f"--hostfile {path}, line {number}"
        if (match := re.fullmatch(f"({ADDRESS})(?::(.*))?", words[0])) is not None:
            try:
                name, slots = of_address(match[1]), match[2] or ""
            except ConfigError as error:
                raise ConfigError(f"{where}: {error}") from None
        elif words[0].count(":") > 1:
            raise ConfigError(f"{where}: {words[0]!r}; {IN_BRACKETS}")
        else:
            name, _, slots = words[0].partition(":")
        for word in words[1:]:
            key, equals, value = word.partition("=")
            if key == "slots" and equals:
                slots = value
            elif key not in ("max_slots", "max-slots") or not equals:
                raise ConfigError(f"{where}: {word!r}; expected NAME slots=N or NAME:N")
        if slots and (not slots.isdecimal() or int(slots) < 1):
            raise ConfigError(f"{where}: {slots!r} is no number of slots")
        found.append(Host(name, int(slots or 1)))
    return merge(found, f"--hostfile {path}")


def of_slurm(environ: Mapping[str, str]) -> list[list[Host]]:
    """The hosts of the Slurm allocation that this process runs in, by its groups; none outside of one.

    A heterogeneous job has several groups, others one. A node that is in two groups is in the first.

    Raises:
        ConfigError: its variables make no sense.
    """
    if not environ.get("SLURM_JOB_ID"):
        return []
    if not environ.get("SLURM_HET_SIZE", "").isdigit():
        found = _of_slurm(environ, "")
        return [found] if found else []
    groups: list[list[Host]] = []
    for number in range(int(environ["SLURM_HET_SIZE"])):
        known = {host.name for group in groups for host in group}
        group = [host for host in _of_slurm(environ, f"_HET_GROUP_{number}") if host.name not in known]
        groups += [group] if group else []
    return groups


def _of_slurm(environ: Mapping[str, str], group: str) -> list[Host]:
    names = environ.get(f"SLURM_JOB_NODELIST{group}") or environ.get(f"SLURM_NODELIST{group}", "")
    if not names:
        return []
    found = expand_slurm(names)
    # Without --ntasks there are no tasks to count, and a node takes as many workers as it has cores.
    tasks = f"SLURM_TASKS_PER_NODE{group}"
    counts = environ.get(tasks) or environ.get(f"SLURM_JOB_CPUS_PER_NODE{group}") or f"1(x{len(found)})"
    slots = _counts(counts, tasks)
    cores = environ.get(f"SLURM_JOB_CPUS_PER_NODE{group}", "")
    if len(slots) != len(found) and cores and "SLURM_STEP_ID" in environ:
        slots = _counts(cores, tasks)  # the tasks are those of the step that this process is in
    if len(slots) != len(found):
        raise ConfigError(f"{tasks}={counts!r} does not fit the {len(found)} nodes of {names!r}")
    return [Host(name, number) for name, number in zip(found, slots, strict=True)]


def _counts(text: str, variable: str) -> list[int]:
    """``2(x3),1`` as numbers, one for each node."""
    found: list[int] = []
    for word in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", word)
        if match is None:
            raise ConfigError(f"{variable}={text!r} makes no sense")
        found += [int(match[1])] * int(match[2] or 1)
    return found


def expand_slurm(text: str) -> list[str]:
    """``n[1-3,08],gpu2`` as ``n1 n2 n3 n08 gpu2``: what ``scontrol show hostnames`` prints.

    Raises:
        ConfigError: it is no such list.
    """
    if re.fullmatch(f"{_NAME}(?:,{_NAME})*", text) is None:
        raise ConfigError(f"{text!r} is no list of nodes")
    found: list[str] = []
    for word in re.findall(_NAME, text):
        names = [""]
        for plain, inside in re.findall(r"([^\[\]]+)|\[([^\]]*)\]", word):
            ends = [plain] if plain else _members(inside, text)
            names = [name + end for name in names for end in ends]
        found += names
    return found


def _members(inside: str, text: str) -> list[str]:
    found = []
    for part in inside.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise ConfigError(f"{text!r} is no list of nodes")
        first, last = match[1], match[2] or match[1]
        if int(last) - int(first) >= _MOST_HOSTS:
            raise ConfigError(f"{text!r}: {part} are more than {_MOST_HOSTS} nodes")
        found += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return found


def of_lsf(environ: Mapping[str, str]) -> list[Host]:
    """The hosts of the LSF job that this process runs in; none outside of one.

    ``LSB_MCPU_HOSTS`` is ``hosta 2 hostb 4``; the first host may be one that only starts the job.

    Raises:
        ConfigError: its variables make no sense.
    """
    if not environ.get("LSB_JOBID"):
        return []
    words = environ.get("LSB_MCPU_HOSTS", "").split()
    if words:
        if len(words) % 2 or not all(count.isdigit() and int(count) > 0 for count in words[1::2]):
            raise ConfigError(f"LSB_MCPU_HOSTS={' '.join(words)!r} makes no sense")
        return merge((Host(name, int(n)) for name, n in zip(words[::2], words[1::2], strict=True)), "LSB_MCPU_HOSTS")
    return merge((Host(name) for name in environ.get("LSB_HOSTS", "").split()), "LSB_HOSTS")


def merge(hosts: Iterable[Host], source: str) -> list[Host]:
    """Every host once, with the slots of all its lines.

    Raises:
        ConfigError: there is none.
    """
    slots: dict[str, int] = {}
    for host in hosts:
        slots[host.name] = slots.get(host.name, 0) + host.slots
    if not slots:
        raise ConfigError(f"{source} names no host")
    return [Host(name, number) for name, number in slots.items()]


def lay_out(
    hosts: Sequence[Host], bounds: Sequence[tuple[int, int]], num_servers: int, server_hosts: Sequence[str] = ()
) -> Layout:
    """Workers fill the slots of ``hosts`` in order, so that the workers of a client are neighbours.

    Servers go to ``server_hosts`` in turn, or to all hosts: the last ones first, which have the fewest workers.

    Args:
        bounds: of each client, its first worker and the one after its last.
    Raises:
        ConfigError: there are fewer slots than workers.
    """
    num_workers = bounds[-1][1]
    slots = list(itertools.islice((host.name for host in hosts for _ in range(host.slots)), num_workers))
    if len(slots) < num_workers:
        listed = names_in_words([f"{host.name} {host.slots}" for host in hosts])
        raise ConfigError(f"{num_workers} workers, and the hosts have {len(slots)} slots ({listed})")
    clients = []
    for first, end in bounds:
        clients.append(tuple(Host(name, number) for name, number in Counter(slots[first:end]).items()))
    homes = list(server_hosts) or [host.name for host in reversed(hosts)]
    return Layout(tuple(homes[i % len(homes)] for i in range(num_servers)), tuple(clients))
