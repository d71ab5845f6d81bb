"""Operations under way, as ``_async`` functions return them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvmpi.torch.group import GroupWork


class Handle:
    """An operation under way; ``synchronize`` waits for it and gives its result."""

    def __init__(self, works: Sequence[GroupWork], result: Callable[[], Any]) -> None:
        self._works, self._finish = works, result
        self._result: Any = None
        self._taken = False

    def done(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def wait(self) -> Any:
        """The result; the operation's error is raised here."""
        for work in self._works:
            work.wait()
        if not self._taken:
            self._result, self._taken = self._finish(), True
        return self._result

    def __call__(self) -> Any:
        """As ``wait``: Horovod's handle of a sparse reduction is a function."""
        return self.wait()


def synchronize(handle: Handle) -> Any:
    """Wait for an operation that an ``_async`` function has started; returns what its other form returns.

    Raises:
        KVTimeoutError: a rank did not make the same call within ``KVMPI_TIMEOUT_S``; names it.
        OrderMismatchError, ShapeMismatchError, DTypeMismatchError: ranks made different calls; names the difference.
    """
    return handle.wait()


def poll(handle: Handle) -> bool:
    """Whether ``synchronize`` would return at once."""
    return handle.done()


def first(handle: Handle) -> Handle:
    """The only tensor instead of a list of one."""
    inner = handle._finish
    handle._finish = lambda: inner()[0]
    return handle
