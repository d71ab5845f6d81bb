"""Collectives on tensors: a worker's group of vectors, one per device, is summed with all others as one object."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvmpi.arrays import Vector
from kvmpi.collectives import arena, cross_memory
from kvmpi.collectives.agreement import Call, verdict
from kvmpi.collectives.comm import Comm
from kvmpi.collectives.host_group import HostGroup, form
from kvmpi.collectives.naive import MAX_PIECE_COUNT, naive_allreduce, naive_broadcast
from kvmpi.collectives.ring import chain_broadcast, ring_allreduce
from kvmpi.collectives.shared import BLOCK_BYTES, MAX_VECTORS, shared_allreduce, shared_broadcast
from kvmpi.collectives.waiting import wait_all
from kvmpi.deadline import Deadline
from kvmpi.errors import ConfigError, PeerLostError, UnsupportedError
from kvmpi.kernels import host
from kvmpi.trace import Recorder

Buffer = npt.NDArray[Any]

ALGORITHMS = ("auto", "shared", "ring", "mpi", "naive")
_TAG_TELL = 5
_TELL_BYTES = 1 << 10
#: Up to this size messages have the lower latency, and MPI's own allreduce the lowest (benchmarks/allreduce.py).
_AUTO_SMALL_BYTES = 256 << 10


class Collectives:
    """The collectives of one communicator. Calls must come from one thread at a time, in the same order on every rank.

    Args:
        algorithm: one of ``ALGORITHMS``; ``auto`` chooses by size.
        chunk_bytes: bytes of one chunk in a ring or chain.
    """

    def __init__(
        self, comm: Comm, algorithm: str = "auto", chunk_bytes: int = 512 << 10, recorder: Recorder | None = None
    ) -> None:
        if algorithm not in ALGORITHMS:
            raise ConfigError(f"allreduce algorithm {algorithm!r}; known: {', '.join(ALGORITHMS)}")
        self._comm, self._algorithm, self._chunk_bytes = comm, algorithm, chunk_bytes
        self._recorder = recorder or Recorder()
        self._scratch: Buffer = np.empty(0, dtype=np.uint8)
        self._broken: str | None = None
        # The ranks as a group of one host, or why they are none; formed when it is first of use.
        self._group: HostGroup | str | None = None

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

    def empty(self, count: int, dtype: str) -> Buffer:
        """Uninitialised host memory of shape ``(count,)`` in storage dtype, which other ranks can read directly."""
        if self.size > 1 and self._algorithm in ("auto", "shared") and cross_memory.available():
            try:
                found = arena.own().empty(count, host.STORAGE[dtype])
            except OSError:
                found = None  # ordinary memory will do
            if found is not None:
                return found
        return host.empty(count, dtype)

    def agree(self, call: Call, deadline: Deadline) -> None:
        """Return when every rank has made the same call; raises what ``agreement.verdict`` returns or raises."""
        settings = f"KVMPI_ALLREDUCE={self._algorithm} KVMPI_RING_CHUNK_BYTES={self._chunk_bytes}"
        with self._recorder.timed("wait"):
            error = self._guarded(lambda: verdict(self._comm, call, deadline, settings))
        if error is not None:
            raise error

    def allreduce(self, sources: Sequence[Vector], out: Buffer, dtype: str, deadline: Deadline, label: str) -> None:
        """Sum all vectors of all ranks into ``out`` of every rank.

        Args:
            sources: this rank's vectors, each of shape ``(count,)``, on host or device; ``out`` may be the first one's
                memory, and must not overlap another.
            out: shape ``(count,)``, host memory in the storage dtype of ``dtype``.
            dtype: half types are accumulated in float32 and rounded once.
        Raises:
            KVTimeoutError: a rank did not take part in time; the communicator is then unusable.
        """
        terms = _HostTerms(sources, out, dtype)
        with self._recorder.timed("reduce", out.nbytes):
            if self.size == 1 or out.size == 0:
                terms.sum_into_out()
            else:
                self._guarded(lambda: self._allreduce(terms, dtype, deadline, label))

    def _allreduce(self, terms: _HostTerms, dtype: str, deadline: Deadline, label: str) -> None:
        algorithm = self._algorithm
        small = terms.out.nbytes <= _AUTO_SMALL_BYTES
        if algorithm == "shared" or (algorithm == "auto" and not small):
            group = self._host_group(deadline)
            if isinstance(group, HostGroup):
                shared_allreduce(
                    group, terms.vectors(MAX_VECTORS), terms.out, dtype, block_bytes=BLOCK_BYTES, deadline=deadline,
                    label=label, scratch=self._scratch_of,
                )  # fmt: skip
                return
            if algorithm == "shared":
                raise UnsupportedError(f"{label}: allreduce algorithm 'shared': {group}")
        if algorithm == "auto":
            algorithm = "mpi" if small else "ring"
        if algorithm == "ring":
            max_chunk_count = max(1, self._chunk_bytes // terms.accumulate.itemsize)
            ring_allreduce(
                self._comm, terms, terms.accumulator, terms.out, max_chunk_count=max_chunk_count, deadline=deadline,
                label=label, scratch=lambda count: self._scratch_of(count, terms.accumulate),
            )  # fmt: skip
            return
        accumulator = terms.fold()
        if algorithm == "naive" or not self._mpi_allreduce(accumulator, deadline, label):
            if self._algorithm == "mpi":
                raise UnsupportedError("allreduce algorithm 'mpi' needs an MPI communicator")
            naive_allreduce(self._comm, accumulator, deadline, label)
        terms.finish()

    def _host_group(self, deadline: Deadline) -> HostGroup | str:
        if self._group is None:
            self._group = form(self._comm, deadline)
        return self._group

    def _mpi_allreduce(self, accumulator: Buffer, deadline: Deadline, label: str) -> bool:
        """Sum with MPI's own allreduce; False where the communicator has none."""
        what = f"{label}: MPI_Iallreduce on MPI rank {self.rank} of {self.size}: a rank did not take part"
        # OpenMPI's vectorised sums of short integers do not wrap around but stop at the largest value.
        short = accumulator.dtype.kind in "iu" and accumulator.itemsize < 4
        for start in range(0, accumulator.size, MAX_PIECE_COUNT):
            piece = accumulator[start : start + MAX_PIECE_COUNT]
            summed = piece.astype(np.int32) if short else piece
            request = self._comm.iallreduce(summed)
            if request is None:
                return False
            wait_all([request], deadline, lambda: f"{what} within {deadline.timeout_s:.1f} s")
            if short:
                np.copyto(piece, summed, casting="unsafe")
        return True

    def _scratch_of(self, count: int, dtype: np.dtype[Any]) -> Buffer:
        """Memory that the next call uses again: fresh memory costs a page fault every 4 KiB."""
        nbytes = count * dtype.itemsize
        if self._scratch.size < nbytes:
            self._scratch = np.empty(nbytes, dtype=np.uint8)
        return self._scratch[:nbytes].view(dtype)

    def broadcast(self, buffer: Buffer, root: int, deadline: Deadline, label: str) -> None:
        """Copy ``buffer`` (shape ``(count,)``, host) of rank ``root`` into that of every rank."""
        if self.size == 1 or buffer.size == 0:
            return
        with self._recorder.timed("broadcast", buffer.nbytes):
            if self._algorithm == "naive":
                self._guarded(lambda: naive_broadcast(self._comm, buffer, root, deadline, label))
                return
            if self._algorithm == "shared" or (self._algorithm == "auto" and buffer.nbytes > _AUTO_SMALL_BYTES):
                group = self._guarded(lambda: self._host_group(deadline))
                if isinstance(group, HostGroup):
                    self._guarded(lambda: shared_broadcast(group, buffer, root, deadline=deadline, label=label))
                    return
            max_chunk_count = max(1, self._chunk_bytes // buffer.itemsize)
            self._guarded(
                lambda: chain_broadcast(
                    self._comm, buffer, root, max_chunk_count=max_chunk_count, deadline=deadline, label=label
                )
            )

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

    def _guarded(self, run: Callable[[], Any]) -> Any:
        if self._broken is not None:
            raise PeerLostError(f"this client's communicator is unusable since an earlier failure: {self._broken}")
        try:
            return run()
        except BaseException as error:
            # Whatever it was, messages may be on their way that a later call would take for its own.
            self._broken = f"{type(error).__name__}: {error}"
            raise


class _HostTerms:
    """One rank's vectors of one tensor, as ``ring.Terms`` and as a whole.

    Partial sums have the dtype ``accumulate``. That is ``out``'s own but for half types, and then they need memory.
    """

    def __init__(self, sources: Sequence[Vector], out: Buffer, dtype: str) -> None:
        self.out, self._dtype = out, dtype
        self._wide = dtype in host.HALF
        self.accumulate = host.STORAGE[host.ACCUMULATE[dtype]]
        self._accumulator: Buffer | None = None
        self._buffers = [source.buffer for source in sources if source.on_host]
        devices = [source.buffer for source in sources if not source.on_host]
        if devices:
            from kvmpi.kernels import gpu

            staged = out if not self._buffers else host.empty(out.size, dtype)
            gpu.sum_vectors_to_host(staged, devices, dtype)
            self._buffers.append(staged)

    def vectors(self, max_vectors: int) -> list[Buffer]:
        """This rank's vectors, or their sum where they are more than ``max_vectors``."""
        if len(self._buffers) > max_vectors:
            self.sum_into_out()
            self._buffers = [self.out]
        return self._buffers

    @property
    def accumulator(self) -> Buffer:
        """Memory for partial sums, as long as ``out``."""
        if self._accumulator is None:
            self._accumulator = np.empty(self.out.size, self.accumulate) if self._wide else self.out
        return self._accumulator

    def own(self, start: int, stop: int) -> Buffer:
        """See ``ring.Terms``. A single vector is sent from where it is."""
        if self._wide:
            part = self.accumulator[start:stop]
            host.widen(self._buffers[0][start:stop], self._dtype, part)
            self._add_others(part, self._buffers[1:], start, stop)
            return part
        if len(self._buffers) == 1:
            return self._buffers[0][start:stop]
        host.sum_vectors(self.out[start:stop], [buffer[start:stop] for buffer in self._buffers], self._dtype)
        return self.out[start:stop]

    def add(self, incoming: Buffer, start: int, stop: int, last: bool) -> None:
        """See ``ring.Terms``."""
        if not self._wide:
            parts = [buffer[start:stop] for buffer in self._buffers]
            host.sum_vectors(self.out[start:stop], [incoming, *parts], self._dtype)
            return
        self._add_others(incoming, self._buffers, start, stop)
        if last:
            host.narrow(incoming, self.out[start:stop], self._dtype)
        else:
            np.copyto(self.accumulator[start:stop], incoming)

    def _add_others(self, part: Buffer, buffers: Sequence[Buffer], start: int, stop: int) -> None:
        for buffer in buffers:
            host.add_widened(part, host.ACCUMULATE[self._dtype], buffer[start:stop], self._dtype)

    def fold(self) -> Buffer:
        """This rank's contribution in the accumulator, where it may be changed."""
        if self._wide:
            return self.own(0, self.out.size)
        self.sum_into_out()
        return self.out

    def finish(self) -> None:
        """What the accumulator holds becomes the result."""
        if self._wide:
            host.narrow(self.accumulator, self.out, self._dtype)

    def sum_into_out(self) -> None:
        if len(self._buffers) > 1 or self._buffers[0].ctypes.data != self.out.ctypes.data:
            host.sum_vectors(self.out, self._buffers, self._dtype)
