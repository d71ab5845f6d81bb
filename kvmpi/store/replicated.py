"""``local`` and ``mpi``: every worker holds the values, and all apply the same push rule to the same sum."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvmpi import arrays, optim
from kvmpi.arrays import Vector
from kvmpi.collectives import Comm
from kvmpi.config import Config
from kvmpi.deadline import Deadline
from kvmpi.engine import Work
from kvmpi.errors import UnsupportedError
from kvmpi.kernels import host
from kvmpi.store.base import KVStore, Updater
from kvmpi.store.checkpoint import SavedKey
from kvmpi.store.core import Invocation, KeyState, as_accumulated, scaled

Buffer = npt.NDArray[Any]


class _Replica:
    """This worker's copy of one key, with what its rule remembers."""

    __slots__ = ("master", "state", "updates", "value")

    def __init__(self, value: Buffer) -> None:
        self.value = value
        self.master: Buffer | None = None
        self.state: dict[str, Buffer] = {}
        self.updates = 0


class ReplicatedStore(KVStore):
    """Values in every worker. ``local``: alone. ``mpi``: one client of all workers, tensor allreduce, no server."""

    _capabilities = {**KVStore._capabilities, "updater": True}  # noqa: RUF012 - read only

    def __init__(self, type_name: str, config: Config, comm: Comm | None = None) -> None:
        super().__init__(type_name, config, comm)
        self._replicas: dict[int | str, _Replica] = {}
        self._updater: Updater | None = None

    @property
    def rank(self) -> int:
        return self.mpi_rank

    @property
    def num_workers(self) -> int:
        return self.mpi_size

    def set_updater(self, fn: Updater) -> None:
        self._settle(Deadline(self._config.timeout_s))
        self._updater = fn

    # ---- operations

    def _start_init(self, states: list[KeyState], values: list[Vector], call: Invocation) -> list[Work]:
        return [self._init_op(s, v, call) for s, v in zip(states, values, strict=True)]

    def _init_op(self, state: KeyState, vector: Vector, call: Invocation) -> Work:
        label = f"init of key {state.key!r}"

        def run(cause: BaseException | None) -> None:
            call.check()
            value = host.empty(state.count, state.dtype)
            if self.mpi_rank == 0:
                _copy_to_host(vector, value)
            self._cast.broadcast(value, 0, call.deadline, label)
            self._replicas[state.key] = _Replica(value)

        return self._engine.push(run, reads=call.done, writes=[state.value], lane="broadcast", name=label, no_skip=True)

    def _start_push(self, state: KeyState, vectors: list[Vector], call: Invocation) -> Work:
        factor = self._mean_factor(vectors)

        def apply() -> None:
            scaled(state.host_buffer(), factor, state.dtype)
            with self._recorder.timed("update"):
                self._apply(state)

        return self._reduce_op(state, vectors, call, then=apply, writes=[state.value])

    def _apply(self, state: KeyState) -> None:
        """The push rule: the host buffer holds the sum."""
        replica, pushed = self._replicas[state.key], state.host_buffer()
        if self._updater is not None:
            shape, dtype, like = state.shape, state.dtype, state.library
            self._updater(
                state.key, arrays.wrap(pushed, shape, dtype, like), arrays.wrap(replica.value, shape, dtype, like)
            )
        elif self._rule is not None:
            rule = self._rule
            replica.updates += 1
            if rule.multi_precision and state.dtype in host.HALF and replica.master is None:
                replica.master = optim.make_master(replica.value, state.dtype)
            optim.update(
                rule, replica.value, state.dtype, as_accumulated(pushed, state.dtype), replica.state, replica.updates,
                master=replica.master,
            )  # fmt: skip
        else:
            replica.value, state.buffer = pushed, replica.value

    def _start_pull(self, state: KeyState, outs: list[Any], call: Invocation) -> Work:
        def run() -> None:
            with self._recorder.timed("copy"):
                for out in outs:
                    arrays.write(out, self._replicas[state.key].value)

        # A call that waits anyway copies in its own thread if the value is ready.
        lane = "cpu" if call.async_op else "inline"
        return self._engine.push(run, reads=[*call.done, state.value], lane=lane, name=f"pull of key {state.key!r}")

    def _start_pushpull(self, state: KeyState, vectors: list[Vector], outs: list[Any], call: Invocation) -> Work:
        factor = self._mean_factor(vectors)
        rule = self._rule

        def apply() -> None:
            met = self._replicas[state.key].value.copy() if rule is not None and rule.replies_old else None
            scaled(state.host_buffer(), factor, state.dtype)
            with self._recorder.timed("update"):
                self._apply(state)
            for out in outs:
                arrays.write(out, self._replicas[state.key].value if met is None else met)

        return self._reduce_op(state, vectors, call, then=apply, writes=[state.value])

    def _start_set_rule(self, rule: optim.Rule, call: Invocation) -> Work:
        def run() -> None:
            for replica in self._replicas.values():
                replica.state, replica.updates, replica.master = {}, 0, None
            self._rule = rule

        return self._on_all_keys(run, "set_optimizer", call)

    def _start_set_hyperparams(self, rule: optim.Rule, hyperparams: dict[str, Any], call: Invocation) -> Work:
        return self._on_all_keys(lambda: None, "set_hyperparams", call)

    def _on_all_keys(self, run: Any, name: str, call: Invocation) -> Work:
        values = [state.value for state in self._keys.values()]
        return self._engine.push(run, reads=call.done, writes=[self._control, *values], lane="cpu", name=name)

    # ---- checkpoints

    def _dump(self, state: KeyState, deadline: Deadline) -> SavedKey:
        replica = self._replicas[state.key]
        found = {"value": replica.value, **replica.state}
        if replica.master is not None:
            found["master"] = replica.master
        return SavedKey(state.key, state.shape, state.dtype, replica.updates, found)

    def _restore(self, saved: list[SavedKey], with_values: bool, deadline: Deadline) -> None:
        for key in saved:
            replica = self._replicas[key.key]
            found = dict(key.arrays)
            if with_values:
                np.copyto(replica.value, found.pop("value"))
            replica.master = found.pop("master", None)
            replica.state, replica.updates = found, key.updates


class ClientStore(ReplicatedStore):
    """``kv.client``: sums among the workers of one client. It takes no optimizer: it holds sums, and no weights."""

    _capabilities = {**ReplicatedStore._capabilities, "optimizer": False, "elastic": False}  # noqa: RUF012 - read only

    def set_optimizer(self, optimizer: Any) -> None:
        raise UnsupportedError(
            "kv.client only sums among the workers of one client: apply the sum in the loop, or call "
            "set_optimizer on the store that kv.client belongs to"
        )


def _copy_to_host(vector: Vector, out: Buffer) -> None:
    if vector.on_host:
        np.copyto(out, vector.buffer)
    else:
        from kvmpi.kernels import gpu

        gpu.sum_vectors_to_host(out, [vector.buffer], vector.dtype)
