"""``torch.futures.Future`` for what kvmpi does in the background: what DDP and its communication hooks wait for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from kvmpi.engine import Engine, Work, create_engine

#: Callbacks of futures may wait for other futures (PowerSGD's do), each of them in a thread.
_NUM_THREADS = 16
_engine: Engine | None = None
_engine_lock = threading.Lock()


def future_of(
    work: Work, value: Callable[[], Any], call_back: Callable[[Callable[[], Any]], Any] | None = None
) -> torch.futures.Future[Any]:
    """A future of ``value()`` that is set when ``work`` is done, or fails with its error.

    Args:
        call_back: runs what sets the future, and with it the future's callbacks, when called in the thread that
            finishes ``work``. By default in threads that do nothing else, so that callbacks may start and await further
            operations.
    """
    run = call_back or _run_aside
    start: torch.futures.Future[Any] = torch.futures.Future()

    def finish(_: Any) -> Any:
        work.wait()
        return value()

    # Not set_exception: what runs in C++, as DDP does, would take that for a value.
    found = start.then(finish)
    if work.done():
        start.set_result(None)
    else:
        work.add_done_callback(lambda _: run(lambda: start.set_result(None)))
    return found


def _run_aside(callback: Callable[[], Any]) -> None:
    _callbacks().push(callback, lane="futures")


def _callbacks() -> Engine:
    global _engine
    with _engine_lock:
        if _engine is None:
            _engine = create_engine()
            _engine.add_lane("futures", num_threads=_NUM_THREADS)
        return _engine
