"""Sums over the ranks of a host: who sums which pieces, out of vectors read where they lie, and who copies results."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvmpi.arrays import address_of
from kvmpi.collectives.algorithm import Act, Tensor
from kvmpi.collectives.cross_memory import Source
from kvmpi.collectives.handover import hand_over
from kvmpi.collectives.host_group import MAX_PLACES, HostGroup
from kvmpi.collectives.schedule import Range, segment_bounds
from kvmpi.collectives.terms import times
from kvmpi.errors import ranks_in_words
from kvmpi.kernels import host

Buffer = npt.NDArray[Any]
#: Of one tensor of one rank: where its result goes, and where its vectors are.
Places = tuple[list[int], list[int]]

#: Vectors of a tensor for which there is room in any case.
MOST_VECTORS = 8
#: A block and what is added to it stay in a core's cache.
BLOCK_BYTES = 1 << 20
#: A word says how many places for a result follow, and below this bit how many of vectors.
_HEAD_BITS = 32
ONE_OF_EACH = 1 << _HEAD_BITS | 1


class Piece(NamedTuple):
    """A range of one of several tensors."""

    tensor: int
    start: int
    stop: int


@functools.lru_cache(maxsize=256)
def pieces_of(counts: tuple[int, ...], num_ranks: int, block_count: int) -> list[list[Piece]]:
    """Which pieces, of at most ``block_count`` elements, each rank sums of tensors that lie end to end."""
    found: list[list[Piece]] = []
    tensor, low = 0, 0
    for start, stop in segment_bounds(sum(counts), num_ranks):
        found.append([])
        while start < stop:
            while start >= low + counts[tensor]:
                low += counts[tensor]
                tensor += 1
            end = min(stop, low + counts[tensor])
            blocks = segment_bounds(end - start, -(-(end - start) // block_count))
            found[-1] += [Piece(tensor, start - low + a, start - low + b) for a, b in blocks]
            start = end
    return found


def parts_of(pieces: Sequence[Piece], num_tensors: int) -> list[slice]:
    """By tensor: what one rank's pieces of it are together; they follow each other."""
    found = [slice(0, 0)] * num_tensors
    for number, start, stop in pieces:
        first = found[number]
        found[number] = slice(first.start if first.stop == start != 0 else start, stop)
    return found


class Posted:
    """What the ranks of a host have posted for a call: of each tensor, places of its vectors and of its result.

    Others read at both. Where they cannot reach private memory, scratch stands in for what is posted.

    Args:
        tensors: this rank's.
        with_results: whether others have to do with results where this rank puts them.
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
        #: By tensor: where this rank puts the result.
        self.results: list[Buffer] = []
        mine: list[Places] = []
        for tensor in tensors:
            vectors = [self._reachable(vector, act, slice(None))[1] for vector in tensor.vectors]
            result, place = self._reachable(tensor.out, act, own) if with_results else (tensor.out, 0)
            self.results.append(result)
            mine.append(([place], vectors))
        #: By rank and tensor.
        self.places = _exchange_places(group, mine, act, group.others if wait_for is None else wait_for)

    def _reachable(self, buffer: Buffer, act: Act, present: slice) -> tuple[Buffer, int]:
        """``buffer`` and the place to post; or what stands in for it, with a copy of the elements ``present``."""
        place = self._group.place_of(buffer)
        if place is not None:
            return buffer, place
        if self._group.attaches:
            return buffer, address_of(buffer)
        stand_in, place = _stand_in(self._group, buffer, act)
        assert place is not None
        hand_over(stand_in[present], buffer[present])
        return stand_in, place

    def copy_result(self, rank: int, tensor: int, part: slice, out: Buffer) -> None:
        """``out[part]`` becomes ``rank``'s result there."""
        place = self.places[rank][tensor][0][0]
        if not self._group.are_one(place, self.places[self._group.index][tensor][0][0]):
            self._group.read(rank, place, part, out[part])


