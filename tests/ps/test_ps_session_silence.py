"""The master's session in virtual time, where answers do not come: repetition and deadlines."""

from __future__ import annotations

import numpy as np
import pytest
from session_bench import RETRY_S, Bench, keys, push

from kvmpi.errors import KVError, KVTimeoutError, ServerLostError, ShapeMismatchError
from kvmpi.ps.asks import SCHEDULER, Ask, Operation
from kvmpi.wire import Message
from kvmpi.wire import messages as m

# ---- repetition


def test_a_request_is_repeated_until_it_is_answered() -> None:
    bench = Bench()
    bench.start("op", push(0, 1))
    (message,) = bench.flush()
    assert not bench.after(0.9 * RETRY_S)
    for pauses in (1, 2, 4):
        assert bench.after(1.1 * pauses * RETRY_S) == [message]
    bench.answer(message)
    assert not bench.after(100 * RETRY_S)


@pytest.mark.parametrize("accepted", [False, True])
def test_the_longer_the_silence_the_seldomer_a_request_is_repeated(accepted: bool) -> None:
    """Its first copy may be on its way over a slow link, behind those that were made since."""
    bench = Bench()
    bench.start("op", push(0, 1, fused=True), timeout_s=1000 * RETRY_S)
    (message,) = bench.flush()
    if accepted:
        bench.answer(message, m.Accepted)
    at_s = [bench.now_s for _ in range(640) if bench.after(0.1 * RETRY_S)]
    np.testing.assert_allclose(at_s, np.array([1, 3, 7, 15, 31, 63]) * RETRY_S, atol=RETRY_S)


def test_words_are_repeated_after_pauses_that_do_not_grow() -> None:
    """They take no room on a slow link, and a scheduler that is started again is to hear soon who waits."""
    bench = Bench()
    bench.start("op", Ask(SCHEDULER, m.Barrier, (1, 0)), timeout_s=1000 * RETRY_S)
    bench.flush()
    assert len([bench.now_s for _ in range(640) if bench.after(0.1 * RETRY_S)]) > 50


def test_short_operations_are_repeated_often_enough_whatever_the_silence() -> None:
    bench = Bench()
    bench.start("op", push(0, 1), timeout_s=8 * RETRY_S)
    bench.flush()
    at_s = [bench.now_s for _ in range(79) if bench.after(0.1 * RETRY_S)]
    np.testing.assert_allclose(at_s, [1.1, 3.2, 5.3, 7.4], atol=0.2)


def test_who_is_known_to_wait_for_others_is_asked_as_often_as_at_first() -> None:
    bench = Bench()
    bench.start("op", push(0, 1, fused=True), timeout_s=1000 * RETRY_S)
    (message,) = bench.flush()
    bench.answer(message, m.Accepted)
    for _ in range(20):
        assert bench.after(1.1 * RETRY_S)
        bench.answer(message, m.Waiting, [3])


def test_another_server_is_asked_as_soon_as_the_first_was() -> None:
    bench = Bench()

    def view(epoch: int, head: int, incarnation: int) -> m.View:
        servers = [m.ServerInfo(rank, incarnation, "host", []) for rank in range(2)]
        return m.View(epoch, 0, [m.Chain(epoch, [head])], servers, [])

    def greet() -> None:
        for hello in bench.flush():
            bench.answer(hello)

    bench.start("hello", *(Ask(server, m.Hello, (1, "sync", 0, 2, 1)) for server in range(2)))
    greet()
    bench.session.adopt(view(1, 0, 1))
    greet()
    bench.start("op", push(0, 1, part=0), timeout_s=1000 * RETRY_S)
    for epoch, head, incarnation in [(2, 1, 1), (3, 1, 2)]:
        (message,) = bench.flush()
        for _ in range(40):
            bench.after(RETRY_S)
        bench.session.adopt(view(epoch, head, incarnation))
        if incarnation > 1:
            greet()
    assert bench.flush() == [message]
    assert not bench.after(0.9 * RETRY_S)
    assert bench.after(0.2 * RETRY_S) == [message]


def test_what_needs_a_part_that_is_lost_fails_at_once() -> None:
    bench = Bench()
    servers = [m.ServerInfo(0, 1, "host", [])]
    bench.session.adopt(m.View(1, 0, [m.Chain(1, [0]), m.Chain(1, [0])], servers, []))
    bench.start("hello", Ask(0, m.Hello, (1, "sync", 0, 2, 1)))
    bench.answer(*bench.flush())
    for part in range(2):
        bench.start(f"of part {part}", push(0, 1, part=part))
    bench.flush()
    bench.session.adopt(m.View(2, 0, [m.Chain(1, [0]), m.Chain(2, [], why="server 1 was lost")], servers, []))
    bench.start("later", push(0, 1, part=1))
    assert [label for label in bench.ended if label != "hello"] == ["of part 1", "later"]
    for label in ("of part 1", "later"):
        error = bench.ended[label]
        assert isinstance(error, ServerLostError)
        assert f"{label}: server 1 was lost" in str(error)


