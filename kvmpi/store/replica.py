"""A worker's copy of one key with what its rule remembers, of all elements or of this worker's share: arithmetic."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

from kvmpi import optim
from kvmpi.kernels import host
from kvmpi.kernels import rows as by_rows
from kvmpi.kernels.rows import Rows

Buffer = npt.NDArray[Any]


class Replica:
    """One key.

    Attributes:
        value: shape ``(count,)``, storage dtype.
        common: the workers of a host share that memory, and write the same there.
        shown: a read-only array that the program has, and the memory that it shows: that of ``value`` by then.
        state: what the rule remembers, by name, of the elements ``share``; likewise ``master``, the float32 copy of a
            half type, if there is one.
        share: the elements that this worker updates; None: all of them.
        stale: of ``value`` only that share is up to date.
        updates: so many there have been.
    """

    __slots__ = ("common", "dtype", "master", "share", "shown", "stale", "state", "updates", "value")

    def __init__(self, value: Buffer, dtype: str, *, common: bool) -> None:
        self.value, self.dtype, self.common = value, dtype, common
        self.shown: tuple[Any, Buffer] | None = None
        self.forget()
        self.stale = False

    def forget(self) -> None:
        """A rule begins without a memory."""
        self.state: dict[str, Buffer] = {}
        self.master: Buffer | None = None
        self.share: slice | None = None
        self.updates = 0

    def keep_apart(self) -> None:
        """Every worker changes the value by itself from now on: each needs its own."""
        if self.common:
            self.value, self.common, self.shown = self.value.copy(), False, None

    def narrow_to(self, share: slice) -> None:
        """This worker updates no more than ``share`` from now on."""
        if self.share is None:
            state = {name: array[share].copy() for name, array in self.state.items()}
            master = None if self.master is None else self.master[share].copy()
            self.state, self.master, self.share = state, master, share  # or, where there is no room, nothing

    @property
    def is_parted(self) -> bool:
        """Whether other workers have something of the key that this one has not."""
        return self.stale or self.share is not None

    def signature(self) -> int:
        """A number that is another on a worker that has made other updates, or remembers something else of them."""
        kept = {**self.state, "master": self.master}
        kinds = sorted((name, str(array.dtype)) for name, array in kept.items() if array is not None)
        return 1 + zlib.crc32(repr((self.updates, kinds)).encode())

    def widen(self) -> dict[str, Buffer]:
        """Room for all elements of what this worker has a share of, by name, with that share in its place.

        The caller fills in the rest, and says so with ``widened``.
        """
        found = {"value": self.value} if self.stale else {}
        if self.share is not None:
            arrays = self.state if self.master is None else {**self.state, "master": self.master}
            for name, array in arrays.items():
                found[name] = np.empty(self.value.size, array.dtype)
                found[name][self.share] = array
        return found

    def widened(self, found: dict[str, Buffer]) -> None:
        """What ``widen`` returned is whole."""
        if self.share is not None:
            self.master = found.get("master")
            self.state = {name: found[name] for name in self.state}
        self.share, self.stale = None, False

    def apply(self, rule: optim.Rule, pushed: Buffer) -> None:
        """Update the elements of this worker.

        Args:
            pushed: their sum, in storage dtype.
        Raises:
            KVError: the rule does not take it; nothing has changed.
        """
        own = self.value if self.share is None else self.value[self.share]
        self._prepare_master(rule, own)
        step = self.updates + 1
        optim.update(
            rule, own, self.dtype, _as_accumulated(pushed, self.dtype), self.state, step,
            master=self.master,
        )  # fmt: skip
        self.updates = step

    def apply_rows(self, rule: optim.Rule, rows: Rows) -> None:
        """Update some rows, of all of which this worker has all."""
        assert self.share is None
        self._prepare_master(rule, self.value)
        step = self.updates + 1
        wide = Rows(rows.ids, by_rows.widened(rows.values, self.dtype))
        optim.update_rows(rule, self.value, self.dtype, wide, self.state, step, master=self.master)
        self.updates = step

    def _prepare_master(self, rule: optim.Rule, own: Buffer) -> None:
        if not rule.multi_precision:
            self.master = None
        elif self.dtype in host.HALF and self.master is None:
            self.master = optim.make_master(own, self.dtype)


def _as_accumulated(buffer: Buffer, dtype: str) -> Buffer:
    """``buffer`` in the dtype in which rules compute; itself where that is its own."""
    if dtype not in host.HALF:
        return buffer
    wide = np.empty(buffer.size, dtype=np.float32)
    host.widen(buffer, dtype, wide)
    return wide
