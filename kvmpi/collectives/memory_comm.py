"""A communicator in memory, with ranks as threads of one process, so that most tests need no mpirun."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Collection, Sequence

import numpy as np

from kvmpi.collectives.comm import Bytes
from kvmpi.machine import host_name

#: Which of several communicators of the same ranks: how often each ancestor had been duplicated.
_Context = tuple[int, ...]


class _Send:
    """A message on its way. Like a large one of MPI's, it is read from the sender's buffer when it is received."""

    def __init__(self, buffer: Bytes) -> None:
        self._buffer: Bytes | None = buffer.reshape(-1).view(np.uint8)

    def deliver(self, target: Bytes) -> None:
        assert self._buffer is not None, "a message is delivered once"
        if self._buffer.size > target.size:
            raise AssertionError(f"message of {self._buffer.size} bytes for a buffer of {target.size}")
        target[: self._buffer.size] = self._buffer
        self._buffer = None

    def test(self) -> bool:
        return self._buffer is None


class _Receive:
    def __init__(self, world: MemoryWorld, box: deque[_Send], queue: deque[_Receive], buffer: Bytes) -> None:
        self._world, self._box, self._queue, self._buffer = world, box, queue, buffer
        self._done = False

    def test(self) -> bool:
        with self._world.lock:
            # Messages match receives in the order in which both were posted, as in MPI.
            while self._queue and self._box:
                receive = self._queue.popleft()
                self._box.popleft().deliver(receive._buffer.reshape(-1).view(np.uint8))
                receive._done = True
            return self._done


class MemoryWorld:
    """The mailboxes that the ranks of one world share."""

    def __init__(self, size: int, hosts: Sequence[str] | None = None) -> None:
        """``hosts`` names each rank's host; by default all are on this one."""
        self.size = size
        self.hosts = [host_name()] * size if hosts is None else list(hosts)
        self.lock = threading.Lock()  # guards the mailboxes
        self.boxes: dict[tuple[_Context, int, int, int], deque[_Send]] = defaultdict(deque)
        self.queues: dict[tuple[_Context, int, int, int], deque[_Receive]] = defaultdict(deque)

    def comms(self) -> list[MemoryComm]:
        """One communicator for each rank."""
        return [MemoryComm(self, rank, ()) for rank in range(self.size)]


class MemoryComm:
    """One rank's end of a ``MemoryWorld``."""

    has_collectives = False

    def __init__(self, world: MemoryWorld, rank: int, context: _Context) -> None:
        self._world, self.rank, self.size, self._context = world, rank, world.size, context
        self.host = world.hosts[rank]
        self._duplicates = 0

    def isend(self, buffer: Bytes, dest: int, tag: int) -> _Send:
        with self._world.lock:
            message = _Send(buffer)
            self._world.boxes[self._context, self.rank, dest, tag].append(message)
        return message

    def irecv(self, buffer: Bytes, source: int, tag: int) -> _Receive:
        with self._world.lock:
            where = (self._context, source, self.rank, tag)
            queue = self._world.queues[where]
            receive = _Receive(self._world, self._world.boxes[where], queue, buffer)
            queue.append(receive)
        return receive

    def iallreduce(self, *_: object) -> _Send:
        raise AssertionError("a communicator in memory has no collectives of its own")

    ireduce_scatter = iallgather = ibroadcast = iallreduce

    def waiter(self, peers: Collection[int]) -> None:
        """Nothing wakes."""

    def attend(self) -> None:
        """They move when they are asked about."""

    def channel(self, source: int, dest: int, tag: int) -> None:
        """There are no connections."""

    def duplicate(self) -> MemoryComm:
        self._duplicates += 1
        return MemoryComm(self._world, self.rank, (*self._context, self._duplicates))

    def free(self) -> None:
        pass
