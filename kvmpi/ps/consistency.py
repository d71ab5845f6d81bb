"""When contributions become an update, and when a value may be read: the synchronous and asynchronous disciplines."""

from __future__ import annotations

from abc import ABC, abstractmethod

from kvmpi.errors import ConfigError


class Consistency(ABC):
    """How the pushes of several clients to one chunk combine. Subclass it, set ``name``, and ``register`` it."""

    name = ""
    #: Contributions are added in client order, each round holds one of each, and step s belongs to round s.
    in_rounds = False

    @abstractmethod
    def complete(self, contributed: int, num_clients: int) -> bool:
        """Whether ``contributed`` pushes make an update."""

    @abstractmethod
    def readable(self, rounds: int, min_round: int) -> bool:
        """Whether a reader who has pushed ``min_round`` times may see the value after ``rounds`` updates."""


_DISCIPLINES: dict[str, Consistency] = {}


def register(cls: type[Consistency]) -> type[Consistency]:
    """Make a discipline available by its name."""
    _DISCIPLINES[cls.name] = cls()
    return cls


def get(name: str) -> Consistency:
    """The discipline called ``name``.

    Raises:
        ConfigError: no such discipline.
    """
    if name not in _DISCIPLINES:
        raise ConfigError(f"consistency {name!r}; known: {', '.join(sorted(_DISCIPLINES))}")
    return _DISCIPLINES[name]


@register
class Synchronous(Consistency):
    """One update per round, after every client's push; a reader sees the round that it pushed."""

    name = "sync"
    in_rounds = True

    def complete(self, contributed: int, num_clients: int) -> bool:
        return contributed >= num_clients

    def readable(self, rounds: int, min_round: int) -> bool:
        return rounds >= min_round


@register
class Asynchronous(Consistency):
    """One update per push, at once; a reader sees the newest value."""

    name = "async"

    def complete(self, contributed: int, num_clients: int) -> bool:
        return True

    def readable(self, rounds: int, min_round: int) -> bool:
        return True
