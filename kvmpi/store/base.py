"""The KVStore that users hold: arguments are checked, workers of a client agree, and a store type does the rest.

A call goes: parse and check the arguments; if that fails, the other workers of the client learn it through the
agreement and raise too; then one engine operation or more for each key, which subclasses push.

Collective operations run on two ordered lanes with a communicator each, ``reduce`` and ``broadcast``. They are pushed
with ``no_skip``: whether a collective runs must be the same on every rank, so it never depends on a failure that only
one rank knows. What all ranks know is the agreement of the call.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from kvmpi import arrays, optim
from kvmpi.arrays import Vector
from kvmpi.collectives import Call, Collectives, Comm, Entry, SoloComm
from kvmpi.config import Config
from kvmpi.deadline import Deadline
from kvmpi.engine import Variable, Work, create_engine
from kvmpi.errors import (
    ConfigError,
    DTypeMismatchError,
    DuplicateKeyError,
    KeyKindError,
    KeyNotInitializedError,
    KVError,
    ShapeMismatchError,
    UnsupportedError,
    rebuild,
)
from kvmpi.kernels import host
from kvmpi.store import checkpoint
from kvmpi.store.grammar import Group, Key, groups
from kvmpi.trace import Recorder

Buffer = npt.NDArray[Any]
Updater = Callable[[Key, Any, Any], None]

_CLOSE_TIMEOUT_S = 30.0
_INLINE_BYTES = 1 << 20


@dataclass(slots=True)
class KeyState:
    """What the store knows of one key.

    ``sent`` orders the operations that use the host buffer, ``value`` those that touch the stored value.
    """

    key: Key
    shape: tuple[int, ...]
    dtype: str
    index: int
    library: str
    sent: Variable
    value: Variable
    buffer: Buffer | None = None

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    def host_buffer(self) -> Buffer:
        """The key's own host memory, made at first use; shape ``(count,)``, storage dtype."""
        if self.buffer is None:
            self.buffer = host.empty(self.count, self.dtype)
        return self.buffer


@dataclass(slots=True)
class Agreed:
    """The agreement of one call: ``done`` is written when it is reached, ``error`` is why it was not."""

    done: list[Variable] = field(default_factory=list)
    error: BaseException | None = None

    def check(self) -> None:
        """Raise the error that every rank of the client raises."""
        if self.error is not None:
            raise self.error


