"""A variable: the FIFO of reads and writes that orders operations, their count, and what poisons it."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from kvmpi.engine.work import Failure, earliest

if TYPE_CHECKING:
    from kvmpi.engine.base import Engine
    from kvmpi.engine.operation import Operation

_WRITING = -1


class Variable:
    """Stands for one piece of state that operations read and write; holds no data. Made by ``engine.variable``.

    ``version`` counts the writes that have completed. A write that failed or was skipped is one of them: its
    function may have changed the state before it raised.

    All fields are guarded by the engine's lock. A variable refers to pending operations only, so that finished ones
    are freed however long it lives.
    """

    __slots__ = ("__weakref__", "_active", "_blocked", "_engine", "_failures", "_last_write", "name", "version")

    def __init__(self, engine: Engine, name: str) -> None:
        self.name = name
        self.version = 0
        self._engine = engine
        self._active = 0  # reads that hold the variable, or _WRITING
        self._blocked: deque[tuple[Operation, bool]] = deque()  # (operation, is a write) in push order; head is blocked
        self._last_write: Operation | None = None  # the newest pending write
        self._failures: list[Failure] = []

    def __repr__(self) -> str:
        return f"<Variable {self.name!r} version {self.version}>"

    @property
    def in_use(self) -> bool:
        """Whether an operation has it, or waits for it; may be asked without the engine's lock."""
        return self._active != 0

    # -- the FIFO ------------------------------------------------------------------------------------------------

    def request_read(self, op: Operation) -> bool:
        """Enter the FIFO as a read; ``True`` if it may go on at once."""
        if self._active >= 0 and not self._blocked:
            self._active += 1
            return True
        self._blocked.append((op, False))
        return False

    def request_write(self, op: Operation) -> bool:
        """Enter the FIFO as a write; ``True`` if it may go on at once."""
        self._last_write = op
        if self._active == 0:  # then nothing is blocked either
            self._active = _WRITING
            return True
        self._blocked.append((op, True))
        return False

    def release_read(self, freed: list[Operation]) -> None:
        """A read has finished; append to ``freed`` what waits for nothing any more."""
        self._active -= 1
        if not self._active and self._blocked:
            self._grant(freed)

    def release_write(self, op: Operation, freed: list[Operation]) -> None:
        """The write ``op`` has finished; append to ``freed`` what waits for nothing any more."""
        self.version += 1
        if self._last_write is op:
            self._last_write = None
        self._active = 0
        if self._blocked:
            self._grant(freed)

    def _grant(self, freed: list[Operation]) -> None:
        blocked = self._blocked
        op, is_write = blocked.popleft()
        if is_write:
            self._active = _WRITING
            self._admit(op, freed)
            return
        self._active = 1
        self._admit(op, freed)
        while blocked and not blocked[0][1]:
            self._active += 1
            self._admit(blocked.popleft()[0], freed)

    def _admit(self, op: Operation, freed: list[Operation]) -> None:
        if self._failures:
            op.cause = earliest(op.cause, self.poison_for(op.seq))
        op.num_waits -= 1
        if not op.num_waits:
            freed.append(op)

    # -- poison --------------------------------------------------------------------------------------------------

    def poison(self, failure: Failure) -> None:
        """Operations that ``failure`` concerns may not use the variable."""
        if not any(known is failure for known in self._failures):
            self._failures.append(failure)

    def poison_for(self, seq: int) -> Failure | None:
        """The first failure that concerns operation ``seq``. Called in push order, so that what is over can go."""
        self._failures = [failure for failure in self._failures if failure.concerns(seq)]
        return min(self._failures, key=lambda failure: failure.order, default=None)

    @property
    def poisoned(self) -> bool:
        """Whether any failure is remembered; may be asked without the engine's lock."""
        return bool(self._failures)

    def undelivered(self) -> Failure | None:
        """The first failure that poisons the variable and that no caller has seen."""
        active = [failure for failure in self._failures if failure.delivered_at is None]
        return min(active, key=lambda failure: failure.order, default=None)
