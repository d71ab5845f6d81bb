"""NCCL's collectives, from GPU to GPU: a rank's vectors are summed on one of its devices, then NCCL does the rest."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from kvmpi.arrays import address_of
from kvmpi.collectives.algorithm import Act, Tensor
from kvmpi.collectives.comm import Comm
from kvmpi.collectives.forming import exchange
from kvmpi.collectives.topology import discover
from kvmpi.collectives.waiting import wait_all
from kvmpi.deadline import Deadline
from kvmpi.errors import KVTimeoutError, PeerLostError
from kvmpi.kernels import host

Buffer = npt.NDArray[Any]

_TAG_OFFER, _TAG_ID = 16, 17
_DOING = "starting NCCL"
#: By this setting NCCL takes ranks for ranks of different hosts: then several may share a GPU.
_HOST_ID = "NCCL_HOSTID"
_CONNECTS_LATE = "NCCL_RUNTIME_CONNECT"


class Nccl:
    """See ``Algorithm``; also ``out`` and ``copies`` may be on devices, and then a sum passes through no host memory.

    Half types are added up in float32 and rounded once. The order of additions is NCCL's business. What is on the host
    goes to the device and back.
    """

    def __init__(self, comm: Any, modules: _Modules, device: Any) -> None:
        self._comm, self._cupy, self._nccl, self._gpu = comm, modules.cupy, modules.nccl, modules.gpu
        self._device = device
        with device:  # of its own: what waits for other ranks there must hold up nothing of another communicator
            self._stream = modules.cupy.cuda.Stream(non_blocking=True)
        self._queued: list[Any] = []  # transfers on the stream
        self._types = {
            np.dtype(name): getattr(self._nccl, f"NCCL_{name.upper()}")
            for name in ("float32", "float64", "int8", "uint8", "int32", "int64")
        }

    def allreduce(self, tensors: Sequence[Tensor], dtype: str, act: Act) -> None:
        tensors = [tensor for tensor in tensors if tensor.out.size]
        with self._device, self._stream:
            terms = [self._sum_own(tensor, dtype) for tensor in tensors]
            totals = [self._total(*pair, act) for pair in zip(tensors, terms, strict=True)]
            with self._together(act) as comm:
                for term, total in zip(terms, totals, strict=True):
                    kind = self._types[term.dtype]
                    comm.allReduce(
                        term.data.ptr, total.data.ptr, term.size, kind, self._nccl.NCCL_SUM, self._stream.ptr
                    )
            for tensor, total in zip(tensors, totals, strict=True):
                self._deliver((tensor.out, *tensor.copies), total, dtype, act.scale)
            self._finish()

    def reduce_scatter(self, vectors: Sequence[Buffer], out: Buffer, dtype: str, act: Act) -> None:
        with self._device, self._stream:
            term = self._sum_own(Tensor(vectors, vectors[0]), dtype)
            parts = [term[start:stop] for start, stop in act.segments(term.size)]
            with self._together(act) as comm:
                for root, part in enumerate(parts):
                    if part.size:
                        where, kind = part.data.ptr, self._types[part.dtype]
                        comm.reduce(where, where, part.size, kind, self._nccl.NCCL_SUM, root, self._stream.ptr)
            if out.size:
                self._deliver([out], parts[act.rank], dtype, act.scale)
            self._finish()

    def allgather(self, out: Buffer, act: Act) -> None:
        self._spread([(root, out[start:stop]) for root, (start, stop) in enumerate(act.segments(out.size))], act)

    def broadcast(self, buffer: Buffer, root: int, act: Act) -> None:
        self._spread([(root, buffer)], act)

    def _spread(self, parts: Sequence[tuple[int, Buffer]], act: Act) -> None:
        """Each part, which its root has, goes to all others."""
        with self._device, self._stream:
            found = [(root, part.view(np.uint8)) for root, part in parts if part.size]
            there = [self._empty(part.size, np.uint8) for _, part in found]
            for (root, part), memory in zip(found, there, strict=True):
                if root == act.rank:
                    self._gpu.copy_to_devices([memory], part)
            with self._together(act) as comm:
                for (root, _), memory in zip(found, there, strict=True):
                    where = memory.data.ptr
                    comm.broadcast(where, where, memory.size, self._nccl.NCCL_UINT8, root, self._stream.ptr)
            others = [(part, [m]) for (root, part), m in zip(found, there, strict=True) if root != act.rank]
            self._gpu.sum_many_to_host(others, "uint8")

    def close(self) -> None:
        """No call may follow, and none of this rank is under way."""
        comm, self._comm = self._comm, None
        if comm is not None:
            comm.abort()  # unlike destroy it does not wait for other ranks, which may be gone

    # ---- pieces. The device and the stream are the current ones.

    def _empty(self, count: int, dtype: Any) -> Any:
        """Memory of the device; whoever gets it next on this stream uses it later."""
        return self._cupy.empty(count, dtype)

    def _sum_own(self, tensor: Tensor, dtype: str) -> Any:
        """This rank's sum, in a dtype that NCCL adds up; one vector that needs no sum is itself that."""
        vectors = list(tensor.devices)
        for vector in tensor.vectors:
            vectors.append(self._empty(vector.size, vector.dtype))
            self._gpu.copy_to_devices(vectors[-1:], vector)
        wide = host.STORAGE[host.ACCUMULATE[dtype]]
        own = vectors[0]
        away = own.device.id != self._device.id
        if len(vectors) > 1 or own.dtype != wide or away:
            if away:  # a sum is formed where its first vector is
                vectors[0] = self._empty(own.size, own.dtype)
                self._gpu.queue_copy(vectors[0], own, self._stream)
            own = self._empty(own.size, wide)
            self._queued.append(self._gpu.start_sum(own, vectors, dtype, stream=self._stream))
        if own.dtype not in self._types:  # short integers, which NCCL does not know
            narrow, own = own, self._empty(own.size, np.int32)
            self._cupy.copyto(own, narrow)
        return own

    def _total(self, tensor: Tensor, term: Any, act: Act) -> Any:
        """Where the sum of all ranks goes: to the first array of this device that wants it as it is."""
        if act.scale == 1.0 and term.dtype == tensor.out.dtype:
            for wanted in (tensor.out, *tensor.copies):
                if self._is_here(wanted):
                    return wanted
        of_caller = any(term is vector for vector in tensor.devices)
        return self._empty(term.size, term.dtype) if of_caller else term

    def _is_here(self, array: Any) -> bool:
        return not isinstance(array, np.ndarray) and array.device.id == self._device.id

    @contextmanager
    def _together(self, act: Act) -> Iterator[Any]:
        """NCCL's communicator, which begins what it is asked for at the end; returns when that is done."""
        try:
            self._nccl.groupStart()
            try:
                yield self._comm
            finally:
                self._nccl.groupEnd()
            wait_all(
                [_Queued(self._comm, self._gpu.mark(self._stream))],
                act.deadline,
                lambda: f"{act.describe()}: {_late(act.deadline)}",
            )
        except BaseException as error:
            # What waits on the device for other ranks would do so for ever. Nothing can be exchanged any more.
            self._comm.abort()
            self._comm = None
            if isinstance(error, self._nccl.NcclError):
                raise PeerLostError(f"{act.describe()}: {error}") from None
            raise

    def _deliver(self, wanted: Sequence[Any], total: Any, dtype: str, scale: float) -> None:
        """Multiply, round, and copy to wherever the sum is wanted."""
        storage = host.STORAGE[dtype]
        if total.dtype != host.STORAGE[host.ACCUMULATE[dtype]]:  # a short integer
            wide, total = total, self._empty(total.size, storage)
            self._cupy.copyto(total, wide, casting="unsafe")
        elif scale != 1.0 or total.dtype != storage:
            here = [array for array in wanted if self._is_here(array)]
            rounded = here[0] if here else self._empty(total.size, storage)
            self._queued.append(self._gpu.start_sum(rounded, [total], dtype, scale=scale, stream=self._stream))
            total = rounded
        devices = [array for array in wanted if not isinstance(array, np.ndarray)]
        for array in devices:
            if array.data.ptr != total.data.ptr:
                self._gpu.queue_copy(array, total, self._stream)
        hosts = [array for array in wanted if isinstance(array, np.ndarray)]
        if hosts:
            self._gpu.sum_vectors_to_host(hosts[0], [total], dtype)
        for array in hosts[1:]:
            if address_of(array) != address_of(hosts[0]):
                np.copyto(array, hosts[0])

    def _finish(self) -> None:
        """Return when all is done that was queued."""
        queued, self._queued = self._queued, []
        for transfer in [*queued, self._gpu.mark(self._stream)]:
            transfer.wait()


