"""What a simulated job knows of a snapshot that it goes on from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Pair = tuple[int, Any]
"""(client, key)."""
Interval = tuple[int, int]
"""How many pushes there are, at least and at most."""


@dataclass
class Past:
    """What a snapshot may hold, and what it must, as the job knew that has made it.

    Attributes:
        number: of the snapshot.
        begun, done: of a job in rounds: sets of steps that may and that must be in the values.
        step: of other jobs: how far at least the job is that goes on from here.
        written: pushes of that job that may and that must be in each part, since its server has begun to copy.
        mark: what was put back last at least, before that step.
        base: those of the jobs before it, by client, key and chunk; as far as it is known better than from ``before``.
        starts: the elements with which the chunks of each key begin.
    """

    number: int
    begun: dict[Pair, int] = field(default_factory=dict)
    done: dict[Pair, int] = field(default_factory=dict)
    step: int = 0
    mark: int = 0
    written: dict[int, dict[Pair, Interval]] = field(default_factory=dict)
    base: dict[tuple[int, Any, int], Interval] = field(default_factory=dict)
    before: Past | None = None
    starts: dict[Any, list[int]] = field(default_factory=dict)

    def interval(self, client: int, key: Any, chunk: int, part: int) -> Interval:
        """How many pushes of a client are in a chunk, which belongs to this part; of a job that has no rounds."""
        least, most = self.base.get((client, key, chunk), (0, 0))
        if (client, key, chunk) not in self.base and self.before is not None:
            least, most = self.before.interval(client, key, chunk, part)
        done, begun = self.written[part][client, key]
        return least + done, most + begun
