"""What the doctor prints: a table of all findings, pairs of hosts, the ceiling, and at the end what to do."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

import kvmpi
from kvmpi.doctor.finding import LEVELS, Finding
from kvmpi.doctor.pairs import Pairs, slow
from kvmpi.errors import names_in_words

WIDTH = 80
_MOST_COLUMNS = 6
_LONGEST_NAME = 24
_MOST_ALIKE = 8
_STYLES = {"ok": "green", "skipped": "dim", "warning": "yellow", "problem": "bold red"}


def exit_status(findings: Sequence[Finding]) -> int:
    """1 if there is a problem, else 0."""
    return 1 if any(finding.level == "problem" for finding in findings) else 0


def as_json(findings: Sequence[Finding], ceiling: dict[str, Any] | None) -> str:
    """Everything, for programs."""
    found = {
        "kvmpi": kvmpi.__version__, "status": exit_status(findings), "findings": [asdict(f) for f in findings],
        "ceiling": ceiling,
    }  # fmt: skip
    return json.dumps(found, indent=2)


def show(findings: Sequence[Finding], pairs: Pairs | None, ceiling: Sequence[str], title: str) -> None:
    """Print all of it, problems last."""
    console = Console(width=WIDTH, highlight=False)
    with console.capture() as captured:
        console.print(title + "\n", markup=False)
        _show(findings, pairs, ceiling, console)
    # Without the blanks that fill every line, which a terminal that is narrower would wrap.
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


def _show(findings: Sequence[Finding], pairs: Pairs | None, ceiling: Sequence[str], console: Console) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False, width=console.width)
    table.add_column(width=7)
    rows = _rows(findings)
    longest = max((len(name) for _, name, _ in rows), default=0)
    table.add_column(width=min(longest, _LONGEST_NAME), overflow="fold")
    table.add_column(overflow="fold", ratio=1)
    for level, name, seen in rows:
        table.add_row(Text(level, _STYLES[level]), Text(name), Text(seen, overflow="fold"))
    console.print(table)
    if pairs is not None:
        console.print()
        _show_pairs(pairs, console)
    if ceiling:
        console.print()
        console.print(Text("The ceiling", "bold"))
        for line in ceiling:
            _say(console, line, 2)
    for level in LEVELS[2:]:
        for alike in _alike([finding for finding in findings if finding.level == level]):
            _explain(alike, console)
    counts = {level: sum(f.level == level for f in findings) for level in LEVELS}
    console.print()
    if counts["problem"] or counts["warning"]:
        parts = [f"{counts[level]} {level}{'s' * (counts[level] > 1)}" for level in LEVELS[:1:-1] if counts[level]]
        console.print(Text(", ".join(parts), _STYLES["problem" if counts["problem"] else "warning"]))
    else:
        console.print(Text("nothing to complain about", _STYLES["ok"]))


def _rows(findings: Sequence[Finding]) -> list[tuple[str, str, str]]:
    """Level, name and text of each row: hosts that have found the same share one, and of many kinds some are shown."""
    kinds: dict[tuple[str, str], dict[str, list[Finding]]] = {}
    for finding in findings:
        kinds.setdefault((finding.level, finding.check), {}).setdefault(finding.seen, []).append(finding)
    rows = []
    for (level, check), alike in kinds.items():
        shown = list(alike.items())[:_MOST_ALIKE]
        for seen, its in shown:
            where = f" ({names_in_words([finding.host or 'this host' for finding in its], 3)})" if len(its) > 1 else ""
            rows.append((level, check if where else _name(its[0]), seen + where))
        if len(alike) > len(shown):
            count = sum(map(len, alike.values())) - sum(len(its) for _, its in shown)
            rows.append((level, check, f"the same kind {count} times more; --json has all"))
    return rows


def _name(finding: Finding) -> str:
    return f"{finding.host}: {finding.check}" if finding.host and finding.host not in finding.seen else finding.check


def _alike(findings: Sequence[Finding]) -> list[list[Finding]]:
    """In groups of the same advice, which is given once for all hosts that it is for."""
    groups: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.check, finding.do), []).append(finding)
    return list(groups.values())


def _explain(alike: Sequence[Finding], console: Console) -> None:
    first = alike[0]
    hosts = [finding.host or "this host" for finding in alike]
    where = f" ({names_in_words(hosts)})" if hosts != ["this host"] else ""
    console.print()
    console.print(Text.assemble((f"{first.level}: ", _STYLES[first.level]), (first.check + where, "bold")))
    said = list(dict.fromkeys(finding.seen for finding in alike))
    for seen in said[:_MOST_ALIKE]:
        _say(console, seen, 2)
    if len(said) > _MOST_ALIKE:
        _say(console, f"and {len(said) - _MOST_ALIKE} more like these", 2)
    for line in first.means.splitlines():
        _say(console, line, 2)
    advice, *commands = first.do.splitlines() or [""]
    if advice:
        _say(console, f"To do: {advice}", 2)
    for line in commands:
        # Whole, however long, so that it can be copied.
        console.print(Text(f"    {line}", "cyan"), soft_wrap=True)


def _say(console: Console, text: str, indent: int) -> None:
    console.print(Padding(Text(text), (0, 0, 0, indent)))


def _show_pairs(pairs: Pairs, console: Console) -> None:
    """Rates from the host of a row to that of a column; of many hosts only the slowest pairs."""
    names, cells = pairs.names, pairs.cells
    bad = set(slow(cells))
    if len(names) > _MOST_COLUMNS:
        console.print(Text("The slowest pairs of hosts", "bold"))
        measured = sorted(
            (pair for pair in cells if "bytes_per_s" in cells[pair]), key=lambda p: cells[p]["bytes_per_s"]
        )
        for i, j in measured[:10]:
            _say(console, f"{names[i]} -> {names[j]}  {_cell(cells[i, j])}", 2)
        return
    console.print(Text("Pairs of hosts, from row to column: MB/s, ms of a round trip", "bold"))
    table = Table(box=None, padding=(0, 1, 0, 0), width=console.width)
    table.add_column("  from", overflow="ellipsis", no_wrap=True, ratio=1)
    for index in range(len(names)):
        table.add_column(f"to {index}", justify="right", min_width=10, no_wrap=True)
    for i, name in enumerate(names):
        row = [
            Text("-" if i == j else _cell(cells.get((i, j), {})), _STYLES["warning"] if (i, j) in bad else "")
            for j in range(len(names))
        ]
        table.add_row(Text(f"  {i} {name}"), *row)
    console.print(table)


def _cell(cell: dict[str, Any] | Any) -> str:
    if "bytes_per_s" in cell:
        return f"{cell['bytes_per_s'] / 1e6:,.0f} {cell['round_trip_s'] * 1e3:.2f}"
    return "failed" if cell else "?"
