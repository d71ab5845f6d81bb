"""Checks of the environment: settings, variables of MPI, proxies, processes that fork, a batch system."""

from __future__ import annotations

import multiprocessing
import re
import shutil
from collections.abc import Mapping

from kvmpi.collectives import cost
from kvmpi.config import Config, env_name
from kvmpi.doctor.finding import Finding, Surroundings, ask
from kvmpi.errors import ConfigError, names_in_words
from kvmpi.launchers import where
from kvmpi.launchers.job import OWNED

#: Right for looking for an error, slow for work: setting -> what it costs.
_SLOW = {
    ("engine", "naive"): "every call waits for the one before",
    ("allreduce", "naive"): "everything goes through rank 0 in float64",
    ("shared_input", "stage"): "workers of a host copy every array once more",
    ("shared_payloads", "off"): "payloads between processes of a host go through a socket",
    ("transport", "tcp"): "processes of a host encrypt what they send each other",
    ("log_level", "DEBUG"): "servers write a line for every message",
}
_COMMANDS = {"slurm": ("srun", "sbatch"), "lsf": ("blaunch", "bsub")}
_NAMES = {"slurm": "Slurm", "lsf": "LSF"}
_ANSWER_S = 4.0


def settings(at: Surroundings) -> Finding:
    """``KVMPI_*`` variables: unknown names, values that make no sense, those of another job, slow choices."""
    ours = {name: value for name, value in at.environ.items() if name.startswith("KVMPI_")}
    if not ours:
        return Finding("settings", "ok", "no KVMPI_* variable is set")
    try:
        config = Config.from_env({name: value for name, value in ours.items() if name not in OWNED})
        cost.load(config.tuning)
    except ConfigError as error:
        # The message may go on to list every setting that there is.
        text = str(error).partition("; known settings:")[0]
        return Finding(
            "settings", "problem", text, "No process of a job starts with it.",
            "unset or correct it; docs/settings.md lists every setting",
        )  # fmt: skip
    if stale := sorted(OWNED & ours.keys()):
        return Finding(
            "settings", "warning", f"{', '.join(stale)} set by hand, or by a job around this shell",
            "A program that is started without kvmpi run would look for that job.", f"unset {' '.join(stale)}",
        )  # fmt: skip
    slow = [
        f"{env_name(field)}={value}: {why}" for (field, value), why in _SLOW.items() if getattr(config, field) == value
    ]
    if slow:
        names = " ".join(line.partition("=")[0] for line in slow)
        return Finding("settings", "warning", "; ".join(slow), "Right for finding an error.", f"unset {names}")
    return Finding("settings", "ok", ", ".join(f"{name}={value}" for name, value in sorted(ours.items())))


