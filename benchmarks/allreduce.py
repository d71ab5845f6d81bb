"""How fast sums over workers are: kvmpi's algorithms, the whole store, MPI_Allreduce and gloo in one table.

    kvmpi run -n 4 benchmarks/allreduce.py [--sizes 4K,1M,64M] [--algorithms ring,mpi,MPI_Allreduce,gloo,store]
    mpirun -n 4 python benchmarks/allreduce.py ...

Rows: ``auto``, ``shared``, ``ring``, ``mpi``, ``naive`` are algorithms of ``kvmpi.collectives``; ``store`` is
``kv.pushpull`` on an ``mpi`` store; ``MPI_Allreduce`` is mpi4py's call; ``gloo`` is torch.distributed, when torch is
there; ``agree`` is the agreement alone, which every call of a store begins with. All rows copy: from one buffer into
another, except gloo's and those named ``NAME:in``, which sum in place; ``NAME:empty`` takes its input from where
``kv.empty`` does.

Every row is verified with rank-dependent integers before it is timed; a wrong element makes the exit status 1. The
time of an iteration is that of the slowest rank, after a barrier; rank 0 fixes the number of iterations. The rows of a
size take turns, so that a disturbance of the machine hits all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

import kvmpi
from kvmpi import arrays
from kvmpi.collectives import ALGORITHMS, Call, Collectives, Entry, arena, mpi_comm
from kvmpi.config import Config
from kvmpi.deadline import Deadline

WORLD = MPI.COMM_WORLD
ROUNDS = 5
WIDTHS = {
    "size_B": 11, "count": 10, "dtype": 9, "algo": 17, "ranks": 6, "t_min": 10, "t_p50": 10, "t_p99": 10, "t_max": 10,
    "algbw": 8, "busbw": 8, "iters": 7, "wrong": 6,
}  # fmt: skip
Row = dict[str, Any]


class Contestant:
    """One way to sum ``source`` over all ranks into ``out``."""

    name: str
    source: np.ndarray
    out: np.ndarray

    def __init__(self, name: str, count: int, dtype: str) -> None:
        self.name = name
        _, *how = name.split(":")
        self.source = arena.own().empty(count, arrays.DTYPES[dtype]) if "empty" in how else None
        if self.source is None:
            self.source = np.empty(count, arrays.DTYPES[dtype])
        self.source[:] = 0
        self.out = self.source if "in" in how else np.zeros(count, arrays.DTYPES[dtype])

    def run(self) -> None:
        raise NotImplementedError

    def wrong(self) -> int:
        """Elements, of all ranks, that one verified run gets wrong."""
        index = np.arange(self.source.size) % 11
        # Small integers, so that sums are exact in every dtype; they depend on the rank and on the index.
        self.source[...] = index + WORLD.rank % 4
        self.run()
        expected = WORLD.size * index + sum(rank % 4 for rank in range(WORLD.size))
        bad = int(np.count_nonzero(self.out != expected.astype(self.out.dtype)))
        self.source[...] = 0  # sums of sums in place would overflow
        return int(WORLD.allreduce(bad))

    def close(self) -> None:
        pass


class OurAlgorithm(Contestant):
    def __init__(self, name: str, count: int, dtype: str) -> None:
        super().__init__(name, count, dtype)
        self._comm = mpi_comm.world()
        chunk_bytes = Config.from_env().ring_chunk_bytes
        self._collectives = Collectives(self._comm, name.partition(":")[0], chunk_bytes)
        self._vectors, self._dtype = [arrays.read(self.source)], dtype

    def run(self) -> None:
        self._collectives.allreduce(self._vectors, self.out, self._dtype, Deadline(300.0), "benchmark")

    def close(self) -> None:
        self._comm.free()


class Agreement(Contestant):
    def __init__(self, name: str, count: int, dtype: str) -> None:
        super().__init__(name, 0, dtype)
        self._comm = mpi_comm.world()
        self._collectives = Collectives(self._comm)
        self._entries = (Entry("layer1.weight", (count,), dtype),)

    def run(self) -> None:
        self._collectives.agree(Call("pushpull", self._entries), Deadline(300.0))

    def close(self) -> None:
        self._comm.free()


class Store(Contestant):
    def __init__(self, name: str, count: int, dtype: str) -> None:
        super().__init__(name, count, dtype)
        self._kv = kvmpi.create("mpi")
        self._kv.init("x", self.source)

    def run(self) -> None:
        self._kv.pushpull("x", self.source, self.out)

    def close(self) -> None:
        self._kv.close()


class RawMpi(Contestant):
    def run(self) -> None:
        WORLD.Allreduce(MPI.IN_PLACE if self.out is self.source else self.source, self.out)


class Gloo(Contestant):
    def __init__(self, name: str, count: int, dtype: str) -> None:
        super().__init__(name, count, dtype)
        import torch

        self.out = self.source
        self._tensor = torch.from_numpy(self.source)

    def run(self) -> None:
        import torch.distributed

        torch.distributed.all_reduce(self._tensor)


KINDS: dict[str, type[Contestant]] = {
    **dict.fromkeys(ALGORITHMS, OurAlgorithm), "store": Store,
    "MPI_Allreduce": RawMpi, "gloo": Gloo, "agree": Agreement,
}  # fmt: skip


def start_gloo() -> bool:
    """Join a gloo process group of all ranks; False, on all of them, where torch is missing."""
    try:
        import torch
        import torch.distributed as dist
    except ImportError:
        torch = None
    if not WORLD.allreduce(int(torch is not None), MPI.MIN):
        return False
    torch.set_num_threads(1)
    if WORLD.rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, WORLD.size, is_master=True, wait_for_workers=False)
        WORLD.bcast(store.port)
    else:
        store = dist.TCPStore("127.0.0.1", WORLD.bcast(None), WORLD.size, is_master=False)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=store, rank=WORLD.rank, world_size=WORLD.size)
    return True


def timed(contestant: Contestant, iters: int) -> np.ndarray:
    """Seconds of each iteration on the slowest rank."""
    times_s = np.empty(iters)
    for i in range(iters):
        WORLD.Barrier()
        start_s = time.perf_counter()
        contestant.run()
        times_s[i] = time.perf_counter() - start_s
    WORLD.Allreduce(MPI.IN_PLACE, times_s, MPI.MAX)
    return times_s


def measure(names: list[str], count: int, dtype: str, seconds: float) -> Iterator[Row]:
    """The rows of one size."""
    contestants = [KINDS[name.partition(":")[0]](name, count, dtype) for name in names]
    wrong = [contestant.wrong() for contestant in contestants]
    latest_s = [timed(contestant, 5) for contestant in contestants]
    times_s: list[list[np.ndarray]] = [[] for _ in contestants]
    for _ in range(ROUNDS):
        for i, contestant in enumerate(contestants):
            wanted = seconds / ROUNDS / max(float(np.mean(latest_s[i])), 1e-6)
            iters = WORLD.bcast(int(min(1000, max(2, wanted))))
            timed(contestant, 1)  # the caches belong to the previous contestant
            latest_s[i] = timed(contestant, iters)
            times_s[i].append(latest_s[i])
    for i, contestant in enumerate(contestants):
        yield as_row(contestant, dtype, np.concatenate(times_s[i]), wrong[i])
        contestant.close()


def as_row(contestant: Contestant, dtype: str, times_s: np.ndarray, wrong: int) -> Row:
    low_s, p50_s, p99_s, high_s = (float(np.quantile(times_s, q)) for q in (0.0, 0.5, 0.99, 1.0))
    algbw = contestant.source.nbytes / p50_s / 1e9
    return {
        "size_B": contestant.source.nbytes, "count": contestant.source.size, "dtype": dtype, "algo": contestant.name,
        "ranks": WORLD.size, "t_min": 1e6 * low_s, "t_p50": 1e6 * p50_s, "t_p99": 1e6 * p99_s, "t_max": 1e6 * high_s,
        "algbw": algbw, "busbw": algbw * 2 * (WORLD.size - 1) / WORLD.size, "iters": times_s.size, "wrong": wrong,
    }  # fmt: skip


def as_line(row: Row) -> str:
    cells = []
    for name, width in WIDTHS.items():
        value = row[name]
        digits = 3 if name.endswith("bw") else 1
        cells.append(f"{value:>{width}.{digits}f}" if isinstance(value, float) else f"{value:>{width}}")
    return "".join(cells)


def environment() -> Row:
    """What a figure means nothing without."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    ).stdout.strip()
    names = ("FUNNELED", "SERIALIZED", "MULTIPLE")
    levels = {getattr(MPI, f"THREAD_{name}"): name for name in names}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "host": platform.node(),
        "cores": cores,
        "mpi": MPI.Get_library_version().splitlines()[0].strip("\0 ").partition(", package")[0],
        "thread_level": levels.get(MPI.Query_thread(), "SINGLE"),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "kvmpi": kvmpi.__version__,
        "commit": commit,
        "chunk_B": Config.from_env().ring_chunk_bytes,
    }


