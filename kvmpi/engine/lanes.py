"""Lanes: queues of operations with threads of their own, strictly in push order or by priority."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvmpi.engine.operation import Operation


class Lane:
    """A name and an order. By itself this is the lane ``inline``, which has no queue and no thread.

    All fields of lanes are guarded by the engine's lock.
    """

    ordered = False
    #: The lane itself, if it has a queue.
    queue: ThreadLane | None = None

    def __init__(self, name: str) -> None:
        self.name = name


class ThreadLane(Lane, ABC):
    """A queue and its threads, which start with the first operation and park on a gate each while idle."""

    def __init__(self, name: str, num_threads: int) -> None:
        super().__init__(name)
        self.queue = self
        self.num_threads = num_threads
        self.num_started = 0
        self.parked: list[threading.Lock] = []  # gates of the idle threads; opening one wakes one
        self.stopped = False

    @abstractmethod
    def admit(self, op: Operation) -> None:
        """Called at push, in push order."""

    @abstractmethod
    def enqueue(self, op: Operation) -> bool:
        """``op`` waits for no variable any more; ``True`` if a thread could run something now."""

    @abstractmethod
    def take(self) -> Operation | None:
        """The next operation that may run."""

    @abstractmethod
    def clear(self) -> None:
        """Forget every operation that has not started."""

    def summon(self, wake: list[Callable[[], object]], start_thread: Callable[[ThreadLane], None]) -> None:
        """Append to ``wake`` what gets one more thread going, if one is free; to be called without the lock.

        Busy threads look into the queue before they park, so they need no wake-up.
        """
        if self.parked:
            wake.append(self.parked.pop().release)
        elif self.num_started < self.num_threads:
            self.num_started += 1
            wake.append(lambda: start_thread(self))

    def stop(self) -> list[threading.Lock]:
        """Threads that find no operation end from now on; returns the gates of those that must be told."""
        self.stopped = True
        parked, self.parked = self.parked, []
        return parked


class OrderedLane(ThreadLane):
    """One thread, strictly first in, first out: the head blocks what is behind it until its function has returned.

    With the same pushes on every rank, the functions run in the same order on every rank.
    """

    ordered = True

    def __init__(self, name: str) -> None:
        super().__init__(name, num_threads=1)
        self.borrower: object = None  # who runs the lane's operations, if not its thread
        self._queue: deque[Operation] = deque()  # every pushed operation, ready or not

    def admit(self, op: Operation) -> None:
        self._queue.append(op)

    def enqueue(self, op: Operation) -> bool:
        return self._queue[0] is op  # behind a blocked head there is nothing to wake up for

    def take(self) -> Operation | None:
        if self._queue and not self._queue[0].num_waits:
            return self._queue.popleft()
        return None

    def has_before(self, op: Operation) -> bool:
        """Whether the lane has something that was pushed before ``op``."""
        return bool(self._queue) and self._queue[0].seq < op.seq

    def clear(self) -> None:
        self._queue.clear()

    def summon(self, wake: list[Callable[[], object]], start_thread: Callable[[ThreadLane], None]) -> None:
        if self.borrower is None:  # who looks into the queue, too
            super().summon(wake, start_thread)

    def lend(self, borrower: object) -> bool:
        """Leave everything to ``borrower``; ``False`` if the lane is at work, or about to be."""
        if self.borrower is not None or self.stopped or len(self.parked) < self.num_started:
            return False
        self.borrower = borrower
        return True

    def give_back(
        self, borrower: object, wake: list[Callable[[], object]], start_thread: Callable[[ThreadLane], None]
    ) -> None:
        """End of ``lend``; arguments as of ``summon``."""
        if self.borrower is borrower:
            self.borrower = None
            if self._queue and not self._queue[0].num_waits:
                self.summon(wake, start_thread)


class UnorderedLane(ThreadLane):
    """Runs what is ready: larger priority first, then in push order."""

    def __init__(self, name: str, num_threads: int) -> None:
        super().__init__(name, num_threads)
        self._heap: list[tuple[int, int, Operation]] = []

    def admit(self, op: Operation) -> None:
        pass

    def enqueue(self, op: Operation) -> bool:
        heappush(self._heap, (-op.priority, op.seq, op))
        return True

    def take(self) -> Operation | None:
        return heappop(self._heap)[2] if self._heap else None

    def clear(self) -> None:
        self._heap.clear()
