"""The barriers of a store whose clients wait for one that is started again: its program may skip some, or meet all."""

from __future__ import annotations

import itertools

import pytest

from kvmpi.ps.barriers import NOBODY, Barriers
from kvmpi.ps.membership import CLOSED
from kvmpi.ps.reply import Reply
from kvmpi.wire import messages as m
from kvmpi.wire.messages import NEXT_BARRIER

LAST = 4
"""The step of both clients when client 1 was lost, after three barriers."""


class Meeting:
    """Two clients that have met three times; ``restarts``: another process goes on with what was saved."""

    def __init__(self, *, restarts: bool = False) -> None:
        self.barriers = Barriers(2, "wait", lambda: None)
        self._restarts = restarts
        self._numbers = itertools.count(1)
        for ordinal, step in ((1, 0), (2, 1), (3, 3)):
            self.come(0, ordinal, step)
            assert self.come(1, ordinal, step) == {0: ordinal, 1: ordinal}

    def lose_and_bring_back(self, *, at_barrier: int = 0) -> None:
        if at_barrier:
            assert self.come(0, at_barrier, LAST) == {}
        assert self.barriers.lose(1, "was lost: no heartbeat") == []
        self.barriers.dead.pop(1)
        self.barriers.bring_back(1)

    def come(self, client: int, ordinal: int, step: int, request: int = 0) -> dict[int, int]:
        """Who passes because of that, and what number they are told."""
        self.request = request or next(self._numbers)
        message = m.Barrier(self.request, ordinal, step)
        return self.passed(self.barriers.arrive(client, b"%d" % client, message, 0.0, lambda rank: 0.0))

    def passed(self, replies: list[Reply]) -> dict[int, int]:
        if self._restarts:
            before, self.barriers = self.barriers, Barriers(2, "wait", lambda: None)
            self.barriers.restore(before.save(1))
            self.barriers.waiting = before.waiting  # they ask again
        return {int(reply.route): reply.message.version for reply in replies if isinstance(reply.message, m.Ack)}


@pytest.mark.parametrize("restarts", [False, True])
def test_a_client_that_skips_what_is_done_meets_the_others_at_the_next_barrier(restarts: bool) -> None:
    meeting = Meeting(restarts=restarts)
    meeting.lose_and_bring_back()
    assert meeting.passed(meeting.barriers.enter(1, LAST)) == {}
    assert meeting.come(1, 1, LAST) == {1: 3}, "that of the beginning is over"
    assert meeting.come(0, 4, LAST + 1) == {}
    assert meeting.come(1, NEXT_BARRIER, LAST + 1) == {0: 4, 1: 4}
    assert meeting.come(1, NEXT_BARRIER, LAST + 1, meeting.request) == {1: 4}, "the answer was lost"
    assert meeting.come(1, 5, LAST + 2) == {}
    assert meeting.come(0, 5, LAST + 2) == {0: 5, 1: 5}


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize(("at", "met"), [(LAST + 1, 4), (LAST + 2, 5)])
def test_a_barrier_that_overtakes_the_word_of_its_client_s_entry(at: int, met: int, restarts: bool) -> None:
    """Sent again, that word comes later: the client is at a barrier that is over, and not at the open one."""
    meeting = Meeting(restarts=restarts)
    for ordinal, step in ((4, LAST + 1), (5, LAST + 3)):
        meeting.come(0, ordinal, step)
        assert meeting.come(1, ordinal, step) == {0: ordinal, 1: ordinal}
    meeting.lose_and_bring_back()
    assert meeting.come(0, 6, LAST + 3) == {}, "there are two after the last step"
    assert meeting.come(1, NEXT_BARRIER, at) == {1: met}
    assert meeting.passed(meeting.barriers.enter(1, at - 1)) == {}
    assert meeting.come(1, NEXT_BARRIER, at, meeting.request) == {1: met}, "the answer was lost"
    for ordinal in range(met + 1, 6):
        assert meeting.come(1, ordinal, LAST + 3) == {1: 5}
    assert meeting.come(1, 6, LAST + 3) == {0: 6, 1: 6}


