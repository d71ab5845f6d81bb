"""What people see of a running job: kvmpi top, the web page in a browser, Prometheus, and the summary at its end."""

from __future__ import annotations

import http.client
import io
import json
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from jobs import HANGS_S, wait_for
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from kvmpi.benchmarks import browser
from kvmpi.config import STATUS_FILE
from kvmpi.errors import ConfigError
from kvmpi.launchers import add_server, summary, top
from kvmpi.ps.statistics import Statistics
from kvmpi.trace import card, dashboard
from kvmpi.trace.board import Board
from kvmpi.trace.card import NAME as CARD
from kvmpi.wire import messages

PROGRAM = Path(__file__).parent / "programs" / "reporting.py"


@dataclass
class Watched:
    """A job that goes on until ``stop`` is there."""

    process: subprocess.Popen[bytes]
    folder: Path
    jobs: Path
    url: str
    metrics: list[str]

    @property
    def stop(self) -> Path:
        return self.folder / "stop"

    @property
    def errors(self) -> str:
        return (self.folder / "err").read_text()

    @property
    def card(self) -> Path:
        (found,) = self.jobs.glob(f"kvmpi-*/{CARD}")
        return found

    def top(self, *options: str) -> str:
        command = [sys.executable, "-m", "kvmpi", "top", self.card.parent.name.removeprefix("kvmpi-"), *options]
        env = {**os.environ, "TMPDIR": str(self.jobs)}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=HANGS_S, check=True)
        return done.stdout

    def get(self, path: str = "", host: str = "", method: str = "GET", **headers: str) -> tuple[int, Any, bytes]:
        """Status, headers and body of what the web page answers."""
        parts = urlsplit(self.url)
        connection = http.client.HTTPConnection(parts.netloc, timeout=20)
        try:
            connection.putrequest(method, path or f"{parts.path}?{parts.query}", skip_host=True)
            for name, value in {"Host": host or parts.netloc, **headers}.items():
                connection.putheader(name.replace("_", "-"), value)
            connection.endheaders()
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read()
        finally:
            connection.close()

    @property
    def token(self) -> str:
        return urlsplit(self.url).query


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("watched")
    jobs = Path(tempfile.mkdtemp(prefix="watched-", dir="/tmp"))  # short enough for sockets, and this job's alone
    env = {name: value for name, value in os.environ.items() if not name.startswith("KVMPI_")}
    env |= {"KVMPI_METRICS_PORT": "0", "KVMPI_REPORT_S": "0.2", "TMPDIR": str(jobs)}
    options = ["-n", "2", "-c", "2", "-s", "1", "--dashboard", "--summary", "--log-dir", str(folder / "logs")]
    command = [sys.executable, "-m", "kvmpi", "run", *options, "--", str(PROGRAM), str(folder / "stop")]
    with open(folder / "err", "wb") as err, open(folder / "out", "wb") as out:
        process = subprocess.Popen(command, env=env, stdout=out, stderr=err)
    watched = Watched(process, folder, jobs, "", [])
    try:
        wait_for(lambda: watched.errors.count("http://") == 3 or process.poll() is not None, "the addresses")
        watched.url = re.findall(r"dashboard: (http://\S+)", watched.errors)[0]
        watched.metrics = re.findall(r"metrics of \w.*?: (http://\S+)", watched.errors)
        yield watched
    finally:
        watched.stop.touch()
        try:
            process.wait(60)
        finally:
            process.kill()
            process.wait()
            shutil.rmtree(jobs)


def _running(job: Watched) -> dict[str, Any]:
    """The picture, once both workers have done some steps."""
    deadline = time.monotonic() + 60
    while True:
        picture: dict[str, Any] = json.loads(job.top("--json"))
        workers = picture["workers"]
        if len(workers) == 2 and all(w["steps"] > 10 and w["steps_per_s"] > 0 for w in workers) and picture["servers"]:
            return picture
        assert time.monotonic() < deadline, picture


