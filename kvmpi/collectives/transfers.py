"""Messages between two ranks: each is a Work that finishes by itself, in whichever order the messages arrive."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvmpi.collectives.comm import Comm, Request
from kvmpi.collectives.exchange import MAX_MESSAGE_BYTES, pieces
from kvmpi.collectives.waiting import Habit, Patience
from kvmpi.deadline import Deadline
from kvmpi.engine import Work
from kvmpi.errors import ConfigError, KVTimeoutError, ShapeMismatchError, UnsupportedError

Buffer = npt.NDArray[Any]

#: Waits for single messages.
_MESSAGES = Habit()


class Transfer(Work):
    """One message under way. Its buffer belongs to it until it is done."""

    __slots__ = ("_deadline", "_expected", "_polling", "_requests", "_then", "_waiting")

    def __init__(
        self, name: str, requests: Sequence[Request], expected: int | None, deadline: Deadline,
        then: Callable[[], object] | None,
    ) -> None:  # fmt: skip
        super().__init__(name)
        self._requests, self._expected, self._deadline, self._then = requests, expected, deadline, then
        self._polling = threading.Lock()  # guards the requests: MPI looks at one from one thread at a time
        self._waiting = 0

    @property
    def source(self) -> int:
        """The rank that sent what was received."""
        return self._requests[0].source  # type: ignore[attr-defined]

    @property
    def awaited(self) -> bool:
        """Whether somebody waits for it, and thereby polls."""
        return self._waiting > 0

    def poll(self) -> bool:
        """Whether it is done; finishes it if it has just become so."""
        if self.done() or not self._polling.acquire(blocking=False):
            return self.done()
        try:
            if self.done():
                return True
            try:
                if not all(request.test() for request in self._requests):
                    if not self._deadline.expired():
                        return False
                    self._give_up()
                self._check_length()
                if self._then is not None:
                    self._then()
            except ShapeMismatchError as error:
                self.finish(ShapeMismatchError(f"{self.name}: {error}"))
            except Exception as error:
                self.finish(error)
            else:
                self.finish()
            return True
        finally:
            self._polling.release()

    def wait_done(self, timeout_s: float | None = None) -> bool:
        """As of ``Work``; the waiting thread polls, which is faster than to be woken."""
        patience = Patience(Deadline(timeout_s), lambda: f"{self.name}: not done", _MESSAGES)
        with self._lock:
            self._waiting += 1
        try:
            while not self.poll():
                patience.pause()
            patience.progress()
        except KVTimeoutError:
            return self.done()
        finally:
            with self._lock:
                self._waiting -= 1
        return True

    def _give_up(self) -> None:
        if self._expected is not None:  # what comes now must not be written to memory that its owner uses again
            for request in self._requests:
                if not request.test():
                    request.cancel()  # type: ignore[attr-defined]
        raise KVTimeoutError(
            f"{self.name}: not done within {self._deadline.timeout_s:.1f} s; look at that worker, or allow more time"
        )

    def _check_length(self) -> None:
        if self._expected is None:
            return
        came = sum(request.nbytes for request in self._requests)  # type: ignore[attr-defined]
        if came != self._expected:
            raise ShapeMismatchError(f"a message of {came} bytes for a tensor of {self._expected}")


class Transfers:
    """The messages of one rank of a communicator. All methods may be called from any thread.

    Messages from one rank to another with one tag arrive in the order in which they were sent. A thread polls as long
    as something is under way, so that transfers go on, and finish, while nobody waits for them.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._lock = threading.Lock()  # guards the fields below
        self._under_way: list[Transfer] = []
        self._thread: threading.Thread | None = None

    def send(self, buffer: Buffer, dest: int, tag: int, timeout_s: float | None, label: str) -> Transfer:
        """Start to send ``buffer``, host memory."""
        where = f"{label} from MPI rank {self._comm.rank} to MPI rank {dest}, tag {tag}"
        self._check(where, dest, tag)
        requests = [self._comm.isend(piece, dest, tag) for piece in _messages(buffer)]
        return self._started(Transfer(where, requests, None, Deadline(timeout_s), None))

    def receive(
        self, buffer: Buffer, source: int | None, tag: int, timeout_s: float | None, label: str,
        then: Callable[[], object] | None = None,
    ) -> Transfer:  # fmt: skip
        """Start to receive ``buffer.nbytes`` bytes from ``source``, None for any rank; ``then`` runs when they came.

        The Work fails with ShapeMismatchError if the message is of another length.
        """
        sender = "any MPI rank" if source is None else f"MPI rank {source}"
        where = f"{label} on MPI rank {self._comm.rank} from {sender}, tag {tag}"
        self._check(where, source, tag)
        if source is None and buffer.nbytes > MAX_MESSAGE_BYTES:
            raise UnsupportedError(f"{where}: more than {MAX_MESSAGE_BYTES} bytes; name the rank that sends them")
        comm: Any = self._comm
        requests = [comm.irecv_message(piece, source, tag) for piece in _messages(buffer)]
        return self._started(Transfer(where, requests, buffer.nbytes, Deadline(timeout_s), then))

    def drain(self, deadline: Deadline) -> bool:
        """Wait for what is under way; whether all of it is done."""
        with self._lock:
            left = list(self._under_way)
        return all(transfer.wait_done(deadline.remaining_s()) for transfer in left)

    def _check(self, where: str, peer: int | None, tag: int) -> None:
        if self._comm.size == 1:
            raise UnsupportedError(f"{where}: a group of one rank sends no messages")
        if peer is not None and not 0 <= peer < self._comm.size:
            raise ConfigError(f"{where}: ranks go from 0 to {self._comm.size - 1}")
        comm: Any = self._comm
        if not 0 <= tag <= comm.largest_tag:
            raise ConfigError(f"{where}: tags go from 0 to {comm.largest_tag}")

    def _started(self, transfer: Transfer) -> Transfer:
        if transfer.poll():
            return transfer
        with self._lock:
            self._under_way.append(transfer)
            if self._thread is None:
                self._thread = threading.Thread(target=self._look_after, name="kvmpi-transfers", daemon=True)
                self._thread.start()
        return transfer

    def _look_after(self) -> None:
        patience = Patience(Deadline(None), lambda: "")
        while True:
            with self._lock:
                before = len(self._under_way)
                self._under_way = [transfer for transfer in self._under_way if not transfer.done()]
                if not self._under_way:
                    self._thread = None
                    return
                left = list(self._under_way)
            for transfer in left:
                if not transfer.awaited:
                    transfer.poll()
            if len(left) < before:
                patience.progress()
            patience.pause()


def _messages(buffer: Buffer) -> list[Buffer]:
    """At least one, so that there is something to match."""
    return list(pieces(buffer)) or [np.empty(0, np.uint8)]
