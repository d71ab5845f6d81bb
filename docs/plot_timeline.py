"""Draws one step of a timeline: ``python docs/plot_timeline.py TRACE.json FIGURE.png [--step N]``; needs matplotlib."""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

#: In the order of a step, and of the legend. Light and dark alternate, so that it can be read without colours, too.
COLOURS = {
    "wait": "#dddddd", "reduce": "#0072b2", "exchange": "#a6d3ee", "encode": "#d62728", "push": "#e69f00",
    "server queue": "#f5deb3", "update": "#1a1a1a", "pull": "#56b4a0", "broadcast": "#8c5a9e", "copy": "#cc79a7",
}  # fmt: skip
#: Inside of others, and drawn lower.
_INNER = ("exchange", "encode", "copy")


def load(path: str) -> list[dict[str, Any]]:
    """The events of a trace."""
    content = Path(path).read_bytes()
    found: list[dict[str, Any]] = json.loads(gzip.decompress(content) if path.endswith(".gz") else content)[
        "traceEvents"
    ]
    return found


def window_of(events: Sequence[dict[str, Any]], step: int) -> tuple[float, float]:
    """Microseconds between which all workers do ``step`` (their training clock before it), the first to the last."""
    marks = [e for e in events if e["ph"] == "i" and e["name"] == "clock"]
    begins = [e["ts"] for e in marks if e["args"]["clock"] == step]
    ends = [e["ts"] for e in marks if e["args"]["clock"] == step + 1]
    if not begins or not ends:
        sys.exit(f"the timeline has no step {step}: does the program call kv.clock()?")
    return min(begins), max(ends)


def draw(events: Sequence[dict[str, Any]], window: tuple[float, float], path: str) -> None:
    """A row for every row of the trace in which something happens then, below each other by processes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    begin, end = window
    spans = [
        e for e in events if e["ph"] == "X" and e["name"] in COLOURS and e["ts"] < end and e["ts"] + e["dur"] > begin
    ]
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    rows = sorted({(e["pid"], e["tid"]) for e in spans})
    places, labels, lines, y = {}, [], [], 0.0
    for i, row in enumerate(rows):
        if i and rows[i - 1][0] != row[0]:
            lines.append(y + 0.1)
            y += 0.7
        places[row] = y
        labels.append(f"{processes[row[0]]}: {threads[row].split(' ')[0] if 'io-' in threads[row] else threads[row]}")
        y += 1
    figure, axes = pyplot.subplots(figsize=(10, 0.24 * y + 1.5))
    for span in sorted(spans, key=lambda e: -e["dur"]):
        height = 0.4 if span["name"] in _INNER else 0.8
        start, stop = max(begin, span["ts"]), min(end, span["ts"] + span["dur"])
        left, width = (start - begin) / 1000, (stop - start) / 1000
        colour = COLOURS[span["name"]]
        edge = "#404040" if stop - start > 0.01 * (end - begin) else colour  # a narrow one would be all edge
        axes.barh(
            places[span["pid"], span["tid"]], width, left=left, height=height, color=colour, edgecolor=edge,
            linewidth=0.4,
        )  # fmt: skip
    for line in lines:
        axes.axhline(line, color="#404040", linewidth=0.4)
    axes.set_yticks([places[row] for row in rows], labels, fontsize=7)
    axes.set_ylim(y - 0.4, -0.7)
    axes.set_xlim(0, (end - begin) / 1000)
    axes.set_xlabel("milliseconds")
    axes.spines[["top", "right"]].set_visible(False)
    handles = [Patch(facecolor=COLOURS[name], edgecolor="#404040", linewidth=0.3, label=name) for name in COLOURS]
    figure.legend(handles=handles, ncol=len(COLOURS), loc="upper center", fontsize=7, frameon=False, columnspacing=1)
    figure.tight_layout(rect=(0, 0, 1, 0.97))
    figure.savefig(path, dpi=110)


def main() -> None:
    """See the top of this file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace")
    parser.add_argument("figure")
    parser.add_argument("--step", type=int, default=5, help="training clock before the step (default 5)")
    options = parser.parse_args()
    events = load(options.trace)
    draw(events, window_of(events, options.step), options.figure)


if __name__ == "__main__":
    main()
