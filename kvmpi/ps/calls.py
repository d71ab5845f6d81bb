"""Calls that every client makes, in the same order: the first copy takes effect, the others must equal it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from kvmpi.errors import ConfigError, ProtocolError
from kvmpi.wire.entries import CallsState, RuleInForce

#: Calls that not all clients have made are kept for comparison: the last ones that together are no longer. A server
#: that joins a chain is told of them, and of the rule, in one message.
_MOST_BYTES = 60_000


class SharedCalls:
    """The calls of one kind on one server, numbered from 1. Forgets a call when every client has made it,
    and if clients are so far apart that very many are open, the oldest: these are not compared any more.

    Attributes:
        made: how many there were, by whoever was first.
    """

    def __init__(self, name: str, server: int) -> None:
        self._name, self._server = name, server
        self.made = 0
        self._calls: dict[int, Any] = {}
        self._sizes: dict[int, int] = {}  # in bytes, of the same
        self._seen: dict[int, int] = {}
        self._bytes = 0

    def is_repeat(self, client: int, ordinal: int, call: Any, at: str = "") -> bool:
        """Whether this is another client's, or a repeated, copy of a call that has taken effect.

        Args:
            at: when ``client`` has made it, in words.

        Raises:
            ProtocolError: the client skips a number.
            ConfigError: another client's call of this number was different.
        """
        if ordinal == self.made + 1:
            return False
        if not 1 <= ordinal <= self.made:
            raise ProtocolError(
                f"{self._name} number {ordinal} of client {client} on server {self._server} is out of turn"
            )
        if ordinal in self._calls and self._calls[ordinal] != call:
            raise ConfigError(
                f"{self._name} call {ordinal}: client {client}{at} says {call}, an earlier client said "
                f"{self._calls[ordinal]}; all clients must make the same calls"
            )
        return True

    def made_by(self, client: int) -> int:
        """How many of the calls ``client`` has made."""
        return self._seen.get(client, 0)

    def note(self, client: int, ordinal: int, call: Any, clients: Iterable[int]) -> None:
        """``client`` has made this call, which is valid. ``clients`` are those of whom more calls are expected."""
        if ordinal > self.made:
            self.made = ordinal
            self._keep(ordinal, call)
        self._seen[client] = max(ordinal, self._seen.get(client, 0))
        done = min((self._seen.get(other, 0) for other in clients), default=ordinal)
        while self._calls and ((oldest := next(iter(self._calls))) <= done or self._bytes > _MOST_BYTES):
            del self._calls[oldest]
            self._bytes -= self._sizes.pop(oldest)

    def _keep(self, number: int, call: Any) -> None:
        self._calls[number], self._sizes[number] = call, len(msgspec.msgpack.encode(call)) + 32
        self._bytes += self._sizes[number]

    def dump(self, pack: Callable[[Any], RuleInForce]) -> CallsState:
        """All of it, for ``restore``; ``pack`` makes an entry of a call."""
        return CallsState(self.made, [(number, pack(call)) for number, call in self._calls.items()], dict(self._seen))

    def restore(self, state: CallsState, unpack: Callable[[RuleInForce], Any]) -> None:
        """Be as ``dump`` has described it."""
        self.made, self._seen = state.made, dict(state.seen)
        self._calls, self._sizes, self._bytes = {}, {}, 0
        for number, call in state.open:
            self._keep(number, unpack(call))
