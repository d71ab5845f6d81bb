"""A client's session by itself: what it sends is taken, and answered, by hand."""

from __future__ import annotations

from typing import Any

from kvmpi.errors import KVError
from kvmpi.ps.asks import Ask, Operation
from kvmpi.ps.session import ClientSession
from kvmpi.wire import Message
from kvmpi.wire import messages as m

RETRY_S = 1.0


class Bench:
    """A session whose messages a test takes and answers by hand."""

    def __init__(self, window_bytes: int = 100) -> None:
        self.session = ClientSession(window_bytes, RETRY_S)
        self.now_s = 0.0
        self.sent: list[tuple[int, Message]] = []
        self.ended: dict[str, KVError | None] = {}
        self.accepted: list[str] = []

    def start(self, label: str, *asks: Ask, timeout_s: float = 100.0, priority: int = 0) -> None:
        def on_done(error: KVError | None) -> None:
            assert label not in self.ended, f"{label} ended twice"
            self.ended[label] = error

        operation = Operation(label, timeout_s, self.now_s, on_done, lambda: self.accepted.append(label))
        self.session.submit(operation, asks, priority)

    def flush(self) -> list[Message]:
        out = [(peer, message) for peer, message, _ in self.session.sendable(self.now_s)]
        self.sent += out
        return [message for _, message in out]

    def answer(self, message: Message, reply: type[Message] = m.Ack, *fields: Any, payloads: Any = ()) -> None:
        fields = fields or (() if reply in (m.Accepted, m.Moved) else (0,))
        self.session.receive(reply(message.request, *fields), list(payloads))  # type: ignore[attr-defined]

    def after(self, seconds: float) -> list[Message]:
        self.now_s += seconds
        self.session.tick(self.now_s)
        return self.flush()


def push(peer: int, cost: int, key: Any = "k", fused: bool = False, **kwargs: Any) -> Ask:
    return Ask(peer, m.Push, (key, 0, 1, "none", fused), cost_bytes=cost, **kwargs)


def pull(peer: int, cost: int, key: Any = "k") -> Ask:
    return Ask(peer, m.Pull, (key, 0, 1), cost_bytes=cost, reads=True)


def is_quiet(message: Message) -> bool:
    return isinstance(message, m.Push) and message.quiet


def keys(messages: list[Message]) -> list[Any]:
    return [message.key for message in messages]  # type: ignore[attr-defined]
