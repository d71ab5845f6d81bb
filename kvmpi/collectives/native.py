"""The compiled parts of the collectives, ``compiled/``, where they have been built: same results, same messages.

pip builds them where there is a C compiler; without one ``ring`` and ``shared`` do the same work in Python.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvmpi.arrays import DTYPES, address_of
from kvmpi.collectives.comm import Channel
from kvmpi.collectives.cross_memory import Source, refusal
from kvmpi.collectives.host_group import SlotMemory, Target, Word
from kvmpi.collectives.links import lost
from kvmpi.collectives.ring import Scratch
from kvmpi.collectives.schedule import Schedule
from kvmpi.collectives.waiting import looks
from kvmpi.kernels.host import HALF, KINDS

try:
    from kvmpi.collectives import _native
except ImportError:
    _native = None  # type: ignore[assignment]

Buffer = npt.NDArray[Any]

# ``struct ring``, ``struct terms``, ``struct part``, ``struct source`` and ``struct target`` of compiled/.
_RING_WORDS = (
    "in_fd out_fd receives sends num_transfers num_chunks num_kept num_summed piece_bytes incoming partials progress "
    "announced received sent received_bytes ready sent_bytes own wake_bytes in_error out_error"
)
RING = np.dtype([(name, np.int64) for name in _RING_WORDS.split()])
_TERMS_WORDS = "kind itemsize sum_itemsize num_parts parts as_they_are block_count fetched wide"
TERMS = np.dtype(
    [(name, np.int64) for name in _TERMS_WORDS.split()]
    + [("scale", np.float64), ("lost", np.int64), ("error", np.int64)]
)
_KIND_OF = {dtype: ord(KINDS[name]) for name, dtype in DTYPES.items() if name != "bfloat16"}

_AT_THE_START = (0,) * 9
_DONE, _FAILED = 2, 3
_DELIVERED, _NOT_READ, _NOT_WRITTEN, _GIVEN_UP = range(4)
#: More elements than there are, so that their bytes can still be counted.
_ENDLESS = 1 << 48
#: What ``SlotSum.run`` returns.
NOT_BEGUN, SUMMED, OFFERED, OWN_SUMMED = 0, 1, 2, 3
#: Milliseconds after which whoever waits looks at its deadline, whoever does not, at signals, and what else has to be
#: moved on has its turn.
_IDLE_MS, _MOST_MS, _BESIDE_MS = 20, 100, 5
#: Compiled rings are woken when so much has come: with half as much a rank's threads took 38 ms of processor time a
#: step instead of 35, while a network of 20 MB was trained on four hosts.
MOST_PIECE_BYTES = 256 << 10
#: Elements of a block, which stays in a core's cache while all sources are added to it.
_BLOCK_COUNT = 32 << 10


def is_built() -> bool:
    """Whether there is compiled code."""
    return _native is not None


class Terms(Protocol):
    """What a rank contributes to a sum, for compiled code; see ``ring.Terms`` for others.

    ``sources`` are of ``dtype``, are added in that order, and the first one is this process's.
    """

    dtype: str
    sum_dtype: np.dtype[Any]
    scale: float

    @property
    def sources(self) -> Sequence[Source]: ...


class CopyList:
    """Copies (to, from) of which only the addresses are known: the memory has to be there whenever they are made.

    ``for_others``: others read them next.
    """

    def __init__(self, copies: Sequence[tuple[Buffer, Buffer]], *, for_others: bool = False) -> None:
        self._for_others = for_others
        rows = [(address_of(to), address_of(source), to.nbytes) for to, source in copies]
        self._table = np.array(rows, np.int64) if rows else None

    def run(self) -> None:
        """Make them, in this order."""
        if self._table is not None:
            _native.copy_ranges(self._table, self._for_others)


class NativeTerms:
    """``struct terms``: tensors that lie end to end, what is added up of each, and where it goes.

    Args:
        outs: of each tensor, where the result is made.
        terms: of each tensor, of one dtype; none to add nothing.
        block: as of ``HostSum``; so many elements are added up, and delivered, at a time.
        base: the number of the first element.
        targets: of each tensor, where else the result goes.

    Of all these only addresses are kept: what lies there has to be kept by whoever calls.
    """

    def __init__(
        self, outs: Sequence[Buffer], terms: Sequence[Terms], block: tuple[Buffer, Buffer], *, base: int = 0,
        targets: Sequence[Sequence[Target]] = (),
    ) -> None:  # fmt: skip
        dtype = outs[0].dtype
        sum_dtype = terms[0].sum_dtype if terms else dtype
        sources = [each.sources for each in terms] or [()] * len(outs)
        found = [source for of_part in sources for source in of_part]
        goals = [target for of_part in targets for target in of_part]
        listed, aims = np.array(found or [Source(0)], np.int64), np.array(goals or [Target(0)], np.int64)
        parts, start, place, aim = list[tuple[int, ...]](), base, address_of(listed), address_of(aims)
        for out, of_part, to in zip(outs, sources, targets or [()] * len(outs), strict=True):
            parts.append((start, start + out.size, address_of(out), len(of_part), place, len(to), aim))
            start += out.size
            place += len(of_part) * listed.strides[0]
            aim += len(to) * aims.strides[0]
        if len(parts) == 1:  # vectors of a reduce-scatter have more elements than it
            parts[0] = (0, _ENDLESS, address_of(outs[0]) - base * dtype.itemsize, *parts[0][3:])
        table = np.array(parts, np.int64)
        kind, scale = (ord(KINDS[terms[0].dtype]), terms[0].scale) if terms else (0, 1.0)
        as_they_are = sum_dtype == dtype and all(len(of_part) == 1 for of_part in sources)
        fetched, wide = block
        head = [
            *(kind, dtype.itemsize, sum_dtype.itemsize, len(parts), address_of(table), as_they_are),
            *(fetched.size, address_of(fetched), address_of(wide)),
        ]
        self.struct = np.array([(*head, scale, 0, 0)], TERMS)
        self._alive = [listed, aims, table]

    def sum_segment(self, start: int, stop: int) -> bool:
        """Sum the elements from ``start`` to ``stop`` and deliver them; whether nobody has given up.

        Raises:
            PeerLostError: another process's memory is not there any more.
            PermissionError: the system refuses to let this process read or write there.
        """
        result = _native.sum_segment(self.struct, start, stop)
        if result in (_NOT_READ, _NOT_WRITTEN):
            raise self._refusal("read from" if result == _NOT_READ else "write to")
        return bool(result == _DELIVERED)

    def check(self) -> None:
        """Raise if a ring could not read something, as ``sum_segment`` does."""
        if self.struct["error"][0]:
            raise self._refusal("read from")

    def _refusal(self, verb: str) -> Exception:
        return refusal(verb, int(self.struct["lost"][0]), int(self.struct["error"][0]))


class NativeRings:
    """A ``ring.Machine``: several rings that move together, as ``Ring`` does one. Tensors are summed end to end.

    Args:
        channels: of each ring.
        schedules: of each ring.
        piece_bytes: what has come of a chunk is looked at whenever it is so much; fewer looks leave the processor to
            training, more of them keep the links busy.
        outs: of each tensor, as ``out`` of ``Ring``.
        terms: of each tensor, of one dtype, as of ``Ring``; none to add nothing.
        base: as of ``Ring``.
        progress: of a single ring: a word that counts, from what it is given with, the chunks that are final.
        alone: whether nothing else has to be moved on meanwhile.
    """

    def __init__(
        self, channels: Sequence[Channel], schedules: Sequence[Schedule], piece_bytes: int, outs: Sequence[Buffer],
        terms: Sequence[Terms], *, base: int = 0, scratch: Scratch = np.empty, progress: Word | None = None,
        alone: bool = True,
    ) -> None:  # fmt: skip
        self._channels, self._schedules = channels, schedules
        self._idle_ms = _IDLE_MS if alone else min(_IDLE_MS, _BESIDE_MS)
        self._most_ms = _MOST_MS if alone else min(_MOST_MS, _BESIDE_MS)
        dtype = outs[0].dtype
        sum_dtype = terms[0].sum_dtype if terms else dtype
        half = bool(terms) and terms[0].dtype in HALF
        block = scratch(_BLOCK_COUNT, dtype), scratch(_BLOCK_COUNT if half else 0, np.float32)
        self._terms = NativeTerms(outs, terms, block, base=base)
        self._alive = list[Any]([outs, terms, block])
        rows = list[tuple[int, ...]]()
        for channel, schedule in zip(channels, schedules, strict=True):
            incoming = scratch(schedule.longest_chunk if terms else 0, sum_dtype)
            partials = scratch(schedule.kept_count, sum_dtype)
            receives, sends = schedule.tables
            words = [
                *(channel.in_fd, channel.out_fd, address_of(receives), address_of(sends), len(sends)),
                *(schedule.num_chunks, schedule.num_kept, schedule.num_summed, piece_bytes),
                *(address_of(incoming), address_of(partials), *(progress or (0, 0)), *_AT_THE_START),
            ]
            rows.append(tuple(words))
            self._alive += [incoming, partials]
        self._rings = np.array(rows, RING)
        self.done = False

    def advance(self) -> bool:
        """See ``Machine``; waits for a moment if there is nothing to do.

        Raises:
            PeerLostError: the other end of a connection is closed, or another process's memory is not there any more.
            PermissionError: the system refuses to let this process read there.
        """
        result = _native.move_rings(self._rings, self._terms.struct, self._idle_ms, self._most_ms)
        self.done = result == _DONE
        if result == _FAILED:
            self._terms.check()
            for ring, channel in zip(self._rings, self._channels, strict=True):
                for peer, error in ((channel.left, int(ring["in_error"])), (channel.right, int(ring["out_error"]))):
                    if error:
                        raise lost(peer, "closed" if error < 0 else os.strerror(error))
        return bool(result)

    def stuck(self) -> str:
        """See ``Machine``."""
        for ring, channel, schedule in zip(self._rings, self._channels, self._schedules, strict=True):
            if ring["received"] < len(schedule.receives):
                step = int(ring["received"]) // schedule.num_chunks
                return f"no data from MPI rank {channel.left}, step {step + 1} of {schedule.num_steps}"
        return f"MPI rank {self._channels[0].right} does not take its data"


def sums_slots(dtype: np.dtype[Any]) -> bool:
    """Whether there is compiled code that sums such elements in slots."""
    return is_built() and dtype in _KIND_OF


class SlotSum:
    """Sums of vectors of one length and dtype, for every second call of a group of ranks.

    Attributes:
        run: of call number, vector, out and what it has returned for this call before, else ``NOT_BEGUN``: that if it
            cannot begin yet, ``OFFERED`` if others are not there yet, ``OWN_SUMMED`` if they have not summed their
            parts yet, or ``SUMMED``.
    """

    __slots__ = ("_kept", "run")

    run: Callable[[int, Buffer, Buffer, int], int]

    def __init__(self, memory: SlotMemory, part: int = 0) -> None:
        """``part``: elements that each rank sums for all; 0 if each sums all of them itself."""
        slot = memory.slots[0]
        words = [
            *(len(memory.slots), memory.number, memory.posted, memory.summed, memory.finished),
            *(_KIND_OF[slot.dtype], slot.size, slot.itemsize, part, *looks()),
            *(address_of(page) for page in memory.pages),
            *(address_of(slot) for slot in memory.slots),
        ]
        struct = np.array(words, np.int64)
        self._kept = struct, memory
        self.run = functools.partial(_native.sum_slots, address_of(struct))
