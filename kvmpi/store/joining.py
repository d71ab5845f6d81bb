"""``join``: a worker without batches goes along with its client's other workers until they have none left either.

Within a client every sum needs everybody. So a worker that has joined makes each call that its peers make, with zeros
for what it would push and without arrays to pull into; how it hears of the calls says ``collectives.agreement``. When
all workers of a client have joined, the master tells servers and scheduler to go on without the client.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from kvmpi import optim
from kvmpi.arrays import Vector
from kvmpi.collectives import JOIN, Call, Verdict
from kvmpi.compiling import methods_not_compiled
from kvmpi.deadline import Deadline
from kvmpi.engine import Work
from kvmpi.errors import KVError, PeerLostError, UnsupportedError
from kvmpi.kernels import host
from kvmpi.kernels.rows import no_rows
from kvmpi.store.call import WHOLE, Invocation, KeyState, Part
from kvmpi.store.core import StoreCore
from kvmpi.store.grammar import Key

if TYPE_CHECKING:
    from kvmpi.store.base import KVStore


@methods_not_compiled
class Joining(StoreCore):
    """The part of a store that ends for a worker before it ends for others."""

    _follower: Follower | None = None
    _all_joined = False

    def join(self) -> None:
        """This worker has no more batches: rounds and barriers go on without it. It may pull and close, not push.

        That is for good: rounds have gone on without it, and a worker that has joined cannot come back to them.
        A barrier of its own waits for clients that have not joined; once all have, barriers wait for nobody.
        So that the last epoch ends for all when some have fewer batches. To be called once by every worker, when it has
        pushed its last. Returns when all workers of the client have joined. Until then this worker takes part in what
        the others of its client do: it contributes nothing to sums, holds no weights that would enter a mean over
        workers (``Elastic``, ``Outer``), and updates values as they do, so that after ``join`` it pulls what they pull.
        A divisor of the user's own (``rescale_grad``, a batch size) stays what it is. ``kv.client`` is joined as well.

        The others may push, pull, change optimizer and hyperparameters, save, load and meet at barriers. Keys and
        ``kv.client`` are made before anybody joins. A call that this worker cannot make for them is an error here and
        there, and so is a mistake of theirs; after either, ``join`` goes on if it is called again.

        Raises:
            KVTimeoutError: the others made no call for ``KVMPI_TIMEOUT_S``, or did not finish one.
            UnsupportedError: they made a call that a worker which has joined cannot make, as ``init`` or ``close``.
        """
        self._check_open()
        if self._all_joined:
            return
        self._settle(self._call(JOIN).deadline)
        self._joined = True
        if self.mpi_size > 1:
            if self._follower is None:
                self._follower = Follower(cast("KVStore", self))
            self._follower.run()
        call = self._call(JOIN)
        error: Exception | None = None
        try:
            if self._follower is not None:
                self._follower.finish()
            self._settle(call.deadline)
        except Exception as first:  # the others wait for the announcement all the same
            error = first
        self._announce_join(call)
        self._all_joined = True
        if error is not None:
            raise error

    def _announce_join(self, call: Invocation) -> None:
        """Tell whoever waits for this client's pushes."""


