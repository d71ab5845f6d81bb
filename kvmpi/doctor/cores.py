"""Checks of this host's cores and memory: what a container may use of them, and how many threads would share them."""

from __future__ import annotations

import math
import os
import re

from kvmpi.doctor.finding import Finding, Surroundings
from kvmpi.machine import bound_cores, limit_bytes, quota_cores, spare_bytes

#: Variables by which every worker of a host would bind its threads to the same cores.
_BINDING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
_POLICIES = ("PRTE_MCA_hwloc_default_binding_policy", "OMPI_MCA_hwloc_base_binding_policy", "HYDRA_BINDING")


def available(at: Surroundings) -> tuple[int, float]:
    """The cores that this process may run on, and how many of them at once, as a container's limit has it."""
    cores = bound_cores()
    return cores, min(float(cores), quota_cores(at.read))


def cores(at: Surroundings) -> Finding:
    """How many cores there are for how many workers."""
    count, usable = available(at)
    machine = os.cpu_count() or count
    seen = f"{count} of {machine} cores" if count < machine else f"{count} cores"
    facts = {"cores": count, "usable": usable, "machine": machine}
    if usable < count:
        seen += f", of which this container may use {usable:.3g} at a time"
    if at.workers > usable:
        return Finding(
            "cores", "warning", f"{seen}, for {at.workers} workers",
            "Workers wait for each other's turn on a core: a sum takes as long as the last of them needs to get one.",
            f"start at most {max(1, int(usable))} workers here, each with as many threads as it has cores", facts,
        )  # fmt: skip
    return Finding("cores", "ok", seen, facts=facts)


def load(at: Surroundings) -> Finding:
    """Whether other programs use the cores: then nothing that is measured here means much, and jobs wait for them."""
    text = at.read("/proc/loadavg").split()
    if not text:
        return Finding("load", "skipped", "this system does not say how busy it is")
    busy, machine = float(text[0]), os.cpu_count() or 1
    seen = f"{busy:.1f} on {machine} cores in the last minute"
    if busy > machine + 1:
        return Finding(
            "load", "warning", seen, "Other programs use the cores: jobs start slowly, a sum waits for the worker that "
            "gets no core, and what is measured here says little.", "see who it is: top", {"load": busy},
        )  # fmt: skip
    return Finding("load", "ok", seen, facts={"load": busy})


def threads(at: Surroundings) -> Finding:
    """Threads of all workers of this host against its cores."""
    _, usable = available(at)
    given = at.environ.get("OMP_NUM_THREADS", "")
    fair = max(1, int(usable) // at.workers)
    if given and not re.fullmatch(r"\d+(,\d+)*", given):
        return Finding("threads", "warning", f"OMP_NUM_THREADS={given!r} is no number", do="unset OMP_NUM_THREADS")
    each = int(given.partition(",")[0]) if given else fair
    source = f"OMP_NUM_THREADS={given}" if given else f"kvmpi run sets OMP_NUM_THREADS={each}"
    seen = f"{source} for each of {at.workers} workers"
    facts = {"threads": each, "workers": at.workers, "fair": fair}
    if each * at.workers > max(usable, at.workers):
        return Finding(
            "threads", "warning", f"{seen}: {each * at.workers} threads on {usable:.3g} cores",
            "Threads that push each other off the cores cost far more than they bring.",
            f"export OMP_NUM_THREADS={fair}", facts,
        )  # fmt: skip
    return Finding("threads", "ok", seen, facts=facts)


def binding(at: Surroundings) -> Finding:
    """Variables that bind threads or ranks to cores behind everybody's back."""
    bound = {name: at.environ[name] for name in _BINDING if at.environ.get(name, "false").lower() not in ("false", "")}
    policies = {name: at.environ[name] for name in _POLICIES if at.environ.get(name, "none") != "none"}
    listed = ", ".join(f"{name}={value}" for name, value in {**bound, **policies}.items())
    if bound and at.workers > 1:
        return Finding(
            "binding", "warning", listed,
            "Every worker of this host binds its threads to the same first cores, and the others stay idle.",
            f"unset {' '.join(bound)}",
        )  # fmt: skip
    if policies:
        return Finding(
            "binding", "warning", listed,
            "kvmpi run starts ranks unbound; this asks for the contrary, and would bind several clients of one host to "
            "the same cores.", f"unset {' '.join(policies)}",
        )  # fmt: skip
    return Finding("binding", "ok", "no variable binds threads or ranks to cores")


def memory(at: Surroundings) -> Finding:
    """Memory that can be had, and a container's limit."""
    text = at.read("/proc/meminfo")
    figures = {match[1]: int(match[2]) << 10 for match in re.finditer(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE)}
    if "MemAvailable" not in figures:
        return Finding("memory", "skipped", "this system does not say how much there is")
    free, limit, spare = figures["MemAvailable"], limit_bytes(at.read), spare_bytes(at.read)
    seen = f"{free / 2**30:.1f} GiB free"
    if limit < figures.get("MemTotal", math.inf):
        seen += f", a limit of {limit / 2**30:.1f} GiB for this container"
        if math.isfinite(spare):
            seen += f", of which {spare / 2**30:.1f} GiB are left"
    facts = {"free_bytes": free, "limit_bytes": None if math.isinf(limit) else int(limit)}
    if min(free, limit, spare) < 1 << 30:
        return Finding(
            "memory", "warning", seen, "A worker with torch takes 0.3 GiB before it has a model; who takes more than "
            "the limit is killed by SIGKILL without a word.", "give the container more memory, or start fewer workers",
            facts,
        )  # fmt: skip
    return Finding("memory", "ok", seen, facts=facts)
