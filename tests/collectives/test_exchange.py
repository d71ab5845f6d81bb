"""Exchanges of parts, and reductions that are no sums, with ranks as threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from collective_helpers import to_float64, vectors
from rank_threads import RunRanks

from kvmpi.collectives import arena, host_group
from kvmpi.collectives import exchange as module
from kvmpi.collectives.exchange import GroupCollectives, exchange, pieces
from kvmpi.deadline import Deadline
from kvmpi.errors import DTypeMismatchError, KVTimeoutError, ShapeMismatchError, UnsupportedError

SIZES = (1, 2, 3, 4, 7)
#: How often what a rank sends is repeated.
ROUNDS = (1, 1000, 20_000, 3, 70_000, 1)
COUNTS = (0, 1, 5, 1000)
#: More than fits into a slot, of any dtype.
LARGE = 300_001
FOLDED = ("float32", "float16", "bfloat16", "int8", "uint8", "int64")
UFUNCS: dict[str, Any] = {"product": np.multiply, "min": np.minimum, "max": np.maximum}


def within(seconds: float = 20.0) -> Deadline:
    return Deadline(seconds)


def part(source: int, dest: int) -> np.ndarray:  # type: ignore[type-arg]
    """What one rank sends to another: as long as their numbers say, nothing at times."""
    return (100 * source + 10 * dest + np.arange((source + 2 * dest) % 4)).astype("i4")


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which way each exchange went, of every rank."""
    found: list[str] = []
    on_host, by_messages = module.exchange_on_host, module.exchange

    def count_host(*arguments: Any) -> bool:
        done = on_host(*arguments)
        if done:
            found.append("host")
        return done

    def count_messages(*arguments: Any) -> None:
        by_messages(*arguments)
        found.append("messages")

    monkeypatch.setattr(module, "exchange_on_host", count_host)
    monkeypatch.setattr(module, "exchange", count_messages)
    return found


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("attach", [True, False], ids=["attached", "not attached"])
@pytest.mark.parametrize("hosts", ["one host", "many hosts"])
def test_every_rank_gets_what_every_other_sends_it(
    run_ranks: RunRanks, ways: list[str], size: int, attach: bool, hosts: str
) -> None:
    """Parts of a few bytes, of which many fit into a slot, and of which none or only some do, kept or staged."""

    def sent(source: int, dest: int, times: int) -> Any:
        return np.tile(part(source, dest), times)

    def work(comm: Any) -> dict[int, Any]:
        collectives, found = GroupCollectives(comm, attach=attach), {}
        for number, times in enumerate(ROUNDS):
            found[times] = [np.empty_like(sent(source, comm.rank, times)) for source in range(size)]
            sends = [sent(comm.rank, dest, times) for dest in range(size)]
            kept = [each.copy() for each in sends]
            if number % 2:
                collectives.exchange(sends, found[times], within(), "test")
            else:
                counts = [[each.size for each in row] for row in (sends, found[times])]
                collectives.exchange_counted(sends, found[times], *counts, within(), "test")
            for each, copy in zip(sends, kept, strict=True):
                np.testing.assert_array_equal(each, copy)
                each[:] = -1  # nobody reads there any more
        return found

    names = None if hosts == "one host" else "abcdefg"[:size]
    for rank, found in enumerate(run_ranks(size, work, hosts=names)):
        for times, parts in found.items():
            for source in range(size):
                np.testing.assert_array_equal(parts[source], sent(source, rank, times), f"{source} to {rank}: {times}")
    if size > 1:
        by_rank = [sum(part(source, dest).nbytes for dest in range(size) if dest != source) for source in range(size)]
        too_large = [times for times in ROUNDS if times * max(by_rank) > host_group.SLOT_BYTES]
        assert too_large, "a round goes another way than through slots"
        by_messages = len(ROUNDS) if names else 0 if attach else len(too_large)
        assert sorted(ways) == ["host"] * size * (len(ROUNDS) - by_messages) + ["messages"] * size * by_messages


