"""Which clients of a store take part in its rounds, and what it means when one does not come back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kvmpi.errors import ClientLostError, ProtocolError, ranks_in_words
from kvmpi.ps.reply import MAX_WHY

CLOSED = "has closed the store"
#: Where others wait for clients that are lost: its program was done without that, and nobody starts it again.
ENDED = "has ended with exit status 0, and had not closed the store"
FOR_GOOD = (CLOSED, ENDED)
#: No job has so many; a peer that claims more is wrong, and lists as long as that must not be made.
MAX_CLIENTS = 1 << 16
#: Ways in which clients have gone that an error tells.
_MOST_WHYS = 3


def how_it_left(why: str) -> str:
    """How a client is gone that has said good-bye, with the error that its program ends with, or empty."""
    return f"has ended with {why[:MAX_WHY]}" if why else CLOSED


def blame(gone: Mapping[int, str]) -> str:
    """Which clients are gone, and how, and what to do; the end of an error of others that cannot go on.

    Those are named that began it: who has ended with a ``ClientLostError`` has only lost others.
    """
    alike: dict[str, list[int]] = {}  # in the order in which they have gone
    for client, why in gone.items():
        alike.setdefault(why, []).append(client)
    first = [why for why in alike if ClientLostError.__name__ not in why] or list(alike)[:1]
    shown = first[:_MOST_WHYS]
    named = ", ".join(f"client {ranks_in_words(alike[why])} {why}" for why in shown)
    if others := len(gone) - sum(len(alike[why]) for why in shown):
        named += f"; {others} more {'is' if others == 1 else 'are'} gone"
    if all(why in FOR_GOOD for why in gone.values()):
        return f"{named}; all clients must make the same calls, or kv.join() where one has fewer batches"
    return f"{named}; look at it first, and at its host; KVMPI_ON_CLIENT_LOSS and --restart let a job go on"


class Membership:
    """The clients of one store in one part.

    Args:
        in_rounds: rounds need a push of each client.
        on_loss: what rounds do without a client that is lost: "fail", "wait" for its return, or "shrink".
    Attributes:
        incarnations: the process of each client that was here last.
        gone: clients that are lost or have closed the store, and how.
        finished: clients that will push nothing further.
        entering: clients that are back and have not said yet which round is their first.
        entered: clients that have said so, and the process of each that has.
        entered_after: and the overall step after which rounds have it again.
        changes: grows when others may be awaited than before.

    Where rounds go on without a client that is gone, another process of it is here as a guest at first: the client is
    still among those that are gone, until that ``bring_back``s it.
    """

    def __init__(self, num_clients: int, *, in_rounds: bool, on_loss: str) -> None:
        self.num_clients, self._in_rounds, self._on_loss = num_clients, in_rounds, on_loss
        self.changes = 0
        self.incarnations: dict[int, int] = {}
        self.gone: dict[int, str] = {}
        # By client: the last process of it that is gone, which never comes back.
        self._ended: dict[int, int] = {}
        self.finished: set[int] = set()
        self.entering: set[int] = set()
        self.entered: dict[int, int] = {}
        self.entered_after: dict[int, int] = {}

    @property
    def deserted(self) -> bool:
        """Whether every client has left, and none is waited for. As ``Barriers.deserted``, but that no round of an
        asynchronous store fails for want of a client: one that is lost there may always come back."""
        if len(self.gone) < self.num_clients or any(map(self.is_guest, self.gone)):
            return False
        if self._on_loss == "shrink":
            return next(reversed(self.gone.values()), "") == CLOSED
        waits = not self._in_rounds or self._on_loss == "wait"
        return not waits or all(why in FOR_GOOD for why in self.gone.values())

    @property
    def is_over(self) -> bool:
        """Whether it is too late to come back: the last client to go has left in good order, so that all is done."""
        return self._on_loss == "shrink" and next(reversed(self.gone.values()), "") == CLOSED

    @property
    def shrinks(self) -> bool:
        """Whether rounds go on without clients that are gone."""
        return self._in_rounds and self._on_loss == "shrink"

    def _returns(self, client: int) -> bool:
        """Whether rounds wait for a client that is gone."""
        return self._in_rounds and self._is_expected(client)

    def _is_expected(self, client: int) -> bool:
        """Whether a client that is gone is waited for."""
        return self._on_loss == "wait" and self.gone[client] not in FOR_GOOD

    def is_awaited(self, client: int) -> bool:
        """Whether, where staleness is bounded, reads of others wait for ``client`` if it is too far behind."""
        return client not in self.finished and (client not in self.gone or self._is_expected(client))

    @property
    def num_here(self) -> int:
        """How many clients still push, as far as is known: all but those that are gone, or have no more to push."""
        return self.num_clients - len(self.gone.keys() | self.finished)

    def is_guest(self, client: int) -> bool:
        """Whether rounds go on without ``client``, and another process of it is here."""
        here = self.incarnations.get(client, -1)
        return self.shrinks and client in self.gone and here > self._ended[client]

    def takes_part(self, client: int) -> bool:
        """Whether ``client`` may push."""
        return client not in self.gone and client not in self.entering

    @property
    def giver(self) -> int | None:
        """Who gives keys their first values: client 0, and where others go on without it the lowest client that is
        here. None: client 0 has to, and never comes."""
        if 0 not in self.gone or self._returns(0):
            return 0
        if self._in_rounds and not self.shrinks:
            return None
        here = (client for client in range(self.num_clients) if client not in self.gone or self.is_guest(client))
        return next((client for client in here if client not in self.finished), None)

    def is_needed(self, client: int) -> bool:
        """Whether a round that ``client`` has not pushed to has to wait for it."""
        return client not in self.finished and not (client in self.gone and self._on_loss == "shrink")

    def ends(self, client: int) -> bool:
        """Whether ``client`` is gone, and rounds that need it can never be completed."""
        return client in self.gone and self.is_needed(client) and not self._returns(client)

    def ending(self) -> Iterator[int]:
        """The clients that are gone for which ``ends``."""
        return filter(self.ends, () if self._on_loss == "shrink" else self.gone)  # where nobody waits for who is gone

    def knows(self, client: int, incarnation: int) -> bool:
        """Whether this very process is here already, or has been.

        Raises:
            ProtocolError: a later one of this client is.
        """
        before = self.incarnations.get(client, -1)
        if incarnation < before:
            raise ProtocolError(f"client {client} has a later incarnation already")
        return incarnation == before or self.has_ended(client, incarnation)

    def has_ended(self, client: int, incarnation: int) -> bool:
        """Whether this process of a client is known to be gone."""
        return client in self._ended and incarnation <= self._ended[client]

    def finish(self, client: int) -> None:
        """A client has no more to push."""
        self.finished.add(client)
        self.changes += 1

    def lose(self, client: int, why: str, incarnation: int) -> None:
        """A process of a client, and those before it, will push no more."""
        self.changes += 1
        self.gone.pop(client, None)  # its place among them is that of its last end
        self.gone[client] = why
        self._ended[client] = incarnation
        self.entering.discard(client)

    def can_return(self, client: int) -> bool:
        """Whether the process of ``client`` that is here comes after one that rounds may go on without.

        Also if they have not: this server may not have known the one before.
        """
        can = self.shrinks and client not in self.entering
        return can and self.entered.get(client) != self.incarnations.get(client)

    def bring_back(self, client: int) -> None:
        """Rounds wait again for a client that was gone, until it has entered."""
        self.changes += 1
        self.gone.pop(client, None)
        self.finished.discard(client)
        self.entering.add(client)
        self.entered_after.pop(client, None)

    def enter(self, client: int, step: int) -> None:
        """A client that is back takes part again, in rounds of overall steps after ``step``."""
        self.entering.discard(client)
        self.entered[client], self.entered_after[client] = self.incarnations[client], step

    def losses(self) -> list[tuple[int, str, int]]:
        """What has to be said to ``lose`` to make this of nothing."""
        return [(client, why, self._ended[client]) for client, why in self.gone.items()]

    def take_in(self, client: int, incarnation: int) -> bool:
        """A process takes the client's part; whether it takes the place of another that counts no more."""
        self.changes += 1
        before = self.incarnations.get(client, incarnation)
        replaces = incarnation > before
        self.incarnations[client] = incarnation
        if client in self.gone and (not self._in_rounds or self._returns(client)):
            del self.gone[client]
        elif replaces and self._in_rounds and self._on_loss != "wait" and client not in self.gone:
            self.lose(client, "was lost and started again", before)
        return replaces

    def refusal(self, client: int) -> ClientLostError | None:
        """Why ``client`` cannot take part (any more)."""
        if client not in self.gone or self.shrinks:
            return None
        cannot = "the rounds of a synchronous store cannot go on with it; start the job again"
        return ClientLostError(f"client {client} {self.gone[client]}, and {cannot}")

    def blame(self) -> str:
        """Who is gone and needed."""
        return blame({client: self.gone[client] for client in self.ending()})
