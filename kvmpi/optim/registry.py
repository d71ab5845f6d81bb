"""Names of update rules: a rule travels as its name and plain numbers, never as code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, overload

from kvmpi.errors import ConfigError
from kvmpi.optim.rule import Rule, make

C = TypeVar("C", bound=type[Rule])

_RULES: dict[str, type[Rule]] = {}


@overload
def register(cls_or_name: C) -> C: ...
@overload
def register(cls_or_name: str) -> Callable[[C], C]: ...
@overload
def register(cls_or_name: str, cls: C) -> C: ...
def register(cls_or_name: Any, cls: Any = None) -> Any:
    """Give a subclass of ``Rule`` a name: ``@register("mine")``, ``@register`` or ``register("mine", Mine)``.

    Without a name, it is the ``name`` that the class body sets, or else the class's name in lower case. Servers run
    in processes of their own: start them with ``--import MODULE``, where MODULE registers the rule.

    A dataclass gets back what it has hidden of ``Rule``: rules differ, too, if they do for one key alone.

    Raises:
        ConfigError: not a subclass of ``Rule``, or the name belongs to another class.
    """
    if isinstance(cls_or_name, str):
        name = cls_or_name
        return (lambda c: _add(name, c)) if cls is None else _add(name, cls)
    own = vars(cls_or_name).get("name") if isinstance(cls_or_name, type) else None
    return _add(own or getattr(cls_or_name, "__name__", "").lower(), cls_or_name)


def create(name: str, hyperparams: Mapping[str, Any] | None = None) -> Rule:
    """The rule called ``name``.

    Raises:
        ConfigError: no such rule, no such hyperparameter, one is missing, or a value makes no sense.
    """
    cls = _RULES.get(name)
    if cls is None:
        raise ConfigError(
            f"no update rule is registered as {name!r}; known: {', '.join(known())}. A rule of your own must be "
            f"registered in the servers too: give the option --import MODULE"
        )
    given = dict(hyperparams or {})
    try:
        return make(cls, given)
    except TypeError as err:
        raise ConfigError(f"update rule {name!r} with {given}: {err}") from err


def known() -> list[str]:
    """The registered names, sorted."""
    return sorted(_RULES)


def is_registered(rule: Rule) -> bool:
    """Whether ``create(rule.name, rule.hyperparams())`` makes a rule of the same class."""
    return _RULES.get(rule.name) is type(rule)


def _add(name: str, cls: Any) -> Any:
    if not (isinstance(cls, type) and issubclass(cls, Rule)):
        raise ConfigError(f"register({name!r}): {cls!r} is not a subclass of kvmpi.optim.Rule")
    if not name:
        raise ConfigError(f"register: {cls.__qualname__} needs a name")
    have = _RULES.get(name)
    # A module that is loaded again defines its class again.
    if have is not None and (have.__module__, have.__qualname__) != (cls.__module__, cls.__qualname__):
        raise ConfigError(f"the name {name!r} is taken by the update rule {have.__module__}.{have.__qualname__}")
    if "__dataclass_params__" in vars(cls):
        for method in ("__eq__", "__hash__", "__repr__"):
            setattr(cls, method, getattr(Rule, method))
    cls.name = name
    _RULES[name] = cls
    return cls
