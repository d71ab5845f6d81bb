"""What the scheduler knows of the work of a job, as a state machine without I/O: newest reports, rates and curves.

Rudra has a statistics server for what learners report (Gupta, Zhang, Milthorpe 2015); here it is a part of the
scheduler. Whatever is reported, and however fast, memory is bounded: so many processes, names, and points.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import msgspec
from msgspec import structs

from kvmpi.errors import ProtocolError
from kvmpi.ps.curve import Curve, mean
from kvmpi.trace.activity import MAX_NAME_CHARS, MAX_NAMES, MAX_POINTS, MAX_STEP
from kvmpi.wire import messages as m

#: Of one report. No process of ours has as many phases.
_MAX_ENTRIES = 64
_MAX_HOST_CHARS = 300
#: Servers that one job may have in the course of time, beside those it began with.
_MORE_SERVERS = 64
#: So many workers may report where nobody has said how many there are.
_MANY_WORKERS = 1 << 12
#: Points of all curves of one name together, about; each worker has 32 at least and 256 at most.
_ALL_POINTS = 1 << 16
#: Curves of single workers that are shown; the mean is of all.
_MOST_SHOWN = 64
#: How fast rates follow, for a report: a rate is a mean over the last few.
_FOLLOW = 0.3
#: A worker whose own work takes so many times that of the median worker is a straggler.
_STRAGGLES = 1.25
#: Phases whose bytes go to or come from other processes, each once.
_MOVING = ("reduce", "broadcast", "push", "pull")
#: A greater number makes no sense as a total, and sums of it would overflow.
_MAX_TOTAL = 1e18


#: Totals of which there is a rate.
_RATED = ("steps", "blocked_s", "communication_s", "requests", "rounds")


class _Process(msgspec.Struct):
    """A worker or a server. ``rates`` are means over the last few reports; ``base`` is what the next one begins at."""

    report: m.Report
    heard_s: float
    base: m.Report
    base_s: float
    rates: dict[str, float] = msgspec.field(default_factory=dict)
    curves: dict[str, Curve] = msgspec.field(default_factory=dict)


def _moved(report: m.Report) -> float:
    if report.role == "server":
        return report.totals.get("received_bytes", 0.0) + report.totals.get("sent_bytes", 0.0)
    return sum(report.phases[name][1] for name in _MOVING if name in report.phases)


class Statistics:
    """The newest report of every process of a job, what follows from it, and curves.

    Args:
        num_workers, num_servers: of the job; a report of a worker with a higher rank is refused. 0 workers: nobody has
            said how many there are.
        num_clients: of the job, for show.
        report_s: seconds from one report of a process to the next.
    Attributes:
        refused: reports that made no sense.
    """

    def __init__(
        self, num_workers: int = 1, num_servers: int = 0, num_clients: int = 1, report_s: float = 1.0, job: str = ""
    ) -> None:
        self._num_workers, self._num_servers, self._num_clients = num_workers, num_servers, num_clients
        self._report_s, self._job = report_s, job
        self._workers: dict[int, _Process] = {}
        self._servers: dict[int, _Process] = {}
        self._most_workers = num_workers or _MANY_WORKERS
        self._capacity = min(256, max(32, _ALL_POINTS // self._most_workers))
        self._bytes_per_s, self._steps_per_s = Curve(), Curve()
        self._next_sample_s: float | None = None
        self._start_s: float | None = None
        self.refused = 0

    def hear(self, report: m.Report, now_s: float) -> None:
        """Take a report.

        Raises:
            ProtocolError: it makes no sense, or is too large; it counts for nothing.
        """
        try:
            self._check(report)
        except ProtocolError:
            self.refused += 1
            raise
        self._start_s = now_s if self._start_s is None else self._start_s
        processes = self._workers if report.role == "worker" else self._servers
        process = processes.get(report.rank)
        if process is not None and process.report.incarnation > report.incarnation:
            return  # of one before it
        points, report = report.curves, structs.replace(report, curves={})
        if process is None or process.report.incarnation < report.incarnation:
            kept = {} if process is None else process.curves  # the curves of a worker that is back go on
            process = processes[report.rank] = _Process(report, now_s, report, now_s, curves=kept)
            self._add_curves(process, points)
        elif report.number > process.report.number:
            self._follow(process, report, now_s)
            self._add_curves(process, points)

    def _check(self, report: m.Report) -> None:
        most = {"worker": self._most_workers, "server": self._num_servers + _MORE_SERVERS}.get(report.role, 0)
        if not 0 <= report.rank < most:
            raise ProtocolError(f"scheduler: {report.role[:20]!r} {report.rank} of {most} cannot report")
        named = (report.totals, report.phases, report.curves)
        if any(len(name) > MAX_NAME_CHARS for names in named for name in names) or len(report.host) > _MAX_HOST_CHARS:
            raise ProtocolError(f"scheduler: {report.role} {report.rank} reports names that are too long")
        sizes = (len(report.totals), len(report.phases), len(report.staleness), len(report.missing))
        if max(sizes) > _MAX_ENTRIES or len(report.curves) > MAX_NAMES:
            raise ProtocolError(f"scheduler: {report.role} {report.rank} reports too much")
        if any(len(points) > MAX_POINTS for points in report.curves.values()):
            raise ProtocolError(f"scheduler: {report.role} {report.rank} reports more than {MAX_POINTS} points at once")
        if any(not 0 <= step < MAX_STEP for points in report.curves.values() for step, _ in points):
            raise ProtocolError(f"scheduler: {report.role} {report.rank} reports a step that cannot be")
        numbers = [*report.totals.values(), *(number for phase in report.phases.values() for number in phase)]
        if not all(0 <= number <= _MAX_TOTAL for number in numbers):  # nor not-a-number
            raise ProtocolError(f"scheduler: {report.role} {report.rank} reports a total that cannot be")
        if any(len(phase) != 3 for phase in report.phases.values()):
            raise ProtocolError(f"scheduler: {report.role} {report.rank} reports phases of another form")

    def _follow(self, process: _Process, report: m.Report, now_s: float) -> None:
        """Rates, from one report to the next; of several that come at once they follow from the first."""
        process.report, process.heard_s = report, now_s
        seconds = now_s - process.base_s
        if seconds < self._report_s / 4:
            return
        pairs = {f"{name}_per_s": (process.base.totals.get(name, 0.0), report.totals.get(name, 0.0)) for name in _RATED}
        pairs["bytes_per_s"] = (_moved(process.base), _moved(report))
        for name, (old, new) in pairs.items():
            rate = max(0.0, new - old) / seconds
            process.rates[name] = rate + (process.rates.get(name, rate) - rate) * (1 - _FOLLOW)
        process.base, process.base_s = report, now_s

    def _add_curves(self, process: _Process, told: dict[str, list[tuple[int, float]]]) -> None:
        for name, points in told.items():
            if name not in process.curves and len(process.curves) >= MAX_NAMES:
                continue
            curve = process.curves.setdefault(name, Curve(self._capacity))
            for step, value in points:
                curve.add(float(step), value)

    def tick(self, now_s: float) -> None:
        """Take a sample of the whole job's rates, about once a second."""
        if self._start_s is None or (self._next_sample_s is not None and now_s < self._next_sample_s):
            return
        self._next_sample_s = now_s + max(self._report_s, 0.1)
        workers = [p for p in self._workers.values() if self._state(p, now_s) == "running" and p.rates]
        if workers:
            self._bytes_per_s.add(now_s - self._start_s, _sum(workers, "bytes_per_s"))
            self._steps_per_s.add(now_s - self._start_s, _sum(workers, "steps_per_s") / len(workers))

    def _state(self, process: _Process, now_s: float) -> str:
        if process.report.ended:
            return "done"
        return "running" if now_s - process.heard_s <= _SILENT_REPORTS * max(self._report_s, 1.0) else "silent"

    # ---- what there is to see

    def snapshot(self, now_s: float, lost: Sequence[str] = ()) -> dict[str, Any]:
        """Everything, as numbers, texts, lists and dicts with texts as keys.

        Args:
            lost: whom the scheduler has lost, in words.
        """
        workers = [self._worker(rank, process, now_s) for rank, process in sorted(self._workers.items())]
        servers = [self._server(rank, process, now_s) for rank, process in sorted(self._servers.items())]
        running = [worker for worker in workers if worker["state"] == "running"]
        _mark_stragglers(running)
        most = max((worker["steps"] for worker in workers), default=0)
        for worker in workers:
            worker["behind"] = most - worker["steps"]
        clients: dict[int, list[dict[str, Any]]] = {}
        for worker in workers:
            clients.setdefault(worker["client"], []).append(worker)
        names = sorted({name for process in self._workers.values() for name in process.curves})
        return {
            "format": 1,
            "job": self._job,
            "time_s": time.time(),
            "report_s": self._report_s,
            "elapsed_s": 0.0 if self._start_s is None else now_s - self._start_s,
            "shape": {
                "workers": self._num_workers or len(workers),
                "clients": self._num_clients if self._num_workers else len(clients),
                "servers": max([self._num_servers, *(rank + 1 for rank in self._servers)]),  # some may have been added
            },
            "totals": {
                "steps": most,
                "steps_per_s": _mean(running, "steps_per_s"),
                "bytes_per_s": sum(worker["bytes_per_s"] for worker in running),
                "bytes": sum(worker["bytes"] for worker in workers),
                "keys": max((worker["keys"] for worker in workers), default=0),
                "imbalance": max((worker["imbalance"] for worker in workers), default=1.0),
                "running": len(running),
                "reporting": len(workers),
            },
            "lost": list(lost)[:_MAX_ENTRIES],
            "slowest": max(running, key=lambda worker: worker["own_s_per_step"])["rank"] if len(running) > 1 else None,
            "clients": [_client(rank, members) for rank, members in sorted(clients.items())],
            "workers": workers,
            "servers": servers,
            "history": {"bytes_per_s": self._bytes_per_s.points(), "steps_per_s": self._steps_per_s.points()},
            "curves": {name: self._curves_of(name) for name in names},
        }

    def _curves_of(self, name: str) -> dict[str, Any]:
        found = {rank: p.curves[name].points() for rank, p in sorted(self._workers.items()) if name in p.curves}
        shown = dict(list(found.items())[:_MOST_SHOWN])
        return {"mean": mean(found.values()), "workers": {str(rank): points for rank, points in shown.items()}}

    def _worker(self, rank: int, process: _Process, now_s: float) -> dict[str, Any]:
        report, rates = process.report, process.rates
        totals = report.totals
        elapsed_s, blocked_s = totals.get("elapsed_s", 0.0), totals.get("blocked_s", 0.0)
        pushes = sum(report.staleness.values())
        stale = sum(clocks * count for clocks, count in report.staleness.items())
        steps_per_s = rates.get("steps_per_s", 0.0)
        newest = {name: curve.newest for name, curve in process.curves.items()}
        return {
            "rank": rank,
            "client": report.client,
            "host": report.host.partition("/")[0],
            "state": self._state(process, now_s),
            "silent_s": now_s - process.heard_s,
            "steps": int(totals.get("steps", 0.0)),
            "steps_per_s": steps_per_s,
            "bytes": _moved(report),
            "bytes_per_s": rates.get("bytes_per_s", 0.0),
            "elapsed_s": elapsed_s,
            "compute_s": max(0.0, elapsed_s - blocked_s),
            "blocked_s": min(blocked_s, elapsed_s),
            "communication_s": totals.get("communication_s", 0.0),
            "blocked_share": min(1.0, rates.get("blocked_s_per_s", 0.0)),
            "own_s_per_step": (1 - min(1.0, rates.get("blocked_s_per_s", 0.0))) / steps_per_s if steps_per_s else 0.0,
            "possible_bytes_per_s": totals.get("possible_bytes_per_s"),
            "reduce_bytes_per_s": _speed(report.phases.get("reduce")),
            "keys": int(totals.get("keys", 0.0)),
            "imbalance": totals.get("imbalance", 1.0),
            "resident_bytes": totals.get("resident_bytes", 0.0),
            "staleness": stale / pushes if pushes else None,
            "staleness_counts": {str(clocks): count for clocks, count in sorted(report.staleness.items())},
            "phases": report.phases,
            "newest": {name: point[1] for name, point in sorted(newest.items()) if point is not None},
            "straggler": False,
        }

    def _server(self, rank: int, process: _Process, now_s: float) -> dict[str, Any]:
        report, rates = process.report, process.rates
        whole = {name: int(report.totals.get(name, 0.0)) for name in _OF_SERVERS}
        return {
            "rank": rank,
            "host": report.host.partition("/")[0],
            "state": self._state(process, now_s),
            "silent_s": now_s - process.heard_s,
            **whole,
            "requests_per_s": rates.get("requests_per_s", 0.0),
            "rounds_per_s": rates.get("rounds_per_s", 0.0),
            "bytes_per_s": rates.get("bytes_per_s", 0.0),
            "missing": report.missing,
        }


