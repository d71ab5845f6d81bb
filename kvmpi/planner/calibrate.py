"""What servers cost, from the JSON lines of ``kvmpi bench ps``."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

from kvmpi.errors import ConfigError
from kvmpi.planner.spec import ServerFigures

_NEEDED = {"size_B", "keys", "clients", "servers", "mode", "fused_p50"}


def from_lines(lines: Iterable[str], name: str) -> ServerFigures:
    """Of the rows over TCP with most clients: messages from the smallest size, bytes from what the largest adds.

    A server handles its share of the keys of each client in the time of a small exchange, and its share of all clients'
    bytes in what a large one takes longer. Rows of synchronous stores count that send every bit and have nothing wrong;
    of several for one size, the fastest. Without rows over TCP the others count, and they alone tell of shared memory.

    Args:
        lines: JSON, one object a line, as ``kvmpi bench ps --keys 160 --sizes 640K,64M --json FILE`` writes them.
        name: of the file, for messages.
    Raises:
        ConfigError: these are no such lines, or only one size was measured.
    """
    rows = [row for number, line in enumerate(lines, 1) if line.strip() for row in _row(line, f"{name}, line {number}")]
    over_tcp = [row for row in rows if str(row.get("row", "")).startswith("tcp")]
    rows = over_tcp or rows  # shared memory says nothing about a network
    most = max((row["clients"] for row in rows), default=0)
    best: dict[int, dict[str, Any]] = {}
    for row in rows:
        if row["clients"] == most and row["size_B"]:
            known = best.get(row["size_B"])
            if known is None or row["fused_p50"] < known["fused_p50"]:
                best[row["size_B"]] = row
    if len(best) < 2:
        raise ConfigError(f"{name}: expected synchronous rows of two sizes or more; kvmpi bench ps --json {name}")
    small, large = best[min(best)], best[max(best)]
    # The fullest server has its share of the keys, of every client.
    handled = small["clients"] * -(-small["keys"] // small["servers"])
    message_s = 1e-6 * small["fused_p50"] / handled
    longer_s = 1e-6 * (large["fused_p50"] - small["fused_p50"])
    if longer_s <= 0:
        raise ConfigError(
            f"{name}: {large['size_B']} bytes took no longer than {small['size_B']}; measure larger sizes"
        )
    moved = (large["size_B"] - small["size_B"]) * large["clients"] / large["servers"]
    rate = moved / longer_s
    shared = max(rate, ServerFigures.shared_bytes_per_s) if over_tcp else rate
    return ServerFigures(message_s=message_s, process_bytes_per_s=rate, shared_bytes_per_s=shared)


def _row(line: str, where: str) -> list[dict[str, Any]]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None
    if not isinstance(row, dict) or _NEEDED - set(row):
        missing = ", ".join(sorted(_NEEDED - set(row))) if isinstance(row, dict) else "everything"
        raise ConfigError(f"{where}: no row of kvmpi bench ps; it lacks {missing}")
    if row["mode"] != "sync" or row.get("compress", "none") != "none" or row.get("wrong", 0) != 0:
        return []
    for name in sorted(_NEEDED - {"mode"}):
        value, number = row[name], (int, float) if name == "fused_p50" else int
        if not isinstance(value, number) or not (name == "size_B" or value > 0) or not 0 <= value < math.inf:
            raise ConfigError(f"{where}: {name} is {value!r}: expected a positive number")
    return [row]
