"""What a request brings to a chunk, checked before anything is changed."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from kvmpi.arrays import DTYPES
from kvmpi.errors import ConfigError, DTypeMismatchError, ProtocolError, ShapeMismatchError
from kvmpi.kernels import host
from kvmpi.kernels.rows import Rows
from kvmpi.ps.codec import Codec
from kvmpi.ps.row_chunks import check_ids
from kvmpi.ps.slot import Slot
from kvmpi.wire import as_array
from kvmpi.wire import messages as m
from kvmpi.wire.entries import Key

Buffer = npt.NDArray[Any]

#: As many as an array of NumPy or PyTorch can have. The product of very many lengths takes seconds.
_MAX_DIMENSIONS = 64


def check_shape(message: m.Init) -> None:
    """What a key is said to be must be possible, since snapshots and other servers take it as it is.

    Raises:
        ProtocolError: it is not.
    """
    if len(message.shape) > _MAX_DIMENSIONS:
        raise ProtocolError(
            f"init of key {message.key!r}: {len(message.shape)} dimensions, no key has more than {_MAX_DIMENSIONS}"
        )
    elements = math.prod(message.shape)
    fits = message.count == elements if message.num_chunks == 1 else 0 <= message.count <= elements
    if min(message.shape, default=0) < 0 or not fits or message.num_chunks > max(1, elements):
        raise ProtocolError(
            f"init of key {message.key!r}: {message.count} elements in chunk {message.chunk} of "
            f"{message.num_chunks} cannot be of shape {tuple(message.shape[:16])}"
        )


def check_steps(message: m.Push, most: int) -> None:
    """What a push says of steps is counted on with, and said to others.

    Raises:
        ProtocolError: there are no such steps.
    """
    if message.step < 1:  # taken for one that is done it would be lost in silence
        raise ProtocolError(f"push of key {message.key!r}: there is no step {message.step}, the first one is 1")
    at, done, earliest, latest = message.at, message.done, message.earliest, message.latest
    if not (at or done or earliest or latest):  # nobody wants to know
        return
    if not (abs(at) <= most and 0 <= done <= most and 0 <= earliest <= latest <= most):
        raise ProtocolError(
            f"push of key {message.key!r}: overall step {at}, done {done}, steps {earliest} to {latest} cannot be"
        )


def check_same(client: int, message: m.Init, known: m.Init, count: int | None, known_by: str) -> None:
    """``client`` must mean by a key what ``known_by`` meant.

    Args:
        count: elements in this chunk of the key, if it is here.
    Raises:
        ShapeMismatchError, DTypeMismatchError: it has another shape or dtype.
        ConfigError: it cuts the key in another way.
    """
    text = f"init of key {message.key!r}: client {client} has {{}} {{}}, {known_by} has {{}}; all must be equal"
    if message.shape != known.shape:
        raise ShapeMismatchError(text.format("shape", tuple(message.shape), tuple(known.shape)))
    if message.dtype != known.dtype:
        raise DTypeMismatchError(text.format("dtype", message.dtype, known.dtype))
    cut = f"KVMPI_CHUNK_BYTES, KVMPI_MAX_MESSAGE_BYTES or KVMPI_PLACEMENT other than {known_by}, giving"
    if message.num_chunks != known.num_chunks:
        raise ConfigError(text.format(f"{cut} chunks:", message.num_chunks, known.num_chunks))
    if count is not None and message.count != count:
        raise ConfigError(text.format(f"{cut} elements in chunk {message.chunk}:", message.count, count))


def chunk_array(key: Key, payloads: list[memoryview], dtype: str, count: int, what: str) -> Buffer:
    """The one payload of a request, as ``count`` elements.

    Raises:
        ProtocolError: it is something else.
    """
    if len(payloads) != 1:
        raise ProtocolError(f"{what} of key {key!r}: {len(payloads)} payload frames, expected 1")
    array = as_array(payloads[0], DTYPES[dtype])
    if array.size != count:
        raise ProtocolError(f"{what} of key {key!r}: {array.size} elements in this chunk, expected {count}")
    return array


def pushed(slot: Slot, rows: int, payloads: list[memoryview], encoding: Codec) -> Buffer | Rows:
    """What a push brings, of ``encoding.wire_dtype``: all of the chunk, or, unless -1, some ``rows``.

    Raises:
        ProtocolError: it is something else, or no such rows can be in this chunk.
    """
    if rows < 0 and len(payloads) == 1 and encoding.name == "none" and payloads[0].nbytes == slot.value.nbytes:
        return np.frombuffer(payloads[0], slot.value.dtype)  # as a rule
    what = "push" if rows < 0 else "push of rows"
    frames = 1 + (rows >= 0)
    if len(payloads) != frames:
        raise ProtocolError(f"{what} of key {slot.key!r}: {len(payloads)} payload frames, expected {frames}")
    ids = None if rows < 0 else row_ids(slot, payloads[0], rows, "push")
    payload, count = payloads[-1], slot.count if ids is None else ids.size * slot.width
    nbytes = encoding.wire_bytes(count, slot.dtype)
    if payload.nbytes != nbytes:
        raise ProtocolError(
            f"{what} of key {slot.key!r}: {payload.nbytes} bytes came, expected {nbytes} for {count} elements of "
            f"{slot.dtype} with codec {encoding.text!r}"
        )
    values = encoding.decode(payload, count, slot.dtype)
    return values if ids is None else Rows(ids, values.reshape(ids.size, slot.width))


def row_ids(slot: Slot, payload: memoryview, count: int, what: str) -> Buffer:
    """The numbers of ``count`` rows of a chunk.

    Raises:
        ProtocolError: the chunk does not have these rows.
    """
    width = slot.width
    if slot.count and (not width or slot.count % width):
        raise ProtocolError(f"{what} of rows of key {slot.key!r}: its chunk {slot.chunk} is not cut at rows")
    try:
        return check_ids(payload, count, slot.count // width if width else 0)
    except ProtocolError as error:
        raise ProtocolError(f"{what} of rows of key {slot.key!r}, chunk {slot.chunk}: {error}") from None


def state_arrays(slot: Slot, message: m.PutState, payloads: list[memoryview], max_updates: int) -> dict[str, Buffer]:
    """The state of a chunk that is to be restored, by name.

    Raises:
        ProtocolError: no chunk like this one can be in such a state.
    """
    named = len(message.names) == len(payloads) == len(set(message.names) - {slot.OLD_VALUE, slot.TOUCHED})
    if not named or not 0 <= message.updates <= max_updates:
        raise ProtocolError(
            f"state of key {message.key!r}: {len(payloads)} payloads for the names {message.names} "
            f"after {message.updates} updates"
        )
    arrays = {}
    for name, payload in zip(message.names, payloads, strict=True):
        dtype = slot.dtype if name == "value" else host.ACCUMULATE[slot.dtype]
        arrays[name] = chunk_array(message.key, [payload], dtype, slot.count, f"state {name!r}")
    return arrays