def test_nothing_is_repeated_while_what_left_before_it_is_answered() -> None:
    """A link carries what it is given in order, and may be as slow as it wants; what it has lost comes again."""
    bench = Bench(1000)
    for number in range(10):
        bench.start(f"op {number}", push(0, 1, number), timeout_s=1000 * RETRY_S)
    messages = bench.flush()
    for message in messages[:8]:
        assert not bench.after(0.9 * RETRY_S)
        bench.answer(message)
    assert keys(bench.after(1.1 * RETRY_S)) == [8, 9]
    bench.answer(messages[9])
    bench.start("later", push(0, 1, "later"), timeout_s=1000 * RETRY_S)
    bench.flush()
    assert not bench.after(0.9 * RETRY_S)
    bench.start("last", push(0, 1, "last"), timeout_s=1000 * RETRY_S)
    (last,) = bench.flush()
    assert keys(bench.after(0.2 * RETRY_S)) == ["later"]
    bench.answer(last)  # who has that would have had what left before
    assert keys(bench.after(1.0 * RETRY_S)) == [8]


def test_short_operations_are_repeated_sooner() -> None:
    bench = Bench()
    bench.start("op", push(0, 1), timeout_s=1.0)
    (message,) = bench.flush()
    assert bench.after(0.3) == [message]


def test_an_accepted_fused_push_asks_only_for_its_answer() -> None:
    bench = Bench(10)
    bench.start("op", push(0, 10, fused=True))
    bench.start("next", push(0, 10, "next"))
    (message,) = bench.flush()
    bench.answer(message, m.Accepted)
    assert not bench.ended
    assert keys(bench.flush()) == ["next"], "its window is free"
    assert m.Query(message.request, "k", 0, 1) in bench.after(1.1 * RETRY_S)  # type: ignore[attr-defined]
    bench.answer(message, m.Accepted)  # once more
    bench.answer(message, m.Value)
    assert bench.ended == {"op": None}
    assert bench.session._in_flight[0, False] == 10


def test_acceptance_is_told_once_when_every_push_is_in_its_round_or_all_is_over() -> None:
    bench = Bench()
    bench.start("both", push(0, 1, "a", fused=True), push(1, 1, "b", fused=True))
    first, second = bench.flush()
    bench.answer(first, m.Accepted)
    bench.answer(first, m.Accepted)
    assert bench.accepted == []
    bench.answer(second, m.Accepted)
    assert bench.accepted == ["both"]
    assert bench.ended == {}
    bench.answer(first, m.Value)
    bench.answer(second, m.Value)
    assert bench.accepted == ["both"]
    assert bench.ended == {"both": None}

    bench.start("value first", push(0, 1, "a", fused=True), push(1, 1, "b", fused=True))
    first, second = bench.flush()
    bench.answer(first, m.Value)
    assert bench.accepted == ["both"]
    bench.answer(second)
    assert bench.accepted == ["both", "value first"]
    bench.start("too late", push(0, 1, "a", fused=True), timeout_s=1.0)
    bench.after(2.0)
    bench.start("nothing to ask")
    assert bench.accepted == ["both", "value first", "too late", "nothing to ask"]


def test_what_has_not_left_is_not_repeated() -> None:
    bench = Bench(1)
    bench.start("first", push(0, 1, "first"))
    bench.start("second", push(0, 1, "second"))
    bench.flush()
    assert keys(bench.after(1.1 * RETRY_S)) == ["first"]


def test_what_is_to_be_repeated_while_no_server_answers_is_repeated_once() -> None:
    """A part is on its way to another server, whose head has accepted a push; that may last."""
    bench = Bench()

    def view(epoch: int, head: int, *, draining: bool = False) -> m.View:
        chain = m.Chain(epoch, [head, 1 - head], draining=draining)
        return m.View(epoch, 0, [chain], [m.ServerInfo(rank, 1, "host", []) for rank in range(2)], [])

    bench.start("hello", *(Ask(server, m.Hello, (1, "sync", 0, 2, 1)) for server in range(2)))
    for hello in bench.flush():
        bench.answer(hello)
    bench.session.adopt(view(1, 0))
    for hello in bench.flush():
        bench.answer(hello)
    bench.start("op", push(0, 1, fused=True, part=0), timeout_s=1000.0)
    (message,) = bench.flush()
    bench.answer(message, m.Accepted)
    bench.session.adopt(view(2, 0, draining=True))
    for _ in range(50):
        assert not bench.after(1.1 * RETRY_S)
    assert len(bench.session._repeats) == 1
    bench.session.adopt(view(3, 1))
    assert bench.flush() == [m.Query(message.request, "k", 0, 1)]  # type: ignore[attr-defined]


# ---- deadlines