class KVStore:
    """A key-value store on arrays. Made by ``kvmpi.create``; also a context manager that closes it.

    Keys are ints or strs, one kind in a store. Values are NumPy arrays, torch tensors or CuPy arrays, one for a key or
    one per device; what is pushed is summed over devices and workers, never averaged. Methods that take ``async_op``
    return a ``Work`` then; the arrays belong to the store until its ``wait`` returns.
    """

    _capabilities: dict[str, bool] = {  # noqa: RUF012 - read only
        "optimizer": True,
        "updater": False,
        "async": False,
        "elastic": True,
        "compression": False,
        "sparse": False,
        "checkpoint": True,
        "replication": False,
        "snapshots": False,
        "encryption": False,
    }

    def __init__(self, type_name: str, config: Config, comm: Comm | None = None) -> None:
        self._type, self._config = type_name, config
        self._recorder = Recorder()
        comm = comm or SoloComm()
        self._comm, self._comms = comm, [comm.duplicate(), comm.duplicate()]
        self._client_store: KVStore | None = None
        chunk_bytes = config.ring_chunk_bytes
        self._reduce = Collectives(self._comms[0], config.allreduce, chunk_bytes, self._recorder)
        self._cast = Collectives(self._comms[1], config.allreduce, chunk_bytes, self._recorder)
        self._engine = create_engine(config.engine, config.engine_threads)
        self._engine.add_lane("reduce", ordered=True)
        self._engine.add_lane("broadcast", ordered=True)
        self._control = self._engine.variable("control")
        self._keys: dict[Key, KeyState] = {}
        self._rule: optim.Rule | None = None
        self._updater: Updater | None = None
        self._clock = 0
        self._closed = False

    # ---- who and where

    @property
    def type(self) -> str:
        """The store type, by its first name."""
        return self._type

    @property
    def rank(self) -> int:
        """This worker's rank among all workers."""
        return 0

    @property
    def num_workers(self) -> int:
        return 1

    @property
    def mpi_rank(self) -> int:
        """This worker's rank in its client."""
        return self._reduce.rank

    @property
    def mpi_size(self) -> int:
        """Workers in this client."""
        return self._reduce.size

    @property
    def client_rank(self) -> int:
        return 0

    @property
    def num_clients(self) -> int:
        return 1

    @property
    def num_servers(self) -> int:
        return 0

    @property
    def client(self) -> KVStore:
        """A store among the workers of this client alone: ``kv.client.pushpull`` sums over them without any server.

        It has keys of its own and its ranks are MPI ranks; it takes no optimizer, because what becomes of the sums is
        the business of the loop. For a client of one worker it is local. The first use is collective over the workers
        of the client; closing this store closes it too.
        """
        if self._client_store is None:
            from kvmpi.store.replicated import ClientStore

            deadline = Deadline(self._config.timeout_s)
            self._together("client", lambda: None, deadline)
            self._client_store = ClientStore("mpi" if self.mpi_size > 1 else "local", self._config, self._comm)
        return self._client_store

    @property
    def optimizer(self) -> optim.Rule | None:
        """The update rule in force, or None."""
        return self._rule

    def is_capable(self, capability: str) -> bool:
        """Whether this store can do something.

        Raises:
            ConfigError: unknown capability; the message lists the known ones.
        """
        if capability not in self._capabilities:
            raise ConfigError(f"unknown capability {capability!r}; known: {', '.join(sorted(self._capabilities))}")
        return self._capabilities[capability]

    # ---- keys and values

    def init(self, key: Any, value: Any) -> None:
        """Create keys. Collective over all workers; worker 0's value counts; returns when they can be read.

        Raises:
            DuplicateKeyError: a key exists, or stands twice in the call.
            KeyKindError: a key is of the other kind than the store's.
            ShapeMismatchError, DTypeMismatchError: workers disagree.
        """
        deadline = Deadline(self._config.timeout_s)

        def prepare() -> list[Group]:
            if isinstance(key, list | tuple) and len(set(key)) != len(key):
                twice = sorted({str(k) for k in key if list(key).count(k) > 1})
                raise DuplicateKeyError(f"init: key {', '.join(twice)} stands twice in one call")
            found = groups(key, value, "init")
            self._check_kind(found, "init")
            for group in found:
                if group.key in self._keys:
                    raise DuplicateKeyError(f"init of key {group.key!r} on worker {self.rank}: it exists already")
                first = group.arrays[0]
                for other in group.arrays:
                    _check_array(other, arrays.shape_of(first), arrays.dtype_of(first), f"init of key {group.key!r}")
            return found

        def entries(found: list[Group]) -> list[Entry]:
            return [Entry(g.key, arrays.shape_of(g.arrays[0]), arrays.dtype_of(g.arrays[0])) for g in found]

        found, agreed = self._enter("init", prepare, entries, deadline)
        states = [self._new_state(group) for group in found]
        vectors = [arrays.read(group.arrays[0]) for group in found]
        try:
            self._join(self._start_init(states, vectors, agreed, deadline), "init").wait()
        except BaseException:
            for state in states:
                del self._keys[state.key]
            self._forget(states)
            raise

    def push(self, key: Any, value: Any, priority: int = 0, async_op: bool = False) -> Work | None:
        """Add ``value``, summed over devices and workers, to the keys by the push rule.

        With an optimizer or updater the stored value is updated with the sum; without, it becomes the sum. Returns
        when ``value`` may be reused; an error of the servers surfaces at the next call on the key or at ``wait_all``.

        Raises:
            KeyNotInitializedError, ShapeMismatchError, DTypeMismatchError, KeyKindError: nothing was pushed.
            UnsupportedError: an asynchronous store without an optimizer.
        """
        deadline = Deadline(self._config.timeout_s)
        states, found, agreed = self._enter_keys("push", key, value, deadline)
        vectors = [[arrays.read(array) for array in group.arrays] for group in found]
        works = [
            self._start_push(state, parts, priority, deadline, agreed, async_op)
            for state, parts in zip(states, vectors, strict=True)
        ]
        return self._complete(works, "push", async_op)

    def pull(self, key: Any, out: Any, priority: int = 0, async_op: bool = False) -> Work | None:
        """Copy the stored values into ``out``; every array listed under a key gets the same value.

        Raises:
            KeyNotInitializedError, ShapeMismatchError, DTypeMismatchError, KeyKindError: ``out`` is unchanged.
        """
        deadline = Deadline(self._config.timeout_s)
        states, found, agreed = self._enter_keys("pull", key, out, deadline, writes=True)
        works = [
            self._start_pull(state, group.arrays, priority, deadline, agreed, async_op)
            for state, group in zip(states, found, strict=True)
        ]
        return self._complete(works, "pull", async_op)

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0, async_op: bool = False) -> Work | None:
        """``push`` and ``pull`` in one exchange; without ``out`` the result replaces ``value``.

        Under ``Elastic`` the result is the center that the push met, else the new value.
        """
        deadline = Deadline(self._config.timeout_s)
        out = value if out is None else out
        states, found, agreed = self._enter_keys("pushpull", key, value, deadline, out=out)
        targets = {group.key: group.arrays for group in groups(key, out, "pushpull")}
        vectors = [[arrays.read(array) for array in group.arrays] for group in found]
        works = [
            self._start_pushpull(state, parts, targets[state.key], priority, deadline, agreed, async_op)
            for state, parts in zip(states, vectors, strict=True)
        ]
        return self._complete(works, "pushpull", async_op)

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        """``init``, then ``pull`` into ``out``: worker 0's value everywhere."""
        self.init(key, value)
        self.pull(key, out, priority)

    def empty(self, shape: int | Sequence[int], dtype: Any = "float32", device: str | None = None) -> Any:
        """An uninitialised array in memory that the collectives use without a copy."""
        return arrays.empty((shape,) if isinstance(shape, int) else tuple(shape), dtype, device)

    # ---- update rules

    def set_optimizer(self, optimizer: Any) -> None:
        """Make a rule of ``kvmpi.optim``, or a ``torch.optim`` instance that has an equivalent, the push rule.

        Collective over all workers, with equal arguments. Replaces an earlier optimizer and its state.

        Raises:
            UnsupportedError: a torch optimizer, or an option of it, that has no equivalent.
        """
        deadline = Deadline(self._config.timeout_s)
        rule, agreed = self._enter(
            "set_optimizer", lambda: optim.from_any(optimizer), lambda rule: [Entry(repr(rule))], deadline
        )
        self._start_set_rule(rule, agreed, deadline).wait()
        self._rule = rule

    def set_hyperparams(self, **hyperparams: Any) -> None:
        """Change hyperparameters of the optimizer, for example ``lr=0.01``, from this worker's next push on.

        Collective over the workers of a client. Returns when every server has them.

        Raises:
            ConfigError: there is no optimizer, or it has no such hyperparameter.
        """
        deadline = Deadline(self._config.timeout_s)

        def prepare() -> optim.Rule:
            if self._rule is None:
                raise ConfigError("set_hyperparams: there is no optimizer yet; call kv.set_optimizer first")
            return self._rule.with_hyperparams(**hyperparams)

        rule, agreed = self._enter("set_hyperparams", prepare, lambda rule: [Entry(repr(rule))], deadline)
        self._settle(deadline)
        self._start_set_hyperparams(rule, hyperparams, agreed, deadline).wait()
        self._rule = rule

    def set_updater(self, fn: Updater) -> None:
        """Call ``fn(key, pushed, stored)``, which changes ``stored`` in place, for every push. Non-dist stores only."""
        raise UnsupportedError(
            f"set_updater: a {self._type} store updates on the servers; register a rule with kvmpi.optim.register "
            "and start the job with --import MODULE"
        )

    def set_gradient_compression(self, params: dict[str, Any]) -> None:
        """Send pushes in fewer bytes: ``{"type": "fp16"}``; ``{"type": "none"}`` turns it off.

        Raises:
            UnsupportedError: a type that is not available, or a store that sends nothing to servers.
        """
        raise UnsupportedError(f"a {self._type} store sends nothing to servers, so there is nothing to compress")

    # ---- checkpoints

    def save(self, path: Any) -> None:
        """Write values, optimizer state and clock to one file, atomically. Collective; worker 0 writes."""
        self._save(str(path), with_values=True)

    def load(self, path: Any) -> None:
        """Restore what ``save`` wrote. Collective; every worker reads ``path``. Keys that do not exist are created."""
        self._load(str(path), with_values=True)

    def save_optimizer_states(self, path: Any) -> None:
        """Like ``save``, without the values."""
        self._save(str(path), with_values=False)

    def load_optimizer_states(self, path: Any) -> None:
        """Restore what ``save_optimizer_states`` or ``save`` wrote, without touching values. Keys must exist."""
        self._load(str(path), with_values=False)

    def _save(self, path: str, *, with_values: bool) -> None:
        deadline = Deadline(self._config.timeout_s)
        _, agreed = self._enter("save", lambda: None, lambda _: [], deadline)
        self._settle(deadline)
        self._barrier(agreed, deadline)

        def write() -> None:
            if self.rank != 0:
                return
            states = sorted(self._keys.values(), key=lambda state: state.index)
            saved = [self._dump(state, deadline) for state in states]
            checkpoint.write(path, self._type, self._clock, self._rule, saved, with_values=with_values)

        self._together("save", write, deadline)

    def _load(self, path: str, *, with_values: bool) -> None:
        deadline = Deadline(self._config.timeout_s)
        self._settle(deadline)

        def prepare() -> checkpoint.Checkpoint:
            found = checkpoint.read(path, self._keys, with_values=with_values)
            self._check_kind([Group(saved.key, []) for saved in found.keys], "load")
            return found

        found, agreed = self._enter(
            "load", prepare, lambda c: [Entry(k.key, k.shape, k.dtype) for k in c.keys], deadline
        )
        self._barrier(agreed, deadline)
        missing = [saved for saved in found.keys if saved.key not in self._keys]
        if missing:
            values = [arrays.wrap(s.arrays["value"], s.shape, s.dtype, "numpy") for s in missing]
            self.init([saved.key for saved in missing], values)
        if found.rule is not None and found.rule != self._rule:
            self.set_optimizer(found.rule)
        self._restore(found.keys, with_values, deadline)
        self._clock = found.clock
        self.barrier()

    # ---- waiting and ending

    def barrier(self) -> None:
        """Return when every worker is here and everything that this worker started is done."""
        deadline = Deadline(self._config.timeout_s)
        _, agreed = self._enter("barrier", lambda: None, lambda _: [], deadline)
        self._settle(deadline)
        self._barrier(agreed, deadline)

    def wait_all(self) -> None:
        """Return when everything that this worker started is done; raise the first error that nobody has seen."""
        self._check_open()
        self._engine.wait_all(self._config.timeout_s)

    def clock(self) -> int:
        """One iteration is done; returns how many that makes."""
        self._clock += 1
        return self._clock

    def num_dead(self, timeout_s: float = 60.0) -> int:
        """Clients of which nothing was heard for ``timeout_s`` seconds. Collective over the workers of a client."""
        return 0

    def stats(self) -> dict[str, Any]:
        """Bytes, seconds and calls per phase; histogram of staleness; imbalance of the servers (1 is even)."""
        return {**self._recorder.snapshot(), "clock": self._clock, "imbalance": self._imbalance()}

    def close(self) -> None:
        """Wait for what is under way, leave the job, release everything. Collective; idempotent; also runs at exit.

        An error that nobody has seen yet is raised after the store is closed.
        """
        if self._closed:
            return
        deadline = Deadline(self._config.timeout_s)
        error: BaseException | None = None
        try:
            if self._client_store is not None:
                self._client_store.close()
        except Exception as first:
            error = first
        try:
            self._engine.wait_all(deadline.remaining_s())
        except Exception as first:
            error = error or first
        try:
            if not self._reduce.broken:
                _, agreed = self._enter("close", lambda: None, lambda _: [], deadline)
        except Exception as first:
            error = error or first
        self._closed = True
        self._release(Deadline(min(_CLOSE_TIMEOUT_S, deadline.remaining_s())))
        if error is not None:
            raise error

    def abort(self) -> None:
        """Release everything at once, without a word to the peers: for a process that ends with an error."""
        self._closed = True
        if self._client_store is not None:
            self._client_store.abort()
        self._disconnect()

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def broken(self) -> bool:
        """Whether workers of this client were lost, so that the process cannot end MPI in good order."""
        inner = self._client_store
        return self._reduce.broken or self._cast.broken or (inner is not None and inner.broken)

    def __enter__(self) -> KVStore:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.close()
        else:
            # The other workers cannot be told in time; the process is about to end, or the user knows better.
            self.abort() if self.mpi_size > 1 else self._close_quietly()

    def _close_quietly(self) -> None:
        try:
            self.close()
        except Exception:
            pass  # the error that is on its way out matters more

    def _release(self, deadline: Deadline) -> None:
        try:
            self._engine.close(deadline.remaining_s())
        except KVError:
            pass  # a stuck operation; its Work carries the error
        self._disconnect()
        if not self.broken:
            for comm in self._comms:
                comm.free()

    # ---- what store types do

    def _start_init(
        self, states: list[KeyState], values: list[Vector], agreed: Agreed, deadline: Deadline
    ) -> list[Work]:
        raise NotImplementedError

    def _start_push(
        self, state: KeyState, vectors: list[Vector], priority: int, deadline: Deadline, agreed: Agreed, async_op: bool
    ) -> Work:
        raise NotImplementedError

    def _start_pull(
        self, state: KeyState, outs: list[Any], priority: int, deadline: Deadline, agreed: Agreed, async_op: bool
    ) -> Work:
        raise NotImplementedError

    def _start_pushpull(
        self, state: KeyState, vectors: list[Vector], outs: list[Any], priority: int, deadline: Deadline, agreed: Agreed,
        async_op: bool,
    ) -> Work:  # fmt: skip
        raise NotImplementedError

    def _start_set_rule(self, rule: optim.Rule, agreed: Agreed, deadline: Deadline) -> Work:
        raise NotImplementedError

    def _start_set_hyperparams(
        self, rule: optim.Rule, hyperparams: dict[str, Any], agreed: Agreed, deadline: Deadline
    ) -> Work:
        raise NotImplementedError

    def _dump(self, state: KeyState, deadline: Deadline) -> checkpoint.SavedKey:
        raise NotImplementedError

    def _restore(self, saved: list[checkpoint.SavedKey], with_values: bool, deadline: Deadline) -> None:
        raise NotImplementedError

    def _barrier(self, agreed: Agreed, deadline: Deadline) -> None:
        """All workers are here. The agreement has seen to it where there is one client."""

    def _check_pushable(self, op: str, state: KeyState) -> None:
        """Raise if ``op`` cannot push to this key now."""

    def _forget(self, states: list[KeyState]) -> None:
        """An ``init`` of these keys failed."""

    def _imbalance(self) -> float:
        return 1.0

    def _disconnect(self) -> None:
        pass

    # ---- how calls begin

    def _check_open(self) -> None:
        if self._closed:
            raise KVError(f"this {self._type} store is closed; create another with kvmpi.create")

    def _check_kind(self, found: Sequence[Group], op: str) -> None:
        known = {type(key) for key in list(self._keys)[:1]}
        for group in found:
            known.add(type(group.key))
            if len(known) > 1:
                mine = "str" if type(group.key) is int else "int"
                raise KeyKindError(f"{op} of key {group.key!r}: this store uses {mine} keys, and only one kind")

    def _new_state(self, group: Group) -> KeyState:
        first = group.arrays[0]
        state = KeyState(
            key=group.key,
            shape=arrays.shape_of(first),
            dtype=arrays.dtype_of(first),
            index=len(self._keys),
            library=arrays.library_of(first),
            sent=self._engine.variable(f"buffer of key {group.key!r}"),
            value=self._engine.variable(f"key {group.key!r}"),
        )
        self._keys[group.key] = state
        return state

    def _enter(
        self, op: str, prepare: Callable[[], Any], entries: Callable[[Any], Sequence[Entry]], deadline: Deadline
    ) -> tuple[Any, Agreed]:
        """Run ``prepare``; make sure that every worker of the client succeeded in the same call."""
        prepared, failure = None, None
        described: Sequence[Entry] = ()
        try:
            self._check_open()
            prepared = prepare()
            described = entries(prepared)
        except Exception as error:  # whatever it is, the other ranks must hear of it
            failure = error
        agreed = Agreed()
        if self._reduce.size == 1 or self._closed:
            if failure is not None:
                raise failure
            return prepared, agreed
        call = Call(op, tuple(described), failure)
        var = self._engine.variable(f"agreement on {op}")
        agreed.done.append(var)

        def run(cause: BaseException | None) -> None:
            try:
                self._reduce.agree(call, deadline)
            except BaseException as error:
                agreed.error = error
                raise

        work = self._engine.push(run, writes=agreed.done, lane="reduce", name=f"agree on {op}", no_skip=True)
        if failure is not None:
            work.wait()
            raise failure
        return prepared, agreed

    def _enter_keys(
        self, op: str, key: Any, value: Any, deadline: Deadline, *, writes: bool = False, out: Any = None
    ) -> tuple[list[KeyState], list[Group], Agreed]:
        """``_enter`` for a call on existing keys; failures of earlier calls on them surface here."""

        def prepare() -> tuple[list[KeyState], list[Group]]:
            found = groups(key, value, op)
            self._check_kind(found, op)
            states = [self._match(group, op, writes=writes or out is value) for group in found]
            if out is not None and out is not value:
                for group in groups(key, out, op):
                    self._match(group, op, writes=True)
            for state in states:
                if not writes:
                    self._check_pushable(op, state)
                self._engine.raise_pending(state.sent)
                self._engine.raise_pending(state.value)
            order = sorted(range(len(states)), key=lambda i: _processing_order(states[i]))
            return [states[i] for i in order], [found[i] for i in order]

        (states, found), agreed = self._enter(
            op, prepare, lambda both: [Entry(s.key, s.shape, s.dtype) for s in both[0]], deadline
        )
        return states, found, agreed

    def _match(self, group: Group, op: str, *, writes: bool) -> KeyState:
        state = self._keys.get(group.key)
        where = f"{op} of key {group.key!r} on worker {self.rank}"
        if state is None:
            raise KeyNotInitializedError(f"{where}: the key was never initialised; call kv.init on all workers first")
        for array in group.arrays:
            _check_array(array, state.shape, state.dtype, where)
            if writes:
                arrays.check_writable(array)
        return state

    def _complete(self, works: list[Work], op: str, async_op: bool) -> Work | None:
        work = self._join(works, op)
        if async_op:
            return work
        work.wait()
        return None

    def _join(self, works: Sequence[Work], op: str) -> Work:
        """One Work for several: finished when all are, with the first one's error."""
        return works[0] if len(works) == 1 else _JoinedWork(works, op)

    def _settle(self, deadline: Deadline) -> None:
        """Wait until everything that was started is done; its errors surface here."""
        self._engine.wait_all(deadline.remaining_s())

    # ---- pieces of operations

    def _reduce_op(
        self, state: KeyState, vectors: list[Vector], op: str, deadline: Deadline, agreed: Agreed, async_op: bool,
        then: Callable[[], None] | None = None, writes: Sequence[Variable] = (),
    ) -> Work:  # fmt: skip
        """Push: sum ``vectors`` over the client into the key's host buffer, then call ``then``."""
        label = f"{op} of key {state.key!r}"

        def run(cause: BaseException | None) -> None:
            agreed.check()
            self._reduce.allreduce(vectors, state.host_buffer(), state.dtype, deadline, label)
            if cause is not None:
                raise cause
            if then is not None:
                then()

        lane = "reduce"
        if self.mpi_size == 1:
            # Nobody to keep in step with. A hand-over between threads costs more than to add up a small array here.
            here = not async_op and sum(vector.nbytes for vector in vectors) <= _INLINE_BYTES
            lane = "inline" if here else "cpu"
        return self._engine.push(
            run, reads=agreed.done, writes=[state.sent, *writes], lane=lane, name=label, no_skip=True
        )

    def _tell_op(
        self, label: str, writes: Sequence[Variable], deadline: Deadline, agreed: Agreed,
        then: Callable[[], None] | None = None, reads: Sequence[Variable] = (), result: list[str] | None = None,
    ) -> Work:  # fmt: skip
        """Push: the master tells its client how what ``writes`` depends on went (and ``result``), then ``then`` runs.

        ``then`` may broadcast: it runs on every rank or on none.
        """

        def run(cause: BaseException | None) -> None:
            agreed.check()
            status = b""
            if self.mpi_rank == 0:
                if cause is not None:
                    status = json.dumps([type(cause).__name__, str(cause)]).encode()[:60000]
                elif result:
                    status = json.dumps([None, result[0]]).encode()
            heard = self._cast.tell(status, 0, deadline, label)
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
            run, reads=[*agreed.done, *reads], writes=writes, lane="broadcast", name=label, no_skip=True
        )

    def _together(self, op: str, run: Callable[[], None], deadline: Deadline) -> None:
        """Run something on every worker; if it fails on one of this client's, all of them raise."""
        self._enter(op, run, lambda _: [], deadline)
        self._settle(deadline)

    def _mean_factor(self, vectors: Sequence[Vector]) -> float:
        """What a sum over the client is multiplied by: Elastic and Outer take the mean over workers and devices."""
        if self._rule is None or not self._rule.averages:
            return 1.0
        return 1.0 / (self.mpi_size * len(vectors))