@pytest.mark.parametrize("restarts", [False, True])
def test_a_barrier_that_overtakes_that_word_is_not_one_that_its_client_skips(restarts: bool) -> None:
    meeting = Meeting(restarts=restarts)
    meeting.lose_and_bring_back(at_barrier=4)
    assert meeting.come(1, NEXT_BARRIER, LAST + 1) == {0: 4}, "it has gone on after that step"
    assert meeting.passed(meeting.barriers.enter(1, LAST)) == {}
    assert meeting.come(0, 5, LAST + 1) == {0: 5, 1: 5}


@pytest.mark.parametrize("restarts", [False, True])
def test_what_has_failed_on_one_client_is_told_to_all_that_meet_and_to_who_asks_again(restarts: bool) -> None:
    def come(client: int, ordinal: int, error: str = "", text: str = "") -> dict[int, tuple[int, str, str]]:
        message = m.Barrier(ordinal, ordinal, LAST, error, text)
        replies = meeting.barriers.arrive(client, b"%d" % client, message, 0.0, lambda rank: 0.0)
        meeting.passed([])
        acks = [(int(r.route), r.message) for r in replies if isinstance(r.message, m.Ack)]
        return {rank: (ack.version, ack.error, ack.text) for rank, ack in acks}

    meeting = Meeting(restarts=restarts)
    assert come(1, 4, "KVError", "full") == {}
    failed = (4, "KVError", "client 1: full")
    assert come(0, 4) == {0: failed, 1: failed}
    assert come(1, 4) == {1: failed}, "the answer was lost"
    assert come(0, 5) == {}
    assert come(0, 5) == {}, "it asks again"
    assert come(1, 5) == {0: (5, "", ""), 1: (5, "", "")}
    assert come(0, 6, "KVError", "a" * 9999) == {}
    first = (6, "KVError", "client 0: " + "a" * 4000)
    assert come(1, 6, "ConfigError", "late") == {0: first, 1: first}
    assert come(0, 7, "E" * 260_000, "no room in the header of an Ack") == {}
    assert come(1, 7)[1] == (7, "E" * 100, "client 0: no room in the header of an Ack")
    for ordinal in range(8, 100):
        come(0, ordinal, "KVError", "again")
        assert come(1, ordinal)[0] == (ordinal, "KVError", "client 0: again")
    assert len(meeting.barriers.outcomes) == 16


@pytest.mark.parametrize("restarts", [False, True])
def test_a_yes_of_one_client_is_told_to_all_and_hides_no_failure(restarts: bool) -> None:
    def come(client: int, ordinal: int, *, error: str = "", yes: bool = False) -> dict[int, tuple[bool, str]]:
        message = m.Barrier(ordinal, ordinal, LAST, error, "text", yes)
        replies = meeting.barriers.arrive(client, b"%d" % client, message, 0.0, lambda rank: 0.0)
        meeting.passed([])
        return {int(r.route): (r.message.yes, r.message.error) for r in replies if isinstance(r.message, m.Ack)}

    meeting = Meeting(restarts=restarts)
    assert come(0, 4) == {}
    assert come(1, 4, yes=True) == {0: (True, ""), 1: (True, "")}
    assert come(0, 4) == {0: (True, "")}, "the answer was lost"
    assert come(0, 5) == {}
    assert come(1, 5) == {0: (False, ""), 1: (False, "")}
    assert come(0, 6, yes=True) == {}
    assert come(1, 6, error="KVError") == {0: (True, "KVError"), 1: (True, "KVError")}


