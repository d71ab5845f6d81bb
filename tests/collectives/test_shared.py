"""Ranks of one host that read from each other: ranks as threads, which read from their own process in the same way."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from building import built
from collective_helpers import all_vectors, allreduce, assert_is_sum, on_host, vectors
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmpi.arrays import address_of
from kvmpi.collectives import Collectives, arena, cross_memory, forming, shared
from kvmpi.collectives.algorithm import Act, Scratch, Tensor
from kvmpi.collectives.cost import Choice
from kvmpi.collectives.cross_memory import CrossMemory
from kvmpi.collectives.forming import form
from kvmpi.collectives.host_group import HostGroup
from kvmpi.collectives.host_sum import ONE_OF_EACH
from kvmpi.collectives.memory_comm import MemoryComm
from kvmpi.collectives.native import NativeTerms
from kvmpi.collectives.shared import Shared
from kvmpi.deadline import Deadline
from kvmpi.errors import KVTimeoutError, PeerLostError, UnsupportedError

RunRanks = Callable[..., list[Any]]

TIMEOUT_S = 20.0


def group_of(comm: MemoryComm) -> HostGroup:
    group = form(comm, range(comm.size), Deadline(TIMEOUT_S))
    assert isinstance(group, HostGroup), group
    return group


def placed(own: list[np.ndarray], mapped: int) -> list[np.ndarray]:
    """The same vectors, those whose bit is set in memory that other ranks have mapped."""
    found = []
    for i, vector in enumerate(own):
        block = arena.own().empty(vector.size, vector.dtype) if mapped >> i & 1 else None
        if block is not None:
            block[:] = vector
        found.append(vector if block is None else block)
    return found


def act_of(group: HostGroup, op: str, label: str = "test", timeout_s: float = TIMEOUT_S) -> Act:
    return Act(label, op, Choice("shared", 1, 0), group.index, group.size, Deadline(timeout_s), Scratch())


def reduce_shared(
    group: HostGroup, own: list[np.ndarray], dtype: str, block_bytes: int, *, in_place: bool = False,
    out_mapped: bool = False, **options: int,
) -> np.ndarray:  # fmt: skip
    out = own[0] if in_place else placed([np.full_like(own[0], 77)], int(out_mapped))[0]
    way = Shared(group, block_bytes, **options)
    way.allreduce([Tensor(own, out)], dtype, act_of(group, "allreduce"))
    return out


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(2, 6), count=st.integers(0, 700), num_vectors=st.integers(1, 8), block_bytes=st.integers(1, 600),
    in_place=st.booleans(), dtype=st.sampled_from(["float32", "float64", "float16", "bfloat16", "int8", "int64"]),
    stage_bytes=st.sampled_from([0, 1 << 20]),
    mapped=st.lists(st.integers(0, 511), min_size=6, max_size=6), compiled=st.sampled_from([0, 5, 63]),
)  # fmt: skip
def test_sums_of_any_shape_have_the_bits_of_the_ring(
    run_ranks: RunRanks, size: int, count: int, num_vectors: int, block_bytes: int, in_place: bool, dtype: str,
    mapped: list[int], stage_bytes: int, compiled: int,
) -> None:  # fmt: skip
    def rank_main(comm: MemoryComm) -> tuple[np.ndarray, np.ndarray]:
        own = vectors(comm.rank, num_vectors, count, dtype)
        ring = allreduce(comm, "ring", own, dtype, chunk_bytes=64)
        own = placed(own, mapped[comm.rank])
        before = [vector.copy() for vector in own]
        out = reduce_shared(
            group_of(comm),
            own,
            dtype,
            block_bytes,
            in_place=in_place,
            out_mapped=bool(mapped[comm.rank] >> 8),
            slot_bytes=0,
            stage_bytes=stage_bytes,
            use_native=bool(compiled >> comm.rank & 1),
        )
        for i in range(in_place, num_vectors):
            np.testing.assert_array_equal(own[i], before[i], err_msg=f"vector {i} of rank {comm.rank} was changed")
        return out, ring

    outs = run_ranks(size, rank_main)
    assert_is_sum(outs[0][0], all_vectors(size, num_vectors, count, dtype), dtype)
    assert len({result.tobytes() for pair in outs for result in pair}) == 1


def test_where_there_is_no_room_to_stage_ranks_attach(run_ranks: RunRanks) -> None:
    """To what is private; what others have mapped is used as before."""

    def rank_main(comm: MemoryComm) -> list[np.ndarray]:
        group, outs = group_of(comm), []
        asked: list[int] = []

        class Private(Scratch):
            def __call__(self, count: int, dtype: Any) -> np.ndarray:
                asked.append(count)
                return np.empty(count, dtype)

        for in_place in (False, True):
            own = placed(vectors(comm.rank, 2, 301, "float32"), comm.rank)
            out = own[0] if in_place else np.empty_like(own[0])
            act = act_of(group, "allreduce")
            act.scratch = Private()
            copy = np.empty_like(out)
            Shared(group, 200, slot_bytes=0).allreduce([Tensor(own, out, [copy])], "float32", act)
            outs += [out, copy]
        assert asked.count(301) >= 2, "it was to be staged"
        return outs

    for out in itertools.chain.from_iterable(run_ranks(3, rank_main)):
        assert_is_sum(out, all_vectors(3, 2, 301, "float32"), "float32")


def test_ranks_may_have_different_numbers_of_vectors(run_ranks: RunRanks) -> None:
    """In several calls: what a rank posted for an earlier one must not be taken for a vector of this one."""
    size = 3
    numbers = [[1, 2, 3], [8, 1, 1], [1, 1, 5]]

    def rank_main(comm: MemoryComm) -> list[np.ndarray]:
        group = group_of(comm)
        return [
            reduce_shared(group, vectors(comm.rank, of[comm.rank], 999, "float32"), "float32", 256) for of in numbers
        ]

    outs = run_ranks(size, rank_main)
    for call, of in enumerate(numbers):
        assert_is_sum(
            outs[0][call], [v for rank in range(size) for v in vectors(rank, of[rank], 999, "float32")], "float32"
        )
        assert len({out[call].tobytes() for out in outs}) == 1


def test_many_calls_of_one_group_in_any_order(run_ranks: RunRanks) -> None:
    """Ranks run apart: whoever is ahead must not be taken for a rank of the call before."""
    size, num_calls = 4, 120

    def rank_main(comm: MemoryComm) -> None:
        group = group_of(comm)
        pace = np.random.default_rng(comm.rank)
        for call in range(num_calls):
            if pace.random() < 0.2:
                time.sleep(pace.random() * 2e-3)
            if call % 3:
                root = call % size
                buffer = np.arange(500 + call) + (1000 * call if comm.rank == root else 0)
                Shared(group).broadcast(buffer, root, act_of(group, "broadcast"))
                np.testing.assert_array_equal(buffer, np.arange(500 + call) + 1000 * call)
                buffer[:] = -1  # ours again, at once
            else:
                own = np.arange(500 + call) * (comm.rank + 1) + call
                out = reduce_shared(group, [own], "int64", 256)
                own[:] = -1
                np.testing.assert_array_equal(out, 10 * np.arange(500 + call) + size * call)
                out[:] = -1

    run_ranks(size, rank_main)


@pytest.mark.parametrize("size", [2, 3, 7])
def test_broadcast_from_every_root(run_ranks: RunRanks, size: int) -> None:
    def rank_main(comm: MemoryComm) -> None:
        collectives = Collectives(comm, "shared")
        for root in range(size):
            for count in (0, 1, 999):
                buffer = vectors(comm.rank, 1, count, "float64")[0]
                collectives.broadcast(buffer, root, Deadline(TIMEOUT_S), "test")
                np.testing.assert_array_equal(buffer, vectors(root, 1, count, "float64")[0])

    run_ranks(size, rank_main)


# ---- where it cannot be


class _Rank(threading.local):
    rank = 0


@pytest.mark.parametrize("cause", ["refused", "system", "other process"])
def test_where_one_rank_cannot_read_from_the_others_all_stage(
    run_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch, cause: str
) -> None:
    here = _Rank()
    read = CrossMemory.read

    def refused(self: CrossMemory, address: int, into: np.ndarray) -> None:
        if here.rank == 2:
            raise PermissionError(1, "reading from process 1: Operation not permitted")
        read(self, address, into)

    def elsewhere(self: CrossMemory, address: int, into: np.ndarray) -> None:
        read(self, address, into)
        if here.rank == 2:
            into[:] = 0

    if cause == "system":
        monkeypatch.setattr(cross_memory, "_process_vm_readv", None)
    else:
        monkeypatch.setattr(CrossMemory, "read", refused if cause == "refused" else elsewhere)

    def rank_main(comm: MemoryComm) -> np.ndarray:
        here.rank = comm.rank
        group = group_of(comm)
        assert not group.attaches
        return reduce_shared(group, vectors(comm.rank, 2, 5000, "float32"), "float32", 512)

    for out in run_ranks(4, rank_main):
        assert_is_sum(out, all_vectors(4, 2, 5000, "float32"), "float32")


def test_where_no_memory_is_shared_every_rank_says_so_and_the_default_sums_otherwise(
    run_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = _Rank()
    mapped = forming._mapped
    monkeypatch.setattr(forming, "_mapped", lambda *where: None if here.rank == 2 else mapped(*where))
    count = 200_000  # large enough for the default to try it

    def rank_main(comm: MemoryComm) -> np.ndarray:
        here.rank = comm.rank
        own = vectors(comm.rank, 1, count, "float32")
        for algorithm in ("shared", "hierarchical"):
            with pytest.raises(UnsupportedError, match=f"'{algorithm}': .*(the same processes|MPI rank 2 cannot read)"):
                allreduce(comm.duplicate(), algorithm, own, "float32")
        with pytest.raises(UnsupportedError, match="no memory is shared"):
            Collectives(comm.duplicate()).shared_empty(5, "float32", Deadline(TIMEOUT_S))
        return allreduce(comm.duplicate(), "auto", own, "float32")

    outs = run_ranks(4, rank_main)
    assert_is_sum(outs[0], all_vectors(4, 1, count, "float32"), "float32")


def test_memory_that_is_gone_is_a_lost_peer() -> None:
    with pytest.raises(PeerLostError, match="cannot read from process"):
        CrossMemory(2**22 + 1).read(4096, np.zeros(8, np.uint8))
    with pytest.raises(PeerLostError, match="cannot write to process"):
        CrossMemory(2**22 + 1).write(4096, np.zeros(8, np.uint8))
    import os

    with pytest.raises(PeerLostError, match="Bad address"):
        CrossMemory(os.getpid()).read(8, np.zeros(8, np.uint8))


# ---- ranks that stop


@pytest.mark.parametrize(
    ("moment", "problem"),
    [
        ("before", "did not start"), ("small", "did not start"), ("parts", "did not add up its part"),
        ("posted", "did not finish"),
    ],
)  # fmt: skip
def test_a_rank_that_stops_is_named_with_what_it_did_not_do(
    run_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch, moment: str, problem: str
) -> None:
    if moment == "parts":
        monkeypatch.setattr(shared, "PARTS_FROM_BYTES", 0)
    size, silent, timeout_s = 4, 2, 1.0
    own = [np.arange(1000.0) + rank for rank in range(size)]
    kept = np.empty(1000)

    def rank_main(comm: MemoryComm) -> Any:
        group = group_of(comm)
        if comm.rank == silent:
            if moment not in ("before", "small"):
                group.begin(Deadline(TIMEOUT_S), lambda: "test")
                group.post([ONE_OF_EACH, address_of(kept), address_of(own[silent])])
            return None
        start_s = time.monotonic()
        act = act_of(group, "allreduce", "push of key 7", timeout_s)
        way = Shared(group, 1 << 16, **({} if moment in ("small", "parts") else {"slot_bytes": 0}))
        with pytest.raises(
            KVTimeoutError, match=f"key 7.*on MPI rank {comm.rank} of 4: MPI rank 2 {problem} within"
        ) as e:
            way.allreduce([Tensor([own[comm.rank]], np.empty(1000))], "float64", act)
        assert timeout_s <= time.monotonic() - start_s < 2 * timeout_s
        return str(e.value)

    run_ranks(size, rank_main)


@pytest.mark.parametrize("use_native", [True, False])
def test_nobody_writes_to_a_rank_that_has_given_up(
    run_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch, use_native: bool
) -> None:
    """A rank was stopped in the middle of a call and goes on after the others' deadline: their arrays are theirs."""
    own = [np.arange(1000.0) * (rank + 1) for rank in range(3)]
    given_up, gone = threading.Barrier(3, timeout=TIMEOUT_S), []
    fetch, sum_segment = HostGroup.fetch, NativeTerms.sum_segment

    def late(self: HostGroup, *where: Any) -> Any:
        found = fetch(self, *where)
        if self.index == 1 and not gone:
            gone.append(True)
            given_up.wait()
        return found

    def late_compiled(self: NativeTerms, start: int, stop: int) -> bool:
        if 300 < start < 400 and not gone:  # the second rank's part
            gone.append(True)
            given_up.wait()
        return sum_segment(self, start, stop)

    monkeypatch.setattr(HostGroup, "fetch", late)
    monkeypatch.setattr(NativeTerms, "sum_segment", late_compiled)

    def rank_main(comm: MemoryComm) -> None:
        group = group_of(comm)
        way, mine = Shared(group, slot_bytes=0, stage_bytes=0, use_native=use_native), own[comm.rank]
        act = act_of(group, "allreduce", timeout_s=TIMEOUT_S if comm.rank == 1 else 0.3)
        with pytest.raises(PeerLostError if comm.rank == 1 else KVTimeoutError, match=r"has given up|MPI rank 1 did"):
            way.allreduce([Tensor([mine], mine)], "float64", act)
        if comm.rank != 1:
            mine[:] = -1  # an error handler has better use for it
            given_up.wait()

    run_ranks(3, rank_main)
    assert gone
    assert all((own[rank] == -1).all() for rank in (0, 2))


