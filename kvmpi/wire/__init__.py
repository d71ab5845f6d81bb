"""Messages between processes: typed and versioned headers with raw payload frames, over ZeroMQ."""

from kvmpi.wire.messages import MAX_HEADER_BYTES, PROTOCOL_VERSION, Message, decode, encode
from kvmpi.wire.sockets import (
    Connection,
    Context,
    Listener,
    Readiness,
    Waker,
    as_array,
    keep_large_buffers,
    new_context,
)

__all__ = [
    "Connection",
    "Context",
    "Listener",
    "MAX_HEADER_BYTES",
    "Message",
    "PROTOCOL_VERSION",
    "Readiness",
    "Waker",
    "as_array",
    "decode",
    "encode",
    "keep_large_buffers",
    "new_context",
]
