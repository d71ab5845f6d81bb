"""What a process buffers and writes, and the picture that is made of it, without any job."""

from __future__ import annotations

import errno
import gzip
import itertools
import json
import os
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvmpi.config import Config
from kvmpi.errors import ConfigError
from kvmpi.trace import merge, parts, timeline
from kvmpi.trace.__main__ import main as trace_command
from kvmpi.trace.parts import NOTHING, SPAN


def record(start_ns: int, end_ns: int, phase: int = 0, **fields: int) -> bytes:
    values = {
        "start_ns": start_ns, "end_ns": end_ns, "nbytes": NOTHING, "clock": NOTHING, "step": NOTHING,
        "staleness": NOTHING, "chunk": NOTHING, "peer": NOTHING, "key": 0, "thread": 0, "phase": phase, "store": 0,
    }  # fmt: skip
    return SPAN.pack(*{**values, **fields}.values())


def write_part(
    folder: Path, role: str, rank: int, spans: bytes, phases: list[str], *, begin_ns: int = 0, clock: str = "here",
    clocks: list[tuple[str, int, int]] | None = None, dropped: int = 0, pid: int = 1, tail: bytes = b"",
    begin_time: float = 0.0,
) -> None:  # fmt: skip
    about = {
        "role": role, "rank": rank, "pid": pid, "host": "h", "clock": clock, "begin_ns": begin_ns,
        "begin_time": begin_time, "job": "j", "client": 0,
    }  # fmt: skip
    names = [("phase", number, name) for number, name in enumerate(phases)]
    names += [("key", 0, "w"), ("thread", 0, "MainThread"), ("thread", 1, "kvmpi-reduce")]
    known = {"about": about, "names": names, "clocks": clocks or [], "dropped": dropped}
    folder.mkdir(exist_ok=True)
    content = parts.names_block(known) + parts.spans_block(spans) + tail
    (folder / parts.file_name(role, rank, pid, begin_ns)).write_bytes(content)


def events(path: Path) -> list[dict[str, Any]]:
    content = path.read_bytes()
    return json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)["traceEvents"]


def process_names(found: list[dict[str, Any]]) -> dict[int, str]:
    return {e["pid"]: e["args"]["name"] for e in found if e["name"] == "process_name"}


def test_what_finds_no_room_is_counted() -> None:
    spans = timeline.Spans(capacity=4)
    wakes = [spans.add(i, i + 1, *[0] * 10) for i in range(6)]
    assert wakes == [False, False, True, False, False, False]  # half full: it is time to write
    assert spans.dropped == 2
    assert [fields[0] for fields in SPAN.iter_unpack(spans.take())] == [0, 1, 2, 3]
    assert spans.add(7, 8, *[0] * 10) is False
    assert [fields[0] for fields in SPAN.iter_unpack(spans.take())] == [7]
    assert bytes(spans.take()) == b""


def test_there_is_an_end_to_what_a_process_writes() -> None:
    spans = timeline.Spans(capacity=8, most=3)
    for i in range(5):
        spans.add(i, i, *[0] * 10)
    assert len(spans.take()) == 3 * SPAN.size
    spans.add(9, 9, *[0] * 10)
    assert (len(spans.take()), spans.dropped) == (0, 3)