class Follower:
    """Makes the calls of a worker's peers in its place."""

    def __init__(self, store: KVStore) -> None:
        self._store = store
        self._zeros: npt.NDArray[np.uint8] = np.zeros(0, np.uint8)
        self._inner: _JoinInThread | None = None

    def run(self) -> None:
        """Return when all workers of the client have joined; raise what a call raises on all of them."""
        self._join_client_store()
        while (heard := self._hear()).description:
            op, keys, (clock, details) = json.loads(heard.description)
            self._store._set_clock(clock)
            if op in _STARTS:
                self._exchange(op, keys, heard.num_joined, *details)
            else:
                self._command(op, details)

    def finish(self) -> None:
        """Return when the client's own store is joined as well; raise the first error on the way to that."""
        if self._inner is not None:
            self._inner.finish()

    def _join_client_store(self) -> None:
        """Peers use both stores, in an order that this worker need not know: each is followed by itself."""
        inner = self._store._client_store
        if inner is not None and not inner.closed and (self._inner is None or not self._inner.is_alive()):
            self._inner = _JoinInThread(inner)

    def _hear(self) -> Verdict:
        """What the peers do next."""
        store, found = self._store, list[Verdict]()

        def run(cause: BaseException | None) -> None:
            found.append(store._reduce.agree(Call(JOIN), Deadline(store._config.timeout_s)))

        try:
            store._after_agreements(run, (), JOIN, ahead=False).wait()
        except PeerLostError:
            for state in store._keys.values():  # what was lost in an exchange says more
                store._raise_pending(state)
            raise
        return found[0]

    def _exchange(
        self, op: str, keys: list[Key], num_joined: int, async_op: bool, forms: list[int | str], scale: float = 1.0,
        reduced: bool = False,
    ) -> None:  # fmt: skip
        """Push nothing, or pull for nobody.

        Args:
            async_op: whether the peers go on at once. They may have to: what they wait for can need their next call.
            forms: how many vectors a peer pushes to each key, by which a mean divides; or that it pushes rows.
            scale: what sums are multiplied by.
            reduced: peers push what is a sum already, the same on all of them.
        """
        store = self._store
        call = store._call(op, async_op=async_op)
        call.num_joined, call.scale, call.reduced = num_joined, scale, reduced

        def prepare() -> list[Part]:
            states = [store._keys[key] for key in keys]
            for state in states:
                store._raise_pending(state)
            return [self._part(state, form) for state, form in zip(states, forms, strict=True)]

        parts = store._enter(call, prepare, lambda parts: store._entries_of(parts, op))
        works = _STARTS[op](store, parts, call)
        if async_op and op != "push":
            for work in works:
                work.add_done_callback(self._leave_to_peers)
        store._complete(works, call)

    def _leave_to_peers(self, work: Work) -> None:
        """All workers hear how a pull went: an error is raised where they wait for it, and means nothing here."""
        if work.error() is not None and not self._store.broken:
            with contextlib.suppress(Exception):
                work.wait()

    def _part(self, state: KeyState, form: int | str) -> Part:
        """Nothing, in the form in which the peers push something."""
        state.by_rows = not isinstance(form, int)
        if isinstance(form, int):
            return Part(state, [self._nothing(state)] * form)
        return Part(state, [], rows=no_rows(state.width, state.dtype), whole=form == WHOLE)

    def _nothing(self, state: KeyState) -> Vector:
        """Zeros: pages that nobody writes to take no memory."""
        if state.nbytes > self._zeros.size:
            self._zeros = np.zeros(state.nbytes, np.uint8)
            self._zeros.flags.writeable = False
        zeros = self._zeros[: state.nbytes].view(host.STORAGE[state.dtype])
        return Vector(zeros, state.dtype, "cpu", shared=False)

    def _command(self, op: str, details: Any) -> None:
        store, make = self._store, _COMMANDS.get(op)
        if make is None:
            text = (
                f"worker {store.rank} has joined, which {op} cannot do without; make keys and kv.client before the "
                "first worker joins, and let all workers join before one closes the store"
            )
            _refuse(store, op, UnsupportedError(text))
        else:
            make(store, details)
        self._join_client_store()


class _JoinInThread(threading.Thread):
    """``join`` of another store meanwhile, to its end: nobody could call it again after a mistake of the peers."""

    def __init__(self, store: KVStore) -> None:
        super().__init__(name="kvmpi-join", daemon=True)
        self._store, self._errors = store, list[BaseException]()
        self.start()

    def run(self) -> None:
        while not self._store._all_joined:
            try:
                self._store.join()
            except BaseException as error:
                self._errors.append(error)
                if self._store.broken or self._store.closed:
                    return

    def finish(self) -> None:
        """Return when the store is joined; raise the first error on the way."""
        self.join()
        if self._errors:
            first, self._errors = self._errors[0], []
            raise first


def _refuse(store: KVStore, op: str, error: KVError) -> None:
    """Raise ``error`` on all workers of the client, which make the call."""

    def fail() -> None:
        raise error

    store._enter(store._call(op), fail)


def _set_optimizer(store: KVStore, details: Any) -> None:
    name, hyperparams = details
    try:
        rule = optim.create(name, hyperparams)
    except KVError as error:
        _refuse(store, "set_optimizer", error)
    else:
        store.set_optimizer(rule)


_Start = Callable[["KVStore", list[Part], Invocation], list[Work]]
_STARTS: Mapping[str, _Start] = MappingProxyType(
    {
        "push": lambda store, parts, call: store._start_push(parts, call),
        "pull": lambda store, parts, call: store._start_pull(parts, call),
        "pushpull": lambda store, parts, call: store._start_pushpull(parts, call),
        "allreduce": lambda store, parts, call: store._start_allreduce(parts, call),
        "row_sparse_pull": lambda store, parts, call: [store._start_row_pull(part, call) for part in parts],
    }
)
#: Other calls that need nothing of a worker but what all workers give, by what ``StoreCore._enter`` is told of them.
_COMMANDS: Mapping[str, Callable[[KVStore, Any], object]] = MappingProxyType(
    {
        "barrier": lambda store, _: store.barrier(),
        "any": lambda store, _: store.any(False),
        "set_optimizer": _set_optimizer,
        "set_hyperparams": lambda store, changed: store.set_hyperparams(**changed),
        "set_gradient_compression": lambda store, params: store.set_gradient_compression(params),
        "restore_errors": lambda store, details: store.restore_errors(dict(details)),
        "move_errors": lambda store, details: store.move_errors({(a, b): some for a, b, some in details}),
        "save": lambda store, details: store._save(details[0], with_values=details[1]),
        "load": lambda store, details: store._load(details[0], with_values=details[1]),
        "num_dead": lambda store, timeout_s: store.num_dead(timeout_s),
    }
)
