"""What is said about waits: when, how often, and whom it names."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "ps"))
from ps_helpers import STORE, Machine, route

from kvmpi.config import Config
from kvmpi.ps.scheduler import SchedulerState
from kvmpi.trace import stall
from kvmpi.trace.stall import Wait, Watch
from kvmpi.wire import messages as m


def test_a_wait_is_told_at_intervals_that_double_and_when_it_is_over() -> None:
    watch = Watch(limit_s=10.0)
    wait = Wait("a", 100.0, "push of key 'w'", "client 1 is missing")
    told = {now_s: lines for now_s in range(100, 200) if (lines := watch.look([wait], float(now_s)))}
    assert list(told) == [110, 120, 140, 180]
    assert told[120] == ["has waited 20.0 s: push of key 'w': client 1 is missing"]
    assert watch.has_told
    assert watch.look([], 200.0) == ["waits no longer, after 100.0 s: push of key 'w'"]
    assert not watch.has_told
    assert watch.look([], 201.0) == []
    assert watch.look([wait._replace(since_s=300.0)], 309.0) == []  # the next one begins anew
    assert len(watch.look([wait._replace(since_s=300.0)], 310.0)) == 1


def test_a_short_wait_is_never_told() -> None:
    watch = Watch(limit_s=10.0)
    assert watch.look([Wait(1, 0.0, "x")], 9.9) == []
    assert watch.look([], 10.1) == []


def test_of_many_waits_few_are_named() -> None:
    watch = Watch(limit_s=1.0)
    waits = [Wait(number, float(number), f"push {number}") for number in range(20)]
    lines = watch.look(reversed(waits), 100.0)
    assert [line.split(": ")[-1] for line in lines] == ["push 0", "push 1", "push 2", "and 17 further waits"]
    assert watch.look([], 101.0)[-1] == "and 17 other waits, no longer"


def test_reports_come_before_the_timeout() -> None:
    assert stall.limit_of(Config()) == 60.0 < Config().timeout_s
    assert stall.limit_of(Config(timeout_s=5.0)) == 2.5
    assert stall.limit_of(Config(stall_s=0.0)) == 0.0


def test_a_server_names_clients_keys_and_rounds() -> None:
    machine = Machine("sync", 3)
    value = np.arange(4, dtype="f4")
    machine.init_all("w", value)
    machine.init_all("b", value)
    state = machine.state
    assert state.waits(5.0) == []
    for client in range(3):
        machine.push(client, "w", 1, value)
    assert state.waits(6.0) == []  # the round is over
    machine.push(2, "w", 2, value)
    state.handle(route(0), m.Push(91, "w", 0, 2, "none", True), [memoryview(value.tobytes())], 7.0)
    (wait,) = state.waits(9.0)
    assert (wait.since_s, wait.what) == (9.0, f"round 2 of key 'w' (chunk 0) in store {STORE}")
    assert wait.whom == "no push from client 1 (last request 9.0 s ago)"
    state.handle(route(1), m.Push(92, "b", 0, 1, "none", True), [memoryview(value.tobytes())], 20.0)
    waits = {wait.what: wait for wait in state.waits(21.5)}
    assert waits[f"round 2 of key 'w' (chunk 0) in store {STORE}"].since_s == 9.0  # still the same wait
    assert "client 1 (last request 1.5 s ago)" in waits[f"round 2 of key 'w' (chunk 0) in store {STORE}"].whom
    assert (
        "client 0 (last request 14.5 s ago), client 2" in waits[f"round 1 of key 'b' (chunk 0) in store {STORE}"].whom
    )
    state.handle(route(1), m.Push(93, "w", 0, 2, "none", True), [memoryview(value.tobytes())], 22.0)
    assert [wait.what for wait in state.waits(23.0)] == [f"round 1 of key 'b' (chunk 0) in store {STORE}"]


def test_who_asks_again_is_told_for_how_long_the_others_are_silent() -> None:
    machine = Machine("sync", 3)
    value = np.arange(4, dtype="f4")
    machine.init_all("w", value)
    machine.state.handle(route(1), m.GetState(80, "w", 0), [], 30.0)
    machine.state.handle(route(0), m.Push(91, "w", 0, 1, "none", True), [memoryview(value.tobytes())], 41.0)
    (reply,) = [
        reply for reply in machine.state.handle(route(0), m.Query(91, "w", 0, 1), [], 42.5)
        if isinstance(reply.message, m.Waiting)
    ]  # fmt: skip
    assert reply.message.clients == [1, 2]
    assert reply.message.silent_s == [12, 42]


def test_the_scheduler_names_who_is_not_there() -> None:
    state = SchedulerState(2, 20.0)
    state.handle(b"s1", m.Register(1, "server", 1, -1, 2, 1, "h", ["tcp://1"]), 0.0)
    (wait,) = state.waits(3.0)
    assert wait.whom == "server 0 has not come"
    state.handle(b"s0", m.Register(1, "server", 0, -1, 2, 1, "h", ["tcp://0"]), 4.0)
    for rank in range(3):
        state.handle(b"c%d" % rank, m.Register(1, "client", rank, STORE, 3, 1, "h", []), 5.0)
    assert state.waits(6.0) == []
    state.handle(b"c1", m.Barrier(2, 1), 7.0)
    state.handle(b"c2", m.Heartbeat(4), 9.0)
    (wait,) = state.waits(10.0)
    assert (wait.since_s, wait.what) == (7.0, f"barrier 1 of store {STORE}")
    assert wait.whom == "client 0 (last heartbeat 5.0 s ago), client 2 (last heartbeat 1.0 s ago) did not reach it"
    assert f"client 2 of store {STORE}, clock 4: last heartbeat 1.0 s ago" in state.notes(10.0)
    (again,) = state.handle(b"c1", m.Barrier(2, 1), 11.0)
    assert again.message == m.Waiting(2, [0, 2], [6, 2])


def test_what_has_been_watched_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may make thousands of stores."""

    class Source:
        def waits(self) -> list[Wait]:
            return []

        def notes(self) -> list[str]:
            return ["a line"]

    for name in ("_sources", "_notes"):
        monkeypatch.setattr(stall, name, [])
    for _ in range(5):
        source = Source()
        stall.watch(source.waits)
        stall.note(source.notes)
    assert stall.describe().count("a line") == 1
    assert max(len(stall._sources), len(stall._notes)) <= 2
