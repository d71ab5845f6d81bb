"""How far the clock of one host is ahead of another's: estimated from the times of questions and answers.

Source: Mills, "Internet Time Synchronization: the Network Time Protocol", IEEE Trans. Communications 39(10), 1991.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping


class OffsetEstimate:
    """The offset of a clock, as the question with the shortest way there and back has it.

    What an answer that took ``round_trip_ns`` says is wrong by half of that at most, and by nothing if both ways were
    equally long. Most delays hit few of many messages: so the shortest is the best, and no mean is taken.

    Attributes:
        offset_ns: what has to be added to a time of ours to get the other's; None before the first answer.
        round_trip_ns: of the answer that says so.
    """

    def __init__(self) -> None:
        self.offset_ns: int | None = None
        self.round_trip_ns = 0

    def hear(self, asked_ns: int, answered_ns: int, heard_ns: int) -> bool:
        """An answer has come; whether it is the best so far.

        Args:
            asked_ns, heard_ns: on our clock.
            answered_ns: on the other's.
        """
        round_trip_ns = heard_ns - asked_ns
        if round_trip_ns < 0 or (self.offset_ns is not None and round_trip_ns >= self.round_trip_ns):
            return False
        self.offset_ns, self.round_trip_ns = answered_ns - (asked_ns + heard_ns) // 2, round_trip_ns
        return True


def offsets_to(root: str, measured: Iterable[tuple[str, str, int, int]]) -> Mapping[str, int]:
    """What has to be added to the times of each clock to get times of ``root``'s: along the best measurements.

    Args:
        measured: (clock, other, offset of ``other`` against ``clock`` in ns, round trip in ns).
    Returns:
        Clocks that no measurement connects with ``root`` are missing.
    """
    edges: dict[str, list[tuple[int, str, int]]] = {}
    for clock, other, offset_ns, round_trip_ns in measured:
        edges.setdefault(other, []).append((round_trip_ns, clock, offset_ns))
        edges.setdefault(clock, []).append((round_trip_ns, other, -offset_ns))
    found, reached = {root: 0}, {root: 0}  # offsets, and the round trips that they took in all
    open_ends = [root]
    while open_ends:
        here = min(open_ends, key=reached.__getitem__)
        open_ends.remove(here)
        for round_trip_ns, clock, offset_ns in edges.get(here, []):
            so_far = reached[here] + round_trip_ns
            if clock not in reached or so_far < reached[clock]:
                reached[clock], found[clock] = so_far, found[here] + offset_ns
                open_ends.append(clock)
    return found
