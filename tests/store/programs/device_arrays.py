"""Run by test_store_devices: what a store does with arrays of a device, against sums in float64.

device_arrays.py FOLDER TYPE... [CHECK=NAME]...
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from device_checks import DEVICE, Checks, one_host_for_each
from device_streams import STREAM_CHECKS
from device_values import DTYPES, HALVES, array, blank, host, numbers, refill, same, strided, transposed

import kvmpi
from kvmpi.errors import ShapeMismatchError

torch.set_num_threads(1)
SHAPES = [(3, 5), (0,), (), (1,), (1013,), (70_001,), (0, 4)]
LIBRARIES = ("cupy", "torch")


def total(kv: Any, of: Callable[[int], np.ndarray]) -> np.ndarray:
    return sum(of(rank).astype("f8") for rank in range(kv.num_workers))


def devices_of_a_key(kv: Any) -> None:
    """Two vectors on the card stand for two devices; outs of every kind get the same value."""
    for dtype in DTYPES:
        for shape in SHAPES if dtype in ("float32", "bfloat16") else SHAPES[:1]:
            key = f"{dtype} {shape}"
            kv.init(key, array(numbers(shape, 1, dtype=dtype), dtype))
            first = blank(shape, dtype)
            kv.pull(key, first)
            same(first, numbers(shape, 1, dtype=dtype), f"init of {key}")
            for step, library in enumerate(LIBRARIES * 2):
                given = [array(numbers(shape, kv.rank, d, step, dtype=dtype), dtype, library) for d in range(2)]
                if step > 1:  # what is not contiguous, and what is on the host
                    given[0] = transposed(shape, dtype, library)
                    refill(given[0], numbers(shape, kv.rank, 0, step, dtype=dtype))
                    given[1] = array(numbers(shape, kv.rank, 1, step, dtype=dtype), dtype, library, "cpu")
                kv.push(key, given)
                expected = total(kv, lambda r: sum(numbers(shape, r, d, step, dtype=dtype) for d in range(2)))  # noqa: B023
                outs = [make(shape, dtype, kind) for kind in LIBRARIES for make in (blank, transposed, strided)]
                outs += [blank(shape, dtype, device="cpu"), outs[0]]
                kv.pull(key, outs)
                for i, out in enumerate(outs):
                    same(out, expected, f"out {i} of {key}, step {step}")
                for d, one in enumerate(given):
                    same(one, numbers(shape, kv.rank, d, step, dtype=dtype), f"{key}: what was pushed")


def in_place_and_out_of_place(kv: Any) -> None:
    for library in LIBRARIES:
        for dtype in ("float32", "bfloat16", "int64"):
            for shape in SHAPES:
                key = f"{library} {dtype} {shape}"
                kv.init(key, blank(shape, dtype, library))
                for step in range(3):
                    ours = numbers(shape, kv.rank, step, dtype=dtype)
                    expected = total(kv, lambda r: numbers(shape, r, step, dtype=dtype))  # noqa: B023
                    value, out = array(ours, dtype, library), transposed(shape, dtype, library)
                    kv.pushpull(key, value, out)
                    same(out, expected, f"pushpull of {key}")
                    same(value, ours, f"{key}: what was pushed")
                    kv.pushpull(key, value)
                    same(value, expected, f"pushpull of {key} in place")
                    several = [array(ours, dtype, library), array(ours, dtype, library)]
                    kv.pushpull(key, several)
                    for one in several:
                        same(one, 2 * expected, f"pushpull of {key} in place, two devices")


def many_keys(kv: Any) -> None:
    """Lists of 20 keys of odd sizes and two dtypes, in place and not, later and at once."""
    keys = [f"layer{i}" for i in range(20)]
    sizes = [(997 * i * i) % 30_011 + i % 2 for i in range(20)]
    dtypes = ["bfloat16" if i % 3 == 0 else "float32" for i in range(20)]
    values = [array(np.zeros(n), dtype, "torch") for n, dtype in zip(sizes, dtypes, strict=True)]
    kv.init(keys, values)
    outs = [blank((n,), dtype, LIBRARIES[i % 2]) for i, (n, dtype) in enumerate(zip(sizes, dtypes, strict=True))]
    for step in range(4):
        for i, value in enumerate(values):
            refill(value, numbers(sizes[i], kv.rank, step, i))
        expected = [total(kv, lambda r: numbers(sizes[i], r, step, i)) for i in range(20)]  # noqa: B023
        if step % 2:
            work = kv.pushpull(keys, values, async_op=True)
            work.wait()
            found = values
        else:
            kv.push(keys, values, priority=-step)
            kv.pull(keys, outs)
            found = outs
        for key, one, right in zip(keys, found, expected, strict=True):
            same(one, right, f"{key}, step {step}")


def sums_that_are_not_stored(kv: Any) -> None:
    for library in LIBRARIES:
        for dtype in ("float32", "float64", "bfloat16", "int32"):
            for shape in SHAPES:
                key = f"{library} {dtype} {shape}"
                kv.init(key, blank(shape, dtype, library))
                ours = numbers(shape, kv.rank, dtype=dtype)
                expected = total(kv, lambda r: numbers(shape, r, dtype=dtype))  # noqa: B023
                scales = (1.0,) if dtype == "int32" else (1.0, 0.5)
                for scale in scales:
                    value, out = array(ours, dtype, library), strided(shape, dtype, library)
                    kv.allreduce(key, value, out, scale=scale)
                    same(out, scale * expected, f"allreduce of {key}")
                    same(value, ours, f"{key}: what was summed")
                    kv.allreduce(key, value, scale=scale)
                    same(value, scale * expected, f"allreduce of {key} in place")
                pair = [array(ours, dtype, library), array(ours, dtype, library, "cpu")]
                kv.allreduce(key, pair)
                for one in pair:
                    same(one, 2 * expected, f"allreduce of {key}, device and host")
                kv.pull(key, value)
                same(value, np.full(shape, 77), f"the value of {key}")
    keys = [f"cupy float32 {shape}" for shape in SHAPES]
    values = [array(numbers(shape, kv.rank, i)) for i, shape in enumerate(SHAPES)]
    kv.allreduce(keys, values, async_op=True, scale=0.25).wait()
    for i, (key, value) in enumerate(zip(keys, values, strict=True)):
        same(value, 0.25 * total(kv, lambda r: numbers(SHAPES[i], r, i)), key)  # noqa: B023


def first_values(kv: Any) -> None:
    """Worker 0's come to all, whatever others give."""
    for library in LIBRARIES:
        for dtype in ("float32", "bfloat16"):
            outs = [blank((31, 7), dtype, library), transposed((31, 7), dtype, library)]
            kv.broadcast(f"{library} {dtype}", array(numbers((31, 7), kv.rank), dtype, library), outs)
            for out in outs:
                same(out, numbers((31, 7), 0), f"broadcast of {library} {dtype}")


