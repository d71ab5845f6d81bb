"""The KVStore that users hold: the public API; store types fill in the operations."""

from __future__ import annotations

import logging
import numbers
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from kvmpi import arrays, optim
from kvmpi.arrays import Vector
from kvmpi.collectives import Entry
from kvmpi.compiling import methods_not_compiled, not_compiled
from kvmpi.deadline import Deadline
from kvmpi.engine import Work
from kvmpi.errors import ConfigError, DuplicateKeyError, KVError, UnsupportedError
from kvmpi.store.call import Invocation, KeyState, Part, check_array, dtype_in
from kvmpi.store.grammar import Group, Key, groups
from kvmpi.store.joining import Joining
from kvmpi.store.row_sparse import RowSparse
from kvmpi.store.saving import Saving
from kvmpi.trace import stall, timeline
from kvmpi.trace.activity import activity

#: ``fn(key, pushed, stored)``, which changes ``stored`` in place.
Updater = Callable[[Key, Any, Any], None]

#: So long a worker that closes its store waits for the others of its client, which may have something left to do.
_CLOSE_TIMEOUT_S = 30.0
_log = logging.getLogger(__name__)

#: Stores to which nothing referred any more before they were closed: whoever makes the next one closes them.
dropped: deque[KVStore] = deque()


