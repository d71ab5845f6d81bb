"""What a client has summed already is pushed by its master alone, and every worker hears what any worker says.

reduced.py TYPE...
"""

import sys

import numpy as np

import kvmpi
from kvmpi.errors import ConfigError

SHAPES = [(), (3, 5), (300_001,)]
KEYS = list(range(len(SHAPES)))
STEPS = 4


def given(client, step, key):
    return np.full(SHAPES[key], 1.0 + 10.0 * client + 0.5 * step + 100.0 * key)


def raises(error, text, call):
    said = f"no {error.__name__}"
    try:
        call()
    except error as caught:
        said = str(caught)
    assert text in said, said


def values_of_clients(name):
    """Each way to push: the stored values get each client's once, also if the caller's arrays change at once."""
    with kvmpi.create(name) as kv:
        expected = [np.zeros(shape) for shape in SHAPES]
        outs = [np.empty(shape) for shape in SHAPES]
        kv.init(KEYS, expected)
        kv.set_optimizer(kvmpi.optim.Test(lr=-1.0))
        for step in range(STEPS):
            values = [given(kv.client_rank, step, key) for key in KEYS]
            for key in KEYS:
                expected[key] += sum(given(client, step, key) for client in range(kv.num_clients))
            work = None
            if step == 0:
                work = kv.pushpull(KEYS, values, outs, async_op=True, reduced=True)
            elif step == 1:
                kv.pushpull(KEYS, values, outs, reduced=True)
            else:
                kv.push(KEYS, values, async_op=step == 2, reduced=True)
            for value in values:
                value[...] = np.nan
            if work is not None:
                work.wait()
            if step > 1 or kv.is_capable("async"):
                if kv.is_capable("async"):
                    kv.barrier()
                kv.pull(KEYS, outs)
                kv.barrier()
            for key in KEYS:
                np.testing.assert_array_equal(outs[key], expected[key], err_msg=f"{name}, step {step}, key {key}")
        rows = np.zeros((4, 2))
        kv.init(9, rows)
        kv.pushpull(9, (np.array([1, 3]), np.ones((2, 2))), rows, reduced=True)
        kv.barrier()
        kv.pull(9, rows)
        np.testing.assert_array_equal(rows, kv.num_clients * np.array([[0, 0], [1, 1], [0, 0], [1, 1]]))


def without_a_rule(name):
    """The value becomes the sum of what the clients have; and means of Elastic are those of clients."""
    with kvmpi.create(name) as kv:
        outs = [np.zeros(shape) for shape in SHAPES]
        kv.init(KEYS, outs)
        for step in range(STEPS):
            kv.pushpull(KEYS, [given(kv.client_rank, step, key) for key in KEYS], outs, reduced=True)
            for key in KEYS:
                expected = sum(given(client, step, key) for client in range(kv.num_clients))
                np.testing.assert_array_equal(outs[key], expected, err_msg=f"{name}, step {step}, key {key}")
        kv.set_optimizer(kvmpi.optim.Elastic(0.5))
        kv.init(9, np.zeros(2))
        center = np.empty(2)
        kv.pushpull(9, np.array([4.0, 8.0]), center, reduced=True)
        kv.pull(9, center)
        np.testing.assert_array_equal(center, 0.5 * kv.num_clients * np.array([4.0, 8.0]))


def some_have_joined(name):
    """Masters first: what the others of a client have is pushed all the same, and what they say is heard."""
    with kvmpi.create(name) as kv:
        kv.init("w", np.zeros(7))
        kv.init("rows", np.zeros((3, 2)))
        kv.set_optimizer(kvmpi.optim.Test(lr=-1.0))
        own, most = 2 + 2 * kv.mpi_rank, 2 * kv.mpi_size
        for step in range(own):
            kv.pushpull("w", np.full(7, 1.0 + step), np.empty(7), reduced=True)
            kv.push("rows", (np.array([2]), np.ones((1, 2))), reduced=True)
            assert not kv.any(False)
            assert kv.any(step + 1 == most) == (step + 1 == most)
        kv.join()
        kv.barrier()
        out, rows = np.empty(7), np.empty((3, 2))
        kv.pull("w", out)
        kv.pull("rows", rows)
        np.testing.assert_array_equal(out, kv.num_clients * most * (most + 1) / 2)
        np.testing.assert_array_equal(rows[2], kv.num_clients * most)


def what_any_says(name):
    with kvmpi.create(name) as kv:
        for rank in range(kv.num_workers):
            assert kv.any(kv.rank == rank)
            assert not kv.any(False)
        assert kv.any(np.float32(1.0))
        assert not kv.any(np.zeros(1))
        kv.barrier()
        last = kv.rank == kv.num_workers - 1
        raises(ValueError, "ambiguous", lambda: kv.any(np.zeros(2) if last else False))
        assert kv.any(last)  # all of them are in step


def mismatch(name):
    with kvmpi.create(name) as kv:
        kv.init("w", np.zeros(2))
        kv.set_optimizer(kvmpi.optim.Test(lr=-1.0))
        if kv.mpi_size > 1:
            only_first = kv.mpi_rank == 0
            raises(ConfigError, "reduced", lambda: kv.push("w", np.ones(2), reduced=only_first))
        kv.barrier()


for name in sys.argv[1:]:
    values_of_clients(name)
    if not name.startswith("dist_async"):
        without_a_rule(name)
    some_have_joined(name)
    what_any_says(name)
    mismatch(name)
    print("reduced", name, "right")