def test_after_a_failure_the_communicator_is_unusable(run_ranks: RunRanks) -> None:
    own = [np.ones(1000, "f4") for _ in range(3)]

    def rank_main(comm: MemoryComm) -> None:
        collectives = Collectives(comm, "shared")
        buffer = own[comm.rank]
        collectives.allreduce(on_host([buffer], "float32"), buffer, "float32", Deadline(TIMEOUT_S), "first")
        if comm.rank == 1:
            return
        with pytest.raises(KVTimeoutError, match="MPI rank 1 did not start"):
            collectives.allreduce(on_host([buffer], "float32"), buffer, "float32", Deadline(0.2), "second")
        with pytest.raises(PeerLostError, match="unusable since"):
            collectives.allreduce(on_host([buffer], "float32"), buffer, "float32", Deadline(0.2), "third")

    run_ranks(3, rank_main)
    assert (own[1] == 3).all()


def test_nothing_passes_a_fence(run_ranks: RunRanks) -> None:
    """Where processors reorder: to take a lock holds back what follows, to leave it what came before, and no more. Only
    that a lock is left and taken again, in this order, keeps both sides apart."""

    class Lock:
        def __enter__(self) -> None:
            events.append("take")

        def __exit__(self, *_: object) -> None:
            events.append("leave")

    events = ["before"]
    [group, _] = run_ranks(2, group_of)
    group._order = Lock()
    group._fence()
    events.append("after")
    reached = [True] + [False] * (len(events) - 1)  # what "before" is certainly seen before
    for later, event in enumerate(events):
        for earlier, past in enumerate(events[:later]):
            if reached[earlier] and (past == "take" or event == "leave" or (past, event) == ("leave", "take")):
                reached[later] = True
    assert reached[-1], events