def read_first(tensor: Tensor) -> Tensor:
    """The same, with the sum where the first vector has just been read, if it goes there at all, and copied from there.

    That is in the cache.
    """
    vector = address_of(tensor.vectors[0])
    if any(address_of(later) == vector for later in tensor.vectors[1:]):
        return tensor
    for i, copy in enumerate(tensor.copies):
        if address_of(copy) == vector:
            return Tensor(tensor.vectors, copy, [*tensor.copies[:i], tensor.out, *tensor.copies[i + 1 :]])
    return tensor


class Delivery:
    """Results of which each rank of a host makes a part, which it delivers to all: where they go, and from where.

    Args:
        tensors: this rank's.
        parts: of each, what this rank makes of the result.
        stage_bytes: private memory of tensors up to this size is staged: scratch stands in for what others make and
            read. So it is with all private memory where ranks cannot attach.
    Attributes:
        mine: by tensor, what to post.
        before, after: copies that this rank makes (to, from): of what others read, and when all have delivered.
    """

    def __init__(
        self, group: HostGroup, tensors: Sequence[Tensor], parts: Sequence[slice], act: Act, stage_bytes: int = 0
    ) -> None:
        self._group, self._tensors = group, tensors
        self._copies: list[list[Buffer]] = []  # by tensor: to which others deliver as well
        self.mine: list[Places] = []
        self.before: list[tuple[Buffer, Buffer]] = []
        self.after: list[tuple[Buffer, Buffer]] = []
        late: list[tuple[Buffer, Buffer]] = []
        room = MAX_PLACES - sum(2 + len(tensor.vectors) for tensor in tensors)
        for tensor, part in zip(tensors, parts, strict=True):
            attaches = group.attaches and tensor.out.nbytes > stage_bytes
            staged: dict[int, tuple[Buffer, int]] = {}  # by address
            vectors = [self._place(vector, attaches, staged, part, act) for vector in tensor.vectors]
            places = [self._place(tensor.out, attaches, staged, None, act)]
            copies = []
            for copy in tensor.copies:
                place = group.place_of(copy)
                if room > 0 and (place is not None or attaches):
                    places.append(address_of(copy) if place is None else place)
                    copies.append(copy)
                    room -= 1
                else:
                    late.append((copy, tensor.out))
            self._copies.append(copies)
            if staged and (found := staged.get(address_of(tensor.out))) is not None:
                self.after += _all_but(part, tensor.out, found[0])
            self.mine.append((places, vectors))
        self.after += late
        #: By rank and tensor.
        self.places: dict[int, list[Places]] = {}

    def _place(
        self, buffer: Buffer, attaches: bool, staged: dict[int, tuple[Buffer, int]], own: slice | None, act: Act
    ) -> int:
        """What to post; with ``own``, others read all but that there."""
        address = address_of(buffer)
        place = self._group.place_at(address)
        if place is not None or attaches:
            return address if place is None else place
        if address not in staged:
            stand_in, place = _stand_in(self._group, buffer, act)
            if place is None:
                return address
            staged[address] = stand_in, place
            if own is not None:
                self.before += _all_but(own, stand_in, buffer)
        return staged[address][1]

    def begin(self, act: Act) -> None:
        """Begin the call, and learn where others' results go.

        Raises:
            KVTimeoutError: a rank did not begin this call.
        """
        for to, source in self.before:
            hand_over(to, source)
        self.places = _exchange_places(self._group, self.mine, act, self._group.others)

    def deliver(self, tensor: int, part: slice) -> None:
        """This rank's part of a result is there: it goes to all that asked for it, on every rank."""
        group, done = self._group, self._tensors[tensor].out[part]
        mine = self.places[group.index][tensor][0]
        for copy in self._copies[tensor]:
            np.copyto(copy[part], done)
        for peer in group.others:
            for place in self.places[peer][tensor][0]:
                if not any(group.are_one(place, own) for own in mine):
                    group.deliver(peer, place, part, done)

    def settle(self) -> None:
        """All have delivered: this rank copies what it has to by itself."""
        for to, source in self.after:
            np.copyto(to, source)


