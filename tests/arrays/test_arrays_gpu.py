"""CuPy arrays and CUDA tensors through the same seam as those of the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvmpi import arrays
from kvmpi.errors import DTypeMismatchError

pytestmark = pytest.mark.gpu

try:
    import cupy

    HAVE_GPU = cupy.cuda.runtime.getDeviceCount() > 0
except Exception:  # no CuPy, or CuPy without a driver, which raises an error of its own
    cupy, HAVE_GPU = None, False

if not HAVE_GPU:
    pytest.skip("needs CuPy and a GPU", allow_module_level=True)

CUPY_DTYPES = [name for name in arrays.DTYPES if name != "bfloat16"]


def make(shape: tuple[int, ...], dtype: str) -> Any:
    return cupy.arange(int(np.prod(shape)), dtype="f4").reshape(shape).astype(arrays.DTYPES[dtype])


@pytest.mark.parametrize("dtype", CUPY_DTYPES)
def test_every_dtype(dtype: str) -> None:
    array = make((5, 7), dtype)
    vector = arrays.read(array)
    assert (vector.dtype, vector.device, vector.shared, vector.on_host) == (dtype, "cuda:0", True, False)
    np.testing.assert_array_equal(vector.buffer.get(), np.arange(35).astype(arrays.DTYPES[dtype]))
    arrays.write(array, np.arange(35)[::-1].astype(arrays.DTYPES[dtype]))
    np.testing.assert_array_equal(array.get().reshape(-1), np.arange(35)[::-1].astype(arrays.DTYPES[dtype]))


@pytest.mark.parametrize("view", [lambda a: a.T, lambda a: a[::2, 1::3], lambda a: a[0, 0], lambda a: a[:0]])
def test_views_are_read_in_c_order_and_written_through(view: Any) -> None:
    base = make((12, 6), "float32")
    array = view(base)
    np.testing.assert_array_equal(arrays.read(array).buffer.get(), array.get().reshape(-1))
    flat = np.arange(array.size, dtype="f4") + 100
    arrays.write(array, flat)
    np.testing.assert_array_equal(view(base).get().reshape(-1), flat)


def test_what_a_stream_still_computes_is_waited_for() -> None:
    array = cupy.zeros(1 << 24, "f4")
    with cupy.cuda.Stream(non_blocking=True):
        for _ in range(50):
            array += 1
        vector = arrays.read(array)
    assert float(vector.buffer.min()) == 50.0


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(DTypeMismatchError):
        arrays.dtype_of(cupy.zeros(2, "c8"))


def test_empty_on_a_device() -> None:
    array = arrays.empty((2, 3), "float16", "cuda:0")
    assert (arrays.library_of(array), array.shape, arrays.dtype_of(array)) == ("cupy", (2, 3), "float16")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tensors_on_a_device(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a torch with CUDA")
    tensor = torch.arange(12, device="cuda").to(getattr(torch, dtype)).reshape(3, 4).t()
    vector = arrays.read(tensor)
    assert (vector.dtype, vector.device, vector.shared) == (dtype, "cuda:0", False)
    arrays.write(tensor, vector.buffer.get()[::-1].copy())
    assert tensor.float().cpu().reshape(-1).tolist() == [11, 7, 3, 10, 6, 2, 9, 5, 1, 8, 4, 0]
