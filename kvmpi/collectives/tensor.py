"""Collectives on tensors: a worker's group of vectors, one per device, is summed with all others as one object."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from kvmpi.arrays import Vector, address_of
from kvmpi.collectives import arena, devices, narrowed, selection
from kvmpi.collectives.agreement import CLOSE, Call, Verdict, leave, verdict
from kvmpi.collectives.algorithm import Act, Algorithm, Batch, Scratch, Tensor, shared_bytes
from kvmpi.collectives.comm import Comm
from kvmpi.collectives.cost import Choice, Figures
from kvmpi.collectives.cost import load as load_figures
from kvmpi.collectives.guard import Guard
from kvmpi.collectives.selection import SHARING, Selection
from kvmpi.collectives.shares import Shares, share_of
from kvmpi.collectives.shortcut import Shortcut
from kvmpi.collectives.waiting import in_vain, wait_all
from kvmpi.config import Config
from kvmpi.deadline import Deadline
from kvmpi.errors import KVTimeoutError, UnsupportedError
from kvmpi.kernels import host
from kvmpi.trace import Recorder, timeline

Buffer = npt.NDArray[Any]

_C = TypeVar("_C", bound="Collectives")
_SUMS_DEVICES = ("ring", "multi_ring", "nccl")
_BETWEEN_HOSTS = ("ring", "multi_ring", "host_ring", "hierarchical")
_TAG_TELL = 5
_TELL_BYTES = 1 << 10


class Collectives:
    """The collectives of one communicator. Calls must come from one thread at a time, in the same order on every rank.

    Args:
        algorithm: one of ``ALGORITHMS``; ``auto`` chooses by size and by which ranks share a host.
        chunk_bytes: bytes of one message of a ring or chain; 0 chooses by size.
        num_rings: rings of ``multi_ring``, 1 to 8.
        attach: whether ranks of one host read from each other's private memory; else it is staged.
        figures: what to choose by; those of rank 0 count.
        ring_transport: ``mpi``, ``tcp`` or ``auto``: what carries rings between hosts, see ``linking``.
        interface: for ``tcp``, see ``linking.own_addresses``.
        use_native: whether compiled code takes part, where it has been built.
        compression: as what large sums of float32 travel between hosts, a name of ``narrowed.WIRES``.
        calls: what agreements travel over; they may then be made by another thread than collectives. None: ``comm``.
    Attributes:
        parted: not all ranks have made their last call in time; some may do so much later, and the communicator must
            not be freed.
        waits_for: who had not when this rank's time was over, as a text.
    """

    def __init__(
        self, comm: Comm, algorithm: str = "auto", chunk_bytes: int = 0, recorder: Recorder | None = None, *,
        num_rings: int = 2, attach: bool = True, figures: Figures | None = None, ring_transport: str = "mpi",
        interface: str = "", use_native: bool = True, compression: str = "none", calls: Comm | None = None,
    ) -> None:  # fmt: skip
        self._comm, self._calls, self._compression = comm, calls or comm, compression
        self._guard = Guard(comm)
        self._selection = Selection(
            comm, self._guard, algorithm, chunk_bytes, num_rings=num_rings, attach=attach, figures=figures or Figures(),
            ring_transport=ring_transport, interface=interface, use_native=use_native, calls=calls,
        )  # fmt: skip
        self._shortcut = Shortcut(lambda: self._selection.route)
        self._recorder = recorder or Recorder()
        self._scratch = Scratch()
        self.parted, self.waits_for = False, ""

    @classmethod
    def configured(
        cls: type[_C], comm: Comm, config: Config, recorder: Recorder | None = None, *, calls: Comm | None = None
    ) -> _C:
        """As the user's settings say."""
        return cls(
            comm, config.allreduce, config.ring_chunk_bytes, recorder, num_rings=config.num_rings,
            attach=config.shared_input == "attach", figures=load_figures(config.tuning),
            ring_transport=config.ring_transport, interface=config.interface, use_native=config.native != "off",
            compression=config.ring_compression, calls=calls,
        )  # fmt: skip

    @property
    def rank(self) -> int:
        return self._comm.rank

    @property
    def size(self) -> int:
        return self._comm.size

    @property
    def broken(self) -> bool:
        """Whether a peer was lost, so that nothing more can be exchanged."""
        return self._guard.broken is not None

    @property
    def fills_devices(self) -> bool:
        """Whether ``out`` and ``copies`` of an allreduce may be on devices."""
        return self._selection.algorithm == "nccl" and self.size > 1

    # ---- memory

    def empty(self, count: int, dtype: str) -> Buffer:
        """Uninitialised host memory of shape ``(count,)`` in storage dtype, which other ranks can read directly."""
        if self.size > 1 and self._selection.algorithm in SHARING:
            return shared_bytes(count * host.STORAGE[dtype].itemsize).view(host.STORAGE[dtype])
        return host.empty(count, dtype)

    def shared_empty(self, count: int, dtype: str, deadline: Deadline) -> Buffer:
        """Collective: memory that is one and the same on all ranks of a host, shape ``(count,)`` in storage dtype.

        As ``out`` of a collective it is written once, by all ranks of the host together, and nothing is copied: each
        rank reads the result in place. A rank may read there until it begins the next call that has this memory as its
        ``out``: the others write only when all have begun it. Nobody else may write there. It lives as long as this
        object.

        Raises:
            UnsupportedError: the ranks of a host share no memory here.
        """
        if self.size == 1:
            return host.empty(count, dtype)
        group = self._selection.located(deadline, "creating shared memory").group
        if isinstance(group, str):
            raise UnsupportedError(f"no memory is shared between the ranks of a host: {group}")
        made: Buffer | None = None
        storage = host.STORAGE[dtype]
        nbytes = max(1, count) * storage.itemsize
        if group.index == 0:
            made = arena.own().empty(nbytes, np.dtype(np.uint8))
        what = f"creating shared memory on MPI rank {self.rank} of {self.size}"
        found: Buffer | None = self._guard.run(lambda: group.share(made, nbytes, deadline, lambda: what))
        if found is None:
            raise UnsupportedError(f"{what}: no room for {nbytes} bytes")
        return found.view(storage)[:count]

    def common_empty(self, count: int, dtype: str, deadline: Deadline) -> Buffer | None:
        """Collective: ``shared_empty`` where the algorithm in force makes use of it; else None, on all ranks."""
        nbytes = count * host.STORAGE[dtype].itemsize
        if self._selection.algorithm not in SHARING or self.size == 1 or nbytes <= selection.COMMON_ABOVE_BYTES:
            return None
        try:
            return self.shared_empty(count, dtype, deadline)
        except UnsupportedError:
            return None

    def free_common(self, buffers: Sequence[Buffer], deadline: Deadline) -> None:
        """Collective: nobody looks any more at memory of ``common_empty``; the same on all ranks."""
        if buffers:
            what = f"freeing shared memory on MPI rank {self.rank} of {self.size}"
            group = self._selection.located(deadline, what).group
            assert not isinstance(group, str)
            self._guard.run(lambda: group.unshare(buffers, deadline, lambda: what))

    # ---- before and after the collectives

    def agree(self, call: Call, deadline: Deadline, settings: str = "") -> Verdict:
        """``agreement.verdict`` when every rank has made the same call or has joined; raises its error otherwise.

        ``settings`` are the caller's that must be equal on all ranks, too. Where others are late for ``CLOSE``, nothing
        is broken, but ranks have ``parted``.
        """
        settings = f"KVMPI_RING_COMPRESSION={self._compression} {self._selection.settings} {settings}".strip()
        with self._recorder.timed("wait"):
            found: Verdict = self._guard.run(lambda: self._meet(call, deadline, settings))
        self.parted |= found.last
        if found.error is not None:
            if found.last:  # nobody waits for the one that is leaving
                self._guard.note(found.error)
            raise found.error
        return found

    def _meet(self, call: Call, deadline: Deadline, settings: str) -> Verdict:
        try:
            return verdict(self._calls, call, deadline, settings, self._shortcut)
        except KVTimeoutError as error:
            if call.op != CLOSE:
                raise
            self.waits_for = str(error).partition(" within ")[0]
            return Verdict(last=True)

    def leave(self, deadline: Deadline) -> bool:
        """``agreement.leave``: the last call here. Whether the communicator may be freed."""
        return not self.broken and leave(self._calls, deadline, self._shortcut)

    def close(self) -> None:
        """End the connections of its own, and keep no more than others may still read; no call may follow."""
        self._selection.close()
        self._shortcut.close()
        self._scratch = Scratch()

    # ---- the collectives

    def allreduce(self, sources: Sequence[Vector], out: Buffer, dtype: str, deadline: Deadline, label: str) -> None:
        """Sum all vectors of all ranks into ``out`` of every rank.

        Args:
            sources: this rank's vectors, each of shape ``(count,)``, on host or device; ``out`` may be the first one's
                memory, and must not overlap another.
            out: shape ``(count,)``, memory in the storage dtype of ``dtype``, of the host unless ``fills_devices``.
            dtype: half types are accumulated in float32 and rounded once.
        Raises:
            KVTimeoutError: a rank did not take part in time; the communicator is then unusable.
            UnsupportedError: the algorithm is not possible here; the message says why.
        """
        shared, source = self._selection.shared, sources[0]
        if shared is None or len(sources) != 1 or source.device != "cpu" or dtype in host.HALF or not out.size:
            self.allreduce_many([(sources, out, ())], dtype, deadline, label)
            return
        if self._guard.broken is not None:
            raise self._guard.unusable()
        start_s, start_ns = time.perf_counter(), timeline.now() if timeline.on else 0
        try:
            shared.sum_one(source.buffer, out, deadline, label)
        except BaseException as error:
            raise self._guard.failed(error, deadline) from None
        self._recorder.add_brief("reduce", start_s, time.perf_counter(), out.nbytes)
        if start_ns:
            timeline.span("reduce", start_ns, nbytes=out.nbytes)

    def allreduce_many(
        self, tensors: Sequence[tuple[Sequence[Vector], Buffer, Sequence[Buffer]]], dtype: str, deadline: Deadline,
        label: str, scale: float = 1.0, *, exact: bool = False,
    ) -> None:  # fmt: skip
        """``allreduce`` of several tensors, given as (sources, out, copies), as one; ``copies`` get the result, too.

        The same lengths in the same order on every rank.

        Args:
            scale: what the sums, of a float type, are multiplied by; the same on every rank. Half types are rounded
                after that.
            exact: nothing is rounded on its way, whatever is set.
        """
        nbytes = sum(out.nbytes for _, out, _ in tensors)
        with self._recorder.timed("reduce", nbytes):
            if nbytes == 0:
                return
            if self.size == 1:
                for sources, out, copies in tensors:
                    self.sum_own(sources, out, dtype, scale)
                    for copy in copies:
                        np.copyto(copy, out)
                return
            self._scratch.begin()
            algorithm, act = self._begin("allreduce", nbytes, deadline, label, [tensor[0] for tensor in tensors])
            act.scale = scale
            name, wire = act.choice.algorithm, "" if exact else self._wire(nbytes, dtype, act)
            given = [sources for sources, _, _ in tensors]
            self._guard.run(lambda: devices.settle(given, act))
            if name in _SUMS_DEVICES and (len(tensors) == 1 or name == "nccl") and not wire:
                found = [
                    Tensor([s.buffer for s in sources if s.on_host], out, copies,
                           [s.settled() for s in sources if not s.on_host])
                    for sources, out, copies in tensors
                ]  # fmt: skip
            else:
                hosts = self._guard.run(lambda: devices.to_host(given, dtype, self._scratch))
                found = [Tensor(own, out, copies) for own, (_, out, copies) in zip(hosts, tensors, strict=True)]
            self._guard.run(lambda: self._sum(algorithm, found, dtype, act, wire), deadline, act=act)

    @staticmethod
    def _sum(algorithm: Algorithm, tensors: Sequence[Tensor], dtype: str, act: Act, wire: str) -> None:
        act.rounds = bool(wire)
        if wire and wire != dtype:
            narrowed.allreduce(algorithm, tensors, wire, act)
        else:
            algorithm.allreduce(tensors, dtype, act)

    def _wire(self, nbytes: int, dtype: str, act: Act) -> str:
        """The half type as which vectors and partial sums travel, where links are slow and bytes count; else none."""
        wire = narrowed.WIRES[self._compression] if dtype == "float32" or dtype in host.HALF else ""
        if (
            not wire
            or nbytes < selection.LINKED_FROM_BYTES
            or act.choice.algorithm not in _BETWEEN_HOSTS
            or self.num_hosts < 2
        ):
            return ""
        return wire if dtype == "float32" else dtype

    def sum_batch(self, batch: Batch, deadline: Deadline, label: str, scale: float = 1.0) -> None:
        """``allreduce_many`` of what has been described before, on two ranks or more."""
        shared, first = self._selection.shared, batch[0]
        one = len(batch) == 1 and len(first.vectors) == 1 and scale == 1.0 and batch.dtype not in host.HALF
        if shared is not None and one and 0 < batch.nbytes <= shared.slot_bytes:
            self.allreduce(
                [Vector(first.vectors[0], batch.dtype, "cpu", True)], first.out, batch.dtype, deadline, label
            )
            for copy in first.copies:
                np.copyto(copy, first.out)
            return
        with self._recorder.timed("reduce", batch.nbytes):
            if batch.nbytes:
                self._scratch.begin()
                algorithm, act = self._begin("allreduce", batch.nbytes, deadline, label)
                act.scale = scale
                wire = self._wire(batch.nbytes, batch.dtype, act)
                self._guard.run(lambda: self._sum(algorithm, batch, batch.dtype, act, wire), deadline, act=act)

    def sum_own(self, sources: Sequence[Vector], out: Buffer, dtype: str, scale: float = 1.0) -> None:
        """Sum the vectors of this rank alone into ``out``; arguments as of ``allreduce``. Nobody else takes part."""
        hosts: list[Buffer] = [source.buffer for source in sources if source.on_host]
        if len(hosts) == len(sources):
            _sum_alone(hosts, out, dtype, scale)
        elif scale == 1.0 and not hosts:
            devices.sum_to_host(sources, out, dtype)
        else:  # with memory of its own: who is alone sums in several threads at once
            [vectors] = devices.to_host([sources], dtype, Scratch())
            _sum_alone(vectors, out, dtype, scale)

    def reduce_scatter(
        self, sources: Sequence[Vector], out: Buffer, dtype: str, deadline: Deadline, label: str, scale: float = 1.0
    ) -> None:
        """Like ``allreduce``, but ``out`` gets this rank's segment of the sum, and may be that part of ``sources[0]``.

        ``scale`` as in ``allreduce_many``. Rank r's segment is ``schedule.segment_bounds(count, size)[r]``.
        """
        with self._recorder.timed("reduce", sources[0].nbytes):
            if self.size == 1 or sources[0].count == 0:
                self.sum_own(sources, out, dtype, scale)
                return
            self._scratch.begin()
            [vectors] = self._guard.run(lambda: devices.to_host([sources], dtype, self._scratch))
            algorithm, act = self._begin("reduce_scatter", vectors[0].nbytes, deadline, label)
            act.scale = scale
            self._guard.run(lambda: algorithm.reduce_scatter(vectors, out, dtype, act), deadline, act=act)

    def allgather(self, source: Buffer, out: Buffer, deadline: Deadline, label: str) -> None:
        """Bring every rank's segment into ``out``, shape ``(count,)``.

        Args:
            source: this rank's segment, as of ``reduce_scatter``; may be that part of ``out``.
        """
        with self._recorder.timed("broadcast", out.nbytes):
            self._scratch.begin()
            algorithm, act = self._begin("allgather", out.nbytes, deadline, label)
            own = out[slice(*act.segments(out.size)[self.rank])]
            if address_of(own) != address_of(source):
                np.copyto(own, source)
            if self.size > 1 and out.size:
                self._guard.run(lambda: algorithm.allgather(out, act), deadline, act=act)

    def sum_shares(
        self, tensors: Sequence[Sequence[Vector]], dtype: str, deadline: Deadline, label: str, scale: float = 1.0
    ) -> list[Buffer]:
        """Sum each tensor's vectors of all ranks, and return of each sum this rank's share, ``shares.share_of``.

        It is in memory that the next collective uses anew. For two ranks or more; the same lengths in the same order on
        every rank. ``scale`` as in ``allreduce_many``.
        """
        shares, storage = Shares([sources[0].count for sources in tensors], self.size), host.STORAGE[dtype]
        with self._recorder.timed("reduce", shares.count * storage.itemsize):
            self._scratch.begin()
            if not shares.count:
                return [np.empty(0, storage) for _ in tensors]
            algorithm, act = self._begin("reduce_scatter", shares.count * storage.itemsize, deadline, label)
            act.scale = scale

            def run() -> Buffer:
                devices.settle(tensors, act)
                found = devices.to_host(tensors, dtype, self._scratch)
                packed = []
                for number in range(max(map(len, found))):
                    packed.append(self._scratch(shares.count, storage))
                    shares.pack([v[number] if number < len(v) else None for v in found], packed[-1])
                own = self._scratch(shares.length, storage)
                algorithm.reduce_scatter(packed, own, dtype, act)
                return own

            return shares.split(self._guard.run(run, deadline, act=act), self.rank)

    def gather_shares(self, tensors: Sequence[tuple[Buffer, Sequence[Buffer]]], deadline: Deadline, label: str) -> None:
        """Bring every rank's share of each tensor, given as (tensor, targets), to all ``targets`` of that tensor.

        Targets are memory of the host of the tensor's shape, and may be the tensor. All are of one dtype; for two ranks
        or more, the same lengths in the same order on every rank.
        """
        shares = Shares([tensor.size for tensor, _ in tensors], self.size)
        nbytes = shares.count * tensors[0][0].itemsize if tensors else 0
        with self._recorder.timed("broadcast", nbytes):
            self._scratch.begin()
            if not nbytes:
                return
            algorithm, act = self._begin("allgather", nbytes, deadline, label)

            def run() -> None:
                packed = self._scratch(shares.count, tensors[0][0].dtype)
                own = shares.split(packed[self.rank * shares.length :][: shares.length], self.rank)
                for part, (tensor, _) in zip(own, tensors, strict=True):
                    np.copyto(part, tensor[share_of(tensor.size, self.size, self.rank)])
                algorithm.allgather(packed, act)
                shares.unpack(packed, [targets for _, targets in tensors])

            self._guard.run(run, deadline, act=act)

    def broadcast(self, buffer: Buffer, root: int, deadline: Deadline, label: str) -> None:
        """Copy ``buffer`` (shape ``(count,)``, host) of rank ``root`` into that of every rank."""
        if self.size == 1 or buffer.size == 0:
            return
        with self._recorder.timed("broadcast", buffer.nbytes):
            self._scratch.begin()
            algorithm, act = self._begin("broadcast", buffer.nbytes, deadline, label)
            names_them = act.choice.algorithm in ("shared", "naive")
            asked = None if names_them else deadline

            def run() -> None:
                algorithm.broadcast(buffer, root, act)
                if self.rank != root and deadline.expired():
                    raise KVTimeoutError(
                        f"{act.describe()}: ended when its time was over; MPI rank {root} may have given up, and "
                        "changed what it sent"
                    )

            self._guard.run(run, asked, all_fail=False, act=act)

    def choice(self, op: str, count: int, dtype: str, deadline: Deadline | None = None) -> Choice:
        """How ``op`` on ``count`` elements is done on two ranks or more. Collective at first."""
        nbytes = count * host.STORAGE[dtype].itemsize
        return self._selection.choose(op, nbytes, deadline or Deadline(None), "choosing an algorithm")

    @property
    def num_hosts(self) -> int:
        """Hosts on which the ranks are; 0 as long as that is not known, before the first collective on arrays."""
        return self._selection.num_hosts

    def expected_seconds(self, done: Sequence[float] | None) -> float:
        """As of ``Selection``."""
        return self._selection.expected_seconds(done)

    def _begin(
        self, op: str, nbytes: int, deadline: Deadline, label: str, tensors: Sequence[Sequence[Vector]] = ()
    ) -> tuple[Algorithm, Act]:
        """``tensors``: what is summed, if that may be on devices."""
        choice = self._selection.choose(op, nbytes, deadline, label) if self.size > 1 else Choice("naive", 1, 0)
        algorithm = self._selection.algorithm_of(choice, nbytes, deadline, label, tensors)
        return algorithm, Act(label, op, choice, self.rank, self.size, deadline, self._scratch)

    def before(self, wait: Callable[[], None]) -> None:
        """``wait()`` before a collective, which others may have begun: where it fails nothing can be exchanged."""
        if self.size > 1:
            self._guard.run(wait)
        else:
            wait()

    def tell(self, text: bytes, root: int, deadline: Deadline, label: str) -> bytes:
        """``text`` of rank ``root`` on every rank; other ranks' ``text`` is ignored."""
        if self.size == 1:
            return text
        return self._guard.run(lambda: self._tell(text, root, deadline, label))

    def _tell(self, text: bytes, root: int, deadline: Deadline, label: str) -> bytes:
        # The root's own deadline for its servers passes first, and then it says so, which takes time, too.
        grace = Deadline(deadline.remaining_s() * 1.1 + min(0.5, 0.5 * deadline.timeout_s))
        # The length and the first KiB in one message: most texts are empty, and latency counts.
        if self.rank == root:
            head = np.frombuffer(len(text).to_bytes(8, "little") + text[:_TELL_BYTES], dtype=np.uint8)
            messages = [head, np.frombuffer(text, dtype=np.uint8)[_TELL_BYTES:]][: 1 + (len(text) > _TELL_BYTES)]
            others = [rank for rank in range(self.size) if rank != root]
            sends = [self._comm.isend(message, rank, _TAG_TELL) for rank in others for message in messages]
            wait_all(
                sends, grace, lambda: f"{label}: MPI rank {root} could not report to the others{in_vain(deadline)}"
            )
            return text
        head = np.empty(8 + _TELL_BYTES, dtype=np.uint8)
        what = (
            f"{label}: MPI rank {self.rank} of {self.size} heard nothing from MPI rank {root}, which asks the "
            f"servers,{in_vain(deadline)}"
        )
        wait_all([self._comm.irecv(head, root, _TAG_TELL)], grace, lambda: what)
        length = int.from_bytes(head[:8].tobytes(), "little")
        heard = head[8 : 8 + min(length, _TELL_BYTES)].tobytes()
        if length > _TELL_BYTES:
            rest = np.empty(length - _TELL_BYTES, dtype=np.uint8)
            wait_all([self._comm.irecv(rest, root, _TAG_TELL)], grace, lambda: what)
            heard += rest.tobytes()
        return heard


def _sum_alone(vectors: Sequence[Buffer], out: Buffer, dtype: str, scale: float) -> None:
    if len(vectors) > 1 or scale != 1.0 or address_of(vectors[0]) != address_of(out):
        host.sum_vectors(out, vectors, dtype, scale)
