"""Inputs that depend on rank and index, and sums of them computed without the code under test."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvmpi.arrays import DTYPES, Vector
from kvmpi.collectives import Collectives, Comm
from kvmpi.collectives.cross_memory import Source
from kvmpi.deadline import Deadline

Array = npt.NDArray[Any]

SEED = 17
FLOATS = ("float32", "float64", "float16", "bfloat16")
#: Spacing of the numbers next to 1, which np.finfo knows for all but one of them.
EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


def to_bfloat16(values: Array) -> Array:
    """The bits of float32 values that have at most 8 significant bits; others would have to be rounded."""
    bits = values.astype("f4").view("u4")
    assert not (bits & 0xFFFF).any(), "not a bfloat16 value"
    return (bits >> 16).astype("u2")


def to_float64(buffer: Array, dtype: str) -> Array:
    """What a buffer in storage dtype holds."""
    if dtype == "bfloat16":
        return (buffer.astype("u4") << 16).view("f4").astype("f8")
    return buffer.astype("f8")


def vectors(rank: int, num_vectors: int, count: int, dtype: str) -> list[Array]:
    """This rank's vectors, the same in every call; floats with all their bits in use, integers of their whole range."""
    found = (_kept if count <= _KEPT_TO else _made)(rank, num_vectors, count, dtype)
    return [vector.copy() for vector in found]


def _made(rank: int, num_vectors: int, count: int, dtype: str) -> list[Array]:
    rng = np.random.default_rng([SEED, rank, num_vectors, count])
    found = []
    for _ in range(num_vectors):
        if dtype == "bfloat16":
            found.append((rng.standard_normal(count).astype("f4").view("u4") >> 16).astype("u2"))
        elif dtype in FLOATS:
            found.append(rng.standard_normal(count).astype(dtype))
        else:
            span = np.iinfo(dtype)
            found.append(rng.integers(span.min, span.max, count, dtype=dtype, endpoint=True))
    return found


#: Vectors up to so many elements are made once for all that ask for them: to make them takes as long as to sum them.
_KEPT_TO = 2000
_kept = functools.lru_cache(maxsize=1000)(_made)


def all_vectors(size: int, num_vectors: int, count: int, dtype: str) -> list[Array]:
    """The vectors of all ranks, in rank order."""
    return [vector for rank in range(size) for vector in vectors(rank, num_vectors, count, dtype)]


def assert_is_sum(out: Array, terms: list[Array], dtype: str, scale: float = 1.0) -> None:
    """Floats: within the rounding of so many additions and of the result. Integers: exact, wrapping around.

    Of floats it is the sum times ``scale``, which costs another rounding, and one of ``scale`` itself.
    """
    if dtype not in FLOATS:
        with np.errstate(over="ignore"):
            np.testing.assert_array_equal(out, np.sum(terms, axis=0, dtype=dtype))
        return
    wide = np.array([to_float64(term, dtype) for term in terms])
    exact, magnitude = scale * wide.sum(axis=0), abs(scale) * np.abs(wide).sum(axis=0)
    adding = EPS["float64" if dtype == "float64" else "float32"] / 2
    # An addition errs by half a unit of a partial sum, which is at most the sum of magnitudes. The oracle adds too.
    bound = (len(terms) - 1) * (adding + EPS["float64"]) * magnitude
    if scale != 1.0:
        bound = bound + 2 * (adding + EPS["float64"]) * (np.abs(exact) + bound)
    if dtype in ("float16", "bfloat16"):
        smallest = {"float16": 2.0**-25, "bfloat16": 0.0}[dtype]
        bound = bound + EPS[dtype] / 2 * (np.abs(exact) + bound) + smallest
    error = np.abs(to_float64(out, dtype) - exact)
    worst = int(np.argmax(error - bound)) if out.size else 0
    assert (error <= bound).all(), f"element {worst}: error {error[worst]}, bound {bound[worst]} (seed {SEED})"


def on_host(buffers: list[Array], dtype: str) -> list[Vector]:
    assert all(buffer.dtype == DTYPES[dtype] for buffer in buffers)
    return [Vector(buffer, dtype, "cpu", True) for buffer in buffers]


def allreduce(
    comm: Comm, algorithm: str, own: list[Array], dtype: str, *, in_place: bool = False, chunk_bytes: int = 256 << 10,
    timeout_s: float = 20.0, **settings: Any,
) -> Array:  # fmt: skip
    """Sum ``own`` over all ranks; the inputs must survive, but for the first one if ``in_place``."""
    before = [vector.copy() for vector in own]
    out = own[0] if in_place else np.full_like(own[0], 77)
    collectives = Collectives(comm, algorithm, chunk_bytes, **settings)
    collectives.allreduce(on_host(own, dtype), out, dtype, Deadline(timeout_s), "test")
    for i, (vector, old) in enumerate(zip(own, before, strict=True)):
        if not (in_place and i == 0):
            np.testing.assert_array_equal(vector, old, err_msg=f"vector {i} of rank {comm.rank} was changed")
    return out


def at_once(check: Callable[..., object], cases: Sequence[tuple[Any, ...]]) -> None:
    """``check(*case)`` of all cases, side by side: most of them wait until time is over. The first failure says which
    case it is of."""
    with ThreadPoolExecutor(len(cases)) as threads:
        running = [(case, threads.submit(check, *case)) for case in cases]
    for case, done in running:
        if error := done.exception():
            raise AssertionError(f"case {case}: {error}") from error


class Contribution(NamedTuple):
    """``native.Terms``."""

    sources: Sequence[Source]
    dtype: str = "float32"
    sum_dtype: np.dtype[Any] = DTYPES["float32"]
    scale: float = 1.0
