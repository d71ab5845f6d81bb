"""A part of a timeline, the file that one process of a job writes its spans to: blocks of names and of spans.

A block is one byte for its kind, four for its length (little-endian), and so many bytes. Kind ``J`` is a JSON object
that adds to what is known: names of keys, threads and phases, who wrote it, clocks, what was dropped. Kind ``S`` is
spans of fixed size that use those names. A process that is killed leaves one block that is cut off at most.
"""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from kvmpi.errors import ConfigError

SPAN = struct.Struct("<qqqiiiiiIHHh2x")
_HEAD = struct.Struct("<cI")
NOTHING = -1


class Span(NamedTuple):
    """One span. Times are nanoseconds of the writer's monotonic clock; ``NOTHING`` where a field says nothing.

    Attributes:
        step: the number of the push on its key, which is that of the round in a synchronous store.
        chunk: on a server the number of the chunk; on a master, how many chunks there were.
        peer: on a server, the client whose push it is.
        key, thread, phase: numbers of names.
    """

    start_ns: int
    end_ns: int
    nbytes: int
    clock: int
    step: int
    staleness: int
    chunk: int
    peer: int
    key: int
    thread: int
    phase: int
    store: int


@dataclass
class Part:
    """What one process has written. Its spans stay in its file: all of a job may not fit into memory.

    Attributes:
        path: the file.
        blocks: where in it spans are: places, and numbers of bytes.
        about: role, rank, pid, host, clock (the name of the clock), begin_ns, begin_time, client, job.
        names: by kind ("key", "thread", "phase") the names by their numbers.
        dropped: spans that found no room.
        clocks: how far other clocks are ahead of this one: name, offset in ns, round trip in ns.
        truncated: there is more, which cannot be read: a block that is not whole.
    """

    about: dict[str, Any] = field(default_factory=dict)
    names: dict[str, dict[int, Any]] = field(default_factory=lambda: {"key": {}, "thread": {}, "phase": {}})
    dropped: int = 0
    clocks: dict[str, tuple[int, int]] = field(default_factory=dict)
    path: str = ""
    blocks: list[tuple[int, int]] = field(default_factory=list)
    truncated: bool = False

    @property
    def num_spans(self) -> int:
        return sum(length for _, length in self.blocks) // SPAN.size

    def all_spans(self) -> Iterator[Span]:
        """In the order in which they were written, which is that of their ends in each thread."""
        with open(self.path, "rb") as file:
            for place, length in self.blocks:
                file.seek(place)
                yield from map(Span._make, SPAN.iter_unpack(file.read(length)))


def folder_of(timeline: str) -> str:
    """Where the parts of a timeline lie until it is made of them."""
    return f"{timeline}.parts"


def require_file(timeline: str) -> None:
    """Raises:
    ConfigError: there is something that is no file. A timeline takes the place of what is there: of /dev/null, too.
    """
    if os.path.exists(timeline) and not os.path.isfile(timeline):
        what = "a folder" if os.path.isdir(timeline) else "no file, but a device or the like"
        raise ConfigError(f"the timeline {timeline!r} cannot be written: that is {what}")


def file_name(role: str, rank: int, pid: int, begin_ns: int) -> str:
    """Of one process: another process has another name, also on another host or in the place of one that has died."""
    return f"{role}-{rank}-{pid}-{begin_ns:x}.part"


def names_block(known: Mapping[str, Any]) -> bytes:
    """A ``J`` block."""
    text = json.dumps(known).encode()
    return _HEAD.pack(b"J", len(text)) + text


def spans_block(spans: bytes | bytearray | memoryview) -> bytes:
    """An ``S`` block."""
    return _HEAD.pack(b"S", len(spans)) + bytes(spans)


def read(path: str | Path) -> Part:
    """What is in a part, as far as it was written. A file that is none gives an empty one."""
    part, place, size = Part(path=str(path)), 0, os.path.getsize(path)
    with open(path, "rb") as file:
        while place + _HEAD.size <= size:
            file.seek(place)
            kind, length = _HEAD.unpack(file.read(_HEAD.size))
            begin, place_after = place + _HEAD.size, place + _HEAD.size + length
            if place_after > size or kind not in (b"J", b"S"):
                break
            if kind == b"S":
                part.blocks.append((begin, length - length % SPAN.size))
            else:
                try:
                    _learn(part, json.loads(file.read(length)))
                except (ValueError, TypeError, LookupError, AttributeError):
                    break  # it is damaged
            place = place_after
    part.truncated = place < size
    return part


def _learn(part: Part, known: dict[str, Any]) -> None:
    part.about.update(known.get("about", {}))
    part.dropped = known.get("dropped", part.dropped)
    for kind, number, name in known.get("names", []):
        part.names[kind][number] = name
    for clock, offset_ns, round_trip_ns in known.get("clocks", []):
        part.clocks[clock] = (offset_ns, round_trip_ns)


def clock_name() -> str:
    """The same in all processes whose monotonic clocks are one: those of one boot of one host, where that is known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        shift = Path("/proc/self/timens_offsets")  # of a container that has a clock of its own
        own = re.findall(r"monotonic\s+(\S+)\s+(\S+)", shift.read_text(encoding="ascii")) if shift.exists() else []
    except OSError:
        return os.uname().nodename
    return boot if not own or own[0] == ("0", "0") else f"{boot}+{'.'.join(own[0])}"
