"""The master's session in virtual time: windows, order, ends and the loss of peers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from session_bench import RETRY_S, Bench, is_quiet, keys, pull, push

from kvmpi.errors import KVError, KVTimeoutError, PeerLostError, ProtocolError, ServerLostError, ShapeMismatchError
from kvmpi.ps.asks import Ask
from kvmpi.wire import Message
from kvmpi.wire import messages as m

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
    assert keys(bench.flush()) == ["old 3"], "and nothing that would not fit"
    for message in (first, *older[1:]):
        bench.answer(message)
    assert keys(bench.flush()) == ["new"]
    assert bench.session._in_flight[0, False] == 41


def test_what_is_newer_than_a_request_that_waits_need_not_stay_behind_it_either() -> None:
    """A push of a key that waits for the one before it is queued behind what the program has pushed since."""
    bench = Bench(100)
    bench.start("large", push(0, 280, "large"))
    bench.start("next of a key", push(0, 0, "next of a key"))
    (large,) = bench.flush()
    bench.answer(large, m.Waiting, [1], [])
    (small,) = bench.flush()
    assert keys([large, small]) == ["large", "next of a key"]
    bench.answer(small)
    bench.answer(large)
    assert bench.session.idle
    assert bench.session._in_flight[0, False] == 0


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


def test_a_part_may_be_lost_before_what_is_for_it_has_left() -> None:
    """Its server does not know this client yet: where the request has waited nothing is left when a view loses it."""
    bench = Bench()
    bench.session.adopt(m.View(1, 0, [m.Chain(1, [0])], [m.ServerInfo(0, 1, "h", [])], []))
    bench.start("op", push(0, 1, part=0))
    assert not bench.flush()
    bench.session.adopt(m.View(2, 0, [m.Chain(2, [], why="server 0 was lost")], [], []))
    assert isinstance(bench.ended["op"], ServerLostError)
    assert not bench.flush()
    bench.session.adopt(m.View(3, 0, [m.Chain(3, [1])], [m.ServerInfo(1, 1, "h", [])], []))
    bench.start("other", push(1, 1, "other"))
    assert keys(bench.flush()) == ["other"]


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
