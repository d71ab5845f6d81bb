"""Ranks agree on their call, or all of them raise the error that names the first difference, and can go on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from collective_helpers import all_vectors, assert_is_sum, at_once, on_host, vectors
from shortcuts import Shortcuts, shortcuts  # noqa: F401 - a fixture of all tests here

from kvmpi.collectives import Call, Collectives, Entry
from kvmpi.collectives.agreement import agree
from kvmpi.collectives.memory_comm import MemoryComm
from kvmpi.deadline import Deadline
from kvmpi.errors import (
    ConfigError,
    DTypeMismatchError,
    KeyNotInitializedError,
    KVError,
    KVTimeoutError,
    OrderMismatchError,
    PeerLostError,
    ShapeMismatchError,
)

RunRanks = Callable[..., list[Any]]

TIMEOUT_S = 20.0


def outcome(run: Callable[[], object]) -> BaseException | None:
    try:
        run()
    except KVError as error:
        return error
    return None


def meet(run_ranks: RunRanks, calls: list[Call], **settings: Any) -> list[BaseException | None]:
    """Each rank's error of agreeing on its call. Then all ranks sum something, to show that the communicator works."""

    def rank_main(comm: MemoryComm) -> BaseException | None:
        mine = {name: values[comm.rank] for name, values in settings.items()}
        collectives = Collectives(comm, mine.get("algorithm", "ring"), mine.get("chunk_bytes", 64))
        found = outcome(lambda: collectives.agree(calls[comm.rank], Deadline(TIMEOUT_S)))
        assert not collectives.broken
        again = Collectives(comm, "ring", 64)
        again.agree(Call("push", (Entry("next", (50,), "float32"),)), Deadline(TIMEOUT_S))
        own = vectors(comm.rank, 1, 50, "float32")
        again.allreduce(on_host(own, "float32"), own[0], "float32", Deadline(TIMEOUT_S), "test")
        assert_is_sum(own[0], all_vectors(comm.size, 1, 50, "float32"), "float32")
        return found

    return run_ranks(len(calls), rank_main)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_equal_calls_agree(run_ranks: RunRanks, size: int, shortcuts: Shortcuts | None) -> None:  # noqa: F811
    call = Call("push", (Entry("a", (2, 3), "float32"), Entry(7, (), "int8")))
    assert meet(run_ranks, [call] * size) == [None] * size
    if shortcuts is not None and size > 1:
        assert shortcuts.taken == 2 * size


A, B, C = (Entry(key, (2, 3), "float32") for key in "abc")

DIFFERENCES = {
    "op": (Call("push", (A,)), Call("pull", (A,)), OrderMismatchError, ["push('a')", "pull('a')"]),
    "key": (Call("push", (A, B)), Call("push", (A, C)), OrderMismatchError, ["position 1", "'b'", "'c'"]),
    "kind of key": (Call("push", (Entry(1),)), Call("push", (Entry("1"),)), OrderMismatchError, ["key 1", "key '1'"]),
    "order": (Call("push", (A, B)), Call("push", (B, A)), OrderMismatchError, ["position 0", "'a'", "'b'"]),
    "extra key": (Call("push", (A,)), Call("push", (A, B)), OrderMismatchError, ["position 1", "no key", "'b'"]),
    "missing key": (Call("push", (A, B)), Call("push", (A,)), OrderMismatchError, ["position 1", "no key", "'b'"]),
    "shape": (
        Call("push", (A, B)),
        Call("push", (A, Entry("b", (3, 2), "float32"))),
        ShapeMismatchError,
        ["position 1", "'b'", "(2, 3)", "(3, 2)"],
    ),
    "dtype": (
        Call("push", (A,)),
        Call("push", (Entry("a", (2, 3), "float64"),)),
        DTypeMismatchError,
        ["position 0", "'a'", "float32", "float64"],
    ),
}


@pytest.mark.parametrize("odd", [0, 1, 2])
@pytest.mark.parametrize("what", list(DIFFERENCES))
def test_a_difference_is_the_same_error_on_every_rank(run_ranks: RunRanks, what: str, odd: int) -> None:
    usual, other, cls, words = DIFFERENCES[what]
    found = meet(run_ranks, [other if rank == odd else usual for rank in range(3)])
    assert [type(error) for error in found] == [cls] * 3
    assert len({str(error) for error in found}) == 1
    for word in [*words, "MPI rank 0", f"MPI rank {odd or 1}"]:
        assert word in str(found[0])