def test_a_deadline_names_operation_server_and_missing_clients() -> None:
    bench = Bench()
    bench.start("push of key 'w'", push(0, 1), push(1, 1, fused=True), push(2, 1), Ask(SCHEDULER, m.Barrier, (1,)),
                timeout_s=8.0)  # fmt: skip
    zero, one, two, _ = bench.flush()
    bench.answer(two)
    bench.answer(one, m.Accepted)
    bench.answer(zero, m.Waiting, [3, 5])
    bench.after(7.9)
    assert not bench.ended
    bench.after(0.2)
    error = bench.ended["push of key 'w'"]
    assert isinstance(error, KVTimeoutError)
    text = str(error)
    for part in ("push of key 'w'", "8.0 s", "server 0 still waits for client 3, 5", "server 1 has accepted it",
                 "no answer from the scheduler", "KVMPI_TIMEOUT_S"):  # fmt: skip
        assert part in text
    assert "server 2" not in text
    assert bench.session.idle


def test_a_deadline_keeps_an_error_that_came_before() -> None:
    bench = Bench()
    bench.start("op", push(0, 1), push(1, 1), timeout_s=1.0)
    first, _ = bench.flush()
    bench.answer(first, m.Failure, "ShapeMismatchError", "the cause")
    bench.after(2.0)
    assert isinstance(bench.ended["op"], ShapeMismatchError)


def test_a_deadline_frees_the_window_and_what_was_queued_never_leaves() -> None:
    bench = Bench(10)
    bench.start("slow", push(0, 10, "sent"), push(0, 10, "queued"), timeout_s=1.0)
    bench.start("next", push(0, 10, "next"))
    assert keys(bench.flush()) == ["sent"]
    assert keys(bench.after(1.5)) == ["next"]
    which = "(key 'sent', 'queued')"
    assert f"no answer from server 0 {which}; check that process and the network to it" in str(bench.ended["slow"])


def test_requests_that_go_on_behind_their_deadline_all_leave_and_hold_back_those_behind_them() -> None:
    bench, late, taken = Bench(10), list[KVError](), list[Message]()

    def start(label: str, *asks: Ask, after: tuple[Operation, ...] = (), timeout_s: float = 100.0) -> Operation:
        def on_done(error: KVError | None) -> None:
            assert label not in bench.ended
            bench.ended[label] = error

        operation = Operation(label, timeout_s, bench.now_s, on_done, None, lambda e: not late.append(e), after)
        bench.session.submit(operation, asks)
        return operation

    asks = [push(0, 10, i, on_reply=lambda message, payloads: taken.append(message)) for i in range(3)]
    first = start("first", *asks, timeout_s=5.0)
    (message,) = bench.flush()
    bench.after(6.0)
    assert [type(error) for error in late] == [KVTimeoutError]
    assert bench.ended == {}
    second = start("second", push(0, 10, "second"), after=(first,), timeout_s=5.0)
    start("third", push(0, 10, "third"), after=(first, second))
    bench.after(6.0)
    assert len(late) == 2
    assert "first" not in bench.ended
    assert len(bench.session.waits()) == 1, "somebody waits for the third only"
    sent = [message]
    for key in (0, 1, 2, "second", "third"):
        assert keys(sent) == [key]
        bench.answer(sent[0])
        sent = bench.flush()
    assert bench.ended == {"first": None, "second": None, "third": None}
    assert not taken, "where it would have put an answer may be somebody else's"
    assert set(bench.session._in_flight.values()) == {0}
    assert bench.session.idle


def test_requests_leave_when_all_operations_are_over_that_they_wait_for() -> None:
    bench = Bench()

    def start(label: str, peer: int, *after: Operation) -> Operation:
        operation = Operation(label, 100.0, bench.now_s, lambda error: bench.ended.update({label: error}), after=after)
        bench.session.submit(operation, [push(peer, 10, label)])
        return operation

    start("third", 0, start("first", 0), start("second", 1))
    first, second = bench.flush()
    assert keys([first, second]) == ["first", "second"]
    bench.answer(second)
    assert bench.flush() == []
    bench.answer(first)
    assert keys(bench.flush()) == ["third"]


def test_a_request_that_could_not_leave_says_so() -> None:
    bench = Bench(10)
    bench.start("first", push(0, 10))
    bench.start("second", push(0, 10), timeout_s=1.0)
    bench.flush()
    bench.after(1.5)
    assert "not yet sent to server 0" in str(bench.ended["second"])


def test_what_waits_for_a_server_that_does_not_know_this_client_says_so() -> None:
    bench = Bench()
    bench.session.adopt(m.View(1, 0, [m.Chain(1, [0])], [m.ServerInfo(0, 1, "host", [])], []))
    bench.start("hello", Ask(0, m.Hello, (1, "sync", 0, 2, 1)))
    bench.flush()
    bench.start("push", push(-2, 1, part=0), timeout_s=5.0)
    assert not bench.flush()
    assert "not answered this client's Hello" in next(
        wait.whom for wait in bench.session.waits() if wait.what == "push"
    )
    bench.after(6.0)
    assert "not yet sent to server 0, which has not answered this client's Hello" in str(bench.ended["push"])
