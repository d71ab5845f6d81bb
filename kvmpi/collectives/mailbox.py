"""Which message belongs to which receive, by communicator, sender and tag, in the order of both: as in MPI. No I/O."""

from __future__ import annotations

from collections import deque


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
        messages = self._messages.get(box, ())
        for message in messages:
            if receive.source is None or receive.source == message.source:
                self._take(self._messages, box, message)
                _match(message, receive)
                return message
        self._receives.setdefault(box, deque()).append(receive)
        return None

    def arrive(self, box: Box, message: Message) -> bool:
        """A message is announced; whether somebody waits for it, who has it now."""
        for receive in self._receives.get(box, ()):
            if receive.source is None or receive.source == message.source:
                self._take(self._receives, box, receive)
                _match(message, receive)
                return True
        self._messages.setdefault(box, deque()).append(message)
        return False

    def cancel(self, box: Box, receive: Receive) -> None:
        """No message is wanted any more; one may have come."""
        if receive in self._receives.get(box, ()):
            self._take(self._receives, box, receive)

    def forget(self, context: int) -> None:
        """Nobody receives anything in this communicator any more."""
        for boxes in (self._receives, self._messages):
            for box in [box for box in boxes if box[0] == context]:
                del boxes[box]

    @staticmethod
    def _take(boxes: dict[Box, deque[Receive]] | dict[Box, deque[Message]], box: Box, one: Receive | Message) -> None:
        boxes[box].remove(one)  # type: ignore[arg-type]
        if not boxes[box]:
            del boxes[box]


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
