"""Rows of keys in every store type: sums, optimizers, pulls, joined workers, checkpoints, against float64.

    sparse.py FOLDER TYPE...    sparse.py bits TYPE...

Every push depends on worker, step, key and row. Prints a line for each type, and one with a checksum of sums that are
not exact; with ``bits`` this alone.
"""

import functools
import hashlib
import os
import sys

import numpy as np

import kvmpi

#: Importing torch takes longer than all the rest.
WITH_TORCH = int(os.environ.get("KVMPI_NUM_WORKERS", 1)) <= 2
if WITH_TORCH:
    import torch

#: The second is in several chunks, on all servers.
KEYS = {
    "table": ((50, 3), "float32"), "large": ((700, 300), "float32"), "vector": ((41,), "int64"),
    "half": ((20, 2, 2), "float16"), "brain": ((9, 5), "bfloat16" if WITH_TORCH else "float64"),
    "no rows": ((0, 2), "float32"), "no columns": ((4, 0), "float32"),
}  # fmt: skip
STEPS = 4


def drawn(rank, step, key):
    """Row ids, some twice and in any order, and whole numbers for them: in the last step most rows, else few."""
    rows = KEYS[key][0][0]
    rng = np.random.default_rng([rank, step, len(key)])
    n = [rows // 10, 2, 0, 2 * rows][step % 4] if rows else 0
    return rng.integers(0, max(1, rows), n), rng.integers(0, 5, (n, *KEYS[key][0][1:]))


def array(values, dtype):
    return torch.tensor(values, dtype=torch.bfloat16) if dtype == "bfloat16" else np.asarray(values, dtype)


def as_pushed(rank, step, key):
    """A pair; or a torch sparse tensor, of a NumPy key as well; or one of each, as of two devices."""
    (shape, dtype), (ids, rows) = KEYS[key], drawn(rank, step, key)
    if not WITH_TORCH or (step + rank) % 3 == 0:
        # Two vectors of one dtype would be those of two devices.
        kind = np.int64 if dtype != "int64" and step % 2 else np.int32
        return ids.astype(kind), array(rows, dtype)

    def tensor(ids, rows):
        values = torch.tensor(rows, dtype=getattr(torch, dtype))
        return torch.sparse_coo_tensor(torch.tensor(ids)[None], values, shape, check_invariants=True)

    half = len(ids) // 2
    if (step + rank) % 3 == 1:
        return tensor(ids, rows)
    return [tensor(ids[:half], rows[:half]), (torch.tensor(ids[half:], dtype=torch.int32), array(rows[half:], dtype))]


@functools.cache
def total(ranks, step, key):
    """The sum of what these workers push: which rows, and a matrix that is right for these."""
    found, touched = np.zeros(KEYS[key][0]), np.zeros(KEYS[key][0][0], bool)
    for rank in ranks:
        ids, rows = drawn(rank, step, key)
        for row, numbers in zip(ids, rows, strict=True):
            found[row] += numbers
        touched[ids] = True
    for kept in (touched, found):
        kept.flags.writeable = False  # whoever asks next is given it too
    return touched, found


def numpy_of(out):
    return out.float().numpy().astype("f8") if not isinstance(out, np.ndarray) else out.astype("f8")


def empty(shape, dtype):
    return array(np.full(shape, 7), dtype)


def check_pulls(kv, expected, *what):
    """Ids of workers differ: twice the same, unsorted, of two dimensions, none, and lists of keys."""
    rng = np.random.default_rng([kv.rank, 5])
    for key, (shape, dtype) in KEYS.items():
        last = shape[0] - 1
        some = [np.empty(0, np.int64), []]
        if shape[0]:
            some += [
                [last, 0, last],
                rng.integers(0, shape[0], (2, 3)),
                np.array(last // 2, np.int16),
                list(range(shape[0])),
            ]
        for ids in some:
            out = empty((*np.shape(ids), *shape[1:]), dtype)
            kv.row_sparse_pull(key, out, ids)
            right = expected[key][np.asarray(ids, int)] if np.size(ids) else np.empty((*np.shape(ids), *shape[1:]))
            np.testing.assert_array_equal(numpy_of(out), right, err_msg=f"{what} {key} {ids}")
    outs = [empty((2, *KEYS[key][0][1:]), KEYS[key][1]) for key in ("vector", "large", "table")]
    many = empty((1, 3), "float32")
    ids = [np.array([kv.rank, 40]), [5, 4 + kv.rank], [[1, 2], [49]]]
    kv.row_sparse_pull(["vector", "large", "table"], [outs[0], outs[1], [outs[2], many]], ids, async_op=True).wait()
    for key, out, named in zip(
        ("vector", "large", "table", "table"), [*outs, many], [*ids[:2], [1, 2], [49]], strict=True
    ):
        np.testing.assert_array_equal(numpy_of(out), expected[key][named], err_msg=f"{what} {key}")


def init(kv):
    start = {key: np.arange(np.prod(shape)).reshape(shape) % 13 for key, (shape, _) in KEYS.items()}
    kv.init(list(KEYS), [array(start[key], KEYS[key][1]) for key in KEYS])
    return {key: value.astype("f8") for key, value in start.items()}


def sums(name):
    """Without an optimizer rows become their sums, and others stay; results come back in every form."""
    with kvmpi.create(name) as kv:
        assert kv.is_capable("sparse")
        assert kv.is_capable("replication") == (kv.num_servers == 3), "the job that has --replicas"
        expected, ranks = init(kv), range(kv.num_workers)
        for step in range(2 * STEPS):
            pushed = {key: as_pushed(kv.rank, step, key) for key in KEYS}
            changed = {}
            for key in KEYS:
                touched, found = total(ranks, step, key)
                expected[key] = np.where(touched.reshape(-1, *[1] * (found.ndim - 1)), found, expected[key])
                changed[key] = touched
            if step % 4 == 0:
                kv.push(list(KEYS), list(pushed.values()))
            elif step % 4 == 1:
                works = [
                    kv.push(key, value, priority=-i, async_op=True) for i, (key, value) in enumerate(pushed.items())
                ]
                for work in works:
                    work.wait()
            elif step % 4 == 2:
                outs = {key: empty(*KEYS[key]) for key in KEYS}
                kv.pushpull(list(KEYS), list(pushed.values()), list(outs.values()))
                for key, out in outs.items():
                    np.testing.assert_array_equal(numpy_of(out), expected[key], err_msg=f"{name} {step} {key}")
            else:
                for key, value in pushed.items():
                    kv.pushpull(key, value)
                    for one in value if isinstance(value, list) else [value]:
                        if isinstance(one, tuple):
                            ids, rows = np.asarray(one[0], int), one[1]
                        else:
                            ids, rows = one._indices()[0].numpy(), one._values()
                            if rows.numel():
                                np.testing.assert_array_equal(ids, np.flatnonzero(changed[key]))
                        right = expected[key][ids].reshape(rows.shape)
                        np.testing.assert_array_equal(numpy_of(rows), right, err_msg=f"{name} {step} {key}")
            if step % 3 != 1:
                check_pulls(kv, expected, name, step)
        whole = {key: empty(*KEYS[key]) for key in KEYS}
        kv.pull(list(KEYS), list(whole.values()))
        for key, out in whole.items():
            np.testing.assert_array_equal(numpy_of(out), expected[key])


class Lazy:
    """Optimizers on the rows that were pushed, in float64, written from their formulas."""

    def __init__(self, shape):
        self.value = np.zeros(shape)
        self.first, self.second, self.step = np.zeros(shape), np.zeros(shape), 0

    def momentum(self, r, g, lr=0.5, momentum=0.75):
        self.first[r] = momentum * self.first[r] + g
        self.value[r] -= lr * self.first[r]

    def adam(self, r, g, lr=0.25):
        self.first[r] = 0.9 * self.first[r] + 0.1 * g
        self.second[r] = 0.999 * self.second[r] + 0.001 * g**2
        mean, square = self.first[r] / (1 - 0.9**self.step), self.second[r] / (1 - 0.999**self.step)
        self.value[r] -= lr * mean / (np.sqrt(square) + 1e-8)

    def adagrad(self, r, g, lr=0.5):
        self.second[r] += g**2
        self.value[r] -= lr * g / (np.sqrt(self.second[r]) + 1e-10)

    def plain(self, r, g, lr=0.5):
        self.value[r] -= lr * g


RULES = {
    "plain": kvmpi.optim.SGD(lr=0.5), "momentum": kvmpi.optim.SGD(lr=0.5, momentum=0.75),
    "adam": kvmpi.optim.Adam(lr=0.25), "adagrad": kvmpi.optim.Adagrad(lr=0.5),
}  # fmt: skip


def optimizers(name, path):
    """Each rule, with a checkpoint in between; in a client of several workers one that joins early goes along."""
    for rule_name, rule in RULES.items():
        with kvmpi.create(name) as kv:
            shapes = {key: KEYS[key][0] for key in ("table", "large")}
            for key, shape in shapes.items():
                kv.init(key, np.zeros(shape))
            kv.set_optimizer(rule)
            lazy = {key: Lazy(shape) for key, shape in shapes.items()}
            counts = [5 + (rank == 0) for rank in range(kv.num_workers)]
            for step in range(max(counts)):
                ranks = tuple(rank for rank in range(kv.num_workers) if counts[rank] > step)
                if kv.rank in ranks:
                    for key in shapes:
                        ids, rows = drawn(kv.rank, step, key)
                        kv.push(key, (ids, rows.astype("f8")))
                    if step == 2:
                        kv.save(path)
                        kv.push("table", (np.array([3]), np.ones((1, 3))))
                        kv.load(path)
                for key, one in lazy.items():
                    touched, found = total(ranks, step, key)
                    one.step += 1
                    getattr(one, rule_name)(np.flatnonzero(touched), found[touched])
            kv.join()
            if kv.client_rank == 0:  # it pushed last, and so it reads that round
                for key, one in lazy.items():
                    ids = np.arange(shapes[key][0])
                    out = np.empty(shapes[key])
                    kv.row_sparse_pull(key, out, ids)
                    np.testing.assert_allclose(
                        out, one.value, rtol=1e-9, atol=1e-9, err_msg=f"{name} {rule_name} {key}"
                    )


def mixed(name):
    """In a round of several clients some push rows, others whole arrays: the round is of the whole value."""
    with kvmpi.create(name) as kv:
        expected = init(kv)["large"]
        kv.set_optimizer(kvmpi.optim.SGD(lr=1.0, momentum=0.5))
        velocity = np.zeros_like(expected)
        for step in range(3):
            sparse = (kv.client_rank + step) % 2
            ids, rows = drawn(kv.rank, step, "large")
            dense = np.zeros(expected.shape, "f4")
            np.add.at(dense, ids, rows)
            kv.push("large", (ids, rows.astype("f4")) if sparse else dense)
            velocity = 0.5 * velocity + total(range(kv.num_workers), step, "large")[1]
            expected -= velocity
            out = np.empty((2, 300), "f4")
            kv.row_sparse_pull("large", out, [699, 13])
            np.testing.assert_array_equal(out, expected[[699, 13]])


def updates(name):
    """Asynchronous: nothing is lost; rows of others come with a pull."""
    with kvmpi.create(name) as kv:
        expected = init(kv)
        kv.set_optimizer(kvmpi.optim.Test(lr=-1.0))
        kv.barrier()
        for step in range(STEPS):
            for key in KEYS:
                if step % 2:
                    kv.pushpull(key, as_pushed(kv.rank, step, key))
                else:
                    kv.push(key, as_pushed(kv.rank, step, key))
        kv.barrier()
        for key in KEYS:
            for step in range(STEPS):
                expected[key] += total(range(kv.num_workers), step, key)[1]
        check_pulls(kv, expected, name)


def bits(name):
    """Sums that are rounded: the same in every worker, and in the next run."""
    with kvmpi.create(name) as kv:
        kv.init("w", np.zeros((500, 20), "f4"))
        kv.set_gradient_compression({"type": "fp16"}) if name.startswith("dist") and kv.num_servers else None
        rng = np.random.default_rng(kv.rank)
        digest = hashlib.sha256()
        for step in range(4):
            ids = rng.integers(0, 500, [400, 40, 5000, 0][step])
            kv.push("w", (ids, rng.standard_normal((ids.size, 20)).astype("f4")))
            out = np.empty((500, 20), "f4")
            kv.row_sparse_pull("w", out, np.arange(500))
            digest.update(out.tobytes())
        print(f"bits {name} {digest.hexdigest()}", flush=True)


def joins(name):
    """Some workers stop early; the others go on with rows, whole arrays and pulls of both."""
    with kvmpi.create(name) as kv:
        init(kv)
        counts = [2 + 3 * (rank % 2 == 0) for rank in range(kv.num_workers)]
        for step in range(counts[kv.rank]):
            ranks = tuple(rank for rank in range(kv.num_workers) if counts[rank] > step)
            value = as_pushed(kv.rank, 3, "table")
            whole = np.empty((50, 3), "f4")
            if step % 2:
                kv.pushpull(
                    ["table", "large"], [value, np.full((700, 300), 1.0, "f4")], [whole, np.empty((700, 300), "f4")]
                )
            else:
                kv.pushpull("table", value)
                kv.pull("table", whole)
            touched, found = total(ranks, 3, "table")
            np.testing.assert_array_equal(whole[touched], found[touched])
            some = np.empty((2, 3), "f4")
            kv.row_sparse_pull("table", some, [kv.rank, 49])
            np.testing.assert_array_equal(some, whole[[kv.rank, 49]])
        kv.join()


def mistakes(name):
    """What one worker does wrong is an error for its client, and the store goes on."""
    with kvmpi.create(name) as kv:
        kv.init("w", np.zeros((10, 3), "f4"))
        good = (np.array([1]), np.ones((1, 3), "f4"))
        odd = kv.rank == kv.num_workers - 1
        erring = kv.client_rank == kv.num_clients - 1
        for bad, error in (
            ((np.array([1, -1]), np.ones((2, 3), "f4")), kvmpi.errors.RowIndexError),
            ((np.array([10]), np.ones((1, 3), "f4")), kvmpi.errors.RowIndexError),
            ((np.array([1, 2]), np.ones((1, 3), "f4")), kvmpi.errors.ShapeMismatchError),
            ((np.array([1]), np.ones((1, 3))), kvmpi.errors.DTypeMismatchError),
            (np.ones((10, 3), "f4"), kvmpi.errors.DTypeMismatchError if kv.mpi_size > 1 else None),
        ):
            if erring and error is not None:
                try:
                    kv.push("w", bad if odd else good)
                    text = "nothing"
                except error as found:
                    text = str(found)
                assert "'w'" in text, (bad, text)
            kv.barrier()
            kv.push("w", good)
            out = np.empty((2, 3), "f4")
            kv.row_sparse_pull("w", out, [0, 1])
            assert out.tolist() == [[0.0] * 3, [float(kv.num_workers)] * 3], out


if __name__ == "__main__":
    folder, *names = sys.argv[1:]
    for name in names:
        if folder == "bits":
            bits(name)
            continue
        if "async" in name:
            updates(name)
        else:
            sums(name)
            optimizers(name, os.path.join(folder, name))
            bits(name)
            joins(name)
            mistakes(name)
            if name.startswith("dist"):
                mixed(name)
        print(f"sparse {name} right", flush=True)
