"""Values that come from servers: one on its way, and where a pulled one goes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt

from kvmpi import arrays
from kvmpi.engine import Work
from kvmpi.kernels import host
from kvmpi.ps import Landing
from kvmpi.store.call import KeyState
from kvmpi.trace import timeline

Buffer = npt.NDArray[Any]


@dataclass(slots=True)
class Answer:
    """The value of the round of a push, on its way; ``work`` is done when all of it has landed."""

    landing: Landing
    work: Work = field(default_factory=Work)


class Target:
    """Where a pulled value goes: into the first array of ``out`` that is plain host memory, from there to the rest."""

    __slots__ = ("_key", "_outs", "buffer", "complete")

    def __init__(self, state: KeyState, outs: list[Any]) -> None:
        self._key = state.key
        self.buffer: Buffer
        self._outs: list[Any] = []
        direct = None
        for out in {id(out): out for out in outs}.values():
            vector = arrays.read(out) if direct is None else None
            if vector is not None and vector.on_host and vector.shared:
                direct = vector.buffer
            else:
                self._outs.append(out)
        self.buffer = host.empty(state.count, state.dtype) if direct is None else direct
        self.complete = not self._outs

    def spread(self) -> None:
        start_ns = timeline.now() if timeline.on and self._outs else 0
        for out in self._outs:
            arrays.write(out, self.buffer)
        if start_ns:
            timeline.span("copy", start_ns, self._key, nbytes=len(self._outs) * self.buffer.nbytes)
