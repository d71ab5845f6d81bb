"""What an optimizer of MXNet says, as a rule of ``kvmpi.optim``: of all keys, and of those with rates of their own."""

from __future__ import annotations

from typing import Any

import mxnet as mx

from kvmpi import optim
from kvmpi.errors import UnsupportedError

_INSTEAD = "; let MXNet's optimizer step in the workers: update_on_kvstore=False, with a synchronous store"


def rule_of(
    optimizer: Any, lr: float | None = None, wd: float | None = None, rescale_grad: float | None = None
) -> optim.Rule:
    """The rule of ``kvmpi.optim`` that does what an optimizer of MXNet does with its next gradient.

    ``lr`` and ``wd`` are those of a key that has its own; ``rescale_grad`` is in the place of the optimizer's.

    MXNet's SGD and NAG put the learning rate into the momentum, ``v = momentum * v + lr * gradient``, torch's do not.
    So where there is momentum, the rule has a learning rate of 1, and gradient and weight decay are multiplied by it:
    the same while the learning rate changes. Adam's ``epsilon`` is added after the correction of bias, as in torch.

    Raises:
        UnsupportedError: there is none.
    """
    label = f"MXNet's {type(optimizer).__name__}"
    if getattr(optimizer, "clip_gradient", None):
        raise UnsupportedError(
            f"{label} with clip_gradient={optimizer.clip_gradient} has no equivalent in kvmpi.optim{_INSTEAD}"
        )
    kind, lr = type(optimizer), float(getattr(optimizer, "learning_rate", 0.0) if lr is None else lr)
    wd = getattr(optimizer, "wd", 0.0) if wd is None else wd
    scale = getattr(optimizer, "rescale_grad", 1.0) if rescale_grad is None else rescale_grad
    common: dict[str, Any] = {}
    if kind in (mx.optimizer.SGD, mx.optimizer.NAG, mx.optimizer.Adam):
        common = {"rescale_grad": scale, "multi_precision": bool(optimizer.multi_precision)}
    if kind in (mx.optimizer.SGD, mx.optimizer.NAG):
        if optimizer.momentum == 0.0:
            return optim.SGD(lr, weight_decay=wd, **common)
        nesterov = kind is mx.optimizer.NAG
        if nesterov and wd != 0.0:  # MXNet lets the weights decay where the momentum will have taken them
            raise UnsupportedError(f"{label} with momentum and wd={wd} has no equivalent{_INSTEAD}")
        common["rescale_grad"] *= lr
        return optim.SGD(1.0, optimizer.momentum, nesterov=nesterov, weight_decay=lr * wd, **common)
    if kind is mx.optimizer.Adam:
        betas = (optimizer.beta1, optimizer.beta2)
        return optim.Adam(lr, betas, optimizer.epsilon, weight_decay=wd, **common)
    if kind is mx.optimizer.Test:
        return optim.Test(lr=-1.0, rescale_grad=scale)
    raise UnsupportedError(f"{label} has no equivalent in kvmpi.optim (SGD, NAG, Adam and Test have){_INSTEAD}")


def with_rates(optimizer: Any, rates: dict[Any, tuple[float, float]], scale: float) -> optim.Rule:
    """The rule with the learning rate and weight decay of each key, in steps that grow with the keys alone."""
    rule = rule_of(optimizer, rescale_grad=scale)
    common = rule.hyperparams()
    own = {pair: rule_of(optimizer, *pair, scale).hyperparams() for pair in set(rates.values())}
    of_keys = {
        f"{name}@{key}": value
        for key, pair in rates.items()
        for name, value in own[pair].items()
        if value != common[name]
    }
    return rule.with_hyperparams(**of_keys)


def rates_of(optimizer: Any, keys: list[Any]) -> dict[Any, tuple[float, float]]:
    """By key: learning rate and weight decay, with what ``lr_mult`` and ``wd_mult`` say."""
    return dict(zip(keys, zip(optimizer._get_lrs(keys), optimizer._get_wds(keys), strict=True), strict=True))


def scale_of(optimizer: Any) -> float:
    """``rescale_grad`` for a rule, of which others are multiples."""
    return float(optimizer.rescale_grad) or 1.0


def options_of(optimizer: Any) -> tuple[Any, ...]:
    """All that ``rule_of`` looks at, but for ``rescale_grad``."""
    return tuple(getattr(optimizer, name, None) for name in _OPTIONS)


_OPTIONS = ("learning_rate", "wd", "clip_gradient", "multi_precision", "momentum", "beta1", "beta2", "epsilon")
