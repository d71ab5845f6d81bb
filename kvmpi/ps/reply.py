"""What a state machine sends: a message and where it goes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from kvmpi.errors import KVError
from kvmpi.wire import Message
from kvmpi.wire import messages as m

if TYPE_CHECKING:
    import numpy.typing as npt

#: Of a longer list only the beginning is named: a message must stay small whatever a peer claims.
MAX_NAMED = 64
MAX_TEXT = 4000
#: Of the name of an exception: one that is longer is none that anybody knows.
MAX_ERROR_NAME = 100
#: Of why a client has ended, which is repeated in every error because of that.
MAX_WHY = 300


class Reply(NamedTuple):
    """A message to send to the peer at ``route``."""

    route: bytes
    message: Message
    payloads: tuple[npt.NDArray[Any], ...] = ()


class Forward(NamedTuple):
    """A message to send to another server."""

    server: int
    message: Message
    payloads: tuple[npt.NDArray[Any], ...] = ()


Outgoing = Reply | Forward


def failure(route: bytes, request: int, error: Exception, *, used: bool = False) -> Reply:
    """``error`` as a reply."""
    return Reply(route, m.Failure(request, *name_and_text(error), used))


def name_and_text(error: Exception) -> tuple[str, str]:
    """``error`` as it travels. What is no ``KVError`` is a defect, and says its type."""
    known = isinstance(error, KVError)
    # What repr could not print comes back to us in error messages, and must be encoded once more.
    text = str(error) if known else f"{type(error).__name__}: {error}"
    return type(error).__name__ if known else "KVError", text[:MAX_TEXT].encode(errors="backslashreplace").decode()


def why_ended(error: BaseException) -> str:
    """What others are told of a client whose program ends with ``error``: its type and first line."""
    text = ": ".join([type(error).__name__, *str(error).splitlines()[:1]])
    return text[:MAX_WHY].encode(errors="backslashreplace").decode()