def test_top_shows_what_the_job_does(job: Watched) -> None:
    picture = _running(job)
    assert picture["shape"] == {"workers": 2, "clients": 2, "servers": 1}
    assert picture["totals"]["keys"] == 2
    assert picture["lost"] == []
    for worker in picture["workers"]:
        rank, step = worker["rank"], worker["steps"]
        assert worker["newest"]["accuracy"] == 0.25
        # The newest point may stand for a few steps.
        assert rank < worker["newest"]["loss"] <= rank + 1.0 / max(1, step - 16)
        # What it has pushed and got back, both ways; at the most one step more than it has told.
        assert step * 400_000 <= worker["bytes"] <= (step + 1) * 400_016
        assert 0 < worker["blocked_s"] < worker["elapsed_s"]
    # Worker 1 sleeps for 50 ms in each step, worker 0 for 10 ms and waits for the rest.
    assert picture["slowest"] == 1
    server = picture["servers"][0]
    assert (server["keys"], server["held_bytes"]) == (2, 200_008)
    # It may be in the middle of a round, of two clients.
    assert server["received_bytes"] == pytest.approx(server["sent_bytes"], rel=0.2, abs=2 * 200_008)
    assert picture["history"]["steps_per_s"][-1][1] > 0
    assert "workers" in job.top(), "into a pipe it is printed once, and the job goes on"
    table = job.top("--once")
    assert "workers" in table
    assert "loss" in table
    assert re.search(r"^1 +1 +(slow|running) +\d+", table, re.MULTILINE), table
    assert "-n 2 -c 2 -s 1" in job.top("--list")


def test_stacks_of_all_processes_are_written_where_the_job_writes(job: Watched) -> None:
    _running(job)
    assert f"process {job.process.pid}" in job.top("--stacks")
    said = "thread MainThread (most recent call first)"
    everybody = ("scheduler", "server 0", "worker 0", "worker 1")
    wait_for(lambda: all(re.search(rf"\[{who}\].*{re.escape(said)}", job.errors) for who in everybody), "the stacks")


def test_its_files_are_private(job: Watched) -> None:
    job.top("--once")
    for name in (job.card, job.card.with_name("status.json"), job.card.with_name("watched")):
        assert stat.S_IMODE(name.stat().st_mode) == 0o600


def test_prometheus_sees_workers_and_servers(job: Watched) -> None:
    picture = _running(job)
    found: dict[str, dict[str, float]] = {}
    for url in job.metrics:
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=20)
        connection.request("GET", "/metrics")
        for family in text_string_to_metric_families(connection.getresponse().read().decode()):
            for sample in family.samples:
                who = sample.labels.get("worker") or sample.labels.get("server") or ""
                found.setdefault(sample.name, {})[who + sample.labels.get("name", "")] = sample.value
        connection.close()
    assert len(job.metrics) == 2
    assert found["kvmpi_worker_steps_total"]["0"] >= picture["workers"][0]["steps"]
    assert found["kvmpi_worker_reported"]["1accuracy"] == 0.25
    assert found["kvmpi_server_held_bytes"] == {"0": 200_008.0}
    assert found["kvmpi_workers_reporting"] == {"": 2.0}


def test_nobody_sees_the_page_without_the_token_or_by_another_name(job: Watched) -> None:
    status, headers, body = job.get()
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert headers["Content-Security-Policy"].startswith("default-src 'self'")
    assert headers["Referrer-Policy"] == "no-referrer"
    assert b"http" not in body.replace(b"http-equiv", b"")  # nothing from anywhere else
    assert job.get("/")[0] == job.get("/data.json")[0] == job.get("/data.json?token=")[0] == 403
    assert job.get(f"/app.js?{job.token[:-1]}")[0] == 403
    port = urlsplit(job.url).port
    for host in (
        "evil.example",
        f"evil.example:{port}",
        f"10.0.0.1:{port}",
        f"127.0.0.1:{port}0",
        "127.0.0.1",
        ":",
        "x" * 300,
    ):
        assert job.get(host=host)[0] == 403, host
    assert job.get(host=f"localhost:{port}")[0] == 200
    assert job.get(f"/../config.py?{job.token}")[0] == job.get(f"/nothing?{job.token}")[0] == 404
    assert job.get(method="POST")[0] == job.get(method="DELETE")[0] == 501
    assert job.get("/" + "x" * 3000)[0] == 414
    assert job.get(**{f"X_{i}": "y" for i in range(70)})[0] == 431