def in_bytes(text: str) -> int:
    """``64K`` -> 65536; K, M and G are powers of 1024."""
    scale = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:].upper(), 1)
    return int(text if scale == 1 else text[:-1]) * scale


def main() -> int:
    parser = argparse.ArgumentParser(description="how fast sums over workers are")
    parser.add_argument("--sizes", default="4K,64K,1M,16M,64M", help="bytes of a rank's buffer, e.g. 0,4K,1M")
    parser.add_argument("--algorithms", default="auto,shared,ring,mpi,store,MPI_Allreduce,gloo", help="rows, see above")
    parser.add_argument("--dtype", default="float32", choices=list(arrays.DTYPES))
    parser.add_argument("--seconds", type=float, default=0.5, help="time for one row")
    parser.add_argument("--json", metavar="FILE", help="append one JSON line per row to this file")
    args = parser.parse_args()
    names = args.algorithms.split(",")
    if unknown := [name for name in names if name.partition(":")[0] not in KINDS]:
        parser.error(f"unknown algorithm {', '.join(unknown)}; known: {', '.join(KINDS)}")
    if args.dtype == "bfloat16":
        parser.error("bfloat16 cannot be verified with NumPy; use float16")
    itemsize = arrays.DTYPES[args.dtype].itemsize
    if args.dtype == "float16":
        names = [name for name in names if name != "MPI_Allreduce"]  # not every MPI has a 2-byte float
    if "gloo" in names and not start_gloo():
        names.remove("gloo")
    about = environment()
    first = WORLD.rank == 0
    if first:
        print("# " + ", ".join(f"{name} {value}" for name, value in about.items()))
        print("# times in us, of the slowest rank; GB is 10^9 bytes; algbw = S/t_p50, busbw = algbw*2(n-1)/n")
        print("".join(f"{name:>{width}}" for name, width in WIDTHS.items()), flush=True)
    wrong = 0
    for size in map(in_bytes, args.sizes.split(",")):
        for row in measure(names, size // itemsize, args.dtype, args.seconds):
            wrong += row["wrong"]
            if first:
                print(as_line(row), flush=True)
                if args.json:
                    with open(args.json, "a") as file:
                        file.write(json.dumps({**row, **about}) + "\n")
    if "gloo" in names:
        import torch.distributed

        torch.distributed.destroy_process_group()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
