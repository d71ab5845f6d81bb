"""What ``kvmpi bench allreduce`` and its like show: columns, their meaning, and how far ``auto`` was from the best."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Sequence
from typing import Any

from kvmpi.benchmarks.report import Report
from kvmpi.benchmarks.table import Row, Table
from kvmpi.collectives import ALGORITHMS

#: Column -> least width.
COLUMNS = {
    "size_B": 10, "count": 9, "dtype": 7, "op": 9, "algo": 13, "ranks": 5, "chunk_B": 8, "t_min": 9, "t_p50": 9,
    "t_p99": 9, "t_max": 9, "algbw": 7, "busbw": 7, "iters": 5, "wrong": 5,
}  # fmt: skip

_SIZE = {
    "allreduce": "each rank's vector",
    "reduce_scatter": "the whole vector, of which each rank gets a segment",
    "allgather": "the whole vector, of which each rank has a segment",
    "broadcast": "the vector",
}
#: Between cores that have moved a word takes so many times as long, or more.
_MOVED = 2.0
_FACTOR = {"allreduce": " * 2(n-1)/n", "reduce_scatter": " * (n-1)/n", "allgather": " * (n-1)/n", "broadcast": ""}


class CollectiveReport(Report):
    """The tables of one collective operation, one for each number of ranks."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        self._labels: list[str] = []
        self._facts: dict[str, dict[str, Any]] = {}
        self._memory: dict[int, dict[str, float]] = {}

    def begin(self, num_ranks: int, labels: Sequence[str], facts: dict[str, dict[str, Any]]) -> None:
        """A table for so many ranks; ``facts`` by row."""
        self._labels, self._facts = list(labels), facts
        main_facts = next(iter(facts.values()))
        if "memory" in main_facts:
            self._memory[num_ranks] = main_facts["memory"]
        head, shown = title(main_facts, num_ranks), {mpi_words(main_facts)}
        for label, other in facts.items():
            words = mpi_words(other)
            if words not in shown:
                head.append(f"{label}: {words}")
                shown.add(words)
        op, dtype = self._args.op, self._args.dtype
        self._open_table([*head, *legend(op)], table_of(op, dtype, labels))

    def place(self, row: Row) -> int:
        return self._labels.index(row["algo"])

    def about(self, row: Row) -> dict[str, Any]:
        facts = {name: value for name, value in self._facts[row["algo"]].items() if name not in ("memory", "word_ns")}
        memory = {f"memory_{name}": rate for name, rate in self._memory.get(row["ranks"], {}).items()}
        return {**facts, **memory, "link": self._args.link or ""}

    def sentences(self, found: Sequence[Row]) -> list[str]:
        return [*about_auto(found, ALGORITHMS), *about_cores(found)]

    def subject(self, row: Row) -> str:
        return f"{row['op']} by {row['algo']} on {row['ranks']} ranks, {row['size_B']} B of {row['dtype']}"

    def is_drawn(self, row: Row) -> bool:
        return bool(row["size_B"] and row["busbw"])  # no bus has carried anything for one rank

    def draw(self, path: str, drawn: Sequence[Row]) -> None:
        from kvmpi.benchmarks import limits, plot

        plot.draw(path, drawn, limits.picture(drawn, self._memory, self._args.hosts, self._args.link))


def table_of(op: str, dtype: str, labels: Iterable[str]) -> Table:
    return Table(COLUMNS, {"dtype": [dtype], "op": [op], "algo": labels})


def title(facts: Row, num_ranks: int) -> list[str]:
    """Where the rows below come from."""
    kvmpi = facts["kvmpi"] + (f" ({facts['commit']})" if facts["commit"] else "")
    hosts = "1 host" if facts["hosts"] == 1 else f"{facts['hosts']} hosts"
    lines = [
        f"{num_ranks} ranks on {hosts} over {facts['nic']}; host {facts['host']}, {facts['cores']} cores, "
        f"binding {facts['binding']}",
        f"kvmpi {kvmpi}, {mpi_words(facts)}, Python {facts['python']}, numpy {facts['numpy']}, torch {facts['torch']}",
    ]
    if memory := facts.get("memory"):
        rates = f"copy {memory['copy']:.1f}, add {memory['add']:.1f} GB/s of result"
        lines.append(f"memory, all ranks at once on arrays of 64 MB: {rates}")
    if word_ns := facts.get("word_ns"):
        lines.append(f"a word takes {word_ns:.0f} ns from one core to another and back")
    return lines


def mpi_words(facts: Row) -> str:
    """``Open MPI v5.0.11 (THREAD_MULTIPLE, idle ranks spin)``."""
    idle = f", idle ranks {facts['idle']}" if facts["idle"] != "unknown" else ""
    return f"{facts['mpi']} (THREAD_{facts['thread_level']}{idle})"


def legend(op: str) -> list[str]:
    """What the columns mean."""
    return [
        f"t: time of the slowest rank after a barrier, in us; S = size_B: bytes of {_SIZE[op]}; n = ranks",
        f"algbw = S / t_p50, busbw = algbw{_FACTOR[op]}, in GB/s; 1 GB = 10^9 bytes",
    ]


def about_cores(rows: Iterable[Row]) -> list[str]:
    """Whether cores, of a virtual machine as a rule, have moved apart or together between these rows, as a sentence."""
    times_ns = [row[name] for row in rows for name in ("word_ns_min", "word_ns_max") if name in row]
    if not times_ns or max(times_ns) < _MOVED * min(times_ns):
        return []
    return [
        f"the cores have moved: a word took {min(times_ns):.0f} to {max(times_ns):.0f} ns from one to another and "
        "back; compare what was measured at one time (JSON lines have word_ns_min and word_ns_max)"
    ]


def about_auto(rows: Sequence[Row], own: Iterable[str]) -> list[str]:
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
        found.append(f"{row['algo']} took {row['choice']}; best was {row['best']}: within {percent} %")
    return found
