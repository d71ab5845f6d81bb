"""``kvmpi bench allreduce`` and its like: starts the ranks, or is one of them, and shows what they measure."""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kvmpi.benchmarks import options, rows
from kvmpi.benchmarks.collective_report import CollectiveReport
from kvmpi.benchmarks.jobs import RANK_PROGRAM, MpiSpec, RankJob, Stage, find_mpich, local_command
from kvmpi.benchmarks.plan import Plan, RowName
from kvmpi.benchmarks.ranks import Session
from kvmpi.benchmarks.report import exit_status
from kvmpi.benchmarks.turns import Event, acquaint, drive
from kvmpi.collectives import mpi_comm
from kvmpi.config import Config
from kvmpi.errors import ConfigError
from kvmpi.launchers import mpirun
from kvmpi.launchers.rank_exec import mpi_rank
from kvmpi.launchers.signals import SignalCatcher
from kvmpi.machine import num_cores


def main(op: str, argv: Sequence[str]) -> int:
    """Run ``kvmpi bench OP ARGV``; the exit status."""
    inside = mpi_comm.started_by_mpi() or bool(os.environ.get("KVMPI_ROLE"))
    first = not inside or max(0, mpi_rank(dict(os.environ))) == 0
    with contextlib.ExitStack() as stack:
        if not first:  # one complaint about a bad option is enough
            silence = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(contextlib.redirect_stderr(silence))
            stack.enter_context(contextlib.redirect_stdout(silence))
        args = options.parse(op, argv)
    return exit_status(lambda: _as_rank(args, first) if inside else _as_parent(args), complains=first)


def _plan(args: argparse.Namespace, num_ranks: int, names: Sequence[RowName], *, memory: bool = True) -> Plan:
    return Plan(
        op=args.op, cases=options.cases(args, num_ranks), rows=tuple(names), dtype=args.dtype,
        num_vectors=args.vectors, num_rings=args.rings, chunk_bytes=args.chunk_bytes, seconds=args.seconds,
        num_ranks=num_ranks, measure_memory=memory,
    )  # fmt: skip


# ---- inside a job that somebody else has started


class _HereJob:
    """This process is one of the ranks."""

    name = "MPI"

    def __init__(self, session: Session) -> None:
        self.ask = session.handle


def _as_rank(args: argparse.Namespace, first: bool) -> int:
    own_job = {"--yield": args.idle, "--hosts": args.hosts, "--mpich": args.mpich}
    if given := [name for name, value in own_job.items() if value]:
        raise ConfigError(
            f"{given[0]} is for jobs that kvmpi bench starts itself; here somebody else has started the ranks"
        )
    if os.environ.get("KVMPI_NUM_CLIENTS", "1") != "1":
        raise ConfigError("all ranks must be one client; start the job with -c 1")
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise ConfigError(f"MPI is not available here ({error}); pip install 'kvmpi[mpi]'") from None
    world = MPI.COMM_WORLD
    started = int(os.environ.get("OMPI_COMM_WORLD_SIZE") or os.environ.get("PMI_SIZE") or world.size)
    if started != world.size:
        raise ConfigError(
            f"mpirun has started {started} ranks, but the MPI that mpi4py has loaded sees {world.size}: they are of "
            "different MPIs; name the right library in MPI4PY_LIBMPI"
        )
    if args.ranks_given and args.ranks != [world.size]:
        raise ConfigError(f"-n {args.ranks[0]}: the job that was started has {world.size} ranks; leave -n out")
    names = options.wanted_rows(args, mpich=False)
    if bad := [name.label for name in names if rows.SPIN in name.how or name.kind == rows.MPICH]:
        raise ConfigError(f"{bad[0]} needs a job of its own, which kvmpi bench starts only outside of mpirun")
    report, problem = None, None
    if world.rank == 0:
        try:
            report = CollectiveReport(args)
        except ConfigError as error:
            problem = error
    if problem := world.bcast(problem):
        raise problem
    try:
        return _measure_here(args, world, names, report)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        mpi_comm.end_job(1)  # the other ranks would wait for this one for ever
        raise


def _measure_here(
    args: argparse.Namespace, world: Any, names: Sequence[RowName], report: CollectiveReport | None
) -> int:
    session = Session(_plan(args, world.size, names), world)
    (about,) = session.handle("about")
    labels = [name.label for name in names]
    if report is not None:
        facts: dict[str, Any] = about["facts"]
        report.begin(world.size, labels, dict.fromkeys(labels, facts))
    found = drive([_HereJob(session)], options.cases(args, world.size), report)
    session.finish()
    if report is not None:
        return report.end()
    return int(not found or any(row["wrong"] for row in found))


# ---- the parent of jobs of its own


class _StageJob:
    """A job of a stage."""

    def __init__(self, stage: Stage, job: RankJob) -> None:
        self.name = job.name
        self.ask: Callable[[str], Iterator[Event]] = lambda command: stage.ask(job, command)


