"""Which gradients travel together, and when a bucket may leave: arithmetic that knows neither torch nor a store."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvmpi.errors import KVError

#: Large enough that a call's fixed cost is small beside its bytes, small enough that there are several to overlap.
BUCKET_BYTES = 2 << 20
#: Of the first bucket, with which exchanging begins, and of the last, which nothing is left to hide.
EDGE_BYTES = 1 << 20
#: So few travel together: a call costs more than their way.
SMALL_BYTES = 256 << 10


def complete_order(seen: Iterable[int], count: int) -> list[int]:
    """All of ``range(count)``: as ``seen``, then what is missing there from the last to the first.

    Backward passes reach parameters about in the reverse of the order in which a model defines them.
    """
    first = dict.fromkeys(index for index in seen if 0 <= index < count)
    return [*first, *(index for index in reversed(range(count)) if index not in first)]


def plan(
    order: Sequence[int], nbytes: Sequence[int], bucket_bytes: int = BUCKET_BYTES, edge_bytes: int = EDGE_BYTES
) -> list[tuple[int, ...]]:
    """Cut ``order`` into buckets, each a stretch of it.

    A bucket has at most ``bucket_bytes``, the first and the last at most ``edge_bytes``, or a single member. The last
    is filled from behind, the others from the front; it has at most a quarter of all bytes, so that there is something
    to send before a small model's backward is over.

    Args:
        order: indices in the order in which their gradients are expected.
        nbytes: by index.
    """
    edge_bytes = min(edge_bytes, bucket_bytes)
    all_bytes = sum(nbytes[index] for index in order)
    start, room = len(order), edge_bytes
    if all_bytes > min(edge_bytes, SMALL_BYTES):
        room = min(room, all_bytes // 4)
    while start and (start == len(order) or nbytes[order[start - 1]] <= room):
        start -= 1
        room -= nbytes[order[start]]
    found: list[list[int]] = []
    room = 0
    for index in order[:start]:
        if not found or nbytes[index] > room:
            room = bucket_bytes if found else edge_bytes
            found.append([])
        found[-1].append(index)
        room -= nbytes[index]
    return [tuple(bucket) for bucket in [*found, list(order[start:])] if bucket]


def schedule(ready_s: Sequence[float], cost_s: Sequence[float]) -> list[int]:
    """The order in which buckets leave so that those that come back first are those that the next forward needs first.

    Buckets fill in the reverse of the order in which a forward needs them. One after the other leaves; whenever the way
    is free it is the one needed first of those that are full. So the last layers', which fill first, leave at once as
    long as nothing better is to be had, and else wait behind the first layers' (priorities as of Jayarajan et al.,
    "Priority-based Parameter Propagation", MLSys 2019, fixed beforehand because all ranks have to agree on the order).

    Args:
        ready_s: by bucket, when it is full.
        cost_s: by bucket, how long it is under way.
    """
    left, found, now_s = set(range(len(ready_s))), list[int](), 0.0
    while left:
        now_s = max(now_s, min(ready_s[number] for number in left))
        number = max(number for number in left if ready_s[number] <= now_s)
        left.remove(number)
        found.append(number)
        now_s += cost_s[number]
    return found


class Progress:
    """One pass over a plan: gradients arrive in any order, buckets leave in a fixed one.

    Args:
        order: in which they leave; by default that of the plan.
    """

    def __init__(self, buckets: Sequence[Sequence[int]], order: Sequence[int] | None = None) -> None:
        self._buckets = buckets
        self._order = list(range(len(buckets)) if order is None else order)
        self._absent = [set(bucket) for bucket in buckets]
        self._next = 0
        #: By gradient, what its bucket waits for: one set for all of a bucket. Who is called for every gradient may
        #: take it out there himself, and ask ``leaving`` when nothing is left.
        self.missing = {index: absent for bucket, absent in zip(buckets, self._absent, strict=True) for index in bucket}

    def arrive(self, index: int) -> list[int]:
        """The buckets that may leave now that the gradient ``index`` is there.

        Raises:
            KVError: it is there already.
        """
        missing = self.missing[index]
        if index not in missing:
            raise KVError(f"gradient {index} arrives twice in one pass")
        missing.remove(index)
        return self.leaving()

    def leaving(self) -> list[int]:
        """The buckets that may leave now, and were not named before."""
        first = self._next
        while self._next < len(self._order) and not self._absent[self._order[self._next]]:
            self._next += 1
        return self._order[first : self._next]

    def absent(self, number: int) -> list[int]:
        """What of bucket ``number`` has not arrived."""
        missing = self._absent[number]
        return [index for index in self._buckets[number] if index in missing] if missing else []

    def finish(self) -> list[int]:
        """No more will arrive: the buckets that have not left."""
        first, self._next = self._next, len(self._order)
        return self._order[first:]
