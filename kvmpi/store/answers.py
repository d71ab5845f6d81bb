"""Values that come from servers: one on its way, where a pulled one goes, and which of them go together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy.typing as npt

from kvmpi import arrays
from kvmpi.engine import Work
from kvmpi.kernels import host
from kvmpi.ps import Landing
from kvmpi.store.call import Invocation, KeyState, Part, deliver
from kvmpi.trace import timeline

Buffer = npt.NDArray[Any]
T = TypeVar("T")

#: Values up to this size go together with others.
_SMALL_BYTES = 64 << 10
_MOST_ASKED, _ASKED_BYTES = 16, 256 << 10


class Answer(msgspec.Struct):
    """The value of the round of a push, on its way; ``work`` is done when all of it has landed."""

    landing: Landing
    work: Work


class Target:
    """Where a pulled value goes: into the first array of ``outs`` that is plain host memory, from there to the rest."""

    __slots__ = ("_call", "_key", "_outs", "buffer", "complete")

    def __init__(self, part: Part, call: Invocation) -> None:
        self._key, self._call = part.state.key, call
        self._outs: list[Any] = []
        direct: Buffer | None = None
        for out in {id(out): out for out in part.outs}.values():
            if direct is None:
                direct = part.direct.get(id(out))
                if direct is None and (memory := arrays.memory_of(out)) is not None:
                    direct = memory.buffer
                if direct is not None:
                    continue
            self._outs.append(out)
        self.buffer: Buffer = self._memory(part.state) if direct is None else direct
        self.complete = not self._outs

    def _memory(self, state: KeyState) -> Buffer:
        if all(arrays.device_memory_of(out) is None for out in self._outs):
            return host.empty(state.count, state.dtype)
        from kvmpi.kernels import gpu

        return gpu.pinned_empty(state.count, state.dtype)

    def spread(self) -> None:
        start_ns = timeline.now() if timeline.on and self._outs else 0
        self._call.await_devices()
        deliver(self._outs, self.buffer)
        if start_ns:
            timeline.span("copy", start_ns, self._key, nbytes=len(self._outs) * self.buffer.nbytes)


class Coming(NamedTuple):
    """A value that servers were asked for: where it goes, and on the master the Work that is done when it is there."""

    state: KeyState
    target: Target
    work: Work


def together(
    items: Sequence[T], nbytes_of: Callable[[T], int], room_bytes: int = _ASKED_BYTES, most: int = _MOST_ASKED
) -> list[list[T]]:
    """Small ones together, at most so many in so many bytes, and others each by itself: by sizes and their order alone,
    so that all workers agree. As given, what servers are asked for at once: the first are on their way while others are
    got ready."""
    found: list[list[T]] = []
    room = 0
    for item in items:
        nbytes = nbytes_of(item)
        if not found or nbytes > min(room, _SMALL_BYTES) or len(found[-1]) >= most:
            found.append([])
            room = room_bytes if nbytes <= _SMALL_BYTES else 0
        found[-1].append(item)
        room -= nbytes
    return found
