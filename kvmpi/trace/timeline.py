"""The timeline of this process: spans that every room adds through ``span``, buffered, and written every second.

    from kvmpi.trace import timeline

    if timeline.on:
        timeline.span("update", start_ns, key, nbytes=value.nbytes)

Off, that is one test of an attribute. On, a span is 64 bytes at most in memory that is there from the beginning. A
thread writes them to this process's part (``parts.py``), and ``merge.py`` makes one picture of all parts. Time is that
of CLOCK_MONOTONIC, which all processes of a host share.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
from typing import Any

from kvmpi.config import Config
from kvmpi.errors import ConfigError
from kvmpi.trace import parts
from kvmpi.trace.clocks import OffsetEstimate
from kvmpi.trace.parts import NOTHING, SPAN

#: Spans that wait to be written: more than a process makes in two seconds.
CAPACITY = 1 << 15
#: What a kill -9 loses at most.
FLUSH_S = 1.0

#: Whether spans are wanted. Only ``begin`` and ``end`` change it.
on = False
now = time.monotonic_ns
_log = logging.getLogger(__name__)
_get_ident, _pack_into, _SIZE = threading.get_ident, SPAN.pack_into, SPAN.size


class Spans:
    """Two halves of preallocated memory: one fills, the other is being written.

    Args:
        most: so many spans are taken in, from the beginning to the end of the process.
    Attributes:
        dropped: spans that found no room.
    """

    __slots__ = ("_capacity", "_count", "_fills", "_half", "_left", "_lock", "_room", "_spare", "dropped")

    def __init__(self, capacity: int = CAPACITY, most: int = 1 << 62) -> None:
        self._capacity, self._half, self._left, self.dropped = capacity, capacity // 2, most, 0
        self._lock = threading.Lock()
        self._fills, self._spare = bytearray(capacity * SPAN.size), bytearray(capacity * SPAN.size)
        self._count, self._room = 0, min(capacity, most)

    def add(
        self, start_ns: int, end_ns: int, nbytes: int, clock: int, step: int, staleness: int, chunk: int, peer: int,
        key: int, thread: int, phase: int, store: int,
    ) -> bool:  # fmt: skip
        """Take one span in, or count it as dropped; whether it is time to write."""
        with self._lock:
            count = self._count
            if count == self._room:
                self.dropped += 1
                return False
            _pack_into(
                self._fills, count * _SIZE, start_ns, end_ns, nbytes, clock, step, staleness, chunk, peer, key, thread,
                phase, store,
            )  # fmt: skip
            self._count = count + 1
        return count == self._half

    def take(self) -> memoryview:
        """What has come since the last time; it is overwritten after the next."""
        with self._lock:
            taken, count = self._fills, self._count
            self._fills, self._spare, self._count = self._spare, taken, 0
            self._left -= count
            self._room = min(self._capacity, self._left)
        return memoryview(taken)[: count * _SIZE]

    def close(self, lost: int) -> None:
        """Take nothing more in; so many that were taken are lost."""
        with self._lock:
            self._room = self._left = self._count
            self.dropped += lost


class _Here(threading.local):
    """What the thread at hand is about."""

    key: Any = None
    clock = NOTHING


class _Names:
    """Numbers for names, and those that are still to be written."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.numbers: dict[Any, int] = {}
        self.news: list[tuple[str, int, Any]] = []
        self._lock = threading.Lock()

    def number(self, thing: Any, name: Any) -> int:
        """That of ``thing``, which is new and called ``name``."""
        with self._lock:
            number = self.numbers.setdefault(thing, len(self.numbers))
            self.news.append((self.kind, number, name))
            return number

    def take(self) -> list[tuple[str, int, Any]]:
        """What nobody has taken yet."""
        with self._lock:
            fresh, self.news = self.news, []
            return fresh


