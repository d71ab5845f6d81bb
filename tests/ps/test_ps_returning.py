"""Clients that rounds have gone on without, and that are back: what the scheduler makes of them."""

from __future__ import annotations

import msgspec
import pytest
from scheduler_desk import TIMEOUT_S, Desk, with_clients

from kvmpi.errors import ClientLostError
from kvmpi.ps.barriers import NOBODY
from kvmpi.ps.scheduler import SchedulerState
from kvmpi.ps.scheduler_file import SavedScheduler
from kvmpi.wire import messages as m


def left_out(num_clients: int = 3, at: str = "reborn") -> Desk:
    """The last client was lost after two barriers, and another process of it has registered."""
    desk = with_clients(num_clients, on_client_loss="shrink")
    others = [f"1/{rank}" for rank in range(num_clients - 1)]
    desk.live(1.6 * TIMEOUT_S, *others)
    for ordinal in (1, 2):
        for other in others:
            desk.say(other, m.Barrier, ordinal, 5 * ordinal)
    desk.client(num_clients - 1, num_clients, at=at, incarnation=2)
    desk.inbox.clear()
    return desk


def go_on_with_what_was_saved(desk: Desk) -> None:
    state = SchedulerState(desk.num_servers, TIMEOUT_S, on_client_loss="shrink")
    state.restore(msgspec.msgpack.decode(msgspec.msgpack.encode(desk.state.save()), type=SavedScheduler), desk.now_s)
    desk.state = state


@pytest.mark.parametrize("restarts", [False, True])
def test_barriers_before_its_entry_are_over_for_a_client_that_is_back(restarts: bool) -> None:
    desk = left_out()
    if restarts:
        go_on_with_what_was_saved(desk)
    first = desk.say("reborn", m.Barrier, 1, 0)
    assert desk.told("reborn") == [m.Ack(first, 2)], "nobody is waited for"
    for other in ("1/0", "1/1"):
        desk.say(other, m.Barrier, 3, 10)
    assert [type(told) for told in desk.told("1/0")] == [m.Ack], "nor does anybody wait for it"
    desk.say("reborn", m.Enter, 12)
    if restarts:
        go_on_with_what_was_saved(desk)
    desk.inbox.clear()
    own = desk.say("reborn", m.Barrier, 2, 12)
    assert desk.told("reborn") == [m.Ack(own, 3, first=2)]
    for other in ("1/0", "1/1"):
        desk.say(other, m.Barrier, 4, 12)
    assert [type(told) for told in desk.told("1/1")] == [m.Ack], "all before its first round"


def test_barriers_after_its_entry_wait_for_a_client_that_is_back() -> None:
    desk = left_out()
    desk.say("reborn", m.Enter, 12)
    desk.inbox.clear()
    early = desk.say("reborn", m.Barrier, 2, 14)  # at the fourth, while others are on their way to the third
    for other in ("1/0", "1/1"):
        desk.say(other, m.Barrier, 3, 12)
    assert desk.told("1/0") != [], "the third is before its entry"
    desk.inbox.clear()
    desk.say("1/0", m.Barrier, 4, 14)
    assert not desk.inbox
    desk.say("1/1", m.Barrier, 4, 14)
    assert desk.told("reborn") == [m.Ack(early, 4)], "which number it was"
    desk.inbox.clear()
    desk.say("reborn", m.Barrier, 2, 14, request=early)
    assert desk.told("reborn") == [m.Ack(early, 4, first=NOBODY)], "the answer was lost"
    desk.say("1/0", m.Barrier, 5, 15)
    desk.say("1/1", m.Barrier, 5, 15)
    assert not desk.told("1/0"), "from now on it counts as everybody"
    desk.say("reborn", m.Barrier, 5, 15)
    assert [type(told) for told in desk.told("1/0")] == [m.Ack]


