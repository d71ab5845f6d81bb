"""Jobs that measure: started by the parent, told what to do in turns, and ended with it."""

from __future__ import annotations

import json
import os
import secrets
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from kvmpi.collectives import mpi_comm
from kvmpi.errors import ConfigError, KVError
from kvmpi.launchers import job as launcher_jobs
from kvmpi.launchers import mpirun, processes
from kvmpi.launchers.cores import THREADS, YIELD, threads
from kvmpi.launchers.mpirun import LITTER, MPI
from kvmpi.launchers.signals import SignalCatcher
from kvmpi.machine import num_cores

GRACE_S = 5.0  # between SIGTERM and SIGKILL
_FINALIZE_S = 30.0  # for a job to end when it was told to
_SILENCE_S = 1800.0  # what a job may take for a row, the slowest on the largest arrays included
_SHM = "/dev/shm"
_LONGEST_TMPDIR = 40  # characters; unix sockets below it must stay under 108
#: What every rank of an MPI job runs, before the folder of the job.
RANK_PROGRAM = (sys.executable, launcher_jobs.RANK_MAIN, "-m", "kvmpi.benchmarks.ranks")


class JobFailedError(KVError):
    """A job has ended before it was told to."""


class InterruptedBySignal(Exception):
    """The user wants to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Plan(Protocol):
    """What the processes of a job have to know."""

    @property
    def num_ranks(self) -> int: ...

    def to_json(self) -> str: ...


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """A job to start, whose ``plan.num_ranks`` processes are told what to do.

    Its folder has ``plan.json``, and FIFOs: ``ask-RANK`` for each of these, ``answers-RANK`` for the first
    ``num_answering`` of them.

    Attributes:
        name: for messages.
        command: from the folder of the job to the words that start it.
        settings: environment variables, which beat the user's.
    """

    name: str
    plan: Plan
    command: Callable[[str], list[str]]
    num_answering: int = 1
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def wants_shm(self) -> bool:
        """Whether it puts shared memory into a folder of the parent's."""
        return False

    def environment(self, users: Mapping[str, str], folder: str, shm: str) -> dict[str, str]:
        """That of the job, from the user's; ``shm`` is the folder for shared memory, or empty."""
        return {**users, **self.settings}


@dataclass(frozen=True, kw_only=True)
class MpiSpec(JobSpec):
    """A job of the rank program under an mpirun, whose rank 0 answers.

    Attributes:
        yields: whether ranks of Open MPI yield while they wait; None leaves that to the launcher.
        on_hosts: the job runs on other hosts than its mpirun, and gets no shared folder for its memory.
    """

    mpi: MPI
    yields: bool | None = None
    on_hosts: bool = False

    @property
    def wants_shm(self) -> bool:
        return self.mpi.is_open_mpi

    def environment(self, users: Mapping[str, str], folder: str, shm: str) -> dict[str, str]:
        cores = num_cores()
        num_ranks = self.plan.num_ranks
        # Not measured, but a program that is: with more threads than cores everything would be slow.
        env = {THREADS: threads(cores, num_ranks), "PYTHONUNBUFFERED": "1"}
        shm = "" if self.on_hosts else shm
        env |= self.mpi.env(folder, shm, crowded=num_ranks > cores, one_host=not self.on_hosts)
        merged: dict[str, str] = {**env, **users, **self.settings}
        for name in ("MPI4PY_LIBMPI",):  # each job has its own library
            if name in env:
                merged[name] = env[name]
        if self.yields is not None:
            merged[YIELD] = "1" if self.yields else "0"
        return merged


class RankJob:
    """A running job."""

    def __init__(self, spec: JobSpec, process: subprocess.Popen[bytes], asks: list[int], answers: list[int]) -> None:
        self.name, self.process = spec.name, process
        self.num_answering = len(answers)
        self._asks = asks
        self._pending = dict.fromkeys(answers, b"")

    def tell(self, command: str) -> None:
        for fd in self._asks:
            os.write(fd, f"{command}\n".encode())

    def events(self) -> list[dict[str, Any]]:
        """What has been answered since the last call."""
        found: list[bytes] = []
        for fd in self._pending:
            while chunk := _drain(fd):
                self._pending[fd] += chunk
            *lines, self._pending[fd] = self._pending[fd].split(b"\n")
            found += lines
        return [json.loads(line) for line in found]


