"""Where a client finds a key, and how far it is with it."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvmpi.ps import placement
from kvmpi.ps.asks import Operation
from kvmpi.ps.chains import part_of
from kvmpi.ps.feedback import Feedback
from kvmpi.ps.row_chunks import RowChunks
from kvmpi.ps.steps import Found, Track
from kvmpi.trace import timeline
from kvmpi.wire import Message
from kvmpi.wire import messages as m


@dataclass(slots=True)
class KeyLayout:
    """How a key is spread over servers, and how far this client is with it."""

    shape: tuple[int, ...]
    dtype: str
    chunks: list[placement.Part]
    digest: int = 0
    steps: int = 0
    track: Track = field(default_factory=Track)
    seen_version: int = 0
    pushing: bool = False  # somebody waits for the last push
    pushes: list[Operation] = field(default_factory=list)  # that one, and those before it for which nobody waits
    found_by_rows: bool = False  # the last round before this process pushed was of rows
    staleness: int = timeline.NOTHING  # of the last push
    by_rows: RowChunks | None = None
    feedback: Feedback | None = None  # with a codec that keeps what it does not send

    def part(self, chunk: int) -> int:
        """The part of the values to which a chunk belongs."""
        return part_of(self.chunks[chunk].server, self.digest + chunk)

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
