"""Ranks that have joined hear of the calls that the others make, whoever has joined; a rank that is late is named."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from collective_helpers import at_once
from shortcuts import shortcuts  # noqa: F401 - a fixture of all tests here

from kvmpi.collectives import JOIN, Call, Entry
from kvmpi.collectives.agreement import Verdict, verdict
from kvmpi.collectives.memory_comm import MemoryComm
from kvmpi.deadline import Deadline
from kvmpi.errors import KeyNotInitializedError, KVTimeoutError, OrderMismatchError, ShapeMismatchError

RunRanks = Callable[..., list[Any]]

TIMEOUT_S = 20.0
KEY = Entry("a", (2, 3), "float32")


def call_of(step: int, speaker: int) -> Call:
    return Call("push", (KEY, Entry(str(step))), details=lambda: {"step": step, "speaker": speaker})


def go_along(comm: MemoryComm, steps: int, heard: list[Any]) -> None:
    """Make ``steps`` calls, then go along until all ranks have joined."""
    for step in range(steps):
        heard.append(verdict(comm, call_of(step, comm.rank), Deadline(TIMEOUT_S)))
    while (found := verdict(comm, Call(JOIN), Deadline(TIMEOUT_S))).description:
        op, keys, details = json.loads(found.description)
        assert (op, keys) == ("push", ["a", str(details["step"])])
        heard.append((found.num_joined, details))
        assert verdict(comm, call_of(details["step"], -1), Deadline(TIMEOUT_S)) == Verdict()


@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_ranks_with_fewer_calls_hear_of_the_others(run_ranks: RunRanks, size: int) -> None:
    """Every order in which up to three of the ranks can end, with the others going on to the last step."""
    for steps in itertools.product([0, 1, 3], repeat=min(size, 3)):
        counts = [*steps, *[2] * size][:size]

        def rank_main(comm: MemoryComm, counts: list[int] = counts) -> list[Any]:
            heard: list[Any] = []
            go_along(comm, counts[comm.rank], heard)
            return heard

        for rank, heard in enumerate(run_ranks(size, rank_main)):
            for step in range(max(counts)):
                num_joined = sum(count <= step for count in counts)
                speaker = next(r for r in range(size) if counts[r] > step)
                expected: Any = Verdict(None, num_joined)
                if counts[rank] <= step:
                    expected = (num_joined, {"step": step, "speaker": speaker})
                assert heard[step] == expected, f"rank {rank}, step {step} of {counts}"
            assert len(heard) == max(counts)


@pytest.mark.parametrize("joined", [0, 1, 2, 3])
def test_a_difference_between_the_others_is_an_error_on_all(run_ranks: RunRanks, joined: int) -> None:
    usual, other = Call("push", (KEY,)), Call("push", (Entry("a", (6,), "float32"),))
    odd = 3 if joined != 3 else 2
    calls = [Call(JOIN) if r == joined else other if r == odd else usual for r in range(4)]
    found = run_ranks(4, lambda comm: verdict(comm, calls[comm.rank], Deadline(TIMEOUT_S)).error)
    assert [type(error) for error in found] == [ShapeMismatchError] * 4
    first = 0 if joined else 1
    assert f"shape (2, 3) on MPI rank {first} and (6,) on MPI rank {odd}" in str(found[joined])


@pytest.mark.parametrize("joined", [0, 1])
def test_a_failure_of_another_is_an_error_on_all(run_ranks: RunRanks, joined: int) -> None:
    own = KeyNotInitializedError("push of key 'b' on worker 1: the key was never initialised")
    calls = [Call(JOIN) if r == joined else Call("push", (KEY,), own if r == 2 else None) for r in range(3)]
    found = run_ranks(3, lambda comm: verdict(comm, calls[comm.rank], Deadline(TIMEOUT_S)).error)
    assert [type(error) for error in found] == [KeyNotInitializedError] * 3
    assert found[2] is own


@pytest.mark.parametrize("joined", [0, 1, 2])
def test_a_rank_that_has_joined_and_makes_another_call_is_an_error_on_all(run_ranks: RunRanks, joined: int) -> None:
    """It was told of a push, and pulls."""

    def rank_main(comm: MemoryComm) -> BaseException | None:
        if comm.rank != joined:
            return verdict(comm, Call("push", (KEY,)), Deadline(TIMEOUT_S)).error
        assert verdict(comm, Call(JOIN), Deadline(TIMEOUT_S)).description
        return verdict(comm, Call("pull", (KEY,)), Deadline(TIMEOUT_S)).error

    assert [type(error) for error in run_ranks(3, rank_main)] == [OrderMismatchError] * 3


@pytest.mark.parametrize("joined", [0, 1])
def test_a_rank_that_joins_anew_instead_of_making_the_call_is_told_again(run_ranks: RunRanks, joined: int) -> None:
    def rank_main(comm: MemoryComm) -> Verdict:
        if comm.rank != joined:
            return verdict(comm, call_of(5, comm.rank), Deadline(TIMEOUT_S))
        told = [verdict(comm, Call(JOIN), Deadline(TIMEOUT_S)).description for _ in range(3)]
        assert json.loads(told[0])[2] == {"step": 5, "speaker": 1 - joined}
        assert told == told[:1] * 3
        return verdict(comm, call_of(5, -1), Deadline(TIMEOUT_S))

    found = run_ranks(2, rank_main)
    assert (found[joined], found[1 - joined]) == (Verdict(), Verdict(None, 1))


def test_a_rank_that_makes_no_call_is_named(run_ranks: RunRanks) -> None:
    """One has joined early; another makes a call shortly before the first gives up, and has all of its time."""
    timeout_s = 1.0

    def check(joined: int, late: int) -> None:
        def rank_main(comm: MemoryComm) -> tuple[str, float]:
            if comm.rank != joined:
                time.sleep(0.8 * timeout_s)
            start_s = time.monotonic()
            with pytest.raises(KVTimeoutError) as caught:
                verdict(comm, Call(JOIN if comm.rank == joined else "push"), Deadline(timeout_s))
            return str(caught.value), time.monotonic() - start_s

        found = [result for result in run_ranks(3, rank_main, absent=(late,)) if result is not None]
        assert len(found) == 2
        for text, seconds in found:
            assert f"MPI rank {late} of this client" in text
            assert 0.9 * timeout_s <= seconds < 4 * timeout_s

    at_once(check, [(0, 2), (1, 2), (2, 0), (1, 0)])


def test_ranks_that_have_joined_do_not_wait_for_ever(run_ranks: RunRanks) -> None:
    timeout_s = 0.5

    def check(size: int, absent: int) -> None:
        def rank_main(comm: MemoryComm) -> float:
            start_s = time.monotonic()
            with pytest.raises(KVTimeoutError, match=f"MPI rank {absent} of this client"):
                verdict(comm, Call(JOIN), Deadline(timeout_s))
            return time.monotonic() - start_s

        found = [seconds for seconds in run_ranks(size, rank_main, absent=(absent,)) if seconds is not None]
        assert len(found) == size - 1
        assert all(0.9 * timeout_s <= seconds < 4 * timeout_s for seconds in found)

    at_once(check, [(2, 0), (2, 1), (3, 0), (3, 1)])


def test_alone_nobody_is_waited_for(run_ranks: RunRanks) -> None:
    assert run_ranks(1, lambda comm: verdict(comm, Call(JOIN), Deadline(0.1))) == [Verdict(None, 1)]
