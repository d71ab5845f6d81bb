"""The rules that kvmpi brings: torch's optimizers with torch's formulas, and the rules of data-parallel training.

Sources: Kingma & Ba 2014, arXiv:1412.6980 (Adam); Loshchilov & Hutter 2017, arXiv:1711.05101 (AdamW); Duchi, Hazan,
Singer, JMLR 12, 2011 (Adagrad); Zhang, Choromanska, LeCun, NIPS 2015, arXiv:1412.6651 (elastic averaging); Douillard et
al. 2023, arXiv:2311.08105 (DiLoCo's outer step); Zhang, Gupta, Lian, Liu 2016, arXiv:1511.05950 (learning rates by
staleness). Where torch and a paper differ, torch.optim 2.x is followed:
order of operations, default values, and names.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import numpy as np

from kvmpi.errors import ConfigError
from kvmpi.optim.registry import register
from kvmpi.optim.rule import Array, Block, Rule


@dataclass(frozen=True)
class _Checked(Rule):
    """Turns what the constructor was given into plain numbers, and refuses what makes no sense."""

    def __post_init__(self) -> None:
        for f in fields(self):
            value = _number(self, f.name, str(f.type))
            object.__setattr__(self, f.name, value)  # frozen: the one moment of change
            if f.name in _NOT_NEGATIVE and not self._allows_negative(f.name):
                self._require(value >= 0, f.name, "must not be negative")
        self._validate()

    def _allows_negative(self, name: str) -> bool:
        return False

    def _validate(self) -> None:
        """What a class checks beyond signs."""

    def _require(self, condition: bool, name: str, what: str) -> None:
        if not condition:
            raise ConfigError(f"{type(self).__name__}({name}={getattr(self, name)!r}): {what}")


_NOT_NEGATIVE = frozenset({"lr", "momentum", "weight_decay", "eps", "lr_decay", "initial_accumulator_value", "alpha"})


def _number(rule: Rule, name: str, kind: str) -> Any:
    value = getattr(rule, name)
    try:
        if kind == "bool":
            if value not in (0, 1):
                raise ValueError
            return bool(value)
        if kind == "float":
            if isinstance(value, str):
                raise ValueError
            return _finite(value)
        first, second = value
        return (_finite(first), _finite(second))
    except (TypeError, ValueError, OverflowError):
        wanted = {"bool": "True or False", "float": "a finite number"}.get(kind, "a pair of finite numbers")
        raise ConfigError(f"{type(rule).__name__}({name}={value!r}): expected {wanted}") from None


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError
    return number


def _gradient(b: Block, rescale_grad: float, weight_decay: float) -> Array:
    """rescale_grad * pushed + weight_decay * stored: ``b.pushed`` itself, or in ``b.scratch[0]``."""
    work, other = b.scratch
    gradient = b.pushed
    if rescale_grad != 1.0:
        gradient = np.multiply(gradient, rescale_grad, out=work)
    if weight_decay != 0.0:
        np.multiply(b.stored, weight_decay, out=other)
        gradient = np.add(gradient, other, out=work)
    return gradient


def _momentum_step(b: Block, gradient: Array, lr: float, momentum: float, nesterov: bool) -> None:
    """out = stored - lr * (gradient, or what momentum makes of it). The first step finds a buffer of zeros, and
    0 * momentum + gradient is torch's buffer = gradient."""
    work, other = b.scratch
    if momentum != 0.0:
        buffer = b.state["momentum"]
        np.multiply(buffer, momentum, out=buffer)
        np.add(buffer, gradient, out=buffer)
        if nesterov:
            np.multiply(buffer, momentum, out=other)
            gradient = np.add(gradient, other, out=work)
        else:
            gradient = buffer
    np.multiply(gradient, lr, out=other)
    np.subtract(b.stored, other, out=b.out)


@register("sgd")
@dataclass(frozen=True)
class SGD(_Checked):
    """``torch.optim.SGD`` without dampening: weight decay is added to the gradient, then momentum, then the step.

    With ``staleness_aware``, servers of an asynchronous store apply a gradient that is n updates old with
    lr / max(1, n) (Zhang, Gupta, Lian, Liu 2016): they divide the gradient, so that it also counts as much less in the
    momentum, and weight decay, which is of the newest value, stays as it is. Elsewhere no gradient is old.
    """

    lr: float
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    rescale_grad: float = 1.0
    multi_precision: bool = False
    staleness_aware: bool = False

    def _validate(self) -> None:
        self._require(not self.nesterov or self.momentum > 0, "nesterov", "needs a momentum above 0")

    def slots(self) -> dict[str, float]:
        return {"momentum": 0.0} if self.momentum != 0.0 else {}

    def compute(self, b: Block) -> None:
        gradient = _gradient(b, self.rescale_grad, self.weight_decay)
        _momentum_step(b, gradient, self.lr, self.momentum, self.nesterov)


