"""Several small messages to one peer as one: what a call on many keys says is short, and so are its answers.

A bundle is a header frame like that of a message, and one frame with all payloads one behind another. Neither state
machines nor users see it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
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
    most_bytes = min(_MOST_BYTES, most_bytes)
    small_bytes = min(SMALL_BYTES, most_bytes)
    group: list[Outgoing] = []
    room = most_bytes
    for outgoing in messages:
        payloads = outgoing[1]
        size = sum([payload.nbytes for payload in payloads]) if payloads else 0
        if group and (size > room or size >= small_bytes or len(group) == MOST_MESSAGES):
            yield from _sealed(group, reject, most_bytes // 4)
            group, room = [], most_bytes
        group.append(outgoing)
        room -= size
        if size >= small_bytes:
            yield from _sealed(group, reject, 0)
            group, room = [], most_bytes
    if group:
        yield from _sealed(group, reject, most_bytes // 4)


def _sealed(
    group: list[Outgoing], reject: Callable[[Message, ProtocolError], None], most_bytes: int
) -> Iterator[tuple[bytes, Sequence[Payload]]]:
    """Messages as one, encoded at once; as several, if that would have a header of more than ``most_bytes``."""
    if len(group) == 1:
        [(message, payloads)] = group
        try:
            yield encoding.encode(message), payloads
        except ProtocolError as error:
            reject(message, error)
        return
    messages: list[Any] = [message for message, _ in group]
    sizes = [[payload.nbytes for payload in payloads] for _, payloads in group]
    try:
        header = encoding.BEGINNING + _encoder.encode(Bundle(messages, sizes))
    except encoding.CANNOT_BE_ENCODED:
        if left := [outgoing for outgoing in group if _can_be_encoded(outgoing[0], reject)]:
            yield from _sealed(left, reject, most_bytes)
        return
    if len(header) <= most_bytes:
        yield header, _joined([payload for _, payloads in group for payload in payloads])
        return
    middle = len(group) // 2
    yield from _sealed(group[:middle], reject, most_bytes)
    yield from _sealed(group[middle:], reject, most_bytes)


def _can_be_encoded(message: Message, reject: Callable[[Message, ProtocolError], None]) -> bool:
    try:
        encoding.encode(message)
    except ProtocolError as error:
        reject(message, error)
        return False
    return True


def _joined(payloads: list[Payload]) -> Sequence[Payload]:
    if not payloads:
        return ()
    import numpy as np  # a scheduler, which has no payloads, starts without

    return (np.frombuffer(b"".join([payload.data for payload in payloads if payload.nbytes]), np.uint8),)


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
    flat = [size for each in sizes for size in each]
    if (flat and min(flat) < 0) or len(frames) != bool(flat):
        raise ProtocolError(f"a bundle with {len(frames)} payload frames")
    if not flat:
        return [(message, []) for message in messages]
    [frame], total = frames, sum(flat)
    if frame.nbytes != total:
        raise ProtocolError(f"a bundle with {frame.nbytes} bytes of payloads, which says {total}")
    ends = accumulate(flat)
    return [
        (message, [frame[(end := next(ends)) - size : end] for size in each])
        for message, each in zip(messages, sizes, strict=True)
    ]
