"""Values from elsewhere: what ``assign``, ``save`` and ``load`` do on every worker, whatever the type of the store."""

from __future__ import annotations

import importlib.util
import os
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from kvmpi import arrays
from kvmpi.arrays import Vector
from kvmpi.compiling import methods_not_compiled
from kvmpi.deadline import Deadline
from kvmpi.errors import ConfigError, DTypeMismatchError, ShapeMismatchError
from kvmpi.store import checkpoint
from kvmpi.store.call import Invocation, KeyState
from kvmpi.store.grammar import Group, groups
from kvmpi.store.meeting import Meeting

if TYPE_CHECKING:
    from kvmpi.store.base import KVStore

#: Of a checkpoint, between servers and a disk: what slow networks and disks still manage.
SLOWEST_BYTES_PER_S = 10e6


@methods_not_compiled
class Saving(Meeting):
    """The part of a store that goes to a file and comes from there, or from memory."""

    def assign(self, key: Any, value: Any) -> None:
        """Replace values past the optimizer: what it remembers of them stays. Collective over all workers.

        For weights that come from elsewhere in the middle of training. Worker 0's count; returns when they can be read.
        A process that was started again, whose program comes to it once more, changes nothing.

        Raises:
            KeyNotInitializedError: a key does not exist.
            ShapeMismatchError, DTypeMismatchError: a value is not like the one that is there.
        """

        def prepare() -> list[tuple[KeyState, Vector]]:
            found = [(self._match(group, "assign"), group.arrays[0]) for group in groups(key, value, "assign")]
            return [(state, arrays.read(array)) for state, array in found]

        with self._meeting("assign") as call:  # nobody reads or pushes what others have yet to write
            found = self._enter_settled(call, prepare, lambda found: [state.entry for state, _ in found])

        def put(call: Invocation) -> None:
            for state, vector in found:
                self._assign(state, vector, call)

        # Nor what they have written.
        self._by_one("assign", lambda call: self._together("assign", lambda: put(call)))

    _first = 0  # the client that does it, as all of them know since they have met last; below 0: it is done
    _did = False  # whether this worker has done it, as it says when they meet the next time
    _is_done = True  # whether anybody has said so

    @property
    def _is_first(self) -> bool:
        """Whether this worker does what one has to do for all: worker 0, as long as the others need not do without."""
        return self.client_rank == self._first and self.mpi_rank == 0

    def _long_call(self, op: str, nbytes: int) -> Invocation:
        """One that reads or writes so many bytes, while all workers wait for whoever does: more time than others."""
        return self._call(op, more_s=nbytes / SLOWEST_BYTES_PER_S)

    def _by_one(self, op: str, run: Callable[[Invocation], None], nbytes: int = 0) -> None:
        """Run on every worker what one of them does for all, and meet; again with the next, if that one has been lost
        before it could say that it is done. ``nbytes``: of a file, as in ``_long_call``."""
        self._is_done = False
        while not self._is_done:
            self._is_done = True  # where no clients meet
            try:
                with self._meeting(op, self._long_call(op, nbytes)) as call:
                    run(call)
                    self._did = self._is_first
            finally:
                self._did = False

    def save(self, path: Any) -> None:
        """Write values, optimizer state and clock to one file, atomically. Collective; worker 0 writes.

        A file that was there keeps its mode; of a symbolic link what it leads to is replaced; what is no regular file
        is refused. While it is written the file beside it, ``.kvmpi-NAME-...``, may be seen, and after a ``kill -9``
        until the next save to that name.

        Where others go on without client 0, and it is gone or lost while it writes, the first worker of the lowest
        client that is left does. A process that was started again, whose program comes to it once more, writes nothing:
        the file is there. Others wait for ``KVMPI_TIMEOUT_S``, and a second more for every 10 MB of the file; so they
        do in ``load``.

        Raises:
            KVError: it could not be written, on every worker; what was there before is unchanged.
        """
        self._save(path, with_values=True)

    def load(self, path: Any) -> None:
        """Restore what ``save`` wrote. Collective; every worker reads ``path``. Keys that do not exist are created.

        If one worker cannot read the file, or two of a client read different ones, all raise, and nothing is changed. A
        process that was started again, whose program comes to it once more, changes nothing: what was trained since
        counts.

        Raises:
            KVError: the file is missing or damaged.
            ConfigError: it is no checkpoint of kvmpi, or holds optimizer states only; or workers of a client have
                different ones, as on hosts without a common file system.
            KeyKindError, ShapeMismatchError, DTypeMismatchError: a key of it does not fit the store's.
        """
        self._load(path, with_values=True)

    def save_optimizer_states(self, path: Any) -> None:
        """Like ``save``, without the values."""
        self._save(path, with_values=False)

    def load_optimizer_states(self, path: Any) -> None:
        """Restore what ``save_optimizer_states`` or ``save`` wrote, without touching values. Keys must exist."""
        self._load(path, with_values=False)

    def _save(self, path: Any, *, with_values: bool) -> None:
        with self._meeting("save") as call:
            name = self._enter_settled(call, lambda: _file(path), details=lambda name: [name, with_values])
            self._await_whole(call)

        def write(states: list[KeyState], call: Invocation) -> None:
            saved = [self._dump(state, call.deadline) for state in states]
            for key, state in zip(saved, states, strict=True):
                key.by_rows = state.by_rows
            # This process may have been started again, and its program have skipped changes that others have made.
            rule = next((key.rule for key in saved if key.rule is not None), self._rule)
            checkpoint.write(name, self._type, self._clock, rule, saved, with_values=with_values)

        def run(call: Invocation) -> None:
            if self._is_first:
                states = sorted(self._keys.values(), key=lambda state: state.index)
                self._between_calls("save", states, partial(write, states, call))

        # Values, and about as much for each thing that the rule remembers.
        num_slots = len(self._rule.slots()) if self._rule else 0
        nbytes = (1 + num_slots) * sum(state.nbytes for state in self._keys.values())
        # When save returns, the file is there for the workers of every client.
        self._by_one("save", lambda call: self._together("save", lambda: run(call), call), nbytes)

    def _load(self, path: Any, *, with_values: bool) -> None:
        def prepare() -> checkpoint.Checkpoint:
            found = checkpoint.read(_file(path), self._keys, with_values=with_values)
            call.source = f"file_checksum={found.checksum:08x}"
            self._check_kind([Group(saved.key, []) for saved in found.keys], "load")
            for saved in found.keys:
                self._check_fits(saved, path)
            return found

        nbytes = _size_of(path)
        # Nothing is changed before every worker of every client has read it.
        with self._meeting("load", self._long_call("load", nbytes)) as call:
            found = self._enter_settled(call, prepare, details=lambda _: [_file(path), with_values])
            self._await_whole(call)
        self._by_one("load", lambda call: self._put(found, with_values, call), nbytes)

    def _put(self, found: checkpoint.Checkpoint, with_values: bool, call: Invocation) -> None:
        """Make the store what a file says that all workers have read."""
        store = cast("KVStore", self)
        missing = [saved for saved in found.keys if saved.key not in self._keys]
        if missing:
            values = [arrays.wrap(s.arrays["value"], s.shape, s.dtype, _library_of(s)) for s in missing]
            store.init([saved.key for saved in missing], values)
        if found.rule is not None and found.rule != self._rule:
            if self._first < 0:  # it was done before, and the rule may have changed since: servers do not hear of it
                self._rule, self._num_rules = found.rule, self._num_rules + 1
            else:
                store.set_optimizer(found.rule)
        states = [self._keys[saved.key] for saved in found.keys]
        for state, saved in zip(states, found.keys, strict=True):
            state.by_rows = saved.by_rows
        restore = partial(self._restore, found.keys, with_values, call.deadline)
        self._together("load", lambda: self._between_calls("load", states, restore, changes=True), call)
        store._set_clock(found.clock)

    def _check_fits(self, saved: checkpoint.SavedKey, path: Any) -> None:
        state = self._keys.get(saved.key)
        if state is not None and (saved.shape, saved.dtype) != (state.shape, state.dtype):
            wrong = ShapeMismatchError if saved.shape != state.shape else DTypeMismatchError
            raise wrong(
                f"load of {path}: key {saved.key!r} has shape {saved.shape} and dtype {saved.dtype} there, and "
                f"{state.shape} and {state.dtype} in the store"
            )

    @abstractmethod
    def _assign(self, state: KeyState, vector: Vector, call: Invocation) -> None:
        """Put worker 0's ``vector`` in the place of a value."""

    def _await_whole(self, call: Invocation) -> None:
        """Return when this worker has all that it is to write, or to change. Collective over the client."""

    def _between_calls(
        self, op: str, states: Sequence[KeyState], run: Callable[[], None], *, changes: bool = False
    ) -> None:
        """``run()``, which looks at these values, or ``changes`` them, while no call of another thread changes them."""
        run()

    @abstractmethod
    def _dump(self, state: KeyState, deadline: Deadline) -> checkpoint.SavedKey:
        """Everything a checkpoint needs of one key."""

    @abstractmethod
    def _restore(self, saved: list[checkpoint.SavedKey], with_values: bool, deadline: Deadline) -> None:
        """The inverse of ``_dump``."""


def _file(path: Any) -> str:
    if isinstance(path, str | bytes | os.PathLike) and "\0" not in (name := os.fsdecode(path)):
        return name
    raise ConfigError(f"path is {path!r}: expected the name of a file")


def _size_of(path: Any) -> int:
    """Bytes of a file; 0 where there is none."""
    try:
        return os.path.getsize(path)
    except (OSError, TypeError, ValueError):
        return 0


def _library_of(saved: checkpoint.SavedKey) -> str:
    """What a key was made of, where that is there."""
    has_torch = saved.library == "torch" and importlib.util.find_spec("torch") is not None
    return "torch" if has_torch else "numpy"
