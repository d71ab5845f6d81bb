"""kv.report checks what it is given wherever it is called, and what a process has done is added up right."""

from __future__ import annotations

import http.client
import itertools
import math
import socket
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
import torch
from jobs import wait_for

import kvmpi
from kvmpi import optim
from kvmpi.config import Config
from kvmpi.errors import ConfigError, KVError
from kvmpi.ps.reporter import begin_reports
from kvmpi.trace import Recorder, activity, http_server
from kvmpi.trace.activity import MAX_POINTS, Activity, Observation
from kvmpi.trace.board import Board
from kvmpi.trace.prometheus import serve


@pytest.fixture
def kv() -> Iterator[kvmpi.KVStore]:
    with kvmpi.create("local") as store:
        yield store


def test_numbers_of_all_kinds_can_be_reported(kv: kvmpi.KVStore) -> None:
    kv.report(0)
    kv.report(np.int64(3), loss=0.5, accuracy=np.float32(0.25), seen=torch.tensor(7), flag=True)
    kv.report(4, loss=math.nan, bound=math.inf, one=np.array([2.0])[0])


@pytest.mark.parametrize(("step", "values", "told"), [
    (1.5, {}, "step is 1.5"), (-1, {}, "0 or more"), (None, {}, "whole number"), (1 << 60, {}, "0 or more"),
    (1, {"loss": "low"}, "report of loss"), (1, {"loss": None}, "no number"), (1, {"loss": np.zeros(3)}, "no number"),
    (1, {"x" * 65: 1.0}, "64 characters"), (1, {f"n{i}": 0.0 for i in range(17)}, "at most 16 names"),
])  # fmt: skip
def test_what_is_no_number_is_refused_at_the_call(kv: kvmpi.KVStore, step: object, values: dict, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        kv.report(step, **values)


def test_a_closed_store_takes_no_reports() -> None:
    store = kvmpi.create("local")
    store.close()
    with pytest.raises(KVError, match="closed"):
        store.report(1, loss=0.0)


def test_nobody_reports_from_a_process_that_no_launcher_started(kv: kvmpi.KVStore) -> None:
    begin_reports(Config(), 0)
    begin_reports(Config(role="worker", rank=0, scheduler="tcp://127.0.0.1:9", report_s=0), 0)
    assert not [thread.name for thread in threading.enumerate() if thread.name == "kvmpi-reports"]
    assert activity.activity._points == {}  # and nothing is kept for nobody


def test_stores_of_a_process_are_added_up_and_go_on_to_count_when_closed() -> None:
    whole = Activity()
    idle: list[bool] = []
    whole.on_idle = lambda: idle.append(whole.is_idle)

    class Store:
        def __init__(self, *seen: Any) -> None:
            self.seen = seen

        def observe(self) -> Observation:
            return Observation(*self.seen)

    one = Store({"steps": 5.0, "keys": 2.0}, {"push": [1.0, 10.0, 2.0]})
    two = Store({"steps": 3.0, "keys": 1.0}, {"push": [0.5, 7.0, 1.0], "pull": [1.0, 1.0, 1.0]})
    first, second = one.observe, two.observe
    dropped = Store({"steps": 9.0}, {"push": [9.0, 9.0, 9.0]})
    whole.begin(first)
    whole.begin(dropped.observe)
    whole.begin(second)
    del dropped
    found = whole.observe()
    assert (found.totals["steps"], found.totals["keys"]) == (5.0, 3.0)
    assert found.phases == {"push": [1.5, 17.0, 3.0], "pull": [1.0, 1.0, 1.0]}
    whole.end(first)
    whole.end(first)
    assert idle == []
    whole.end(second)
    assert idle == [True]
    assert whole.observe().phases == found.phases
    whole.report(9, {"loss": 0.5})
    found = whole.observe()
    assert (found.totals["steps"], found.curves) == (9.0, {"loss": [(9, 0.5)]})
    assert whole.observe().curves == {}


def test_a_program_that_reports_very_often_keeps_the_shape_of_its_curve() -> None:
    whole = Activity()
    whole.on_idle = lambda: None
    for step in range(10_000):
        whole.report(step, {"loss": float(step)})
    points = whole.observe().curves["loss"]
    assert MAX_POINTS / 4 < len(points) <= MAX_POINTS
    assert points[0] == (0, 0.0)
    assert points[-1][0] > 9_000
    assert all(a < b for (a, _), (b, _) in itertools.pairwise(points))


def test_time_of_communication_counts_once_however_much_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("kvmpi.trace.time", SimpleNamespace(perf_counter=lambda: now[0]))
    recorder = Recorder()
    # From, to: inside another, overlapping, apart, and one that covers a gap between others.
    stretches = [(0, 1), (0.5, 2), (1.5, 1.75), (5, 6), (5.5, 5.75), (4.5, 8), (9, 10), (0.25, 10.5), (12, 13)]
    ended: list[tuple[float, float]] = []
    for start, end in sorted(stretches, key=lambda stretch: stretch[1]):
        now[0] = end
        recorder.add("push", end - start)
        recorder.add("update", end - start)  # no communication
        ended.append((start, end))
        grid = np.arange(0, 14, 0.125) + 0.0625
        covered = 0.125 * sum(any(a < x < b for a, b in ended) for x in grid)
        assert recorder.busy_s == pytest.approx(covered)


def test_what_is_summed_alone_is_no_communication() -> None:
    recorder = Recorder(alone=True)
    recorder.add("reduce", 1.0)
    assert recorder.busy_s == 0.0


def test_time_in_calls_is_counted(kv: kvmpi.KVStore) -> None:
    kv.init("w", np.zeros(3))
    before = kv._observe().totals["blocked_s"]
    work = kv.pushpull("w", np.ones(3), np.zeros(3), async_op=True)
    assert work is not None
    issued = kv._observe().totals["blocked_s"]
    work.wait()
    kv.barrier()
    observed = kv._observe()
    assert 0 < before < issued < observed.totals["blocked_s"] < 60
    assert (observed.totals["steps"], observed.totals["keys"]) == (1.0, 1.0)


def test_metrics_without_the_library_say_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigError, match=r"pip install 'kvmpi\[metrics\]'"):
        serve(Board(lambda _: {}), "127.0.0.1", 0)