def _as_parent(args: argparse.Namespace) -> int:
    environ = mpirun.clean(os.environ)
    try:
        mpi = mpirun.find(environ, args.ranks[0])
    except ConfigError as error:
        # What it says about clients, and about jobs without MPI, does not help here.
        text = str(error).partition("; or run without MPI")[0]
        raise ConfigError(text.replace("a client of several workers needs MPI", "the ranks need MPI")) from None
    Config.from_env()  # a bad setting must not start anything
    mpich = None if mpi.kind == "mpich" or args.hosts else find_mpich(args.mpich, environ)
    signals = SignalCatcher()
    try:
        report = CollectiveReport(args)
        with contextlib.ExitStack() as stack:
            stack.callback(report.progress.hide)
            lab = None
            if args.hosts:
                from kvmpi.benchmarks.netlab import NetLab

                if mpi.kind != "openmpi":
                    raise ConfigError(f"simulated hosts need the mpirun of Open MPI 5, and {mpi.path} is another one")
                lab = stack.enter_context(NetLab(args.hosts, args.link))
            for num_ranks in args.ranks:
                _measure(args, num_ranks, mpi, mpich, lab, signals, report)
            return report.end()
    finally:
        signals.close()


def _measure(
    args: argparse.Namespace,
    num_ranks: int,
    mpi: mpirun.MPI,
    mpich: mpirun.MPI | None,
    lab: Any,
    signals: SignalCatcher,
    report: CollectiveReport,
) -> None:
    names = options.wanted_rows(args, mpich=mpich is not None)
    notes = []
    if mpich is None and any(name.kind == rows.MPICH for name in names):
        raise ConfigError(
            "no MPICH was found; pip install mpich in another environment and name its Python: --mpich PYTHON"
        )
    if mpich is None and args.rows is None and mpi.is_open_mpi and not lab:
        notes.append(
            "MPICH left out: not found; pip install mpich in another environment and name its Python: --mpich PYTHON"
        )
    if mpi.kind == "mpich" and any(rows.SPIN in name.how for name in names):
        notes.append("rows with :spin left out: only Open MPI can be told to yield")
        names = [name for name in names if rows.SPIN not in name.how]
    groups = _groups(args, names, mpi, mpich, num_ranks, lab)
    labels = [name.label for name in names]

    def say(line: str) -> None:
        report.progress.hide()
        print(line, file=sys.stderr, flush=True)

    report.progress.show(f"starting {num_ranks} ranks")
    with Stage([spec for spec, _ in groups], signals, say) as stage:
        facts: dict[str, dict[str, Any]] = {}
        there, missing = acquaint(stage, lambda number: number == 0)
        notes += [f"{', '.join(name.label for name in groups[i][1])} left out: {error}" for i, error in missing]
        for number, _, about in there:
            if lab:  # what the ranks see are pretended hosts
                about |= {"host": platform.node(), "nic": f"simulated links of {args.link}"}
            facts |= {name.label: about for name in groups[number][1]}
        report.begin(num_ranks, labels, facts)
        for note in notes:
            report.note(note)
        drive([_StageJob(stage, job) for _, job, _ in there], options.cases(args, num_ranks), report)
        stage.finish()


def _groups(
    args: argparse.Namespace,
    names: Sequence[RowName],
    mpi: mpirun.MPI,
    mpich: mpirun.MPI | None,
    num_ranks: int,
    lab: Any,
) -> list[tuple[MpiSpec, list[RowName]]]:
    """The jobs to start and the rows of each; the first one is the one that everything else is compared in."""
    cores = num_cores()
    call = rows.MPI_CALLS[args.op]
    others = [name for name in names if name.kind != rows.MPICH]
    yields = {"on": True, "off": False}.get(args.idle)
    apart: list[RowName] = []
    if args.idle != "off" and any(rows.SPIN in name.how for name in names):
        if yields is None:
            yields = num_ranks > cores  # as the launcher has it
        apart = [name for name in others if name.kind == call and (rows.SPIN in name.how) == yields]
    found: list[tuple[MpiSpec, list[RowName]]] = []
    for idle, its_rows in ((yields, [name for name in others if name not in apart]), (not yields, apart)):
        if its_rows:
            kind = "Open MPI" if mpi.is_open_mpi else "MPICH"
            suffix = "" if idle is None else ", idle ranks yield" if idle else ", idle ranks spin"
            command = _lab_command(lab, mpi, args.ranks_per_host, idle) if lab else local_command(mpi, num_ranks)
            plan = _plan(args, num_ranks, its_rows, memory=not found)  # which is measured once
            spec = MpiSpec(
                name=kind + suffix, plan=plan, command=command, mpi=mpi, yields=idle, on_hosts=bool(lab)
            )  # fmt: skip
            found.append((spec, its_rows))
    its_rows = [name for name in names if name.kind == rows.MPICH]
    if its_rows and mpich is not None:
        plan = _plan(args, num_ranks, its_rows, memory=not found)
        found.append((MpiSpec(name="MPICH", plan=plan, command=local_command(mpich, num_ranks), mpi=mpich), its_rows))
    return found


def _lab_command(lab: Any, mpi: mpirun.MPI, ranks_per_host: int, yields: bool | None) -> Callable[[str], list[str]]:
    """Ranks on simulated hosts."""
    words = list(lab.mpirun_arguments(ranks_per_host))
    if yields is not None and "mpi_yield_when_idle" in words:  # what the environment says counts then
        at = words.index("mpi_yield_when_idle")
        del words[at - 1 : at + 2]
    return lambda folder: lab.command_on(0, [mpi.path, *words, *RANK_PROGRAM, folder])
