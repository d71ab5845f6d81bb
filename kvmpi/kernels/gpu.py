"""Sums of device vectors into host memory, and copies back, by CuPy; import it when there is a device array.

A device vector is a one-dimensional C-contiguous ``cupy.ndarray`` in the storage dtype of ``kernels.host``. Pinned
memory is what ``pinned_empty`` gives, and any other host memory that CUDA has locked and mapped. Other memory is
reached by way of pinned blocks, at a fifth of the rate, or is locked when it first takes part (``LOCK_FROM_BYTES``).

Everything is queued behind the work that is by then on the current stream of each vector's device, and later work there
sees what was written to device vectors: by events, no device is ever synchronised. Until a ``Transfer`` is done, its
sources must not change. Once a dtype's kernel is compiled and the pools are filled, nothing is allocated but Python
objects, and scratch where a device cannot read another's memory.

Sums have the bits of ``kernels.host``: added from left to right, half types in float32 and rounded once. Only the bits
of a NaN in a sum that is not narrowed are not those of the host.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import cupy
import numpy as np

from kvmpi.errors import DTypeMismatchError, ShapeMismatchError, UnsupportedError
from kvmpi.kernels import host
from kvmpi.kernels.host import Array

# vector_sum.cu has these four numbers too.
THREADS, BLOCKS_PER_SM = 256, 4
PACK_BYTES, MAX_DIRECT = 16, 8

#: Bytes of a block of pinned memory through which pageable memory is reached; there are two at a time.
STAGE_BYTES = 4 << 20

#: From this size on host memory is locked when something in it is first transferred, and until it is freed. For less
#: that is not worth it, and pages may be others' too. It takes 0.03 ms/MiB, or 0.37 where the pages are not there yet,
#: and saves 0.1 ms/MiB each time (H200 on PCIe 5).
LOCK_FROM_BYTES = 1 << 20

#: Since this version of Linux a process keeps its locked pages when it forks, as data loaders do. Before, a private
#: page was of both until one wrote there: who was first got another page, and the device went on with the old one.
_KEEPS_LOCKED_PAGES = (5, 12)

#: Bytes of scratch for each vector that has to be copied to the device that sums it.
SCRATCH_BYTES = 8 << 20

_NOT_READY, _PEER_ACCESS_ALREADY_ENABLED = 600, 704  # cudaError_t
_REGISTER_PORTABLE = 1  # cudaHostRegisterPortable: for all devices

_lock = threading.Lock()
_linux = tuple(map(int, re.findall(r"\d+", os.uname().release)[:2])) if sys.platform == "linux" else (0, 0)
_streams: dict[int, list[Any]] = {}  # by device; guarded by _lock
_thread = threading.local()  # "entered": devices that this thread has used
_events: dict[int, list[Any]] = {}  # unused ones by device; list.pop and list.append need no lock


class Transfer:
    """Queued work, for one thread at a time. It keeps the memory that the work uses; dropped too early, it waits."""

    __slots__ = ("_events", "_kept")

    def __init__(self, events: list[tuple[int, Any]], kept: object) -> None:
        self._events, self._kept = events, kept

    def done(self) -> bool:
        """Whether the work is done. Does not block.

        Raises:
            cupy.cuda.runtime.CUDARuntimeError: the device failed.
        """
        while self._events:
            status = cupy.cuda.runtime.eventQuery(self._events[-1][1].ptr)
            if status == _NOT_READY:
                return False
            if status:  # Event.done says False then, for ever
                raise cupy.cuda.runtime.CUDARuntimeError(status)
            _give_event(*self._events.pop())
        self._kept = None
        return True

    def wait(self) -> None:
        """Return when the work is done; raises as ``done``."""
        while self._events:
            self._events[-1][1].synchronize()
            _give_event(*self._events.pop())
        self._kept = None

    def __del__(self) -> None:
        if self._events and not sys.is_finalizing():
            self.wait()


def start_sum(dst: Any, sources: Sequence[Any], dtype: str, *, scale: float = 1.0, stream: Any = None) -> Transfer:
    """Queue ``dst = (sources[0] + sources[1] + ...) * scale`` on the device of the first source.

    The kernel writes pinned memory itself: the sum never takes memory on the device and crosses the bus once. One
    vector that is neither scaled nor converted is copied.

    Args:
        dst: shape ``(count,)``, pinned, or a device vector on the device of ``sources[0]``; there it may be one of the
            sources. Of the storage dtype of ``dtype``, or of float32 where that is a half type: the sum is not rounded.
        sources: device vectors of ``dtype`` and the same shape; from several devices, they are read from their own
            memory where the devices permit it. Where that is a half type they may all be of float32, as sums that have
            not been rounded.
        scale: for float types; the product is formed in the dtype in which values are added up.
        stream: one of the device of ``sources[0]``; its current stream by default.
    Raises:
        DTypeMismatchError, ShapeMismatchError: the vectors do not fit; an integer type is scaled.
        UnsupportedError: ``dst`` is not pinned or on another device; a vector is not contiguous.
    """
    _check_sum(dst, sources, dtype, scale)
    if dst.size == 0:
        return Transfer([], None)
    home, on_host = sources[0].device, isinstance(dst, np.ndarray)
    with home:
        stream = cupy.cuda.get_current_stream() if stream is None else stream
        address = _pinned_address(dst) if on_host else dst.data.ptr
        _queue_after(sources if on_host else [*sources, dst], stream, home.id)
        kept = _queue_sum(address, dst.dtype, sources, dtype, scale, slice(0, dst.size), stream)
        event = _record(stream, home.id)
        if not on_host:
            _show(event, stream)
    return Transfer([(home.id, event)], (dst, sources, kept))


def start_copy(dsts: Sequence[Any], src: Array, *, stream: Any = None) -> Transfer:
    """Queue copies of pinned ``src`` to every device vector of ``dsts``.

    On each device the first vector comes from the host, by the copy engine: it leaves the multiprocessors to others and
    has the full rate of the bus, which a kernel that reads host memory has not. The others are copied from the first
    one, at the speed of the device's memory.

    Args:
        dsts: of the dtype and shape of ``src``, in any order of devices.
        stream: one of the device of ``dsts[0]``, its current stream by default. The vectors of another device come on
            that device's first stream of ``streams``.
    Raises:
        DTypeMismatchError, ShapeMismatchError: the vectors do not fit.
        UnsupportedError: ``src`` is not pinned; a vector is not contiguous.
    """
    assert dsts, "a copy to no vector"
    by_device: dict[int, list[Any]] = {}
    for dst in dsts:
        _check_vector(dst, src.shape, src.dtype)
        by_device.setdefault(dst.device.id, []).append(dst)
    if src.size == 0:
        return Transfer([], None)
    events: list[tuple[int, Any]] = []
    transfer = Transfer(events, (dsts, src))
    for device_id, vectors in by_device.items():
        with vectors[0].device:
            own = streams(device_id, 1)[0] if events else stream
            own = cupy.cuda.get_current_stream() if own is None else own
            address = _pinned_address(src)
            _queue_after(vectors, own, device_id)
            for dst in vectors:
                _queue_copy(dst.data.ptr, address, src.nbytes, own)
                address = vectors[0].data.ptr
            events.append((device_id, _record(own, device_id)))
            _show(events[-1][1], own)
    return transfer


def queue_copy(dst: Any, src: Any, stream: Any) -> None:
    """Queue ``dst = src``, device vectors of one length and dtype, on any devices, with nothing waited for."""
    _queue_copy(dst.data.ptr, src.data.ptr, src.nbytes, stream)


def mark(stream: Any) -> Transfer:
    """All that is queued by now on a stream of the current device."""
    device_id = cupy.cuda.runtime.getDevice()
    return Transfer([(device_id, _record(stream, device_id))], None)


def sum_many_to_host(jobs: Sequence[tuple[Array, Sequence[Any]]], dtype: str) -> None:
    """``sum_vectors_to_host`` of each ``(dst_host, sources_device)``, queued together."""
    queued: list[tuple[Transfer, Array | None, Array | None]] = []
    for dst, sources in jobs:
        with sources[0].device:
            if dst.size == 0 or is_pinned(dst):
                queued.append((start_sum(dst, sources, dtype), None, None))
            elif dst.nbytes <= STAGE_BYTES:
                block = pinned_empty(dst.nbytes, "uint8").view(dst.dtype)
                queued.append((start_sum(block, sources, dtype), dst, block))
            else:
                sum_vectors_to_host(dst, sources, dtype)
    for transfer, pageable, staged in queued:
        transfer.wait()
        if pageable is not None and staged is not None:
            np.copyto(pageable, staged)


def sum_vectors_to_host(dst_host: Array, sources_device: Sequence[Any], dtype: str) -> None:
    """``dst_host = sources_device[0] + ...``, as ``start_sum``; returns when ``dst_host``, pinned or not, holds it."""
    _check_sum(dst_host, sources_device, dtype, 1.0)
    home = sources_device[0].device
    with home:
        if dst_host.size == 0 or is_pinned(dst_host):
            start_sum(dst_host, sources_device, dtype).wait()
            return
        stream = cupy.cuda.get_current_stream()
        _queue_after(sources_device, stream, home.id)
        pending: list[tuple[Transfer, slice, Array]] = []
        for part, block in _staged(dst_host):
            kept = _queue_sum(block.ctypes.data, block.dtype, sources_device, dtype, 1.0, part, stream)
            pending.append((Transfer([(home.id, _record(stream, home.id))], (block, kept)), part, block))
            if len(pending) == 2:  # the device fills one block while the other is emptied
                _collect(dst_host, *pending.pop(0))
        for each in pending:
            _collect(dst_host, *each)


def copy_to_devices(dsts: Sequence[Any], src_host: Array) -> None:
    """``start_copy`` of host memory, pinned or not, on the current streams of the devices; returns when it is done."""
    for dst in dsts:
        _check_vector(dst, src_host.shape, src_host.dtype)
    home = dsts[0].device
    with home:
        if src_host.size == 0 or is_pinned(src_host):
            start_copy(dsts, src_host).wait()
            return
        stream, first = cupy.cuda.get_current_stream(), dsts[0]
        _queue_after(dsts, stream, home.id)
        pending: list[Transfer] = []
        for part, block in _staged(src_host):
            if len(pending) == 2:
                pending.pop(0).wait()
            np.copyto(block, src_host[part])
            _queue_copy(first.data.ptr + part.start * block.itemsize, block.ctypes.data, block.nbytes, stream)
            pending.append(Transfer([(home.id, _record(stream, home.id))], (first, block)))
        for dst in dsts[1:]:
            _queue_copy(dst.data.ptr, first.data.ptr, src_host.nbytes, stream)
        pending.append(Transfer([(home.id, _record(stream, home.id))], dsts))
        for transfer in pending:
            transfer.wait()


def is_pinned(array: Array) -> bool:
    """Whether kernels of the current device reach a host array; it is locked for that where it may be.

    Memory is locked as a whole, if it is known whose it is: a NumPy array's own, or that of an object with an
    ``__array_interface__`` that says that it ``owns_memory``. It stays so until that is freed.
    """
    if _mapped(array) is not None:
        return True
    memory = _memory_of(array)
    if memory is None or memory.nbytes < LOCK_FROM_BYTES or memory.address in _refused:
        return False
    runtime = cupy.cuda.runtime
    try:
        forget = weakref.finalize(memory.owner, _unlock, memory.address, os.getpid())
        forget.atexit = False
    except TypeError:  # nobody can tell when it is freed
        return False
    try:
        runtime.hostRegister(memory.address, memory.nbytes, _REGISTER_PORTABLE)
    except runtime.CUDARuntimeError:  # pages that another has locked, or more than the system lets one lock
        forget.detach()
        if _mapped(array) is None:
            _refused.add(memory.address)
    return _mapped(array) is not None


def pinned_empty(count: int, dtype: str) -> Array:
    """As ``host.empty``, of pinned memory from CuPy's pool, to which it returns when the last array on it is gone."""
    storage = host.empty(0, dtype).dtype
    if count == 0:
        return np.empty(0, storage)
    return np.frombuffer(cupy.cuda.alloc_pinned_memory(count * storage.itemsize), storage, count)


