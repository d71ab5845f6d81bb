"""Processes whose end the launcher has seen: what it says, and what the scheduler makes of it."""

from __future__ import annotations

import logging
import os
import select

import msgspec
import pytest
from scheduler_desk import TIMEOUT_S, Desk, with_clients

from kvmpi.config import Config
from kvmpi.errors import ClientLostError
from kvmpi.launchers import endings as launcher
from kvmpi.ps.endings import Ending, Endings, Losses
from kvmpi.ps.incarnations import last_incarnation, new_incarnation
from kvmpi.ps.scheduler_file import SavedScheduler
from kvmpi.wire import messages as m


def views(desk: Desk, at: str) -> list[m.View]:
    return [message for message in desk.told(at) if isinstance(message, m.View)]


def test_what_is_said_before_a_scheduler_is_there_and_between_two_is_heard(tmp_path, caplog):
    said = launcher.Endings(str(tmp_path))
    said.tell("client", 1, 0, "was killed by SIGKILL")
    first = Endings(str(tmp_path))
    assert select.select(first.handles, [], [], 0)[0] == first.handles
    [ending] = first.take()
    assert (ending.role, ending.rank, ending.how) == ("client", 1, "was killed by SIGKILL")
    assert first.take() == []
    assert not select.select(first.handles, [], [], 0)[0]
    first.close()
    for rank in range(3):
        said.tell("server", rank, 0, "ended")
    second = Endings(str(tmp_path))
    assert [(e.role, e.rank) for e in second.take()] == [("server", rank) for rank in range(3)]
    with open(tmp_path / "endings", "wb") as other, caplog.at_level(logging.ERROR):
        other.write(b'{"role": "client"}\nnonsense\n' + msgspec.json.encode(Ending("client", 5, 7, "x")) + b"\nhal")
        other.flush()
        assert second.take() == [Ending("client", 5, 7, "x")]
        assert len(caplog.records) == 2
    said.close()
    # Without a launcher it is not readable for ever, nor where nobody has made it at all.
    assert not select.select(second.handles, [], [], 0)[0]
    second.close()
    elsewhere = Endings(str(tmp_path / "nowhere"))
    assert elsewhere.handles == elsewhere.take() == []


def test_a_launcher_whose_scheduler_does_not_read_is_not_held_up(tmp_path):
    said = launcher.Endings(str(tmp_path))
    for _ in range(3000):
        said.tell("client", 1, 0, "was killed by SIGKILL")
    heard = Endings(str(tmp_path))
    assert 100 < len(heard.take()) < 3000
    os.set_blocking(heard.handles[0], True)
    said.tell("client", 2, 0, "was killed by SIGKILL")
    assert heard.take()
    said.close()
    heard.close()


def test_the_launcher_hears_who_was_silent(tmp_path):
    heard = launcher.Losses(str(tmp_path))
    for _ in range(2):  # one scheduler after the other
        told = Losses(str(tmp_path), 1.0)
        told.tell("client", 3)
        told.tell("server", 0)
        told.close()
    assert heard.feed(os.read(heard.fd, 1 << 16)) == 2 * [("client", 3), ("server", 0)]
    assert not select.select([heard.fd], [], [], 0)[0]
    os.close(heard.fd)
    nobody = Losses(str(tmp_path / "nowhere"), 1.0)
    nobody.tell("client", 1)
    nobody.live(5.0)
    nobody.close()


def test_the_launcher_hears_that_the_scheduler_lives(tmp_path):
    heard, told = launcher.Losses(str(tmp_path)), Losses(str(tmp_path), 1.0)
    found = []
    for now_s in (10.0, 10.9, 11.1, 11.2, 15.0):
        told.live(now_s)
        if select.select([heard.fd], [], [], 0)[0]:
            found.append(now_s)
            assert heard.feed(os.read(heard.fd, 1 << 16)) == []
    assert found == [10.0, 11.1, 15.0]
    told.live(20.0)
    told.tell("server", 1)
    assert heard.feed(os.read(heard.fd, 1 << 16)) == [("server", 1)]
    told.close()
    os.close(heard.fd)


def test_whoever_is_lost_in_silence_is_named_once():
    desk = with_clients(2, on_client_loss="shrink")
    for _ in range(3):
        desk.live(TIMEOUT_S, "1/0")
    assert desk.state.take_unheard() == [("client", 1)]
    assert desk.state.take_unheard() == []
    desk.take(desk.state.hear_end("client", 0, 1, "was killed"))
    assert desk.state.take_unheard() == []


