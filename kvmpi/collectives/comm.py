"""The seam between the collectives and whatever carries their bytes: a communicator of ranked peers."""

from __future__ import annotations

from typing import Any, Protocol

import numpy.typing as npt

Bytes = npt.NDArray[Any]


class Request(Protocol):
    """A transfer under way."""

    def test(self) -> bool:
        """Whether the transfer is done. Once true it stays true."""
        ...


class Comm(Protocol):
    """``size`` ranks that exchange messages. Messages from one rank to another with one tag keep their order.

    Buffers are contiguous arrays; they belong to the transfer until its request is done.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def isend(self, buffer: Bytes, dest: int, tag: int) -> Request: ...

    def irecv(self, buffer: Bytes, source: int, tag: int) -> Request: ...

    def iallreduce(self, buffer: Bytes) -> Request | None:
        """Start the transport's own sum of ``buffer`` over all ranks, in place; None if it has none."""
        ...

    def duplicate(self) -> Comm:
        """The same ranks with message traffic of their own; collective."""
        ...

    def free(self) -> None: ...


class SoloComm:
    """The communicator of a worker that is alone: one rank, no messages."""

    rank = 0
    size = 1

    def isend(self, buffer: Bytes, dest: int, tag: int) -> Request:
        raise AssertionError("a communicator of one rank sends nothing")

    irecv = isend

    def iallreduce(self, buffer: Bytes) -> Request | None:
        return None

    def duplicate(self) -> SoloComm:
        return self

    def free(self) -> None:
        pass