class Writer:
    """What a process has while its timeline is on."""

    def __init__(self, path: str, about: dict[str, Any], most: int) -> None:
        self.spans = Spans(most=most)
        self.keys, self.threads, self.phases = _Names("key"), _Names("thread"), _Names("phase")
        self._path = path
        self._unsaid: dict[str, Any] = {"about": about}  # what is not in the file yet, besides what is new
        self._offsets: dict[str, OffsetEstimate] = {}
        self._news_of_clocks: set[str] = set()
        self._dropped = 0
        self._writes = threading.Lock()  # one flush at a time
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
        self._wake = threading.Event()
        self._end = 0  # of the file
        self._stopped = self._failed = False
        self.flush()
        self._thread = threading.Thread(target=self._run, name="kvmpi-timeline", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Write sooner than planned."""
        self._wake.set()

    def hear_clock(self, name: str, asked_ns: int, answered_ns: int, heard_ns: int) -> None:
        """Another host has answered at ``answered_ns`` on the clock called ``name``."""
        if self._offsets.setdefault(name, OffsetEstimate()).hear(asked_ns, answered_ns, heard_ns):
            self._news_of_clocks.add(name)

    def flush(self) -> None:
        """Write what there is. A disk that is full ends the timeline, and not the process; what is lost is counted."""
        with self._writes:
            spans = self.spans.take()
            known, self._unsaid = self._unsaid, {}
            # After the spans: their names are there by now.
            if news := [new for names in (self.keys, self.threads, self.phases) for new in names.take()]:
                known.setdefault("names", []).extend((kind, number, _plain(name)) for kind, number, name in news)
            if self.spans.dropped != self._dropped:
                known["dropped"] = self._dropped = self.spans.dropped
            if self._news_of_clocks:
                heard, self._news_of_clocks = self._news_of_clocks, set()
                known.setdefault("clocks", []).extend(
                    (name, self._offsets[name].offset_ns, self._offsets[name].round_trip_ns) for name in heard
                )
            blocks = (parts.names_block(known) if known else b"") + (parts.spans_block(spans) if spans else b"")
            end = self._end + len(blocks)
            try:
                while blocks:
                    blocks = blocks[os.write(self._file, blocks) :]
                self._end = end
            except OSError as error:
                if not self._failed:
                    _log.warning("%s: %s; the timeline of this process ends here", self._path, error.strerror)
                self._failed, self._unsaid = True, known
                self.spans.close(len(spans) // _SIZE)
                with contextlib.suppress(OSError):
                    os.ftruncate(self._file, self._end)  # what comes after half a block cannot be read

    def _run(self) -> None:
        while not self._stopped:
            self._wake.wait(FLUSH_S)
            self._wake.clear()
            self.flush()

    def close(self) -> None:
        """Write the rest."""
        self._stopped = True
        self._wake.set()
        if self._thread is not threading.current_thread():
            self._thread.join(5.0)
        self.flush()
        os.close(self._file)


_here = _Here()
_writer: Writer | None = None
_merges = ""


def begin(config: Config, role: str = "", rank: int = NOTHING) -> None:
    """Put the timeline on if ``KVMPI_TIMELINE`` says so; in a process where it is on already, nothing happens.

    Args:
        role, rank: what this process is, if no launcher has told it.
    Raises:
        ConfigError: its folder cannot be written to, or what is there is no file.
    """
    global on, _writer, _merges
    if not config.timeline or on:
        return
    role, rank = config.role or role or "worker", config.rank if config.rank >= 0 else rank
    begin_ns = now()
    path = os.path.abspath(config.timeline)  # the program may be elsewhere when it ends
    parts.require_file(path)
    folder = parts.folder_of(path)
    about = {
        "role": role, "rank": rank, "pid": os.getpid(), "host": os.uname().nodename, "clock": parts.clock_name(),
        "begin_ns": begin_ns, "begin_time": time.time(), "job": config.job_id,
        "client": config.client_rank if role == "worker" else NOTHING,
    }  # fmt: skip
    try:
        os.makedirs(folder, exist_ok=True)
        part = os.path.join(folder, parts.file_name(role, rank, os.getpid(), begin_ns))
        _writer = Writer(part, about, config.timeline_spans)
    except OSError as error:
        raise ConfigError(f"KVMPI_TIMELINE={config.timeline!r}: {folder} cannot be written to: {error}") from None
    # Nobody else is there to put the parts together.
    _merges = path if not config.role and rank < 0 else ""
    on = True
    atexit.register(end)


def span(
    phase: str, start_ns: int, key: Any = None, *, nbytes: int = NOTHING, clock: int = NOTHING, step: int = NOTHING,
    staleness: int = NOTHING, chunk: int = NOTHING, peer: int = NOTHING, store: int = 0, end_ns: int = 0,
) -> None:  # fmt: skip
    """Something has gone on since ``start_ns``, until now or ``end_ns``; see ``parts.Span``. To be called if ``on``.

    Without a ``key`` it is about what the thread is about (``about``).
    """
    writer = _writer
    if writer is None:
        return
    if key is None:
        key, clock = _here.key, _here.clock if clock == NOTHING else clock
    key_number = writer.keys.numbers.get(key)
    if key_number is None:
        key_number = writer.keys.number(key, key)
    thread = writer.threads.numbers.get(ident := _get_ident())
    if thread is None:
        thread = writer.threads.number(ident, threading.current_thread().name)
    number = writer.phases.numbers.get(phase)
    if number is None:
        number = writer.phases.number(phase, phase)
    if writer.spans.add(
        start_ns, end_ns or now(), nbytes, clock, step, staleness, chunk, peer, key_number, thread, number, store
    ):
        writer.wake()


def mark(phase: str, key: Any = None, **fields: int) -> None:
    """Something has happened at this moment. To be called if ``on``."""
    at_ns = now()
    span(phase, at_ns, key, end_ns=at_ns, **fields)


def about(key: Any, clock: int) -> None:
    """From here on this thread is about ``key``, at the training clock ``clock``. To be called if ``on``."""
    _here.key, _here.clock = key, clock


def hear_clock(name: str, asked_ns: int, answered_ns: int, heard_ns: int) -> None:
    """As of ``Writer``."""
    if _writer is not None:
        _writer.hear_clock(name, asked_ns, answered_ns, heard_ns)


def flush() -> None:
    """Write what there is: for a process that is about to end without a word."""
    if _writer is not None:
        _writer.flush()


def end() -> None:
    """Put the timeline off; what is buffered is written. A process that is alone makes the picture too."""
    global on, _writer, _merges
    on = False
    writer, _writer = _writer, None
    if writer is not None:
        writer.close()
        if _merges:
            from kvmpi.trace import merge

            merge.merge(_merges)
            _merges = ""


def _forked() -> None:
    """A child has neither the thread nor a part of its own."""
    global on, _writer, _merges
    on, _writer, _merges = False, None, ""


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def _plain(name: Any) -> Any:
    return name if name is None or isinstance(name, (int, str)) else repr(name)
