"""A real job with workers, a server and a scheduler, on this host or on all that were chosen, with a deadline."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from kvmpi.config import Config
from kvmpi.doctor.finding import Finding, Surroundings, ask
from kvmpi.errors import ConfigError
from kvmpi.launchers.hosts import Host, as_word, of_slurm
from kvmpi.launchers.job import FILES_AND_PORTS, OWNED

PROGRAM = str(Path(__file__).with_name("sum_program.py"))
_MOST_HOSTS = 16


def run(
    at: Surroundings, hosts: Sequence[Host] = (), kind: str = "", *, has_mpi: bool = True, remote_shell: str = "ssh",
    network: str = "", interface: str = "",
) -> Finding:  # fmt: skip
    """A job of one client, with one server: two workers here, or one on each host.

    Args:
        kind: how the hosts are reached, see ``where.look``.
        has_mpi: otherwise every worker is a client of its own.
        interface: by which this host reaches the others; MPI may take another, unless it is told.
    """
    count = min(len(hosts), _MOST_HOSTS) if len(hosts) > 1 else 2
    name = f"kvmpi run -n {count} -s 1"
    try:
        Config.from_env({key: value for key, value in at.environ.items() if key not in OWNED})
    except ConfigError:
        return Finding(name, "skipped", "settings come first: see there")
    clients = 1 if has_mpi else count
    timeout_s = at.deadline_s * (2 if len(hosts) > 1 else 1.5)
    # A sum that hangs becomes kvmpi's own error, which says who is missing. Files and ports are those of real jobs.
    env = {"KVMPI_TIMEOUT_S": str(timeout_s / 2), **dict.fromkeys(FILES_AND_PORTS, "")}
    words = [
        "-n",
        str(count),
        "-c",
        str(clients),
        "-s",
        "1",
        *_places(at, hosts[:count], kind, remote_shell, network, env),
    ]
    answer = ask(at, (sys.executable, "-m", "kvmpi", "run", *words, PROGRAM), timeout_s=timeout_s, env=env)
    where = f"on {count} hosts" if len(hosts) > 1 else "here"
    how = "one client over MPI" if has_mpi else "every worker a client, without MPI"
    if answer.status == 0:
        return Finding(name, "ok", f"{where}, {how}: right, {answer.seconds:.1f} s", facts={"seconds": answer.seconds})
    means = f"Its last words:\n{answer.last_words(6)}" if answer.last_words() else "It has printed nothing."
    if has_mpi:
        without = run(at, hosts, kind, has_mpi=False, remote_shell=remote_shell, network=network)
        if without.level == "ok":
            is_about_networks = answer.status is None or "--interface" in answer.out + answer.err
            if interface and not network and len(hosts) > 1 and is_about_networks:
                told = run(at, hosts, kind, remote_shell=remote_shell, network=interface)
                if told.level == "ok":
                    why = "MPI has taken a network that does not join the hosts: told which one does, it works."
                    seen, do = f"{where}, {how}: it {answer.end()}", f"name it: kvmpi run --interface {interface} ..."
                    return Finding(name, "problem", seen, f"{means}\n{why}", do)
            return Finding(
                name, "problem", f"{where}, {how}: it {answer.end()}", means,
                "the same without MPI works, so look at MPI first, and meanwhile:\n"
                f"kvmpi run -n {count} -c {count} -s 1 ...",
            )  # fmt: skip
    if hosts and _names_network(answer.out + answer.err):
        return Finding(name, "problem", f"{where}, {how}: it {answer.end()}", means,
                       "name the network that joins the hosts: --interface eth0, or 10.0.0.0/16")  # fmt: skip
    return Finding(name, "problem", f"{where}, {how}: it {answer.end()}", means, "see docs/troubleshooting.md")


def _names_network(text: str) -> bool:
    return any(word in text for word in ("No route", "unreachable", "Connection refused", "timed out"))


def _places(
    at: Surroundings, hosts: Sequence[Host], kind: str, remote_shell: str, network: str, env: dict[str, str]
) -> list[str]:
    """Options that put one worker on each host; in an allocation its own variables say so."""
    if len(hosts) < 2:
        return []
    words = ["--interface", network] if network else []
    if kind == "ssh":
        return [*words, "--remote-shell", remote_shell, "--hosts", ",".join(as_word(Host(host.name)) for host in hosts)]
    if kind == "jsrun":
        return [*words, "--jsrun-option=--rs_per_host=1"]
    names = {host.name for host in hosts}
    if kind == "srun":
        groups = of_slurm(at.environ)
        for number, group in enumerate(groups):
            chosen = [host.name for host in group if host.name in names]
            suffix = f"_HET_GROUP_{number}" if len(groups) > 1 else ""
            env |= dict.fromkeys((f"SLURM_JOB_NODELIST{suffix}", f"SLURM_NODELIST{suffix}"), ",".join(chosen))
            env |= {f"SLURM_TASKS_PER_NODE{suffix}": f"1(x{len(chosen)})"}
    else:
        env |= {"LSB_MCPU_HOSTS": " ".join(f"{host.name} 1" for host in hosts)}
    return words
