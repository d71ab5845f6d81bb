"""The compiled parts of the collectives, ``native.c``, where they have been built: same results, same messages.

pip builds them where there is a C compiler; without one ``ring`` and ``shared`` do the same work in Python.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvmpi.arrays import address_of
from kvmpi.collectives.comm import Channel
from kvmpi.collectives.host_group import SlotMemory
from kvmpi.collectives.links import lost
from kvmpi.collectives.ring import Scratch
from kvmpi.collectives.schedule import Schedule
from kvmpi.collectives.terms import HostTerms

try:
    from kvmpi.collectives import _native
except ImportError:
    _native = None  # type: ignore[assignment]

Buffer = npt.NDArray[Any]

# ``struct ring`` and ``struct sum`` of native.c.
_RING_WORDS = (
    "in_fd out_fd receives sends num_transfers num_chunks num_kept num_summed piece_bytes incoming partials "
    "received sent received_bytes ready_bytes sent_bytes wake_bytes in_error out_error"
)
RING = np.dtype([(name, np.int64) for name in _RING_WORDS.split()])
SUM = np.dtype(
    [(name, np.int64) for name in ["kind", "itemsize", "out", "base", "num_vectors", "vectors"]] + [("scale", float)]
)
#: What is added up as what in C, by the dtype's character.
KINDS = {np.dtype(f"i{size}"): ord(kind) for size, kind in ((1, "b"), (2, "h"), (4, "i"), (8, "q"))}
KINDS.update({np.dtype(f"u{dtype.itemsize}"): kind for dtype, kind in list(KINDS.items())})
KINDS.update({np.dtype(np.float32): ord("f"), np.dtype(np.float64): ord("d")})

_AT_THE_START = (0,) * 8
_DONE, _FAILED = 2, 3
#: What ``SlotSum.start`` returns.
NOT_BEGUN, SUMMED, OFFERED = 0, 1, 2
#: Milliseconds after which whoever waits looks at its deadline, and whoever does not, at signals.
_IDLE_MS, _MOST_MS = 20, 100


def is_built() -> bool:
    """Whether there is compiled code."""
    return _native is not None


def runs_rings(out: Buffer, terms: HostTerms | None) -> bool:
    """Whether there is compiled code that knows how to add such elements."""
    return is_built() and (terms is None or (terms.sum_dtype == out.dtype and out.dtype in KINDS))


class NativeRings:
    """A ``ring.Machine``: several rings that move together, as ``Ring`` does one.

    Args:
        channels: of each ring.
        schedules: of each ring.
        piece_bytes: what has come of a chunk is looked at whenever it is so much; fewer looks leave the processor to
            training, more of them keep the links busy.
        out, base: as of ``Ring``.
        terms: as of ``Ring``; what ``runs_rings`` has been asked about.
    """

    def __init__(
        self, channels: Sequence[Channel], schedules: Sequence[Schedule], piece_bytes: int, out: Buffer,
        terms: HostTerms | None, *, base: int = 0, scratch: Scratch = np.empty,
    ) -> None:  # fmt: skip
        self._channels, self._schedules = channels, schedules
        vectors = [] if terms is None else terms.vectors
        addresses = np.array([address_of(vector) for vector in vectors], np.int64)
        kind, scale = KINDS.get(out.dtype, 0), 1.0 if terms is None else terms.scale
        places = address_of(out), base, len(vectors), address_of(addresses)
        self._sum = np.array([(kind, out.itemsize, *places, scale)], SUM)
        self._alive = [out, vectors, addresses]
        rows = []
        for channel, schedule in zip(channels, schedules, strict=True):
            incoming = scratch(schedule.longest_chunk if vectors else 0, out.dtype)
            partials = scratch(schedule.kept_count, out.dtype)
            receives, sends = schedule.tables
            if terms is not None and len(vectors) > 1:  # a single one is sent from where it is
                for start, stop, kept in schedule.sends[: schedule.num_chunks]:
                    terms.own(start, stop, partials[kept : kept + stop - start])
            transfers = address_of(receives), address_of(sends), len(sends)
            numbers = schedule.num_chunks, schedule.num_kept, schedule.num_summed
            room = address_of(incoming), address_of(partials)
            rows.append((channel.in_fd, channel.out_fd, *transfers, *numbers, piece_bytes, *room, *_AT_THE_START))
            self._alive += [incoming, partials]
        self._rings = np.array(rows, RING)
        self.done = False

    def advance(self) -> bool:
        """See ``Machine``; waits for a moment if there is nothing to do.

        Raises:
            PeerLostError: the other end of a connection is closed.
        """
        result = _native.move_rings(self._rings, self._sum, _IDLE_MS, _MOST_MS)
        self.done = result == _DONE
        if result == _FAILED:
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
    return is_built() and dtype in KINDS


class SlotSum:
    """Sums of vectors of one length and dtype, for every second call of a group of ranks."""

    __slots__ = ("_address", "_kept")

    def __init__(self, memory: SlotMemory) -> None:
        slot = memory.slots[0]
        words = [
            *(len(memory.slots), memory.number, memory.posted, memory.finished),
            *(KINDS[slot.dtype], slot.size, slot.itemsize),
            *(address_of(page) for page in memory.pages),
            *(address_of(slot) for slot in memory.slots),
        ]
        struct = np.array(words, np.int64)
        self._address, self._kept = address_of(struct), (struct, memory)

    def start(self, call: int, vector: Buffer, out: Buffer) -> int:
        """Begin call number ``call``: ``NOT_BEGUN``, ``OFFERED`` if others are not there yet, or ``SUMMED``."""
        return _native.sum_slots(self._address, call, vector, out, False)

    def end(self, call: int, vector: Buffer, out: Buffer) -> None:
        """All have posted."""
        done = _native.sum_slots(self._address, call, vector, out, True)
        assert done == SUMMED
