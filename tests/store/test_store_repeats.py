"""What is remembered of calls is bounded, whatever calls there are."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections import Counter
from typing import Any

import numpy as np
import pytest
from rank_threads import RunRanks

from kvmpi.collectives import Call
from kvmpi.collectives.memory_comm import MemoryComm
from kvmpi.config import Config
from kvmpi.deadline import Deadline
from kvmpi.errors import KVError
from kvmpi.store import repeats
from kvmpi.store.repeats import Repeat, Repeats
from kvmpi.store.replicated import ReplicatedStore

NUM_KEYS = 500


def test_calls_with_other_arrays_each_time_are_looked_at_seldom_and_leave_little() -> None:
    known, keys = Repeats(), list(range(NUM_KEYS))
    kept, looked_at = [], 0
    for _ in range(300):
        kept.append([np.empty(1, "f4") for _ in keys])
        signature = known.signature("pushpull", 1.0, keys, kept[-1], None)
        if signature is not None:
            looked_at += 1
            assert known.find(signature) is None
            assert not known.made(signature)
    assert repeats._PATIENCE <= looked_at <= repeats._PATIENCE + 300 // repeats._RARELY + 1
    assert not known._known
    assert sys.getsizeof(known._made) < 1 << 20


def test_known_calls_are_so_many_keys_at_most_and_the_newest_stays() -> None:
    known, keys = Repeats(), tuple(range(NUM_KEYS))
    calls = (Call("pushpull"), Call("pushpull"))
    for number in range(100):
        signature = ("pushpull", 1.0, keys, (number,), None)
        repeat = Repeat([], [], calls)
        known.keep(signature, repeat)
        assert known.find(signature) is repeat
        assert len(known._known) * NUM_KEYS <= repeats._MOST_KEYS


def test_a_call_that_is_made_again_is_looked_at_every_time() -> None:
    known, array = Repeats(), np.empty(3)
    first = known.signature("pushpull", 1.0, "k", array, None)
    assert first is not None
    assert not known.made(first)
    assert known.made(first)
    known.keep(first, Repeat([], [], (Call("pushpull"), Call("pushpull"))))
    for _ in range(3 * repeats._PATIENCE):
        again = known.signature("pushpull", 1.0, "k", array, None)
        assert again == first
        assert known.find(again) is not None


def test_a_sum_in_place_is_known_wherever_its_arrays_lie() -> None:
    known, keys, repeat = Repeats(), ["k", "l"], Repeat([], [], (Call("allreduce"), Call("allreduce")))
    kept = [[np.empty((2, 3), "f4"), np.empty(5)] for _ in range(4)]
    first, second, third = (known.signature("allreduce", 0.5, keys, arrays, None) for arrays in kept[:3])
    assert first is not None
    assert second is not None
    assert third is not None
    assert not known.made(first)
    assert known.like(second) is None
    assert known.made(second), "one like it"
    known.keep(second, repeat)
    assert known.find(third) is None
    assert known.like(third) is repeat
    one, other = kept[3]
    others = [
        ("allreduce", 1.0, keys, kept[3], None), ("allreduce", 0.5, keys[::-1], kept[3][::-1], None),
        ("allreduce", 0.5, keys, [one.T, other], None), ("allreduce", 0.5, keys, [one, other.astype("f4")], None),
        ("allreduce", 0.5, keys, kept[3], kept[2]), ("pushpull", 0.5, keys, kept[3], None),
        ("allreduce", 0.5, keys, [one.reshape(3, 2), other], None),
    ]  # fmt: skip
    for call in others:
        signature = known.signature(*call)
        assert signature is None or known.like(signature) is None, call[:3]


SHAPES = {"a": (3, 5), "b": (15,), "c": (7,)}


def numbers(*seeds: int, key: str) -> np.ndarray:
    return np.random.default_rng([ord(key), *seeds]).integers(-9, 10, SHAPES[key]).astype("f4")


@pytest.mark.parametrize("seed", range(6))
def test_calls_that_some_workers_know_are_right_whatever_came_between(run_ranks: RunRanks, seed: int) -> None:
    """Against what a dict says. One worker has arrays of its own for each call, another new ones now and then."""
    size = 2 + seed % 2
    fired: Counter[str] = Counter()

    def rank_main(comm: MemoryComm) -> None:
        choose, mine = random.Random(seed), random.Random(f"{seed} {comm.rank}")
        kv = ReplicatedStore("mpi", Config(timeout_s=20.0), comm)
        value, pushes = {key: numbers(seed, key=key) for key in SHAPES}, Counter[str]()
        kv.init(list(SHAPES), [value[key].copy() for key in SHAPES])
        kept = {key: (np.zeros(shape, "f4"), np.zeros(shape, "f4")) for key, shape in SHAPES.items()}
        for step in range(50):
            what = choose.choice(["in place", "into others", "to views", "views", "two arrays", "sum", "pull"])
            keys = choose.choice([["a", "b", "c"], ["b", "a"], ["c"]])
            waits = choose.random() < 0.6
            arrays = {key: kept[key] for key in keys}
            if comm.rank == 1 or (comm.rank == 2 and mine.random() < 0.5):
                arrays = {key: (np.zeros(SHAPES[key], "f4"), np.zeros(SHAPES[key], "f4")) for key in keys}
            total = {}
            for key in keys:
                arrays[key][0][...] = numbers(seed, step, comm.rank, key=key)
                total[key] = sum(numbers(seed, step, rank, key=key) for rank in range(size))
            pushed, outs = [arrays[key][0] for key in keys], [arrays[key][1] for key in keys]
            if what == "views" and keys == ["c"]:
                what = "in place"
            if what == "views":  # each of two keys gets what the other has, and a third what it is given
                pushed[:2] = [kv.view(keys[1]).reshape(SHAPES[keys[0]]), kv.view(keys[0]).reshape(SHAPES[keys[1]])]
                total |= {
                    keys[0]: size * value[keys[1]].reshape(SHAPES[keys[0]]),
                    keys[1]: size * value[keys[0]].reshape(SHAPES[keys[1]]),
                }
            if what == "two arrays":
                pushed, total = [[array, array] for array in pushed], {key: 2 * total[key] for key in keys}
            if what == "to views":
                outs = [kv.view(key) for key in keys]
            if what == "pull":
                work, total = kv.pull(keys, outs, async_op=not waits), {key: value[key] for key in keys}
            elif what == "sum":
                work = kv.allreduce(keys, pushed, outs, async_op=not waits)
            elif what == "in place":
                work, outs = kv.pushpull(keys, pushed, async_op=not waits), pushed
            else:
                work = kv.pushpull(keys, pushed, outs, async_op=not waits)
            if what != "sum":
                value |= total
            if what != "pull":
                pushes.update(keys)
            if not waits and choose.random() < 0.5:
                also = np.empty(SHAPES[keys[0]], "f4")
                kv.pull(keys[0], also)  # which sees what was pushed before it
                np.testing.assert_array_equal(also, value[keys[0]], err_msg=f"seed {seed}, step {step}: {what} {keys}")
            if work is not None:
                work.wait()
            for key, out in zip(keys, outs, strict=True):
                np.testing.assert_array_equal(out, total[key], err_msg=f"seed {seed}, step {step}: {what} {keys}")
            for key in SHAPES:
                np.testing.assert_array_equal(
                    kv.view(key), value[key], err_msg=f"seed {seed}, step {step}: {what} {keys}"
                )
        assert kv._observe().totals["steps"] == max(pushes.values())
        if comm.rank == 0:
            fired["known"] += len(kv._repeats._known)
        kv.close()

    run_ranks(size, rank_main)
    assert fired["known"] > 3, "nothing was made again"


def test_a_pull_waits_for_the_sum_of_a_call_that_is_known(run_ranks: RunRanks) -> None:
    def rank_main(comm: MemoryComm) -> None:
        kv = ReplicatedStore("mpi", Config(timeout_s=20.0), comm)
        kv.init(["a", "c"], [numbers(1, key="a"), numbers(1, key="c")])
        pushed, out = [np.empty(SHAPES[key], "f4") for key in "ac"], np.empty(SHAPES["c"], "f4")
        for step in range(6):
            for key, array in zip("ac", pushed, strict=True):
                array[...] = numbers(step, comm.rank, key=key)
            release = threading.Event()
            kv._engine.push(lambda release=release: release.wait(20.0), lane="reduce", name="a sum that takes long")
            before = kv.stats()["phases"]["wait"]["calls"]
            works = [kv.pushpull(["a", "c"], pushed, async_op=True), kv.pull("c", out, async_op=True)]
            deadline = Deadline(20.0)
            while kv.stats()["phases"]["wait"]["calls"] < before + 2 and not deadline.expired():
                time.sleep(1e-3)  # until all have heard of both
            release.set()
            for work in works:
                work.wait()
            right = numbers(step, 0, key="c") + numbers(step, 1, key="c")
            np.testing.assert_array_equal(out, right, err_msg=f"step {step}")
        assert kv._repeats._known
        kv.close()

    run_ranks(2, rank_main)


@pytest.mark.parametrize("shared", [(0, 1), (1, 2), (0, 2), ()])
def test_a_sum_in_place_of_arrays_that_share_memory_is_none_that_is_known(
    run_ranks: RunRanks, shared: tuple[int, ...]
) -> None:
    """Though it is like one: what becomes of them is what becomes of them in the first call."""

    def rank_main(comm: MemoryComm) -> list[Any]:
        found: list[Any] = []
        for known in (False, True):
            kv = ReplicatedStore("mpi", Config(timeout_s=20.0, bucket_bytes=1), comm)
            kv.init(list("abc"), [np.zeros(5, "f4")] * 3)
            for _ in range(3 * known):
                kv.allreduce(list("abc"), [np.ones(5, "f4") for _ in "abc"])
            room = np.arange(30, dtype="f4").reshape(6, 5) + comm.rank
            arrays = [room[0], room[1], room[5]]
            for which, start in zip(shared, (10, 12), strict=False):
                arrays[which] = room.reshape(-1)[start : start + 5]
            try:
                kv.allreduce(list("abc"), arrays)
                found.append([array.tolist() for array in arrays])
            except KVError as error:
                found.append(str(error))
            kv.abort()
        return found

    for first, again in run_ranks(2, rank_main):
        assert first == again


@pytest.mark.parametrize("waits", [True, False])
def test_a_worker_that_has_joined_takes_part_in_calls_that_others_know(run_ranks: RunRanks, waits: bool) -> None:
    def rank_main(comm: MemoryComm) -> None:
        kv = ReplicatedStore("mpi", Config(timeout_s=20.0), comm)
        kv.init(["a", "c"], [numbers(1, key="a"), numbers(1, key="c")])
        pushed = [np.empty(SHAPES[key], "f4") for key in "ac"]
        for step in range(10):
            if comm.rank == 1 and step == 5:
                break
            for key, array in zip("ac", pushed, strict=True):
                array[...] = numbers(step, comm.rank, key=key)
            work = kv.pushpull(["a", "c"], pushed, async_op=not waits)
            if work is not None:
                work.wait()
            for key, array in zip("ac", pushed, strict=True):
                right = numbers(step, 0, key=key) + (numbers(step, 1, key=key) if step < 5 else 0)
                np.testing.assert_array_equal(array, right, err_msg=f"step {step}, key {key}")
        assert kv._repeats._known
        kv.join()
        np.testing.assert_array_equal(kv.view("a"), numbers(9, 0, key="a"))
        kv.close()

    run_ranks(2, rank_main)
