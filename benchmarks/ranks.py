"""The program on every rank: opens a case, verifies its rows, times them in turns, and reports from rank 0.

    python -m kvmpi.benchmarks.ranks FOLDER

FOLDER has ``plan.json``, a FIFO ``ask-RANK`` for each rank, from which it reads commands (see ``Session.handle``), and
a FIFO ``answers-0``, into which rank 0 writes events as JSON lines. End of file on the first means that the parent has
died.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kvmpi import arrays
from kvmpi.benchmarks import environment, peers, rows
from kvmpi.benchmarks.contestants import LABEL, Contestant, Setting
from kvmpi.benchmarks.plan import ROUNDS, Case, Plan, RowName
from kvmpi.benchmarks.sizes import format_bytes
from kvmpi.benchmarks.table import Row
from kvmpi.benchmarks.verify import Pattern, poison
from kvmpi.errors import ConfigError, UnsupportedError

_MOST_ITERATIONS = 1000  # of a row, in one round
_SLOW_S = 0.05  # from here on a row needs no iteration to warm up: caches do not matter
_MEMORY_SHARE = 0.85

#: ``about`` (facts), ``note`` (text), ``rows`` (rows), ``done``; see ``Session.handle``.
Event = dict[str, Any]

BUSBW: dict[str, Callable[[int], float]] = {
    "allreduce": lambda n: 2 * (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "allgather": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
}


class _RefusedError(Exception):
    """A contestant cannot take part; the text says why."""


class Entrant:
    """A contestant in the case that is open: what was measured of it so far."""

    def __init__(self, name: RowName, contestant: Contestant, wrong: int) -> None:
        self.name, self.contestant, self.wrong = name, contestant, wrong
        self.mean_s = 0.0  # of the latest iterations
        self.times_s: list[np.ndarray] = []


class Session:
    """One rank of a job. All ranks handle the same commands in the same order."""

    def __init__(self, plan: Plan, world: Any) -> None:
        self._plan, self._world = plan, world
        self._setting = Setting(plan, world.rank, world.size)
        self._contestants: dict[RowName, Contestant] = {}
        self._impossible: set[RowName] = set()
        self._noted: set[str] = set()
        self._case: Case = Case(())
        self._entrants: list[Entrant] = []
        self._pattern = Pattern(plan.dtype, world.size * plan.num_vectors)
        self._words_ns: list[float] = []  # of the open case

    def handle(self, command: str) -> Iterator[Event]:
        """``about``, ``open CASE``, ``round``, ``close``: the events that follow from it."""
        word, _, argument = command.partition(" ")
        if word == "about":
            yield self._about()
        elif word == "open":
            yield from self._open(self._plan.cases[int(argument)])
        elif word == "round":
            self._round()
        elif word == "close":
            yield {"kind": "rows", "rows": self._close()}

    def finish(self) -> None:
        """Nothing more will be measured."""
        for contestant in self._contestants.values():
            contestant.close()
        peers.stop_gloo()

    def _about(self) -> Event:
        facts = environment.facts(self._world)
        if self._plan.measure_memory:
            facts["memory"] = environment.memory_rates(self._world)
            facts["word_ns"] = environment.word_ns(self._world)
        return {"kind": "about", "facts": facts}

    # ---- a case

    def _open(self, case: Case) -> Iterator[Event]:
        self._case, self._entrants, self._words_ns = case, [], []
        if text := self._too_large(case):
            yield {"kind": "note", "text": text}
            return
        for name in self._plan.rows:
            if name not in self._impossible:
                try:
                    self._entrants.append(self._enter(name, case))
                except _RefusedError as refusal:
                    yield from self._note(f"{name.label} left out: {refusal}")
        for entrant in self._entrants:
            times_s = self._timed(entrant.contestant, 1)
            if times_s[0] < self._plan.seconds / 50:
                times_s = self._timed(entrant.contestant, 5)
            entrant.mean_s = float(np.mean(times_s))

    def _enter(self, name: RowName, case: Case) -> Entrant:
        """A contestant that is ready for a case, and verified.

        Raises:
            _RefusedError: on every rank; it cannot take part, in this case or at all.
        """
        contestant = self._contestants.get(name)
        try:
            if contestant is None:
                contestant = self._contestants[name] = self._together(partial(self._make, name))
        except _RefusedError:
            self._impossible.add(name)
            raise
        self._together(partial(contestant.open, case))  # may refuse this case only
        try:
            wrong = self._together(partial(self._wrong, contestant))
        except _RefusedError:
            self._impossible.add(name)
            del self._contestants[name]
            raise
        return Entrant(name, contestant, wrong)

    def _make(self, name: RowName) -> Contestant:
        how = [word for word in name.how if word != rows.SPIN]  # what its job is about, not the contestant
        return rows.KINDS[name.kind](self._setting, name.kind, how)

    def _together(self, work: Callable[[], Any]) -> Any:
        """What ``work`` returns.

        Raises:
            _RefusedError: on every rank, if it is not possible on one.
        """
        found, reason = None, ""
        try:
            found = work()
        except (UnsupportedError, ConfigError, OverflowError) as error:  # the last: MPI's counts are ints
            reason = str(error).removeprefix(f"{LABEL}: ") or type(error).__name__
        reasons = [text for text in self._world.allgather(reason) if text]
        if reasons:
            raise _RefusedError(reasons[0])
        return found

    def _note(self, text: str) -> Iterator[Event]:
        if text not in self._noted:
            self._noted.add(text)
            yield {"kind": "note", "text": text}

    def _too_large(self, case: Case) -> str:
        """Why a case cannot be measured on this host; empty if it can."""
        nbytes = sum(case.counts) * arrays.DTYPES[self._plan.dtype].itemsize
        modifiers = {word for name in self._plan.rows for word in name.how}
        copies = (1 + len(modifiers & {"empty", "view"})) * (self._plan.num_vectors + 1)
        copies += 2 * any(name.kind in ("store", "naive", "baidu") for name in self._plan.rows)
        num_ranks = environment.ranks_on_machine(self._world)
        needed, available = nbytes * copies * num_ranks, environment.available_bytes()
        fits = available is None or needed <= _MEMORY_SHARE * available
        if all(self._world.allgather(fits)):
            return ""
        return (
            f"{format_bytes(nbytes)} left out: its rows take about {format_bytes(needed)} of memory for {num_ranks} "
            f"ranks, and {format_bytes(available or 0)} is free"
        )

    def _wrong(self, contestant: Contestant) -> int:
        """Elements, of all ranks, that one verified run gets wrong."""
        inputs = contestant.inputs()
        for result in contestant.results():
            poison(result.buffer)
        for buffer, start, term in inputs:
            self._pattern.fill(buffer, start, term)
        contestant.place()
        self._world.Barrier()  # a result may lie in memory that all ranks share
        contestant.run()
        contestant.fetch()
        bad = sum(self._pattern.wrong(result.buffer, result.start, result.terms) for result in contestant.results())
        self._world.Barrier()
        for buffer, _, _ in inputs:
            buffer[:] = 0  # sums of sums in place would overflow
        contestant.place()
        return int(self._world.allreduce(bad))

    def _timed(self, contestant: Contestant, iters: int) -> np.ndarray:
        """Seconds of each iteration on the slowest rank."""
        from mpi4py import MPI

        times_s = np.empty(iters)
        run, barrier, clock = contestant.run, self._world.Barrier, time.perf_counter
        for i in range(iters):
            barrier()
            start_s = clock()
            run()
            times_s[i] = clock() - start_s
        self._world.Allreduce(MPI.IN_PLACE, times_s, MPI.MAX)
        return times_s

    def _round(self) -> None:
        self._look_at_cores()
        for entrant in self._entrants:
            wanted = self._plan.seconds / ROUNDS / max(entrant.mean_s, 1e-6)
            iters = self._world.bcast(int(min(_MOST_ITERATIONS, max(1, wanted))))
            if entrant.mean_s < _SLOW_S:
                self._timed(entrant.contestant, 1)  # the caches belong to the previous contestant
            times_s = self._timed(entrant.contestant, iters)
            entrant.mean_s = float(np.mean(times_s))
            entrant.times_s.append(times_s)

    def _look_at_cores(self) -> None:
        """How far apart they are: a virtual machine's are not where they were a minute ago."""
        if self._plan.measure_memory and (word_ns := environment.word_ns(self._world)) is not None:
            self._words_ns.append(word_ns)

    def _close(self) -> list[Row]:
        self._look_at_cores()
        found = [self._row(entrant) for entrant in self._entrants]
        for entrant in self._entrants:
            entrant.contestant.shut()
        self._entrants = []
        self._setting.forget()
        return found

    def _row(self, entrant: Entrant) -> Row:
        plan, size = self._plan, self._world.size
        times_s = np.concatenate(entrant.times_s)
        low_s, p50_s, p99_s, high_s = (float(np.quantile(times_s, q)) for q in (0.0, 0.5, 0.99, 1.0))
        count = sum(self._case.counts)
        size_bytes = count * arrays.DTYPES[plan.dtype].itemsize
        algbw = size_bytes / p50_s / 1e9 if entrant.contestant.sums else 0.0
        row = {
            "size_B": size_bytes, "count": count, "dtype": plan.dtype, "op": plan.op, "algo": entrant.name.label,
            "ranks": size, "chunk_B": entrant.contestant.chunk_bytes, "t_min": 1e6 * low_s, "t_p50": 1e6 * p50_s,
            "t_p99": 1e6 * p99_s, "t_max": 1e6 * high_s, "algbw": algbw, "busbw": algbw * BUSBW[plan.op](size),
            "iters": int(times_s.size), "wrong": entrant.wrong, "arrays": len(self._case.counts),
            "vectors": plan.num_vectors, "preset": self._case.preset,
        }  # fmt: skip
        if self._words_ns:
            row |= {"word_ns_min": min(self._words_ns), "word_ns_max": max(self._words_ns)}
        if choice := entrant.contestant.choice():
            row["choice"] = choice
        return row


def main(folder: str) -> int:
    """Serve the parent that made ``folder``."""
    from mpi4py import MPI

    plan = Plan.from_json(Path(folder, "plan.json").read_text())
    world = MPI.COMM_WORLD
    if plan.num_ranks and world.size != plan.num_ranks:
        raise ConfigError(
            f"mpirun has started {plan.num_ranks} ranks, but the MPI that mpi4py has loaded sees {world.size}: they "
            "are of different MPIs; name the right library in MPI4PY_LIBMPI"
        )
    session = Session(plan, world)
    to = Path(folder, "answers-0") if world.rank == 0 else Path(os.devnull)
    with open(to, "w", buffering=1) as answers, open(Path(folder, f"ask-{world.rank}")) as asked:
        for line in asked:
            command = line.strip()
            if command == "quit":
                session.finish()
                return 0
            for event in (*session.handle(command), {"kind": "done"}):
                answers.write(json.dumps(event) + "\n")
    os._exit(1)  # nobody is left to report to, and MPI_Finalize would wait for the others


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
