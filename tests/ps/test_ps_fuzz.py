"""Arbitrary messages in arbitrary order to the state machines of server and scheduler: answers, and nothing else."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from message_strategies import heard

from kvmpi.errors import BY_NAME, ProtocolError
from kvmpi.ps.reply import Reply
from kvmpi.ps.scheduler import SchedulerState
from kvmpi.ps.server import ServerState
from kvmpi.wire import Message, encode
from kvmpi.wire import messages as m

ROUTES = [b"tone", b"ttwo", b"ithree"]
COUNT = 3

VALUE = np.arange(COUNT, dtype="f4").tobytes()
IDS, TWO_ROWS = np.array([0, 2], "<u4").tobytes(), VALUE[:8]
ROWS = [[IDS, TWO_ROWS]] * 2 + [[IDS], [IDS[::-1], TWO_ROWS], [IDS * 2, VALUE]]
payloads = st.sampled_from([[VALUE]] * 7 + ROWS + [[], [VALUE] * 2, [VALUE[:6]]]) | st.lists(
    st.binary(max_size=20) | st.sampled_from([b"", b"\xff" * len(VALUE), b"x" * 4000]), max_size=3
)

#: Requests that make sense at one time or another: those that do not make it past the first check show little.
request, key = st.integers(1, 3), st.sampled_from(["k", "k", "k", "j", 7])
few = st.sampled_from([1, 1, 1, 2, 2, 3, 0, 4])
rules = st.sampled_from([
    ("test", {"lr": -1.0}), ("sgd", {"lr": 0.1, "momentum": 0.9}), ("elastic", {"alpha": 0.5}), ("outer", {}),
    ("adam", {"lr": 1e300}), ("sgd", {"lr": float("nan")}), ("sgd", {}), ("test", {"alpha": 1}),
    ("sgd", {"lr": 0.1, "lr@k": 0.2, "momentum@": 0.5}), ("sgd", {"lr": 0.1, "@k": 7}), ("sgd", {"lr@@k": [1e400, 2]}),
])  # fmt: skip
to_server = st.one_of(
    st.builds(
        m.Hello, request, st.just(1), st.sampled_from(["sync", "async", "ssp:0", "softsync:1"]), st.integers(0, 1),
        st.just(2), few
    ),
    st.builds(
        m.Init, request, key, st.integers(0, 1), st.integers(1, 2), st.just(COUNT), st.sampled_from([[COUNT], [6]]),
        st.sampled_from(["float32", "float16", "int8"]),
    ),
    st.builds(
        m.Push, request, key, st.just(0), few, st.sampled_from(["none", "fp16", "bf16", "2bit:0.5", "1bit:0"]),
        st.booleans(), st.booleans(),
    ),
    *[st.builds(m.Push, request, st.just("k"), st.just(0), few, st.just("none"), st.booleans(), st.booleans())] * 4,
    st.builds(m.Pull, request, key, st.just(0), few),
    *[st.builds(m.Pull, request, key, st.just(0), few, st.just(0), st.sampled_from([2, 2, 0, 1 << 40]))] * 2,
    *[
        st.builds(m.Push, request, key, st.just(0), few, st.just("none"), st.booleans(), st.booleans(), st.just(0),
                  st.sampled_from([2, 2, 2, 0, 4, 1 << 40, -7]))
    ] * 3,
    st.builds(m.Query, request, key, st.just(0), few),
    st.tuples(request, few, rules).map(lambda drawn: m.SetRule(drawn[0], drawn[1], *drawn[2])),
    st.builds(m.SetHyperparams, request, few, st.sampled_from([{"lr": 0.5}, {"lr@k": 1}, {"@": True}, {}]), few),
    st.builds(m.GetState, request, key, st.just(0)),
    st.builds(m.PutState, request, key, st.just(0), few, st.sampled_from([["value"], ["value", "momentum"], []])),
    st.sampled_from([m.Bye(1), *[m.Pull(1, "k", 0, 1)] * 9]),  # not too often: the session is over then
    heard,
)  # fmt: skip
to_scheduler = st.one_of(
    st.builds(
        m.Register, request, st.sampled_from(["client", "server"]), st.integers(0, 1), st.sampled_from([1, -1]),
        st.integers(1, 2), few, st.just("h"), st.sampled_from([[], ["tcp://127.0.0.1:1"]]),
    ),
    st.builds(m.Barrier, request, few),
    st.builds(m.Heartbeat, few),
    st.builds(m.QueryDead, request, st.floats(0, 9)),
    st.sampled_from([m.Leave(1), *[m.Heartbeat(1)] * 9]),
    heard,
)  # fmt: skip


@contextmanager
def no_defects() -> Iterator[None]:
    """The state machines catch what they did not foresee, and log it."""
    found: list[logging.LogRecord] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = found.append  # type: ignore[method-assign]
    logger = logging.getLogger("kvmpi")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
    assert not found, "\n".join(logging.Formatter().format(record) for record in found)


def size_of(thing: Any, seen: set[int] | None = None) -> int:
    """How much a state holds: entries of its containers, and bytes of its arrays and texts, wherever they are."""
    seen = set() if seen is None else seen
    if id(thing) in seen or isinstance(thing, type | int | float | None):
        return 0
    seen.add(id(thing))
    if isinstance(thing, np.ndarray):
        return thing.nbytes
    if isinstance(thing, str | bytes | bytearray | memoryview):
        return len(thing)
    if isinstance(thing, dict):
        return len(thing) + sum(size_of(x, seen) for pair in thing.items() for x in pair)
    if isinstance(thing, list | tuple | set | frozenset) or hasattr(thing, "popleft"):
        return len(thing) + sum(size_of(x, seen) for x in thing)
    names = [name for cls in type(thing).__mro__ for name in getattr(cls, "__slots__", ())]
    parts = [getattr(thing, name, None) for name in names] + list(getattr(thing, "__dict__", {}).values())
    return sum(size_of(x, seen) for x in parts) if type(thing).__module__.startswith("kvmpi") else 0


def check_replies(replies: Sequence[Reply]) -> None:
    assert isinstance(replies, list)
    for reply in replies:
        assert isinstance(reply, Reply)
        assert reply.route in ROUTES
        encode(reply.message)
        assert all(isinstance(payload, np.ndarray) for payload in reply.payloads)
        if isinstance(reply.message, m.Failure):
            assert reply.message.error in BY_NAME
            assert "failed on a" not in reply.message.text


def is_refusal(route: bytes, replies: Sequence[Reply]) -> bool:
    """Whether the sender is told that its request is malformed, and nobody else is told anything."""
    if len(replies) != 1 or replies[0].route != route or not isinstance(replies[0].message, m.Failure):
        return False
    return issubclass(BY_NAME[replies[0].message.error], ProtocolError)


def alone() -> ServerState:
    """A server that holds everything by itself."""
    state = ServerState(0)
    state.adopt(m.View(1, 0, [m.Chain(1, [0])], [m.ServerInfo(0, 1, "host", [])], []))
    return state


def a_store(state: ServerState, mode: str) -> None:
    """Store 1 with two clients, and a key that has a value."""
    value = memoryview(bytearray(VALUE))
    for client, route in enumerate(ROUTES[:2]):
        state.handle(route, m.Hello(1, 1, mode, client, 2, 1), [])
        init = m.Init(2, "k", 0, 1, COUNT, [COUNT], "float32")
        replies = state.handle(route, init, [value] if client == 0 else [])
        assert [type(reply.message) for reply in replies] == [m.Ack]
    if mode != "sync":
        state.handle(ROUTES[0], m.SetRule(3, 1, "test", {"lr": -1.0, "rescale_grad": 1.0}), [])


@pytest.mark.parametrize("mode", ["sync", "async", "ssp:0", "softsync:1", ""])
@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from(ROUTES), to_server, payloads), min_size=10, max_size=40))
def test_a_server_answers_whatever_it_hears(
    mode: str, said: list[tuple[bytes, Message | ProtocolError, list[bytes]]]
) -> None:
    state = alone()
    if mode:
        a_store(state, mode)
    with no_defects(), np.errstate(all="ignore"):
        for route, message, frames in said:
            before = size_of(state)
            replies = state.handle(route, message, [memoryview(bytearray(frame)) for frame in frames])
            check_replies(replies)
            if is_refusal(route, replies):
                assert size_of(state) <= before, f"{message} was refused, and left something behind"


@pytest.mark.parametrize("num_servers", [1, 2])
@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from(ROUTES), to_scheduler, st.floats(0, 3)), min_size=10, max_size=40))
def test_a_scheduler_answers_whatever_it_hears(
    num_servers: int, said: list[tuple[bytes, Message | ProtocolError, float]]
) -> None:
    state = SchedulerState(num_servers, 5.0)
    now_s = 0.0
    with no_defects():
        for route, message, later_s in said:
            now_s += later_s
            before = size_of(state)
            replies = state.handle(route, message, now_s)
            check_replies(replies)
            if is_refusal(route, replies):
                assert size_of(state) <= before, f"{message} was refused, and left something behind"
            check_replies(state.tick(now_s))


def test_strangers_that_are_refused_leave_nothing_however_many_they_are() -> None:
    """Each under a name of its own, which must not be remembered."""
    server, scheduler = alone(), SchedulerState(1, 5.0)
    a_store(server, "sync")
    before = size_of(server), size_of(scheduler)
    refused = [
        m.Push(1, "k", 0, 1, "none", False), m.Pull(1, "k", 0, 0), m.GetState(1, "k", 0), m.Bye(1), m.Leave(1),
        m.Hello(1, 1, "sync", 5, 2, 1), m.Hello(1, 9, "no such mode", 0, 2, 1), m.Hello(1, 1, "sync", 0, 1 << 40, 1),
        m.Register(1, "server", -7, -1, 1, 1, "h", []), m.Register(1, "king", 0, -1, 1, 1, "h", []),
        m.Register(1, "server", 0, -1, 1, 1, "h" * 5000, []), m.Barrier(1, 1), m.Heartbeat(1), m.Ack(1, 1),
        ProtocolError("noise"),
    ]  # fmt: skip
    for number in range(200):
        for message in refused:
            route = b"t%d" % number
            for replies in (server.handle(route, message, []), scheduler.handle(route, message, 0.0)):
                assert [type(reply.message) for reply in replies] in ([m.Failure], [m.Ack], [m.Moved])
    assert (size_of(server), size_of(scheduler)) == before
