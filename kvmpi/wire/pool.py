"""Which ranges of a block of memory are taken: arithmetic without memory."""

from __future__ import annotations

import bisect

#: Ranges begin at cache lines, and so at a multiple of every item size.
ALIGN_BYTES = 64


class Pool:
    """Half-open ranges of ``range(start, stop)``, which never overlap.

    The lowest range that is large enough is taken first: what was given back a moment ago is still in the cache.
    """

    def __init__(self, start: int, stop: int) -> None:
        self._free = [(-(-start // ALIGN_BYTES) * ALIGN_BYTES, stop)]  # (start, stop), in order, never touching
        self._taken: dict[int, int] = {}  # start: stop

    @property
    def num_taken(self) -> int:
        """How many ranges are taken."""
        return len(self._taken)

    @property
    def free_ranges(self) -> list[tuple[int, int]]:
        """What is not taken, as (start, stop)."""
        return list(self._free)

    def take(self, nbytes: int) -> int | None:
        """Where a range of at least ``nbytes`` > 0 begins; None if there is no room."""
        length = -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES
        for i, (start, stop) in enumerate(self._free):
            if start + length <= stop:
                self._free[i : i + 1] = [(start + length, stop)] if start + length < stop else []
                self._taken[start] = start + length
                return start
        return None

    def give(self, start: int) -> None:
        """The range that begins at ``start``, and is taken, is free again."""
        stop = self._taken.pop(start)
        i = bisect.bisect(self._free, (start, stop))
        if i < len(self._free) and self._free[i][0] == stop:
            stop = self._free.pop(i)[1]
        if i > 0 and self._free[i - 1][1] == start:
            i -= 1
            start = self._free.pop(i)[0]
        self._free.insert(i, (start, stop))
