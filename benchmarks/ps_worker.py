"""A worker of ``kvmpi bench ps``: opens a case, verifies every row of it, times it in turns, and reports.

    python -m kvmpi.benchmarks.ps_worker FOLDER

FOLDER has ``plan.json``, a FIFO ``ask-RANK`` from which this worker reads commands (see ``Session.handle``), and a FIFO
``answers-RANK`` into which it writes events as JSON lines. End of file on the first means that the parent has died.

The same program serves kvmpi and MXNet, so that both are measured by the same loop. MXNet's interpreter runs it by its
path, and has no kvmpi: here stands nothing that needs more than NumPy.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

try:
    from kvmpi.benchmarks.verify import Pattern, poison
except ImportError:
    from verify import Pattern, poison  # type: ignore[no-redef]

Array = npt.NDArray[Any]
Event = dict[str, Any]

_FIRST_LOOK = (1, 1)  # iterations after warm-ups that tell how many there is time for
_VERIFIED = 2  # exchanges of each kind, before a row is timed and afterwards


class CannotTakePart(Exception):
    """A row has to be left out of a case; the text says why. The same on all workers."""


class Kvmpi:
    """A store of kvmpi, on NumPy arrays.

    Attributes:
        values, outs: what is pushed and where is pulled into, by key.
        lasts: a worker has one store for the whole job.
    """

    lasts = False

    def __init__(self, mode: str, compress: str, *, grouped: bool) -> None:
        import kvmpi

        self._kv = kvmpi.create(f"dist_{mode}_mpi" if grouped else f"dist_{mode}")
        if compress != "none":
            self._kv.set_gradient_compression({"type": compress})
        if mode == "async":
            self._kv.set_optimizer(kvmpi.optim.SGD(lr=1.0))

    @staticmethod
    def about() -> dict[str, Any]:
        """The software that a worker uses, besides what the parent has too; collective in its client."""
        from kvmpi.benchmarks.environment import mpi_name
        from kvmpi.collectives import mpi_comm

        if not mpi_comm.started_by_mpi():
            return {}
        from mpi4py import MPI

        return {"mpi": mpi_name(MPI.Get_library_version())}

    def empty(self, count: int) -> Array:
        """Memory of the store's own, for values."""
        return self._kv.empty(count)  # type: ignore[no-any-return]

    def open(self, values: Sequence[Array], outs: Sequence[Array]) -> None:
        """Make a key for each of ``values``; collective."""
        keys = list(range(len(values)))
        self._kv.init(keys, [np.zeros_like(value) for value in values])
        self._ends = ends([*outs])
        # One key is not a list of one: that is the call which users make.
        self._keys: Any = keys if len(keys) > 1 else keys[0]
        self._values: Any = list(values) if len(keys) > 1 else values[0]
        self._outs: Any = list(outs) if len(keys) > 1 else outs[0]

    def push(self) -> None:
        self._kv.push(self._keys, self._values)

    def pull(self) -> None:
        self._kv.pull(self._keys, self._outs)

    def pushpull(self) -> None:
        self._kv.pushpull(self._keys, self._values, self._outs)

    def load(self) -> None:
        """``values`` and ``outs`` were changed."""

    def restore(self) -> None:
        """A push comes next: undo what earlier calls have done to the values."""

    def read(self) -> None:
        """Make ``outs`` what was pulled."""

    def glance(self) -> list[float]:
        """The first and the last element that were pulled; a later call does not find them again."""
        return spoiled(self._ends)

    def settle(self) -> None:
        """Collective; returns when the servers have applied what any worker has pushed so far."""
        self._kv.wait_all()
        self._kv.barrier()

    def imbalance(self) -> float | None:
        return float(self._kv.stats()["imbalance"])

    def close(self) -> None:
        self._kv.close()