@pytest.mark.parametrize("common", [False, True])
@pytest.mark.parametrize("way", ["slots", "parts", "stage", "attach"])
def test_single_vectors_go_every_way(
    run_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch, way: str, common: bool
) -> None:
    """Memory is used anew as soon as a call returns, while slow ranks may still be at it."""
    monkeypatch.setattr(shared, "PARTS_FROM_BYTES", 0 if way == "parts" else 1 << 30)
    monkeypatch.setattr(shared, "SLOT_BYTES", (256 << 10) if way in ("slots", "parts") else 0)
    monkeypatch.setattr(shared, "STAGE_BYTES", (1 << 20) if way == "stage" else 0)
    size, count = 4, 30_011
    index = np.arange(count) % 977
    deliver = HostGroup.deliver

    def slow(self: HostGroup, *where: Any) -> None:
        time.sleep(5e-4 if self.index == 2 else 0)  # the others are long through with the call
        deliver(self, *where)

    monkeypatch.setattr(HostGroup, "deliver", slow)

    def rank_main(comm: MemoryComm) -> None:
        collectives, deadline = Collectives(comm, "shared"), Deadline(TIMEOUT_S)
        result = collectives.shared_empty(count, "int64", deadline) if common else np.empty(count, "i8")
        for turn in range(30):
            own = index * (comm.rank + 1) + turn
            out = result if common else (own if turn % 3 == 0 else result)
            collectives.allreduce(on_host([own], "int64"), out, "int64", deadline, "test")
            if own is not out:
                own[:] = -1
            if (comm.rank + turn) % size == 0:
                time.sleep(1e-3)
            np.testing.assert_array_equal(out, 10 * index + size * turn, err_msg=f"turn {turn}, rank {comm.rank}")
            if not common:
                out[:] = -2

    run_ranks(size, rank_main)


