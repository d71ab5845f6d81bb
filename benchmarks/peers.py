"""The rows that are not kvmpi's: MPI's own collectives, gloo through torch.distributed, and Baidu's ring."""

from __future__ import annotations

import os
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from kvmpi.arrays import DTYPES
from kvmpi.benchmarks.baidu_ring import BaiduRing
from kvmpi.benchmarks.contestants import TIMEOUT_S, Array, Contestant, Result, Setting
from kvmpi.benchmarks.plan import Case
from kvmpi.collectives import mpi_comm
from kvmpi.collectives.schedule import segment_bounds
from kvmpi.deadline import Deadline
from kvmpi.errors import UnsupportedError
from kvmpi.kernels import host

BUCKET_BYTES = 25 << 20


class LibraryMpi(Contestant):
    """The call of the MPI library, on mpi4py's buffers. Several vectors are summed here first."""

    outs: list[Array]

    def __init__(self, setting: Setting, kind: str, how: Sequence[str]) -> None:
        super().__init__(setting, kind, how)
        from mpi4py import MPI

        if setting.dtype in host.HALF and setting.op in ("allreduce", "reduce_scatter"):
            raise UnsupportedError(f"MPI cannot add {setting.dtype}")
        self._mpi, self._comm = MPI, MPI.COMM_WORLD
        self._calls: list[Callable[[], None]] = []

    def open(self, case: Case) -> None:
        super().open(case)
        calls = {
            "allreduce": self._allreduce, "reduce_scatter": self._reduce_scatter,
            "allgather": self._allgather, "broadcast": self._broadcast,
        }  # fmt: skip
        make = calls[self.setting.op]
        self._calls = [make(*each) for each in zip(self.counts, self.sources, self.outs, strict=True)]

    def run(self) -> None:
        for call in self._calls:
            call()

    def shut(self) -> None:
        super().shut()
        self._calls = []

    def _allreduce(self, count: int, sources: list[Array], out: Array) -> Callable[[], None]:
        comm, in_place = self._comm, self._mpi.IN_PLACE
        if len(sources) == 1:
            return lambda: comm.Allreduce(in_place if out is sources[0] else sources[0], out)

        def fold_and_sum() -> None:
            host.sum_vectors(out, sources, self.setting.dtype)
            comm.Allreduce(in_place, out)

        return fold_and_sum

    def _reduce_scatter(self, count: int, sources: list[Array], out: Array) -> Callable[[], None]:
        counts = self._lengths(count)
        comm, in_place, whole = self._comm, self._mpi.IN_PLACE, sources[0]
        if "in" in self.how:
            # MPI leaves the result at the beginning of the buffer, wherever the segment was.
            self.outs = [whole[: out.size] if mine is out else mine for mine in self.outs]
        dtype = self.setting.dtype
        folded = whole if len(sources) == 1 or "in" in self.how else np.empty_like(whole)

        def fold_and_scatter() -> None:
            if len(sources) > 1:
                host.sum_vectors(folded, sources, dtype)
            if "in" in self.how:
                comm.Reduce_scatter(in_place, whole, counts)
            else:
                comm.Reduce_scatter(folded, out, counts)

        return fold_and_scatter

    def _allgather(self, count: int, sources: list[Array], out: Array) -> Callable[[], None]:
        counts, comm = self._lengths(count), self._comm
        source = self._mpi.IN_PLACE if "in" in self.how else self._message(sources[0])
        target = self._message(out, counts)
        return lambda: comm.Allgatherv(source, target)

    def _broadcast(self, count: int, sources: list[Array], out: Array) -> Callable[[], None]:
        comm, message = self._comm, self._message(out)
        return lambda: comm.Bcast(message, 0)

    def _lengths(self, count: int) -> list[int]:
        return [stop - start for start, stop in segment_bounds(count, self.setting.size)]

    def _message(self, buffer: Array, counts: list[int] | None = None) -> Any:
        """MPI knows no float16; what is only copied goes as integers of the same size."""
        if buffer.dtype == np.float16:
            buffer = buffer.view(np.uint16)
        return buffer if counts is None else [buffer, counts]


