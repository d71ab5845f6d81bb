"""What went wrong first in a job, and whom it is put down to."""

from __future__ import annotations

from dataclasses import dataclass

from kvmpi.launchers import processes


@dataclass(frozen=True)
class Failure:
    """The first thing that went wrong."""

    label: str  # who: "worker 3"
    status: int  # exit status of the whole job
    text: str  # what happened, as the end of a sentence

    @classmethod
    def of(cls, label: str, returncode: int) -> Failure:
        """The failure of a process that has ended with ``returncode`` (negative: by a signal)."""
        return cls(label, processes.exit_status(returncode), processes.describe_end(returncode))


@dataclass(frozen=True)
class Suspect:
    """A rank that has failed under an mpirun, until it is known whether it was the first there."""

    failure: Failure
    client: str  # label of its mpirun
    deadline: float  # time.monotonic() after which it is held responsible in any case
    certain: bool  # it said so itself; otherwise a signal ended it, perhaps because mpirun was stopping all ranks
