"""Which message belongs to which receive, by communicator, sender and tag, in the order of both: as in MPI. No I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Receive:
    """Memory that is to take one message.

    Attributes:
        source: whose it is to be, or None; whose it is, once there is one.
        nbytes: how long it is, once there is one.
        done: all of it is here, or it is ``too_long`` and was dropped.
    """

    __slots__ = ("done", "nbytes", "source", "target", "too_long")

    def __init__(self, target: memoryview, source: int | None) -> None:
        self.target, self.source = target, source
        self.nbytes, self.done, self.too_long = -1, False, False


class Message:
    """What a peer has announced: ``data`` is where its bytes are, or go, if they came before anybody wanted them.

    Attributes:
        number: by which its sender knows it, if it is only offered; else -1.
        receive: whom it belongs to.
        arrived: all of ``data`` is here.
    """

    __slots__ = ("arrived", "data", "nbytes", "number", "receive", "source")

    def __init__(self, source: int, nbytes: int, number: int = -1) -> None:
        self.source, self.nbytes, self.number = source, nbytes, number
        self.receive: Receive | None = None
        self.data: memoryview | None = None
        self.arrived = False


#: A communicator and a tag.
Box = tuple[int, int]


class Mailbox:
    """Of one process. Whoever calls this moves the bytes."""

    def __init__(self) -> None:
        self._receives: dict[Box, deque[Receive]] = {}
        self._messages: dict[Box, deque[Message]] = {}

    def post(self, box: Box, receive: Receive) -> Message | None:
        """Wait for a message; the one that was there already, which is its own now."""
        message = _take(self._messages, box, lambda message: _fit(message, receive))
        if message is None:
            self._receives.setdefault(box, deque()).append(receive)
        else:
            _match(message, receive)
        return message

    def arrive(self, box: Box, message: Message) -> bool:
        """A message is announced; whether somebody waits for it, who has it now."""
        receive = _take(self._receives, box, lambda receive: _fit(message, receive))
        if receive is None:
            self._messages.setdefault(box, deque()).append(message)
        else:
            _match(message, receive)
        return receive is not None

    def cancel(self, box: Box, receive: Receive) -> None:
        """No message is wanted any more; one may have come."""
        _take(self._receives, box, lambda posted: posted is receive)

    def forget(self, context: int) -> None:
        """Nobody receives anything in this communicator any more."""
        for boxes in (self._receives, self._messages):
            for box in [box for box in boxes if box[0] == context]:
                del boxes[box]


def _take(boxes: dict[Box, deque[T]], box: Box, wanted: Callable[[T], bool]) -> T | None:
    """The first of a box that is wanted, which is in no box then."""
    queue = boxes.get(box, deque())
    found = next(filter(wanted, queue), None)
    if found is not None:
        queue.remove(found)
        if not queue:
            del boxes[box]
    return found


def _fit(message: Message, receive: Receive) -> bool:
    return receive.source is None or receive.source == message.source


def _match(message: Message, receive: Receive) -> None:
    message.receive, receive.source, receive.nbytes = receive, message.source, message.nbytes
    receive.too_long = message.nbytes > receive.target.nbytes
    settle(message)


def settle(message: Message) -> None:
    """Whoever waits for a message gets what came of it before, if that is all."""
    receive = message.receive
    if not message.arrived or receive is None:
        return
    if message.data is not None and not receive.too_long:
        receive.target[: message.nbytes] = message.data
    message.data, receive.done = None, True