def _stand_in(group: HostGroup, buffer: Buffer, act: Act) -> tuple[Buffer, int | None]:
    """As much memory that others can reach, and its place; None where there is no room, and ranks can attach."""
    found = act.scratch(max(1, buffer.size), buffer.dtype)[: buffer.size]  # an empty one lies nowhere
    place = group.place_of(found)
    assert place is not None or group.attaches, "no room in the arena for data that has to be staged"
    return found, place


def _all_but(own: slice, to: Buffer, source: Buffer) -> list[tuple[Buffer, Buffer]]:
    """Copies of all but the elements ``own``."""
    parts = (slice(0, own.start), slice(own.stop, source.size))
    return [(to[part], source[part]) for part in parts if part.start < part.stop]


def _exchange_places(group: HostGroup, mine: list[Places], act: Act, awaited: Sequence[int]) -> dict[int, list[Places]]:
    """Begin the call, post this rank's places, and wait for those of ``awaited``; by rank and tensor."""
    group.begin(act.deadline, act.describe)
    group.post(words_of(mine))
    group.await_posts(awaited, act.deadline, act.describe)
    return {group.index: mine, **{rank: places_of(group, rank, len(mine)) for rank in awaited}}


def words_of(mine: Sequence[Places]) -> list[int]:
    """What to post; ``places_of`` is the way back."""
    words = [len(places) << _HEAD_BITS | len(vectors) for places, vectors in mine]
    for places, vectors in mine:
        words += places
        words += vectors
    return words


def fits(num_tensors: int) -> bool:
    """Whether there is room to post so many, however many vectors other ranks have; ``folded`` sees to that."""
    return num_tensors * (2 + MOST_VECTORS) <= MAX_PLACES


def folded(tensors: Sequence[Tensor], dtype: str, act: Act) -> Sequence[Tensor]:
    """The tensors with at most ``MOST_VECTORS`` vectors each, where there are too many of them to post all.

    The vectors from there on are added up in scratch; of half types, their sum is rounded once more.
    """
    if sum(2 + len(tensor.vectors) for tensor in tensors) <= MAX_PLACES:
        return tensors
    found = []
    for tensor in tensors:
        vectors, rest = list(tensor.vectors[: MOST_VECTORS - 1]), tensor.vectors[MOST_VECTORS - 1 :]
        if len(rest) > 1:
            vectors.append(act.scratch(tensor.out.size, tensor.out.dtype))
            host.sum_vectors(vectors[-1], rest, dtype)
        else:
            vectors += rest
        found.append(Tensor(vectors, tensor.out, tensor.copies))
    return found


def places_of(group: HostGroup, rank: int, num_tensors: int) -> list[Places]:
    """By tensor: what ``rank`` has posted."""
    numbers = [divmod(head, 1 << _HEAD_BITS) for head in group.places_of(rank, 0, num_tensors)]
    words, found, start = group.places_of(rank, num_tensors, sum(map(sum, numbers))), [], 0
    for num_results, num_vectors in numbers:
        middle, stop = start + num_results, start + num_results + num_vectors
        found.append((words[start:middle], words[middle:stop]))
        start = stop
    return found


