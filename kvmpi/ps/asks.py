"""What a client asks for: operations, and the requests that they are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy.typing as npt

from kvmpi.errors import KVError
from kvmpi.wire import Message

Buffer = npt.NDArray[Any]
Reply = Callable[[Message, list[memoryview]], None]

#: The scheduler's number among the peers; servers have theirs, from 0.
SCHEDULER = -1
#: Where requests go about a part for which no server answers at present.
NOWHERE = -2
#: Where a push says among its fields whether it wants the value for an answer.
FUSED = 4


class Operation(msgspec.Struct, eq=False):
    """Several requests that end together: one key's exchange, or one command to all servers.

    Args:
        label: what it does, for error messages.
        timeout_s: seconds that it may take from ``began_s`` on.
        on_done: called once with the first error, or None.
        on_accepted: called once, when the peers have taken every fused push into its round, or all is over.
        on_late: called once with the error, when the time is over; whether the requests go on nevertheless, for nobody
            who waits for them. Values that they bring are dropped then.
        after: its requests leave when all of these are over.
    """

    label: str
    timeout_s: float
    began_s: float
    on_done: Callable[[KVError | None], None]
    on_accepted: Callable[[], None] | None = None
    on_late: Callable[[KVError], bool] | None = None
    after: Sequence[Operation] = ()
    followers: list[Operation] = msgspec.field(default_factory=list)
    num_awaited: int = 0
    asks: Sequence[Ask] = ()
    pending: int = 0
    unaccepted: int = 0
    priority: int = 0
    retry_s: float = 0.0
    error: KVError | None = None
    finished: bool = False
    is_late: bool = False

    @property
    def expires_s(self) -> float:
        """When it has to be over."""
        return self.began_s + self.timeout_s


class Ask(msgspec.Struct, eq=False):
    """One request: ``kind(request number, *fields)`` to ``peer``, with payloads made when it leaves.

    Attributes:
        part: it is for the server that answers for this part, whichever that is; -1: for ``peer``.
        cost_bytes: what it takes from its window: payload bytes, or with ``reads`` the bytes it asks for.
        reads: it takes from the window of values asked for.
        may_be_quiet: it is a push of which nothing need be heard before its answer.
        window: that it takes from: of its peer, of words (None), of values asked for or of payloads.
        withheld: payloads, and what they cost, for a peer that says that it waits for this very client.
        sent_s, left_s, pause_s: when it was sent last, and first; the silence after which it is sent again.
        accepted: it is a push that is in its round, and no longer takes from its window.
        used: it is a push that failed, and whose step is used up nevertheless.
        answered: it has ``ended`` well.
        old: the answer is kept by its server.
        missing, silent_s: clients that it waits for, and for how long each of them has been silent.
    """

    peer: int
    kind: type[Message]
    fields: tuple[Any, ...]
    part: int = -1
    payloads: Callable[[], Sequence[Buffer]] | None = None
    cost_bytes: int = 0
    reads: bool = False
    may_be_quiet: bool = False
    on_reply: Reply | None = None
    withheld: tuple[Callable[[], Sequence[Buffer]], int] | None = None
    number: int = -1
    window: tuple[int, bool | None] = (NOWHERE, None)
    quiet: bool = False
    sent_s: float | None = None
    left_s: float = 0.0
    pause_s: float = 0.0
    accepted: bool = False
    used: bool = False
    ended: bool = False
    answered: bool = False
    old: bool = False
    missing: list[int] | None = None
    silent_s: list[int] = msgspec.field(default_factory=list)
    operation: Operation = None  # type: ignore[assignment]  # when it is submitted

    @property
    def where(self) -> tuple[int, bool]:
        """The queue in which it waits."""
        return self.peer, self.reads