def mpi_variables(at: Surroundings) -> Finding:
    """``OMPI_*`` and the like that change how MPI works, or tell it that it is inside a job already."""
    inside = sorted(name for name in at.environ if name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"))
    if inside:
        return Finding(
            "MPI variables", "warning", f"this process is a rank of an MPI job ({', '.join(inside)})",
            "What is measured here shares its cores with the others; kvmpi run takes such variables away.",
            "run kvmpi doctor once, outside of mpirun",
        )  # fmt: skip
    prefixes = ("OMPI_MCA_", "PRTE_MCA_", "PMIX_MCA_", "UCX_", "MPICH_", "HYDRA_", "I_MPI_", "FI_")
    found = {name: value for name, value in sorted(at.environ.items()) if name.startswith(prefixes)}
    interfaces = set(at.names("/sys/class/net"))
    hurt, names = [], []
    for name, value in found.items():
        parts = set(value.lstrip("^").split(","))
        chosen = not value.startswith("^")
        why = ""
        if name == "OMPI_MCA_btl" and (("sm" in parts or "vader" in parts) != chosen):
            why = "ranks of a host talk over the network instead of shared memory"
        elif name == "OMPI_MCA_btl" and "self" in parts and not chosen:
            why = "no rank can send to itself, and MPI does not start"
        elif name == "OMPI_MCA_mpi_yield_when_idle" and value in ("1", "true"):
            why = "sums take twice as long where every rank has a core; kvmpi run sets it where ranks share cores"
        elif name.endswith("_if_include") and interfaces:
            missing = [part for part in parts if "/" not in part and part not in interfaces]
            why = f"this host has no interface {', '.join(missing)}" if missing else ""
        if why:
            hurt.append(f"{name}={value}: {why}")
            names.append(name)
    if hurt:
        return Finding("MPI variables", "warning", "; ".join(hurt), do=f"unset {' '.join(names)}", facts=found)
    if found:
        return Finding("MPI variables", "ok", ", ".join(f"{k}={v}" for k, v in found.items()), facts=found)
    return Finding("MPI variables", "ok", "none is set")


def proxies(at: Surroundings) -> Finding:
    """Proxies of HTTP. kvmpi's own connections take none; what asks its pages of figures does."""
    names = ("http_proxy", "https_proxy", "all_proxy")
    found = [name for name in at.environ if name.lower() in names and at.environ[name]]
    spared = at.environ.get("no_proxy", "") + "," + at.environ.get("NO_PROXY", "")
    if not found:
        return Finding("proxies", "ok", "none is set")
    if not re.search(r"localhost|127\.0\.0\.1|\*", spared):
        return Finding(
            "proxies", "warning", f"{', '.join(sorted(found))} without localhost in no_proxy",
            "kvmpi's own connections use no proxy, but what reads http://localhost asks the proxy for it.",
            "export no_proxy=localhost,127.0.0.1",
        )  # fmt: skip
    return Finding("proxies", "ok", f"{', '.join(sorted(found))}; not for localhost")


def forks(at: Surroundings) -> Finding:
    """How Python starts further processes: a process that speaks MPI must not fork, and a DataLoader does."""
    method = multiprocessing.get_context().get_start_method()
    if method != "fork":
        return Finding("forks", "ok", f"start method {method}")
    cards = at.names("/sys/class/infiniband")
    advice = "DataLoader(..., multiprocessing_context='forkserver')"
    if cards:
        return Finding(
            "forks", "warning", f"start method fork, and {', '.join(cards)}",
            "A process that speaks MPI over InfiniBand and forks, as a DataLoader with num_workers does, may crash or "
            "read wrong data.", advice,
        )  # fmt: skip
    return Finding("forks", "ok", "start method fork; for a DataLoader under MPI see docs/troubleshooting.md")


def batch(at: Surroundings) -> Finding:
    """Slurm or LSF: the allocation around this process, or whether the system answers."""
    path = at.environ.get("PATH")
    for system in _COMMANDS:
        try:
            found, _, _ = where.look(system, "", "", "", at.environ)
        except ConfigError as error:
            return Finding(
                "batch system", "problem", str(error), "kvmpi run cannot tell which hosts it has, or not reach them.",
                "load the batch system's module, or name hosts for ssh: kvmpi run --hosts a:4,b:4 ...",
            )  # fmt: skip
        if found:
            names = names_in_words([f"{host.name}:{host.slots}" for host in found])
            return _allocation(at, system, f"in a {_NAMES[system]} allocation: {names}")
    for system, (start, submit) in _COMMANDS.items():
        if shutil.which(submit, path=path) is None:
            continue
        command = ("scontrol", "ping") if system == "slurm" else ("lsid",)
        answer = ask(at, command, timeout_s=_ANSWER_S)
        if answer.status != 0 or "DOWN" in answer.out:
            return Finding(
                "batch system", "warning", f"{_NAMES[system]}: {submit} is here, but its controller does not answer",
                f"{' '.join(command)} {answer.end()}: {answer.last_words(1)}",
                f"kvmpi run --launcher {system} will not work from here; --hosts does",
            )  # fmt: skip
        return Finding("batch system", "ok", f"{_NAMES[system]} answers; {start} and {submit} are here")
    return Finding("batch system", "skipped", "neither Slurm nor LSF")


def _allocation(at: Surroundings, system: str, seen: str) -> Finding:
    if system == "lsf":
        return Finding("batch system", "ok", seen)
    answer = ask(at, ("srun", "--version"), timeout_s=_ANSWER_S)
    match = re.search(r"(\d+)\.(\d+)", answer.out)
    if match is not None and (int(match[1]), int(match[2])) < (20, 11):
        return Finding("batch system", "problem", f"{seen}; srun {match[0]}", "kvmpi run needs srun --overlap, which "
                       "came with 20.11.", "use --hosts and ssh")  # fmt: skip
    each = _cpus_each(at.environ)
    if each == 1 and not at.environ.get("SLURM_CPUS_PER_TASK"):
        return Finding(
            "batch system", "ok", f"{seen}; one core for each task (--cpus-per-task=N gives a worker more)"
        )  # fmt: skip
    return Finding("batch system", "ok", f"{seen}; {each} cores for each task")


def _cpus_each(environ: Mapping[str, str]) -> int:
    text = environ.get("SLURM_CPUS_PER_TASK", "1")
    return int(text) if text.isdigit() else 1
