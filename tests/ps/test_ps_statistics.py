"""What the scheduler makes of reports: totals, rates, stragglers, curves, and bounds on what anybody may tell."""

from __future__ import annotations

import math
import socket
import sys
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from message_strategies import of_kind

from kvmpi.config import Config
from kvmpi.errors import ConfigError, ProtocolError
from kvmpi.ps.curve import Curve, mean
from kvmpi.ps.scheduler import SchedulerState
from kvmpi.ps.showing import Showing
from kvmpi.ps.statistics import Statistics
from kvmpi.wire import messages as m


def report(rank: int, number: int, role: str = "worker", **fields: Any) -> m.Report:
    totals = {"steps": 0.0, "elapsed_s": float(number), "blocked_s": 0.0, **fields.pop("totals", {})}
    return m.Report(role, rank, fields.pop("client", rank), fields.pop("incarnation", 1), number, "h", totals, **fields)


def test_rates_follow_from_reports_and_the_slowest_is_who_waits_least() -> None:
    statistics = Statistics(num_workers=3, num_clients=3)
    # Ten steps a second on all; worker 2 computes 0.09 s of each, the others 0.03 s, and wait for the rest.
    for second in range(1, 6):
        for rank, blocked in enumerate((0.7, 0.7, 0.1)):
            totals = {"steps": 10.0 * second, "blocked_s": blocked * second, "elapsed_s": float(second)}
            phases = {"push": [0.1, 1e6 * second * (rank + 1), 1.0], "update": [0.1, 9e9, 1.0]}
            statistics.hear(report(rank, second, totals=totals, phases=phases), float(second))
        statistics.tick(second + 0.5)
    found = statistics.snapshot(5.5)
    assert [worker["steps_per_s"] for worker in found["workers"]] == pytest.approx([10.0] * 3)
    assert [worker["bytes_per_s"] for worker in found["workers"]] == pytest.approx([1e6, 2e6, 3e6])
    assert found["totals"]["bytes_per_s"] == pytest.approx(6e6)
    assert found["totals"]["steps"] == 50
    assert [worker["own_s_per_step"] for worker in found["workers"]] == pytest.approx([0.03, 0.03, 0.09])
    assert [worker["straggler"] for worker in found["workers"]] == [False, False, True]
    assert found["slowest"] == 2
    assert [y for _, y in found["history"]["bytes_per_s"]] == pytest.approx([6e6] * 4)


def test_who_is_silent_who_is_done_and_who_is_lost() -> None:
    statistics = Statistics(num_workers=2, num_servers=1)
    statistics.hear(report(0, 1), 0.0)
    statistics.hear(report(1, 1, ended=True), 0.0)
    statistics.hear(report(0, 1, "server", totals={"keys": 3.0, "queue": 2.0}, missing=[1]), 0.0)
    found = statistics.snapshot(60.0, ["client 0 was lost"])
    assert [worker["state"] for worker in found["workers"]] == ["silent", "done"]
    assert found["lost"] == ["client 0 was lost"]
    assert (found["servers"][0]["keys"], found["servers"][0]["queue"], found["servers"][0]["missing"]) == (3, 2, [1])
    assert found["totals"]["running"] == 0


def test_an_old_report_counts_for_nothing_and_another_process_begins_anew() -> None:
    statistics = Statistics(num_workers=1)
    statistics.hear(report(0, 2, totals={"steps": 20.0}, curves={"loss": [(20, 0.5)]}), 1.0)
    statistics.hear(report(0, 1, totals={"steps": 10.0}, curves={"loss": [(10, 0.9)]}), 2.0)
    assert statistics.snapshot(2.0)["workers"][0]["steps"] == 20
    statistics.hear(report(0, 1, incarnation=2, totals={"steps": 3.0}, curves={"loss": [(21, 0.4)]}), 3.0)
    statistics.hear(report(0, 9, totals={"steps": 99.0}), 4.0)
    found = statistics.snapshot(4.0)
    assert found["workers"][0]["steps"] == 3
    assert found["curves"]["loss"]["workers"]["0"] == [(20.0, 0.5), (21.0, 0.4)]


@pytest.mark.parametrize(
    "wrong",
    [
        report(2, 1), report(-1, 1), report(0, 1, "client"), report(0, 1, "server" * 99),
        report(0, 1, totals={"x" * 65: 1.0}), report(0, 1, totals={"steps": math.nan}),
        report(0, 1, totals={"steps": -1.0}), report(0, 1, totals={"steps": 1e300}),
        report(0, 1, totals={f"n{i}": 0.0 for i in range(65)}), report(0, 1, phases={"push": [1.0]}),
        report(0, 1, phases={"push": [1.0, math.inf, 1.0]}), report(0, 1, curves={"loss": [(-1, 0.0)]}),
        report(0, 1, curves={f"n{i}": [] for i in range(17)}), report(0, 1, curves={"loss": [(1, 0.0)] * 257}),
        report(0, 1, staleness=dict.fromkeys(range(65), 1)), report(0, 1, missing=list(range(65))),
    ],
)  # fmt: skip
def test_a_report_that_makes_no_sense_is_refused_and_leaves_nothing(wrong: m.Report) -> None:
    statistics = Statistics(num_workers=2, num_servers=0)
    with pytest.raises(ProtocolError):
        statistics.hear(wrong, 0.0)
    assert statistics.refused == 1
    assert statistics.snapshot(0.0)["workers"] == []


