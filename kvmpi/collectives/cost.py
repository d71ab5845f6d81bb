"""What each algorithm is expected to cost: arithmetic on a few measured figures.

The formulas are those of Hockney's model: a latency for each message or meeting, and bytes over bandwidth; what runs at
the same time counts once. They need not be right to the microsecond, only right about which algorithm is cheaper.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from kvmpi.errors import ConfigError

#: Chunks of rings. Handling one costs 20 us; above 128 KiB two rings that share a link of 1 Gbit/s leave it idle for a
#: tenth of the time.
_LEAST_CHUNK_BYTES, _MOST_CHUNK_BYTES = 64 << 10, 128 << 10
#: Over connections of their own (``links``) two chunks of a segment leave no link idle: one is summed while the other
#: travels. Each more costs a rank, which sleeps meanwhile, some 100 us of processor time with cold caches.
_LINKED_CHUNKS, _MOST_LINKED_CHUNK_BYTES = 2, 512 << 10

#: Part of a single ring's sums for which the link waits: a guess, large enough that two rings win where they were seen
#: to, as with 64 MiB between four hosts of 1 Gbit/s.
_UNHIDDEN = 0.5
#: What a message of ``hierarchical`` costs over one of ``ring``, as measured with small tensors: a rank also waits for
#: those of its host.
_HIERARCHICAL_MESSAGE = 2.5
#: Of ``multi_ring``, where the model chooses.
MODEL_RINGS = 2


@dataclass(frozen=True)
class Figures:
    """Of a cluster, measured by ``kvmpi bench tune``. The defaults are of small machines on 10 Gbit/s Ethernet."""

    meeting_s: float = 8e-6  #: all ranks of a host meet once in shared memory
    add_bytes_per_s: float = 5e9  #: result of an addition, for each of a host's ranks when all of them add
    copy_bytes_per_s: float = 8e9  #: likewise of a copy
    message_s: float = 2e-5  #: a small message from rank to rank, with what Python does about it
    link_bytes_per_s: float = 1.1e9  #: between two hosts, in each direction
    library_s: float = 2.5e-5  #: MPI's own allreduce of one number by two ranks, likewise; twice that by four

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (isinstance(value, (int, float)) and 0 < value < math.inf):
                raise ConfigError(f"tuning: {field.name} is {value!r}: expected a positive number")


def load(path: str, option: str = "KVMPI_TUNING=") -> Figures:
    """What ``kvmpi bench tune`` wrote to ``path``; the built-in figures for an empty ``path``.

    ``option`` is what the user has put before it.

    Raises:
        ConfigError: the file cannot be read, or is something else.
    """
    if not path:
        return Figures()
    try:
        found = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{option}{path}: {error}; kvmpi bench tune --out {path} writes it") from None
    known = {field.name for field in fields(Figures)}
    if not isinstance(found, dict) or (unknown := set(found) - known):
        what = f"it holds {', '.join(sorted(unknown))}" if isinstance(found, dict) else "it is no table"
        raise ConfigError(f"{option}{path}: {what}; expected {', '.join(sorted(known))}")
    return replace(Figures(), **found)


def save(path: str, figures: Figures) -> None:
    """Write ``figures`` for ``load``."""
    Path(path).write_text(json.dumps(asdict(figures), indent=2) + "\n")


class Choice(NamedTuple):
    """How to do a collective; ``seconds`` is what that is expected to take."""

    algorithm: str
    num_rings: int
    chunk_bytes: int
    seconds: float = 0.0

    def __str__(self) -> str:
        rings = f" x{self.num_rings}" if self.num_rings > 1 else ""
        return f"{self.algorithm}{rings}" + (f" chunk {self.chunk_bytes >> 10}K" if self.chunk_bytes else "")


def costs(
    op: str, nbytes: int, hosts: tuple[int, ...], figures: Figures, *, shares: bool, has_library: bool,
    linked: bool = False,
) -> dict[str, Choice]:  # fmt: skip
    """Every algorithm that is possible, with its best settings.

    Args:
        op: "allreduce", "reduce_scatter", "allgather" or "broadcast".
        nbytes: of the whole tensor on one rank.
        hosts: number of ranks on each host.
        shares: whether ranks of a host share memory.
        has_library: whether the transport has collectives of its own.
        linked: whether rings between hosts have connections of their own.
    """
    size, most, num_hosts = sum(hosts), max(hosts), len(hosts)
    adds = op in ("allreduce", "reduce_scatter")
    halves = 2 if op == "allreduce" else 1
    passes = 1.0 if op == "broadcast" else halves * (size - 1) / size
    link = figures.link_bytes_per_s if num_hosts > 1 else figures.copy_bytes_per_s
    add_s = nbytes / figures.add_bytes_per_s if adds else 0.0
    copy_s = nbytes / figures.copy_bytes_per_s

    found: dict[str, Choice] = {}
    # Sums are made while the next chunk travels, except where memory is what carries the chunks, and at the end of a
    # segment, unless another ring has something to do then.
    unhidden = 1.0 if num_hosts == 1 else 0.0 if linked else _UNHIDDEN
    sums_s = add_s * (size - 1) / size * unhidden
    steps = halves * (size - 1)
    for name, rings in (("ring", 1), ("multi_ring", MODEL_RINGS)):
        part = nbytes / size / rings
        chunk = linked_chunk_for(part) if linked else chunk_for(part, figures.message_s, link)
        # All links are busy from the first step on. What each step adds is the last chunk's way through the rank, where
        # no other chunk travels meanwhile.
        last_s = 0.0 if linked else min(chunk, part) / figures.add_bytes_per_s
        ring_s = steps * (figures.message_s * rings * max(1.0, part / chunk) + last_s)
        ring_s += passes * nbytes / link + (sums_s if rings == 1 else 0.0)
        if rings == 1 or (adds and num_hosts == size):
            found[name] = Choice(name, rings, chunk, ring_s)
    if has_library:
        hops = math.ceil(math.log2(size))
        # Libraries overlap less: between hosts they reach about two thirds of the link.
        found["mpi"] = Choice("mpi", 1, 0, figures.library_s * hops + 1.5 * passes * nbytes / link + 2 * copy_s)
    if shares and num_hosts == 1:
        meetings = 1 if nbytes <= 256 << 10 else 2.5
        share = (size - 1) / size
        found["shared"] = Choice("shared", 1, 0, meetings * figures.meeting_s + share * (add_s + copy_s))
    if shares and num_hosts > 1:
        rings = min(hosts)
        part = nbytes / num_hosts / rings
        chunk = linked_chunk_for(part) if linked else chunk_for(part, figures.message_s, link / rings)
        steps = halves * (num_hosts - 1)
        passes = 1.0 if op == "broadcast" else halves * (num_hosts - 1) / num_hosts
        last_s = 0.0 if linked else min(chunk, part) / figures.add_bytes_per_s
        seconds = steps * (_HIERARCHICAL_MESSAGE * figures.message_s * max(1.0, part / chunk) + last_s)
        seconds += passes * nbytes / link + (2 * figures.meeting_s + add_s / most if most > 1 else sums_s)
        found["hierarchical"] = Choice("hierarchical", 1, chunk, seconds)
    return found


def chunk_for(part_bytes: float, message_s: float, link_bytes_per_s: float) -> int:
    """The chunk size, a power of two, at which filling the pipe and handling chunks cost least together."""
    return _power_of_two(math.sqrt(max(1.0, part_bytes) * message_s * link_bytes_per_s), _MOST_CHUNK_BYTES)


def linked_chunk_for(part_bytes: float) -> int:
    """The same over connections of their own: about half of a segment's part."""
    return _power_of_two(part_bytes / _LINKED_CHUNKS, _MOST_LINKED_CHUNK_BYTES)


def _power_of_two(nbytes: float, most_bytes: int) -> int:
    return 1 << round(math.log2(min(max(nbytes, _LEAST_CHUNK_BYTES), most_bytes)))


def as_words(figures: Figures) -> list[float]:
    """For a message to other ranks."""
    return [float(getattr(figures, field.name)) for field in fields(figures)]


def from_words(words: list[float]) -> Figures:
    """The inverse of ``as_words``."""
    names: Mapping[str, Any] = dict(zip((field.name for field in fields(Figures)), words, strict=True))
    return Figures(**names)
