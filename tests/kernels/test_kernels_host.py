"""Host kernels against float64 and torch as oracles, over every half-precision bit pattern and every rounding tie."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
from jobs import HANGS_S

from kvmpi.errors import DTypeMismatchError, ShapeMismatchError
from kvmpi.kernels import host

try:
    import torch
except ImportError:
    torch = None

needs_torch = pytest.mark.skipif(torch is None, reason="needs torch")

INTEGERS = ["int8", "int16", "int32", "int64", "uint8"]
SIZES = [0, 1, 2, 7, 1000, 4097]
TINY_BLOCK_BYTES = 256


@pytest.fixture(params=["compiled", "numpy"])
def backend(request, monkeypatch):
    """Run a test once with compiled conversions, and once as where there is no compiler."""
    assert host._halves is not None, "they are not built: python setup.py build_ext --inplace"
    if request.param == "numpy":
        monkeypatch.setattr(host, "_halves", None)
    return request.param


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(host, "BLOCK_BYTES", TINY_BLOCK_BYTES)


def to_float64(vector: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "bfloat16":
        with np.errstate(invalid="ignore"):  # signalling NaNs
            return (vector.astype("u4") << 16).view("f4").astype("f8")
    return vector.astype("f8")


def round_to(exact: np.ndarray, dtype: str) -> np.ndarray:
    """float32 or float64 -> half type by searching the table of all its finite values: slow and obvious."""
    width = 0x7F80 if dtype == "bfloat16" else 0x7C00  # the bits of infinity
    table = to_float64(np.arange(width, dtype="u2").view(host.STORAGE[dtype]), dtype)
    step = table[-1] - table[-2]
    table = np.append(table, table[-1] + step)  # what infinity would be if the exponent went on
    size = np.abs(exact.astype("f8"))
    high = np.searchsorted(table, size).clip(1, width)
    low = high - 1
    below, above = size - table[low], table[high] - size
    bits = np.where((above < below) | ((above == below) & (high % 2 == 0)), high, low)
    bits = np.where(size == 0, 0, np.where(np.isinf(size), width, bits))
    return (bits | np.where(np.signbit(exact), 0x8000, 0)).astype("u2").view(host.STORAGE[dtype])


def random_vector(dtype: str, count: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng([23, seed, count])
    if dtype in INTEGERS:
        limits = np.iinfo(dtype)
        return rng.integers(limits.min, limits.max, count, dtype=dtype, endpoint=True)
    values = rng.standard_normal(count) * 10.0 ** rng.integers(-3, 3, count)
    return round_to(values, dtype) if dtype in host.HALF else values.astype(dtype)


def ties(dtype: str) -> np.ndarray:
    """Every finite half value, every midpoint of two neighbours, and the float32 next to each midpoint; both signs."""
    width = 0x7F80 if dtype == "bfloat16" else 0x7C00
    values = to_float64(np.arange(width, dtype="u2").view(host.STORAGE[dtype]), dtype)
    values = np.append(values, 2 * values[-1] - values[-2])
    middles = ((values[1:] + values[:-1]) / 2).astype("f4")
    assert (middles.astype("f8") == (values[1:] + values[:-1]) / 2).all()
    up, down = np.nextafter(middles, np.float32(np.inf)), np.nextafter(middles, np.float32(0))
    positive = np.concatenate([values[:-1].astype("f4"), middles, up, down])
    specials = np.array([np.inf, 1e-45, 1e-40, 65504, 65519.996, 65520, 3.4028235e38], "f4")
    both = np.concatenate([positive, specials])
    return np.concatenate([both, -both])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_widen_is_exact_for_every_bit_pattern(backend, dtype):
    bits = np.arange(1 << 16, dtype="u2")
    src = bits.view(host.STORAGE[dtype])
    out = np.full(src.size, 7, "f4")
    host.widen(src, dtype, out)
    exact = to_float64(src, dtype)
    nan = np.isnan(exact)
    np.testing.assert_array_equal(out[~nan].astype("f8"), exact[~nan])
    np.testing.assert_array_equal(np.signbit(out), bits >= 0x8000)
    assert np.isnan(out[nan]).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_rounds_every_tie_to_even(backend, dtype):
    src = ties(dtype)
    out = host.empty(src.size, dtype)
    host.narrow(src, out, dtype)
    np.testing.assert_array_equal(out.view("u2"), round_to(src, dtype).view("u2"))


@needs_torch
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_random_bits_as_torch_does(backend, dtype):
    src = np.random.default_rng(5).integers(0, 1 << 32, 200_001, dtype="u4").view("f4")
    out = host.empty(src.size, dtype)
    host.narrow(src, out, dtype)
    oracle = torch.from_numpy(src).to(getattr(torch, dtype)).view(torch.int16).numpy().view("u2")
    nan = np.isnan(src)
    assert nan.any()
    np.testing.assert_array_equal(out.view("u2")[~nan], oracle[~nan])
    assert set(out.view("u2")[nan]) == {0x7FC0 if dtype == "bfloat16" else 0x7E00}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("count", SIZES)
def test_round_trip_returns_the_bits(backend, small_blocks, dtype, count):
    src = random_vector(dtype, count, 0)
    wide, back = np.empty(count, "f4"), host.empty(count, dtype)
    host.widen(src, dtype, wide)
    host.narrow(wide, back, dtype)
    np.testing.assert_array_equal(back.view("u2"), src.view("u2"))


def test_bits_do_not_depend_on_what_is_compiled(monkeypatch):
    """Conversions, NaNs of every kind included, and sums: once compiled, once by NumPy."""

    def results() -> list[np.ndarray]:
        found = []
        noise = np.random.default_rng(9).integers(0, 1 << 32, 100_003, dtype="u4").view("f4")
        for dtype in ("float16", "bfloat16"):
            every = np.arange(1 << 16, dtype="u2").view(host.STORAGE[dtype])
            wide, half, total = np.empty(1 << 16, "f4"), host.empty(noise.size, dtype), host.empty(1 << 16, dtype)
            host.widen(every, dtype, wide)
            host.narrow(noise, half, dtype)
            host.sum_vectors(total, [every, every[::-1].copy(), every], dtype)
            found += [wide.view("u4"), half.view("u2"), total.view("u2")]
        return found

    compiled = results()
    monkeypatch.setattr(host, "_halves", None)
    for a, b in zip(compiled, results(), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", ["widen", "narrow"])
def test_compiled_conversions_look_at_lengths(name):
    convert = getattr(host._halves, name)
    sizes = (4, 2) if name == "widen" else (2, 4)
    for kind, into, source in (("e", 3, 4), ("y", 5, 4), ("f", 4, 4), ("q", 0, 0)):
        memory = bytearray(into * sizes[0])
        with pytest.raises(ValueError, match="expected a half type and vectors of one length"):
            convert(kind, memory, bytes(source * sizes[1]))
        assert not any(memory)
    with pytest.raises(ValueError, match="expected a half type"):
        convert("e", bytearray(4), bytes(3))
    with pytest.raises(TypeError, match="bytes"):
        convert("e", bytes(4), bytes(4))  # cannot be written


def test_float16_from_read_only_memory_does_not_warn(backend, recwarn):
    src = np.frombuffer(np.arange(100, dtype="f2").tobytes(), "f2")
    out = np.empty(100, "f4")
    host.widen(src, "float16", out)
    np.testing.assert_array_equal(out, np.arange(100))
    assert not recwarn.list


def test_narrow_does_not_warn_or_raise_on_overflow(backend):
    out = host.empty(3, "float16")
    with np.errstate(all="raise"):
        host.narrow(np.array([1e30, -1e30, 1e-30], "f4"), out, "float16")
    np.testing.assert_array_equal(out, np.array([np.inf, -np.inf, 0], "f2"))


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("num_sources", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", list(host.STORAGE))
def test_sum_vectors(small_blocks, dtype, num_sources, count):
    sources = [random_vector(dtype, count, rank) for rank in range(num_sources)]
    before = [src.copy() for src in sources]
    dst = host.empty(count, dtype)
    host.sum_vectors(dst, sources, dtype)
    for src, was in zip(sources, before, strict=True):
        np.testing.assert_array_equal(src, was)
    if dtype in INTEGERS:
        wrapped = sum(int_array.astype(object) for int_array in sources)
        limits = np.iinfo(dtype)
        exact = (wrapped - limits.min) % (1 << limits.bits) + limits.min
        np.testing.assert_array_equal(dst.astype(object), exact)
        return
    wide = [to_float64(src, dtype) for src in sources]
    exact, size = np.sum(wide, axis=0), np.sum(np.abs(wide), axis=0)
    if dtype in host.HALF and num_sources > 1:  # float32 on the way, one rounding at the end
        ulp = 2.0**-8 if dtype == "bfloat16" else 2.0**-11
        bound = ulp * np.abs(exact) + num_sources * 2.0**-23 * size + 2.0**-24
    else:
        bound = (num_sources - 1) * np.finfo(host.STORAGE[dtype] if dtype not in host.HALF else "f4").eps * size
    assert (np.abs(to_float64(dst, dtype) - exact) <= bound).all()


@pytest.mark.parametrize("dtype", list(host.STORAGE))
@pytest.mark.parametrize("position", [0, 1, 2, 3])
def test_sum_vectors_into_one_of_the_sources(small_blocks, dtype, position):
    sources = [random_vector(dtype, 1001, rank) for rank in range(4)]
    expected = host.empty(1001, dtype)
    host.sum_vectors(expected, [src.copy() for src in sources], dtype)
    host.sum_vectors(sources[position], sources, dtype)
    np.testing.assert_array_equal(sources[position], expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_one_array_several_times(small_blocks, dtype):
    src = random_vector("int8", 1001, 0).astype("f4")
    if dtype != "float32":
        src = round_to(src, dtype) if dtype in host.HALF else src.astype(dtype)
    expected = host.empty(1001, dtype)
    host.sum_vectors(expected, [src.copy(), src.copy(), src.copy()], dtype)
    host.sum_vectors(src, [src, src, src], dtype)
    np.testing.assert_array_equal(src, expected)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_types_round_once(dtype):
    """1 + u/2 + u/2 is 1 when every addition rounds, and 1 + u when only the sum does; u is the spacing above 1."""
    spacing = 2.0**-7 if dtype == "bfloat16" else 2.0**-10
    one, half_spacing = (round_to(np.full(3, value), dtype) for value in (1.0, spacing / 2))
    dst = host.empty(3, dtype)
    host.sum_vectors(dst, [one, half_spacing, half_spacing], dtype)
    np.testing.assert_array_equal(to_float64(dst, dtype), 1 + spacing)


@pytest.mark.parametrize("dtype", list(host.STORAGE))
def test_add_into(small_blocks, dtype):
    dst, src = random_vector(dtype, 333, 0), random_vector(dtype, 333, 1)
    expected = host.empty(333, dtype)
    host.sum_vectors(expected, [dst.copy(), src], dtype)
    host.add_into(dst, src, dtype)
    np.testing.assert_array_equal(dst, expected)


@pytest.mark.parametrize("dtype", list(host.STORAGE))
@pytest.mark.parametrize("count", [0, 1, 333])
def test_add_widened(backend, small_blocks, dtype, count):
    wide_dtype = host.ACCUMULATE[dtype]
    acc = random_vector(wide_dtype, count, 0)
    src = random_vector(dtype, count, 1)
    expected = acc + (to_float64(src, dtype).astype("f4") if dtype in host.HALF else src)
    host.add_widened(acc, wide_dtype, src, dtype)
    np.testing.assert_array_equal(acc, expected)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_scale(small_blocks, dtype):
    src = random_vector(dtype, 333, 0)
    dst = src.copy()
    host.scale(dst, 0.3, dtype)
    if dtype in host.HALF:
        expected = round_to(to_float64(src, dtype).astype("f4") * np.float32(0.3), dtype)
    else:
        expected = src * src.dtype.type(0.3)
    np.testing.assert_array_equal(dst, expected)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_scale_refuses_integers(dtype):
    with pytest.raises(DTypeMismatchError, match=dtype):
        host.scale(np.ones(3, dtype), 2.0, dtype)


def test_copy_is_bit_for_bit():
    src = np.array([0x7FC1, 0xFFFF, 0x8000], "u2")
    dst = host.empty(3, "bfloat16")
    host.copy(dst, src)
    np.testing.assert_array_equal(dst, src)


def test_mistakes_are_errors_and_nothing_is_broadcast():
    one, three = np.ones(1, "f4"), np.ones(3, "f4")
    for call in (
        lambda: host.copy(three, one),
        lambda: host.add_into(three, one, "float32"),
        lambda: host.add_widened(three, "float32", one, "float32"),
        lambda: host.widen(one.astype("f2"), "float16", three),
        lambda: host.narrow(one, host.empty(3, "bfloat16"), "bfloat16"),
        lambda: host.sum_vectors(np.ones((2, 2), "f4"), [np.ones((2, 2), "f4")], "float32"),
    ):
        with pytest.raises(ShapeMismatchError):
            call()
    for call in (
        lambda: host.empty(3, "complex64"),
        lambda: host.copy(three, three.astype("f8")),
        lambda: host.sum_vectors(three, [three], "float64"),
        lambda: host.add_widened(three.astype("f2"), "float16", three.astype("f2"), "float16"),
        lambda: host.widen(three.astype("f8"), "float64", three),
        lambda: host.narrow(three, three.astype("i4"), "int32"),
        lambda: host.narrow(three.astype("f8"), three.astype("f2"), "float16"),
    ):
        with pytest.raises(DTypeMismatchError):
            call()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_temporaries_are_blocks(dtype):
    count = 1 << 22
    vectors = [np.ones(count, host.STORAGE[dtype]) for _ in range(4)]
    acc = np.ones(count, "f4")
    tracemalloc.start()
    try:
        host.sum_vectors(vectors[0], vectors, dtype)
        host.sum_vectors(vectors[3], vectors, dtype)
        host.add_widened(acc, "float32", vectors[0], dtype)
        host.narrow(acc, vectors[1], dtype)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes <= 4 * host.BLOCK_BYTES + (64 << 10)


def test_import_needs_neither_torch_nor_cupy():
    code = (
        "import sys, kvmpi.kernels, kvmpi.optim\n"
        "assert not {'torch', 'cupy', 'kvmpi.kernels.gpu'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=HANGS_S)
