"""Collectives on tensors: a worker's group of vectors, one per device, is summed with all others as one object."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvmpi.arrays import Vector
from kvmpi.collectives.agreement import Call, agree
from kvmpi.collectives.comm import Comm
from kvmpi.collectives.naive import naive_allreduce, naive_broadcast
from kvmpi.collectives.ring import chain_broadcast, ring_allreduce
from kvmpi.collectives.waiting import wait_all
from kvmpi.deadline import Deadline
from kvmpi.errors import ConfigError, KVTimeoutError, PeerLostError, UnsupportedError
from kvmpi.kernels import host
from kvmpi.trace import Recorder

Buffer = npt.NDArray[Any]

ALGORITHMS = ("auto", "ring", "mpi", "naive")
_TAG_TELL = 5
_TELL_BYTES = 64 << 10
#: Up to this size the library's own allreduce has the lower latency (benchmarks/allreduce.py).
_AUTO_MPI_BYTES = 256 << 10


class Collectives:
    """The collectives of one communicator. Calls must come from one thread at a time, in the same order on every rank.

    Args:
        algorithm: one of ``ALGORITHMS``; ``auto`` chooses by size.
        chunk_bytes: bytes of one chunk in a ring or chain.
    """

    def __init__(
        self, comm: Comm, algorithm: str = "auto", chunk_bytes: int = 256 << 10, recorder: Recorder | None = None
    ) -> None:
        if algorithm not in ALGORITHMS:
            raise ConfigError(f"allreduce algorithm {algorithm!r}; known: {', '.join(ALGORITHMS)}")
        self._comm, self._algorithm, self._chunk_bytes = comm, algorithm, chunk_bytes
        self._recorder = recorder or Recorder()
        self._broken: str | None = None

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

    def agree(self, call: Call, deadline: Deadline) -> None:
        """Return when every rank has made the same call; see ``agreement.agree``."""
        with self._recorder.timed("wait"):
            self._guarded(lambda: agree(self._comm, call, deadline))

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
        on_host = _HostSources(sources, out, dtype)
        with self._recorder.timed("reduce", out.nbytes):
            if self.size == 1 or out.size == 0:
                on_host.sum_into_out()
            else:
                self._guarded(lambda: self._allreduce(on_host, deadline, label))

    def _allreduce(self, sources: _HostSources, deadline: Deadline, label: str) -> None:
        out = sources.out
        algorithm = self._algorithm
        wide = host.ACCUMULATE[sources.dtype] != sources.dtype
        accumulator = np.empty(out.size, dtype=np.float32) if wide else out
        if algorithm == "auto":
            algorithm = "mpi" if accumulator.nbytes <= _AUTO_MPI_BYTES else "ring"

        def fold(start: int, stop: int) -> None:
            sources.fold(accumulator, start, stop)

        def narrow(start: int, stop: int) -> None:
            if wide:
                host.narrow(accumulator[start:stop], out[start:stop], sources.dtype)

        if algorithm == "mpi":
            fold(0, out.size)
            request = self._comm.iallreduce(accumulator)
            if request is not None:
                what = f"{label}: MPI_Iallreduce on MPI rank {self.rank} of {self.size}: a rank did not take part"
                wait_all([request], deadline, lambda: what)
                narrow(0, out.size)
                return
            if self._algorithm == "mpi":
                raise UnsupportedError("allreduce algorithm 'mpi' needs an MPI communicator")
            naive_allreduce(self._comm, accumulator, deadline, label)
            narrow(0, out.size)
        elif algorithm == "naive":
            fold(0, out.size)
            naive_allreduce(self._comm, accumulator, deadline, label)
            narrow(0, out.size)
        else:
            max_chunk_count = max(1, self._chunk_bytes // accumulator.itemsize)
            ring_allreduce(
                self._comm, accumulator, out, fold=fold, narrow=narrow, max_chunk_count=max_chunk_count,
                deadline=deadline, label=label,
            )  # fmt: skip

    def broadcast(self, buffer: Buffer, root: int, deadline: Deadline, label: str) -> None:
        """Copy ``buffer`` (shape ``(count,)``, host) of rank ``root`` into that of every rank."""
        if self.size == 1 or buffer.size == 0:
            return
        with self._recorder.timed("broadcast", buffer.nbytes):
            if self._algorithm == "naive":
                self._guarded(lambda: naive_broadcast(self._comm, buffer, root, deadline, label))
                return
            max_chunk_count = max(1, self._chunk_bytes // buffer.itemsize)
            self._guarded(
                lambda: chain_broadcast(
                    self._comm, buffer, root, max_chunk_count=max_chunk_count, deadline=deadline, label=label
                )
            )

    def tell(self, text: bytes, root: int, deadline: Deadline, label: str) -> bytes:
        """``text`` of rank ``root`` (at most 64 KiB) on every rank; other ranks' ``text`` is ignored."""
        if self.size == 1:
            return text
        if len(text) > _TELL_BYTES:
            raise ValueError(f"text of {len(text)} bytes, limit {_TELL_BYTES}")
        return self._guarded(lambda: self._tell(text, root, deadline, label))

    def _tell(self, text: bytes, root: int, deadline: Deadline, label: str) -> bytes:
        if self.rank == root:
            # Length and text in one message: most texts are empty, and latency counts.
            message = np.frombuffer(len(text).to_bytes(4, "little") + text, dtype=np.uint8)
            sends = [self._comm.isend(message, rank, _TAG_TELL) for rank in range(self.size) if rank != root]
            wait_all(sends, deadline, lambda: f"{label}: MPI rank {root} could not report to the others")
            return text
        buffer = np.empty(_TELL_BYTES + 4, dtype=np.uint8)
        what = (
            f"{label}: MPI rank {self.rank} of {self.size} heard nothing from MPI rank {root}, which asks the servers"
        )
        # The root's own deadline for its servers passes first, and then it says so.
        grace = Deadline(deadline.remaining_s() * 1.1 + 0.5)
        wait_all([self._comm.irecv(buffer, root, _TAG_TELL)], grace, lambda: what)
        length = int.from_bytes(buffer[:4].tobytes(), "little")
        return buffer[4 : 4 + length].tobytes()

    def _guarded(self, run: Callable[[], Any]) -> Any:
        if self._broken is not None:
            raise PeerLostError(f"this client's communicator is unusable since an earlier failure: {self._broken}")
        try:
            return run()
        except KVTimeoutError as error:
            self._broken = str(error)
            raise