@pytest.mark.parametrize("in_arena", [True, False])
def test_what_lies_in_shared_memory_is_read_there(run_ranks: RunRanks, ways: list[str], in_arena: bool) -> None:
    def work(comm: Any) -> Any:
        collectives = GroupCollectives(comm, attach=False)
        mine = arena.own().empty(200_000, np.dtype("i4")) if in_arena else np.empty(200_000, "i4")
        mine[:] = np.arange(200_000) * (comm.rank + 1)
        found = [np.empty_like(mine) for _ in range(3)]
        collectives.gather_lists(mine, found, within(), "test")
        return found

    for found in run_ranks(3, work):
        for rank, each in enumerate(found):
            np.testing.assert_array_equal(each, np.arange(200_000) * (rank + 1))
    assert ways == ["host" if in_arena else "messages"] * 3


def test_a_rank_that_is_missing_on_the_host_is_named_and_what_was_sent_is_kept(run_ranks: RunRanks) -> None:
    def work(comm: Any) -> Any:
        collectives = GroupCollectives(comm)
        collectives.exchange([None] * 3, [None] * 3, within(), "before")
        if comm.rank == 1:
            return None
        large = np.full(1 << 20, comm.rank, "u1")
        collectives.exchange([large] * 3, [np.empty_like(large) for _ in range(3)], Deadline(0.5), "test")

    before = len(host_group._kept_for_late_ranks)
    outcomes = run_ranks(3, work, errors=True)
    for rank in (0, 2):
        assert isinstance(outcomes[rank], KVTimeoutError)
        assert f"test: exchange on MPI rank {rank} of 3: MPI rank 1 did not start" in str(outcomes[rank])
    kept = host_group._kept_for_late_ranks[before:]
    assert sorted(each[0] for each in kept if isinstance(each, np.ndarray) and each.size == 1 << 20) == [0, 2]


def test_some_ranks_may_send_nothing(run_ranks: RunRanks) -> None:
    def work(comm: Any) -> Any:
        sends = [np.array([comm.rank], "i8") if dest == 1 else None for dest in range(3)]
        found = [np.zeros(1, "i8") if comm.rank == 1 else None for _ in range(3)]
        GroupCollectives(comm).exchange(sends, found, within(), "test")
        return found

    outcomes = run_ranks(3, work)
    assert [int(found[0]) for found in outcomes[1]] == [0, 1, 2]


def test_a_message_larger_than_mpi_can_count_goes_in_pieces() -> None:
    whole = np.arange(10, dtype="i4")
    parts = list(pieces(whole, max_bytes=16))
    assert [piece.nbytes for piece in parts] == [16, 16, 8]
    np.testing.assert_array_equal(np.concatenate(parts).view("i4"), whole)
    assert not list(pieces(whole[:0]))


def test_a_rank_that_does_not_take_part_is_named(run_ranks: RunRanks) -> None:
    def work(comm: Any) -> None:
        parts = [np.zeros(4) for _ in range(3)]
        exchange(comm, parts, [p.copy() for p in parts], Deadline(0.3), lambda ranks: f"waits for {ranks}")

    outcomes = run_ranks(3, work, absent=(2,), errors=True)
    for rank in (0, 1):
        assert isinstance(outcomes[rank], KVTimeoutError)
        assert "waits for [2]" in str(outcomes[rank])


@pytest.mark.parametrize("size", SIZES)
def test_texts_of_all_ranks(run_ranks: RunRanks, size: int) -> None:
    texts = [bytes([rank]) * (rank * 3 % 5) for rank in range(size)]
    for found in run_ranks(size, lambda comm: GroupCollectives(comm).all_tell(texts[comm.rank], within(), "test")):
        assert found == texts