def test_where_every_worker_is_a_client_those_of_a_client_that_has_ended_are_lost():
    """The launcher has two clients of two workers; the clients of store 2 are the workers."""
    desk = Desk(1, "shrink", workers=[range(2), range(2, 4)])
    desk.server(0)
    for store, num_clients in ((1, 2), (2, 4)):
        for rank in range(num_clients):
            desk.client(rank, num_clients, store)
    desk.inbox.clear()
    desk.take(desk.state.hear_end("client", 1, 1, "was killed"))
    assert sorted((lost.store, lost.rank) for lost in views(desk, "2/0")[-1].lost) == [(1, 1), (2, 2), (2, 3)]
    failed = [at for at, told in desk.inbox.items() if any(isinstance(message, m.Failure) for message in told)]
    assert sorted(failed) == ["1/1", "2/2", "2/3"]
    desk.client(0, 4, store=3)
    assert {(lost.store, lost.rank) for lost in views(desk, "3/0")[-1].lost} >= {(3, 2), (3, 3)}
    # Of a client that is started again, one worker comes before the others.
    desk.client(2, 4, store=2, at="again", incarnation=2)
    assert not desk.state.save().ended


def test_a_silent_worker_is_named_by_the_client_that_the_launcher_knows():
    desk = Desk(workers=[range(2), range(2, 5)])
    for rank in range(5):
        desk.client(rank, 5)
    for _ in range(3):
        desk.live(TIMEOUT_S, *(f"1/{rank}" for rank in (0, 1, 2, 4)))
    assert desk.state.take_unheard() == [("client", 1)]


@pytest.mark.parametrize("policy", ["fail", "shrink", "wait"])
def test_a_client_that_has_ended_is_lost_at_once(policy):
    desk = with_clients(3, on_client_loss=policy)
    desk.say("1/0", m.Barrier, 1)
    desk.say("1/2", m.Barrier, 1)
    desk.take(desk.state.hear_end("client", 1, 1, "was killed by SIGKILL"))
    if policy == "fail":
        error = desk.error("1/0")
        assert isinstance(error, ClientLostError)
        assert "client 1 was lost: its process was killed by SIGKILL" in str(error)
    else:
        assert [type(message) for message in desk.told("1/0")] == ([m.Ack] if policy == "shrink" else [])
    assert desk.state.describe(0.0)["lost"] == ["client 1 was lost: its process was killed by SIGKILL"]


def test_only_the_process_that_has_ended_is_meant():
    desk = with_clients(2, on_client_loss="shrink")
    desk.client(1, 2, at="1/1 again", incarnation=5)
    desk.inbox.clear()
    desk.take(desk.state.hear_end("client", 1, 4, "was killed"))
    desk.take(desk.state.hear_end("server", 1, 9, "was killed"))
    assert not desk.inbox
    assert not desk.state.save().ended
    desk.take(desk.state.hear_end("client", 1, 5, "was killed"))
    assert isinstance(desk.error("1/1 again"), Exception)


def test_a_client_that_has_left_in_good_order_is_not_lost():
    desk = Desk(1)
    desk.server(0)
    for rank in range(2):
        desk.client(rank, 2)
    desk.say("1/1", m.Leave)
    desk.inbox.clear()
    desk.take(desk.state.hear_end("client", 1, 1, "ended with exit status 0"))
    assert not desk.inbox
    assert desk.state.describe(0.0)["lost"] == []


@pytest.mark.parametrize("policy", ["fail", "shrink"])
@pytest.mark.parametrize("begun", [False, True])
def test_nobody_waits_for_a_client_that_ends_before_it_has_come_to_a_store(policy, begun):
    """Whether the others are there already or not; one that is started again is back as any other."""
    desk = Desk(1, on_client_loss=policy)
    desk.server(0)
    if begun:
        desk.client(0, 3)
        desk.say("1/0", m.Barrier, 1)
        desk.inbox.clear()
    desk.take(desk.state.hear_end("client", 1, 7, "ended with exit status 1"))
    if not begun:
        desk.client(0, 3)
        desk.say("1/0", m.Barrier, 1)
    why = "was lost: its process ended with exit status 1"
    assert views(desk, "server 0")[-1].lost == [m.Lost(1, 1, 0, why)]
    told = [message for message in desk.told("1/0") if not isinstance(message, m.View)]
    assert [type(message) for message in told] == ([m.Failure] if policy == "fail" else [])
    desk.client(2, 3)
    desk.say("1/2", m.Barrier, 1)
    if policy == "fail":
        return
    assert isinstance(desk.told("1/0")[-1], m.Ack)
    assert isinstance(desk.told("1/2")[-1], m.Ack)
    desk.client(1, 3, incarnation=8)
    desk.say("1/0", m.Barrier, 2)
    desk.say("1/2", m.Barrier, 2)
    assert isinstance(desk.told("1/2")[-1], m.Ack)  # not before it has entered
    desk.say("1/1", m.Enter, -1)
    desk.say("1/0", m.Barrier, 3)
    desk.say("1/2", m.Barrier, 3)
    assert desk.told("1/2") == []
    # In later stores it is from the beginning on.
    desk.client(0, 3, store=2)
    assert [lost.store for lost in views(desk, "2/0")[-1].lost] == [1]