class HostSum:
    """One tensor's vectors of all ranks of a host, this rank's first, as ``ring.Terms``.

    Args:
        number: which of the posted tensors it is.
        block: memory of the tensor's dtype, and for half types of float32: what is read at a time fits in there.
        scale: what the result is multiplied by.
        rounds: partial sums are of the tensor's dtype; else those of half types are float32.
    """

    def __init__(
        self, group: HostGroup, posted: Posted | Delivery, number: int, vectors: Sequence[Buffer], dtype: str,
        block: tuple[Buffer, Buffer], scale: float = 1.0, *, rounds: bool = False,
    ) -> None:  # fmt: skip
        self._group, self._vectors, self.dtype, self.scale = group, vectors, dtype, scale
        self._half = dtype in host.HALF
        self._rounds = rounds and self._half
        self.sum_dtype = host.STORAGE[dtype if rounds else host.ACCUMULATE[dtype]]
        self._fetched, self._wide = block
        self._places = [(peer, place) for peer in group.others for place in posted.places[peer][number][1]]

    @property
    def sources(self) -> list[Source]:
        """See ``native.Terms``."""
        own = [Source(address_of(vector)) for vector in self._vectors]
        return own + [self._group.source(peer, place) for peer, place in self._places]

    def own(self, start: int, stop: int, into: Buffer) -> Buffer:
        """See ``ring.Terms``: what this host contributes."""
        self._run(None, start, stop, into, 1.0)
        return into

    def add(self, incoming: Buffer, start: int, stop: int, into: Buffer) -> None:
        """See ``ring.Terms``."""
        self._run(incoming, start, stop, into, 1.0)

    def finish(self, incoming: Buffer | None, start: int, stop: int, into: Buffer) -> None:
        """See ``ring.Terms``. Without ``incoming``, the result is what this host contributes."""
        self._run(incoming, start, stop, into, self.scale, narrow=self._half)

    def _run(
        self, incoming: Buffer | None, start: int, stop: int, into: Buffer, scale: float, *, narrow: bool = False
    ) -> None:
        length = self._fetched.size
        with np.errstate(all="ignore"):
            for first in range(start, stop, length):
                block = slice(first, min(first + length, stop))
                local = slice(first - start, block.stop - start)
                before, target = None if incoming is None else incoming[local], into[local]
                if not self._half:
                    self._sum_block(before, block, target)
                    times(target, scale)
                    continue
                wide = self._wide[: target.size] if narrow or self._rounds else target
                self._sum_half_block(before, block, wide)
                times(wide, scale)
                if wide is not target:
                    host.narrow(wide, target, self.dtype)

    def _sum_block(self, total: Buffer | None, block: slice, target: Buffer) -> None:
        for vector in self._vectors:
            total = vector[block] if total is None else np.add(total, vector[block], out=target)
        for peer, place in self._places:
            term = self._group.fetch(peer, place, block, self._fetched[: target.size])
            total = np.add(total, term, out=target)  # type: ignore[arg-type]
        if total is not target:
            np.copyto(target, total)  # type: ignore[arg-type]

    def _sum_half_block(self, before: Buffer | None, block: slice, target: Buffer) -> None:
        vectors = list(self._vectors)
        if before is None:
            host.widen(vectors.pop(0)[block], self.dtype, target)
        elif self._rounds:
            host.widen(before, self.dtype, target)
        else:
            np.copyto(target, before)
        for vector in vectors:
            host.add_widened(target, "float32", vector[block], self.dtype)
        for peer, place in self._places:
            term = self._group.fetch(peer, place, block, self._fetched[: target.size])
            host.add_widened(target, "float32", term, self.dtype)


def block_for(dtype: str, block_bytes: int, act: Act) -> tuple[Buffer, Buffer]:
    """Scratch for ``HostSum``."""
    count = max(1, block_bytes // host.STORAGE[dtype].itemsize)
    return act.scratch(count, host.STORAGE[dtype]), act.scratch(count if dtype in host.HALF else 0, np.float32)


class Copies:
    """A ``ring.Machine`` that copies ranks' results of the only tensor to ``out`` as they become final.

    Args:
        orders: by rank: the elements that become final, in the order in which ``HostGroup.advance`` announces them.
    """

    def __init__(self, group: HostGroup, posted: Posted, out: Buffer, orders: Mapping[int, Sequence[Range]]) -> None:
        self._group, self._posted, self._out = group, posted, out
        self._left = {rank: order for rank, order in orders.items() if order}
        self._taken = dict.fromkeys(orders, 0)

    @property
    def done(self) -> bool:
        return not self._left

    def stuck(self) -> str:
        return f"MPI rank {ranks_in_words(self._group.members[rank] for rank in self._left)} did not sum its part"

    def advance(self) -> bool:
        moved = False
        for rank, order in list(self._left.items()):
            taken, ready = self._taken[rank], min(self._group.blocks_of(rank), len(order))
            for start, stop in order[taken:ready]:
                self._posted.copy_result(rank, 0, slice(start, stop), self._out)
            self._taken[rank] = ready
            moved |= ready > taken
            if ready == len(order):
                del self._left[rank]
        return moved