def test_different_settings_are_an_error(run_ranks: RunRanks) -> None:
    found = meet(run_ranks, [Call("push", (A,))] * 3, chunk_bytes=[64, 64, 128])
    assert [type(error) for error in found] == [ConfigError] * 3
    assert "KVMPI_RING_CHUNK_BYTES=128 on MPI rank 2" in str(found[0])
    found = meet(run_ranks, [Call("push", (A,))] * 2, algorithm=["ring", "naive"])
    assert "KVMPI_ALLREDUCE=naive" in str(found[1])


@pytest.mark.parametrize("leaving", [0, 2])
def test_nobody_waits_for_a_rank_that_has_closed(run_ranks: RunRanks, leaving: int) -> None:
    def rank_main(comm: MemoryComm) -> list[BaseException | None]:
        collectives, call = Collectives(comm, "ring", 64), Call("push", (A,))
        first = outcome(lambda: collectives.agree(Call("close") if comm.rank == leaving else call, Deadline(TIMEOUT_S)))
        start_s = time.monotonic()
        second = None if comm.rank == leaving else outcome(lambda: collectives.agree(call, Deadline(TIMEOUT_S)))
        assert time.monotonic() - start_s < TIMEOUT_S / 2
        return [first, second]

    found = run_ranks(3, rank_main)
    assert [type(first) for first, _ in found] == [OrderMismatchError] * 3
    assert [type(second) for _, second in found] == [type(None) if r == leaving else PeerLostError for r in range(3)]


def test_ranks_hear_of_one_that_has_left(run_ranks: RunRanks) -> None:
    """At once, and after it has gone."""

    def check(leaving: int, late_s: float) -> None:
        def rank_main(comm: MemoryComm) -> str:
            collectives, start_s = Collectives(comm, "ring", 64), time.monotonic()
            if comm.rank == leaving:
                assert not collectives.leave(Deadline(0.3))
                assert not collectives.broken
            else:
                time.sleep(late_s)
                error = outcome(lambda: collectives.agree(Call("push", (A,)), Deadline(TIMEOUT_S)))
                assert isinstance(error, OrderMismatchError)
                left = f"push('a') on MPI rank {comm.rank} of 3: MPI rank {leaving} of this client has left"
                assert left in str(error)
                assert isinstance(outcome(lambda: collectives.agree(Call("push"), Deadline(TIMEOUT_S))), PeerLostError)
            assert time.monotonic() - start_s < TIMEOUT_S / 2
            return "done"

        assert run_ranks(3, rank_main) == ["done"] * 3

    at_once(check, [(leaving, late_s) for leaving in (0, 2) for late_s in (0.0, 0.6)])


def test_all_ranks_may_leave_one_after_the_other(run_ranks: RunRanks) -> None:
    gone = [threading.Event() for _ in range(3)]

    def rank_main(comm: MemoryComm) -> list[bool]:
        first, second = (Collectives(one, "ring", 64) for one in (comm, comm.duplicate()))
        found = first.leave(Deadline(TIMEOUT_S))
        if comm.rank > 0:  # rank 0 has gone by then, and rank 2 finds what it has left
            assert gone[comm.rank - 1].wait(TIMEOUT_S)
        start_s = time.monotonic()
        found_late = second.leave(Deadline(0.2))
        assert time.monotonic() - start_s < TIMEOUT_S / 2
        gone[comm.rank].set()
        return [found, found_late]

    assert run_ranks(3, rank_main) == [[True, False]] * 3
    assert run_ranks(1, lambda comm: Collectives(comm, "ring", 64).leave(Deadline(1.0))) == [True]


@pytest.mark.parametrize("failing", [0, 1, 3])
def test_one_ranks_failure_reaches_all(run_ranks: RunRanks, failing: int) -> None:
    own = KeyNotInitializedError("push of key 'a' on worker 9: the key was never initialised")
    calls = [Call("push", (A,), own if rank == failing else None) for rank in range(4)]
    found = meet(run_ranks, calls)
    assert [type(error) for error in found] == [KeyNotInitializedError] * 4
    assert found[failing] is own
    for rank in set(range(4)) - {failing}:
        assert f"MPI rank {failing}" in str(found[rank])
        assert "never initialised" in str(found[rank])


def test_every_rank_may_fail_in_its_own_way(run_ranks: RunRanks) -> None:
    own = [ShapeMismatchError("one"), None, DTypeMismatchError("two")]
    found = meet(run_ranks, [Call("push", (), failure) for failure in own])
    assert found[0] is own[0]
    assert found[2] is own[2]
    assert isinstance(found[1], ShapeMismatchError)


