"""Row-sparse keys in real jobs of every store type, and mistakes of a worker that is alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import kvmpi
from kvmpi import errors, optim

PROGRAM = Path(__file__).parent / "programs" / "sparse.py"
JOBS = [
    ("-n 1 -c 1 -s 2", ["local", "mpi", "dist_sync", "dist_async"]),
    ("-n 2 -c 2 -s 2", ["dist_sync", "dist_async"]),
    ("-n 4 -c 2 -s 3 --replicas 1", ["dist_sync_mpi", "dist_async_mpi"]),
    ("-n 3 -c 1 -s 0", ["mpi"]),
]


@pytest.mark.parametrize(("options", "names"), JOBS)
def test_rows_are_right(job, tmp_path, options, names):
    done = job(options, PROGRAM, tmp_path, *names)
    for name in names:
        assert done.stdout.count(f"sparse {name} right") == int(options.split()[1])


ROW, WHOLE = np.ones((1, 3), "f4"), np.ones((10, 3), "f4")
MISTAKES = {
    "negative id": (lambda kv: kv.push("w", (np.array([-1]), ROW)), errors.RowIndexError, "row id -1 at position 0"),
    "large id": (lambda kv: kv.push("w", (np.array([10]), ROW)), errors.RowIndexError, "row id 10"),
    "id that int64 does not hold": (
        lambda kv: kv.push("w", (np.array([2**64 - 1], np.uint64), ROW)), errors.DTypeMismatchError, str(2**64 - 1),
    ),
    "a list of ids": (lambda kv: kv.push("w", ([1], ROW)), errors.DTypeMismatchError, "two arrays, .row_ids, rows."),
    "pull of a large id": (lambda kv: kv.row_sparse_pull("w", ROW.copy(), [10]), errors.RowIndexError, "rows 0 to 9"),
    "ids that are floats": (lambda kv: kv.push("w", (np.array([1.0]), ROW)), errors.DTypeMismatchError, "integers"),
    "a mask": (lambda kv: kv.push("w", (np.ones(1, bool), ROW)), errors.DTypeMismatchError, "integers"),
    "ids for a pull": (lambda kv: kv.row_sparse_pull("w", ROW.copy(), [0.5]), errors.DTypeMismatchError, "integers"),
    "ids of two dimensions": (
        lambda kv: kv.push("w", (np.array([[1, 2]]), np.ones((1, 2, 3), "f4"))), errors.ShapeMismatchError,
        r"row ids of shape \(1, 2\), expected a vector",
    ),
    "a single id": (
        lambda kv: kv.pushpull("w", (torch.tensor(3), torch.ones(3))), errors.ShapeMismatchError,
        r"row ids of shape \(\), expected a vector",
    ),
    "shape of rows": (lambda kv: kv.push("w", (np.array([1, 2]), ROW)), errors.ShapeMismatchError, r"\(2, 3\)"),
    "dtype of rows": (lambda kv: kv.push("w", (np.array([1]), ROW.astype("f8"))), errors.DTypeMismatchError, "float64"),
    "shape of a tensor": (
        lambda kv: kv.push("w", torch.zeros(9, 3).to_sparse(1)), errors.ShapeMismatchError, r"\(9, 3\), the key has",
    ),
    "every element": (lambda kv: kv.push("w", torch.eye(10, 3).to_sparse()), errors.UnsupportedError, "to_sparse.1."),
    "shape of out": (lambda kv: kv.row_sparse_pull("w", ROW.copy(), [[1, 2]]), errors.ShapeMismatchError, "1, 2, 3"),
    "out that is none": (lambda kv: kv.row_sparse_pull("w", None, [1]), errors.DTypeMismatchError, "NoneType"),
    "out of floats": (lambda kv: kv.row_sparse_pull("w", ROW.astype("f8"), [1]), errors.DTypeMismatchError, "float64"),
    "unknown key": (lambda kv: kv.row_sparse_pull("x", ROW.copy(), [1]), errors.KeyNotInitializedError, "'x'"),
    "ids of no key": (lambda kv: kv.row_sparse_pull(["w"], [ROW.copy()], [1]), errors.DTypeMismatchError, "int"),
    "no ids": (lambda kv: kv.row_sparse_pull("w", [ROW.copy()], None), errors.DTypeMismatchError, "NoneType"),
    "ids in lists of different lengths": (
        lambda kv: kv.row_sparse_pull("w", np.ones((2, 3), "f4"), [[1, 2], [3]]), errors.DTypeMismatchError,
        "row ids: expected integers, got lists of different lengths",
    ),
    "lists": (lambda kv: kv.row_sparse_pull(["w"], [ROW.copy()], []), errors.ConfigError, "1 keys need"),
    "both kinds": (lambda kv: kv.push("w", [(np.array([1]), ROW), WHOLE]), errors.ConfigError, "one kind"),
    "both in two keys": (
        lambda kv: kv.push(["w", "w"], [(np.array([1]), ROW), WHOLE]), errors.ConfigError, "one kind",
    ),
    "no rows": (lambda kv: kv.push("number", (np.array([0]), ROW)), errors.ShapeMismatchError, "no rows"),
    "a pair for out": (
        lambda kv: kv.pushpull("w", (np.array([1]), ROW), (np.array([1]), ROW)), errors.UnsupportedError, "a pair",
    ),
    "a sparse out": (
        lambda kv: kv.pushpull("w", WHOLE, torch.zeros(10, 3).to_sparse(1)), errors.UnsupportedError,
        "out is sparse",
    ),
    "rows in init": (lambda kv: kv.init("y", torch.zeros(10, 3).to_sparse(1)), errors.UnsupportedError, "to_dense"),
}  # fmt: skip


@pytest.mark.parametrize("name", ["local", "dist_sync"])
def test_mistakes_are_errors_at_the_call(name):
    with kvmpi.create(name) as kv:
        start = np.arange(30, dtype="f4").reshape(10, 3)
        kv.init(["w", "number"], [start, np.ones((), "f4")])
        for what, (call, error, words) in MISTAKES.items():
            with pytest.raises(error, match=words):
                call(kv)
            out = np.empty_like(start)
            kv.pull("w", out)
            np.testing.assert_array_equal(out, start, err_msg=what)


@pytest.mark.parametrize("name", ["local", "dist_sync", "dist_async"])
@pytest.mark.parametrize("rule", [optim.Elastic(0.5), optim.Outer()], ids=repr)
def test_averages_take_no_rows(name, rule):
    with kvmpi.create(name) as kv:
        kv.init("w", np.zeros((10, 3), "f4"))
        kv.set_optimizer(rule)
        with pytest.raises(errors.UnsupportedError, match=r"push of key 'w' on worker 0: .*dense"):
            kv.push("w", (np.array([1]), ROW))
        kv.push("w", np.ones((10, 3), "f4"))


def test_an_updater_gets_what_was_pushed():
    """A pair for a NumPy key, a sparse tensor for one of torch."""
    seen = []

    def updater(key, pushed, stored):
        if isinstance(pushed, tuple):
            stored[pushed[0]] += pushed[1]
        else:
            stored += pushed
        seen.append(type(pushed))

    with kvmpi.create("local") as kv:
        kv.init(["numpy", "torch"], [np.zeros((5, 2)), torch.zeros(5, 2)])
        kv.set_updater(updater)
        rows = np.array([[1.0, 2.0], [3.0, 4.0]])
        for key, dtype in (("numpy", "f8"), ("torch", "f4")):
            kv.push(key, (np.array([4, 4]), rows.astype(dtype)))
        outs = [np.empty((5, 2)), torch.empty(5, 2)]
        kv.pull(["numpy", "torch"], outs)
    assert seen == [tuple, torch.Tensor]
    for out in outs:
        assert np.asarray(out).tolist() == [[0, 0]] * 4 + [[4, 6]]


def test_only_the_rows_travel():
    with kvmpi.create("dist_sync") as kv:
        kv.init("w", np.zeros((10_000, 32), "f4"))
        kv.set_optimizer(optim.SGD(lr=1.0))
        ids = np.arange(0, 10_000, 100)
        kv.push("w", (ids, np.ones((100, 32), "f4")))
        kv.row_sparse_pull("w", np.empty((100, 32), "f4"), ids)
        phases = kv.stats()["phases"]
    assert phases["push"]["bytes"] == phases["pull"]["bytes"] == 100 * (4 + 128)
