"""What ``kvmpi bench devices`` shows: columns, their meaning, and the card on which they were measured."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from kvmpi.benchmarks import environment
from kvmpi.benchmarks.device_rows import ROWS
from kvmpi.benchmarks.plot import Picture, draw
from kvmpi.benchmarks.report import Report
from kvmpi.benchmarks.sizes import format_bytes
from kvmpi.benchmarks.table import Row, Table

#: Column -> least width.
COLUMNS = {
    "size_B": 9, "dtype": 7, "row": 18, "vectors": 7, "t_min": 9, "t_p50": 9, "t_p99": 9, "GB/s": 8, "of_copy": 7,
    "iters": 5, "wrong": 5,
}  # fmt: skip

LEGEND = (
    "S = size_B: bytes of one vector; t: from the call until its work is done, in us; rows of a size take turns",
    "copy: cudaMemcpyAsync, pinned memory; reduce: a sum of vectors in host memory; broadcast: a copy to each",
    "GB/s: S / t_p50; what reads and writes on the device: copy:d2d 2 S, device_sum (vectors + 1) S; 1 GB = 10^9 bytes",
    "of_copy: GB/s over that of copy:d2h (reduce) and copy:h2d (broadcast) of the size, copy:d2d of the largest size",
)


class DeviceReport(Report):
    """One table: sizes, and dtypes one after the other."""

    def __init__(self, args: argparse.Namespace, card: dict[str, Any]) -> None:
        super().__init__(args)
        self._facts = {**environment.here(), **card}

    def begin(self) -> None:
        self._open_table([*title(self._facts), *LEGEND], Table(COLUMNS, {"dtype": self._args.dtypes, "row": ROWS}))

    def bandwidths(self, dtype: str, nbytes: int, found: Sequence[Row]) -> None:
        """What was found of the card before its rows: the copies of the largest size."""
        rates = {row["row"]: row["GB/s"] for row in found}
        self._facts.update({f"{name.replace(':', '_')}_gb_per_s": rate for name, rate in rates.items()})
        words = ", ".join(f"{name} {rate:.1f}" for name, rate in rates.items())
        self.note(f"{dtype}: copies of {format_bytes(nbytes)} at {words} GB/s")

    def doing(self, size: str, what: str) -> None:
        """Show what is going on."""
        self.progress.show(f"{size}, {what}")

    def place(self, row: Row) -> int:
        return ROWS.index(row["row"]) * 100 + (row["vectors"] or 0)

    def about(self, row: Row) -> dict[str, Any]:
        return self._facts

    def sentences(self, found: Sequence[Row]) -> list[str]:
        return []

    def subject(self, row: Row) -> str:
        of = f" of {_vectors(row)}" if row["vectors"] else ""
        return f"{row['row']}{of}, {row['size_B']} B of {row['dtype']}"

    def is_drawn(self, row: Row) -> bool:
        return row["vectors"] is not None

    def draw(self, path: str, drawn: Sequence[Row]) -> None:
        draw(path, drawn, picture(drawn, self._args.dtypes, self._facts["card"]))


def title(facts: dict[str, Any]) -> list[str]:
    """Where the rows below come from."""
    commit = f" ({facts['commit']})" if facts["commit"] else ""
    return [
        f"vectors on one {facts['card']}; driver for CUDA {facts['driver_cuda']}, CuPy {facts['cupy']} with CUDA "
        f"{facts['cuda']}; host {facts['host']}, {facts['cores']} cores, binding {facts['binding']}",
        f"kvmpi {facts['kvmpi']}{commit}, Python {facts['python']}, numpy {facts['numpy']}",
    ]


def picture(rows: Sequence[Row], dtypes: Sequence[str], card: str) -> Picture:
    """How rows are drawn: a panel for each dtype and number of vectors."""
    return Picture(
        title=f"sums and broadcasts of device vectors, {card}", label="row", bandwidth="of_copy",
        bandwidth_name="bandwidth over a copy's", time="t_p50",
        panel=lambda row: (dtypes.index(row["dtype"]), row["vectors"]),
        panel_name=lambda row: f"{row['dtype']}, {_vectors(row)}",
        measured="Median time from the call until its work is done.",
    )  # fmt: skip


def _vectors(row: Row) -> str:
    return "1 vector" if row["vectors"] == 1 else f"{row['vectors']} vectors"
