"""What two processes of a host tell each other about the memory in which they hand over payloads.

A slip travels alone, or before the header in the header's frame: the magic ``b"KVS"``, one byte of version, the length
of the slip in four bytes, one msgpack array, and the header. Neither state machines nor users see them.
"""

from __future__ import annotations

import msgspec

from kvmpi.errors import ProtocolError

#: A frame with a slip begins so.
BEGINNING = b"KVS"
_MAGIC = BEGINNING + b"\1"
_START = len(_MAGIC) + 4
#: So much a slip may add to a frame; a message whose slip would have more goes as plain frames.
MAX_SLIP_BYTES = 64 << 10


class _Slip(msgspec.Struct, array_like=True):
    pass


class Offer(_Slip, tag="offer"):
    """Where the sender's arena is, and the token of the receiver's, if it has mapped that.

    ``answer``: the receiver is to make its own offer. Without an arena ``fd`` is -1.
    """

    pid: int
    fd: int
    size_bytes: int
    token: bytes
    answer: bool


class Proof(_Slip, tag="proof"):
    """The token of the receiver's arena: the sender has mapped it."""

    token: bytes


class Unknown(_Slip, tag="unknown"):
    """The sender has not mapped the receiver's arena: whatever was announced in it is lost."""


class Parcel(_Slip, tag="parcel"):
    """Where a message's payloads are, and what the sender gives back of those that it was sent.

    Blocks have tickets, which count up from 0 in each direction. All below ``floor`` are given back, and those in
    ``done``. As the next parcel says it again, and what never arrived is below the floor, losing one loses no memory.

    ``blocks``: for each payload its ticket, offset and bytes; None: it is the next of the frames that follow.
    """

    floor: int
    done: list[int]
    blocks: list[tuple[int, int, int] | None] = []


Slip = Offer | Proof | Unknown | Parcel
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Slip] = msgspec.msgpack.Decoder(Slip)  # type: ignore[arg-type]


def encode(slip: Slip, header: bytes = b"") -> bytes:
    """The frame of a slip, and of the message with this header that it travels with."""
    body = _encoder.encode(slip)
    return b"".join((_MAGIC, len(body).to_bytes(4, "little"), body, header))


def decode(frame: bytes) -> tuple[Slip, bytes]:
    """The slip in a frame, and the header after it.

    Raises:
        ProtocolError: not of this version, or not a valid slip.
    """
    if frame[: len(_MAGIC)] != _MAGIC:
        raise ProtocolError(f"version {frame[3:4].hex() or 'missing'} of shared payloads, this process speaks 01")
    stop = _START + int.from_bytes(frame[len(_MAGIC) : _START], "little")
    if len(frame) < stop or stop > _START + MAX_SLIP_BYTES:
        raise ProtocolError(f"slip of {stop - _START} bytes in a frame of {len(frame)}")
    try:
        return _decoder.decode(memoryview(frame)[_START:stop]), frame[stop:]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"malformed slip: {error}") from None