def test_data_come_once(job: Watched) -> None:
    _running(job)
    for _ in range(20):  # between two pictures
        status, headers, body = job.get(f"/data.json?{job.token}")
        assert status == 200
        assert set(json.loads(body)["curves"]) == {"accuracy", "loss"}
        again, _, nothing = job.get(f"/data.json?{job.token}", If_None_Match=headers["ETag"])
        if again == 304:
            assert nothing == b""
            return
    raise AssertionError("the same data were sent again every time")


def test_connections_that_say_nothing_do_not_stop_the_job(job: Watched) -> None:
    parts = urlsplit(job.url)
    silent = [socket.create_connection((parts.hostname or "", parts.port or 0)) for _ in range(40)]
    try:
        before = _running(job)["totals"]["steps"]
        wait_for(lambda: _running(job)["totals"]["steps"] > before, "a step")
    finally:
        for each in silent:
            each.close()

    def is_shown() -> bool:
        try:
            return job.get()[0] == 200
        except ConnectionError:  # there are still too many
            return False

    wait_for(is_shown, "the page")


@pytest.mark.skipif(browser.find() is None, reason="no Chromium here to look at the page with")
def test_the_page_in_a_browser_on_a_desk_and_on_a_phone(job: Watched) -> None:
    _running(job)
    with browser.Browser() as page:
        for width, mobile in ((1200, False), (360, True)):
            page.resize(width, 800, mobile=mobile)
            page.open(job.url)
            page.wait_for("document.body?.dataset.ready && document.querySelectorAll('#workers tbody tr').length == 2")
            text = page.ask("document.body.innerText")
            assert "2 workers in 2 clients" in text
            told = page.ask("document.querySelector('[data-tile=steps]').textContent")
            assert int(told.replace("\u2009", "").replace(" ", "")) >= 10
            cells = page.ask(
                "[...document.querySelectorAll('#workers tbody tr')].map(row => "
                "Object.fromEntries([...row.children].map(c => [c.dataset.label || 'worker', c.textContent])))"
            )
            assert [(cell["worker"], cell["accuracy"]) for cell in cells] == [(f"worker {i}", "0.25") for i in (0, 1)]
            assert 1.0 <= float(cells[1]["loss"]) < 1.1
            # Curves of both workers and of the mean; the last point of the mean is read out.
            assert page.ask("document.querySelectorAll('[data-title=loss] path').length") == 3
            newest = page.ask("document.querySelector('[data-title=loss] output').textContent")
            assert 0.5 <= float(newest.split()[0]) < 0.6
            assert page.ask("[...document.querySelectorAll('svg')].every(s => s.getAttribute('aria-label'))")
            assert page.ask("document.documentElement.scrollWidth") == width
            # The head of a table is for screen readers only, on a phone.
            wide = "[...document.querySelectorAll('main *:not(thead, thead *)')].filter(e => "
            wide += "e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML.slice(0, 200))"
            assert page.ask(wide) == []
        errors = page.ask(
            "performance.getEntriesByType('resource').filter(e => !e.name.startsWith(location.origin)).length"
        )
        assert errors == 0


