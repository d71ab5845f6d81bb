"""What training must come to, in NumPy's float64 and from the published formulas: the oracle of random trainings.

Update rules as torch.optim documents them; codecs as MXNet's documentation and the IEEE formats have them; elastic
averaging: Zhang, Choromanska, LeCun 2015; DiLoCo and its streaming form: Douillard et al. 2023 and 2025.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Flat = npt.NDArray[Any]

#: Bits of a number, the first one included, and its smallest exponent.
HALF = {"float16": (11, -24), "bfloat16": (8, -133)}
EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


def noise(count: int, *where: int) -> Flat:
    """Sixteenths between -2 and 2, which all dtypes hold, as they do sums of four of them."""
    return np.random.default_rng(where).integers(-32, 33, count) / 16


def rounded(x: Flat, dtype: str) -> Flat:
    """To the nearest number of a half type, to even between two; as it is in others."""
    if dtype not in HALF:
        return x
    bits, least = HALF[dtype]
    with np.errstate(all="ignore"):
        _, exponent = np.frexp(x)
        unit = np.ldexp(1.0, np.maximum(exponent - bits, least))
        found = np.where(np.isfinite(x), np.rint(x / unit) * unit, x)
    return np.where(np.abs(found) > 65504, np.copysign(np.inf, found), found) if dtype == "float16" else found


def updated(
    kind: str, h: Mapping[str, Any], value: Flat, pushed: Flat, state: dict[str, Flat], step: int, count: int = 1
) -> Flat:
    """The new value; ``state`` of these elements, which changes, is zeros (or what Adagrad begins with) at first."""
    with np.errstate(all="ignore"):
        return _updated(kind, h, value, pushed, state, step, count)


def _updated(
    kind: str, h: Mapping[str, Any], value: Flat, pushed: Flat, state: dict[str, Flat], step: int, count: int
) -> Flat:
    if kind == "elastic":
        return value + h["alpha"] * (pushed - count * value)
    g = pushed / count if kind == "outer" else pushed * h["rescale_grad"]
    if kind == "test":
        return value - h["lr"] * g
    decay = h.get("weight_decay", 0.0)
    if kind in ("sgd", "adam", "adagrad") and decay:
        g = g + decay * value
    if kind in ("sgd", "outer"):
        if h["momentum"]:
            state["momentum"] = h["momentum"] * state["momentum"] + g
            g = g + h["momentum"] * state["momentum"] if h["nesterov"] else state["momentum"]
        return value - h["lr"] * g
    if kind == "adagrad":
        state["sum"] = state["sum"] + g * g
        return value - h["lr"] / (1 + (step - 1) * h["lr_decay"]) * g / (np.sqrt(state["sum"]) + h["eps"])
    assert kind in ("adam", "adamw")
    if kind == "adamw":
        value = (1 - h["lr"] * decay) * value
    beta1, beta2 = h["betas"]
    state["exp_avg"] = beta1 * state["exp_avg"] + (1 - beta1) * g
    state["exp_avg_sq"] = beta2 * state["exp_avg_sq"] + (1 - beta2) * g * g
    mean, square = state["exp_avg"] / (1 - beta1**step), state["exp_avg_sq"] / (1 - beta2**step)
    return value - h["lr"] * mean / (np.sqrt(square) + h["eps"])


NAMES = {"sgd": ["momentum"], "outer": ["momentum"], "adagrad": ["sum"], "adam": ["exp_avg", "exp_avg_sq"],
         "adamw": ["exp_avg", "exp_avg_sq"]}  # fmt: skip


@dataclass
class Rows:
    """Rows ``ids`` of a key, which may repeat; ``values`` has one for each."""

    ids: npt.NDArray[np.int64]
    values: Flat


@dataclass
class Rule:
    """``of_keys``: what is different for some."""

    kind: str
    h: dict[str, Any]
    of_keys: dict[int, dict[str, Any]] = field(default_factory=dict)

    def of(self, key: int) -> dict[str, Any]:
        return self.h | self.of_keys.get(key, {})


@dataclass
class Key:
    """``value`` as servers hold it; ``master`` where they know it more exactly."""

    shape: tuple[int, ...]
    dtype: str
    value: Flat
    master: Flat | None = None
    state: dict[str, Flat] = field(default_factory=dict)
    step: int = 0

    @property
    def width(self) -> int:
        return int(np.prod(self.shape[1:], dtype=np.int64))

    def update(self, rule: Rule, key: int, pushed: Sequence[Flat | Rows]) -> npt.NDArray[np.bool_]:
        """Apply the sum of what clients have pushed; which elements that has changed."""
        h, total = rule.of(key), np.zeros(self.value.size)
        mine = np.zeros(self.value.size, bool)
        for one in pushed:
            if isinstance(one, Rows):
                if self.width:
                    np.add.at(total.reshape(-1, self.width), one.ids, one.values.reshape(-1, self.width))
                    mine.reshape(-1, self.width)[one.ids] = True
            else:
                total += one
                mine[:] = True
        begins = float(h.get("initial_accumulator_value", 0.0))
        for name in NAMES.get(rule.kind, ()):
            self.state.setdefault(name, np.full(self.value.size, begins))
        if not h.get("multi_precision") or self.dtype not in HALF:
            self.master = None
        elif self.master is None:
            self.master = self.value.copy()
        self.step += 1
        some = {name: array[mine] for name, array in self.state.items()}
        old = self.value if self.master is None else self.master
        new = updated(rule.kind, h, old[mine], total[mine], some, self.step, len(pushed))
        for name, array in some.items():
            self.state[name][mine] = array
        if self.master is not None:
            self.master[mine] = new
        self.value[mine] = rounded(new, self.dtype)
        return mine

    def forget(self) -> None:
        """Another rule begins."""
        self.state, self.step = {}, 0

    def copy(self) -> Key:
        state = {name: array.copy() for name, array in self.state.items()}
        master = None if self.master is None else self.master.copy()
        return Key(self.shape, self.dtype, self.value.copy(), master, state, self.step)


class Encoder:
    """What becomes of what one client pushes to one key of float32; others travel as they are."""

    def __init__(self, kind: str, threshold: float) -> None:
        self.kind, self.threshold = kind, threshold
        self.left: dict[int, Flat] = {}

    def __call__(self, key: int, dtype: str, pushed: Flat | Rows) -> Flat | Rows:
        narrow = {"fp16": "float16", "bf16": "bfloat16"}.get(self.kind, "float32")
        if dtype != "float32" or self.kind == "none":
            return pushed
        if isinstance(pushed, Rows):
            return Rows(pushed.ids, rounded(pushed.values, narrow))
        if narrow != "float32":
            return rounded(pushed, narrow)
        total = pushed + self.left.get(key, 0.0)
        if self.kind == "2bit":
            said = self.threshold * ((total >= self.threshold) * 1.0 - (total <= -self.threshold))
        else:
            said = np.where(total > self.threshold, 1.0, -1.0)
        self.left[key] = total - said
        return said


def difference(found: Flat, expected: Flat, bound: float) -> Flat:
    """Where they are different by more than ``bound``; not-a-numbers are alike, and so are infinities."""
    with np.errstate(all="ignore"):
        alike = (found == expected) | (np.isnan(found) & np.isnan(expected)) | (np.abs(found - expected) <= bound)
    return np.flatnonzero(~alike)
