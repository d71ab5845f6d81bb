"""Messages between processes: typed and versioned headers with raw payload frames, over ZeroMQ."""

from kvmpi.wire.bundle import SMALL_BYTES
from kvmpi.wire.context import Context, new_context
from kvmpi.wire.encoding import MAX_HEADER_BYTES, PROTOCOL_VERSION, decode, encode
from kvmpi.wire.keys import create_keys
from kvmpi.wire.malloc import keep_large_buffers
from kvmpi.wire.messages import Message
from kvmpi.wire.pool import ALIGN_BYTES
from kvmpi.wire.readiness import Readiness, Waker
from kvmpi.wire.refusal import OtherVersionError
from kvmpi.wire.sockets import LEND_FROM_BYTES, Connection, Listener, as_array
from kvmpi.wire.watch import Watch

__all__ = [
    "ALIGN_BYTES",
    "Connection",
    "Context",
    "LEND_FROM_BYTES",
    "Listener",
    "MAX_HEADER_BYTES",
    "Message",
    "OtherVersionError",
    "PROTOCOL_VERSION",
    "Readiness",
    "SMALL_BYTES",
    "Waker",
    "Watch",
    "as_array",
    "create_keys",
    "decode",
    "encode",
    "keep_large_buffers",
    "new_context",
]
