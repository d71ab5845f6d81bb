"""What ``kvmpi bench ps`` shows: columns, their meaning, and how the rows of a size compare."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from kvmpi.benchmarks import environment
from kvmpi.benchmarks.plot import Picture, draw
from kvmpi.benchmarks.ps_options import Layout
from kvmpi.benchmarks.ps_rows import MXNET, PsRow
from kvmpi.benchmarks.report import Report
from kvmpi.benchmarks.table import Row, Table

#: Column -> least width.
COLUMNS = {
    "size_B": 9, "keys": 4, "row": 4, "clients": 7, "servers": 7, "mode": 5, "compress": 8, "push_p50": 9,
    "push_p99": 9, "pull_p50": 9, "pull_p99": 9, "both_p50": 9, "fused_p50": 9, "client_bw": 9, "server_bw": 9,
    "imbalance": 9, "iters": 5, "wrong": 5,
}  # fmt: skip

LEGEND = (
    "S = size_B: bytes of a call's float32 values, all keys together; times of all calls of all workers, in us",
    "push: until its array may be used again; pull: until the value is there; both: push, then pull; fused: pushpull",
    "client_bw = 2 S / both_p50, server_bw = client_bw * clients / servers, in GB/s; 1 GB = 10^9 bytes",
    "imbalance: bytes of the fullest server over the mean; wrong: elements, of verified and of timed calls",
    "sync: the sum of a round is stored; async: servers run SGD(lr=1) at every push. compress: how pushes travel",
)


class PsReport(Report):
    """A table for each shape of a job."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        self._here = environment.here()
        self._rows: Sequence[PsRow] = ()
        self._facts: dict[str, dict[str, Any]] = {}

    def begin(self, layout: Layout, rows: Sequence[PsRow], facts: dict[str, dict[str, Any]]) -> None:
        """A table; ``facts`` by label of a row: what its workers know of the software that they use."""
        self._rows, self._facts = rows, facts
        texts = {"row": [row.label for row in rows], "mode": ["async"], "compress": [row.way.compress for row in rows]}
        software = {name: text for about in facts.values() for name, text in about.items()}
        self._open_table([*title(layout, self._here, software), *LEGEND], Table(COLUMNS, texts))

    def place(self, row: Row) -> int:
        return [(known.mode, known.label) for known in self._rows].index((row["mode"], row["row"]))

    def about(self, row: Row) -> dict[str, Any]:
        return {**self._here, **self._facts[row["row"]]}

    def sentences(self, found: Sequence[Row]) -> list[str]:
        return compare(found)

    def subject(self, row: Row) -> str:
        return (
            f"{row['mode']} push and pull by {row['row']}, {job(*row['job'])}, {row['size_B']} B in {row['keys']} keys"
        )

    def draw(self, path: str, drawn: Sequence[Row]) -> None:
        draw(path, [{**row, "line": line_name(row)} for row in drawn], picture(drawn))


def title(layout: Layout, here: dict[str, Any], software: dict[str, Any]) -> list[str]:
    """Where the rows below come from."""
    commit = f" ({here['commit']})" if here["commit"] else ""
    mpi = f", {software['mpi']} inside clients" if "mpi" in software else ""
    lines = [
        f"{job(layout.workers, layout.clients, layout.servers)} on one host: {here['host']}, {here['cores']} cores, "
        f"binding {here['binding']}",
        f"kvmpi {here['kvmpi']}{commit}{mpi}, Python {here['python']}, numpy {here['numpy']}, pyzmq {here['pyzmq']}",
    ]
    if MXNET in software:
        lines.append(f"{software[MXNET]}; every worker is a client, and push returns at once")
    return lines


def job(workers: int, clients: int, servers: int) -> str:
    """``4 workers in 2 clients, 1 server``."""

    def number(count: int, noun: str) -> str:
        return f"{count} {noun}" if count == 1 else f"{count} {noun}s"

    return f"{number(workers, 'worker')} in {number(clients, 'client')}, {number(servers, 'server')}"


def compare(found: Sequence[Row]) -> list[str]:
    """For each mode the times of its rows over those of MXNet's push and pull; without MXNet, of the first row's.

    The rows get ``over``, ``ratio`` and ``ratio_fused``.
    """
    sentences = []
    for mode in dict.fromkeys(row["mode"] for row in found):
        own = [row for row in found if row["mode"] == mode]
        base = next((row for row in own if row["row"] == MXNET), own[0])
        words = []
        for row in own:
            row["over"] = base["row"]
            row["ratio"], row["ratio_fused"] = (row[name] / base["both_p50"] for name in ("both_p50", "fused_p50"))
            if row is not base:
                words.append(f"{row['row']} {row['ratio']:.2f}, fused {row['ratio_fused']:.2f}")
        if words:
            sentences.append(f"{mode}, times over push and pull of {base['row']}: {'; '.join(words)}")
    return sentences


def line_name(row: Row) -> str:
    """The name of a row's line in a picture."""
    return str(row["row"]) + ("" if row["mode"] == "sync" else f":{row['mode']}")


def picture(rows: Sequence[Row]) -> Picture:
    """How rows with a ``line`` are drawn."""
    preset = rows[0]["preset"]
    what = f"gradients of {preset}" if preset else f"{rows[0]['keys']} keys" if rows[0]["keys"] > 1 else "one key"
    return Picture(
        title=f"push and pull of float32, {what}", label="line", bandwidth="client_bw",
        bandwidth_name="2 S / t of a client, GB/s", time="both_p50",
        panel=lambda row: tuple(row["job"]),
        panel_name=lambda row: job(*row["job"]),
        measured="Median time of push, then pull, on all workers.",
    )  # fmt: skip