@pytest.mark.parametrize("hosts", [None, "abc"])
@pytest.mark.parametrize("count", [5, 500_000])
def test_counts_that_do_not_fit_are_an_error_on_all(run_ranks: RunRanks, hosts: str | None, count: int) -> None:
    """They go on after it: nothing was written."""

    def work(comm: Any) -> str:
        collectives = GroupCollectives(comm)
        sent = [1, 1, 1] if comm.rank != 2 else [1, count, 1]
        found = [np.full(1, -1.0) for _ in range(3)]
        with pytest.raises(ShapeMismatchError) as caught:
            collectives.exchange_counted([np.ones(n) for n in sent], found, sent, [1] * 3, within(), "test")
        assert all(each[0] == -1.0 for each in found)
        collectives.exchange_counted([np.full(1, comm.rank + 0.5)] * 3, found, [1] * 3, [1] * 3, within(), "test")
        assert [each[0] for each in found] == [0.5, 1.5, 2.5]
        return str(caught.value)

    for said in run_ranks(3, work, hosts=hosts):
        assert f"MPI rank 2 sends {count} elements to MPI rank 1, which expects 1" in said


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", FOLDED)
@pytest.mark.parametrize("hosts", ["one host", "many hosts"])
def test_reductions_that_are_no_sums(run_ranks: RunRanks, size: int, dtype: str, hosts: str) -> None:
    cases = [(op, count) for op in UFUNCS for count in COUNTS]
    cases.append((list(UFUNCS)[FOLDED.index(dtype) % len(UFUNCS)], LARGE))

    def work(comm: Any) -> dict[Any, Any]:
        collectives, found = GroupCollectives(comm), {}
        for op, count in cases:
            mine = vectors(comm.rank, 1, count, dtype)[0]
            kept = mine.copy()
            out = np.empty_like(mine)
            collectives.fold(mine, out, dtype, op, within(), "fold")
            np.testing.assert_array_equal(mine, kept)
            collectives.fold(mine, mine, dtype, op, within(), "fold in place")
            np.testing.assert_array_equal(mine, out)
            root = count % size
            reduced = np.empty_like(kept) if comm.rank == root else None
            collectives.reduce(kept, reduced, dtype, op, root, within(), "reduce")
            if reduced is not None:
                np.testing.assert_array_equal(reduced, out)
            found[op, count] = out
        return found

    outcomes = run_ranks(size, work, hosts=None if hosts == "one host" else "abcdefg"[:size])
    for op, count in cases:
        ufunc = UFUNCS[op]
        terms = np.stack([vectors(rank, 1, count, dtype)[0] for rank in range(size)])
        found = outcomes[0][op, count]
        for other in outcomes[1:]:
            np.testing.assert_array_equal(other[op, count], found, f"{op} of {count} {dtype}")
        if dtype.startswith(("int", "uint")):
            with np.errstate(over="ignore"):
                np.testing.assert_array_equal(found, ufunc.reduce(terms, axis=0, dtype=terms.dtype))
        else:
            exact = ufunc.reduce(to_float64(terms, dtype), axis=0)
            eps = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}[dtype]
            tiny = {"float32": 0.0, "float16": 2.0**-24, "bfloat16": 0.0}[dtype]
            bound = (size * 2.0**-23 + eps) * np.abs(exact) + tiny
            assert (np.abs(to_float64(found, dtype) - exact) <= bound).all(), f"{op} of {count} {dtype}"


@pytest.mark.parametrize("hosts", [None, "abcd"], ids=["one host", "many hosts"])
@pytest.mark.parametrize("count", [10, 100_000])
def test_a_sum_to_one_rank(run_ranks: RunRanks, count: int, hosts: str | None) -> None:
    def work(comm: Any) -> Any:
        mine = np.arange(count, dtype="f4") * (comm.rank + 1)
        out = np.empty(count, "f4") if comm.rank == 2 else None
        GroupCollectives(comm).reduce(mine, out, "float32", "sum", 2, within(), "test")
        return out

    np.testing.assert_array_equal(run_ranks(4, work, hosts=hosts)[2], np.arange(count) * 10)


def test_what_cannot_be_combined(run_ranks: RunRanks) -> None:
    def work(comm: Any, op: str) -> None:
        GroupCollectives(comm).fold(np.zeros(3, "f4"), np.zeros(3, "f4"), "float32", op, within(), "test")

    for op, error in (("bxor", DTypeMismatchError), ("median", UnsupportedError)):
        for outcome in run_ranks(2, lambda comm, op=op: work(comm, op), errors=True):
            assert isinstance(outcome, error), op
