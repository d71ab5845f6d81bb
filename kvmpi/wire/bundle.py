"""Several small messages to one peer as one: what a call on many keys says is short, and so are its answers.

A bundle is a header frame like that of a message, and one frame with all payloads one behind another. Neither state
machines nor users see it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from kvmpi.errors import ProtocolError
from kvmpi.wire import encoding
from kvmpi.wire.messages import AnyMessage, Message
from kvmpi.wire.partner import SHARE_FROM_BYTES

if TYPE_CHECKING:
    import numpy.typing as npt

Payload: TypeAlias = "npt.NDArray[Any]"
Outgoing: TypeAlias = "tuple[Message, Sequence[Payload]]"

#: A message travels in a bundle if its payloads are smaller: others are as well off alone.
SMALL_BYTES = SHARE_FROM_BYTES
#: So many may be in one, and so many bytes of payloads; of headers a quarter.
MOST_MESSAGES = 256
_MOST_BYTES = 256 << 10


class Bundle(msgspec.Struct, array_like=True, tag="bundle"):
    """``messages``, and for each the bytes of each of its payloads."""

    messages: list[AnyMessage]  # type: ignore[valid-type]
    sizes: list[list[int]]


class _Sealed(msgspec.Struct, array_like=True, tag="bundle"):
    """The same, of messages that are encoded."""

    messages: list[msgspec.Raw]
    sizes: list[list[int]]


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(AnyMessage | Bundle)


def gathered(
    messages: Iterable[Outgoing], reject: Callable[[Message, ProtocolError], None], most_bytes: int
) -> Iterator[tuple[bytes, Sequence[Payload]]]:
    """What to send for ``messages``, all to one peer and in their order: header frames with their payloads.

    Args:
        reject: gets messages that cannot be encoded; nothing of them is sent.
        most_bytes: no frame of several messages has more; 0: each message goes alone.
    """
    bodies: list[bytes] = []
    joined: list[Sequence[Payload]] = []
    nbytes = header_bytes = 0
    most_bytes = min(_MOST_BYTES, most_bytes)
    for message, payloads in messages:
        try:
            body = encoding.encode(message)
        except ProtocolError as error:
            reject(message, error)
            continue
        size = sum([payload.nbytes for payload in payloads]) if payloads else 0
        is_small = max(size, len(body)) < min(SMALL_BYTES, most_bytes)
        if bodies and (
            not is_small or nbytes + size > most_bytes or header_bytes + len(body) > most_bytes // 4
            or len(bodies) == MOST_MESSAGES
        ):  # fmt: skip
            yield _sealed(bodies, joined)
            bodies, joined, nbytes, header_bytes = [], [], 0, 0
        if not is_small:
            yield body, payloads
            continue
        bodies.append(body)
        joined.append(payloads)
        nbytes += size
        header_bytes += len(body)
    if bodies:
        yield _sealed(bodies, joined)


def _sealed(bodies: list[bytes], joined: list[Sequence[Payload]]) -> tuple[bytes, Sequence[Payload]]:
    if len(bodies) == 1:
        return bodies[0], joined[0]
    raw = [msgspec.Raw(body[len(encoding.BEGINNING) :]) for body in bodies]
    sizes = [[payload.nbytes for payload in payloads] for payloads in joined]
    header = encoding.BEGINNING + _encoder.encode(_Sealed(raw, sizes))
    flat = [payload for payloads in joined for payload in payloads]
    if not flat:
        return header, ()
    import numpy as np  # a scheduler, which has no payloads, starts without

    return header, (np.frombuffer(b"".join([payload.data for payload in flat if payload.nbytes]), np.uint8),)


def parted(header: bytes, frames: list[memoryview]) -> list[tuple[Message, list[memoryview]]]:
    """The messages that have come, with their payloads: one, or those in a bundle.

    Raises:
        ProtocolError: as ``decode``, or a bundle that is not as it says.
        OtherVersionError: as ``decode``.
    """
    found = encoding.decode(header, _decoder)
    if not isinstance(found, Bundle):
        return [(found, frames)]
    messages, sizes = found.messages, found.sizes
    if not 0 < len(messages) == len(sizes) <= MOST_MESSAGES:
        raise ProtocolError(f"a bundle of {len(messages)} messages, and sizes of {len(sizes)}")
    total = sum(map(sum, sizes))
    if any(size < 0 for each in sizes for size in each) or len(frames) != int(any(sizes)):
        raise ProtocolError(f"a bundle with {len(frames)} payload frames")
    if frames and frames[0].nbytes != total:
        raise ProtocolError(f"a bundle with {frames[0].nbytes} bytes of payloads, which says {total}")
    together: list[tuple[Message, list[memoryview]]] = []
    start = 0
    for message, each in zip(messages, sizes, strict=True):
        payloads = []
        for size in each:
            payloads.append(frames[0][start : start + size])
            start += size
        together.append((message, payloads))
    return together