class Stage:
    """Jobs that take turns; a context manager, after which no process of them is left.

    ``say`` shows a line of a job's output.
    """

    def __init__(self, specs: Sequence[JobSpec], signals: SignalCatcher, say: Callable[[str], None]) -> None:
        self._specs, self._signals, self._say = specs, signals, say
        self.jobs: list[RankJob] = []
        self._selector = selectors.DefaultSelector()
        self._fds: list[int] = []
        self._outputs: dict[int, bytes] = {}
        self._ending = False

    def __enter__(self) -> Stage:
        tmpdir = tempfile.gettempdir()
        if len(tmpdir) > _LONGEST_TMPDIR and os.access("/tmp", os.W_OK):
            tmpdir = "/tmp"
        self._id = secrets.token_hex(8)
        self._folder = Path(tempfile.mkdtemp(prefix="kvmpi-bench-", dir=tmpdir))
        self._shm = ""
        if os.access(_SHM, os.W_OK) and any(spec.wants_shm for spec in self._specs):
            self._shm = tempfile.mkdtemp(prefix="kvmpi-bench-", dir=_SHM)
        self._watchdog = processes.Watchdog(self._id, (str(self._folder), self._shm, *LITTER))
        self._selector.register(self._signals.wakeup_fd, selectors.EVENT_READ, None)
        try:
            for spec in self._specs:
                self.jobs.append(self._start(spec))
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    # ---- turns

    def ask(self, job: RankJob, command: str) -> Iterator[dict[str, Any]]:
        """Have all processes of ``job`` carry out ``command`` while the other jobs wait; their events.

        Raises:
            JobFailedError: the job has ended instead, or hangs.
            InterruptedBySignal: Ctrl-C and the like.
        """
        job.tell(command)
        left = job.num_answering
        end_s = time.monotonic() + _SILENCE_S
        while True:
            for event in job.events():
                end_s = time.monotonic() + _SILENCE_S
                if event["kind"] == "done":
                    left -= 1
                else:
                    yield event
            if not left:
                return
            if job.process.poll() is not None:
                self._show_rest()
                raise JobFailedError(f"the job under {job.name} {processes.describe_end(job.process.returncode)}")
            if (left_s := end_s - time.monotonic()) <= 0:
                raise JobFailedError(f"the job under {job.name} has said nothing for {_SILENCE_S / 60:.0f} minutes")
            self._look(left_s)

    def drop(self, job: RankJob) -> None:
        """Go on without a job."""
        self._ending = True
        self._kill([job])
        self.jobs.remove(job)
        self._ending = False

    def finish(self) -> None:
        """All is measured: let the jobs end.

        Raises:
            JobFailedError: one could not do that properly.
        """
        for job in self.jobs:
            job.tell("quit")
        end_s = time.monotonic() + _FINALIZE_S
        for job in self.jobs:
            while job.process.poll() is None and time.monotonic() < end_s:
                self._look(end_s - time.monotonic())
            status = job.process.poll()
            if status is None:
                raise JobFailedError(f"the job under {job.name} has measured everything, but does not end")
            if status:
                raise JobFailedError(
                    f"the job under {job.name} {processes.describe_end(status)} after everything was measured"
                )

    def _look(self, timeout_s: float | None) -> bool:
        """Wait for something to happen, and show what jobs print; whether they have printed."""
        ready = [key for key, _ in self._selector.select(timeout_s)]
        for key in ready:
            if key.data is None:
                _drain(key.fd)
            elif key.data == "output":
                self._read_output(key.fd)
        if self._signals.caught:
            raise InterruptedBySignal(self._signals.caught[0])
        return any(key.data == "output" for key in ready)

    def _show_rest(self) -> None:
        """The last words of a job, which explain its end."""
        for _ in range(64):
            if not self._look(0):
                break

    def _read_output(self, fd: int) -> None:
        chunk = _drain(fd)
        *lines, self._outputs[fd] = (self._outputs[fd] + chunk).split(b"\n")
        if not chunk:
            lines = [self._outputs[fd]] if self._outputs[fd] else []
            self._selector.unregister(fd)
        for line in lines:
            if not self._ending:
                self._say(line.decode(errors="replace"))

    # ---- start and end

    def _start(self, spec: JobSpec) -> RankJob:
        number = len(self.jobs)
        folder = self._folder / str(number)
        folder.mkdir()
        (folder / "plan.json").write_text(spec.plan.to_json())
        asks = [self._fifo(folder / f"ask-{rank}", write=True) for rank in range(spec.plan.num_ranks)]
        answers = [self._fifo(folder / f"answers-{rank}", write=False) for rank in range(spec.num_answering)]
        for fd in answers:
            self._selector.register(fd, selectors.EVENT_READ, "answers")
        read_end, write_end = os.pipe()
        self._fds.append(read_end)
        command = spec.command(str(folder))
        try:
            process = processes.start(command, self._env(spec, folder), stdout=write_end, stderr=write_end)
        except OSError as error:
            raise JobFailedError(f"{command[0]} could not be started: {error.strerror}") from None
        finally:
            os.close(write_end)
        self._watchdog.add(process.pid)
        self._outputs[read_end] = b""
        self._selector.register(read_end, selectors.EVENT_READ, "output")
        return RankJob(spec, process, asks, answers)

    def _fifo(self, path: Path, *, write: bool) -> int:
        """Our end of a new FIFO. We hold both, so that neither ends before or without us."""
        os.mkfifo(path, 0o600)
        read_end = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        write_end = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        self._fds += [read_end, write_end]
        return write_end if write else read_end

    def _env(self, spec: JobSpec, folder: Path) -> dict[str, str]:
        users = mpirun.clean({k: v for k, v in os.environ.items() if k not in launcher_jobs.OWNED})
        return {**spec.environment(mpirun.with_home(users), str(folder), self._shm), "KVMPI_JOB_ID": self._id}

    def _close(self) -> None:
        self._ending = True
        self._kill(self.jobs)
        self._watchdog.finish()
        self._selector.close()
        for fd in self._fds:
            os.close(fd)

    def _kill(self, jobs: Sequence[RankJob]) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            for job in jobs:
                processes.signal_group(job.process, number)
            end_s = time.monotonic() + GRACE_S
            while any(job.process.poll() is None for job in jobs) and time.monotonic() < end_s:
                try:
                    self._look(0.05)
                except InterruptedBySignal:
                    time.sleep(0.02)


