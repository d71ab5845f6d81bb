"""A communicator in memory, with ranks as threads of one process, so that most tests need no mpirun."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Sequence

import numpy as np

from kvmpi.collectives.comm import Bytes
from kvmpi.machine import host_name

#: Which of several communicators of the same ranks: how often each ancestor had been duplicated.
_Context = tuple[int, ...]


class _Done:
    def test(self) -> bool:
        return True


class _Receive:
    def __init__(self, world: MemoryWorld, box: deque[np.ndarray], queue: deque[_Receive], buffer: Bytes) -> None:
        self._world, self._box, self._queue, self._buffer = world, box, queue, buffer
        self._done = False

    def test(self) -> bool:
        with self._world.lock:
            # Messages match receives in the order in which both were posted, as in MPI.
            while self._queue and self._box:
                receive, message = self._queue.popleft(), self._box.popleft()
                target = receive._buffer.reshape(-1).view(np.uint8)
                if message.size > target.size:
                    raise AssertionError(f"message of {message.size} bytes for a buffer of {target.size}")
                target[: message.size] = message
                receive._done = True
            return self._done


class MemoryWorld:
    """The mailboxes that the ranks of one world share."""

    def __init__(self, size: int, hosts: Sequence[str] | None = None) -> None:
        """``hosts`` names each rank's host; by default all are on this one."""
        self.size = size
        self.hosts = [host_name()] * size if hosts is None else list(hosts)
        self.lock = threading.Lock()  # guards the mailboxes
        self.boxes: dict[tuple[_Context, int, int, int], deque[np.ndarray]] = defaultdict(deque)
        self.queues: dict[tuple[_Context, int, int, int], deque[_Receive]] = defaultdict(deque)

    def comms(self) -> list[MemoryComm]:
        """One communicator for each rank."""
        return [MemoryComm(self, rank, ()) for rank in range(self.size)]


class MemoryComm:
    """One rank's end of a ``MemoryWorld``. A sent message is copied at once, so a send is done when posted."""

    has_collectives = False

    def __init__(self, world: MemoryWorld, rank: int, context: _Context) -> None:
        self._world, self.rank, self.size, self._context = world, rank, world.size, context
        self.host = world.hosts[rank]
        self._duplicates = 0

    def isend(self, buffer: Bytes, dest: int, tag: int) -> _Done:
        with self._world.lock:
            message = buffer.reshape(-1).view(np.uint8).copy()
            self._world.boxes[self._context, self.rank, dest, tag].append(message)
        return _Done()

    def irecv(self, buffer: Bytes, source: int, tag: int) -> _Receive:
        with self._world.lock:
            where = (self._context, source, self.rank, tag)
            queue = self._world.queues[where]
            receive = _Receive(self._world, self._world.boxes[where], queue, buffer)
            queue.append(receive)
        return receive

    def iallreduce(self, *_: object) -> _Done:
        raise AssertionError("a communicator in memory has no collectives of its own")

    ireduce_scatter = iallgather = ibroadcast = iallreduce

    def duplicate(self) -> MemoryComm:
        self._duplicates += 1
        return MemoryComm(self._world, self.rank, (*self._context, self._duplicates))

    def free(self) -> None:
        pass
