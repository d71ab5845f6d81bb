"""How bytes become lines."""

from __future__ import annotations

import pytest

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
