"""Calls that every client makes, in the same order: the first copy takes effect, the others must equal it.

A process that was started again may make all calls of its program again, or only those of the steps that are left.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from kvmpi.errors import ConfigError, ProtocolError
from kvmpi.wire.entries import CallsState, RuleInForce

#: The last calls that together are no longer are kept for comparison. A server that joins a chain is told of them, and
#: of the rule, in one message.
_MOST_BYTES = 60_000


class SharedCalls:
    """The calls of one kind on one server, numbered from 1. Forgets the oldest: these are not compared any more.

    Attributes:
        made: how many there were, by whoever was first.
    """

    def __init__(self, name: str, server: int) -> None:
        self._name, self._server = name, server
        self.made = 0
        self._calls: dict[int, tuple[Any, int]] = {}  # and at which step of its program somebody has made it first
        self._sizes: dict[int, int] = {}  # in bytes, of the same
        self._seen: dict[int, int] = {}
        self._bytes = 0

    def number_of(self, client: int, ordinal: int, call: Any, step: int, *, again: bool, pushed: bool) -> int:
        """Which call this is: the ``ordinal``-th that the process makes.

        Another process of a client may have left calls out that were made in steps that are done: then it is a later
        one that equals it, or one that nobody has made.

        Args:
            step: of its program.
            again: others have gone on without the process before this one.
            pushed: this process goes on where another was, and has pushed since. Before that it may make all calls once
                more, in their order; one that is out of this order, or comes after, was not made before ``step``.
        """
        made_before = again or pushed or ordinal <= self._seen.get(client, 0)
        if not made_before or (ordinal not in self._calls and not pushed):  # not made yet, or long ago
            return ordinal
        known, at = self._calls.get(ordinal, (None, 0))
        if known == call and (at >= step or not pushed):
            return ordinal
        for number, (known, at) in self._calls.items():
            if number > ordinal and known == call and at >= step:
                return number
        return self.made + 1

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
        if ordinal in self._calls and (known := self._calls[ordinal][0]) != call:
            raise ConfigError(
                f"{self._name} call {ordinal}: client {client}{at} says {call}, an earlier client said {known}; all "
                "clients must make the same calls"
            )
        return True

    def made_by(self, client: int) -> int:
        """How many of the calls ``client`` has made."""
        return self._seen.get(client, 0)

    def note(self, client: int, ordinal: int, call: Any, step: int) -> None:
        """``client`` has made this call, which is valid, at ``step`` of its program."""
        if ordinal > self.made:
            self.made = ordinal
            self._keep(ordinal, call, step)
        self._seen[client] = max(ordinal, self._seen.get(client, 0))
        while self._bytes > _MOST_BYTES:
            oldest = next(iter(self._calls))
            del self._calls[oldest]
            self._bytes -= self._sizes.pop(oldest)

    def _keep(self, number: int, call: Any, step: int) -> None:
        self._calls[number], self._sizes[number] = (call, step), len(msgspec.msgpack.encode(call)) + 32
        self._bytes += self._sizes[number]

    def dump(self, pack: Callable[[Any, int], RuleInForce]) -> CallsState:
        """All of it, for ``restore``; ``pack`` makes an entry of a call and its step."""
        return CallsState(self.made, [(number, pack(*call)) for number, call in self._calls.items()], dict(self._seen))

    def restore(self, state: CallsState, unpack: Callable[[RuleInForce], Any]) -> None:
        """Be as ``dump`` has described it."""
        self.made, self._seen = state.made, dict(state.seen)
        self._calls, self._sizes, self._bytes = {}, {}, 0
        for number, call in state.open:
            self._keep(number, unpack(call), call.from_round)
