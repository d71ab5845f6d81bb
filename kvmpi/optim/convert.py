"""From what a user passes to ``set_optimizer`` to a rule; knows torch's optimizers without importing torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kvmpi.errors import ConfigError, UnsupportedError
from kvmpi.optim.registry import is_registered
from kvmpi.optim.rule import Rule
from kvmpi.optim.rules import SGD, Adagrad, Adam, AdamW

#: torch class -> rule and the options that both know.
_TORCH: dict[str, tuple[Callable[..., Rule], tuple[str, ...]]] = {
    "SGD": (SGD, ("lr", "momentum", "nesterov", "weight_decay")),
    "Adam": (Adam, ("lr", "betas", "eps", "weight_decay")),
    "AdamW": (AdamW, ("lr", "betas", "eps", "weight_decay")),
    "Adagrad": (Adagrad, ("lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps")),
}

#: Options that change the result and that no rule has. The others (foreach, fused, ...) choose an implementation.
_MISSING = ("dampening", "maximize", "amsgrad")


def from_any(optimizer: object) -> Rule:
    """The rule that does what ``optimizer`` does: a ``Rule``, or an instance of a ``torch.optim`` class.

    Only hyperparameters are taken from a torch optimizer, not the state of steps that it has already done.

    Raises:
        UnsupportedError: a torch optimizer, or an option of one, that has no equivalent.
        ConfigError: anything else, or a rule whose class is not registered.
    """
    if isinstance(optimizer, Rule):
        if not is_registered(optimizer):
            raise ConfigError(
                f"the update rule {type(optimizer).__qualname__} is not registered: "
                f"decorate it with kvmpi.optim.register, in a module that servers import (--import MODULE)"
            )
        return optimizer
    if isinstance(optimizer, type) and issubclass(optimizer, Rule):
        raise ConfigError(f"{optimizer.__name__} is a class: pass an instance, {optimizer.__name__}(...)")
    if any(_is_torch(cls) for cls in type(optimizer).__mro__):
        return _from_torch(optimizer)
    raise ConfigError(
        f"{type(optimizer).__module__}.{type(optimizer).__qualname__} is not an optimizer: "
        f"expected one of kvmpi.optim or of torch.optim ({', '.join(_TORCH)})"
    )


def stated_by(optimizer: Any, rule: Rule) -> Rule:
    """``rule`` with the hyperparameters of the same name that a torch optimizer has.

    A rule that ``from_any`` makes of torch optimizers must be the one that it makes of this one; of a rule without an
    equivalent in torch, the optimizer says what it can.

    Raises:
        UnsupportedError: the optimizer is of another rule, has no equivalent, or its groups differ.
    """
    if any(type(rule) is known for known, _ in _TORCH.values()):
        own = from_any(optimizer)
        if type(own) is not type(rule):
            raise UnsupportedError(f"{own!r} is another rule")
    own_names = set(rule.hyperparams()) - {"rescale_grad", "multi_precision"}
    return rule.with_hyperparams(**_agreed(optimizer, own_names & set(optimizer.param_groups[0])))


def _is_torch(cls: type) -> bool:
    return cls.__module__ == "torch.optim.optimizer" and cls.__name__ == "Optimizer"


def _from_torch(optimizer: Any) -> Rule:
    cls = type(optimizer)
    label = f"{cls.__module__}.{cls.__qualname__}"
    name = cls.__name__ if cls.__module__.startswith("torch.optim.") else ""
    if name not in _TORCH:
        raise UnsupportedError(
            f"{label} has no equivalent in kvmpi.optim; supported: "
            f"{', '.join('torch.optim.' + known for known in _TORCH)}. Write the rule with kvmpi.optim.register, or "
            f"pushpull gradients without set_optimizer and step in the worker"
        )
    rule, options = _TORCH[name]
    groups: list[Mapping[str, Any]] = optimizer.param_groups
    decoupled = {bool(group.get("decoupled_weight_decay", False)) for group in groups}
    if name == "Adam" and decoupled == {True}:
        rule = AdamW
    elif name == "Adam" and len(decoupled) > 1:
        raise UnsupportedError(f"{label}: its parameter groups differ in decoupled_weight_decay; expected one value")
    for group in groups:
        for option in _MISSING:
            if group.get(option):
                raise UnsupportedError(f"{label} with {option}={group[option]!r} has no equivalent in kvmpi.optim")
    return rule(**_agreed(optimizer, options))


def _agreed(optimizer: Any, options: Iterable[str]) -> dict[str, Any]:
    """These options of a torch optimizer, which all of its groups have alike."""
    groups: list[Mapping[str, Any]] = optimizer.param_groups
    first = {option: _plain(groups[0][option]) for option in options}
    for index, group in enumerate(groups):
        for option in first:
            if _plain(group[option]) != first[option]:
                raise UnsupportedError(
                    f"{type(optimizer).__module__}.{type(optimizer).__qualname__}: parameter group {index} has "
                    f"{option}={group[option]!r}, group 0 has {first[option]!r}; one optimizer serves all keys, so all "
                    "groups must agree"
                )
    return first


def _plain(value: Any) -> Any:
    """A number, also where torch keeps a tensor of one element."""
    if isinstance(value, tuple | list):
        return tuple(float(v) for v in value)
    return value if isinstance(value, bool) else float(value)
