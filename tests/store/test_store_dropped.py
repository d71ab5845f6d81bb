"""A store to which nothing refers any more, as when a cell of a notebook that makes one is run again."""

from __future__ import annotations

import gc
import os
import tempfile
import threading

import numpy as np
import pytest

import kvmpi
from kvmpi.store import factory

TYPES = ["local", "mpi", "dist_sync", "dist_async_mpi"]


@pytest.fixture(autouse=True)
def temporary(monkeypatch):
    """A folder for temporary files that is nobody else's, with a short name, as sockets want it."""
    with tempfile.TemporaryDirectory(prefix="k") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield folder
        factory._close_dropped()


def cell(name: str) -> tuple[kvmpi.KVStore, np.ndarray]:
    kv, weights = kvmpi.create(name), np.zeros(1000, "f4")
    kv.init("w", weights)
    kv.set_optimizer(kvmpi.optim.Test(lr=-1.0))
    kv.pushpull("w", np.arange(1000, dtype="f4"), weights)
    return kv, weights


@pytest.mark.parametrize("name", TYPES)
def test_a_cell_that_is_run_again_leaves_one_store_behind_at_most(name, temporary):
    seen = []
    for _ in range(6):
        kv, weights = cell(name)
        np.testing.assert_array_equal(weights, np.arange(1000), err_msg="values of another store")
        seen.append((threading.active_count(), len(os.listdir("/proc/self/fd")), len(os.listdir(temporary))))
    assert seen[2:] == [seen[1]] * 4, "the store that the name had before is there while the next is made, and no other"
    kv.close()
    if name.startswith("dist"):
        assert len(os.listdir(temporary)) == 1
    del kv
    factory._close_dropped()
    assert os.listdir(temporary) == []


@pytest.mark.parametrize("name", TYPES)
def test_a_store_that_something_refers_to_stays(name):
    first, _ = cell(name)
    holder = [first.pushpull]  # a callback has it, say
    del first
    for _ in range(3):
        cell(name)
    out = np.zeros(1000, "f4")
    holder[0]("w", np.ones(1000, "f4"), out)
    np.testing.assert_array_equal(out, np.arange(1000) + 1)
    holder[0].__self__.close()


def test_what_a_dropped_store_was_asked_for_is_done(temporary):
    kv, _ = cell("dist_sync")
    out = np.zeros(1000, "f4")
    work = kv.pushpull("w", np.ones(1000, "f4"), out, async_op=True)
    del kv
    kvmpi.create("local").close()
    work.wait(10.0)
    np.testing.assert_array_equal(out, np.arange(1000) + 1)
    del work
    factory._close_dropped()
    assert os.listdir(temporary) == []


def test_a_child_does_not_close_what_its_parent_has(temporary):
    kv, _ = cell("dist_sync")
    pid = os.fork()
    if pid == 0:
        del kv
        gc.collect()
        kvmpi.create("local").close()
        os._exit(len(os.listdir(temporary)))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1, "the folder of the parent's servers"
    out = np.zeros(1000, "f4")
    kv.pull("w", out)
    np.testing.assert_array_equal(out, np.arange(1000))
    kv.close()
