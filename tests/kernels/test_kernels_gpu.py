"""Device kernels: on a GPU where there is one, and their arithmetic on a NumPy stand-in for CuPy everywhere."""

from __future__ import annotations

import contextlib
import importlib
import sys
import types

import numpy as np
import pytest

from kvmpi.kernels import host

HALF_AND_WHOLE = ["float32", "float64", "float16", "bfloat16", "int32", "uint8"]


def device_count() -> int:
    try:
        import cupy

        return cupy.cuda.runtime.getDeviceCount()
    except Exception:  # no CuPy, no driver or no device: all the same to a test that needs one
        return 0


class StandInArray(np.ndarray):
    """A NumPy array with the few methods of ``cupy.ndarray`` that gpu.py calls."""

    device = contextlib.nullcontext()

    def get(self, stream, out):
        stream.log.append("get")
        np.copyto(out, self, casting="no")

    def set(self, src, stream):
        stream.log.append("set")
        np.copyto(self, src, casting="no")


class StandInStream:
    def __init__(self):
        self.log = []

    def record(self):
        self.log.append("record")
        return types.SimpleNamespace(synchronize=lambda: self.log.append("synchronize"))

    def wait_event(self, event):
        self.log.append("wait")


@pytest.fixture
def stand_in(monkeypatch):
    """``kvmpi.kernels.gpu`` on top of a module that is called cupy and computes with NumPy; and its only stream."""
    stream = StandInStream()
    cupy = types.ModuleType("cupy")
    cupy.asarray = lambda a: a
    cupy.isnan = np.isnan
    cupy.where = lambda *args: np.where(*args).view(StandInArray)
    cupy.cuda = types.SimpleNamespace(get_current_stream=lambda: stream)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.delitem(sys.modules, "kvmpi.kernels.gpu", raising=False)
    yield importlib.import_module("kvmpi.kernels.gpu"), stream
    sys.modules.pop("kvmpi.kernels.gpu", None)


def vectors(dtype: str, num_vectors: int, count: int) -> list[np.ndarray]:
    found = []
    for rank in range(num_vectors):
        values = (np.random.default_rng([3, rank]).standard_normal(count) * 50).astype("f4")
        if dtype == "bfloat16":
            vector = host.empty(count, dtype)
            host.narrow(values, vector, dtype)
        else:
            vector = np.abs(values).astype(dtype) if dtype == "uint8" else values.astype(dtype)
        found.append(vector)
    return found


@pytest.mark.parametrize("num_vectors", [1, 2, 3])
@pytest.mark.parametrize("dtype", HALF_AND_WHOLE)
def test_same_bits_as_the_host_kernel(stand_in, monkeypatch, dtype, num_vectors):
    gpu, stream = stand_in
    monkeypatch.setattr(gpu, "BLOCK_LENGTH", 100)
    sources = vectors(dtype, num_vectors, 1001)
    expected, out = host.empty(1001, dtype), host.empty(1001, dtype)
    host.sum_vectors(expected, sources, dtype)
    gpu.sum_vectors_to_host(out, [src.view(StandInArray) for src in sources], dtype)
    np.testing.assert_array_equal(out, expected)
    assert stream.log[: 2 * num_vectors] == ["record"] * num_vectors + ["wait"] * num_vectors
    assert stream.log[-2:] == ["record", "synchronize"]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_not_a_number_and_infinity(stand_in, dtype):
    gpu, _ = stand_in
    sources = [np.arange(1 << 16, dtype="u2").view(host.STORAGE[dtype]) for _ in range(2)]
    sources[1] = sources[1][::-1].copy()
    expected, out = host.empty(1 << 16, dtype), host.empty(1 << 16, dtype)
    host.sum_vectors(expected, sources, dtype)
    with np.errstate(all="ignore"):
        gpu.sum_vectors_to_host(out, [src.view(StandInArray) for src in sources], dtype)
    np.testing.assert_array_equal(out.view("u2"), expected.view("u2"))


def test_copy_to_device_waits(stand_in):
    gpu, stream = stand_in
    dst = np.zeros(5, "f4").view(StandInArray)
    gpu.copy_to_device(dst, np.arange(5, dtype="f4"))
    np.testing.assert_array_equal(dst, np.arange(5))
    assert stream.log == ["set", "record", "synchronize"]


@pytest.mark.gpu
@pytest.mark.skipif(device_count() == 0, reason="needs CuPy and a GPU")
@pytest.mark.parametrize("num_vectors", [1, 2, 3])
@pytest.mark.parametrize("dtype", HALF_AND_WHOLE)
def test_on_the_device(dtype, num_vectors):
    import cupy

    from kvmpi.kernels import gpu

    sources = vectors(dtype, num_vectors, 100_001)
    on_device = []
    for rank, src in enumerate(sources):
        with cupy.cuda.Device(rank % device_count()):
            on_device.append(cupy.empty(src.size, src.dtype))
            gpu.copy_to_device(on_device[-1], src)
    expected, out = host.empty(100_001, dtype), host.empty(100_001, dtype)
    host.sum_vectors(expected, sources, dtype)
    gpu.sum_vectors_to_host(out, on_device, dtype)
    np.testing.assert_array_equal(out, expected)
