"""Transfers, launches, several devices and mistakes, most of them on a stand-in."""

from __future__ import annotations

import gc
import importlib
import itertools
import threading
import time
import weakref

import numpy as np
import pytest
from device_stand_in import StandInArray, StandInError
from kernel_helpers import DTYPES, SIZES, SOURCE, assert_same_bits, device_count, oracle, place, random_vector

from kvmpi.collectives.arena import Arena
from kvmpi.errors import DTypeMismatchError, ShapeMismatchError, UnsupportedError
from kvmpi.kernels import host

# Transfers and streams


def test_streams_are_made_once(stand_in):
    gpu, _, machine = stand_in()
    two, three, elsewhere = gpu.streams(0, 2), gpu.streams(0, 3), gpu.streams(1, 1)
    assert three[:2] == two
    assert gpu.streams(0, 1) == two[:1]
    assert [stream.device_id for stream in three + elsewhere] == [0, 0, 0, 1]
    assert all(stream.non_blocking for stream in three + elsewhere)
    assert machine.counts["streams"] == 4


def test_done_does_not_wait(stand_in):
    gpu, cupy, _ = stand_in()
    stream, out = gpu.streams(0, 1)[0], gpu.pinned_empty(10, "int32")
    transfer = gpu.start_sum(out, [place(cupy, np.arange(10, dtype="i4"))] * 2, "int32", stream=stream)
    assert not transfer.done()
    assert stream.ran == 0
    stream.run()
    assert transfer.done()
    assert transfer.done()
    np.testing.assert_array_equal(out, 2 * np.arange(10))


@pytest.mark.gpu
@pytest.mark.skipif(device_count() == 0, reason="needs CuPy and a GPU")
def test_done_becomes_true(import_gpu):
    gpu, cupy = import_gpu(), importlib.import_module("cupy")
    out = gpu.pinned_empty(1 << 24, "float32")
    transfer = gpu.start_sum(out, [cupy.ones(1 << 24, "f4")] * 2, "float32", stream=gpu.streams(0, 1)[0])
    deadline = time.monotonic() + 30
    while not transfer.done():
        assert time.monotonic() < deadline
    assert (out == 2).all()


def test_a_failed_device_is_an_error_and_not_a_wait_for_ever(stand_in):
    gpu, cupy, _ = stand_in()
    transfer = gpu.start_sum(gpu.pinned_empty(10, "int32"), [place(cupy, np.zeros(10, "i4"))] * 2, "int32")
    cupy.cuda.runtime.eventQuery = lambda event: 700
    with pytest.raises(StandInError, match="700"):
        transfer.done()


def test_a_transfer_keeps_its_memory(stand_in):
    gpu, cupy, _ = stand_in()
    sources = [place(cupy, random_vector("int32", 100, seed)) for seed in range(12)]
    alive = [weakref.ref(src) for src in sources]
    expected = np.sum([src.memory for src in sources], axis=0, dtype="i4")
    out = gpu.pinned_empty(100, "int32")
    transfer = gpu.start_sum(out, sources, "int32")
    del sources
    gc.collect()
    assert all(ref() is not None for ref in alive)
    # Were the table of the addresses that are no arguments free, this would be it.
    gpu.pinned_empty(4, "int64")[:] = place(cupy, np.zeros(100, "i4")).data.ptr
    transfer.wait()
    np.testing.assert_array_equal(out, expected)
    gc.collect()
    assert all(ref() is None for ref in alive)


def test_a_transfer_that_is_dropped_waits(stand_in):
    gpu, cupy, _ = stand_in()
    out = gpu.pinned_empty(10, "int32")
    out[:] = 0
    gpu.start_sum(out, [place(cupy, np.ones(10, "i4"))] * 2, "int32")
    np.testing.assert_array_equal(out, 2)