def test_those_at_a_barrier_agree_on_who_does_what_one_has_to_do() -> None:
    barriers = Barriers(3, "shrink", lambda: None)

    def come(ordinal: int, *clients: int) -> dict[int, int]:
        """Who passes, and who is first, when these have come."""
        replies = []
        for client in clients:
            message = m.Barrier(ordinal, ordinal, LAST)
            replies += barriers.arrive(client, b"%d" % client, message, 0.0, lambda rank: 0.0)
        return {int(r.route): r.message.first for r in replies if isinstance(r.message, m.Ack)}

    assert come(1, 2, 0, 1) == {0: 0, 1: 0, 2: 0}
    barriers.lose(0, "was lost: no heartbeat")
    assert come(2, 2, 1) == {1: 1, 2: 1}
    assert come(2, 1) == {1: 1}, "the answer was lost"
    barriers.lose(1, "was lost: no heartbeat")
    assert come(3, 2) == {2: 2}
    again = Barriers(3, "shrink", lambda: None)
    again.restore(barriers.save(1))
    barriers = again
    assert come(3, 2) == {2: 2}, "another scheduler knows it"


@pytest.mark.parametrize("why", ["has joined", "goes on behind it", "is back, and has not entered"])
def test_who_does_not_come_to_a_barrier_is_not_to_do_what_one_has_to_do_for_all(why: str) -> None:
    barriers = Barriers(3, "shrink" if why.startswith("is back") else "wait", lambda: None)

    def come(client: int, ordinal: int, step: int, *, yes: bool = False) -> list[tuple[int, bool]]:
        message = m.Barrier(ordinal, ordinal, step, yes=yes)
        replies = barriers.arrive(client, b"%d" % client, message, 0.0, lambda rank: 0.0)
        return [(r.message.first, r.message.yes) for r in replies if isinstance(r.message, m.Ack)]

    assert come(0, 1, 4) == come(1, 1, 4) == []
    assert come(2, 1, 4) == [(0, False)] * 3
    if why == "has joined":
        barriers.finish(0)
    else:
        barriers.lose(0, "was lost: no heartbeat")
        del barriers.dead[0]  # the scheduler does so when another process of it is here
        barriers.bring_back(0)
    assert come(1, 2, 4) == []
    found = come(2, 2, 4)
    if why == "goes on behind it":
        assert found == []
        found = [(r.message.first, r.message.yes) for r in barriers.enter(0, 4) if isinstance(r.message, m.Ack)]
    assert found == [(1, False)] * 2
    assert come(1, 3, 4, yes=True) == []
    assert come(2, 3, 4) == [(1, True)] * 2


def test_who_comes_to_a_barrier_behind_which_others_have_met_again_does_nothing_for_all() -> None:
    """The first process of client 0 ended behind barrier 2, where others wait at the third for what it has to do."""
    barriers, replies = Barriers(2, "wait", lambda: None), []

    def come(client: int, ordinal: int) -> list[int]:
        message = m.Barrier(ordinal, ordinal, 0)
        replies[:] = barriers.arrive(client, b"%d" % client, message, 0.0, lambda rank: 0.0)
        return [r.message.first for r in replies if isinstance(r.message, m.Ack)]

    for ordinal in (1, 2):
        assert come(1, ordinal) == []
        assert come(0, ordinal) == [0, 0]
    assert come(1, 3) == []
    barriers.lose(0, "was lost: no heartbeat")
    barriers.bring_back(0)
    assert come(0, 1) == [NOBODY]
    assert come(0, 2) == [0]
    assert come(0, 3) == [0, 0]
    assert come(0, 2) == [NOBODY]