def refuse_ranks(benchmark: str) -> None:
    """For benchmarks that start jobs of their own, of which each rank of another job would start one.

    Raises:
        ConfigError: this process is such a rank.
    """
    if mpi_comm.started_by_mpi() or os.environ.get("KVMPI_ROLE"):
        raise ConfigError(f"kvmpi bench {benchmark} starts its jobs itself; run it outside of mpirun and kvmpi run")


def _drain(fd: int) -> bytes:
    try:
        return os.read(fd, 1 << 16)
    except BlockingIOError:
        return b""


def local_command(mpi: MPI, num_ranks: int) -> Callable[[str], list[str]]:
    """All ranks on this host."""
    # The variable keeps hydra from leaving a file behind; the ranks would look for that file.
    words = ["env", "-u", "HWLOC_XMLFILE"] if mpi.kind == "mpich" else []
    return lambda folder: [*mpi.command(num_ranks, local=True), *words, *RANK_PROGRAM, folder]


def find_mpich(given: str | None, environ: Mapping[str, str]) -> MPI | None:
    """An MPICH besides the MPI in use: ``given`` is its mpiexec, or the interpreter of an environment that has it.

    Raises:
        ConfigError: ``given`` is no such thing.
    """
    if given:
        beside = Path(shutil.which(given) or given).absolute().parent
        tried = [given] if Path(given).name.startswith(("mpiexec", "mpirun")) else []
        tried += [str(beside / name) for name in ("mpiexec.hydra", "mpiexec")]
        path = next(filter(None, map(shutil.which, tried)), None)
        if path is None:
            raise ConfigError(f"--mpich {given}: no mpiexec beside it; pip install mpich in that environment")
        if mpirun.detect_kind(path, environ) != "mpich":
            raise ConfigError(f"--mpich {given}: {path} is not MPICH's mpiexec")
        return MPI(path, "mpich")
    neighbour = Path(sys.executable).parent / "mpiexec.hydra"
    found = shutil.which(str(neighbour)) or shutil.which("mpiexec.mpich", path=environ.get("PATH"))
    return MPI(found, "mpich") if found else None
