"""How many clients have pushed a chunk how often, so that the slowest is known without a look at all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

#: How far all are where there is nobody.
FURTHEST = 1 << 62


class Standing:
    """By number of pushes, how many of the clients that take part have made as many.

    Attributes:
        as_of: what it is of; of something else it is not true any more.
        slowest: the fewest that any of them has made.
        seen: what ``ends`` was when somebody looked last who waits for others.
    """

    __slots__ = ("_counts", "as_of", "seen", "slowest")

    def __init__(self, as_of: tuple[int, int], clocks: Iterable[int]) -> None:
        self.as_of, self._counts = as_of, Counter(clocks)
        self.slowest = min(self._counts, default=FURTHEST)
        self.seen: tuple[int, bool, int] | None = None

    def move(self, clock: int) -> None:
        """One that had made so many pushes has made one more."""
        self._counts[clock] -= 1
        self._counts[clock + 1] += 1
        if not self._counts[clock]:
            del self._counts[clock]
            self.slowest = min(self._counts)

    @property
    def ends(self) -> tuple[int, bool, int]:
        """The fewest pushes, whether only one client has made so few, and the next that there are."""
        after = min((clock for clock in self._counts if clock > self.slowest), default=FURTHEST)
        return self.slowest, self._counts[self.slowest] == 1, after

    def slowest_but(self, clock: int) -> int:
        """The fewest that any of them has made but one, who has made ``clock``."""
        slowest, is_one, after = self.ends
        return after if clock == slowest and is_one else slowest
