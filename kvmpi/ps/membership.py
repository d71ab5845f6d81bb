"""Which clients of a store take part in its rounds, and what it means when one does not come back."""

from __future__ import annotations

from itertools import islice

from kvmpi.errors import ClientLostError, ProtocolError
from kvmpi.ps.reply import MAX_NAMED

CLOSED = "has closed the store"


class Membership:
    """The clients of one store in one part.

    Args:
        in_rounds: rounds need a push of each client.
        on_loss: what rounds do without a client that is lost: "fail", "wait" for its return, or "shrink".
    Attributes:
        incarnations: the process of each client that was here last.
        gone: clients that are lost or have closed the store, and how.
        finished: clients that will push nothing further.
    """

    def __init__(self, num_clients: int, *, in_rounds: bool, on_loss: str) -> None:
        self.num_clients, self._in_rounds, self._on_loss = num_clients, in_rounds, on_loss
        self.incarnations: dict[int, int] = {}
        self.gone: dict[int, str] = {}
        # By client: the last process of it that is gone, which never comes back.
        self._ended: dict[int, int] = {}
        self.finished: set[int] = set()

    @property
    def present(self) -> list[int]:
        """The clients that are not gone."""
        return [client for client in range(self.num_clients) if client not in self.gone]

    @property
    def deserted(self) -> bool:
        """Whether every client has left, and none is waited for."""
        return len(self.gone) == self.num_clients and not any(map(self._returns, self.gone))

    def _returns(self, client: int) -> bool:
        """Whether a client that is gone is waited for."""
        return self._in_rounds and self._on_loss == "wait" and self.gone[client] != CLOSED

    def is_needed(self, client: int) -> bool:
        """Whether a round that ``client`` has not pushed to has to wait for it."""
        return client not in self.finished and not (client in self.gone and self._on_loss == "shrink")

    def ends(self, client: int) -> bool:
        """Whether ``client`` is gone, and rounds that need it can never be completed."""
        return client in self.gone and self.is_needed(client) and not self._returns(client)

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

    def lose(self, client: int, why: str, incarnation: int) -> None:
        """A process of a client, and those before it, will push no more."""
        self.gone[client] = why
        self._ended[client] = incarnation

    def losses(self) -> list[tuple[int, str, int]]:
        """What has to be said to ``lose`` to make this of nothing."""
        return [(client, why, self._ended[client]) for client, why in self.gone.items()]

    def take_in(self, client: int, incarnation: int) -> bool:
        """A process takes the client's part; whether it takes the place of another that counts no more."""
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
        if client not in self.gone:
            return None
        cannot = "the rounds of a synchronous store cannot go on with it; start the job again"
        if self._on_loss == "shrink":
            cannot = "the rounds of a synchronous store go on without it"
        return ClientLostError(f"client {client} {self.gone[client]}, and {cannot}")

    def blame(self) -> str:
        """Who is gone and needed."""
        named = [f"client {client} {why}" for client, why in sorted(self.gone.items()) if self.ends(client)]
        return ", ".join(islice(named, MAX_NAMED))