@pytest.mark.skipif(browser.find() is None, reason="no Chromium here to look at the page with")
def test_the_page_shows_what_is_constant_but_for_rounding() -> None:
    """The mean of three times 0.1 is the next number above 0.1: no axis has room for ticks in between."""
    statistics = Statistics(num_workers=3)
    for rank in range(3):
        curves = {"rate": [(step, 0.1) for step in (1, 2, 3)]}
        statistics.hear(messages.Report("worker", rank, 0, 1, 1, "host", {"steps": 3.0}, curves=curves), 0.0)
    board = Board(statistics.snapshot)
    assert board.renew(1.0)["curves"]["rate"]["mean"][-1][1] == 0.1 + 2.0**-56
    url, close = dashboard.serve(board, "127.0.0.1", 0)
    try:
        with browser.Browser() as page:
            page.open(url)
            page.wait_for("document.body?.dataset.ready")
            texts = "[...document.querySelectorAll('[data-title=rate] svg text')].map(t => t.textContent)"
            marks = [float(text) for text in page.ask(texts)]
            assert {0.1, 1.0, 2.0, 3.0} <= set(marks)
            assert len(marks) == len(set(marks)), marks
    finally:
        close()


def test_the_end_of_the_job_is_summed_up(job: Watched) -> None:
    _running(job)
    job.stop.touch()
    assert job.process.wait(60) == 0
    out = (job.folder / "out").read_text()
    (steps,) = {int(number) for number in re.findall(r"steps (\d+)", out)}
    assert out.count("steps") == 2
    text = job.errors
    assert f"2 workers in 2 clients, 1 server; {steps} steps" in text
    rows = [line.split() for line in text.splitlines() if line.startswith("  worker ")]
    assert [row[1] for row in rows] == ["0", "1"]
    assert all(row[4] == str(steps) for row in rows)
    assert "slowest: worker 1" in text
    kept = json.loads((job.folder / "logs" / "summary.json").read_text())
    assert kept["slowest"] == 1
    for worker in kept["workers"]:
        rank = worker["rank"]
        # What the program has slept for, which is most of what it did by itself.
        slept_s = steps * (0.01 + 0.04 * rank)
        assert worker["steps"] == steps
        assert slept_s <= worker["compute_s"] < worker["elapsed_s"]
        assert worker["compute_s"] + worker["blocked_s"] == pytest.approx(worker["elapsed_s"])
        assert worker["bytes"] == pytest.approx(steps * 400_016)
    points = kept["curves"]["loss"]["workers"]["1"]
    assert points[-1][0] == steps
    assert not list(job.jobs.iterdir())


