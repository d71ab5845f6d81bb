"""What the first passes of a training teach: in which order gradients come, and which buckets should leave first."""

from __future__ import annotations

import time
from collections.abc import Iterable

import torch

from kvmpi.engine import Work
from kvmpi.store import KVStore
from kvmpi.torch import buckets
from kvmpi.torch.parameters import next_key, summing

#: How many passes are through when one is timed: not the first, which is slow, and again when buckets leave in the
#: order that was found, since that changes what they wait for. So many passes later the order is planned.
_TIMED, _PLANNED_AFTER = (1, 4, 7), 2


class _Timing:
    """When the buckets of one pass were full, and how long each was under way; for ``buckets.schedule``."""

    def __init__(self, count: int) -> None:
        self._began_s = time.perf_counter()
        self._full_s, self._sent_s, self._done_s = ([0.0] * count for _ in range(3))
        self.order: list[int] = []

    def filled(self, number: int) -> None:
        self._full_s[number] = time.perf_counter() - self._began_s

    def sent(self, number: int, works: Iterable[Work | None]) -> None:
        self.order.append(number)
        self._sent_s[number] = time.perf_counter() - self._began_s
        for work in works:
            if work is not None:
                work.add_done_callback(lambda _: self._done(number))

    def _done(self, number: int) -> None:
        self._done_s[number] = time.perf_counter() - self._began_s

    def schedule(self) -> list[int]:
        """The order in which buckets should leave, once all that left in this pass are back."""
        cost_s, before_s = [0.0] * len(self.order), 0.0
        for number in self.order:
            cost_s[number] = max(0.0, self._done_s[number] - max(before_s, self._sent_s[number]))
            before_s = max(before_s, self._done_s[number])
        return buckets.schedule(self._full_s, cost_s)


class Learner:
    """What one loop has learned; all that plan alike learn the same, in the same passes.

    Args:
        planners: the store of those that plan alike; None: this worker plans for itself.
        count: of parameters.
        times: buckets leave in an order of their own, which is found by timing passes.
    Attributes:
        passes: that are through, up to those after which there is nothing to learn.
        order: in which gradients come, as far as that is known.
        leaving: the order in which buckets leave, if it is not that of the plan.
    """

    def __init__(self, planners: KVStore | None, count: int, *, times: bool) -> None:
        self._planners, self._count, self._times = planners, count, times
        self.passes = 0
        self.order = buckets.complete_order((), count)
        self.leaving: list[int] | None = None
        self._seen: list[int] = []  # the order of the first pass
        self._timing: _Timing | None = None
        if planners is not None:
            self._key = next_key(planners)
            planners.init(self._key, torch.zeros(count, dtype=torch.int64, device="cpu"))

    @property
    def is_timing(self) -> bool:
        """Whether the pass that is under way is timed."""
        return self._timing is not None and self.passes in _TIMED

    @property
    def knows_all(self) -> bool:
        """Whether there is nothing left to learn."""
        return self.passes >= _TIMED[-1] + _PLANNED_AFTER

    def forget(self) -> None:
        """Buckets are others now."""
        self.leaving = self._timing = None

    def begin(self, num_buckets: int) -> None:
        """A pass begins."""
        if self._times and self.passes in _TIMED:
            self._timing = _Timing(num_buckets)

    def arrived(self, index: int, number: int) -> None:
        """The gradient of a parameter is there, in this bucket."""
        if not self.passes:
            self._seen.append(index)
        self.filled(number)

    def filled(self, number: int) -> None:
        """A bucket has one gradient more, or will not have it: the last is what counts."""
        if self._timing is not None and self.is_timing:
            self._timing.filled(number)

    def sent(self, number: int, works: Iterable[Work | None]) -> None:
        """A bucket has left."""
        if self._timing is not None and self.is_timing:
            self._timing.sent(number, works)

    def end(self, num_buckets: int) -> bool:
        """A pass is through; whether buckets are to be planned anew, since gradients come in another order."""
        self.passes += 1
        if self.passes == 1:
            order = self._agreed(buckets.complete_order(self._seen, self._count))
            self._seen.clear()
            if order and order != self.order:
                self.order = order
                return True
        elif self.passes - _PLANNED_AFTER in _TIMED and self._times:
            # Only where the plan has stayed is there a whole pass to go by; the first says so to all.
            whole = self._timing is not None and len(self._timing.order) == num_buckets
            found = self._agreed(self._timing.schedule() if self._timing is not None and whole else [])
            if sorted(found) == list(range(num_buckets)):
                self.leaving = found
            self._timing = None
        return False

    def _agreed(self, order: list[int]) -> list[int]:
        """What the first of those that plan alike has found; nothing if it has joined."""
        if self._planners is None:
            return order
        told = torch.zeros(self._count, dtype=torch.int64, device="cpu")
        if self._planners.rank == 0:
            told[: len(order)] = torch.tensor(order, dtype=torch.int64, device="cpu") + 1
        summing(self._planners)(self._key, told)
        return [number - 1 for number in told.tolist() if number]
