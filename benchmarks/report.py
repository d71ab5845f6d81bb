"""What every benchmark shows: a table on standard output, a JSON line for each row, a plot, and what is going on."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kvmpi.benchmarks.jobs import InterruptedBySignal
from kvmpi.benchmarks.plan import Case
from kvmpi.benchmarks.table import Row, Table
from kvmpi.errors import ConfigError, KVError, UnsupportedError


def complain(text: str) -> None:
    """One line for the user on standard error."""
    print(f"kvmpi bench: {text}", file=sys.stderr, flush=True)


def exit_status(measure: Callable[[], int], *, complains: bool = True) -> int:
    """What ``measure`` returns, or the exit status of what ended it, which the user is told."""
    try:
        return measure()
    except InterruptedBySignal as interruption:
        complain(f"stopped by {interruption}")
        return 128 + interruption.number
    except KeyboardInterrupt:  # so early that no job was there to stop
        return 128 + signal.SIGINT
    except KVError as error:
        if complains:
            complain(str(error))
        return 2 if isinstance(error, (ConfigError, UnsupportedError)) else 1
    except BrokenPipeError:  # who read the table has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def check_writable(path: str) -> None:
    """Better now than after minutes of measuring.

    Raises:
        ConfigError: the file cannot be written.
    """
    if os.path.isdir(path):
        raise ConfigError(f"{path} cannot be written: it is a folder")
    folder = os.path.dirname(os.path.abspath(path))
    if not os.access(path if os.path.exists(path) else folder, os.W_OK):
        why = "no permission" if os.path.isdir(folder) else f"there is no folder {folder}"
        raise ConfigError(f"{path} cannot be written: {why}")


def check_torch(name: str) -> None:
    """Better now than as an error of each rank.

    Raises:
        ConfigError: the benchmark of this name needs torch, which is not there.
    """
    if importlib.util.find_spec("torch") is None:
        raise ConfigError(f"{name} needs torch; pip install 'kvmpi[torch]'")


def check_plot(path: str | None) -> None:
    """What ``--plot`` needs, if it is given.

    Raises:
        ConfigError: it is not there.
    """
    if path and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib; pip install 'kvmpi[bench]'")
    if path:
        check_writable(path)


@contextlib.contextmanager
def writing(path: str | None) -> Iterator[None]:
    """What fails inside was about this file.

    Raises:
        KVError: it could not be written.
    """
    try:
        yield
    except OSError as error:
        raise KVError(f"{path} cannot be written: {error.strerror or error}") from None


class JsonLines:
    """The file of ``--json``, which gets a line for each row; without a path, nothing."""

    def __init__(self, path: str | None) -> None:
        self._path = path
        try:
            self._file = open(path or os.devnull, "w")  # noqa: SIM115 - closed in close()
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}") from None

    def write(self, row: Row) -> None:
        with writing(self._path):
            try:
                self._file.write(json.dumps(row) + "\n")
                self._file.flush()
            except OSError:
                with contextlib.suppress(OSError):
                    self._file.close()  # or Python 3.13 tries once more at its end, and says so
                raise

    def close(self) -> None:
        with writing(self._path):
            self._file.close()


class Report(ABC):
    """The table on standard output, and the files that the user asked for.

    Subclasses know what a row means; they begin each table with ``_open_table``.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self.rows: list[Row] = []
        self._table: Table | None = None
        self._date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self.progress = Progress()
        check_plot(args.plot)
        self._json = JsonLines(args.json)

    # ---- what subclasses know

    @abstractmethod
    def place(self, row: Row) -> int:
        """Where a row stands among those of its case."""

    @abstractmethod
    def about(self, row: Row) -> dict[str, Any]:
        """What the JSON line of a row has besides the row."""

    @abstractmethod
    def sentences(self, found: Sequence[Row]) -> list[str]:
        """What is to be said below the rows of a case, which may get further values."""

    @abstractmethod
    def subject(self, row: Row) -> str:
        """What a row has measured, in words, for a complaint about its results."""

    def is_drawn(self, row: Row) -> bool:
        """Whether a row has a place in the picture."""
        return bool(row["size_B"])

    @abstractmethod
    def draw(self, path: str, drawn: Sequence[Row]) -> None:
        """Write the picture of some rows."""

    # ---- what is the same everywhere

    def _open_table(self, head: Sequence[str], table: Table) -> None:
        if self._table is not None:
            self._print("")
        self._table = table
        for line in head:
            self._print(f"# {line}")
        self._print(table.header())

    def note(self, text: str) -> None:
        self._print(f"# {text}")

    def block(self, case: Case, found: Sequence[Row]) -> None:
        """All rows of a case."""
        assert self._table is not None
        found = sorted(found, key=self.place)
        if case.preset and found:
            self.note(f"{case.preset}: {len(case.counts)} arrays, {sum(case.counts):,} elements")
        sentences = self.sentences(found)
        for row in found:
            self._print(self._table.line(row))
            self._json.write({**row, **self.about(row), "command": self._args.command, "date": self._date})
        for sentence in sentences:
            self.note(sentence)
        self.rows += found

    def end(self) -> int:
        """Everything was measured; the exit status."""
        self.progress.hide()
        self._json.close()
        if not self.rows:
            complain("nothing could be measured")
            return 1
        bad = [row for row in self.rows if row["wrong"]]
        for row in bad:
            complain(f"WRONG: {self.subject(row)}: {row['wrong']} elements")
        if self._args.plot:
            drawn = [row for row in self.rows if self.is_drawn(row)]
            if drawn:
                with writing(self._args.plot):
                    self.draw(self._args.plot, drawn)
            else:
                self.note(f"{self._args.plot} was not drawn: nothing to show")
        return int(bool(bad))

    def _print(self, text: str) -> None:
        self.progress.hide()
        print(text, flush=True)


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
