"""Which processes of a job may die, and are started again: a policy without processes."""

from __future__ import annotations

import math
import signal
from collections.abc import Collection
from dataclasses import dataclass, field

#: What a server ends with when the job has taken it for lost (EX_TEMPFAIL): it may come back as a new one.
OUT_OF_THE_JOB = 75
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 10.0
#: A process that lives, and counts as lost, ends by itself within this time, or does not.
_PATIENCE_S = 5.0


@dataclass
class Restarts:
    """Servers whose values others hold too, clients, and the scheduler are started again.

    Each ``most`` times, after pauses that double. ``silence_s``: after which one counts as lost that is to be heard.
    """

    most: int
    replicas: int
    on_client_loss: str = "fail"
    silence_s: float = math.inf
    _due: dict[str, float] = field(default_factory=dict)
    _count: dict[str, int] = field(default_factory=dict)
    _unheard: list[tuple[float, str, object]] = field(default_factory=list)

    def bears(self, label: str, returncode: int) -> bool:
        """Whether the job can go on without a process that has failed so."""
        role = label.split()[0]
        if role == "server":
            # What is wrong with its settings would only be wrong again.
            return self.replicas > 0 and (returncode < 0 or returncode == OUT_OF_THE_JOB)
        if role == "scheduler":
            return self.can_restart(label)
        waits = self.on_client_loss == "wait" and self.can_restart(label)
        return waits or self.on_client_loss == "shrink"

    def advice(self, label: str, status: int) -> str:
        """How others could have gone on without ``label``, which has ended the job; empty if that was its own error."""
        killed = 0 < status - 128 < signal.NSIG and status != 128 + signal.SIGINT  # which was somebody's wish
        if label.split()[0] not in ("worker", "client") or not killed or self.on_client_loss != "fail":
            return ""
        return (
            "set KVMPI_ON_CLIENT_LOSS=shrink to go on without a client that dies, also where stores are asynchronous; "
            "--restart N starts it again"
        )

    def can_restart(self, label: str) -> bool:
        """Whether ``label`` may be started once more."""
        return self._count.get(label, 0) < self.most

    def plan(self, label: str, now_s: float, *, is_wanted: bool = True) -> str:
        """``label`` has died, and the job can bear it: what becomes of it, as the end of a sentence.

        Args:
            is_wanted: there is something left for it to do.
        """
        count = self._count.get(label, 0)
        server = label.startswith("server")
        if not self.can_restart(label) or not is_wanted:
            return f"the job goes on without it{': others hold what it held' if server else ''}"
        self._count[label] = count + 1
        self._due[label] = now_s + min(_FIRST_PAUSE_S * 2.0**count, _LONGEST_PAUSE_S)
        return f"it is started again ({count + 1} of {self.most})"

    @property
    def planned(self) -> Collection[str]:
        """Those that are about to be started again."""
        return self._due.keys()

    def left_s(self, now_s: float) -> float | None:
        """Seconds until something is to be started, or to be ended; None if nothing is."""
        times_s = [*self._due.values(), *(at_s for at_s, _, _ in self._unheard)]
        return max(0.0, min(times_s) - now_s) if times_s else None

    def take_due(self, now_s: float) -> list[str]:
        """What is to be started now; it is not asked for again."""
        due = [label for label, at_s in self._due.items() if at_s <= now_s]
        for label in due:
            del self._due[label]
        return due

    def hear(self, label: str, process: object, now_s: float) -> None:
        """``process`` has given a sign of life, and will give others."""
        self._unheard = [waiting for waiting in self._unheard if waiting[1] != label]
        self.note_unheard(label, process, now_s + self.silence_s)

    def note_unheard(self, label: str, process: object, now_s: float) -> None:
        """``process`` counts as lost, at that time, because nobody hears it.

        Without a server, or a scheduler, that nobody can replace, others find out by themselves; without a client there
        may be no others who would.
        """
        if self.bears(label, -signal.SIGKILL) or label.split()[0] in ("worker", "client"):
            self._unheard.append((now_s + _PATIENCE_S, label, process))

    def take_unheard(self, now_s: float) -> list[tuple[str, object]]:
        """Who is to be ended now, should it still be there: it is stopped, or cannot be reached. Where the job does not
        go on without it, if it is stopped: a store that was aborted counts as lost, too, in a process that is well."""
        due = [(label, process) for at_s, label, process in self._unheard if at_s <= now_s]
        self._unheard = [waiting for waiting in self._unheard if waiting[0] > now_s]
        return due
