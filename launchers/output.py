"""Shows the output of many processes as whole lines, each with the name of the process that wrote it."""

from __future__ import annotations

import os
import re
import select
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path

TAIL_LINES = 20
KEPT_BYTES = 4 << 10  # of each line that is kept for the end of a job
_FRAME = re.compile(rb'( *)File "([^"]+)", line \d+')
_CRASH = re.compile(rb"\[[^]]+:\d+\] (\[ ?\d+\] |\*\*\* |Signal)")
_LOG = re.compile(r"(scheduler|(server|worker|client)-\d+)\.log(\.1)?")
MAX_LINE_BYTES = 8 << 20  # a longer line is shown in pieces, so that no program can fill the launcher's memory
PROGRESS_INTERVAL_S = 1.0  # how often a line that is redrawn with '\r' is shown
WRITE_BYTES = 4096  # PIPE_BUF: what poll() reports as writable takes this much without blocking
COLOURS = {"scheduler": "35", "server": "33", "worker": "36", "client": "31", "kvmpi": "1"}


def last_words(lines: Iterable[bytes], inside: Sequence[str]) -> list[bytes]:
    """The last lines of somebody's standard error, without frames of tracebacks in files below the folders ``inside``.

    What one looks for is where the program has called what has failed; or, of a crash, what was said before Open MPI's
    stack of it.
    """
    found: list[bytes] = []
    hidden = False
    for line in lines:
        if _CRASH.match(line):
            continue
        if frame := _FRAME.match(line):
            path = os.fsdecode(frame[2])
            was_hidden, hidden = hidden, path.startswith((*inside, "<frozen runpy>"))
            if hidden and not was_hidden:
                found.append(frame[1] + b"... inside kvmpi")
        elif not line.startswith(b"    "):  # as the text of a frame does
            hidden = False
        if not hidden:
            found.append(line)
    return found[-TAIL_LINES:]


def shortened(line: bytes) -> bytes:
    """A line as it is kept for the end of a job, of which there may be many."""
    return line if len(line) <= KEPT_BYTES else line[:KEPT_BYTES] + b" ..."


class OutputClosedError(Exception):
    """The reader of our standard output or error has gone away."""


class LineSplitter:
    """Cuts a byte stream into lines without their ends.

    A carriage return redraws the line, as progress bars do: of the drafts of one line only the last is kept, and a
    draft is shown early when nothing was for ``PROGRESS_INTERVAL_S``. Nothing else in the bytes is looked at.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pending = bytearray()  # what follows the last '\n' or '\r'
        self._draft = b""  # the last text that a '\r' has ended, while its line goes on
        self._shown_early = False  # the draft of this line has been shown
        self._shown_s = clock()

    def feed(self, chunk: bytes) -> list[bytes]:
        """The lines that ``chunk`` completes."""
        lines: list[bytes] = []
        whole, rest = self._cut(chunk)
        for line in whole:
            text = self._redraw(line) or self._draft
            if text or not self._shown_early:
                lines.append(text)
            self._draft, self._shown_early = b"", False
        self._pending += self._redraw(rest)
        if self._draft and self._clock() - self._shown_s >= PROGRESS_INTERVAL_S:
            lines.append(self._draft)
            self._draft, self._shown_early = b"", True
        if len(self._pending) > MAX_LINE_BYTES:
            lines.append(bytes(self._pending))
            self._pending.clear()
        if lines:
            self._shown_s = self._clock()
        return lines

    def _cut(self, chunk: bytes) -> tuple[list[bytes], bytes]:
        """The texts that a line's end follows, and the rest. What is pending is looked at only where that ends."""
        if b"\n" not in chunk and b"\r" not in chunk:
            return [], chunk
        *whole, rest = (bytes(self._pending) + chunk).split(b"\n")
        self._pending.clear()
        return whole, rest

    def _redraw(self, text: bytes) -> bytes:
        """Keep the newest draft in ``text``; what follows it."""
        *drafts, rest = text.split(b"\r")
        self._draft = next((draft for draft in reversed(drafts) if draft), self._draft)
        return rest

    def close(self) -> list[bytes]:
        """What is left when the stream has ended."""
        left = bytes(self._pending) or self._draft
        self._pending, self._draft = bytearray(), b""
        return [left] if left else []


@dataclass
class Stream:
    """One pipe or FIFO that a process of the job writes to."""

    label: str
    target: int  # 1 or 2: where its lines go; 0: it carries reports of rank_exec
    client: str = ""  # label of the mpirun above it
    splitter: LineSplitter = field(default_factory=LineSplitter)