@pytest.mark.parametrize("restarts", [False, True])
def test_who_comes_back_does_what_all_were_lost_before_and_nothing_that_is_done(restarts: bool) -> None:
    """Each step is followed by two barriers, between which one client does something for all."""
    barriers = Barriers(2, "shrink", lambda: None)

    def come(client: int, step: int, *, yes: bool = False) -> list[tuple[int, bool]]:
        nonlocal barriers
        message = m.Barrier(1, barriers.done + 1, step, yes=yes)
        replies = barriers.arrive(client, b"%d" % client, message, 0.0, lambda rank: 0.0)
        if restarts and not barriers.waiting:
            before, barriers = barriers, Barriers(2, "shrink", lambda: None)
            barriers.restore(before.save(1))
        return [(r.message.first, r.message.yes) for r in replies if isinstance(r.message, m.Ack)]

    def lose_and_bring_back(client: int, entered: int) -> None:
        barriers.lose(client, "was lost: no heartbeat")
        del barriers.dead[client]  # the scheduler does so when another process of it is here
        barriers.bring_back(client)
        barriers.enter(client, entered)

    lose_and_bring_back(1, 0)
    assert come(1, 0) == [(1, False)], "nobody has done it yet, and client 0 may be about to"
    assert come(1, 0, yes=True) == [(NOBODY, True)]
    assert come(0, 0) == [(0, False)]
    assert come(0, 0, yes=True) == [(0, True)]
    for yes in (False, True):
        assert come(0, 1, yes=yes) == []
        assert come(1, 1) == [(0, yes)] * 2
    lose_and_bring_back(1, 1)
    assert come(1, 1) == [(NOBODY, False)], "client 0 has done it, and said so to client 1 that is lost"
    assert come(0, 2) == []
    assert come(1, 2) == [(0, False)] * 2
    # After step 2 both are lost before client 0 has done it.
    lose_and_bring_back(0, 2)
    lose_and_bring_back(1, 2)
    assert come(1, 1) == [(NOBODY, False)], "a step that others went beyond"
    assert come(1, 2) == [(1, False)]
    assert come(1, 2, yes=True) == [(NOBODY, True)]
    assert come(0, 2) == [(NOBODY, False)]
    assert come(0, 3) == []
    assert come(1, 3) == [(0, False)] * 2


def test_nobody_waits_for_it_at_a_barrier_that_it_skips() -> None:
    meeting = Meeting()
    meeting.lose_and_bring_back(at_barrier=4)
    assert meeting.passed(meeting.barriers.enter(1, LAST)) == {0: 4}


@pytest.mark.parametrize("restarts", [False, True])
def test_a_client_that_meets_all_barriers_again_waits_at_the_open_one(restarts: bool) -> None:
    meeting = Meeting(restarts=restarts)
    meeting.lose_and_bring_back()
    assert meeting.come(0, 4, LAST) == {}, "it may come to this one yet"
    for ordinal in (1, 2, 3):
        assert meeting.come(1, ordinal, LAST) == {1: 3}
    assert meeting.come(1, 4, LAST) == {0: 4, 1: 4}
    assert meeting.passed(meeting.barriers.enter(1, LAST)) == {}
    assert meeting.come(0, 5, LAST + 1) == {}
    assert meeting.come(1, NEXT_BARRIER, LAST + 1) == {0: 5, 1: 5}


@pytest.mark.parametrize("restarts", [False, True])
def test_a_client_that_has_joined_is_told_which_barrier_it_is_at_and_not_which_are_over(restarts: bool) -> None:
    meeting = Meeting(restarts=restarts)
    meeting.lose_and_bring_back()
    meeting.passed(meeting.barriers.enter(1, LAST))
    meeting.passed(meeting.barriers.finish(1))
    for ordinal, step in ((4, LAST), (5, LAST + 2), (6, LAST + 4), (7, LAST + 4)):
        assert meeting.come(0, ordinal, step) == {0: ordinal}
    assert meeting.barriers.lose(0, CLOSED) == []
    assert meeting.come(1, NEXT_BARRIER, LAST + 1) == {1: 5}, "the first after its entry"
    assert meeting.come(1, NEXT_BARRIER, LAST + 1, meeting.request) == {1: 5}, "the answer was lost"
    assert meeting.come(1, 6, LAST + 1) == {1: 7}, "it counts on"
    assert meeting.come(1, 7, LAST + 1) == {1: 7}