@register("adam")
@dataclass(frozen=True)
class Adam(_Checked):
    """``torch.optim.Adam`` without amsgrad (Kingma & Ba 2014); weight decay is added to the gradient."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    rescale_grad: float = 1.0
    multi_precision: bool = False

    decoupled: ClassVar[bool] = False

    def _validate(self) -> None:
        self._require(all(0.0 <= beta < 1.0 for beta in self.betas), "betas", "both must be in [0, 1)")

    def slots(self) -> dict[str, float]:
        return {"exp_avg": 0.0, "exp_avg_sq": 0.0}

    def compute(self, b: Block) -> None:
        work, other = b.scratch
        beta1, beta2 = self.betas
        mean, square = b.state["exp_avg"], b.state["exp_avg_sq"]
        gradient = _gradient(b, self.rescale_grad, 0.0 if self.decoupled else self.weight_decay)
        # mean = beta1 * mean + (1 - beta1) * gradient, in the form of torch's lerp
        np.subtract(gradient, mean, out=other)
        if 1.0 - beta1 < 0.5:
            np.multiply(other, 1.0 - beta1, out=other)
            np.add(mean, other, out=mean)
        else:
            np.multiply(other, beta1, out=other)
            np.subtract(gradient, other, out=mean)
        # square = beta2 * square + (1 - beta2) * gradient**2
        np.multiply(gradient, 1.0 - beta2, out=other)
        np.multiply(other, gradient, out=other)
        np.multiply(square, beta2, out=square)
        np.add(square, other, out=square)
        # out = stored (decayed) - step_size * mean / (sqrt(square / correction2) + eps)
        step_size = self.lr / (1.0 - beta1**b.step)
        np.sqrt(square, out=other)
        np.divide(other, math.sqrt(1.0 - beta2**b.step), out=other)
        np.add(other, self.eps, out=other)
        np.multiply(mean, step_size, out=work)
        np.divide(work, other, out=work)
        if self.decoupled and self.weight_decay != 0.0:
            np.multiply(b.stored, 1.0 - self.lr * self.weight_decay, out=other)
            np.subtract(other, work, out=b.out)
        else:
            np.subtract(b.stored, work, out=b.out)


@register("adamw")
@dataclass(frozen=True)
class AdamW(Adam):
    """``torch.optim.AdamW`` without amsgrad (Loshchilov & Hutter 2017): weight decay shrinks the value itself."""

    weight_decay: float = 1e-2

    decoupled: ClassVar[bool] = True


@register("adagrad")
@dataclass(frozen=True)
class Adagrad(_Checked):
    """``torch.optim.Adagrad`` (Duchi et al. 2011)."""

    lr: float = 1e-2
    lr_decay: float = 0.0
    weight_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10
    rescale_grad: float = 1.0
    multi_precision: bool = False

    def slots(self) -> dict[str, float]:
        return {"sum": self.initial_accumulator_value}

    def compute(self, b: Block) -> None:
        work, other = b.scratch
        total = b.state["sum"]
        gradient = _gradient(b, self.rescale_grad, self.weight_decay)
        np.multiply(gradient, gradient, out=other)
        np.add(total, other, out=total)
        np.sqrt(total, out=other)
        np.add(other, self.eps, out=other)
        np.multiply(gradient, self.lr / (1.0 + (b.step - 1) * self.lr_decay), out=work)
        np.divide(work, other, out=work)
        np.subtract(b.stored, work, out=b.out)


@register("elastic")
@dataclass(frozen=True)
class Elastic(_Checked):
    """Elastic averaging: the stored center moves towards the pushed weights (Zhang, Choromanska, LeCun, NIPS 2015).

    center += alpha * (w - center), for every client against the same center when a round holds several. A worker that
    then does w -= alpha * (w - center), with the center that its push met, conserves w + center.
    """

    alpha: float
    multi_precision: bool = False

    averages: ClassVar[bool] = True
    replies_old: ClassVar[bool] = True
    of_weights: ClassVar[bool] = True

    def _validate(self) -> None:
        self._require(self.alpha <= 1.0, "alpha", "must be between 0 and 1")

    def compute(self, b: Block) -> None:
        work, _ = b.scratch
        if b.count == 1:
            np.subtract(b.pushed, b.stored, out=work)
        else:
            np.multiply(b.stored, b.count, out=work)
            np.subtract(b.pushed, work, out=work)
        np.multiply(work, self.alpha, out=work)
        np.add(b.stored, work, out=b.out)


@register("outer")
@dataclass(frozen=True)
class Outer(_Checked):
    """DiLoCo's outer step: SGD with Nesterov momentum on the mean of the pushed differences center - w (Douillard et
    al. 2023). ``Outer(lr=1, momentum=0)`` makes the center the mean of the clients' weights."""

    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True
    multi_precision: bool = False

    averages: ClassVar[bool] = True

    def slots(self) -> dict[str, float]:
        return {"momentum": 0.0} if self.momentum != 0.0 else {}

    def compute(self, b: Block) -> None:
        gradient = b.pushed if b.count == 1 else np.divide(b.pushed, b.count, out=b.scratch[0])
        _momentum_step(b, gradient, self.lr, self.momentum, self.nesterov)


@register("test")
@dataclass(frozen=True)
class Test(_Checked):
    """stored -= lr * rescale_grad * pushed: what the tests of KVStore programs use, with integers too.

    On integer vectors, which wrap around, lr * rescale_grad must be a whole number.
    """

    __test__: ClassVar[bool] = False  # pytest: this class is not a test

    lr: float = -1.0
    rescale_grad: float = 1.0

    integers: ClassVar[bool] = True

    def _allows_negative(self, name: str) -> bool:
        return True

    def compute(self, b: Block) -> None:
        work, _ = b.scratch
        factor: Any = self.lr * self.rescale_grad
        if b.stored.dtype.kind != "f":
            if not (factor.is_integer() and abs(factor) < 2.0**63):
                raise ConfigError(
                    f"{self!r} on a key of {b.stored.dtype}: lr * rescale_grad is {factor}, expected a whole number"
                )
            factor = np.int64(factor).astype(b.stored.dtype)  # wraps, as the product does
        np.multiply(b.pushed, factor, out=work)
        np.subtract(b.stored, work, out=b.out)
