"""What a benchmark shows: the table on standard output, a JSON line for each row, a plot, and what is going on."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any, TextIO

from kvmpi.benchmarks import table
from kvmpi.benchmarks.plan import Case
from kvmpi.benchmarks.table import Row
from kvmpi.collectives import ALGORITHMS
from kvmpi.errors import ConfigError


def complain(text: str) -> None:
    """One line for the user on standard error."""
    print(f"kvmpi bench: {text}", file=sys.stderr, flush=True)


class Report:
    """The table on standard output, and the files that the user asked for."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self.rows: list[Row] = []
        self._memory: dict[int, dict[str, float]] = {}
        self._facts: dict[str, dict[str, Any]] = {}
        self._table: table.Table | None = None
        self._json: TextIO | None = None
        self._date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self.progress = Progress()
        if args.plot and importlib.util.find_spec("matplotlib") is None:
            raise ConfigError("--plot needs matplotlib; pip install 'kvmpi[bench]'")
        if args.plot and not os.access(os.path.dirname(os.path.abspath(args.plot)), os.W_OK):
            raise ConfigError(f"{args.plot} cannot be written")  # better now than after minutes of measuring
        if args.json:
            try:
                self._json = open(args.json, "w", buffering=1)  # noqa: SIM115 - closed in end()
            except OSError as error:
                raise ConfigError(f"{args.json} cannot be written: {error.strerror}") from None

    def begin(self, num_ranks: int, labels: Sequence[str], facts: dict[str, dict[str, Any]]) -> None:
        """A table for so many ranks; ``facts`` by row."""
        if self._table is not None:
            self._print("")
        self._table = table.Table(self._args.op, self._args.dtype, labels)
        self._facts = facts
        main_facts = next(iter(facts.values()))
        if "memory" in main_facts:
            self._memory[num_ranks] = main_facts["memory"]
        for line in table.title(main_facts, num_ranks):
            self._print(line)
        shown = {table.mpi_words(main_facts)}
        for label, other in facts.items():
            words = table.mpi_words(other)
            if words not in shown:
                self._print(f"# {label}: {words}")
                shown.add(words)
        for line in table.legend(self._args.op):
            self._print(line)
        self._print(self._table.header())

    def note(self, text: str) -> None:
        self._print(f"# {text}")

    def block(self, case: Case, found: list[Row]) -> None:
        """All rows of a case."""
        assert self._table is not None
        if case.preset and found:
            self._print(f"# {case.preset}: {len(case.counts)} arrays, {sum(case.counts):,} elements")
        sentences = table.about_auto(found, ALGORITHMS)
        for row in found:
            self._print(self._table.line(row))
            if self._json is not None:
                facts = {name: value for name, value in self._facts[row["algo"]].items() if name != "memory"}
                memory = self._memory.get(row["ranks"], {})
                line = {**row, **facts, **{f"memory_{name}": rate for name, rate in memory.items()}}
                line |= {"link": self._args.link or "", "command": self._args.command, "date": self._date}
                self._json.write(json.dumps(line) + "\n")
        for _, sentence in sentences:
            self._print(sentence)
        self.rows += found

    def end(self) -> int:
        """Everything was measured; the exit status."""
        self.progress.hide()
        if self._json is not None:
            self._json.close()
        if self._args.plot:
            from kvmpi.benchmarks import plot

            drawn = [row for row in self.rows if row["size_B"]]
            if drawn:
                plot.draw(self._args.plot, drawn, self._memory, hosts=self._args.hosts, link=self._args.link)
            else:
                self.note(f"{self._args.plot} was not drawn: nothing to show")
        if not self.rows:
            complain("nothing could be measured")
            return 1
        return complain_of_wrong(self.rows)

    def _print(self, text: str) -> None:
        self.progress.hide()
        print(text, flush=True)


def complain_of_wrong(found: Sequence[Row]) -> int:
    """Name the rows with wrong results on standard error; the exit status."""
    for row in found:
        if row["wrong"]:
            complain(
                f"WRONG: {row['op']} by {row['algo']} on {row['ranks']} ranks, {row['size_B']} B of {row['dtype']}: "
                f"{row['wrong']} elements"
            )
    return int(any(row["wrong"] for row in found))


class Progress:
    """What is being measured, on a terminal only. It does not move: that would take time from what is measured."""

    def __init__(self) -> None:
        self._live: Any = None
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(stderr=True), auto_refresh=False, transient=True)

    def show(self, text: str) -> None:
        if self._live is not None:
            self._live.start()
            self._live.update(f"[dim]... {text}[/dim]", refresh=True)

    def hide(self) -> None:
        if self._live is not None:
            self._live.stop()