@pytest.mark.parametrize("restarts", [False, True])
def test_who_has_joined_waits_at_the_open_barrier_for_those_that_are_back(restarts: bool) -> None:
    """It has pushed no more for long: that the others enter at a later step does not mean that they skip it."""
    meeting = Meeting(restarts=restarts)
    assert meeting.passed(meeting.barriers.finish(0)) == {}
    assert meeting.come(0, 4, 1) == {}
    meeting.lose_and_bring_back()
    assert meeting.passed(meeting.barriers.enter(1, LAST)) == {}
    assert meeting.come(1, 1, LAST) == {1: 3}, "that of the beginning is over"
    assert meeting.come(1, NEXT_BARRIER, LAST + 1) == {0: 4, 1: 4}
    assert meeting.come(0, 5, 1) == {}
    assert meeting.come(1, 5, LAST + 2) == {0: 5, 1: 5}


def test_clients_that_are_back_may_be_at_different_barriers() -> None:
    meeting = Meeting()
    for client in (0, 1):
        meeting.barriers.bring_back(client)
    meeting.barriers.enter(0, LAST)
    meeting.barriers.enter(1, LAST + 1)
    assert meeting.come(1, NEXT_BARRIER, LAST + 3) == {}
    assert meeting.come(0, NEXT_BARRIER, LAST + 1) == {0: 4}, "the other one has skipped it"
    assert meeting.come(0, 5, LAST + 3) == {0: 5, 1: 5}


def test_what_a_client_that_is_back_has_not_pushed_yet_does_not_make_it_skip() -> None:
    meeting = Meeting()
    meeting.barriers.bring_back(0)
    meeting.barriers.enter(0, LAST)
    meeting.barriers.bring_back(1)
    assert meeting.come(0, NEXT_BARRIER, LAST + 1) == {}
    assert meeting.come(1, 4, LAST + 1) == {0: 4, 1: 4}, "its process before has pushed one step more"


@pytest.mark.parametrize("step", [0, LAST])
def test_a_client_that_has_nothing_left_to_do_holds_nobody_up(step: int) -> None:
    """It says when it leaves that it has gone on from somewhere; one that has begun anew has left its program early."""
    meeting = Meeting()
    meeting.lose_and_bring_back()
    assert meeting.come(0, 4, LAST) == {}
    left = meeting.barriers.lose(1, CLOSED, step)
    if step:
        assert meeting.passed(left) == {0: 4}
        assert meeting.come(0, 5, LAST) == {0: 5}
    else:
        assert [type(reply.message) for reply in left] == [m.Failure]


def test_who_meets_others_at_another_barrier_than_theirs_holds_nobody_up_either() -> None:
    """Its program has skipped the third barrier, and has two after its last step, as theirs."""
    meeting = Meeting()
    meeting.barriers.done = 2
    meeting.lose_and_bring_back()
    assert meeting.come(0, 3, LAST) == {}
    assert meeting.come(1, 2, LAST) == {1: 2}
    assert meeting.come(1, 3, LAST) == {0: 3, 1: 3}
    assert meeting.barriers.lose(1, CLOSED, LAST) == []
    assert meeting.come(0, 4, LAST) == {0: 4}
    assert meeting.come(0, 5, LAST) == {0: 5}


def test_a_client_that_is_lost_again_is_waited_for_again() -> None:
    meeting = Meeting()
    meeting.lose_and_bring_back()
    meeting.barriers.enter(1, LAST)
    assert meeting.come(0, 4, LAST + 1) == {}
    meeting.lose_and_bring_back()
    assert meeting.come(1, 4, LAST) == {0: 4, 1: 4}


@pytest.mark.parametrize("restarts", [False, True])
def test_a_client_that_repeats_a_step_passes_the_barriers_that_were_met_after_it(restarts: bool) -> None:
    """It goes on before the last step where nobody knows that all of that is done."""
    meeting = Meeting(restarts=restarts)
    meeting.lose_and_bring_back()
    assert meeting.passed(meeting.barriers.enter(1, 2)) == {}
    assert meeting.come(1, NEXT_BARRIER, 3) == {1: 3}, "the one after step 3"
    assert meeting.come(1, NEXT_BARRIER, 3, meeting.request) == {1: 3}, "the answer was lost"
    assert meeting.come(0, 4, LAST + 1) == {}
    assert meeting.come(1, 4, LAST + 1) == {0: 4, 1: 4}