#: Numbers that servers tell as they are.
_OF_SERVERS = (
    "keys", "held_bytes", "received_bytes", "sent_bytes", "requests", "queue", "rounds", "refused", "resident_bytes",
)  # fmt: skip
#: A process counts as silent when so many reports are missing.
_SILENT_REPORTS = 5


def _sum(processes: Sequence[_Process], rate: str) -> float:
    return sum(process.rates.get(rate, 0.0) for process in processes)


def _mean(workers: Sequence[dict[str, Any]], name: str) -> float:
    return sum(worker[name] for worker in workers) / len(workers) if workers else 0.0


def _speed(phase: list[float] | None) -> float | None:
    """Bytes per second of a phase while it is under way."""
    return phase[1] / phase[0] if phase and phase[0] > 0 and phase[1] > 0 else None


def _client(rank: int, members: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        "rank": rank,
        "workers": [worker["rank"] for worker in members],
        "steps": max(worker["steps"] for worker in members),
        "steps_per_s": _mean(members, "steps_per_s"),
        "bytes_per_s": sum(worker["bytes_per_s"] for worker in members),
        "state": "running" if any(worker["state"] == "running" for worker in members) else members[0]["state"],
    }


def _mark_stragglers(running: Sequence[dict[str, Any]]) -> None:
    """Who waits least for the others is whom they wait for."""
    own = [worker["own_s_per_step"] for worker in running if worker["own_s_per_step"] > 0]
    usual = median(own) if len(own) > 1 else 0.0
    for worker in running:
        worker["straggler"] = usual > 0 and worker["own_s_per_step"] > _STRAGGLES * usual
