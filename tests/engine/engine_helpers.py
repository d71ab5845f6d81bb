"""What the tests of the engine share."""

from __future__ import annotations

import queue
import threading

from kvmpi.engine import Work

TIMEOUT_S = 20.0  # of one wait in these tests: reached only if the engine hangs


class Finisher:
    """A thread that stands for the network: it finishes promises in the order in which they were made."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Work, BaseException | None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def promise(self, error: BaseException | None = None) -> Work:
        work = Work("promise")
        self._queue.put((work, error))
        return work

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            item[0].finish(item[1])

    def stop(self) -> None:
        self._queue.put(None)
        self._thread.join(TIMEOUT_S)
