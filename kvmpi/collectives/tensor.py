"""Collectives on tensors: a worker's group of vectors, one per device, is summed with all others as one object."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from kvmpi.arrays import Vector, address_of
from kvmpi.collectives import arena, devices, narrowed
from kvmpi.collectives.agreement import Call, Verdict, leave, roll_call, verdict
from kvmpi.collectives.algorithm import Act, Algorithm, Batch, Scratch, Tensor, shared_bytes
from kvmpi.collectives.comm import Comm
from kvmpi.collectives.cost import MODEL_RINGS, Choice, Figures, costs
from kvmpi.collectives.cost import load as load_figures
from kvmpi.collectives.hierarchical import Hierarchical
from kvmpi.collectives.library import Library
from kvmpi.collectives.linking import link
from kvmpi.collectives.links import Links
from kvmpi.collectives.naive import Naive
from kvmpi.collectives.nccl import Nccl, connect
from kvmpi.collectives.rings import Rings
from kvmpi.collectives.shared import Shared
from kvmpi.collectives.topology import Topology, locate
from kvmpi.collectives.waiting import wait_all
from kvmpi.config import Config
from kvmpi.deadline import Deadline
from kvmpi.errors import ConfigError, KVTimeoutError, PeerLostError, UnsupportedError
from kvmpi.kernels import host
from kvmpi.trace import Recorder, timeline

Buffer = npt.NDArray[Any]

ALGORITHMS = ("auto", "shared", "hierarchical", "multi_ring", "ring", "host_ring", "nccl", "mpi", "naive")
_C = TypeVar("_C", bound="Collectives")
_log = logging.getLogger(__name__)
_SUMS_DEVICES = ("ring", "multi_ring", "nccl")
_SHARING = ("auto", "shared", "hierarchical")
_BETWEEN_HOSTS = ("ring", "multi_ring", "host_ring", "hierarchical")
_TAG_TELL = 5
_TELL_BYTES = 1 << 10
#: Memory that ranks share is given out above this size, since of smaller sums every rank writes all, and would write
#: there at the same time as others; and from this size on MPI's own collectives are not chosen: they would leave
#: partial sums there.
COMMON_ABOVE_BYTES = 256 << 10
#: Rings between hosts have connections of their own from this size on: to be woken takes longer than to look.
LINKED_FROM_BYTES = 256 << 10
#: Seconds at most to find out who answers when a call has failed.
_ROLL_CALL_S = 5.0


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
    """

    def __init__(
        self, comm: Comm, algorithm: str = "auto", chunk_bytes: int = 0, recorder: Recorder | None = None, *,
        num_rings: int = 2, attach: bool = True, figures: Figures | None = None, ring_transport: str = "mpi",
        interface: str = "", use_native: bool = True, compression: str = "none", calls: Comm | None = None,
    ) -> None:  # fmt: skip
        if algorithm not in ALGORITHMS:
            raise ConfigError(f"allreduce algorithm {algorithm!r}; known: {', '.join(ALGORITHMS)}")
        if not 1 <= num_rings <= 8:
            raise ConfigError(f"{num_rings} rings: expected 1 to 8")
        self._comm, self._calls = comm, calls or comm
        self._algorithm, self._chunk_bytes = algorithm, chunk_bytes
        self._num_rings, self._attach = num_rings, attach
        self._ring_transport, self._interface, self._use_native = ring_transport, interface, use_native
        self._compression = compression
        self._figures = figures or Figures()
        self._choices: dict[tuple[str, int], Choice] = {}
        self._recorder = recorder or Recorder()
        self._scratch = Scratch()
        self._broken: str | None = None
        self._topology: Topology | None = None  # found out at the first call that depends on it
        self._links: Links | None = None  # likewise
        self._unlinked = ""  # why there are none
        self._made: dict[tuple[str, Comm], Algorithm] = {}
        self._shared: Shared | None = None  # where it sums whatever comes

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
        return self._broken is not None

    @property
    def fills_devices(self) -> bool:
        """Whether ``out`` and ``copies`` of an allreduce may be on devices."""
        return self._algorithm == "nccl" and self.size > 1

    # ---- memory

    def empty(self, count: int, dtype: str) -> Buffer:
        """Uninitialised host memory of shape ``(count,)`` in storage dtype, which other ranks can read directly."""
        if self.size > 1 and self._algorithm in _SHARING:
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
        group = self._located(deadline, "creating shared memory").group
        if isinstance(group, str):
            raise UnsupportedError(f"no memory is shared between the ranks of a host: {group}")
        made: Buffer | None = None
        storage = host.STORAGE[dtype]
        nbytes = max(1, count) * storage.itemsize
        if group.index == 0:
            made = arena.own().empty(nbytes, np.dtype(np.uint8))
        what = f"creating shared memory on MPI rank {self.rank} of {self.size}"
        found: Buffer | None = self._guarded(lambda: group.share(made, nbytes, deadline, lambda: what))
        if found is None:
            raise UnsupportedError(f"{what}: no room for {nbytes} bytes")
        return found.view(storage)[:count]

    def common_empty(self, count: int, dtype: str, deadline: Deadline) -> Buffer | None:
        """Collective: ``shared_empty`` where the algorithm in force makes use of it; else None, on all ranks."""
        nbytes = count * host.STORAGE[dtype].itemsize
        if self._algorithm not in _SHARING or self.size == 1 or nbytes <= COMMON_ABOVE_BYTES:
            return None
        try:
            return self.shared_empty(count, dtype, deadline)
        except UnsupportedError:
            return None

    def free_common(self, buffers: Sequence[Buffer], deadline: Deadline) -> None:
        """Collective: nobody looks any more at memory of ``common_empty``; the same on all ranks."""
        if buffers:
            what = f"freeing shared memory on MPI rank {self.rank} of {self.size}"
            group = self._located(deadline, what).group
            assert not isinstance(group, str)
            self._guarded(lambda: group.unshare(buffers, deadline, lambda: what))

    # ---- before and after the collectives

    def agree(self, call: Call, deadline: Deadline, settings: str = "") -> Verdict:
        """``agreement.verdict`` when every rank has made the same call or has joined; raises its error otherwise.

        ``settings`` are the caller's that must be equal on all ranks, too.
        """
        settings = (
            f"KVMPI_ALLREDUCE={self._algorithm} KVMPI_NUM_RINGS={self._num_rings} "
            f"KVMPI_RING_TRANSPORT={self._ring_transport} KVMPI_RING_COMPRESSION={self._compression} "
            f"KVMPI_RING_CHUNK_BYTES={self._chunk_bytes} {settings}"
        ).strip()
        with self._recorder.timed("wait"):
            found: Verdict = self._guarded(lambda: verdict(self._calls, call, deadline, settings))
        if found.error is not None:
            if found.last:  # nobody waits for the one that is leaving
                self._broken = f"{type(found.error).__name__}: {found.error}"
            raise found.error
        return found

    def leave(self, deadline: Deadline) -> bool:
        """``agreement.leave``: the last call here. Whether the communicator may be freed."""
        return not self.broken and leave(self._calls, deadline)

    def close(self) -> None:
        """End the connections of its own, and keep no more than others may still read; no call may follow."""
        if self._links is not None:
            self._links.close()
        for algorithm in self._made.values():
            if isinstance(algorithm, Nccl):
                algorithm.close()
        if self._topology is not None and not isinstance(self._topology.group, str):
            self._topology.group.close()
        self._scratch = Scratch()

    def _located(self, deadline: Deadline, label: str) -> Topology:
        if self._topology is None:
            self._topology = self._guarded(lambda: self._locate(deadline, label))
        if self._unlinked and self._ring_transport == "tcp":  # all ranks know, and nothing is under way
            raise UnsupportedError(f"{label}: KVMPI_RING_TRANSPORT=tcp: {self._unlinked}")
        return self._topology

    def _locate(self, deadline: Deadline, label: str) -> Topology:
        topology = locate(self._comm, self._figures, deadline, label, attach=self._attach)
        if len(topology.layout.hosts) > 1 and self._ring_transport != "mpi":
            linked = link(
                self._comm, topology.layout, max(MODEL_RINGS, self._num_rings), deadline, label,
                network=self._interface, despite_fabric=self._ring_transport == "tcp",
            )  # fmt: skip
            if isinstance(linked, Links):
                self._links = linked
            else:
                self._unlinked = linked
                _log.info("rings between hosts use MPI: %s", linked)
        return topology

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
        shared, source = self._shared, sources[0]
        if shared is None or len(sources) != 1 or source.device != "cpu" or dtype in host.HALF or not out.size:
            self.allreduce_many([(sources, out, ())], dtype, deadline, label)
            return
        if self._broken is not None:
            raise self._unusable()
        start_s, start_ns = time.perf_counter(), timeline.now() if timeline.on else 0
        try:
            shared.sum_one(source.buffer, out, deadline, label)
        except BaseException as error:
            raise self._failed(error, deadline) from None
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
            self._guarded(lambda: devices.settle(given, act))
            if name in _SUMS_DEVICES and (len(tensors) == 1 or name == "nccl") and not wire:
                found = [
                    Tensor([s.buffer for s in sources if s.on_host], out, copies,
                           [s.settled() for s in sources if not s.on_host])
                    for sources, out, copies in tensors
                ]  # fmt: skip
            else:
                hosts = self._guarded(lambda: devices.to_host(given, dtype, self._scratch))
                found = [Tensor(own, out, copies) for own, (_, out, copies) in zip(hosts, tensors, strict=True)]
            self._guarded(lambda: self._sum(algorithm, found, dtype, act, wire), deadline, act=act)

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
        if not wire or nbytes < LINKED_FROM_BYTES or act.choice.algorithm not in _BETWEEN_HOSTS or self.num_hosts < 2:
            return ""
        return wire if dtype == "float32" else dtype

    def sum_batch(self, batch: Batch, deadline: Deadline, label: str, scale: float = 1.0) -> None:
        """``allreduce_many`` of what has been described before, on two ranks or more."""
        shared, first = self._shared, batch[0]
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
                self._guarded(lambda: self._sum(algorithm, batch, batch.dtype, act, wire), deadline, act=act)

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
            [vectors] = self._guarded(lambda: devices.to_host([sources], dtype, self._scratch))
            algorithm, act = self._begin("reduce_scatter", vectors[0].nbytes, deadline, label)
            act.scale = scale
            self._guarded(lambda: algorithm.reduce_scatter(vectors, out, dtype, act), deadline, act=act)

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
                self._guarded(lambda: algorithm.allgather(out, act), deadline, act=act)

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

            self._guarded(run, asked, all_fail=False, act=act)

    def choice(self, op: str, count: int, dtype: str, deadline: Deadline | None = None) -> Choice:
        """How ``op`` on ``count`` elements is done on two ranks or more. Collective at first."""
        nbytes = count * host.STORAGE[dtype].itemsize
        return self._choose(op, nbytes, deadline or Deadline(None), "choosing an algorithm")

    @property
    def num_hosts(self) -> int:
        """Hosts on which the ranks are; 0 as long as that is not known, before the first collective on arrays."""
        if self.size == 1:
            return 1
        return 0 if self._topology is None else len(self._topology.layout.hosts)

    def expected_seconds(self, done: Sequence[float] | None) -> float:
        """What an allreduce of the mean size should take by the figures of the cost model; 0: nobody knows yet.

        Args:
            done: seconds, bytes and calls of those that there were.
        """
        if done is None or not done[2] or not done[1] or self._topology is None:
            return 0.0
        layout, group, figures = self._topology.layout, self._topology.group, self._topology.figures
        options = costs(
            "allreduce", int(done[1] / done[2]), tuple(map(len, layout.hosts)), figures,
            shares=not isinstance(group, str), has_library=self._comm.has_collectives,
            linked=self._links is not None,
        )  # fmt: skip
        return min(choice.seconds for choice in options.values())

    def _begin(
        self, op: str, nbytes: int, deadline: Deadline, label: str, tensors: Sequence[Sequence[Vector]] = ()
    ) -> tuple[Algorithm, Act]:
        """``tensors``: what is summed, if that may be on devices."""
        choice = self._choose(op, nbytes, deadline, label) if self.size > 1 else Choice("naive", 1, 0)
        linked = self._links is not None and nbytes >= LINKED_FROM_BYTES and choice.algorithm != "nccl"
        comm = self._links if linked and self._links is not None else self._comm
        algorithm = self._made.get((choice.algorithm, comm))
        if algorithm is None:
            away = [vector.buffer for sources in tensors for vector in sources if not vector.on_host]
            algorithm = self._make(choice.algorithm, comm, deadline, label, away)
            self._made[choice.algorithm, comm] = algorithm
        act = Act(label, op, choice, self.rank, self.size, deadline, self._scratch)
        return algorithm, act

    def _choose(self, op: str, nbytes: int, deadline: Deadline, label: str) -> Choice:
        """Depends on nothing but what is equal on all ranks."""
        size = 1 << nbytes.bit_length()  # one choice for all sizes between two powers of two
        found = self._choices.get((op, size))
        if found is None:
            topology = self._located(deadline, label)
            options = costs(
                op, 3 * size // 4, tuple(map(len, topology.layout.hosts)), topology.figures,
                shares=not isinstance(topology.group, str),
                has_library=self._comm.has_collectives and nbytes < COMMON_ABOVE_BYTES,
                linked=self._links is not None and nbytes >= LINKED_FROM_BYTES,
            )  # fmt: skip
            if self._algorithm == "auto":
                found = min(options.values(), key=lambda choice: choice.seconds)
            else:
                like = "hierarchical" if self._algorithm in _SHARING and "hierarchical" in options else "ring"
                found = Choice(self._algorithm, self._num_rings if self._algorithm == "multi_ring" else 1,
                               options[like].chunk_bytes)  # fmt: skip
            if self._chunk_bytes:
                found = found._replace(chunk_bytes=self._chunk_bytes)
            self._choices[op, size] = found
        return found

    def _make(self, name: str, comm: Comm, deadline: Deadline, label: str, away: Sequence[Any]) -> Algorithm:
        if name in ("ring", "host_ring", "multi_ring"):
            return Rings(comm, use_native=self._use_native)
        if name == "naive":
            return Naive(self._comm)
        if name == "mpi" and self._comm.has_collectives:
            return Library(self._comm)
        where = f"{label}: algorithm {name!r}"
        if name == "mpi":
            raise UnsupportedError(f"{where} needs an MPI communicator")
        if name == "nccl":
            found: Nccl | str = self._guarded(lambda: connect(self._comm, away, deadline, label))
            if isinstance(found, str):
                raise UnsupportedError(f"{where}: {found}")
            return found
        topology = self._located(deadline, label)
        if isinstance(topology.group, str):
            raise UnsupportedError(f"{where}: {topology.group}")
        if len(topology.layout.hosts) == 1:
            shared = Shared(topology.group, use_native=self._use_native)
            always = self._algorithm == name or all(
                self._choose("allreduce", 1 << bits, deadline, label).algorithm == name for bits in range(1, 40)
            )
            if topology.group.attaches and always:
                self._shared = shared
            return shared
        if name == "shared":
            raise UnsupportedError(f"{where}: ranks are on different hosts, {topology.layout.describe()}")
        return Hierarchical(comm, topology.layout, topology.group, use_native=self._use_native)

    def before(self, wait: Callable[[], None]) -> None:
        """``wait()`` before a collective, which others may have begun: where it fails nothing can be exchanged."""
        if self.size > 1:
            self._guarded(wait)
        else:
            wait()

    def tell(self, text: bytes, root: int, deadline: Deadline, label: str) -> bytes:
        """``text`` of rank ``root`` on every rank; other ranks' ``text`` is ignored."""
        if self.size == 1:
            return text
        return self._guarded(lambda: self._tell(text, root, deadline, label))

    def _tell(self, text: bytes, root: int, deadline: Deadline, label: str) -> bytes:
        # The length and the first KiB in one message: most texts are empty, and latency counts.
        if self.rank == root:
            head = np.frombuffer(len(text).to_bytes(8, "little") + text[:_TELL_BYTES], dtype=np.uint8)
            messages = [head, np.frombuffer(text, dtype=np.uint8)[_TELL_BYTES:]][: 1 + (len(text) > _TELL_BYTES)]
            others = [rank for rank in range(self.size) if rank != root]
            sends = [self._comm.isend(message, rank, _TAG_TELL) for rank in others for message in messages]
            wait_all(sends, deadline, lambda: f"{label}: MPI rank {root} could not report to the others")
            return text
        head = np.empty(8 + _TELL_BYTES, dtype=np.uint8)
        what = (
            f"{label}: MPI rank {self.rank} of {self.size} heard nothing from MPI rank {root}, which asks the servers"
        )
        # The root's own deadline for its servers passes first, and then it says so.
        grace = Deadline(deadline.remaining_s() * 1.1 + min(0.5, 0.5 * deadline.timeout_s))
        wait_all([self._comm.irecv(head, root, _TAG_TELL)], grace, lambda: what)
        length = int.from_bytes(head[:8].tobytes(), "little")
        heard = head[8 : 8 + min(length, _TELL_BYTES)].tobytes()
        if length > _TELL_BYTES:
            rest = np.empty(length - _TELL_BYTES, dtype=np.uint8)
            wait_all([self._comm.irecv(rest, root, _TAG_TELL)], grace, lambda: what)
            heard += rest.tobytes()
        return heard

    def _guarded(
        self, run: Callable[[], Any], deadline: Deadline | None = None, *, all_fail: bool = True, act: Act | None = None
    ) -> Any:
        """``run()``; with a ``deadline``, those who do not answer are named when that has passed.

        Args:
            all_fail: no rank can be through with it when one of them fails.
            act: what is to be named where a peer is lost.
        """
        if self._broken is not None:
            raise self._unusable()
        try:
            return run()
        except BaseException as error:
            if act is not None and type(error) is PeerLostError:
                error = PeerLostError(f"{act.describe()}: {error}")
            raise self._failed(error, deadline, all_fail=all_fail) from None

    def _unusable(self) -> PeerLostError:
        return PeerLostError(f"this client's communicator is unusable since an earlier failure: {self._broken}")

    def _failed(self, error: BaseException, deadline: Deadline | None, *, all_fail: bool = True) -> BaseException:
        """What to raise for ``error``; from here on nothing can be exchanged."""
        # Whatever it was, messages may be on their way that a later call would take for its own.
        self._broken = f"{type(error).__name__}: {error}"
        if self._topology is not None and not isinstance(self._topology.group, str):
            self._topology.group.give_up()
        if type(error) is not KVTimeoutError or deadline is None:
            return error
        # Who waits names whom it waits for, which may itself wait for another. All others give up at about this time.
        silent = roll_call(self._comm, Deadline(min(_ROLL_CALL_S, 0.5 * deadline.timeout_s)))
        if not silent:
            return error
        names, what = ", ".join(map(str, silent)), "stopped or dead" if all_fail else "stopped, dead or through with it"
        return KVTimeoutError(f"{error}. No answer from MPI rank {names}, {what}")


def _sum_alone(vectors: Sequence[Buffer], out: Buffer, dtype: str, scale: float) -> None:
    if len(vectors) > 1 or scale != 1.0 or address_of(vectors[0]) != address_of(out):
        host.sum_vectors(out, vectors, dtype, scale)
