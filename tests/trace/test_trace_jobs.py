"""Real jobs: their timelines, and what they say when they stand still."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
from jobs import HANGS_S, run_job, wait_for

PROGRAMS = Path(__file__).parent / "programs"
STEPS, COUNT = 3, 300_000


class Picture:
    """A trace: its spans with the names of their processes and rows."""

    def __init__(self, path: Path) -> None:
        opened = gzip.open if path.suffix == ".gz" else open
        with opened(path, "rt") as file:
            whole = json.load(file)
        self.other = whole["otherData"]
        found: list[dict[str, Any]] = whole["traceEvents"]
        self.names = {e["pid"]: e["args"]["name"] for e in found if e["name"] == "process_name"}
        self.order = {e["pid"]: e["args"]["sort_index"] for e in found if e["name"] == "process_sort_index"}
        self.rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in found if e["name"] == "thread_name"}
        self.spans = [e for e in found if e["ph"] == "X"]
        self.flows = [e for e in found if e["ph"] in "sf"]
        self.marks = [e for e in found if e["ph"] == "i"]

    def of(self, process: str, phase: str, **arguments: Any) -> list[dict[str, Any]]:
        return [
            e for e in self.spans
            if self.names[e["pid"]] == process and e["name"] == phase
            and all(e["args"].get(name) == value for name, value in arguments.items())
        ]  # fmt: skip


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> Picture:
    path = tmp_path_factory.mktemp("timeline") / "t.json.gz"
    job = run_job(f"-n 4 -c 2 -s 2 --timeline {path}", PROGRAMS / "timeline.py", "well")
    assert job.returncode == 0, job.stderr
    assert f"timeline of 7 processes, {Picture(path).other['spans']} spans: {path}" in job.stderr
    assert os.listdir(path.parent) == ["t.json.gz"]  # no parts are left
    return Picture(path)


def test_every_role_has_its_rows_in_order(picture: Picture) -> None:
    names = [picture.names[pid] for pid in sorted(picture.names, key=picture.order.__getitem__)]
    assert names == ["scheduler", "server 0", "server 1", *(f"worker {rank}" for rank in range(4))]
    assert picture.other["dropped spans"] == 0
    assert picture.other["clocks nobody has compared"] == []


def test_every_phase_is_there_with_keys_bytes_and_clocks(picture: Picture) -> None:
    nbytes = 4 * COUNT
    for rank in range(4):
        worker = f"worker {rank}"
        for phase in ("reduce", "broadcast"):
            (one,) = picture.of(worker, phase, key="w", clock=1)
            assert one["args"]["bytes"] == nbytes, (worker, phase)
        (exchange,) = picture.of(worker, "exchange", key="w", clock=1)
        assert exchange["args"]["bytes"] == nbytes // 2  # the other worker's half
        (copied,) = [e for e in picture.of(worker, "copy", key="w") if picture.rows[e["pid"], e["tid"]] == "broadcast"][
            :1
        ]
        assert copied["args"]["bytes"] == nbytes
        assert picture.of(worker, "wait", key="w", clock=1)
        clocks = [
            e["args"]["clock"] for e in picture.marks if e["name"] == "clock" and picture.names[e["pid"]] == worker
        ]
        assert clocks == [1, 2, 3]
    for rank, client in ((0, 0), (2, 1)):
        for step in range(1, STEPS + 1):
            about = {"key": "w", "step": step}
            (push,) = picture.of(f"worker {rank}", "push", **about)
            assert push["args"].items() >= {"bytes": nbytes, "clock": step - 1, "client": client, "chunks": 2}.items()
            encoded = picture.of(f"worker {rank}", "encode", **about)
            assert sum(e["args"]["bytes"] for e in encoded) == nbytes
            queued = [
                e for server in range(2) for e in picture.of(f"server {server}", "server queue", client=client, **about)
            ]
            assert sum(e["args"]["bytes"] for e in queued) == nbytes
        assert picture.of(f"worker {rank}", "pull", key="b")
    for rank in (1, 3):  # no masters
        assert not picture.of(f"worker {rank}", "push")
    updates = Counter(
        e["args"]["bytes"] for server in range(2) for e in picture.of(f"server {server}", "update", key="w")
    )
    assert updates == {nbytes // 2: 2 * STEPS}
    (barrier,) = picture.of("scheduler", "barrier")
    assert barrier["args"]["step"] == 1


def test_an_update_lies_between_the_push_and_its_answer(picture: Picture) -> None:
    """Of different processes: they have one clock."""
    looked = 0
    for step in range(1, STEPS + 1):
        updates = [e for server in range(2) for e in picture.of(f"server {server}", "update", key="w", step=step)]
        assert len(updates) == 2
        for rank in (0, 2):
            (push,) = picture.of(f"worker {rank}", "push", key="w", step=step)
            pulls = picture.of(f"worker {rank}", "pull", key="w", step=step)
            end = max(e["ts"] + e["dur"] for e in [push, *pulls])
            for update in updates:
                assert push["ts"] < update["ts"] < update["ts"] + update["dur"] < end
                looked += 1
    assert looked == 4 * STEPS


def test_spans_of_one_row_are_nested_or_apart(picture: Picture) -> None:
    rows = defaultdict(list)
    for span in picture.spans:
        rows[span["pid"], span["tid"]].append((span["ts"], -span["dur"], span["name"]))
    for row, spans in rows.items():
        open_ends: list[float] = []
        for start, negative, name in sorted(spans):
            while open_ends and open_ends[-1] <= start + 1e-3:
                open_ends.pop()
            end = start - negative
            assert not open_ends or end <= open_ends[-1] + 1e-3, (picture.names[row[0]], picture.rows[row], name)
            open_ends.append(end)
    for worker in range(4):
        for exchange in picture.of(f"worker {worker}", "exchange"):
            (around,) = [
                e for e in picture.of(f"worker {worker}", "reduce", key="w", clock=exchange["args"]["clock"])
                if e["tid"] == exchange["tid"]
            ]  # fmt: skip
            assert around["ts"] <= exchange["ts"] <= exchange["ts"] + exchange["dur"] <= around["ts"] + around["dur"]


def test_arrows_lead_from_every_push_to_its_update(picture: Picture) -> None:
    begins = {e["id"]: e for e in picture.flows if e["ph"] == "s"}
    ends = {e["id"]: e for e in picture.flows if e["ph"] == "f"}
    assert begins.keys() == ends.keys()
    assert len(begins) == 2 * STEPS * (2 + 1)  # of each client: two chunks of w, one of b
    for flow, end in ends.items():
        (update,) = [
            e for e in picture.spans
            if (e["pid"], e["tid"], e["name"]) == (end["pid"], end["tid"], "update") and e["ts"] == end["ts"]
        ]  # fmt: skip
        assert f"/{update['args']['key']!r}/{update['args']['chunk']}/{update['args']['step']}" in flow
        assert begins[flow]["ts"] < end["ts"]


def test_a_killed_worker_is_in_the_picture(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    (tmp_path / "t.json.parts").mkdir()
    (tmp_path / "t.json.parts" / "worker-9-1-1.part").write_bytes(b"of a job before")
    settings = {"timeline": path}  # as good as the option
    job = run_job("-n 2 -c 2 -s 1", PROGRAMS / "timeline.py", "killed", settings=settings)
    assert "worker 1 (client 1) was killed by SIGKILL" in job.stderr
    assert job.returncode == 128 + signal.SIGKILL
    picture = Picture(path)
    assert sorted(picture.names.values()) == ["scheduler", "server 0", "worker 0", "worker 1"]
    assert [e["args"]["step"] for e in picture.of("worker 1", "push", key="w")] == [1, 2, 3]
    assert os.listdir(tmp_path) == ["t.json"]


def test_a_job_that_stands_still_says_why(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("KVMPI_")}
    go_on, program = tmp_path / "go on", str(PROGRAMS / "stall.py")
    command = [sys.executable, "-m", "kvmpi", "run", "-n", "4", "-c", "2", "-s", "2", program, str(go_on)]
    process = subprocess.Popen(
        command, env={**env, "KVMPI_STALL_S": "0.5"}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    lines: list[str] = []
    assert process.stderr is not None
    reader = threading.Thread(target=lambda: lines.extend(process.stderr), daemon=True)  # type: ignore[arg-type]
    reader.start()
    try:
        names = (
            "no push from client 1",
            "MPI rank 1 (worker 3) of this client did not make the call",
            "waits for client 1",
        )
        wait_for(lambda: all(name in "".join(lines) for name in names), "reports of the wait")
        process.send_signal(signal.SIGUSR1)
        wait_for(lambda: sum("thread MainThread (most" in line for line in [*lines]) >= 6, "answers")
        go_on.touch()
        assert process.wait(60) == 0
    finally:
        process.kill()
    reader.join(10)
    text = "".join(lines)

    def said(who: str, *words: str) -> bool:
        return any(line.startswith(f"[{who}]") and all(word in line for word in words) for line in lines)

    # By themselves: who, key, clock, whom they wait for; and that it is over.
    assert said("worker 2", "worker 2 (client 1) at clock 2: has waited", "pushpull('w')", "(worker 3)"), text
    assert said("worker 0", "at clock 2: has waited", "pushpull of key 'w'", "step 3", "waits for client 1"), text
    assert said("worker 1", "has waited", "pushpull of key 'w'", "MPI rank 0 (worker 0)"), text
    assert any(
        said(f"server {server}", "round 3 of key 'w'", "no push from client 1 (last request") for server in (0, 1)
    )
    assert said("worker 2", "waits no longer, after"), text
    # When asked: all but the one with a handler of its own, which is left alone.
    (answer,) = [line for line in lines if "SIGUSR1: asked" in line]
    for who in ("scheduler", "server 0", "server 1", "worker 1", "worker 2", "worker 3"):
        assert who in answer
        assert said(who, "thread MainThread (most recent call first)"), who
    assert "worker 0" not in answer
    assert "the user's handler" not in text
    assert not said("worker 0", "most recent call first")
    assert said("worker 2", "for ", "MPI rank 1 (worker 3) of this client did not make the call")
    assert said("scheduler", "client 1 of store 1, clock", "last heartbeat"), text
    # Worker 3 has answered out of its long call.
    mine = [line for line in lines if line.startswith("[worker 3]")]
    over = next(i for i, line in enumerate(mine) if "the long call is over" in line)
    assert any("waits for nothing in kvmpi" in line for line in mine[:over])
    assert any("in long_call" in line for line in mine[:over])


def test_a_program_without_a_launcher_makes_its_own_picture(tmp_path: Path) -> None:
    program = (
        "import os, numpy as np, kvmpi\n"
        "kv = kvmpi.create('dist_async')\n"
        "kv.init(7, np.zeros(10, 'f4'))\n"
        "kv.set_optimizer(kvmpi.optim.SGD(lr=0.5))\n"
        "for _ in range(3):\n"
        "    kv.pushpull(7, np.ones(10, 'f4'))\n"  # at its end the store is closed, and then the picture made
        "os.chdir('/')\n"  # where it began, though
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith("KVMPI_")}
    env["KVMPI_TIMELINE"] = "t.json"
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=env, check=True, timeout=HANGS_S)
    assert os.listdir(tmp_path) == ["t.json"]
    picture = Picture(tmp_path / "t.json")
    assert list(picture.names.values()) == ["worker"]
    pushes, updates = picture.of("worker", "push", key=7), picture.of("worker", "update", key=7)
    assert [push["args"]["staleness"] for push in pushes] == [0, 0, 0]
    assert [(update["args"]["step"], update["args"]["client"]) for update in updates] == [(1, 0), (2, 0), (3, 0)]
