"""Calls that every client makes, in the same order: the first copy takes effect, the others must equal it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from kvmpi.errors import ConfigError, ProtocolError
from kvmpi.wire.entries import CallsState, RuleInForce


class SharedCalls:
    """The calls of one kind on one server, numbered from 1. Forgets a call when every client has made it.

    Attributes:
        made: how many there were, by whoever was first.
    """

    def __init__(self, name: str, server: int) -> None:
        self._name, self._server = name, server
        self.made = 0
        self._calls: dict[int, Any] = {}
        self._seen: dict[int, int] = {}

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
            self._calls[ordinal] = call
        self._seen[client] = max(ordinal, self._seen.get(client, 0))
        done = min((self._seen.get(other, 0) for other in clients), default=ordinal)
        for number in [number for number in self._calls if number <= done]:
            del self._calls[number]

    def dump(self, pack: Callable[[Any], RuleInForce]) -> CallsState:
        """All of it, for ``restore``; ``pack`` makes an entry of a call."""
        return CallsState(self.made, [(number, pack(call)) for number, call in self._calls.items()], dict(self._seen))

    def restore(self, state: CallsState, unpack: Callable[[RuleInForce], Any]) -> None:
        """Be as ``dump`` has described it."""
        self.made, self._seen = state.made, dict(state.seen)
        self._calls = {number: unpack(call) for number, call in state.open}