def later(kv: Any) -> None:
    """Several calls under way; the same key in program order."""
    shape, n = (50_021,), kv.num_workers
    kv.init(["a", "b"], [blank(shape), blank(shape)])
    for library in LIBRARIES:
        a, b = (array(numbers(shape, kv.rank, salt), library=library) for salt in (1, 2))
        outs = [blank(shape, library=library) for _ in range(3)]
        works = [
            kv.push("a", a, async_op=True), kv.pull("a", outs[0], async_op=True), kv.push("a", b, async_op=True),
            kv.pull("a", outs[1], async_op=True), kv.pushpull("b", [b, b], outs[2], async_op=True),
        ]  # fmt: skip
        for work in reversed(works):
            work.wait(20)
            assert work.done()
        for out, salt, times in zip(outs, (1, 2, 2), (1, 1, 2), strict=True):
            same(out, times * total(kv, lambda r: numbers(shape, r, salt)), f"async, {library}, {n} workers")  # noqa: B023
    kv.wait_all()


def steps_of_an_optimizer(kv: Any) -> None:
    """Momentum and weight decay in the store, beside the same in float64."""
    shapes, rate, n = [(13, 7), (1013,), (30_011,)], 0.1, kv.num_workers
    keys = list(range(2 * len(shapes)))
    dtypes = ["float32", "float64"] * len(shapes)
    shapes = [shape for shape in shapes for _ in range(2)]
    exact = [numbers(shape, 5).astype("f8") for shape in shapes]
    moving: list[np.ndarray | None] = [None] * len(keys)
    kv.init(keys, [array(v, dtype, LIBRARIES[k % 2]) for k, v, dtype in zip(keys, exact, dtypes, strict=True)])
    kv.set_optimizer(kvmpi.optim.SGD(lr=rate, momentum=0.9, weight_decay=0.01, rescale_grad=1 / n))
    outs = [blank(shape, dtype, LIBRARIES[k % 2]) for k, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))]
    for step in range(6):
        if step == 3:
            kv.set_hyperparams(lr=(rate := 0.01))
        grads = [
            [array(np.sin(numbers(shape, kv.rank, step, d)), dtype, LIBRARIES[(k + step) % 2]) for d in range(2)]
            for k, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
        ]
        if step % 2:
            kv.pushpull(keys, grads, outs)
        else:
            kv.push(keys, grads)
            kv.pull(keys, outs)
        for k, shape in enumerate(shapes):
            mean = total(kv, lambda r: sum(np.sin(numbers(shape, r, step, d)) for d in range(2))) / n  # noqa: B023
            mean = mean + 0.01 * exact[k]
            moving[k] = mean if moving[k] is None else 0.9 * moving[k] + mean
            exact[k] = exact[k] - rate * moving[k]
            np.testing.assert_allclose(host(outs[k]), exact[k], rtol=0, atol=1e-5 if dtypes[k] == "float32" else 1e-12)


