"""Numbers that show whether every element of every rank arrived once, in its place: their sums are exact.

Needs nothing but NumPy: workers of other systems, in environments without kvmpi, use this file too.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

#: Up to here a dtype holds every integer; wider types hold more than is needed.
_LARGEST = {"int8": 127, "uint8": 255, "bfloat16": 256, "float16": 2048}
_TILE_COUNT = 1 << 15


class Pattern:
    """Small integers by rank, vector and index: element ``i`` of a vector is ``i % modulus + offset``.

    Partial sums of up to ``num_terms`` vectors stay exact in ``dtype``, in whatever order and precision they are added.
    The modulus is a prime, so that an element that a power of two shifts, or a segment mistaken for another, shows.
    """

    def __init__(self, dtype: str, num_terms: int) -> None:
        self._dtype = dtype
        largest = _LARGEST.get(dtype, 1 << 15) // num_terms
        self._num_offsets = 4 if largest >= 4 else 2
        primes = [prime for prime in (2, 3, 5, 7, 11) if prime - 1 + self._num_offsets - 1 <= largest]
        self.modulus = primes[-1] if primes else 2
        repeats = -(-_TILE_COUNT // self.modulus)
        self._index = np.tile(np.arange(self.modulus, dtype=np.int64), repeats)

    def offset(self, term: int) -> int:
        """What tells vector ``term`` (counted over all ranks) from others."""
        return term % self._num_offsets

    def fill(self, buffer: Array, start: int, term: int) -> None:
        """Make ``buffer`` the elements from index ``start`` on of vector ``term``."""
        tile = self._tile(start, 1, self.offset(term))
        for first in range(0, buffer.size, tile.size):
            part = buffer[first : first + tile.size]
            part[:] = tile[: part.size]

    def totals(self, start: int, terms: range, times: int = 1) -> Array:
        """The sums of the vectors ``terms``, each taken ``times`` times, from index ``start`` on: as many as repeat."""
        return self._tile(start, times * len(terms), times * sum(map(self.offset, terms)))

    def wrong(self, buffer: Array, start: int, terms: range, times: int = 1) -> int:
        """How many elements are not those of ``totals``."""
        tile = self.totals(start, terms, times)
        bad = 0
        for first in range(0, buffer.size, tile.size):
            part = buffer[first : first + tile.size]
            bad += int(np.count_nonzero(part != tile[: part.size]))
        return bad

    def _tile(self, start: int, factor: int, constant: int) -> Array:
        values = factor * ((self._index + start) % self.modulus) + constant
        if self._dtype == "bfloat16":
            return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        return values.astype(self._dtype)


def poison(buffer: Array) -> None:
    """Make sure that no earlier result can pass for this one."""
    buffer.view(np.uint8)[:] = 0xFE
