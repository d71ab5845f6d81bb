"""Rules as immutable plain numbers, and their names."""

from __future__ import annotations

import copy
import dataclasses
import json
import math

import numpy as np
import pytest

import kvmpi
from kvmpi import optim
from kvmpi.errors import ConfigError
from kvmpi.optim import registry

EXAMPLES = [
    optim.SGD(lr=0.1, momentum=0.9, nesterov=True, multi_precision=True),
    optim.Adam(betas=(0.8, 0.99)),
    optim.AdamW(weight_decay=0.5),
    optim.Adagrad(initial_accumulator_value=1.0),
    optim.Elastic(alpha=0.25),
    optim.Outer(lr=1, momentum=0),
    optim.Test(),
    optim.SGD(lr=0.1, weight_decay=1e-4).for_keys([3, 5], weight_decay=0.0).for_keys([5], lr=0.5),
    optim.Adam().for_keys(["a@b", "lr"], betas=(0.5, 0.75)),
]


@pytest.fixture
def names(monkeypatch):
    """Names registered in a test are forgotten after it."""
    monkeypatch.setattr(registry, "_RULES", dict(registry._RULES))


@pytest.mark.parametrize("rule", EXAMPLES, ids=repr)
def test_travels_as_name_and_plain_numbers(rule):
    there = json.loads(json.dumps([rule.name, rule.hyperparams()]))
    back = optim.create(*there)
    assert back == rule
    assert hash(back) == hash(rule)
    assert type(back) is type(rule)
    assert repr(back) == repr(rule)
    assert eval(repr(rule), vars(optim)) == rule
    assert copy.deepcopy(rule) == rule
    for value in rule.hyperparams().values():
        assert type(value) in (float, bool) or (type(value) is list and all(type(v) is float for v in value))


def test_a_key_may_have_hyperparameters_of_its_own():
    rule = optim.SGD(lr=0.1, weight_decay=1e-4).for_keys([3, "x@y"], weight_decay=0.0)
    assert rule.of_key(3) == rule.of_key("x@y") == optim.SGD(lr=0.1)
    assert rule.of_key(4) is rule
    later = rule.with_hyperparams(lr=0.01, **{"lr@3": 0.5})
    assert later.of_key(3) == optim.SGD(lr=0.5)
    assert later.of_key("x@y") == optim.SGD(lr=0.01), "what is not different for a key is as for all"
    assert later.of_key(4).lr == 0.01
    assert rule.of_key(3) == optim.SGD(lr=0.1), "rules never change"
    assert rule != optim.SGD(lr=0.1, weight_decay=1e-4)
    assert optim.Adam().for_keys([], lr=1.0) == optim.Adam()
    for wrong in ({"rate": 1.0}, {"lr": "fast"}):
        with pytest.raises(ConfigError):
            rule.for_keys([1], **wrong)


@pytest.mark.parametrize("rule", EXAMPLES, ids=repr)
def test_never_changes(rule):
    name = next(iter(rule.hyperparams()))
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(rule, name, 0.5)
    changed = rule.with_hyperparams(**{name: 0.5})
    assert changed != rule
    assert changed.hyperparams() == {**rule.hyperparams(), name: 0.5}
    assert changed.with_hyperparams(**{name: getattr(rule, name)}) == rule
    with pytest.raises(ConfigError, match=rf"no hyperparameter learning_rate; known: {name}"):
        rule.with_hyperparams(learning_rate=1)


def test_repr_and_equality():
    assert repr(optim.SGD(lr=1, momentum=0.9)) == "SGD(lr=1.0, momentum=0.9)"
    assert repr(optim.Adam(betas=[0.8, 0.9])) == "Adam(betas=(0.8, 0.9))"
    assert optim.SGD(lr=1) == optim.SGD(lr=1.0) != optim.SGD(lr=2)
    assert optim.SGD(lr=np.float32(0.5)) == optim.SGD(lr=0.5)
    assert optim.Adam(weight_decay=1e-2) != optim.AdamW()
    assert optim.Adam() != "adam"


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: optim.SGD(lr=-0.1), r"SGD\(lr=-0.1\): must not be negative"),
        (lambda: optim.SGD(lr=math.nan), "lr"),
        (lambda: optim.SGD(lr="fast"), "expected a finite number"),
        (lambda: optim.SGD(lr="0.1"), "expected a finite number"),
        (lambda: optim.SGD(lr=None), "expected a finite number"),
        (lambda: optim.SGD(lr=10**400), "expected a finite number"),
        (lambda: optim.SGD(lr=0.1, momentum=-1), "momentum"),
        (lambda: optim.SGD(lr=0.1, weight_decay=-1), "weight_decay"),
        (lambda: optim.SGD(lr=0.1, nesterov=True), "nesterov.*momentum"),
        (lambda: optim.SGD(lr=0.1, nesterov="no"), "True or False"),
        (lambda: optim.SGD(lr=0.1, momentum=0.9, nesterov=True).with_hyperparams(momentum=0), "nesterov"),
        (lambda: optim.Adam(lr=-1), "lr"),
        (lambda: optim.Adam(eps=-1), "eps"),
        (lambda: optim.Adam(betas=(0.9, 1.0)), "betas"),
        (lambda: optim.Adam(betas=(-0.1, 0.9)), "betas"),
        (lambda: optim.Adam(betas=0.9), "pair"),
        (lambda: optim.Adam(betas=(0.9, 0.9, 0.9)), "pair"),
        (lambda: optim.AdamW(weight_decay=-1), "weight_decay"),
        (lambda: optim.Adagrad(lr_decay=-1), "lr_decay"),
        (lambda: optim.Adagrad(initial_accumulator_value=-1), "initial_accumulator_value"),
        (lambda: optim.Elastic(alpha=-0.1), "alpha"),
        (lambda: optim.Elastic(alpha=1.1), "alpha"),
        (lambda: optim.Outer(lr=-1), "lr"),
        (lambda: optim.Outer(momentum=-1), "momentum"),
    ],
)
def test_values_that_make_no_sense(make, what):
    with pytest.raises(ConfigError, match=what):
        make()


