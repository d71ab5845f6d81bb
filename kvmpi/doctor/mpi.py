"""Checks of MPI: mpi4py, the library it loads, an mpirun that belongs to it, and a real job of two ranks."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from kvmpi.doctor.cores import available
from kvmpi.doctor.finding import Finding, Level, Surroundings, ask
from kvmpi.errors import ConfigError
from kvmpi.launchers import mpirun
from kvmpi.launchers.mpirun import ASK_NOBODY, MPI
from kvmpi.machine import refuses_affinity

PROGRAM = ("-m", "kvmpi.doctor.mpi_program")
_VERSION_S = 5.0
_INSTALL = "pip install 'kvmpi[mpi]'"
_LIBRARY = "MPI4PY_LIBMPI"
_TEMPORARY = "set TMPDIR to a folder that can be written, with room"
_WITHOUT = "Without MPI, make every worker a client of its own: kvmpi run -n 4 -c 4 -s 1 ..."


@dataclass(frozen=True)
class Found:
    """An MPI with what its library says, both empty where there is none, and the variable that leads mpi4py to it."""

    mpi: MPI | None
    library: str = ""
    path: str = ""
    env: Mapping[str, str] = field(default_factory=dict)


def launcher(at: Surroundings) -> tuple[Finding, MPI | None]:
    """The mpirun that jobs would be started with; it answers."""
    environ = {**mpirun.clean(at.environ), "KVMPI_JOB_ID": at.job_id}
    try:
        mpi = mpirun.find(environ, at.workers, timeout_s=_VERSION_S)
    except ConfigError as error:
        # A laptop may do without; who names an mpirun, or has mpi4py, wants it.
        wanted = bool(at.environ.get("KVMPI_MPIRUN")) or _has_mpi4py()
        level: Level = "problem" if wanted else "warning"
        seen, _, do = str(error).partition("; ")
        return Finding("mpirun", level, seen, _WITHOUT, do), None
    kind = "Open MPI" if mpi.is_open_mpi else "MPICH"
    return Finding("mpirun", "ok", f"{mpi.path} ({kind})", facts={"path": mpi.path, "kind": mpi.kind}), mpi


def library(at: Surroundings, mpi: MPI | None) -> tuple[Finding, Found]:
    """mpi4py and the library that it loads, which must be that of ``mpi``; nothing of MPI is started."""
    if not _has_mpi4py():
        return Finding("MPI library", "warning", "mpi4py is not installed", _WITHOUT, _INSTALL), Found(None)
    version = metadata.version("mpi4py")
    env = {}
    if mpi is not None and _LIBRARY not in at.environ:  # kvmpi run does the same
        env = {name: value for name, value in mpi.env("", "", crowded=False, one_host=True).items() if name == _LIBRARY}
    answer = ask(at, (sys.executable, *PROGRAM, "version"), env=env)
    says = _lines(answer.out)
    if answer.status != 0 or not says:
        return Finding(
            "MPI library", "problem", f"mpi4py {version} finds no library that works: {answer.last_words(1)}",
            f"Loading it {answer.end()}. {_WITHOUT}", f"{_INSTALL}\nor load the module of your site's MPI",
        ), Found(None)  # fmt: skip
    name, path = says[0]["library"], says[0]["path"]
    found = Found(mpi, name, path, env)
    seen = f"{' '.join(name.partition(', package')[0].split())}, mpi4py {version}, {path}"
    if mpi is not None and ("open mpi" in name.lower()) != mpi.is_open_mpi:
        return Finding(
            "MPI library", "problem", f"{seen}, and mpirun is {mpi.path}",
            "They do not belong together: every worker would believe to be alone, or the job hangs at its start.",
            f"point KVMPI_MPIRUN to the mpirun of that library, or {_LIBRARY} to the library of this mpirun",
        ), Found(None, name, path)  # fmt: skip
    return Finding("MPI library", "ok", seen, facts=says[0]), found


def _has_mpi4py() -> bool:
    try:
        return bool(metadata.version("mpi4py"))
    except metadata.PackageNotFoundError:
        return False


def site(at: Surroundings, found: Found) -> Finding:
    """A wheel's MPI where the site has one of its own, which knows the site's network."""
    if found.mpi is None:
        return Finding("MPI of the site", "skipped", "there is no MPI to compare")
    inside = str(Path(sys.prefix)) in os.path.abspath(found.mpi.path)
    other = shutil.which("mpirun", path=at.environ.get("PATH"))
    fabric = at.names("/sys/class/infiniband")
    if other and os.path.realpath(other) != os.path.realpath(found.mpi.path) and inside:
        matters = fabric or at.environ.get("SLURM_JOB_ID") or at.environ.get("LSB_JOBID")
        seen = f"jobs take the wheel's; PATH has another mpirun, {other}"
        if not matters:
            return Finding("MPI of the site", "ok", seen)
        return Finding(
            "MPI of the site", "warning", seen, "The site's was probably built for its network and its batch system.",
            f"compare the two:\nKVMPI_MPIRUN={other} kvmpi bench allreduce -n 2",
        )  # fmt: skip
    named = "KVMPI_MPIRUN names it" if at.environ.get("KVMPI_MPIRUN") else "the one on PATH"
    return Finding("MPI of the site", "ok", "jobs take the wheel's in this environment" if inside else named)


def trial(at: Surroundings, found: Found) -> Finding:
    """``mpirun -n 2``, as a user would start it: two ranks that know of each other, with threads."""
    mpi = found.mpi
    if mpi is None:
        return Finding("mpirun -n 2", "skipped", "there is no mpirun that works")
    env, words, notes = dict(found.env), [mpi.path, "-n", "2"], []
    blind = {} if not refuses_affinity() else {k: v for k, v in ASK_NOBODY.items() if at.environ.get(k) != v}
    if mpi.is_open_mpi:
        words += ["--oversubscribe"] if blind or available(at)[0] < 2 else []
        words += ["--bind-to", "none"] if blind else []  # to cores, of which it sees none then
        if os.geteuid() == 0 and not at.environ.get("OMPI_ALLOW_RUN_AS_ROOT"):
            env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
            notes.append("as root it wants OMPI_ALLOW_RUN_AS_ROOT=1 and OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1")
        if "HOME" not in at.environ:
            notes.append("HOME is not set, which it wants; kvmpi run sets it by itself")
    answer = ask(at, (*words, sys.executable, *PROGRAM, "rank"), env={**env, **blind})
    ranks = _lines(answer.out)
    tail = f"Its last words:\n{answer.last_words()}" if answer.last_words() else "It has printed nothing."
    if answer.status is None:
        return Finding(
            "mpirun -n 2", "problem", f"it {answer.end()} and was stopped", tail,
            "look for the usual reasons: a network interface that leads nowhere (try mpirun --mca btl_tcp_if_include "
            "lo), a host name that does not resolve, an mpirun of another MPI, a machine that is far too busy",
        )  # fmt: skip
    if answer.status != 0:
        return Finding("mpirun -n 2", "problem", f"it {answer.end()}", tail, _advice(answer.out + answer.err))
    if len(ranks) == 2 and all(rank["size"] == 1 for rank in ranks):
        return Finding(
            "mpirun -n 2", "problem", "both ranks believe to be alone", "mpirun and the library that mpi4py loads "
            f"({ranks[0]['path']}) do not belong together.",
            f"point KVMPI_MPIRUN to the mpirun of that library, or {_LIBRARY} to the library of this mpirun",
        )  # fmt: skip
    if len(ranks) != 2 or any(rank["sum"] != 3 for rank in ranks):
        return Finding("mpirun -n 2", "problem", "the two ranks did not find the sum 3", tail)
    level, cores = ranks[0]["thread_level"], ranks[0]["cores"]
    facts = {"thread_level": level, "cores": cores, "seconds": answer.seconds}
    seen = f"{answer.seconds:.1f} s, thread level {level}, a rank has {cores} of {available(at)[0]} cores"
    if level != "MULTIPLE":
        return Finding(
            "mpirun -n 2", "problem", seen, "kvmpi calls MPI from several threads.",
            "take an MPI that was built for threads; the wheel is: " + _INSTALL, facts,
        )  # fmt: skip
    if blind:
        variables = " ".join(f"{name}={value}" for name, value in blind.items())
        return Finding(
            "mpirun -n 2", "warning", f"{seen}, with {variables}",
            "A sandbox refuses sched_getaffinity here, which MPI "
            "then asks again and again: a plain mpirun, or a program that loads MPI, never starts without these "
            "variables. kvmpi run sets them.", "have the sandbox allow sched_getaffinity, or start programs with "
            f"kvmpi run, or:\nexport {variables}\nmpirun --oversubscribe --bind-to none ...", facts,
        )  # fmt: skip
    if cores and cores * 2 < available(at)[0]:
        return Finding(
            "mpirun -n 2", "warning", seen, "A plain mpirun binds each rank to few cores, which its threads share; "
            "kvmpi run does not.", "start programs with kvmpi run, or mpirun --bind-to none", facts,
        )  # fmt: skip
    return Finding("mpirun -n 2", "ok", "; ".join([seen, *notes]), facts=facts)


def _advice(text: str) -> str:
    """What to do about the commonest words of mpiruns."""
    known: Sequence[tuple[str, str]] = (
        (
            "run as root",
            "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 (kvmpi run does so by itself)",
        ),
        ("Read-only file system", _TEMPORARY),
        ("No space left on device", _TEMPORARY),
        ("listener thread failed to start", _TEMPORARY),
        ("not enough slots", "mpirun --oversubscribe (kvmpi run does so by itself)"),
        ("No module named", "mpirun has started another Python, or mpi4py is missing: " + _INSTALL),
        ("cannot open shared object", "load the module of the MPI that mpi4py looks for, or: " + _INSTALL),
    )
    for words, advice in known:
        if words in text:
            return advice
    return "try it by hand: mpirun -n 2 hostname"


def _lines(text: str) -> list[dict[str, Any]]:
    found = []
    for line in text.splitlines():
        try:
            read = json.loads(line)
        except ValueError:
            continue
        if isinstance(read, dict) and "library" in read:
            found.append(read)
    return found
