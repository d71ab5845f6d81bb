"""Calls of random programs that must fail, on one worker or on all: with the right error, and without any effect."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from random_arrays import numbers_of

from kvmpi import errors

if TYPE_CHECKING:
    from random_runner import Runner

#: Mistakes of all workers alike, and those of which the error names the key.
ON_ALL = ("twice", "file", "hyper", "scale", "other key", "other call")
NAMED = ("shape", "dtype", "fixed", "none", "row id", "twice")


def make(runner: Runner, names: list[Any]) -> None:
    """One mistake of a worker of one client: all workers of the client raise; others know nothing of it."""
    kv, model, shared = runner.kv, runner.model, runner.rng(runner.number, "mistake")
    place = shared.randrange(len(model.clients))
    odd = shared.choice(model.clients[place])
    name = shared.choice(names)
    kind = shared.choice(["shape", "dtype", "unknown", "kind", "fixed", "none", "lengths", "other key", "other call",
                          "row id", "scale", "twice", "file", "hyper"])  # fmt: skip
    async_op = shared.random() < 0.3
    key, grouped, errs = model.keys[name], len(model.clients[place]) > 1, runner.me == odd
    if kind not in ("twice", "file") and place != runner.place:
        return
    if model.rule is None and not model.exact and kind != "twice":
        return
    if kind in ("other key", "other call") and not grouped:
        return
    if kind != "twice" and not all(map(model.takes, names)):
        return  # what others do right is an error then, too

    def good() -> Any:
        return runner.array(name, runner.numbers(key.count, "mistake")).array

    out = runner.array(name, 55, out=True)

    def push() -> Any:
        if runner.client_rng.random() < 0.5:
            return kv.push(name, good(), async_op=async_op)
        return kv.pushpull(name, good(), out.array, async_op=async_op)

    expected: Any = errors.KVError
    call = push
    if kind == "shape":
        expected = errors.ShapeMismatchError
        if errs:
            call = lambda: kv.push([*names, name], [*map(fitting, names), np.zeros((*key.shape, 3), "float32")])  # noqa: E731
        else:
            call = lambda: kv.push([*names, name], [*map(fitting, names), good()], async_op=async_op)  # noqa: E731
    elif kind == "dtype":
        expected = errors.DTypeMismatchError
        if errs:
            wrong = np.zeros(key.shape, "int8" if shared.random() < 0.5 else "complex64")
            call = lambda: kv.pushpull(name, wrong, out.array)  # noqa: E731
    elif kind == "unknown":
        expected = errors.KeyNotInitializedError
        if errs:
            unknown = "unknown" if isinstance(name, str) else 4711
            call = lambda: kv.push([name, unknown], [good(), good()])  # noqa: E731
    elif kind == "kind":
        expected = errors.KeyKindError
        if errs:
            other: Any = 4711 if isinstance(name, str) else "unknown"
            call = lambda: kv.pull(other, out.array)  # noqa: E731
    elif kind == "fixed":
        expected = errors.UnsupportedError
        if key.dtype == "bfloat16":
            return
        fixed = np.zeros(key.shape, key.dtype)
        fixed.flags.writeable = False
        call = (lambda: kv.pull(name, fixed)) if errs else (lambda: kv.pull(name, out.array, async_op=async_op))
    elif kind == "none":
        expected = errors.DTypeMismatchError
        if errs:
            call = lambda: kv.pull(name, None)  # noqa: E731
    elif kind == "lengths":
        expected = errors.ConfigError
        if errs:
            call = lambda: kv.push([name, name], [good()])  # noqa: E731
    elif kind == "other key":
        expected = errors.OrderMismatchError
        others = [n for n in model.keys if n != name and (model.takes(n))]
        if not others or not model.takes(name):
            return
        other = shared.choice(others)
        call = (lambda: kv.push(other, fitting(other))) if errs else (lambda: kv.push(name, good(), async_op=async_op))
    elif kind == "other call":
        expected = errors.OrderMismatchError
        call = (lambda: kv.pull(name, out.array)) if errs else (lambda: kv.push(name, good(), async_op=async_op))
    elif kind == "row id":
        if not key.shape:
            return
        expected = errors.RowIndexError
        rows = np.zeros((1, *key.shape[1:]), key.dtype if key.dtype != "bfloat16" else "float32")
        if key.dtype == "bfloat16" or key.count > 100_000:
            return
        bad = shared.choice([-1, key.shape[0]])
        if errs:
            call = lambda: kv.row_sparse_pull(name, rows, [bad])  # noqa: E731
        else:
            call = lambda: kv.row_sparse_pull(name, rows[:0], [])  # noqa: E731
    elif kind == "scale":
        if not kv.is_capable("allreduce"):
            return
        expected = errors.ConfigError
        scale = float("nan") if errs else 0.5
        if grouped and shared.random() < 0.5:
            scale = 2.0 if errs else 0.5
        if "float" not in key.dtype:
            expected = errors.KVError
        elif not grouped:
            scale = float("nan")
        call = lambda: kv.allreduce(name, good(), out.array, scale=scale)  # noqa: E731
    elif kind == "twice":
        expected = errors.DuplicateKeyError
        call = lambda: kv.init(name, good())  # noqa: E731
    elif kind == "file":
        expected = errors.KVError
        call = lambda: kv.load(runner.folder / "there is no such file")  # noqa: E731
    elif kind == "hyper":
        expected = errors.ConfigError
        call = lambda: kv.set_hyperparams(no_such=1.0)  # noqa: E731

    def fitting(other: Any) -> Any:
        return runner.array(other, runner.numbers(model.keys[other].count, "mistake")).array

    caught = None
    try:
        work = call()
        if work is not None:
            work.wait()
    except expected as error:
        caught = str(error)
    assert caught is not None, f"mistake {kind} of key {name!r} by worker {odd}: nothing was raised"
    if not errs and kind not in ON_ALL:
        assert "MPI rank" in caught, f"mistake {kind}: {caught!r} does not say who has made it"
    elif kind in NAMED:
        assert repr(name) in caught, f"mistake {kind}: {caught!r} does not name key {name!r}"
    assert (numbers_of(out.array) == 55).all(), f"mistake {kind}: out is changed"
