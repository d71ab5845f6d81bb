"""The table of ``kvmpi bench``: its columns, its lines, and what ``auto`` chose."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

Row = dict[str, Any]

#: Column -> least width. Text is aligned to the left, numbers to the right.
COLUMNS = {
    "size_B": 10, "count": 9, "dtype": 7, "op": 9, "algo": 13, "ranks": 5, "chunk_B": 8, "t_min": 9, "t_p50": 9,
    "t_p99": 9, "t_max": 9, "algbw": 7, "busbw": 7, "iters": 5, "wrong": 5,
}  # fmt: skip
_TEXT = ("dtype", "op", "algo")

_SIZE = {
    "allreduce": "each rank's vector",
    "reduce_scatter": "the whole vector, of which each rank gets a segment",
    "allgather": "the whole vector, of which each rank has a segment",
    "broadcast": "the vector",
}
_FACTOR = {"allreduce": " * 2(n-1)/n", "reduce_scatter": " * (n-1)/n", "allgather": " * (n-1)/n", "broadcast": ""}


class Table:
    """Lines whose columns line up, for rows with these values in the columns of text."""

    def __init__(self, op: str, dtype: str, labels: Iterable[str]) -> None:
        widths = dict(COLUMNS)
        for name, values in (("dtype", [dtype]), ("op", [op]), ("algo", labels)):
            widths[name] = max(widths[name], *map(len, values))
        self._widths = widths

    def header(self) -> str:
        return self._join({name: name for name in COLUMNS})

    def line(self, row: Row) -> str:
        return self._join({name: cell(name, row[name]) for name in COLUMNS})

    def _join(self, cells: dict[str, str]) -> str:
        padded = [f"{cells[name]:{'<' if name in _TEXT else '>'}{width}}" for name, width in self._widths.items()]
        return " ".join(padded).rstrip()


def cell(name: str, value: Any) -> str:
    """One value as text without blanks."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.{3 if name.endswith('bw') else 1}f}"
    return str(value)


def title(facts: Row, num_ranks: int) -> list[str]:
    """Where the rows below come from, as comment lines."""
    kvmpi = facts["kvmpi"] + (f" ({facts['commit']})" if facts["commit"] else "")
    hosts = "1 host" if facts["hosts"] == 1 else f"{facts['hosts']} hosts"
    lines = [
        f"# {num_ranks} ranks on {hosts} over {facts['nic']}; host {facts['host']}, {facts['cores']} cores, "
        f"binding {facts['binding']}",
        f"# kvmpi {kvmpi}, {mpi_words(facts)}, Python {facts['python']}, numpy {facts['numpy']}, "
        f"torch {facts['torch']}",
    ]
    if memory := facts.get("memory"):
        rates = f"copy {memory['copy']:.1f}, add {memory['add']:.1f} GB/s of result"
        lines.append(f"# memory, all ranks at once on arrays of 64 MB: {rates}")
    return lines


def mpi_words(facts: Row) -> str:
    """``Open MPI v5.0.11 (THREAD_MULTIPLE, idle ranks spin)``."""
    idle = f", idle ranks {facts['idle']}" if facts["idle"] != "unknown" else ""
    return f"{facts['mpi']} (THREAD_{facts['thread_level']}{idle})"


def legend(op: str) -> list[str]:
    """What the columns mean, as comment lines."""
    return [
        f"# t: time of the slowest rank after a barrier, in us; S = size_B: bytes of {_SIZE[op]}; n = ranks",
        f"# algbw = S / t_p50, busbw = algbw{_FACTOR[op]}, in GB/s; 1 GB = 10^9 bytes",
    ]


def about_auto(rows: Sequence[Row], own: Iterable[str]) -> list[tuple[Row, str]]:
    """For each row of ``auto`` how far it was from the best algorithm with the same modifiers, as a sentence.

    The row gets ``best`` and ``behind_best`` (0.05 is 5 % slower). ``own`` are the names of kvmpi's algorithms.
    """
    found = []
    names = set(own)
    for row in rows:
        kind, _, how = row["algo"].partition(":")
        if kind != "auto":
            continue
        others = [other for other in rows if other["algo"].partition(":")[2] == how]
        others = [other for other in others if other["algo"].partition(":")[0] in names - {"auto"}]
        if not others or not row.get("choice"):
            continue
        best = min([row, *others], key=lambda other: other["t_p50"])
        itself = "its own" if "," in row["choice"] else row["choice"].split()[0]
        row["best"] = itself if best is row else best["algo"]
        row["behind_best"] = row["t_p50"] / best["t_p50"] - 1
        percent = math.ceil(100 * row["behind_best"] - 1e-9)
        found.append((row, f"# {row['algo']} took {row['choice']}; best was {row['best']}: within {percent} %"))
    return found
