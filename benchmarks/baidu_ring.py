"""The ring allreduce that Baidu published in 2017, with one ring member for each vector: the design to compare with.

Every vector of every rank is a member of one ring. Its allreduce works on a private copy, in whole segments, one
blocking step after the other: send a segment to the right while one comes in from the left, wait for both, add. Nothing
is pipelined, and members of one process pass segments to each other as if by messages, through a buffer.

Cost for V vectors on each of P ranks, M = V * P: 2(M-1) steps; a rank sends 2(M-1)/M * S bytes and adds, or copies,
V times as much.

Source: A. Gibiansky, "Bringing HPC Techniques to Deep Learning", Baidu Research, 2017; written from that description.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvmpi.collectives.comm import Comm
from kvmpi.collectives.schedule import segment_bounds
from kvmpi.collectives.waiting import wait_all
from kvmpi.deadline import Deadline
from kvmpi.kernels import host

Array = npt.NDArray[Any]

_TAG = 31


class BaiduRing:
    """One rank's members of the ring, for vectors of ``count`` elements of ``dtype``.

    Attributes:
        outs: the results, one for each vector.
    """

    def __init__(self, comm: Comm, num_vectors: int, count: int, dtype: str) -> None:
        self._comm, self._dtype = comm, dtype
        self._bounds = segment_bounds(count, num_vectors * comm.size)
        longest = self._bounds[0][1] - self._bounds[0][0]
        self.outs = [host.empty(count, dtype) for _ in range(num_vectors)]
        self._incoming = [host.empty(longest, dtype) for _ in range(num_vectors)]

    def allreduce(self, sources: Sequence[Array], deadline: Deadline) -> None:
        """Sum the ``sources`` of all ranks into every one of ``outs``."""
        for out, source in zip(self.outs, sources, strict=True):
            np.copyto(out, source)
        num_members, first = len(self._bounds), self._comm.rank * len(self.outs)
        members = range(first, first + len(self.outs))
        for step in range(num_members - 1):
            sent = [(member - step) % num_members for member in members]
            for i, (member, incoming) in enumerate(zip(members, self._step(sent, deadline), strict=True)):
                start, stop = self._bounds[(member - step - 1) % num_members]
                host.add_into(self.outs[i][start:stop], incoming, self._dtype)
        for step in range(num_members - 1):
            sent = [(member + 1 - step) % num_members for member in members]
            for i, (member, incoming) in enumerate(zip(members, self._step(sent, deadline), strict=True)):
                start, stop = self._bounds[(member - step) % num_members]
                np.copyto(self.outs[i][start:stop], incoming)

    def _step(self, sent: list[int], deadline: Deadline) -> list[Array]:
        """Member i sends its segment ``sent[i]`` to the next one; what each member receives."""
        comm = self._comm
        left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
        num_members = len(self._bounds)
        # A member receives the segment that follows on the one that it sends, counted backwards.
        lengths = [self._length((segment - 1) % num_members) for segment in sent]
        received = [buffer[:length] for buffer, length in zip(self._incoming, lengths, strict=True)]
        start, stop = self._bounds[sent[-1]]
        outgoing = self.outs[-1][start:stop]
        requests = []
        if comm.size == 1:
            np.copyto(received[0], outgoing)
        else:
            if received[0].size:
                requests.append(comm.irecv(received[0], left, _TAG))
            if outgoing.size:
                requests.append(comm.isend(outgoing, right, _TAG))
        for i, segment in enumerate(sent[:-1]):
            start, stop = self._bounds[segment]
            np.copyto(received[i + 1], self.outs[i][start:stop])
        wait_all(requests, deadline, lambda: f"baidu on MPI rank {comm.rank} of {comm.size}: a neighbour is missing")
        return received

    def _length(self, segment: int) -> int:
        start, stop = self._bounds[segment]
        return stop - start
