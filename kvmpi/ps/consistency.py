"""When contributions become an update, and when a value may be read: synchronous, asynchronous, and in between."""

from __future__ import annotations

from abc import ABC, abstractmethod

from kvmpi.errors import ConfigError


class Consistency(ABC):
    """How the pushes of several clients to one chunk combine. Subclass it, set ``name``, and ``register`` it."""

    name = ""
    #: Contributions are added in client order, each round holds one of each, and step s belongs to round s.
    in_rounds = False
    #: Each contribution is an update, and who reads may have to wait for clients that have pushed less often.
    holds_reads = False
    #: Some contributions together are an update, whoever they are from, and nobody waits for it.
    gathers = False

    def size(self, num_clients: int) -> int:
        """How many pushes make an update where so many clients take part."""
        return num_clients if self.in_rounds else 1

    @abstractmethod
    def complete(self, contributed: int, num_clients: int) -> bool:
        """Whether ``contributed`` pushes make an update."""

    @abstractmethod
    def readable(self, reached: int, pushed: int) -> bool:
        """Whether a reader who has pushed so often may see the value.

        Args:
            reached: in rounds, how many are over; else how often each of the others has pushed, at least.
        """


_DISCIPLINES: dict[str, type[Consistency]] = {}


def register(cls: type[Consistency]) -> type[Consistency]:
    """Make a discipline available by its name; what is behind a colon its ``__init__`` gets, as a text."""
    _DISCIPLINES[cls.name] = cls
    return cls


def discipline(mode: str) -> Consistency:
    """The discipline called ``mode``, maybe with a parameter: ``ssp:3``.

    Raises:
        ConfigError: no such discipline, or not with this parameter.
    """
    name, colon, parameter = mode.partition(":")
    cls = _DISCIPLINES.get(name)
    if cls is None:
        raise ConfigError(f"consistency {mode[:80]!r}; known: {', '.join(sorted(_DISCIPLINES))}")
    try:
        return cls(parameter) if colon else cls()  # type: ignore[call-arg]
    except (TypeError, ValueError):
        raise ConfigError(f"consistency {mode[:80]!r}: {name} has no such parameter") from None


@register
class Synchronous(Consistency):
    """One update per round, after every client's push; a reader sees the round that it pushed."""

    name = "sync"
    in_rounds = True

    def complete(self, contributed: int, num_clients: int) -> bool:
        return contributed >= num_clients

    def readable(self, reached: int, pushed: int) -> bool:
        return reached >= pushed


@register
class Asynchronous(Consistency):
    """One update per push, at once; a reader sees the newest value."""

    name = "async"

    def complete(self, contributed: int, num_clients: int) -> bool:
        return True

    def readable(self, reached: int, pushed: int) -> bool:
        return True


@register
class BoundedStaleness(Asynchronous):
    """One update per push, at once; a reader waits until nobody is more than ``staleness`` pushes behind it.

    Source: Ho et al., "More effective distributed ML via a stale synchronous parallel parameter server", NIPS 2013. A
    worker at their clock c has pushed c times, and sees all updates of the clocks up to c - staleness - 1, the first of
    which is 0: the first c - staleness pushes of everyone.
    """

    name = "ssp"
    holds_reads = True

    def __init__(self, staleness: str) -> None:
        self.staleness = int(staleness)
        if self.staleness < 0:
            raise ValueError

    def readable(self, reached: int, pushed: int) -> bool:
        return reached >= pushed - self.staleness


@register
class SoftSynchronous(Asynchronous):
    """One update when a ``splits``-th part of the clients' number of pushes is there; a reader sees the newest value.

    Source: Gupta, Zhang, Milthorpe, "Model accuracy and runtime tradeoff in distributed deep learning" (Rudra), 2015,
    arXiv:1509.04210: n-softsync, whose server updates after floor(clients / n) gradients, from whichever clients.
    """

    name = "softsync"
    gathers = True

    def __init__(self, splits: str) -> None:
        self.splits = int(splits)
        if self.splits < 1:
            raise ValueError

    def size(self, num_clients: int) -> int:
        return max(1, num_clients // self.splits)

    def complete(self, contributed: int, num_clients: int) -> bool:
        return contributed >= self.size(num_clients)