@methods_not_compiled
class KVStore(Joining, RowSparse, Saving, ABC):
    """A key-value store on arrays. Made by ``kvmpi.create``; also a context manager that closes it.

    Keys are ints or strs, one kind in a store. Values are NumPy arrays, torch tensors or CuPy arrays, one for a key or
    one per device; what is pushed is summed over devices and workers, never averaged. Methods that take ``async_op``
    return a ``Work`` then; the arrays belong to the store until its ``wait`` returns. A handler of signals, which may
    come in the middle of a call, makes none: it sets a flag for the loop. Threads may call at once, and each call
    counts as a whole (without servers, in a client of one worker, each of its keys for itself); where several workers
    are a client, their calls have to come in one order all the same.
    """

    _capabilities: dict[str, bool] = {  # noqa: RUF012 - read only
        "optimizer": True,
        "allreduce": False,
        "updater": False,
        "view": False,
        "async": False,
        "skip": False,
        "elastic": True,
        "compression": False,
        "sparse": True,
        "checkpoint": True,
        "replication": False,
        "snapshots": False,
        "encryption": False,
    }

    _client_store: KVStore | None = None

    @property
    @not_compiled
    def client(self) -> KVStore:
        """A store among the workers of this client alone: ``kv.client.pushpull`` sums over them without any server.

        It has keys of its own and its ranks are MPI ranks; it takes no optimizer, because what becomes of the sums is
        the business of the loop. For a client of one worker it is local. The first use is collective over the workers
        of the client; closing this store closes it too.
        """
        if self._client_store is None:
            from kvmpi.store.replicated import ClientStore

            self._together("client", lambda: None)
            self._client_store = ClientStore(
                "mpi" if self.mpi_size > 1 else "local", self._config, self._comm.duplicate()
            )
            activity.begin(self._client_store._observe)
        return self._client_store

    @property
    def sharded_update(self) -> bool:
        """Whether each worker updates, and remembers what the rule in force needs of, its share of every value alone.

        See ``KVMPI_SHARDED_UPDATE``; of stores whose workers hold the values, under a rule of kvmpi's that takes
        gradients element by element.
        """
        return False

    @property
    def num_optimizers(self) -> int:
        """How many rules there have been: one more after ``set_optimizer``, and a load of another than is in force."""
        return self._num_rules

    @property
    def optimizer(self) -> optim.Rule | None:
        """The update rule in force, or None."""
        return self._rule

    @property
    def resumed_step(self) -> int:
        """How many steps the values had when ``kvmpi run --resume`` started the job; 0 in a new one.

        In a client that was started again (``--restart``): also the steps that it has pushed before, known when all
        keys have their ``init``. If others went on without it (``KVMPI_ON_CLIENT_LOSS=shrink``): also the rounds until
        it was back, known from the first ``init`` on; in an asynchronous store it begins anew then.

        Of a synchronous store: the pushes of the key that is pushed most; of an asynchronous one: the updates of a
        snapshot, divided by its clients, and this client's own pushes since. The same on every worker of a client; a
        loop begins with ``for step in range(kv.resumed_step, steps)``.
        """
        return 0

    def is_capable(self, capability: str) -> bool:
        """Whether this store can do something.

        ``optimizer``, ``updater``, ``allreduce``, ``view``, ``compression`` (``set_gradient_compression``) and
        ``checkpoint`` (``save``, ``load``): it has the method; ``sparse``: it takes rows; ``elastic``: it takes
        ``kvmpi.optim.Elastic``; ``async``: each push is an update of its own, or with some others, and no client waits
        for all; ``skip``: and a client may leave pushes out, since no other waits for them; ``snapshots``: its servers
        can write them; ``replication``: in this job servers may die (``--replicas``); ``encryption``: in this job, what
        goes to servers over TCP is encrypted.

        Raises:
            ConfigError: unknown capability; the message lists the known ones.
        """
        if not isinstance(capability, str) or capability not in self._capabilities:
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
        call = self._call("init")
        self._create(self._enter_init(call, key, value), call)

    def _enter_init(
        self, call: Invocation, key: Any, value: Any, *, settled: bool = False
    ) -> list[tuple[Group, Vector]]:
        """``_enter`` for new keys: what each of them begins with."""

        def prepare() -> list[tuple[Group, Vector]]:
            found = groups(key, value, "init")
            if isinstance(key, list | tuple) and len(found) != len(key):
                twice = sorted({repr(k) for k in key if list(key).count(k) > 1})
                raise DuplicateKeyError(f"init: key {', '.join(twice)} stands twice in one call")
            self._check_kind(found, "init")
            for group in found:
                if group.key in self._keys:
                    raise DuplicateKeyError(f"init of key {group.key!r} on worker {self.rank}: it exists already")
                first = group.arrays[0]
                where = f"init of key {group.key!r}"
                for other in group.arrays:
                    check_array(other, arrays.shape_of(first), dtype_in(first, where), where)
            return [(group, arrays.read(group.arrays[0])) for group in found]

        def entries(found: list[tuple[Group, Vector]]) -> list[Entry]:
            return [Entry(group.key, arrays.shape_of(group.arrays[0]), vector.dtype) for group, vector in found]

        return (self._enter_settled if settled else self._enter)(call, prepare, entries)

    def _create(self, found: Sequence[tuple[Group, Vector]], call: Invocation) -> None:
        """Make keys that all workers of the client have agreed on; returns when they can be read."""
        states = [self._new_state(group) for group, _ in found]
        try:
            with self._gathering:
                works = self._start_init(states, [vector for _, vector in found], call)
            self._complete(works, call)
        except BaseException:
            for state in states:
                del self._keys[state.key]
            self._forget(states)
            raise

    def push(
        self, key: Any, value: Any, priority: int = 0, async_op: bool = False, *, reduced: bool = False
    ) -> Work | None:
        """Add ``value``, summed over devices and workers, to the keys by the push rule.

        With an optimizer or updater the stored value is updated with the sum; without, it becomes the sum. Returns
        when ``value`` may be reused; an error of the servers surfaces at the next call on the key or at ``wait_all``.

        **Some rows only**: a torch sparse tensor with one sparse dimension, or a tuple ``(row_ids, rows)`` of a vector
        of integers and an array of shape ``(len(row_ids), *value.shape[1:])``. Rows that are there twice are summed,
        and only these rows travel. The push rule is applied to the rows that anybody has pushed in the round, and all
        others stay as they are: without an optimizer the rows become their sums; momentum, weight decay and averages of
        an optimizer change with a row, and not without it (as with ``torch.optim.SparseAdam``). If one client pushes
        a whole array, the round is of the whole value. See docs/sparse.md.

        Args:
            reduced: ``value`` is what the client pushes already, and equal on all its workers: a sum that came from
                ``kv.client``, for example, clipped since. The master's is sent; nothing is summed over workers. It may
                be changed when the call returns, also with ``async_op``.
        Raises:
            KeyNotInitializedError, ShapeMismatchError, DTypeMismatchError, KeyKindError: nothing was pushed.
            RowIndexError: a row id is negative, or not below ``value.shape[0]``; nothing was pushed.
            UnsupportedError: an asynchronous store without an optimizer; rows under an optimizer that cannot be applied
                to rows (``Elastic``, ``Outer``), or of a key that servers hold in pieces smaller than its rows.
        """
        call = self._call("push", priority, async_op)
        call.reduced = reduced
        return self._make(call, key, value, None, self._start_push)

    def pull(self, key: Any, out: Any, priority: int = 0, async_op: bool = False) -> Work | None:
        """Copy the stored values into ``out``; every array listed under a key gets the same value.

        Raises:
            KeyNotInitializedError, ShapeMismatchError, DTypeMismatchError, KeyKindError: ``out`` is unchanged.
        """
        call = self._call("pull", priority, async_op)
        return self._make(call, key, None, out, self._start_pull)

    def pushpull(
        self, key: Any, value: Any, out: Any = None, priority: int = 0, async_op: bool = False, *, reduced: bool = False
    ) -> Work | None:
        """``push`` and ``pull`` in one exchange; without ``out`` the result replaces ``value``.

        ``reduced`` as of ``push``. Under ``Elastic`` the result is the center that the push met, else the new value.

        For a push of rows ``out`` is a whole array, or a torch sparse tensor, which gets the rows that the update has
        changed: in a synchronous store those that any worker has pushed. Without ``out``, a sparse tensor gets these,
        and the ``rows`` of a pair become the new ones.

        ``out`` may be the key's ``view``, which shows the result then without a copy.
        """
        call = self._call("pushpull", priority, async_op)
        call.reduced = reduced
        if out is None:
            out = value
        elif out is not value:
            out = self._behind_views(key, out)
        return self._make(call, key, value, out, self._start_pushpull)

    def _make(
        self, call: Invocation, key: Any, value: Any, out: Any, start: Callable[[list[Part], Invocation], list[Work]]
    ) -> Work | None:
        """Make a call on keys, which ``start`` begins unless it is known; ``out`` is ``value`` to be replaced."""
        parts: list[Part] = []
        with self._lanes_of(call, key):
            with self._beginning:
                works = self._again(call, key, value, out)
                if works is None:
                    with self._gathering_of(key):
                        parts = self._enter_keys(call, key, value, out)
                        works = start(parts, call)
                    if call.op not in ("push", "pull"):  # of which it is noted before they begin
                        self._note_made(call, parts)
            if call.reduced:
                self._await_copies(parts, call)
            return self._complete(works, call)

    def allreduce(
        self, key: Any, value: Any, out: Any = None, priority: int = 0, async_op: bool = False, *, scale: float = 1.0
    ) -> Work | None:
        """The sum of ``value`` over devices and workers goes to ``out``, by default in place of ``value``.

        Unlike ``pushpull`` it leaves the stored value as it is, whatever the push rule is, and keeps no copy of the
        sum: what gradients want that a worker's own optimizer uses. For stores that hold values in the workers. Where
        there are several workers, arrays of ``kv.empty`` are summed in place without a copy.

        Args:
            scale: what the sum is multiplied by on the way, ``1 / kv.num_workers`` for a mean over workers; half types
                are rounded after that. Of keys of a float type, and the same on all workers.
        Raises:
            KeyNotInitializedError, ShapeMismatchError, DTypeMismatchError, KeyKindError: ``out`` is unchanged.
            ConfigError: workers have given different scales, or one that is no number; ``out`` is unchanged.
            UnsupportedError: the values are on servers; or ``value`` has rows of a key.
        """
        call = self._call("allreduce", priority, async_op)
        call.scale = scale
        return self._make(call, key, value, value if out is None else out, self._start_allreduce)

    def view(self, key: Any) -> Any:
        """The stored value itself: what ``pull`` would copy, for stores that hold values in the workers.

        It keeps its value until this worker's next push, pushpull or load of the key, a new optimizer, or the store's
        end; what it holds from then on is undefined, but that a ``pushpull`` which has it as ``out`` shows its result
        there. Workers of one host may share its memory: nobody may write there. NumPy's array is read-only; torch's,
        for a torch key, cannot be.

        Raises:
            KeyNotInitializedError: there is no such key.
            UnsupportedError: the values are on servers.
        """
        raise UnsupportedError(f"view: the values of a {self._type} store are on the servers; pull them")

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        """``init``, then ``pull`` into ``out``: worker 0's value everywhere. Collective over all workers."""
        call = self._call("init")
        with self._meeting("broadcast"):  # before others wait for a value that its client cannot give
            found = self._enter_init(call, key, value, settled=True)
        # In an asynchronous store a fast worker's first push would otherwise overtake a slow one's pull.
        with self._meeting("broadcast"):
            self._create(found, call)
            self.pull(key, out, priority)

    def empty(self, shape: int | Sequence[int], dtype: Any = "float32", device: str | None = None) -> Any:
        """An uninitialised array in memory that others use without a copy: torch's for a torch dtype.

        The workers of one host read each other's arrays in it directly; of a client of one worker, the servers of its
        host do. It is freed with its last view. It may be shared memory: a process that this one forks writes to the
        same. After a call has failed, as when its time was over, others may be reading still: leave such an array
        unchanged until the store is closed, unless the same call is made again with the same contents. What a failed
        call was to fill, wherever it lies, may still be written to, since MPI goes on with what has begun.

        Raises:
            ConfigError: ``shape`` is none, or of more than any memory has.
            DTypeMismatchError: a dtype that kvmpi does not carry.
            UnsupportedError: there is no such ``device``, or no CuPy for one.
            MemoryError: there is no such memory left.
        """
        allocate = self._reduce.empty if self.mpi_size > 1 else self._empty
        return arrays.empty(shape, dtype, device, allocate)

    # ---- update rules

    def set_optimizer(self, optimizer: Any) -> None:
        """Make a rule of ``kvmpi.optim``, or a ``torch.optim`` instance that has an equivalent, the push rule.

        Collective over all workers, with equal arguments. Replaces an earlier optimizer and its state.

        Raises:
            UnsupportedError: a torch optimizer, or an option of it, that has no equivalent.
        """
        call = self._call("set_optimizer")
        rule = self._enter_settled(
            call, lambda: optim.from_any(optimizer), lambda rule: [Entry(repr(rule))],
            lambda rule: [rule.name, rule.hyperparams()],
        )  # fmt: skip
        self._start_set_rule(rule, call).wait()
        self._rule, self._num_rules = rule, self._num_rules + 1

    def set_hyperparams(self, **hyperparams: Any) -> None:
        """Change hyperparameters of the optimizer, for example ``lr=0.01``, from this worker's next push on.

        Collective over the workers of a client; all clients make the same calls. Returns when every server has them. In
        an asynchronous store the first client's call counts at once, for the pushes of all.

        Raises:
            ConfigError: there is no optimizer, or it has no such hyperparameter.
        """
        call = self._call("set_hyperparams")

        def prepare() -> optim.Rule:
            if self._rule is None:
                raise ConfigError("set_hyperparams: there is no optimizer yet; call kv.set_optimizer first")
            return self._rule.with_hyperparams(**hyperparams)

        def changed(rule: optim.Rule) -> dict[str, Any]:
            now = rule.hyperparams()
            return {name: now[name] for name in hyperparams}

        rule = self._enter_settled(call, prepare, lambda rule: [Entry(repr(rule))], changed)
        self._start_set_hyperparams(rule, hyperparams, call).wait()
        self._rule = rule

    def set_updater(self, fn: Updater) -> None:
        """Call ``fn(key, pushed, stored)``, which changes ``stored`` in place, for every push. Non-dist stores only.

        Replaces an optimizer, as ``set_optimizer`` replaces an updater. All workers call it; ``fn`` calls nothing of
        this store, where it would wait for itself. It runs once at a time, in the order of the program, and maybe in
        another thread.
        """
        raise UnsupportedError(
            f"set_updater: a {self._type} store updates on the servers; register a rule with kvmpi.optim.register "
            "and start the job with --import MODULE"
        )

    def set_gradient_compression(self, params: dict[str, Any]) -> None:
        """Send pushes in fewer bytes: ``{"type": "fp16"}``, ``bf16``, ``2bit`` or ``1bit``; ``none`` turns it off.

        What a client pushes to a float32 key is rounded to float16 or bfloat16 once, after the sum over its workers;
        servers add in float32. bfloat16 keeps float32's range and 8 bits of precision, float16 has 11 bits and ends
        at 65504. So are rows of it, which ``2bit`` and ``1bit`` carry as they are. Values of other dtypes, ``init`` and
        what is pulled travel as they are.

        ``{"type": "2bit", "threshold": 0.5}`` and ``1bit`` are MXNet's: of each element there goes ``threshold``, its
        negative or nothing; or 1 if it is above ``threshold``, else -1. What an element has more or less than that is
        added to it in the next push. That error is forgotten when values are loaded or assigned, or optimizer states
        loaded, when compression changes, and with the process: no file or snapshot has it. (Seide et al., INTERSPEECH
        2014; Strom, INTERSPEECH 2015.)

        Collective over the workers of a client; returns when all clients have called it. A push of not-a-numbers or
        infinities is a ``KVError`` under ``2bit`` and ``1bit``.

        Raises:
            UnsupportedError: a type or parameter that there is not; a store that sends nothing to servers; ``2bit`` or
                ``1bit`` where ``Elastic`` is sent weights.
            ConfigError: a threshold that makes no sense.
        """
        raise UnsupportedError(f"a {self._type} store sends nothing to servers, so there is nothing to compress")

    def pushed_dtype(self, dtype: str) -> str:
        """What values of ``dtype`` are rounded to on their way to servers, as ``set_gradient_compression`` has it."""
        return dtype

    @property
    def keeps_errors(self) -> bool:
        """Whether pushes leave something out that is added to the next: ``2bit`` and ``1bit`` compression do."""
        return False

    def restore_errors(self, parts: Mapping[Key, Sequence[tuple[int, int]]]) -> None:
        """Take note that what was pushed last to some elements is used by nobody, and is to be said by later pushes.

        For loops that leave out gradients which no worker has computed, though they travel as zeros with others: what
        earlier pushes have left out of them would go with these zeros, and be lost. Collective over the workers of a
        client, when that push is done; all clients do it alike. Where nothing is left out, it does nothing.

        Args:
            parts: by key, ranges ``(start, stop)`` of its elements.
        Raises:
            KeyNotInitializedError: a key does not exist.
        """

    def move_errors(self, moves: Mapping[tuple[Key, Key], Sequence[tuple[int, int, int]]]) -> None:
        """Take note that elements of one key are pushed as elements of another from now on.

        For loops that lay out anew which gradients travel together: what pushes of the one have left out is added to
        the next push of the other. Collective over the workers of a client, when their pushes are done; all clients do
        it alike. Where nothing is left out, it does nothing.

        Args:
            moves: by keys, the one and the other: ``(start, stop, first)``, elements ``start:stop`` of the one, which
                are those from ``first`` on of the other.
        Raises:
            KeyNotInitializedError: a key does not exist.
            ShapeMismatchError: a key has no such elements.
        """

    def _await_copies(self, parts: Sequence[Part], call: Invocation) -> None:
        """Return when what the call pushes is in memory of the store's own."""
        written = [part.state.sent for part in parts]
        copied = self._engine.push(lambda _: None, reads=written, lane="inline", name=call.op, no_skip=True)
        copied.wait(call.deadline.remaining_s())

    # ---- waiting and ending

    def wait_all(self) -> None:
        """Return when everything that this worker started is done; raise the first error that nobody has seen."""
        call = self._call("wait_all")
        self._check_open()
        try:
            self._settle(call.deadline)
        finally:
            self._recorder.blocked(time.perf_counter() - call.started_s)

    def clock(self) -> int:
        """One iteration is done; returns how many that makes."""
        self._set_clock(self._clock + 1)
        return self._clock

    def _set_clock(self, clock: int) -> None:
        self._clock = stall.clock = clock
        if timeline.on:
            timeline.mark("clock", clock=clock)

    def num_dead(self, timeout_s: float = 60.0) -> int:
        """Clients of which nothing was heard for ``timeout_s`` seconds. Collective over the workers of a client.

        Raises:
            ConfigError: ``timeout_s`` is no number of seconds.
        """
        seconds_of_silence(timeout_s)
        return 0

    def stats(self) -> dict[str, Any]:
        """Bytes, seconds and calls per phase; histogram of staleness; imbalance of the servers (1 is even).

        Bytes are payloads, counted where they are sent or taken. ``push``: from the client's master to servers;
        ``pull``: from servers to it, also what a ``pushpull`` brings, or in a synchronous store a ``push`` of a key
        that is pulled after each push: these are one call, of ``push``, which has the seconds of both ways.
        ``reduce``: summed over the workers of the client and the devices. ``broadcast``: from the master to the others.
        ``copy``: given out by a store without servers, in ``pull`` and ``pushpull`` alike. Staleness and imbalance are
        what a client's master knows.
        """
        return {**self._recorder.snapshot(), "clock": self._clock, "imbalance": self._imbalance()}

    def report(self, step: int, **values: Any) -> None:
        """Tell whoever looks at the job how training goes: ``kv.report(step, loss=0.31, accuracy=0.9)``.

        Each name becomes a curve of this worker over ``step``, and one of the mean over all workers, in ``kvmpi top``,
        on the dashboard and in the summary at the end (see docs/dashboard.md). Not collective: any worker may call it
        whenever it likes. It only takes note, and sends nothing itself; in a process that no launcher started nobody
        asks. A tensor on a GPU is waited for. Only the shape of long curves is kept: every second point, every fourth.

        Args:
            step: how many steps are done, 0 or more. It is also what "steps" counts from then on.
            values: plain numbers, or arrays and tensors of one element; not-a-number and infinity may be told too. At
                most 16 names in one process, of at most 64 characters.
        Raises:
            ConfigError: ``step`` is no whole number or negative, a value is no number, or there are too many names.
            KVError: the store is closed.
        """
        self._check_open()
        activity.report(step, values)

    def close(self) -> None:
        """Wait for what is under way, leave the job, release everything. Collective; idempotent; also runs at exit.

        Workers of a client wait up to half a minute for each other, or ``KVMPI_TIMEOUT_S`` if that is less. This one's
        store is closed then, too, and a warning names those that are late, as a worker that evaluates what all have
        trained: its process is waited for when this one ends, and any other call of it but ``close`` is an error there.
        An error that nobody has seen yet is raised after the store is closed.
        """
        if self._closed or self._forked:
            return
        with self._closing:  # other threads may close it as well, at the end of the program for instance
            if not self._closed:
                self._close()

    def _close(self) -> None:
        call = self._call("close")
        error: BaseException | None = None
        try:
            if self._client_store is not None:
                self._client_store.close()
        except Exception as first:
            error = first
        try:
            self._settle(call.deadline)
        except Exception as first:
            error = error or first
        call.deadline = Deadline(min(_CLOSE_TIMEOUT_S, call.deadline.remaining_s()))
        patience_s = call.deadline.timeout_s
        try:
            if not self._reduce.broken:
                self._enter(call, lambda: None)
                patience_s = 1.0 + 1.25 * patience_s  # who asks for the agreement waits longer than who is asked
        except Exception as first:
            error = error or first
        self._closed = True
        activity.end(self._observe)
        self._release(Deadline(patience_s))
        if self._reduce.waits_for:
            _log.warning(
                "kvmpi: worker %d has closed its store before others: %s. At its end this process waits for theirs",
                self.rank, self._reduce.waits_for,
            )  # fmt: skip
        if error is not None:
            raise error

    def abort(self, failure: BaseException | None = None) -> None:
        """Release everything at once, for a process that ends with an error: without a word to the peers, but to those
        that are to survive ``failure``."""
        self._closed = True
        activity.end(self._observe)
        if self._client_store is not None:
            self._client_store.abort()
        self._disconnect()

    def __repr__(self) -> str:
        clients = f", client {self.client_rank} of {self.num_clients}" if self.num_clients > 1 else ""
        servers = f", {self.num_servers} server{'s' if self.num_servers > 1 else ''}" if self.num_servers else ""
        end = ", closed" if self.closed else ""
        return f"<kvmpi {self.type}: worker {self.rank} of {self.num_workers}{clients}{servers}{end}>"

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def broken(self) -> bool:
        """Whether workers of this client were lost, so that the process cannot end MPI in good order."""
        inner = self._client_store
        return self._reduce.broken or self._cast.broken or (inner is not None and inner.broken)

    def __del__(self) -> None:
        """Nothing refers to it any more. Collections come at any moment, in any thread, where it cannot be closed."""
        if not getattr(self, "_closed", True):
            dropped.append(self)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            f"a store ({self.type}) cannot be copied, pickled or sent to another process; give that arrays, such as "
            "those of kv.pull, or keep the store out of what is sent (a data set for a DataLoader, a checkpoint)"
        )

    def __enter__(self) -> KVStore:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.close()
        else:
            # The other workers cannot be told in time; the process is about to end, or the user knows better.
            self.abort(error) if self.mpi_size > 1 else self._close_quietly(error)

    def _close_quietly(self, cause: BaseException) -> None:
        if not isinstance(cause, SystemExit) or cause.code not in (None, 0):
            self._failure = cause
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
        for collectives in (self._reduce, self._cast):
            collectives.close()
        if not self.broken and not self._reduce.parted:
            for comm in (*self._comms, self._comm):
                comm.free()
        for state in self._keys.values():
            state.buffer = None  # a store that is closed may be referred to for long

    # ---- what store types do

    @abstractmethod
    def _start_init(self, states: list[KeyState], values: list[Vector], call: Invocation) -> list[Work]:
        """One operation for each new key, finished when the key can be read."""

    @abstractmethod
    def _start_push(self, parts: list[Part], call: Invocation) -> list[Work]:
        """Sum over the client and apply the push rule; finished when the vectors may be reused."""

    @abstractmethod
    def _start_pull(self, parts: list[Part], call: Invocation) -> list[Work]:
        """Fill their ``outs``."""

    @abstractmethod
    def _start_pushpull(self, parts: list[Part], call: Invocation) -> list[Work]:
        """Both, in one exchange."""

    def _start_allreduce(self, parts: list[Part], call: Invocation) -> list[Work]:
        """Sum over the client, into the arrays of the call alone; of stores that are capable of it."""
        raise NotImplementedError

    @abstractmethod
    def _start_set_rule(self, rule: optim.Rule, call: Invocation) -> Work:
        """Put a new rule in force everywhere."""

    @abstractmethod
    def _start_set_hyperparams(self, rule: optim.Rule, hyperparams: dict[str, Any], call: Invocation) -> Work:
        """Put changed hyperparameters in force everywhere."""

    def _forget(self, states: list[KeyState]) -> None:
        """An ``init`` of these keys failed."""

    def _disconnect(self) -> None:
        pass


def seconds_of_silence(timeout_s: Any) -> float:
    """The argument of ``num_dead``; raise ``ConfigError`` if it is none."""
    found = float(timeout_s) if isinstance(timeout_s, numbers.Real) else -1.0
    if not found >= 0:  # as of not-a-number
        raise ConfigError(f"num_dead: timeout_s={timeout_s!r}, expected seconds, from 0 on")
    return found
