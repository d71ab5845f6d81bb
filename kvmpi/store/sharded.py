"""Each worker of a client updates its share of every value, and what a rule remembers is kept once (ZeRO, stage 1).

A push brings every worker its share of the sum, to which the rule is applied; a pull brings together what the workers
have. As many bytes travel as in an allreduce; the update, and what is remembered for it, is one part in ``mpi_size``.
Whatever else looks at a value, or at what is remembered, is preceded by ``_make_whole``.

Source: Rajbhandari, Rasley, Ruwase, He: ZeRO: memory optimizations toward training trillion parameter models, SC 2020,
arXiv:1910.02054.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvmpi import arrays, optim
from kvmpi.arrays import Vector
from kvmpi.collectives import Comm, share_of
from kvmpi.config import Config
from kvmpi.engine import Work
from kvmpi.errors import KVError, ranks_in_words, rebuild
from kvmpi.store.call import Invocation, KeyState, Part, about, deliver, label_of
from kvmpi.store.operations import Operations
from kvmpi.store.repeats import Repeats
from kvmpi.store.replica import Replica
from kvmpi.trace import timeline

Buffer = npt.NDArray[Any]


class ShardedUpdates(Operations):
    """The part of a store whose workers hold the values that divides updates among them."""

    _replicas: dict[int | str, Replica]

    def __init__(self, type_name: str, config: Config, comm: Comm | None = None) -> None:
        super().__init__(type_name, config, comm)
        #: Lists that were pushed, or pulled, more than once: the keys' states, and which array is whose.
        self._lists: Repeats[list[tuple[KeyState, int]]] = Repeats()

    @property
    def sharded_update(self) -> bool:
        rule = self._rule
        return (
            self._config.sharded_update == "on"
            and self.mpi_size > 1
            and rule is not None
            and optim.never_raises(rule)
            and rule.in_blocks
            and not (rule.averages or rule.replies_old)
        )

    # ---- lists of keys that are pushed, or pulled, again

    def _known_list(self, call: Invocation, key: Any, value: Any, out: Any) -> list[Part] | None:
        """A call that was made before, of which nothing has to be looked at but where arrays are that are written to.

        What is pushed is copied before anything is written, wherever it lies.
        """
        usual = isinstance(key, list | tuple) and not (self._joined or call.reduced or timeline.on)
        if not usual or type(call.priority) is not int:
            return None
        signature = self._lists.signature(call.op, 1.0, key, value, out)
        if signature is not None and call.op == "push":
            op, scale, keys, pushed, pulled = signature
            signature = op, scale, keys, tuple(layout[1:] for layout in pushed or ()), pulled
        call.signature = signature
        known = None if signature is None else self._lists.find(signature)
        has = self._engine.has_pending
        if known is None or any(has(state.sent) or has(state.value) for state, _ in known):
            return None
        if out is not None:
            arrays.note_writes(out)
            return [Part(state, [], [out[place]]) for state, place in known]
        for state, _ in known:
            state.pushes += 1
            state.by_rows = False
        return [Part(state, [arrays.read(value[place])]) for state, place in known]

    def _note_list(self, call: Invocation, parts: Sequence[Part]) -> None:
        """The list, which was not known, is pushed or pulled."""
        signature = call.signature
        if signature is None or not self._lists.made(signature) or len(parts) != len(signature[2]):
            return
        if all(part.rows is None and not part.row_outs and len(part.vectors) + len(part.outs) == 1 for part in parts):
            place = {key: i for i, key in enumerate(signature[2])}
            self._lists.keep(signature, [(part.state, place[part.state.key]) for part in parts])

    # ---- operations

    def _share_op(self, bucket: Sequence[Part], call: Invocation) -> Work:
        """Push: sum, and apply the rule to this worker's share."""
        label, rule = label_of(call.op, [part.state for part in bucket]), self._rule
        assert rule is not None

        def run(cause: BaseException | None) -> None:
            call.check()
            if timeline.on:
                timeline.about(about(bucket), call.clock)
            replicas = [self._replicas[part.state.key] for part in bucket]
            if call.reduced:
                sums = self._shares_of_sums(bucket, call, label)
            else:
                dtype = bucket[0].state.dtype
                sums = self._reduce.sum_shares([part.vectors for part in bucket], dtype, call.deadline, label)
            for replica in replicas:  # on all workers alike, whatever becomes of the update
                replica.stale = True
            for replica in replicas:
                replica.narrow_to(self._share_of(replica))
            if cause is not None:
                raise cause
            with self._recorder.timed("update"):
                for part, replica, own in zip(bucket, replicas, sums, strict=True):
                    self._update(part.state, replica, rule, own)

        written = [variable for part in bucket for variable in (part.state.sent, part.state.value)]
        return self._engine.push(run, reads=call.done, writes=written, lane="reduce", name=label, no_skip=True)

    def _share_of(self, replica: Replica) -> slice:
        return share_of(replica.value.size, self.mpi_size, self.mpi_rank)

    def _shares_of_sums(self, bucket: Sequence[Part], call: Invocation, label: str) -> list[Buffer]:
        """This worker's shares of sums that the client has already, in the keys' host buffers."""
        root = self._who_has_sum(call) if call.num_joined else self.mpi_rank
        for part in bucket:
            buffer = part.state.host_buffer()
            if self.mpi_rank == root:
                self._reduce.sum_own(part.vectors, buffer, part.state.dtype)
            if call.num_joined:
                self._reduce.broadcast(buffer, root, call.deadline, label)
        replicas = [self._replicas[part.state.key] for part in bucket]
        return [
            part.state.host_buffer()[self._share_of(replica)] for part, replica in zip(bucket, replicas, strict=True)
        ]

    def _update(self, state: KeyState, replica: Replica, rule: optim.Rule, pushed: Buffer) -> None:
        """The rule is applied to what this worker has of the key, of which ``pushed`` is the sum."""
        try:
            replica.apply(rule.of_key(state.key), pushed)
        except KVError as error:
            what = f"update {replica.updates + 1} of key {state.key!r} on worker {self.rank}"
            raise rebuild(type(error).__name__, f"{what}: {error}") from error

    def _gather_op(self, parts: Sequence[Part], call: Invocation) -> Work:
        """Push: bring values together in what the parts ask for."""
        label = label_of(call.op, [part.state for part in parts])

        def run(cause: BaseException | None) -> None:
            call.check()
            if timeline.on:
                timeline.about(about(parts), call.clock)
            if call.fences:
                self._reduce.before(call.await_devices)
            stale = [part for part in parts if self._replicas[part.state.key].stale]
            # What an array's memory cannot get, the value does, and passes it on; it stays stale as elsewhere.
            memory = {id(out): arrays.memory_of(out) for part in parts for out in part.outs}
            gathered = []
            for part in stale:
                value = self._replicas[part.state.key].value
                found = [memory[id(out)] for out in part.outs]
                targets = [vector.buffer for vector in found if vector is not None]
                gathered.append((value, targets if len(targets) == len(found) else [*targets, value]))
            self._reduce.gather_shares(gathered, call.deadline, label)
            if cause is not None:
                raise cause
            for part in parts:
                value = self._replicas[part.state.key].value
                fresh = not self._replicas[part.state.key].stale
                deliver([out for out in part.outs if fresh or memory[id(out)] is None], value)
                self._recorder.add("copy", 0.0, len(part.outs) * value.nbytes, calls=0)

        values = [part.state.value for part in parts]
        return self._engine.push(run, reads=[*call.done, *values], lane="reduce", name=label, no_skip=True)

    def _make_whole(self, states: Sequence[KeyState], call: Invocation) -> Work:
        """Push: every worker gets the whole of these values, and of what is remembered of them."""

        def run(cause: BaseException | None) -> None:
            call.check()
            replicas = [self._replicas.get(state.key) for state in states]  # none where an init has failed
            if not any(replica is not None and replica.is_parted for replica in replicas):
                if cause is not None:
                    raise cause
                return
            found, error = list[tuple[Replica, dict[str, Buffer]]](), None
            try:
                found = [(replica, replica.widen()) for replica in replicas if replica is not None]
            except Exception as failed:  # this worker alone may have no room
                error = failed
            self._check_alike(states, replicas, error, call)
            by_dtype = defaultdict[np.dtype[Any], list[Buffer]](list)
            for _, whole in found:
                for array in whole.values():
                    by_dtype[array.dtype].append(array)
            for some in by_dtype.values():
                self._reduce.gather_shares([(array, [array]) for array in some], call.deadline, call.op)
            for replica, whole in found:
                replica.widened(whole)
            if cause is not None:
                raise cause

        values = [state.value for state in states]
        return self._engine.push(run, reads=call.done, writes=values, lane="reduce", name=call.op, no_skip=True)

    def _check_alike(
        self, states: Sequence[KeyState], replicas: Sequence[Replica | None], error: Exception | None, call: Invocation
    ) -> None:
        """Raise, on all workers, if they cannot bring together what they have. Collective.

        Args:
            error: why this worker cannot.
        """
        said = np.zeros((self.mpi_size, 1 + len(states)))
        said[self.mpi_rank, 0] = error is not None
        said[self.mpi_rank, 1:] = [0 if replica is None else replica.signature() for replica in replicas]
        flat = said.reshape(-1)
        sources = [Vector(flat, "float64", "cpu", shared=True)]
        self._reduce.allreduce_many([(sources, flat, ())], "float64", call.deadline, call.op)
        if error is not None:
            raise error
        what = f"{call.op} on worker {self.rank}: the shares of all workers cannot be brought together"
        if failed := np.flatnonzero(said[:, 0]).tolist():
            raise KVError(f"{what}: worker {ranks_in_words(failed)} has failed, as its own error says")
        for state, column in zip(states, said[:, 1:].T, strict=True):
            if others := np.flatnonzero(column != column[0]).tolist():
                raise KVError(
                    f"{what}: of key {state.key!r} worker {ranks_in_words(others)} remembers something else than "
                    "worker 0, as an update has failed on some workers alone: begin again from a checkpoint"
                )