class Output:
    """Writes lines to our standard output and error, and to a file for each process.

    Args:
        log_dir: folder for ``worker-3.log`` and the like; created if missing; empty for none. Those of a job before
            are ``worker-3.log.1`` from then on.
        interrupted: asked while a write cannot go on; true gives up on it (the terminal may be stopped for good).
    """

    def __init__(self, environ: Mapping[str, str], log_dir: str, interrupted: Callable[[], bool]) -> None:
        self._colour = {fd: _wants_colour(fd, environ) for fd in (1, 2)}
        self._log_dir = Path(log_dir) if log_dir else None
        if self._log_dir is not None:
            self._log_dir.mkdir(parents=True, exist_ok=True)
            _set_aside(self._log_dir)
        self._logs: dict[str, FileIO] = {}
        self._interrupted = interrupted
        self._closed: set[int] = set()
        self.newest: deque[tuple[str, int]] = deque(maxlen=TAIL_LINES)  # who wrote the newest lines, and where

    def open_log(self, label: str) -> None:
        """Create the log of a process, also when it never writes anything."""
        if self._log_dir is not None and label not in self._logs:
            self._logs[label] = FileIO(self._log_dir / f"{label.replace(' ', '-')}.log", "wb")

    def lines(self, label: str, fd: int, lines: list[bytes]) -> None:
        """Show lines that the process ``label`` has written to its descriptor ``fd`` (1 or 2).

        Raises:
            OutputClosedError: nobody reads them any more.
        """
        if not lines:
            return
        prefix = self._prefix(label, fd)
        self.newest.extend([(label, fd)] * min(len(lines), TAIL_LINES))
        if (log := self._logs.get(label)) is not None:
            try:
                log.write(b"".join(line + b"\n" for line in lines))
            except OSError as error:
                del self._logs[label]
                self.say(f"kvmpi run: the log of {label} ends here: {error.strerror}")
        self._write(fd, b"".join(prefix + line + b"\n" for line in lines))

    def say(self, text: str) -> None:
        """A message of the launcher itself, on standard error."""
        try:
            self._write(2, text.encode(errors="surrogateescape") + b"\n")
        except OutputClosedError:
            pass

    def keep(self, name: str, contents: bytes) -> None:
        """Write a file beside the logs, if there are any."""
        if self._log_dir is not None:
            try:
                (self._log_dir / name).write_bytes(contents)
            except OSError as error:
                self.say(f"kvmpi run: {name}: {error.strerror}")

    def close(self) -> None:
        """Close the log files."""
        for log in self._logs.values():
            log.close()

    def _prefix(self, label: str, fd: int) -> bytes:
        if not self._colour[fd]:
            return f"[{label}] ".encode()
        return f"\x1b[{COLOURS.get(label.split()[0], '0')}m[{label}]\x1b[0m ".encode()

    def _write(self, fd: int, data: bytes) -> None:
        """Write all of ``data``; poll first, so that a stopped terminal cannot stop the launcher from ending."""
        if fd in self._closed:
            return
        view = memoryview(data)
        poller = select.poll()
        poller.register(fd, select.POLLOUT)
        while view:
            if not poller.poll(200):
                if self._interrupted():
                    return
                continue
            try:
                view = view[os.write(fd, view[:WRITE_BYTES]) :]
            except BlockingIOError:
                continue
            except BrokenPipeError:
                self._closed.add(fd)
                raise OutputClosedError from None
            except OSError as error:  # a full disk or a lost terminal is no reason to end a training run
                self._closed.add(fd)
                if fd == 1:
                    self.say(
                        f"kvmpi run: standard output: {error.strerror}; the job goes on, and what it prints is lost"
                    )
                return


def _set_aside(folder: Path) -> None:
    """Keep the logs of the job before: one may look for why it has failed when the next one runs already."""
    found = [path for path in folder.iterdir() if _LOG.fullmatch(path.name) and path.is_file()]
    newest = [path for path in found if path.suffix == ".log"]
    if newest:
        for path in set(found) - set(newest):
            path.unlink()
    for path in newest:
        path.rename(f"{path}.1")


def _wants_colour(fd: int, environ: Mapping[str, str]) -> bool:
    return os.isatty(fd) and not environ.get("NO_COLOR") and environ.get("TERM", "dumb") != "dumb"
