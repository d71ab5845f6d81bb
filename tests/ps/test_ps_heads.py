"""What the head of a chain owes the others: not to answer when it may have been replaced, not to run ahead of them."""

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
        self.others_have_all = True
        self.last_seq = 0
        members = list(range(length))
        view = m.View(1, length - 1, [m.Chain(1, members)], [m.ServerInfo(rank, 1, "h", []) for rank in members], [])
        self.replies: list[Message] = []
        self._take(self.state.adopt(view, 0.0), 0.0)
        self.ask(0.0, m.Hello(1, STORE, "async", 0, 1, 1))
        self.ask(0.0, m.Init(2, "k", 0, 1, COUNT, [COUNT], "float32"), whole_numbers(COUNT))
        self.ask(0.0, m.SetRule(3, 1, "test", optim.Test(lr=-1.0).hyperparams()))

    def ask(self, now_s: float, message: Message, *payloads: np.ndarray) -> Message | None:
        """The answer, if there is one by now."""
        frames = [memoryview(bytearray(payload.tobytes())) for payload in payloads]
        self.replies.clear()
        self._take(self.state.handle(route(0), message, frames, now_s), now_s)
        return self.replies[0] if self.replies else None

    def _take(self, outgoing: Sequence[Any], now_s: float) -> None:
        for one in outgoing:
            match one:
                case Reply():
                    self.replies.append(one.message)
                case Forward(message=m.Extend()):
                    self._take(self.state.hear(1, m.Attach(0, 1, 0), now_s), now_s)
                case Forward(message=m.Log() as log):
                    self.last_seq = log.seq
                    if self.others_have_all:
                        self.commit(now_s)

    def commit(self, now_s: float = 0.0) -> None:
        """The others have all that they were sent."""
        self._take(self.state.hear(1, m.Committed(0, 1, self.last_seq), now_s), now_s)


@pytest.mark.parametrize("request_", [
    m.Pull(9, "k", 0, 0), m.Push(9, "k", 0, 1, "none", True), m.GetState(9, "k", 0), m.Query(9, "k", 0, 0),
])  # fmt: skip
def test_after_its_lease_a_head_answers_nobody(request_: Any) -> None:
    head = Head(2)
    payloads = [whole_numbers(COUNT)] if isinstance(request_, m.Push) else []
    assert head.ask(LEASE_ENDS_S + 0.1, request_, *payloads) == m.Moved(9), "another may be the head now"
    head.state.lease_ends_s += 5.0
    assert isinstance(head.ask(LEASE_ENDS_S + 0.2, request_, *payloads), m.Value | m.State), "the scheduler was heard"


def test_a_head_that_answers_nobody_says_whom_it_waits_for() -> None:
    assert Head(2).state.waits(LEASE_ENDS_S) == []
    (wait,) = Head(2).state.waits(LEASE_ENDS_S + 0.1)
    assert (wait.since_s, wait.what) == (LEASE_ENDS_S, "the scheduler")
    assert "this server answers nobody" in wait.whom
    assert Head(1).state.waits(LEASE_ENDS_S + 100.0) == []


def test_nobody_can_take_the_place_of_a_server_that_is_alone() -> None:
    assert isinstance(Head(1).ask(LEASE_ENDS_S + 100.0, m.Pull(9, "k", 0, 0)), m.Value)


def test_a_client_that_does_not_wait_for_answers_cannot_fill_the_log() -> None:
    head = Head(2)
    head.others_have_all = False
    first = m.Push(10, "k", 0, 1, "none", True)
    assert head.ask(0.0, first, whole_numbers(COUNT)) is None
    kept = len(head.state.parts[0]._log)
    refused = head.ask(0.0, m.Push(11, "k", 0, 2, "none", True), whole_numbers(COUNT))
    assert refused is None, "in the order of the answers"
    assert head.ask(0.0, first, whole_numbers(COUNT)) is None, "a repetition is none"
    assert len(head.state.parts[0]._log) == kept
    assert head.state.held_bytes(route(0)) > 2 * 4 * COUNT
    head.replies.clear()
    head.commit()
    assert [type(reply) for reply in head.replies] == [m.Value, m.Failure, m.Value]
    assert head.state.held_bytes(route(0)) == 0
    assert head.ask(0.0, m.Push(12, "k", 0, 2, "none", True), whole_numbers(COUNT)) is None
    assert len(head.state.parts[0]._log) == 1
