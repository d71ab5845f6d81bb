"""What every store type is made of: an engine with ordered lanes, two sets of collectives, and how a call begins.

A call goes: parse and check the arguments; if that fails, the other workers of the client learn it through the
agreement and raise too; then one engine operation or more for each key, which store types push.

Collective operations run on two ordered lanes with a communicator each, ``reduce`` and ``broadcast``. Agreements have a
third communicator, and run on the lane ``agree`` if nobody waits for their call, else on ``reduce``. All are pushed
with ``no_skip``: whether a collective runs must be the same on every rank, so it never depends on a failure that only
one rank knows. What all ranks know is the agreement of the call.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, NoReturn, TypeVar

import numpy.typing as npt

from kvmpi import arrays, optim
from kvmpi.collectives import Call, Collectives, Comm, Entry, SoloComm, compare_clocks
from kvmpi.config import Config
from kvmpi.deadline import Deadline
from kvmpi.engine import Variable, Work, create_engine
from kvmpi.errors import (
    DTypeMismatchError,
    KeyKindError,
    KeyNotInitializedError,
    KVError,
    UnsupportedError,
)
from kvmpi.kernels import host
from kvmpi.store import checked
from kvmpi.store.call import (
    Invocation,
    JoinedWork,
    KeyState,
    Part,
    about,
    check_array,
    check_scalable,
    check_writable,
    entries_of,
    keep_apart,
    overlap,
    processing_order,
    take_numbers,
)
from kvmpi.store.grammar import Group, Key, groups
from kvmpi.store.rows import RowOut
from kvmpi.trace import Recorder, stall, timeline
from kvmpi.trace.activity import Observation

Buffer = npt.NDArray[Any]
T = TypeVar("T")

_NOTHING = nullcontext()
#: Up to here a copy in the thread at hand costs less than a hand-over to another.
INLINE_BYTES = 8 << 20
#: Part of its time that an operation which has failed may take to find out who is missing.
_EXPLAINING = 0.9


class StoreCore:
    """Keys, lanes and agreement; subclasses add the public API and the operations of a store type."""

    def __init__(self, type_name: str, config: Config, comm: Comm | None = None) -> None:
        self._type, self._config = type_name, config
        comm = comm or SoloComm()
        rank = comm.rank if comm.size > 1 else timeline.NOTHING
        timeline.begin(config, "worker", rank)
        if type_name != "local":  # which waits for nobody
            stall.begin(config, "worker", rank)
        self._recorder = Recorder(alone=comm.size == 1)
        self._comm, self._comms = comm, [comm.duplicate() for _ in range(3)]
        if timeline.on and comm.size > 1:
            compare_clocks(self._comms[0])
        sums, casts, calls = self._comms
        self._reduce = Collectives.configured(sums, config, self._recorder, calls=calls)
        self._mpi_rank, self._mpi_size = comm.rank, comm.size  # every call asks for them
        # What it carries is on the host, and NCCL does not want two of its communicators at work at the same time.
        casting = replace(config, allreduce="auto") if config.allreduce == "nccl" else config
        self._cast = Collectives.configured(casts, casting, self._recorder)
        # Held from the agreement on a call until all of its operations are pushed: another thread's are not in between.
        self._beginning: AbstractContextManager[object] = threading.RLock()
        self._keys: dict[Key, KeyState] = {}
        self._mending, self._closing = threading.Lock(), threading.RLock()
        self._begin_engine()
        self._rule: optim.Rule | None = None
        self._num_rules = 0
        self._clock = 0
        self._pid = os.getpid()
        self._closed = False
        self._joined = False

    #: Around operations that are begun, or become ready, together: what they ask for leaves together.
    _gathering: AbstractContextManager[object] = _NOTHING

    def _begin_engine(self) -> None:
        """Make an engine, and variables of it for all that there is."""
        engine = create_engine(self._config.engine, self._config.engine_threads)
        for lane in ("reduce", "broadcast", "agree"):
            engine.add_lane(lane, ordered=True)
        self._control, self._agreements = engine.variable("control"), engine.variable("agreements")
        for state in self._keys.values():
            state.use(engine)
        engine.together = self._gathering
        self._engine = engine  # the last step: a signal that comes before it leaves all to be done again

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
        return self._mpi_rank

    @property
    def mpi_size(self) -> int:
        """Workers in this client."""
        return self._mpi_size

    @property
    def ring_compression(self) -> str:
        """As what large sums of float32 travel between the hosts of a client (``KVMPI_RING_COMPRESSION``)."""
        return self._config.ring_compression

    @property
    def num_hosts(self) -> int:
        """Hosts on which the workers of this client are; 0 as long as that is not known, before its first sum."""
        return self._reduce.num_hosts

    @property
    def client_rank(self) -> int:
        return 0

    @property
    def num_clients(self) -> int:
        return 1

    @property
    def pushes_per_update(self) -> int:
        """So many pushes of clients are one update: of all of them in a synchronous store, one in an asynchronous one;
        in ``dist_softsync`` fewer, too, when clients are gone."""
        return self.num_clients

    @property
    def num_servers(self) -> int:
        return 0

    @property
    def keys(self) -> list[Key]:
        """The keys there are, in the order of their ``init``."""
        return list(self._keys)

    # ---- how calls begin

    #: Where operations of a worker without others run that do not in the caller's thread.
    _alone_lane = "cpu"

    @property
    def _survives_signals(self) -> bool:
        """Whether the store goes on after a Ctrl-C that came in the middle of the engine's own steps."""
        return False

    #: The keys for which an updater of the user runs, by thread.
    _updating: dict[int, Key] = {}  # noqa: RUF012 - of stores that have updaters, another

    def _refuse_inside(self, op: str) -> NoReturn:
        key = self._updating[threading.get_ident()]
        raise KVError(
            f"{op} inside the updater of key {key!r}: it would wait for itself; an updater works on what it is given"
        )

    def _check_open(self) -> None:
        if self._closed:
            raise KVError(f"this {self._type} store is closed; create another with kvmpi.create")
        if self._forked:
            raise KVError(
                f"this {self._type} store belongs to process {self._pid}, from which this one, {os.getpid()}, was "
                "forked without its threads; send the arrays to that process, or create a store of type 'local' here"
            )

    @property
    def _forked(self) -> bool:
        """Whether this is a fork of the process that made the store: none of its threads is here."""
        return os.getpid() != self._pid

    def _check_kind(self, found: Sequence[Group], op: str) -> None:
        kind = type(next(iter(self._keys), found[0].key if found else 0))
        for group in found:
            if type(group.key) is not kind:
                mine = "str" if kind is str else "int"
                raise KeyKindError(f"{op} of key {group.key!r}: this store uses {mine} keys, and only one kind")

    def _new_state(self, group: Group) -> KeyState:
        first = group.arrays[0]
        state = KeyState(
            key=group.key,
            shape=arrays.shape_of(first),
            dtype=arrays.dtype_of(first),
            index=len(self._keys),
            library=arrays.library_of(first),
            empty=self._empty,
        )
        state.use(self._engine)
        self._keys[group.key] = state
        return state

    def _empty(self, count: int, dtype: str) -> Buffer:
        """Uninitialised memory of shape ``(count,)`` in storage dtype, for what this worker sends by itself."""
        return host.empty(count, dtype)

    def _call(self, op: str, priority: int = 0, async_op: bool = False, more_s: float = 0.0) -> Invocation:
        """A public call begins: from here its time runs, ``more_s`` longer than that of most."""
        if os.getpid() != self._pid:
            self._check_open()
        if self._engine.broken and self._survives_signals:
            with self._mending:
                if self._engine.broken and not self._closed:
                    self._engine.join(self._config.timeout_s)
                    self._begin_engine()
        if self._updating and threading.get_ident() in self._updating:
            self._refuse_inside(op)
        return Invocation(op, Deadline(self._config.timeout_s + more_s), priority, async_op, clock=self._clock)

    def _enter(
        self, call: Invocation, prepare: Callable[[], T], entries: Callable[[T], Sequence[Entry]] = lambda _: (),
        details: Callable[[T], Any] = lambda _: None,
    ) -> T:  # fmt: skip
        """Run ``prepare``; make sure that every worker of the client succeeded in the same call.

        ``details`` is what ``joining`` needs to know to make the call in the place of a worker that has joined.
        """
        failure: Exception | None = None
        described: Sequence[Entry] = ()
        try:
            self._check_open()
            prepared = prepare()
            described = entries(prepared)
        except Exception as error:  # whatever it is, the other ranks must hear of it
            if self._mpi_size == 1 or self._closed:
                raise
            failure = error
        if self._mpi_size == 1:
            return prepared
        signature = Call(call.op, tuple(described), failure, lambda: [self._clock, details(prepared)])
        work = self._agree_op(signature, call)
        if failure is not None:
            work.wait()
            raise failure
        return prepared

    def _enter_settled(
        self, call: Invocation, prepare: Callable[[], T], entries: Callable[[T], Sequence[Entry]] = lambda _: (),
        details: Callable[[T], Any] = lambda _: None,
    ) -> T:  # fmt: skip
        """``_enter`` when all that was started before is done. What has failed on one worker is an error on all."""

        def settle_and_prepare() -> T:
            self._settle(call.deadline)
            return prepare()

        prepared = self._enter(call, settle_and_prepare, entries, details)
        self._settle(call.deadline)  # the agreement
        return prepared

    def _agree(self, signature: Call, call: Invocation) -> None:
        """Agree with the other workers of the client on a call."""
        if timeline.on:
            timeline.about(call.about, call.clock)
        try:
            settings = f"KVMPI_BUCKET_BYTES={self._config.bucket_bytes}"
            if call.scale != 1.0:
                settings = f"{settings} scale={call.scale}"
            if call.reduced:
                settings = f"{settings} reduced"
            if self._config.sharded_update != "off":
                settings = f"{settings} KVMPI_SHARDED_UPDATE={self._config.sharded_update}"
            if call.source:
                settings = f"{settings} {call.source}"
            found = self._reduce.agree(signature, call.deadline, settings)
            call.num_joined += found.num_joined
        except BaseException as error:
            call.error = error
            raise

    def _agree_op(self, signature: Call, call: Invocation) -> Work:
        """Push: ``_agree``, which ``call.done`` stands for."""
        name = f"agreement on {call.op}"
        call.done.append(self._engine.variable(name))
        return self._after_agreements(lambda _: self._agree(signature, call), call.done, name, ahead=call.async_op)

    def _after_agreements(
        self, run: Callable[[BaseException | None], None], writes: Sequence[Variable], name: str, *, ahead: bool
    ) -> Work:
        """Push: ``run`` agrees with the other workers on a call, after all calls before it.

        Args:
            ahead: while sums of earlier calls are under way; else in the thread that sums next, without a hand-over.
        """
        lane = "agree" if ahead else "reduce"
        return self._engine.push(run, writes=[*writes, self._agreements], lane=lane, name=name, no_skip=True)

    def _enter_keys(self, call: Invocation, key: Any, value: Any = None, out: Any = None) -> list[Part]:
        """``_enter`` for a call on existing keys; failures of earlier calls on them surface here."""
        pushes, pulls = call.op != "pull", call.op != "push"
        in_place, alone = pushes and pulls and out is value, self._mpi_size == 1
        if pushes and self._joined:  # the others expect no such call, so they need not hear of it
            raise KVError(f"{call.op} of key {key!r} on worker {self.rank}: it has called join, and pushes no more")

        def prepare() -> list[Part]:
            take_numbers(call, key)
            single = self._keys.get(key) if alone and (type(key) is int or type(key) is str) else None
            if single is not None and (memory := checked.find(single, call, value, out, self._rule)) is not None:
                self._raise_pending(single)
                single.pushes += pushes
                single.by_rows &= not pushes
                call.about = single.key
                return [checked.part_of(single, memory, value, out)]
            if (known := self._known_parts(call, key, value, out)) is not None:
                return known
            parts: dict[Key, Part] = {}
            for group in groups(key, value, call.op, by_rows=True) if pushes else []:
                state = self._match(group, call.op)
                self._check_pushable(call.op, state)
                state.pushes += 1
                state.by_rows = group.by_rows
                if group.by_rows:
                    if call.op == "allreduce":
                        raise UnsupportedError(f"allreduce of key {group.key!r}: rows of it are summed by pushpull")
                    parts[group.key] = self._part_of_rows(group, state, call, in_place)
                    continue
                vectors = [arrays.read(array) for array in group.arrays]
                parts[group.key] = Part(state, vectors, group.arrays if in_place else [], in_place)
            for group in groups(key, out, call.op, by_rows=pushes) if pulls and not in_place else []:
                state = self._match(group, call.op)
                part = parts.setdefault(group.key, Part(state, []))
                if group.by_rows:
                    part.row_outs = self._row_outs(part, group, call)
                else:
                    part.outs, part.whole = group.arrays, part.rows is not None
            check_writable(parts.values(), call.op, self.rank)
            if not in_place or overlap(parts.values()):
                keep_apart(list(parts.values()), call)
            if (not in_place or call.reduced) and arrays.may_be_on_devices():  # else what is pushed is waited for
                found = [arrays.fence(out) for part in parts.values() for out in part.outs]
                call.fences = [fence for fence in found if fence is not None]
            for part in parts.values():
                self._raise_pending(part.state)
            if call.scale != 1.0:
                check_scalable(call, parts.values())
            if timeline.on:
                call.about = about(list(parts.values()))
            if single is not None:
                checked.note(parts[single.key], call, value, out, self._rule)
            found = sorted(parts.values(), key=lambda part: processing_order(part.state))
            if call.op in ("push", "pull") and call.signature is not None:
                self._note_made(call, found)
            return found

        return self._enter(
            call, prepare, lambda parts: self._entries_of(parts, call.op),
            lambda parts: [call.async_op, [part.form for part in parts], call.scale, call.reduced],
        )  # fmt: skip

    def _entries_of(self, parts: Sequence[Part], op: str) -> list[Entry]:
        """What has to be equal on all workers of the client, under the rule in force."""
        return entries_of(parts, averaged=self._rule is not None and self._rule.averages and op != "allreduce")

    def _raise_pending(self, state: KeyState) -> None:
        """Raise what an earlier call on the key has left, if nobody has seen it yet."""
        self._engine.raise_pending(state.sent)
        self._engine.raise_pending(state.value)

    def _match(self, group: Group, op: str) -> KeyState:
        state = self._keys.get(group.key)
        if state is None:
            self._check_kind([group], op)
            raise KeyNotInitializedError(
                f"{op} of key {group.key!r} on worker {self.rank}: the key was never initialised; "
                "call kv.init on all workers first"
            )
        for array in () if group.by_rows else group.arrays:
            try:
                if array.shape == state.shape and arrays.dtype_of(array) == state.dtype:
                    continue
            except (DTypeMismatchError, UnsupportedError):
                pass  # said below with the key's name
            check_array(array, state.shape, state.dtype, f"{op} of key {group.key!r} on worker {self.rank}")
        return state

    def _lanes_of(self, call: Invocation, key: Any) -> AbstractContextManager[object]:
        """Around a call on keys: the lanes that its caller borrows, see ``Engine.borrow``.

        Who waits for a sum had better do it than wake another thread, which would take a core from other workers. What
        servers answer about several keys another thread passes on, while this one reads the next. A timeline shows what
        there is to do on the rows of the lanes.
        """
        if call.async_op or self._mpi_size == 1 or timeline.on:
            return _NOTHING
        return self._engine.borrow("reduce") if _are_several(key) else self._engine.borrow("reduce", "broadcast")

    def _gathering_of(self, key: Any) -> AbstractContextManager[object]:
        """Around the beginning of a call on keys; of one, there is nothing to gather."""
        return self._gathering if _are_several(key) else _NOTHING

    def _again(self, call: Invocation, key: Any, value: Any, out: Any) -> list[Work] | None:
        """Make a call as it was made before, if it is known; what it waits for. ``out`` may be ``value`` itself."""
        return None

    def _behind_views(self, key: Any, out: Any) -> Any:
        """``out``, with the memory of values in place of what shows them read-only, where results may go there."""
        return out

    def _known_parts(self, call: Invocation, key: Any, value: Any, out: Any) -> list[Part] | None:
        """What a push or a pull does with each key, if the same call was made before and has been found right."""
        return None

    def _note_made(self, call: Invocation, parts: Sequence[Part]) -> None:
        """The call, which was not known, is being made."""

    def _complete(self, works: list[Work], call: Invocation) -> Work | None:
        if not works and call.done:  # no keys here; others may have some
            check = self._engine.push(lambda _: call.check(), call.done, lane="inline", name=call.op, no_skip=True)
            works = [check]
        try:
            start_ns = timeline.now() if timeline.on else 0
            if works or call.async_op:
                work = works[0] if len(works) == 1 else JoinedWork(works, call.op)
                if call.async_op:
                    work.on_waited = self._recorder.blocked
                    return work
                self._help(work)
                work.wait()
            if start_ns:
                timeline.span("wait", start_ns, call.about, clock=call.clock)
            return None
        finally:
            self._recorder.blocked(time.perf_counter() - call.started_s)

    def _observe(self) -> Observation:
        """What this store has done so far; from any thread."""
        found = self._recorder.snapshot()
        phases = {name: [p["seconds"], float(p["bytes"]), float(p["calls"])] for name, p in found["phases"].items()}
        if self.mpi_size == 1 and "reduce" in phases:
            phases["sum"] = phases.pop("reduce")  # nothing travels
        states = list(self._keys.values())
        totals = {
            "steps": float(max(self._clock, max((state.pushes for state in states), default=0))),
            "keys": float(len(states)),
            "blocked_s": self._recorder.blocked_s,
            "communication_s": self._recorder.busy_s,
            "imbalance": self._imbalance(),
        }
        if (seconds := self._reduce.expected_seconds(phases.get("reduce"))) > 0:
            totals["possible_bytes_per_s"] = phases["reduce"][1] / phases["reduce"][2] / seconds
        return Observation(totals, phases, Counter(found["staleness"]))

    def _imbalance(self) -> float:
        """The most loaded server's bytes over the mean."""
        return 1.0

    def _help(self, work: Work) -> None:
        """Do in the caller's thread what ``work`` waits for, as far as that is quicker."""

    #: Why the store is closed, if that is an error of the program.
    _failure: BaseException | None = None

    def _settle(self, deadline: Deadline) -> None:
        """Wait until everything that was started is done; its errors surface here.

        An operation gives up at its own deadline, and knows whom it waited for some time later.
        """
        self._engine.wait_all(deadline.remaining_s() + _EXPLAINING * deadline.timeout_s)

    def _check_pushable(self, op: str, state: KeyState) -> None:
        """Raise if ``op`` cannot push to this key now."""
        rule = self._rule
        if rule is None or op == "allreduce" or rule.integers or not (rule.in_blocks or rule.averages):
            return
        if host.ACCUMULATE[state.dtype] not in ("float32", "float64"):
            raise DTypeMismatchError(
                f"{op} of key {state.key!r} on worker {self.rank}: {rule!r} cannot compute in {state.dtype}; use a key "
                "of a float type, or no optimizer, for values of this kind"
            )

    def _part_of_rows(self, group: Group, state: KeyState, call: Invocation, in_place: bool) -> Part:
        """What a call pushes to a key of which it has some rows; see ``row_sparse``."""
        raise NotImplementedError

    def _row_outs(self, part: Part, group: Group, call: Invocation) -> list[RowOut]:
        """Where rows that the push of ``part`` changes go."""
        raise NotImplementedError


def _are_several(key: Any) -> bool:
    return isinstance(key, list | tuple) and len(key) != 1