def test_create_explains_what_is_wrong():
    with pytest.raises(ConfigError, match=r"'sgdd'; known: adagrad, .*--import"):
        optim.create("sgdd", {})
    with pytest.raises(ConfigError, match="no hyperparameter learning_rate; known: lr, momentum"):
        optim.create("sgd", {"learning_rate": 1})
    with pytest.raises(ConfigError, match=r"'sgd'.*lr"):
        optim.create("sgd", {})
    assert optim.create("adam") == optim.Adam()


def test_register(names):
    @optim.register("mine")
    @dataclasses.dataclass(frozen=True)
    class Mine(optim.Rule):
        lr: float = 1.0

    @optim.register
    class Plain(optim.Rule):
        def __init__(self, rate):
            self.rate = rate

    @optim.register
    class Named(optim.Rule):
        name = "called so"

    third = optim.register("third", type("Third", (optim.Rule,), {}))
    assert optim.create("mine", {"lr": 2}) == Mine(2.0) == optim.from_any(Mine(2.0))
    assert optim.create("plain", {"rate": 3}) == Plain(3)
    assert repr(Plain(3)) == "Plain(rate=3.0)"
    assert Plain(3) != Plain(4) != Mine(4)
    assert Plain(3).with_hyperparams(rate=4) == Plain(4)
    assert optim.create("called so") == Named()
    assert optim.create("third") == third()
    assert {"mine", "plain", "called so", "third", "sgd"} <= set(optim.known())


def test_rules_of_ones_own_differ_if_they_do_for_one_key(names):
    """What dataclasses make for themselves knows of fields alone."""

    @optim.register("mine")
    @dataclasses.dataclass(frozen=True)
    class Mine(optim.Rule):
        lr: float = 1.0

    for_one = Mine(2.0).for_keys(["b"], lr=0.5)
    assert for_one != Mine(2.0)
    assert for_one == Mine(2.0).for_keys(["b"], lr=0.5)
    assert len({for_one, Mine(2.0), Mine(2.0).for_keys(["b"], lr=0.5)}) == 2
    assert repr(for_one) == "Mine(lr=2.0).for_keys(['b'], lr=0.5)"


@pytest.mark.parametrize("name", ["value", "master", "met", "touched"])
def test_state_has_no_name_under_which_something_else_is_saved(names, name):
    @optim.register("mine")
    class Mine(optim.Rule):
        def slots(self):
            return {"velocity": 0.0, name: 0.0}

    with kvmpi.create("local") as kv:
        kv.init("w", np.zeros(3))
        with pytest.raises(ConfigError, match=f"Mine calls a state array {name}, under which something else is saved"):
            kv.set_optimizer(Mine())


def test_register_refuses(names):
    with pytest.raises(ConfigError, match="not a subclass"):
        optim.register("dict", dict)
    with pytest.raises(ConfigError, match=r"taken by the update rule kvmpi\.optim\.rules\.SGD"):
        optim.register("sgd", type("Other", (optim.Rule,), {}))
    assert optim.register("sgd", optim.SGD) is optim.SGD


def test_from_any():
    rule = optim.SGD(lr=0.1)
    assert optim.from_any(rule) is rule

    class Child(optim.SGD):
        """Has its parent's name, and would be its parent on a server."""

    with pytest.raises(ConfigError, match="Child is not registered"):
        optim.from_any(Child(lr=0.1))
    with pytest.raises(ConfigError, match=r"pass an instance, SGD\(\.\.\.\)"):
        optim.from_any(optim.SGD)
    for thing in ("sgd", None, {"lr": 1}, lambda key, pushed, stored: None):
        with pytest.raises(ConfigError, match="not an optimizer"):
            optim.from_any(thing)


def test_a_hyperparameter_must_be_a_number(names):
    @optim.register("wordy")
    class Wordy(optim.Rule):
        def __init__(self, mode="a"):
            self.mode = mode

    with pytest.raises(ConfigError, match=r"Wordy.mode is 'a'"):
        Wordy().hyperparams()
    for mode in (10**400, [0.5, 10**400], float("nan"), [float("nan")]):  # the former no float can hold
        with pytest.raises(ConfigError, match=r"Wordy.mode is .*: expected a number"):
            Wordy(mode).hyperparams()
