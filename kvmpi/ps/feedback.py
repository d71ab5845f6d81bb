"""What quantized pushes of a key have not said yet: it is added to the next push."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvmpi.ps.codec import Quantizer

Buffer = npt.NDArray[Any]

_LARGEST = np.finfo(np.float32).max


class Feedback:
    """The error of one float32 key of ``count`` elements. It changes only with a push that counts.

    A push that fails and is made again is quantized again, from the error that there was before it: servers that had it
    already, and take the second for a repetition, have then the same. Chunks that were answered are not: what was
    pushed there may have been overwritten by the answer, and servers pass over what is said now.
    """

    def __init__(self, codec: Quantizer, count: int) -> None:
        self._codec = codec
        self._residual = np.zeros(count, np.float32)
        self._left = np.empty(count, np.float32)  # by the push under way
        self._encoded: dict[int, Sequence[Buffer]] = {}  # by the first element of the chunk
        self._answered: set[int] = set()

    def payloads(self, where: slice, chunk: Buffer) -> Callable[[], Sequence[Buffer]]:
        """What gives the payloads for elements ``where`` of the next push, the same however often it is asked."""

        def encoded() -> Sequence[Buffer]:
            if where.start not in self._encoded:
                quantized = self._codec.quantize(chunk, self._residual[where], self._left[where])
                self._encoded[where.start] = (quantized,)
            return self._encoded[where.start]

        return encoded

    def restore(self, where: slice) -> None:
        """What was said last of elements ``where`` nobody has used: they are as they were before it.

        To be called when that push is over and counts, before the next one.
        """
        self._residual[where] = self._left[where]

    def take(self, where: slice) -> Buffer:
        """What is still to be said of elements ``where``, for somebody else to say it."""
        taken = self._residual[where].copy()
        self._residual[where] = 0
        return taken

    def add(self, where: slice, values: Buffer) -> None:
        """This is to be said of elements ``where``, too."""
        with np.errstate(over="ignore"):
            self._residual[where] += values
        np.clip(self._residual[where], -_LARGEST, _LARGEST, out=self._residual[where])

    def note_answer(self, where: slice) -> None:
        """The server has what was said of elements ``where``."""
        self._answered.add(where.start)

    def settle(self, chunks: Sequence[slice], *, counts: bool) -> None:
        """The push is over. ``chunks``: all of the key; ``counts``: the next one is no repetition of it."""
        if counts and self._encoded:  # else it was of rows
            for where in chunks:
                if where.start not in self._encoded:
                    self._left[where] = self._residual[where]
            self._residual, self._left = self._left, self._residual
        if counts:
            self._answered.clear()
        self._encoded = {start: codes for start, codes in self._encoded.items() if start in self._answered}
