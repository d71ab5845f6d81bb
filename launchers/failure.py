"""What went wrong first in a job, and whom it is put down to."""

from __future__ import annotations

import enum
import signal
from dataclasses import dataclass

from kvmpi.launchers import processes

#: What Open MPI's ranks end with when one on another host has died; others may call ``sys.exit(14)``.
OPEN_MPI_LOST = 14
#: For a rank that has raised to run its exit handlers, and for an mpirun to say why a rank of it was killed.
_EXIT_S, _VERDICT_S = 5.0, 1.0
#: What Intel's mpirun ends with when a rank was killed; a rank may call ``exit(-1)``, too.
INTEL_KILLED = 255
#: Statuses of an mpirun that say nothing; hydra gives the number of a signal without the 128.
_MUTE = {0, *(offset + number for number in (signal.SIGTERM, signal.SIGKILL) for offset in (0, 128))}


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


class Evidence(enum.IntEnum):
    """That a rank was the first to fail under its mpirun."""

    FOLLOWS = 1  # it has failed because a peer was gone, or by the signal with which mpirun stops ranks
    KILLED = 2  # mpirun kills only those who do not heed that signal
    SAID_SO = 3


@dataclass
class Suspect:
    """A rank that has failed under an mpirun, until it is known whether it was the first there."""

    failure: Failure
    client: str  # label of its mpirun
    deadline_s: float  # time.monotonic() after which it is held responsible in any case
    evidence: Evidence
    has_lost_a_peer: bool
    followed: bool  # others have lost a peer


class Inquest:
    """Which rank under an mpirun was the first to fail; what is heard of them may come in any order.

    Attributes:
        suspect: it is not settled yet.
    """

    def __init__(self) -> None:
        self.suspect: Suspect | None = None
        self._explained: set[str] = set()

    def has_said_why(self, client: str) -> bool:
        """Whether a rank of that mpirun has shown its own error."""
        return client in self._explained

    def _evidence(self, client: str) -> int:
        return self.suspect.evidence if self.suspect is not None and self.suspect.client == client else 0

    def hear(
        self, client: str, failure: Failure, returncode: int, now_s: float, *, raised: bool, has_lost_a_peer: bool
    ) -> bool:
        """Take note of the end of a rank, or of what it has ``raised`` before; whether that settles it."""
        has_lost_a_peer |= returncode == OPEN_MPI_LOST
        if has_lost_a_peer or returncode == -signal.SIGTERM:
            evidence = Evidence.FOLLOWS
        elif raised or returncode == -signal.SIGKILL:
            evidence = Evidence.SAID_SO if raised else Evidence.KILLED
            if raised:
                self._explained.add(client)
        else:
            # A rank that was killed in the same client may well be the victim of this one, not the other way round.
            if returncode and 0 < self._evidence(client) < Evidence.SAID_SO:
                self.suspect = None
            return returncode != 0
        before = self.suspect
        if before is None or (before.client == client and evidence > before.evidence):
            deadline_s = now_s + (_EXIT_S if evidence == Evidence.SAID_SO else _VERDICT_S)
            followed = before is not None and (before.followed or before.has_lost_a_peer)
            self.suspect = Suspect(failure, client, deadline_s, evidence, has_lost_a_peer, followed)
        elif before.client == client and before.failure.label != failure.label:
            before.followed |= has_lost_a_peer
        return False

    def hear_of_client(self, client: str, status: int, *, hears_all: bool = False) -> None:
        """The mpirun itself has ended: with what the first rank has ended with, if that says anything.

        Args:
            hears_all: all its ranks report here how they end, so that ``hear`` knows of all statuses.
        """
        found = self.suspect
        if found is None or found.client != client or found.evidence == Evidence.SAID_SO or found.followed:
            return
        if hears_all and status == INTEL_KILLED:
            return
        if status not in _MUTE and status != found.failure.status:
            self.suspect = None
