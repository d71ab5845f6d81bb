"""From what a user passes to ``set_optimizer`` to a rule; knows torch's optimizers without importing torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kvmpi.errors import ConfigError, UnsupportedError
from kvmpi.optim.registry import is_registered
from kvmpi.optim.rule import KEPT_BESIDE_STATE, Rule
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


#: By parameter group of a torch optimizer: the keys of its parameters.
KeysOfGroups = Sequence[Sequence[int | str]]


def from_any(optimizer: object, keys: KeysOfGroups | None = None) -> Rule:
    """The rule that does what ``optimizer`` does: a ``Rule``, or an instance of a ``torch.optim`` class.

    Only hyperparameters are taken from a torch optimizer, not the state of steps that it has already done.

    Args:
        keys: of the parameters in each of a torch optimizer's groups, if these may differ.
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
        if taken := KEPT_BESIDE_STATE & set(optimizer.slots()):
            raise ConfigError(
                f"the update rule {type(optimizer).__qualname__} calls a state array {', '.join(sorted(taken))}, under "
                "which something else is saved: give it another name"
            )
        return optimizer
    if isinstance(optimizer, type) and issubclass(optimizer, Rule):
        raise ConfigError(f"{optimizer.__name__} is a class: pass an instance, {optimizer.__name__}(...)")
    if any(_is_torch(cls) for cls in type(optimizer).__mro__):
        return _from_torch(optimizer, keys)
    raise ConfigError(
        f"{type(optimizer).__module__}.{type(optimizer).__qualname__} is not an optimizer: "
        f"expected one of kvmpi.optim or of torch.optim ({', '.join(_TORCH)})"
    )


def stated_by(optimizer: Any, rule: Rule, keys: KeysOfGroups | None = None) -> Rule:
    """``rule`` with the hyperparameters of the same name that a torch optimizer has; ``keys`` as in ``from_any``.

    A rule that ``from_any`` makes of torch optimizers must be the one that it makes of this one; of a rule without an
    equivalent in torch, the optimizer says what it can.

    Raises:
        UnsupportedError: the optimizer is of another rule, has no equivalent, or its groups differ.
    """
    if any(type(rule) is known for known, _ in _TORCH.values()):
        own = from_any(optimizer, keys)
        if type(own) is not type(rule):
            raise UnsupportedError(f"{own!r} is another rule")
    own_names = set(rule.hyperparams()) - {"rescale_grad", "multi_precision"}
    first, others = _options_of(optimizer, sorted(own_names & set(optimizer.param_groups[0])), keys)
    # The optimizer has the last word on which keys are different in what it says.
    return _different(rule.alike_in(first).with_hyperparams(**first), others)


def _is_torch(cls: type) -> bool:
    return cls.__module__ == "torch.optim.optimizer" and cls.__name__ == "Optimizer"


def _from_torch(optimizer: Any, keys: KeysOfGroups | None) -> Rule:
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
    first, others = _options_of(optimizer, options, keys)
    return _different(rule(**first), others)


def _options_of(
    optimizer: Any, options: Iterable[str], keys: KeysOfGroups | None
) -> tuple[dict[str, Any], list[tuple[Sequence[int | str], dict[str, Any]]]]:
    """These options of a torch optimizer's first group; and by keys of each other one what is different there."""
    groups: list[Mapping[str, Any]] = optimizer.param_groups
    first = {option: _plain(groups[0][option]) for option in options}
    others = []
    for index, group in enumerate(groups[1:], 1):
        different = {option: value for option in first if (value := _plain(group[option])) != first[option]}
        for option in different if keys is None else ():
            raise UnsupportedError(
                f"{type(optimizer).__module__}.{type(optimizer).__qualname__}: parameter group {index} has "
                f"{option}={group[option]!r}, group 0 has {first[option]!r}, and nobody says which keys are whose; "
                "make the rule of group 0 and call its for_keys"
            )
        if different and keys is not None:
            others.append((keys[index], different))
    return first, others


def _different(rule: Rule, others: Iterable[tuple[Sequence[int | str], dict[str, Any]]]) -> Rule:
    for keys, different in others:
        rule = rule.for_keys(keys, **different)
    return rule


def _plain(value: Any) -> Any:
    """A number, also where torch keeps a tensor of one element."""
    if isinstance(value, tuple | list):
        return tuple(float(v) for v in value)
    return value if isinstance(value, bool) else float(value)
