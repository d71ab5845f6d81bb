"""What an asynchronous operation of a process group returns."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Work as _TorchWork  # torch.distributed has it only of late

from kvmpi.collectives.transfers import Transfer
from kvmpi.compiling import methods_not_compiled
from kvmpi.engine import Work
from kvmpi.torch.futures import future_of

#: Before torch 2.7, C++ that asks Python for a Work, as DistributedDataParallel does, holds its C++ half alone, and
#: waits for ever once Python's is gone (https://github.com/pytorch/pytorch/pull/146376). So they are held here until
#: somebody waits for them, which C++ does soon; of those for which nobody ever waits, only the last few.
_held: deque[GroupWork] | None = (
    deque(maxlen=64) if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 7) else None
)


@methods_not_compiled
class GroupWork(_TorchWork):
    """A ``torch.distributed.Work`` over a Work of kvmpi.

    Args:
        results: what the future holds.
        call_back: as of ``future_of``.
    """

    def __init__(
        self, work: Work, results: Sequence[Any] = (), call_back: Callable[[Callable[[], Any]], Any] | None = None
    ) -> None:
        super().__init__()
        self._work, self._results, self._call_back = work, results, call_back
        self._future: torch.futures.Future[Any] | None = None
        if _held is not None:
            _held.append(self)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when the operation is done; its error is raised here."""
        self._let_go()
        seconds = None if timeout is None or timeout <= timedelta(0) else timeout.total_seconds()
        self._work.wait(seconds)
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        if isinstance(self._work, Transfer):
            return self._work.poll()
        return self._work.done()

    def is_success(self) -> bool:
        return self.is_completed() and self._work.error() is None

    def exception(self) -> BaseException | None:
        return self._work.error()

    def result(self) -> list[Any]:
        self.wait()
        return list(self._results)

    def get_future(self) -> torch.futures.Future[Any]:
        self._let_go()
        if self._future is None:
            self._future = future_of(self._work, lambda: list(self._results), self._call_back)
        return self._future

    def _let_go(self) -> None:
        if _held is not None:
            with contextlib.suppress(ValueError):  # waited for before
                _held.remove(self)

    def source_rank(self) -> int:
        self.wait()
        assert isinstance(self._work, Transfer), "only messages have a source"
        return self._work.source

    _source_rank = source_rank
