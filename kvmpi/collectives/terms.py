"""What one rank contributes to a sum: the vectors of its tensor, range by range or as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvmpi.arrays import address_of
from kvmpi.collectives.cross_memory import Source
from kvmpi.kernels import host

Buffer = npt.NDArray[Any]


class HostTerms:
    """Vectors in host memory, as ``ring.Terms``. Results are multiplied by ``scale``.

    Partial sums of half types are float32, unless it ``rounds`` them, too. Callers ignore floating-point warnings.
    """

    def __init__(self, vectors: Sequence[Buffer], dtype: str, scale: float = 1.0, *, rounds: bool = False) -> None:
        self._vectors, self.scale, self.dtype = vectors, scale, dtype
        self._half = dtype in host.HALF
        self._wide = self._half and not rounds
        self.sum_dtype = host.STORAGE[host.ACCUMULATE[dtype] if self._wide else dtype]

    @property
    def sources(self) -> list[Source]:
        """See ``native.Terms``."""
        return [Source(address_of(vector)) for vector in self._vectors]

    def own(self, start: int, stop: int, into: Buffer) -> Buffer:
        """See ``ring.Terms``. A single vector that need not be widened is used where it is."""
        first, *others = [vector[start:stop] for vector in self._vectors]
        if self._wide:
            host.widen(first, self.dtype, into)
            self._add_widened(into, others)
            return into
        if not others:
            return first
        host.sum_vectors(into, [first, *others], self.dtype)
        return into

    def add(self, incoming: Buffer, start: int, stop: int, into: Buffer) -> None:
        """See ``ring.Terms``."""
        if len(self._vectors) == 1 and not self._half:  # as a rule, and for each of many chunks
            np.add(incoming, self._vectors[0][start:stop], out=into)
            return
        parts = [vector[start:stop] for vector in self._vectors]
        if self._wide:
            np.copyto(into, incoming)
            self._add_widened(into, parts)
        else:
            host.sum_vectors(into, [incoming, *parts], self.dtype)

    def finish(self, incoming: Buffer, start: int, stop: int, into: Buffer) -> None:
        """See ``ring.Terms``."""
        if self._wide:
            self._add_widened(incoming, [vector[start:stop] for vector in self._vectors])
            times(incoming, self.scale)
            host.narrow(incoming, into, self.dtype)
        elif self._half:
            parts = [vector[start:stop] for vector in self._vectors]
            host.sum_vectors(into, [incoming, *parts], self.dtype, self.scale)
        else:
            self.add(incoming, start, stop, into)
            times(into, self.scale)

    def _add_widened(self, total: Buffer, parts: Sequence[Buffer]) -> None:
        for part in parts:
            host.add_widened(total, host.ACCUMULATE[self.dtype], part, self.dtype)


def times(total: Buffer, scale: float) -> None:
    """Multiply a sum in place, unless ``scale`` is 1."""
    if scale != 1.0:
        with np.errstate(all="ignore"):
            np.multiply(total, scale, out=total)
