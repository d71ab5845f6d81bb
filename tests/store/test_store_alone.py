"""Every store type in one process: the API's semantics, which do not depend on how many workers there are."""

from __future__ import annotations

import ast
import copy
import functools
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tracemalloc

import numpy as np
import pytest
import torch
from jobs import HANGS_S
from store_helpers import ALL, array, pulled

import kvmpi
from kvmpi import errors, optim
from kvmpi.deadline import Deadline
from kvmpi.engine.naive import NaiveEngine
from kvmpi.ps import link
from kvmpi.store.call import Invocation, take_numbers
from kvmpi.wire import Connection, Listener


def rounded_to_bfloat16(values):
    mantissa, exponent = np.frexp(values.astype("f8"))
    return np.ldexp(np.rint(mantissa * 256) / 256, exponent).astype("f4")  # rint: to even, as IEEE's default


def test_names_and_aliases():
    for alias, name in {
        "device": "local", "allreduce": "mpi", "synchronous-mpi": "dist_sync_mpi", "asynchronous-mpi": "dist_async_mpi",
    }.items():  # fmt: skip
        with kvmpi.create(alias) as kv:
            assert kv.type == name
    with pytest.raises(ValueError, match="dist_sync_mpi"):
        kvmpi.create("dist_snyc")
    with pytest.raises(errors.ConfigError, match="timeout"):
        kvmpi.create("local", timeout=3)


def test_a_job_that_goes_on_with_a_store_that_servers_know_nothing_of(monkeypatch, recwarn):
    monkeypatch.setenv("KVMPI_RESUME", "/of/before")
    with kvmpi.create("mpi") as kv:
        assert kv.resumed_step == 0
    (warning,) = recwarn
    assert "goes on from /of/before" in str(warning.message)
    assert "has nothing there" in str(warning.message)
    assert warning.filename == __file__


