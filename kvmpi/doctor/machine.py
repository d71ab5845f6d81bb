"""Checks of this host alone: Python, packages, shared memory, what dead jobs have left, limits, GPU."""

from __future__ import annotations

import contextlib
import math
import os
import platform
import re
import resource
import shutil
import sys
import time
from importlib import metadata
from pathlib import Path

import kvmpi
from kvmpi.collectives import native
from kvmpi.doctor.finding import Finding, Level, Surroundings, ask
from kvmpi.launchers import mpirun, watchdog
from kvmpi.machine import room_for_threads

MIB = 1 << 20
#: Open MPI maps 16 MiB for each rank of a host, and loaders of data put their batches there.
SHM_RANK_BYTES, SHM_ENOUGH_BYTES = 16 * MIB, 512 * MIB
FILES_ENOUGH = 1024
LOCKED_ENOUGH_BYTES = 64 * MIB
#: Processes and threads of the launcher, an mpirun, the scheduler and a server; and of each worker, without torch's.
JOB_THREADS, WORKER_THREADS = 25, 10
#: Of a job: its number. A benchmark's folders go by their own names, which its processes and its watchdog are told.
_JOB = r"[0-9a-f]{16}"
_BENCH = r"kvmpi-(?:bench|lab)-[a-z0-9_]{8}"
#: Names of the job's folders: the launcher's, those of processes in a batch system, and of servers in a worker.
_FOLDER = re.compile(rf"kvmpi-({_JOB})(?:-(?:client|server|worker)-\d+(?:-\d+)?)?|({_BENCH})|kvmpi-[a-z0-9_]{{8}}")
#: A folder is made before anything of its job runs, and nobody waits for a day to put something into his.
_YOUNG_S, _DAY_S = 60.0, 86_400.0


def python(at: Surroundings) -> Finding:
    """The interpreter, and whether the ``kvmpi`` on PATH is that of this one, and what programs here would import."""
    seen = f"{platform.python_version()} in {sys.prefix}, kvmpi {kvmpi.__version__}"
    found = shutil.which("kvmpi", path=at.environ.get("PATH"))
    ours = Path(sys.prefix) / "bin" / "kvmpi"
    if found and ours.exists() and not os.path.samefile(found, ours):
        return Finding(
            "python", "warning", seen, f"PATH finds another kvmpi: {found}.",
            f"activate the environment that you mean:\n. {sys.prefix}/bin/activate",
        )  # fmt: skip
    here = Path("kvmpi", "__init__.py").absolute()
    if here.exists() and not os.path.samefile(here, kvmpi.__file__):
        return Finding(
            "python", "warning", seen,
            f"Programs in this folder import the sources in it, {here.parent}, in place of what is installed; compiled "
            "parts are seldom there.",
            f"install these ({sys.executable} -m pip install -e '.[mpi]'), or keep programs in another folder",
        )  # fmt: skip
    return Finding("python", "ok", seen)


