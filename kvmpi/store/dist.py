"""The ``dist_*`` types: servers hold the values; each client's master talks to them for its workers."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from kvmpi import arrays, optim
from kvmpi.arrays import DTYPES, Vector
from kvmpi.collectives import Comm, Entry
from kvmpi.config import Config, client_bounds
from kvmpi.deadline import Deadline
from kvmpi.engine import Work
from kvmpi.errors import UnsupportedError
from kvmpi.kernels import host
from kvmpi.ps import EmbeddedJob, PsClient
from kvmpi.store.base import Agreed, KeyState, KVStore, scaled
from kvmpi.store.checkpoint import SavedKey

Buffer = npt.NDArray[Any]

#: Stores are numbered in the order of their creation, which is the same in every worker.
_numbers = itertools.count(1)


class DistStore(KVStore):
    """A store on servers.

    Args:
        mode: "sync" or "async".
        grouped: workers of one MPI communicator are one client; else every worker is a client of its own.
        embedded: servers in this process, for a program that no launcher started.
    """

    def __init__(
        self, type_name: str, config: Config, comm: Comm | None, *, mode: str, grouped: bool,
        embedded: EmbeddedJob | None = None,
    ) -> None:  # fmt: skip
        super().__init__(type_name, config, comm)
        self._mode, self._embedded = mode, embedded
        first, _ = client_bounds(config.num_workers, config.num_clients)[config.client_rank]
        self._rank = first + self.mpi_rank if grouped else max(0, config.rank)
        self._client = config.client_rank if grouped else self._rank
        self._num_clients = config.num_clients if grouped else config.num_workers
        self._capabilities = {**KVStore._capabilities, "async": mode == "async", "compression": True}
        self._ps: PsClient | None = None
        number = next(_numbers)
        if self.mpi_rank == 0:
            self._ps = PsClient(
                config, store=number, mode=mode, client=self._client, num_clients=self._num_clients,
                recorder=self._recorder,
            )  # fmt: skip
        deadline = Deadline(config.timeout_s)
        self._command("create", lambda ps: ps.connect(deadline), Agreed(), deadline).wait()

    # ---- who and where

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def num_workers(self) -> int:
        return self._config.num_workers

    @property
    def client_rank(self) -> int:
        return self._client

    @property
    def num_clients(self) -> int:
        return self._num_clients

    @property
    def num_servers(self) -> int:
        return self._config.num_servers

    # ---- operations

    def _start_init(
        self, states: list[KeyState], values: list[Vector], agreed: Agreed, deadline: Deadline
    ) -> list[Work]:
        if self._ps is not None:
            self._ps.add_keys([(state.key, state.shape, state.dtype) for state in states])
        works = []
        for state, vector in zip(states, values, strict=True):
            value = _on_host(vector) if self.rank == 0 else None
            works.append(
                self._ask_op(state, "init", lambda ps, s=state, v=value: ps.init(s.key, v, deadline), agreed)  # type: ignore[misc]
            )
            if self.mpi_size > 1:
                works[-1] = self._tell_op(f"init of key {state.key!r}", [state.value], deadline, agreed)
        return works

    def _forget(self, states: list[KeyState]) -> None:
        if self._ps is not None:
            self._ps.forget_keys([state.key for state in states])

    def _check_pushable(self, op: str, state: KeyState) -> None:
        if self._mode == "async" and self._rule is None:
            raise UnsupportedError(
                f"{op} of key {state.key!r} on worker {self.rank}: an asynchronous store needs an update rule; "
                "call kv.set_optimizer(...) on all workers first"
            )

    def _start_push(
        self, state: KeyState, vectors: list[Vector], priority: int, deadline: Deadline, agreed: Agreed, async_op: bool
    ) -> Work:
        lent = self._lent(vectors, until_done=async_op)
        if lent is not None:
            work = self._ask_op(
                state, "push", lambda ps: ps.push(state.key, lent, deadline, priority), agreed, priority=priority
            )
            return work if async_op else self._nothing()
        local = self._sum_op(state, vectors, "push", deadline, agreed, async_op)
        work = self._ask_op(
            state, "push", lambda ps: ps.push(state.key, state.host_buffer(), deadline, priority), agreed,
            reads_buffer=True, priority=priority,
        )  # fmt: skip
        # The caller's arrays are free once the sum is in the key's own buffer.
        return work if async_op and self._ps is not None else local

    def _start_pull(
        self, state: KeyState, outs: list[Any], priority: int, deadline: Deadline, agreed: Agreed, async_op: bool
    ) -> Work:
        target = _Target(state, outs)
        work = self._ask_op(
            state, "pull", lambda ps: ps.pull(state.key, target.buffer, deadline, priority), agreed, priority=priority
        )
        return self._spread_op(state, target, "pull", work, deadline, agreed)

    def _start_pushpull(
        self, state: KeyState, vectors: list[Vector], outs: list[Any], priority: int, deadline: Deadline, agreed: Agreed,
        async_op: bool,
    ) -> Work:  # fmt: skip
        target = _Target(state, outs)
        source = self._lent(vectors, until_done=True)
        if source is None:
            self._sum_op(state, vectors, "pushpull", deadline, agreed, async_op)
        work = self._ask_op(
            state, "pushpull",
            lambda ps: ps.pushpull(
                state.key, state.host_buffer() if source is None else source, target.buffer, deadline, priority
            ),
            agreed, reads_buffer=source is None, priority=priority,
        )  # fmt: skip
        return self._spread_op(state, target, "pushpull", work, deadline, agreed)

    def _lent(self, vectors: list[Vector], *, until_done: bool) -> Buffer | None:
        """The memory that can be sent as it is: a single host vector that nobody changes while it is sent."""
        if self.mpi_size == 1 and len(vectors) == 1 and vectors[0].on_host and (until_done or not vectors[0].shared):
            buffer: Buffer = vectors[0].buffer
            return buffer
        return None

    def _sum_op(
        self, state: KeyState, vectors: list[Vector], op: str, deadline: Deadline, agreed: Agreed, async_op: bool
    ) -> Work:
        factor = self._mean_factor(vectors)
        if self._ps is None:
            return self._reduce_op(state, vectors, op, deadline, agreed, async_op)
        return self._reduce_op(
            state, vectors, op, deadline, agreed, async_op,
            then=lambda: scaled(state.host_buffer(), factor, state.dtype),
        )  # fmt: skip

    def _ask_op(
        self, state: KeyState, op: str, ask: Callable[[PsClient], Work], agreed: Agreed, *,
        reads_buffer: bool = False, priority: int = 0,
    ) -> Work:  # fmt: skip
        """Push on the master: ask the servers about one key. Other workers have nothing to do."""
        ps = self._ps
        if ps is None:
            return self._nothing()
        reads = [*agreed.done, *([state.sent] if reads_buffer else [])]
        return self._engine.push(
            lambda: ask(ps), reads=reads, writes=[state.value], lane="inline", priority=priority,
            name=f"{op} of key {state.key!r}",
        )  # fmt: skip

    def _spread_op(
        self, state: KeyState, target: _Target, op: str, asked: Work, deadline: Deadline, agreed: Agreed
    ) -> Work:
        """Push: the master's answer goes to all workers of the client and into all arrays of ``out``."""
        label = f"{op} of key {state.key!r}"
        if self.mpi_size == 1:
            if target.complete:
                return asked
            return self._engine.push(target.spread, writes=[state.value], lane="cpu", name=f"{label}: copy out")

        def spread() -> None:
            self._cast.broadcast(target.buffer, 0, deadline, label)
            target.spread()

        return self._tell_op(label, [state.value], deadline, agreed, then=spread)

    def _nothing(self) -> Work:
        work = Work("nothing to wait for")
        work.finish()
        return work

    # ---- commands

    def _command(
        self, name: str, run: Callable[[PsClient], Work | None], agreed: Agreed, deadline: Deadline,
        result: list[str] | None = None,
    ) -> Work:  # fmt: skip
        """Push: the master does something for all workers of its client; ``result`` of the master reaches all."""
        ps = self._ps
        work: Work | None = None
        if ps is not None:
            work = self._engine.push(
                lambda: run(ps), reads=agreed.done, writes=[self._control], lane="inline" if name != "create" else "cpu",
                name=name,
            )  # fmt: skip
        if self.mpi_size > 1 or work is None:
            work = self._tell_op(name, [self._control], deadline, agreed, result=result)
        return work

    def _start_set_rule(self, rule: optim.Rule, agreed: Agreed, deadline: Deadline) -> Work:
        self._settle(deadline)
        return self._command("set_optimizer", lambda ps: ps.set_rule(rule, deadline), agreed, deadline)

    def _start_set_hyperparams(
        self, rule: optim.Rule, hyperparams: dict[str, Any], agreed: Agreed, deadline: Deadline
    ) -> Work:
        changed = {name: rule.hyperparams()[name] for name in hyperparams}
        return self._command("set_hyperparams", lambda ps: ps.set_hyperparams(changed, deadline), agreed, deadline)

    def set_gradient_compression(self, params: dict[str, Any]) -> None:
        deadline = Deadline(self._config.timeout_s)

        def prepare() -> str:
            unknown = set(params) - {"type"}
            name = str(params.get("type", ""))
            if unknown or name not in ("none", "fp16"):
                raise UnsupportedError(
                    f"set_gradient_compression({params}): available are {{'type': 'fp16'}} and {{'type': 'none'}}"
                )
            return name

        name, agreed = self._enter("set_gradient_compression", prepare, lambda name: [Entry(name)], deadline)
        self._settle(deadline)
        if self._ps is not None:
            self._ps.set_codec(name)
        self._barrier(agreed, deadline)

    def _barrier(self, agreed: Agreed, deadline: Deadline) -> None:
        self._command("barrier", lambda ps: ps.barrier(deadline), agreed, deadline).wait()

    def clock(self) -> int:
        super().clock()
        if self._ps is not None:
            self._ps.clock = self._clock
        return self._clock

    def num_dead(self, timeout_s: float = 60.0) -> int:
        deadline = Deadline(self._config.timeout_s)
        _, agreed = self._enter("num_dead", lambda: None, lambda _: [], deadline)
        result = ["0"]

        def ask(ps: PsClient) -> Work:
            work, dead = ps.dead_clients(timeout_s, deadline)
            work.add_done_callback(lambda _: result.__setitem__(0, json.dumps(len(dead))))
            return work

        self._command("num_dead", ask, agreed, deadline, result=result).wait()
        return int(json.loads(result[0]))

    def _imbalance(self) -> float:
        return 1.0 if self._ps is None else self._ps.imbalance()

    # ---- checkpoints

    def _dump(self, state: KeyState, deadline: Deadline) -> SavedKey:
        assert self._ps is not None
        work, chunks = self._ps.get_state(state.key, deadline)
        work.wait()
        saved = SavedKey(state.key, state.shape, state.dtype, chunks[0].updates)
        for name in chunks[0].arrays:
            dtype = DTYPES[state.dtype if name == "value" else host.ACCUMULATE[state.dtype]]
            whole = np.empty(state.count, dtype=dtype)
            for chunk in chunks:
                whole[chunk.start : chunk.stop] = chunk.arrays[name]
            saved.arrays[name] = whole
        return saved

    def _restore(self, saved: list[SavedKey], with_values: bool, deadline: Deadline) -> None:
        if self.rank == 0 and self._ps is not None:
            for key in saved:
                self._ps.put_state(key.key, key.updates, key.arrays, deadline).wait()

    # ---- the end

    def _disconnect(self) -> None:
        if self._ps is not None:
            if self.broken:
                self._ps.abort()
            else:
                self._ps.close(Deadline(10.0))
        if self._embedded is not None:
            self._embedded.close()
            self._embedded = None

    def abort(self) -> None:
        if self._ps is not None:
            self._ps.abort()
        super().abort()


class _Target:
    """Where a pulled value goes: straight into the first array of ``out`` that is plain host memory, then to the rest."""

    __slots__ = ("_outs", "buffer", "complete")

    def __init__(self, state: KeyState, outs: list[Any]) -> None:
        self.buffer: Buffer
        self._outs: list[Any] = []
        direct = None
        for out in {id(out): out for out in outs}.values():
            vector = arrays.read(out) if direct is None else None
            if vector is not None and vector.on_host and vector.shared:
                direct = vector.buffer
            else:
                self._outs.append(out)
        self.buffer = host.empty(state.count, state.dtype) if direct is None else direct
        self.complete = not self._outs

    def spread(self) -> None:
        for out in self._outs:
            arrays.write(out, self.buffer)


def _on_host(vector: Vector) -> Buffer:
    if vector.on_host:
        buffer: Buffer = vector.buffer
        return buffer
    from kvmpi.kernels import gpu

    staged = host.empty(vector.count, vector.dtype)
    gpu.sum_vectors_to_host(staged, [vector.buffer], vector.dtype)
    return staged