class MXNet:
    """Apache MXNet's store. Its engine is asynchronous, so what it pulls is waited for."""

    lasts = True

    def __init__(self, mode: str, compress: str, *, grouped: bool) -> None:
        import mxnet

        self._mx, self._kv = mxnet, mxnet.kv.create(f"dist_{mode}")
        self._num_keys = 0
        if mode == "async":
            self._kv.set_optimizer(mxnet.optimizer.SGD(learning_rate=1.0, wd=0.0, rescale_grad=1.0))

    @staticmethod
    def about() -> dict[str, Any]:
        import mxnet

        versions = f"Python {platform.python_version()}, numpy {np.__version__}"
        return {"mxnet": f"MXNet {mxnet.__version__} ({versions})"}

    def open(self, values: Sequence[Array], outs: Sequence[Array]) -> None:
        if not all(value.size for value in values):
            raise CannotTakePart("MXNet has no empty arrays")
        self._keys = list(range(self._num_keys, self._num_keys + len(values)))
        self._num_keys += len(values)
        nd = self._mx.nd
        self._kv.init(self._keys, [nd.zeros(value.size) for value in values])
        self._sources, self._targets = list(values), list(outs)
        self._values, self._spares, self._outs = ([nd.zeros(value.size) for value in values] for _ in range(3))

    def push(self) -> None:
        self._kv.push(self._keys, self._spares)

    def pull(self) -> None:
        self._kv.pull(self._keys, out=self._outs)
        for out in self._outs:
            out.wait_to_read()

    def pushpull(self) -> None:
        self._kv.pushpull(self._keys, self._spares, out=self._outs)
        for out in self._outs:
            out.wait_to_read()

    def load(self) -> None:
        for ours, theirs in zip([*self._sources, *self._targets], [*self._values, *self._outs], strict=True):
            theirs[:] = ours
        self._mx.nd.waitall()

    def restore(self) -> None:
        # MXNet keeps the array that was pushed as the buffer into which it receives: it would push sums of sums.
        for value, spare in zip(self._values, self._spares, strict=True):
            value.copyto(spare)
        self._mx.nd.waitall()

    def read(self) -> None:
        for target, out in zip(self._targets, self._outs, strict=True):
            target[:] = out.asnumpy()

    def glance(self) -> list[float]:
        return [float(self._outs[0][:1].asscalar()), float(self._outs[-1][-1:].asscalar())]

    def settle(self) -> None:
        self._mx.nd.waitall()
        self._kv._barrier()

    def imbalance(self) -> float | None:
        return None

    def close(self) -> None:
        """Forget the arrays. The store, of which it has one for the whole job, ends with the process."""
        self._values = self._spares = self._outs = []


SYSTEMS: dict[str, Any] = {"kvmpi": Kvmpi, "mxnet": MXNet}


def _system(name: str) -> Any:
    if name == "sockets":
        from kvmpi.benchmarks.ps_sockets import Sockets

        return Sockets
    return SYSTEMS[name]


def ends(arrays: Sequence[Array]) -> list[Array]:
    """The first and the last element of all, as arrays of one; none if there are no elements."""
    filled = [array for array in arrays if array.size]
    return [filled[0][:1], filled[-1][-1:]] if filled else []


def spoiled(elements: Sequence[Array]) -> list[float]:
    """The values of arrays of one element, which lose them."""
    found = [float(element[0]) for element in elements]
    for element in elements:
        element[0] = np.nan
    return found


class Entrant:
    """A row in the case that is open."""

    def __init__(self, store: Any, mode: str, num_workers: int, rank: int) -> None:
        self.store, self.mode = store, mode
        self._pattern, self._rank = Pattern("float32", num_workers), rank
        self._workers = range(num_workers)
        self._num_pushes = 0

    def open(self, values: Sequence[Array], outs: Sequence[Array]) -> None:
        self._values, self._outs = values, outs
        self.store.open(values, outs)

    def verify(self) -> int:
        """How many elements of some exchanges this worker gets wrong; collective."""
        return sum(
            self._check(exchange) for exchange in (self._push_and_pull, self.store.pushpull) for _ in range(_VERIFIED)
        )

    def time(self, iters: int, warm_ups: int) -> tuple[list[list[float]], int]:
        """Seconds of push, pull, both, and pushpull by iteration, and how many of the values looked at were wrong.

        Synchronous rounds keep the workers in step. Asynchronous values depend on who came when, and are looked at
        afterwards.
        """
        self._fill(0)
        expected, sync = self._expected_ends(), self.mode == "sync"
        store, clock = self.store, time.perf_counter
        times_s: list[list[float]] = [[], [], [], []]
        wrong = 0
        for _ in range(warm_ups + iters):
            store.restore()
            start_s = clock()
            store.push()
            pushed_s = clock()
            store.pull()
            pulled_s = clock()
            wrong += sync and store.glance() != expected
            store.restore()
            again_s = clock()
            store.pushpull()
            done_s = clock()
            wrong += sync and store.glance() != expected
            parts_s = (pushed_s - start_s, pulled_s - pushed_s, pulled_s - start_s, done_s - again_s)
            for times, part_s in zip(times_s, parts_s, strict=True):
                times.append(part_s)
        self._num_pushes += 2 * (warm_ups + iters)
        return [times[warm_ups:] for times in times_s], wrong

    def _push_and_pull(self) -> None:
        self.store.push()
        self.store.pull()

    def _check(self, exchange: Callable[[], None]) -> int:
        """Wrong elements after one exchange of all workers.

        Synchronous: the store has the sum of this round, whose inputs are unlike those of the last. Asynchronous: SGD
        has subtracted every push of every worker from zeros.
        """
        self._num_pushes += 1
        sync = self.mode == "sync"
        step = self._num_pushes if sync else 0
        self._fill(step)
        self.store.restore()
        exchange()
        if not sync:
            self.store.settle()
            self.store.pull()
        self.store.read()
        times = 1 if sync else -self._num_pushes
        bad = sum(self._pattern.wrong(out, step + key, self._workers, times) for key, out in enumerate(self._outs))
        self.store.settle()  # nobody pushes on before everybody has looked
        return bad

    def _fill(self, step: int) -> None:
        for key, (value, out) in enumerate(zip(self._values, self._outs, strict=True)):
            self._pattern.fill(value, step + key, self._rank)
            poison(out)
        self.store.load()

    def _expected_ends(self) -> list[float]:
        filled = [(key, value.size) for key, value in enumerate(self._values) if value.size]
        if not filled:
            return []
        (first, _), (last, size) = filled[0], filled[-1]
        starts = (first, last + size - 1)
        return [float(self._pattern.totals(start, self._workers)[0]) for start in starts]