def test_the_hot_path_allocates_nothing(stand_in):
    gpu, cupy, machine = stand_in()
    sources = [[place(cupy, random_vector("float16", 5000, seed)) for seed in range(12)] for _ in range(2)]
    outs, pageable = [gpu.pinned_empty(5000, "float16") for _ in range(2)], host.empty(5000, "float16")

    def iterate() -> None:
        for num_vectors in (1, 2, 8, 12):
            jobs = zip(outs, sources, gpu.streams(0, 2), strict=True)
            sums = [gpu.start_sum(out, vecs[:num_vectors], "float16", stream=s) for out, vecs, s in jobs]
            sums[0].wait()
            gpu.streams(0, 2)[1].run()
            assert sums[1].done()
            copies = [gpu.start_copy(vecs[:3], out) for vecs, out in zip(sources, outs, strict=True)]
            assert not copies[0].done()
            for transfer in copies:
                transfer.wait()
            gpu.sum_vectors_to_host(pageable, sources[0][:num_vectors], "float16")
            gpu.copy_to_devices([sources[0][0]], pageable)

    iterate()
    before = machine.counts.copy()
    for _ in range(3):
        iterate()
    assert machine.counts.pop("pinned_calls") > before.pop("pinned_calls")  # of a pool that has them
    assert machine.counts == before
    assert before["kernels"] == 1


# Memory that is locked


def test_memory_is_locked_until_it_is_freed(stand_in, monkeypatch):
    """A vector's own memory, or all of that which it is a view of, once."""
    gpu, cupy, machine = stand_in()
    monkeypatch.setattr(gpu, "_linux", (6, 1))
    count = gpu.LOCK_FROM_BYTES // 4
    sources = [place(cupy, random_vector("float32", count, seed)) for seed in range(2)]
    whole = np.empty(2 * count + 7, "f4")
    for out in (whole[3 : count + 3], whole[-count:], whole[3 : count + 3]):
        gpu.sum_vectors_to_host(out, sources, "float32")
        assert_same_bits(out, oracle([src.memory for src in sources], "float32"), "sum")
        gpu.copy_to_devices(sources, out)
        assert_same_bits(sources[1].get(), out, "copy")
    assert (machine.counts["registered"], machine.counts["unregistered"]) == (1, 0)
    before = machine.counts["pinned_calls"]
    gpu.sum_vectors_to_host(whole[:count], sources, "float32")
    assert machine.counts["pinned_calls"] == before, "no block between"
    del out, whole
    gc.collect()
    assert machine.counts["unregistered"] == 1
    assert machine.owner(sources[0].data.ptr) == 0


def test_private_memory_is_not_locked_where_a_fork_would_take_it_away(stand_in, monkeypatch):
    """Memory that processes share is."""
    gpu, cupy, machine = stand_in()
    monkeypatch.setattr(gpu, "_linux", (5, 11))
    count = gpu.LOCK_FROM_BYTES // 4
    source, arena = place(cupy, random_vector("float32", count, 1)), Arena(64 << 20)
    for number, out in enumerate([np.empty(count, "f4"), arena.empty(count, np.dtype("f4"))]):
        gpu.sum_vectors_to_host(out, [source], "float32")
        assert_same_bits(out, source.memory, "sum")
        assert machine.counts["registered"] == number


