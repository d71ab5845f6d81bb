"""The engine operations that calls are made of: sums over a client, and what its master tells the others."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import numpy as np

from kvmpi.arrays import Vector
from kvmpi.engine import Variable, Work
from kvmpi.errors import rebuild
from kvmpi.store.call import Invocation, Part, about, label_of
from kvmpi.store.core import INLINE_BYTES, Buffer, StoreCore
from kvmpi.trace import timeline


class Operations(StoreCore):
    """Pushes to the engine what has to run on all ranks of a client, or on none."""

    def _buckets(self, parts: Sequence[Part]) -> list[list[Part]]:
        """Parts whose sums travel together: by their order, dtypes and sizes alone, so that all workers agree."""
        if self.mpi_size == 1:
            return [[part] for part in parts]  # nothing travels
        found: list[list[Part]] = []
        room = 0
        averages = self._rule is not None and self._rule.averages
        for part in parts:
            state, last = part.state, found[-1][0] if found else part
            other = state.dtype != last.state.dtype or (averages and len(part.vectors) != len(last.vectors))
            if not found or state.nbytes > room or other:
                found.append([])
                room = self._config.bucket_bytes
            found[-1].append(part)
            room -= state.nbytes
        return found

    def _reduce_op(
        self,
        bucket: Sequence[Part],
        call: Invocation,
        then: Callable[[Part], None] | None = None,
        *,
        writes: Sequence[Variable] = (),
        targets: Callable[[Part], tuple[Buffer, Sequence[Buffer]]] | None = None,
        keeps: bool = True,
    ) -> Work:
        """Push: sum each part's vectors over the client into the key's host buffer, then call ``then`` for each.

        Under a rule that averages, that is the mean over workers and devices.

        Args:
            targets: other memory for the sum, and what else gets it.
            keeps: whether this worker needs a sum that the client has already.
        """
        label = label_of(call.op, [part.state for part in bucket])
        dtype = bucket[0].state.dtype
        averages = self._rule is not None and self._rule.averages and call.op != "allreduce"

        def run(cause: BaseException | None) -> None:
            call.check()
            if call.fences:
                self._reduce.before(call.await_devices)
            if timeline.on:
                timeline.about(about(bucket), call.clock)
            # Who has joined has no weights to push, and does not count.
            num_workers = 1 if call.reduced else self.mpi_size - call.num_joined
            scale = 1.0 / (num_workers * len(bucket[0].vectors)) if averages else call.scale
            together = not call.reduced or targets is not None or call.num_joined > 0
            tensors = [
                (part.vectors, *((part.state.host_buffer(), ()) if targets is None else targets(part)))
                for part in (bucket if together or keeps else ())
            ]
            if not call.reduced:
                # A rule that averages is sent weights.
                self._reduce.allreduce_many(tensors, dtype, call.deadline, label, scale, exact=averages)
            else:
                root = self._who_has_sum(call) if together else self.mpi_rank
                for sources, out, copies in tensors:
                    if self.mpi_rank == root:
                        self._reduce.sum_own(sources, out, dtype, scale)
                    if together:  # ranks may share that memory, or some have no sum
                        self._reduce.broadcast(out, root, call.deadline, label)
                    for copy in copies:
                        np.copyto(copy, out)
            if cause is not None:
                raise cause
            errors = list[Exception]()
            for part in bucket if then is not None else ():
                try:
                    then(part)  # type: ignore[misc]
                except Exception as error:  # what a user's function has to say of one key is not about another
                    errors.append(error)
            if errors:
                raise errors[0]

        lane = "reduce"
        if self.mpi_size == 1:
            # Nobody to keep in step with. A hand-over between threads costs more than to add up a small array here.
            nbytes = sum(vector.nbytes for part in bucket for vector in part.vectors)
            lane = "inline" if not call.async_op and nbytes <= INLINE_BYTES else self._alone_lane
        written = [*(part.state.sent for part in bucket), *writes]
        return self._engine.push(run, reads=call.done, writes=written, lane=lane, name=label, no_skip=True)

    def _tell_op(
        self, label: str, writes: Sequence[Variable], call: Invocation,
        then: Callable[[], None] | None = None, reads: Sequence[Variable] = (), result: list[str] | None = None,
    ) -> Work:  # fmt: skip
        """Push: the master tells its client how what ``writes`` depends on went (and ``result``), then ``then`` runs.

        ``then`` may broadcast: it runs on every rank or on none.
        """

        def run(cause: BaseException | None) -> None:
            call.check()
            status = b""
            if self.mpi_rank == 0:
                if cause is not None:
                    status = json.dumps([type(cause).__name__, str(cause)]).encode()
                elif result:
                    status = json.dumps([None, result[0]]).encode()
            start_ns = timeline.now() if timeline.on and self.mpi_rank else 0
            heard = self._cast.tell(status, 0, call.deadline, label)
            if start_ns:
                timeline.span("wait", start_ns, call.about, clock=call.clock)
            if heard:
                name, text = json.loads(heard)
                if name is not None:
                    raise cause if cause is not None else rebuild(name, text)
                if result is not None:
                    result[:] = [text]
            if then is not None:
                then()
            if cause is not None:
                raise cause

        return self._engine.push(
            run, reads=[*call.done, *reads], writes=writes, lane="broadcast", name=label, no_skip=True
        )

    def _who_has_sum(self, call: Invocation) -> int:
        """Of a call with what the client has summed already, the first MPI rank that has not joined, and so has it.

        Collective. All have begun the call then: nobody reads any more what earlier calls have left in their memory.
        """
        if self.mpi_size == 1:
            return 0
        said = np.zeros(self.mpi_size)
        said[self.mpi_rank] = not self._joined
        sources = [Vector(said, "float64", "cpu", shared=True)]
        self._reduce.allreduce_many([(sources, said, ())], "float64", call.deadline, call.op)
        return int(said.argmax())
