"""Failures: poison, skipping, no_skip, and that every failure is reported exactly once."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
from engine_helpers import TIMEOUT_S, Finisher

from kvmpi.engine import Engine, Variable, Work, create_engine
from kvmpi.errors import KVError


def fail(message: str = "broken") -> None:
    raise ValueError(message)


def test_failure_is_raised_by_wait_and_only_there(engine: Engine) -> None:
    var, ran = engine.variable(), []
    first = engine.push(fail, writes=[var])
    second = engine.push(lambda: ran.append(2), reads=[var])
    with pytest.raises(ValueError, match="broken"):
        first.wait(TIMEOUT_S)
    with pytest.raises(ValueError, match="broken"):  # every wait of a failed Work raises
        first.wait(TIMEOUT_S)
    with pytest.raises(ValueError, match="broken"):  # pushed before the delivery: skipped with the same cause
        second.wait(TIMEOUT_S)
    assert second.error() is first.error()
    engine.wait(var, TIMEOUT_S)
    engine.raise_pending(var)
    engine.wait_all(TIMEOUT_S)
    engine.push(lambda: ran.append(3), reads=[var]).wait(TIMEOUT_S)  # healthy again
    assert ran == [3]


def test_poison_travels(engine: Engine) -> None:
    a, b, c, d = (engine.variable(name) for name in "abcd")
    ran: list[str] = []
    engine.push(fail, writes=[a])
    works = [
        engine.push(lambda: ran.append("a to b"), reads=[a], writes=[b]),
        engine.push(lambda: ran.append("b to c"), reads=[b], writes=[c], lane="reduce"),
        engine.push(lambda: ran.append("writes c"), writes=[c], lane="inline"),
        engine.push(lambda: ran.append("reads c"), reads=[c, d], lane="io"),
    ]
    engine.push(lambda: ran.append("d"), writes=[d]).wait(TIMEOUT_S)
    with pytest.raises(ValueError, match="broken"):
        engine.wait(c, TIMEOUT_S)
    for work in works:
        with pytest.raises(ValueError, match="broken"):
            work.wait(TIMEOUT_S)
    assert ran == ["d"]
    assert (a.version, b.version, c.version, d.version) == (1, 1, 2, 1)
    for var in (a, b, c, d):  # one delivery made all of them healthy
        engine.raise_pending(var)
    engine.push(lambda: ran.append("again"), reads=[a, b], writes=[c]).wait(TIMEOUT_S)
    assert ran == ["d", "again"]


def test_wait_all_raises_the_first_and_then_is_silent(engine: Engine) -> None:
    variables = [engine.variable() for _ in range(5)]
    for i, var in enumerate(variables):
        engine.push(lambda i=i: fail(f"number {i}"), writes=[var], lane="io", priority=i)
    with pytest.raises(ValueError, match="number 0"):
        engine.wait_all(TIMEOUT_S)
    engine.wait_all(TIMEOUT_S)
    for var in variables:
        engine.raise_pending(var)
    assert [engine.push(int, writes=[var]).error() for var in variables] == [None] * 5


def test_wait_all_is_silent_about_what_a_wait_has_raised(engine: Engine) -> None:
    var = engine.variable()
    failed = engine.push(fail, writes=[var])
    engine.push(lambda: fail("other"))
    with pytest.raises(ValueError, match="broken"):
        failed.wait(TIMEOUT_S)
    with pytest.raises(ValueError, match="other"):
        engine.wait_all(TIMEOUT_S)
    engine.wait_all(TIMEOUT_S)


def test_raise_pending_delivers_without_waiting(threaded: Engine) -> None:
    var, release = threaded.variable(), threading.Event()
    threaded.raise_pending(var)
    failed = threaded.push(lambda: (release.wait(TIMEOUT_S), fail()), writes=[var])
    threaded.raise_pending(var)  # not failed yet, and it does not wait
    release.set()
    assert failed.wait_done(TIMEOUT_S)
    with pytest.raises(ValueError, match="broken"):
        threaded.raise_pending(var)
    threaded.raise_pending(var)
    threaded.wait_all(TIMEOUT_S)


def test_no_skip_is_always_called_with_the_cause(engine: Engine) -> None:
    var, out = engine.variable(), engine.variable()
    causes: list[BaseException | None] = []
    engine.push(causes.append, reads=[var], no_skip=True, lane="reduce")
    failed = engine.push(fail, writes=[var])
    work = engine.push(causes.append, reads=[var], writes=[out], no_skip=True, lane="reduce")
    work.wait(TIMEOUT_S)  # it has dealt with the cause: it does not fail, and what it writes is healthy
    assert causes == [None, failed.error()]
    engine.push(int, reads=[out]).wait(TIMEOUT_S)
    with pytest.raises(ValueError, match="broken"):
        engine.wait(var, TIMEOUT_S)  # which delivered nothing


def test_no_skip_that_passes_the_cause_on_shares_the_failure(engine: Engine) -> None:
    var, out = engine.variable(), engine.variable()

    def pass_on(cause: BaseException | None) -> None:
        assert cause is not None
        raise cause

    engine.push(fail, writes=[var])
    engine.push(pass_on, reads=[var], writes=[out], no_skip=True)
    with pytest.raises(ValueError, match="broken"):
        engine.wait(out, TIMEOUT_S)
    engine.wait_all(TIMEOUT_S)  # reported once, not twice


def test_error_of_a_returned_work_is_the_operations(engine: Engine, finisher: Finisher) -> None:
    var = engine.variable()
    work = engine.push(lambda: finisher.promise(ConnectionError("server 1 is gone")), writes=[var])
    skipped = engine.push(int, writes=[var])
    with pytest.raises(ConnectionError, match="server 1"):
        engine.wait(var, TIMEOUT_S)
    assert skipped.error() is work.error()
    engine.wait_all(TIMEOUT_S)
    engine.push(int, writes=[var]).wait(TIMEOUT_S)


def test_failure_of_an_operation_that_was_returned_is_reported_once(engine: Engine) -> None:
    outer = engine.push(lambda: engine.push(fail, lane="io"), lane="reduce")
    with pytest.raises(ValueError, match="broken"):
        outer.wait(TIMEOUT_S)
    engine.wait_all(TIMEOUT_S)


def test_delivered_failures_do_not_pile_up(engine: Engine) -> None:
    var = engine.variable()
    for i in range(1_000):
        with pytest.raises(ValueError, match=f"number {i}"):
            engine.push(lambda i=i: fail(f"number {i}"), writes=[var]).wait(TIMEOUT_S)
    assert len(engine._undelivered) < 100
    assert len(var._failures) < 10


def test_skipped_operations_do_not_pile_up(engine: Engine) -> None:
    var = engine.variable()
    engine.push(fail, writes=[var])
    for _ in range(1_000):
        engine.push(int, writes=[var])
    with pytest.raises(ValueError, match="broken"):
        engine.wait(var, TIMEOUT_S)
    assert len(engine._undelivered) == len(var._failures) == 1


def test_system_exit_in_a_function_does_not_end_the_thread(threaded: Engine) -> None:
    with pytest.raises(SystemExit):
        threaded.push(lambda: exec("raise SystemExit(3)"), lane="reduce").wait(TIMEOUT_S)
    threaded.push(int, lane="reduce").wait(TIMEOUT_S)


class Model:
    """The rules of failures, applied serially: no variable FIFO, no thread, no record shared with the engine."""

    def __init__(self, num_variables: int) -> None:
        self.poison: list[set[int]] = [set() for _ in range(num_variables)]
        self.delivered: set[int] = set()
        self.failed: set[int] = set()

    def op(self, number: int, reads: list[int], writes: list[int], fails: bool, no_skip: bool) -> tuple[str, int]:
        """What happens to the operation, and which operation is to blame."""
        active = set().union(*(self.poison[v] for v in (*reads, *writes))) - self.delivered
        cause = min(active, default=-1)
        if cause >= 0 and not no_skip:
            for v in writes:
                self.poison[v].add(cause)
            return "skipped", cause
        if fails:
            self.failed.add(number)
            for v in writes:
                self.poison[v].add(number)
            return "failed", number
        return "ran", cause

    def wait_all(self) -> int:
        undelivered = self.failed - self.delivered
        self.delivered |= undelivered
        return min(undelivered, default=-1)

    def wait(self, var: int) -> int:
        first = min(self.poison[var] - self.delivered, default=-1)
        self.delivered.add(first)
        return first


@pytest.mark.parametrize(("kind", "num_threads"), [("naive", 1), ("threaded", 1), ("threaded", 4)])
@pytest.mark.parametrize("seed", range(8))
def test_random_failures_match_the_model(
    new_engine: Callable[..., Engine], finisher: Finisher, seed: int, kind: str, num_threads: int
) -> None:
    """Which operations run, which are skipped and why, and what every wait raises, is the same on all engines."""
    rng = random.Random(seed)
    engine, model = new_engine(kind, num_threads), Model(12)
    variables = [engine.variable(str(i)) for i in range(12)]
    happened: dict[int, tuple[str, int]] = {}
    expected: dict[int, tuple[str, int]] = {}
    works: list[Work] = []

    def blamed(error: BaseException | None) -> int:
        return -1 if error is None else int(str(error))

    def run(number: int, fails: bool, finishes_elsewhere: bool, cause: BaseException | None) -> Work | None:
        happened[number] = ("failed", number) if fails else ("ran", blamed(cause))
        error = ValueError(str(number)) if fails else None
        if finishes_elsewhere:
            return finisher.promise(error)
        if error is not None:
            raise error
        return None

    def raised(wait: Callable[[], None]) -> int:
        try:
            wait()
        except ValueError as error:
            return blamed(error)
        return -1

    for number in range(2_000):
        reads, writes = rng.sample(range(12), rng.randint(0, 3)), rng.sample(range(12), rng.randint(0, 2))
        fails, no_skip, elsewhere = rng.random() < 0.05, rng.random() < 0.2, rng.random() < 0.3
        expected[number] = model.op(number, reads, writes, fails, no_skip)
        args = (number, fails, elsewhere)
        works.append(
            engine.push(
                (lambda cause, args=args: run(*args, cause)) if no_skip else (lambda args=args: run(*args, None)),
                [variables[v] for v in reads],
                [variables[v] for v in writes],
                rng.choice(["cpu", "reduce", "broadcast", "inline", "io"]),
                rng.randint(-2, 2),
                no_skip=no_skip,
            )
        )
        choice = rng.random()
        if choice < 0.01:
            assert raised(lambda: engine.wait_all(TIMEOUT_S)) == model.wait_all(), f"seed {seed}, after {number}"
        elif choice < 0.03:
            v = rng.randrange(12)
            assert raised(lambda v=v: engine.wait(variables[v], TIMEOUT_S)) == model.wait(v), f"seed {seed}, {number}"
        elif choice < 0.06:
            k = rng.randrange(max(0, number - 20), number + 1)
            verdict, blame = expected[k]
            blame = -1 if verdict == "ran" else blame
            assert raised(lambda k=k: works[k].wait(TIMEOUT_S)) == blame, f"seed {seed}, wait {k} after {number}"
            model.delivered.add(blame)
    assert raised(lambda: engine.wait_all(TIMEOUT_S)) == model.wait_all()
    engine.wait_all(TIMEOUT_S)
    assert all(work.done() for work in works)
    for number, work in enumerate(works):
        if number not in happened:
            happened[number] = ("skipped", blamed(work.error()))
        assert (blamed(work.error()) == -1) == (expected[number][0] == "ran"), f"seed {seed}, operation {number}"
    assert {n: (happened[n], expected[n]) for n in expected if happened[n] != expected[n]} == {}, f"seed {seed}"
    verdicts = [verdict for verdict, _ in expected.values()]
    assert (
        min(verdicts.count("failed"), verdicts.count("skipped"), verdicts.count("ran")) > 50
    )  # else nothing is tested


@pytest.mark.parametrize("step", ["request_write", "release_write"])
def test_ctrl_c_between_two_steps_of_a_push_ends_the_engine(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is half registered, or has half let go, would hold its variables for ever."""
    engine = create_engine()
    a, b = engine.variable("a"), engine.variable("b")
    done = getattr(Variable, step)

    def interrupted(self: Variable, *arguments: Any) -> Any:
        if self is b:
            raise KeyboardInterrupt
        return done(self, *arguments)

    monkeypatch.setattr(Variable, step, interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.push(lambda: None, writes=[a, b], lane="inline")
    with pytest.raises(KVError, match="closed"):
        engine.push(lambda: None, writes=[a])
    engine.close(TIMEOUT_S)
