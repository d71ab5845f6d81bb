"""``kvmpi bench ps``: what it plans, how it judges values, what it shows, and jobs with real servers."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import uuid
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from jobs import HANGS_S
from processes import processes_with

from kvmpi.benchmarks import environment, ps, ps_jobs, ps_mxnet, ps_options, ps_report, ps_rows
from kvmpi.benchmarks.plan import ROUNDS, Case
from kvmpi.benchmarks.ps_options import Layout
from kvmpi.benchmarks.ps_worker import Entrant
from kvmpi.benchmarks.table import Table

PROGRAMS = Path(__file__).parent / "programs"


def parsed(text: str) -> argparse.Namespace:
    return ps_options.parse("ps", text.split())


# ---- rows and options


def test_a_row_is_settings_and_what_its_stores_do():
    label, way = ps_rows.parse(" tcp:fp16:chunk_bytes=65536:placement=lpt")
    assert label == "tcp:fp16:chunk_bytes=65536:placement=lpt"
    assert dict(way.settings) == {
        "KVMPI_TRANSPORT": "tcp", "KVMPI_SECURITY": "off", "KVMPI_CHUNK_BYTES": "65536", "KVMPI_PLACEMENT": "lpt"
    }  # fmt: skip
    assert way.compress == "fp16"
    assert way.system == "kvmpi"
    assert ps_rows.parse("ipc:replicas=1")[1].options == ("--replicas", "1")


def test_options_stand_for_rows():
    def labels(text):
        return [(row.label, row.mode) for row in parsed(text).rows]

    assert labels("") == [("tcp", "sync"), ("ipc", "sync")]
    assert labels("--mode async,sync --transport auto --compress none,fp16 --mxnet python") == [
        (label, mode) for mode in ("async", "sync") for label in ("auto", "auto:fp16", "mxnet")
    ]
    assert labels("--rows ipc,tcp,ipc") == [("ipc", "sync"), ("tcp", "sync")]
    assert labels("--rows ipc,sockets --mode async,sync") == [("ipc", "async"), ("ipc", "sync"), ("sockets", "sync")]


def test_rows_share_a_job_where_they_can():
    rows = parsed("--rows tcp,ipc,tcp:fp16,mxnet,tcp:retry_s=5 --mode sync,async --mxnet python").rows
    jobs = [[(row.label, row.mode) for row in job] for job in ps_rows.by_job(rows)]
    assert jobs == [
        [("tcp", "sync"), ("tcp:fp16", "sync"), ("tcp", "async"), ("tcp:fp16", "async")],
        [("ipc", "sync"), ("ipc", "async")],
        [("mxnet", "sync")],
        [("tcp:retry_s=5", "sync"), ("tcp:retry_s=5", "async")],
        [("mxnet", "async")],
    ]


def test_shapes_of_jobs_and_keys_of_a_call():
    args = parsed("-n 2,4 -s 1,2 --sizes 0,4,4098 --keys 3")
    assert args.layouts == [Layout(n, n, s) for n in (2, 4) for s in (1, 2)]
    assert not any(layout.grouped for layout in args.layouts)
    assert [case.counts for case in args.cases] == [(0, 0, 0), (1, 0, 0), (342, 341, 341)]
    assert parsed("-n 4 -c 2").layouts == [Layout(4, 2, 2)]
    assert Layout(4, 2, 2).grouped
    ((case),) = parsed("--preset resnet50").cases
    assert (case.preset, len(case.counts), sum(case.counts)) == ("resnet50", 161, 25_557_032)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("-n 2 -c 3", "every client needs a worker"),
        ("-s 0", "-s 0: expected positive numbers"),
        ("--rows fast", "unknown row 'fast'; known: auto, tcp, ipc, mxnet, sockets"),
        ("--rows tcp:slow", "tcp has no 'slow'; known: fp16, bf16, empty, curve, shared, plain and SETTING=VALUE"),
        ("--rows mxnet:fp16 --mxnet python", "mxnet has no 'fp16'"),
        ("--rows tcp:rank=3", "unknown setting 'rank'"),
        ("--rows tcp:chunk_bytes=x", "KVMPI_CHUNK_BYTES='x': expected int"),
        ("--rows ,", "no rows given"),
        ("--rows mxnet", "--mxnet PYTHON"),
        ("--rows tcp --compress fp16", "name a row such as tcp:fp16"),
        ("--rows tcp --transport ipc", "not allowed with"),
        ("--transport udp", "--transport udp: expected some of auto, tcp, ipc"),
        ("--mode sync,ssp", "--mode ssp: expected some of sync, async"),
        ("--compress zip", "--compress zip"),
        ("--keys 0", "--keys 0: must be positive"),
        ("--keys 2 --preset resnet50", "a preset has its own"),
        ("--sizes 4X", "'4X' is no size"),
        ("--seconds 0", "a positive number of seconds"),
        ("--plot picture.txt", "expected a name that ends in .png"),
    ],
)
def test_a_bad_option_is_named(text, words, capsys):
    with pytest.raises(SystemExit) as ended:
        parsed(text)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_what_does_not_fit_into_memory_is_left_out(monkeypatch):
    rows = [ps_rows.by_job(parsed("--transport tcp,ipc --mode sync,async").rows), Layout(2, 2, 2)]
    case = Case((1 << 20,))  # 4 MiB: two jobs with 4 arrays, and two stores with 5 copies
    needed = (4 << 20) * 2 * (2 * 2 + 2 * 5)
    monkeypatch.setattr(environment, "available_bytes", lambda: int(needed / 0.85) + 1)
    assert ps._fitting([case], *rows) == ([case], [])
    monkeypatch.setattr(environment, "available_bytes", lambda: int(needed / 0.85) - 1)
    fitting, (note,) = ps._fitting([case], *rows)
    assert fitting == []
    assert note.startswith("4 MiB left out: its rows take about 112 MiB of memory")


# ---- verification


class OneWorker:
    """A store of one worker that does what it should; subclasses do not."""

    def __init__(self, mode: str) -> None:
        self.mode = mode

    def open(self, values, outs):
        self.values, self.outs = values, outs
        self.stored = [np.zeros_like(value) for value in values]

    def push(self):
        for stored, value in zip(self.stored, self.values, strict=True):
            stored[:] = value if self.mode == "sync" else stored - value

    def pull(self):
        for stored, out in zip(self.stored, self.outs, strict=True):
            out[:] = stored

    def pushpull(self):
        self.push()
        self.pull()

    def glance(self):
        filled = [out for out in self.outs if out.size]
        return [float(filled[0][0]), float(filled[-1][-1])] if filled else []

    def load(self):
        pass

    restore = read = settle = load


class Drops(OneWorker):
    """Every third push is lost."""

    count = 0

    def push(self):
        self.count += 1
        if self.count % 3:
            super().push()


class AppliesTwice(OneWorker):
    def push(self):
        super().push()
        if self.mode == "async":
            super().push()
        else:
            self.stored[0] += self.values[0]


class SwapsKeys(OneWorker):
    def pull(self):
        super().pull()
        self.outs[0][:], self.outs[1][:] = self.stored[1], self.stored[0]


class SpoilsOneElement(OneWorker):
    def pull(self):
        super().pull()
        self.outs[-1][-1] += 1


class PullsNothing(OneWorker):
    def pull(self):
        pass


def judged(store: OneWorker, counts: tuple[int, ...]) -> tuple[int, int]:
    """Wrong elements in verification, wrong calls in timing."""
    entrant = Entrant(store, store.mode, 1, 0)
    entrant.open([np.empty(count, "f4") for count in counts], [np.empty(count, "f4") for count in counts])
    before = entrant.verify()
    times_s, wrong = entrant.time(5, 2)
    assert [len(times) for times in times_s] == [5] * 4
    return before + entrant.verify(), wrong


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("counts", [(0,), (1,), (1, 0, 0), (40, 40, 7)])
def test_a_store_that_is_right_passes(mode, counts):
    assert judged(OneWorker(mode), counts) == (0, 0)


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("liar", [Drops, AppliesTwice, SwapsKeys, SpoilsOneElement, PullsNothing])
def test_a_store_that_is_wrong_is_found_out(mode, liar):
    wrong, _ = judged(liar(mode), (40, 40, 7))
    assert wrong > 0


def test_a_timed_call_is_looked_at_too():
    assert judged(SpoilsOneElement("sync"), (40, 40, 7))[1] == 14


# ---- the parent's part of a job


class Stage:
    """Answers as two workers of one row do; the first is slower, and talks to no server."""

    def __init__(self) -> None:
        self.commands: list[str] = []

    def ask(self, job, command):
        self.commands.append(command)
        kind = {"open": "opened", "time": "times", "close": "closed"}[command.split()[0]]
        for slower in (2.0, 1.0):
            event = {"kind": kind, "row": 0, "wrong": int(kind == "times")}
            if kind != "closed":
                event["mean_s"] = slower / 1000
            if kind == "times":
                event["us"] = [[slower * base] * 3 for base in (1.0, 2.0, 3.0, 4.0)]
            if kind == "closed" and slower == 1.0:
                event["imbalance"] = 1.5
            yield event
        if kind == "opened":
            yield {"kind": "refused", "row": 1, "text": "no empty arrays"}


def test_what_workers_report_becomes_a_row():
    rows = parsed("--rows tcp,mxnet --mxnet python").rows
    job = argparse.Namespace(name="tcp")
    stage, cases = Stage(), (Case(()), Case((1000, 500)))
    turns = ps_jobs.PsJob(stage, job, rows, Layout(2, 2, 1), cases, 1.0)
    assert list(turns.ask("open 1")) == [{"kind": "note", "text": "mxnet left out of 5.9 KiB: no empty arrays"}]
    for _ in range(ROUNDS):
        assert list(turns.ask("round")) == []
    ((event),) = turns.ask("close")
    # The slower worker takes 2 ms for an iteration, so a fifth of a second is enough for 100; one more warms up.
    assert stage.commands == ["open 1", *["time 0 100 1"] * ROUNDS, "close"]
    (row,) = event["rows"]
    expected = {
        "size_B": 6000, "keys": 2, "row": "tcp", "clients": 2, "servers": 1, "mode": "sync", "compress": "none",
        "push_p50": 1.5, "both_p50": 4.5, "fused_p50": 6.0, "pull_p99": 4.0, "imbalance": 1.5, "iters": 500,
        "wrong": 2 * ROUNDS, "workers": 2,
    }  # fmt: skip
    assert {name: row[name] for name in expected} == expected
    assert row["client_bw"] == pytest.approx(2 * 6000 / 4.5e-6 / 1e9)
    assert row["server_bw"] == pytest.approx(2 * 2 * 6000 / 4.5e-6 / 1e9)


@pytest.mark.parametrize("num_workers", [1, 2, 16, 128, 1000])
def test_asynchronous_sums_stay_exact(num_workers):
    most = ps_jobs._most_iterations(num_workers)
    assert most >= 1
    pushes = 2 * ROUNDS * (most + 1) + 12  # warm-ups and verification included
    assert most == 1 or pushes * 13 * num_workers <= 1 << 24


def row(label="tcp", **values):
    found = dict.fromkeys(ps_report.COLUMNS, 1.0) | {
        "size_B": 67108864, "keys": 1, "row": label, "clients": 2, "servers": 2, "mode": "sync", "compress": "none",
        "iters": 5, "wrong": 0, "workers": 2, "job": [2, 2, 2],
    }  # fmt: skip
    return found | values


def test_rows_are_compared_with_mxnet_or_else_with_the_first():
    rows = [row(both_p50=30.0, fused_p50=20.0), row("ipc", both_p50=15.0, fused_p50=10.0)]
    assert ps_report.compare(rows) == ["sync, times over push and pull of tcp: ipc 0.50, fused 0.33"]
    rows += [row("mxnet", both_p50=20.0, fused_p50=25.0), row(mode="async", both_p50=7.0)]
    assert ps_report.compare(rows) == [
        "sync, times over push and pull of mxnet: tcp 1.50, fused 1.00; ipc 0.75, fused 0.50"
    ]
    assert [(r["over"], r["ratio"]) for r in rows] == [("mxnet", 1.5), ("mxnet", 0.75), ("mxnet", 1.0), ("tcp", 1.0)]


def test_lines_of_the_table_line_up():
    label = "tcp:fp16:chunk_bytes=65536"
    shown = Table(ps_report.COLUMNS, {"row": ["tcp", label], "mode": ["async"], "compress": ["none", "fp16"]})
    lines = [shown.header(), shown.line(row(imbalance=None)), shown.line(row(label, push_p50=1234567.8))]
    assert len({len(line) for line in lines}) == 1
    assert [len(line.split()) for line in lines] == [len(ps_report.COLUMNS)] * 3
    assert lines[1].split()[-3] == "-"


def test_a_job_in_words():
    assert ps_report.job(1, 1, 1) == "1 worker in 1 client, 1 server"
    assert ps_report.job(4, 2, 3) == "4 workers in 2 clients, 3 servers"


# ---- real jobs


def test_small_jobs_are_verified_and_measured(bench, tmp_path):
    done = bench(
        "ps", "-n", 2, "-s", 1, "--sizes", "0,4,4099", "--keys", 2, "--mode", "sync,async", "--rows",
        "ipc,ipc:fp16,sockets,mxnet", "--mxnet", tmp_path / "nothing", "--seconds", "0.02", "--json", "rows.json",
        "--plot", "picture.png",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(f"# mxnet left out: {tmp_path}/nothing: No such file or directory") == 1
    found = [json.loads(line) for line in (tmp_path / "rows.json").read_text().splitlines()]
    assert [(r["size_B"], r["mode"], r["row"]) for r in found] == [
        (size, mode, label)
        for size in (0, 4, 4096)
        for mode, labels in (("sync", ("ipc", "ipc:fp16", "sockets")), ("async", ("ipc", "ipc:fp16")))
        for label in labels
    ]
    for r in found:
        assert r["wrong"] == 0
        assert r["iters"] >= ROUNDS
        assert (r["keys"], r["clients"], r["servers"], r["workers"]) == (2, 2, 1, 2)
        assert r["imbalance"] == (None if r["row"] == "sockets" else 1.0)
        assert 0 < r["push_p50"] <= r["push_p99"]
        assert max(r["push_p50"], r["pull_p50"]) <= r["both_p50"] <= r["both_p99"]
        assert r["client_bw"] == pytest.approx(2 * r["size_B"] / r["both_p50"] / 1e3)
        assert r["server_bw"] == pytest.approx(2 * r["client_bw"])
        assert {"host", "cores", "python", "numpy", "kvmpi", "commit", "command", "date"} <= set(r)
    shown = [line.split() for line in done.stdout.splitlines() if not line.startswith("#")]
    assert shown[0] == list(ps_report.COLUMNS)
    assert Counter(words[2] for words in shown[1:]) == {"ipc": 6, "ipc:fp16": 6, "sockets": 3}
    assert (tmp_path / "picture.png").stat().st_size > 10_000


def test_a_wrong_value_is_counted_and_named(tmp_path):
    env = {name: value for name, value in os.environ.items() if not name.startswith("KVMPI_")}
    command = [sys.executable, str(PROGRAMS / "ps_liar.py"), "ps", "-s", "1", "--sizes", "4,1K", "--seconds", "0.01"]
    done = subprocess.run(
        [*command, "--rows", "liar"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=HANGS_S,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    shown = [line.split() for line in done.stdout.splitlines() if not line.startswith("#")][1:]
    wrong = {(words[0], words[2]): words[-1] for words in shown}
    # The last worker's lie in each of 4 exchanges, before the row is timed and afterwards.
    assert wrong == {("4", "liar"): "0", ("1024", "liar"): "8"}
    assert done.stderr == (
        "kvmpi bench: WRONG: sync push and pull by liar, 2 workers in 2 clients, 1 server, 1024 B in 1 keys: "
        "8 elements\n"
    )


def test_a_job_that_fails_says_why(bench):
    done = bench("ps", "-n", 1, "-s", 1, "--rows", "tcp:imports=no_such_module", "--sizes", 4, "--seconds", "0.01")
    assert done.returncode == 1
    assert "cannot import 'no_such_module'" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("kvmpi bench: the job under tcp:imports=no_such_module ended with")


def test_it_starts_its_jobs_itself(monkeypatch, capsys):
    monkeypatch.setenv("KVMPI_ROLE", "worker")
    assert ps.main("ps", []) == 2
    assert "run it outside of mpirun and kvmpi run" in capsys.readouterr().err


# ---- jobs of MXNet, with a stand-in for MXNet


@pytest.fixture
def mxnet_job(tmp_path):
    """Runs workers with the code ``worker``; the status and the output of the job. Nothing of it is left behind."""

    def run(worker: str) -> tuple[int, str]:
        role = "import os, time\nif os.environ['DMLC_ROLE'] != 'worker':\n    time.sleep(60)\n"
        (tmp_path / "mxnet.py").write_text(role)
        (tmp_path / "worker.py").write_text(f"import os, sys, time\nimport mxnet\n{worker}")
        mark = uuid.uuid4().hex
        env = {**os.environ, "PYTHONPATH": str(tmp_path), "TEST_MARK": mark}
        command = [sys.executable, "-m", "kvmpi.benchmarks.ps_mxnet", sys.executable, "2", "1"]
        done = subprocess.run(
            [*command, str(tmp_path / "worker.py"), "FOLDER"], env=env, capture_output=True, text=True, timeout=60
        )
        deadline_s = time.monotonic() + 30
        while processes_with(f"TEST_MARK={mark}"):
            assert time.monotonic() < deadline_s, "a process has outlived the job"
            time.sleep(0.02)
        return done.returncode, done.stdout + done.stderr

    return run


def test_a_job_of_mxnet_ends_with_its_workers(mxnet_job):
    names = ("KVMPI_RANK", "DMLC_NUM_WORKER", "DMLC_NUM_SERVER", "DMLC_PS_ROOT_URI")
    status, output = mxnet_job(
        f"os.write(1, ' '.join([sys.argv[1], *(os.environ[name] for name in {names})]).encode() + b'\\n')"
    )
    assert status == 0
    assert sorted(output.splitlines()) == [f"FOLDER {rank} 2 1 127.0.0.1" for rank in (0, 1)]


def test_a_job_of_mxnet_fails_with_its_first_process(mxnet_job):
    status, output = mxnet_job("time.sleep(60) if os.environ['KVMPI_RANK'] == '0' else sys.exit(3)")
    assert (status, output) == (1, "a worker of MXNet ended with exit status 3\n")


def test_an_interpreter_without_mxnet_is_named(tmp_path):
    assert ps_mxnet.missing(str(tmp_path / "none")) == f"{tmp_path}/none: No such file or directory"
    assert ps_mxnet.missing(sys.executable) == f"{sys.executable}: ModuleNotFoundError: No module named 'mxnet'"
