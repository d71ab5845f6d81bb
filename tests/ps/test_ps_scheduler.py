"""The scheduler's state machine in virtual time: roster, barriers, heartbeats, leaving and coming back."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmpi.errors import ClientLostError, ConfigError, PeerLostError, ProtocolError, rebuild
from kvmpi.ps.scheduler import SchedulerState
from kvmpi.ps.scheduler_file import SavedScheduler
from kvmpi.wire import Message, encode
from kvmpi.wire import messages as m

TIMEOUT_S = 10.0


class Desk:
    """A scheduler and its visitors; ``inbox[route]`` holds what each was told and has not read."""

    def __init__(self, num_servers: int = 0, on_client_loss: str = "fail") -> None:
        self.state = SchedulerState(num_servers, TIMEOUT_S, on_client_loss=on_client_loss)
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
    assert "no heartbeat" in lost.text
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


def test_a_lost_server_is_announced_to_clients_and_servers() -> None:
    desk = Desk(2)
    desk.server(0)
    desk.server(1)
    desk.client(0, 1)
    desk.inbox.clear()
    desk.live(1.6 * TIMEOUT_S, "server 1", "1/0")
    for at in ("server 1", "1/0"):
        (notice,) = desk.told(at)
        assert isinstance(notice, m.View)
        assert [server.rank for server in notice.servers] == [1]
        assert {tuple(chain.members) for chain in notice.chains} == {(), (1,)}
        assert all("server 0 was lost" in chain.why for chain in notice.chains if not chain.members)


def test_leaving_is_no_loss_but_barriers_cannot_be_completed() -> None:
    desk = with_clients(3)
    desk.say("1/0", m.Barrier, 1)
    request = desk.say("1/1", m.Leave)
    assert desk.told("1/1") == [m.Ack(request, 0)]
    error = desk.error("1/0")
    assert isinstance(error, ClientLostError)
    assert "client 1 has closed the store" in str(error)
    desk.tick(100 * TIMEOUT_S / 200)
    assert not desk.inbox
    again = desk.say("1/1", m.Leave)
    assert desk.told("1/1") == [m.Ack(again, 0)], "it may be said twice"


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


# ---- clients that were left out, and are back


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
    assert desk.told("reborn") == [m.Ack(own, 3)]
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
    assert desk.told("reborn") == [m.Ack(early, 4)], "the answer was lost"
    desk.say("1/0", m.Barrier, 5, 15)
    desk.say("1/1", m.Barrier, 5, 15)
    assert not desk.told("1/0"), "from now on it counts as everybody"
    desk.say("reborn", m.Barrier, 5, 15)
    assert [type(told) for told in desk.told("1/0")] == [m.Ack]


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


REGISTERS: dict[str, tuple[Any, ...]] = {
    "role": ("king", 0, 1, 1, 1, "h", []),
    "long role": ("k" * 100_000, 0, 1, 1, 1, "h", []),
    "negative rank": ("client", -1, 1, 2, 1, "h", []),
    "rank beyond the number": ("client", 2, 1, 2, 1, "h", []),
    "a crowd": ("client", 0, 9, 1 << 40, 1, "h", []),
    "other number of clients": ("client", 0, 1, 3, 1, "h", []),
    "other number of servers": ("server", 0, -1, 5, 1, "h", []),
    "long endpoints": ("server", 0, -1, 1, 1, "h", ["tcp://" + "x" * 100_000]),
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