class Session:
    """One worker of a job. All workers handle the same commands in the same order."""

    def __init__(self, plan: dict[str, Any], rank: int) -> None:
        self._plan, self._rank = plan, rank
        self._system = _system(plan["system"])
        self._kept: Any = None
        self._entrants: dict[int, Entrant] = {}

    def handle(self, command: str) -> Iterator[Event]:
        """``about``, ``open CASE``, ``time ROW ITERATIONS WARM_UPS``, ``close``: the events that follow from it."""
        word, *numbers = command.split()
        if word == "about":
            facts = self._system.about()
            if self._rank == 0:
                yield {"kind": "about", "facts": facts}
        elif word == "open":
            yield from self._open(self._plan["cases"][int(numbers[0])]["counts"])
        elif word == "time":
            yield self._time(*map(int, numbers))
        elif word == "close":
            yield from self._close()

    def _open(self, counts: Sequence[int]) -> Iterator[Event]:
        values, outs = ([np.empty(count, np.float32) for count in counts] for _ in range(2))
        for number, row in enumerate(self._plan["rows"]):
            entrant = Entrant(self._store(row), row["mode"], self._plan["num_ranks"], self._rank)
            try:
                entrant.open([entrant.store.empty(n) for n in counts] if row["memory"] == "empty" else values, outs)
            except CannotTakePart as refusal:
                yield {"kind": "refused", "row": number, "text": str(refusal)}
                continue
            self._entrants[number] = entrant
            wrong = entrant.verify()
            times_s, more = entrant.time(*_FIRST_LOOK)
            yield {"kind": "opened", "row": number, "wrong": wrong + more, "mean_s": _mean_s(times_s)}

    def _store(self, row: dict[str, str]) -> Any:
        if self._kept is not None:
            return self._kept
        store = self._system(row["mode"], row["compress"], grouped=self._plan["grouped"])
        if self._system.lasts:
            self._kept = store
        return store

    def _time(self, number: int, iters: int, warm_ups: int) -> Event:
        times_s, wrong = self._entrants[number].time(iters, warm_ups)
        us = [[round(1e6 * time_s, 2) for time_s in times] for times in times_s]
        return {"kind": "times", "row": number, "us": us, "wrong": wrong, "mean_s": _mean_s(times_s)}

    def _close(self) -> Iterator[Event]:
        for number, entrant in self._entrants.items():
            imbalance, wrong = entrant.store.imbalance(), entrant.verify()
            entrant.store.close()
            yield {"kind": "closed", "row": number, "wrong": wrong, "imbalance": imbalance}
        self._entrants.clear()


def _mean_s(times_s: list[list[float]]) -> float:
    """Of one iteration: push, pull and pushpull."""
    return float(np.mean(times_s[2]) + np.mean(times_s[3]))


def main(folder: str) -> int:
    """Serve the parent that made ``folder``."""
    with open(os.path.join(folder, "plan.json")) as file:
        plan = json.load(file)
    rank = int(os.environ["KVMPI_RANK"])
    session = Session(plan, rank)
    with (
        open(os.path.join(folder, f"answers-{rank}"), "w") as answers,
        open(os.path.join(folder, f"ask-{rank}")) as asked,
    ):
        for line in asked:
            if line.strip() == "quit":
                return 0
            for event in (*session.handle(line.strip()), {"kind": "done"}):
                answers.write(json.dumps(event) + "\n")
            answers.flush()
    os._exit(1)  # nobody is left to report to, and stores would wait for their peers


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
