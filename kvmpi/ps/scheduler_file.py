"""What a scheduler that is started again has to know, and the file that it is kept in."""

from __future__ import annotations

import contextlib
import os

import msgspec

from kvmpi.errors import ConfigError
from kvmpi.wire.messages import Chain, Lost


class SavedMember(msgspec.Struct, array_like=True):
    """A server, or a client's master in one store."""

    role: str
    store: int
    rank: int
    route: bytes
    incarnation: int
    host: str
    endpoints: list[str]


class SavedStore(msgspec.Struct, array_like=True):
    """A store's clients and barriers."""

    number: int
    num_clients: int
    barriers_done: int
    dead: dict[int, str]
    finished: list[int]
    returning: dict[int, int] = {}
    left: dict[int, int] = {}
    first: dict[int, int] = {}
    outcomes: dict[int, tuple[str, str, int, bool]] = {}
    passed: dict[int, int] = {}
    did_after: int = -1


class SavedScheduler(msgspec.Struct, array_like=True):
    """All of it but snapshots under way. ``chains`` and what belongs to them are empty until all servers were there."""

    epoch: int
    chains: list[Chain]
    alive: list[int]
    wanted_heads: list[int]
    members: list[SavedMember]
    stores: list[SavedStore]
    lost: list[Lost]
    snapshot: int = 0  # what the job was resumed from, and how far its stores were there
    steps: dict[int, int] = {}
    over: list[int] = []
    ended: dict[int, str] = {}


def write(path: str, saved: SavedScheduler) -> None:
    """Replace the file at ``path``: a process that dies while it writes leaves the old one.

    Raises:
        OSError: it cannot be written, as on a full disk; the old one is still there.
    """
    try:
        with open(path + ".new", "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(msgspec.msgpack.encode(saved))
        os.replace(path + ".new", path)
    except OSError:
        remove(path + ".new")
        raise


def remove(path: str) -> None:
    """Remove the file, if there is one."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def read(path: str) -> SavedScheduler | None:
    """What the file says; None if there is none.

    Raises:
        ConfigError: it is something else.
    """
    try:
        with open(path, "rb") as file:
            return msgspec.msgpack.decode(file.read(), type=SavedScheduler)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"the state of the scheduler in {path} cannot be read: {error}") from None
