"""Every rule that torch also has, against torch.optim over 20 steps; and conversion of torch optimizers."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from kvmpi import optim
from kvmpi.errors import ConfigError, UnsupportedError

torch = pytest.importorskip("torch")

STEPS = 20
COUNT = 257

SGD_OPTIONS = [
    {"lr": 0.1, "momentum": m, "nesterov": n, "weight_decay": w, "rescale_grad": r}
    for m, n, w, r in itertools.product([0.0, 0.9], [False, True], [0.0, 0.03], [1.0, 0.125])
    if m or not n
]
ADAM_OPTIONS = [
    {"lr": 0.01, "betas": b, "eps": e, "weight_decay": w, "rescale_grad": r}
    for b, e, w, r in itertools.product([(0.9, 0.999), (0.3, 0.95), (0.0, 0.5)], [1e-8, 1e-3], [0.0, 0.05], [1.0, 0.25])
]
ADAGRAD_OPTIONS = [
    {"lr": 0.1, "lr_decay": d, "weight_decay": w, "initial_accumulator_value": i, "eps": e, "rescale_grad": r}
    for d, w, i, e, r in itertools.product([0.0, 0.1], [0.0, 0.05], [0.0, 0.5], [1e-10, 1e-2], [1.0, 4.0])
]
CASES = [
    (name, options)
    for name, many in (
        ("SGD", SGD_OPTIONS),
        ("Adam", ADAM_OPTIONS),
        ("AdamW", ADAM_OPTIONS),
        ("Adagrad", ADAGRAD_OPTIONS),
    )
    for options in many
]


def tolerance(dtype: str) -> float:
    # Each step rounds a few values of size about 1 a few times, and steps add up.
    return 16 * STEPS * np.finfo(dtype).eps


def gradients(dtype: str) -> list[np.ndarray]:
    return [np.random.default_rng([41, step]).standard_normal(COUNT).astype(dtype) for step in range(STEPS)]


def start(dtype: str) -> np.ndarray:
    return np.random.default_rng(40).standard_normal(COUNT).astype(dtype)


def torch_steps(optimizer_name: str, options: dict, dtype: str, change: dict | None = None) -> list[np.ndarray]:
    """Values after each step; ``change`` is applied before step 11."""
    options = dict(options)
    rescale = options.pop("rescale_grad")
    param = torch.nn.Parameter(torch.from_numpy(start(dtype)))
    optimizer = getattr(torch.optim, optimizer_name)([param], foreach=False, **options)
    values = []
    for step, gradient in enumerate(gradients(dtype), start=1):
        if step == 11 and change:
            optimizer.param_groups[0].update(change)
        param.grad = torch.from_numpy(gradient * gradient.dtype.type(rescale))
        optimizer.step()
        values.append(param.detach().numpy().copy())
    return values


def our_steps(rule: optim.Rule, dtype: str, change: dict | None = None) -> list[np.ndarray]:
    stored, state, values = start(dtype), {}, []
    for step, pushed in enumerate(gradients(dtype), start=1):
        if step == 11 and change:
            rule = rule.with_hyperparams(**change)
        was = pushed.copy()
        rule.apply(stored, pushed, state, step)
        np.testing.assert_array_equal(pushed, was, err_msg="pushed was changed")
        assert stored.dtype == dtype
        assert all(array.dtype == dtype for array in state.values())
        values.append(stored.copy())
    return values


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(("name", "options"), CASES, ids=lambda x: x if isinstance(x, str) else None)
def test_same_values_as_torch(name, options, dtype):
    rule = getattr(optim, name)(**options)
    steps = zip(our_steps(rule, dtype), torch_steps(name, options, dtype), strict=True)
    for step, (ours, theirs) in enumerate(steps, start=1):
        np.testing.assert_allclose(ours, theirs, rtol=tolerance(dtype), atol=tolerance(dtype), err_msg=f"step {step}")


@pytest.mark.parametrize(
    ("name", "options", "change"),
    [
        ("SGD", SGD_OPTIONS[-1], {"lr": 0.01, "momentum": 0.5, "nesterov": False, "weight_decay": 0.1}),
        ("SGD", SGD_OPTIONS[0], {"momentum": 0.9}),  # the buffer comes into being at step 11
        ("Adam", ADAM_OPTIONS[0], {"lr": 0.001, "betas": (0.8, 0.9), "weight_decay": 0.1}),
        ("AdamW", ADAM_OPTIONS[0], {"lr": 0.001, "eps": 0.1}),
        ("Adagrad", ADAGRAD_OPTIONS[0], {"lr": 0.5, "lr_decay": 0.2}),
    ],
)
def test_change_of_hyperparameters_midway(name, options, change):
    ours = our_steps(getattr(optim, name)(**options), "float64", change)
    theirs = torch_steps(name, options, "float64", change)
    unchanged = torch_steps(name, options, "float64")
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance("float64"), atol=tolerance("float64"))
    assert not np.allclose(ours[-1], unchanged[-1]), "the change had no effect"


def test_defaults_are_torchs():
    param = [torch.nn.Parameter(torch.zeros(1))]
    for name in ("Adam", "AdamW", "Adagrad"):
        rule = getattr(optim, name)()
        assert optim.from_any(getattr(torch.optim, name)(param)) == rule
    assert optim.from_any(torch.optim.SGD(param)) == optim.SGD(lr=1e-3)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("SGD", {"lr": 0.25, "momentum": 0.5, "nesterov": True, "weight_decay": 0.125}),
        ("Adam", {"lr": 0.25, "betas": (0.5, 0.75), "eps": 1e-3, "weight_decay": 0.5}),
        ("AdamW", {"lr": 0.25, "betas": (0.5, 0.75), "eps": 1e-3, "weight_decay": 0.5}),
        (
            "Adagrad",
            {"lr": 0.25, "lr_decay": 0.5, "weight_decay": 0.125, "initial_accumulator_value": 2.0, "eps": 1e-3},
        ),
    ],
)
def test_from_torch(name, options):
    params = [torch.nn.Parameter(torch.zeros(2)) for _ in range(3)]
    cls = getattr(torch.optim, name)
    expected = getattr(optim, name)(**options)
    assert optim.from_any(cls(params, **options)) == expected
    assert optim.from_any(cls([{"params": params[:1]}, {"params": params[1:]}], **options)) == expected
    with pytest.raises(UnsupportedError, match="group 1 has lr"):
        optim.from_any(cls([{"params": params[:1]}, {"params": params[1:], "lr": 0.75}], **options))
    with pytest.raises(UnsupportedError, match="maximize"):
        optim.from_any(cls(params, maximize=True, **options))


def test_from_torch_with_a_tensor_as_learning_rate():
    param = [torch.nn.Parameter(torch.zeros(1))]
    assert optim.from_any(torch.optim.Adam(param, lr=torch.tensor(0.25))) == optim.Adam(lr=0.25)


def test_from_torch_after_a_scheduler_has_changed_the_rate():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0, momentum=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    optimizer.step()
    scheduler.step()
    assert optim.from_any(optimizer) == optim.SGD(lr=0.5, momentum=0.5)
    with pytest.raises(ConfigError, match="not an optimizer"):
        optim.from_any(scheduler)


def test_what_torch_has_and_kvmpi_has_not():
    class Mine(torch.optim.SGD):
        pass

    param = [torch.nn.Parameter(torch.zeros(1))]
    for optimizer, what in (
        (torch.optim.SGD(param, momentum=0.5, dampening=0.5), "dampening=0.5"),
        (torch.optim.Adam(param, amsgrad=True), "amsgrad"),
        (torch.optim.AdamW(param, amsgrad=True), "amsgrad"),
        (torch.optim.RMSprop(param), r"RMSprop .*torch.optim.SGD"),
        (Mine(param), "Mine"),
    ):
        with pytest.raises(UnsupportedError, match=what):
            optim.from_any(optimizer)
