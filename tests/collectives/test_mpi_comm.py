"""What the MPI communicator makes of MPI's answers, with a stand-in for mpi4py."""

from __future__ import annotations

import faulthandler
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvmpi.collectives import mpi_comm
from kvmpi.collectives.waiting import wait_all
from kvmpi.deadline import Deadline
from kvmpi.errors import KVError, KVTimeoutError, PeerLostError


class MpiError(Exception):
    """In the place of ``MPI.Exception``."""

    def Get_error_class(self) -> int:
        return -1


class StandIn:
    """An ``MPI.Comm`` whose transfers are done when ``answers`` says so; an exception in it is raised."""

    def __init__(self, *answers: Any) -> None:
        self._answers = list(answers)

    def Get_rank(self) -> int:
        return 0

    def Get_size(self) -> int:
        return 2

    def Isend(self, *_: object) -> Any:
        return self

    Irecv = Isend

    def Test(self) -> bool:
        answer = self._answers.pop(0) if self._answers else False
        if isinstance(answer, Exception):
            raise answer
        return answer


def comm_of(stand_in: StandIn) -> mpi_comm.MpiComm:
    return mpi_comm.MpiComm(SimpleNamespace(BYTE="byte", Exception=MpiError, ERR_TRUNCATE=15), stand_in, None, None)


def test_an_error_of_mpi_is_a_lost_peer() -> None:
    request = comm_of(StandIn(False, MpiError("MPI_ERR_PROC_FAILED"))).irecv(np.zeros(4, "u1"), 1, 0)
    with pytest.raises(PeerLostError, match="MPI_ERR_PROC_FAILED"):
        wait_all([request], Deadline(5.0), lambda: "never")


def test_a_limit_of_threads_is_not_taken_for_a_missing_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("unable to start watchdog thread")  # as CPython says it

    monkeypatch.setattr(faulthandler, "dump_traceback_later", refuse)
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    with pytest.raises(KVError, match=r"unable to start watchdog thread\); raise the limit of processes") as caught:
        mpi_comm.world(5.0)
    assert "pip install" not in str(caught.value)


def test_an_error_at_the_start_is_a_lost_peer() -> None:
    stand_in = StandIn()
    stand_in.Isend = lambda *_: (_ for _ in ()).throw(MpiError("MPI_ERR_COMM"))  # type: ignore[method-assign]
    with pytest.raises(PeerLostError, match="MPI_ERR_COMM"):
        comm_of(stand_in).isend(np.zeros(4, "u1"), 1, 0)


def test_a_buffer_lives_until_its_transfer_is_done() -> None:
    """After a timeout nobody refers to it but MPI, which may still write there."""
    before = set(mpi_comm._under_way)
    request = comm_of(StandIn()).irecv(np.zeros(4, "u1"), 1, 0)
    with pytest.raises(KVTimeoutError):
        wait_all([request], Deadline(0.01), lambda: "nothing came")
    assert mpi_comm._under_way - before == {request}
    mpi_comm._under_way.discard(request)
    done = comm_of(StandIn(False, True)).isend(np.zeros(4, "u1"), 1, 0)
    wait_all([done], Deadline(5.0), lambda: "never")
    assert done.test(), "what is done stays done"
    assert mpi_comm._under_way == before


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, False),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, True),
        ({"OMPI_COMM_WORLD_SIZE": "1"}, False),
        ({"PMI_SIZE": "2"}, True),
        ({"MV2_COMM_WORLD_SIZE": "2"}, True),
        ({"SLURM_NTASKS": "8"}, False),
        ({"SLURM_NTASKS": "8", "PMIX_RANK": "0"}, True),
    ],
)
def test_started_by_mpi(monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], expected: bool) -> None:
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS", "PALS_NRANKS", "PMIX_RANK", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert mpi_comm.started_by_mpi() is expected