def test_who_waits_for_the_return_of_clients_waits_for_one_that_has_never_come():
    desk = Desk(1, on_client_loss="wait")
    desk.server(0)
    desk.client(0, 2)
    desk.inbox.clear()
    desk.take(desk.state.hear_end("client", 1, 7, "was killed"))
    assert not desk.inbox


@pytest.mark.parametrize("has_come", [True, False])
def test_nobody_waits_for_a_client_whose_program_has_ended_for_good(has_come):
    """Where others wait for one that is lost: nobody starts this one again, whether it had come to the store or not."""
    desk = Desk(on_client_loss="wait")
    for rank in (0, 1) if has_come else (0,):
        desk.client(rank, 2)
    if has_come:
        desk.say("1/0", m.Barrier, 1)
    desk.take(desk.state.hear_end("client", 1, 7, "ended with exit status 0", returns=False))
    if not has_come:
        desk.say("1/0", m.Barrier, 1)
    (failure,) = [message for message in desk.told("1/0") if isinstance(message, m.Failure)]
    assert failure.error == "ClientLostError"
    assert "client 1 has ended with exit status 0" in failure.text


def test_another_scheduler_knows_who_has_ended():
    desk = Desk(1, on_client_loss="shrink")
    desk.server(0)
    changes = desk.state.changes
    desk.take(desk.state.hear_end("client", 1, 7, "was killed"))
    assert desk.state.changes > changes
    saved = msgspec.msgpack.decode(msgspec.msgpack.encode(desk.state.save()), type=SavedScheduler)
    other = Desk(1, on_client_loss="shrink")
    other.state.restore(saved, 0.0)
    other.client(0, 2)
    assert [lost.rank for lost in views(other, "1/0")[-1].lost] == [1]


def test_a_server_that_has_ended_gives_its_parts_to_others_at_once():
    desk = Desk(2)
    desk.state.replicas = 1
    for rank in range(2):
        desk.server(rank)
    desk.inbox.clear()
    desk.take(desk.state.hear_end("server", 1, 1, "was killed by SIGKILL"))
    view = views(desk, "server 0")[-1]
    assert {tuple(chain.members) for chain in view.chains} == {(0,)}
    assert [server.rank for server in view.servers] == [0]


@pytest.mark.parametrize("start", [0, 1, 20])
@pytest.mark.parametrize("year_s", [0.0, 1.8e9, 2.8e9])
def test_a_later_process_has_a_larger_number_whatever_clocks_say(monkeypatch, start, year_s):
    monkeypatch.setattr("time.time_ns", lambda: int(year_s * 1e9))
    first = new_incarnation(Config(start=start), {})
    assert first <= last_incarnation(start) < 1 << 63
    monkeypatch.setattr("time.time_ns", lambda: 0)
    assert new_incarnation(Config(start=start + 1), {}) > last_incarnation(start)
    again = [{"SLURM_RESTART_COUNT": count} for count in ("1", "2", "63")]
    numbers = [new_incarnation(Config(start=start), environ) for environ in again]
    assert sorted({first, last_incarnation(start), *numbers}) == [first, *numbers, last_incarnation(start)], "requeued"
    assert first < new_incarnation(Config(start=start), {"LSB_RESTART": "Y"}) <= numbers[0]
    assert numbers[-1] == new_incarnation(Config(start=start), {"SLURM_RESTART_COUNT": "999"})
    monkeypatch.setattr("time.time_ns", lambda: int((year_s + 0.002) * 1e9))
    assert new_incarnation(Config(start=start), {}) > first, "started once more by somebody who does not count"