def test_the_scheduler_answers_a_worker_and_never_ends_a_server_over_its_report() -> None:
    state = SchedulerState(num_servers=1, heartbeat_timeout_s=5.0, statistics=Statistics(1, 1))
    (heard,) = state.handle(b"worker", report(0, 7, answer=True), 0.0)
    assert heard == (b"worker", m.Heard(7), ())
    register = m.Register(1, "server", 0, -1, 1, 1, "h", ["tcp://127.0.0.1:1"])
    state.handle(b"server", register, 0.0)
    assert state.handle(b"server", report(9999, 1, "server", answer=True), 1.0) == []
    assert state.rejected == 1
    assert state.members["server", -1, 0].last_seen_s == 1.0  # a sign of life all the same


def _size(statistics: Statistics) -> int:
    processes = [*statistics._workers.values(), *statistics._servers.values()]
    curves = [curve for process in processes for curve in process.curves.values()]
    points = sum(sys.getsizeof(curve._xs) + sys.getsizeof(curve._ys) for curve in curves)
    return points + sum(len(msgspec.msgpack.encode(process.report)) for process in processes)


def test_memory_is_bounded_whatever_is_told_and_however_fast() -> None:
    statistics = Statistics(num_workers=4)
    sizes = []
    for number in range(1, 1201):
        points = [(number * 256 + i, 1.0 / (1 + i)) for i in range(256)]
        names = {f"{number % 50}-{i}": points for i in range(16)}
        statistics.hear(report(number % 4, number, curves=names), number * 1e-6)
        statistics.tick(number * 1e-6)
        sizes.append(_size(statistics))
    # 16 curves of 256 points in doubles, with what arrays keep in reserve; and the rest of a report.
    assert max(sizes) < 4 * (16 * (256 * 2 * 8 * 1.25 + 200) + 200)
    assert all(len(process.curves) <= 16 for process in statistics._workers.values())


def test_servers_that_were_added_count() -> None:
    statistics = Statistics(num_workers=1, num_servers=2)
    for rank in (0, 3):
        statistics.hear(report(rank, 1, "server"), 0.0)
    assert statistics.snapshot(1.0)["shape"]["servers"] == 4, "server 2 is there, and has told nothing yet"


@settings(max_examples=100, deadline=None)
@given(st.lists(of_kind(m.Report), max_size=6))
def test_no_report_can_break_the_picture(reports: list[m.Report]) -> None:
    statistics = Statistics(num_workers=3, num_servers=2)
    for now, each in enumerate(reports):
        each.role = "worker" if now % 2 else each.role
        try:
            statistics.hear(each, float(now))
        except ProtocolError:
            continue
        statistics.tick(float(now))
    picture = msgspec.json.decode(msgspec.json.encode(statistics.snapshot(100.0)))
    assert set(picture) >= {"workers", "servers", "curves", "history", "totals", "lost"}


@pytest.mark.parametrize("count", [0, 1, 2, 7, 8, 9, 31, 1000, 4097])
def test_a_curve_keeps_its_shape(count: int) -> None:
    curve = Curve(capacity=8)
    for x in range(count):
        curve.add(x, 3.0 * x)
    points = curve.points()
    assert len(points) == len(curve) <= 9
    assert [x for x, _ in points] == sorted({x for x, _ in points})
    if count:
        assert points[-1][0] == count - 1
        # Each point is the mean of those after the one before it, all on one line.
        since = [-1.0, *(x for x, _ in points[:-1])]
        for (x, y), before in zip(points[:-1], since, strict=False):
            assert y == pytest.approx(3.0 * (before + 1 + x) / 2)


def test_the_mean_of_curves_is_over_whoever_is_there() -> None:
    first = [(1.0, 1.0), (2.0, 2.0), (3.0, math.nan)]
    second = [(2.0, 4.0), (3.0, 6.0)]
    assert mean([first, second]) == [(1.0, 1.0), (2.0, 3.0), (3.0, 6.0)]
    assert mean([]) == []
    line = mean([[(float(x), 2.0 * x) for x in range(10)], [(0.0, 2.0), (9.0, 20.0)]], most=5)
    assert line == [(float(x), pytest.approx(2.0 * x + 1)) for x in (1, 3, 5, 7, 9)]
    # Who is one point behind the others makes no step in the mean; who has ended long ago makes one.
    behind = mean([[(float(x), 0.0) for x in range(101)], [(float(x), 1.0) for x in range(100)]])
    assert behind[-1] == (99.0, 0.5)
    assert mean([[(float(x), 0.0) for x in range(101)], [(0.0, 1.0), (50.0, 1.0)]])[-1] == (100.0, 0.0)


@pytest.mark.parametrize(("name", "index", "who", "needs"), [
    ("metrics_port", 0, "the scheduler for Prometheus", "prometheus_client"),
    ("metrics_port", 2, "server 1 for Prometheus", "prometheus_client"), ("dashboard_port", 0, "the web page", "json"),
])  # fmt: skip
def test_a_port_that_is_taken_is_named_with_its_setting(name: str, index: int, who: str, needs: str) -> None:
    pytest.importorskip(needs)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError) as caught:
            Showing(Config(**{name: port - index}), lambda _: {}, index, print)
    for part in (f"{who} cannot listen on 127.0.0.1:{port}: Address already in use", f"set KVMPI_{name.upper()}"):
        assert part in str(caught.value)