def test_a_store_that_cannot_be_made_leaves_no_job_behind(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    with pytest.raises(errors.ConfigError, match="no_such_file"):
        kvmpi.create("dist_sync", tuning=str(tmp_path / "no_such_file"))
    assert not list(tmp_path.iterdir())
    assert not {"kvmpi-scheduler", "kvmpi-server"} & {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize("take", [copy.deepcopy, copy.copy, pickle.dumps])
def test_what_holds_a_store_cannot_be_sent_elsewhere(any_store, take):
    with pytest.raises(TypeError, match=rf"a store \({any_store.type}\) cannot be copied, pickled or sent"):
        take({"data set": any_store} if take is not copy.copy else any_store)
    value = np.array([1, 2], "f4")
    any_store.init("w", value)
    assert list(pulled(any_store, "w", value)) == [1, 2]


def test_a_store_says_what_it_is():
    with kvmpi.create("dist_sync") as kv:
        assert repr(kv) == "<kvmpi dist_sync: worker 0 of 1, 1 server>"
    assert repr(kv) == "<kvmpi dist_sync: worker 0 of 1, 1 server, closed>"
    with kvmpi.create("local") as kv:
        assert repr(kv) == "<kvmpi local: worker 0 of 1>"


def test_a_job_of_one(any_store):
    kv = any_store
    assert (kv.rank, kv.num_workers, kv.mpi_rank, kv.mpi_size, kv.client_rank, kv.num_clients) == (0, 1, 0, 1, 0, 1)
    assert kv.num_servers == (1 if kv.type.startswith("dist") else 0)
    assert kv.num_hosts == 1
    assert kv.num_dead(5.0) == 0
    assert (kv.clock(), kv.clock()) == (1, 2)
    kv.barrier()


def test_init_then_pull(any_store):
    values = {key: array(key, shape) for key, shape in enumerate([(2, 3), (), (0,), (5, 1, 7), (300_000,)])}
    any_store.init(list(values), list(values.values()))
    for key, value in values.items():
        np.testing.assert_array_equal(pulled(any_store, key, value), value)


def test_a_tensor_between_two_alignments_gets_its_value(any_store):
    any_store.init(0, torch.arange(6.0).reshape(2, 3))
    memory = bytearray(25)
    out = torch.frombuffer(memory, dtype=torch.float32, offset=1, count=6).reshape(2, 3)
    assert out.data_ptr() % 4
    for _ in range(2):
        out.zero_()
        any_store.pull(0, out)
        assert out.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_a_key_that_cannot_be_sent_is_refused_by_every_store(any_store):
    with pytest.raises(errors.ConfigError, match=r"key 'w\\ud800' has no encoding"):
        any_store.init("w\ud800", array(0))
    any_store.init("wörter", array(0))
    np.testing.assert_array_equal(pulled(any_store, "wörter", array(0)), array(0))
    with pytest.raises(errors.ConfigError, match="has no encoding"):
        any_store.pull("\udc80", array(1))


def test_push_assigns_the_sum_over_devices(store):
    store.init("w", np.zeros((2, 3), "f4"))
    parts = [array(i) for i in range(3)]
    store.push("w", parts)
    np.testing.assert_allclose(pulled(store, "w", parts[0]), np.sum(parts, axis=0, dtype="f8"), rtol=1e-6)
    store.push("w", parts[0])
    np.testing.assert_array_equal(pulled(store, "w", parts[0]), parts[0])


def test_equal_keys_in_one_push_are_summed(store):
    store.init([3, 5], [np.zeros(4, "f4")] * 2)
    ones = np.ones(4, "f4")
    store.push([3, 5, 3], [ones, 5 * ones, 2 * ones])
    np.testing.assert_array_equal(pulled(store, 3, ones), 3 * ones)
    np.testing.assert_array_equal(pulled(store, 5, ones), 5 * ones)


def test_allreduce_leaves_the_value_alone(any_store):
    kv, value, out = any_store, array(1), np.empty((2, 3), "f4")
    kv.init([3, 5], [array(0), np.zeros((0, 2), "f2")])
    if not kv.is_capable("allreduce"):
        with pytest.raises(errors.UnsupportedError, match=r"allreduce of key 3: .*kv.client.allreduce"):
            kv.allreduce(3, value)
        kv.client.init(3, value)
        kv, any_store = kv.client, kv.client
    else:
        kv.set_optimizer(optim.SGD(lr=1.0))
        np.testing.assert_array_equal(pulled(kv, 3, out), array(0))
    before = pulled(kv, 3, out)
    kv.allreduce(3, [value, array(2)], out)
    np.testing.assert_allclose(out, value.astype("f8") + array(2), rtol=1e-6)
    np.testing.assert_array_equal(value, array(1))
    both = [array(1), array(2)]
    kv.allreduce(3, both)
    for each in both:
        np.testing.assert_array_equal(each, out)
    kv.allreduce(3, [array(1), array(2)], out, scale=0.25)
    np.testing.assert_array_equal(out, np.float32(0.25) * (array(1) + array(2)))
    same = torch.from_numpy(array(4))
    kv.allreduce(3, same, async_op=True).wait()
    np.testing.assert_array_equal(same, array(4))
    np.testing.assert_array_equal(pulled(kv, 3, out), before)
    with pytest.raises(errors.UnsupportedError, match="rows"):
        kv.allreduce(3, (np.array([1]), np.ones((1, 3), "f4")))
    with pytest.raises(errors.ShapeMismatchError):
        kv.allreduce(3, np.zeros(2, "f4"))
    with pytest.raises(errors.KeyNotInitializedError, match="allreduce of key 4"):
        kv.allreduce(4, value)


def test_lists_of_keys_and_one_array_many_times(store):
    store.init(["a", "b"], [array(1), array(2)])
    outs = [np.empty((2, 3), "f4") for _ in range(2)]
    same = np.empty((2, 3), "f4")
    store.pull(["a", "b"], [[outs[0]] * 3, [outs[1], same, same]])
    np.testing.assert_array_equal(outs[0], array(1))
    np.testing.assert_array_equal(outs[1], array(2))
    np.testing.assert_array_equal(same, array(2))


def test_pushpull_and_broadcast(store):
    out = np.empty((2, 3), "f4")
    store.broadcast("w", array(0), out)
    np.testing.assert_array_equal(out, array(0))
    store.pushpull("w", [array(1), array(2)], out)
    np.testing.assert_allclose(out, array(1).astype("f8") + array(2), rtol=1e-6)
    value = array(3)
    store.pushpull("w", value)
    np.testing.assert_array_equal(value, array(3))
    devices = [array(4), array(5)]
    store.pushpull("w", devices)
    np.testing.assert_allclose(devices[0], array(4).astype("f8") + array(5), rtol=1e-6)
    np.testing.assert_array_equal(devices[0], devices[1])


def test_the_store_owns_its_copy(any_store):
    kv = any_store
    mine = array(0)
    kv.init("w", mine)
    mine[...] = -1
    np.testing.assert_array_equal(pulled(kv, "w", mine), array(0))
    gradient, before = array(1), pulled(kv, "w", mine)
    kv.push("w", gradient)
    gradient[...] = -1
    out = pulled(kv, "w", mine)
    expected = before + array(1) if "async" in kv.type else array(1)
    np.testing.assert_array_equal(out, expected)
    out[...] = -2  # what was pulled is the caller's
    np.testing.assert_array_equal(pulled(kv, "w", mine), expected)
    np.testing.assert_array_equal(gradient, np.full((2, 3), -1, "f4"))


gradient_of = functools.cache(array)  # to draw a large one takes longer than to push it


@pytest.mark.parametrize("memory", ["private", "of the store", "seen through a read-only view"])
@pytest.mark.parametrize("count", [1, 70_000, 1_500_000])
def test_buffers_are_free_when_a_call_returns(any_store, count, memory):
    any_store.init("w", np.zeros(count, "f4"))
    total = np.zeros(count)
    buffer = any_store.empty(count) if memory == "of the store" else np.empty(count, "f4")
    pushed = buffer.view()
    pushed.flags.writeable = "read-only" not in memory
    for i in range(4):
        buffer[...] = gradient_of(i, count)
        total = total + buffer if "async" in any_store.type else buffer.astype("f8")
        any_store.push("w", pushed)
        buffer[...] = np.nan
    np.testing.assert_allclose(pulled(any_store, "w", np.empty(count, "f4")), total, rtol=1e-5, atol=1e-5)


def test_async_work(any_store):
    keys = list(range(20))
    any_store.init(keys, [np.zeros(1000, "f4")] * 20)
    values, outs = [array(k, 1000) for k in keys], [np.empty(1000, "f4") for _ in keys]
    pushes = [any_store.push(k, values[k], priority=-k, async_op=True) for k in keys]
    pulls = [any_store.pull(k, outs[k], priority=-k, async_op=True) for k in keys]
    for work in [*pushes, *pulls]:
        work.wait(10)
        assert work.done()
    for key in keys:
        np.testing.assert_array_equal(outs[key], values[key])
    work = any_store.pushpull(keys, values, outs, async_op=True)
    work.wait()
    factor = 2 if "async" in any_store.type else 1
    for key in keys:
        np.testing.assert_array_equal(outs[key], factor * values[key])


DTYPES = ["float32", "float64", "float16", "int8", "int16", "int32", "int64", "uint8"]


def test_dtypes_and_layouts(store):
    for i, dtype in enumerate(DTYPES):
        value = (np.arange(35).reshape(5, 7) - (0 if dtype == "uint8" else 9)).astype(dtype)
        store.init(i, value)
        store.push(i, [value, value.T.copy().T])  # the second is not contiguous
        out = np.zeros((7, 5), dtype).T
        store.pull(i, out)
        assert out.dtype == value.dtype
        np.testing.assert_array_equal(out, (2 * value.astype("i8")).astype(dtype))
    for i, dtype in enumerate([torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32], start=100):
        tensor = torch.arange(24).reshape(2, 3, 2, 2).to(dtype).contiguous(memory_format=torch.channels_last)
        tensor.requires_grad_(tensor.is_floating_point())
        store.init(i, tensor)
        store.push(i, [tensor, tensor])
        out = torch.zeros_like(tensor)
        store.pull(i, out)
        assert torch.equal(out.detach().double(), 2 * tensor.detach().double())


def test_scalars_and_empty_arrays(any_store):
    any_store.init(["s", "e"], [np.array(3, "f4"), np.zeros((0, 4), "f4")])
    any_store.push(["s", "e"], [np.ones((), "f4"), np.zeros((0, 4), "f4")])
    out = np.zeros((), "f4")
    any_store.pull("s", out)
    assert out == (4 if "async" in any_store.type else 1)
    any_store.pushpull("e", np.zeros((0, 4), "f4"))


def test_bad_calls(any_store):
    kv = any_store
    kv.init("w", array(0))
    good, out = array(0), np.empty((2, 3), "f4")
    cases = [
        (errors.KeyNotInitializedError, lambda: kv.push("nope", good)),
        (KeyError, lambda: kv.pull("nope", out)),
        (errors.DuplicateKeyError, lambda: kv.init("w", good)),
        (errors.DuplicateKeyError, lambda: kv.init(["x", "y", "x"], [good] * 3)),
        (errors.KeyKindError, lambda: kv.init(3, good)),
        (TypeError, lambda: kv.push(3, good)),
        (errors.ShapeMismatchError, lambda: kv.push("w", np.ones((3, 2), "f4"))),
        (ValueError, lambda: kv.pull("w", np.ones(6, "f4"))),
        (errors.DTypeMismatchError, lambda: kv.push("w", good.astype("f8"))),
        (errors.DTypeMismatchError, lambda: kv.pushpull("w", good, np.empty((2, 3), "i4"))),
        (errors.DTypeMismatchError, lambda: kv.pull("w", None)),
        (errors.DTypeMismatchError, lambda: kv.init("c", np.zeros(2, "c8"))),
        (errors.ConfigError, lambda: kv.is_capable("telepathy")),
        (errors.ConfigError, lambda: kv.is_capable(["sparse"])),
        (errors.ConfigError, lambda: kv.num_dead("all")),
        (errors.ConfigError, lambda: kv.push("w", good, priority=np.array([1, 2]))),
        (errors.ConfigError, lambda: kv.row_sparse_pull("w", good[:1], [0], priority="high")),
        (errors.UnsupportedError, lambda: kv.pull("w", np.lib.stride_tricks.as_strided(good, (2, 3), (4, 4)))),
        (errors.ConfigError, lambda: kv.pushpull(["w"], [good], [out, out])),
    ]
    for error, call in cases:
        with pytest.raises(error) as caught:
            call()
        assert isinstance(caught.value, errors.KVError)
    np.testing.assert_array_equal(pulled(kv, "w", good), array(0))
    read_only = array(5)
    read_only.flags.writeable = False
    with pytest.raises(errors.UnsupportedError, match="read-only"):
        kv.pull("w", read_only)
    kv.push("w", read_only)
    with pytest.raises(errors.KVError, match="'w'"):
        kv.push("w", np.ones((3, 2), "f4"))


def test_an_asynchronous_store_needs_an_optimizer():
    for name in ["dist_async", "dist_async_mpi", "dist_ssp", "dist_ssp_mpi", "dist_softsync"]:
        with kvmpi.create(name) as kv:
            assert kv.is_capable("async")
            assert kv.is_capable("skip") == ("ssp" not in name)
            kv.init("w", array(0))
            for call in (lambda kv=kv: kv.push("w", array(0)), lambda kv=kv: kv.pushpull("w", array(0))):
                with pytest.raises(errors.KVError, match="set_optimizer"):
                    call()
            kv.set_optimizer(optim.Test())
            kv.push("w", array(1))
            np.testing.assert_array_equal(pulled(kv, "w", array(0)), array(0) + array(1))


def test_capabilities_tell_the_truth():
    for name in ALL:
        with kvmpi.create(name) as kv:
            dist = name.startswith("dist")
            assert kv.is_capable("optimizer")
            assert kv.is_capable("async") == kv.is_capable("skip") == ("async" in name)
            assert kv.is_capable("compression") == dist
            assert kv.is_capable("encryption") == dist
            assert not kv.is_capable("replication")
            assert kv.is_capable("updater") == (not dist)
            assert kv.is_capable("checkpoint")
            assert kv.is_capable("sparse")
            kv.init("w", array(0))
            if "async" in name:
                kv.set_optimizer(optim.Test(lr=-1))
            if not dist:
                with pytest.raises(errors.UnsupportedError):
                    kv.set_gradient_compression({"type": "fp16"})
                continue
            kv.set_gradient_compression({"type": "fp16"})
            kv.push("w", array(1))
            expected = array(1).astype("f2").astype("f4") + (array(0) if "async" in name else 0)
            np.testing.assert_array_equal(pulled(kv, "w", array(0)), expected)
            kv.set_gradient_compression({"type": "bf16"})
            kv.push("w", array(1))
            expected = rounded_to_bfloat16(array(1)) + (expected if "async" in name else 0)
            np.testing.assert_array_equal(pulled(kv, "w", array(0)), expected)
            assert kv.stats()["phases"]["push"]["bytes"] == 2 * (array(1).nbytes // 2)
            with pytest.raises(errors.UnsupportedError, match="fp16"):
                kv.set_gradient_compression({"type": "3bit", "threshold": 0.5})


def test_closed_stores(any_store):
    any_store.close()
    any_store.close()
    with pytest.raises(errors.KVError, match="closed"):
        any_store.push("w", array(0))


@pytest.mark.parametrize("name", ALL)
def test_a_closed_store_that_is_still_referred_to_holds_no_descriptors_and_no_buffers(name):
    stores, descriptors = [], []
    tracemalloc.start()
    try:
        for _ in range(4):
            with kvmpi.create(name, timeout_s=20) as kv:
                if kv.is_capable("compression"):
                    kv.set_gradient_compression({"type": "2bit", "threshold": 0.5})
                kv.init("w", np.zeros(100_000, "f4"))
                kv.set_optimizer(optim.Test(lr=-1))
                kv.pushpull("w", np.ones(100_000, "f4"), np.empty(100_000, "f4"))
            stores.append(kv)
            descriptors.append(len(os.listdir("/proc/self/fd")))
        kept_bytes, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert descriptors[3] <= descriptors[0], descriptors
    assert all(state.buffer is None for store in stores for state in store._keys.values())
    assert most_bytes > 400_000  # arrays are traced
    assert kept_bytes < 400_000, "something as large as a value has been kept"


def test_plug_in_store_type():
    from kvmpi.store.replicated import ReplicatedStore

    kvmpi.register_store("mine", lambda config: ReplicatedStore("mine", config))
    with kvmpi.create("mine") as kv:
        assert kv.type == "mine"


def test_empty_arrays_in_collective_memory():
    with kvmpi.create("local") as kv:
        assert kv.empty((2, 3), "float16").dtype == np.float16
        assert kv.empty(5, np.int32).shape == (5,)
        assert kv.empty((1,), torch.bfloat16).dtype == torch.bfloat16
        with pytest.raises(errors.DTypeMismatchError):
            kv.empty(3, "complex64")
        for shape in (1 << 62, (1 << 40, 1 << 40), 1 << 63):
            with pytest.raises(errors.ConfigError, match="larger than any memory"):
                kv.empty(shape)
        for dtype in (torch.float32, "float32"):
            for device in ("cuda:99", "cuda:x", "gpu"):
                with pytest.raises(errors.UnsupportedError, match=f"empty on {device}"):
                    kv.empty(3, dtype, device)


def test_numbers_of_numpy_become_those_of_python():
    for given, priority in ((np.uint8(3), 3), (np.int8(-128), -128), (np.float32(0.5), 0.5), (True, 1)):
        call = Invocation("allreduce", Deadline(None), given, scale=np.float32(0.5))
        take_numbers(call, "w")
        assert (call.priority, type(call.priority), type(call.scale)) == (priority, type(priority), float)
    for mistake in ({"scale": np.array([1.0])}, {"scale": 10**400}, {"scale": True}, {"priority": float("nan")}):
        with pytest.raises(errors.ConfigError, match=next(iter(mistake))):
            take_numbers(Invocation("allreduce", Deadline(None), **mistake), "w")


def interrupt(patch, engine):
    """A signal comes when ``engine`` is to know of an operation: with threads just before, without them just after."""
    if not isinstance(engine, NaiveEngine):
        patch.setattr(engine, "_register", lambda *_: signal.raise_signal(signal.SIGINT))
        return
    enter = engine._enter
    patch.setattr(engine, "_enter", lambda entry: (enter(entry), signal.raise_signal(signal.SIGINT)))


@pytest.mark.parametrize("engine", ["threaded", "naive"])
@pytest.mark.parametrize("name", ["local", "mpi"])
def test_a_signal_in_the_middle_of_a_call_leaves_a_store_without_others_usable(name, engine, monkeypatch):
    """It may come between two steps of the engine's own, and one with threads is not used any more."""
    monkeypatch.setenv("KVMPI_ENGINE", engine)
    with kvmpi.create(name) as kv:
        kv.init(["w", "v"], [array(0)] * 2)
        kv.set_optimizer(optim.Test())
        kv.push("w", array(1))
        for _ in range(2):
            with monkeypatch.context() as patch:
                interrupt(patch, kv._engine)
                with pytest.raises(KeyboardInterrupt):
                    kv.push("w", array(1))
            kv.push("w", array(2))
        kv.wait_all()
        np.testing.assert_array_equal(pulled(kv, "w", array(0)), array(0) + array(1) + array(2) + array(2))
        np.testing.assert_array_equal(pulled(kv, "v", array(0)), array(0))


def test_a_list_call_ends_with_its_last_part(any_store, monkeypatch):
    """Whoever waits is told by the operation that ends last, in whichever thread that is."""
    monkeypatch.setattr(link, "_AWAKE_S", 1000.0)  # nothing else ends a wait in time
    kv, keys = any_store, list(range(5))
    kv.init(keys, [np.zeros(100, "f4") for _ in keys])
    for step in range(20):
        outs = [np.empty(100, "f4") for _ in keys]  # with a second one each, which another thread copies to
        kv.pushpull(
            keys, [np.full(100, step + key, "f4") for key in keys], [[out, np.empty(100, "f4")] for out in outs]
        )
        if "async" not in kv.type:
            assert [out[0] for out in outs] == [step + key for key in keys]
    told = []
    work = kv.pull(keys, [np.empty(100, "f4") for _ in keys], async_op=True)
    work.add_done_callback(told.append)
    assert work.wait_done(20)
    kv.wait_all()
    assert told == [work]


def test_memory_of_a_failed_push_is_not_written_again(monkeypatch):
    """A server may be reading there still, and would add what is half of the next push."""
    with kvmpi.create("dist_sync", timeout_s=20) as kv:
        kv.init("w", np.zeros(20_000, "f4"))
        kv.push("w", np.ones(20_000, "f4"))
        kv.wait_all()
        state = kv._keys["w"]
        used = state.buffer
        assert used is not None

        def fail(*_, **__):
            work = kvmpi.engine.Work("push that nobody answers")
            work.finish(errors.KVTimeoutError("nobody has answered"))
            return work

        with monkeypatch.context() as broken:
            broken.setattr(kv._ps, "exchange_together", fail)
            kv.push("w", np.full(20_000, 2, "f4"))
            with pytest.raises(errors.KVTimeoutError):
                kv.wait_all()
        kv.push("w", np.full(20_000, 3, "f4"))
        np.testing.assert_array_equal(pulled(kv, "w", np.empty(20_000, "f4")), np.full(20_000, 3))
        assert not np.shares_memory(kv._keys["w"].buffer, used)
        np.testing.assert_array_equal(used, np.full(20_000, 2))


def test_a_store_that_was_dropped_is_closed_at_exit():
    program = """
import numpy, kvmpi
def leave_one():
    kv = kvmpi.create("dist_sync")
    kv.init("w", numpy.ones(3, "f4"))
leave_one()
import os
assert os.listdir(os.environ["TMPDIR"]), "the sockets of the servers in the process live here"
"""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # short enough for names of sockets
        done = subprocess.run(
            [sys.executable, "-c", program], env={**os.environ, "TMPDIR": folder}, capture_output=True, text=True,
            timeout=HANGS_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert os.listdir(folder) == []


MPI_IN_A_LONE_PROCESS = """
from mpi4py import MPI
import kvmpi
kv = kvmpi.create("local")
print({line.split()[-1] for line in open("/proc/self/maps") if "/sm_segment." in line})
raise SystemExit(3)
"""


def test_a_process_without_a_launcher_leaves_no_memory_of_mpi_behind():
    """Somebody in it has initialised MPI, as Lightning does; Open MPI leaves that to a daemon, which is not there."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("KVMPI_", "OMPI_"))}
    command = [sys.executable, "-c", MPI_IN_A_LONE_PROCESS]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=HANGS_S, check=False)
    assert done.returncode == 3, done.stderr
    found = ast.literal_eval(done.stdout)
    assert len(found) == 1, f"{found}: there was nothing to leave behind"
    assert not os.path.exists(found.pop())


def test_the_memory_of_a_sum_is_made_once_however_long_that_takes(store):
    """The first push after a pull is summed in one thread, and its answer awaited in another: in the same memory."""
    count = 1_100_000  # two of them are too much to be summed in the thread that calls
    index, out = np.arange(count, dtype="f4") % 1000, np.empty(count, "f4")
    store.init("w", np.zeros(count, "f4"))
    store.pull("w", out)
    state, made = store._keys["w"], []

    def slow(count, dtype, empty=state.empty):
        time.sleep(0.2)
        made.append(empty(count, dtype))
        made[-1][:] = 0
        return made[-1]

    state.buffer, state.empty = None, slow
    for step in (1, 2):
        store.push("w", [index, index * step])
        store.pull("w", out)
        assert np.array_equal(out, index * (1 + step)), out[:4]
    assert len(made) == 1


def test_a_call_on_many_small_keys_takes_few_messages(monkeypatch):
    posted = {Connection: 0, Listener: 0}
    for kind in posted:

        def post(self, *message, kind=kind, real=kind._post):
            posted[kind] += 1
            real(self, *message)

        monkeypatch.setattr(kind, "_post", post)
    keys = [f"k{i}" for i in range(64)]
    values = [array(i + 1, (10,)) for i in range(64)]
    with kvmpi.create("dist_sync") as kv:
        kv.init(keys, values)
        outs = [np.empty_like(value) for value in values]
        for step in range(1, 4):
            pushed = [value * (step + i) for i, value in enumerate(values)]
            posted.update(dict.fromkeys(posted, 0))
            kv.pushpull(keys, pushed, outs)
            fused = dict(posted)
            for out, value in zip(outs, pushed, strict=True):
                np.testing.assert_array_equal(out, value)
            kv.push(keys, values)
            kv.pull(keys, outs)
            for out, value in zip(outs, values, strict=True):
                np.testing.assert_array_equal(out, value)
            assert 0 < max(fused.values()) <= 16, "one message a key would be 64"
            assert max(posted.values()) <= 64, "three messages a key would be 192"