class _JoinedWork(Work):
    """Several operations of one call."""

    __slots__ = ("_works",)

    def __init__(self, works: Sequence[Work], name: str) -> None:
        super().__init__(name)
        self._works = works

    def done(self) -> bool:
        return all(work.done() for work in self._works)

    def error(self) -> BaseException | None:
        return next((error for work in self._works if (error := work.error()) is not None), None)

    def wait(self, timeout_s: float | None = None) -> None:
        deadline = Deadline(timeout_s)
        for work in self._works:
            work.wait(None if timeout_s is None else deadline.remaining_s())


def _processing_order(state: KeyState) -> tuple[int, int]:
    """Keys of one call are processed in ascending order of int keys; str keys in the order of their init."""
    return (state.key, 0) if isinstance(state.key, int) else (0, state.index)


def _check_array(array: Any, shape: tuple[int, ...], dtype: str, where: str) -> None:
    if arrays.shape_of(array) != shape:
        raise ShapeMismatchError(f"{where}: shape {arrays.shape_of(array)}, the key has {shape}")
    if arrays.dtype_of(array) != dtype:
        raise DTypeMismatchError(f"{where}: dtype {arrays.dtype_of(array)}, the key has {dtype}")


def scaled(buffer: Buffer, factor: float, dtype: str) -> None:
    """Multiply ``buffer`` in place, unless ``factor`` is 1."""
    if factor != 1.0:
        host.scale(buffer, factor, dtype)


def as_accumulated(buffer: Buffer, dtype: str) -> Buffer:
    """``buffer`` in the dtype in which rules compute; itself where that is its own."""
    if dtype not in host.HALF:
        return buffer
    wide = np.empty(buffer.size, dtype=np.float32)
    host.widen(buffer, dtype, wide)
    return wide
