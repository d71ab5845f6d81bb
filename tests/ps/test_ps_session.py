"""The master's session in virtual time: windows, order, repetition, deadlines and the loss of peers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvmpi.errors import KVError, KVTimeoutError, PeerLostError, ProtocolError, ServerLostError, ShapeMismatchError
from kvmpi.ps.asks import SCHEDULER, Ask, Operation
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


# ---- windows and order


def test_the_windows_are_never_exceeded_but_by_one_large_request() -> None:
    rng, seen_quiet = np.random.default_rng(5), 0
    for round_ in range(60):
        window = int(rng.integers(1, 200))
        bench = Bench(window)
        cost: dict[int, int] = {}
        wheres: dict[int, tuple[int, bool]] = {}
        open_: dict[int, Message] = {}
        for i in range(60):
            peer, reads = int(rng.integers(2)), bool(rng.integers(2))
            size = int(rng.integers(0, 120)) // int(rng.integers(1, 20))  # quiet ones are small
            fused = bool(rng.integers(2))
            may_be_quiet = fused and bool(rng.integers(2))
            ask = pull(peer, size, i) if reads else push(peer, size, i, fused=fused, may_be_quiet=may_be_quiet)
            bench.start(f"op {i}", ask, priority=int(rng.integers(3)), timeout_s=float(rng.integers(5, 50)))
            cost[ask.number], wheres[ask.number] = size, (peer, reads)
        for _ in range(2000):
            for message in bench.flush():
                open_[message.request] = message  # type: ignore[attr-defined]
            for where in set(wheres.values()):
                here = [number for number in open_ if wheres[number] == where]
                quiet = [cost[number] for number in here if is_quiet(open_[number])]
                taken = [cost[number] for number in here if cost[number] and not is_quiet(open_[number])]
                assert sum(taken) <= window or len(taken) == 1, f"{round_=}: {taken} in a window of {window}"
                assert sum(quiet) <= window / 8, f"{round_=}: {quiet} in a window of {window}"
                seen_quiet += len(quiet)
            if not open_:
                break
            number = int(rng.choice(list(open_)))
            message = open_.pop(number)
            if rng.random() < 0.2:
                bench.after(2.0)
            elif isinstance(message, m.Push) and message.fused and not message.quiet:
                bench.answer(message, m.Accepted)  # no longer under way
            else:
                bench.answer(message, m.Value)
            # What has timed out is no longer under way either.
            open_ = {n: msg for n, msg in open_.items() if f"op {msg.key}" not in bench.ended}  # type: ignore[attr-defined]
        assert not open_
        bench.session.fail_all(KVError("end"))
        assert len(bench.ended) == 60
        assert set(bench.session._in_flight.values()) == {0}
    assert seen_quiet > 100


def test_quiet_pushes_take_no_room_from_others_and_others_none_from_them() -> None:
    bench = Bench(160)
    bench.start("quiet", *(push(0, 8, f"quiet {i}", fused=True, may_be_quiet=True) for i in range(2)))
    bench.start("large", push(0, 160, "large", fused=True))  # what others wait for must leave
    sent = bench.flush()
    assert [(message.key, message.quiet) for message in sent] == [  # type: ignore[attr-defined]
        ("quiet 0", True), ("quiet 1", True), ("large", False),
    ]  # fmt: skip
    # There is no room left to be quiet in, so that it asks for a word, and waits for room elsewhere.
    bench.start("third", push(0, 8, "third", fused=True, may_be_quiet=True))
    assert not bench.flush()
    bench.answer(sent[2], m.Accepted)
    (third,) = bench.flush()
    assert not is_quiet(third)
    bench.answer(sent[0], m.Value)
    bench.start("fourth", push(0, 12, "fourth", fused=True, may_be_quiet=True))
    (fourth,) = bench.flush()
    assert is_quiet(fourth)
    assert bench.accepted == ["large"]
    bench.answer(sent[1], m.Value)
    assert bench.accepted == ["large", "quiet"]
    assert bench.ended == {"quiet": None}


def test_a_quiet_push_that_is_not_answered_is_repeated_until_it_is_accepted() -> None:
    bench = Bench(160)
    bench.start("op", push(0, 20, fused=True, may_be_quiet=True))
    (message,) = bench.flush()
    assert is_quiet(message)
    assert bench.after(1.1 * RETRY_S) == [message]
    bench.answer(message, m.Accepted)
    bench.answer(message, m.Waiting, [3])
    assert bench.after(1.1 * RETRY_S) == [m.Query(message.request, "k", 0, 1)]  # type: ignore[attr-defined]
    bench.start("next", push(0, 20, "next", fused=True, may_be_quiet=True))
    (following,) = bench.flush()
    assert is_quiet(following), "its room is free"


def test_reads_and_pushes_have_windows_of_their_own_and_so_has_each_peer() -> None:
    bench = Bench(100)
    for peer in (0, 1):
        bench.start(f"push {peer}", push(peer, 100, f"push {peer}"))
        bench.start(f"more {peer}", push(peer, 1, f"more {peer}"))
        bench.start(f"pull {peer}", pull(peer, 100, f"pull {peer}"))
    sent = bench.flush()
    assert sorted(keys(sent)) == ["pull 0", "pull 1", "push 0", "push 1"]
    bench.answer(next(message for message in sent if message.key == "push 1"))  # type: ignore[attr-defined]
    assert keys(bench.flush()) == ["more 1"]


def test_a_request_larger_than_the_window_goes_alone() -> None:
    bench = Bench(100)
    bench.start("small", push(0, 10, "small"))
    bench.start("huge", push(0, 1000, "huge"))
    bench.start("next", push(0, 10, "next"))
    (small,) = bench.flush()
    bench.answer(small)
    (huge,) = bench.flush()
    assert huge.key == "huge"  # type: ignore[attr-defined]
    assert not bench.flush()
    bench.answer(huge)
    assert keys(bench.flush()) == ["next"]


def test_larger_priorities_leave_first_then_the_older() -> None:
    bench = Bench(1)
    for key, priority in [("a", 0), ("b", -1), ("c", 5), ("d", 0), ("e", 5)]:
        bench.start(key, push(0, 1, key), priority=priority)
    order = []
    while sent := bench.flush():
        order += keys(sent)
        bench.answer(sent[0])
    assert order == ["c", "e", "a", "d", "b"]


def test_payloads_are_made_when_the_request_leaves() -> None:
    bench = Bench(10)
    made: list[str] = []

    def payloads(name: str) -> Any:
        return lambda: made.append(name) or ()

    bench.start("first", push(0, 10, payloads=payloads("first")))
    bench.start("second", push(0, 10, payloads=payloads("second")))
    (message,) = bench.flush()
    assert made == ["first"]
    bench.answer(message)
    bench.flush()
    assert made == ["first", "second"]


# ---- ends


def test_an_operation_ends_with_its_last_answer_and_its_first_error() -> None:
    bench = Bench()
    bench.start("op", push(0, 1), push(1, 1), push(2, 1))
    first, second, third = bench.flush()
    bench.answer(second, m.Failure, "ShapeMismatchError", "second")
    bench.answer(first, m.Failure, "KVError", "first")
    assert not bench.ended
    bench.answer(third)
    assert isinstance(bench.ended["op"], ShapeMismatchError)
    assert "second" in str(bench.ended["op"])
    assert bench.session.idle


def test_an_init_that_one_server_refuses_waits_for_no_other() -> None:
    bench = Bench()
    bench.start("op", *(Ask(peer, m.Init, ("k", peer, 2, 3, [6], "float32")) for peer in (0, 1)))
    refused, _ = bench.flush()
    bench.answer(refused, m.Failure, "ShapeMismatchError", "not yours")
    assert isinstance(bench.ended["op"], ShapeMismatchError)
    assert bench.session.idle


def test_servers_may_forget_what_they_keep_when_the_whole_operation_has_its_answers() -> None:
    bench = Bench()
    for label in ("whole", "in part"):
        bench.start(label, *(Ask(i, m.Push, (label, i, 7, "none", True)) for i in range(2)))
    sent: list[Any] = bench.flush()
    whole, part = ([message for message in sent if message.key == key] for key in ("whole", "in part"))
    for message in (whole[0], part[0]):
        bench.answer(message, m.Value, 1, -1, True)
    assert bench.flush() == []
    bench.answer(part[1], m.Failure, "KVError", "no")
    assert isinstance(bench.ended["in part"], KVError)
    assert bench.flush() == []  # the first chunk's answer is wanted once more when that is made again
    bench.answer(whole[1], m.Value, 1)  # not kept
    assert bench.ended["whole"] is None
    assert bench.flush() == [m.Query(whole[0].request, "whole", 0, 7, fused=False)]


def test_no_requests_are_done_at_once() -> None:
    bench = Bench()
    bench.start("op")
    assert bench.ended == {"op": None}
    assert bench.session.idle


def test_late_and_unasked_answers_are_ignored() -> None:
    bench = Bench()
    got: list[Message] = []
    bench.start("op", push(0, 1, on_reply=lambda message, payloads: got.append(message)))
    (message,) = bench.flush()
    bench.answer(message)
    for kind, fields in [(m.Ack, (1,)), (m.Value, (1,)), (m.Failure, ("KVError", "x")), (m.Waiting, ([1],))]:
        bench.answer(message, kind, *fields)
    for stray in (m.Ack(-1, 0), m.Ack(999, 0), m.Heartbeat(1), m.Moved(-1)):
        bench.session.receive(stray, [])
    assert bench.ended == {"op": None}
    assert len(got) == 1


def test_an_answer_after_the_deadline_does_not_touch_the_buffers() -> None:
    bench = Bench()
    got: list[Message] = []
    ask = pull(0, 1)
    ask.on_reply = lambda message, payloads: got.append(message)
    bench.start("op", ask, timeout_s=1.0)
    (message,) = bench.flush()
    bench.after(2.0)
    assert isinstance(bench.ended["op"], KVTimeoutError)
    bench.answer(message, m.Value)
    assert not got


@pytest.mark.parametrize("error", [ProtocolError("odd"), ZeroDivisionError("odd")])
def test_an_answer_that_cannot_be_taken_in_fails_its_operation_only(error: Exception) -> None:
    bench = Bench()

    def on_reply(message: Message, payloads: list[memoryview]) -> None:
        raise error

    bench.start("bad", push(0, 60, on_reply=on_reply))
    bench.start("good", push(0, 60))
    (bad,) = bench.flush()
    bench.answer(bad)
    (good,) = bench.flush()
    bench.answer(good)
    assert isinstance(bench.ended["bad"], KVError)
    assert "odd" in str(bench.ended["bad"])
    assert bench.ended["good"] is None


def test_what_is_older_than_a_request_that_waits_need_not_stay_behind_it() -> None:
    """Others may wait for it, and the one that waits for them; there is a second window for that, and no third."""
    bench = Bench(100)
    for number in range(4):
        bench.start(f"old {number}", push(0, 40, f"old {number}"))
    bench.start("first", push(0, 90, "first"), priority=1)
    bench.start("other reads", pull(0, 90, "other reads"), priority=1)
    bench.start("new", push(0, 1, "new"))
    first, reads = bench.flush()
    assert keys([first, reads]) == ["first", "other reads"]
    assert not bench.after(0.1)
    bench.answer(reads, m.Waiting, [1], [])
    assert not bench.flush(), "what has another window is not in its way"
    bench.answer(first, m.Waiting, [1], [])
    older = bench.flush()
    assert keys(older) == ["old 0", "old 1", "old 2"], "in their order, into a second window"
    for message in (first, *older):
        bench.answer(message, m.Waiting, [1], [])
    assert not bench.flush(), "there is no third"
    bench.answer(first, m.Waiting, [1], [])
    assert not bench.flush()
    bench.answer(older[0])
    assert not bench.flush()
    bench.answer(first, m.Waiting, [1], [])
    assert keys(bench.flush()) == ["old 3"], "and nothing newer"
    for message in (first, *older[1:]):
        bench.answer(message)
    assert keys(bench.flush()) == ["new"]
    assert bench.session._in_flight[0, False] == 41


def test_a_request_that_has_left_out_of_turn_is_repeated_and_sent_once() -> None:
    bench = Bench(10)
    bench.start("old", push(0, 10, "old"))
    bench.start("first", push(0, 10, "first"), priority=1)
    (first,) = bench.flush()
    (again,) = bench.after(RETRY_S + 0.1)
    bench.answer(again, m.Waiting, [2], [])
    bench.answer(first, m.Waiting, [2], [])
    (old,) = bench.flush()
    assert keys([old]) == ["old"]
    assert sorted(keys(bench.after(2 * RETRY_S + 0.1))) == ["first", "old"]
    bench.answer(old)
    assert not bench.flush()
    bench.answer(first)
    assert not bench.flush()
    assert bench.ended == {"old": None, "first": None}
    assert bench.session._in_flight[0, False] == 0


def test_a_request_that_cannot_be_made_or_sent_fails_and_frees_its_window() -> None:
    bench = Bench(10)

    def payloads() -> Any:
        raise ZeroDivisionError("codec")

    bench.start("made", push(0, 10, payloads=payloads))
    bench.start("sent", push(0, 10))
    bench.start("good", push(0, 10, "good"))
    (unsendable,) = bench.flush()
    assert "codec" in str(bench.ended["made"])
    bench.session.reject(unsendable.request, ProtocolError("too large"))  # type: ignore[attr-defined]
    assert isinstance(bench.ended["sent"], ProtocolError)
    assert keys(bench.flush()) == ["good"]


def test_something_else_than_an_answer_is_an_error() -> None:
    bench = Bench()
    bench.start("op", push(0, 1))
    (message,) = bench.flush()
    bench.session.receive(m.Bye(message.request), [])  # type: ignore[attr-defined]
    assert isinstance(bench.ended["op"], ProtocolError)


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
    assert "no answer from server 0" in str(bench.ended["slow"])


def test_requests_that_go_on_behind_their_deadline_all_leave_and_hold_back_those_behind_them() -> None:
    bench, late, taken = Bench(10), list[KVError](), list[Message]()

    def start(label: str, *asks: Ask, after: Operation | None = None, timeout_s: float = 100.0) -> Operation:
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
    second = start("second", push(0, 10, "second"), after=first, timeout_s=5.0)
    start("third", push(0, 10, "third"), after=second)
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


# ---- lost peers


def test_a_lost_server_ends_at_once_what_needs_it_and_nothing_else() -> None:
    bench = Bench(10)
    bench.start("both", push(0, 10), push(1, 10))
    bench.start("queued", push(1, 10, "queued"))
    bench.start("other", push(0, 10, "other"))
    zero, one = bench.flush()
    bench.session.lose_peer(1, "server 1 was lost: no heartbeat for 9.0 s")
    assert sorted(bench.ended) == ["both", "queued"]
    for label in ("both", "queued"):
        error = bench.ended[label]
        assert isinstance(error, ServerLostError)
        for part in (label, "server 1", "no heartbeat"):
            assert part in str(error)
    bench.answer(zero)
    bench.answer(one)
    assert keys(bench.flush()) == ["other"]
    bench.start("late", push(0, 1, "late"), push(1, 1, "late"))
    assert isinstance(bench.ended["late"], ServerLostError)
    assert not bench.flush(), "nothing of it leaves"


def test_an_answered_request_to_a_server_that_is_lost_later_counts() -> None:
    bench = Bench()
    bench.start("op", push(0, 1), push(1, 1))
    zero, one = bench.flush()
    bench.answer(one)
    bench.session.lose_peer(1, "server 1 was lost")
    assert not bench.ended
    bench.answer(zero)
    assert bench.ended == {"op": None}


def test_fail_all_ends_everything_once_and_the_session_can_go_on() -> None:
    bench = Bench(10)
    for i in range(4):
        bench.start(f"op {i}", push(0, 10, i), pull(1, 10, i))
    sent = bench.flush()
    bench.session.fail_all(PeerLostError("the end"))
    assert all(isinstance(error, PeerLostError) for error in bench.ended.values())
    assert len(bench.ended) == 4
    assert bench.session.idle
    bench.session.fail_all(KVError("again"))
    for message in sent:
        bench.answer(message)
    assert not bench.after(100.0)
    bench.start("new", push(0, 10, "new"))
    assert keys(bench.flush()) == ["new"]
