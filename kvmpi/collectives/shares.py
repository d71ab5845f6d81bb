"""The share that each rank has of every tensor, and how shares of several lie in one piece of memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy.typing as npt

Buffer = npt.NDArray[Any]


def share_of(count: int, size: int, rank: int) -> slice:
    """Which elements of ``count`` are those of ``rank``; the last ranks may have fewer than others, or none.

    It depends on nothing but these numbers: not on which tensors are summed together.
    """
    length = -(-count // size)
    return slice(min(rank * length, count), min((rank + 1) * length, count))


class Shares:
    """Tensors of ``counts`` elements in one piece of memory: rank 0's share of each, then rank 1's, and so on.

    All ranks have as much room there, so that it can be scattered and gathered as one tensor. What a share lacks to the
    length of the longest of its tensor is not defined.

    Attributes:
        length: elements of one rank.
        count: of all.
    """

    def __init__(self, counts: Sequence[int], size: int) -> None:
        self._size, self._counts = size, counts
        self._lengths = [-(-count // size) for count in counts]
        self.length = sum(self._lengths)
        self.count = self.length * size

    def pack(self, tensors: Sequence[Buffer | None], packed: Buffer) -> None:
        """Copy tensors of shape ``(count,)`` to their places; None stands for zeros."""
        for tensor, (there, own) in zip(tensors, self._places(packed), strict=True):
            for place, part in zip(there, own, strict=True):
                place[...] = 0 if tensor is None else tensor[part].reshape(place.shape)

    def unpack(self, packed: Buffer, tensors: Sequence[Sequence[Buffer]]) -> None:
        """Copy each tensor from its places into every array of its list."""
        for targets, (there, own) in zip(tensors, self._places(packed), strict=True):
            for place, part in zip(there, own, strict=True):
                for target in targets:
                    target[part].reshape(place.shape)[...] = place

    def split(self, own: Buffer, rank: int) -> list[Buffer]:
        """Of one rank's part of packed memory, shape ``(length,)``, the share of each tensor."""
        found, start = list[Buffer](), 0
        for count, length in zip(self._counts, self._lengths, strict=True):
            share = share_of(count, self._size, rank)
            found.append(own[start : start + share.stop - share.start])
            start += length
        return found

    def _places(self, packed: Buffer) -> Iterator[tuple[list[Buffer], list[slice]]]:
        """Of each tensor the shares of all ranks as views of ``packed``, and where they are in the tensor: those that
        are whole as one view of two dimensions, what is left as another."""
        rows = packed.reshape(self._size, self.length)
        start = 0
        for count, length in zip(self._counts, self._lengths, strict=True):
            num_whole, rest = divmod(count, length) if length else (0, 0)
            there, own = [rows[:num_whole, start : start + length]], [slice(0, num_whole * length)]
            if rest:
                there.append(rows[num_whole, start : start + rest])
                own.append(slice(num_whole * length, count))
            yield there, own
            start += length
