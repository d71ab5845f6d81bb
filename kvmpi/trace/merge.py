"""One picture of a whole job from the parts of its processes: Chrome's trace format, as ui.perfetto.dev reads it.

Source of the format: "Trace Event Format", Google.
"""

from __future__ import annotations

import gzip
import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from pathlib import Path
from typing import IO, Any

from kvmpi.errors import ConfigError
from kvmpi.trace import parts
from kvmpi.trace.clocks import offsets_to
from kvmpi.trace.parts import NOTHING, Part, Span

#: Phases of which several go on at the same time in one process: each has rows of its own, as many as are needed.
SIDE_BY_SIDE = ("push", "pull", "server queue", "barrier")
#: From top to bottom.
_ROLES = ("scheduler", "server", "worker")
_ROW_ORDER = ("MainThread", "kvmpi-reduce", "kvmpi-broadcast", "push", "pull", "server queue")


@dataclass
class Merged:
    """What has become of the parts.

    Attributes:
        processes: their names, in the order of the rows.
        spans, dropped: how many there are, and how many found no room.
        unaligned: processes whose clock nobody has compared with the others'.
        truncated: processes, or files, of whose parts the rest cannot be read.
    """

    processes: list[str] = field(default_factory=list)
    spans: int = 0
    dropped: int = 0
    unaligned: list[str] = field(default_factory=list)
    truncated: list[str] = field(default_factory=list)


def merge(timeline: str, job: str = "", *, keep: bool = False) -> Merged:
    """Make the file ``timeline`` of its parts (gzip if its name ends in ``.gz``), and remove these.

    Args:
        job: take only parts of this job; empty: all.
        keep: leave the parts where they are.
    Raises:
        ConfigError: there are no parts, or the file cannot be written. The parts are still there then.
    """
    folder = Path(parts.folder_of(timeline))
    merged = Merged()
    found = []
    for path in sorted(folder.glob("*.part")):
        part = parts.read(path)
        if not part.about:
            merged.truncated.append(path.stem)
        elif not job or part.about["job"] == job:
            found.append((path, part))
    if not found:
        raise ConfigError(f"there are no parts of a timeline in {folder}")
    parts.require_file(timeline)
    temporary = f"{timeline}.{os.getpid()}.tmp"
    try:
        with _create(temporary, compressed=timeline.endswith(".gz")) as file:
            write(file, [part for _, part in found], merged)
        os.replace(temporary, timeline)
    except OSError as error:
        raise ConfigError(f"the timeline {timeline!r} cannot be written: {error}; its parts are in {folder}") from None
    finally:
        Path(temporary).unlink(missing_ok=True)  # it was not replaced
    if not keep:
        for path, _ in found:
            path.unlink(missing_ok=True)
        try:
            folder.rmdir()
        except OSError:
            pass  # others are in there
    return merged


def _create(path: str, *, compressed: bool) -> IO[str]:
    return gzip.open(path, "wt", compresslevel=3) if compressed else open(path, "w", encoding="utf-8")


def write(file: IO[str], found: Sequence[Part], merged: Merged) -> None:
    """The picture, as JSON, one event on each line."""
    found = sorted(found, key=_place)
    first = found[0].about  # the scheduler's, if there is one
    compared = offsets_to(
        first["clock"], [(p.about["clock"], other, *measured) for p in found for other, measured in p.clocks.items()]
    )
    # Clocks count from the start of their hosts: of others the time of day has to do.
    offsets = {**{p.about["clock"]: _by_time_of_day(first, p.about) for p in reversed(found)}, **compared}
    begin_ns = min(part.about["begin_ns"] + offsets[part.about["clock"]] for part in found)
    file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
    separator = ""
    incarnations: Counter[tuple[str, int]] = Counter()
    masters = _masters(found)
    for number, part in enumerate(found, start=1):
        about = part.about
        incarnations[about["role"], about["rank"]] += 1
        name = _name(about, incarnations[about["role"], about["rank"]])
        if about["clock"] not in compared:
            merged.unaligned.append(name)
        if part.truncated:
            merged.truncated.append(name)
        shift_ns = offsets[about["clock"]] - begin_ns
        for event in _events(part, number, name, shift_ns, masters):
            file.write(separator + json.dumps(event, separators=(",", ":")))
            separator = ",\n"
        merged.processes.append(name)
        merged.spans += part.num_spans
        merged.dropped += part.dropped
    other = {
        "job": first["job"],
        "begin": min(part.about["begin_time"] for part in found),
        "spans": merged.spans,
        "dropped spans": merged.dropped,
        "processes": merged.processes,
        "clocks nobody has compared": merged.unaligned,
        "cut off": merged.truncated,
    }
    file.write(f'\n],"otherData":{json.dumps(other)}}}\n')


def _by_time_of_day(root: dict[str, Any], about: dict[str, Any]) -> int:
    """What has to be added to times of a clock that nobody has compared with the root's, by the time of day."""
    return round(1e9 * (about["begin_time"] - root["begin_time"])) - (about["begin_ns"] - root["begin_ns"])


def _place(part: Part) -> tuple[int, int, int]:
    role = part.about["role"]
    return _ROLES.index(role) if role in _ROLES else len(_ROLES), part.about["rank"], part.about["begin_ns"]


