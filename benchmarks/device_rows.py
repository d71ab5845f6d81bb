"""What ``kvmpi bench devices`` measures: copies, and sums and broadcasts of device vectors, each with its check."""

from __future__ import annotations

import mmap
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvmpi.arrays import DTYPES
from kvmpi.benchmarks.plan import ROUNDS
from kvmpi.benchmarks.table import Row
from kvmpi.benchmarks.verify import poison

Array = npt.NDArray[Any]

#: Rows of plain copies, by their direction.
D2H, H2D, D2D = "copy:d2h", "copy:h2d", "copy:d2d"
COPIES = (D2H, H2D, D2D)
REDUCE, BROADCAST, DEVICE_SUM = "reduce", "broadcast", "device_sum"
#: A modifier: from or to memory that nobody has pinned.
PAGEABLE = ":pageable"
#: Row -> the copy with whose bandwidth it is compared.
COMPARED = {
    REDUCE: D2H, REDUCE + PAGEABLE: D2H, BROADCAST: H2D, BROADCAST + PAGEABLE: H2D, DEVICE_SUM: D2D,
}  # fmt: skip
ROWS = (*COPIES, *COMPARED)

MAX_VECTORS = 8
# A prime, so that an element that a power of two shifts shows. Sums of MAX_VECTORS fit in int8, are exact in bfloat16.
_MODULUS = 13
_TILE_COUNT = _MODULUS * 2521  # stays in cache