def packages(at: Surroundings) -> Finding:
    """What kvmpi depends on is there, new enough, and can be imported; CURVE is built in."""
    found, lacking = {}, []
    try:
        needed = metadata.requires("kvmpi") or []
    except metadata.PackageNotFoundError:  # its sources are on PYTHONPATH: the imports below are the trial
        needed = []
    for line in needed:
        match = re.match(r"([\w-]+)\s*>=\s*([\d.]+)", line)
        if match is None or "extra" in line:
            continue
        name, least = match[1], match[2]
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            lacking.append(f"{name} is missing")
            continue
        if _numbers(found[name]) < _numbers(least):
            lacking.append(f"{name} {found[name]} is older than {least}")
    for name in ("mpi4py", "torch"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    seen = ", ".join(f"{name} {version}" for name, version in found.items())
    if not lacking:
        program = "import numpy, msgspec, rich, safetensors.numpy, zmq; print('curve', zmq.has('curve'))"
        answer = ask(at, (sys.executable, "-c", program))
        if answer.status != 0:
            lacking.append(f"importing them {answer.end()}: {answer.last_words(1)}")
        elif "curve True" not in answer.out:
            lacking.append("this pyzmq has no CURVE, which connections over TCP need")
    if lacking:
        return Finding(
            "packages", "problem", "; ".join(lacking), "kvmpi does not work without them.",
            f"{sys.executable} -m pip install --upgrade kvmpi pyzmq", found,
        )  # fmt: skip
    compiled = "compiled parts" if native.is_built() else "no compiled parts (it was installed without a C compiler)"
    return Finding("packages", "ok", f"{seen}; {compiled}", facts={**found, "compiled": str(native.is_built())})


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def shared_memory(at: Surroundings) -> Finding:
    """The size of /dev/shm, which MPI and loaders of data use; kvmpi's own memory has no name there."""
    try:
        status = os.statvfs(f"{at.root}/dev/shm")
        reason = "it can only be read" if status.f_flag & os.ST_RDONLY else ""
    except OSError as error:
        reason = error.strerror or str(error)
    if reason and sys.platform != "linux":
        return Finding("shared memory", "skipped", f"no /dev/shm ({reason})")
    if reason:
        return Finding(
            "shared memory", "warning", f"no /dev/shm that can be used: {reason}", "MPI takes the temporary folder, "
            "which may be slow; locks of multiprocessing, and DataLoaders with workers, fail.",
            "mount one, as root:\nmount -t tmpfs -o size=8G tmpfs /dev/shm\n"
            "docker run --tmpfs /dev/shm:size=8g ...",
        )  # fmt: skip
    free, size = status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
    seen = f"/dev/shm has {_size(free)} free of {_size(size)}"
    facts = {"free_bytes": free, "size_bytes": size}
    if free >= SHM_ENOUGH_BYTES:
        return Finding("shared memory", "ok", seen, facts=facts)
    means = "MPI takes 16 MiB a worker there, and a DataLoader its batches; without room they die of SIGBUS."
    do = "make it larger, as root, or start the container with more:\nmount -o remount,size=8G /dev/shm\n"
    do += "docker run --shm-size=8g ..."
    level: Level = "problem" if free < at.workers * SHM_RANK_BYTES else "warning"
    return Finding("shared memory", level, seen, means, do, facts)


def find_leftovers(at: Surroundings, *, young: bool = False) -> list[str]:
    """Files and folders of this user's jobs and benchmarks of which nothing runs any more.

    Args:
        young: instead, folders that are so new that nothing of theirs need run yet.
    """
    living, sockets = _living(at), at.read("/proc/net/unix")
    found = []
    for folder in dict.fromkeys((f"{at.root}/dev/shm", at.temporary, "/tmp" if not at.root else at.temporary)):
        try:
            entries = list(os.scandir(folder))
        except OSError:
            continue
        for entry in entries:
            match = _FOLDER.fullmatch(entry.name)
            try:
                status = entry.stat(follow_symlinks=False)
                age_s = time.time() - status.st_mtime
            except OSError:
                continue
            mine = match is not None and entry.is_dir(follow_symlinks=False) and status.st_uid == os.getuid()
            if match is None or not mine or (age_s < _YOUNG_S) is not young or f"{entry.path}/" in sockets:
                continue
            owner = match[1] or match[2]
            if owner in living or watchdog.is_held(entry.path):
                continue
            if owner is None and not _was_of_servers(entry.path, status.st_mode, age_s):
                continue
            found.append(entry.path)
    for path in () if young else mpirun.LITTER:
        found += watchdog.find_orphans(f"{at.root}{path[:-1]}", 0.0)
    return sorted(found)


def _was_of_servers(folder: str, mode: int, age_s: float) -> bool:
    """Of a folder with eight letters, which may be anybody's: whether servers in a worker made it, dead or alive."""
    try:
        names = os.listdir(folder)
    except OSError:
        return False
    private = mode & 0o777 == 0o700
    return any(name == "keys" or name.startswith("server-") for name in names) or (
        not names and private and age_s > _DAY_S
    )


def _living(at: Surroundings) -> set[str]:
    """Every job, and every folder of a benchmark, that some process carries in its environment or was started for."""
    found: set[str] = set()
    for name in filter(str.isdigit, at.names("/proc")):
        for file in ("environ", "cmdline"):
            text = "\0" + at.read(f"/proc/{name}/{file}") + "\0"
            found.update(re.findall(f"\0(?:KVMPI_JOB_ID=)?({_JOB})\0", text))
            found.update(re.findall(_BENCH, text))
    return found


def remove_leftovers(at: Surroundings) -> list[str]:
    """Remove what ``find_leftovers`` finds; what has gone."""
    found = find_leftovers(at)
    for path in found:
        if os.path.isdir(path):
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                os.unlink(path)
    return [path for path in found if not os.path.exists(path)]


def leftovers(at: Surroundings) -> Finding:
    """Folders and shared memory of jobs that have died with their launcher and its watchdog."""
    found = find_leftovers(at)
    if not found:
        return Finding("leftovers", "ok", "dead jobs have left nothing here")
    nbytes = sum(_bytes_below(path) for path in found)
    where = ", ".join(sorted({os.path.dirname(path) for path in found}))
    return Finding(
        "leftovers", "warning", f"{len(found)} of dead jobs, {_size(nbytes)}, in {where}",
        f"No process belongs to them any more; the first is {found[0]}. In /dev/shm they take memory.",
        "have them removed:\nkvmpi doctor --clean", {"paths": found, "bytes": nbytes},
    )  # fmt: skip


def _bytes_below(path: str) -> int:
    total = 0
    with contextlib.suppress(OSError):
        total = os.lstat(path).st_size
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_size
    return total


def open_files(at: Surroundings) -> Finding:
    """How many descriptors a process may have: a server has one for each client and for each stranger."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    seen = f"{_count(soft)} open files, at most {_count(hard)}"
    facts = {"soft": soft, "hard": hard}
    if hard != resource.RLIM_INFINITY and hard < FILES_ENOUGH:
        return Finding(
            "open files", "warning", seen, "Servers raise their limit to 65536 where they may; here they may not.",
            "raise the hard limit in /etc/security/limits.conf, or for a container:\n"
            "docker run --ulimit nofile=65536 ...", facts,
        )  # fmt: skip
    return Finding("open files", "ok", seen, facts=facts)


def processes(at: Surroundings) -> Finding:
    """How many processes and threads there may still be; each of them counts as one."""
    limits = {"pids.max of this container": room_for_threads(at.read)}
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft != resource.RLIM_INFINITY and os.geteuid() != 0:  # whom it does not bind
        limits["ulimit -u"] = soft - _own_threads(at)
    which, left = min(limits.items(), key=lambda item: item[1])
    if math.isinf(left):
        return Finding("processes", "ok", "any number of processes and threads")
    need = JOB_THREADS + at.workers * WORKER_THREADS
    seen = f"room for {max(0, left):.0f} more processes and threads, by {which}"
    facts = {"left": int(left), "needed": need}
    if left >= 2 * need:
        return Finding("processes", "ok", seen, facts=facts)
    level: Level = "problem" if left < need else "warning"
    return Finding(
        "processes", level, seen, f"A job of {at.workers} workers needs about {need}, and as many as torch and "
        "DataLoaders take.", "have the limit raised: ulimit -u, or for a container:\n"
        "docker run --pids-limit 4096 ...", facts,
    )  # fmt: skip


def _own_threads(at: Surroundings) -> int:
    """The threads of all processes of this user."""
    total = 0
    for name in filter(str.isdigit, at.names("/proc")):
        status = at.read(f"/proc/{name}/status")
        user = re.search(r"^Uid:\s+(\d+)", status, re.MULTILINE)
        if user is not None and int(user[1]) == os.getuid():
            found = re.search(r"^Threads:\s+(\d+)", status, re.MULTILINE)
            total += int(found[1]) if found else 1
    return total


def locked_memory(at: Surroundings) -> Finding:
    """InfiniBand needs memory that is locked; nothing else here does."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    cards = at.names("/sys/class/infiniband")
    seen = f"{'any amount' if soft == resource.RLIM_INFINITY else _size(soft)} may be locked"
    if not cards:
        return Finding("locked memory", "ok", f"{seen}; no InfiniBand card, so nothing needs it")
    seen += f"; {', '.join(cards)}"
    if soft != resource.RLIM_INFINITY and soft < LOCKED_ENOUGH_BYTES:
        return Finding(
            "locked memory", "warning", seen, "MPI cannot register memory with the card: it fails, or takes TCP.",
            "ulimit -l unlimited; under Slurm: LimitMEMLOCK=infinity for slurmd, "
            "PropagateResourceLimitsExcept=MEMLOCK",
        )  # fmt: skip
    return Finding("locked memory", "ok", seen)


def temporary(at: Surroundings) -> Finding:
    """The folder in which jobs have theirs: sockets, keys, a script for mpirun."""
    folder = at.temporary
    wanted = at.environ.get("TMPDIR", "")
    if wanted and not (os.path.isdir(wanted) and os.access(wanted, os.W_OK)):
        return Finding(
            "temporary folder", "problem", f"TMPDIR={wanted} is no folder that can be written",
            "Python quietly takes another one, other programs fail.", "unset TMPDIR, or make the folder",
        )  # fmt: skip
    if not any(map(at.environ.get, ("TMPDIR", "TEMP", "TMP"))) and folder == os.getcwd() != "/tmp":
        return Finding(
            "temporary folder", "warning", f"{folder}, the current one, as neither /tmp nor /var/tmp can be written",
            "Jobs take another one in every folder that they are started in; a plain mpirun fails.",
            "set TMPDIR to a folder that can be written, with room",
        )  # fmt: skip
    try:
        status = os.statvfs(folder)
    except OSError as error:
        return Finding("temporary folder", "problem", f"{folder}: {error.strerror}", do="set TMPDIR to one that exists")
    free = status.f_bavail * status.f_frsize
    seen = f"{folder} has {_size(free)} free"
    if free < 16 * MIB:
        return Finding(
            "temporary folder", "problem", seen, "Jobs keep their sockets and keys there.", "make room there"
        )
    if status.f_flag & getattr(os, "ST_NOEXEC", 8):
        return Finding(
            "temporary folder", "warning", f"{folder} is mounted noexec",
            "A client on several hosts has a script there, which mpirun runs.",
            "set TMPDIR to a folder from which programs may run:\nexport TMPDIR=$HOME/tmp",
        )  # fmt: skip
    return Finding("temporary folder", "ok", seen)


def gpu(at: Surroundings) -> Finding:
    """CuPy and the devices that it sees. None of it is needed; what is there should work."""
    cards = [name for name in at.names("/dev") if re.fullmatch(r"nvidia\d+", name)]
    try:
        named = next(name for name in ("cupy-cuda13x", "cupy-cuda12x", "cupy-cuda11x", "cupy") if _version(name))
    except StopIteration:
        if cards:
            return Finding(
                "gpu", "skipped", f"{len(cards)} NVIDIA devices, and no CuPy: arrays on a GPU need it",
                do=f"{sys.executable} -m pip install cupy-cuda12x",
            )  # fmt: skip
        return Finding("gpu", "skipped", "no NVIDIA device and no CuPy; kvmpi needs neither")
    program = (
        "import cupy; n = cupy.cuda.runtime.getDeviceCount(); x = int(cupy.arange(1000).sum());"
        "print('devices', n, cupy.cuda.runtime.getDeviceProperties(0)['name'].decode(), x)"
    )
    answer = ask(at, (sys.executable, "-c", program))
    seen = f"{named} {_version(named)}, "
    if answer.status == 0 and answer.out.strip().endswith(" 499500"):
        words = answer.out.split()
        return Finding("gpu", "ok", f"{seen}{words[1]} devices: {' '.join(words[2:-1])}")
    if not cards:
        return Finding("gpu", "skipped", f"{seen}and no NVIDIA device here")
    hidden = at.environ.get("CUDA_VISIBLE_DEVICES")
    means = "" if hidden is None else f"CUDA_VISIBLE_DEVICES={hidden!r} says which are seen."
    do = "nvidia-smi shows the driver's CUDA version; install the CuPy for it, such as cupy-cuda12x"
    return Finding("gpu", "warning", f"{seen}but it {answer.end()}: {answer.last_words(1)}", means, do)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _size(nbytes: int) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= scale:
            return f"{nbytes / scale:.1f}".removesuffix(".0") + f" {unit}"
    return f"{nbytes} bytes"


def _count(limit: int) -> str:
    return "any number" if limit == resource.RLIM_INFINITY else str(limit)