def _name(about: dict[str, Any], incarnation: int) -> str:
    role, rank = about["role"], about["rank"]
    name = role if role == "scheduler" or rank < 0 else f"{role} {rank}"
    return name if incarnation == 1 else f"{name} (started again, {incarnation})"


def _masters(found: Iterable[Part]) -> bool:
    """Whether any process has pushed to servers: arrows have beginnings then."""
    return any("push" in part.names["phase"].values() for part in found)


def _events(part: Part, pid: int, name: str, shift_ns: int, has_masters: bool) -> Iterator[dict[str, Any]]:
    """All of one process; ``pid`` is its place among the rows."""
    about = part.about
    yield _meta("process_name", pid, 0, name=name)
    yield _meta("process_sort_index", pid, 0, sort_index=pid)
    labels = [f"host {about['host']}", f"pid {about['pid']}"]
    if about["role"] == "worker" and about["client"] >= 0:
        labels.insert(0, f"client {about['client']}")
    if part.dropped:
        labels.append(f"{part.dropped} spans dropped")
    if part.truncated:
        labels.append("cut off")
    yield _meta("process_labels", pid, 0, labels=", ".join(labels))
    phases, keys = part.names["phase"], part.names["key"]
    rows = _rows(part)
    numbers = {row: number for number, row in enumerate(sorted({row for row, _ in rows}, key=_row_order), start=1)}
    for row, number in numbers.items():
        yield _meta("thread_name", pid, number, name=_row_name(*row))
        yield _meta("thread_sort_index", pid, number, sort_index=number)
    contributors: dict[tuple[int, int, int, int], list[int]] = defaultdict(list)
    for row, span in rows:
        phase = phases.get(span.phase, "?")
        tid = numbers[row]
        arguments = _arguments(span, phase, keys.get(span.key))
        at = {"name": phase, "cat": "kvmpi", "pid": pid, "tid": tid, "ts": (span.start_ns + shift_ns) / 1000}
        if span.end_ns == span.start_ns:
            yield {**at, "ph": "i", "s": "t", "args": arguments}
            continue
        yield {**at, "ph": "X", "dur": (span.end_ns - span.start_ns) / 1000, "args": arguments}
        if has_masters:
            yield from _arrows(span, phase, at, about, keys.get(span.key), contributors)


def _arrows(
    span: Span, phase: str, at: dict[str, Any], about: dict[str, Any], key: Any,
    contributors: dict[tuple[int, int, int, int], list[int]],
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """From a master's push of each chunk to the update that it is in, on whichever server that is."""
    flow = {**at, "name": "push to update", "cat": "flow"}
    what = (span.store, span.key, span.step, span.chunk)
    if phase == "push" and about["role"] != "server":
        for chunk in range(max(0, span.chunk)):
            yield {**flow, "ph": "s", "id": _flow_id(span.store, span.peer, key, chunk, span.step)}
    elif phase == "server queue" and span.step >= 0:
        contributors[what].append(span.peer)
    elif phase == "update":
        for client in [span.peer] if span.peer >= 0 else contributors.pop(what, []):
            yield {**flow, "ph": "f", "bp": "e", "id": _flow_id(span.store, client, key, span.chunk, span.step)}


def _flow_id(store: int, client: int, key: Any, chunk: int, step: int) -> str:
    return f"{store}/{client}/{key!r}/{chunk}/{step}"


def _rows(part: Part) -> list[tuple[tuple[str, int], Span]]:
    """Every span with its row (name, number of the lane), by their beginnings; those of one lane do not overlap."""
    phases, threads = part.names["phase"], part.names["thread"]
    placed = []
    free: dict[str, list[int]] = defaultdict(list)  # lanes that are free again
    busy: dict[str, list[tuple[int, int]]] = defaultdict(list)  # until when a lane is not
    for span in sorted(part.all_spans(), key=lambda span: (span.start_ns, -span.end_ns)):
        phase = phases.get(span.phase, "?")
        if phase not in SIDE_BY_SIDE:
            placed.append(((threads.get(span.thread, "?"), 0), span))
            continue
        while busy[phase] and busy[phase][0][0] <= span.start_ns:
            heappush(free[phase], heappop(busy[phase])[1])
        lane = heappop(free[phase]) if free[phase] else len(busy[phase])
        heappush(busy[phase], (span.end_ns, lane))
        placed.append(((phase, lane), span))
    return placed


def _row_order(row: tuple[str, int]) -> tuple[int, str, int]:
    name, lane = row
    return _ROW_ORDER.index(name) if name in _ROW_ORDER else len(_ROW_ORDER), name, lane


def _row_name(name: str, lane: int) -> str:
    name = "main" if name == "MainThread" else name.removeprefix("kvmpi-")
    return name if lane == 0 else f"{name} {lane + 1}"


def _arguments(span: Span, phase: str, key: Any) -> dict[str, Any]:
    found = {} if key is None else {"key": key}
    for name in ("nbytes", "clock", "step", "staleness"):
        if (value := getattr(span, name)) != NOTHING:
            found["bytes" if name == "nbytes" else name] = value
    if span.chunk != NOTHING:
        found["chunks" if phase in ("push", "pull") else "chunk"] = span.chunk
    if span.peer != NOTHING:
        found["client"] = span.peer
    if span.store:
        found["store"] = span.store
    return found


def _meta(what: str, pid: int, tid: int, **arguments: Any) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": arguments}