class Gloo(Contestant):
    """``torch.distributed`` over gloo, which sums in place, as DistributedDataParallel does.

    ``bucket``: arrays are copied into buckets of 25 MiB, the last array first, summed while the next bucket is filled,
    and copied back.
    """

    modifiers = ("empty", "bucket")

    def __init__(self, setting: Setting, kind: str, how: Sequence[str]) -> None:
        super().__init__(setting, kind, how)
        self._dist = start_gloo()
        if "bucket" in self.how:
            if setting.op != "allreduce":
                raise UnsupportedError("gloo:bucket is about allreduce")
            self.chunk_bytes = BUCKET_BYTES
        self._probe()
        self._calls: list[Callable[[], Any]] = []
        self._buckets: list[tuple[Array, list[tuple[Array, Array]]]] = []

    def open(self, case: Case) -> None:
        setting = self.setting
        if setting.op in ("reduce_scatter", "allgather") and (
            odd := [count for count in case.counts if count % setting.size]
        ):
            raise UnsupportedError(
                f"its segments must be equal, and {setting.size} does not divide {odd[0]:,} elements"
            )
        super().open(case)
        if setting.op == "allreduce":
            self.outs = [vectors[0] for vectors in self.sources]
        if "bucket" in self.how:
            self._buckets = list(_buckets(self.outs))
        else:
            self._calls = [self._call(sources, out) for sources, out in zip(self.sources, self.outs, strict=True)]

    def _probe(self) -> None:
        """Which dtypes gloo knows depends on the version of torch."""
        setting = self.setting
        whole, own = (np.zeros(count, DTYPES[setting.dtype]) for count in (setting.size, 1))
        ends = {"reduce_scatter": ([whole], own), "allgather": ([own], whole)}
        try:
            self._call(*ends.get(setting.op, ([whole], whole)))()
        except RuntimeError as error:
            raise UnsupportedError(f"gloo has no {setting.op} of {setting.dtype}: {error}") from None

    def _tensor(self, array: Array) -> Any:
        """Arrays that are only copied go as bytes."""
        copied = self.setting.op in ("allgather", "broadcast")
        return _tensor(array.view(np.uint8) if copied else array, "uint8" if copied else self.setting.dtype)

    def _call(self, sources: list[Array], out: Array) -> Callable[[], Any]:
        dist, target = self._dist, self._tensor(out)
        if self.setting.op == "broadcast":
            return lambda: dist.broadcast(target, 0)
        source = self._tensor(sources[0])
        if self.setting.op == "allgather":
            gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch renames them
            return lambda: gather(target, source)
        if self.setting.op == "allreduce":
            call = partial(dist.all_reduce, target)
        else:
            call = partial(getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor, target, source)
        if len(sources) == 1:
            return call

        def fold_and_call() -> None:
            host.sum_vectors(sources[0], sources, self.setting.dtype)
            call()

        return fold_and_call

    def run(self) -> None:
        if "bucket" in self.how:
            self._run_buckets()
        for call in self._calls:
            call()

    def _run_buckets(self) -> None:
        for vectors in self.sources:
            if len(vectors) > 1:
                host.sum_vectors(vectors[0], vectors, self.setting.dtype)
        works = []
        for bucket, parts in self._buckets:
            for array, place in parts:
                np.copyto(place, array)
            works.append(self._dist.all_reduce(self._tensor(bucket), async_op=True))
        for work, (_, parts) in zip(works, self._buckets, strict=True):
            work.wait()
            for array, place in parts:
                np.copyto(array, place)

    def shut(self) -> None:
        super().shut()
        self._calls, self._buckets = [], []


def _buckets(arrays: Sequence[Array]) -> list[tuple[Array, list[tuple[Array, Array]]]]:
    """Memory of each bucket, and which array goes where in it."""
    groups: list[list[Array]] = []
    room = 0
    for array in reversed(arrays):
        if not groups or array.nbytes > room:
            groups.append([])
            room = BUCKET_BYTES
        groups[-1].append(array)
        room -= array.nbytes
    found = []
    for group in groups:
        bucket = np.empty(sum(array.size for array in group), group[0].dtype)
        ends = np.cumsum([array.size for array in group])
        places = [bucket[end - array.size : end] for array, end in zip(group, ends, strict=True)]
        found.append((bucket, list(zip(group, places, strict=True))))
    return found


def _tensor(array: Array, dtype: str) -> Any:
    import torch

    if dtype == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def start_gloo() -> Any:
    """``torch.distributed`` with a gloo group of all ranks; collective.

    Raises:
        UnsupportedError: on all ranks, where one has no torch.
    """
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # it warns of addresses without names
    try:
        import torch
        import torch.distributed as dist

        missing = "" if dist.is_available() and dist.is_gloo_available() else "this torch has no gloo"
    except ImportError as error:
        missing = f"{error}; pip install 'kvmpi[torch]'"
    reasons = [reason for reason in world.allgather(missing) if reason]
    if reasons:
        raise UnsupportedError(reasons[0])
    if dist.is_initialized():
        return dist
    torch.set_num_threads(1)
    interface, address = network_interface(len(set(world.allgather(socket.gethostname()))) > 1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    address = world.bcast(address)
    if world.rank == 0:
        store = dist.TCPStore(address, 0, world.size, is_master=True, wait_for_workers=False)
        world.bcast(store.port)
    else:
        store = dist.TCPStore(address, world.bcast(None), world.size, is_master=False)
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
    return dist


def stop_gloo() -> None:
    """Leave the group, if there is one."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def network_interface(several_hosts: bool) -> tuple[str, str]:
    """Name and IPv4 address of the interface to talk over: the loopback unless there are several hosts."""
    if several_hosts:
        chosen = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
        for name in [chosen] if chosen else [name for _, name in socket.if_nameindex() if name != "lo"]:
            if address := _address_of(name):
                return name, address
    return "lo", "127.0.0.1"


def _address_of(interface: str) -> str:
    """The IPv4 address; empty where there is none."""
    import fcntl

    siocgifaddr = 0x8915
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            answer = fcntl.ioctl(sock.fileno(), siocgifaddr, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return ""
    return socket.inet_ntoa(answer[20:24])


class Baidu(Contestant):
    """See ``baidu_ring``. It copies its input, and every vector gets the sum."""

    ops = ("allreduce",)
    modifiers = ("empty",)

    def __init__(self, setting: Setting, kind: str, how: Sequence[str]) -> None:
        super().__init__(setting, kind, how)
        self._comm = mpi_comm.world(TIMEOUT_S)
        self._rings: list[BaiduRing] = []

    def open(self, case: Case) -> None:
        self.counts = case.counts
        self.sources = self.setting.sources(case, shared="empty" in self.how)
        num_vectors = self.setting.plan.num_vectors
        self._rings = [BaiduRing(self._comm, num_vectors, count, self.setting.dtype) for count in self.counts]

    def run(self) -> None:
        deadline = Deadline(TIMEOUT_S)
        for ring, sources in zip(self._rings, self.sources, strict=True):
            ring.allreduce(sources, deadline)

    def results(self) -> list[Result]:
        terms = range(self.setting.size * self.setting.plan.num_vectors)
        return [Result(out, 0, terms) for ring in self._rings for out in ring.outs]

    def shut(self) -> None:
        super().shut()
        self._rings = []

    def close(self) -> None:
        self._comm.free()
