"""The sum of all vectors of all ranks of a host, each read from where it lies when it is added."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvmpi.collectives.algorithm import Act, Tensor
from kvmpi.collectives.cross_memory import address_of
from kvmpi.collectives.host_group import IN_ARENA, MAX_PLACES, HostGroup
from kvmpi.collectives.ring import Range, Scratch
from kvmpi.kernels import host

Buffer = npt.NDArray[Any]

#: A block and what is added to it stay in a core's cache.
BLOCK_BYTES = 256 << 10


class Piece(NamedTuple):
    """A range of one of several tensors; ``at`` is where it begins in a range of all of them, end to end."""

    tensor: int
    start: int
    stop: int
    at: int


class Cut:
    """Several tensors end to end: which range of which tensor a range of all of them is."""

    def __init__(self, counts: Sequence[int]) -> None:
        self._bounds = [0, *accumulate(counts)]
        self.count = self._bounds[-1]
        self._single = len(counts) == 1

    def pieces(self, start: int, stop: int) -> Sequence[Piece]:
        if self._single:
            return (Piece(0, start, stop, 0),)
        return list(self._pieces(start, stop))

    def _pieces(self, start: int, stop: int) -> Iterator[Piece]:
        first = int(np.searchsorted(self._bounds, start, "right")) - 1
        for tensor in range(first, len(self._bounds) - 1):
            low, high = self._bounds[tensor : tensor + 2]
            if low >= stop:
                return
            a, b = max(start, low), min(stop, high)
            if a < b:
                yield Piece(tensor, a - low, b - low, a - start)


class Posted:
    """What the ranks of a host have posted for a call: of each tensor, the place of a result and of its vectors.

    Args:
        tensors: this rank's; where others cannot read private memory, scratch stands in for what is posted.
        with_results: whether others read results where this rank puts them.
        own: which elements of results are there already.
        wait_for: the ranks of which that is to be known; by default all.
    Raises:
        KVTimeoutError: one of them did not begin this call.
    """

    def __init__(
        self, group: HostGroup, tensors: Sequence[Tensor], act: Act, *, with_results: bool = True,
        own: slice = slice(0, 0), wait_for: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        self._group = group
        self.results: list[Buffer] = []
        places: list[int] = []
        for tensor in tensors:
            result, place = self._reachable(tensor.out, act, own) if with_results else (tensor.out, 0)
            self.results.append(result)
            places.append(place)
            places += [self._reachable(vector, act, slice(None))[1] for vector in tensor.vectors]
        group.begin(act.deadline, act.describe)
        group.post([len(places), *(len(tensor.vectors) for tensor in tensors), *places])
        awaited = group.others if wait_for is None else wait_for
        group.await_posts(awaited, act.deadline, act.describe)
        self._places: dict[int, list[list[int]]] = {}
        for rank in (group.index, *awaited):
            num_places = group.places_of(rank, 1)[0]
            words = iter(group.places_of(rank, 1 + len(tensors) + num_places)[1:])
            numbers = [next(words) for _ in tensors]
            self._places[rank] = [[next(words) for _ in range(1 + number)] for number in numbers]

    def _reachable(self, buffer: Buffer, act: Act, present: slice) -> tuple[Buffer, int]:
        """``buffer`` and the place to post; or what stands in for it, with a copy of the elements ``present``."""
        place = self._group.place_of(buffer)
        if place is not None:
            return buffer, place
        if self._group.attaches:
            return buffer, address_of(buffer)
        stand_in = act.scratch(buffer.size, buffer.dtype)
        place = self._group.place_of(stand_in)
        assert place is not None, "no room in the arena for data that has to be staged"
        np.copyto(stand_in[present], buffer[present])
        return stand_in, place

    def result_of(self, rank: int, tensor: int) -> int | None:
        """Where ``rank`` puts its part of a result; None if that is this rank's own result."""
        place = self._places[rank][tensor][0]
        return None if place & IN_ARENA and place == self._places[self._group.index][tensor][0] else place

    def vectors_of(self, rank: int, tensor: int) -> list[int]:
        """Where the vectors of one of ``rank``'s tensors are."""
        return self._places[rank][tensor][1:]

    def copy_result(self, rank: int, tensor: int, part: slice, out: Buffer) -> None:
        """``out[part]`` becomes ``rank``'s result there."""
        place = self.result_of(rank, tensor)
        if place is not None:
            found = self._group.fetch(rank, place, part, out[part])
            if not np.may_share_memory(found, out[part]):
                np.copyto(out[part], found)


def fits(tensors: Sequence[Tensor]) -> bool:
    """Whether there is room to post so many."""
    return 1 + sum(2 + len(tensor.vectors) for tensor in tensors) <= MAX_PLACES