def test_memory_of_the_arena_is_unlocked_before_it_goes_back(stand_in, monkeypatch):
    """Pages that the system takes back would stay locked, and a device would write where nobody reads."""
    gpu, cupy, machine = stand_in()
    arena, order = Arena(64 << 20), []
    unlock, absorb = cupy.cuda.runtime.hostUnregister, Arena._absorb
    monkeypatch.setattr(cupy.cuda.runtime, "hostUnregister", lambda at: (order.append("unlocked"), unlock(at)))
    block = arena.empty(gpu.LOCK_FROM_BYTES // 4, np.dtype("f4"))
    monkeypatch.setattr(Arena, "_absorb", lambda self: (order.append("given back"), absorb(self)))
    gpu.sum_vectors_to_host(block[500:1500], [place(cupy, random_vector("float32", 1000, 1))], "float32")
    assert (machine.counts["registered"], order) == (1, [])
    del block
    gc.collect()
    assert order == ["unlocked", "given back"]


def test_memory_that_is_not_to_be_locked(stand_in, monkeypatch):
    """Little of it, or nobody knows whose, or the system refuses: blocks between, as before."""
    gpu, cupy, machine = stand_in()
    monkeypatch.setattr(gpu, "_linux", (6, 1))
    count = gpu.LOCK_FROM_BYTES // 4
    source = place(cupy, random_vector("float32", count, 3))
    foreign = np.frombuffer(bytearray(4 * count), "f4")
    refused = np.empty(count, "f4")

    def refuse(*_: object) -> None:
        refusals.append(1)
        raise StandInError(2)

    refusals: list[int] = []
    little = np.empty(count - 1, "f4")
    gpu.sum_vectors_to_host(little, [source[1:]], "float32")
    assert_same_bits(little, source.memory[1:], "little")
    part_of_more = np.lib.stride_tricks.as_strided(np.empty(2 * count, "f4"), (count,))
    for memory in (foreign, part_of_more):
        gpu.sum_vectors_to_host(memory, [source], "float32")
        assert_same_bits(memory, source.memory, "foreign")
    assert machine.counts["registered"] == 0
    monkeypatch.setattr(cupy.cuda.runtime, "hostRegister", refuse)
    for _ in range(2):
        refused[:] = 0
        gpu.sum_vectors_to_host(refused, [source], "float32")
        assert_same_bits(refused, source.memory, "refused")
    assert len(refusals) == 1, "asked once"
    del refused
    gc.collect()
    assert machine.counts["unregistered"] == 0


@pytest.mark.gpu
@pytest.mark.skipif(device_count() == 0, reason="needs CuPy and a GPU")
def test_a_thread_that_is_new_to_the_device_finds_pinned_memory(import_gpu):
    """CUDA calls all memory pageable in a thread that has no context."""
    gpu, found = import_gpu(), []
    pinned, locked = gpu.pinned_empty(1000, "float32"), np.empty(gpu.LOCK_FROM_BYTES, "u1")
    assert gpu.is_pinned(locked)
    for memory in (pinned, locked):
        thread = threading.Thread(target=lambda memory=memory: found.append(gpu._pinned_address(memory)))
        thread.start()
        thread.join()
    assert found == [pinned.ctypes.data, locked.ctypes.data]


def test_many_sums_are_queued_together(stand_in):
    gpu, cupy, machine = stand_in()
    counts = [0, 1, 1001, gpu.LOCK_FROM_BYTES // 4, 5]
    jobs, wanted = [], []
    for number, count in enumerate(counts):
        sources = [random_vector("float32", count, 10 * number + seed) for seed in range(2)]
        jobs.append((np.empty(count, "f4"), [place(cupy, src) for src in sources]))
        wanted.append(oracle(sources, "float32"))
    gpu.sum_many_to_host(jobs, "float32")
    for (out, _), expected in zip(jobs, wanted, strict=True):
        assert_same_bits(out, expected, out.size)
    assert len(machine.launches) == 4


# The launch


def test_the_grid_fills_the_device_and_no_more(stand_in):
    gpu, cupy, machine = stand_in()
    assert f"__launch_bounds__({gpu.THREADS}, {gpu.BLOCKS_PER_SM})" in SOURCE.read_text()
    for count, offset, blocks in [(1, 0, 1), (4096, 0, 4), (4104, 0, 5), (1 << 20, 0, 12), (1 << 20, 1, 12)]:
        machine.launches.clear()
        out = gpu.pinned_empty(count, "float32")
        gpu.start_sum(out, [place(cupy, np.ones(count, "f4"), k * offset) for k in range(2)], "float32").wait()
        [(grid, block, args)] = machine.launches
        assert (grid, block) == (blocks, 256)
        assert args[11:14] == (count, 0, 0 if offset else count // 4)


@pytest.mark.parametrize("itemsizes", [(1, 1), (2, 2), (4, 4, 4), (8, 8), (4, 2, 2)])
def test_split_into_packs(stand_in, itemsizes):
    gpu, _, _ = stand_in()
    lanes = 16 // max(itemsizes)
    for count, *offsets in itertools.product([0, 1, 7, 16, 40], *(range(0, 32, size) for size in itemsizes)):
        head, packs = gpu.split_into_packs([4096 + offset for offset in offsets], itemsizes, count)
        starts = [
            first
            for first in range(lanes)
            if all((o + first * size) % (lanes * size) == 0 for o, size in zip(offsets, itemsizes, strict=True))
        ]
        if not starts:
            assert packs == 0
        else:
            assert (head, packs) == (starts[0], max(0, (count - starts[0]) // lanes))


# Several devices


@pytest.mark.parametrize("peers", [set(), {(0, 1), (0, 2)}, {(0, 2)}])
@pytest.mark.parametrize("dtype", DTYPES)
def test_vectors_of_several_devices(stand_in, monkeypatch, dtype, peers):
    gpu, cupy, machine = stand_in(peers)
    monkeypatch.setattr(gpu, "SCRATCH_BYTES", 512)
    for count, num_vectors in itertools.product(SIZES[:-1], [3, 12]):
        sources, on_device = [random_vector(dtype, count, seed) for seed in range(num_vectors)], []
        for k, src in enumerate(sources):
            with cupy.cuda.Device(k % 3):
                on_device.append(place(cupy, np.zeros_like(src)))
                machine.current_stream().queue(lambda to=on_device[-1], src=src: np.copyto(to.memory, src))
        machine.counts.clear()
        machine.scratch_of.clear()
        out, stream = gpu.pinned_empty(count, dtype), gpu.streams(0, 1)[0]
        gpu.start_sum(out, on_device, dtype, stream=stream).wait()
        assert_same_bits(out, oracle(sources, dtype), (count, num_vectors))
        away = sum((0, k % 3) not in peers for k in range(num_vectors) if k % 3)
        assert machine.counts["device"] == (away if count else 0)
        assert machine.scratch_of <= {stream.ptr}  # the pool of that stream
        pageable = host.empty(count, dtype)
        gpu.sum_vectors_to_host(pageable, on_device, dtype)
        assert_same_bits(pageable, oracle(sources, dtype), (count, num_vectors))


def test_peer_access_that_is_enabled_already(stand_in):
    gpu, cupy, machine = stand_in({(0, 1)})
    machine.enabled.add((0, 1))
    sources = []
    for device_id in range(2):
        with cupy.cuda.Device(device_id):
            sources.append(place(cupy, np.ones(10, "i4")))
    out = gpu.pinned_empty(10, "int32")
    gpu.start_sum(out, sources, "int32").wait()
    np.testing.assert_array_equal(out, 2)


def test_copies_to_several_devices(stand_in):
    gpu, cupy, machine = stand_in()
    src = gpu.pinned_empty(1001, "float32")
    src[:] = np.arange(1001)
    dsts = []
    for k in range(6):
        with cupy.cuda.Device(k % 3):
            dsts.append(place(cupy, np.zeros(1001, "f4")))
            dsts[-1] += np.float32(100)
    transfer = gpu.start_copy(dsts, src, stream=gpu.streams(0, 1)[0])
    for dst in dsts:
        dst += np.float32(1)
        np.testing.assert_array_equal(dst.get(), np.arange(1001) + 1)
    assert transfer.done()
    assert machine.copies == [(0, None), (0, 0), (1, None), (1, 1), (2, None), (2, 2)]


@pytest.mark.gpu
@pytest.mark.skipif(device_count() < 2, reason="needs CuPy and two GPUs")
@pytest.mark.parametrize("reads", [True, False])
def test_two_gpus(import_gpu, monkeypatch, reads):
    gpu, cupy = import_gpu(), importlib.import_module("cupy")
    monkeypatch.setattr(gpu, "SCRATCH_BYTES", 1 << 16)
    if not reads:
        monkeypatch.setattr(gpu, "_enable_peer", lambda *_: False)
    sources, on_device = [random_vector("float32", 100_003, seed) for seed in range(4)], []
    for k, src in enumerate(sources):
        with cupy.cuda.Device(k % 2):
            on_device.append(cupy.asarray(src))
    out = gpu.pinned_empty(100_003, "float32")
    gpu.start_sum(out, on_device, "float32", stream=gpu.streams(0, 1)[0]).wait()
    assert_same_bits(out, oracle(sources, "float32"), "two devices")
    gpu.start_copy(on_device, out).wait()
    for vector in on_device:
        assert_same_bits(vector.get(), out, "copied back")


@pytest.mark.gpu
@pytest.mark.skipif(device_count() == 0, reason="needs CuPy and a GPU")
def test_more_than_two_to_the_31_elements(import_gpu):
    gpu, cupy = import_gpu(), importlib.import_module("cupy")
    count = (1 << 31) + 19
    if cupy.cuda.runtime.memGetInfo()[0] < 4 * count:
        pytest.skip("needs 8 GiB of device memory")
    sources, out = [cupy.full(count, k + 1, "u1") for k in range(2)], cupy.zeros(count, "u1")
    sources[0][-5:] = 7
    gpu.start_sum(out, sources, "uint8").wait()
    assert int((out[: 1 << 30] != 3).sum()) == 0
    assert int((out[1 << 30 : -5] != 3).sum()) == 0
    assert (out[-5:].get() == 9).all()


# Mistakes


def test_mistakes(stand_in):
    gpu, cupy, machine = stand_in()
    one, three = place(cupy, np.ones(1, "f4")), place(cupy, np.ones(3, "f4"))
    pinned = gpu.pinned_empty(3, "float32")
    with cupy.cuda.Device(1):
        elsewhere = place(cupy, np.ones(3, "f4"))
    flat = np.ones((3, 1), "f4")
    odd = StandInArray(machine, machine.allocate(13, 0)[1:].view("f4"), 0)
    odd_pinned = gpu.pinned_empty(13, "uint8")[1:].view("f4")
    for error, call in [
        (DTypeMismatchError, lambda: gpu.start_sum(pinned, [three], "float64")),
        (DTypeMismatchError, lambda: gpu.start_sum(pinned, [three], "complex64")),
        (DTypeMismatchError, lambda: gpu.start_sum(gpu.pinned_empty(3, "float64"), [three], "float32")),
        (DTypeMismatchError, lambda: gpu.start_sum(gpu.pinned_empty(3, "float16"), [three], "float32")),
        (DTypeMismatchError, lambda: gpu.start_copy([three], gpu.pinned_empty(3, "int32"))),
        (DTypeMismatchError, lambda: gpu.pinned_empty(3, "complex64")),
        (ShapeMismatchError, lambda: gpu.start_sum(pinned, [three, one], "float32")),
        (ShapeMismatchError, lambda: gpu.start_sum(flat, [three], "float32")),
        (ShapeMismatchError, lambda: gpu.start_copy([three, one], pinned)),
        (ShapeMismatchError, lambda: gpu.copy_to_devices([one], np.ones(3, "f4"))),
        (UnsupportedError, lambda: gpu.start_sum(np.ones(3, "f4"), [three], "float32")),
        (UnsupportedError, lambda: gpu.start_copy([three], np.ones(3, "f4"))),
        (UnsupportedError, lambda: gpu.start_sum(elsewhere, [three], "float32")),
        (UnsupportedError, lambda: gpu.start_sum(gpu.pinned_empty(6, "float32")[::2], [three], "float32")),
        (UnsupportedError, lambda: gpu.start_sum(gpu.pinned_empty(2, "float32"), [three[::2]], "float32")),
        (UnsupportedError, lambda: gpu.start_sum(pinned, [three, odd], "float32")),
        (UnsupportedError, lambda: gpu.start_sum(odd_pinned, [three], "float32")),
    ]:
        with pytest.raises(error):
            call()


@pytest.mark.parametrize("dtype", ["int8", "int64", "uint8"])
def test_integers_are_not_scaled(stand_in, dtype):
    gpu, cupy, _ = stand_in()
    vector = place(cupy, np.ones(3, dtype))
    with pytest.raises(DTypeMismatchError, match=dtype):
        gpu.start_sum(gpu.pinned_empty(3, dtype), [vector], dtype, scale=0.5)
