"""What a training program shows: a line for each epoch, a progress bar where there is a terminal, and a log file."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


def count(number: int, what: str) -> str:
    """ "1 client", "2 clients"."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def at_least(least: int) -> Callable[[str], int]:
    """An argparse type: a whole number, and no smaller one."""

    def integer(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}")
        return int(text)

    return integer


class Report:
    """Of worker 0; the other workers make one with ``active=False``, which shows and writes nothing.

    The bar is drawn on ``tty`` (under ``kvmpi run`` standard error is a pipe, and the launcher tells where the terminal
    is), else on standard error if that is a terminal, else not at all.
    """

    def __init__(self, *, active: bool, tty: str = "", log: str = "") -> None:
        self._active = active
        self._path = log if active else ""
        self._log: TextIO | None = None
        self._terminal: TextIO | None = None
        self._bar: Progress | None = None
        if active and tty:
            try:
                self._terminal = open(tty, "w", encoding="utf-8")  # noqa: SIM115
            except OSError:
                pass
        if active and (self._terminal is not None or sys.stderr.isatty()):
            console = Console(file=self._terminal or sys.stderr, force_terminal=True)
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, TextColumn("{task.fields[loss]}"), console=console, transient=True)

    def header(self, text: str, settings: dict[str, Any], *, again: bool = False) -> None:
        """Once: what is about to run; ``again``: the log has what processes before this one have done."""
        if self._path:
            try:
                self._log = open(self._path, "a" if again else "w", encoding="utf-8")  # noqa: SIM115
            except OSError as error:
                sys.exit(f"--log {self._path}: {error.strerror}")
        self._write({"event": "config", **settings})
        if self._active:
            print(text)
            print(f"{'epoch':>5}  {'train loss':>10}  {'val accuracy':>12}  {'seconds':>8}", flush=True)

    def say(self, text: str) -> None:
        """A line that is no epoch's."""
        if self._active:
            print(text, flush=True)

    def start(self, epoch: int, num_batches: int) -> None:
        """A new bar."""
        if self._bar is not None:
            self._bar.start()
            self._bar.console.show_cursor(True)  # it is hidden by start; this process may be killed
            self._task = self._bar.add_task(f"epoch {epoch}", total=num_batches, loss="")

    def advance(self, loss: float) -> None:
        """One batch is done."""
        if self._bar is not None:
            self._bar.update(self._task, advance=1, loss=f"loss {loss:.3f}")

    def finish(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.remove_task(self._task)
            self._bar.stop()

    def epoch(self, epoch: int, loss: float, accuracy: float, epoch_s: float, elapsed_s: float) -> None:
        """The line of an epoch; ``elapsed_s`` is training time since the start."""
        self._write(
            {
                "event": "epoch",
                "epoch": epoch,
                "train_loss": round(loss, 6),
                "val_accuracy": accuracy,
                "epoch_s": round(epoch_s, 6),
                "elapsed_s": round(elapsed_s, 6),
            }
        )
        if self._active:
            print(f"{epoch:>5}  {loss:>10.4f}  {accuracy:>12.2%}  {epoch_s:>8.2f}", flush=True)

    def close(self) -> None:
        """Close what was opened."""
        if self._bar is not None:
            self._bar.stop()
        for file in (self._log, self._terminal):
            if file is not None:
                file.close()

    def _write(self, entry: dict[str, Any]) -> None:
        if self._log is not None:
            self._log.write(json.dumps(entry) + "\n")
            self._log.flush()