def streams(device: int, n: int) -> list[Any]:
    """The first ``n`` of kvmpi's streams on a device; the null stream does not wait for them, nor they for it."""
    with _lock:
        made = _streams.setdefault(device, [])
        with cupy.cuda.Device(device):
            while len(made) < n:
                made.append(cupy.cuda.Stream(non_blocking=True))
        return made[:n]


@contextmanager
def own_stream(device: Any, number: int = 0) -> Iterator[Any]:
    """Make ``streams(device)[number]`` the current one: for work that waits for nothing but what has been waited for.

    An engine's thread has the null stream otherwise, on which all is queued that a program has queued since.
    """
    stream = streams(device.id, number + 1)[number]
    with device, stream:
        yield stream


def split_into_packs(addresses: Sequence[int], itemsizes: Sequence[int], count: int) -> tuple[int, int]:
    """Elements before the first pack of ``PACK_BYTES`` of the largest itemsize, and the number of packs.

    There are no packs where no element of all vectors is aligned to a pack.
    """
    lanes = PACK_BYTES // max(itemsizes)
    head = -(addresses[0] // itemsizes[0]) % lanes
    for address, itemsize in zip(addresses, itemsizes, strict=True):
        if (address + head * itemsize) % (lanes * itemsize):
            return 0, 0
    return head, max(0, (count - head) // lanes)


# Queueing. The device of the stream is the current one.


def _queue_sum(
    dst: int, dst_dtype: Any, sources: Sequence[Any], dtype: str, scale: float, part: slice, stream: Any
) -> list[Any]:
    """Sum a part of the sources to the address ``dst``; returns what must be kept until that is done."""
    home, itemsize = sources[0].device.id, sources[0].dtype.itemsize
    if len(sources) == 1 and scale == 1 and dst_dtype == sources[0].dtype:
        _queue_copy(dst, sources[0].data.ptr + part.start * itemsize, (part.stop - part.start) * itemsize, stream)
        return []
    storage = host.STORAGE[dtype]
    names = [dtype if found == storage else host.ACCUMULATE[dtype] for found in (sources[0].dtype, dst_dtype)]
    kernel = _kernel(*names)
    factor = host.STORAGE[host.ACCUMULATE[dtype]].type(scale)
    itemsizes = [dst_dtype.itemsize] + len(sources) * [itemsize]
    far = [k for k, src in enumerate(sources) if not _can_read(home, src)]
    length = min(SCRATCH_BYTES // itemsize, part.stop - part.start) if far else part.stop - part.start
    kept: list[Any] = []
    with stream:
        # Memory of a stream goes back to a pool of that stream: whoever gets it next uses it after this sum.
        scratch = {k: cupy.empty(length, sources[k].dtype) for k in far}
        for start in range(part.start, part.stop, length):
            count = min(length, part.stop - start)
            addresses = [src.data.ptr + start * itemsize for src in sources]
            for k, block in scratch.items():
                _queue_copy(block.data.ptr, addresses[k], count * itemsize, stream)
                addresses[k] = block.data.ptr
            addresses.insert(0, dst + (start - part.start) * dst_dtype.itemsize)
            kept.append(_launch(kernel, addresses, itemsizes, count, factor, _max_blocks(home)))
    return kept


def _launch(
    kernel: Any, addresses: list[int], itemsizes: list[int], count: int, factor: np.generic, max_blocks: int
) -> Array:
    """The result's address comes first. Returns the table of those that are no arguments, for it to be kept."""
    direct, others = addresses[: 1 + MAX_DIRECT], addresses[1 + MAX_DIRECT :]
    more = pinned_empty(len(others), "int64")
    more[:] = others
    head, packs = split_into_packs(addresses, itemsizes, count)
    singles = count - packs * (PACK_BYTES // max(itemsizes))
    blocks = min(-(-max(packs, singles) // THREADS), max_blocks)
    pointers = [*direct, *(1 + MAX_DIRECT - len(direct)) * [0], more.ctypes.data if others else 0]
    num_sources = np.int32(len(addresses) - 1)
    kernel((blocks,), (THREADS,), (*pointers, num_sources, count, head, packs, factor))
    return more


def _queue_copy(dst: int, src: int, nbytes: int, stream: Any) -> None:
    cupy.cuda.runtime.memcpyAsync(dst, src, nbytes, cupy.cuda.runtime.memcpyDefault, stream.ptr)


def _queue_after(vectors: Sequence[Any], stream: Any, home: int) -> None:
    """Let ``stream`` wait for what is queued on the current stream of each vector's device."""
    for device_id, device in {vector.device.id: vector.device for vector in vectors}.items():
        with device:
            current = cupy.cuda.get_current_stream()
            if device_id == home and current.ptr == stream.ptr:
                continue
            event = _record(current, device_id)
        stream.wait_event(event)
        _give_event(device_id, event)  # a wait is for what was recorded before it, whatever is recorded later


def _show(event: Any, stream: Any) -> None:
    """Let the current stream wait for what was recorded on ``stream``."""
    current = cupy.cuda.get_current_stream()
    if current.ptr != stream.ptr:
        current.wait_event(event)


def _record(stream: Any, device_id: int) -> Any:
    try:
        event = _events[device_id].pop()
    except (KeyError, IndexError):
        event = cupy.cuda.Event(disable_timing=True)
    event.record(stream)
    return event


def _give_event(device_id: int, event: Any) -> None:
    _events.setdefault(device_id, []).append(event)


def _staged(array: Array) -> Iterator[tuple[slice, Array]]:
    """Parts of a vector, and for each in turn one of two pinned blocks of its length."""
    # Lengths are powers of two, so that the pool has blocks of few sizes.
    length = min(STAGE_BYTES // array.itemsize, 1 << (array.size - 1).bit_length())
    blocks = [pinned_empty(length * array.itemsize, "uint8").view(array.dtype) for _ in range(2)]
    for k, start in enumerate(range(0, array.size, length)):
        part = slice(start, min(start + length, array.size))
        yield part, blocks[k % 2][: part.stop - part.start]


def _collect(dst: Array, transfer: Transfer, part: slice, block: Array) -> None:
    transfer.wait()
    np.copyto(dst[part], block)


@functools.cache
def _kernel(dtype: str, out_dtype: str) -> Any:
    name = f"kvmpi_sum_{dtype}_to_{out_dtype}"
    source = Path(__file__).with_name("vector_sum.cu").read_text(encoding="utf-8")
    instance = f"SUM_KERNEL({name}, {dtype.capitalize()}, {out_dtype.capitalize()})"
    return cupy.RawKernel(f"{source}\n{instance}\n", name, options=("--std=c++14",))


@functools.cache
def _max_blocks(device_id: int) -> int:
    return int(cupy.cuda.Device(device_id).attributes["MultiProcessorCount"]) * BLOCKS_PER_SM


def _can_read(home: int, vector: Any) -> bool:
    """Whether kernels of the device ``home``, the current one, can read the vector where it is."""
    if vector.device.id == home:
        return True
    # Peer access is not for all memory: some allocators map theirs for one device only.
    readable = _enable_peer(home, vector.device.id) and cupy.cuda.runtime.pointerGetAttributes(vector.data.ptr)
    return bool(readable and readable.devicePointer)


@functools.cache
def _enable_peer(device_id: int, peer_id: int) -> bool:
    runtime = cupy.cuda.runtime
    if not runtime.deviceCanAccessPeer(device_id, peer_id):
        return False
    with cupy.cuda.Device(device_id):
        try:
            runtime.deviceEnablePeerAccess(peer_id)
        except runtime.CUDARuntimeError as error:
            if error.status != _PEER_ACCESS_ALREADY_ENABLED:
                raise
    return True


def _mapped(array: Array) -> int | None:
    """Where kernels of the current device find a host array; None if it is not pinned or not contiguous."""
    if not (array.flags.c_contiguous and array.flags.aligned):
        return None
    runtime = cupy.cuda.runtime
    _enter_context()
    start = array.ctypes.data
    attributes = [runtime.pointerGetAttributes(at) for at in (start, start + max(0, array.nbytes - 1))]
    if any(found.type not in (runtime.memoryTypeHost, runtime.memoryTypeManaged) for found in attributes):
        return None
    return attributes[0].devicePointer or None


def _enter_context() -> None:
    """Let this thread have the context of the current device: one that has not used it yet finds no memory pinned."""
    device_id = cupy.cuda.runtime.getDevice()
    entered = _thread.__dict__.setdefault("entered", set())
    if device_id not in entered:
        _give_event(device_id, cupy.cuda.Event(disable_timing=True))  # any use of it will do
        entered.add(device_id)


class _Memory(NamedTuple):
    owner: Any  # with it the memory is freed
    address: int
    nbytes: int


def _memory_of(array: Array) -> _Memory | None:
    """All of the memory that a view is of; None where nobody says what that is."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    if array.base is None:
        stays = array.flags.owndata and _linux >= _KEEPS_LOCKED_PAGES
        return _Memory(array, array.ctypes.data, array.nbytes) if stays else None
    if not getattr(array.base, "owns_memory", False):
        return None
    whole = np.asarray(array.base)
    return _Memory(array.base, whole.ctypes.data, whole.nbytes)


#: Where memory begins that could not be locked.
_refused: set[int] = set()


def _unlock(address: int, pid: int) -> None:
    """Memory is about to be freed. In a forked child it is still the parent's."""
    if pid == os.getpid() and not sys.is_finalizing():
        cupy.cuda.runtime.hostUnregister(address)


def _pinned_address(array: Array) -> int:
    address = _mapped(array)
    if address is None:
        raise UnsupportedError("host memory of a transfer is pinned and contiguous: take it from pinned_empty()")
    return address


# Checks


def _check_sum(dst: Any, sources: Sequence[Any], dtype: str, scale: float) -> None:
    assert sources, "the sum of no vectors"
    storage = host.empty(0, dtype).dtype
    wide = host.STORAGE[host.ACCUMULATE[dtype]]
    if dst.dtype not in (storage, wide):
        raise DTypeMismatchError(f"a sum of {dtype} is kept as {storage} or as {wide}, dst is {dst.dtype}")
    if scale != 1 and wide.kind != "f":
        raise DTypeMismatchError(f"a sum of {dtype} cannot be scaled by {scale}: only float types can")
    for src in sources:
        _check_vector(src, dst.shape, wide if sources[0].dtype == wide else storage)
    if not isinstance(dst, np.ndarray):
        _check_vector(dst, dst.shape, dst.dtype)
        if dst.device.id != sources[0].device.id:
            raise UnsupportedError(f"dst is on device {dst.device.id}, and the sum on {sources[0].device.id}")


def _check_vector(vector: Any, shape: tuple[int, ...], dtype: Any) -> None:
    if vector.dtype != dtype:
        raise DTypeMismatchError(f"vectors are kept as {vector.dtype} and {dtype}: expected the same")
    if vector.shape != shape or len(shape) != 1:
        raise ShapeMismatchError(f"vectors of shapes {vector.shape} and {shape}: expected one dimension, equal lengths")
    if not vector.flags.c_contiguous or vector.data.ptr % vector.dtype.itemsize:
        raise UnsupportedError(f"a device vector of {vector.dtype} is not contiguous or not aligned to its elements")