def test_names_that_the_locale_cannot_write(tmp_path: Path) -> None:
    folder = tmp_path / "kvmpi-aa11"
    folder.mkdir(mode=0o700)
    card = {"job": "aa11", "program": ["tra\u00een.py"], "started_s": time.time(), "pid": os.getpid()}
    (folder / CARD).write_text(json.dumps({**card, "workers": 1, "clients": 1, "servers": 0}))
    picture = {
        "job": "aa11", "shape": {"workers": 0, "clients": 0, "servers": 0}, "elapsed_s": 1.0, "workers": [],
        "totals": {"keys": 0, "steps": 0, "steps_per_s": 0.0, "bytes_per_s": 0.0, "imbalance": 1.0},
        "curves": {"pr\u00e9cision": {}}, "servers": [], "lost": [], "slowest": None,
    }  # fmt: skip
    (folder / STATUS_FILE).write_text(json.dumps(picture, ensure_ascii=False), encoding="utf-8")
    ahead_s = time.time() + 3600  # new enough, however slow this machine is
    os.utime(folder / STATUS_FILE, (ahead_s, ahead_s))
    env = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONIOENCODING": "ascii", "LC_ALL": "C", "PYTHONUTF8": "0"}
    env["PYTHONCOERCECLOCALE"] = "0"
    command = [sys.executable, "-m", "kvmpi", "top", "aa11"]
    for option in ("--once", "--list"):
        done = subprocess.run([*command, option], env=env, capture_output=True, text=True, timeout=HANGS_S, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        assert "tra\\xeen.py" in done.stdout
        assert ("pr\\xe9cision" in done.stdout) == (option == "--once")


def test_which_job_is_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def card(name: str, **fields: Any) -> None:
        folder = tmp_path / f"kvmpi-{name}"
        folder.mkdir(mode=fields.pop("mode", 0o700))
        job = {"job": name, "program": ["train.py"], "started_s": time.time(), "pid": os.getpid(), **fields}
        (folder / CARD).write_text(json.dumps({"workers": 1, "clients": 1, "servers": 0, **job}))

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(ConfigError, match=f"no running job of yours has a folder in {tmp_path} or /tmp"):
        top.choose(top.find_jobs([tmp_path]), "")
    card("aa11", started_s=time.time() - 60)
    card("bad1", mode=0o755)  # anybody could have written it
    card("bad2", pid=1 << 30)  # its launcher is gone
    (tmp_path / "kvmpi-bad3").mkdir(mode=0o700)
    (tmp_path / "kvmpi-bad3" / CARD).write_text("{")
    assert top.choose(top.find_jobs([tmp_path]), "")["job"] == "aa11"
    card("aa22", program=["tr\udcffin.py"])
    cards = top.find_jobs([tmp_path])
    assert [found["job"] for found in cards] == ["aa22", "aa11"]
    assert top.choose(cards, "aa1")["job"] == "aa11"
    assert cards[0]["program"] == ["tr\ufffdin.py"], "a name that is no text is shown all the same"
    for wanted, told in (("", "several jobs"), ("aa", "several jobs"), ("zz", "no job 'zz'")):
        with pytest.raises(ConfigError, match=told):
            top.choose(cards, wanted)


def test_jobs_as_json(tmp_path: Path) -> None:
    """Also where there are none; and what is wrong is said elsewhere."""

    def run(*options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "kvmpi", "top", "--json", *options]
        env = {**os.environ, "TMPDIR": str(tmp_path)}
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=HANGS_S, check=False)

    def listed() -> list[Any]:
        """Those of this test: others may run jobs."""
        done = run("--list")
        assert (done.returncode, done.stderr) == (0, "")
        return [job for job in json.loads(done.stdout) if job["folder"].startswith(str(tmp_path))]

    assert listed() == []
    folder = tmp_path / "kvmpi-aa11"
    folder.mkdir(mode=0o700)
    card = {"job": "aa11", "program": ["train.py", "x y"], "started_s": time.time(), "pid": os.getpid()}
    card.update(workers=1, clients=1, servers=0)
    (folder / CARD).write_text(json.dumps(card))
    assert listed() == [{**card, "folder": str(folder)}]
    for options, said in ((("zz",), "no job 'zz'"), (("aa11", "--stacks"), "leave --json out")):
        done = run(*options)
        assert (done.returncode, done.stdout) == (1, "")
        assert said in done.stderr