def test_what_was_done_for_all_before_its_entry_is_not_done_again() -> None:
    """As to load what was saved: it would put old values in the place of what all have trained since."""
    desk = left_out()
    desk.say("reborn", m.Enter, 12)
    desk.inbox.clear()

    def is_done(step: int, *, yes: bool = False) -> bool:
        request = desk.say("reborn", m.Barrier, 1, step, "", "", yes)
        (told,) = desk.told("reborn")
        assert told in [m.Ack(request, 2, first=first, yes=yes) for first in (NOBODY, 2)]
        return told == m.Ack(request, 2, first=NOBODY, yes=yes)

    assert is_done(11)
    assert not is_done(12), "all may have been lost before one of them has done it"
    before = desk.state.changes
    assert is_done(12, yes=True)
    assert desk.state.changes > before, "to be saved"
    assert is_done(11, yes=True)
    go_on_with_what_was_saved(desk)
    assert is_done(12)


def test_a_client_that_is_lost_again_holds_no_barrier_up() -> None:
    desk = left_out()
    desk.say("reborn", m.Enter, 12)
    for other in ("1/0", "1/1"):
        desk.say(other, m.Barrier, 3, 13)
    desk.inbox.clear()
    desk.live(1.6 * TIMEOUT_S, "1/0", "1/1")
    assert m.Ack in map(type, desk.told("1/0"))


def test_who_has_no_rounds_to_enter_counts_barriers_at_once() -> None:
    desk = left_out()
    desk.say("reborn", m.Enter, -1)
    desk.inbox.clear()
    for other in ("1/0", "1/1"):
        desk.say(other, m.Barrier, 3)
    assert not desk.inbox
    for ordinal in (1, 2, 3):
        desk.say("reborn", m.Barrier, ordinal)
    assert [type(told) for told in desk.told("1/0")] == [m.Ack]


@pytest.mark.parametrize("restarts", [False, True])
def test_the_view_says_that_a_client_was_left_out_that_had_left_in_good_order(restarts: bool) -> None:
    desk = Desk(1, on_client_loss="shrink")
    desk.server(0)
    desk.client(0, 2)
    desk.client(1, 2)
    desk.say("1/1", m.Leave)
    if restarts:
        go_on_with_what_was_saved(desk)
    desk.client(1, 2, at="reborn", incarnation=2)
    view = desk.told("reborn")[-1]
    assert isinstance(view, m.View)
    assert [(lost.rank, lost.incarnation) for lost in view.lost] == [(1, 1)]


def test_a_process_in_the_place_of_one_that_has_left_after_all_does_not_begin_the_store_anew() -> None:
    """It would wait for the others, for ever."""
    desk = Desk(1, on_client_loss="wait")
    desk.server(0)
    for client in (0, 1):
        desk.client(client, 2)
    for client in (0, 1):
        desk.say(f"1/{client}", m.Leave)
    go_on_with_what_was_saved(desk)
    desk.client(1, 2, at="late", incarnation=2)
    error = desk.error("late")
    assert isinstance(error, ClientLostError)
    assert "is over" in str(error)


def test_it_is_too_late_to_come_back_when_all_others_have_left() -> None:
    desk = left_out(2)
    desk.say("reborn", m.Leave)
    desk.say("1/0", m.Leave)
    go_on_with_what_was_saved(desk)
    desk.client(1, 2, at="late", incarnation=3)
    error = desk.error("late")
    assert isinstance(error, ClientLostError)
    assert "is over" in str(error)


def test_the_view_says_that_a_client_was_left_out_also_if_another_process_was_faster_than_its_loss() -> None:
    desk = Desk(1, on_client_loss="shrink")
    desk.server(0)
    desk.client(0, 2)
    desk.client(1, 2)
    request = desk.client(1, 2, at="reborn", incarnation=2)
    view = desk.told("reborn")[-1]
    assert isinstance(view, m.View)
    assert view.request == request
    assert [(lost.rank, lost.incarnation) for lost in view.lost] == [(1, 1)]