def test_small_sums_leave_the_callers_error_state_alone(run_ranks: RunRanks) -> None:
    def rank_main(comm: MemoryComm) -> None:
        with np.errstate(over="raise", invalid="raise"):
            before, out = np.geterr(), np.empty(2, "f4")
            collectives = Collectives(comm, "shared")
            own = np.array([3e38, np.inf if comm.rank else -np.inf], "f4")
            for _ in range(3):
                collectives.allreduce(on_host([own], "float32"), out, "float32", Deadline(TIMEOUT_S), "test")
            assert np.isinf(out[0])
            assert np.isnan(out[1])
            assert np.geterr() == before

    run_ranks(2, rank_main)


@built
def test_plans_take_scratch_as_the_first_call_did_and_end_with_it(run_ranks: RunRanks) -> None:
    def rank_main(comm: MemoryComm) -> None:
        group, scratch = group_of(comm), Scratch()
        way = Shared(group, 512, slot_bytes=0)

        def taken(count: int) -> int:
            scratch.begin()
            act = act_of(group, "allreduce")
            act.scratch = scratch
            own[:count] = comm.rank
            way.allreduce([Tensor([own[:count]], own[:count])], "float64", act)
            assert (own[:count] == 3).all()
            return scratch.used

        own = np.empty(9000)
        used = [taken(1000) for _ in range(4)]
        assert used[0] > 8000, "nothing was staged"
        assert used == used[:1] * 4
        assert next(iter(way._segments._plans.values())).scratch_bytes == used[0]
        memory = scratch.memory
        for _ in range(2):
            taken(9000)
        assert scratch.memory is not memory
        assert len(way._segments._plans) == 1, "plans of other scratch would keep that"

    run_ranks(3, rank_main)