def test_threads_lose_no_span(tmp_path: Path) -> None:
    timeline.begin(Config(timeline=str(tmp_path / "t.json"), role="worker", rank=5, job_id="j"))
    try:
        assert timeline.on

        def work(number: int) -> None:
            for i in range(500):
                timeline.span("update", timeline.now(), f"key {number}", nbytes=i, step=number)

        threads = [threading.Thread(target=work, args=(number,), name=f"t{number}") for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        timeline.about("the key at hand", 11)
        timeline.span("reduce", timeline.now(), nbytes=3)
    finally:
        timeline.end()
    assert not timeline.on
    (path,) = (tmp_path / "t.json.parts").iterdir()
    part = parts.read(path)
    assert (part.about["role"], part.about["rank"], part.dropped) == ("worker", 5, 0)
    for number in range(4):
        mine = [span for span in part.all_spans() if span.step == number]
        assert [span.nbytes for span in mine] == list(range(500))
        assert {part.names["key"][span.key] for span in mine} == {f"key {number}"}
    (last,) = [span for span in part.all_spans() if part.names["phase"][span.phase] == "reduce"]
    assert (part.names["key"][last.key], last.clock) == ("the key at hand", 11)


def test_a_killed_process_leaves_all_whole_blocks(tmp_path: Path) -> None:
    whole = parts.spans_block(record(5, 6))
    for cut in range(1, len(whole)):
        folder = tmp_path / str(cut)
        write_part(folder, "worker", 0, record(1, 2) + record(3, 4), ["reduce"], tail=whole[:cut])
        part = parts.read(next(folder.iterdir()))
        assert [span.start_ns for span in part.all_spans()] == [1, 3]
        assert part.truncated
    (tmp_path / "noise").write_bytes(np.random.default_rng(0).bytes(300))
    assert parts.read(tmp_path / "noise").num_spans == 0


def test_a_disk_that_is_full_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    timeline.begin(Config(timeline=str(tmp_path / "t.json"), role="worker", rank=0, job_id="j"))
    full = False

    def write(fd: int, content: bytes) -> int:
        nonlocal room
        if not full:
            return real(fd, content)
        if not room:
            raise OSError(errno.ENOSPC, "No space left on device")
        room = False
        return real(fd, content[: len(content) // 2])

    real, room = os.write, True
    try:
        timeline.span("push", timeline.now(), "before")
        timeline.flush()
        with monkeypatch.context() as patch:
            patch.setattr(timeline.os, "write", write)
            full = True
            for i in range(100):
                timeline.span("pull", timeline.now(), f"lost {i}")
            timeline.flush()
            assert not room
        timeline.span("pull", timeline.now(), "after")
    finally:
        timeline.end()
    merged = merge.merge(str(tmp_path / "t.json"))
    assert (merged.spans, merged.dropped, merged.truncated) == (1, 101, [])
    assert "No space left on device; the timeline of this process ends here" in caplog.text


def test_a_part_that_is_damaged_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "t.json.parts"
    later = parts.spans_block(record(5, 6))
    for rank, damaged in enumerate((b"J\x03\0\0\0{x}", b"J\x02\0\0\0[]", b"J\x01\0\0\0\xff", b"noise")):
        write_part(folder, "worker", rank, record(1, 2), ["reduce"], tail=damaged + later)
    write_part(folder, "worker", 4, record(1, 2), ["reduce"])
    (folder / "worker-5-1-0.part").write_bytes(b"")
    assert trace_command([str(tmp_path / "t.json")]) == 0
    said = capsys.readouterr().out
    assert "5 spans of 5 processes" in said
    assert "cut off: worker-5-1-0, worker 0, worker 1, worker 2, worker 3\n" in said
    labels = [e["args"]["labels"] for e in events(tmp_path / "t.json") if e["name"] == "process_labels"]
    assert ["cut off" in text for text in labels] == [True] * 4 + [False]


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_clocks_of_hosts_are_brought_together(tmp_path: Path, name: str) -> None:
    folder = tmp_path / f"{name}.parts"
    write_part(folder, "scheduler", 0, record(1000, 2000), ["barrier"], clock="a")
    # Its clock is 500 behind; another's is not known.
    write_part(folder, "worker", 0, record(600, 700), ["reduce"], clock="b", clocks=[("a", 500, 40)], begin_ns=100)
    write_part(folder, "worker", 1, record(9000, 9100), ["reduce"], clock="c", begin_ns=8000)
    merged = merge.merge(str(tmp_path / name))
    assert merged.processes == ["scheduler", "worker 0", "worker 1"]
    assert merged.unaligned == ["worker 1"]
    found = events(tmp_path / name)
    assert {(e["name"], e["ts"], e["dur"]) for e in found if e["ph"] == "X" and e["pid"] < 3} == {
        ("barrier", 1.0, 1.0),
        ("reduce", 1.1, 0.1),
    }
    assert not folder.exists()


def test_a_clock_that_nobody_has_compared_goes_by_the_time_of_day(tmp_path: Path) -> None:
    """One host has been up for ten days, the other for an hour; the second of its processes comes later."""
    folder, days, hour = tmp_path / "t.json.parts", 864_000 * 10**9, 3600 * 10**9
    write_part(folder, "worker", 0, record(days, days + 500), ["reduce"], clock="a", begin_ns=days, begin_time=1.7e9)
    for rank, later_s in ((1, 1.5), (2, 5.0)):
        at_ns, at_s = hour + int(later_s * 1e9), 1.7e9 + later_s
        write_part(folder, "worker", rank, record(at_ns, at_ns + 5), [""], clock="b", begin_ns=at_ns, begin_time=at_s)
    assert merge.merge(str(tmp_path / "t.json")).unaligned == ["worker 1", "worker 2"]
    starts_us = [e["ts"] for e in events(tmp_path / "t.json") if e["ph"] == "X"]
    assert starts_us == pytest.approx([0.0, 1.5e6, 5e6], abs=1.0)


def test_a_process_that_was_started_again_has_a_row_of_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "t.json.parts"
    write_part(folder, "server", 1, record(50, 60), ["update"], begin_ns=40, pid=8)
    write_part(folder, "server", 1, record(10, 20), ["update"], begin_ns=5, pid=7, dropped=3)
    write_part(folder, "server", 0, b"", [], begin_ns=6)
    merged = merge.merge(str(tmp_path / "t.json"), keep=True)
    assert merged.processes == ["server 0", "server 1", "server 1 (started again, 2)"]
    assert merged.dropped == 3
    found = events(tmp_path / "t.json")
    labels = {e["pid"]: e["args"]["labels"] for e in found if e["name"] == "process_labels"}
    assert "3 spans dropped" in labels[2]
    assert folder.exists()  # kept


def test_what_goes_on_side_by_side_is_in_rows_that_do_not_overlap(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    starts = rng.integers(0, 1000, 200)
    spans = b"".join(record(int(start), int(start + rng.integers(1, 50)), step=i) for i, start in enumerate(starts))
    write_part(tmp_path / "t.json.parts", "worker", 0, spans, ["push"])
    merge.merge(str(tmp_path / "t.json"))
    found = [e for e in events(tmp_path / "t.json") if e["ph"] == "X"]
    assert len(found) == 200
    most = max(sum(e["ts"] <= other["ts"] < e["ts"] + e["dur"] for e in found) for other in found)
    rows: dict[int, list[Any]] = {}
    for event in sorted(found, key=lambda e: e["ts"]):
        rows.setdefault(event["tid"], []).append(event)
    assert len(rows) == most  # no more than needed
    for row in rows.values():
        for before, after in itertools.pairwise(row):
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-6


def test_parts_of_another_job_and_no_parts(tmp_path: Path) -> None:
    write_part(tmp_path / "t.json.parts", "worker", 0, record(1, 2), ["reduce"])
    for job in ("another", "j"):
        path = str(tmp_path / "t.json")
        if job == "j":
            assert merge.merge(path, job).spans == 1
        else:
            with pytest.raises(ConfigError, match="no parts"):
                merge.merge(path, job)
    with pytest.raises(ConfigError, match="cannot be written to"):
        timeline.begin(Config(timeline=str(tmp_path / "t.json" / "t")))
    assert not timeline.on


def test_a_timeline_takes_the_place_of_files_only(tmp_path: Path) -> None:
    write_part(tmp_path / "t.json.parts", "worker", 0, record(1, 2), ["reduce"])
    path = tmp_path / "t.json"
    os.mkfifo(path)  # as /dev/null, which root could replace
    for make in (lambda: merge.merge(str(path)), lambda: timeline.begin(Config(timeline=str(path)))):
        with pytest.raises(ConfigError, match=r"t\.json' cannot be written: that is no file"):
            make()
    assert path.is_fifo()
    assert not timeline.on
    path.unlink()
    path.write_text("of a job before")
    assert merge.merge(str(path)).spans == 1


def test_the_spans_of_many_processes_stay_in_their_files(tmp_path: Path) -> None:
    count, spans = 30, 5_000
    about = {"role": "worker", "rank": 0, "pid": 1, "clock": "c", "begin_ns": 0, "begin_time": 0.0, "job": "j"}
    for rank in range(count):
        block = b"".join(parts.SPAN.pack(rank, k, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0) for k in range(spans))
        told = parts.names_block({"about": {**about, "rank": rank}})
        (tmp_path / f"{rank}.part").write_bytes(told + parts.spans_block(block))
    tracemalloc.start()
    try:
        found = [parts.read(tmp_path / f"{rank}.part") for rank in range(count)]
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < spans * parts.SPAN.size, "those of one"
    assert [part.num_spans for part in found] == [spans] * count
    assert [(span.start_ns, span.end_ns) for span in found[7].all_spans()] == [(7, k) for k in range(spans)]