def test_strangers_take_few_threads_of_whoever_has_metrics_and_not_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server.Handler, "timeout", 4.0)
    board = Board(lambda _: {})
    url, close = serve(board, "127.0.0.1", 0)
    place = urlsplit(url)

    def ask() -> int:
        board.renew(time.monotonic())
        connection = http.client.HTTPConnection(place.netloc, timeout=20)
        try:
            connection.request("GET", place.path)
            return connection.getresponse().status
        except ConnectionError:
            return 0
        finally:
            connection.close()

    try:
        assert ask() == 200
        before = threading.active_count()
        silent = [socket.create_connection((place.hostname or "", place.port or 0)) for _ in range(30)]
        wait_for(lambda: ask() == 0, "a refusal")
        assert threading.active_count() - before <= 16
        wait_for(lambda: ask() == 200, "an answer, when those who say nothing have been cut off")
        for each in silent:
            each.close()
    finally:
        close()


def test_a_board_makes_a_picture_when_somebody_asks_and_only_then() -> None:
    made: list[float] = []

    def make(now_s: float) -> dict[str, float]:
        made.append(now_s)
        return {"at": now_s}

    board = Board(make, every_s=1.0)
    board.step(1e6)
    assert made == []
    assert board.read(timeout_s=0.0) == (0, {})  # nobody has made one, and the asker goes on
    asked_s = board._asked_s
    board.step(asked_s + 0.5)
    board.step(asked_s + 1.0)  # not yet again
    board.step(asked_s + 1.75)
    board.step(asked_s + 60.0)  # nobody has asked for long
    assert [round(now_s - asked_s, 2) for now_s in made] == [0.5, 1.75]


@pytest.mark.parametrize("name", ["local", "mpi", "dist_sync", "dist_async", "dist_sync_mpi", "dist_async_mpi"])
def test_statistics_count_a_pushpull_both_ways(name: str) -> None:
    """Also where the result goes to several arrays, or is rows only."""
    with kvmpi.create(name) as kv:
        kv.init(["w", "rows"], [np.zeros(1000, "f4"), np.zeros((1000, 4), "f4")])
        kv.set_optimizer(optim.SGD(lr=0.1))
        there, back = ("push", "pull") if name.startswith("dist_") else ("reduce", "copy")
        seen: dict[str, dict[str, int]] = {}

        def moved() -> list[tuple[int, int]]:
            """Bytes and calls since the last time."""
            nonlocal seen
            before, seen = seen, kv.stats()["phases"]
            nothing = {"bytes": 0, "calls": 0}
            pairs = [(before.get(phase, nothing), seen.get(phase, nothing)) for phase in (there, back)]
            return [(new["bytes"] - old["bytes"], new["calls"] - old["calls"]) for old, new in pairs]

        ids, rows, outs = np.array([7, 3, 7]), np.ones((3, 4), "f4"), [np.empty(1000, "f4") for _ in range(2)]
        moved()
        kv.pushpull("w", np.ones(1000, "f4"), outs[0])
        assert moved() == [(4000, 1), (4000, 0)]
        kv.pushpull("w", np.ones(1000, "f4"))
        assert moved() == [(4000, 1), (4000, 0)]
        kv.pushpull("w", np.ones(1000, "f4"), outs)
        assert moved() == [(4000, 1), (4000 if back == "pull" else 8000, 0)]
        kv.pushpull("rows", (ids, rows))
        # Two rows of 16 bytes with ids of 4 bytes; here, a row for each id that was named.
        assert moved() == ([(40, 1), (40, 0)] if back == "pull" else [(0, 0), (48, 0)])
        kv.pull("w", outs)
        assert moved()[1] == (4000 if back == "pull" else 8000, 1)
        kv.row_sparse_pull("rows", rows, ids)
        assert moved()[1] == (40 if back == "pull" else 48, 1)


def test_statistics_count_what_was_done() -> None:
    with kvmpi.create("dist_async") as kv:
        kv.init("w", np.zeros(1000, "f4"))
        kv.set_optimizer(optim.Test())
        for _ in range(3):
            kv.push("w", np.ones(1000, "f4"))
        kv.pull("w", np.empty(1000, "f4"))
        stats = kv.stats()
        assert stats["phases"]["push"] == {**stats["phases"]["push"], "bytes": 12_000, "calls": 3}
        assert stats["phases"]["pull"]["bytes"] == 4_000
        assert sum(stats["staleness"].values()) == 3
        assert stats["imbalance"] == 1.0
