"""A scheduler's state machine in virtual time, and who comes to it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from kvmpi.errors import rebuild
from kvmpi.ps.scheduler import SchedulerState
from kvmpi.wire import Message, encode
from kvmpi.wire import messages as m

TIMEOUT_S = 10.0


class Desk:
    """A scheduler and its visitors; ``inbox[route]`` holds what each was told and has not read."""

    def __init__(self, num_servers: int = 0, on_client_loss: str = "fail", workers: Sequence[range] = ()) -> None:
        self.state = SchedulerState(num_servers, TIMEOUT_S, on_client_loss=on_client_loss, workers=workers)
        self.num_servers = num_servers
        self.now_s = 0.0
        self.numbers = itertools.count(1)
        self.inbox: dict[str, list[Message]] = {}

    def say(self, at: str, kind: type[Message], *fields: Any, request: int = 0) -> int:
        request = request or next(self.numbers)
        self.take(self.state.handle(at.encode(), kind(request, *fields), self.now_s))
        return request

    def take(self, replies: Any) -> None:
        for reply in replies:
            encode(reply.message)
            self.inbox.setdefault(reply.route.decode(), []).append(reply.message)

    def server(self, rank: int, at: str = "", incarnation: int = 1) -> int:
        fields = ("server", rank, -1, self.num_servers, incarnation, f"host {rank}", [f"tcp://{rank}"])
        return self.say(at or f"server {rank}", m.Register, *fields)

    def client(self, rank: int, of: int, store: int = 1, at: str = "", incarnation: int = 1) -> int:
        return self.say(at or f"{store}/{rank}", m.Register, "client", rank, store, of, incarnation, "host", [])

    def beat(self, *routes: str) -> None:
        for at in routes:
            self.take(self.state.handle(at.encode(), m.Heartbeat(3, self.state.epoch), self.now_s))

    def tick(self, seconds: float) -> None:
        self.now_s += seconds
        self.take(self.state.tick(self.now_s))

    def live(self, seconds: float, *routes: str) -> None:
        """Let time pass in which only these give signs of life."""
        for _ in range(4):
            self.tick(seconds / 4)
            self.beat(*routes)

    def told(self, at: str) -> list[Message]:
        return self.inbox.pop(at, [])

    def error(self, at: str) -> Exception:
        (failure,) = self.told(at)
        assert isinstance(failure, m.Failure)
        return rebuild(failure.error, failure.text)


def with_clients(num_clients: int, store: int = 1, on_client_loss: str = "fail") -> Desk:
    desk = Desk(on_client_loss=on_client_loss)
    for rank in range(num_clients):
        desk.client(rank, num_clients, store)
    desk.inbox.clear()
    return desk
