"""The rows that are kvmpi's: its collectives by algorithm, its store, and the agreement that begins a store's calls."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

import kvmpi
from kvmpi import arrays
from kvmpi.arrays import Vector
from kvmpi.benchmarks.device_mirrors import Mirrors
from kvmpi.benchmarks.plan import Case, Plan
from kvmpi.collectives import Call, Collectives, Entry, mpi_comm
from kvmpi.collectives.schedule import segment_bounds
from kvmpi.config import Config
from kvmpi.deadline import Deadline
from kvmpi.errors import UnsupportedError

Array = npt.NDArray[Any]

TIMEOUT_S = 300.0
LABEL = "kvmpi bench"


class Setting:
    """What all contestants of a job share: the plan, the ranks, and memory that they use one after the other."""

    def __init__(self, plan: Plan, rank: int, size: int) -> None:
        self.plan, self.op, self.dtype = plan, plan.op, plan.dtype
        self.rank, self.size = rank, size
        config = Config.from_env()
        self.chunk_bytes = plan.chunk_bytes or config.ring_chunk_bytes
        rings = plan.num_rings or config.num_rings
        self._config = replace(config, ring_chunk_bytes=self.chunk_bytes, num_rings=rings)
        self._mirrors: Mirrors | None = None
        self._memory: dict[tuple[str, bool], list[list[Array]]] = {}
        self._allocator: Collectives | None = None

    def collectives(self, algorithm: str) -> tuple[Collectives, Callable[[], None]]:
        """kvmpi's collectives over all ranks, and what frees their communicator; collective."""
        comm = mpi_comm.world(TIMEOUT_S)
        try:
            made = Collectives.configured(comm, replace(self._config, allreduce=algorithm))
        except BaseException:
            comm.free()
            raise

        def free() -> None:
            made.close()
            comm.free()

        return made, free

    def sources(self, case: Case, *, shared: bool) -> list[list[Array]]:
        """This rank's inputs, by tensor and vector; the same memory for every contestant. ``shared``: of kv.empty."""
        counts = list(case.counts)
        if self.op == "allgather":
            counts = [stop - start for start, stop in map(self.segment, counts)]
        return self._allocated("sources", counts, self.plan.num_vectors, shared)

    def outs(self, case: Case, *, shared: bool) -> list[Array]:
        """Where this rank's results go; the same memory for every contestant."""
        counts = list(case.counts)
        if self.op == "reduce_scatter":
            counts = [stop - start for start, stop in map(self.segment, counts)]
        return [vectors[0] for vectors in self._allocated("outs", counts, 1, shared)]

    def segment(self, count: int) -> tuple[int, int]:
        """This rank's part of an array of ``count`` elements."""
        return segment_bounds(count, self.size)[self.rank]

    def mirrors(self) -> Mirrors:
        """On the GPU of this rank.

        Raises:
            UnsupportedError: it has none.
        """
        if self._mirrors is None:
            self._mirrors = Mirrors(int(os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK", self.rank)))
        return self._mirrors

    def forget(self) -> None:
        """A case has ended: give its memory back."""
        self._memory.clear()
        if self._mirrors is not None:
            self._mirrors.forget()

    def _allocated(self, what: str, counts: list[int], num_vectors: int, shared: bool) -> list[list[Array]]:
        if (what, shared) not in self._memory:
            self._memory[what, shared] = [[self._empty(count, shared) for _ in range(num_vectors)] for count in counts]
        return self._memory[what, shared]

    def _empty(self, count: int, shared: bool) -> Array:
        if not shared:
            return np.empty(count, arrays.DTYPES[self.dtype])
        if self._allocator is None:
            self._allocator = self.collectives("auto")[0]
        return self._allocator.empty(count, self.dtype)


@dataclass(frozen=True)
class Result:
    """Where a contestant leaves elements ``start`` and following of a tensor, and of which vectors they are the sum."""

    buffer: Array
    start: int
    terms: range


class Contestant:
    """One row: a way to carry out the operation on every array of a case. It lives as long as its job.

    Attributes:
        ops: operations that it can do.
        modifiers: what may follow its name.
        sums: whether it works on the arrays at all, so that bandwidth makes sense.
        sources, outs: inputs (by tensor and vector) and results (by tensor) of the open case.
    """

    ops: tuple[str, ...] = ("allreduce", "reduce_scatter", "allgather", "broadcast")
    modifiers: tuple[str, ...] = ("in", "empty")
    sums = True
    chunk_bytes: int | None = None

    def __init__(self, setting: Setting, kind: str, how: Sequence[str]) -> None:
        self.setting, self.kind, self.how = setting, kind, frozenset(how)
        self.sources: list[list[Array]] = []
        self.outs: list[Array] = []
        self.counts: tuple[int, ...] = ()

    def open(self, case: Case) -> None:
        """Get ready for a case; collective. UnsupportedError here means: not this case."""
        setting, op = self.setting, self.setting.op
        self.counts = case.counts
        shared = "empty" in self.how
        if op == "broadcast":
            self.outs = setting.outs(case, shared=shared)
            self.sources = [[out] for out in self.outs]
        elif "in" not in self.how:
            self.sources = setting.sources(case, shared=shared)
            self.outs = self.new_outs(case)
        elif op == "allgather":
            self.outs = setting.outs(case, shared=shared)
            self.sources = [[out[slice(*setting.segment(out.size))]] for out in self.outs]
        else:
            self.sources = setting.sources(case, shared=shared)
            self.outs = [vectors[0] for vectors in self.sources]
            if op == "reduce_scatter":
                self.outs = [out[slice(*setting.segment(out.size))] for out in self.outs]

    def new_outs(self, case: Case) -> list[Array]:
        """Memory for results that do not replace inputs."""
        return self.setting.outs(case, shared=False)

    def place(self) -> None:
        """Inputs have been filled."""
        if "gpu" in self.how:
            self.setting.mirrors().send()

    def fetch(self) -> None:
        """Results are about to be looked at."""
        if "gpu" in self.how:
            self.setting.mirrors().fetch()

    def run(self) -> None:
        """Carry out the operation once: what is timed."""
        raise NotImplementedError

    def shut(self) -> None:
        """The case has ended."""
        self.sources, self.outs = [], []

    def close(self) -> None:
        """The job has ended."""

    def choice(self) -> str:
        """What an automatic choice takes for the open case; empty where there is none."""
        return ""

    def inputs(self) -> list[tuple[Array, int, int]]:
        """What to fill before a verified run: (buffer, index of its first element, number of the vector)."""
        setting, found = self.setting, []
        for count, vectors in zip(self.counts, self.sources, strict=True):
            start = setting.segment(count)[0] if setting.op == "allgather" else 0
            if setting.op == "broadcast" and setting.rank != 0:
                continue
            first = setting.rank * len(vectors)
            found += [(vector, start, first + i) for i, vector in enumerate(vectors)]
        return found

    def results(self) -> list[Result]:
        """What to look at after a verified run."""
        setting, found = self.setting, []
        for count, out in zip(self.counts, self.outs, strict=True):
            if setting.op == "allreduce":
                found.append(Result(out, 0, range(setting.size * setting.plan.num_vectors)))
            elif setting.op == "reduce_scatter":
                start = setting.segment(count)[0]
                found.append(Result(out, start, range(setting.size * setting.plan.num_vectors)))
            elif setting.op == "broadcast":
                found.append(Result(out, 0, range(1)))
            else:
                for rank, (start, stop) in enumerate(segment_bounds(count, setting.size)):
                    found.append(Result(out[start:stop], start, range(rank, rank + 1)))
        return found


class OurAlgorithm(Contestant):
    """An algorithm of ``kvmpi.collectives``. ``view``: the result lies in memory that all ranks of the host share.

    ``gpu``: the vectors, and the result in the end, are on the rank's GPU.
    """

    modifiers = ("in", "empty", "view", "gpu")

    def __init__(self, setting: Setting, kind: str, how: Sequence[str]) -> None:
        super().__init__(setting, kind, how)
        self._collectives, self._free = setting.collectives(kind)
        try:
            if "gpu" in self.how:
                setting.mirrors()
            self._probe()
        except BaseException:
            self._free()
            raise
        self._calls: list[Callable[[Deadline], None]] = []

    def _probe(self) -> None:
        """Whether the algorithm is possible here shows when it has something to do."""
        setting = self.setting
        whole = np.zeros(setting.size, arrays.DTYPES[setting.dtype])
        own = whole[slice(*setting.segment(whole.size))].copy()
        ends = {"reduce_scatter": ([whole], own), "allgather": ([own], whole)}
        self._call(*ends.get(setting.op, ([whole], np.empty_like(whole))))(Deadline(TIMEOUT_S))

    def open(self, case: Case) -> None:
        super().open(case)
        if ("ring" in self.kind or self.kind == "hierarchical") and self.setting.size > 1:
            count = max(case.counts)
            self.chunk_bytes = self._collectives.choice(self.setting.op, count, self.setting.dtype).chunk_bytes
        self._calls = [self._call(sources, out) for sources, out in zip(self.sources, self.outs, strict=True)]

    def new_outs(self, case: Case) -> list[Array]:
        if "view" not in self.how:
            return super().new_outs(case)
        deadline = Deadline(TIMEOUT_S)
        return [self._collectives.shared_empty(count, self.setting.dtype, deadline) for count in case.counts]

    def _call(self, sources: list[Array], out: Array) -> Callable[[Deadline], None]:
        op, dtype, ours = self.setting.op, self.setting.dtype, self._collectives
        if op == "broadcast":
            return partial(ours.broadcast, out, 0, label=LABEL)
        if op == "allgather":
            return partial(ours.allgather, sources[0], out, label=LABEL)
        if "gpu" in self.how:
            return self._call_on_devices(sources, out)
        vectors = [Vector(source, dtype, "cpu", True) for source in sources]
        return partial(ours.allreduce if op == "allreduce" else ours.reduce_scatter, vectors, out, dtype, label=LABEL)

    def _call_on_devices(self, sources: list[Array], out: Array) -> Callable[[Deadline], None]:
        from kvmpi.kernels import gpu

        mirrors, dtype, ours = self.setting.mirrors(), self.setting.dtype, self._collectives
        vectors = [Vector(there, dtype, f"cuda:{there.device.id}", True) for there in map(mirrors.of, sources)]
        result = mirrors.of(out)
        if ours.fills_devices:
            return partial(ours.allreduce, vectors, result, dtype, label=LABEL)
        total = gpu.pinned_empty(out.size, dtype)

        def call(deadline: Deadline) -> None:
            ours.allreduce(vectors, total, dtype, deadline, LABEL)
            gpu.copy_to_devices([result], total)

        return call

    def run(self) -> None:
        deadline = Deadline(TIMEOUT_S)
        for call in self._calls:
            call(deadline)

    def choice(self) -> str:
        if self.kind != "auto" or not any(self.counts) or self.setting.size == 1:
            return ""
        taken = [str(self._collectives.choice(self.setting.op, count, self.setting.dtype)) for count in self.counts]
        if len(set(taken)) == 1:
            return taken[0]
        names = [words.split()[0] for words in taken]
        return ", ".join(f"{name} for {names.count(name)} arrays" for name in dict.fromkeys(names))

    def shut(self) -> None:
        super().shut()
        self._calls = []

    def close(self) -> None:
        self._free()


class Agreement(Contestant):
    """What every call of a store begins with: the ranks agree that they make the same call."""

    ops = ("allreduce",)
    modifiers = ()
    sums = False

    def __init__(self, setting: Setting, kind: str, how: Sequence[str]) -> None:
        super().__init__(setting, kind, how)
        self._collectives, self._free = setting.collectives("auto")
        self._entries: tuple[Entry, ...] = ()

    def open(self, case: Case) -> None:
        self.counts = ()  # nothing is summed
        named = [(f"layer{i}.weight", (count,)) for i, count in enumerate(case.counts)]
        self._entries = tuple(Entry(name, shape, self.setting.dtype) for name, shape in named)

    def run(self) -> None:
        self._collectives.agree(Call("pushpull", self._entries), Deadline(TIMEOUT_S))

    def close(self) -> None:
        self._free()


class Store(Contestant):
    """``kv.pushpull`` on an ``mpi`` store, one call for all arrays. ``empty``: input and result are of kv.empty.

    ``sum``: ``kv.allreduce``, which keeps no value. ``view``: results are read in the store's own memory. ``gpu``:
    input and result are on the rank's GPU.
    """

    ops = ("allreduce",)
    modifiers = ("in", "empty", "sum", "view", "gpu")

    def __init__(self, setting: Setting, kind: str, how: Sequence[str]) -> None:
        super().__init__(setting, kind, how)
        self._settings: dict[str, Any] = {"ring_chunk_bytes": setting.chunk_bytes}
        known = {field.name for field in fields(Config)}
        self._settings |= {
            name: setting.plan.num_rings for name in ("num_rings",) if name in known and setting.plan.num_rings
        }
        if setting.dtype == "bfloat16" and importlib.util.find_spec("torch") is None:
            raise UnsupportedError("bfloat16 arrays are torch's; pip install 'kvmpi[torch]'")
        if "gpu" in self.how:
            setting.mirrors()
            if setting.dtype == "bfloat16":
                raise UnsupportedError("arrays of CuPy have no bfloat16")
        self._kv: Any = None
        self._arguments: tuple[Any, ...] = ()

    def open(self, case: Case) -> None:
        super().open(case)
        self._kv = kvmpi.create("mpi", **self._settings)
        values = [[self._array(vector) for vector in vectors] for vectors in self.sources]
        outs = [self._array(out) for out in self.outs]
        flat = [vectors[0] for vectors in values]
        keys = list(range(len(values)))
        self._kv.init(keys, flat)
        if "view" in self.how:
            outs = list(map(self._kv.view, keys))
            places = [arrays.span_of(view)[0] for view in outs]
            self.outs = [  # which can be spoiled before a result is looked at
                arrays.memory_at(place, count, self.setting.dtype)
                for place, count in zip(places, case.counts, strict=True)
            ]
        value = flat if len(values[0]) == 1 else values
        self._arguments = (keys, value, outs) if len(keys) > 1 else (0, value[0], outs[0])

    def new_outs(self, case: Case) -> list[Array]:
        return [] if "view" in self.how else self.setting.outs(case, shared="empty" in self.how)

    def _array(self, flat: Array) -> Any:
        if "gpu" in self.how:
            return self.setting.mirrors().of(flat)
        return arrays.wrap(flat, (flat.size,), self.setting.dtype, "numpy")

    def run(self) -> None:
        (self._kv.allreduce if "sum" in self.how else self._kv.pushpull)(*self._arguments)

    def shut(self) -> None:
        super().shut()
        self._arguments = ()
        if self._kv is not None:
            self._kv.close()
            self._kv = None