class _HostSources:
    """One rank's vectors of one tensor, folded range by range into a host accumulator."""

    def __init__(self, sources: Sequence[Vector], out: Buffer, dtype: str) -> None:
        self.out, self.dtype = out, dtype
        self._buffers = [source.buffer for source in sources if source.on_host]
        devices = [source.buffer for source in sources if not source.on_host]
        if devices:
            from kvmpi.kernels import gpu

            staged = out if not self._buffers else host.empty(out.size, dtype)
            gpu.sum_vectors_to_host(staged, devices, dtype)
            self._buffers.append(staged)

    def fold(self, accumulator: Buffer, start: int, stop: int) -> None:
        """Write the sum of this rank's vectors over a range into ``accumulator``."""
        part = accumulator[start:stop]
        parts = [buffer[start:stop] for buffer in self._buffers]
        if self.dtype in host.HALF:
            host.widen(parts[0], self.dtype, part)
            for source in parts[1:]:
                host.add_widened(part, host.ACCUMULATE[self.dtype], source, self.dtype)
        elif len(parts) > 1 or parts[0].ctypes.data != part.ctypes.data:
            host.sum_vectors(part, parts, self.dtype)

    def sum_into_out(self) -> None:
        if len(self._buffers) > 1 or self._buffers[0].ctypes.data != self.out.ctypes.data:
            host.sum_vectors(self.out, self._buffers, self.dtype)