def rows(kv: Any) -> None:
    """Pairs of ids and rows, and sparse tensors, all on the device; and rows that come back."""
    n, shape = kv.num_workers, (40, 3)
    for library in LIBRARIES:
        for dtype in ("float32", "bfloat16") if library == "torch" else ("float32", "float64"):
            key, expected = f"{library} {dtype}", numbers(shape, 9)
            kv.init(key, array(expected, dtype, library))
            for step in range(3):
                ids = {rank: (np.arange(5) * (rank + 2) + step) % 7 * 5 for rank in range(n)}  # some of them twice
                moved = {rank: numbers((5, 3), rank, step) for rank in range(n)}
                given: Any = (array(ids[kv.rank], "int64", library), array(moved[kv.rank], dtype, library))
                if library == "torch" and step:
                    given = torch.sparse_coo_tensor(given[0][None], given[1], shape, check_invariants=True)
                kv.push(key, given)
                sums = np.zeros(shape)
                for rank in range(n):
                    np.add.at(sums, ids[rank], moved[rank])
                touched = sorted({i for found in ids.values() for i in found})
                expected[touched] = sums[touched]
                wanted = np.array([[kv.rank, 35], [5, 5]])
                out, whole = blank((2, 2, 3), dtype, library), blank(shape, dtype, library)
                kv.row_sparse_pull(key, out, array(wanted, "int64", library))
                same(out, expected[wanted], f"rows of {key}, step {step}")
                kv.row_sparse_pull(key, out, wanted.tolist() if step % 2 else wanted, async_op=True).wait()
                same(out, expected[wanted], f"rows of {key}, later, step {step}")
                kv.pull(key, whole)
                same(whole, expected, f"{key}, step {step}")


def arrays_of_the_store(kv: Any) -> None:
    for dtype in ("float32", "bfloat16", torch.float16, np.float64, "int8"):
        made, whole = kv.empty((9, 11), dtype, device=DEVICE), "int8" if dtype == "int8" else "float32"
        device = getattr(made, "device", "cpu")
        where = f"cuda:{device.id}" if hasattr(device, "id") else str(device)
        assert where == DEVICE, where
        refill(made, numbers((9, 11), kv.rank, dtype=whole))
        kv.init(f"{dtype}", made)
        kv.pushpull(f"{dtype}", made)
        same(made, total(kv, lambda r: numbers((9, 11), r, dtype=whole)), f"kv.empty of {dtype}")  # noqa: B023


def saved(kv: Any, folder: str) -> None:
    kv.init(["w", "h"], [array(numbers((500, 3), 1)), array(numbers((77,), 2), "bfloat16")])
    kv.set_optimizer(kvmpi.optim.SGD(lr=0.5, momentum=0.5))
    grads = [array(numbers((500, 3), kv.rank)), array(numbers((77,), kv.rank), "bfloat16")]
    kv.push(["w", "h"], grads)
    path = os.path.join(folder, f"saved-{kv.type}")
    kv.save(path)
    outs, again = ([blank((500, 3)), blank((77,), "bfloat16")] for _ in range(2))
    kv.pushpull(["w", "h"], grads, outs)
    kv.push(["w", "h"], grads)
    kv.load(path)
    kv.pushpull(["w", "h"], grads, again)
    for one, other in zip(outs, again, strict=True):
        same(other, host(one), "a step after load")


def refused(kv: Any) -> None:
    """Nothing has changed after a call that is refused."""
    kv.init("k", array(numbers((10,), 1)))
    for call, arguments in ((kv.push, ("k", blank((11,)))), (kv.pull, ("k", out := blank((11,))))):
        try:
            call(*arguments)
        except ShapeMismatchError:
            continue
        raise AssertionError(f"{call.__name__} of another shape was not refused")
    same(out, np.full(11, 77), "an out of another shape")
    kv.pull("k", out := blank((10,)))
    same(out, numbers((10,), 1), "the value")


CHECKS: list[Callable[[Any], None]] = [
    devices_of_a_key, in_place_and_out_of_place, many_keys, sums_that_are_not_stored, first_values, later,
    steps_of_an_optimizer, rows, arrays_of_the_store, refused, *STREAM_CHECKS,
]  # fmt: skip


def on_a_store(check: Callable[..., None], name: str, *arguments: Any) -> None:
    with kvmpi.create(name, timeout_s=10) as kv:
        if check is not sums_that_are_not_stored or kv.is_capable("allreduce"):
            check(kv, *arguments)


def main(folder: str, words: list[str]) -> int:
    one_host_for_each()
    checks = Checks([word.partition("=")[2] for word in words if "=" in word])
    for name in (word for word in words if "=" not in word):
        for check in [*CHECKS, saved]:

            def named(name: str, check: Callable[..., None] = check) -> None:
                on_a_store(check, name, *([folder] if check is saved else []))

            named.__name__ = check.__name__
            checks.run(named, name)
    return checks.finish()


if __name__ == "__main__":
    assert set(HALVES) < set(DTYPES)
    sys.exit(main(sys.argv[1], sys.argv[2:]))
