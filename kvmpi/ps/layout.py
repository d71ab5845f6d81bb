"""Where a client finds a key, and how far it is with it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from kvmpi.arrays import DTYPES
from kvmpi.ps import placement
from kvmpi.ps.asks import Operation
from kvmpi.ps.chains import part_of
from kvmpi.ps.codec import Codec
from kvmpi.ps.feedback import Feedback
from kvmpi.ps.row_chunks import RowChunks
from kvmpi.ps.steps import Found, Track
from kvmpi.trace import timeline
from kvmpi.wire import Message
from kvmpi.wire import messages as m


class Place(NamedTuple):
    """A chunk: which elements of the key it has, how many, their bytes, and the part of the values it belongs to."""

    where: slice
    num_elements: int
    nbytes: int
    part: int


@dataclass(slots=True)
class KeyLayout:
    """How a key is spread over servers, and how far this client is with it."""

    shape: tuple[int, ...]
    dtype: str
    chunks: list[placement.Part]
    digest: int = 0
    steps: int = 0
    track: Track = field(default_factory=Track)
    pushing: bool = False  # somebody waits for the last push
    pushes: list[Operation] = field(default_factory=list)  # that one, and those before it for which nobody waits
    found_by_rows: bool = False  # the last round before this process pushed was of rows
    staleness: int = timeline.NOTHING  # of the last push
    by_rows: RowChunks | None = None
    feedback: Feedback | None = None  # with a codec that keeps what it does not send
    _sent: tuple[Codec, int] | None = None  # what ``sent_bytes`` was asked for last
    seen: list[int] = field(init=False)  # of each chunk, the version that this client has read last
    places: list[Place] = field(init=False)  # of its chunks: looked at with every push, and the same for each

    def __post_init__(self) -> None:
        self.seen = [0] * len(self.chunks)
        itemsize = DTYPES[self.dtype].itemsize
        self.places = [
            Place(
                slice(chunk.start, chunk.stop), count := chunk.stop - chunk.start, count * itemsize,
                part_of(chunk.server, self.digest + i),
            )
            for i, chunk in enumerate(self.chunks)
        ]  # fmt: skip

    def sent_bytes(self, chosen: Codec) -> int:
        """Bytes of a push of the whole key, as a codec encodes them."""
        if self._sent is None or self._sent[0] is not chosen:
            self._sent = chosen, sum(chosen.wire_bytes(place.num_elements, self.dtype) for place in self.places)
        return self._sent[1]

    def part(self, chunk: int) -> int:
        """The part of the values to which a chunk belongs."""
        return self.places[chunk].part

    def hear(self, message: Message, payloads: list[memoryview]) -> None:
        """The answer to the ``Init`` of a chunk."""
        match message:
            case m.Found():
                found = Found(message.version, message.at, message.done)
                self.found_by_rows |= message.by_rows
            case m.Ack():
                found = Found(message.version, {}, 0)
            case _:
                return
        self.track.found = found.merged(self.track.found)
