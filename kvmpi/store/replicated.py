"""``local`` and ``mpi``: every worker holds the values, and all apply the same push rule to the same sum."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt

from kvmpi import arrays, optim
from kvmpi.arrays import Vector, address_of
from kvmpi.collectives import Comm
from kvmpi.compiling import methods_not_compiled
from kvmpi.config import Config
from kvmpi.deadline import Deadline
from kvmpi.engine import Work
from kvmpi.errors import ConfigError, KeyNotInitializedError, UnsupportedError
from kvmpi.kernels import host
from kvmpi.kernels import rows as by_rows
from kvmpi.kernels.rows import Rows
from kvmpi.store.base import KVStore, Updater
from kvmpi.store.call import Invocation, KeyState, Part, about, copy_to_host, deliver, meeting
from kvmpi.store.checkpoint import SavedKey
from kvmpi.store.grammar import normal_key
from kvmpi.store.repeats import Repeating, Repeats
from kvmpi.store.replica import Replica
from kvmpi.store.sharded import ShardedUpdates
from kvmpi.trace import timeline

Buffer = npt.NDArray[Any]


@methods_not_compiled
class ReplicatedStore(Repeating, ShardedUpdates, KVStore):
    """Values in every worker. ``local``: alone. ``mpi``: one client of all workers, tensor allreduce, no server."""

    _capabilities = {  # noqa: RUF012 - read only
        **KVStore._capabilities, "allreduce": True, "updater": True, "view": True,
    }  # fmt: skip

    def __init__(self, type_name: str, config: Config, comm: Comm | None = None) -> None:
        super().__init__(type_name, config, comm)
        self._replicas: dict[int | str, Replica] = {}
        self._updater: Updater | None = None
        self._updater_lock = threading.Lock()
        self._updating = {}
        if self.mpi_size == 1:  # a call on a key is one operation, and those of several threads run side by side
            self._beginning = nullcontext()

    @property
    def _survives_signals(self) -> bool:
        return self.mpi_size == 1  # nobody else knows how far the call was, or wants to

    @property
    def rank(self) -> int:
        return self.mpi_rank

    @property
    def num_workers(self) -> int:
        return self.mpi_size

    def set_updater(self, fn: Updater) -> None:
        if not callable(fn):
            raise ConfigError(f"set_updater({fn!r}): expected a function fn(key, pushed, stored)")
        call = self._call("set_updater")
        self._enter_settled(call, lambda: None)
        self._start_update_by(None, fn, call).wait()

    def _call_updater(self, key: int | str, pushed: Any, stored: Any) -> None:
        assert self._updater is not None
        thread = threading.get_ident()
        with self._updater_lock:  # it may have memory of its own, and knows nothing of threads
            self._updating[thread] = key
            try:
                self._updater(key, pushed, stored)
            finally:
                del self._updating[thread]

    def _update_by(self, rule: optim.Rule | None, updater: Updater | None) -> None:
        """What was set last counts, and begins without a memory."""
        for replica in self._replicas.values():
            replica.keep_apart()
            replica.forget()
        self._lists = Repeats()  # a rule may refuse what another took
        self._rule, self._updater = rule, updater
        # A function of the user's may remember what it has done, and is called in the order of the program.
        self._alone_lane = "cpu" if updater is None else "reduce"

    # ---- operations

    def _known_parts(self, call: Invocation, key: Any, value: Any, out: Any) -> list[Part] | None:
        shared = call.op in ("push", "pull") and self.sharded_update
        return self._known_list(call, key, value, out) if shared else None

    def _note_made(self, call: Invocation, parts: Sequence[Part]) -> None:
        if call.op in ("push", "pull"):
            self._note_list(call, parts)
        else:
            super()._note_made(call, parts)

    @property
    def _assigns(self) -> bool:
        """Whether a value becomes the sum that is pushed: there is no other rule."""
        return self._rule is None and self._updater is None

    def _values_of(self, states: Sequence[KeyState]) -> list[tuple[Buffer, bool]]:
        replicas = [self._replicas[state.key] for state in states]
        return [(replica.value, replica.common) for replica in replicas]

    def _value_memory(self) -> list[Buffer]:
        return [replica.value for replica in list(self._replicas.values())]

    def _start_init(self, states: list[KeyState], values: list[Vector], call: Invocation) -> list[Work]:
        return [self._init_op(s, v, call) for s, v in zip(states, values, strict=True)]

    def _init_op(self, state: KeyState, vector: Vector, call: Invocation) -> Work:
        label = f"init of key {state.key!r}"

        def run(cause: BaseException | None) -> None:
            call.check()
            value, common = self._memory_for(state, call)
            if self.mpi_rank == 0:
                self._reduce.before(lambda: copy_to_host(vector, value, call))
            self._reduce.broadcast(value, 0, call.deadline, label)
            self._replicas[state.key] = Replica(value, state.dtype, common=common)

        return self._engine.push(run, reads=call.done, writes=[state.value], lane="reduce", name=label, no_skip=True)

    def _memory_for(self, state: KeyState, call: Invocation) -> tuple[Buffer, bool]:
        """Memory for a value, and whether the workers of a host share it: only where all of them write the same."""
        if self._assigns:
            found = self._reduce.common_empty(state.count, state.dtype, call.deadline)
            if found is not None:
                return found, True
        return host.empty(state.count, state.dtype), False

    def _start_push(self, parts: list[Part], call: Invocation) -> list[Work]:
        whole = [part for part in parts if part.rows is None]
        self._copy_views(whole, call)
        begin = self._share_op if self.sharded_update else self._bucket_op
        works = [begin(bucket, call) for bucket in self._buckets(whole)]
        by_rows = [part for part in parts if part.rows is not None]
        if by_rows and self.sharded_update:
            works.append(self._make_whole([part.state for part in by_rows], call))
        return works + [self._rows_op(part, call) for part in by_rows]

    def _copy_views(self, parts: Sequence[Part], call: Invocation) -> None:
        """Copy what is pushed out of values of the same call that are written to while others still read: where workers
        share a value by sums, else key by key by a rule.
        """
        replicas, assigns = [self._replicas.get(part.state.key) for part in parts], self._assigns
        written = [replica.value for replica in replicas if replica is not None and (replica.common or not assigns)]
        if not written:
            return
        meets = meeting(written)
        found = [
            (part, i)
            for part in parts
            for i, vector in enumerate(part.vectors)
            if vector.on_host and meets(vector.buffer)
        ]
        if found:
            values = [part.state.value for part in parts]
            name = f"{call.op} of a view"
            earlier = self._engine.push(lambda _: None, reads=values, lane="inline", name=name, no_skip=True)
            earlier.wait_done(call.deadline.remaining_s())
        for part, i in found:
            part.vectors[i] = part.vectors[i].copied()

    def _bucket_op(self, bucket: list[Part], call: Invocation) -> Work:
        """Push: sum, apply the push rule, and copy out what the parts ask for."""
        rule, assigns = self._rule, self._assigns
        if assigns:
            _choose_direct(bucket, devices=self._reduce.fills_devices and not call.reduced)

        def targets(part: Part) -> tuple[Buffer, Sequence[Buffer]]:
            replica = self._replicas[part.state.key]
            made = replica.value if replica.common else part.state.host_buffer()
            return made, [memory for memory in part.direct.values() if _address_of(memory) != address_of(made)]

        def finish(part: Part) -> None:
            state, replica = part.state, self._replicas[part.state.key]
            met = replica.value.copy() if rule is not None and rule.replies_old and part.outs else None
            if not replica.common:
                with self._recorder.timed("update"):
                    self._apply(state)
            place = arrays.span_of(replica.value)
            outs = [out for out in part.outs if arrays.span_of(out) != place]  # else it is there already
            deliver([out for out in outs if id(out) not in part.direct], replica.value if met is None else met)
            if outs:
                self._recorder.add("copy", 0.0, len(outs) * replica.value.nbytes, calls=0)

        values = [part.state.value for part in bucket]
        # A function of the user's may remember what it has done, and is called in the same order everywhere.
        if rule is None or call.reduced or not call.async_op or self.mpi_size == 1:
            return self._reduce_op(bucket, call, finish, writes=values, targets=targets if assigns else None)
        self._reduce_op(bucket, call)

        def run() -> None:
            if timeline.on:
                timeline.about(about(bucket), call.clock)
            for part in bucket:
                finish(part)

        # Elsewhere, so that the next sum begins meanwhile.
        return self._engine.push(
            run, reads=[part.state.sent for part in bucket], writes=values, lane="cpu", priority=call.priority,
            name=f"update by {call.op}",
        )  # fmt: skip

    def _apply(self, state: KeyState) -> None:
        """The push rule: the host buffer holds the sum."""
        replica, pushed = self._replicas[state.key], state.host_buffer()
        if self._updater is not None:
            shape, dtype, like = state.shape, state.dtype, state.library
            stored = arrays.wrap(replica.value, shape, dtype, like)
            self._call_updater(state.key, arrays.wrap(pushed, shape, dtype, like), stored)
        elif self._rule is not None:
            self._update(state, replica, self._rule, pushed)
        else:
            replica.value, state.buffer = pushed, replica.value

    def _start_pull(self, parts: list[Part], call: Invocation) -> list[Work]:
        if self.sharded_update:
            return [self._gather_op(bucket, call) for bucket in self._buckets(parts)]
        return [self._copy_op(part.state, part.outs, call) for part in parts]

    def _copy_op(self, state: KeyState, outs: list[Any], call: Invocation) -> Work:
        def run() -> None:
            with self._recorder.timed("copy", len(outs) * self._replicas[state.key].value.nbytes):
                call.await_devices()
                deliver(outs, self._replicas[state.key].value)

        # A call that waits anyway copies in its own thread if the value is ready.
        lane = "cpu" if call.async_op else "inline"
        return self._engine.push(run, reads=[*call.done, state.value], lane=lane, name=f"pull of key {state.key!r}")

    def _start_pushpull(self, parts: list[Part], call: Invocation) -> list[Work]:
        works = self._start_push(parts, call)
        if self.sharded_update:
            whole = [part for part in parts if part.rows is None]
            works += [self._gather_op(bucket, call) for bucket in self._buckets(whole)]
        return works

    def _start_allreduce(self, parts: list[Part], call: Invocation) -> list[Work]:
        return [self._sum_op(bucket, call) for bucket in self._buckets(parts)]

    def _sum_op(self, bucket: list[Part], call: Invocation) -> Work:
        """Push: sum into what the parts ask for, and nowhere else."""
        _choose_direct(bucket, devices=self._reduce.fills_devices)

        def targets(part: Part) -> tuple[Buffer, Sequence[Buffer]]:
            direct = list(part.direct.values())
            if direct and len(part.vectors) == 1 and len(direct) == len(part.outs):  # as a rule
                return direct.pop(0), direct
            # The first vector may be replaced by partial sums, others are still to be added by then.
            later = {vector.address for vector in part.vectors[1:]}
            # Other outs are filled from there, which is then on the host.
            all_direct = all(id(out) in part.direct for out in part.outs)
            usable = (
                (all_direct or isinstance(memory, np.ndarray)) and (not later or _address_of(memory) not in later)
                for memory in direct
            )
            first = next((i for i, found in enumerate(usable) if found), None)
            return (part.state.host_buffer() if first is None else direct.pop(first)), direct

        def finish(part: Part) -> None:
            others = [out for out in part.outs if id(out) not in part.direct]
            if others:
                deliver(others, targets(part)[0])

        return self._reduce_op(bucket, call, finish, targets=targets)

    def _rows_op(self, part: Part, call: Invocation) -> Work:
        """Push: sum rows over the client, apply the push rule to them, and copy out what the part asks for."""
        state = part.state

        def finish() -> None:
            replica, rows = self._replicas[state.key], part.rows
            assert rows is not None
            replica.keep_apart()  # the ranks of a host write common memory together, and whole
            with self._recorder.timed("update"):
                self._apply_rows(state, replica, rows)
            call.await_devices()
            deliver(part.outs, replica.value)
            nbytes = len(part.outs) * replica.value.nbytes
            if part.row_outs:
                found = Rows(rows.ids, by_rows.take(replica.value, state.width, rows.ids))
                self._fill(part, found)
                nbytes += sum(out.nbytes(found) for out in part.row_outs)
            if nbytes:
                self._recorder.add("copy", 0.0, nbytes, calls=0)

        return self._sum_rows_op(part, call, finish, writes=[state.value])

    def _apply_rows(self, state: KeyState, replica: Replica, rows: Rows) -> None:
        """The push rule, for the sum of some rows."""
        if self._updater is not None:
            flat, shape = replica.value, (rows.count, *state.shape[1:])
            pushed: Any = (rows.ids, arrays.wrap(rows.values.reshape(-1), shape, state.dtype, state.library))
            if state.library == "torch":
                pushed = arrays.sparse_tensor(rows.ids, rows.values.reshape(-1), state.shape, state.dtype)
            self._call_updater(state.key, pushed, arrays.wrap(flat, state.shape, state.dtype, state.library))
        elif self._rule is not None:
            replica.apply_rows(self._rule.of_key(state.key), rows)
        else:
            by_rows.put(replica.value, rows.ids, rows.values)

    def _start_row_pull(self, part: Part, call: Invocation) -> Work:
        state = part.state
        if self.sharded_update:
            self._make_whole([state], call)

        def run() -> None:
            start_s, value = time.perf_counter(), self._replicas[state.key].value
            nbytes = sum(out.fill_from(value, state.width) for out in part.row_outs)
            self._recorder.add("copy", time.perf_counter() - start_s, nbytes)

        lane = "cpu" if call.async_op else "inline"
        return self._engine.push(
            run, reads=[*call.done, state.value], lane=lane, name=f"{call.op} of key {state.key!r}"
        )

    def view(self, key: Any) -> Any:
        self._check_open()
        state = self._keys.get(normal_key(key))
        if state is None:
            raise KeyNotInitializedError(f"view of key {key!r} on worker {self.rank}: the key was never initialised")
        if self._updating.get(threading.get_ident()) == state.key:
            self._refuse_inside("view")
        self._engine.push(lambda: None, reads=[state.value], lane="inline", name=f"view of key {key!r}").wait()
        replica = self._replicas[state.key]
        if replica.stale:
            raise UnsupportedError(
                f"view of key {key!r} on worker {self.rank}: with KVMPI_SHARDED_UPDATE=on this worker has its share of "
                "what was pushed, and pull brings all shares together: take that"
            )
        if replica.shown is None or replica.shown[1] is not replica.value:
            value = arrays.wrap(replica.value.view(), state.shape, state.dtype, state.library)
            if isinstance(value, np.ndarray):
                value.flags.writeable = False
            replica.shown = value, replica.value
        return replica.shown[0]

    def _behind_views(self, key: Any, out: Any) -> Any:
        if self._rule is not None and self._rule.replies_old:  # which is no longer there
            return out
        if isinstance(key, list | tuple):
            several = isinstance(out, list | tuple) and len(out) == len(key)
            return list(map(self._behind_view, key, out)) if several else out
        return self._behind_view(key, out)

    def _behind_view(self, key: Any, out: Any) -> Any:
        if isinstance(out, list):  # a pair is rows
            return [self._behind_view(key, each) for each in out]
        if type(out) is not np.ndarray or out.flags.writeable:
            return out
        state = self._keys.get(key) if isinstance(key, int | str | np.integer) else None  # type: ignore[arg-type]
        replica = None if state is None else self._replicas.get(state.key)
        if state is None or replica is None or replica.shown is None or replica.shown[0] is not out:
            return out
        memory = replica.shown[1]
        # Of a value that is not shared an earlier call may have made room for the next sum by now.
        return memory.reshape(state.shape) if memory is replica.value or memory is state.buffer else out

    def _start_set_rule(self, rule: optim.Rule, call: Invocation) -> Work:
        return self._start_update_by(rule, None, call)

    def _start_update_by(self, rule: optim.Rule | None, updater: Updater | None, call: Invocation) -> Work:
        common: list[Buffer] = []
        if self.sharded_update:
            self._make_whole(list(self._keys.values()), call)

        def update() -> None:
            common.extend(replica.value for replica in self._replicas.values() if replica.common)
            self._update_by(rule, updater)

        def free(cause: BaseException | None) -> None:
            call.check()
            if cause is not None:
                raise cause
            self._reduce.free_common(common, call.deadline)

        work = self._on_all_keys(update, call.op, call)
        if self.mpi_size == 1:
            return work
        return self._engine.push(
            free, reads=call.done, writes=[self._control], lane="reduce", name=call.op, no_skip=True
        )

    def _start_set_hyperparams(self, rule: optim.Rule, hyperparams: dict[str, Any], call: Invocation) -> Work:
        return self._on_all_keys(lambda: None, "set_hyperparams", call)

    def _release(self, deadline: Deadline) -> None:
        super()._release(deadline)
        self._replicas, self._repeats, self._lists = (
            {},
            Repeats(),
            Repeats(),
        )  # what refers to the store must not keep its values

    def _on_all_keys(self, run: Any, name: str, call: Invocation) -> Work:
        values = [state.value for state in self._keys.values()]
        return self._engine.push(run, reads=call.done, writes=[self._control, *values], lane="cpu", name=name)

    # ---- values from elsewhere

    def _assign(self, state: KeyState, vector: Vector, call: Invocation) -> None:
        label = f"assign of key {state.key!r}"

        def run(cause: BaseException | None) -> None:
            call.check()
            replica = self._replicas[state.key]
            if self.mpi_rank == 0:
                self._reduce.before(lambda: copy_to_host(vector, replica.value, call))
            self._reduce.broadcast(replica.value, 0, call.deadline, label)
            replica.master, replica.stale = None, False

        self._engine.push(run, reads=call.done, writes=[state.value], lane="reduce", name=label, no_skip=True).wait()

    def _await_whole(self, call: Invocation) -> None:
        if self.sharded_update:
            self._make_whole(list(self._keys.values()), call).wait(call.deadline.remaining_s())

    def _between_calls(
        self, op: str, states: Sequence[KeyState], run: Callable[[], None], *, changes: bool = False
    ) -> None:
        values = [state.value for state in states]
        # Only read where that is enough: a file that cannot be written then leaves no value in doubt.
        reads, writes = ([], values) if changes else (values, [])
        self._engine.push(run, reads, writes, lane="inline", name=op).wait()

    def _dump(self, state: KeyState, deadline: Deadline) -> SavedKey:
        replica = self._replicas[state.key]
        found = {"value": replica.value, **replica.state}
        if replica.master is not None:
            found["master"] = replica.master
        return SavedKey(state.key, state.shape, state.dtype, replica.updates, found, state.library)

    def _restore(self, saved: list[SavedKey], with_values: bool, deadline: Deadline) -> None:
        for key in saved:
            replica = self._replicas[key.key]
            found = dict(key.arrays)
            master = found.pop("master", None)
            if with_values:
                np.copyto(replica.value, found.pop("value"))
                replica.master = master
            elif master is not None:
                replica.master = optim.fitting_master(master, replica.value, key.dtype)
            replica.state, replica.updates = found, key.updates


@methods_not_compiled
class ClientStore(ReplicatedStore):
    """``kv.client``: sums among the workers of one client. It takes no optimizer: it holds sums, and no weights."""

    _capabilities = {**ReplicatedStore._capabilities, "optimizer": False, "elastic": False}  # noqa: RUF012 - read only

    def set_optimizer(self, optimizer: Any) -> None:
        raise UnsupportedError(
            "kv.client only sums among the workers of one client: apply the sum in the loop, or call "
            "set_optimizer on the store that kv.client belongs to"
        )


def _address_of(memory: Any) -> int:
    return address_of(memory) if isinstance(memory, np.ndarray) else int(memory.data.ptr)


def _choose_direct(bucket: Sequence[Part], *, devices: bool) -> None:
    """Set each part's ``direct``; ``devices``: results may be written there directly."""
    for part in bucket:
        if part.in_place:
            for out, vector in zip(part.outs, part.vectors, strict=True):
                if vector.shared and (vector.on_host or devices):
                    part.direct[id(out)] = vector.buffer
            continue
        for out in part.outs:
            if (memory := arrays.memory_of(out)) is not None:
                part.direct[id(out)] = memory.buffer
            elif devices and (there := arrays.device_memory_of(out)) is not None:
                part.direct[id(out)] = there
