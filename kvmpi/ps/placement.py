"""Which server owns which part of a key, and how parts are cut into chunks; the same on every client, without talk."""

from __future__ import annotations

import hashlib
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import msgspec

from kvmpi.errors import ConfigError
from kvmpi.wire import ALIGN_BYTES

Key = int | str

#: A chunk that moves best, in bytes. A part of more than so many has larger ones, up to a limit: each chunk takes a
#: message, of a push of few rows too, and what is not yet sent of the first ones delays what is more urgent.
CHUNK_BYTES, MOST_CHUNK_BYTES = 2 << 20, 8 << 20
_SMALL_CHUNKS = 16


class KeySize(msgspec.Struct, frozen=True):
    """A key to place: ``count`` elements of ``itemsize`` bytes, in rows of ``width`` elements."""

    key: Key
    count: int
    itemsize: int
    width: int = 1


class Part(msgspec.Struct, frozen=True):
    """Elements ``start:stop`` of a key, owned by ``server``."""

    server: int
    start: int
    stop: int


class Placement(ABC):
    """A rule that assigns parts of keys to servers. Subclass it, set ``name``, and ``register`` it.

    The answer may depend only on the sequence of keys placed so far, so that every client computes the same.
    """

    name = ""

    def __init__(self, num_servers: int) -> None:
        self.num_servers = num_servers
        self.load_bytes = [0] * num_servers

    def place(self, sizes: Sequence[KeySize]) -> list[list[Part]]:
        """The parts of each key, in element order; keeps count of each server's bytes."""
        placed: list[list[Part]] = [[] for _ in sizes]
        for i in self.order(sizes):
            placed[i] = self.split(sizes[i])
            for part in placed[i]:
                self.load_bytes[part.server] += (part.stop - part.start) * sizes[i].itemsize
        return placed

    def order(self, sizes: Sequence[KeySize]) -> Sequence[int]:
        """In which order the keys of one call are placed."""
        return range(len(sizes))

    @abstractmethod
    def split(self, size: KeySize) -> list[Part]:
        """The parts of one key."""

    def imbalance(self) -> float:
        """The most loaded server's bytes over the mean; 1 is even."""
        total = sum(self.load_bytes)
        return max(self.load_bytes) * self.num_servers / total if total else 1.0


_PLACEMENTS: dict[str, type[Placement]] = {}


def register(cls: type[Placement]) -> type[Placement]:
    """Make a placement available by its name (``KVMPI_PLACEMENT``)."""
    _PLACEMENTS[cls.name] = cls
    return cls


def create(name: str, num_servers: int) -> Placement:
    """The placement called ``name``.

    Raises:
        ConfigError: no such placement.
    """
    if name not in _PLACEMENTS:
        raise ConfigError(f"KVMPI_PLACEMENT={name!r}: expected one of {', '.join(map(repr, sorted(_PLACEMENTS)))}")
    return _PLACEMENTS[name](num_servers)


def digest(key: Key) -> int:
    """A number that depends on the key alone, and is the same in every process."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "little")


def _hashed(key: Key, num_servers: int) -> int:
    return digest(key) % num_servers


def _whole(server: int, size: KeySize) -> list[Part]:
    return [Part(server, 0, size.count)]


@register
class Hash(Placement):
    """Every key whole on a server chosen by a hash of its name."""

    name = "hash"

    def split(self, size: KeySize) -> list[Part]:
        return _whole(_hashed(size.key, self.num_servers), size)


@register
class RoundRobin(Placement):
    """Every key whole, on one server after the other."""

    name = "round_robin"

    def __init__(self, num_servers: int) -> None:
        super().__init__(num_servers)
        self._next = 0

    def split(self, size: KeySize) -> list[Part]:
        server, self._next = self._next, (self._next + 1) % self.num_servers
        return _whole(server, size)


@register
class LongestFirst(Placement):
    """Every key whole on the least loaded server, the largest keys of a call first (LPT; Graham 1969)."""

    name = "lpt"

    def order(self, sizes: Sequence[KeySize]) -> Sequence[int]:
        return sorted(range(len(sizes)), key=lambda i: (-sizes[i].count * sizes[i].itemsize, i))

    def split(self, size: KeySize) -> list[Part]:
        server = min(range(self.num_servers), key=lambda s: (self.load_bytes[s], s))
        return _whole(server, size)


@register
class Uniform(Placement):
    """Keys in near-equal parts over as many servers as are worth it, from one that a hash of the name chooses.

    What was placed before does not matter, so a client that was mistaken about one key agrees on the next.
    """

    name = "uniform"
    #: A part below this size costs more in messages than a second server saves.
    min_part_bytes = 256 << 10
    #: Parts of fewer pieces of whole rows are cut within rows: else they would differ by more than an eighth.
    min_part_grains = 8

    def split(self, size: KeySize) -> list[Part]:
        num_parts = max(1, min(self.num_servers, size.count * size.itemsize // self.min_part_bytes))
        by_rows = math.lcm(size.width, _elements_apart(size.itemsize))
        fits = 0 < by_rows * self.min_part_grains * num_parts <= size.count
        ends = _near_equal(size.count, num_parts, by_rows if fits else _elements_apart(size.itemsize))
        home = _hashed(size.key, self.num_servers)
        return [Part((home + i) % self.num_servers, ends[i], ends[i + 1]) for i in range(num_parts)]


def _elements_apart(itemsize: int) -> int:
    """Parts and chunks begin where blocks of shared memory may: so they can be read where they are."""
    return max(1, ALIGN_BYTES // itemsize)


def _near_equal(count: int, num_pieces: int, apart: int) -> list[int]:
    """Where ``num_pieces`` pieces of ``count`` elements begin and end: at multiples of ``apart``, but for the end."""
    base, extra = divmod(-(-count // apart), num_pieces)
    return [min(count, apart * (i * base + min(i, extra))) for i in range(num_pieces + 1)]


def cut(
    parts: Sequence[Part], itemsize: int, chunk_bytes: int, width: int = 1, most_rows: int = 1 << 62,
    most_bytes: int = 1 << 62,
) -> list[Part]:  # fmt: skip
    """The chunks of a key, in element order: each part in near-equal pieces of at most ``chunk_bytes``.

    0 chooses by the size of the part; ``most_bytes`` are the limit of either. Pieces of whole rows, at most
    ``most_rows``, where the part consists of whole rows and one is not too large; else a piece has at least one
    element, even where that is larger than the limit. An empty part is one empty piece.
    """
    chunks = []
    apart = _elements_apart(itemsize)
    for part in parts:
        count = part.stop - part.start
        wanted_bytes = chunk_bytes or min(MOST_CHUNK_BYTES, max(CHUNK_BYTES, count * itemsize // _SMALL_CHUNKS))
        longest = max(1, min(wanted_bytes, most_bytes) // itemsize)
        if 0 < width <= longest and part.start % width == 0 == part.stop % width:
            grain = math.lcm(width, apart) if math.lcm(width, apart) <= longest else width
            longest = min(longest, max(1, most_rows // (grain // width)) * grain)
        else:
            grain = apart if apart <= longest else 1
        longest -= longest % grain
        ends = _near_equal(count, max(1, -(-count // longest)), grain)
        chunks += [Part(part.server, part.start + a, part.start + b) for a, b in itertools.pairwise(ends)]
    return chunks


def width_of(shape: Sequence[int]) -> int:
    """Elements of a row of a key of this shape; 0 where it has no rows, or rows without elements."""
    return math.prod(shape[1:]) if shape else 0
