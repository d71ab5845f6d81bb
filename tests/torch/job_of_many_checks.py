"""Run by test_torch_jobs: what needs several processes, as trainer, compiled, STORE/steps, STORE/weights=CHECK ..."""

from __future__ import annotations

import os
import sys
import unittest.mock
from collections.abc import Callable, Sequence
from typing import Any

import optimizer_gradients
import optimizer_steps
import optimizer_weights
import torch
import trainer_checks
from optimizer_loops import adamw, plain_steps, same_in_all, winding, winding_steps

import kvmpi

torch.set_num_threads(1)


def chosen(checks: Sequence[Callable[[Any], None]], names: list[str]) -> list[Callable[[Any], None]]:
    """Those that are called so; all, if none is named."""
    unknown = set(names) - {check.__name__ for check in checks}
    assert not unknown, f"no such checks: {unknown}"
    return [check for check in checks if check.__name__ in names or not names]


def gradients(store: str, names: list[str]) -> None:
    with kvmpi.create(store) as kv:
        for check in chosen(optimizer_gradients.CHECKS, names):
            check(kv)


def direct(store: str, names: list[str]) -> None:
    """The same, and more, where weights are large enough to be summed where autograd has made their gradients."""
    with unittest.mock.patch("kvmpi.torch.gradients.DIRECT_BYTES", 100), kvmpi.create(store) as kv:
        for check in chosen((*optimizer_gradients.DIRECT_CHECKS, *optimizer_gradients.CHECKS), names):
            check(kv)


def weights(store: str, names: list[str]) -> None:
    for check in chosen(optimizer_weights.CHECKS, names):  # each with stores of its own, since a store has one rule
        check(store)


def shares(store: str, names: list[str]) -> None:
    """The same where each worker updates its share, as gradients are that stay where autograd has made them."""
    os.environ["KVMPI_SHARDED_UPDATE"] = "on"
    with unittest.mock.patch("kvmpi.torch.gradients.DIRECT_BYTES", 100):
        weights(store, names)
    steps(store, ["some_as_one_process", "uneven_batches", "resumed"])
    del os.environ["KVMPI_SHARDED_UPDATE"]


def steps(store: str, names: list[str]) -> None:
    for check in chosen(optimizer_steps.CHECKS, names):
        check(store)


def algorithms(store: str, names: list[str]) -> None:
    for name in names:
        with kvmpi.create(store, allreduce=name) as kv:
            same_in_all(kv, plain_steps)
            same_in_all(kv, winding_steps, make=winding, optimizer=adamw)


def main() -> None:
    for argument in sys.argv[1:]:
        what, _, names = argument.partition("=")
        store, _, group = what.rpartition("/")
        if group in ("trainer", "compiled"):
            {"trainer": trainer_checks.main, "compiled": trainer_checks.compiled}[group]()
        else:
            run = {
                "gradients": gradients,
                "direct": direct,
                "weights": weights,
                "shares": shares,
                "steps": steps,
                "algorithms": algorithms,
            }[group]
            run(store, names.split(",") if names else [])
        print(f"{what} passed")


if __name__ == "__main__":
    main()
