"""Run under mpirun by ``test_gpu_jobs.py``: every algorithm of the collectives on vectors of a device, over a real MPI.

    gpu_checks.py sums [CHECK...]        gpu_checks.py one_host        gpu_checks.py absent

All ranks share one card, and several vectors on it stand for several devices. ``DEVICE=cpu``: on the host.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from collective_helpers import FLOATS, all_vectors, assert_is_sum, on_host, vectors
from device_checks import ON_GPU, Checks, one_host_for_each, placed
from mpi4py import MPI

from kvmpi.arrays import DTYPES, Vector
from kvmpi.collectives import Collectives, mpi_comm
from kvmpi.collectives.schedule import segment_bounds
from kvmpi.collectives.selection import ALGORITHMS
from kvmpi.deadline import Deadline
from kvmpi.errors import KVTimeoutError, UnsupportedError

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
TIMEOUT_S = 20.0
USED = [name for name in ALGORITHMS if ON_GPU or name != "nccl"]
MIDDLE = 1013

#: count, vectors, dtype, placement; each with every algorithm.
CASES = [
    *[(count, n, "float32", where) for count in (0, 1, MIDDLE) for n in (1, 2, 8) for where in ("device", "mixed")],
    *[(MIDDLE, n, dtype, where) for dtype in DTYPES for n, where in ((1, "device"), (3, "mixed"))],
    (MIDDLE, 8, "bfloat16", "device"),
    (300_007, 1, "float32", "device"),
    (300_007, 2, "bfloat16", "device"),
    (300_007, 8, "float32", "device"),
    (300_007, 8, "float32", "mixed"),
]
LARGE = 5_000_011


def tensor(own: list[np.ndarray], dtype: str, where: str) -> list[Vector]:
    """All on the device, at odd places in memory; or every other one on the host, beginning with the first."""
    if where == "device":
        return [placed(vector, dtype, i % 3) for i, vector in enumerate(own)]
    return [placed(v, dtype) if i % 2 else on_host([v.copy()], dtype)[0] for i, v in enumerate(own)]


def on_the_host(vector: Vector) -> np.ndarray:
    return vector.buffer if vector.on_host else vector.buffer.get()


def unchanged(sources: list[Vector], own: list[np.ndarray], what: str, but: Any = None) -> None:
    for i, (source, old) in enumerate(zip(sources, own, strict=True)):
        if source is not but:
            np.testing.assert_array_equal(on_the_host(source), old, err_msg=f"vector {i} of {what} was changed")


@functools.lru_cache(maxsize=4)
def terms(num_vectors: int, count: int, dtype: str) -> list[np.ndarray]:
    return all_vectors(SIZE, num_vectors, count, dtype)


class Bits:
    """What this rank has got in one check: the same on all ranks, and right, as rank 0 finds out."""

    def __init__(self) -> None:
        self._digest, self._wrong = hashlib.sha256(), []

    def add(self, out: np.ndarray, num_vectors: int, dtype: str, what: str, scale: float = 1.0) -> None:
        self._digest.update(out.tobytes())
        if RANK == 0:
            self.note(lambda: assert_is_sum(out, terms(num_vectors, out.size, dtype), dtype, scale), what)

    def note(self, check: Callable[[], None], what: str) -> None:
        """Failures are kept, so that all ranks make the same calls."""
        try:
            check()
        except AssertionError as error:
            self._wrong.append(f"{what}: {error}")

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()

    def check(self) -> None:
        assert not self._wrong, f"{len(self._wrong)} wrong: " + "\n".join(self._wrong[:5])


def together(check: Callable[..., Bits | None]) -> Callable[..., None]:
    """``check`` on all ranks, which compare what they have got; all are in step then, also where one has failed."""

    @functools.wraps(check)
    def run(*arguments: str) -> None:
        error: Exception | None = None
        digest = ""
        try:
            bits = check(*arguments)
            digest = bits.digest if bits is not None else ""
            if bits is not None:
                bits.check()
        except Exception as caught:
            error = caught
        found = WORLD.allgather((error is None, digest))
        if not all(right for right, _ in found):
            _made.clear()
        if error is not None:
            raise error
        assert len({mine for right, mine in found if right}) == 1, f"ranks got different bits: {found}"

    return run


_made: dict[str, list[Collectives]] = {}


def collectives_of(algorithm: str) -> list[Collectives]:
    """With small chunks, and as it comes. Those of the check before, unless that has failed on a rank."""
    if algorithm not in _made:
        _made[algorithm] = [
            Collectives(mpi_comm.world(TIMEOUT_S), algorithm, chunk_bytes, num_rings=3) for chunk_bytes in (512, 0)
        ]
    return _made[algorithm]


def deadline() -> Deadline:
    return Deadline(TIMEOUT_S)


@together
def sums(algorithm: str) -> Bits:
    small, usual = collectives_of(algorithm)
    bits = Bits()
    for count, num_vectors, dtype, where in CASES:
        what = f"{algorithm}: {num_vectors} x {count} {dtype}, {where}"
        own = vectors(RANK, num_vectors, count, dtype)
        sources, out = tensor(own, dtype, where), np.full(count, 77, DTYPES[dtype])
        chosen = usual if count > MIDDLE else small
        chosen.allreduce(sources, out, dtype, deadline(), what)
        bits.add(out, num_vectors, dtype, what)
        bits.note(functools.partial(unchanged, sources, own, what), what)
        if where == "mixed":  # the first one is on the host: in place
            out = sources[0].buffer
            chosen.allreduce(sources, out, dtype, deadline(), what)
            bits.add(out, num_vectors, dtype, f"{what}, in place")
            bits.note(functools.partial(unchanged, sources, own, what, but=sources[0]), what)
    return bits


@together
def large_sums(algorithm: str) -> Bits:
    """20 MB: the sums are exact. Then again, into the same memory and from the same, as in the steps of training."""
    _, collectives = collectives_of(algorithm)
    index = np.arange(LARGE, dtype="f4") % 1000
    out, bits = np.empty(LARGE, "f4"), Bits()
    sources = tensor([index + RANK, index + 2 * RANK], "float32", "device")
    for step in range(3):
        expected = 2 * SIZE * (index + step) + 3 * sum(range(SIZE))
        collectives.allreduce(sources, out, "float32", deadline(), f"{algorithm}: large")
        same = bool((out == expected).all())
        bits.note(lambda same=same, step=step: _true(same, f"{algorithm}, step {step}: wrong"), "large")
        for source in sources:
            source.buffer[...] += 1
            sync()
    return bits


def sync() -> None:
    if ON_GPU:
        import cupy

        cupy.cuda.get_current_stream().synchronize()


def _true(found: bool, what: str) -> None:
    assert found, what


@together
def scatters(algorithm: str) -> Bits:
    """And what the ranks have is gathered again, from and into host memory."""
    small, usual = collectives_of(algorithm)
    bits = Bits()
    shapes = [(0, 1), (1, 1), (MIDDLE, 2), (MIDDLE, 3), (300_007, 2)]
    for dtype in ("float32", "bfloat16", "float64", "int8", "int16"):
        for count, num_vectors in shapes if dtype == "float32" else shapes[2:4]:
            for where in ("device", "mixed"):
                for scale in (1.0, 1 / 3) if dtype in FLOATS and count == MIDDLE else (1.0,):
                    what = f"{algorithm}: scatter {num_vectors} x {count} {dtype}, {where}, scale {scale}"
                    start, stop = segment_bounds(count, SIZE)[RANK]
                    own = vectors(RANK, num_vectors, count, dtype)
                    sources, whole = tensor(own, dtype, where), np.full(count, 77, DTYPES[dtype])
                    in_place = where == "mixed" and num_vectors > 2
                    part = sources[0].buffer[start:stop] if in_place else np.empty(stop - start, DTYPES[dtype])
                    chosen = usual if count > MIDDLE else small
                    chosen.reduce_scatter(sources, part, dtype, deadline(), what, scale)
                    mine = sources[0] if in_place else None
                    bits.note(functools.partial(unchanged, sources, own, what, but=mine), what)
                    if num_vectors == 2:
                        whole[start:stop] = part
                        part = whole[start:stop]
                    chosen.allgather(part, whole, deadline(), what)
                    bits.add(whole, num_vectors, dtype, what, scale)
    return bits


@together
def broadcasts(algorithm: str) -> Bits:
    small, usual = collectives_of(algorithm)
    bits = Bits()
    for root in range(SIZE):
        for count, dtype in ((0, "float32"), (1, "int8"), (MIDDLE, "bfloat16"), (300_007, "float64")):
            buffer = vectors(RANK, 1, count, dtype)[0]
            (usual if count > MIDDLE else small).broadcast(buffer, root, deadline(), f"{algorithm}: cast from {root}")
            expected = vectors(root, 1, count, dtype)[0]
            bits.note(functools.partial(np.testing.assert_array_equal, buffer, expected), f"cast {count} from {root}")
    return bits


@together
def many_tensors(algorithm: str) -> Bits:
    """Of different lengths in one call, with copies of the results, and scaled."""
    small, usual = collectives_of(algorithm)
    bits = Bits()
    shapes = [(MIDDLE, 2, "device", 1), (0, 1, "device", 0), (5, 3, "mixed", 2), (70_001, 1, "device", 1)]
    for dtype in ("float32", "bfloat16", "float16", "float64", "int32"):
        for scale in (1.0, 1 / 3) if dtype in FLOATS else (1.0,):
            what = f"{algorithm}: many {dtype}, scale {scale}"
            owns = [vectors(RANK, num_vectors, count, dtype) for count, num_vectors, _, _ in shapes]
            given = [tensor(own, dtype, where) for own, (_, _, where, _) in zip(owns, shapes, strict=True)]
            outs = [np.full(count, 77, DTYPES[dtype]) for count, _, _, _ in shapes]
            copies = [[np.full(count, 78, DTYPES[dtype]) for _ in range(n)] for count, _, _, n in shapes]
            for chosen, some in ((small, slice(0, 3)), (usual, slice(0, 4)), (usual, slice(0, 1))):
                tensors = list(zip(given, outs, copies, strict=True))[some]
                chosen.allreduce_many(tensors, dtype, deadline(), what, scale)
                for (sources, out, others), own in zip(tensors, owns, strict=False):
                    bits.add(out, len(sources), dtype, f"{what}, {out.size}", scale)
                    bits.note(functools.partial(unchanged, sources, own, what), what)
                    for other in others:
                        bits.note(functools.partial(np.testing.assert_array_equal, other, out), f"{what}, a copy")
                        other[...] = 78
                    out[...] = 77
    return bits


@together
def turns() -> Bits:
    """Algorithms one after the other on one communicator, host and device in turn, with steady results."""
    comm = mpi_comm.world(TIMEOUT_S)
    made = {name: Collectives(comm, name) for name in USED}
    bits = Bits()
    for turn in range(3):
        for name, collectives in made.items():
            own = vectors(RANK, 2, MIDDLE + turn, "float32")
            sources = tensor(own, "float32", "device") if turn % 2 == 0 else on_host(own, "float32")
            out = np.empty(MIDDLE + turn, "f4")
            collectives.allreduce(sources, out, "float32", deadline(), name)
            bits.add(out, 2, "float32", f"{name}, turn {turn}")
    return bits


# ---- what nccl says when it cannot be used


@together
def refusals() -> None:
    """Two ranks on one GPU of one host: every rank hears which they are, each time, and other algorithms go on."""
    comm = mpi_comm.world(TIMEOUT_S)
    nccl = Collectives(comm, "nccl")
    for _ in range(2):
        own = vectors(RANK, 1, MIDDLE, "float32")
        sources, out = tensor(own, "float32", "device"), np.empty(MIDDLE, "f4")
        with pytest.raises(UnsupportedError) as caught:
            nccl.allreduce(sources, out, "float32", deadline(), "push of key 1")
        text = str(caught.value)
        assert "push of key 1" in text, text
        assert "GPU" in text, text
        assert {"0", "1"} <= set(re.findall(r"\d+", text.replace("key 1", ""))), f"both ranks are not named: {text}"
    own, out = vectors(RANK, 1, MIDDLE, "float32"), np.empty(MIDDLE, "f4")
    ring = Collectives(mpi_comm.world(TIMEOUT_S), "ring")
    ring.allreduce(tensor(own, "float32", "device"), out, "float32", deadline(), "ring")
    assert_is_sum(out, terms(1, MIDDLE, "float32"), "float32")


def absence() -> None:
    """The last rank does not come: a timeout on all others in time, and an error at once from there on."""
    collectives, timeout_s = Collectives(mpi_comm.world(TIMEOUT_S), "nccl" if ON_GPU else "ring"), 2.0
    own, out = vectors(RANK, 1, 300_007, "float32"), np.empty(300_007, "f4")
    sources = tensor(own, "float32", "device")
    collectives.allreduce(sources, out, "float32", deadline(), "first")
    assert_is_sum(out, terms(1, 300_007, "float32"), "float32")
    WORLD.Barrier()
    if RANK == SIZE - 1:
        time.sleep(2 * timeout_s + 1)
        return
    start_s = time.monotonic()
    with pytest.raises(KVTimeoutError, match="push of key 7"):
        collectives.allreduce(sources, out, "float32", Deadline(timeout_s), "push of key 7")
    took_s = time.monotonic() - start_s
    assert timeout_s * 0.9 <= took_s <= 2 * timeout_s, f"after {took_s:.1f} s"
    assert collectives.broken
    unchanged(sources, own, "what was to be summed")


def main(what: str, only: list[str]) -> int:
    if what != "one_host":
        one_host_for_each()
    checks = Checks(only, f"rank {RANK}: ")
    if what == "one_host":
        checks.run(refusals)
    elif what == "absent":
        checks.run(absence)
    else:
        for algorithm in USED:
            for check in (sums, large_sums, scatters, broadcasts, many_tensors):
                checks.run(check, algorithm)
        checks.run(turns)
    return checks.finish()


if __name__ == "__main__":
    try:
        failed = main(sys.argv[1], sys.argv[2:])
    except BaseException:
        sys.stdout.write(f"rank {RANK} of {SIZE}:\n{traceback.format_exc()}")
        sys.stdout.flush()
        WORLD.Abort(1)
    # All have said what they had to. In good order MPI ends only when all its messages have come.
    if WORLD.allreduce(failed, MPI.MAX):
        WORLD.Abort(1)
    if sys.argv[1] == "absent":
        os._exit(0)
