"""Cuts hosts of a real job off at random moments, and sees how long it takes until all workers get on."""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from chaos.harness import TRAINING, finish, is_healthy, steps_of, wait_for
from chaos.hosts import CLIENTS, SCHEDULER_HOST, SERVERS, Cut, HostsJob
from jobs import environs_with

#: What may be cut off how: a victim, a kind of cut, and whether it lasts longer than the job bears silence.
FAULTS = (
    ("server", "down", False), ("client", "out", False), ("scheduler", "in", False), ("server", "apart", True),
    ("client", "down", False), ("server", "in", False), ("scheduler", "down", False), ("server", "down", True),
    ("client", "in", False), ("server", "out", False), ("scheduler", "out", False), ("server", "out", True),
    ("scheduler", "down", True), ("client", "down", True), ("server", "in", True),
)  # fmt: skip


@dataclass
class PartitionReport:
    """What came of it."""

    status: int = -1
    output: str = ""
    cuts: Counter[str] = field(default_factory=Counter)
    idle: list[str] = field(default_factory=list)  # cuts that kept nothing from getting through
    stood_s: list[float] = field(default_factory=list)  # the longest time in which somebody did not get on
    recovery_s: list[float] = field(default_factory=list)  # from the end of a cut until all got on
    left: list[str] = field(default_factory=list)
    restarted: int = 0
    why: str = ""  # it has come to nothing

    @property
    def is_right(self) -> bool:
        """Whether all went well: four workers with three keys each, nothing wrong or left, every cut a real one."""
        right = self.status == 0 and self.output.count("has 0 wrong elements") == 12
        return right and not self.left and not self.idle

    def __str__(self) -> str:
        def times(seconds: list[float]) -> str:
            return f"median {statistics.median(seconds):.2f} s, longest {max(seconds):.2f} s" if seconds else "-"

        cuts = ", ".join(f"{count} x {name}" for name, count in sorted(self.cuts.items()))
        return (
            f"{self.cuts.total()} partitions ({cuts}); {self.restarted} processes started again\n"
            f"until all workers got on, from the end of the partition: {times(self.recovery_s)}\n"
            f"longest standstill around each: {times(self.stood_s)}\n{self.why}"
        )


class Progress:
    """How long the slowest worker has stood still, at most; to be told to look often."""

    def __init__(self, notes: Path) -> None:
        self._notes, self._steps, self._since_s = notes, steps_of(notes), time.monotonic()
        self.longest_s = 0.0

    def look(self) -> bool:
        """See how far all are; False, so that it can be a part of a condition."""
        now_s, steps = time.monotonic(), steps_of(self._notes)
        self.longest_s = max(self.longest_s, now_s - self._since_s)
        if self.is_beyond(self._steps, 1):
            self._steps, self._since_s = steps, now_s
        return False

    def is_beyond(self, before: list[int], rounds: int = 3) -> bool:
        """Whether all have got on. A round that was under way may end; the third needs that all are there."""
        return all(now >= then + rounds for now, then in zip(steps_of(self._notes), before, strict=True))


class Partitions:
    """One job on seven hosts, see ``HostsJob``; ``count`` of its hosts are cut off in turn while it trains.

    Args:
        short_s, long_s: how long; ``timeout_s``, after which a silent member is lost, is between the two.
    """

    def __init__(
        self, seed: int, count: int, *, short_s: float = 5.0, timeout_s: float = 10.0, long_s: float = 15.0,
        store_type: str = "dist_sync_mpi", nbytes: int = 1 << 20, faults: tuple[tuple[str, str, bool], ...] = FAULTS,
    ) -> None:  # fmt: skip
        self._choose, self._count, self._faults = random.Random(seed), count, faults
        self._short_s, self._timeout_s, self._long_s = short_s, timeout_s, long_s
        self._arguments = (str(TRAINING), store_type)
        self._nbytes = nbytes

    def run(self, timeout_s: float = 120.0) -> PartitionReport:
        """Run the job to its end, with partitions until there were enough."""
        report = PartitionReport()
        with tempfile.TemporaryDirectory(prefix="chaos-") as name:
            folder = Path(name)
            (folder / "rounds").write_text("")
            program = (*self._arguments, str(folder), str(self._nbytes))
            job = HostsJob(program, folder, (self._timeout_s / 20, self._timeout_s))
            try:
                with job:
                    wait_for(lambda: min(steps_of(folder)) > 3, 60.0, job.look)
                    for i in range(self._count):
                        self._cut_one(job, self._faults[i % len(self._faults)], report)
                    finish(folder, 20)
                    wait_for(job.look, timeout_s)
                    report.status = job.stop() if not job.broken else 1
                    report.left = job.left_files()
                    report.left += [f"process {pid}" for pid in environs_with(job.mark)]
            except TimeoutError as error:
                report.why = f"{error}; {job.broken}"
            report.restarted = job.restarted
            report.output = (folder / "output").read_text(errors="replace")
        return report

    def _cut_one(self, job: HostsJob, fault: tuple[str, str, bool], report: PartitionReport) -> None:
        victim, kind, is_long = fault
        # One replica bears one lost server at a time.
        wait_for(lambda: is_healthy(str(job.job_dir)), 90.0, job.look)
        began = time.monotonic() + self._choose.uniform(0.05, 0.6)
        wait_for(lambda: time.monotonic() >= began, 5.0, job.look)
        first, count = {"server": (1, SERVERS), "client": (1 + SERVERS, CLIENTS)}.get(victim, (SCHEDULER_HOST, 1))
        host = first + self._choose.randrange(count)
        cut = Cut(job.lab, host, kind)
        progress = Progress(job.folder)
        ends = time.monotonic() + (self._long_s if is_long else self._short_s)
        wait_for(lambda: time.monotonic() >= ends, 60.0, lambda: progress.look() or job.look())
        name = f"{victim} {kind}{' long' if is_long else ''}"
        if not cut.has_fired():
            report.idle.append(name)
        cut.end()
        healed, before = time.monotonic(), steps_of(job.folder)
        wait_for(lambda: progress.is_beyond(before), 90.0, lambda: progress.look() or job.look())
        report.cuts[name] += 1
        report.stood_s.append(progress.longest_s)
        report.recovery_s.append(time.monotonic() - healed)
        print(f"{name} host {host}: {report.stood_s[-1]:.2f} s, {report.recovery_s[-1]:.2f} s", flush=True)
