"""Every exception that kvmpi raises, each also the builtin exception that fits; and how messages name many."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class KVError(RuntimeError):
    """Base of all errors of kvmpi."""


class KeyNotInitializedError(KVError, KeyError):
    """A key was used before ``init``."""

    # KeyError prints repr(args[0]), which would put the whole sentence in quotes.
    __str__ = RuntimeError.__str__


class DuplicateKeyError(KVError, ValueError):
    """A key was initialised twice, or stands twice in one ``init``."""


class KeyKindError(KVError, TypeError):
    """A key is neither int nor str, or a store was given both kinds."""


class ShapeMismatchError(KVError, ValueError):
    """An array's shape differs from the shape that its key was initialised with."""


class DTypeMismatchError(KVError, TypeError):
    """An array's dtype differs from its key's, or is one that kvmpi does not carry."""


class RowIndexError(KVError, IndexError):
    """A row id of a row-sparse push or pull is negative, or not below the number of rows of its key."""


class OrderMismatchError(KVError):
    """The workers of one client issued different collective calls."""


class UnsupportedError(KVError, NotImplementedError):
    """The request is valid, but this store or this environment cannot serve it."""


class NotLaunchedError(KVError):
    """The call needs a job that ``kvmpi run`` or ``mpirun`` has started."""


class KVTimeoutError(KVError, TimeoutError):
    """A wait reached its deadline."""


class PeerLostError(KVError, ConnectionError):
    """Another process of the job is gone."""


#: In a ``ServerLostError`` of values that nobody has any more: no other process of a client would find them.
VALUES_LOST = "its part of the values is lost"
#: In a ``ClientLostError`` of a store that nobody is in any more: another process would come too late as well.
STORE_OVER = "is over, all its clients have left"


class ServerLostError(PeerLostError):
    """A server, or the scheduler, is gone."""


class ClientLostError(PeerLostError):
    """A client is gone, and the job is not allowed to go on without it."""


class AuthenticationError(KVError, PermissionError):
    """A peer could not prove that it belongs to the job."""


class ProtocolError(KVError):
    """A message was malformed, too large, of another version, or out of place."""


class ConfigError(KVError, ValueError):
    """A setting, an argument or the shape of the job makes no sense."""


#: Errors that may travel between processes, by class name.
BY_NAME: dict[str, type[KVError]] = {
    cls.__name__: cls for cls in list(globals().values()) if isinstance(cls, type) and issubclass(cls, KVError)
}


def rebuild(name: str, message: str) -> KVError:
    """The error called ``name`` with ``message``; names from elsewhere become a plain ``KVError``."""
    cls = BY_NAME.get(name)
    return cls(message) if cls is not None else KVError(f"{name}: {message}")


def ranks_in_words(ranks: Iterable[int], most: int = 8) -> str:
    """``3, 17, 201 to 296``: the first ``most`` numbers and ranges, and how many ranks there are besides."""
    found: list[list[int]] = []
    for rank in sorted(ranks):
        if found and rank == found[-1][-1] + 1:
            found[-1].append(rank)
        else:
            found.append([rank])
    # Two that follow each other are shorter as they are.
    parts = [part for run in found for part in ([run] if len(run) > 2 else [[rank] for rank in run])]
    words = [str(part[0]) if len(part) == 1 else f"{part[0]} to {part[-1]}" for part in parts]
    return _first_of(words, most, sum(map(len, parts[most:])))


def names_in_words(names: Sequence[str], most: int = 8) -> str:
    """``a, b, c``: the first ``most``, and how many there are besides."""
    return _first_of(names, most, len(names) - most)


def _first_of(words: Sequence[str], most: int, others: int) -> str:
    return ", ".join(words[:most]) + (f" and {others} more" if len(words) > most else "")
