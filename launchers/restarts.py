"""Which processes of a job are started again when they die, and when: a policy without processes."""

from __future__ import annotations

from dataclasses import dataclass, field

#: What a server ends with when the job has taken it for lost (EX_TEMPFAIL): it may come back as a new one.
OUT_OF_THE_JOB = 75
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 10.0


@dataclass
class Restarts:
    """Servers whose values others hold too are started again, each ``most`` times, after pauses that double."""

    most: int
    replicas: int
    _due: dict[str, float] = field(default_factory=dict)
    _count: dict[str, int] = field(default_factory=dict)

    def bears(self, role: str, returncode: int) -> bool:
        """Whether the job can go on without a process that has ended so. A mistake would only be made again."""
        return role == "server" and self.replicas > 0 and (returncode < 0 or returncode == OUT_OF_THE_JOB)

    def plan(self, label: str, now_s: float) -> str:
        """``label`` has died and is not missed: what becomes of it, as the end of a sentence."""
        count = self._count.get(label, 0)
        if count >= self.most:
            return "others hold what it held, the job goes on without it"
        self._count[label] = count + 1
        self._due[label] = now_s + min(_FIRST_PAUSE_S * 2.0**count, _LONGEST_PAUSE_S)
        return f"others hold what it held, it is started again ({count + 1} of {self.most})"

    def left_s(self, now_s: float) -> float | None:
        """Seconds until something is to be started; None if nothing is."""
        return max(0.0, min(self._due.values()) - now_s) if self._due else None

    def take_due(self, now_s: float) -> list[str]:
        """What is to be started now; it is not asked for again."""
        due = [label for label, at_s in self._due.items() if at_s <= now_s]
        for label in due:
            del self._due[label]
        return due