def test_a_failure_that_is_a_timeout_does_not_break_the_communicator(run_ranks: RunRanks) -> None:
    """It may be about a server, long ago: ``meet`` sums afterwards."""
    calls = [Call("push", (A,), KVTimeoutError("no reply from server 0") if rank == 1 else None) for rank in range(3)]
    assert [type(error) for error in meet(run_ranks, calls)] == [KVTimeoutError] * 3


def test_a_failure_that_is_no_error_of_ours_is_a_plain_error_elsewhere(run_ranks: RunRanks) -> None:
    calls = [Call("push", (A,), ZeroDivisionError("of an updater") if rank == 0 else None) for rank in range(2)]

    def rank_main(comm: MemoryComm) -> BaseException:
        with pytest.raises(Exception) as caught:
            agree(comm, calls[comm.rank], Deadline(TIMEOUT_S))
        return caught.value

    found = run_ranks(2, rank_main)
    assert found[0] is calls[0].failure
    assert type(found[1]) is KVError
    assert "MPI rank 0 of this client cannot push: ZeroDivisionError: of an updater" in str(found[1])


@pytest.mark.parametrize("position", [0, 1500, 2999])
def test_thousands_of_keys(run_ranks: RunRanks, position: int) -> None:
    usual = [Entry(f"model.layers.{i}.attention.query.weight", (4096, i), "bfloat16") for i in range(3000)]
    other = list(usual)
    other[position] = Entry(usual[position].key, (1,), "bfloat16")
    found = meet(run_ranks, [Call("push", tuple(other if rank == 1 else usual)) for rank in range(3)])
    assert [type(error) for error in found] == [ShapeMismatchError] * 3
    assert f"position {position}:" in str(found[2])
    assert meet(run_ranks, [Call("push", tuple(usual))] * 3) == [None] * 3


def test_a_long_failure_travels_whole(run_ranks: RunRanks) -> None:
    long = KVError("x" * 200_000 + " the end")
    found = meet(run_ranks, [Call("push", (A,), long if rank == 1 else None) for rank in range(2)])
    assert str(found[0]).endswith(" the end")


def test_absent_ranks_are_named_by_all_others(run_ranks: RunRanks) -> None:
    timeout_s = 1.0

    def check(size: int, absent: tuple[int, ...]) -> None:
        begin = threading.Barrier(size - len(absent))  # who comes later waits for less

        def rank_main(comm: MemoryComm) -> float:
            collectives = Collectives(comm, "ring", 64)
            begin.wait(TIMEOUT_S)
            start_s = time.monotonic()
            with pytest.raises(KVTimeoutError) as caught:
                collectives.agree(Call("push", (A,)), Deadline(timeout_s))
            waited_s = time.monotonic() - start_s
            assert f"MPI rank {', '.join(map(str, absent))} of this client" in str(caught.value)
            assert f"push('a') on MPI rank {comm.rank} of {size}" in str(caught.value)
            assert collectives.broken
            start_s = time.monotonic()
            with pytest.raises(PeerLostError, match="earlier failure"):
                collectives.agree(Call("push", (A,)), Deadline(timeout_s))
            assert time.monotonic() - start_s < timeout_s / 2
            return waited_s

        waited_s = [seconds for seconds in run_ranks(size, rank_main, absent=absent) if seconds is not None]
        assert len(waited_s) == size - len(absent)
        assert all(0.9 * timeout_s <= seconds < 2 * timeout_s for seconds in waited_s), waited_s

    at_once(check, [(2, (0,)), (2, (1,)), (4, (0,)), (4, (2,)), (4, (1, 3))])


def test_many_absent_ranks_are_told_of(run_ranks: RunRanks, shortcuts: Shortcuts | None) -> None:  # noqa: F811
    """In few words; whole, their list is longer than any fixed buffer of a few hundred bytes."""
    size, absent = 130, tuple(range(2, 130))
    # Of a host whose first rank is missing it cannot be known whether the others are.
    named = ", 14, 16 and 56 more" if shortcuts is not None and shortcuts.per_host > 1 else " 2 to 129"

    def rank_main(comm: MemoryComm) -> str:
        with pytest.raises(KVTimeoutError) as caught:
            agree(comm, Call("barrier"), Deadline(0.2))
        return str(caught.value)

    for text in run_ranks(size, rank_main, absent=absent)[:2]:
        assert f"{named} of this client" in text


def test_a_late_rank_is_waited_for(run_ranks: RunRanks) -> None:
    def rank_main(comm: MemoryComm) -> None:
        if comm.rank == 1:
            time.sleep(0.3)  # a straggler: longer than polling and yielding last
        agree(comm, Call("push", (A,)), Deadline(TIMEOUT_S))

    assert run_ranks(3, rank_main) == [None] * 3
