"""``kvmpi doctor``: reads the command line, runs every check, and prints what they have found."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import secrets
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from os.path import expanduser
from typing import Any

from rich.console import Console

from kvmpi.config import client_bounds
from kvmpi.doctor import attach, ceiling, cores, machine, mpi, network, pairs, remote, report, settings, trial
from kvmpi.doctor.finding import Finding, Surroundings
from kvmpi.errors import ConfigError, KVTimeoutError
from kvmpi.launchers import hosts as host_lists
from kvmpi.launchers import mpirun, processes, where
from kvmpi.launchers.hosts import Host
from kvmpi.launchers.reach import Reach
from kvmpi.planner.presets import PRESETS

#: Checks of a host by itself, in the order in which they are shown.
MACHINE: tuple[Callable[[Surroundings], Finding], ...] = (
    machine.python, machine.packages, cores.cores, cores.load, cores.threads, cores.binding, cores.memory,
    machine.shared_memory, machine.leftovers, machine.temporary, machine.open_files, machine.processes,
    machine.locked_memory,
    attach.cross_memory, machine.gpu, network.name,
)  # fmt: skip
#: Checks of what this shell would hand on to a job.
SHELL: tuple[Callable[[Surroundings], Finding], ...] = (
    settings.settings, settings.mpi_variables, settings.proxies, settings.forks, settings.batch,
)  # fmt: skip


def parser() -> argparse.ArgumentParser:
    """The options of ``kvmpi doctor``."""
    result = argparse.ArgumentParser(
        prog="kvmpi doctor", allow_abbrev=False,
        description="Look for what keeps jobs from starting or makes them slow, and say what to do about it. Inside an "
        "allocation of Slurm or LSF the hosts are those of the allocation.",
        epilog="Exit status: 0 without problems (warnings are none), 1 with some, 2 for wrong usage.",
    )  # fmt: skip
    add = result.add_argument
    add("--hosts", default="", metavar="H:N,...", help="also look at these hosts, and at every pair of them")
    add(
        "--hostfile",
        type=expanduser,
        default="",
        metavar="F",
        help="the same from a file, a line for each: NAME slots=N",
    )
    add("--interface", default="", metavar="I", help="network between hosts: eth0, or 10.0.0.0/16 (default: any)")
    add("--remote-shell", default="ssh", metavar="CMD", help="takes HOST COMMAND and runs it there (default ssh)")
    add("-n", dest="workers", type=int, default=2, metavar="N", help="workers that you mean to start (default 2)")
    add("--model", default="", metavar="M", help=f"how fast can it be: {', '.join(PRESETS)}, or bytes")
    add("--step-seconds", type=float, metavar="S", help="with --model: a step of one worker alone")
    add("--machine", action="store_true", help="only this host by itself: no network, no jobs")
    add("--clean", action="store_true", help="remove what dead jobs have left here, and do nothing else")
    add("--json", action="store_true", help="print everything as JSON")
    return result


def main(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> int:
    """Run ``kvmpi doctor ARGV``; the exit status."""
    options = parser()
    args = options.parse_args(argv)
    if args.workers < 1:
        options.error(f"-n {args.workers}: there is at least one worker")
    if args.step_seconds is not None and not 0 < args.step_seconds < math.inf:
        options.error(f"--step-seconds {args.step_seconds:g}: expected a positive number")
    if bool(args.model) != bool(args.step_seconds):
        options.error("--model and --step-seconds go together: --model resnet50 --step-seconds 0.25")
    if args.machine and (args.hosts or args.hostfile):
        options.error("--machine looks at this host only: leave it out, or --hosts and --hostfile")
    if args.clean and (args.hosts or args.hostfile or args.json):
        options.error(
            "--clean is for this host only, and prints no JSON: leave it out, or --hosts, --hostfile and --json"
        )
    environ = dict(os.environ) if environ is None else environ
    if args.clean:
        return _clean(Surroundings(environ))
    try:
        nbytes = ceiling.gradient_bytes(args.model) if args.model else 0
        nobody: tuple[list[Host], str, Reach | None] = ([], "", None)
        chosen, kind, way = (
            nobody if args.machine else where.look("auto", args.hostfile, args.hosts, args.remote_shell, environ)
        )
        if args.interface and not chosen:
            raise ConfigError("--interface is for several hosts; see --hosts and --hostfile")
        placed = _placed(chosen, args.workers) if args.model else [args.workers]
    except ConfigError as error:
        options.error(str(error))
    at = Surroundings(environ, secrets.token_hex(8), workers=-(-args.workers // max(1, len(chosen))))
    found: list[Finding] = []
    measured: pairs.Pairs | None = None
    lines: list[str] = []
    facts: dict[str, Any] | None = None
    # Whatever a check leaves running ends with us, also after a kill -9, and what it leaves in memory.
    watchdog = processes.Watchdog(at.job_id, mpirun.LITTER)
    try:
        with _progress(args.json) as say:
            for check in MACHINE if args.machine else MACHINE + SHELL:
                say(check.__name__.replace("_", " "))
                found.append(guarded(check, at))
            if not args.machine:
                say("MPI")
                launcher, its_mpi = mpi.launcher(at)
                library, seen = mpi.library(at, its_mpi)
                found += [launcher, library, guarded(mpi.site, at, seen)]
                say("mpirun -n 2")
                two_ranks = guarded(mpi.trial, at, seen)
                found.append(two_ranks)
                say("network")
                towards = pairs.first_other(at, chosen)
                taken, listening = (
                    guarded(check, at, args.interface, towards) for check in (network.interface, network.ports)
                )
                found += [taken, listening]
                if way is not None:
                    say("other hosts")
                    about, measured = pairs.check(at, chosen, way, args.interface)
                    found += about
                    reached = [name for f in about if f.check == "hosts" and f.level == "ok" for name in f.facts]
                    found += remote.check(at, reached, way)
                say("kvmpi run")
                has_mpi = bool(two_ranks.facts)
                reachable = not any(f.check == "hosts" and f.level == "problem" for f in found)
                found.append(
                    trial.run(at, chosen, kind, has_mpi=has_mpi, remote_shell=args.remote_shell, network=args.interface,
                              interface=taken.facts.get("interface", ""))
                    if reachable else Finding("kvmpi run", "skipped", "hosts come first: see there")
                )  # fmt: skip
            if args.model:
                say("memory")
                figures = _figures(at, placed, measured)
                estimated = ceiling.estimate(nbytes, args.step_seconds, placed, figures)
                facts = ceiling.as_facts(estimated, figures)
                lines = ceiling.describe(estimated, args.model, figures, cores.available(at)[0])
    except KVTimeoutError as error:
        found.append(Finding("memory", "problem", str(error)))
    except KeyboardInterrupt:
        print("kvmpi doctor: stopped", file=sys.stderr)
        return 130
    finally:
        watchdog.finish()
    if args.json:
        print(report.as_json(found, facts))
    else:
        report.show(found, measured, lines, f"kvmpi doctor on {socket.gethostname()}")
    return report.exit_status(found)


def guarded(check: Callable[..., Finding], at: Surroundings, *more: object) -> Finding:
    """What ``check`` finds; a check that fails is a finding too, for a doctor is called where things are odd."""
    try:
        return check(at, *more)
    except Exception as error:
        name = check.__name__.replace("_", " ")
        return Finding(name, "warning", f"this check has failed: {type(error).__name__}: {error}")


def _placed(chosen: Sequence[Host], workers: int) -> list[int]:
    """How many workers are on each host."""
    if len(chosen) < 2:
        return [workers]
    layout = host_lists.lay_out(chosen, client_bounds(workers, 1), 0)
    return [host.slots for host in layout.clients[0]]


def _figures(at: Surroundings, placed: Sequence[int], measured: pairs.Pairs | None) -> Any:
    rates = attach.memory_rates(at, min(max(placed), os.cpu_count() or 1))
    link, trip = (None, None) if measured is None else (measured.slowest_bytes_per_s, measured.longest_round_trip_s)
    # What all cores have together is shared by all workers of a host.
    share = min(max(placed), os.cpu_count() or 1) / max(placed)
    return ceiling.figures(rates["copy"] * share, rates["add"] * share, link, trip)


def _clean(at: Surroundings) -> int:
    removed = machine.remove_leftovers(at)
    for path in removed:
        print(f"removed {path}")
    left = machine.find_leftovers(at)
    for path in left:
        print(f"could not remove {path}", file=sys.stderr)
    young = machine.find_leftovers(at, young=True)
    for path in young:
        print(f"kept {path}: it is less than a minute old, and its job may be about to begin; try again then")
    if not removed and not left and not young:
        print("dead jobs have left nothing here")
    return 1 if left else 0


@contextlib.contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[str], None]]:
    """Says on a terminal what is being looked at."""
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield lambda text: None
        return
    with console.status("looking around") as status:
        yield lambda text: status.update(f"looking at {text}")
