"""Values for kernels, and what their sums have to be."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path

import numpy as np

from kvmpi.kernels import host

DTYPES = list(host.STORAGE)
FLOATS = ["float32", "float64", "float16", "bfloat16"]
SIZES = [0, 1, 3, 7, 8, 9, 15, 16, 17, 1001, 20_011]
SOURCE = Path(host.__file__).with_name("vector_sum.cu")
NVCC = shutil.which("nvcc") or next(map(str, Path("/usr/local").glob("cuda*/bin/nvcc")), None)

#: dtype -> bits of the exponent, their shift, and the exponent of 1
EXPONENT = {
    "float32": (0x7F800000, 23, 127),
    "float64": (0x7FF << 52, 52, 1023),
    "float16": (0x7C00, 10, 15),
    "bfloat16": (0x7F80, 7, 127),
}


def device_count() -> int:
    try:
        import cupy

        return cupy.cuda.runtime.getDeviceCount()
    except Exception:  # no CuPy, no driver or no device: all the same to a test that needs one
        return 0


# Values


def unsigned(vector: np.ndarray) -> np.ndarray:
    return vector.view(f"u{vector.itemsize}")


def random_vector(dtype: str, count: int, seed: int) -> np.ndarray:
    """Random bits; for floats one half of them near 1, one quarter subnormal, and so NaN and infinity in the rest."""
    return (_kept if count <= max(SIZES) else _made)(dtype, count, seed).copy()


def _made(dtype: str, count: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng([29, seed, count])
    vector = np.empty(count, host.STORAGE[dtype])
    bits = unsigned(vector)
    bits[:] = rng.integers(0, np.iinfo(bits.dtype).max, count, bits.dtype, endpoint=True)
    if dtype in FLOATS:
        mask, shift, one = (bits.dtype.type(value) for value in EXPONENT[dtype])
        kind = np.arange(count) % 4
        bits[kind > 0] &= ~mask
        near = rng.integers(0, 4, count).astype(bits.dtype) + one - bits.dtype.type(2)
        bits[kind > 1] |= (near << shift)[kind > 1]
    return vector


#: To make a small vector takes as long as to sum it.
_kept = functools.lru_cache(maxsize=300)(_made)


def oracle(sources: list[np.ndarray], dtype: str, scale: float = 1.0, wide: bool = False) -> np.ndarray:
    """The sum by ``kernels.host``; a scaled or unrounded one by NumPy in the dtype of partial sums."""
    out = host.empty(sources[0].size, dtype)
    if scale == 1 and not wide:
        host.sum_vectors(out, sources, dtype)
        return out
    if dtype in host.HALF:
        widened = [np.empty(src.size, "f4") for src in sources]
        for src, to in zip(sources, widened, strict=True):
            host.widen(src, dtype, to)
        sources = widened
    with np.errstate(all="ignore"):
        total = sources[0].copy()
        for src in sources[1:]:
            total += src
        total *= total.dtype.type(scale)
    if wide or dtype not in host.HALF:
        return total
    host.narrow(total, out, dtype)
    return out


def assert_same_bits(out: np.ndarray, expected: np.ndarray, what: object) -> None:
    """Bit for bit, but for the NaNs of float32 and float64: whichever they are."""
    assert out.dtype == expected.dtype
    bits, wanted = unsigned(out).copy(), unsigned(expected).copy()
    if out.dtype.kind == "f" and out.itemsize > 2:
        np.testing.assert_array_equal(np.isnan(out), np.isnan(expected), err_msg=str(what))
        bits[np.isnan(out)] = wanted[np.isnan(out)] = 0
    np.testing.assert_array_equal(bits, wanted, err_msg=str(what))


def place(cupy, vector: np.ndarray, offset: int = 0):
    """The vector on the current device, ``offset`` elements from the start of its memory."""
    return cupy.asarray(np.concatenate([np.zeros(offset, vector.dtype), vector]))[offset:]


def check_sum(cuda, dtype: str, count: int, offsets: list[int], to: int = 0, scale: float = 1.0, wide=False) -> None:
    """Sum as many vectors as there are offsets into the middle of pinned memory, and look at what is around it."""
    gpu, cupy = cuda
    sources = [random_vector(dtype, count, seed) for seed in range(len(offsets))]
    on_device = [place(cupy, src, offset) for src, offset in zip(sources, offsets, strict=True)]
    memory = gpu.pinned_empty(count + to + 5, "float32" if wide else dtype)
    unsigned(memory)[:] = 77
    gpu.start_sum(memory[to : to + count], on_device, dtype, scale=scale).wait()
    what = f"{len(offsets)} x {count} {dtype}, offsets {offsets} to {to}, scale {scale}"
    assert_same_bits(memory[to : to + count], oracle(sources, dtype, scale, wide), what)
    assert (unsigned(memory)[:to] == 77).all(), what
    assert (unsigned(memory)[to + count :] == 77).all(), what
