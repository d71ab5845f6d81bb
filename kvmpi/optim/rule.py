"""The base class of update rules: hyperparameters as plain numbers, and the loop over blocks of a vector."""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from kvmpi.errors import ConfigError, DTypeMismatchError, ShapeMismatchError

Array = npt.NDArray[Any]
R = TypeVar("R", bound="Rule")

#: Between a hyperparameter's name and the key that has a value of its own.
_OF_KEY = "@"

#: What is kept beside the arrays of a rule under names of its own: the value, a master copy, the value that a push met,
#: the rows that it had, and pushes that are not in the value yet.
KEPT_BESIDE_STATE = frozenset({"value", "master", "met", "touched", "gathered", "gathered_rows"})

#: Bytes of one vector that are updated at a time: with state and scratch a block still fits into a level-2 cache.
BLOCK_BYTES = 256 << 10


class Block(msgspec.Struct, frozen=True, eq=False):
    """What ``Rule.compute`` works on: the same range of every vector, all of one dtype and length."""

    out: Array  #: receives the new value; may be the memory of ``stored`` or of ``pushed``, so it is written last
    stored: Array  #: the old value
    pushed: Array  #: what was pushed, summed over ``count`` clients
    state: dict[str, Array]  #: one array for each name in ``Rule.slots()``, changed in place
    scratch: tuple[Array, Array]  #: two arrays to work in, uninitialised
    step: int  #: 1 for the first update of this vector
    count: int  #: clients summed in ``pushed``


