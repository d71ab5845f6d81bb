"""Which rank under an mpirun was the first to fail, in whatever order that is heard."""

from __future__ import annotations

import itertools
import signal

import pytest

from kvmpi.launchers import processes
from kvmpi.launchers.failure import INTEL_KILLED, OPEN_MPI_LOST, Failure, Inquest

KILLED, STOPPED = -int(signal.SIGKILL), -int(signal.SIGTERM)


def first_of(news, status, *, hears_all=False):
    """Whom it is put down to: ``news`` are rank, return code, and what it has raised; then the mpirun ends."""
    inquest = Inquest()
    for rank, code, *raised in news:
        failure, lost = Failure.of(f"worker {rank}", code), raised == ["a peer was lost"]
        if inquest.hear("client 0", failure, code, 0.0, raised=bool(raised), has_lost_a_peer=lost):
            return (inquest.suspect.failure if inquest.suspect else failure).label
    inquest.hear_of_client("client 0", status, hears_all=hears_all)
    return inquest.suspect.failure.label if inquest.suspect else "client 0"


@pytest.mark.parametrize(("news", "status"), [
    ([(3, KILLED)], 137), ([(3, KILLED)], 9), ([(3, KILLED)], 0), ([(3, 7)], 7),
    # Others hear that it is gone, and mpirun stops those that are left.
    ([(3, KILLED), (2, OPEN_MPI_LOST), (0, STOPPED)], OPEN_MPI_LOST),
    ([(3, KILLED), (2, 1, "a peer was lost"), (0, STOPPED)], 1),
    ([(3, KILLED), (1, 1, "a peer was lost"), (2, 1, "a peer was lost"), (0, OPEN_MPI_LOST)], 1),
    # It says so itself, and others are stopped because of it, or lose it.
    ([(3, 1, "ValueError"), (0, STOPPED)], 1), ([(3, 1, "ValueError"), (0, KILLED)], 1),
    ([(3, 1, "ValueError"), (0, 1, "a peer was lost"), (1, STOPPED)], 1),
])  # fmt: skip
def test_the_first_is_found(news, status):
    for order in itertools.permutations(news):
        assert first_of(order, status) == "worker 3", order


def test_who_was_stopped_by_mpirun_is_not_who_has_ended_it():
    assert first_of([(1, STOPPED)], 3) == "client 0"
    assert first_of([(1, KILLED)], 3) == "client 0"
    for order in itertools.permutations([(1, STOPPED), (2, KILLED), (3, 5)]):
        assert first_of(order, 5) == "worker 3", order


def test_intels_mpirun_has_one_status_for_all_who_were_killed():
    """Unless a rank that is not heard has ended with it."""
    assert first_of([(3, KILLED)], INTEL_KILLED, hears_all=True) == "worker 3"
    assert first_of([(3, KILLED)], INTEL_KILLED) == "client 0"
    for order in itertools.permutations([(1, KILLED), (3, INTEL_KILLED)]):
        assert first_of(order, INTEL_KILLED, hears_all=True) == "worker 3", order


def test_a_program_may_end_with_the_status_of_lost_peers_itself():
    assert first_of([(1, OPEN_MPI_LOST), (2, STOPPED)], OPEN_MPI_LOST) == "worker 1"


def test_who_says_something_has_more_time_for_it():
    inquest = Inquest()
    inquest.hear("client 0", Failure.of("worker 1", KILLED), KILLED, 10.0, raised=False, has_lost_a_peer=False)
    assert inquest.suspect.deadline_s == 11.0
    assert not inquest.has_said_why("client 0")
    inquest.hear("client 0", Failure.of("worker 2", 1), 1, 10.5, raised=True, has_lost_a_peer=False)
    assert (inquest.suspect.failure.label, inquest.suspect.deadline_s) == ("worker 2", 15.5)
    assert inquest.has_said_why("client 0")
    assert not inquest.has_said_why("client 1")


def test_ranks_of_another_mpirun_change_nothing():
    inquest = Inquest()
    inquest.hear("client 0", Failure.of("worker 1", KILLED), KILLED, 0.0, raised=False, has_lost_a_peer=False)
    inquest.hear("client 1", Failure.of("worker 5", 1), 1, 0.0, raised=True, has_lost_a_peer=False)
    inquest.hear_of_client("client 1", 1)
    assert inquest.suspect.failure == Failure("worker 1", 137, processes.describe_end(KILLED))


def test_what_a_rank_has_said_stands_when_somebody_is_blamed():
    """Its mpirun may comment on it later, which helps nobody."""
    inquest = Inquest()
    assert not inquest.has_said_why("client 0")
    inquest.hear("client 0", Failure.of("worker 1", 1), 1, 0.0, raised=True, has_lost_a_peer=False)
    inquest.suspect = None
    assert inquest.has_said_why("client 0")
    assert not inquest.has_said_why("client 1")