class Tile:
    """The sum of some vectors, as many elements as repeat: element ``i`` of vector ``k`` is ``i * (k + 1) % 13``.

    Each vector differs from all others, so one that is taken twice, in place of another, shows.
    """

    def __init__(self, dtype: str, vectors: Sequence[int]) -> None:
        index = np.arange(_TILE_COUNT, dtype=np.float64)
        total = np.sum([index * (k + 1) % _MODULUS for k in vectors], axis=0, dtype=np.float64)
        if dtype == "bfloat16":
            self.values = (total.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        else:
            self.values = total.astype(DTYPES[dtype])

    def fill(self, array: Array) -> None:
        for start in range(0, array.size, self.values.size):
            part = array[start : start + self.values.size]
            part[:] = self.values[: part.size]

    def wrong(self, array: Array) -> int:
        """How many elements of ``array`` are others."""
        bad = 0
        for start in range(0, array.size, self.values.size):
            part = array[start : start + self.values.size]
            bad += int(np.count_nonzero(part != self.values[: part.size]))
        return bad


@dataclass(frozen=True)
class Contestant:
    """A row of the table.

    Attributes:
        vectors: how many device vectors; 0 for a plain copy.
        nbytes: bytes by which its bandwidth is counted.
        check: runs it once on memory without a trace of the result, and returns how many elements are wrong.
    """

    name: str
    vectors: int
    nbytes: int
    run: Callable[[], None]
    check: Callable[[], int]
    times_s: list[float] = field(default_factory=list)


class Memory:
    """Vectors of ``count`` elements on the current device and on the host; measurements take as much as they want.

    The sources of sums are never written, the targets of broadcasts never read.
    """

    def __init__(self, dtype: str, count: int, num_vectors: int) -> None:
        import cupy

        from kvmpi.kernels import gpu

        storage = DTYPES[dtype]
        self.dtype = dtype
        self.pinned, self.staging = (gpu.pinned_empty(count, dtype) for _ in range(2))
        self.sources, self.targets = ([cupy.empty(count, storage) for _ in range(num_vectors)] for _ in range(2))
        self.result = cupy.empty(count, storage)
        for k, source in enumerate(self.sources):
            Tile(dtype, [k]).fill(self.staging)
            plain_copy(source, self.staging)()


def plain_copy(dst: Any, src: Any) -> Callable[[], None]:
    """``dst = src`` by ``cudaMemcpyAsync``, pinned or on the device, and a wait for it; none of kvmpi's code.

    What can be prepared is: it is what others are compared with.
    """
    import cupy

    (to, _), (at, nbytes) = _place(dst), _place(src)
    queue, kind = cupy.cuda.runtime.memcpyAsync, cupy.cuda.runtime.memcpyDefault
    stream, done = cupy.cuda.get_current_stream(), cupy.cuda.Event(disable_timing=True)

    def run() -> None:
        queue(to, at, nbytes, kind, stream.ptr)
        done.record(stream)
        done.synchronize()

    return run


def _place(array: Any) -> tuple[int, int]:
    address = array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr
    return address, array.size * array.dtype.itemsize


def copies(memory: Memory, count: int) -> list[Contestant]:
    """The plain copies of ``count`` elements: what the bus and the device's memory can do."""
    pinned, source, target = (array[:count] for array in (memory.pinned, memory.sources[0], memory.targets[0]))
    nbytes = pinned.nbytes
    tile, check = Tile(memory.dtype, [0]), _Checks(memory, count)
    d2h, h2d, d2d = plain_copy(pinned, source), plain_copy(target, pinned), plain_copy(target, source)

    def from_host() -> int:
        tile.fill(pinned)
        return check.on_device([target], tile, h2d)

    return [
        Contestant(D2H, 0, nbytes, d2h, lambda: check.on_host(pinned, tile, d2h)),
        Contestant(H2D, 0, nbytes, h2d, from_host),
        Contestant(D2D, 0, 2 * nbytes, d2d, lambda: check.on_device([target], tile, d2d)),
    ]


def sums_and_broadcasts(memory: Memory, count: int, numbers: Sequence[int]) -> list[Contestant]:
    """What kvmpi does with ``count`` elements of each number of vectors."""
    storage = DTYPES[memory.dtype]
    # Nobody can tell when such memory is freed, so nobody locks it.
    plain = np.frombuffer(mmap.mmap(-1, max(1, count) * storage.itemsize), storage, count)
    by_name: dict[str, list[Contestant]] = {name: [] for name in COMPARED}
    for number in numbers:
        for contestant in _of_vectors(memory, count, number, plain):
            by_name[contestant.name].append(contestant)
    return [contestant for found in by_name.values() for contestant in found]


def _of_vectors(memory: Memory, count: int, number: int, plain: Array) -> list[Contestant]:
    from kvmpi.kernels import gpu

    dtype, pinned, result = memory.dtype, memory.pinned[:count], memory.result[:count]
    sources, targets = ([each[:count] for each in vectors[:number]] for vectors in (memory.sources, memory.targets))
    total, check = Tile(dtype, range(number)), _Checks(memory, count)

    def reduce() -> None:
        gpu.start_sum(pinned, sources, dtype).wait()

    def reduce_pageable() -> None:
        _reduce_pageable(plain, sources, dtype)

    def broadcast() -> None:
        gpu.start_copy(targets, pinned).wait()

    def broadcast_pageable() -> None:
        _broadcast_pageable(targets, plain)

    def device_sum() -> None:
        gpu.start_sum(result, sources, dtype).wait()

    def broadcast_of(src: Array, run: Callable[[], None]) -> Callable[[], int]:
        def from_host() -> int:
            total.fill(src)
            return check.on_device(targets, total, run)

        return from_host

    nbytes = pinned.nbytes
    return [
        Contestant(REDUCE, number, nbytes, reduce, lambda: check.on_host(pinned, total, reduce)),
        Contestant(REDUCE + PAGEABLE, number, nbytes, reduce_pageable,
                   lambda: check.on_host(plain, total, reduce_pageable)),
        Contestant(BROADCAST, number, nbytes, broadcast, broadcast_of(pinned, broadcast)),
        Contestant(BROADCAST + PAGEABLE, number, nbytes, broadcast_pageable, broadcast_of(plain, broadcast_pageable)),
        Contestant(DEVICE_SUM, number, (number + 1) * nbytes, device_sum,
                   lambda: check.on_device([result], total, device_sum)),
    ]  # fmt: skip


def _reduce_pageable(dst: Array, vectors: Sequence[Any], dtype: str) -> None:
    from kvmpi.kernels import gpu

    gpu.sum_vectors_to_host(dst, vectors, dtype)


def _broadcast_pageable(vectors: Sequence[Any], src: Array) -> None:
    from kvmpi.kernels import gpu

    gpu.copy_to_devices(vectors, src)


class _Checks:
    """Runs work once, and looks at what it has written, by way of memory that nothing else uses."""

    def __init__(self, memory: Memory, count: int) -> None:
        self._staging = memory.staging[:count]

    def on_host(self, array: Array, expected: Tile, run: Callable[[], None]) -> int:
        poison(array)
        run()
        return expected.wrong(array)

    def on_device(self, vectors: Sequence[Any], expected: Tile, run: Callable[[], None]) -> int:
        poison(self._staging)
        for vector in vectors:
            plain_copy(vector, self._staging)()
        run()
        bad = 0
        for vector in vectors:
            poison(self._staging)
            plain_copy(self._staging, vector)()
            bad += expected.wrong(self._staging)
        return bad


def measure(
    contestants: Sequence[Contestant], seconds: float, show: Callable[[str], None] = lambda doing: None
) -> list[Row]:
    """Check all, then let them take turns, ``seconds`` for each; what was found, in order, without shares.

    A time is from the call until the work is done, as a user pays for it: Python and the launch are parts of it.
    """
    show("verifying")
    wrong = [contestant.check() for contestant in contestants]
    for turn in range(ROUNDS):
        show(f"round {turn + 1} of {ROUNDS}")
        for contestant in contestants:
            contestant.run()  # what others have put into caches is no part of it
            until_s = time.perf_counter() + seconds / ROUNDS
            while True:
                start_s = time.perf_counter()
                contestant.run()
                end_s = time.perf_counter()
                contestant.times_s.append(end_s - start_s)
                if end_s >= until_s:
                    break
    return [_row(contestant, bad) for contestant, bad in zip(contestants, wrong, strict=True)]


def _row(contestant: Contestant, wrong: int) -> Row:
    times_us = [1e6 * time_s for time_s in contestant.times_s]
    median_us = statistics.median(times_us)
    return {
        "row": contestant.name, "vectors": contestant.vectors or None, "t_min": min(times_us), "t_p50": median_us,
        "t_p99": float(np.percentile(times_us, 99)), "GB/s": contestant.nbytes / median_us / 1e3, "of_copy": None,
        "iters": len(times_us), "wrong": wrong,
    }  # fmt: skip


def add_shares(found: Sequence[Row], largest: Sequence[Row]) -> None:
    """Fill ``of_copy`` of a size's rows: their bandwidth over that of a copy of the same size.

    Sums on the device are compared with the copy of the ``largest`` size: smaller ones stay in its cache.
    """
    rates = {row["row"]: row["GB/s"] for row in found if row["row"] in COPIES}
    rates[D2D] = next(row["GB/s"] for row in largest if row["row"] == D2D)
    for row in found:
        if row["row"] in COMPARED:
            row["of_copy"] = row["GB/s"] / rates[COMPARED[row["row"]]]
