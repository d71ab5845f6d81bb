"""Checks of a store with arrays on which streams of the caller still compute, or which they still read.

On the host there are no streams, and the same calls are made without.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from device_checks import ON_GPU
from device_values import blank, host

COUNT = (16 << 20) if ON_GPU else 100_000
ADDS = 200 if ON_GPU else 3
LIBRARIES = ("cupy", "torch")


@contextlib.contextmanager
def stream_of(library: str) -> Iterator[None]:
    """A stream that does not wait for the default one, nor that for it; the current one of the library."""
    if not ON_GPU:
        yield
    elif library == "torch":
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            yield
        stream.synchronize()
    else:
        import cupy

        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            yield
        stream.synchronize()


def settle() -> None:
    if ON_GPU:
        import cupy

        cupy.cuda.Device().synchronize()


def zeros(library: str) -> Any:
    made = blank((COUNT,), library=library)
    made[...] = 0
    settle()
    return made


def add_slowly(x: Any) -> None:
    """``x += ADDS``, by kernels that are still running for a while when this returns."""
    for _ in range(ADDS):
        x += 1


def all_are(found: Any, expected: float, what: str) -> None:
    values = host(found)
    wrong = np.flatnonzero(values != expected)
    assert not wrong.size, f"{what}: {wrong.size} elements, the first {wrong[:1]} is {values[wrong[0]]}, not {expected}"


def sums_are_of_what_streams_compute(kv: Any) -> None:
    """Whoever pushes does not have to wait for the device."""
    n, keys = kv.num_workers, [f"{library}" for library in LIBRARIES]
    for library, key in zip(LIBRARIES, keys, strict=True):
        x, y, out = zeros(library), zeros(library), zeros(library)
        with stream_of(library):
            add_slowly(x)
            kv.init(key, x)
            kv.pull(key, out)
        all_are(out, ADDS, f"{library}: init")
        with stream_of(library):
            add_slowly(x)
            kv.push(key, x)
            kv.pull(key, out)
        all_are(out, n * 2 * ADDS, f"{library}: push")
        with stream_of(library):
            add_slowly(x)
            add_slowly(y)
            work = kv.push(key, [x, y], async_op=True)
            work.wait()
            kv.pull(key, out)
        all_are(out, n * 4 * ADDS, f"{library}: push of two vectors, later")
        with stream_of(library):
            add_slowly(y)
            kv.pushpull(key, y)
        all_are(y, n * 2 * ADDS, f"{library}: pushpull in place")
        if kv.is_capable("allreduce"):
            for async_op in (False, True):
                x = zeros(library)
                with stream_of(library):
                    add_slowly(x)
                    work = kv.allreduce(key, x, async_op=async_op)
                    if work is not None:
                        work.wait()
                all_are(x, n * ADDS, f"{library}: allreduce, async_op={async_op}")
        x, view = zeros(library), blank((COUNT // 2, 2), library=library)
        turned = view.t() if library == "torch" else view.T
        turned[...] = 0
        settle()
        with stream_of(library):
            add_slowly(turned)
            kv.init(f"{key} turned", turned)
            kv.push(f"{key} turned", turned)
            out = blank((2, COUNT // 2), library=library)
            kv.pull(f"{key} turned", out)
        all_are(out, n * ADDS, f"{library}: push of a transposed array")


def what_is_still_read_is_not_overwritten(kv: Any) -> None:
    """Kernels that are queued before a call read what was there before it."""
    n = kv.num_workers
    for library in LIBRARIES:
        x, slow, before = zeros(library), zeros(library), zeros(library)
        x[...] = 5
        settle()
        kv.init(library, x)
        settle()

        def pull(key: str, out: Any) -> None:
            kv.pull(key, out)

        def pull_later(key: str, out: Any) -> None:
            kv.pull(key, out, async_op=True).wait()

        def pushpull(key: str, out: Any, value: Any = x) -> None:
            kv.pushpull(key, value, out)

        def pull_into_two(key: str, out: Any) -> None:
            kv.pull(key, [out, np.empty(COUNT, "f4")])

        for call in (pull, pull_later, pushpull, pull_into_two):
            out = zeros(library)
            out[...] = 9
            settle()
            with stream_of(library):
                add_slowly(slow)
                before[...] = out
                call(library, out)
            all_are(before, 9, f"{library}, {call.__name__}: what was there before")
            expected = 5 * n if call in (pushpull, pull_into_two) else 5
            all_are(out, expected, f"{library}, {call.__name__}: what has come")


def results_are_there_for_all_streams(kv: Any) -> None:
    """When a call has returned, whatever stream reads ``out``; and whatever stream changes what was pushed."""
    n = kv.num_workers
    for library in LIBRARIES:
        x = zeros(library)
        x[...] = 3
        settle()
        kv.init(library, x)
        out, copy = zeros(library), zeros(library)
        with stream_of(library):
            kv.pull(library, out)
            with stream_of(library):
                copy[...] = out
        all_are(copy, 3, f"{library}: what another stream reads")
        with stream_of(library):
            kv.push(library, x)
            with stream_of(library):
                x[...] = -1
            kv.pull(library, out)
        all_are(out, 3 * n, f"{library}: what was pushed before another stream has written there")
        out[...] = 4
        settle()
        with stream_of(library):
            kv.pushpull(library, out)
            out += 1
        all_are(out, 4 * n + 1, f"{library}: what the caller's stream goes on with")


def memory_that_is_freed_at_once(kv: Any) -> None:
    """What was pushed, and temporary copies of it, go back to pools while others take memory from there."""
    n = kv.num_workers
    for library in LIBRARIES:
        first, second = zeros(library), zeros(library)
        kv.init([f"{library} 1", f"{library} 2"], [first, second])
        for turn in range(4):
            with stream_of(library):
                works = []
                for key in (1, 2):
                    made = blank((COUNT,), library=library)
                    made[...] = turn + key
                    works.append(kv.push(f"{library} {key}", made, async_op=True))
                    del made
                    junk = blank((COUNT,), library=library)
                    junk += 1
                    del junk
                for work in works:
                    work.wait()
            kv.pull([f"{library} 1", f"{library} 2"], [first, second])
            all_are(first, n * (turn + 1), f"{library}: turn {turn}")
            all_are(second, n * (turn + 2), f"{library}: turn {turn}")


STREAM_CHECKS: list[Callable[[Any], None]] = [
    sums_are_of_what_streams_compute, what_is_still_read_is_not_overwritten, results_are_there_for_all_streams,
    memory_that_is_freed_at_once,
]  # fmt: skip