class Rule:
    """An update rule. Instances never change; two are equal when class and hyperparameters are.

    A rule of one's own is a subclass with a registered name, whose constructor takes numbers and keeps each under the
    name of its parameter (a frozen dataclass does). It says in ``compute`` what happens to one block::

        @kvmpi.optim.register("sign")
        @dataclass(frozen=True)
        class Sign(kvmpi.optim.Rule):
            lr: float = 0.1

            def compute(self, b):
                b.out[...] = b.stored - self.lr * np.sign(b.pushed)

    A rule that must see the whole vector at once (a norm, say) overrides ``apply`` instead, and nothing else. With
    servers its keys must be whole on one of them: ``KVMPI_PLACEMENT=hash``, and ``KVMPI_CHUNK_BYTES`` as large as the
    largest.
    """

    name: ClassVar[str] = ""
    averages: ClassVar[bool] = False  #: is sent the mean over a client's workers instead of the sum
    replies_old: ClassVar[bool] = False  #: a fused pushpull returns the value that the push met
    of_weights: ClassVar[bool] = False  #: is sent weights, not gradients or differences of weights
    integers: ClassVar[bool] = False  #: can update integer vectors
    multi_precision: bool = False  #: keeps a float32 master copy of values of a half type
    #: On servers of an asynchronous store, a push that is n > 1 updates old is divided by n before the rule sees it: so
    #: many has the value got since its client has read it.
    staleness_aware: bool = False

    # What a rule defines.

    def slots(self) -> dict[str, float]:
        """Names of the state arrays that this rule keeps for each vector -> their initial value.

        Not "value", "master", "met", "touched", "gathered" or "gathered_rows", under which something else is saved.
        """
        return {}

    def compute(self, b: Block) -> None:
        """Write the new value of ``b.stored`` into ``b.out``, and the new state into ``b.state``."""
        raise NotImplementedError(f"{type(self).__name__} defines neither compute nor apply")

    # Hyperparameters.

    def hyperparams(self) -> dict[str, Any]:
        """Every hyperparameter: float, bool or list of floats; and as ``NAME@KEY`` what is different for one key."""
        own = {name: _plain(self, name) for name in _parameters(type(self))}
        return own | {f"{name}{_OF_KEY}{key}": _plain(rule, name) for key, rule in self._by_key.items()
                      for name in self._changed[key]}  # fmt: skip

    def with_hyperparams(self: R, **changes: Any) -> R:
        """A new rule that differs in ``changes``; those of the form ``NAME@KEY`` are for one key.

        Raises:
            ConfigError: a name that this rule does not have, or a value that makes no sense.
        """
        return make(type(self), {**self.hyperparams(), **changes})

    def for_keys(self: R, keys: Iterable[int | str], **changes: Any) -> R:
        """A new rule that has other hyperparameters for some keys: ``rule.for_keys(["bias"], weight_decay=0.0)``.

        They stay as they are for these keys when they change for all others.

        Raises:
            ConfigError: see ``with_hyperparams``.
        """
        return self.with_hyperparams(**{f"{n}{_OF_KEY}{key}": value for key in keys for n, value in changes.items()})

    def alike_in(self: R, names: Iterable[str]) -> R:
        """A new rule in which these hyperparameters are the same for all keys."""
        forgotten = set(names)
        return make(type(self), {
            name: value for name, value in self.hyperparams().items()
            if _OF_KEY not in name or plain_name(name) not in forgotten
        })  # fmt: skip

    def changes_from(self, earlier: Rule) -> dict[str, Any]:
        """What ``earlier.with_hyperparams`` makes do what this rule of the same class does."""
        wanted, known = self.hyperparams(), earlier.hyperparams()
        for name in known:  # what is different for a key no more
            wanted.setdefault(name, wanted[plain_name(name)])
        return {name: value for name, value in wanted.items() if known.get(name) != value}

    def of_key(self, key: int | str) -> Rule:
        """What this rule is for ``key``."""
        return self._by_key.get(str(key), self) if self._by_key else self

    #: By key: the rule, and the names of the hyperparameters in which it differs.
    _by_key: Mapping[str, Rule] = MappingProxyType({})
    _changed: Mapping[str, tuple[str, ...]] = MappingProxyType({})

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.hyperparams() == self.hyperparams()  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return hash((type(self), repr(self)))

    def __repr__(self) -> str:
        """The constructor call, without the parameters that have their default."""
        parameters = _parameters(type(self))
        shown = [
            f"{name}={tuple(value) if isinstance(value, list) else value!r}"
            for name, value in self.hyperparams().items()
            if name in parameters and (tuple(value) if isinstance(value, list) else value) != parameters[name].default
        ]
        keys: dict[str, list[str]] = {}
        for key, rule in self._by_key.items():
            changes = ", ".join(f"{name}={_plain(rule, name)!r}" for name in self._changed[key])
            keys.setdefault(changes, []).append(key)
        others = "".join(f".for_keys({of}, {changes})" for changes, of in keys.items())
        return f"{type(self).__name__}({', '.join(shown)}){others}"

    # Updates.

    def init_state(self, count: int, dtype: npt.DTypeLike = np.float32) -> dict[str, Array]:
        """State for a vector of ``count`` elements; ``dtype`` is the one that updates are computed in.

        Not required: an update adds what is missing in the dictionary that it is given.
        """
        return {name: np.full(count, value, dtype) for name, value in self.slots().items()}

    def apply(self, stored: Array, pushed: Array, state: dict[str, Array], step: int, count: int = 1) -> None:
        """Update ``stored`` and ``state`` in place; ``pushed`` is only read.

        Cost: a few blocks of scratch. The first update also allocates state, if ``state`` is empty.

        Args:
            stored: one-dimensional, float32 or float64 (integers for rules that say so).
            pushed: same length and dtype.
            state: arrays by name; belongs to this vector.
            step: 1 for the first update of this vector.
            count: number of clients summed in ``pushed``.
        """
        self._run(stored, stored, pushed, state, step, count)

    def apply_into(
        self, out: Array, stored: Array, pushed: Array, state: dict[str, Array], step: int, count: int = 1
    ) -> None:
        """As ``apply``, but the new value goes to ``out`` and ``stored`` keeps the old one.

        ``out`` may be the same memory as ``pushed``. The new value has the same bits as that of ``apply``.
        """
        if self.in_blocks:
            self._run(out, stored, pushed, state, step, count)
        else:
            value = stored.copy()
            self.apply(value, pushed, state, step, count)
            np.copyto(out, value)

    @property
    def in_blocks(self) -> bool:
        """Whether a part of a vector can be updated alone: not for a rule that overrides ``apply``."""
        return type(self).apply is Rule.apply

    def ensure_state(self, state: dict[str, Array], count: int, dtype: np.dtype[Any]) -> None:
        """Add the arrays that ``state`` lacks.

        Raises:
            ShapeMismatchError, DTypeMismatchError: an array is there, but not for this vector.
        """
        for name, value in self.slots().items():
            have = state.get(name)
            if have is None:
                state[name] = np.full(count, value, dtype)
            elif have.shape != (count,):
                raise ShapeMismatchError(f"state {name!r} of {self.name} has shape {have.shape}, expected ({count},)")
            elif have.dtype != dtype:
                raise DTypeMismatchError(f"state {name!r} of {self.name} is {have.dtype}, expected {dtype}")

    def _run(self, out: Array, stored: Array, pushed: Array, state: dict[str, Array], step: int, count: int) -> None:
        self._check(out, stored, pushed)
        self.ensure_state(state, stored.size, stored.dtype)
        size = stored.size
        length = min(size, max(1, BLOCK_BYTES // stored.itemsize))
        first, second = np.empty(length, stored.dtype), np.empty(length, stored.dtype)
        mine = {name: state[name] for name in self.slots()} if state else {}
        with np.errstate(all="ignore"):
            if length == size:  # one block, or none
                if size:
                    self.compute(Block(out, stored, pushed, mine, (first, second), step, count))
                return
            for start in range(0, size, length):
                part = slice(start, min(start + length, size))
                fill = part.stop - start
                self.compute(
                    Block(
                        out[part],
                        stored[part],
                        pushed[part],
                        {name: array[part] for name, array in mine.items()},
                        (first[:fill], second[:fill]),
                        step,
                        count,
                    )
                )

    def _check(self, out: Array, stored: Array, pushed: Array) -> None:
        if stored.ndim != 1 or stored.shape != pushed.shape or stored.shape != out.shape:
            raise ShapeMismatchError(
                f"update by {self.name}: stored has shape {stored.shape}, pushed {pushed.shape}, out {out.shape}; "
                f"expected one dimension and equal lengths"
            )
        dtype = stored.dtype
        if pushed.dtype != dtype or out.dtype != dtype:
            raise DTypeMismatchError(
                f"update by {self.name}: stored is {dtype}, pushed {pushed.dtype}, out {out.dtype}; expected the same"
            )
        if not ((dtype.char in "fd" and dtype.isnative) or (self.integers and dtype.kind in "iu")):
            raise DTypeMismatchError(
                f"update by {self.name}: cannot compute in {dtype}; "
                f"use a key of a float type, or no optimizer, for values of this kind"
            )


_parameters_of: dict[Any, Mapping[str, inspect.Parameter]] = {}


def _parameters(cls: type[Rule]) -> Mapping[str, inspect.Parameter]:
    """What a rule is made of: its constructor's parameters, looked up once."""
    if cls not in _parameters_of:
        _parameters_of[cls] = inspect.signature(cls).parameters
    return _parameters_of[cls]


def plain_name(name: str) -> str:
    """Of a hyperparameter, whether of all keys or of one."""
    return name.partition(_OF_KEY)[0]


def make(cls: type[R], given: Mapping[str, Any]) -> R:
    """A rule of hyperparameters as ``Rule.hyperparams`` gives them.

    Raises:
        ConfigError: a name that it does not have, or a value that makes no sense.
        TypeError: a value is missing.
    """
    own = {name: value for name, value in given.items() if _OF_KEY not in name}
    of_keys: dict[str, dict[str, Any]] = {}
    for name, value in given.items():
        if name not in own:
            plain, _, key = name.partition(_OF_KEY)
            of_keys.setdefault(key, {})[plain] = value
    for names in (own, *of_keys.values()):
        _check_known(cls, names)
    found = cls(**own)
    if of_keys:
        by_key = {key: cls(**{**own, **changes}) for key, changes in sorted(of_keys.items())}
        object.__setattr__(found, "_by_key", by_key)
        object.__setattr__(found, "_changed", {key: tuple(sorted(of_keys[key])) for key in by_key})
    return found


def _check_known(cls: type[Rule], given: Mapping[str, Any]) -> None:
    parameters = list(_parameters(cls))
    if unknown := sorted(set(given) - set(parameters)):
        raise ConfigError(
            f"{cls.name or cls.__name__} has no hyperparameter {', '.join(unknown)}; "
            f"known: {', '.join(parameters) or 'none'}"
        )


def _plain(rule: Rule, name: str) -> float | bool | list[float]:
    value = getattr(rule, name)
    if isinstance(value, bool):
        return value
    try:
        if isinstance(value, numbers.Real) and value == value:  # not-a-number is not even equal to itself
            return float(value)
        if isinstance(value, list | tuple) and all(isinstance(v, numbers.Real) and v == v for v in value):
            return [float(v) for v in value]
    except OverflowError:  # a whole number, or a fraction, that no float can hold
        pass
    raise ConfigError(f"{type(rule).__name__}.{name} is {value!r}: expected a number, a bool or a list of numbers")
