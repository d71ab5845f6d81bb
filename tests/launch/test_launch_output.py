"""How bytes become lines, and what becomes of them where nobody takes them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from jobs import HANGS_S

from kvmpi.launchers import output
from kvmpi.launchers.output import LineSplitter


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        (b"a\nb\n", [b"a", b"b"]),
        (b"a\n\nb", [b"a", b"", b"b"]),
        (b"no end", [b"no end"]),
        (b"", []),
        (b"\n", [b""]),
        (b"dos\r\nlines\r\n", [b"dos", b"lines"]),
        (b"10%\r50%\r100%\n", [b"100%"]),
        (b"\r10%\r50%\r100%\n", [b"100%"]),
        (b"10%\r50%\r\n", [b"50%"]),
        (b"10%\r50%\r", [b"50%"]),
        (b"10%\rnext\nplain\n", [b"next", b"plain"]),
        (b"[bold]x[/bold] \xff\x00\x1b[31m\n", [b"[bold]x[/bold] \xff\x00\x1b[31m"]),
    ],
)
@pytest.mark.parametrize("piece_bytes", [1, 2, 3, 1000])
def test_lines_do_not_depend_on_how_the_bytes_arrive(written, shown, piece_bytes):
    splitter = LineSplitter(Clock())
    lines = []
    for start in range(0, len(written), piece_bytes):
        lines += splitter.feed(written[start : start + piece_bytes])
    assert lines + splitter.close() == shown


def test_of_a_line_in_many_pieces_each_is_looked_at_once():
    """Looking at all of it again for each piece would take minutes."""
    splitter, pieces, started_s = LineSplitter(Clock()), 100_000, time.process_time()
    for _ in range(pieces):
        assert splitter.feed(b"x" * 50) == []
    assert splitter.feed(b"\n") == [b"x" * 50 * pieces]
    assert time.process_time() - started_s < 10


def test_a_progress_bar_is_shown_now_and_then():
    clock = Clock()
    splitter = LineSplitter(clock)
    assert splitter.feed(b"\r10%") == []
    clock.now_s += output.PROGRESS_INTERVAL_S
    assert splitter.feed(b"\r20%") == [b"10%"]
    assert splitter.feed(b"\r30%\r") == []
    clock.now_s += output.PROGRESS_INTERVAL_S
    assert splitter.feed(b"40%\r") == [b"40%"]
    assert splitter.feed(b"\n") == [], "already shown"
    assert splitter.feed(b"\nx\n") == [b"", b"x"]


def test_an_endless_line_does_not_fill_the_memory(monkeypatch):
    monkeypatch.setattr(output, "MAX_LINE_BYTES", 100)
    splitter = LineSplitter(Clock())
    assert splitter.feed(b"x" * 90) == []
    assert splitter.feed(b"x" * 20) == [b"x" * 110]
    assert splitter.close() == []


def test_of_long_lines_only_the_beginning_is_kept():
    assert output.shortened(b"short") == b"short"
    assert output.shortened(b"x" * output.MAX_LINE_BYTES) == b"x" * output.KEPT_BYTES + b" ..."


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="the system has no /dev/full")
@pytest.mark.parametrize(("words", "status", "said"), [
    (("plan", "--compute-seconds", "0.2"), 1, "kvmpi plan: standard output: No space left on device"),
    (("plan", "--compute-seconds", "0.2", "--json"), 1, "kvmpi plan: standard output: No space left on device"),
    (("--help",), 1, "kvmpi: standard output: No space left on device"),
    (("top", "--help"), 1, "kvmpi top: standard output: No space left on device"),
    (("run", "-n", "2", "--", "echo", "lost"), 0, "kvmpi run: standard output: No space left on device; the job goes"),
])  # fmt: skip
def test_a_full_disk_below_standard_output_is_said(words, status, said):
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}  # as it is for users
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "kvmpi", *words], stdout=full, stderr=subprocess.PIPE, text=True, timeout=HANGS_S,
            check=False, env=env,
        )  # fmt: skip
    assert done.returncode == status
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith(said)


def test_who_stops_reading_a_plan_gets_no_traceback():
    with subprocess.Popen(
        [sys.executable, "-m", "kvmpi", "plan", "--compute-seconds", "0.2", "--json"], stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    ) as plan:  # fmt: skip
        plan.stdout.close()
        assert plan.stderr.read() == ""
    assert plan.returncode == 128 + signal.SIGPIPE


def test_the_logs_of_the_job_before_are_kept(tmp_path):
    (tmp_path / "mine.log").write_text("not a log of kvmpi's")
    for job, ranks in (("first", 3), ("second", 2), ("third", 1)):
        logs = output.Output({}, str(tmp_path), lambda: False)
        for rank in range(ranks):
            logs.open_log(f"worker {rank}")
            logs.lines(f"worker {rank}", 1, [job.encode()])
        logs.close()
    found = {path.name: path.read_text().strip() for path in tmp_path.iterdir()}
    old = {"worker-0.log.1": "second", "worker-1.log.1": "second"}
    assert found == {"worker-0.log": "third", **old, "mine.log": "not a log of kvmpi's"}
