"""Jobs that take turns at every case."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from kvmpi.benchmarks.jobs import JobFailedError, RankJob, Stage
from kvmpi.benchmarks.plan import ROUNDS, Case
from kvmpi.benchmarks.report import Report
from kvmpi.benchmarks.table import Row

#: ``note`` (text), ``rows`` (rows).
Event = dict[str, Any]


class Job(Protocol):
    """Processes that carry out ``open CASE``, ``round`` and ``close``."""

    name: str

    def ask(self, command: str) -> Iterator[Event]: ...


def drive(jobs: Sequence[Job], cases: Sequence[Case], report: Report | None) -> list[Row]:
    """Measure ``cases``; all rows. Without a ``report`` nothing is shown."""
    found: list[Row] = []
    for number, case in enumerate(cases):
        size = case.preset or f"{sum(case.counts):,} elements"
        block: list[Row] = []
        noted: set[str] = set()
        steps = [f"open {number}", *["round"] * ROUNDS, "close"]
        for i, command in enumerate(steps):
            for job in jobs:
                if report is not None:
                    doing = f"round {i} of {ROUNDS}" if command == "round" else "verifying" if i == 0 else "closing"
                    report.progress.show(f"{size}, {doing} ({job.name})")
                for event in job.ask(command):
                    if event["kind"] == "rows":
                        block += event["rows"]
                    elif report is not None and event["text"] not in noted:
                        noted.add(event["text"])
                        report.note(event["text"])
        if report is not None:
            report.block(case, block)
        found += block
    return found


def acquaint(
    stage: Stage, needed: Callable[[int], bool]
) -> tuple[list[tuple[int, RankJob, Event]], list[tuple[int, str]]]:
    """Wait until the jobs of ``stage`` are there: their number, the job, and what it says ``about`` itself.

    Jobs that cannot be had, and are not ``needed``, are dropped; their numbers with the reasons come second.
    """
    there, missing = [], []
    for number, job in enumerate(list(stage.jobs)):
        try:
            (about,) = stage.ask(job, "about")
        except JobFailedError as error:
            if needed(number):
                raise
            missing.append((number, str(error)))
            stage.drop(job)
        else:
            there.append((number, job, about["facts"]))
    return there, missing