class _Queued:
    """See ``Request``: what NCCL does on the device. Errors that it meets meanwhile are raised."""

    def __init__(self, comm: Any, mark: Any) -> None:
        self._comm, self._mark = comm, mark

    def test(self) -> bool:
        if self._mark.done():
            return True
        self._comm.check_async_error()
        return False


class _Modules:
    """What a rank with a GPU imports.

    Raises:
        Exception: of any kind, where there is no CuPy, driver, GPU or NCCL.
    """

    def __init__(self) -> None:
        import cupy
        from cupy.cuda import nccl

        from kvmpi.kernels import gpu

        self.cupy, self.nccl, self.gpu = cupy, nccl, gpu
        self.count = cupy.cuda.runtime.getDeviceCount()
        if not nccl.available:
            raise ImportError("CuPy finds no NCCL: pip install nvidia-nccl-cu12, or -cu13, as in CuPy's own name")


def connect(comm: Comm, devices: Sequence[Any], deadline: Deadline, label: str) -> Nccl | str:
    """Collective: NCCL between all ranks, or why that is not possible, which is then so on every rank.

    Args:
        devices: vectors of this rank, of which the first one's device is taken; without any it goes by the rank on the
            host.
    Raises:
        KVTimeoutError: a rank did not take part.
    """
    layout, ranks = discover(comm, deadline, label), range(comm.size)
    modules, device, why_not = None, None, ""
    offer = np.zeros(3, np.uint64)  # whether it is one; which host, as NCCL sees it; which GPU
    try:
        modules = _Modules()
        place = layout.hosts[layout.host_of(comm.rank)].index(comm.rank)
        device = devices[0].device if devices else modules.cupy.cuda.Device(place % modules.count)
        bus = modules.cupy.cuda.runtime.deviceGetPCIBusId(device.id)
        offer[:] = 1, _number(os.environ.get(_HOST_ID) or comm.host), _number(str(bus))
    except Exception as error:
        why_not = f"{type(error).__name__}: {error}".splitlines()[0]
    offers = exchange(comm, ranks, offer, _TAG_OFFER, deadline, label, _DOING)
    lacking = [rank for rank in ranks if not offers[rank][0]]
    if modules is None or lacking:
        return f"no GPU, or no NCCL, on MPI rank {', '.join(map(str, lacking))}" + (f" ({why_not})" if why_not else "")
    owners: dict[bytes, int] = {}
    for rank in ranks:
        other = owners.setdefault(offers[rank].tobytes(), rank)
        if other != rank:
            return (
                f"MPI ranks {other} and {rank} share a GPU, and NCCL wants one for each: keep a rank's arrays on the "
                "device of its number on the host, or set CUDA_VISIBLE_DEVICES so"
            )
    own = modules.nccl.get_unique_id()
    as_tuple = isinstance(own, tuple)  # before CuPy 14
    octets = np.frombuffer(bytes(number & 255 for number in own), np.uint64)
    identity: Any = exchange(comm, ranks, octets, _TAG_ID, deadline, label, _DOING)[0].tobytes()
    if as_tuple:
        identity = tuple(np.frombuffer(identity, np.int8).tolist())
    found = _started(modules, device, (comm.size, identity, comm.rank), deadline)
    if isinstance(found, Exception):
        raise PeerLostError(f"{label}: {_DOING} on MPI rank {comm.rank} of {comm.size}: {found}")
    if found is None:
        raise KVTimeoutError(f"{label}: {_DOING} on MPI rank {comm.rank} of {comm.size}: {_late(deadline)}")
    return Nccl(found, modules, device)


def _started(modules: _Modules, device: Any, arguments: tuple[Any, ...], deadline: Deadline) -> Any:
    """NCCL's communicator, its error, or None when time is up: NCCL waits for all ranks for ever, in its own thread."""
    found: list[Any] = []
    # Else NCCL connects in the first collectives, which then wait for a rank that does not come.
    os.environ.setdefault(_CONNECTS_LATE, "0")

    def run() -> None:
        try:
            with device:
                found.append(modules.nccl.NcclCommunicator(*arguments))
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run, name="kvmpi-nccl", daemon=True)
    thread.start()
    thread.join(min(deadline.remaining_s(), threading.TIMEOUT_MAX))
    return found[0] if found else None


def _late(deadline: Deadline) -> str:
    return f"NCCL did not end within {deadline.timeout_s:.1f} s; look at the other workers, or raise KVMPI_TIMEOUT_S"


def _number(text: str) -> int:
    """Two texts that differ have different ones, as good as always."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
