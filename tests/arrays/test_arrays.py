"""Arrays of NumPy and torch become flat vectors, and results come back into them whatever their layout."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from jobs import HANGS_S

from kvmpi import arrays
from kvmpi.errors import DTypeMismatchError, UnsupportedError

torch = pytest.importorskip("torch")

NUMPY_DTYPES = [name for name in arrays.DTYPES if name != "bfloat16"]


def bits(array: Any) -> bytes:
    """The values of an array in C order, bit for bit."""
    if isinstance(array, np.ndarray):
        return array.tobytes()
    whole = array.detach().clone().contiguous()
    return whole.reshape(-1).view(torch.uint8).numpy().tobytes() if whole.numel() else b""


def pattern(count: int, dtype: str, seed: int = 0) -> np.ndarray:
    """Different values at every index, in storage dtype; no NaN, which no library promises to keep."""
    values = (np.arange(count) * 7 + seed) % 113
    if dtype == "bfloat16":
        return (values.astype("f4").view("u4") >> 16).astype("u2")
    return values.astype(arrays.DTYPES[dtype])


def make_numpy(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return pattern(int(np.prod(shape)), dtype).reshape(shape)


def make_torch(shape: tuple[int, ...], dtype: str) -> Any:
    flat = pattern(int(np.prod(shape)), dtype)
    if dtype == "bfloat16":
        return torch.from_numpy(flat.view("i2")).view(torch.bfloat16).reshape(shape)
    return torch.from_numpy(flat).reshape(shape)


LAYOUTS: dict[str, Callable[[], Any]] = {
    "numpy": lambda: make_numpy((3, 4, 5), "float32"),
    "numpy transposed": lambda: make_numpy((3, 4, 5), "float32").T,
    "numpy every other": lambda: make_numpy((12, 6), "float32")[::2, 1::3],
    "numpy backwards": lambda: make_numpy((12,), "float32")[::-1],
    "numpy fortran": lambda: np.asfortranarray(make_numpy((4, 5), "float32")),
    "numpy matrix": lambda: make_numpy((4, 5), "float32").view(np.matrix),
    "numpy 0-d": lambda: np.array(5.0, "f4"),
    "numpy empty": lambda: np.zeros((3, 0, 2), "f4"),
    "numpy of one": lambda: make_numpy((1, 1), "float32"),
    "torch": lambda: make_torch((3, 4, 5), "float32"),
    "torch transposed": lambda: make_torch((3, 4), "float32").t(),
    "torch every other": lambda: make_torch((12, 6), "float32")[::2, 1::3],
    "torch channels last": lambda: make_torch((2, 3, 4, 5), "float32").contiguous(memory_format=torch.channels_last),
    "torch bfloat16 transposed": lambda: make_torch((3, 4), "bfloat16").t(),
    "torch parameter": lambda: torch.nn.Parameter(make_torch((3, 4), "float32")),
    "torch negated": lambda: torch._neg_view(make_torch((3, 4), "float32")),
    "torch negated, strided": lambda: torch.tensor([1 + 2j, 3 + 4j]).conj().imag,
    "torch 0-d": lambda: torch.tensor(5.0),
    "torch 0-d bfloat16": lambda: torch.tensor(5.0, dtype=torch.bfloat16),
    "torch empty": lambda: torch.zeros(3, 0, 2),
    "torch empty bfloat16": lambda: torch.zeros(0, dtype=torch.bfloat16),
}
COPIED = ("transposed", "every other", "backwards", "fortran", "channels last", "negated")


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_reading_gives_the_values_in_c_order(layout: str) -> None:
    array = LAYOUTS[layout]()
    vector = arrays.read(array)
    assert vector.buffer.shape == (int(np.prod(array.shape)),)
    assert type(vector.buffer) is np.ndarray
    assert vector.buffer.flags.c_contiguous
    assert vector.buffer.dtype == arrays.DTYPES[vector.dtype]
    assert vector.buffer.tobytes() == bits(array)
    assert vector.shared == (not any(word in layout for word in COPIED))
    assert (vector.count, vector.nbytes) == (vector.buffer.size, vector.buffer.nbytes)
    assert vector.on_host
    assert arrays.shape_of(array) == tuple(array.shape)


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_arrays_of_one_layout_have_the_same_memory_shape_and_dtype(layout: str) -> None:
    array = LAYOUTS[layout]()
    arrays.is_array(array)  # of a type that nobody has asked for yet nothing is known
    found = arrays.layout_of(array)
    assert (found is not None) == (not any(word in layout for word in COPIED))
    if found is None:
        return
    vector = arrays.read(array)
    assert found == arrays.layout_of(array)
    assert found != arrays.layout_of(LAYOUTS[layout]()) or not vector.count
    if layout != "numpy matrix":  # which has always two dimensions
        assert found != arrays.layout_of(array.reshape((*array.shape, 1)))
    assert (found[0], tuple(found[1]), found[2]) == (
        vector.address,
        tuple(array.shape),
        array.dtype,
    ) or not vector.count
    memory = arrays.memory_at(found[0], vector.count, vector.dtype)
    assert memory.tobytes() == bits(array)
    memory[...] = pattern(vector.count, vector.dtype, seed=50)
    assert bits(array) == memory.tobytes()
    if isinstance(array, np.ndarray):
        array.flags.writeable = False
        assert arrays.layout_of(array) is None


@pytest.mark.parametrize("other", [None, 3, [np.zeros(3)], (np.zeros(1), np.zeros(1)), "torch.sparse"])
def test_what_is_no_plain_array_has_no_layout(other: Any) -> None:
    assert arrays.layout_of(torch.eye(3).to_sparse() if other == "torch.sparse" else other) is None


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_writing_reaches_every_element_and_keeps_nothing(layout: str) -> None:
    array = LAYOUTS[layout]()
    dtype = arrays.dtype_of(array)
    flat = pattern(int(np.prod(array.shape)), dtype, seed=50)
    expected = flat.tobytes()
    arrays.check_writable(array)
    arrays.write(array, flat)
    assert bits(array) == expected
    flat[...] = 0
    assert bits(array) == expected, "the array holds on to the buffer"


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_shared_means_the_same_memory(layout: str) -> None:
    array = LAYOUTS[layout]()
    vector, before = arrays.read(array), bits(array)
    vector.buffer[...] = pattern(vector.count, vector.dtype, seed=99)
    assert bits(array) == (vector.buffer.tobytes() if vector.shared else before)


@pytest.mark.parametrize("dtype", list(arrays.DTYPES))
def test_every_dtype_of_torch(dtype: str) -> None:
    tensor = make_torch((5, 7), dtype)
    assert arrays.dtype_of(tensor) == dtype
    vector = arrays.read(tensor)
    assert (vector.dtype, vector.device, vector.shared) == (dtype, "cpu", True)
    assert vector.buffer.tobytes() == pattern(35, dtype).tobytes()
    arrays.write(tensor, pattern(35, dtype, seed=3))
    assert bits(tensor) == pattern(35, dtype, seed=3).tobytes()


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
def test_every_dtype_of_numpy(dtype: str) -> None:
    array = make_numpy((5, 7), dtype)
    assert arrays.dtype_of(array) == dtype
    assert arrays.read(array).buffer.tobytes() == pattern(35, dtype).tobytes()
    arrays.write(array.T, pattern(35, dtype, seed=3))
    assert array.T.tobytes() == pattern(35, dtype, seed=3).tobytes()


def test_bfloat16_travels_as_its_bits() -> None:
    tensor = torch.tensor([1.0, -2.5, float("inf"), -0.0], dtype=torch.bfloat16)
    assert [hex(n) for n in arrays.read(tensor).buffer.tolist()] == ["0x3f80", "0xc020", "0x7f80", "0x8000"]
    every = np.arange(1 << 16, dtype="u2")
    out = torch.zeros(1 << 16, dtype=torch.bfloat16)
    arrays.write(out, every)
    np.testing.assert_array_equal(out.view(torch.int16).numpy().view("u2"), every)


def test_a_read_only_array_changes_with_the_memory_that_it_shows() -> None:
    array = make_numpy((3, 4), "float32")
    array.flags.writeable = False
    vector = arrays.read(array)
    assert vector.shared
    assert not vector.buffer.flags.writeable
    with pytest.raises(UnsupportedError, match="read-only"):
        arrays.check_writable(array)
    with pytest.raises(UnsupportedError, match="read-only"):
        arrays.check_writable(np.broadcast_to(np.float32(1), (3,)))


def test_expanded_tensors_can_be_read_not_written() -> None:
    expanded = torch.tensor([[1.0], [2.0]]).expand(2, 3)
    assert arrays.read(expanded).buffer.tolist() == [1, 1, 1, 2, 2, 2]
    with pytest.raises(UnsupportedError, match="expanded"):
        arrays.check_writable(expanded)
    for step in ((0, 4), (4, 0), (0, 0), (4, 4), (-4, 4), (8, 4), (4, 2), (2, 16)):
        shared = np.lib.stride_tricks.as_strided(np.zeros(99, "f4")[9:], (2, 3), step)
        with pytest.raises(UnsupportedError, match=r"broadcast .*, whose elements share memory; pass a copy\(\)"):
            arrays.check_writable(shared)
    with pytest.raises(UnsupportedError, match=r"as_strided, whose elements share memory; pass a clone\(\)"):
        arrays.check_writable(torch.zeros(9).as_strided((2, 3), (1, 1)))
    arrays.check_writable(np.lib.stride_tricks.as_strided(np.zeros(99, "f4"), (2, 3), (12, 8)))  # 0 2 4 3 5 7
    arrays.check_writable(torch.zeros(9).as_strided((2, 3), (3, 2)))
    for fine in (np.zeros((1, 3), "f4")[:, ::2], np.broadcast_to(np.zeros((0, 1)), (0, 5)).copy(), np.zeros((4, 3)).T):
        arrays.check_writable(fine)
    arrays.check_writable(torch.zeros(3).as_strided((1, 3), (0, 1)))


def test_tensors_that_need_gradients_can_be_read_and_written() -> None:
    leaf = torch.zeros(3, requires_grad=True)
    arrays.write(leaf, np.arange(3, dtype="f4"))
    assert leaf.tolist() == [0, 1, 2]
    assert leaf.requires_grad
    transposed = torch.zeros(2, 3, requires_grad=True)
    arrays.write(transposed.t(), np.arange(6, dtype="f4"))
    assert transposed.tolist() == [[0, 2, 4], [1, 3, 5]]


@pytest.mark.parametrize(
    "value",
    [
        1.5,
        [1.0, 2.0],
        None,
        np.float32(1),
        np.array([1], ">f4"),
        np.array([1], ">i8"),
        np.array([True]),
        np.array([1 + 1j]),
        np.array(["a"]),
        np.array([None]),
        np.zeros(2, "u2"),
        np.zeros(2, [("float32", "f4")]),
        np.ma.masked_array([1.0, 2.0], [False, True]),
        torch.zeros(2, dtype=torch.bool),
        torch.zeros(2, dtype=torch.complex64),
        torch.zeros(2, dtype=torch.float8_e5m2),
    ],
    ids=lambda value: f"{type(value).__name__} {getattr(value, 'dtype', '')}",
)  # fmt: skip
def test_what_is_not_carried_is_refused(value: Any) -> None:
    with pytest.raises(DTypeMismatchError):
        arrays.dtype_of(value)
    with pytest.raises(DTypeMismatchError):
        arrays.read(value)


def test_a_bfloat16_of_numpy_is_refused() -> None:
    """Packages add such dtypes to NumPy; their buffers are not the raw bits that the kernels take."""

    class Foreign(np.ndarray):
        @property
        def dtype(self) -> Any:
            return type("dtype", (), {"name": "bfloat16", "__eq__": lambda *_: False, "__hash__": lambda _: 0})()

    with pytest.raises(DTypeMismatchError, match="bfloat16 is torch's"):
        arrays.dtype_of(np.zeros(2, "u2").view(Foreign))


@pytest.mark.parametrize("tensor", [torch.zeros(3, 3).to_sparse(), torch.zeros(3, device="meta")])
def test_tensors_without_plain_memory_are_refused_before_anything_is_sent(tensor: Any) -> None:
    """``dtype_of`` is part of what every rank checks before it agrees; ``read`` comes after that."""
    for refuse in (arrays.dtype_of, arrays.check_writable, arrays.read):
        with pytest.raises(UnsupportedError, match="not carried"):
            refuse(tensor)


def test_a_tensor_whose_memory_was_freed_is_refused() -> None:
    """As FSDP frees that of parameters between the steps of their layers. NumPy would make new memory in its place."""
    for refuse in (arrays.dtype_of, arrays.check_writable, arrays.read):
        tensor = torch.zeros(3)
        tensor.untyped_storage().resize_(0)
        with pytest.raises(UnsupportedError, match="memory has been freed"):
            refuse(tensor)
    assert arrays.dtype_of(torch.zeros(0, 3)) == "float32"


def test_a_tensor_that_stands_for_others_is_refused() -> None:
    """As DTensor does: it has no memory of its own, and what its parts have is another thing on each worker."""

    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls, part: Any) -> Any:
            return torch.Tensor._make_wrapper_subclass(cls, part.shape, dtype=part.dtype)

        @classmethod
        def __torch_dispatch__(cls, *_: Any) -> Any:
            raise AssertionError("nothing is to be computed")

    for refuse in (arrays.dtype_of, arrays.check_writable, arrays.read):
        for count in (3, 0):
            with pytest.raises(UnsupportedError, match=r"Wrapper is not carried.*to_local\(\)"):
                refuse(Wrapper(torch.zeros(count)))
    assert arrays.dtype_of(torch.zeros(3).as_subclass(type("Plain", (torch.Tensor,), {}))) == "float32"


def test_is_array() -> None:
    assert arrays.is_array(np.zeros(2))
    assert arrays.is_array(np.zeros(2, bool)), "an array, if not one that can be sent"
    assert arrays.is_array(torch.zeros(2))
    assert not arrays.is_array([1, 2])
    assert not arrays.is_array(3)


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
def test_empty_makes_numpy_arrays(dtype: str) -> None:
    for spelled in (dtype, np.dtype(dtype), np.dtype(dtype).type, np.dtype(dtype).str):
        array = arrays.empty((2, 3), spelled)
        assert (type(array), array.shape, arrays.dtype_of(array)) == (np.ndarray, (2, 3), dtype)


@pytest.mark.parametrize("dtype", list(arrays.DTYPES))
def test_empty_makes_tensors_for_dtypes_of_torch(dtype: str) -> None:
    tensor = arrays.empty((2, 3), getattr(torch, dtype))
    assert (type(tensor), tuple(tensor.shape), arrays.dtype_of(tensor)) == (torch.Tensor, (2, 3), dtype)


def test_empty_bfloat16_is_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    assert arrays.empty((0, 2), "bfloat16").dtype == torch.bfloat16
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "torch", None)
        with pytest.raises(UnsupportedError, match=r"bfloat16 need torch, .*pip install 'kvmpi\[torch\]'"):
            arrays.empty((0, 2), "bfloat16")


@pytest.mark.parametrize("dtype", ["complex64", "float8", ">f4", np.dtype(">i4"), bool, torch.bool, None.__class__])
def test_empty_refuses_other_dtypes(dtype: Any) -> None:
    with pytest.raises(DTypeMismatchError, match="not carried"):
        arrays.empty((2,), dtype)


@pytest.mark.parametrize("dtype", list(arrays.DTYPES))
@pytest.mark.parametrize("like", ["numpy", "torch"])
def test_wrap_shares_memory(dtype: str, like: str) -> None:
    flat = pattern(6, dtype)
    array = arrays.wrap(flat, (2, 3), dtype, like)
    assert arrays.library_of(array) == ("torch" if dtype == "bfloat16" else like)
    assert (arrays.shape_of(array), arrays.dtype_of(array)) == ((2, 3), dtype)
    arrays.write(array, pattern(6, dtype, seed=9))
    assert flat.tobytes() == pattern(6, dtype, seed=9).tobytes()
    assert arrays.shape_of(arrays.wrap(pattern(1, dtype), (), dtype, like)) == ()


def test_arrays_of_more_than_2_gib_are_not_copied() -> None:
    """Pages that nobody touches cost nothing."""
    array = np.zeros((1 << 20, 600), "f4")
    vector = arrays.read(array)
    assert vector.nbytes > 1 << 31
    assert vector.shared
    assert np.shares_memory(vector.buffer, array, max_work=1)


def test_neither_torch_nor_cupy_is_imported() -> None:
    code = (
        "import sys, numpy; from kvmpi import arrays; a = numpy.zeros(3); arrays.write(a, arrays.read(a).buffer);"
        "arrays.empty((2,), 'float32'); arrays.is_array([1]); print({'torch', 'cupy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANGS_S, check=True)
    assert done.stdout.strip() == "set()"


def test_a_tensor_that_has_no_memory_has_no_layout() -> None:
    found: list[Any] = []
    torch.func.vmap(lambda row: found.append(arrays.layout_of(row)) or row)(torch.ones(2, 3))
    assert found == [None]


def test_the_span_of_an_array_is_from_its_first_byte_to_its_last() -> None:
    """Against the addresses of all elements."""
    whole = np.zeros((6, 10), np.float32)
    found = [
        whole, whole[1:3], whole[:, 3], whole.T, whole[::-1, ::-2], whole[2, 3:4], whole[2, 3:4].reshape(()),
        np.broadcast_to(whole[0], (4, 10)), whole.astype(np.float16)[:, 1:],
    ]  # fmt: skip
    for array in found:
        first = array.__array_interface__["data"][0]
        steps = [
            range(0, n * stride, stride) if stride else [0]
            for n, stride in zip(array.shape, array.strides, strict=True)
        ]
        places = [first + sum(at) for at in itertools.product(*steps)]
        expected = min(places), max(places) + array.itemsize
        assert arrays.span_of(array) == expected, array.shape
        if min(array.strides, default=0) >= 0 and array.flags.writeable:
            assert arrays.span_of(torch.from_numpy(array)) == expected, array.shape
    assert arrays.span_of(whole[:0]) == arrays.span_of(torch.zeros(3, 0)) == (0, 0)
