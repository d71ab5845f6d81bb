"""A server that may have been taken for lost, without knowing it, answers nobody."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from ps_helpers import STORE, route, whole_numbers

from kvmpi import optim
from kvmpi.ps.reply import Forward, Reply
from kvmpi.ps.server import ServerState
from kvmpi.wire import Message
from kvmpi.wire import messages as m

COUNT = 5
LEASE_ENDS_S = 9.0


class Head:
    """Server 0 of a chain of ``length`` servers, the others of which have at once what they are sent."""

    def __init__(self, length: int) -> None:
        self.state = ServerState(0)
        self.state.lease_ends_s = LEASE_ENDS_S
        members = list(range(length))
        view = m.View(1, length - 1, [m.Chain(1, members)], [m.ServerInfo(rank, 1, "h", []) for rank in members], [])
        self.replies: list[Message] = []
        self._take(self.state.adopt(view, 0.0), 0.0)
        self.ask(0.0, m.Hello(1, STORE, "async", 0, 1, 1))
        self.ask(0.0, m.Init(2, "k", 0, 1, COUNT, [COUNT], "float32"), whole_numbers(COUNT))
        self.ask(0.0, m.SetRule(3, 1, "test", optim.Test(lr=-1.0).hyperparams()))

    def ask(self, now_s: float, message: Message, *payloads: np.ndarray) -> Message:
        """The answer."""
        frames = [memoryview(bytearray(payload.tobytes())) for payload in payloads]
        self.replies.clear()
        self._take(self.state.handle(route(0), message, frames, now_s), now_s)
        (answer,) = self.replies
        return answer

    def _take(self, outgoing: Sequence[Any], now_s: float) -> None:
        for one in outgoing:
            match one:
                case Reply():
                    self.replies.append(one.message)
                case Forward(message=m.Extend()):
                    self._take(self.state.hear(1, m.Attach(0, 1, 0), now_s), now_s)
                case Forward(message=m.Log() as log):
                    self._take(self.state.hear(1, m.Committed(0, 1, log.seq), now_s), now_s)


@pytest.mark.parametrize("request_", [
    m.Pull(9, "k", 0, 0), m.Push(9, "k", 0, 1, "none", True), m.GetState(9, "k", 0), m.Query(9, "k", 0, 0),
])  # fmt: skip
def test_after_its_lease_a_head_answers_nobody(request_: Any) -> None:
    head = Head(2)
    payloads = [whole_numbers(COUNT)] if isinstance(request_, m.Push) else []
    assert head.ask(LEASE_ENDS_S + 0.1, request_, *payloads) == m.Moved(9), "another may be the head now"
    head.state.lease_ends_s += 5.0
    assert isinstance(head.ask(LEASE_ENDS_S + 0.2, request_, *payloads), m.Value | m.State), "the scheduler was heard"


def test_nobody_can_take_the_place_of_a_server_that_is_alone() -> None:
    assert isinstance(Head(1).ask(LEASE_ENDS_S + 100.0, m.Pull(9, "k", 0, 0)), m.Value)
