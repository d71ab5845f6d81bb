"""Random programs give exactly what a serial run of them gives, on every engine and pool size."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from functools import cache

import pytest
from engine_helpers import TIMEOUT_S, Finisher

from kvmpi.engine import Engine, Work

NUM_OPS = 5_000
NUM_VARIABLES = 100
MODULUS = (1 << 61) - 1
ENGINES = [("naive", 1), ("threaded", 1), ("threaded", 2), ("threaded", 8)]

Program = list[tuple[tuple[int, ...], int]]


def step(values: list[int], number: int, reads: tuple[int, ...], write: int) -> None:
    """Changes one value; swapping any two dependent steps changes the result."""
    total = values[write] * 31 + number
    for position, var in enumerate(reads, 1):
        total += values[var] * position
    values[write] = total % MODULUS


@cache
def program(seed: int) -> tuple[Program, list[int]]:
    """Operations with 2-19 reads and 1 write each, and the values after a serial run."""
    rng = random.Random(seed)
    ops = [
        (tuple(rng.choices(range(NUM_VARIABLES), k=rng.randint(2, 19))), rng.randrange(NUM_VARIABLES))
        for _ in range(NUM_OPS)
    ]
    values = list(range(NUM_VARIABLES))
    for number, (reads, write) in enumerate(ops):
        step(values, number, reads, write)
    return ops, values


@pytest.mark.parametrize(("kind", "num_threads"), ENGINES)
@pytest.mark.parametrize("seed", range(4))
def test_random_program_equals_serial_run(
    new_engine: Callable[..., Engine], seed: int, kind: str, num_threads: int
) -> None:
    ops, expected = program(seed)
    engine = new_engine(kind, num_threads)
    variables = [engine.variable(str(i)) for i in range(NUM_VARIABLES)]
    values = list(range(NUM_VARIABLES))
    for number, (reads, write) in enumerate(ops):
        engine.push(
            lambda args=(number, reads, write): step(values, *args),
            reads=[variables[i] for i in reads],  # with duplicates, and sometimes with the written one
            writes=[variables[write]],
            priority=number % 3,
        )
    engine.wait_all(TIMEOUT_S)
    assert values == expected, f"seed {seed}"
    writes = [write for _, write in ops]
    assert [var.version for var in variables] == [writes.count(i) for i in range(NUM_VARIABLES)]


@pytest.mark.parametrize(("kind", "num_threads"), ENGINES)
@pytest.mark.parametrize("seed", range(2))
def test_mix_of_all_lanes_and_returned_works_equals_serial_run(
    new_engine: Callable[..., Engine], finisher: Finisher, seed: int, kind: str, num_threads: int
) -> None:
    """Two ordered lanes, inline and unordered ones, a third of the operations finishing elsewhere: no deadlock."""
    ops, expected = program(seed)
    rng = random.Random(1000 + seed)
    engine = new_engine(kind, num_threads)
    variables = [engine.variable(str(i)) for i in range(NUM_VARIABLES)]
    values = list(range(NUM_VARIABLES))
    order: dict[str, list[int]] = {lane: [] for lane in ("reduce", "broadcast", "inline", "io", "cpu")}
    pushed: dict[str, list[int]] = {lane: [] for lane in order}

    def run(lane: str, number: int, finishes_elsewhere: bool) -> Work | None:
        order[lane].append(number)
        step(values, number, *ops[number])
        return finisher.promise() if finishes_elsewhere else None

    works = []
    for number, (reads, write) in enumerate(ops):
        lane = rng.choice(list(order))
        pushed[lane].append(number)
        args = (lane, number, rng.random() < 0.33)
        work = engine.push(
            lambda args=args: run(*args), [variables[i] for i in reads], [variables[write]], lane, rng.randint(-9, 9)
        )
        works.append(work)
        if rng.random() < 0.002:
            rng.choice(works).wait(TIMEOUT_S)
    engine.wait_all(TIMEOUT_S)
    assert all(work.done() for work in works)
    assert values == expected, f"seed {seed}"
    for lane in ("reduce", "broadcast"):
        assert order[lane] == pushed[lane], f"seed {seed}, lane {lane}: not in push order"
    for lane in order:
        assert sorted(order[lane]) == pushed[lane], f"seed {seed}, lane {lane}: an operation is missing or ran twice"


@pytest.mark.parametrize("kind", ["naive", "threaded"])
def test_threads_that_push_together(new_engine: Callable[..., Engine], kind: str) -> None:
    """Additions commute, so the sum is known; a lost update, or a read that overlaps a write, would show."""
    engine = new_engine(kind, 4)
    variables = [engine.variable(str(i)) for i in range(3)]
    values, in_order = [0, 0, 0], 0

    def add(target: int, amount: int) -> None:
        before = values[target]
        time.sleep(0)  # let other threads interfere
        values[target] = before + amount

    def add_up(amount: int) -> None:
        nonlocal in_order
        before = in_order
        time.sleep(0)
        in_order = before + amount

    def pusher(number: int) -> None:
        rng = random.Random(number)
        for i in range(500):
            target = rng.randrange(3)
            engine.push(
                lambda args=(target, number * 1000 + i): add(*args),
                reads=[variables[rng.randrange(3)]],
                writes=[variables[target]],
                lane=rng.choice(["cpu", "reduce", "inline", "io"]),
            )
            engine.push(lambda: add_up(1), lane="broadcast")  # no variable: the lane alone keeps them apart

    threads = [threading.Thread(target=pusher, args=(n,), daemon=True) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    engine.wait_all(TIMEOUT_S)
    assert sum(values) == sum(n * 1000 + i for n in range(4) for i in range(500))
    assert sum(var.version for var in variables) == 2000
    assert in_order == 2000