def test_of_a_job_without_a_launcher_those_who_answer_are_asked_and_it_gets_no_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder, job_id = tmp_path / "kvmpi-abcd1234", "0123456789abcdef"
    folder.mkdir(mode=0o700)
    card.write(str(folder), job_id, ["train.py"], (2, 1, 1), launcher=False)
    assert top.main(["--stacks", job_id]) == 1, "nobody answers yet"
    answers = "import signal; signal.signal(signal.SIGUSR1, lambda *_: exit(7)); print('there', flush=True); "
    answers += "signal.pause()"
    with subprocess.Popen([sys.executable, "-c", answers], stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "there\n"
        (folder / f"answers-{worker.pid}").write_text("worker 0")
        assert top.main(["--stacks", job_id]) == 0
        assert worker.wait(HANGS_S) == 7
    assert add_server.main([job_id]) == 1
    said = capsys.readouterr()
    assert said.out == "asked worker 0; the answers are in what they write to standard error\n"
    assert f"job {job_id} is ending, or has only begun" in said.err
    assert "was not started by kvmpi run, which alone starts further servers" in said.err


def test_which_workers_are_well() -> None:
    worker = {
        "rank": 0, "client": 0, "state": "running", "steps": 12345, "steps_per_s": 15.37, "own_s_per_step": 0.0512,
        "blocked_share": 0.2, "bytes_per_s": 1e6, "staleness": None, "resident_bytes": 1e8, "newest": {"accuracy": 0.5},
    }  # fmt: skip
    console = Console(width=40, file=io.StringIO(), color_system=None)
    console.print(top._workers({"curves": {"accuracy": {}}, "workers": [worker]}, 5))
    _, head, row, *_ = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert head.split() == ["worker", "state", "steps/s", "own", "ms"]
    assert row.split() == ["0", "running", "15.37", "51.2"]
    for newest, shown in (({"accuracy": 0.5}, "0.5"), ({"accuracy": None}, "not finite"), ({}, "-")):
        wide = Console(width=200, file=io.StringIO(), color_system=None)
        wide.print(top._workers({"curves": {"accuracy": {}}, "workers": [{**worker, "newest": newest}]}, 5))
        row = wide.file.getvalue().splitlines()[2]  # type: ignore[attr-defined]
        assert row.rstrip().endswith(f" {shown}"), "who has told nothing is not who has diverged"


def test_the_end_has_a_line_of_its_own(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pictures = iter([{}])

    def look(_: Path) -> object:
        for picture in pictures:
            return picture
        raise ConfigError("the job has ended")

    monkeypatch.setattr(top, "look", look)
    monkeypatch.setattr(top, "show", lambda *_: "what it does")
    monkeypatch.setattr(top, "Console", lambda: Console(force_terminal=True, color_system=None))
    top._follow({"folder": Path(), "job": "0123456789"})
    shown, *_, end = capsys.readouterr().out.split("\x1b[?1049l")  # where the screen is given back
    assert "what it does" in shown
    assert end.removeprefix("\x1b[?25h") == "job 01234567 has ended\n"


def test_summary_lines_up() -> None:
    rows = summary.aligned([["", "steps"], ["worker 10", "1"], ["worker 9", "12345"]])
    assert rows == ["             steps", "  worker 10      1", "  worker 9   12345"]
    assert [summary.volume(n) for n in (0, 999, 1000, 1_500_000, 2.5e12)] == [
        "0 B",
        "999 B",
        "1 kB",
        "1.5 MB",
        "2.5 TB",
    ]


def test_what_has_diverged_is_no_result() -> None:
    workers = [{"rank": rank, "steps": 9, "compute_s": 1.0, "newest": {"loss": [0.5, None][rank]}} for rank in (0, 1)]
    curves = {"loss": {"mean": [[3, 0.25]]}, "rate": {"mean": [[9, 0.1]]}}
    said = summary._remarks({"workers": workers, "shape": {"workers": 2}, "curves": curves}, 2)
    assert said[-2:] == ["  loss: not finite at the end, on 1 worker", "  rate: 0.1 at step 9, mean over workers"]


@pytest.mark.parametrize("width", [20, 40, 60, 80, 200])
def test_a_narrow_terminal_has_fewer_columns_and_no_cut_ones(width: int) -> None:
    names = ["worker", "state", "steps", "own ms", "[b]m"]
    rows = [[str(rank), "running", str(1000 * rank), "123.4", "1.25 GB"] for rank in (0, 12)]
    table = top.Columns("workers", names, rows, ["[b]m", "steps", "own ms"], more=3)
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(table)
    title, head, *lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert title.strip() == "workers"
    left_out = {20: ["[b]m", "steps", "own ms"], 40: []}[min(width, 40)]
    assert head.split() == " ".join(name for name in names if name not in left_out).split()
    for line, row in zip(lines, rows, strict=False):
        shown = [cell for name, cell in zip(names, row, strict=True) if name not in left_out]
        assert line.split() == " ".join(shown).split()
    note = " ".join(" ".join(lines[len(rows) :]).split())
    assert note == "3 more" + (f"; too narrow for {', '.join(left_out)}" if left_out else "")
    assert max(map(len, (head, *lines))) <= width
