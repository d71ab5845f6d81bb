"""The jobs of ``kvmpi bench ps``: how they are started, and what becomes of what their workers measure."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from kvmpi.benchmarks.jobs import JobSpec, RankJob, Stage
from kvmpi.benchmarks.plan import ROUNDS, Case
from kvmpi.benchmarks.ps_options import ITEM_BYTES, Layout
from kvmpi.benchmarks.ps_rows import KVMPI, MXNET, SOCKETS, PsRow
from kvmpi.benchmarks.sizes import format_bytes
from kvmpi.benchmarks.table import Row
from kvmpi.benchmarks.turns import Event

_WORKER_FILE = str(Path(__file__).with_name("ps_worker.py"))
_SLOW_S = 0.1  # from here on a row needs no iteration to warm up: caches do not matter
_MOST_ITERATIONS = 1000  # of a row, in one round
_EXACT = 1 << 24  # up to here float32 holds every integer
_LARGEST_ELEMENT = 16  # at least: see verify.Pattern

TIMES = ("push", "pull", "both", "fused")


@dataclass(frozen=True)
class PsPlan:
    """What the workers of one job have to know."""

    system: str
    cases: tuple[Case, ...]
    rows: tuple[dict[str, str], ...]  # mode, compress, memory
    num_ranks: int
    grouped: bool

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def spec(rows: Sequence[PsRow], layout: Layout, cases: Sequence[Case], mxnet: str | None) -> JobSpec:
    """The job of rows that can share one."""
    way = rows[0].way
    told = [{"mode": row.mode, "compress": row.way.compress, "memory": row.way.memory} for row in rows]
    plan = PsPlan(way.system, tuple(cases), tuple(told), layout.workers, layout.grouped)
    shape = [str(number) for number in (layout.workers, layout.clients, layout.servers)]
    if way.system == MXNET:
        assert mxnet is not None
        words = [sys.executable, "-m", "kvmpi.benchmarks.ps_mxnet", mxnet, shape[0], shape[2], _WORKER_FILE]
    elif way.system == SOCKETS:
        words = [sys.executable, "-m", "kvmpi.benchmarks.ps_sockets", shape[0], shape[2], *way.worker]
    else:
        words = [sys.executable, "-m", "kvmpi", "run", "-n", shape[0], "-c", shape[1], "-s", shape[2]]
        words += [*way.options, "--", *way.worker]
    return JobSpec(
        name=", ".join(dict.fromkeys(row.label for row in rows)), plan=plan, command=lambda folder: [*words, folder],
        num_answering=layout.workers, settings=dict(way.settings),
    )  # fmt: skip


def needed_bytes(rows: Sequence[PsRow], layout: Layout, nbytes: int) -> int:
    """About what the job of ``rows`` needs for values of ``nbytes``.

    Workers have what they push and what they pull; a store has a copy in every client, the value and the sum of a round
    on the servers, and about as much again on its way. MXNet's workers have arrays of their own beside NumPy's.
    """
    if rows[0].way.system == MXNET:
        return nbytes * (5 * layout.workers + 3)
    return nbytes * (2 * layout.workers + len(rows) * (layout.clients + 3))


class _Entrant:
    """A row in the case that is open: what its workers have measured so far."""

    def __init__(self) -> None:
        self.wrong, self.mean_s = 0, 0.0
        self.imbalance: float | None = None
        self.iters = 0
        self.us: list[list[float]] = [[] for _ in TIMES]  # of all workers


class PsJob:
    """A job that takes turns with others, see ``turns.Job``."""

    def __init__(
        self, stage: Stage, job: RankJob, rows: Sequence[PsRow], layout: Layout, cases: Sequence[Case], seconds: float
    ) -> None:
        self.name = job.name
        self._stage, self._job, self._rows, self._layout = stage, job, rows, layout
        self._cases, self._case, self._seconds = cases, Case(()), seconds
        self._entrants: dict[int, _Entrant] = {}

    def ask(self, command: str) -> Iterator[Event]:
        """Have the workers carry out ``open CASE``, ``round`` or ``close``."""
        if command == "round":
            self._round()
        elif command == "close":
            yield {"kind": "rows", "rows": self._close()}
        else:
            self._case = self._cases[int(command.split()[1])]
            yield from self._open(command)

    def _open(self, command: str) -> Iterator[Event]:
        self._entrants = {}
        refused: dict[int, str] = {}
        for event in self._stage.ask(self._job, command):
            if event["kind"] == "refused":
                refused[event["row"]] = event["text"]
            else:
                self._note(event)
        for number, text in refused.items():
            size = format_bytes(ITEM_BYTES * sum(self._case.counts))
            yield {"kind": "note", "text": f"{self._rows[number].label} left out of {size}: {text}"}

    def _round(self) -> None:
        for number, entrant in self._entrants.items():
            wanted = int(self._seconds / ROUNDS / max(entrant.mean_s, 1e-6))
            iters = max(1, min(wanted, _most_iterations(self._layout.workers)))
            warm_ups = int(entrant.mean_s < _SLOW_S)  # the caches belong to the row that was there before
            entrant.mean_s = 0.0
            for event in self._stage.ask(self._job, f"time {number} {iters} {warm_ups}"):
                self._note(event)
            entrant.iters += iters

    def _note(self, event: Event) -> None:
        """What one worker says about one row."""
        entrant = self._entrants.setdefault(event["row"], _Entrant())
        entrant.wrong += event["wrong"]
        entrant.mean_s = max(entrant.mean_s, event.get("mean_s", 0.0))
        for all_us, its_us in zip(entrant.us, event.get("us", ()), strict=False):
            all_us += its_us
        if event.get("imbalance") is not None:  # workers who talk to no server know of none
            entrant.imbalance = max(entrant.imbalance or 0.0, event["imbalance"])

    def _close(self) -> list[Row]:
        for event in self._stage.ask(self._job, "close"):
            self._note(event)
        return [self._row(self._rows[number], entrant) for number, entrant in self._entrants.items()]

    def _row(self, row: PsRow, entrant: _Entrant) -> Row:
        layout, size_bytes = self._layout, ITEM_BYTES * sum(self._case.counts)
        clients = layout.clients if row.way.system == KVMPI else layout.workers
        return {
            "size_B": size_bytes, "keys": len(self._case.counts), "row": row.label, "clients": clients,
            "servers": layout.servers, "mode": row.mode, "compress": row.way.compress,
            **quantiles(entrant.us), **bandwidths(size_bytes, entrant.us, clients, layout.servers),
            "imbalance": entrant.imbalance, "iters": entrant.iters, "wrong": entrant.wrong,
            "workers": layout.workers, "job": [layout.workers, layout.clients, layout.servers],
            "preset": self._case.preset, "settings": dict(row.way.settings), "options": list(row.way.options),
        }  # fmt: skip


def quantiles(us: Sequence[Sequence[float]]) -> dict[str, float]:
    """``push_p50``, ``push_p99`` and so on of the times in ``TIMES``."""
    return {
        f"{name}_p{q}": float(np.percentile(times, q)) for name, times in zip(TIMES, us, strict=True) for q in (50, 99)
    }


def bandwidths(size_bytes: int, us: Sequence[Sequence[float]], clients: int, servers: int) -> dict[str, float]:
    """GB/s of a client, there and back, and of a server: 2 S / t and 2 S C / (V t), with the median t of both."""
    client_bw = 2 * size_bytes / (1e3 * float(np.median(us[TIMES.index("both")])))
    return {"client_bw": client_bw, "server_bw": client_bw * clients / servers}


def _most_iterations(num_workers: int) -> int:
    """Of one round, such that what asynchronous pushes add up to stays exact."""
    pushes = _EXACT // (_LARGEST_ELEMENT * num_workers)
    return max(1, min(_MOST_ITERATIONS, pushes // (2 * (ROUNDS + 1)) - 2))
