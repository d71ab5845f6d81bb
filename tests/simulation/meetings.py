"""What must hold at barriers in a simulated job: nobody passes one to which others are still to come."""

from __future__ import annotations

from simulation.network import Violation
from simulation.oracle import Oracle

Meeting = tuple[int, int]
"""A barrier: the step that it comes after, and its number among those that do."""

#: After all barriers of a step.
_LAST = 1 << 30


class Meetings:
    """Which barriers clients have come to, whichever process of them.

    Attributes:
        finished: clients that nobody waits for because they have joined.
    """

    def __init__(self, oracle: Oracle) -> None:
        self._oracle = oracle
        self._come: dict[int, Meeting] = {}
        # Who was away when a client was let go, by client: it may hear of that when others are back.
        self._without: dict[int, set[int]] = {}
        # Whom somebody has passed a barrier without: it is over, and nobody who is back waits there for one who is.
        self._passed_without: dict[Meeting, set[int]] = {}
        self.finished: set[int] = set()

    def come(self, client: int, where: Meeting) -> None:
        """A client is at a barrier."""
        self._come[client] = max(where, self._come.get(client, where))
        self._without[client] = set()

    def let_go(self, client: int) -> None:
        """The scheduler says to a client that it has passed the barrier where it is."""
        self._without.setdefault(client, set()).update(self._oracle.gone)

    def skip(self, client: int, step: int) -> None:
        """A client goes on after ``step``, and does not come to barriers before."""
        self.come(client, (step, _LAST))

    def check_passed(self, client: int, where: Meeting) -> None:
        """A client has passed a barrier."""
        without = self._passed_without.setdefault(where, set())
        without |= self._without[client]
        for other in range(self._oracle.num_clients) if client not in self.finished else ():
            needed = other not in self.finished | self._oracle.gone | without
            if needed and self._come.get(other, (-1, 0)) < where:
                raise Violation(f"client {client} passes barrier {where}, and client {other} has not come to it")
