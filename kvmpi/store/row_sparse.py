"""Row-sparse keys: the public pull of rows, and what all store types do with rows inside a client."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from kvmpi import optim
from kvmpi.collectives import broadcast_rows, sum_rows, union_of_ids
from kvmpi.compiling import methods_not_compiled
from kvmpi.engine import Variable, Work
from kvmpi.errors import KeyNotInitializedError, ShapeMismatchError, UnsupportedError
from kvmpi.kernels import rows as by_rows
from kvmpi.kernels.rows import Rows
from kvmpi.store import rows as given
from kvmpi.store.call import Invocation, KeyState, Part, entries_of, take_numbers
from kvmpi.store.core import INLINE_BYTES
from kvmpi.store.grammar import Group, Key
from kvmpi.store.operations import Operations


@methods_not_compiled
class RowSparse(Operations):
    """The part of a store that moves some rows of a key."""

    def pushed_by_rows(self, key: Key) -> bool:
        """Whether the last push to a key was of rows: by this worker, or before the file that was loaded last.

        In a synchronous store on servers the master of a client that was started again, or of a job that was resumed,
        knows of the pushes before.

        Raises:
            KeyNotInitializedError: the key does not exist.
        """
        if key not in self._keys:
            raise KeyNotInitializedError(
                f"pushed_by_rows of key {key!r} on worker {self.rank}: the key was never initialised"
            )
        return self._keys[key].by_rows

    def row_sparse_pull(
        self, key: Any, out: Any, row_ids: Any, priority: int = 0, async_op: bool = False
    ) -> Work | None:
        """Copy some rows of a stored value into ``out``: ``out[i] = value[row_ids[i]]``. Only these rows travel.

        Ids may repeat and be in any order. Workers may ask for different rows; those of a client make the same calls.

        Args:
            key: a key of at least one dimension, or a list of keys, with lists of as many ``out`` and ``row_ids``.
            out: an array of the key's dtype and of shape ``row_ids.shape + value.shape[1:]``. A list of them, one per
                device, goes with one ``row_ids`` for all or with a list of as many.
            row_ids: integers of any shape, in an array or a list.
        Raises:
            RowIndexError: an id is negative, or not below ``value.shape[0]``; ``out`` is unchanged.
            UnsupportedError: servers hold the key in pieces smaller than its rows.
            KeyNotInitializedError, ShapeMismatchError, DTypeMismatchError, KeyKindError: ``out`` is unchanged.
        """
        call = self._call("row_sparse_pull", priority, async_op)

        def prepare() -> list[Part]:
            take_numbers(call, key)
            parts = []
            for name, pairs in given.wanted(key, out, row_ids):
                state = self._match(Group(name, []), call.op)
                self._check_by_rows(call.op, state)
                outs = given.read_wanted(pairs, state.shape, state.dtype, self._where(call.op, state))
                parts.append(Part(state, [], row_outs=outs))
            for part in parts:
                self._raise_pending(part.state)
            return parts

        with self._beginning:
            parts = self._enter(call, prepare, entries_of, lambda parts: [async_op, [part.form for part in parts]])
            works = [self._start_row_pull(part, call) for part in parts]
        return self._complete(works, call)

    @abstractmethod
    def _start_row_pull(self, part: Part, call: Invocation) -> Work:
        """Fill the part's ``row_outs``."""

    def _check_by_rows(self, op: str, state: KeyState) -> None:
        """Raise if rows of the key cannot be pushed, or pulled, alone."""
        if not state.shape:
            raise ShapeMismatchError(f"{self._where(op, state)}: a key without dimensions has no rows")
        if op != "row_sparse_pull":
            try:
                optim.check_by_rows(self._rule)
            except UnsupportedError as error:
                raise UnsupportedError(f"{self._where(op, state)}: {error}") from None

    def _where(self, op: str, state: KeyState) -> str:
        return f"{op} of key {state.key!r} on worker {self.rank}"

    def _part_of_rows(self, group: Group, state: KeyState, call: Invocation, in_place: bool) -> Part:
        """What a call pushes to a key of which it has some rows; ``in_place``: results replace them."""
        self._check_by_rows(call.op, state)
        rows, outs = given.read(group.arrays, state.shape, state.dtype, self._where(call.op, state))
        return Part(state, [], rows=rows, row_outs=outs if in_place else [])

    def _row_outs(self, part: Part, group: Group, call: Invocation) -> list[given.RowOut]:
        """Where rows that the push of ``part`` changes go."""
        where = self._where(call.op, part.state)
        if part.rows is None:
            raise UnsupportedError(f"{where}: out is sparse, what is pushed is not; give a whole array")
        return given.sparse_outs(group.arrays, part.state.shape, part.state.dtype, where)

    # ---- pieces of operations

    def _sum_rows_op(
        self, part: Part, call: Invocation, then: Callable[[], None] | None = None, writes: Sequence[Variable] = ()
    ) -> Work:
        """Push: let the part's ``rows`` be the sum over the client, then call ``then``."""
        label = f"{call.op} of key {part.state.key!r}"

        def run(cause: BaseException | None) -> None:
            call.check()
            assert part.rows is not None
            if not call.reduced:
                part.rows = sum_rows(self._reduce, part.rows, part.state.dtype, call.deadline, label)
            elif call.num_joined:
                root = self._who_has_sum(call)
                part.rows = broadcast_rows(self._reduce, part.rows, root, call.deadline, label)
            if cause is not None:
                raise cause
            if then is not None:
                then()

        lane = "reduce"
        if self.mpi_size == 1:
            lane = "inline" if not call.async_op and self._nbytes(part) <= INLINE_BYTES else self._alone_lane
        return self._engine.push(
            run, reads=call.done, writes=[part.state.sent, *writes], lane=lane, name=label, no_skip=True
        )

    @staticmethod
    def _nbytes(part: Part) -> int:
        return 0 if part.rows is None else part.rows.nbytes

    def _union_op(self, part: Part, call: Invocation) -> tuple[list[Any], list[Variable]]:
        """Push: find out which ids the workers of the client want; where they will be, and what to wait for."""
        label = f"{call.op} of key {part.state.key!r}"
        ids: list[Any] = [given.union_of(part.row_outs)]
        if self.mpi_size == 1:
            return ids, []

        def run(cause: BaseException | None) -> None:
            call.check()
            ids[0] = union_of_ids(self._reduce, ids[0], call.deadline, label)
            if cause is not None:
                raise cause

        # Not ordered with pushes of the key: what waits here holds the sums of all other keys up.
        known = self._engine.variable(f"ids of {label}")
        self._engine.push(run, reads=call.done, writes=[known], lane="reduce", name=label, no_skip=True)
        return ids, [known]

    def _spread_rows_op(self, part: Part, found: Callable[[], Rows], call: Invocation) -> Work:
        """Push: the rows that the master has go to all workers of the client, and into ``row_outs``."""
        state = part.state
        label = f"{call.op} of key {state.key!r}"

        def spread() -> None:
            rows = found() if self.mpi_rank == 0 else by_rows.no_rows(state.width, state.dtype)
            self._fill(part, broadcast_rows(self._cast, rows, 0, call.deadline, label))

        if self.mpi_size > 1:
            return self._tell_op(label, [state.value], call, then=spread)
        return self._engine.push(spread, writes=[state.value], lane="cpu", name=f"{label}: copy out")

    @staticmethod
    def _fill(part: Part, rows: Rows) -> None:
        for out in part.row_outs:
            out.fill(rows, part.state.dtype)
