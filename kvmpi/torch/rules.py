"""The rule by which a store updates for a ``DistributedOptimizer``: whose it is, and what the optimizer says of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch

from kvmpi import optim
from kvmpi.errors import ConfigError, UnsupportedError
from kvmpi.optim.convert import stated_by
from kvmpi.optim.rule import plain_name
from kvmpi.store import KVStore
from kvmpi.torch.parameters import KeyedParameters

#: By store, what stands for each ``DistributedOptimizer``, and each ``Trainer`` whose weights it updates.
_TENANTS: WeakKeyDictionary[KVStore, set[object]] = WeakKeyDictionary()
#: By store, the rule that such an optimizer has put in force; who finds another there has been given it.
_MADE: WeakKeyDictionary[KVStore, optim.Rule] = WeakKeyDictionary()
#: What schedulers write into an optimizer.
_SCHEDULED = frozenset({"lr", "momentum", "betas"})


def move_in(kv: KVStore, tenant: object) -> None:
    """An optimizer, or what stands for one, trains with ``kv`` from here on."""
    _TENANTS.setdefault(kv, set()).add(tenant)


def move_out(kv: KVStore, tenant: object) -> None:
    """It does no more."""
    _TENANTS.get(kv, set()).discard(tenant)


def check_empty(kv: KVStore) -> None:
    """Raise if another optimizer trains with a store that is to update weights: its one rule would be that of both."""
    if _TENANTS.get(kv):
        raise ConfigError(
            "a DistributedOptimizer or Trainer trains with this store already, and a store that updates weights has "
            "one rule: create a store for each, or detach() a first DistributedOptimizer"
        )


def given_rule(kv: KVStore) -> optim.Rule | None:
    """The store's rule, if its user has set it; not what an optimizer that is detached has left there."""
    return None if _MADE.get(kv) is kv.optimizer else kv.optimizer


def make_rule(kv: KVStore, rule: optim.Rule) -> None:
    """Put an optimizer's own rule in force."""
    kv.set_optimizer(rule)
    assert kv.optimizer is not None
    _MADE[kv] = kv.optimizer


def keep_own(kv: KVStore, rescale_grad: float) -> None:
    """The rule that an optimizer has made stays its own, also if it was loaded: from a job of other numbers of workers,
    or of one that pushed means where this one pushes sums."""
    if kv.optimizer is not None and _MADE.get(kv) is not kv.optimizer:
        if getattr(kv.optimizer, "rescale_grad", rescale_grad) != rescale_grad:
            kv.set_hyperparams(rescale_grad=rescale_grad)
        _MADE[kv] = kv.optimizer


def has_stepped(states: Iterable[Mapping[str, Any]]) -> bool:
    """Whether the states of an optimizer's parameters are of steps that were done: Adagrad's are there before."""
    return any(state and float(state.get("step", 1)) != 0 for state in states)


def keys_of_groups(optimizer: torch.optim.Optimizer, params: KeyedParameters) -> list[list[int]]:
    """By group: the keys of its parameters, as far as they have some."""
    known = {id(tensor): key for tensor, key in zip(params.tensors, params.keys, strict=True)}
    return [[known[id(t)] for t in group["params"] if id(t) in known] for group in optimizer.param_groups]


def agrees(rule: optim.Rule, optimizer: torch.optim.Optimizer, keys: list[list[int]]) -> bool:
    """Whether the optimizer says what the rule of the user says; False where a scheduler has moved it on.

    Raises:
        ConfigError: it says something else, which the store would not do.
    """
    differing = stated(rule, optimizer, keys).changes_from(rule)
    scheduled = all("initial_lr" in group for group in optimizer.param_groups)
    for name, value in differing.items():
        if not (scheduled and plain_name(name) in _SCHEDULED):
            raise _refusal(rule, f"the optimizer has {name}={value!r}")
    return not differing


def stated(rule: optim.Rule, optimizer: torch.optim.Optimizer, keys: list[list[int]]) -> optim.Rule:
    """The store's rule as the optimizer says that it should be.

    Args:
        keys: of ``keys_of_groups``.
    Raises:
        ConfigError: it says something that the store cannot do.
    """
    try:
        return stated_by(optimizer, rule, keys)
    except UnsupportedError as error:
        raise _refusal(rule, str(error)) from None


def follow(kv: KVStore, optimizer: torch.optim.Optimizer, keys: list[list[int]]) -> None:
    """Bring the store's rule up to date with what a scheduler, or anybody else, has written into the optimizer."""
    assert kv.optimizer is not None
    made = given_rule(kv) is None
    if changed := stated(kv.optimizer, optimizer, keys).changes_from(kv.optimizer):
        kv.set_hyperparams(**changed)
        if made:
            _MADE[kv] = kv.optimizer


def _refusal(rule: optim.Rule, what: str) -> ConfigError:
    return ConfigError(
        f"the store applies {rule!r}, but {what}: give kv.set_optimizer what the optimizer says, or leave it out; "
        "optimizers that differ need a store each"
    )
