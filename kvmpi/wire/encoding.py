"""Headers of messages on the wire: msgpack behind a magic and a version.

A message on the wire is ``header frame, payload frame...``. The header frame is the magic ``b"KVM"``, one byte of
protocol version, and one msgpack array whose first element names the message. Nothing is ever unpickled. A version byte
of 0 is no version: such a frame is a refusal, see ``refusal.py``.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvmpi.errors import ProtocolError
from kvmpi.wire import messages as m
from kvmpi.wire.refusal import MAGIC, other_version

PROTOCOL_VERSION = 12
MAX_HEADER_BYTES = 256 << 10
BEGINNING = MAGIC + bytes([PROTOCOL_VERSION])

#: What goes wrong with a message that has an integer of more than 64 bits, a lone surrogate, or too many levels.
CANNOT_BE_ENCODED = (msgspec.MsgspecError, OverflowError, TypeError, ValueError, RecursionError)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[m.Message] = msgspec.msgpack.Decoder(m.AnyMessage)


def encode(message: m.Message) -> bytes:
    """The header frame of ``message``.

    Raises:
        ProtocolError: too large, or not to be encoded: an integer of more than 64 bits, a lone surrogate.
    """
    try:
        header = BEGINNING + _encoder.encode(message)
    except CANNOT_BE_ENCODED as error:
        raise ProtocolError(f"{type(message).__name__} cannot be encoded: {error}") from None
    if len(header) > MAX_HEADER_BYTES:
        raise ProtocolError(f"header of {type(message).__name__} has {len(header)} bytes, limit {MAX_HEADER_BYTES}")
    return header


def decode(header: bytes, decoder: msgspec.msgpack.Decoder[Any] = _decoder) -> m.Message:
    """The message in a header frame; ``decoder`` may know more than messages.

    Raises:
        ProtocolError: too large, not of this protocol, or not a valid message.
        OtherVersionError: of another version, or a refusal; also a ``ProtocolError``.
    """
    if len(header) > MAX_HEADER_BYTES:
        raise ProtocolError(f"header of {len(header)} bytes, limit {MAX_HEADER_BYTES}")
    if header[:4] != BEGINNING:
        if header[:3] != MAGIC:
            raise ProtocolError("header does not begin with the magic of kvmpi")
        if len(header) == 3:
            raise ProtocolError("header ends before its protocol version")
        raise other_version(header, PROTOCOL_VERSION)
    try:
        message: m.Message = decoder.decode(header[4:])  # a copy: of so few bytes it costs less than a view
        return message
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"malformed header: {error}") from None
