"""What a client costs the others, the servers and the scheduler does not grow with how many clients there are."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import numpy as np
import pytest
from ps_helpers import Machine, whole_numbers
from scheduler_desk import TIMEOUT_S, Desk, with_clients

from kvmpi.ps.scheduler import without_old_views
from kvmpi.wire import messages as m

FEW, MANY = 50, 200
KEYS = ("a", "b", "c")


def _lines(run: Callable[[], None]) -> int:
    """How many lines of kvmpi's own code run: the same on every machine, however busy it is."""
    count, before = 0, sys.gettrace()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if "kvmpi/ps/" not in frame.f_code.co_filename.replace("\\", "/"):
            return None
        count += event == "line"
        return trace

    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(before)
    return count


def _server(num_clients: int, on_client_loss: str = "fail") -> Machine:
    machine = Machine("sync", num_clients, on_client_loss=on_client_loss)
    for key in KEYS:
        machine.init_all(key, whole_numbers(4))
    return machine


def _push_all(machine: Machine, step: int, clients: Sequence[int]) -> list[int]:
    order = random.Random(step).sample(clients, len(clients))
    value = np.ones(4, "f4")
    return [machine.push(client, key, step, value, fused=True) for key in KEYS for client in order]


def _rounds(num_clients: int) -> Callable[[], None]:
    machine = _server(num_clients)

    def run() -> None:
        for step in (1, 2):
            assert all(machine.ok(request) for request in _push_all(machine, step, range(num_clients)))
            assert {float(machine.read(key)[0]) for key in KEYS} == {num_clients}

    return run


def _held_up(num_clients: int) -> Callable[[], None]:
    """The first client is late: nobody is in the round, and all others ask again whom they wait for."""
    machine, others = _server(num_clients), range(1, num_clients)
    _push_all(machine, 1, others)

    def run() -> None:
        for request in _push_all(machine, 1, others):
            assert machine.last(request) == m.Waiting(request, [0])

    return run


def _good_bye(on_client_loss: str) -> Callable[[int], Callable[[], None]]:
    def prepare(num_clients: int) -> Callable[[], None]:
        machine = _server(num_clients, on_client_loss)

        def run() -> None:
            for client in range(num_clients):
                assert machine.ok(machine.send(client, m.Bye))
            assert not machine.state.parts[0].shards

        return run

    return prepare


def _some_lost(num_clients: int) -> Callable[[], None]:
    """Rounds go on without a tenth of the clients."""
    machine = _server(num_clients, "shrink")
    left = range(num_clients - num_clients // 10)
    for client in range(left.stop, num_clients):
        machine.lose(client)

    def run() -> None:
        assert all(machine.ok(request) for request in _push_all(machine, 1, left))

    return run


def _barrier(num_clients: int) -> Callable[[], None]:
    desk = with_clients(num_clients)

    def run() -> None:
        for number in (1, 2):
            order = random.Random(number).sample(range(num_clients), num_clients)
            requests = {client: desk.say(f"1/{client}", m.Barrier, number) for client in order[1:]}
            for client, request in requests.items():
                desk.say(f"1/{client}", m.Barrier, number, request=request)
                assert desk.told(f"1/{client}") == [m.Waiting(request, [order[0]])]
            desk.say(f"1/{order[0]}", m.Barrier, number)
            for client in range(num_clients):
                assert isinstance(desk.told(f"1/{client}")[-1], m.Ack)

    return run


def _joining(num_clients: int) -> Callable[[], None]:
    """Half of the clients are there before the servers are."""

    def run() -> None:
        desk = Desk(4)
        for client in range(num_clients // 2):
            desk.client(client, num_clients)
        for server in range(4):
            desk.server(server)
        for client in range(num_clients // 2, num_clients):
            desk.client(client, num_clients)
        assert all(len(desk.told(f"1/{client}")) == 1 for client in range(num_clients))

    return run


@pytest.mark.parametrize(
    "prepare",
    [_rounds, _held_up, _some_lost, _good_bye("fail"), _good_bye("shrink"), _barrier, _joining],
    ids=["rounds", "one late", "some lost", "leaving", "leaving shrinks", "barrier", "joining"],
)
def test_what_all_clients_do_takes_as_many_times_as_there_are_more_of_them(
    prepare: Callable[[int], Callable[[], None]],
) -> None:
    few, many = (_lines(prepare(num_clients)) for num_clients in (FEW, MANY))
    assert few > FEW
    assert many / few < 1.25 * MANY / FEW, f"{few} lines for {FEW} clients, {many} for {MANY}"


def test_of_many_losses_at_once_everyone_hears_once() -> None:
    desk, num_clients, num_lost = Desk(2, "shrink"), 40, 10
    for server in range(2):
        desk.server(server)
    for client in range(num_clients):
        desk.client(client, num_clients)
    there = [*(f"1/{client}" for client in range(num_lost, num_clients)), "server 0", "server 1"]
    desk.live(0.75 * TIMEOUT_S, *there)
    desk.now_s += TIMEOUT_S / 2
    desk.beat(*there)
    epoch = desk.state.epoch
    newcomer = m.Register(7, "client", 0, 2, 1, 1, "host", [])
    turn = [*desk.state.handle(b"2/0", newcomer, desk.now_s), *desk.state.tick(desk.now_s)]
    told = without_old_views(turn)
    assert len(turn) > num_lost * len(there)
    views = [reply.message for reply in told if isinstance(reply.message, m.View)]
    assert len(views) == len(there) + 2  # the newcomer has its own answer before
    assert [view.epoch for view in views if view.request == 7] == [epoch]
    for view in views:
        if view.request < 0:
            assert (view.epoch, [lost.rank for lost in view.lost]) == (epoch + num_lost, [*range(num_lost)])
    assert [reply for reply in told if not isinstance(reply.message, m.View)] == [
        reply for reply in turn if not isinstance(reply.message, m.View)
    ]


def test_an_error_because_of_many_says_how_many_and_what_to_do() -> None:
    machine = _server(MANY)
    for client in range(20, 120):
        machine.lose(client, why=f"was lost: {'no heartbeat for 20.3 s, ' * 10}on host {client}")
    error = str(machine.error(machine.push(0, "a", 1, np.ones(4, "f4"), fused=True)))
    for part in ("on host 20, client 21 was lost", "on host 22; 97 more are gone; look at it first", "let a job go on"):
        assert part in error
    assert "on host 23" not in error
    desk = with_clients(MANY)
    desk.say("1/7", m.Barrier, 1)
    (wait,) = desk.state.waits(desk.now_s)
    assert wait.whom.startswith("client 0 (last heartbeat 0.0 s ago), client 1 (")
    assert wait.whom.endswith("(last heartbeat 0.0 s ago), 191 more clients did not reach it")
