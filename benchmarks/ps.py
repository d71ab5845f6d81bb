"""``kvmpi bench ps``: starts jobs with parameter servers, lets them take turns, and shows what they measure."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from typing import Any

from kvmpi.benchmarks import environment, ps_jobs, ps_mxnet, ps_options
from kvmpi.benchmarks.jobs import Stage, refuse_ranks
from kvmpi.benchmarks.plan import Case
from kvmpi.benchmarks.ps_jobs import PsJob
from kvmpi.benchmarks.ps_options import ITEM_BYTES, Layout
from kvmpi.benchmarks.ps_report import PsReport
from kvmpi.benchmarks.ps_rows import MXNET, PsRow, by_job
from kvmpi.benchmarks.report import exit_status
from kvmpi.benchmarks.sizes import format_bytes
from kvmpi.benchmarks.turns import acquaint, drive
from kvmpi.config import Config
from kvmpi.launchers import mpirun
from kvmpi.launchers.signals import SignalCatcher

_MEMORY_SHARE = 0.85


def main(name: str, argv: Sequence[str]) -> int:
    """Run ``kvmpi bench ps ARGV``; the exit status."""
    args = ps_options.parse(name, argv)
    return exit_status(lambda: _bench(args))


def _bench(args: argparse.Namespace) -> int:
    refuse_ranks("ps")
    Config.from_env()  # a bad setting must not start anything
    if (grouped := next((layout for layout in args.layouts if layout.grouped), None)) is not None:
        mpirun.find(mpirun.clean(os.environ), grouped.workers)
    signals = SignalCatcher()
    try:
        report = PsReport(args)
        with contextlib.ExitStack() as stack:
            stack.callback(report.progress.hide)
            rows, notes = _there(args)
            for layout in args.layouts:
                _measure(args, layout, rows, notes, signals, report)
            return report.end()
    finally:
        signals.close()


def _there(args: argparse.Namespace) -> tuple[list[PsRow], list[str]]:
    """The rows that can be measured, and why others cannot."""
    rest = [row for row in args.rows if row.way.system != MXNET]
    if rest == args.rows:
        hint = f"{MXNET} left out: name an interpreter that has it: --mxnet PYTHON"
        return rest, [] if args.mxnet or args.rows_given else [hint]
    reason = ps_mxnet.missing(args.mxnet)
    return (rest, [f"{MXNET} left out: {reason}"]) if reason else (args.rows, [])


def _measure(
    args: argparse.Namespace, layout: Layout, rows: Sequence[PsRow], notes: Sequence[str], signals: SignalCatcher,
    report: PsReport,
) -> None:  # fmt: skip
    groups = by_job(rows)
    cases, too_large = _fitting(args.cases, groups, layout)

    def say(line: str) -> None:
        report.progress.hide()
        print(line, file=sys.stderr, flush=True)

    report.progress.show(f"starting {layout.workers} workers and {layout.servers} servers for {len(groups)} jobs")
    with Stage([ps_jobs.spec(group, layout, cases, args.mxnet) for group in groups], signals, say) as stage:
        there, missing = acquaint(stage, lambda number: groups[number][0].way.system != MXNET)
        facts: dict[str, dict[str, Any]] = {}
        for number, _, about in there:
            facts |= {row.label: about for row in groups[number]}
        report.begin(layout, rows, facts)
        for note in [*notes, *too_large, *(f"{groups[number][0].label} left out: {text}" for number, text in missing)]:
            report.note(note)
        jobs = [PsJob(stage, job, groups[number], layout, cases, args.seconds) for number, job, _ in there]
        drive(jobs, cases, report)
        stage.finish()


def _fitting(cases: Sequence[Case], groups: Sequence[Sequence[PsRow]], layout: Layout) -> tuple[list[Case], list[str]]:
    """The cases for which there is memory, and what is to be said of others."""
    fitting, notes = [], []
    available = environment.available_bytes()
    for case in cases:
        nbytes = ITEM_BYTES * sum(case.counts)
        needed = sum(ps_jobs.needed_bytes(group, layout, nbytes) for group in groups)
        if available is None or needed <= _MEMORY_SHARE * available:
            fitting.append(case)
        else:
            notes.append(
                f"{format_bytes(nbytes)} left out: its rows take about {format_bytes(needed)} of memory, and "
                f"{format_bytes(available)} is free"
            )
    return fitting, notes
