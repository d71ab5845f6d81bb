"""The scheduler's state machine in virtual time: roster, barriers, heartbeats, leaving and coming back."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_desk import TIMEOUT_S, Desk, with_clients

from kvmpi.errors import ClientLostError, ConfigError, PeerLostError, ProtocolError
from kvmpi.ps.reply import why_ended
from kvmpi.wire import encode
from kvmpi.wire import messages as m


def test_the_view_comes_when_the_last_server_is_there_in_rank_order() -> None:
    desk = Desk(3)
    early = desk.client(0, 1)
    desk.server(2)
    desk.server(0)
    assert not desk.inbox
    desk.server(1)
    (view,) = desk.told("1/0")
    assert isinstance(view, m.View)
    assert (view.request, view.epoch, view.lost) == (early, 1, [])
    assert view.servers == [m.ServerInfo(rank, 1, f"host {rank}", [f"tcp://{rank}"]) for rank in range(3)]
    assert {tuple(chain.members) for chain in view.chains} == {(0,), (1,), (2,)}
    assert all(isinstance(desk.told(f"server {rank}")[0], m.View) for rank in range(3))
    late = desk.client(0, 2, store=2)
    (again,) = desk.told("2/0")
    assert isinstance(again, m.View)
    assert (again.request, again.epoch, again.servers) == (late, 1, view.servers)


def test_a_repeated_register_is_answered_once_per_question() -> None:
    desk = Desk(1)
    request = desk.client(0, 1)
    desk.say("1/0", m.Register, "client", 0, 1, 1, 1, "host", [], request=request)
    desk.server(0)
    assert len(desk.told("1/0")) == 1
    desk.say("1/0", m.Register, "client", 0, 1, 1, 1, "host", [], request=request)
    assert len(desk.told("1/0")) == 1


def test_barriers_count_distinct_clients() -> None:
    desk = with_clients(3)
    first = desk.say("1/0", m.Barrier, 1)
    assert not desk.told("1/0")
    for _ in range(5):
        desk.say("1/0", m.Barrier, 1, request=first)
    assert set(map(type, desk.told("1/0"))) == {m.Waiting}
    desk.say("1/2", m.Barrier, 1)
    desk.say("1/0", m.Barrier, 1, request=first)
    assert desk.told("1/0") == [m.Waiting(first, [1])]
    desk.say("1/1", m.Barrier, 1)
    for rank in range(3):
        (ack,) = desk.told(f"1/{rank}")
        assert isinstance(ack, m.Ack)
    desk.say("1/0", m.Barrier, 1, request=first)  # the answer was lost
    assert desk.told("1/0") == [m.Ack(first, 1)]
    desk.say("1/0", m.Barrier, 2)
    assert not desk.inbox


def test_a_barrier_out_of_turn_is_refused_and_completes_nothing() -> None:
    desk = with_clients(2)
    desk.say("1/0", m.Barrier, 2)
    assert isinstance(desk.error("1/0"), ProtocolError)
    desk.say("1/1", m.Barrier, 1)
    assert not desk.inbox


def test_two_stores_have_barriers_and_losses_of_their_own() -> None:
    desk = Desk()
    for store in (1, 2):
        for rank in range(2):
            desk.client(rank, 2, store)
    desk.inbox.clear()
    desk.say("1/0", m.Barrier, 1)
    desk.say("2/1", m.Barrier, 1)
    assert not desk.inbox
    desk.say("2/0", m.Barrier, 1)
    assert sorted(desk.inbox) == ["2/0", "2/1"]
    desk.inbox.clear()
    desk.say("2/0", m.Leave)
    desk.inbox.clear()
    desk.say("1/1", m.Barrier, 1)
    assert sorted(desk.inbox) == ["1/0", "1/1"]
    assert set(map(type, desk.inbox["1/0"])) == {m.Ack}


def test_silence_is_a_loss_and_everyone_else_is_told() -> None:
    desk = Desk(1)
    desk.server(0)
    for rank in range(3):
        desk.client(rank, 3, incarnation=7)
    desk.client(0, 1, store=2)
    desk.inbox.clear()
    desk.say("1/0", m.Barrier, 1)
    for _ in range(3):
        desk.live(0.9 * TIMEOUT_S, "server 0", "1/0", "1/2", "2/0")
    (notice,) = desk.told("server 0")
    assert isinstance(notice, m.View)
    (lost,) = notice.lost
    assert (lost.rank, lost.store, lost.incarnation) == (1, 1, 7)
    assert "s (stopped, cut off, or in a call that keeps Python's lock)" in lost.text
    assert isinstance(desk.error("1/1"), PeerLostError), "it may only have been silent"
    assert desk.told("2/0") == desk.told("1/2") == [notice]
    kinds = desk.told("1/0")
    assert notice in kinds
    (failure,) = [message for message in kinds if isinstance(message, m.Failure)]
    assert failure.error == "ClientLostError"
    assert "client 1" in failure.text
    desk.say("1/2", m.Barrier, 1)
    assert isinstance(desk.error("1/2"), ClientLostError)
    desk.say("1/1", m.Barrier, 1)
    assert isinstance(desk.error("1/1"), PeerLostError), "the lost one is no member any more"
    assert not [message for message in desk.told("2/0") if isinstance(message, m.Failure)]


def test_one_that_was_lost_and_did_not_hear_of_it_is_told_again() -> None:
    """A client would wait for ever for servers that have ended its sessions."""
    desk = with_clients(2)
    desk.live(1.5 * TIMEOUT_S, "1/0")
    desk.inbox.clear()  # with the connection
    desk.beat("1/1")
    (failure,) = desk.told("1/1")
    assert isinstance(failure, m.Failure)
    assert (failure.request, failure.error) == (-1, "PeerLostError")
    assert "silent for too long (stopped, cut off, or in a call that keeps Python's lock)" in failure.text


@pytest.mark.parametrize("silence", [0.6, 3.0])
def test_a_scheduler_that_hears_nobody_loses_nobody(silence: float) -> None:
    """It was cut off from all, or stopped; what it hears then may come late as well."""
    desk = Desk(2)
    desk.server(0)
    desk.server(1)
    desk.client(0, 1)
    desk.live(0.3 * TIMEOUT_S, "server 0", "server 1", "1/0")
    desk.tick(silence * TIMEOUT_S)
    desk.beat("server 1")
    desk.inbox.clear()
    desk.live(0.6 * TIMEOUT_S, "server 1")
    desk.beat("server 0", "1/0")
    assert not desk.inbox
    desk.live(1.6 * TIMEOUT_S, "server 1", "1/0")
    assert ("server", -1, 0) not in desk.state.members, "one of them is silent"


def test_a_server_hears_which_of_its_heartbeats_have_come() -> None:
    desk = Desk(1)
    desk.server(0)
    desk.client(0, 1)
    desk.inbox.clear()
    desk.take(desk.state.handle(b"server 0", m.Heartbeat(3, desk.state.epoch, 17), desk.now_s))
    assert desk.told("server 0") == [m.Heard(17)]
    desk.beat("1/0")
    assert not desk.inbox, "clients do not ask"


def test_any_message_is_a_sign_of_life() -> None:
    desk = with_clients(2)
    for i in range(5):
        desk.tick(0.9 * TIMEOUT_S)
        desk.beat("1/1")
        desk.say("1/0", m.QueryDead, 1e9) if i % 2 else desk.say("1/0", m.Barrier, 1)
    assert len(desk.state.members) == 2


@pytest.mark.parametrize("how", ["was lost", "has left"])
def test_a_server_that_is_gone_is_announced_to_clients_and_servers(how: str) -> None:
    desk = Desk(2)
    desk.server(0)
    desk.server(1)
    desk.client(0, 1)
    desk.inbox.clear()
    if how == "has left":
        answer = m.Ack(desk.say("server 0", m.Leave), 0)
        assert desk.told("server 0") == [answer]
    else:
        desk.live(1.6 * TIMEOUT_S, "server 1", "1/0")
    for at in ("server 1", "1/0"):
        (notice,) = desk.told(at)
        assert isinstance(notice, m.View)
        assert [server.rank for server in notice.servers] == [1]
        assert {tuple(chain.members) for chain in notice.chains} == {(), (1,)}
        assert all(f"server 0 {how}" in chain.why for chain in notice.chains if not chain.members)
    assert desk.state.describe(desk.now_s)["lost"] == ["server 0 is gone"]


def test_a_server_more_than_the_job_begins_with_has_its_share_also_if_it_is_there_before_the_others() -> None:
    desk = Desk(2)
    for rank in (2, 0, 1):
        desk.server(rank)
    view = desk.told("server 2")[0]
    assert isinstance(view, m.View)
    assert 2 in {chain.joiner for chain in view.chains}


def test_leaving_is_no_loss_but_barriers_cannot_be_completed() -> None:
    desk = with_clients(3)
    desk.say("1/0", m.Barrier, 1)
    request = desk.say("1/1", m.Leave)
    assert desk.told("1/1") == [m.Ack(request, 0)]
    error = desk.error("1/0")
    assert isinstance(error, ClientLostError)
    assert "client 1 has closed the store; all clients must make the same calls, or kv.join" in str(error)
    desk.tick(100 * TIMEOUT_S / 200)
    assert not desk.inbox
    again = desk.say("1/1", m.Leave)
    assert desk.told("1/1") == [m.Ack(again, 0)], "it may be said twice"


@pytest.mark.parametrize("policy", ["fail", "wait", "shrink"])
def test_a_client_that_ends_with_an_error_is_lost_at_once_and_the_others_are_told_why(policy: str) -> None:
    desk = with_clients(3, on_client_loss=policy)
    waiting = desk.say("1/0", m.Barrier, 1)
    desk.say("1/2", m.Barrier, 1)
    desk.say("1/1", m.Leave, 0, why_ended(ValueError("\udcff bad data\nin shard " + "7" * 9999)))
    if policy == "shrink":
        assert desk.told("1/0") == [m.Ack(waiting, 1)]
    elif policy == "wait":
        assert not desk.told("1/0"), "another process of it is to come"
    else:
        error = desk.error("1/0")
        assert isinstance(error, ClientLostError)
        text, _, advice = str(error).partition("; ")
        assert text.endswith("because client 1 has ended with ValueError: \\udcff bad data")
        assert advice.startswith("look at it first")
    desk.client(1, 3, at="reborn", incarnation=2)
    desk.inbox.clear()
    desk.say("reborn", m.Barrier, 1)
    assert [type(told) for told in desk.told("1/0")] == ([m.Ack] if policy == "wait" else [])


def test_dead_clients_are_those_who_are_silent_or_lost_not_those_who_left() -> None:
    desk = with_clients(4)
    desk.say("1/1", m.Leave)
    desk.live(0.9 * TIMEOUT_S, "1/0", "1/3")
    desk.live(0.5 * TIMEOUT_S, "1/0")  # client 2 is lost
    desk.inbox.clear()
    request = desk.say("1/0", m.QueryDead, 0.4 * TIMEOUT_S)
    assert desk.told("1/0") == [m.Dead(request, [2, 3])]
    request = desk.say("1/0", m.QueryDead, 2 * TIMEOUT_S)
    assert desk.told("1/0") == [m.Dead(request, [2])]


def test_a_store_that_everyone_has_left_is_forgotten() -> None:
    desk = with_clients(2)
    for rank in range(2):
        desk.say(f"1/{rank}", m.Leave)
    assert [*desk.state.members, *desk.state._stores, *desk.state._names] == []
    desk.client(0, 1)  # the number may be used again, even for another size


def test_a_later_incarnation_takes_the_place_and_an_earlier_one_is_refused() -> None:
    desk = with_clients(2)
    desk.client(1, 2, at="reborn", incarnation=2)
    desk.inbox.clear()
    desk.client(1, 2, at="late", incarnation=1)
    assert isinstance(desk.error("late"), ProtocolError)
    desk.say("1/1", m.Barrier, 1)
    assert isinstance(desk.error("1/1"), PeerLostError)
    desk.say("1/0", m.Barrier, 1)
    desk.say("reborn", m.Barrier, 1)
    assert isinstance(desk.told("1/0")[0], m.Ack)
    assert len(desk.state._names) == len(desk.state.members) == 2


def test_a_client_that_was_lost_and_comes_back_can_pass_barriers() -> None:
    desk = with_clients(2)
    desk.live(1.6 * TIMEOUT_S, "1/0")
    desk.client(1, 2, at="reborn", incarnation=2)
    desk.inbox.clear()
    desk.say("1/0", m.Barrier, 1)
    desk.say("reborn", m.Barrier, 1)
    assert isinstance(desk.told("1/0")[0], m.Ack)


REGISTERS: dict[str, tuple[Any, ...]] = {
    "role": ("king", 0, 1, 1, 1, "h", []),
    "long role": ("k" * 100_000, 0, 1, 1, 1, "h", []),
    "negative rank": ("client", -1, 1, 2, 1, "h", []),
    "rank beyond the number": ("client", 2, 1, 2, 1, "h", []),
    "a crowd": ("client", 0, 9, 1 << 40, 1, "h", []),
    "other number of clients": ("client", 0, 1, 3, 1, "h", []),
    "other number of servers": ("server", 0, -1, 5, 1, "h", []),
    "long endpoints": ("server", 0, -1, 1, 1, "h", ["tcp://" + "x" * 100_000]),
    "endpoints without end": ("server", 0, -1, 1, 1, "h", [""] * 200_000),
}


@pytest.mark.parametrize("name", REGISTERS)
def test_an_impossible_registration_is_refused(name: str) -> None:
    desk = Desk(1)
    desk.client(1, 2)
    desk.say("stranger", m.Register, *REGISTERS[name])
    assert isinstance(desk.error("stranger"), ProtocolError | ConfigError)
    assert len(desk.state.members) == 1


def test_one_route_is_one_member() -> None:
    desk = with_clients(2)
    desk.client(1, 2, at="1/0", incarnation=9)
    assert isinstance(desk.error("1/0"), ProtocolError)
    desk.say("1/0", m.Barrier, 1)
    desk.say("1/1", m.Barrier, 1)
    assert isinstance(desk.told("1/1")[0], m.Ack)


@pytest.mark.parametrize("kind", [m.Barrier, m.QueryDead])
def test_servers_have_no_barriers(kind: Any) -> None:
    desk = Desk(1)
    desk.server(0)
    desk.inbox.clear()
    desk.say("server 0", kind, 1)
    assert isinstance(desk.error("server 0"), ProtocolError)


def test_waiting_lists_stay_short() -> None:
    desk = Desk()
    desk.client(0, 60_000)
    desk.inbox.clear()
    request = desk.say("1/0", m.Barrier, 1)
    desk.say("1/0", m.Barrier, 1, request=request)
    (waiting,) = desk.told("1/0")
    assert isinstance(waiting, m.Waiting)
    assert waiting.clients[:3] == [1, 2, 3]
    assert len(waiting.clients) < 100


INTS = st.sampled_from([-1, 0, 1, 2, 1 << 63])
MESSAGES = st.one_of(
    st.builds(m.Register, INTS, st.sampled_from(["client", "server", ""]), INTS, INTS, INTS, INTS, st.just("h"),
              st.just([])),
    st.builds(m.Barrier, INTS, INTS),
    st.builds(m.QueryDead, INTS, st.floats()),
    st.builds(m.Leave, INTS),
    st.builds(m.Heartbeat, INTS),
    st.builds(m.Push, INTS, st.just("k"), INTS, INTS, st.just("none"), st.booleans()),
    st.builds(m.CaughtUp, INTS, INTS),
    st.builds(m.Drained, INTS, INTS),
    st.just(ProtocolError("no message")),
)  # fmt: skip


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from([b"a", b"b"]), MESSAGES, st.floats(0, 3)), max_size=40))
def test_no_message_stops_the_scheduler(messages: list[tuple[bytes, Any, float]]) -> None:
    desk = Desk(1)
    desk.client(0, 2, store=7)
    desk.client(1, 2, store=7)
    desk.inbox.clear()
    for at, message, seconds in messages:
        for reply in desk.state.handle(at, message, desk.now_s):
            encode(reply.message)
        desk.beat("7/0", "7/1")
        desk.tick(seconds)
    desk.inbox.clear()
    for rank in range(2):
        desk.say(f"7/{rank}", m.Barrier, 1)
    assert isinstance(desk.told("7/0")[-1], m.Ack)


def test_servers_hear_the_step_that_all_clients_are_done_with() -> None:
    """Of those that still push: not of one that has joined or left."""

    def heard(desk: Desk, *done: int, store: int = 1) -> dict[int, int]:
        for rank, step in enumerate(done):
            desk.take(desk.state.handle(f"{store}/{rank}".encode(), m.Heartbeat(0, desk.state.epoch, 0, step), 0.0))
        desk.now_s += 1.0
        desk.told("server 0")
        desk.take(desk.state.handle(b"server 0", m.Heartbeat(0, desk.state.epoch, 77), desk.now_s))
        (answer,) = desk.told("server 0")
        assert isinstance(answer, m.Heard)
        assert answer.sent_us == 77
        return answer.done

    desk = Desk(1)
    desk.server(0)
    for rank in range(2):
        desk.client(rank, 3)
    assert heard(desk, 5, 7) == {}, "one has not come yet"
    desk.client(2, 3)
    assert heard(desk, 5, 7, 6) == {1: 5}
    desk.say("1/0", m.Finish)
    assert heard(desk) == {1: 6}
    desk.say("1/2", m.Leave)
    assert heard(desk) == {1: 7}
    desk.client(0, 1, store=2)
    assert heard(desk, 3, store=2) == {1: 7, 2: 3}
    desk.take(desk.state.lose(("client", 1, 1), "was lost"))
    assert heard(desk) == {2: 3}, "whoever is lost has said nothing"


def test_servers_do_not_wait_for_who_is_left_out() -> None:
    desk = with_clients(2, on_client_loss="shrink")
    desk.server(0)
    for rank, done in ((0, 4), (1, 9)):
        desk.take(desk.state.handle(f"1/{rank}".encode(), m.Heartbeat(0, 0, 0, done), 0.0))
    desk.take(desk.state.lose(("client", 1, 0), "was lost"))
    assert desk.state._done(1.0) == {1: 9}
    desk.client(0, 2, incarnation=2)
    assert desk.state._done(2.0) == {1: 9}, "it is back, but does not take part yet"
    desk.say("1/0", m.Enter, 9)
    assert desk.state._done(3.0) == {}
    desk.take(desk.state.handle(b"1/0", m.Heartbeat(0, 0, 0, 9), 3.0))
    assert desk.state._done(4.0) == {1: 9}
