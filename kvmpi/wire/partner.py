"""One end of a pair of processes on a host that hand large payloads over in shared memory.

The sender copies a payload into a block of its arena, unless it lies there already, and announces it. The receiver
reads it there, and gives the block back when nothing refers to it any more. Nothing waits: without a block to be had,
a payload is a frame as ever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from kvmpi.errors import ProtocolError
from kvmpi.wire import slips
from kvmpi.wire.pool import ALIGN_BYTES
from kvmpi.wire.shared_memory import Arena, View

if TYPE_CHECKING:
    import numpy.typing as npt

Payload: TypeAlias = "npt.NDArray[Any]"

#: Below this size a frame is as fast.
SHARE_FROM_BYTES = 32 << 10
#: Payloads of one message, tickets of one slip: more are rare, and a slip must stay small.
_MAX_BLOCKS = 256
_MAX_DONE = 1024
#: More blocks than any peer will ever announce; each can still be counted, and said in a message.
_TICKETS = 1 << 62
#: So much of the machine's memory a peer may keep of arrays that are lent in place, where the limit says nothing.
_IN_PLACE_SHARE = 0.25


class _Loan(NamedTuple):
    """A block that the peer may be reading: a payload that lies in the arena itself, or its copy at ``offset``."""

    nbytes: int
    offset: int = -1
    payload: Payload | None = None


class Partner:
    """What this process shares with one peer.

    Args:
        arena: of this process, or None if it has none.
        limit_bytes: so much of copies the peer may keep at a time.
        max_payload_bytes: no payload that arrives may have more.
    """

    def __init__(self, arena: Arena | None, limit_bytes: int, max_payload_bytes: int) -> None:
        self._arena, self._limit_bytes, self._max_payload_bytes = arena, limit_bytes, max_payload_bytes
        # What the peer was sent: by ticket, in order, where it is. Nothing before it has proved to see it.
        self._proven = False
        self._lent: dict[int, _Loan] = {}
        self._lent_bytes = self._copied_bytes = self._next_ticket = 0
        # What came from the peer: by ticket, in order, the bytes of what is still referred to.
        self._view: View | None = None
        self._held: dict[int, int] = {}
        self._expected = 0
        self._done: list[int] = []
        self._unreported_bytes = 0
        self._repeats = False  # the peer is short of blocks: maybe what was said of those given back was lost
        self._dropped: deque[int] = deque()  # tickets that garbage collection, in any thread, has put there

    @property
    def shares(self) -> bool:
        """Whether large payloads to the peer go through shared memory."""
        return self._proven

    @property
    def lent_bytes(self) -> int:
        """What the peer has not given back."""
        return self._lent_bytes

    # ---- becoming acquainted

    def offer(self, *, answer: bool) -> slips.Offer:
        """Show the peer this process's arena; with ``answer`` it is to show its own."""
        token = b"" if self._view is None else self._view.token
        if self._arena is None:
            return slips.Offer(0, -1, 0, token, answer)
        return slips.Offer(self._arena.pid, self._arena.fd, self._arena.size_bytes, token, answer)

    def meet(self, slip: slips.Offer | slips.Proof) -> slips.Slip | None:
        """What the peer shows or proves; what to say to that."""
        if self._arena is not None and slip.token == self._arena.token:
            self._proven = True
        if isinstance(slip, slips.Proof):
            return None
        # Its tickets begin anew; those of before are of a partner that it has parted from.
        self._held, self._dropped, self._done, self._expected, self._unreported_bytes = {}, deque(), [], 0, 0
        try:
            self._view = View(slip.pid, slip.fd, slip.size_bytes)
        except OSError:
            self._view = None  # another container, perhaps: payloads come as frames
        if slip.answer:
            return self.offer(answer=False)
        return slips.Proof(self._view.token) if self._view is not None else None

    def gone(self) -> bool:
        """Whether the peer's process is known to have ended, or to have left."""
        return self._view is not None and self._view.gone()

    def part(self) -> None:
        """Nothing is heard from the peer any more, which may be reading still."""
        lent, self._lent, self._proven = self._lent, {}, False
        self._lent_bytes = self._copied_bytes = 0
        if self._arena is not None and lent:
            copies = [loan.offset for loan in lent.values() if loan.payload is None]
            self._arena.abandon(copies, [loan.payload for loan in lent.values()], self._view)

    # ---- sending

    def pack(self, header: bytes, payloads: Sequence[Payload]) -> tuple[bytes, Sequence[Payload]]:
        """The first frame of a message, and the payloads that are frames of their own."""
        if payloads and self._proven and len(payloads) <= _MAX_BLOCKS and any(map(_is_large, payloads)):
            blocks = [self._place(payload) for payload in payloads]
            # Also if there was no block to be had: the peer then says again what it has given back.
            frames = [payload for payload, block in zip(payloads, blocks, strict=True) if block is None]
            return slips.encode(self._parcel(blocks), header), frames
        if self._dropped or self._done or self._repeats:
            header = slips.encode(self._parcel([]), header)
        return header, payloads

    def _place(self, payload: Payload) -> tuple[int, int, int] | None:
        """A block for the peer to read: the payload where it is, if it lies in the arena, else its copy."""
        nbytes = payload.nbytes
        if not _is_large(payload) or self._arena is None or not payload.flags.c_contiguous:
            return None
        offset = self._arena.offset_of(payload)
        if offset is not None and self._lent_bytes + nbytes <= _IN_PLACE_SHARE * self._arena.size_bytes:
            loan = _Loan(nbytes, payload=payload)
        elif self._copied_bytes + nbytes <= self._limit_bytes and (offset := self._arena.place(payload)) is not None:
            loan = _Loan(nbytes, offset)
            self._copied_bytes += nbytes
        else:
            return None
        ticket, self._next_ticket = self._next_ticket, self._next_ticket + 1
        self._lent[ticket] = loan
        self._lent_bytes += nbytes
        return ticket, offset, nbytes

    def _take_back(self, parcel: slips.Parcel) -> None:
        if parcel.floor > self._next_ticket:
            raise ProtocolError(f"blocks below {parcel.floor} are given back, {self._next_ticket} were lent")
        tickets = []
        for ticket in self._lent:
            if ticket >= parcel.floor:
                break
            tickets.append(ticket)
        tickets += [ticket for ticket in parcel.done if ticket >= parcel.floor and ticket in self._lent]
        copies = []
        for loan in [loan for ticket in tickets if (loan := self._lent.pop(ticket, None)) is not None]:
            self._lent_bytes -= loan.nbytes
            if loan.payload is None:
                self._copied_bytes -= loan.nbytes
                copies.append(loan.offset)
        if copies and self._arena is not None:
            self._arena.free(copies)

    # ---- receiving

    def unpack(self, parcel: slips.Parcel, frames: Sequence[memoryview]) -> list[memoryview]:
        """The payloads of a message.

        Raises:
            ProtocolError: they are not where the peer can have put them.
        """
        self._take_back(parcel)
        if not parcel.blocks:
            return list(frames)
        if sum(block is None for block in parcel.blocks) != len(frames):
            raise ProtocolError(f"{len(frames)} payload frames do not fit {len(parcel.blocks)} payloads")
        self._repeats = any(map(_is_large, frames))
        plain = iter(frames)
        return [next(plain) if block is None else self._open(*block) for block in parcel.blocks]

    def _open(self, ticket: int, offset: int, nbytes: int) -> memoryview:
        if self._view is None:
            raise ProtocolError("a payload in memory that this process does not see")
        if ticket < self._expected:
            raise ProtocolError(f"block {ticket} was announced before")
        if ticket >= _TICKETS:
            raise ProtocolError(f"block {ticket}: there are no more than 2^62")
        if nbytes > self._max_payload_bytes:
            raise ProtocolError(f"payload of {nbytes} bytes, limit {self._max_payload_bytes}")
        if nbytes < 1 or offset < ALIGN_BYTES or offset % ALIGN_BYTES or offset + nbytes > self._view.size_bytes:
            raise ProtocolError(f"bytes {offset} to {offset + nbytes} are no block of {self._view.size_bytes} bytes")
        self._expected = ticket + 1  # those between were lost, and are below the floor one day
        self._held[ticket] = nbytes
        return self._view.block(offset, nbytes, ticket, self._dropped, self._arena)

    def overdue(self) -> slips.Parcel | None:
        """What to say now, because the peer may be short of blocks and nothing else is sent to it."""
        return self._parcel([]) if self._has_news() and 4 * self._unreported_bytes >= self._limit_bytes else None

    def _has_news(self) -> bool:
        while self._dropped:
            ticket = self._dropped.popleft()
            self._unreported_bytes += self._held.pop(ticket)
            self._done.append(ticket)
        return bool(self._done) or self._repeats

    def _parcel(self, blocks: list[tuple[int, int, int] | None]) -> slips.Parcel:
        self._has_news()
        floor = next(iter(self._held), self._expected)
        done = [ticket for ticket in self._done if ticket >= floor][-_MAX_DONE:]
        self._done, self._unreported_bytes, self._repeats = [], 0, False
        return slips.Parcel(floor, done, blocks)


def _is_large(payload: Payload | memoryview) -> bool:
    return payload.nbytes >= SHARE_FROM_BYTES
