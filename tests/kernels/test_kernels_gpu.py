"""Sums and copies by device kernels: on a GPU where there is one, and on a stand-in everywhere."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from kernel_helpers import DTYPES, FLOATS, SIZES, assert_same_bits, check_sum, oracle, place, random_vector, unsigned

from kvmpi.kernels import host

# Sums


@pytest.mark.parametrize("num_vectors", [1, 2, 3, 4, 5, 6, 7, 8, 9, 20])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_have_the_bits_of_the_host(cuda, dtype, num_vectors):
    for count, shift in itertools.product(SIZES, [0, 1, 3]):
        check_sum(cuda, dtype, count, num_vectors * [shift], shift)


@pytest.mark.parametrize("dtype", DTYPES)
def test_vectors_that_are_not_aligned_alike(cuda, dtype):
    for offsets, to in [([0, 1], 0), ([1, 0, 0], 0), ([0, 0], 1), ([3, 5, 7], 2)]:
        for count in SIZES:
            check_sum(cuda, dtype, count, offsets, to)


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_vectors(cuda, dtype):
    # Many times what all threads take at once, which are few on the stand-in.
    many = cuda[1].cuda.Device(0).attributes["MultiProcessorCount"] > 3
    check_sum(cuda, dtype, 5_000_011 if many else 300_011, [0, 0])


@pytest.mark.parametrize("scale", [0.3, -2.0, 1 / 3, 1e-41])
@pytest.mark.parametrize("dtype", FLOATS)
def test_scaled_sums(cuda, dtype, scale):
    for num_vectors, count, offset in itertools.product([1, 2, 8, 9], [1, 8, 1001], [0, 1]):
        check_sum(cuda, dtype, count, num_vectors * [offset], offset, scale)


@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sums_of_half_types_that_are_not_rounded(cuda, dtype, scale):
    for num_vectors, count, offsets in itertools.product([1, 2, 8, 9], SIZES, [(0, 0), (4, 4), (1, 1), (1, 3), (2, 0)]):
        check_sum(cuda, dtype, count, num_vectors * [offsets[0]], offsets[1], scale, wide=True)


@pytest.mark.parametrize("num_vectors", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_half_value_with_every_kind_of_other(cuda, dtype, num_vectors):
    gpu, cupy = cuda
    every = np.arange(1 << 16, dtype="u2").view(host.STORAGE[dtype])
    for shift in [1, 0x0400, 0x7C00, 0x8000, 0xFFC0]:
        others = [np.roll(every, shift), every[::-1].copy()]
        sources = [every, *others[: num_vectors - 1]]
        out = gpu.pinned_empty(every.size, dtype)
        gpu.start_sum(out, [place(cupy, src) for src in sources], dtype).wait()
        assert_same_bits(out, oracle(sources, dtype), f"shift {shift}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_sum_into_one_of_the_sources(cuda, dtype):
    gpu, cupy = cuda
    for position, num_vectors in [(0, 2), (1, 2), (2, 3), (7, 8), (8, 9)]:
        sources = [random_vector(dtype, 1001, seed) for seed in range(num_vectors)]
        on_device = [place(cupy, src) for src in sources]
        gpu.start_sum(on_device[position], on_device, dtype).wait()
        assert_same_bits(on_device[position].get(), oracle(sources, dtype), (position, num_vectors))


def test_same_bits_in_several_runs(cuda):
    gpu, cupy = cuda
    on_device = [place(cupy, random_vector("float32", 100_003, seed)) for seed in range(8)]
    runs = []
    for stream in [None, *gpu.streams(0, 3)]:
        out = gpu.pinned_empty(100_003, "float32")
        gpu.start_sum(out, on_device, "float32", stream=stream).wait()
        runs.append(unsigned(out))
    for run in runs[1:]:
        np.testing.assert_array_equal(run, runs[0])


def test_sums_wait_for_work_on_the_current_stream(cuda):
    gpu, cupy = cuda
    out = gpu.pinned_empty(1 << 22, "float32")
    for stream in [None, gpu.streams(0, 1)[0]]:
        out[:] = 0
        with cupy.cuda.Stream(non_blocking=True):
            sources = [place(cupy, np.zeros(1 << 22, "f4")) for _ in range(2)]
            for _ in range(20):
                sources[0] += np.float32(1)
                sources[1] += np.float32(2)
            transfer = gpu.start_sum(out, sources, "float32", stream=stream)
        transfer.wait()
        assert set(np.unique(out)) == {60.0}


def test_sums_on_several_streams_at_once(cuda):
    gpu, cupy = cuda
    sources = [[random_vector("float32", 100_003, 10 * ring + k) for k in range(3)] for ring in range(4)]
    on_device = [[place(cupy, src) for src in of_ring] for of_ring in sources]
    outs = [gpu.pinned_empty(100_003, "float32") for _ in sources]
    jobs = zip(outs, on_device, gpu.streams(0, 4), strict=True)
    transfers = [gpu.start_sum(out, vectors, "float32", stream=stream) for out, vectors, stream in jobs]
    for transfer in reversed(transfers):
        transfer.wait()
    for out, of_ring in zip(outs, sources, strict=True):
        assert_same_bits(out, oracle(of_ring, "float32"), "a ring")


@pytest.mark.parametrize("wait_first", [True, False])
def test_a_sum_on_the_device_is_between_earlier_and_later_work(cuda, wait_first):
    gpu, cupy = cuda
    with cupy.cuda.Stream(non_blocking=True):
        sources, out = [place(cupy, np.full(1 << 20, k, "f4")) for k in (1, 2)], place(cupy, np.zeros(1 << 20, "f4"))
        out += np.float32(50)
        transfer = gpu.start_sum(out, sources, "float32", stream=gpu.streams(0, 1)[0])
        out += np.float32(4)
        if wait_first:
            transfer.wait()
        assert set(np.unique(out.get())) == {7.0}
    transfer.wait()


# Copies


@pytest.mark.parametrize("num_vectors", [1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_copies_to_several_vectors(cuda, dtype, num_vectors):
    gpu, cupy = cuda
    for count in SIZES:
        src = gpu.pinned_empty(count, dtype)
        src[:] = random_vector(dtype, count, 1)
        dsts = [place(cupy, np.zeros(count, src.dtype), offset) for offset in range(num_vectors)]
        gpu.start_copy(dsts, src).wait()
        for dst in dsts:
            np.testing.assert_array_equal(unsigned(dst.get()), unsigned(src))


@pytest.mark.parametrize("wait_first", [True, False])
def test_copies_are_between_earlier_and_later_work(cuda, wait_first):
    gpu, cupy = cuda
    src = gpu.pinned_empty(1 << 22, "float32")
    src[:] = 3
    for stream in [None, gpu.streams(0, 1)[0]]:
        with cupy.cuda.Stream(non_blocking=True):
            dsts = [place(cupy, np.zeros(src.size, "f4")) for _ in range(3)]
            for dst in dsts:
                dst += np.float32(100)
            transfer = gpu.start_copy(dsts, src, stream=stream)
            for dst in dsts:
                dst += np.float32(1)
            if wait_first:
                transfer.wait()
            for dst in dsts:
                assert set(np.unique(dst.get())) == {4.0}
        transfer.wait()


# The blocking functions


@pytest.mark.parametrize("stage_bytes", [256, 4 << 20])
@pytest.mark.parametrize("num_vectors", [1, 2, 9])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sum_to_pageable_memory(cuda, monkeypatch, dtype, num_vectors, stage_bytes):
    gpu, cupy = cuda
    monkeypatch.setattr(gpu, "STAGE_BYTES", stage_bytes)
    for count in SIZES[:-1]:
        sources = [random_vector(dtype, count, seed) for seed in range(num_vectors)]
        on_device = [place(cupy, src, 1) for src in sources]
        every_second = host.empty(2 * count, dtype)[::2]
        for out in (host.empty(count, dtype), gpu.pinned_empty(count, dtype), every_second):
            gpu.sum_vectors_to_host(out, on_device, dtype)
            assert_same_bits(np.ascontiguousarray(out), oracle(sources, dtype), f"count {count}")
        if dtype in host.HALF:
            wide = np.empty(count, "f4")
            gpu.sum_vectors_to_host(wide, on_device, dtype)
            assert_same_bits(wide, oracle(sources, dtype, wide=True), f"count {count}, not rounded")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sums_that_were_not_rounded_are_scaled_and_rounded_once(cuda, dtype):
    gpu, cupy = cuda
    for count, scale in itertools.product(SIZES, [1.0, 1 / 3]):
        values = random_vector("float32", count, 7)
        expected = host.empty(count, dtype)
        with np.errstate(all="ignore"):
            host.narrow(values * np.float32(scale), expected, dtype)
        out, there = gpu.pinned_empty(count, dtype), place(cupy, np.zeros(count, expected.dtype))
        gpu.start_sum(out, [place(cupy, values)], dtype, scale=scale).wait()
        gpu.start_sum(there, [place(cupy, values)], dtype, scale=scale).wait()
        np.testing.assert_array_equal(unsigned(out), unsigned(expected))
        np.testing.assert_array_equal(unsigned(there.get()), unsigned(expected))


@pytest.mark.parametrize("stage_bytes", [256, 4 << 20])
@pytest.mark.parametrize("dtype", DTYPES)
def test_copy_from_pageable_memory(cuda, monkeypatch, dtype, stage_bytes):
    gpu, cupy = cuda
    monkeypatch.setattr(gpu, "STAGE_BYTES", stage_bytes)
    for count in SIZES:
        values = random_vector(dtype, count, 1)
        pinned, every_second = gpu.pinned_empty(count, dtype), np.repeat(values, 2)[::2]
        pinned[:] = values
        for src in (values, pinned, every_second):
            dst = place(cupy, np.zeros(count, values.dtype))
            gpu.copy_to_devices([dst], src)
            np.testing.assert_array_equal(unsigned(dst.get()), unsigned(values))


def test_blocking_functions_are_ordered_by_the_current_stream(cuda, monkeypatch):
    gpu, cupy = cuda
    monkeypatch.setattr(gpu, "STAGE_BYTES", 1 << 16)
    out = np.zeros(100_003, "f4")
    with cupy.cuda.Stream(non_blocking=True):
        sources = [place(cupy, np.zeros(100_003, "f4")) for _ in range(2)]
        for src in sources:
            src += np.float32(5)
        gpu.sum_vectors_to_host(out, sources, "float32")
        assert set(np.unique(out)) == {10.0}
        sources[0] += np.float32(70)
        gpu.copy_to_devices([sources[0]], out)
        out[:] = 0  # the copy is done
        assert set(np.unique(sources[0].get())) == {10.0}


def test_staging_on_a_device_that_is_early(stand_in, monkeypatch):
    gpu, cupy, _ = stand_in(early=True)
    monkeypatch.setattr(gpu, "STAGE_BYTES", 256)
    sources, out = [random_vector("float32", 1001, seed) for seed in range(2)], np.zeros(1001, "f4")
    on_device = [place(cupy, src) for src in sources]
    gpu.sum_vectors_to_host(out, on_device, "float32")
    assert_same_bits(out, oracle(sources, "float32"), "sum")
    gpu.copy_to_devices([on_device[0]], out)
    assert_same_bits(on_device[0].get(), out, "copy")
