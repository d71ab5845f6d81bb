"""The update rule of a store: chosen and changed by calls that every client makes, in force from a round on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from kvmpi import optim
from kvmpi.errors import ConfigError
from kvmpi.ps.calls import SharedCalls
from kvmpi.ps.slot import RuleChange, Slot
from kvmpi.wire import MAX_HEADER_BYTES, entries
from kvmpi.wire import messages as m
from kvmpi.wire.entries import Key

Slots = Mapping[tuple[Key, int], Slot]


class Rulebook:
    """What the clients of one store have said about its rule.

    Args:
        in_rounds: a change counts from a round on; else at once.
    Attributes:
        rule, generation: the newest rule, and how often another was chosen: its state begins empty then.
        resumed: the rule is from a snapshot. The first choice may be the same again, and keeps the state.
    """

    def __init__(self, server: int, *, in_rounds: bool) -> None:
        self.rule: optim.Rule | None = None
        self.generation = 0
        self.resumed = False
        self._in_rounds = in_rounds
        self._newest: tuple[optim.Rule | None, entries.RuleInForce] | None = None
        self._choices = SharedCalls("set_optimizer", server)
        self._changes = SharedCalls("set_hyperparams", server)

    def entry_of(
        self, client: int, message: m.SetRule | m.SetHyperparams, number: int, slots: Slots
    ) -> entries.RuleCall | entries.HyperCall:
        """What is to be logged of a client's call, which has this ``number`` among those of all.

        Raises:
            ConfigError: no such rule or hyperparameter, or another client has said something else.
            ProtocolError: the client skips a call.
        """
        ahead: list[tuple[Key, int, int]] = []  # only the first copy of a call takes effect
        if isinstance(message, m.SetRule):
            if not self._choices.is_repeat(client, number, (message.rule, message.hyperparams)):
                check_length(optim.create(message.rule, message.hyperparams), "set_optimizer")
                ahead = self._ahead(client, slots)
            return entries.RuleCall(client, number, message.rule, message.hyperparams, ahead, message.step)
        if not self._changes.is_repeat(client, number, message.hyperparams, f" at clock {message.clock}"):
            if self.rule is None:
                raise ConfigError("set_hyperparams: the servers have no optimizer yet; call kv.set_optimizer first")
            check_length(self.rule.with_hyperparams(**message.hyperparams), "set_hyperparams")
            ahead = self._ahead(client, slots)
        return entries.HyperCall(client, number, message.hyperparams, ahead, message.step)

    def number_of(self, client: int, message: m.SetRule | m.SetHyperparams, *, again: bool) -> int:
        """Which of the calls of all clients this is; ``again``: others went on without the last process."""
        calls, call = self._calls_like(message)
        return calls.number_of(client, message.ordinal, call, message.step, again=again, pushed=message.pushed)

    def has_made(self, client: int, message: m.SetRule | m.SetHyperparams, number: int) -> bool:
        """Whether the same client has made the call of this number."""
        return self._calls_like(message)[0].made_by(client) >= number

    def _calls_like(
        self, call: m.SetRule | m.SetHyperparams | entries.RuleCall | entries.HyperCall
    ) -> tuple[SharedCalls, Any]:
        """Those of the same kind, and what is compared of this one."""
        if isinstance(call, m.SetRule | entries.RuleCall):
            return self._choices, (call.rule, call.hyperparams)
        return self._changes, call.hyperparams

    def _ahead(self, client: int, slots: Slots) -> list[tuple[Key, int, int]]:
        """How often ``client`` has pushed the chunks in whose open round it is, which only the head knows."""
        found = []
        for (key, chunk), slot in slots.items():
            pushed = slot.steps.get(client, 0) + (client in slot.held)
            if self._in_rounds and pushed > slot.rounds:
                found.append((key, chunk, pushed))
        return found

    def apply(self, entry: entries.RuleCall | entries.HyperCall, slots: Slots) -> None:
        """Make a call that was logged."""
        calls, call = self._calls_like(entry)
        if not calls.is_repeat(entry.client, entry.ordinal, call):
            if isinstance(entry, entries.RuleCall):
                if not (self.resumed and self.rule is not None and self.rule.name == entry.rule):
                    self.generation += 1
                self.resumed = False
                self.rule = optim.create(entry.rule, entry.hyperparams)
            else:
                assert self.rule is not None
                self.rule = self.rule.with_hyperparams(**entry.hyperparams)
            self._install(entry, slots)
        calls.note(entry.client, entry.ordinal, call, entry.step)

    def _install(self, entry: entries.RuleCall | entries.HyperCall, slots: Slots) -> None:
        """Put the rule in force, in rounds from the one after the client's last push of each chunk: that is in the open
        round, or in none still to come. How often a client that is back has pushed not every server knows."""
        ahead = {(key, chunk): pushed for key, chunk, pushed in entry.ahead}
        for where, slot in slots.items():
            pushed = ahead.get(where, slot.rounds)
            slot.change_rule(RuleChange(pushed + 1 if self._in_rounds else 0, self.generation, self.rule))

    # ---- as a whole

    @property
    def newest(self) -> entries.RuleInForce:
        """The newest rule, as it is logged."""
        change = RuleChange(0, self.generation, self.rule)
        if self._newest is None or self._newest[0] is not self.rule or self._newest[1].generation != self.generation:
            self._newest = self.rule, in_force(change)  # whoever saves asks with every key
        return self._newest[1]

    def dump(self) -> entries.StoreState:
        """All of it, for ``restore``."""
        calls = [
            self._choices.dump(lambda call, step: entries.RuleInForce(step, 0, call[0], call[1])),
            self._changes.dump(lambda call, step: entries.RuleInForce(step, 0, "", call)),
        ]
        return entries.StoreState(self.newest, calls, self.resumed)

    def resume(self, change: RuleChange) -> None:
        """Begin with the rule of a snapshot; its clients are gone, and with them how many calls they had made."""
        self.rule, self.generation, self.resumed = change.rule, change.generation, True

    def restore(self, state: entries.StoreState) -> None:
        """Be as ``dump`` has described it."""
        change = rule_change(state.current)
        self.rule, self.generation, self.resumed = change.rule, change.generation, state.resumed
        self._choices.restore(state.calls[0], lambda call: (call.rule, call.hyperparams))
        self._changes.restore(state.calls[1], lambda call: call.hyperparams)


def check_length(rule: optim.Rule, call: str) -> None:
    """What is different for single keys adds up; another server is told the whole rule in one message."""
    length, limit = len(msgspec.msgpack.encode(in_force(RuleChange(0, 0, rule)))), MAX_HEADER_BYTES // 2
    if length > limit:
        raise ConfigError(
            f"{call}: with what differs for single keys the rule has {length} bytes, limit {limit}; give the rule "
            "itself the hyperparameters that most keys have, keys shorter names, or other keys a store of their own"
        )


def in_force(change: RuleChange) -> entries.RuleInForce:
    """A rule change as it is logged."""
    rule = change.rule
    name, hyperparams = ("", {}) if rule is None else (rule.name, rule.hyperparams())
    return entries.RuleInForce(change.from_round, change.generation, name, hyperparams)


def rule_change(logged: entries.RuleInForce) -> RuleChange:
    """The inverse of ``in_force``."""
    rule = optim.create(logged.rule, logged.hyperparams) if logged.rule else None
    return RuleChange(logged.from_round, logged.generation, rule)