class HostSum:
    """The vectors of all ranks of a host, this rank's first, as ``ring.Terms`` of all tensors end to end."""

    def __init__(
        self, group: HostGroup, posted: Posted, tensors: Sequence[Tensor], dtype: str, block_bytes: int,
        scratch: Scratch,
    ) -> None:  # fmt: skip
        self._group, self._posted, self._tensors, self._dtype = group, posted, tensors, dtype
        self._half = dtype in host.HALF
        self.sum_dtype = host.STORAGE[host.ACCUMULATE[dtype]]
        storage = host.STORAGE[dtype]
        self.cut = Cut([tensor.vectors[0].size for tensor in tensors])
        self.block_count = max(1, block_bytes // storage.itemsize)
        longest = min(self.block_count, self.cut.count)
        self._fetched = scratch(longest, storage)
        self._wide = scratch(longest if self._half else 0, np.float32)

    def own(self, start: int, stop: int, into: Buffer) -> Buffer:
        """See ``ring.Terms``: what this host contributes."""
        self._run(None, start, stop, into, narrow=False)
        return into

    def add(self, incoming: Buffer, start: int, stop: int, into: Buffer) -> None:
        """See ``ring.Terms``."""
        self._run(incoming, start, stop, into, narrow=False)

    def finish(self, incoming: Buffer | None, start: int, stop: int, into: Buffer) -> None:
        """See ``ring.Terms``. Without ``incoming``, the result is what this host contributes."""
        self._run(incoming, start, stop, into, narrow=self._half)

    def _run(self, incoming: Buffer | None, start: int, stop: int, into: Buffer, *, narrow: bool) -> None:
        with np.errstate(all="ignore"):
            for first in range(start, stop, self.block_count):
                last = min(first + self.block_count, stop)
                target = into[first - start : last - start]
                before = None if incoming is None else incoming[first - start : last - start]
                self._sum_block(before, first, last, self._wide[: last - first] if narrow else target)
                if narrow:
                    host.narrow(self._wide[: last - first], target, self._dtype)

    def _sum_block(self, before: Buffer | None, start: int, stop: int, target: Buffer) -> None:
        """``target`` becomes ``before`` plus this block of every vector of every rank."""
        pieces = self.cut.pieces(start, stop)
        totals: list[Buffer] = []
        for piece in pieces:
            part = target[piece.at : piece.at + piece.stop - piece.start]
            own = [vector[piece.start : piece.stop] for vector in self._tensors[piece.tensor].vectors]
            if self._half:
                if before is None:
                    host.widen(own.pop(0), self._dtype, part)
                else:
                    np.copyto(part, before[piece.at : piece.at + part.size])
                total = part
            else:
                total = own.pop(0) if before is None else before[piece.at : piece.at + part.size]
            for term in own:
                total = self._plus(total, term, part)
            totals.append(total)
        for peer in self._group.others:
            self._add_vectors_of(peer, pieces, totals, target)
        if not self._half:
            for piece, total in zip(pieces, totals, strict=True):
                part = target[piece.at : piece.at + total.size]
                if total.ctypes.data != part.ctypes.data:
                    np.copyto(part, total)

    def _add_vectors_of(self, peer: int, pieces: Sequence[Piece], totals: list[Buffer], target: Buffer) -> None:
        places = [self._posted.vectors_of(peer, piece.tensor) for piece in pieces]
        for number in range(max(map(len, places))):
            self._fetch_private(peer, number, pieces, places)
            for i, piece in enumerate(pieces):
                if number < len(places[i]):
                    count = piece.stop - piece.start
                    into = self._fetched[piece.at : piece.at + count]
                    place = places[i][number]
                    if place & IN_ARENA:
                        into = self._group.fetch(peer, place, slice(piece.start, piece.stop), into)
                    totals[i] = self._plus(totals[i], into, target[piece.at : piece.at + count])

    def _fetch_private(self, peer: int, number: int, pieces: Sequence[Piece], places: Sequence[Sequence[int]]) -> None:
        """All pieces of ``peer``'s vectors of this number that lie in private memory, each run with one system call."""
        itemsize = self._fetched.itemsize
        run: list[tuple[int, int]] = []
        first = end = 0
        for i, piece in enumerate(pieces):
            if number < len(places[i]) and not places[i][number] & IN_ARENA:
                if not run or piece.at != end:
                    if run:
                        self._group.fetch_private(peer, run, self._fetched[first:end])
                    run, first = [], piece.at
                end = piece.at + piece.stop - piece.start
                run.append((places[i][number] + piece.start * itemsize, (piece.stop - piece.start) * itemsize))
        if run:
            self._group.fetch_private(peer, run, self._fetched[first:end])

    def _plus(self, total: Buffer, term: Buffer, target: Buffer) -> Buffer:
        if self._half:
            host.add_widened(target, "float32", term, self._dtype)
        else:
            np.add(total, term, out=target)
        return target


class Copies:
    """A ``ring.Machine`` that copies a rank's results as they become final: to ``out``, from there to ``copies``.

    Args:
        order: ranges of all tensors end to end, in the order in which they are announced by ``HostGroup.advance``.
    """

    def __init__(
        self, group: HostGroup, peer: int, posted: Posted, tensors: Sequence[Tensor], cut: Cut, order: Sequence[Range]
    ) -> None:
        self._group, self._peer, self._posted, self._tensors = group, peer, posted, tensors
        self._cut, self._order = cut, order
        self._taken = 0

    @property
    def done(self) -> bool:
        return self._taken == len(self._order)

    def stuck(self) -> str:
        return f"MPI rank {self._group.members[self._peer]} did not sum its part"

    def advance(self) -> bool:
        ready = min(self._group.blocks_of(self._peer), len(self._order))
        if ready == self._taken:
            return False
        while self._taken < ready:
            start, stop = self._order[self._taken]
            self._taken += 1
            while self._taken < ready and self._order[self._taken][0] == stop:
                stop = self._order[self._taken][1]
                self._taken += 1
            for piece in self._cut.pieces(start, stop) if start < stop else ():
                self._copy(piece)
        return True

    def _copy(self, piece: Piece) -> None:
        tensor, part = self._tensors[piece.tensor], slice(piece.start, piece.stop)
        self._posted.copy_result(self._peer, piece.tensor, part, tensor.out)
        for copy in tensor.copies:
            np.copyto(copy[part], tensor.out[part])
