"""Updates by rows: these rows as in a dense update of them alone, bit for bit, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvmpi import optim
from kvmpi.errors import UnsupportedError
from kvmpi.kernels import host
from kvmpi.kernels.rows import Rows
from kvmpi.optim.rule import Rule

RULES = [
    optim.SGD(lr=0.1), optim.SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01, rescale_grad=0.5),
    optim.Adam(lr=0.01, weight_decay=0.1), optim.AdamW(lr=0.01), optim.Adagrad(lr=0.1, lr_decay=0.1),
    optim.Test(lr=0.3),
]  # fmt: skip
NUM_ROWS, WIDTH = 40, 3


def stored(dtype: str, seed: int) -> np.ndarray:
    values = np.random.default_rng(seed).standard_normal(NUM_ROWS * WIDTH)
    if dtype not in host.HALF:
        return values.astype(dtype)
    out = host.empty(values.size, dtype)
    host.narrow(values.astype("f4"), out, dtype)
    return out


def pushed(dtype: str, step: int) -> Rows:
    rng = np.random.default_rng([9, step])
    ids = np.flatnonzero(rng.random(NUM_ROWS) < [0.0, 0.1, 0.5, 1.0][step % 4])
    return Rows(ids, rng.standard_normal((ids.size, WIDTH)).astype(host.STORAGE[host.ACCUMULATE[dtype]]))


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("keeps_master", [False, True])
@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_rows_are_updated_as_vectors_of_their_own(
    rule: Rule, dtype: str, keeps_master: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "BLOCK_BYTES", 64)  # five rows
    keeps_master = keeps_master and dtype in host.HALF
    value = stored(dtype, 1)
    master = optim.make_master(value, dtype) if keeps_master else None
    state: dict[str, np.ndarray] = {}
    # Each row by itself: what it would be if it were a key that is pushed in some steps, and knows the number of each.
    alone = [value[r * WIDTH : (r + 1) * WIDTH].copy() for r in range(NUM_ROWS)]
    masters = [optim.make_master(row, dtype) if keeps_master else None for row in alone]
    states: list[dict[str, np.ndarray]] = [{} for _ in alone]
    for step in range(1, 9):
        rows = pushed(dtype, step)
        optim.update_rows(rule, value, dtype, rows, state, step, 2, master)
        for r, gradient in zip(rows.ids.tolist(), rows.values, strict=True):
            optim.update(rule, alone[r], dtype, gradient, states[r], step, 2, masters[r])
    assert value.tobytes() == np.concatenate(alone).tobytes()
    for name, initial in rule.slots().items():
        expected = [s.get(name, np.full(WIDTH, initial)) for s in states]
        np.testing.assert_array_equal(state[name], np.concatenate(expected))
    if keeps_master:
        np.testing.assert_array_equal(master, np.concatenate(masters))


@pytest.mark.parametrize(("rule", "make"), [
    (optim.SGD(lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
    (optim.Adagrad(lr=0.1, lr_decay=0.01), lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.01)),
    # torch divides by sqrt(v) + eps / sqrt(1 - beta2**t) of which only an eps of 0 is the same
    (optim.Adam(lr=0.01, eps=1e-30), lambda p: torch.optim.SparseAdam(p, lr=0.01, eps=1e-30)),
])  # fmt: skip
def test_the_same_as_torch_with_sparse_gradients(rule: Rule, make) -> None:
    value = stored("float64", 2)
    weight = torch.nn.Parameter(torch.tensor(value.reshape(NUM_ROWS, WIDTH)))
    theirs, state = make([weight]), {}
    for step in range(1, 9):
        rows = pushed("float64", step)
        weight.grad = torch.sparse_coo_tensor(
            torch.tensor(rows.ids)[None], torch.tensor(rows.values), weight.shape, check_invariants=True
        )
        with torch.sparse.check_sparse_tensor_invariants():  # torch warns where nobody says whether it should check
            theirs.step()
        optim.update_rows(rule, value, "float64", rows, state, step)
    np.testing.assert_allclose(value.reshape(NUM_ROWS, WIDTH), weight.detach().numpy(), rtol=1e-12)


class Whole(Rule):
    """A rule that needs all of a vector."""

    name = "whole"

    def apply(self, stored, pushed, state, step, count=1):
        stored -= pushed / np.linalg.norm(pushed)


class AnswersOld(optim.Test):
    """A rule that answers with what was there before."""

    name = "answers old"
    replies_old = True


@pytest.mark.parametrize("rule", [optim.Elastic(alpha=0.5), optim.Outer(), Whole(), AnswersOld()], ids=repr)
def test_rules_that_need_a_whole_vector_say_so(rule: Rule) -> None:
    value = stored("float32", 3)
    before = value.copy()
    with pytest.raises(UnsupportedError, match="push"):
        optim.update_rows(rule, value, "float32", pushed("float32", 3), {}, 1)
    np.testing.assert_array_equal(value, before)


def test_keys_without_elements() -> None:
    state: dict[str, np.ndarray] = {}
    for width in (0, 3):
        optim.update_rows(
            optim.Adam(), np.empty(0, "f4"), "float32", Rows(np.empty(0, "i8"), np.empty((0, width), "f4")), state, 1
        )
