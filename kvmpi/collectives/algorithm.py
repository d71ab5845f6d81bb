"""What every algorithm of the tensor collectives is given, and what it has to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvmpi.collectives import arena
from kvmpi.collectives.ring import Range, segment_bounds
from kvmpi.deadline import Deadline

Buffer = npt.NDArray[Any]


class Scratch:
    """Memory that every call uses anew: fresh memory costs a page fault every 4 KiB.

    It lies where other ranks of the host can read it, if there is such memory.
    """

    def __init__(self) -> None:
        self._memory: Buffer = np.empty(0, np.uint8)
        self._used = self._wanted = 0

    def begin(self) -> None:
        """A new call: what was taken before is free."""
        if self._wanted > self._memory.size:
            # Twice as much, or there would be another one for each call that is a little larger.
            self._memory = _shared_bytes(2 * self._wanted)
        self._used = self._wanted = 0

    def __call__(self, count: int, dtype: Any) -> Buffer:
        """Uninitialised memory of shape ``(count,)``, until the next ``begin``."""
        nbytes = count * np.dtype(dtype).itemsize
        start, self._used = self._used, self._used + -(-nbytes // 64) * 64
        self._wanted = max(self._wanted, self._used)
        if self._used > self._memory.size:
            return _shared_bytes(nbytes).view(dtype)
        return self._memory[start : start + nbytes].view(dtype)


def _shared_bytes(nbytes: int) -> Buffer:
    try:
        found = arena.own().empty(nbytes, np.dtype(np.uint8))
    except OSError:
        found = None
    return np.empty(nbytes, np.uint8) if found is None else found


@dataclass(slots=True)
class Act:
    """One collective under way on one rank: what it is called, and until when it may take."""

    label: str
    op: str
    algorithm: str
    rank: int
    size: int
    deadline: Deadline
    scratch: Scratch

    @property
    def what(self) -> str:
        """For error messages."""
        return f"{self.label}: {self.algorithm} {self.op} on MPI rank {self.rank} of {self.size}"

    def segments(self, count: int) -> list[Range]:
        """Which elements belong to which rank, in a reduce-scatter or an allgather of ``count``."""
        return segment_bounds(count, self.size)


class Algorithm(Protocol):
    """A way to do the four collectives on host memory, on a communicator of at least two ranks.

    Tensors are 1 or more vectors of shape ``(count,)`` in the storage dtype of ``dtype``, with at least one element.
    ``out`` may be the first vector of a tensor, or the part of it that it stands for, and overlaps no other.
    """

    def allreduce(self, vectors: Sequence[Buffer], out: Buffer, dtype: str, act: Act) -> None:
        """Sum all vectors of all ranks into ``out``, shape ``(count,)``, of every rank."""
        ...

    def reduce_scatter(self, vectors: Sequence[Buffer], out: Buffer, dtype: str, act: Act) -> None:
        """Like ``allreduce``, of which ``out`` holds this rank's segment only."""
        ...

    def allgather(self, out: Buffer, act: Act) -> None:
        """Bring to ``out`` of every rank each rank's own segment of it."""
        ...

    def broadcast(self, buffer: Buffer, root: int, act: Act) -> None:
        """Copy ``buffer`` of rank ``root`` into that of every rank."""
        ...
