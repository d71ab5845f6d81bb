"""The messages of the protocol and their encoding: a tagged msgpack header, then raw little-endian payload frames.

A message on the wire is ``header frame, payload frame...``. The header frame is the magic ``b"KVM"``, one byte of
protocol version, and one msgpack array whose first element names the message. Nothing is ever unpickled.

``request`` numbers a question within one connection; the answer carries the same number.
"""

from __future__ import annotations

import msgspec

from kvmpi.errors import ProtocolError

PROTOCOL_VERSION = 1
MAX_HEADER_BYTES = 256 << 10
_MAGIC = b"KVM" + bytes([PROTOCOL_VERSION])

Key = int | str
Number = bool | int | float | list[float]


class Message(msgspec.Struct, array_like=True):
    """Base of all messages."""


class Hello(Message, tag="hello"):
    """A master opens its session at a server: which store, how it is synchronised, who it is."""

    request: int
    store: int
    mode: str
    client: int
    num_clients: int
    incarnation: int


class Init(Message, tag="init"):
    """Create one chunk of a key. Client 0 sends the value; the others wait until it is readable."""

    request: int
    key: Key
    chunk: int
    num_chunks: int
    count: int
    shape: list[int]
    dtype: str


class Push(Message, tag="push"):
    """One client's contribution to one chunk at its ``step`` (1 for the first).

    ``fused`` also asks for the value, which is then the answer; with ``acknowledge`` the server also says when the
    contribution is in its round, even if the value follows at once.
    """

    request: int
    key: Key
    chunk: int
    step: int
    codec: str
    fused: bool
    acknowledge: bool = False


class Pull(Message, tag="pull"):
    """Ask for one chunk, not before the round ``min_round`` is in it."""

    request: int
    key: Key
    chunk: int
    min_round: int


class Query(Message, tag="query"):
    """Ask again for the answer to a fused push that is in its round: the value, or whom the round waits for."""

    request: int
    key: Key
    chunk: int
    step: int


class SetRule(Message, tag="rule"):
    """The client's ``ordinal``-th choice of the update rule: a registered name and plain numbers."""

    request: int
    ordinal: int
    rule: str
    hyperparams: dict[str, Number]


class SetHyperparams(Message, tag="hyper"):
    """The client's ``ordinal``-th change of hyperparameters, in force for the rounds after its own last pushes."""

    request: int
    ordinal: int
    hyperparams: dict[str, Number]
    clock: int


class GetState(Message, tag="getstate"):
    """Ask for one chunk with everything its rule remembers."""

    request: int
    key: Key
    chunk: int


class PutState(Message, tag="putstate"):
    """Replace one chunk's rule state, and its value if ``names`` begins with "value"."""

    request: int
    key: Key
    chunk: int
    updates: int
    names: list[str]


class Bye(Message, tag="bye"):
    """The client leaves the store."""

    request: int


class Ack(Message, tag="ack"):
    """The request is done. For a push: it is part of its round; ``version`` counts the updates of the chunk so far."""

    request: int
    version: int


class Value(Message, tag="value"):
    """One chunk's value (a payload frame) after ``version`` updates."""

    request: int
    version: int


class Waiting(Message, tag="waiting"):
    """The request is held back until these clients have contributed."""

    request: int
    clients: list[int]


class State(Message, tag="state"):
    """The answer to ``GetState``: one payload frame for each name, the value first."""

    request: int
    updates: int
    names: list[str]


class Failure(Message, tag="failure"):
    """The request could not be served: the name of an exception of ``kvmpi.errors`` and its message.

    ``used``: the push was part of a round that is over, so that its step is used up; it must not be repeated.
    """

    request: int
    error: str
    text: str
    used: bool = False


class Register(Message, tag="register"):
    """A server (with its endpoints) or a master joins the job at the scheduler."""

    request: int
    role: str
    rank: int
    store: int
    num_members: int
    incarnation: int
    host: str
    endpoints: list[str]


class Roster(Message, tag="roster"):
    """The answer to ``Register``, once every server is there: each server's host and endpoints, in rank order."""

    request: int
    hosts: list[str]
    endpoints: list[list[str]]


class Heartbeat(Message, tag="heartbeat"):
    """The sender is alive; ``clock`` is its training clock."""

    clock: int


class Barrier(Message, tag="barrier"):
    """A master has reached its ``ordinal``-th barrier of its store."""

    request: int
    ordinal: int


class QueryDead(Message, tag="querydead"):
    """Ask the scheduler which clients of the store have been silent for ``timeout_s``."""

    request: int
    timeout_s: float


class Dead(Message, tag="dead"):
    """The ranks of the clients that are dead."""

    request: int
    clients: list[int]


class Leave(Message, tag="leave"):
    """A member ends in good order; its silence from now on is no loss."""

    request: int


class Lost(Message, tag="lost"):
    """The scheduler tells everyone that a member is gone."""

    role: str
    rank: int
    store: int
    incarnation: int
    text: str


_ANY = (
    Hello | Init | Push | Pull | Query | SetRule | SetHyperparams | GetState | PutState | Bye
    | Ack | Value | Waiting | State | Failure
    | Register | Roster | Heartbeat | Barrier | QueryDead | Dead | Leave | Lost
)  # fmt: skip
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(_ANY)


def encode(message: Message) -> bytes:
    """The header frame of ``message``.

    Raises:
        ProtocolError: too large, or not to be encoded: an integer of more than 64 bits, a lone surrogate.
    """
    try:
        header = _MAGIC + _encoder.encode(message)
    except (msgspec.MsgspecError, OverflowError, TypeError, ValueError, RecursionError) as error:
        raise ProtocolError(f"{type(message).__name__} cannot be encoded: {error}") from None
    if len(header) > MAX_HEADER_BYTES:
        raise ProtocolError(f"header of {type(message).__name__} has {len(header)} bytes, limit {MAX_HEADER_BYTES}")
    return header


def decode(header: bytes) -> Message:
    """The message in a header frame.

    Raises:
        ProtocolError: too large, not of this protocol or version, or not a valid message.
    """
    if len(header) > MAX_HEADER_BYTES:
        raise ProtocolError(f"header of {len(header)} bytes, limit {MAX_HEADER_BYTES}")
    if header[:3] != _MAGIC[:3]:
        raise ProtocolError("header does not begin with the magic of kvmpi")
    if header[3:4] != _MAGIC[3:]:
        raise ProtocolError(
            f"protocol version {header[3:4].hex() or 'missing'}, this process speaks {PROTOCOL_VERSION}"
        )
    try:
        return _decoder.decode(memoryview(header)[4:])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"malformed header: {error}") from None
