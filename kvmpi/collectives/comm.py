"""The seam between the collectives and whatever carries their bytes: a communicator of ranked peers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, Protocol

import numpy.typing as npt

from kvmpi.machine import host_name

Bytes = npt.NDArray[Any]
#: Sleeps for at most some seconds, and less if something happens.
Waiter = Callable[[float], object]


class Channel(NamedTuple):
    """What one ring travels over: descriptors of the connections from the rank ``left`` and to the rank ``right``."""

    left: int
    in_fd: int
    right: int
    out_fd: int


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

    @property
    def host(self) -> str:
        """Equal on two ranks if they can share memory."""
        ...

    def isend(self, buffer: Bytes, dest: int, tag: int) -> Request: ...

    def irecv(self, buffer: Bytes, source: int, tag: int) -> Request: ...

    @property
    def has_collectives(self) -> bool:
        """Whether the transport offers the next four; else they must not be called."""
        ...

    def iallreduce(self, buffer: Bytes) -> Request:
        """Start the transport's own sum of ``buffer`` over all ranks, in place."""
        ...

    def ireduce_scatter(self, buffer: Bytes, out: Bytes, counts: Sequence[int]) -> Request:
        """Likewise, of which ``out`` gets this rank's part; rank r's part has ``counts[r]`` elements."""
        ...

    def iallgather(self, buffer: Bytes, counts: Sequence[int]) -> Request:
        """Start the transport's own exchange of parts: rank r's of ``counts[r]`` elements, in place."""
        ...

    def ibroadcast(self, buffer: Bytes, root: int) -> Request:
        """Start the transport's own copy of ``buffer`` of ``root`` to all ranks."""
        ...

    def waiter(self, peers: Collection[int]) -> Waiter | None:
        """What wakes when messages to or from ``peers`` may have moved; None: their requests must be polled."""
        ...

    def attend(self) -> None:
        """Give messages that are under way a turn, where they move only inside calls; for ranks that wait elsewhere."""
        ...

    def channel(self, source: int, dest: int, tag: int) -> Channel | None:
        """The connections that messages of ``tag`` from ``source`` and to ``dest`` travel over, for others to use.

        None: there are none, or messages are under way. Until that is done, no such message may be sent or received.
        """
        ...

    def duplicate(self) -> Comm:
        """The same ranks with message traffic of their own; collective."""
        ...

    def free(self) -> None: ...


class SoloComm:
    """The communicator of a worker that is alone: one rank, no messages."""

    rank = 0
    size = 1
    has_collectives = False

    @property
    def host(self) -> str:
        return host_name()

    def isend(self, *_: object) -> Request:
        raise AssertionError("a communicator of one rank sends nothing")

    irecv = iallreduce = ireduce_scatter = iallgather = ibroadcast = isend

    def waiter(self, peers: Collection[int]) -> None:
        pass

    def attend(self) -> None:
        pass

    def channel(self, source: int, dest: int, tag: int) -> None:
        pass

    def duplicate(self) -> SoloComm:
        return self

    def free(self) -> None:
        pass
