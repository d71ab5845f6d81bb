"""Tables of text: columns that line up, cells without blanks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Row = dict[str, Any]

_DECIMALS = {
    "algbw": 3, "busbw": 3, "client_bw": 3, "server_bw": 3, "imbalance": 2, "of_ddp": 2, "GB/s": 2, "of_copy": 2,
}  # fmt: skip


class Table:
    """Lines whose columns line up.

    Args:
        columns: column -> least width.
        texts: what columns of text can hold; these are aligned to the left, all others to the right.
    """

    def __init__(self, columns: Mapping[str, int], texts: Mapping[str, Iterable[str]]) -> None:
        self._widths, self._texts = dict(columns), set(texts)
        for name, values in texts.items():
            self._widths[name] = max(len(name), self._widths[name], *map(len, values))

    def header(self) -> str:
        return self._join({name: name for name in self._widths})

    def line(self, row: Row) -> str:
        return self._join({name: cell(name, row[name]) for name in self._widths})

    def _join(self, cells: Mapping[str, str]) -> str:
        padded = [f"{cells[name]:{'<' if name in self._texts else '>'}{width}}" for name, width in self._widths.items()]
        return " ".join(padded).rstrip()


def cell(name: str, value: Any) -> str:
    """One value as text without blanks."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.{_DECIMALS.get(name, 1)}f}"
    return str(value)
